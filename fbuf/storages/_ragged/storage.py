"""`Ragged`: rows whose leaves differ in shape, and text, bytes and Python objects.

Numbers are arrays in the state; everything else is stored on the host row by row, and the state holds a ticket for it. Writes
are eager, except for array leaves with a declared largest shape, which are padded. Samples run in jit, and ragged values are
read on access to `batch.lazy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge import lifetime
from fbuf._bridge.lazy_rows import Tickets, length_name
from fbuf._concurrency.interrupts import DeferInterrupts
from fbuf._core.component import component
from fbuf._core.pytree import Leaves, PyTree, Spec, item_bytes, name_of
from fbuf._core.sample import TICKET
from fbuf._core.slots import Geometry, write_rows
from fbuf._host.memory.lazy_array import within
from fbuf._host.ragged.column import RaggedLeaf
from fbuf._host.ragged.store import Records
from fbuf._interfaces.storage import Read
from fbuf.storages import _host_rows
from fbuf.storages._array_rows import HostPlan
from fbuf.storages._compressed import Codec
from fbuf.storages._host_rows import SideRows
from fbuf.storages._host_storage import HostStorage
from fbuf.storages._ragged import schema
from fbuf.storages._ragged.parse import Parsed, parse_eager, parse_traced

_INDEX_BYTES = 17  # a ragged leaf and row, besides its value


@component
class Ragged(HostStorage):
    """Store rows whose leaves may differ in shape, or be text, bytes or objects (torchrl's lazy stack).

    The example given to `init` defines the leaves. A number (Python's, or a 0-d array) is an array in the state; a str is
    text; bytes are bytes; an array with axes allows any shape with that dtype; anything else (None, a list, a custom object)
    allows anything. Rows are dicts with string keys, nested or not. `extend` takes a list of them (with lanes, N lists of E),
    or one dict of columns: arrays `[N, ...]` or lists of N values. Rows may lack ragged leaves, never the others.

    A batch has the arrays in `batch.data`, and ragged leaves in `batch.lazy` (`fbuf.Lazy`): lists, object arrays, torch nested
    tensors, or a dense stack if shapes agree. So do `get` and `rows`. Views (`Sequence`, `Transition`, ...) read arrays
    only; `batch.lazy` then has the rows of their windows (`Transition`: the row at t).

    Inside jit `sample` works as usual; `extend` takes arrays only, so it needs `maximum`. A leaf with one is read padded with
    zeros, `[B, *maximum]`, with `<name>_length` int32[B, rank] (-1: the row lacks it), inside jit and outside, and views can
    read it. In jit its lengths are those given as `<name>_length`, or its whole shape. Other ragged leaves are only in
    `batch.lazy`.

    Attributes:
      keys: Ragged leaves (or subtrees) besides those with a maximum; None: all but numbers. They keep NumPy's 64 bits. Text,
        bytes and objects are always ragged; an array with axes that is not named has one shape in all rows and is in
        `batch.data`.
      maximum: Largest shape of leaves by name, `{"obs": (12,)}`; a larger row is an error, and nothing is stored.
      encode: Object to bytes, for objects that are not text, bytes, numbers or arrays; None: the objects themselves are kept
        (later changes to them show in the buffer), and `to_arrays` raises.
      decode: The inverse.
      codec: Compresses each value if that saves bytes: `Zstd(3)`; None: values are stored as they are.
      slack: Rows kept beyond the capacity, so that an old state or batch still reads its own rows; None: a sixteenth of the
        capacity, at least 16, at most 4096 a lane. With `prefetch=1` at least the rows written between two samples.
      on_expired: A read of a row evicted since raises ("raise"), or returns None or zeros with `mask` False ("mask").

    `update_rows` cannot change ragged leaves. The capacity is the buffer's; `Replay(..., unlimited=True)` grows by itself.

    Cost: a write about 5 us a value, and waits for previous steps; a read about 3 us a value. 17 bytes a leaf and row besides
      the values; arrays, text and bytes are stored as bytes with checksums, without Python objects.

    Example:
      >>> import fbuf, jax, numpy as np
      >>> buffer = fbuf.Buffer(capacity=1000, storage=fbuf.storages.Ragged())
      >>> state = buffer.init({"obs": np.zeros(0, np.float32), "text": "", "reward": 0.0})
      >>> rows = [{"obs": np.zeros(10, np.float32), "text": "a", "reward": 1.0},
      ...         {"obs": np.ones(11, np.float32), "text": "bb", "reward": 2.0}]
      >>> state = buffer.extend(state, rows)
      >>> state, batch = buffer.sample(state, jax.random.key(0), 4)
      >>> batch.data["reward"].shape, {len(x) for x in batch.lazy["obs"]} <= {10, 11}
      ((4,), True)
    """

    keys: tuple[str, ...] | None = None
    maximum: Any = ()
    encode: Callable[[Any], bytes] | None = None
    decode: Callable[[bytes], Any] | None = None
    codec: Codec | None = None
    slack: int | None = None
    on_expired: Literal["raise", "mask"] = "raise"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.codec, type):
            name = self.codec.__name__
            raise TypeError(f"Ragged: codec is the class {name}; expected a value. Write {name}().")
        if self.codec is not None and not isinstance(self.codec, Codec):
            raise TypeError(f"Ragged: codec is {self.codec!r}; expected chunk, encode and decode. Use Zstd(3).")
        if (self.encode is None) != (self.decode is None):
            known, other = ("encode", "decode") if self.decode is None else ("decode", "encode")
            raise TypeError(f"Ragged: {known} is given without {other}. Give both, or none.")
        object.__setattr__(self, "maximum", _sorted_shapes(self.maximum))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the largest shapes by name."""
        return dict(self.maximum)

    ragged = True
    row_by_row = False  # values are stored when they are added

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        """Return the leaves padded from the host; other ragged leaves are not arrays."""
        return tuple(n for n in self.shapes if n in spec)

    def _own_columns(self, spec: Spec) -> tuple[str, ...]:
        return tuple(x for n in sorted(self.host_keys(spec)) for x in (n, length_name(n)))

    def describe(self, call: str, example: PyTree) -> tuple[PyTree, tuple[RaggedLeaf, ...]]:
        """Return the arrays of a row in the state, and the ragged leaves.

        Raises:
          TypeError, ValueError: the example is invalid, or `keys` or `maximum` do not fit it.
        """
        _host_rows.refuse_tracing("Ragged")
        return schema.describe(call, example, self.keys, self.shapes)

    def open(self, geometry: Geometry, spec: Spec, structure: Any, leaves: tuple[RaggedLeaf, ...]) -> SideRows:
        """Return empty rows over a new store."""
        _host_rows.refuse_tracing("Ragged")
        if not geometry.streams:
            raise ValueError("Ragged: the writer replaces any row; expected the oldest. Use writers.Ring().")
        slack = self._slack(geometry)
        store = Records(leaves, lanes=geometry.lanes, length=geometry.length, slack=slack, **self._functions())
        return self._adopt(store, geometry, spec, structure, leaves)

    def _functions(self) -> dict[str, Any]:
        return {"encode": self.encode, "decode": self.decode, "codec": self.codec}

    def _adopt(
        self,
        store: Records,
        geometry: Geometry,
        spec: Spec,
        structure: Any,
        leaves: tuple[RaggedLeaf, ...],
        arrays: Mapping[str, Any] | None = None,
    ) -> SideRows:
        rows = _host_rows.adopt(store, geometry, spec, structure, (*self._own_columns(spec), TICKET), arrays)
        rows.layout = rows.layout._replace(leaves=leaves)
        return rows

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        return self.open(geometry, spec, structure, ())

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        return _host_rows.abstract(geometry, spec, structure, (*self._own_columns(spec), TICKET))

    def plan_host(self, geometry: Geometry, spec: Spec, trial: Leaves | None, ratio: float | None) -> HostPlan:
        number = geometry.lanes * (geometry.length + self._slack(geometry))
        raw = number * sum(item_bytes(spec[n]) + _INDEX_BYTES for n in self.host_keys(spec))
        known = "leaves with a maximum, all as large as that; the others are as large as their values"
        return raw, known, raw

    def parse(self, call: str, rows: SideRows, data: PyTree, lead: tuple[int | None, ...], axes: str) -> Parsed:
        """Check rows in any form, before anything is stored; inside jit they are arrays already.

        Raises:
          TypeError, ValueError: they do not match the example, exceed their maximum, or (inside jit) are not arrays.
        """
        layout = rows.layout
        tracing = isinstance(rows.id, jax.core.Tracer) or lifetime.traced()
        parse = parse_traced if tracing else parse_eager
        return parse(call, data, layout.spec, layout.leaves, lead, axes)

    def put_values(
        self, rows: SideRows, values: Sequence[Any], shape: tuple[int, int], length: int, mask: Any, after: Any
    ) -> np.ndarray:
        """Store the ragged part of rows; return tickets uint32[N, E, 2].

        Args:
          values: N * E values of each leaf.
          shape: [N, E].
          length: Capacity of a lane; only that many of the newest rows are stored.
          mask: bool[N * E], or None.
          after: Arrays that must be ready first: reads of rows that this may evict.
        """
        jax.block_until_ready((rows.id, rows.ticket, after))
        keep = np.ones(shape, bool) if mask is None else np.asarray(mask).reshape(shape)
        keep = keep & (np.cumsum(keep[::-1], axis=0)[::-1] <= length)
        store = _host_rows.store_of(rows)
        assert isinstance(store, Records)
        with DeferInterrupts():
            tickets = store.put(values, shape[0], None if keep.all() else keep)
        return tickets[..., None].view(np.uint32)

    def on_host(self, rows: SideRows) -> None:
        return None  # a batch has tickets too

    def send(
        self, rows: SideRows, leaves: Leaves, keep: jax.Array | None, slot: jax.Array | None, token: jax.Array
    ) -> tuple[SideRows, dict[str, jax.Array], jax.Array]:
        if TICKET in leaves:  # of `put_values`
            return rows, dict(leaves), jnp.any(leaves[TICKET] != jnp.uint32(0), axis=-1)
        return _host_rows.send(rows, leaves, keep, slot, token)

    def update(self, rows: SideRows, slot: jax.Array, leaves: Leaves, token: jax.Array) -> tuple[SideRows, None]:
        return rows.replace(rows.ticket, write_rows(rows.device, slot, leaves, token)), None

    def changeable(self, call: str, rows: SideRows, names: Sequence[str]) -> Spec:
        """Return the leaves that `update_rows` can change. Raises TypeError for ragged leaves in `names`."""
        host = (*rows.layout.columns, *(leaf.name for leaf in rows.layout.leaves))
        for name in names:
            ragged = next((n for n in host if name == n or name.startswith(f"{n}/")), None)
            if ragged is not None and name not in rows.device:
                raise TypeError(f"{call}: leaf '{ragged}' is ragged, and cannot change. Add the row again.")
        return {n: leaf for n, leaf in rows.layout.spec.items() if n in rows.device}

    def prepare_read(self, rows: SideRows, reads: Sequence[Read]) -> Any:
        return self.read(rows, reads)  # at once: rows are read when the batch is drawn

    def start_read(self, rows: SideRows, pending: Any) -> Any:
        return pending

    def finish_read(self, rows: SideRows, pending: Any) -> tuple[list[jax.Array], jax.Array | None]:
        arrays, ok = pending
        return list(arrays), ok

    def held_bytes(self, rows: SideRows, pending: Any) -> int:
        return 0

    def split(self, rows: SideRows, data: dict[str, Any]) -> tuple[PyTree, Tickets]:
        """Split a view's leaves into arrays and tickets."""
        ticket = data[TICKET]
        dense = tuple(n for n in rows.layout.names if n != TICKET)
        rest = {n: x for n, x in data.items() if n != TICKET}
        # A new array: the state's may be donated during the batch's lifetime.
        return rest, Tickets(
            jnp.broadcast_to(rows.id, ticket.shape) | jnp.uint32(0), ticket, rows.slot, not self.masks_expired, dense
        )

    def resume(
        self, geometry: Geometry, spec: Spec, structure: Any, verify: str
    ) -> tuple[SideRows, np.ndarray, np.ndarray, np.ndarray]:
        raise TypeError(f"Buffer.resume: {self!r} keeps rows in memory. For arrays of one shape use Memmap.")

    def from_arrays(self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        stored, slack = within(arrays, "store:"), self._slack(geometry)
        store = Records.from_arrays(
            stored, lanes=geometry.lanes, length=geometry.length, slack=slack, **self._functions()
        )
        return self._adopt(store, geometry, spec, structure, store.leaves, arrays)

    def with_capacity(self, rows: SideRows, geometry: Geometry) -> SideRows:
        """Return the rows with more room; slots stay. Other states over the same store are unchanged."""
        store = _host_rows.store_of(rows)
        assert isinstance(store, Records)
        with DeferInterrupts():
            store.with_capacity(geometry.length, self._slack(geometry))

        def longer(array: jax.Array) -> jax.Array:
            more = jnp.zeros((geometry.capacity - array.shape[0], *array.shape[1:]), array.dtype)
            return jnp.concatenate([array, more])

        return rows.replace(longer(rows.ticket), {n: longer(a) for n, a in rows.device.items()})


def _sorted_shapes(maximum: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return names and shapes as a hashable value."""
    pairs = maximum.items() if isinstance(maximum, Mapping) else maximum
    example = 'maximum={"obs": (12,)}'
    try:
        found = {name_of(n): (s,) if isinstance(s, (int, np.integer)) else tuple(s) for n, s in pairs}
    except (TypeError, ValueError):
        raise TypeError(f"Ragged: maximum is {maximum!r}; expected shapes by name. Write {example}.") from None
    for name, shape in found.items():
        wrong = [n for n in shape if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1]
        if not shape or wrong:
            raise ValueError(f"Ragged: maximum of '{name}' is {shape!r}; expected one or more sizes >= 1.")
    return tuple(sorted((n, tuple(map(int, shape))) for n, shape in found.items()))

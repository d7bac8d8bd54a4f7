"""`BufferState`: everything about a buffer that changes, as one pytree of arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._core import text_table
from fbuf._core.component import component, state
from fbuf._core.geometry import Ring
from fbuf._core.row_format import RowFormat
from fbuf._core.sample import Sample
from fbuf._indexing.anchors import Anchors
from fbuf._indexing.scatter import Scatter

COUNTERS = (
    "refused_nonfinite",
    "refused_out_of_range",
    "refused_stale",
    "refused_closed",
    "empty_samples",
    "expired_rows",
    "refused_rows",
    "retired_rows",
    "draws_refused",
)
"""What is counted instead of raised: refused priorities and indices, draws from an empty buffer, expired rows, and rows that
did not fit. Those of `BY_DESIGN` are not errors: old rows evicted for new ones, and draws of rows that did not fit."""
BY_DESIGN = ("retired_rows", "draws_refused")


class Header(NamedTuple):
    """The small arrays of a state, which share one array between methods: each argument of a call costs a microsecond."""

    ring: Ring  # where each lane writes next; with a Scattering writer, how many rows are held
    counters: jax.Array  # uint32[9], see `COUNTERS`
    token: jax.Array  # int32[], always 0: orders reads before writes (`fbuf._core.control_flow`)

    def pack(self) -> jax.Array:
        """Return int32[10 + 3 E]: token, counters, cursors, sizes and laps."""
        ring = self.ring
        parts = (self.token[..., None], self.counters, ring.cursor, ring.size, ring.lap)
        return jnp.concatenate([_as(part, jnp.int32) for part in parts], axis=-1)


def _as(words: jax.Array, dtype: Any) -> jax.Array:
    return words if words.dtype == dtype else lax.bitcast_convert_type(words, dtype)


def unpack(packed: jax.Array) -> Header:
    """Return the arrays of `Header.pack`."""
    first = 1 + len(COUNTERS)
    lanes = (packed.shape[-1] - first) // 3

    def part(start: int, size: int, dtype: Any = jnp.int32) -> jax.Array:
        return _as(lax.slice_in_dim(packed, start, start + size, axis=-1), dtype)

    ring = Ring(part(first, lanes), part(first + lanes, lanes), part(first + 2 * lanes, lanes, jnp.uint32))
    return Header(ring, part(1, len(COUNTERS), jnp.uint32), part(0, 1).reshape(packed.shape[:-1]))


def host_ring(header: jax.Array) -> tuple[np.ndarray[Any, Any], ...]:
    """Return cursors, sizes and laps of one state as NumPy arrays, after waiting for it."""
    cursor, size, lap = np.array(header)[1 + len(COUNTERS) :].reshape(3, -1)
    return cursor, size, lap.view(np.uint32)


@component
class ReadNames:
    """The leaf of each read of a view. Static."""

    names: tuple[str, ...]


@state
class Ahead:
    """The prefetched batch, which the next `sample` returns (`Buffer(prefetch=1)`)."""

    batch: Sample  # as it was drawn, without data; `mask` is False throughout if nothing is pending
    reads: ReadNames  # of the view
    context: Any
    held: Any  # of the storage: the rows, or what it needs to read them
    stale: jax.Array  # uint32[], draws returned after their anchor was evicted
    reading: Any = None  # `fbuf._buffer.transforms.Reading` of the draw; None unless `on_read` needs it

    def dropped(self) -> Ahead:
        """Return it without a pending batch."""
        nothing = dataclasses.replace(self.batch, mask=jnp.zeros_like(self.batch.mask))
        return dataclasses.replace(self, batch=nothing)


@state
class Transforms:
    """The memory of transforms by the names of their stages, as `transforms.apply` takes it."""

    given: RowFormat | None  # format of rows before `on_write`; None without `on_write`
    write: dict[str, Any]  # of `on_write`
    read: dict[str, Any]  # of `on_read`


@state
class BufferState:
    """The state of a buffer: a pytree of arrays.

    Its fields are private; read it with `stats`, `rows`, `get` and `last`.
    """

    rows: Any  # of the storage: for Device the rows themselves, leaves [C, ...]
    header: Any  # int32[10 + 3 E], see `Header`, which takes its place within a method
    anchors: Anchors | None  # which rows can be drawn; None if all can
    sampler: Any  # of the sampler: logs, priorities
    scatter: Scatter | None = None  # the row in each slot; None with a Streaming writer
    ahead: Ahead | None = None  # None without prefetch
    transforms: Transforms | None = None  # None without `on_write` and without memory

    @property
    def ring(self) -> Ring:
        """Where each lane writes next, and how many rows it holds."""
        return self._opened.ring

    @property
    def counters(self) -> jax.Array:
        """uint32[9], see `COUNTERS`."""
        return self._opened.counters

    @property
    def token(self) -> jax.Array:
        """int32[], always 0: orders reads before writes."""
        return self._opened.token

    @property
    def _opened(self) -> Header:
        return self.header if isinstance(self.header, Header) else unpack(self.header)

    @property
    def leading(self) -> tuple[int, ...]:
        """The axes along which states are stacked; () for one state."""
        packed = not isinstance(self.header, Header)
        shape: tuple[int, ...] = self.header.shape[:-1] if packed else self.header.token.shape
        return shape

    def open(self) -> BufferState:
        """Return the state with its header unpacked."""
        return dataclasses.replace(self, header=self._opened)

    def pack(self) -> BufferState:
        """Return the state with its header packed."""
        return dataclasses.replace(self, header=self._opened.pack())

    def replace(self, **fields: Any) -> BufferState:
        """Return the state with some fields replaced, those of its header included."""
        own = {name: fields.pop(name) for name in Header._fields if name in fields}
        if own:
            header = self._opened._replace(**own)
            fields["header"] = header if isinstance(self.header, Header) else header.pack()
        return dataclasses.replace(self, **fields)

    def __repr__(self) -> str:
        return text_table.as_text(self)

    def _repr_html_(self) -> str:
        return text_table.as_html(self)


def on_open(core: Callable[..., tuple[BufferState, Any]]) -> Callable[..., tuple[BufferState, Any]]:
    """Return a core that takes and returns packed states. An unchanged header stays the same array."""

    @functools.wraps(core)
    def on_packed(buffer: Any, state: BufferState, *args: Any, **options: Any) -> tuple[BufferState, Any]:
        opened = state.open()
        after, result = core(buffer, opened, *args, **options)
        pairs = zip(jax.tree.leaves(after.header), jax.tree.leaves(opened.header), strict=True)
        if all(new is old for new, old in pairs):
            return dataclasses.replace(after, header=state.header), result
        return after.pack(), result

    return on_packed


def refuse_donated(call: str, state: BufferState) -> None:
    """Raise if the arrays of a state were donated."""
    header = state.header
    if not isinstance(header, jax.core.Tracer) and hasattr(header, "is_deleted") and header.is_deleted():
        raise RuntimeError(f"{call}: the state was donated. Use the state that the step returned: state = step(state).")


def given_of(state: BufferState) -> RowFormat | None:
    """Return the format of rows before `on_write`."""
    return None if state.transforms is None else state.transforms.given

"""Base classes for parts of your own: `NthSampler`, `ArrayStorage` and `FieldsView` implement all but a few methods."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core import slots
from fbuf._core.component import component
from fbuf._core.pytree import Leaves, PyTree, Spec, named_leaves, nested, tree_bytes
from fbuf._core.slot_remap import SlotRemap
from fbuf._core.slots import Geometry, zero_unless
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import AnchorQueue
from fbuf._indexing.anchors import END, START, has
from fbuf._interfaces.sampler import AnchorChange, AnchorSet, Draw, Mass
from fbuf._interfaces.storage import Read, Storage
from fbuf._interfaces.view import AnchorRule, View, Window
from fbuf.samplers._base import LogSampler, masked_draw
from fbuf.storages import _array_rows


class NthSampler(LogSampler):
    """Implement a sampler without priorities, except for `pick`; subclass it. Its only state is the log of anchors.

    A subclass is a `component` with one method, `pick`. Set `in_order = True` if it needs anchors oldest first; writers that
    replace any row are then refused.

    In `sharded.Sharded` and `ray.RayReplay` each shard picks among its own rows, in proportion to their number.

    Cost: that of `samplers.Uniform`, plus `pick`.

    Example: draw new rows more often than old ones.
      >>> import fbuf, jax, jax.numpy as jnp
      >>> @fbuf.parts.component
      ... class Lately(fbuf.parts.NthSampler):
      ...     in_order = True
      ...
      ...     def pick(self, key, batch_size, total):
      ...         count = total.astype(jnp.float32)
      ...         nth = jnp.sqrt(jax.random.uniform(key, (batch_size,))) * count
      ...         nth = jnp.minimum(nth.astype(jnp.int32), total - 1)
      ...         return nth, (2 * nth.astype(jnp.float32) + 1) / count**2
      >>> buffer = fbuf.Buffer(1000, sampler=Lately())
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(1000)})
      >>> state, batch = buffer.sample(state, jax.random.key(0), 4096)
      >>> bool(batch.data["t"].mean() > 600)
      True
    """

    whole = ""
    moves = True

    def pick(self, key: jax.Array, batch_size: int, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Choose among `total` int32[] anchors: return int32[B] in [0, total), and the probability of each, float32[B].

        Anchors are numbered lane by lane, oldest first. If there are none, `total` is 1 and the result is ignored.
        """
        raise NotImplementedError(f"{type(self).__name__}: write def pick(self, key, batch_size, total).")

    def init(self, geometry: Geometry, dense: bool) -> AnchorQueue | None:
        return anchor_log.init(geometry, dense)

    def change(
        self, sampler: AnchorQueue | None, change: AnchorChange, geometry: Geometry, token: jax.Array
    ) -> AnchorQueue | None:
        return anchor_log.apply(sampler, change, geometry, token)

    def draw(
        self, sampler: Any, key: jax.Array, batch_size: int, anchors: AnchorSet, options: Leaves, token: jax.Array
    ) -> tuple[AnchorQueue | None, Draw]:
        total = jnp.sum(anchors.counts, dtype=jnp.int32)
        mask = jnp.broadcast_to(total > jnp.int32(0), (batch_size,))
        picked = self.pick(key, batch_size, jnp.maximum(total, jnp.int32(1)))
        if not isinstance(picked, tuple) or [jnp.shape(x) for x in picked] != [(batch_size,)] * 2:
            got = ", ".join(str(list(jnp.shape(x))) for x in jax.tree.leaves(picked))
            raise TypeError(f"{type(self).__name__}.pick returned {got}; expected two of [{batch_size}].")
        nth, probability = picked
        nth = jnp.clip(nth.astype(jnp.int32), jnp.int32(0), jnp.maximum(total - jnp.int32(1), jnp.int32(0)))
        slot = anchor_log.nth(sampler, anchors, nth)
        return sampler, masked_draw(slot, probability.astype(jnp.float32), mask, anchors.geometry)

    def clear(self, sampler: AnchorQueue | None, geometry: Geometry, dense: bool) -> AnchorQueue | None:
        return anchor_log.clear(sampler)

    def mass(self, sampler: AnchorQueue | None, anchors: AnchorSet) -> Mass:
        zero = jnp.zeros((), jnp.float32)
        return Mass(jnp.sum(anchors.counts, dtype=jnp.int32).astype(jnp.float32), zero, zero)

    def moved(self, sampler: AnchorQueue | None, remap: SlotRemap) -> AnchorQueue | None:
        return anchor_log.moved(sampler, remap)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("arrays",), meta_fields=("capacity", "names", "leaves", "structure")
)
@dataclasses.dataclass(frozen=True)
class KeptRows:
    """The arrays of an `ArrayStorage`, and the format of rows."""

    arrays: Any  # what `allocate` gave
    capacity: int
    names: tuple[str, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # of one row, by name
    structure: Any  # treedef of a row


class ArrayStorage(Storage):
    """Implement a storage on the device, except for its arrays; subclass it.

    A subclass is a `component` with three methods: `allocate`, `put`, `take`. It works with `vmap`, `scan`, prefetch,
    checkpoints and `convert`, as `storages.Device` does. If the methods access only the given slots, a donated state is
    updated in place (check with `fbuf.testing.assert_inplace`).

    Example: float32 leaves in [-limit, limit] take a byte an element.
      >>> import fbuf, jax, jax.numpy as jnp
      >>> @fbuf.parts.component
      ... class Rounded(fbuf.parts.ArrayStorage):
      ...     limit: float = 1.0
      ...
      ...     def allocate(self, capacity, spec):
      ...         small = {n: jnp.int8 if s.dtype == jnp.float32 else s.dtype for n, s in spec.items()}
      ...         return {n: jnp.zeros((capacity, *s.shape), small[n]) for n, s in spec.items()}
      ...
      ...     def put(self, arrays, slot, leaves):
      ...         def packed(x):
      ...             return jnp.round(jnp.clip(x / self.limit, -1, 1) * 127) if x.dtype == jnp.float32 else x
      ...         return arrays | {
      ...             n: arrays[n].at[slot].set(packed(x).astype(arrays[n].dtype), mode="drop", unique_indices=True)
      ...             for n, x in leaves.items()
      ...         }
      ...
      ...     def take(self, arrays, name, slot, leaf):
      ...         x = arrays[name].at[slot].get(mode="promise_in_bounds")
      ...         return x.astype(leaf.dtype) * (self.limit / 127) if leaf.dtype == jnp.float32 else x
      >>> buffer = fbuf.Buffer(1000, storage=Rounded(limit=2.0))
      >>> state = buffer.extend(buffer.init({"obs": jnp.zeros(3)}), {"obs": jnp.full((5, 3), 1.5)})
      >>> buffer.nbytes(state)["device"], round(float(buffer.rows(state, last=1).data["obs"][0, 0]), 1)
      (3052, 1.5)
    """

    def allocate(self, capacity: int, spec: Spec) -> Any:
        """Return arrays for `capacity` rows, as any pytree; `spec` has the shape and dtype of each leaf of a row by name."""
        raise NotImplementedError(_missing(self, "allocate(self, capacity, spec)"))

    def put(self, arrays: Any, slot: jax.Array, leaves: Mapping[str, jax.Array]) -> Any:
        """Return the arrays with some leaves `[n, ...]` written to distinct slots int32[n]; drop slots out of range."""
        raise NotImplementedError(_missing(self, "put(self, arrays, slot, leaves)"))

    def take(self, arrays: Any, name: str, slot: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        """Return a leaf `[..., *leaf.shape]` of dtype `leaf.dtype` from slots int32[...], all in range."""
        raise NotImplementedError(_missing(self, "take(self, arrays, name, slot, leaf)"))

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> KeptRows:
        return self._kept(self.allocate(geometry.capacity, spec), geometry, spec, structure)

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> KeptRows:
        arrays = jax.eval_shape(lambda: self.allocate(geometry.capacity, spec))
        return self._kept(arrays, geometry, spec, structure)

    def spec(self, rows: Any) -> tuple[Spec, Any]:
        if not isinstance(rows, KeptRows):
            raise TypeError(f"{type(self).__name__}: this state is of another storage. Use the buffer that made it.")
        return dict(zip(rows.names, rows.leaves, strict=True)), rows.structure

    def write(
        self, rows: KeptRows, slot: jax.Array, leaves: Leaves, keep: jax.Array | None, token: jax.Array
    ) -> tuple[KeptRows, None]:
        # Rows that are not kept have slots out of range.
        return self.update(rows, slot, leaves, token)

    def update(self, rows: KeptRows, slot: jax.Array, leaves: Leaves, token: jax.Array) -> tuple[KeptRows, None]:
        at = slot.reshape(-1) + token
        flat = {n: x.reshape((at.shape[0], *x.shape[slot.ndim :])) for n, x in leaves.items()}
        return dataclasses.replace(rows, arrays=self.put(rows.arrays, at, flat)), None

    def read(self, rows: KeptRows, reads: Sequence[Read]) -> tuple[list[jax.Array], jax.Array | None]:
        spec, _ = self.spec(rows)
        return [self._read(rows, read, spec[read.name]) for read in reads], None

    def nbytes(self, rows: KeptRows) -> dict[str, int]:
        return {"device": tree_bytes(rows.arrays), "host": 0, "disk": 0}

    def to_arrays(self, rows: KeptRows) -> dict[str, Any]:
        return named_leaves(rows.arrays)

    def from_arrays(self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any) -> KeptRows:
        empty = self.abstract(geometry, spec, structure)
        names = named_leaves(empty.arrays)
        made = [_array_rows.as_device_array(arrays[name], leaf.dtype) for name, leaf in names.items()]
        return dataclasses.replace(empty, arrays=jax.tree.unflatten(jax.tree.structure(empty.arrays), made))

    def _read(self, rows: KeptRows, read: Read, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        capacity = jnp.int32(rows.capacity)
        inside = (read.slot >= jnp.int32(0)) & (read.slot < capacity)
        taken = self.take(rows.arrays, read.name, jnp.where(inside, read.slot, jnp.int32(0)), leaf)
        if taken.shape != (*read.slot.shape, *leaf.shape) or taken.dtype != leaf.dtype:
            raise TypeError(
                f"{type(self).__name__}.take: leaf '{read.name}' is {taken.dtype}{list(taken.shape)}; expected "
                f"{leaf.dtype}{[*read.slot.shape, *leaf.shape]}. Return the shape and dtype of the rows added."
            )
        return zero_unless(inside, taken)

    def _kept(self, arrays: Any, geometry: Geometry, spec: Spec, structure: PyTree) -> KeptRows:
        leaves = tuple(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in spec.values())
        return KeptRows(arrays, geometry.capacity, tuple(spec), leaves, structure)


def _missing(storage: ArrayStorage, method: str) -> str:
    name = type(storage).__name__
    return f"{name}: a storage that derives from ArrayStorage needs methods allocate, put and take. Write def {method}: ..."


@component
class _Names:
    """Names of the leaves of a batch; static."""

    names: tuple[str, ...]


class FieldsView(View):
    """Implement a view whose batches are dicts of leaves of rows, except for `rule` and `fields`; subclass it.

    A subclass is a `component` with a `rule` and one method, `fields`. With `AnchorRule("name", back=b, ahead=a)` a row
    can be drawn while the `b` rows before it are held (fewer at the start of an episode) and once `a` more rows of its episode
    are written. The name distinguishes its states from those of other views. `Buffer(episode_end=...)` names what ends
    episodes.

    Example: add the previous action, zeros at the start of an episode.
      >>> import fbuf, jax.numpy as jnp
      >>> @fbuf.parts.component
      ... class WithLastAction(fbuf.parts.FieldsView):
      ...     rule = fbuf.parts.AnchorRule("last_action", back=1)
      ...
      ...     def fields(self, spec, anchors, slot):
      ...         before = fbuf.parts.earlier(anchors, slot, 1)
      ...         return {name: (name, slot) for name in spec} | {"last_action": ("action", before)}
      >>> buffer = fbuf.Buffer(100, view=WithLastAction(), episode_end=("done",))
      >>> state = buffer.init({"action": 0, "done": False})
      >>> state = buffer.extend(state, {"action": jnp.arange(1, 9), "done": jnp.arange(8) == 3})
      >>> batch = buffer.peek(state, jax.random.key(0), 64).data
      >>> sorted(set(zip(batch["action"].tolist(), batch["last_action"].tolist())))
      [(1, 0), (2, 1), (3, 2), (4, 3), (5, 0), (6, 5), (7, 6), (8, 7)]
    """

    rule = AnchorRule()

    def fields(self, spec: Spec, anchors: AnchorSet, slot: jax.Array) -> Mapping[str, tuple[str, jax.Array]]:
        """Return, for each leaf of the batch ("a/b": nested), a leaf of rows and its slots int32[B, ...].

        `slot` int32[B] was drawn. Slot C reads zeros; `earlier` and `later` return it if there is no such row.
        """
        raise NotImplementedError(f"{type(self).__name__}: write def fields(self, spec, anchors, slot).")

    def window(self, spec: Spec, anchors: AnchorSet, slot: jax.Array, mask: jax.Array, key: jax.Array) -> Window:
        nowhere = jnp.int32(anchors.geometry.capacity)
        fields = self.fields(spec, anchors, jnp.where(mask, slot, nowhere))
        pairs = list(fields.values()) if isinstance(fields, Mapping) else [fields]
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise TypeError(f"{type(self).__name__}.fields returned {fields!r}; expected a dict of pairs.")
        unknown = [name for name, _ in pairs if name not in spec]
        if unknown:
            raise ValueError(f"{type(self).__name__}.fields names '{unknown[0]}', but rows have {', '.join(spec)}.")
        return Window(tuple(Read(name, at) for name, at in fields.values()), _Names(tuple(fields)))

    def assemble(self, spec: Spec, structure: Any, arrays: Sequence[jax.Array], window: Window) -> PyTree:
        return nested(dict(zip(window.context.names, arrays, strict=True)))


def earlier(anchors: AnchorSet, slot: jax.Array, steps: int) -> jax.Array:
    """Return the slots of rows `steps` before those in `slot` int32[...] in the same episode; C if there is none.

    The view's rule needs `back >= steps`. Cost: O(steps) per slot.
    """
    return _moved("earlier", anchors, slot, -steps, START)


def later(anchors: AnchorSet, slot: jax.Array, steps: int) -> jax.Array:
    """Return the slots of rows `steps` after those in `slot` int32[...] in the same episode; C if there is none.

    The view's rule needs `ahead >= steps`. Cost: O(steps) per slot.
    """
    return _moved("later", anchors, slot, steps, END)


def _moved(call: str, anchors: AnchorSet, slot: jax.Array, offset: int, border: int) -> jax.Array:
    geometry, nowhere = anchors.geometry, jnp.int32(anchors.geometry.capacity)
    if anchors.flags is None:
        need = "back" if offset < 0 else "ahead"
        raise ValueError(
            f"fbuf.parts.{call}: the rule of this view has no neighbouring rows. Write "
            f'rule = fbuf.parts.AnchorRule("name", {need}={abs(offset)}).'
        )
    inside = (slot >= jnp.int32(0)) & (slot < nowhere)
    safe = jnp.where(inside, slot, jnp.int32(0))
    sign = jnp.int32(-1 if offset < 0 else 1)
    passed = (sign * jnp.arange(abs(offset), dtype=jnp.int32)).reshape((1,) * slot.ndim + (-1,))
    near = anchors.flags.at[slots.shift(geometry, safe[..., None], passed)].get(mode="promise_in_bounds")
    whole = ~jnp.any(has(near, border), axis=-1)
    return jnp.where(inside & whole, slots.shift(geometry, safe, jnp.int32(offset)), nowhere)

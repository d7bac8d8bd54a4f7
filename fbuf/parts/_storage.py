"""`ArrayStorage`: a storage of one's own on the device, which says what its arrays are and how rows go in and out.

What rows were given as (their structure, shapes and dtypes) is kept beside the arrays, static, so that these may be of any
shape and dtype: packed, rounded, placed elsewhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.geometry import Geometry
from fbuf._core.pytree import PyTree, Spec, named_leaves, tree_bytes, zero_unless
from fbuf._interfaces.storage import Read
from fbuf.storages import _array_rows


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("arrays",), meta_fields=("capacity", "names", "leaves", "structure")
)
@dataclasses.dataclass(frozen=True)
class KeptRows:
    """The arrays of an `ArrayStorage`, and what rows are."""

    arrays: Any  # what `allocate` gave
    capacity: int
    names: tuple[str, ...]
    leaves: tuple[jax.ShapeDtypeStruct, ...]  # of one row, by name
    structure: Any  # treedef of a row


class ArrayStorage:
    """Base of a storage whose rows are arrays on the device.

    A subclass is a `component` with three methods: `allocate`, `put`, `take`. It goes through `vmap`, `scan`, prefetch,
    checkpoints and `convert` as `storages.Device` does. Written so that they touch only the slots named, a donated state is
    updated in place (`fbuf.testing.assert_inplace` says whether it is).

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
      >>> buffer.nbytes(state)["device"], round(float(buffer.last(state, 1).data["obs"][0, 0]), 1)
      (3052, 1.5)
    """

    masks_expired = False

    def allocate(self, capacity: int, spec: Spec) -> Any:
        """Arrays for `capacity` rows, any pytree of them; `spec` says the shape and dtype of each leaf of a row by name."""
        raise NotImplementedError(_missing(self, "allocate(self, capacity, spec)"))

    def put(self, arrays: Any, slot: jax.Array, leaves: Mapping[str, jax.Array]) -> Any:
        """The arrays with some leaves `[n, ...]` of rows in slots int32[n]; one out of range is dropped, none comes twice."""
        raise NotImplementedError(_missing(self, "put(self, arrays, slot, leaves)"))

    def take(self, arrays: Any, name: str, slot: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        """A leaf `[..., *leaf.shape]` of dtype `leaf.dtype` from slots int32[...], all of them in range."""
        raise NotImplementedError(_missing(self, "take(self, arrays, name, slot, leaf)"))

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        return ()

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> KeptRows:
        return self._kept(self.allocate(geometry.capacity, spec), geometry, spec, structure)

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> KeptRows:
        arrays = jax.eval_shape(lambda: self.allocate(geometry.capacity, spec))
        return self._kept(arrays, geometry, spec, structure)

    def plan_host(
        self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None, ratio: float | None
    ) -> tuple[int, str, int]:
        return 0, "none", 0

    def spec(self, rows: Any) -> tuple[Spec, Any]:
        if not isinstance(rows, KeptRows):
            raise TypeError(f"{type(self).__name__}: this state is of another storage. Use the buffer that made it.")
        return dict(zip(rows.names, rows.leaves, strict=True)), rows.structure

    def write(
        self,
        rows: KeptRows,
        slot: jax.Array,
        leaves: Mapping[str, jax.Array],
        keep: jax.Array | None,
        token: jax.Array,
    ) -> tuple[KeptRows, None]:
        del keep  # a row that is not kept has a slot out of range
        return self.update(rows, slot, leaves, token)

    def update(
        self, rows: KeptRows, slot: jax.Array, leaves: Mapping[str, jax.Array], token: jax.Array
    ) -> tuple[KeptRows, None]:
        at = slot.reshape(-1) + token
        flat = {n: x.reshape((at.shape[0], *x.shape[slot.ndim :])) for n, x in leaves.items()}
        return dataclasses.replace(rows, arrays=self.put(rows.arrays, at, flat)), None

    def read(self, rows: KeptRows, reads: Sequence[Read]) -> tuple[list[jax.Array], jax.Array | None]:
        spec, _ = self.spec(rows)
        return [self._read(rows, read, spec[read.name]) for read in reads], None

    def clear(self, rows: KeptRows) -> KeptRows:
        return rows  # what no writer holds is never read

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
                f"{leaf.dtype}{[*read.slot.shape, *leaf.shape]}. Give it the shape and dtype that rows came in."
            )
        return zero_unless(inside, taken)

    def _kept(self, arrays: Any, geometry: Geometry, spec: Spec, structure: PyTree) -> KeptRows:
        leaves = tuple(jax.ShapeDtypeStruct(s.shape, s.dtype) for s in spec.values())
        return KeptRows(arrays, geometry.capacity, tuple(spec), leaves, structure)


def _missing(storage: ArrayStorage, method: str) -> str:
    name = type(storage).__name__
    return f"{name}: a storage that derives from ArrayStorage needs methods allocate, put and take. Write def {method}: ..."

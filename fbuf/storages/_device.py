"""`Device`: rows are plain arrays beside the rest of the state.

No callback, so it vmaps, differentiates, exports, caches and runs on any backend. The state of the rows is the user's own
pytree with a leading axis C, which is also how a checkpoint or a debugger sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from fbuf._core.component import component
from fbuf._core.geometry import Geometry
from fbuf._core.pytree import PyTree, Spec, named_leaves, tree_bytes
from fbuf._host import OnHost
from fbuf._interfaces.storage import LeafBytes, Read
from fbuf.storages import _array_rows


@component
class Device:
    """Rows as device arrays `[C, ...]`.

    Cost: exactly C times the bytes of a row; a write or read touches only its rows.

    Example:
      >>> import fbuf
      >>> fbuf.Buffer(capacity=1000, storage=fbuf.storages.Device()).storage
      Device()
    """

    @property
    def masks_expired(self) -> bool:
        return False

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        return ()

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> PyTree:
        return structure.unflatten(_array_rows.allocate(geometry.capacity, spec).values())

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> PyTree:
        leaves = [jax.ShapeDtypeStruct((geometry.capacity, *s.shape), s.dtype) for s in spec.values()]
        return structure.unflatten(leaves)

    def plan_host(
        self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None, ratio: float | None
    ) -> tuple[int, str, int]:
        return 0, "none", 0

    def spec(self, rows: PyTree) -> tuple[Spec, Any]:
        if isinstance(rows, OnHost):
            raise TypeError("Device: this state keeps rows on the host. Use the buffer that made it.")
        leaves = named_leaves(rows)
        spec = {name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for name, a in leaves.items()}
        return spec, jax.tree.structure(rows)

    def write(
        self,
        rows: PyTree,
        slot: jax.Array,
        leaves: Mapping[str, jax.Array],
        keep: jax.Array | None,
        token: jax.Array,
    ) -> tuple[PyTree, None]:
        del keep  # a row that is not kept has a slot out of range
        return self._map(rows, slot, leaves, token), None

    def update(
        self, rows: PyTree, slot: jax.Array, leaves: Mapping[str, jax.Array], token: jax.Array
    ) -> tuple[PyTree, None]:
        return self._map(rows, slot, leaves, token), None

    def _map(self, rows: PyTree, slot: jax.Array, leaves: Mapping[str, jax.Array], token: jax.Array) -> PyTree:
        arrays = named_leaves(rows)
        new = {n: _array_rows.write(a, slot, leaves[n], token) if n in leaves else a for n, a in arrays.items()}
        structure: Any = jax.tree.structure(rows)
        return structure.unflatten(new.values())

    def read(self, rows: PyTree, reads: Sequence[Read]) -> tuple[list[jax.Array], jax.Array | None]:
        arrays = named_leaves(rows)
        return [_array_rows.read(arrays[read.name], read.slot) for read in reads], None

    def clear(self, rows: PyTree) -> PyTree:
        return rows  # what no ring holds is never read

    def nbytes(self, rows: PyTree) -> dict[str, int]:
        return {"device": tree_bytes(rows), "host": 0, "disk": 0}

    def bytes_per_leaf(self, rows: PyTree) -> dict[str, LeafBytes]:
        return {name: LeafBytes(device=tree_bytes(array)) for name, array in named_leaves(rows).items()}

    def to_arrays(self, rows: PyTree) -> dict[str, Any]:
        return named_leaves(rows)

    def from_arrays(self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any) -> PyTree:
        del geometry
        return structure.unflatten([_array_rows.restored(arrays[name], spec[name].dtype) for name in spec])

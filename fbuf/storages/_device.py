"""`Device`: rows are arrays in the state.

The state of the rows is the user's pytree with a leading axis C; on TPUs some of its leaves are packed. Without
callbacks it works under vmap, grad, export and on any backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
from jax import Array

from fbuf._core.component import component
from fbuf._core.dispatch import OnHost
from fbuf._core.packed_leaf import is_packed, stored_leaves, with_structure
from fbuf._core.pytree import Leaves, PyTree, Spec, tree_bytes
from fbuf._core.slots import Geometry, read_rows, write_rows
from fbuf._interfaces.storage import HostRead, LeafBytes, Read, Storage
from fbuf.storages import _array_rows


@component
class Device(Storage):
    """Store rows as device arrays `[C, ...]`.

    Attributes:
      layout: "rows": an array `[C, ...]` for each leaf. "tiles": arrays that a TPU writes in place; leaves of many elements are
        stored in whole tiles, small ones along one axis. `rows`, batches and checkpoints have the same shapes. None: "tiles"
        if `init` places the state on a TPU, otherwise "rows". Checkpoints load in either layout.

    Cost: C times the bytes of a row. Tiles take up to 5 % more, and up to twice as much for a leaf of more than 2^30 elements
    whose rows fill no whole tiles (`Buffer.plan` tells). A write or read touches only its rows.

    Example:
      >>> import fbuf
      >>> fbuf.Buffer(capacity=1000, storage=fbuf.storages.Device()).storage
      Device()
    """

    layout: Literal["rows", "tiles"] | None = None

    row_by_row = True

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> PyTree:
        allocate = _array_rows.allocate_packed if self._packs() else _array_rows.allocate
        return structure.unflatten(allocate(geometry.capacity, spec).values())

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> PyTree:
        if self._packs():
            return jax.eval_shape(lambda: self.init(geometry, spec, structure))
        leaves = [jax.ShapeDtypeStruct((geometry.capacity, *s.shape), s.dtype) for s in spec.values()]
        return structure.unflatten(leaves)

    def _packs(self) -> bool:
        """Return whether new rows are tiles: by default on the device where JAX places new arrays, if it is a TPU."""
        if self.layout is not None:
            return self.layout == "tiles"
        device: Any = getattr(jax.config, "jax_default_device", None)
        return (jax.default_backend() if device is None else getattr(device, "platform", device)) == "tpu"

    def spec(self, rows: PyTree) -> tuple[Spec, Any]:
        if isinstance(rows, OnHost):
            raise TypeError("Device: this state keeps rows on the host. Use the buffer that made it.")
        leaves, structure = with_structure(rows)
        return {name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for name, a in leaves.items()}, structure

    def write(self, rows: PyTree, slot: Array, leaves: Leaves, keep: Array | None, token: Array) -> tuple[PyTree, None]:
        return self._write_leaves(rows, slot, leaves, token, inside=keep is None), None

    def update(self, rows: PyTree, slot: Array, leaves: Leaves, token: Array) -> tuple[PyTree, None]:
        return self._write_leaves(rows, slot, leaves, token), None

    def _write_leaves(self, rows: PyTree, slot: Array, leaves: Leaves, token: Array, inside: bool = False) -> PyTree:
        arrays, structure = with_structure(rows)
        return structure.unflatten(write_rows(arrays, slot, leaves, token, inside).values())

    def read(self, rows: PyTree, reads: Sequence[Read]) -> tuple[list[Array], Array | None]:
        arrays = stored_leaves(rows)
        return [read_rows(arrays[read.name], read.slot) for read in reads], None

    def on_host(self, rows: PyTree) -> HostRead | None:
        leaves: Any = stored_leaves(rows).values()
        if any(map(is_packed, leaves)):
            return None
        arrays = list(map(_array_rows.in_numpy, leaves))
        return lambda reads: [_array_rows.take(arrays[number], slot) for number, slot in reads]

    def clear(self, rows: PyTree) -> PyTree:
        return rows  # slots outside the ring are never read

    def nbytes(self, rows: PyTree) -> dict[str, int]:
        return {"device": tree_bytes(rows), "host": 0, "disk": 0}

    def bytes_per_leaf(self, rows: PyTree) -> dict[str, LeafBytes]:
        return {name: LeafBytes(device=tree_bytes(array)) for name, array in stored_leaves(rows).items()}

    def to_arrays(self, rows: PyTree) -> dict[str, Any]:
        return stored_leaves(rows)

    def from_arrays(self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any) -> PyTree:
        like = stored_leaves(self.abstract(geometry, spec, structure))
        return structure.unflatten([_array_rows.as_stored(arrays[name], leaf) for name, leaf in like.items()])

"""A part of a checkpoint, the arrays under a prefix as if they were saved alone; and its arrays as they were in the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fbuf._checkpoint.device_arrays import to_device
from fbuf._core.packed_leaf import Packing
from fbuf._formats import checkpoint


class SavedPart:
    """The part of a checkpoint that belongs to one buffer, with the interface of `Saved`.

    Args:
      begin: Prefix of its arrays.
      meta: Its description.
    """

    def __init__(self, saved: checkpoint.Saved, begin: str, meta: dict[str, Any]):
        self.path, self.verify = saved.path, saved.verify
        self.meta = meta | {"extra": None, "replay": None}
        self.arrays = {name[len(begin) :]: a for name, a in saved.arrays.items() if name.startswith(begin)}

    @property
    def nbytes(self) -> int:
        """Return the bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def whole_shape(saved: Any, name: str) -> tuple[int, ...]:
    """Return the shape of a leaf in the state."""
    placed: Mapping[str, Any] = saved.meta["placed"]
    return tuple(placed[name][0]) if name in placed else tuple(saved.arrays[name].shape)


def device_array(saved: Any, name: str, packing: Packing | None = None) -> Any:
    """Return an array of the state on the default device, or a packed leaf."""
    source, fill = saved.arrays[name], bytes.fromhex(saved.meta["placed"][name][1])
    shape = whole_shape(saved, name)
    if (shape[1:] if shape else ()) != source.shape[1:] or (shape or (1,))[0] < source.shape[0]:
        raise checkpoint.SchemaError(
            f"fbuf.load: {saved.path}: '{name}' has shape {list(shape)}, but {list(source.shape)} is stored. Load another "
            f"checkpoint."
        )
    return to_device(source, shape, source.dtype, fill, packing)

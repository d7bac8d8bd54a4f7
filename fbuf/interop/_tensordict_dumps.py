"""Read folders of raw arrays as tensordict writes them (`meta.json` and one `.memmap` per leaf), and torchrl's of pytrees.

Each array is checked against its file first. Leaves that are not arrays (text, objects, nested tensors, pickles) are known
by name only. Files are read as rings, with `pread`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fbuf.interop._columns import DTYPES, MOST_DEPTH, check_name, check_shape, read_json

Leaf = tuple[Path, np.dtype[Any], tuple[int, ...]]
"""File, dtype and shape of an array."""
_SINGLE = "_-single-tensor-_"  # what torchrl calls the leaf of rows that are one tensor
_FOLDERS = ("<class 'tensordict._td.TensorDict'>", "<class 'tensordict.TensorDict'>")


def leaf_of(root: Path, file: Path, described: Path, entry: Mapping[str, Any]) -> Leaf:
    """Return the file, dtype and shape of an array. Raises ValueError unless the file has exactly this size."""
    shape = check_shape(str(described), entry.get("shape"))
    name = entry.get("dtype")
    dtype = DTYPES.get(name.removeprefix("torch.")) if isinstance(name, str) and name.startswith("torch.") else None
    if dtype is None:
        raise ValueError(f"{described}: dtype of {file.name} is {str(name)[:80]!r}; expected one as 'torch.float32'.")
    check_inside(root, file)
    size, expected = file.stat().st_size, math.prod(shape) * dtype.itemsize
    if size != expected:
        raise ValueError(f"{file}: has {size} bytes; expected {expected} of {dtype.name}{list(shape)} by {described}.")
    return file, dtype, shape


def check_inside(root: Path, file: Path) -> None:
    """Raise ValueError if a link is on the way from `root` to `file`."""
    at = file
    while at != root:
        if at.is_symlink():
            raise ValueError(f"{at}: is a link; expected a file or folder of the dump. Copy its target there.")
        at = at.parent


def pytree(storage: Path, described: Path, entries: Any) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves by name of rows that are a pytree of tensors, or one tensor (`row`)."""
    if not isinstance(entries, dict):
        raise ValueError(f"{described}: metadata is a {type(entries).__name__}; expected an object.")
    for dotted, entry in entries.items():
        name = check_name(str(described), dotted.replace(".", "/"))
        if not isinstance(entry, dict):
            raise ValueError(f"{described}: '{name}' is a {type(entry).__name__}; expected an object.")
        file = storage / f"{name}.memmap"
        yield ("row" if name == _SINGLE else name), leaf_of(storage, file, described, entry)


def tensordict(root: Path, folder: Path, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Leaf | str]]:
    """Yield the leaves by name; in place of one that is not an array, a text that says what it is."""
    described = folder / "meta.json"
    check_inside(root, folder)
    if depth > MOST_DEPTH:
        raise ValueError(f"{folder}: is nested more than {MOST_DEPTH} deep.")
    about = read_json(described)
    if about.get("_type") not in _FOLDERS:
        kind = str(about.get("_type"))[:80]
        raise ValueError(f"{described}: is a {kind!r}; expected a TensorDict. Dump td.to_tensordict().")
    for name, entry in about.items():
        if not isinstance(entry, dict):  # of the tensordict itself: shape, device, _type
            continue
        if "/" in name:
            raise ValueError(f"{described}: leaf {name[:80]!r} has an invalid name; expected no slash.")
        full = check_name(str(described), prefix + name)
        if entry.get("type") == "TensorDict":
            yield from tensordict(root, folder / name, full + "/", depth + 1)
        elif "type" in entry:
            kind = str(entry["type"])[:80]
            pickles = [f for f in ("other.pickle", "other.pkl") if (folder / name / f).exists()]
            where = folder / name / (pickles[0] if pickles else "meta.json")
            pickled = ", which is a pickle" if pickles else ""
            yield full, f"leaf '{full}' is a {kind}, in {where}{pickled}; expected an array."
        elif entry.get("is_nested"):
            yield full, f"leaf '{full}' is a nested tensor, in {folder / name}; expected one of one shape."
        else:
            yield full, leaf_of(root, folder / f"{name}.memmap", described, entry)


def batch_of(storage: Path) -> tuple[int, ...]:
    """Return the leading axes of all leaves of a tensordict."""
    described = storage / "meta.json"
    return check_shape(str(described), read_json(described).get("shape"))


def ring_reader(
    file: Path, dtype: np.dtype[Any], room: int, oldest: int, item: tuple[int, ...]
) -> Callable[[int, int], np.ndarray]:
    """Return a function that reads rows of shape `item` by age from a file that is a ring."""
    row = math.prod(item) * dtype.itemsize

    def read(first: int, last: int) -> np.ndarray:
        at = (oldest + first) % max(room, 1)
        head = min(last - first, room - at)
        spans = (at, head), (0, last - first - head)
        data = np.concatenate([np.fromfile(file, np.uint8, n * row, offset=start * row) for start, n in spans])
        if len(data) != (last - first) * row:
            raise ValueError(f"{file}: has fewer than {room} rows of {row} bytes. It was truncated meanwhile.")
        if dtype == np.bool_ and (data > 1).any():
            raise ValueError(f"{file}: rows {first} to {last - 1} have bytes above 1; expected booleans.")
        return data.view(dtype).reshape(last - first, *item)

    return read

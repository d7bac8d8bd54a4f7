"""Read torchrl's dumps (`rb.dumps(path)`) and memory-mapped storages without torch.

A dump is folders of raw arrays, one file per leaf, described by JSON, beside pickles, which are not opened. No string of a
file is evaluated; links and paths out of the folder are refused. Files are read by `pread`, not mapped, so a file that
shrinks raises an error instead of ending the process. A dump has no checksums and is not written atomically, so an
incomplete one is detected only if its counts disagree.

Source: torchrl 0.14.1 (`checkpointers.py`, `writers/round_robin.py`, `samplers/prioritized.py`), tensordict 0.14.3.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._rows import columns as _columns
from fbuf.interop._source import Source

Leaf = tuple[Path, np.dtype[Any], tuple[int, ...]]
"""File, dtype and shape of an array."""
_SINGLE = "_-single-tensor-_"  # what torchrl calls the leaf of rows that are one tensor
_FOLDERS = ("<class 'tensordict._td.TensorDict'>", "<class 'tensordict.TensorDict'>")


def leaf_of(root: Path, file: Path, described: Path, entry: Mapping[str, Any]) -> Leaf:
    """Return the file, dtype and shape of an array. Raises ValueError unless the file has exactly this size."""
    shape = _columns.check_shape(str(described), entry.get("shape"))
    name = entry.get("dtype")
    dtype = _columns.DTYPES.get(str(name).removeprefix("torch.")) if str(name).startswith("torch.") else None
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
        name = _columns.check_name(str(described), dotted.replace(".", "/"))
        if not isinstance(entry, dict):
            raise ValueError(f"{described}: '{name}' is a {type(entry).__name__}; expected an object.")
        file = storage / f"{name}.memmap"
        yield ("row" if name == _SINGLE else name), leaf_of(storage, file, described, entry)


def tensordict(root: Path, folder: Path, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Leaf | str]]:
    """Yield the leaves by name; in place of one that is not an array, a text that says what it is."""
    described = folder / "meta.json"
    check_inside(root, folder)
    if depth > _columns.MOST_DEPTH:
        raise ValueError(f"{folder}: is nested more than {_columns.MOST_DEPTH} deep.")
    about = _columns.read_json(described)
    if about.get("_type") not in _FOLDERS:
        kind = str(about.get("_type"))[:80]
        raise ValueError(f"{described}: is a {kind!r}; expected a TensorDict. Dump td.to_tensordict().")
    for name, entry in about.items():
        if not isinstance(entry, dict):  # of the tensordict itself: shape, device, _type
            continue
        if "/" in name:
            raise ValueError(f"{described}: leaf {name[:80]!r} has an invalid name; expected no slash.")
        full = _columns.check_name(str(described), prefix + name)
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
    return _columns.check_shape(str(described), _columns.read_json(described).get("shape"))


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


_CALL = "from_torchrl"


def from_torchrl(
    path: str | os.PathLike[str],
    *,
    lanes: int | None = None,
    rows: int | None = None,
    cursor: int | None = None,
    priorities: bool = True,
    fields: _columns.Fields = None,
    dtypes: Mapping[str, str] | None = None,
) -> Source:
    """Return the rows, oldest first, and priorities of a torchrl dump or memory-mapped storage.

    Args:
      path: Folder of `ReplayBuffer.dumps(path)`, of a `TensorStorage`, `LazyTensorStorage` or `LazyMemmapStorage` of
        tensordicts or pytrees of tensors; or the folder of a `LazyMemmapStorage` (`scratch_dir`), with `rows=`.
      lanes: E of a storage with `ndim=2`, if the dump's counts do not state it.
      rows: Number of rows (per lane) written, if the folder does not state it.
      cursor: Slot of the next row, if the folder does not state it or states a wrong one.
      priorities: False: ignore the priorities.
      fields: `{name there: name here}` ("next/reward" is a name there); "ted": `interop.TED`, each observation once and
        scalars without their last axis; None: all but `index`, the slots of torchrl's writer.
      dtypes: As for `from_arrays`.
    Returns:
      The source; without a buffer, `into` makes one with torchrl's alpha and beta if there are priorities.
    Raises:
      FileNotFoundError: a file is missing.
      ValueError: sizes, counts, names or dtypes are unknown or contradict one another; a leaf is not an array, or is pickled,
        unless `fields` leaves it out; else as `from_arrays`.
    Transforms of torchrl's buffer are not applied.

    Example:
      >>> import fbuf, json, numpy as np, pathlib, tempfile
      >>> with tempfile.TemporaryDirectory() as dump:  # as rb.dumps(dump) writes it, of a ring of 4 slots
      ...     folder = pathlib.Path(dump, "storage")
      ...     folder.mkdir()
      ...     size = folder.joinpath("action.memmap").write_bytes(np.array([4, 5, 2, 3]).tobytes())
      ...     about = {"is_pytree": True, "metadata": {"action": {"dtype": "torch.int64", "shape": [4]}}, "len": 4}
      ...     size = folder.joinpath("storage_metadata.json").write_text(json.dumps(about))
      ...     buffer, state = fbuf.interop.from_torchrl(dump, cursor=2, fields={"action": "a"}).into()
      >>> buffer.rows(state).data["a"].tolist()
      [2, 3, 4, 5]
    """
    source = _source(Path(path), lanes, rows, cursor, priorities)
    if fields is None:
        fields = [name for name in source.columns if name != "index"] or None
    return dataclasses.replace(source, fields=fields, dtypes=dtypes)


def _source(path: Path, lanes: int | None, rows: int | None, cursor: int | None, priorities: bool) -> Source:
    """Return the rows."""
    storage = path / "storage" if (path / "storage").is_dir() else path
    if not storage.is_dir():
        raise FileNotFoundError(f"{_CALL}: {path} is no folder; expected what ReplayBuffer.dumps(path) wrote.")
    described = storage / "storage_metadata.json"
    about = _columns.read_json(described) if described.exists() else None
    if about is None and not (storage / "meta.json").exists():
        others = [n for n in ("metadata.json", "data_indices.json", "checkpoint.h5") if (storage / n).exists()]
        what = f"has {others[0]}, of another kind of storage" if others else "has neither"
        raise ValueError(f"{_CALL}: {storage} {what}; expected the dump of a LazyTensorStorage.")
    leaves: dict[str, Leaf | str] = {}
    batch: tuple[int, ...] = ()
    if about is not None and about.get("is_pytree"):
        leaves |= pytree(storage, described, about.get("metadata"))
    else:
        leaves |= tensordict(storage, storage)
        batch = batch_of(storage)
    arrays = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, tuple)}
    if not arrays:
        raise ValueError(f"{_CALL}: {storage} has no arrays ({', '.join(leaves) or 'nothing'}); expected a leaf.")
    room = _lane_length(storage, arrays, batch, lanes)
    writer = path / "writer" / "metadata.json"
    written = _columns.read_json(writer) if writer.exists() else {}
    stated = _columns.check_count(str(described), "len", about.get("len")) if about is not None else None
    lanes, steps = _counts(storage, batch, room, lanes, rows, stated, written.get("write_count"))
    oldest = _oldest(writer, steps, room, written, cursor)
    lead = 1 if lanes is None else 1 + _axes(batch, arrays, lanes)
    columns = {name: _columns.refused(leaf) for name, leaf in leaves.items() if isinstance(leaf, str)}
    for name, (file, dtype, shape) in arrays.items():
        item = shape[lead:] if lanes is None else (lanes, *shape[lead:])
        reader = ring_reader(file, dtype, shape[0], oldest, item)
        columns[name] = _columns.Column(shape[lead:], dtype, reader)
    columns = {name: columns[name] for name in leaves}
    at = (oldest + np.arange(steps)) % max(room, 1)
    priority, numbers = _priorities(path / "sampler", room * (lanes or 1)) if priorities else (None, (0.6, 0.4))
    if priority is not None:
        priority = priority.reshape(room, lanes)[at] if lanes is not None else priority[at]
    return Source("torchrl dump", columns, steps, lanes, priority=priority, exponents=numbers, call=_CALL)


def _lane_length(storage: Path, arrays: Mapping[str, Leaf], batch: tuple[int, ...], lanes: int | None) -> int:
    """Return the slots of a lane: the first axis, which all leaves must share."""
    lead = batch or next(iter(arrays.values()))[2][: 1 if lanes is None else 2]
    for name, (_, _, shape) in arrays.items():
        if not lead or shape[: len(lead)] != lead:
            raise ValueError(f"{_CALL}: leaf '{name}' in {storage} has shape {list(shape)}; expected {[*lead, '...']}.")
    return lead[0]


def _counts(
    folder: Path, batch: tuple[int, ...], room: int, lanes: int | None, rows: int | None, stated: int | None, count: Any
) -> tuple[int | None, int]:
    """Lanes, and rows of each.

    `len` of a storage counts items, those of all lanes; but a storage whose items are windows has two leading axes too,
    and there it counts windows. The writer's count, which is of writes along the first axis, tells them apart.
    """
    side = math.prod(batch[1:])
    if rows is None and stated is None:
        raise ValueError(f"{_CALL}: {folder} does not state its number of rows; expected rows=. Pass rows=len(rb).")
    if lanes is None and len(batch) > 1 and side > 1:
        whole = min(count, room) if isinstance(count, int) and count > 0 else None
        if stated is not None and whole is not None and stated == whole * side:
            lanes = side
        elif stated is None or stated != whole:
            raise ValueError(
                f"{_CALL}: rows in {folder} have shape {list(batch)}, and {stated} are written: that may be {side} lanes, "
                f"or rows that are windows of {side} steps. Pass lanes={side}, or rows= for windows."
            )
    steps = rows if rows is not None else (stated or 0) // (lanes or 1)
    if (rows is None and (stated or 0) % (lanes or 1)) or not 0 <= steps <= room:
        number = stated if rows is None else rows
        raise ValueError(f"{_CALL}: {folder} states {number} rows; expected {lanes or 1} lanes of at most {room}.")
    return lanes, steps


def _axes(batch: tuple[int, ...], arrays: Mapping[str, Leaf], lanes: int) -> int:
    """Return the number of axes after the first that count lanes."""
    shape = batch or next(iter(arrays.values()))[2]
    for axes in range(1, len(shape)):
        if math.prod(shape[1 : axes + 1]) == lanes:
            return len(batch) - 1 if batch and math.prod(batch[1:]) == lanes else axes
    raise ValueError(f"{_CALL}: lanes is {lanes}, but rows have shape {list(shape)}; expected lanes on axis 1.")


def _oldest(writer: Path, steps: int, room: int, written: Mapping[str, Any], cursor: int | None) -> int:
    """Return the slot of the oldest row."""
    if cursor is None and "cursor" in written:
        cursor = _columns.check_count(str(writer), "cursor", written["cursor"])
        if steps < room and cursor != steps:
            raise ValueError(
                f"{writer}: cursor is {cursor}, but the storage holds {steps} of {room} rows; expected {steps}. The "
                f"files are of two dumps; pass cursor= to override it."
            )
    if cursor is None:
        return 0
    if not 0 <= cursor <= room:
        raise ValueError(f"{_CALL}: cursor is {cursor}; expected 0 to {room}.")
    return cursor % room if steps == room and room else 0


def _priorities(sampler: Path, places: int) -> tuple[np.ndarray | None, tuple[float, float]]:
    """Return |p| float64 of each slot, and alpha and beta; None if the sampler has no priorities."""
    described, file = sampler / "sampler_metadata.json", sampler / "sumtree.memmap"
    none = None, (0.6, 0.4)
    if not described.exists() or "_alpha" not in (about := _columns.read_json(described)):
        return none
    numbers = {name: about.get(name) for name in ("_alpha", "_beta", "_eps", "_max_capacity")}
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ValueError(f"{described}: {name} is {str(value)[:80]!r}; expected a number >= 0.")
    alpha, beta, eps, capacity = (float(value) for value in numbers.values() if value is not None)
    if int(capacity) < places:
        raise ValueError(f"{described}: there are {int(capacity)} priorities; expected {places}, one per row.")
    check_inside(sampler.parent, file)
    if (size := file.stat().st_size) != int(capacity) * 8:
        raise ValueError(f"{file}: has {size} bytes; expected {int(capacity) * 8}. It is truncated.")
    leaves = np.fromfile(file, np.float64, places)
    if not (np.isfinite(leaves).all() and (leaves >= 0).all()):
        raise ValueError(f"{file}: priorities are not finite or below 0: a TD error was NaN. Pass priorities=False.")
    magnitude = np.power(leaves, 1 / alpha) - eps if alpha else np.ones_like(leaves)
    return np.maximum(magnitude, 0), (alpha, beta)

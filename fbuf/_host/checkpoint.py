"""A store's parts as flat arrays of plain dtypes and back: chunks stay encoded, nothing is pickled.

Damaged bytes of a chunk are found when it is read, so that the rest can be; a damaged dictionary, which many chunks need, at
once; arrays that do not fit together are refused. Rejected: decoding on the way (a checkpoint would be 100 times larger).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

import numpy as np

from fbuf._host.arrays import Array, StoreCorrupted, flat
from fbuf._host.batch import ranges
from fbuf._host.blocks import Blocked
from fbuf._host.chunks import Chunks
from fbuf._host.filechunks import FileChunks
from fbuf._host.filering import FileRing
from fbuf._host.framestream import FrameStream
from fbuf._host.part import Part
from fbuf._host.patches import PATCH, Patch, Patches
from fbuf._host.ring import Ring
from fbuf._host.stacking import Stacking
from fbuf._host.stacks import Stacks
from fbuf._host.zstd import Dictionary

FORMAT = 1


def geometry(lanes: int, length: int, slack: int) -> Array:
    """What says of which store arrays are."""
    return np.array([FORMAT, lanes, length, slack], np.int64)


def check_geometry(arrays: Mapping[str, Array], lanes: int, length: int, slack: int, streams: bool) -> int:
    """The count (or lap) of the first row. Raises ValueError if the arrays are of another store than asked for."""
    wanted = geometry(lanes, length, slack).tolist()
    found = expect(arrays, "geometry", np.int64, (4,)).tolist()
    if found != wanted:
        raise ValueError(
            f"Store.from_arrays: format, lanes, length and slack are {found}; expected {wanted}. "
            f"Load with the buffer that was saved."
        )
    if streams == any(name.startswith("places:") for name in arrays):
        kind = ("in any order", "streams") if streams else ("streams", "in any order")
        raise ValueError(
            f"Store.from_arrays: rows were saved {kind[0]}; expected {kind[1]}. Load with the writer that was saved."
        )
    return int(expect(arrays, "first", np.uint64, (1,))[0])


def save(part: Part, count: Array) -> dict[str, Array]:
    """A column as arrays, copied, when its lanes have int64[E] `count` rows."""
    if isinstance(part, Ring):
        return _save_ring(part)
    if isinstance(part, FileRing):
        return _save_file_ring(part, count)
    if isinstance(part, Chunks | FileChunks):
        return _save_chunks(part if isinstance(part, Chunks) else part.chunks, count)
    if isinstance(part, Stacks):
        return _save_stacks(part, count)
    assert isinstance(part, Blocked)
    return _save_blocks(part, count)


def load(part: Part, arrays: Mapping[str, Array], count: Array) -> None:
    """The inverse of `save`, into a new part. Raises ValueError, and StoreCorrupted for what many rows need."""
    if isinstance(part, Ring):
        _load_ring(part, arrays, count)
    elif isinstance(part, FileRing):
        _load_file_ring(part, arrays, count)
    elif isinstance(part, Chunks):
        _load_chunks(part, arrays, count)
    elif isinstance(part, Stacks):
        _load_stacks(part, arrays, count)
    elif isinstance(part, FileChunks):
        plain = part.in_memory()
        _load_chunks(plain, arrays, count)
        part.take(plain, count)
    else:
        assert isinstance(part, Blocked)
        _load_blocks(part, arrays, count)


def _save_ring(ring: Ring) -> dict[str, Array]:
    used = ring.array[: ring.touched]
    return {"rows": used.copy().reshape(-1).view(np.uint8).reshape(ring.touched, ring.lanes, ring.row)}


def _load_ring(ring: Ring, arrays: Mapping[str, Array], count: Array) -> None:
    touched = min(int(count.max()), ring.depth)
    rows = expect(arrays, "rows", np.uint8, (touched, ring.lanes, ring.row))
    if ring.array.nbytes:
        ring.array[:touched].reshape(-1).view(np.uint8)[:] = rows.reshape(-1)
    ring.touched = touched


def _save_file_ring(ring: FileRing, count: Array) -> dict[str, Array]:
    """As `_save_ring`: either can be loaded as the other."""
    touched = min(int(count.max()), ring.depth)
    out: Array = np.zeros((touched, ring.lanes, ring.row), np.uint8)
    lane, number = ranges(np.maximum(count - ring.depth, 0), count)
    fetch = ring.fetch(lane, number, np.ones(len(lane), bool), count, np.zeros(1, np.int64))
    rows: Array = np.empty((len(lane), ring.row), np.uint8)
    fetch.run([flat(rows)])
    out[number % ring.depth, lane] = rows
    return {"rows": out}


def _load_file_ring(ring: FileRing, arrays: Mapping[str, Array], count: Array) -> None:
    rows = expect(arrays, "rows", np.uint8, (min(int(count.max()), ring.depth), ring.lanes, ring.row))
    lane, number = ranges(np.maximum(count - ring.depth, 0), count)
    ring.put(lane, number, rows[number % ring.depth, lane])


def _save_chunks(part: Chunks, count: Array, low: Array | None = None) -> dict[str, Array]:
    """Live chunks, oldest first, with their dictionaries and the open chunks."""
    lane, chunk = part.live(count, low)
    at = chunk % part.ring, lane
    current = part.coder.current
    books = list(part.table.values())
    if current is not None and current not in books:
        books.append(current)
    number = {0: 0} | {d.slot: i for i, d in enumerate(books, 1) if part.table.get(d.slot) is d}
    contents = [d.data.as_bytes() for d in books]
    state = [part.k, part.closed, part.encoded, part.probed, books.index(current) + 1 if current is not None else 0]
    return {
        "state": np.array(state, np.int64),
        "packed": part.packed.copy(),
        "open": np.array(flat(part.open)).reshape(part.lanes, part.k, part.row),
        "length": part.length[at],
        "checksum": part.checksum[at],
        "dictionary": np.array([number[s] for s in part.slot[at].tolist()], np.uint16),
        "payload": np.frombuffer(b"".join(part.arena.views(part.address[at], part.length[at])), np.uint8),
        "dictionaries": np.frombuffer(b"".join(contents), np.uint8),
        "dictionary_length": np.array([len(c) for c in contents], np.int64),
        "dictionary_checksum": np.array([d.crc for d in books], np.uint32),
    }


def _load_chunks(part: Chunks, arrays: Mapping[str, Array], count: Array, low: Array | None = None) -> None:
    k, closed, encoded, probed, current = expect(arrays, "state", np.int64, (5,)).tolist()
    if k != part.k:
        raise ValueError(
            f"Store.from_arrays: chunks hold {k} rows; expected {part.k}. Load with the codec that was saved."
        )
    opened = expect(arrays, "open", np.uint8, (part.lanes, k, part.row))
    flat(part.open)[:] = flat(np.ascontiguousarray(opened))
    lane, chunk = part.live(count, low)
    length = expect(arrays, "length", np.uint32, (len(lane),))
    checksum = expect(arrays, "checksum", np.uint32, (len(lane),))
    slot = expect(arrays, "dictionary", np.uint16, (len(lane),))
    payload = expect(arrays, "payload", np.uint8, (int(length.sum(dtype=np.int64)),))
    sizes = expect(arrays, "dictionary_length", np.int64, (None,))
    crcs = expect(arrays, "dictionary_checksum", np.uint32, (len(sizes),))
    contents = bytes(expect(arrays, "dictionaries", np.uint8, (int(sizes.sum()),)))
    if (sizes < 1).any() or int(slot.max(initial=0)) > len(sizes) or not 0 <= current <= len(sizes):
        raise ValueError(
            f"Store.from_arrays: chunks name {int(slot.max(initial=0))} dictionaries; expected at most {len(sizes)}. "
            f"Load another checkpoint."
        )
    spans = zip(np.cumsum(sizes).tolist(), sizes.tolist(), crcs.tolist(), strict=True)
    books = [None] + [Dictionary(contents[stop - size : stop], crc) for stop, size, crc in spans]
    view, stops = flat(np.ascontiguousarray(payload)), np.cumsum(length, dtype=np.int64)
    blobs = [view[a:b] for a, b in zip((stops - length).tolist(), stops.tolist(), strict=True)]
    at = chunk % part.ring, lane
    part.address[at] = part.arena.append(blobs)
    part.length[at] = length
    part.checksum[at] = checksum
    part.slot[at] = [part.enter(books[s]) for s in slot.tolist()]
    part.packed = expect(arrays, "packed", np.int64, (part.lanes,)).copy()
    part.closed, part.encoded, part.probed = closed, encoded, bool(probed)
    part.coder.adopt(books[current], closed * k)


def _save_blocks(part: Blocked, count: Array) -> dict[str, Array]:
    """The column of ids, and the blocks that it refers to."""
    words, prints = part.table.held
    place = np.flatnonzero(part.table.count[: part.table.used])
    references = part.table.count[place]
    own = {
        "probed": np.array([part.probed], np.int64),
        "place": place,
        "references": references,
        "table_checksum": np.array([_table_checksum(place, references)], np.uint32),
        "block": words[place],
        "fingerprint": prints[place],
    }
    return own | {f"ids:{n}": a for n, a in save(part.ids, count).items()}


def _load_blocks(part: Blocked, arrays: Mapping[str, Array], count: Array) -> None:
    place = expect(arrays, "place", np.int64, (None,))
    references = expect(arrays, "references", np.int64, place.shape)
    (stated,) = expect(arrays, "table_checksum", np.uint32, (1,)).tolist()
    actual = _table_checksum(place, references)
    if actual != stated:  # a place given up too early would come to hold another row's block
        raise StoreCorrupted(
            f"Store.from_arrays: the table of blocks has checksum {actual:#010x}; expected {stated:#010x}. "
            f"Its bytes were damaged: load another checkpoint."
        )
    block = expect(arrays, "block", np.uint8, (None, None))
    if block.shape != (len(place), part.table.size):
        raise ValueError(
            f"Store.from_arrays: blocks are {list(block.shape)}; expected {[len(place), part.table.size]}. "
            f"Load with the codec that was saved."
        )
    (probed,) = expect(arrays, "probed", np.int64, (1,)).tolist()
    part.table.load(place, block, expect(arrays, "fingerprint", np.uint64, place.shape), references)
    part.probed = bool(probed)
    load(part.ids, {n.removeprefix("ids:"): a for n, a in arrays.items() if n.startswith("ids:")}, count)


def _table_checksum(place: Array, references: Array) -> int:
    return zlib.crc32(flat(np.ascontiguousarray(references)), zlib.crc32(flat(np.ascontiguousarray(place))))


def _save_stacks(part: Stacks, count: Array) -> dict[str, Array]:
    """Rows as they are while it is not known what they are, and if they are no stacks; else frames, and where rows end."""
    stream = part.inner
    if not isinstance(stream, FrameStream):
        return {"stacking": np.array([part.watching, 0, 0, 0], np.int64)} | _save_chunks(stream, count)
    lane, row = ranges(np.maximum(count - part.depth, 0), count)
    frames = np.stack([stream.low, stream.count])
    added = stream.ends.live(lane, row, stream.stacking.frames)
    own = {
        "stacking": np.array([0, *dataclasses.astuple(stream.stacking)], np.int64),
        "frames": frames,
        "added": added,
        "added_checksum": np.array([_table_checksum(frames, added)], np.uint32),
    }
    return own | {f"frame:{n}": a for n, a in _save_chunks(stream.plane, stream.count, stream.low).items()}


def _load_stacks(part: Stacks, arrays: Mapping[str, Array], count: Array) -> None:
    if "stacking" not in arrays:  # saved when stacks were not looked for
        _load_chunks(part.plain(), arrays, count)
        part.resume(count, False)
        return
    watching, *sizes = expect(arrays, "stacking", np.int64, (4,)).tolist()
    if not any(sizes):
        _load_chunks(part.plain(), arrays, count)
        part.resume(count, bool(watching))
        return
    stacking = Stacking(*sizes)
    if stacking not in part.candidates:
        raise ValueError(
            f"Store.from_arrays: rows are stacks of {sizes}; expected one of {list(part.candidates)}. "
            f"Load with the buffer that was saved."
        )
    stream = part.stream(stacking)
    lane, row = ranges(np.maximum(count - part.depth, 0), count)
    low, frames = stream.low, stream.count = expect(arrays, "frames", np.int64, (2, part.lanes)).copy()
    added = expect(arrays, "added", np.uint8, row.shape)
    (stated,) = expect(arrays, "added_checksum", np.uint32, (1,)).tolist()
    actual = _table_checksum(np.stack([low, frames]), added)
    if actual != stated:
        raise StoreCorrupted(
            f"Store.from_arrays: the rows of a stream of frames have checksum {actual:#010x}; expected {stated:#010x}. "
            f"Their bytes were damaged: load another checkpoint."
        )
    shown = np.bincount(lane, added, part.lanes).astype(np.int64)
    if (low < 0).any() or (low + shown != frames).any():
        raise ValueError(
            f"Store.from_arrays: rows show {shown.tolist()} frames; expected {(frames - low).tolist()}. "
            f"Load another checkpoint."
        )
    stream.ends.restore(lane, row, added, low)
    plane = stream.plane
    plane.widen(int((frames // plane.k - low // plane.k).max()) + 2, np.zeros_like(frames), np.zeros_like(low))
    own = {n.removeprefix("frame:"): a for n, a in arrays.items() if n.startswith("frame:")}
    _load_chunks(plane, own, frames, low)
    part.inner = stream
    part.resume(count, False)


def save_patches(patches: Patches) -> dict[str, Array]:
    """Changed rows as arrays."""
    held = list(patches.held.items())
    rows = [(t & ~PATCH, p.lane, p.count, p.superseded) for t, p in held]
    values = [(row, column, v) for row, (_, p) in enumerate(held) for column, v in p.values.items()]
    return {
        "patch:made": np.array([patches.made], np.int64),
        "patch:row": np.array(rows, np.int64).reshape(-1, 4),
        "patch:value": np.array([(r, c, len(v)) for r, c, v in values], np.int64).reshape(-1, 3),
        "patch:data": np.frombuffer(b"".join(v for _, _, v in values), np.uint8),
    }


def load_patches(patches: Patches, arrays: Mapping[str, Array], low: Array, high: Array, columns: int) -> None:
    """The inverse of `save_patches`, where lane e has rows `low[e]` to `high[e] - 1`. Raises ValueError."""
    (made,) = expect(arrays, "patch:made", np.int64, (1,)).tolist()
    rows = expect(arrays, "patch:row", np.int64, (None, 4)).tolist()
    values = expect(arrays, "patch:value", np.int64, (None, 3))
    data = bytes(expect(arrays, "patch:data", np.uint8, (int(values[:, 2].sum()),)))
    for number, lane, count, superseded in rows:
        fits = 0 <= lane < len(low) and low[lane] <= count < high[lane] and 0 < number <= made
        if not fits or superseded > made:
            raise ValueError(
                f"Store.from_arrays: patch:row has {[number, lane, count, superseded]}; expected a row of the store. "
                f"Load another checkpoint."
            )
    own: list[dict[int, bytes]] = [{} for _ in rows]
    end = 0
    for row, column, size in values.tolist():
        if not (0 <= row < len(rows) and 0 <= column < columns and size >= 1):
            raise ValueError(
                f"Store.from_arrays: patch:value has {[row, column, size]}; expected a changed row and a column. "
                f"Load another checkpoint."
            )
        own[row][column] = data[end : end + size]
        end += size
    for (number, lane, count, superseded), value in zip(rows, own, strict=True):
        patches.insert(PATCH | number, Patch(lane, count, value, superseded))
    patches.resume(made)


def expect(arrays: Mapping[str, Array], name: str, dtype: type[np.generic], shape: tuple[int | None, ...]) -> Array:
    """An array of a checkpoint, if it is what it should be; None takes any size."""
    if name not in arrays:
        raise ValueError(f"Store.from_arrays: '{name}' is missing; expected an array. Load another checkpoint.")
    array = arrays[name]
    sizes = len(array.shape) == len(shape) and all(
        want in (None, have) for have, want in zip(array.shape, shape, strict=True)
    )
    if array.dtype != np.dtype(dtype) or not sizes:
        raise ValueError(
            f"Store.from_arrays: '{name}' is {array.dtype}{list(array.shape)}; "
            f"expected {np.dtype(dtype)}{list(shape)}. Load another checkpoint."
        )
    return array

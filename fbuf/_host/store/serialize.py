"""A store's parts as flat arrays of plain dtypes and back: chunks stay encoded, nothing is pickled.

What is large is a `Lazy` source: what it gives is what was there when it was made, whatever is written later (`tracked`, and
segments, which are only appended to); it says in blocks, with marks, what has not changed since. Rows are where they lay, not
in order, so that little changes between two saves. Loading reads block by block: never more than one of them is held twice.

Damaged bytes of a chunk are found when it is read, so that the rest can be; a damaged dictionary, which many chunks need, at
once; arrays that do not fit together are refused. Rejected: decoding on the way (a checkpoint would be 100 times larger).
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fbuf._host.columns.chunked import Chunks
from fbuf._host.columns.chunked_file import FileChunks
from fbuf._host.columns.chunked_serialize import load_chunks, save_chunks
from fbuf._host.columns.frame_stream import FrameStream
from fbuf._host.columns.raw import Ring
from fbuf._host.columns.raw_file import FileRing
from fbuf._host.columns.stack_detect import Stacking
from fbuf._host.columns.stacked import Stacks
from fbuf._host.interfaces import Part
from fbuf._host.memory.lazy_array import Source, expect, lazily, steps, within
from fbuf._host.store.row_updates import PATCH, Patch, Patches
from fbuf._host.types import Array, StoreCorrupted, flat

FORMAT = 1


def geometry(lanes: int, length: int, slack: int) -> Array:
    """What says of which store arrays are."""
    return np.array([FORMAT, lanes, length, slack], np.int64)


def check_geometry(arrays: Mapping[str, Source], lanes: int, length: int, slack: int, streams: bool) -> int:
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


def save(part: Part, count: Array) -> dict[str, Any]:
    """A column as arrays, to be read later, when its lanes have int64[E] `count` rows."""
    if isinstance(part, Ring | FileRing):
        return _save_ring(part, count)
    if isinstance(part, Chunks | FileChunks):
        return save_chunks(part if isinstance(part, Chunks) else part.chunks, count)
    assert isinstance(part, Stacks)
    return _save_stacks(part, count)


def load(part: Part, arrays: Mapping[str, Source], count: Array) -> None:
    """The inverse of `save`, into a new part. Raises ValueError, and StoreCorrupted for what many rows need."""
    if isinstance(part, Ring | FileRing):
        _load_ring(part, arrays, count)
    elif isinstance(part, Chunks):
        load_chunks(part, arrays, count)
    elif isinstance(part, FileChunks):
        load_chunks(part.chunks, arrays, count, record=part.records)
        part.loaded(count)
    else:
        assert isinstance(part, Stacks)
        _load_stacks(part, arrays, count)


def _save_ring(ring: Ring | FileRing, count: Array) -> dict[str, Any]:
    return {"rows": ring.saved(count), "places": np.array([ring.places], np.int64)}


def _load_ring(ring: Ring | FileRing, arrays: Mapping[str, Source], count: Array) -> None:
    """Either kind is loaded as the other, and from a ring of another size."""
    (places,) = expect(arrays, "places", np.int64, (1,)).tolist()
    low = np.maximum(count - ring.depth, 0)
    if places < int((count - low).max(initial=1)):
        raise ValueError(
            f"Store.from_arrays: 'rows' has {places} places; expected {ring.depth} or more. Load another checkpoint."
        )
    rows = lazily(arrays, "rows", np.uint8, (min(int(count.max()), places), ring.lanes, ring.row))
    for start, block in steps(rows):
        if isinstance(ring, Ring) and places == ring.places:
            ring.restore(start, block)
            continue
        number = low + (np.arange(start, start + len(block))[:, None] - low) % places
        step, lane = np.nonzero(number < count)
        ring.put(lane, number[step, lane], block[step, lane])
    if isinstance(ring, Ring):
        ring.touched = min(int(count.max()), ring.depth)


def _checksum(*arrays: Array) -> int:
    crc = 0
    for array in arrays:
        crc = zlib.crc32(flat(np.ascontiguousarray(array)), crc)
    return crc


def _save_stacks(part: Stacks, count: Array) -> dict[str, Any]:
    """Rows as they are while it is not known what they are, and if they are no stacks; else frames, and where rows end."""
    stream = part.inner
    if not isinstance(stream, FrameStream):
        return {"stacking": np.array([part.watching, 0, 0, 0], np.int64)} | save_chunks(stream, count)
    frames = np.stack([stream.low, stream.count])
    added = stream.ends.saved(np.maximum(count - part.depth, 0), count, stream.stacking.frames)
    own = {
        "stacking": np.array([0, *dataclasses.astuple(stream.stacking)], np.int64),
        "frames": frames,
        "added": added,
        "added_checksum": np.array([_checksum(frames, added)], np.uint32),
    }
    return own | {f"frame:{n}": a for n, a in save_chunks(stream.plane, stream.count, stream.low).items()}


def _load_stacks(part: Stacks, arrays: Mapping[str, Source], count: Array) -> None:
    if "stacking" not in arrays:  # saved when stacks were not looked for
        load_chunks(part.plain(), arrays, count)
        part.resume(count, False)
        return
    watching, *sizes = expect(arrays, "stacking", np.int64, (4,)).tolist()
    if not any(sizes):
        load_chunks(part.plain(), arrays, count)
        part.resume(count, bool(watching))
        return
    stacking = Stacking(*sizes)
    if stacking not in part.candidates:
        raise ValueError(
            f"Store.from_arrays: rows are stacks of {sizes}; expected one of {list(part.candidates)}. "
            f"Load with the buffer that was saved."
        )
    stream = part.stream(stacking)
    low, frames = stream.low, stream.count = expect(arrays, "frames", np.int64, (2, part.lanes)).copy()
    added = expect(arrays, "added", np.uint8, (stream.ends.used(count), part.lanes, None))
    (stated,) = expect(arrays, "added_checksum", np.uint32, (1,)).tolist()
    actual = _checksum(np.stack([low, frames]), added)
    if actual != stated:
        raise StoreCorrupted(
            f"Store.from_arrays: the rows of a stream of frames have checksum {actual:#010x}; expected {stated:#010x}. "
            f"Their bytes were damaged: load another checkpoint."
        )
    end = stream.ends.restore(added, np.maximum(count - part.depth, 0), count, low, stacking.frames)
    if (low < 0).any() or (end != frames).any():
        raise ValueError(
            f"Store.from_arrays: rows show {(end - low).tolist()} frames; expected {(frames - low).tolist()}. "
            f"Load another checkpoint."
        )
    plane = stream.plane
    own = within(arrays, "frame:")
    needed = max(int((frames // plane.k - low // plane.k).max()) + 2, plane.ring)
    ring = int(expect(own, "state", np.int64, (7,))[5])
    plane.resize(ring if needed <= ring <= 2 * needed else needed, np.zeros_like(frames), np.zeros_like(low))
    load_chunks(plane, own, frames, low)
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


def load_patches(patches: Patches, arrays: Mapping[str, Source], low: Array, high: Array, columns: int) -> None:
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

"""Convert the columns of a store to flat arrays and back: chunks stay encoded, nothing is pickled.

Large arrays are `Lazy`: they give what was there when they were made, and name the blocks that have not changed since. Rows
and segments keep their places, so that little changes between two saves. Chunk c of a lane is row `c % ring` of the index;
`span` says which bytes of which segments `payload` holds. Loading reads block by block. A damaged chunk is found when it is
read, a damaged dictionary at once; arrays that do not fit together are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from fbuf._host.codecs import Dictionary, check_size, compressor, damaged, unpacker
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.columns.chunked_file import ChunkedFileColumn
from fbuf._host.columns.frame_stream import FrameStream, Stacking
from fbuf._host.columns.raw import RawColumn
from fbuf._host.columns.raw_file import RawFileColumn
from fbuf._host.columns.stacked import StackedColumn
from fbuf._host.memory.arena import Spans, strings
from fbuf._host.memory.file_arena import NOWHERE, FileArena
from fbuf._host.memory.lazy_array import Sources, expect, in_parts, in_small_blocks, lazily, steps, within
from fbuf._host.store.row_updates import CUT, UPDATE_BIT, RowUpdate, RowUpdates
from fbuf._host.types import Array, ColumnData, StoreCorrupted, crc_of, flat, unfit

FORMAT = 1
_MOST = 1 << 60
"""Rows that a store can have had, over all lanes: so many more fit into tickets, below `UPDATE_BIT`."""


def geometry(lanes: int, length: int, slack: int) -> Array:
    """Return the array that identifies the geometry of a store."""
    return np.array([FORMAT, lanes, length, slack], np.int64)


def check_geometry(arrays: Sources, lanes: int, length: int, slack: int, streams: bool) -> int:
    """Return the count (or lap) of the first row. Raises ValueError if the arrays are of another store."""
    wanted = geometry(lanes, length, slack).tolist()
    found = expect(arrays, "geometry", np.int64, (4,)).tolist()
    if found != wanted:
        raise unfit(f"format, lanes, length and slack are {found}", f"{wanted}", "Load with the buffer that was saved.")
    if streams == any(name.startswith("places:") for name in arrays):
        kind = ("in any order", "streams") if streams else ("streams", "in any order")
        raise unfit(f"rows were saved {kind[0]}", f"{kind[1]}", "Load with the writer that was saved.")
    first = int(expect(arrays, "first", np.uint64, (1,))[0])
    if first > _MOST:
        raise unfit(f"first is {first}", f"at most {_MOST}")
    return first


def check_counts(count: Array, lanes: int) -> None:
    """Raise ValueError unless each of int64[E] `count` is a number of rows that lanes can have had."""
    if (count < 0).any() or (count > _MOST // lanes).any():
        raise unfit(f"count is {count.tolist()}", f"0 to {_MOST // lanes} for each lane")


def save(part: ColumnData, count: Array) -> dict[str, Any]:
    """Return a column as arrays, to be read later, when its lanes have int64[E] `count` rows."""
    if isinstance(part, RawColumn | RawFileColumn):
        return {"rows": part.saved(count), "places": np.array([part.places], np.int64)}
    if isinstance(part, ChunkedColumn):
        return save_chunks(part, count)
    assert isinstance(part, StackedColumn)
    return _save_stacks(part, count)


def load(part: ColumnData, arrays: Sources, count: Array) -> None:
    """Load what `save` returned into a new column. Raises ValueError, and StoreCorrupted for what many rows need."""
    if isinstance(part, RawColumn | RawFileColumn):
        _load_ring(part, arrays, count)
    elif isinstance(part, ChunkedFileColumn):
        load_chunks(part, arrays, count, record=part.records)
        part.loaded(count)
    elif isinstance(part, ChunkedColumn):
        load_chunks(part, arrays, count)
    else:
        assert isinstance(part, StackedColumn)
        _load_stacks(part, arrays, count)


def _load_ring(ring: RawColumn | RawFileColumn, arrays: Sources, count: Array) -> None:
    """Load a raw column of either kind and of any size."""
    (places,) = expect(arrays, "places", np.int64, (1,)).tolist()
    low = np.maximum(count - ring.depth, 0)
    if places < int((count - low).max(initial=1)):
        raise unfit(f"'rows' has {places} places", f"{ring.depth} or more")
    rows = lazily(arrays, "rows", np.uint8, (min(int(count.max()), places), ring.lanes, ring.row))
    for start, block in steps(rows):
        if isinstance(ring, RawColumn) and places == ring.places:
            ring.restore(start, block)
            continue
        number = low + (np.arange(start, start + len(block))[:, None] - low) % places
        step, lane = np.nonzero(number < count)
        ring.put(lane, number[step, lane], block[step, lane])
    if isinstance(ring, RawColumn):
        ring.touched = min(int(count.max()), ring.depth)


def _save_stacks(part: StackedColumn, count: Array) -> dict[str, Any]:
    """Save chunks of rows while stacks are not recognised, else frames and row ends."""
    stream = part.inner
    if not isinstance(stream, FrameStream):
        return {"stacking": np.array([part.watching, 0, 0, 0], np.int64)} | save_chunks(stream, count)
    frames = np.stack([stream.low, stream.count])
    added = stream.ends.saved(np.maximum(count - part.depth, 0), count, stream.stacking.frames)
    arrays = {
        "stacking": np.array([0, *dataclasses.astuple(stream.stacking)], np.int64),
        "frames": frames,
        "added": added,
        "added_checksum": np.array([crc_of((frames, added))], np.uint32),
    }
    return arrays | {f"frame:{n}": a for n, a in save_chunks(stream.plane, stream.count, stream.low).items()}


def _load_stacks(part: StackedColumn, arrays: Sources, count: Array) -> None:
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
        raise unfit(f"rows are stacks of {sizes}", f"{list(part.candidates)}", "Load with the buffer that was saved.")
    stream = part.stream(stacking)
    low, frames = stream.low, stream.count = expect(arrays, "frames", np.int64, (2, part.lanes)).copy()
    added = expect(arrays, "added", np.uint8, (stream.ends.used(count), part.lanes, None))
    (stated,) = expect(arrays, "added_checksum", np.uint32, (1,)).tolist()
    actual = crc_of((np.stack([low, frames]), added))
    if actual != stated:
        raise StoreCorrupted(
            f"Store.from_arrays: the rows of a stream of frames have checksum {actual:#010x}; expected {stated:#010x}. "
            f"Their bytes were damaged: load another checkpoint."
        )
    end = stream.ends.restore(added, np.maximum(count - part.depth, 0), count, low, stacking.frames)
    if (low < 0).any() or (end != frames).any():
        raise unfit(f"rows show {(end - low).tolist()} frames", f"{(frames - low).tolist()}")
    plane = stream.plane
    frame_arrays = within(arrays, "frame:")
    needed = max(int((frames // plane.k - low // plane.k).max()) + 2, plane.ring)
    ring = int(expect(frame_arrays, "state", np.int64, (7,))[5])
    plane.resize(ring if needed <= ring <= 2 * needed else needed, np.zeros_like(frames), np.zeros_like(low))
    load_chunks(plane, frame_arrays, frames, low)
    part.inner = stream
    part.resume(count, False)


def save_updates(updates: RowUpdates) -> dict[str, Array]:
    """Return updated rows as arrays."""
    live = list(updates.live.items())
    rows = [(t & ~UPDATE_BIT, p.lane, p.count, p.superseded) for t, p in live]
    values = [(row, column, v) for row, (_, p) in enumerate(live) for column, v in p.values.items()]
    return {
        "patch:made": np.array([updates.made], np.int64),
        "patch:row": np.array(rows, np.int64).reshape(-1, 4),
        "patch:value": np.array([(r, c, len(v)) for r, c, v in values], np.int64).reshape(-1, 3),
        "patch:data": np.frombuffer(b"".join(v for _, _, v in values), np.uint8),
    }


def load_updates(updates: RowUpdates, arrays: Sources, low: Array, high: Array, columns: int) -> None:
    """Load what `save_updates` returned, where lane e has rows `low[e]` to `high[e] - 1`. Raises ValueError."""
    (made,) = expect(arrays, "patch:made", np.int64, (1,)).tolist()
    rows = expect(arrays, "patch:row", np.int64, (None, 4)).tolist()
    values = expect(arrays, "patch:value", np.int64, (None, 3))
    data = bytes(expect(arrays, "patch:data", np.uint8, (int(values[:, 2].sum()),)))
    for number, lane, count, superseded in rows:
        fits = 0 <= lane < len(low) and low[lane] <= count < high[lane] and 0 < number <= made
        if not fits or superseded > made:
            raise unfit(f"patch:row has {[number, lane, count, superseded]}", "a row of the store")
    fields: list[dict[int, bytes]] = [{} for _ in rows]
    end = 0
    for row, column, size in values.tolist():
        if not (0 <= row < len(rows) and (0 <= column < columns or column == CUT) and size >= 1):
            raise unfit(f"patch:value has {[row, column, size]}", "a changed row and a column")
        fields[row][column] = data[end : end + size]
        end += size
    for (number, lane, count, superseded), value in zip(rows, fields, strict=True):
        updates.insert(UPDATE_BIT | number, RowUpdate(lane, count, value, superseded))
    updates.resume(made)


_OPEN_BYTES = 1 << 20
"""Of rows of chunks that are not full yet, compressed together: part of the format."""
_INDEX = ("address", "length", "checksum", "dictionary")

Record = Callable[[int, int, int, bytes, int], bytes]
"""What a chunk is stored as: (lane, chunk, slot, encoded rows, checksum) -> bytes."""


def save_chunks(part: ChunkedColumn, count: Array, low: Array | None = None) -> dict[str, Any]:
    """Return all of a chunked column whose lanes have int64[E] `count` rows; only the index is read now."""
    tail, head = part.span(count, low)
    rows = _rows(part, count, part.ring)
    index = {name: array[:rows].copy() for name, array in zip(_INDEX, _index(part), strict=True)}
    for lane, (first, number) in enumerate(zip((tail % part.ring).tolist(), (head - tail).tolist(), strict=True)):
        for array in index.values():
            array[first + number :, lane] = 0
            array[max(first + number - part.ring, 0) : first, lane] = 0
    span, payload = part.arena.saved(index["address"], index["length"])
    dictionaries = dict(sorted(part.table.items()))
    current = part.coder.current
    entries = [*dictionaries.items()]
    if current is not None and current not in dictionaries.values():
        entries.append((0, current))
    number = next((i for i, (_, book) in enumerate(entries, 1) if book is current), 0)
    state = [part.k, part.closed, part.encoded, part.probed, number, part.ring, part.arena.bits]
    return {
        "state": np.array(state, np.int64),
        "packed": part.packed.copy(),
        **_save_open(part, count),
        **{name: in_small_blocks(array) for name, array in index.items()},  # zeros for chunks that have expired
        "span": span,
        "payload": payload,
        "dictionaries": in_parts(
            [(str(slot), str(d.identity), len(d.data), functools.partial(_content, d)) for slot, d in entries]
        ),
        "dictionary_slot": np.array([slot for slot, _ in entries], np.uint16),
        "dictionary_length": np.array([len(d.data) for _, d in entries], np.int64),
        "dictionary_checksum": np.array([d.crc for _, d in entries], np.uint32),
    }


def _index(part: ChunkedColumn) -> tuple[Array, ...]:
    return part.address, part.length, part.checksum, part.slot


def _live(rows: int, ring: int, tail: Array, head: Array) -> Array:
    """Return bool[rows, E], where in an index chunks `tail` to `head` of each lane are."""
    first = tail % ring
    row: Array = np.arange(rows)[:, None]
    return np.asarray((row >= first) & (row < first + head - tail) | (row < first + head - tail - ring))


def _rows(part: ChunkedColumn, count: Array, ring: int) -> int:
    """Return the number of index rows ever written."""
    return min(int((count // part.k).max(initial=0)), ring)


def _content(dictionary: Dictionary) -> Array:
    return np.frombuffer(dictionary.data.as_bytes(), np.uint8)


def _save_open(part: ChunkedColumn, count: Array) -> dict[str, Array]:
    """Return the rows of open chunks, lane by lane, compressed some lanes at a time."""
    frames, crcs = list[bytes](), list[int]()
    step = _open_step(part)
    packer = compressor(1, step * part.k * part.row, None)
    left = count % part.k
    for start in range(0, part.lanes, step):
        present = np.arange(part.k) < left[start : start + step, None]
        rows = part.open[start : start + step][present]
        frames.append(packer.compress(flat(rows)) if rows.nbytes else b"")
        crcs.append(zlib.crc32(frames[-1]))
    return {
        "open": np.frombuffer(b"".join(frames), np.uint8),
        "open_length": np.array([len(frame) for frame in frames], np.int64),
        "open_checksum": np.array(crcs, np.uint32),
    }


def _open_step(part: ChunkedColumn) -> int:
    """Return how many lanes are compressed together, which follows from the column."""
    return max(_OPEN_BYTES // max(part.k * part.row, 1), 1)


def _load_open(part: ChunkedColumn, arrays: Sources, count: Array) -> None:
    step, left = _open_step(part), count % part.k
    length = expect(arrays, "open_length", np.int64, (-(-part.lanes // step),))
    crcs = expect(arrays, "open_checksum", np.uint32, length.shape)
    if (length < 0).any():
        raise unfit("open_length is negative", "0 or more")
    data = flat(np.ascontiguousarray(expect(arrays, "open", np.uint8, (int(length.sum()),))))
    stops = np.cumsum(length).tolist()
    for i, (stop, size, crc) in enumerate(zip(stops, length.tolist(), crcs.tolist(), strict=True)):
        frame, lanes = data[stop - size : stop], slice(i * step, (i + 1) * step)
        if zlib.crc32(frame) != crc:
            raise damaged("rows of chunks that were not full", zlib.crc32(frame), crc)
        present = np.arange(part.k) < left[lanes, None]
        number = int(np.count_nonzero(present)) * part.row
        if number:
            check_size(frame, number)
        rows = np.frombuffer(unpacker(number)(frame, None) if number else b"", np.uint8)
        part.open[lanes][present] = rows.view(part.open.dtype).reshape(-1, *part.open.shape[2:]) if number else 0


def load_chunks(
    part: ChunkedColumn, arrays: Sources, count: Array, low: Array | None = None, record: Any = None
) -> None:
    """Load what `save_chunks` returned into a new column.

    Args:
      record: Called once dictionaries are known, for what a chunk is stored as; None: as it is.
    Raises:
      ValueError: the arrays do not fit together.
      StoreCorrupted: a dictionary is damaged.
    """
    k, closed, encoded, probed, current, ring, bits = expect(arrays, "state", np.int64, (7,)).tolist()
    if k != part.k:
        raise unfit(f"chunks hold {k} rows", f"{part.k}", "Load with the codec that was saved.")
    if not (0 <= closed <= _MOST and 0 <= encoded <= 1 << 62):
        raise unfit(f"{closed} chunks are closed, of {encoded} bytes", f"at most {_MOST} and {1 << 62}")
    tail, head = part.span(count, low)
    if ring < max(int((head - tail).max(initial=0)), 1):
        raise unfit(f"the index has {ring} rows", f"{int((head - tail).max())}")
    _load_open(part, arrays, count)
    rows = _rows(part, count, ring)
    live = _live(rows, ring, tail, head)
    row, lane = np.nonzero(live)
    first = tail % ring
    chunk = row + (tail - first)[lane]
    chunk += np.where(row < first[lane], ring, 0)
    here = ring == part.ring and bool(live.all())  # every chunk keeps its place in the index
    new: Any = slice(rows) if here else (row if ring == part.ring else chunk % part.ring, lane)
    for name, mine in zip(_INDEX, _index(part), strict=True):
        saved = expect(arrays, name, mine.dtype, (rows, part.lanes))
        mine[new] = saved if here else saved[live]
    _load_dictionaries(part, arrays, part.slot[new].reshape(-1), current, closed)
    part.packed = expect(arrays, "packed", np.int64, (part.lanes,)).copy()
    if (part.packed < 0).any() or (part.packed > head).any():
        raise unfit(f"packed is {part.packed.tolist()}", f"0 to {head.tolist()}")
    part.closed, part.encoded, part.probed, part.verified = closed, encoded, bool(probed), True

    span = Spans(expect(arrays, "span", np.int64, (None, 3)), bits)
    payload = lazily(arrays, "payload", np.uint8, (span.total,))
    address, length = part.address[new].reshape(-1), part.length[new].reshape(-1).astype(np.int64)
    full = length > 0
    place = span.find(address[full], length[full])
    make = None if record is None else record()
    if make is None and bits == part.arena.bits:
        part.arena.adopt(span, payload, address[full], length[full])
    else:
        which = np.flatnonzero(full)
        for some, blobs in strings(payload, place, length[full]):
            _append(part, lane[which[some]], chunk[which[some]], blobs, make)
    lost = address == NOWHERE
    empty = np.flatnonzero(~full & ~lost if isinstance(part.arena, FileArena) else ~full)
    if len(empty):
        _append(part, lane[empty], chunk[empty], [memoryview(b"")] * len(empty), make)


def _append(part: ChunkedColumn, lane: Array, chunk: Array, blobs: list[memoryview], make: Record | None) -> None:
    """Store chunks that the index knows except for their addresses."""
    at = chunk % part.ring, lane
    if make is None:
        part.address[at] = part.arena.append(blobs)
        return
    entries = zip(lane.tolist(), chunk.tolist(), part.slot[at].tolist(), blobs, part.checksum[at].tolist(), strict=True)
    part.address[at] = part.arena.append([make(e, c, s, bytes(blob), crc) for e, c, s, blob, crc in entries])
    part.arena.commit()


def _load_dictionaries(part: ChunkedColumn, arrays: Sources, used: Array, current: int, closed: int) -> None:
    sizes = expect(arrays, "dictionary_length", np.int64, (None,))
    slots = expect(arrays, "dictionary_slot", np.uint16, sizes.shape)
    crcs = expect(arrays, "dictionary_checksum", np.uint32, sizes.shape)
    counts = np.bincount(used)
    known = np.flatnonzero(counts)
    counts = counts[known]
    named = slots[slots > 0]
    strange = np.setdiff1d(known, np.append(named, 0))
    if (sizes < 1).any() or len(strange) or len(np.unique(named)) < len(named) or not 0 <= current <= len(sizes):
        raise unfit(f"chunks use dictionaries {known.tolist()}, newest {current}", f"some of {slots.tolist()}")
    contents = lazily(arrays, "dictionaries", np.uint8, (int(sizes.sum()),))
    uses = dict(zip(known.tolist(), counts.tolist(), strict=True))
    stops = np.cumsum(sizes)
    newest: Dictionary | None = None
    for i, (slot, stop, size, crc) in enumerate(
        zip(slots.tolist(), stops.tolist(), sizes.tolist(), crcs.tolist(), strict=True), 1
    ):
        book = Dictionary(bytes(np.ascontiguousarray(contents[stop - size : stop])), crc)
        if slot in uses:  # unused dictionaries are dropped
            book.slot, book.count = slot, uses[slot]
            part.table[slot] = book
        newest = book if i == current else newest
    part.coder.adopt(newest, closed * part.k)

"""A column of encoded chunks as arrays and back: its segments as they are, the index by place, dictionaries by slot.

Chunk c of a lane is row `c % ring` of the index; `address` is where it lies, a segment's number above `bits` of an offset;
`span` says which bytes of which segments `payload` holds. So a second save finds most blocks of all of them as they were, and
loading puts bytes where they lay. Into files, which have a header before each chunk, and from them, they go chunk by chunk.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fbuf._host.codecs.zstd import Dictionary, compressor, damaged, unpacker
from fbuf._host.columns.chunked import Chunks
from fbuf._host.memory.file_arena import NOWHERE, FileArena
from fbuf._host.memory.lazy_array import Source, expect, lazily, pieces
from fbuf._host.memory.segments import Spans, strings
from fbuf._host.types import Array, flat

_OPEN_BYTES = 1 << 20
"""Of rows of chunks that are not full yet, compressed together: part of the format."""
_INDEX = ("address", "length", "checksum", "dictionary")

Record = Callable[[int, int, int, bytes, int], bytes]
"""What a chunk is stored as: (lane, chunk, slot, encoded rows, checksum) -> bytes."""


def save_chunks(part: Chunks, count: Array, low: Array | None = None) -> dict[str, Any]:
    """All of a column whose lanes have int64[E] `count` rows, unread but for the index."""
    tail, head = part.span(count, low)
    rows = _rows(part, count, part.ring)
    live = _live(rows, part.ring, tail, head)
    index = {name: array[:rows].copy() for name, array in zip(_INDEX, _index(part), strict=True)}
    if not live.all():
        for array in index.values():
            array[~live] = 0
    span, payload = part.arena.saved(index["address"], index["length"])
    books = dict(sorted(part.table.items()))
    current = part.coder.current
    held = [*books.items()]
    if current is not None and current not in books.values():
        held.append((0, current))
    number = next((i for i, (_, book) in enumerate(held, 1) if book is current), 0)
    state = [part.k, part.closed, part.encoded, part.probed, number, part.ring, part.arena.bits]
    return {
        "state": np.array(state, np.int64),
        "packed": part.packed.copy(),
        **_save_open(part, count),
        **index,  # zeros for chunks that have expired
        "span": span,
        "payload": payload,
        "dictionaries": pieces(
            [(str(slot), str(d.identity), len(d.data), functools.partial(_content, d)) for slot, d in held]
        ),
        "dictionary_slot": np.array([slot for slot, _ in held], np.uint16),
        "dictionary_length": np.array([len(d.data) for _, d in held], np.int64),
        "dictionary_checksum": np.array([d.crc for _, d in held], np.uint32),
    }


def _index(part: Chunks) -> tuple[Array, ...]:
    return part.address, part.length, part.checksum, part.slot


def _live(rows: int, ring: int, tail: Array, head: Array) -> Array:
    """bool[rows, E], where in an index chunks `tail` to `head` of each lane lie."""
    first = tail % ring
    row: Array = np.arange(rows)[:, None]
    return np.asarray((row >= first) & (row < first + head - tail) | (row < first + head - tail - ring))


def _rows(part: Chunks, count: Array, ring: int) -> int:
    """Rows of the index that were ever written."""
    return min(int((count // part.k).max(initial=0)), ring)


def _content(dictionary: Dictionary) -> Array:
    return np.frombuffer(dictionary.data.as_bytes(), np.uint8)


def _save_open(part: Chunks, count: Array) -> dict[str, Array]:
    """Rows of the chunks that are still filling, lane by lane, compressed some lanes at a time: of many lanes they are many."""
    frames, crcs = list[bytes](), list[int]()
    step = _open_step(part)
    packer = compressor(1, step * part.k * part.row, None)
    left = count % part.k
    for start in range(0, part.lanes, step):
        there = np.arange(part.k) < left[start : start + step, None]
        rows = part.open[start : start + step][there]
        frames.append(packer.compress(flat(rows)) if rows.nbytes else b"")
        crcs.append(zlib.crc32(frames[-1]))
    return {
        "open": np.frombuffer(b"".join(frames), np.uint8),
        "open_length": np.array([len(frame) for frame in frames], np.int64),
        "open_checksum": np.array(crcs, np.uint32),
    }


def _open_step(part: Chunks) -> int:
    """Lanes compressed together: always the same, so that it can be known from the column."""
    return max(_OPEN_BYTES // max(part.k * part.row, 1), 1)


def _load_open(part: Chunks, arrays: Mapping[str, Source], count: Array) -> None:
    step, left = _open_step(part), count % part.k
    length = expect(arrays, "open_length", np.int64, (-(-part.lanes // step),))
    crcs = expect(arrays, "open_checksum", np.uint32, length.shape)
    if (length < 0).any():
        raise ValueError("Store.from_arrays: open_length is negative; expected 0 or more. Load another checkpoint.")
    data = flat(np.ascontiguousarray(expect(arrays, "open", np.uint8, (int(length.sum()),))))
    stops = np.cumsum(length).tolist()
    for i, (stop, size, crc) in enumerate(zip(stops, length.tolist(), crcs.tolist(), strict=True)):
        frame, lanes = data[stop - size : stop], slice(i * step, (i + 1) * step)
        if zlib.crc32(frame) != crc:
            raise damaged("rows of chunks that were not full", zlib.crc32(frame), crc)
        there = np.arange(part.k) < left[lanes, None]
        number = int(np.count_nonzero(there)) * part.row
        rows = np.frombuffer(unpacker(number)(frame) if number else b"", np.uint8)
        part.open[lanes][there] = rows.view(part.open.dtype).reshape(-1, *part.open.shape[2:]) if number else 0


def load_chunks(
    part: Chunks,
    arrays: Mapping[str, Source],
    count: Array,
    low: Array | None = None,
    record: Callable[[], Record] | None = None,
) -> None:
    """The inverse, into a new column.

    Args:
      record: Called once dictionaries are known, for what a chunk is stored as; None: as it is.
    Raises:
      ValueError: the arrays do not fit together.
      StoreCorrupted: a dictionary is damaged.
    """
    k, closed, encoded, probed, current, ring, bits = expect(arrays, "state", np.int64, (7,)).tolist()
    if k != part.k:
        raise ValueError(
            f"Store.from_arrays: chunks hold {k} rows; expected {part.k}. Load with the codec that was saved."
        )
    tail, head = part.span(count, low)
    if ring < max(int((head - tail).max(initial=0)), 1):
        raise ValueError(
            f"Store.from_arrays: the index has {ring} rows; expected {int((head - tail).max())}. Load another checkpoint."
        )
    _load_open(part, arrays, count)
    rows = _rows(part, count, ring)
    live = _live(rows, ring, tail, head)
    row, lane = np.nonzero(live)
    first = tail % ring
    chunk = row + (tail - first)[lane]
    chunk += np.where(row < first[lane], ring, 0)
    here = ring == part.ring and bool(live.all())  # all of it lies as it lay
    new: Any = slice(rows) if here else (row if ring == part.ring else chunk % part.ring, lane)
    for name, mine in zip(_INDEX, _index(part), strict=True):
        saved = expect(arrays, name, mine.dtype, (rows, part.lanes))
        mine[new] = saved if here else saved[live]
    _load_dictionaries(part, arrays, part.slot[new].reshape(-1), current, closed)
    part.packed = expect(arrays, "packed", np.int64, (part.lanes,)).copy()
    part.closed, part.encoded, part.probed = closed, encoded, bool(probed)

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


def _append(part: Chunks, lane: Array, chunk: Array, blobs: list[memoryview], make: Record | None) -> None:
    """Stores chunks that the index knows but for where they are."""
    at = chunk % part.ring, lane
    if make is None:
        part.address[at] = part.arena.append(blobs)
        return
    entries = zip(lane.tolist(), chunk.tolist(), part.slot[at].tolist(), blobs, part.checksum[at].tolist(), strict=True)
    part.address[at] = part.arena.append([make(e, c, s, bytes(blob), crc) for e, c, s, blob, crc in entries])
    part.arena.settle()


def _load_dictionaries(part: Chunks, arrays: Mapping[str, Source], used: Array, current: int, closed: int) -> None:
    sizes = expect(arrays, "dictionary_length", np.int64, (None,))
    slots = expect(arrays, "dictionary_slot", np.uint16, sizes.shape)
    crcs = expect(arrays, "dictionary_checksum", np.uint32, sizes.shape)
    counts = np.bincount(used)
    known = np.flatnonzero(counts)
    counts = counts[known]
    named = slots[slots > 0]
    strange = np.setdiff1d(known, np.append(named, 0))
    if (sizes < 1).any() or len(strange) or len(np.unique(named)) < len(named) or not 0 <= current <= len(sizes):
        raise ValueError(
            f"Store.from_arrays: chunks name dictionaries {known.tolist()}, of which {current} is the newest; expected some of "
            f"{slots.tolist()}. Load another checkpoint."
        )
    contents = lazily(arrays, "dictionaries", np.uint8, (int(sizes.sum()),))
    uses = dict(zip(known.tolist(), counts.tolist(), strict=True))
    stops = np.cumsum(sizes)
    newest: Dictionary | None = None
    for i, (slot, stop, size, crc) in enumerate(
        zip(slots.tolist(), stops.tolist(), sizes.tolist(), crcs.tolist(), strict=True), 1
    ):
        book = Dictionary(bytes(np.ascontiguousarray(contents[stop - size : stop])), crc)
        if slot in uses:  # one that no chunk needs is nobody's
            book.slot, book.count = slot, uses[slot]
            part.table[slot] = book
        newest = book if i == current else newest
    part.coder.adopt(newest, closed * part.k)

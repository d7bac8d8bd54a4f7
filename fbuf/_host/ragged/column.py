"""Keep one ragged leaf: where each row's value is, and its checksum.

The index is a ring of numpy arrays, 17 bytes a row. Values are byte strings in an arena that all leaves share, or Python
objects where they have no bytes. A row that is overwritten in the ring has expired, and its string is freed.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.memory.arena import Arena
from fbuf._host.ragged import values
from fbuf._host.types import Array

NOTHING, STRING, OBJECT = 0, 1, 2
KINDS = ("array", "text", "bytes", "any")
INDEX: dict[str, Any] = {"kind": np.uint8, "address": np.uint64, "size": np.uint32, "checksum": np.uint32}
"""What is saved of it, by place in the ring."""
_OBJECT_BYTES = 120  # of the index, for an object; what the object itself takes is the user's to know


@dataclass(frozen=True)
class RaggedLeaf:
    """What rows hold under one name.

    Attributes:
      kind: "array", "text", "bytes" or "any".
      dtype: Code of an array's dtype (`values.dtype_code`); "" for the others.
      maximum: The largest shape, for leaves that jitted code sees padded to it.
    """

    name: str
    kind: str
    dtype: str = ""
    maximum: tuple[int, ...] | None = None

    def check(self) -> None:
        """Raise ValueError unless some rows have such a leaf."""
        try:
            coded = values.dtype_code(values.dtype_of(self.dtype)) if self.kind == "array" else ""
        except TypeError:
            coded = None
        sized = self.maximum is None or all(type(n) is int and n > 0 for n in self.maximum)
        if type(self.name) is not str or self.kind not in KINDS or coded != self.dtype or not sized:
            raise ValueError(f"Records.from_arrays: leaf {self!r:.200} is invalid. Load another checkpoint.")


@dataclass
class Staged:
    """Encoded values of a batch: for each row a string, an object, or nothing."""

    kind: Array  # uint8[M]
    strings: list[bytes]
    checksums: list[int]
    objects: list[Any]
    lengths: Array | None  # int32[M, rank], -1 where there is nothing


class RaggedColumn:
    """The newest `depth` rows of each lane of one leaf. Not thread-safe."""

    def __init__(self, leaf: RaggedLeaf, lanes: int, depth: int) -> None:
        shape = (depth, lanes)
        self.leaf = leaf
        self.lanes = lanes
        self.depth = depth
        self.kind: Array = np.zeros(shape, np.uint8)
        self.address: Array = np.empty(shape, np.uint64)
        self.size: Array = np.empty(shape, np.uint32)
        self.checksum: Array = np.empty(shape, np.uint32)
        rank = None if leaf.maximum is None else len(leaf.maximum)
        self.lengths: Array | None = None if rank is None else np.empty((*shape, rank), np.int32)
        self.objects: dict[int, Any] = {}  # by place in the ring

    @property
    def row(self) -> int:
        """Return the bytes of the index a row."""
        arrays = (self.kind, self.address, self.size, self.checksum, self.lengths)
        return sum(a.nbytes for a in arrays if a is not None) // (self.depth * self.lanes)

    def nbytes(self, touched: int) -> int:
        """Return the bytes of the index when lanes have written `touched` of its rows."""
        return self.row * self.lanes * touched + _OBJECT_BYTES * len(self.objects)

    def put(self, lane: Array, count: Array, staged: Staged, addresses: Array, arena: Arena) -> list[Any]:
        """Store rows in place of older ones; return the objects of those."""
        ring = count % self.depth
        at = ring, lane
        kind = self.kind[at]
        strings = ring[kind == STRING], lane[kind == STRING]
        arena.release(self.address[strings], self.size[strings])
        gone = [self.objects.pop(key) for key in self._keys(ring, lane, kind == OBJECT)]
        self.kind[at] = staged.kind
        strings = ring[staged.kind == STRING], lane[staged.kind == STRING]
        self.address[strings] = addresses
        self.size[strings] = [len(s) for s in staged.strings]
        self.checksum[strings] = staged.checksums
        if self.lengths is not None:
            self.lengths[at] = staged.lengths
        self.objects.update(zip(self._keys(ring, lane, staged.kind == OBJECT), staged.objects, strict=True))
        return gone

    def _keys(self, ring: Array, lane: Array, which: Array) -> list[int]:
        return (ring[which] * self.lanes + lane[which]).tolist()

    def object(self, lane: int, count: int) -> Any:
        """Return the object of a row."""
        return self.objects[count % self.depth * self.lanes + lane]

    def compact(self, arena: Arena, segments: Sequence[int]) -> None:
        """Move strings out of these segments."""
        at = np.nonzero(self.kind == STRING)
        moved = arena.within(self.address[at], segments)
        where = at[0][moved], at[1][moved]
        old, size = self.address[where], self.size[where]
        self.address[where] = arena.append(arena.views(old, size.astype(np.int64)))
        arena.release(old, size)

    def deeper(self, depth: int, lane: Array, count: Array) -> RaggedColumn:
        """Return the given rows in a ring of another depth."""
        other = RaggedColumn(self.leaf, self.lanes, depth)
        old, new = (count % self.depth, lane), (count % depth, lane)
        for name in ("kind", "address", "size", "checksum", "lengths"):
            array = getattr(self, name)
            if array is not None:
                getattr(other, name)[new] = array[old]
        keyed = other.kind[new] == OBJECT
        moved = zip(self._keys(new[0], lane, keyed), self._keys(old[0], lane, keyed), strict=True)
        other.objects = {after: self.objects[before] for after, before in moved}
        return other

    def saved(self, touched: int) -> dict[str, Array]:
        """Return the index of the first `touched` places, by the names of `INDEX`; zeros where there is no string."""
        strings = self.kind[:touched] == STRING
        return {name: np.where(strings, getattr(self, name)[:touched], dtype(0)) for name, dtype in INDEX.items()}

    def load(self, index: Mapping[str, Array], rows: Array) -> tuple[Array, Array]:
        """Load what `saved` returned, when the lanes have int64[E] `rows`; return addresses and sizes int64 of the strings."""
        strings = index["kind"] == STRING
        strings &= np.arange(len(strings))[:, None] < np.minimum(rows, self.depth)
        for name in INDEX:
            getattr(self, name)[: len(strings)] = np.where(strings, index[name], 0)
        return index["address"][strings], index["size"][strings].astype(np.int64)


def stage(leaf: RaggedLeaf, rows: Sequence[Any], encode: values.Encode | None, pack: Any) -> Staged:
    """Encode values of one leaf.

    Args:
      rows: One of each row that is stored, or `values.MISSING`.
      encode: The user's `encode`.
      pack: bytes -> bytes, what is done to the bytes of each.
    Raises:
      Whatever the user's functions raise, with a note that names leaf and row.
    """
    kind: Array = np.zeros(len(rows), np.uint8)
    strings, checksums, objects = list[bytes](), list[int](), list[Any]()
    lengths = None if leaf.maximum is None else np.full((len(rows), len(leaf.maximum)), -1, np.int32)
    for i, value in enumerate(rows):
        if value is values.MISSING:
            continue
        try:
            data = values.encode(value, encode)
            data = None if data is None else pack(data)
        except Exception as error:
            error.add_note(f"fbuf: while leaf '{leaf.name}' of row {i} was encoded; nothing was stored.")
            raise
        if data is None:
            kind[i] = OBJECT
            objects.append(value)
            continue
        if len(data) >= 2**32:
            raise ValueError(f"Ragged: leaf '{leaf.name}' of row {i} takes {len(data)} bytes; expected less than 2^32.")
        kind[i] = STRING
        strings.append(data)
        checksums.append(zlib.crc32(data))
        if lengths is not None:
            lengths[i] = np.shape(value)
    return Staged(kind, strings, checksums, objects, lengths)

"""How many distinct blocks rows hold under many cuts at once, and how many there will be: for `Deduplicated.fit`.

Blocks are counted by 64-bit hashes: a million distinct ones are told apart but for a chance of 3e-8. Each word is mixed once;
a block's hash is a weighted sum of its lines', a line's one of its words', so that all cuts share most of the work.

New blocks keep coming, ever fewer: over ten Atari games their number grew by the power 0.46 to 0.99 of the rows from 2,000
rows to 20,000. The power measured between the first half of the rows and all of them misleads both ways, and too small a
table costs more than too large a one. So a power below 0.8 is moved half-way there, and one above is believed, up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from fbuf._algorithms.block_grid import Grid

LEAST_ROWS = 64
"""Fewer rows say nothing about growth."""
MOST_BYTES = 2**26
"""Bytes of rows looked at: the first so many."""
LOAD = 0.83
"""Share of places that are to be taken when the buffer is full; up to 0.9 where narrower ids are had for it."""
MOST_LOAD, NARROW_LOAD = 0.95, 0.9
USUAL_POWER = 0.8
UNIT = 32
"""Places are given in multiples of this, two at least."""
MOST_PLACES = 2**30 - 2**20
PLACE_BYTES = 19
"""Bytes of a place besides its block: its counter, its slot, and a third more slots than places."""
_CHUNK_BYTES = 2**20  # of rows hashed at once: the mixed words stay in the cache

Hashes = npt.NDArray[np.uint64]


TRIED = ((7, 12), (6, 12), (12, 28), (28, 28))
"""Lines and bytes a line of the blocks that are tried, each cut to divide the frame. Small ones suit rich pictures, large ones
plain pictures. XLA on CPU puts these together faster than others that are as small, 12 by 12 or 14 by 12; how fast they are
read, `python -m benchmarks --only deduplicated` shows."""
WORTH = 0.9
"""A block is taken in place of an earlier one of `TRIED`, which is read faster, if it makes at most this share of the bytes: 6
lines save up to 6 % against 7 in ten Atari games, and take some 5 % longer to read."""


def candidates(height: int, width: int, pixel: int) -> list[tuple[int, int]]:
    """Blocks `(rows, pixels)` worth trying for frames of `height` lines of `width` pixels of `pixel` bytes.

    They are `TRIED`, made a little larger or smaller so that they divide the frame, in whole 32-bit words.
    """
    unit = 4 // math.gcd(4, pixel)
    found = []
    for lines, length in TRIED:
        rows = -(-height // max(1, round(height / lines)))
        number = max(1, round(width * pixel / length))
        pixels = _rounded(-(-width // number), unit)
        if rows * pixels * pixel < 64:  # few lines: longer ones
            pixels = min(-(-64 // (rows * pixel * unit)), -(-width // unit)) * unit
        found.append((rows, pixels))
    return list(dict.fromkeys(found))


def _rounded(number: int, unit: int) -> int:
    """The next multiple of `unit`."""
    return -(-number // unit) * unit


class Curve(NamedTuple):
    """Distinct blocks among the first rows, at growing numbers of rows."""

    rows: tuple[int, ...]
    distinct: tuple[int, ...]

    @property
    def power(self) -> float:
        """The power of the number of rows by which distinct blocks are taken to grow."""
        if len(self.rows) < 2 or self.rows[-1] == self.rows[-2]:
            return 1.0
        seen = math.log(self.distinct[-1] / self.distinct[-2]) / math.log(self.rows[-1] / self.rows[-2])
        return min(1.0, max(seen, (seen + USUAL_POWER) / 2))

    def at(self, rows: int) -> float:
        """Distinct blocks among so many rows: counted, or foretold."""
        if rows <= self.rows[-1]:
            return float(np.interp(rows, (0, *self.rows), (0, *self.distinct)))
        return float(self.distinct[-1] * (rows / self.rows[-1]) ** self.power)

    def until(self, distinct: float) -> float:
        """The inverse of `at`: rows that hold so many distinct blocks."""
        if distinct <= self.distinct[-1]:
            return float(np.interp(distinct, (0, *self.distinct), (0, *self.rows)))
        return float(self.rows[-1] * (distinct / self.distinct[-1]) ** (1 / self.power))


def rows_looked_at(number: int, row_bytes: int) -> int:
    """How many of `number` rows are counted: all that are within `MOST_BYTES`, and at least `LEAST_ROWS`."""
    return min(number, max(LEAST_ROWS, MOST_BYTES // max(1, row_bytes)))


def places_for(distinct: float, most: int) -> int:
    """Places for so many distinct blocks; never more than `most` blocks, all distinct, would take."""
    wanted = distinct / LOAD
    for narrow in (2**8, 2**16):
        if narrow < wanted and distinct <= NARROW_LOAD * narrow:
            wanted = narrow
    number = math.ceil(min(wanted, most / MOST_LOAD) / UNIT) * UNIT
    return min(max(2 * UNIT, number), MOST_PLACES)


def table_bytes(references: int, places: int, words: int) -> int:
    """Bytes of so many ids and of a table of so many places for blocks of `words` words."""
    ids = 1 if places <= 2**8 else 2 if places <= 2**16 else 4
    return references * ids + places * (4 * words + PLACE_BYTES)


def smallest(
    curves: Sequence[Curve], cuts: Sequence[tuple[int, int]], blocks: Sequence[int], capacity: int, given: int | None
) -> int:
    """Which of `cuts` makes a full buffer smallest, a row being so many `blocks` under each; earlier ones are preferred.

    Where the table has a `given` number of places: the smallest of those that fit it, or, if none does, that which
    overfills it least.
    """

    def cost(i: int) -> tuple[float, float]:
        distinct, references = curves[i].at(capacity), capacity * blocks[i]
        words = cuts[i][0] * cuts[i][1]
        places = places_for(distinct, references) if given is None else given
        over = max(distinct / (MOST_LOAD * places), 1.0) if given is not None else 1.0
        return over, table_bytes(references, places, words)

    costs = [cost(i) for i in range(len(cuts))]
    best = 0
    for i, (over, size) in enumerate(costs):
        if (over, size) < (costs[best][0], WORTH * costs[best][1]):
            best = i
    return best


def count(leaves: Sequence[tuple[Any, Grid]], cuts: Sequence[tuple[int, int]], lanes: int = 1) -> list[Curve]:
    """Distinct blocks of all leaves together, for each cut.

    Args:
      leaves: Arrays `[R, *shape]`, with grids that say what frames they are made of.
      cuts: Rows and 32-bit words of a block.
      lanes: Rows come this many at a time; those of one lane resemble each other.
    Returns:
      A curve for each cut, at an eighth, a quarter, half and all of the rows.
    Cost: less than a second for 2,000 frames of 84 by 84 under all cuts of `candidates`; 8 bytes for each distinct block of
      each cut.
    """
    number = len(leaves[0][0])
    stops = sorted({-(-number // part) for part in (8, 4, 2, 1)})
    size = max(1, _CHUNK_BYTES // sum(grid.frames * grid.height * grid.line for _, grid in leaves))
    size = max(lanes, size // lanes * lanes)
    seen: list[Hashes] = [np.empty(0, np.uint64) for _ in cuts]
    fresh: list[list[Hashes]] = [[] for _ in cuts]
    distinct: list[list[int]] = [[] for _ in cuts]
    begin = 0
    for stop in stops:
        while begin < stop:
            end = min(begin + size, stop)
            for array, grid in leaves:
                mixed = _mix(_words(np.asarray(array[begin:end]), grid))
                for i, hashes in enumerate(_hashes(mixed, cuts)):
                    fresh[i].append(_changed(hashes, end - begin, lanes))
            begin = end
        for i in range(len(cuts)):
            seen[i] = np.unique(np.concatenate([seen[i], *fresh[i]]))
            fresh[i] = []
            distinct[i].append(len(seen[i]))
    return [Curve(tuple(stops), tuple(numbers)) for numbers in distinct]


def _words(values: npt.NDArray[Any], grid: Grid) -> npt.NDArray[np.uint32]:
    """Rows `[R, *shape]` as uint32[R * frames, height, words of a line], the last word filled up with zeros."""
    if values.dtype.name.endswith(("int4", "int2")):
        values = values.astype(np.int8)
    if grid.last:
        values = np.moveaxis(values, -1, -3)
    frames = len(values) * grid.frames
    lines = np.ascontiguousarray(values).view(np.uint8).reshape(frames, grid.height, grid.line)
    if grid.line % 4:
        lines = np.pad(lines, ((0, 0), (0, 0), (0, -grid.line % 4)))
    return np.ascontiguousarray(lines).view(np.uint32).reshape(frames, grid.height, -1)


def _mix(words: npt.NDArray[np.uint32]) -> Hashes:
    """A permutation of 64 bits in which each depends on all of the word (the finalizer of SplitMix64)."""
    x = words.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _weights(start: int, number: int) -> Hashes:
    """Odd factors, the same everywhere."""
    return _mix(np.arange(start, start + number, dtype=np.uint32)) | np.uint64(1)


def _hashes(mixed: Hashes, cuts: Sequence[tuple[int, int]]) -> list[Hashes]:
    """uint64[frames, down, across] of the blocks of each cut."""
    frames, height, width = mixed.shape
    nothing = _mix(np.zeros(1, np.uint32))  # what padding is mixed to
    lines: dict[int, Hashes] = {}
    blank: dict[int, Hashes] = {}
    out = []
    for rows, words in cuts:
        if words not in lines:
            factors = _weights(1, words)
            whole = _padded(mixed, 2, words, nothing)
            lines[words] = _stir(whole.reshape(frames, height, -1, words) @ factors)
            blank[words] = _stir(np.sum(factors * nothing, keepdims=True))
        whole = _padded(lines[words], 1, rows, blank[words])
        tiles = whole.reshape(frames, -1, rows, whole.shape[2])
        out.append(np.asarray(np.einsum("fdra,r->fda", tiles, _weights(2**31, rows))))
    return out


def _stir(x: Hashes) -> Hashes:
    """A permutation of 64 bits between the two sums, without which words swapped crosswise share factors."""
    x ^= x >> np.uint64(32)
    x *= np.uint64(0xD6E8FEB86659FD93)
    x ^= x >> np.uint64(32)
    return x


def _padded(values: Hashes, axis: int, multiple: int, filler: Hashes) -> Hashes:
    short = -values.shape[axis] % multiple
    if not short:
        return values
    pads = [(0, short if i == axis else 0) for i in range(values.ndim)]
    return np.pad(values, pads, constant_values=filler[0])


def _changed(hashes: Hashes, rows: int, lanes: int) -> Hashes:
    """Distinct hashes of `rows` rows, those left out that the row before of the same lane has in the same place."""
    each = hashes.reshape(rows, -1)
    if rows <= lanes:
        return np.unique(each)
    return np.unique(np.concatenate([each[:lanes].reshape(-1), each[lanes:][each[lanes:] != each[:-lanes]]]))

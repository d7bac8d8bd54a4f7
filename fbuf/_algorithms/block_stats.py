"""Count and extrapolate the distinct blocks of rows under many cuts at once, for `Deduplicated.fit`.

Blocks are counted by 64-bit hashes. Each word is mixed once, and the hash of a block is a weighted sum of the hashes of its
lines, so all cuts share most of the work. The number of distinct blocks grows as a power of the number of rows. The power
measured between half of the rows and all rows is noisy; a power below 0.8 is moved half-way to 0.8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fbuf._algorithms.block_grid import Grid, block_rows

LEAST_ROWS = 64
"""Least rows that show growth."""
MOST_BYTES = 2**26
"""Most bytes of rows to count."""
LOAD = 0.83
"""Target share of used places in a full buffer; up to 0.9 if narrower ids result."""
MOST_LOAD, NARROW_LOAD = 0.95, 0.9
USUAL_POWER = 0.8
UNIT = 32
"""Places are multiples of this number, at least two units."""
MOST_PLACES = 2**30 - 2**20
PLACE_BYTES = 19
"""Bytes of a place besides its block: counter, slot, and a third more index slots than places."""
_CHUNK_BYTES = 2**20  # of rows hashed at once: the mixed words stay in the cache

Hashes = npt.NDArray[np.uint64]


TRIED = ((7, 12), (4, 28), (4, 44), (12, 28))
"""Lines and bytes per line of the candidate blocks: small ones suit rich pictures, large ones plain pictures. Blocks of
(12, 12) are read more slowly."""


def candidates(height: int, width: int, pixel: int) -> list[tuple[int, int]]:
    """Return the blocks `(rows, pixels)` to try for frames of `height` lines of `width` pixels of `pixel` bytes.

    They are `TRIED`, adjusted to divide the frame in whole 32-bit words.
    """
    unit = 4 // math.gcd(4, pixel)
    found = []
    for lines, length in TRIED:
        rows = block_rows(height, lines)
        number = max(1, round(width * pixel / length))
        pixels = -(-width // (number * unit)) * unit
        if rows * pixels * pixel < 64:  # few lines: longer blocks
            pixels = min(-(-64 // (rows * pixel * unit)), -(-width // unit)) * unit
        found.append((rows, pixels))
    return list(dict.fromkeys(found))


class Curve(NamedTuple):
    """Hold the number of distinct blocks at growing numbers of rows."""

    rows: tuple[int, ...]
    distinct: tuple[int, ...]

    @property
    def power(self) -> float:
        """Return the assumed power of growth."""
        if len(self.rows) < 2 or self.rows[-1] == self.rows[-2]:
            return 1.0
        seen = math.log(self.distinct[-1] / self.distinct[-2]) / math.log(self.rows[-1] / self.rows[-2])
        return min(1.0, max(seen, (seen + USUAL_POWER) / 2))

    def at(self, rows: int) -> float:
        """Return the distinct blocks among `rows` rows: counted, or extrapolated."""
        if rows <= self.rows[-1]:
            return float(np.interp(rows, (0, *self.rows), (0, *self.distinct)))
        return float(self.distinct[-1] * (rows / self.rows[-1]) ** self.power)

    def until(self, distinct: float) -> float:
        """Return the rows that hold `distinct` distinct blocks: the inverse of `at`."""
        if distinct <= self.distinct[-1]:
            return float(np.interp(distinct, (0, *self.distinct), (0, *self.rows)))
        return float(self.rows[-1] * (distinct / self.distinct[-1]) ** (1 / self.power))


def rows_looked_at(number: int, row_bytes: int) -> int:
    """Return how many of `number` rows are counted: those within `MOST_BYTES`, and at least `LEAST_ROWS`."""
    return min(number, max(LEAST_ROWS, MOST_BYTES // max(1, row_bytes)))


def places_for(distinct: float, most: int) -> int:
    """Return the places for `distinct` blocks; at most those that `most` distinct blocks need."""
    wanted = distinct / LOAD
    for narrow in (2**8, 2**16):
        if narrow < wanted and distinct <= NARROW_LOAD * narrow:
            wanted = narrow
    number = math.ceil(min(wanted, most / MOST_LOAD) / UNIT) * UNIT
    return min(max(2 * UNIT, number), MOST_PLACES)


def table_bytes(references: int, places: int, words: int) -> int:
    """Return the bytes of `references` ids and of a table of `places` places for blocks of `words` words."""
    ids = 1 if places <= 2**8 else 2 if places <= 2**16 else 4
    return references * ids + places * (4 * words + PLACE_BYTES)


def smallest(
    curves: Sequence[Curve], cuts: Sequence[tuple[int, int]], blocks: Sequence[int], capacity: int, wanted: int | None
) -> int:
    """Return which of `cuts` makes a full buffer smallest.

    `blocks` holds the blocks of a row for each cut. With a `wanted` number of places, prefer the smallest cut that fits them,
    then the cut that exceeds them least.
    """

    def cost(i: int) -> tuple[float, float]:
        distinct, references = curves[i].at(capacity), capacity * blocks[i]
        words = cuts[i][0] * cuts[i][1]
        places = places_for(distinct, references) if wanted is None else wanted
        over = max(distinct / (MOST_LOAD * places), 1.0) if wanted is not None else 1.0
        return over, table_bytes(references, places, words)

    return min(range(len(cuts)), key=cost)


def count(leaves: Sequence[tuple[Any, Grid]], cuts: Sequence[tuple[int, int]], lanes: int = 1) -> list[Curve]:
    """Count the distinct blocks of all leaves together, for each cut.

    Args:
      leaves: Arrays `[R, *shape]` with their grids.
      cuts: Rows and 32-bit words of a block.
      lanes: Number of interleaved lanes; rows of one lane resemble each other.
    Returns:
      A curve for each cut, at an eighth, a quarter, half and all of the rows.
    Cost: less than a second for 2,000 frames of 84 by 84; 8 bytes for each distinct block of each cut.
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
    """Convert rows `[R, *shape]` to uint32[R * frames, height, words of a line]; the last word is padded with zeros."""
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
    """Mix words to 64 bits with the finalizer of SplitMix64."""
    x = words.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def _weights(start: int, number: int) -> Hashes:
    """Return fixed odd factors."""
    return _mix(np.arange(start, start + number, dtype=np.uint32)) | np.uint64(1)


def _hashes(mixed: Hashes, cuts: Sequence[tuple[int, int]]) -> list[Hashes]:
    """Return uint64[frames, down, across], hashes of the blocks of each cut."""
    frames, height, width = mixed.shape
    nothing = _mix(np.zeros(1, np.uint32))  # the hash of padding
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
    """Mix between the two sums; otherwise words swapped crosswise share factors."""
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
    """Return the distinct hashes, except blocks equal to the previous row of the same lane."""
    each = hashes.reshape(rows, -1)
    if rows <= lanes:
        return np.unique(each)
    return np.unique(np.concatenate([each[:lanes].reshape(-1), each[lanes:][each[lanes:] != each[:-lanes]]]))

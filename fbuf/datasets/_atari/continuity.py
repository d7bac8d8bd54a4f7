"""Decide which dumps of a run follow one another without a gap, so that windows may cross between them.

Two stretches of rows are contiguous if the counter of the first ends where that of the second begins; or, for a dump whose
counter was reset (the last of a run), if its rows from the cycle before equal those of the preceding dump. Also, no more
pixels may change between their frames than within them, and rows of zeros may come only after an end. In doubt the
row before the boundary counts as truncated: a cut too many costs one row, a false boundary makes transitions that never were.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

SAME_ROWS = 64  # places before a dump's last of which it keeps the sums
_ENOUGH = 8  # rows that must be alike, not all one frame

Frame = np.ndarray[Any, Any]


class Stretch(NamedTuple):
    """Consecutive rows of one dump, and what is known of their ends."""

    number: int  # of the dump in the data set
    source: int  # of the dump in the run
    rows: int  # there are
    places: int  # of the ring, with those left out
    first: int | None  # rows added to the ring before; None: not known
    sure: bool  # False: to be used only if it follows what comes before
    lead: int  # rows at the beginning that are zeros, and no steps if zeros are put before episodes
    padded: bool | None  # whether they are
    ended: int  # rows up to the end of its first episode, with its last; 0: no episode ends here
    terminal: bool  # the last row ends an episode
    change: int  # the most pixels that change between two frames in a row; -1: not known
    begin: Frame  # the first frame
    end: Frame  # the last
    capacity: int
    head: int  # of the ring
    tail: Sequence[int]  # sums of rows at the places before the ring's last, the last of them last


class Use(NamedTuple):
    """The rows `[begin, stop)` of a stretch that are used; `cut`: nothing follows the last of them."""

    number: int
    begin: int
    stop: int
    cut: bool


class Boundary(NamedTuple):
    """The boundary between two dumps that both exist, or the end."""

    before: int
    after: int | None
    joined: bool
    why: str


def boundaries(stretches: Sequence[Stretch], partial: str = "keep") -> tuple[list[Use], list[Boundary]]:
    """Return the rows to use and the boundaries of a run's stretches, oldest first.

    Args:
      stretches: By dump of the run, the older part of each first.
      partial: "keep", or "drop": after a gap, use rows from the first episode's beginning on.
    """
    padded = not any(one.padded is False for one in stretches)  # where no episode begins nothing tells otherwise
    uses: list[Use] = []
    found: list[Boundary] = []
    last: Stretch | None = None  # the newest of which a row is used
    stop: int | None = None  # rows added before whatever would follow it
    main: Stretch | None = None  # the newest that tells which rows lay before the ring's last place
    change: dict[int, int] = {}  # by dump of the run
    for stretch in stretches:
        change[stretch.source] = max(change.get(stretch.source, -1), stretch.change)
    shift: int | None = None  # what a reset counter lacks
    begins: int | None = 0  # rows added before a place where an episode is known to begin
    waiting = False  # for such a place
    for stretch in stretches:
        first = stretch.first
        if not stretch.sure:
            shift = stop if main is not None and stop is not None and _same_rows(main, stretch) else None
            if shift is None:
                continue
            first = shift
        elif first is None and shift is not None:
            first = stop
        begin = stretch.lead if padded else 0
        why = _gap(last, stop, first)
        if not why and last is not None and not last.terminal:
            why = _contradiction(last, stretch, begin, max(change[last.source], change[stretch.source]))
        if why and uses and last is not None:
            uses[-1] = uses[-1]._replace(cut=not last.terminal)
        if last is not None and last.source != stretch.source:
            found.append(Boundary(last.source, stretch.source, not why, why or "the counters go on"))
        if why:
            waiting = partial == "drop" and not begin and (first is None or first not in (0, begins))
        if waiting:
            begin, waiting = (stretch.ended, False) if stretch.ended else (stretch.rows, True)
        if begin < stretch.rows:
            uses.append(Use(stretch.number, begin, stretch.rows, False))
            last = stretch
        elif why:
            last = None  # none of its rows is used: what comes next follows nothing
        stop = None if first is None else first + stretch.places
        begins = stop if begin == stretch.rows and not waiting else None
        main = stretch if stretch.sure and stretch.head == stretch.capacity - 1 else None
    if uses and last is not None:
        uses[-1] = uses[-1]._replace(cut=not last.terminal)
    return uses, found


def _gap(last: Stretch | None, stop: int | None, first: int | None) -> str:
    """Return why the counters show a gap; "" if they do not."""
    if last is None:
        return "nothing comes before"
    if stop is None or first is None:
        return "the counters do not tell"
    if first > stop:
        return f"{first - stop} rows are missing"
    return f"{stop - first} rows come twice" if first < stop else ""


def _contradiction(last: Stretch, stretch: Stretch, begin: int, change: int) -> str:
    """Return what in the rows contradicts that the stretch follows; "" for nothing."""
    if begin:
        return "rows of zeros follow a row that ended nothing"
    changed = int(np.count_nonzero(last.end != stretch.begin))
    if 0 <= change < changed:
        return f"{changed} pixels change, but at most {change} within the dumps"
    return ""


def _same_rows(main: Stretch, loose: Stretch) -> bool:
    """Return whether a dump still holds rows of the preceding dump, at the same places."""
    if main.capacity != loose.capacity:
        return False
    number = min(len(main.tail), len(loose.tail), loose.capacity - 1 - loose.head)
    ours, theirs = list(loose.tail[len(loose.tail) - number :]), list(main.tail[len(main.tail) - number :])
    return number >= _ENOUGH and ours == theirs and len(set(ours)) > 1


def pack(frame: Frame) -> str:
    """Return a frame as text."""
    return base64.b85encode(zlib.compress(np.ascontiguousarray(frame).tobytes(), 9)).decode()


def unpack(text: str, shape: tuple[int, ...], dtype: str = "uint8") -> Frame:
    """Return the frame of a text of `pack`. Raises ValueError: the text is damaged."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    try:
        data = zlib.decompressobj().decompress(base64.b85decode(text), size + 1)
    except zlib.error as error:
        raise ValueError(f"a frame is damaged ({error})") from None
    if len(data) != size:
        raise ValueError(f"a frame has {len(data)} bytes; expected {size}")
    return np.frombuffer(data, dtype).reshape(shape)

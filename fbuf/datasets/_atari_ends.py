"""What is kept of a converted dump, so that it can be told which others it follows: the ends of its parts, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fbuf.datasets._atari_ring import BLANKS, Part, Ring, in_order
from fbuf.datasets._atari_volumes import Volumes
from fbuf.datasets._seams import Stretch, pack, unpack

FRAME = (84, 84)


class Ended(Protocol):
    """A part that was converted."""

    part: Part
    volumes: Volumes
    ends: int
    ended: int  # rows up to the end of the first episode; 0: none ends
    terminal: bool  # the last row ends an episode
    change: int
    begin: np.ndarray[Any, Any] | None
    end: np.ndarray[Any, Any] | None
    leading: dict[int, bool]  # of the places that may be zeros: whether they are


def describe(dump: Ring, made: Sequence[Ended]) -> list[dict[str, Any]]:
    """What `stretches` needs to know of each part, as JSON."""
    leading = {place for one in made for place, zero in one.leading.items() if zero}
    run: set[int] = set()
    for place in in_order(dump)[:BLANKS].tolist():
        if place not in leading:
            break
        run.add(place)
    run |= {one.part.begin for one in made if not one.part.sure} & leading
    return [
        {
            "pieces": one.volumes.pieces,
            "rows": one.volumes.rows,
            "places": one.part.stop - one.part.begin,
            "first": one.part.first,
            "sure": one.part.sure,
            "lead": len([place for place in run if one.part.begin <= place < one.part.stop]),
            "ends": one.ends,
            "ended": one.ended,
            "terminal": one.terminal,
            "change": one.change,
            "begin": None if one.begin is None else pack(one.begin),
            "end": None if one.end is None else pack(one.end),
        }
        for one in made
    ]


def stretches(meta: dict[str, Any]) -> list[Stretch]:
    """The stretches of a dump, from what its pieces keep."""
    number = int(meta["piece"])
    blank = np.zeros(FRAME, np.uint8)
    return [
        Stretch(
            number=part["pieces"][0][0] if part["pieces"] else -1,
            source=number,
            rows=part["rows"],
            places=part["places"],
            first=part["first"],
            sure=part["sure"],
            lead=part["lead"],
            padded=meta["padded"],
            ended=part["ended"],
            terminal=part["terminal"],
            change=part["change"],
            begin=blank if part["begin"] is None else unpack(part["begin"], FRAME),
            end=blank if part["end"] is None else unpack(part["end"], FRAME),
            capacity=meta["capacity"],
            head=meta["add_count"] % meta["capacity"],
            tail=meta["tail"],
        )
        for part in meta["parts"]
    ]

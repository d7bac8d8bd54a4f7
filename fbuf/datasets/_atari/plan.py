"""List what a folder holds of a run, and assemble the data set that its segments make."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fbuf._core.progress import Progress
from fbuf._formats import dataset
from fbuf._formats.dataset import manifest
from fbuf._host.types import StoreCorrupted
from fbuf.datasets._atari.continuity import Stretch, Use, boundaries, unpack
from fbuf.datasets._atari.segment import FRAME, RUNS, all_numbers

KIND = "atari_dqn"
SETTINGS = {
    "agent": "DQN (Nature), Dopamine",
    "frame_skip": 4,
    "sticky_actions": 0.25,
    "observation": "84x84 grey, maximum of the last two frames",
    "most_steps_an_episode": 27_000,
}
Selection = Iterable[int] | int | None


@dataclass(frozen=True)
class Request:
    """What a caller asks of a run. `call` is the caller's function, for messages."""

    call: str
    id: str
    path: Path
    source: str | os.PathLike[str] | None = None
    dumps: list[int] | None = None
    download: bool | str = True
    workers: int | None = None
    progress: Progress = False
    codec: Any = None
    on_corrupt: str = "raise"
    partial: str = "keep"


class Existing(NamedTuple):
    """The contents of a data set's folder."""

    dumps: dict[int, dict[str, Any]]  # dumps of the run that are whole: what is kept with each
    schema: dataset.Schema | None  # of the first
    about: dict[str, Any] | None  # of the finished data set


def find_existing(call: str, path: Path) -> Existing:
    """Return the contents of a folder.

    Raises:
      ValueError: it has other contents.
    """
    found: dict[int, dict[str, Any]] = {}
    committed = dataset.committed(path)
    for info in committed.values():
        if not {"piece", "made"} <= set(info.meta):
            raise ValueError(f"{call}: {path} is of another kind; expected atari_dqn. Give another root=.")
        if "parts" in info.meta:  # the last of its dump
            wanted = {number: rows for part in info.meta["parts"] for number, rows in part["pieces"]}
            got = {n: committed[n] for n in wanted if n in committed}
            if {n: one.rows for n, one in got.items() if one.meta["made"] == info.meta["made"]} == wanted:
                found[info.meta["piece"]] = info.meta
    try:
        about = manifest.load(path).meta
    except (FileNotFoundError, StoreCorrupted):  # it is written again
        about = None
    schema = next((info.schema for info in committed.values()), None)
    return Existing(dict(sorted(found.items())), schema, about)


def selected(call: str, dumps: Selection) -> list[int] | None:
    """Return numbers of dumps, ascending; None: all.

    Raises:
      TypeError, ValueError: they are invalid.
    """
    if dumps is None:
        return None
    numbers = list(dumps) if isinstance(dumps, Iterable) else [dumps]
    for number in numbers:
        if isinstance(number, bool) or not hasattr(number, "__index__") or not 0 <= number < RUNS:
            raise TypeError(f"{call}: dumps has {number!r}; expected numbers of dumps, as dumps=range(10).")
    if not numbers:
        raise ValueError(f"{call}: dumps is empty; expected numbers of dumps, as dumps=range(10), or None for all.")
    return sorted({int(number) for number in numbers})


def discard(path: Path, number: int) -> None:
    """Remove all segments of a dump."""
    for one in all_numbers(number):
        dataset.discard(path, one)


class Whole(NamedTuple):
    """The manifest of a finished data set: the rows used of each segment, and the metadata."""

    used: list[dataset.SegmentRows]
    meta: dict[str, Any]


def whole(
    ask: Request, now: Existing, wanted: list[int], source: str, listed: list[int], skipped: Mapping[int, str]
) -> Whole:
    """Return which rows of which segments make the data set.

    Raises:
      FileNotFoundError: there is no segment.
    """
    metas = {number: meta for number, meta in now.dumps.items() if number in wanted}
    if not metas:
        raise FileNotFoundError(
            errno.ENOENT, f"{ask.call}: no dump of {ask.id} is whole at {ask.path}. See the warnings before"
        )
    uses, found = boundaries([stretch for number in sorted(metas) for stretch in stretches(metas[number])], ask.partial)
    if not uses:
        raise ValueError(f"{ask.call}: dumps {sorted(metas)} of {ask.id} have no row that can be used.")
    game, _, run = ask.id.partition("/")
    parts = {part["pieces"][0][0]: part for m in metas.values() for part in m["parts"] if part["pieces"]}
    meta = {
        "kind": KIND,
        "id": ask.id,
        "game": game,
        "run": int(run),
        "source": source,
        "selected": ask.dumps,
        "partial": ask.partial,
        "listed": listed,
        "skipped": {str(number): why for number, why in sorted(skipped.items()) if number not in now.dumps},
        "rows": sum(use.stop - use.begin for use in uses),
        "episodes": sum(parts[use.number]["ends"] for use in uses),
        "settings": SETTINGS,
        "boundaries": [boundary._asdict() for boundary in found],
        "pieces": {
            str(n): {key: m[key] for key in ("capacity", "add_count", "stack", "horizon", "blanks", "files")}
            for n, m in sorted(metas.items())
        },
    }
    return Whole([one for use in uses for one in _volumes(use, parts[use.number]["pieces"])], meta)


def stretches(meta: dict[str, Any]) -> list[Stretch]:
    """Return the stretches of a dump from its metadata."""
    number = int(meta["piece"])
    blank = np.zeros(FRAME, np.uint8)
    return [
        Stretch(
            number=part["pieces"][0][0] if part["pieces"] else -1,
            source=number,
            padded=meta["padded"],
            begin=blank if part["begin"] is None else unpack(part["begin"], FRAME),
            end=blank if part["end"] is None else unpack(part["end"], FRAME),
            capacity=meta["capacity"],
            head=meta["add_count"] % meta["capacity"],
            tail=meta["tail"],
            **{key: part[key] for key in ("rows", "places", "first", "sure", "lead", "ended", "terminal", "change")},
        )
        for part in meta["parts"]
    ]


def is_finished(path: Path, said: Whole) -> bool:
    """Return whether the data set's manifest already says this."""
    try:
        now = manifest.load(path)
    except (FileNotFoundError, StoreCorrupted):
        return False
    infos = dataset.committed(path)
    return now.meta == said.meta and [(p.number, p.begin, p.stop, p.cut, p.save) for p in now.segments] == [
        (u.number, u.begin, u.stop, u.cut, infos[u.number].save) for u in said.used if u.number in infos
    ]


def _volumes(use: Use, segments: list[list[int]]) -> list[dataset.SegmentRows]:
    """Return the rows of a part, by the segments that hold them."""
    used, at = [], 0
    for number, rows in segments:
        begin, stop = max(use.begin - at, 0), min(use.stop - at, rows)
        at += rows
        if begin < stop:
            used.append(dataset.SegmentRows(number, begin, stop, use.cut and at >= use.stop))
    return used

"""The windows of `fbuf.views.Sequence` in plain Python, from a list of episodes: which there are, and what each learns.

Everything is enumerated, as the docstring of `Sequence` says it. Rows of a lane are counted from 0.
"""

import dataclasses
import itertools

import numpy as np

ENDS = ("terminated", "truncated", "cut", "id", "running")
"""How an episode ends: by a flag, by `Buffer.cut`, by another id in the next row, or not yet (the last of a lane)."""


@dataclasses.dataclass(frozen=True)
class Episode:
    steps: int  # without the reset row
    how: str


@dataclasses.dataclass(frozen=True)
class Window:
    anchor: int  # the row that is drawn
    by: int  # the row that completes it
    rows: tuple  # int or None, by position
    first: tuple  # bool, by position: `is_first`
    learnt: tuple  # bool, by position

    @property
    def learns(self):
        return {row for row, learnt in zip(self.rows, self.learnt, strict=True) if learnt}


class Lane:
    """The rows of a list of episodes. An id changes with every episode."""

    def __init__(self, episodes, next_step):
        self.first, self.last, self.number = [], [], []  # of each row: of its episode
        self.terminated, self.truncated, self.reset, self.cut_after = [], [], [], []
        self.ended, self.by_id = (
            [],
            [],
        )  # of each row: whether its episode has ended, and whether the next row's id tells
        for number, episode in enumerate(episodes):
            has_reset = next_step and episode.how in ("terminated", "truncated")
            begin, count = len(self.first), episode.steps + has_reset
            for i in range(count):
                final = i == episode.steps - 1
                self.first.append(begin)
                self.last.append(begin + count - 1)
                self.number.append(number)
                self.terminated.append(final and episode.how == "terminated")
                self.truncated.append(final and episode.how == "truncated")
                self.reset.append(i == episode.steps)
                self.cut_after.append(final and episode.how == "cut")
                self.ended.append(episode.how != "running")
                self.by_id.append(episode.how == "id")

    def __len__(self):
        return len(self.first)

    @property
    def rows(self):
        flags = {"terminated": np.array(self.terminated, bool), "truncated": np.array(self.truncated, bool)}
        number, ids = np.arange(len(self), dtype=np.int32), np.array(self.number, np.int32)
        return {"number": number, "id": ids, **flags}

    def until(self, count):
        """Return the lane after its first `count` rows: an episode goes on until its last row, or the next id, arrives."""
        lane = Lane([], False)
        for name, values in vars(self).items():
            setattr(lane, name, values[:count])
        lane.ended = [lane.ended[r] and lane.last[r] + lane.by_id[r] < count for r in range(count)]
        lane.last = [min(last, count - 1) for last in lane.last]
        return lane

    def starts(self, row):
        return self.first[row] == row


def windows(view, lane, oldest=0):
    """Return every window that can be drawn, in order, of the rows held: those from `oldest` on."""
    found = [
        _across(view, lane, row) if view.boundary == "cross" else _within(view, lane, row) for row in range(len(lane))
    ]
    there = [w for w in found if w is not None and any(w.learnt)]
    return [w for w in there if _least_needed(view, lane, w.anchor) >= oldest]


def _least_needed(view, lane, anchor):
    """Return the oldest row that must be held: all up to `at` positions before the anchor, or from the episode's start."""
    least = anchor - view.at * view.dilation
    return least if view.boundary == "cross" else max(least, lane.first[anchor])


def _across(view, lane, anchor):
    rows = [anchor + k * view.dilation for k in range(view.length)]
    if anchor % view.stride or rows[-1] >= len(lane):
        return None
    return _window(view, lane, anchor, rows[-1], rows)


def _within(view, lane, anchor):
    first, last = lane.first[anchor], lane.last[anchor]
    after = (view.length - 1 - view.at) * view.dilation
    strided = (anchor - first) % view.stride == 0
    closing = lane.ended[anchor] and anchor + after == last
    if view.boundary == "stop":
        if anchor + after > last or not (strided or closing):
            return None
    else:
        if anchor + after > last and not lane.ended[anchor]:
            return None
        if not strided and not (closing and view.at):
            return None
    rows = [anchor + (k - view.at) * view.dilation for k in range(view.length)]
    rows = [row if first <= row <= last else None for row in rows]
    return _window(view, lane, anchor, min(anchor + after, last), rows)


def _window(view, lane, anchor, by, rows):
    is_first = []
    for k, row in enumerate(rows):
        since = () if row is None else range(row - view.dilation + 1 if k else row, row + 1)
        is_first.append(any(r >= 0 and lane.starts(r) for r in since))
    learnt = []
    for k, row in enumerate(rows):
        warm = k >= view.burn_in or any(is_first[: k + 1])
        followed = all(k + i < len(rows) and rows[k + i] is not None for i in range(view.bootstrap + 1))
        ends = any(r is not None and lane.terminated[r] for r in rows[k:])
        learnt.append(row is not None and not lane.reset[row] and warm and (followed or ends))
    return Window(anchor, by, tuple(rows), tuple(is_first), tuple(learnt))


def unlearnt(view, lane, oldest=0):
    """Return the rows held that no window learns, reset rows aside."""
    learnt = set(itertools.chain.from_iterable(window.learns for window in windows(view, lane, oldest)))
    return {row for row in range(oldest, len(lane)) if row not in learnt and not lane.reset[row]}


def reaches_every_step(view):
    """Whether the view promises that a whole episode (with "stop", of at least `length` rows) is learnt."""
    return view.dilation == 1 and view.stride <= view.length - view.burn_in - view.bootstrap


def missed(view, lane, episode_first):
    """Return the rows of a whole episode that the promise excepts, None if there is no promise for it."""
    first, last = episode_first, lane.last[episode_first]
    if not (reaches_every_step(view) and lane.ended[first]):
        return None
    if view.boundary == "stop" and last - first + 1 < view.length:
        return set(range(first, last + 1))
    terminal = any(lane.terminated[first : last + 1])
    return set() if terminal else set(range(max(first, last - view.bootstrap + 1), last + 1))

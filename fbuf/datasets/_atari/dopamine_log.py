"""Interpret a dump of Dopamine's circular buffer: which rows were written, in which order.

A dump is the arrays of a ring of C rows as in memory, written whenever a step leaves the write head on the ring's last
place. With `add_count` = A rows added and the head at A mod C, places from the head on hold the cycle *before*, or, while
A < C, memory never written. So the last place of dump N > 0 is the row that follows dump N - 1, and closes the gap between
the two. Three rows of zeros precede each episode; they are not steps. An episode's first step adds four rows, so the head can
jump over C - 1 and a cycle is not dumped; only `add_count` shows it. The final dump has `add_count` set to the head.
`invalid_range` names rows whose return or stack crosses the head; it is compared with the head, and may be missing.

Source: Dopamine's `circular_replay_buffer.py` and batch_rl's `logged_replay_buffer.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
BLANKS = 3  # rows of zeros before an episode: Dopamine's stack, less one
_MOST = 0.99  # of episodes, that begin with them where a writer puts them


class Part(NamedTuple):
    """Places `[begin, stop)` of the files, which were added one after another."""

    begin: int
    stop: int
    first: int | None  # rows added to the ring before the first of them; None: not known
    sure: bool  # False: it may be of another cycle, which only the neighbouring piece can tell


class Ring(NamedTuple):
    """A dump, by its counters."""

    capacity: int
    add_count: int
    head: int
    full: bool
    before: Part | None  # older than `main`
    main: Part | None
    stack: int | None  # of the agent, from `invalid_range`; None if that does not fit to the head
    horizon: int | None
    cuts: frozenset[int]  # places after which nothing is known, as `invalid_range` says beyond what the head does


def ring(number: int, capacity: int, add_count: int, invalid_range: Array) -> Ring:
    """Interpret the counters of dump `number`.

    Raises:
      ValueError: they cannot be those of a ring of `capacity` rows.
    """
    if capacity < BLANKS + 1:
        raise ValueError(f"has {capacity} rows; expected more than {BLANKS}")
    if add_count < 0:
        raise ValueError(f"add_count is {add_count}; expected how many rows were added, at least 0")
    head, full = add_count % capacity, add_count >= capacity
    named = [int(place) for place in invalid_range]
    if any(not 0 <= place < capacity for place in named):
        raise ValueError(f"invalid_range is {named[:8]}; expected places from 0 to {capacity - 1}")
    follow = all((place - named[0]) % capacity == i for i, place in enumerate(named))
    horizon = (head - named[0]) % capacity if named else 0
    fits = bool(named) and follow and 0 < horizon < len(named)
    cumulative = full or number == 0
    main = Part(0, head, add_count - head if cumulative else None, True) if head else None
    before = None
    if full:
        before = Part(head, capacity, add_count - capacity, True)
    elif number > 0:
        before = Part(capacity - 1, capacity, None, False)
    ring_ = Ring(capacity, add_count, head, full, before, main, None, None, frozenset(named))
    return ring_._replace(stack=len(named) - horizon, horizon=horizon, cuts=frozenset()) if fits else ring_


def in_order(of: Ring) -> Array:
    """Return the places known to be consecutive in time, oldest first: int64[...]."""
    parts = [part for part in (of.before, of.main) if part is not None and part.sure]
    return np.concatenate([np.arange(part.begin, part.stop) for part in parts] or [np.zeros(0, np.int64)])


class Blanks(NamedTuple):
    """The places that may hold rows of zeros, by actions, rewards and ends."""

    padded: bool | None  # whether the writer has put them before episodes; None: no episode begins in this piece
    place: Array  # bool[C], a row of zeros if its frame is one
    lead: Array  # int64[...], places at the beginning: rows of zeros if an end lies before the piece


def blanks(of: Ring, action: Array, reward: Array, terminal: Array) -> Blanks:
    """Find rows of zeros after the ends of episodes.

    All but 1 % of the dump's episodes must begin with them: a game may begin with a dark screen and an idle agent, but not
    every time; and one torn place must not turn steps into zeros.
    """
    order = in_order(of)
    zero = ((action == 0) & (reward == 0) & (terminal == 0))[order]
    begins = np.flatnonzero(terminal[order] != 0) + 1
    if of.main is not None and len(order) and (of.before or of.main).first == 0:
        begins = np.concatenate([[0], begins])
    whole = begins[begins + BLANKS <= len(order)]
    begun = zero[whole[:, None] + np.arange(BLANKS)].all(axis=1)
    padded = bool(begun.mean() >= _MOST) if len(whole) else None
    place = np.zeros(of.capacity, bool)
    around = (begins[:, None] + np.arange(BLANKS)).reshape(-1)
    around = around[around < len(order)]
    if padded is not False:
        place[order[around[zero[around]]]] = True
    leading = np.zeros(0, np.int64)
    if len(order) and (of.before or of.main).first != 0:  # type: ignore[union-attr]
        run = int(np.argmin(np.append(zero[:BLANKS], False)))
        leading = order[:run]
    if of.before is not None and not of.before.sure:  # its one row comes first, or is not used
        last = of.capacity - 1
        if action[last] == 0 and reward[last] == 0 and terminal[last] == 0:
            leading = np.append(leading, last)
    return Blanks(padded, place, leading)

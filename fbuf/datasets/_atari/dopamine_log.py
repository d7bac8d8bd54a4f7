r"""What a dump of Dopamine's circular buffer holds: the rows that were written, oldest first.

The files of a piece are the arrays of a ring of C rows as they lay in memory, dumped by the agent that collected them
(`OutOfGraphLoggedReplayBuffer`) whenever a step left the write head on the ring's last place. So, with
`add_count` = A rows added until then and the head at A mod C:

* Places from the head on hold rows of the cycle *before*, or, while A < C, what the memory held before the ring was used:
  never written. At a dump the head is at C - 1: so the last place of piece N > 0 does not follow the place in front of it,
  but is the row that was added a million rows earlier: the one that follows the last row of piece N - 1. Put in front,
  it closes the gap between the two pieces: they hold rows [NC - 1, (N + 1)C - 1) of the run, and a run whose dumps are all
  there is gapless.
* Before each episode lie three rows of zeros, so that a stack of four can be read back from its first frame. They are no
  steps of the agent, are never drawn by Dopamine, and are left out here, where views fill up stacks themselves. A piece has
  them if what follows the ends in it is zeros.
* Because an episode's first step adds four rows at once, the head can jump over C - 1. Then a cycle is not dumped, and
  pieces with following numbers are a million rows apart: which `add_count` tells, and nothing else does. (Runs that "lack
  piece 50" seem to be these.)
* After the last step the ring is dumped once more, with `add_count` set to the head: then it says how many rows of this
  cycle there are, and nothing of the cycles before.
* `invalid_range` names the rows whose n-step return or stack would reach over the head: h places before it and k from it on,
  for an agent with k frames a stack and h steps. Read in the order in which they were added, these are the piece's first
  and last rows, which are as good as any where the neighbouring piece is there. It says nothing that the head does not, and
  is compared with it. Rows that it names elsewhere are made the last of an episode: what follows them is not known. A copy
  that lacks this file is read as well.

torchrl's loader reads places 0 to C - 1 as if they were one after the other, joins every last place to the next piece, and
gives out the rows of zeros, those never written and the row from a million steps earlier as steps.

Source: Dopamine's `circular_replay_buffer.py` and batch_rl's `logged_replay_buffer.py`, read for what they write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

BLANKS = 3  # rows of zeros before an episode: Dopamine's stack, less one
_MOST = 0.99  # of episodes, that begin with them where a writer puts them


class Part(NamedTuple):
    """Places `[begin, stop)` of the files, which were added one after another."""

    begin: int
    stop: int
    first: int | None  # rows added to the ring before the first of them; None: not known
    sure: bool  # False: it may be of another cycle, which only the neighbouring piece can tell


class Ring(NamedTuple):
    """A dump, as its counters tell."""

    capacity: int
    add_count: int
    head: int
    full: bool
    before: Part | None  # older than `main`
    main: Part | None
    stack: int | None  # of the agent, from `invalid_range`; None if that does not fit to the head
    horizon: int | None
    cuts: frozenset[int]  # places after which nothing is known, as `invalid_range` says beyond what the head does


def ring(number: int, capacity: int, add_count: int, invalid_range: np.ndarray[Any, Any]) -> Ring:
    """Reads the counters of piece `number`.

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
    return Ring(
        capacity,
        add_count,
        head,
        full,
        before,
        main,
        len(named) - horizon if fits else None,
        horizon if fits else None,
        frozenset() if fits else frozenset(named),
    )


def in_order(of: Ring) -> np.ndarray[Any, Any]:
    """Places known to be one after another in time, oldest first: int64[...]."""
    parts = [part for part in (of.before, of.main) if part is not None and part.sure]
    return np.concatenate([np.arange(part.begin, part.stop) for part in parts] or [np.zeros(0, np.int64)])


class Blanks(NamedTuple):
    """Where rows of zeros may be, as actions, rewards and ends tell."""

    padded: bool | None  # whether the writer has put them before episodes; None: no episode begins in this piece
    place: np.ndarray[Any, Any]  # bool[C], a row of zeros if its frame is one
    lead: np.ndarray[Any, Any]  # int64[...], places at the beginning: rows of zeros if an end lies before the piece


def blanks(
    of: Ring,
    action: np.ndarray[Any, Any],
    reward: np.ndarray[Any, Any],
    terminal: np.ndarray[Any, Any],
) -> Blanks:
    """Looks at what follows the ends of episodes.

    That all episodes of the piece but one in a hundred begin with rows of zeros is asked for: a game may begin with a dark
    screen and an agent that waits, but not every time; and one torn place must not make steps of all zeros.
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

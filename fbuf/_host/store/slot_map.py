"""Map slots to places of rows, where rows replace any slot and not the oldest: numpy arrays, O(rows written).

C slots have C + slack places. A new row takes an unused place, or the one whose row was retired longest ago. A row is retired
when another is written to its slot, and stays readable until `slack` more rows are retired. A ticket is
`lap * places + place + 1`, where the lap counts the rows that the place has held.

A write may go on from another state than the write before it (a future was dropped, or two are carried on). Then the rows of
that state are the ones not retired, and those of the other are queued: `resume`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fbuf._host.memory.lazy_array import Sources, expect
from fbuf._host.types import Array, unfit

_LOT = 1 << 16  # tickets looked at together


class Placement(NamedTuple):
    """The places of `n` rows."""

    slot: Array  # int64[n]
    at: Array  # int64[n], their places
    evicted: Array  # int64[g], those of them that hold a row until now
    retired: Array  # int64[r], places of the rows replaced
    ticket: Array  # uint64[n]


class SlotMap:
    """Places of the rows of `capacity` slots.

    Args:
      slack: Rows that can be read after they were retired, at least.
      first: Lap of the first row of each place.
    """

    def __init__(self, capacity: int, slack: int, first: int = 0) -> None:
        self.size = capacity + slack
        self.used = 0  # places that hold a row: the first ones
        self.accepted = 0
        self.newest = 0  # ticket of the first row of the last write: which state is the newest
        self.ticket: Array = np.zeros(self.size, np.uint64)  # of the row in each place; 0: none yet
        self._first = first
        small: Any = np.uint32 if self.size < 2**32 - 1 else np.uint64
        self._of_slot: Array = np.zeros(capacity, small)  # 1 + place of the newest row of each slot; 0: none
        self._queue: Array = np.zeros(self.size, small)  # places of retired rows, in this order; a ring
        self._head = 0
        self._waiting = 0  # places in the queue
        self._queued = 0  # places ever queued

    @property
    def nbytes(self) -> int:
        """Return the bytes written to so far; the rest of the arrays is address space only."""
        slots = min(len(self._of_slot), self.used)
        small = self._queue.itemsize
        return self.used * self.ticket.itemsize + (slots + min(self._queued, self.size)) * small

    def resume(self, place: Array, present: Array) -> None:
        """Resume from a state whose rows are at int64[C] `place` by slot, where `present`. Cost: O(C + slack)."""
        slot = np.flatnonzero(present)
        slot = slot[np.unique(place[slot], return_index=True)[1]]
        stays = np.zeros(self.used, bool)
        stays[place[slot]] = True
        newest = self._of_slot[self._of_slot > 0].astype(np.int64) - 1
        retired = np.concatenate([self._waits(), newest])
        retired = retired[~stays[retired]]
        self._of_slot[:] = 0
        self._of_slot[slot] = place[slot] + 1
        self._queue[: len(retired)] = retired
        self._head, self._waiting, self._queued = 0, len(retired), max(self._queued, len(retired))

    def _waits(self) -> Array:
        """Return int64[r], places of retired rows, the first retired first."""
        return self._queue[(self._head + np.arange(self._waiting)) % self.size].astype(np.int64)

    def plan(self, slot: Array) -> Placement:
        """Return places for rows at int64[n] slots, without duplicates. Changes nothing.

        Raises:
          ValueError: a slot is out of range or comes twice.
        """
        n, capacity = len(slot), len(self._of_slot)
        if n and (len(np.unique(slot)) < n or int(slot.min()) < 0 or int(slot.max()) >= capacity):
            raise ValueError(
                f"Store.write: slots of rows that are kept are from {int(slot.min())} to {int(slot.max())}, "
                f"{len(np.unique(slot))} of {n} different; expected different ones from 0 to {capacity - 1}. "
                f"Of several rows for one slot keep the last."
            )
        old = self._of_slot[slot].astype(np.int64) - 1
        retired = old[old >= 0]
        fresh = min(n, self.size - self.used)
        waited = min(n - fresh, self._waiting)
        at = np.concatenate(
            [
                np.arange(self.used, self.used + fresh),
                self._queue[(self._head + np.arange(waited)) % self.size].astype(np.int64),
                retired[: n - fresh - waited],
            ]
        )
        ticket = self.ticket[at] + np.uint64(self.size)
        ticket[:fresh] = (at[:fresh] + 1).astype(np.uint64) + np.uint64(self._first * self.size)
        return Placement(slot, at, at[fresh:], retired, ticket)

    def commit(self, move: Placement) -> None:
        """Apply a placement. Cannot fail."""
        end = self._head + self._waiting
        self._queue[(end + np.arange(len(move.retired))) % self.size] = move.retired
        self._queued += len(move.retired)
        self._waiting += len(move.retired) - len(move.evicted)
        self._head = (self._head + len(move.evicted)) % self.size
        self._of_slot[move.slot] = move.at + 1
        self.ticket[move.at] = move.ticket
        self.used += len(move.at) - len(move.evicted)
        self.accepted += len(move.at)
        self.newest = int(move.ticket[0]) if len(move.ticket) else self.newest

    def find(self, ticket: Array) -> tuple[Array, Array]:
        """Return places int64[M] of tickets uint64[M], and whether their rows are still there; place 0 where not."""
        place = ((ticket - np.uint64(1)) % np.uint64(self.size)).astype(np.int64)
        present = (self.ticket[place] == ticket) & (ticket != np.uint64(0))
        return np.where(present, place, 0), present

    # ---------------------------------------------------------------- checkpoints

    def to_arrays(self) -> dict[str, Array]:
        """Return copies of everything: about 20 bytes a row."""
        return {
            "places:first": np.array([self._first, self.accepted, self.newest], np.uint64),
            "places:ticket": self.ticket[: self.used].copy(),
            "places:slot": self._of_slot.copy(),
            "places:retired": self._waits().astype(self._queue.dtype),
        }

    @classmethod
    def from_arrays(cls, arrays: Sources, capacity: int, slack: int) -> SlotMap:
        """Load what `to_arrays` returned. Raises ValueError if the arrays do not fit together."""
        first, accepted, newest = expect(arrays, "places:first", np.uint64, (3,)).tolist()
        places = cls(capacity, slack, first)
        ticket = expect(arrays, "places:ticket", np.uint64, (None,))
        slot = expect(arrays, "places:slot", places._of_slot.dtype, (capacity,))
        retired = expect(arrays, "places:retired", places._queue.dtype, (None,))
        used = len(ticket)
        owned = slot[slot > 0] - slot.dtype.type(1)
        named = len(owned) + len(retired)
        whole = named == used <= places.size and max(owned.max(initial=0), retired.max(initial=0)) < max(used, 1)
        if whole:
            seen = np.zeros(used, bool)
            seen[owned] = seen[retired] = True
            whole = bool(seen.all()) and all(
                np.array_equal((part - np.uint64(1)) % np.uint64(places.size), np.arange(at, at + len(part)))
                for at in range(0, used, _LOT)
                for part in (ticket[at : at + _LOT],)
            )
        if not whole:
            raise unfit(f"slot and retired name {named} places", f"each of the {used} of places:ticket once")
        places.ticket[:used] = ticket
        places._of_slot[:] = slot
        places._queue[: len(retired)] = retired
        places._waiting = places._queued = len(retired)
        places.used, places.accepted, places.newest = used, accepted, newest
        return places

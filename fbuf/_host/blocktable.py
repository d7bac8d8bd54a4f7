"""A set of blocks on the host: each distinct block once, found by content, counted by references.

Three arrays by place (bytes, fingerprint, references) behind an index of open addressing, all of it numpy, with a few steps
for all blocks of a call together. A fingerprint says where to look and, when blocks are read, whether one is still what was
stored; two blocks are the same only if their bytes are. A place nobody refers to is spare, but keeps its block until another
needs the place: blocks that come back are found.

It grows, by a quarter, and refuses nothing. Growing makes new arrays and leaves the old ones to those who read them, so
readers need no lock: they take `held` once, and a block somebody refers to is never moved in it nor overwritten. Rejected:
doubling (a quarter of the table stood empty on average), a Python dict (weighs more than the blocks).
"""

from __future__ import annotations

import functools

import numpy as np

from fbuf._host.arrays import Array
from fbuf._host.source import Lazy, Source, steps
from fbuf._host.tracked import Tracked

_FIRST = 64  # places of a new table
_LOT = 1024  # blocks verified together: what a processor's cache holds
_ENTERED = 1 << 14  # places entered together when a table is loaded


def _mixed(x: Array) -> Array:
    """uint64[...]: a permutation that spreads high bits to low ones and back."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    return x ^ (x >> np.uint64(29))


@functools.lru_cache(maxsize=64)
def odd(number: int) -> Array:
    """Odd uint64 constants, the same everywhere."""
    return _mixed(_mixed(np.arange(1, number + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9))) | np.uint64(1)


def wide(blocks: Array) -> Array:
    """uint8[A, size] as the widest words that divide `size`."""
    return blocks.view(f"u{next(n for n in (8, 4, 2, 1) if blocks.shape[1] % n == 0)}")


def digest(blocks: Array) -> Array:
    """uint64[A], a fingerprint of each block uint8[A, size]; one changed word always changes it."""
    words = wide(blocks).astype(np.uint64)
    words ^= words >> np.uint64(32)  # a product passes bits upwards only
    return _mixed(np.einsum("ij,j->i", words, odd(words.shape[1])))


def damaged_places(held: tuple[Array, Array], places: Array) -> Array:
    """Of places int64[...], those whose block is not what its fingerprint says; each is looked at once."""
    words, prints = held
    shown = np.zeros(len(words), bool)
    shown[places.reshape(-1)] = True
    distinct = np.flatnonzero(shown)
    lots = np.split(distinct, range(_LOT, len(distinct), _LOT))
    return np.concatenate([lot[digest(np.take(words, lot, axis=0)) != prints[lot]] for lot in lots])


class Table:
    """Distinct blocks of `size` bytes by place, 1 and up; place 0 is zeros and belongs to no block. One writer at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 1  # places that hold a block or did, and place 0
        self.held: tuple[Array, Array] = np.zeros((_FIRST, size), np.uint8), np.zeros(_FIRST, np.uint64)
        self.held[1][:1] = digest(self.held[0][:1])
        self.count: Array = np.zeros(_FIRST, np.int64)
        self._queued: Array = np.zeros(_FIRST, bool)  # whether it is among the spare ones
        self._spare: Array = np.zeros(0, np.int64)  # some have been found again since
        self._slots: Array = np.zeros(_slots(_FIRST), np.int32)
        self._filled = 0  # slots that are not empty
        self._tracked = Tracked(_FIRST, size)

    @property
    def places(self) -> int:
        """Places there are, empty ones included."""
        return len(self.count)

    @property
    def nbytes(self) -> int:
        """All of it, empty places and the index included."""
        words, prints = self.held
        own = words.nbytes + prints.nbytes + self.count.nbytes + self._queued.nbytes
        return own + self._spare.nbytes + self._slots.nbytes

    @property
    def live(self) -> int:
        """Blocks somebody refers to; cost: one pass over the counts."""
        return int(np.count_nonzero(self.count[1 : self.used]))

    # ---------------------------------------------------------------- references

    def refer(self, blocks: Array, number: Array) -> Array:
        """Finds or stores blocks and counts references to them.

        Args:
          blocks: uint8[A, size].
          number: int64[A], references to each, 1 or more.
        Returns:
          int64[A], places. On MemoryError nothing has changed.
        """
        prints = digest(blocks)
        places = self._find(prints, blocks)
        np.add.at(self.count, places, number)  # before a place is needed: these may be spare
        self.count[0] = 0
        try:
            missing = np.flatnonzero(places == 0)
            while missing.size:
                # Of equal fingerprints the first stands for all; those that are not equal to it take another turn.
                _, first, of = np.unique(prints[missing], return_index=True, return_inverse=True)
                chosen = missing[first]
                same = (wide(blocks[missing]) == wide(blocks[chosen])[of]).all(axis=1)
                done, of = missing[same], of[same]
                places[done] = self._add(prints[chosen], blocks[chosen])[of]
                np.add.at(self.count, places[done], number[done])
                missing = missing[~same]
                if missing.size:
                    again = self._find(prints[missing], blocks[missing])
                    places[missing] = again
                    np.add.at(self.count, again, number[missing])
                    self.count[0] = 0
                    missing = missing[again == 0]
        except BaseException:
            self.release(places, number)
            raise
        return places

    def release(self, places: Array, number: Array | int = 1) -> None:
        """Takes references back, of places int[A] (any shape; 0 means none)."""
        places = places.reshape(-1)
        np.subtract.at(self.count, places, number)
        self.count[0] = 0
        idle = places[(self.count[places] == 0) & ~self._queued[places]]
        if idle.size:
            idle = np.unique(idle).astype(np.int64)
            self._queue(idle[idle > 0])

    def _queue(self, idle: Array) -> None:
        self._queued[idle] = True
        self._spare = np.concatenate([self._spare, idle])

    # ---------------------------------------------------------------- places

    def _add(self, prints: Array, blocks: Array) -> Array:
        """Places of new blocks, all different, without references yet."""
        spare = self._take_spare(len(blocks))
        fresh = len(blocks) - len(spare)
        try:
            if self.used + fresh > self.places:
                self._grow(max(self.used + fresh, self.places + self.places // 4))
            crowded = 4 * (self._filled + len(blocks)) > 3 * len(self._slots)
            slots = np.zeros(len(self._slots), np.int32) if crowded else self._slots
            place = np.concatenate([spare, np.arange(self.used, self.used + fresh)])
        except BaseException:
            self._queue(spare)
            raise
        self.used += fresh
        words, own = self.held
        self._tracked.touch_at(place - 1)
        words[place], own[place] = blocks, prints
        # A place may be entered twice: what led to it before leads to a block that does not match, until all is entered anew.
        self._enter(place if slots is self._slots else np.arange(1, self.used), slots)
        return place

    def _take_spare(self, number: int) -> Array:
        """At most `number` spare places."""
        taken = np.zeros(0, np.int64)
        while len(taken) < number and len(self._spare):
            keep = max(len(self._spare) - (number - len(taken)), 0)
            some, self._spare = self._spare[keep:], self._spare[:keep]
            self._queued[some] = False
            taken = np.concatenate([taken, some[self.count[some] == 0]])
        return taken

    def _grow(self, places: int) -> None:
        """Room for `places`; on MemoryError nothing has changed."""
        words, prints = self.held
        larger = np.empty((places, self.size), np.uint8), np.empty(places, np.uint64)
        count, queued = np.zeros(places, np.int64), np.zeros(places, bool)
        for new, old in ((larger[0], words), (larger[1], prints), (count, self.count), (queued, self._queued)):
            new[: self.used] = old[: self.used]
        slots = np.zeros(_slots(places), np.int32) if _slots(places) != len(self._slots) else self._slots
        self.held, self.count, self._queued = larger, count, queued
        self._tracked.moved(places)
        if slots is not self._slots:
            self._enter(np.arange(1, self.used), slots)

    # ---------------------------------------------------------------- the index

    def _way(self, prints: Array) -> tuple[Array, Array]:
        """Where to look first, and how far on every time after that (odd, so that it comes to every slot)."""
        bits = np.uint64(len(self._slots).bit_length() - 1)
        step = (prints & np.uint64(len(self._slots) - 1)) | np.uint64(1)
        return (prints >> (np.uint64(64) - bits)).astype(np.int64), step.astype(np.int64)

    def _find(self, prints: Array, blocks: Array) -> Array:
        """int64[A], place of each block, 0 where it is not."""
        words, own = self.held
        found = np.zeros(len(prints), np.int64)
        todo = np.arange(len(prints))
        at, step = self._way(prints)
        while todo.size:
            place = self._slots[at]
            maybe = np.flatnonzero((own[place] == prints[todo]) & (place > 0))
            same = (wide(words[place[maybe]]) == wide(blocks[todo[maybe]])).all(axis=1)
            hit = maybe[same]
            found[todo[hit]] = place[hit]
            on = place > 0
            on[hit] = False
            todo, at, step = todo[on], (at[on] + step[on]) & (len(self._slots) - 1), step[on]
        return found

    def _enter(self, places: Array, slots: Array) -> None:
        """Puts blocks that are stored into the index, which is `slots` from now on; another one is empty."""
        if slots is not self._slots:
            self._slots, self._filled = slots, 0
        at, step = self._way(self.held[1][places])
        while places.size:
            free = self._slots[at] == 0
            self._slots[at[free]] = places[free]
            won = free & (self._slots[at] == places)  # of several, one
            self._filled += int(np.count_nonzero(won))
            places, at, step = places[~won], (at[~won] + step[~won]) & (len(self._slots) - 1), step[~won]

    # ---------------------------------------------------------------- checkpoints

    def saved(self) -> tuple[Lazy, Array, Array]:
        """Of all places that were used: their blocks uint8[A, size], their fingerprints and references, copied."""
        words, prints = self.held

        def read(start: int, stop: int) -> Array:
            return words[1 + start : 1 + stop].copy()

        blocks = self._tracked.snapshot((self.used - 1, self.size), np.uint8, read)
        return blocks, prints[1 : self.used].copy(), self.count[1 : self.used].copy()

    def load(self, blocks: Source, prints: Array, count: Array) -> None:
        """Fills an empty table."""
        used = 1 + len(prints)
        self._grow(max(used, _FIRST))
        words, own = self.held
        for start, some in steps(blocks):
            words[1 + start : 1 + start + len(some)] = some
        own[1:used], self.count[1:used] = prints, count
        self.used = used
        slots = np.zeros(len(self._slots), np.int32)
        for start in range(1, used, _ENTERED):
            self._enter(np.arange(start, min(start + _ENTERED, used)), slots)
        self._queue(1 + np.flatnonzero(self.count[1:used] == 0))


def _slots(places: int) -> int:
    """Slots of an index: a power of two, half to three quarters as many again as places."""
    return 1 << int(places + places // 2).bit_length()

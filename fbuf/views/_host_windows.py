"""`HostWindows`: what `Sequence` and `Episode` return, in NumPy. Batches are equal bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fbuf._core.pytree import Spec
from fbuf._indexing.anchors import END, RESET, START, TERMINATED
from fbuf._interfaces.view import Window
from fbuf.views import _fields
from fbuf.views._autoreset import last_bit

Numbers = np.ndarray[Any, Any]


class HostWindows:
    """Windows of rows in NumPy.

    Args:
      view: A `Sequence` or an `Episode`, without ids.
      spec, structure: Of stored rows.
    """

    def __init__(self, view: Any, spec: Spec, structure: Any):
        rule = view.rule
        self.back, self.ahead, self._rule = rule.back, rule.ahead, rule
        self._last, self._adds = last_bit(view.autoreset), view.adds
        self._bits = END | TERMINATED | START | RESET
        arrays = [np.zeros(0) for _ in spec]
        masks = tuple(np.zeros(0, bool) for _ in _fields.MADE)
        self.example = view.assemble(spec, structure, arrays, Window((), masks))
        made = {id(array): number for number, array in enumerate((*arrays, *masks))}
        self._leaves, self._rows = [made[id(array)] for array in jax.tree.leaves(self.example)], len(arrays)

    def memory(self, flags: list[int], undecided: int, step: int) -> tuple[int, int]:
        """Return the step of a lane's next row, unless it begins an episode, and the number of undecided rows, for `opened`."""
        return step, undecided

    def read(self, rows: Any, slot: Numbers) -> list[Numbers] | None:
        """Return the leaves of the windows at slots int64[B] of `rows`, a `HeldRows`; None if it cannot read them."""
        at, masks = self._window(rows, slot)
        leaves = rows.read([(range(self._rows), at)])
        if leaves is None:
            return None
        if masks is not None and not masks[0].all():
            missing = ~masks[0]
            for leaf in leaves:
                leaf[missing] = 0
        leaves += masks or ()
        return [leaves[number] for number in self._leaves]

    def _window(self, rows: Any, slot: Numbers) -> tuple[Any, tuple[Numbers, ...] | None]:
        """Return the places of rows [B, T], and the masks `_fields.MADE`; None if batches have none and every row exists."""
        raise NotImplementedError


class HostSequence(HostWindows):
    """Windows of `Sequence`."""

    def __init__(self, view: Any, spec: Spec, structure: Any):
        super().__init__(view, spec, structure)
        self._view, self._stop, self._crosses = view, view.boundary == "stop", view.boundary == "cross"
        self._places = np.arange(view.length) * view.dilation - self.back
        self._every = np.arange(-self.back, self.ahead + 1)
        place = np.arange(view.length)
        self._warm, self._regular = place >= view.burn_in, place < view.length - view.bootstrap
        self._edges = [0, view.length - 1, max(view.length - 2, 0)]

    def opened(self, memory: tuple[int, int], flags: int, before: int) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Return `memory` after a row, and which rows it opens, counted back from it, oldest first, if learnt (`learns`)."""
        rule, ahead, (step, undecided) = self._rule, self.ahead, memory
        if flags & START and not rule.crosses:
            step = 0
        first = step - ahead
        if self._crosses:
            return (step + 1, undecided), (ahead,) if first >= 0 and first % rule.stride == 0 else ()
        if self._stop:
            opens = first >= 0 and (first % rule.stride == 0 or (rule.closes and bool(flags & self._last)))
            if opens and rule.reset_rows:
                if ahead and before & RESET:
                    opens = False
                elif rule.learns and flags & RESET:
                    opens = bool(ahead) and first == 0
            return (step + 1, undecided), (ahead,) if opens else ()
        number = undecided + 1
        if flags & self._last:  # each undecided window is cut here
            wanted = [back for back in range(number - 1, -1, -1) if self._begins(step - back, back == ahead)]
            if rule.reset_rows:  # a reset row opens no window; where windows must learn, neither does a second one
                both = before & RESET if rule.learns else RESET
                wanted = [back for back in wanted if back or not flags & both & RESET]
            return (step + 1, 0), tuple(wanted)
        return (step + 1, min(number, ahead)), (ahead,) if number > ahead and self._begins(first, False) else ()

    def _begins(self, step: int, closing: bool) -> bool:
        return step % self._rule.stride == 0 or (self._rule.closes and closing)

    @property
    def checks(self) -> bool:
        """Whether a window may have no row to learn, so that `learns` decides."""
        return self._rule.learns is not None and not self._stop

    def learns(self, near: Numbers) -> bool:
        """Return whether a window learns a row, from the flags uint8[1, back + 1 + ahead] around its anchor."""
        return bool(self._masks(near)[2].any())

    def _window(self, rows: Any, slot: Numbers) -> tuple[Any, tuple[Numbers, ...] | None]:
        view, lanes = self._view, rows.lanes
        at = rows.at(slot[:, None] + self._places * lanes)
        if not self._stop:
            near = rows.flags(rows.at(slot[:, None] + self._every * lanes))
            return at, self._masks(near) if self._adds or not self._crosses else None
        if not self._adds:
            return at, None
        # Only the first row can begin an episode, and only the last can be a reset row; then the one before may be terminated.
        near = rows.flags(rows.at(slot[:, None] + self._places[self._edges] * lanes))
        shape = len(slot), view.length
        begins = near[:, :1] & START != 0
        learn = np.ones(shape, bool)
        learn[:, -1] = near[:, 1] & RESET == 0
        if view.burn_in:
            learn &= self._warm | begins
        if view.bootstrap:
            learn &= self._regular | ((near[:, 1:2] | near[:, 2:]) & TERMINATED != 0)
        first = np.zeros(shape, bool)
        first[:, :1] = begins
        return at, (np.ones(shape, bool), first, learn)

    def _masks(self, near: Numbers) -> tuple[Numbers, Numbers, Numbers]:
        """Return what `Sequence._masks` does."""
        view, apart = self._view, self._view.dilation
        flags = near[:, ::apart]
        if self._crosses:
            first = near & START != 0
            if apart > 1:
                lines = np.concatenate([np.zeros((len(near), apart - 1), bool), first], axis=1)
                first = lines.reshape(len(near), view.length, apart).any(axis=2)
            learn = flags & RESET == 0
            if view.burn_in:
                learn &= self._warm | np.logical_or.accumulate(first, axis=1)
            if view.bootstrap:
                ended = np.logical_or.accumulate((flags & TERMINATED != 0)[:, ::-1], axis=1)[:, ::-1]
                learn &= self._regular | ended
            return np.ones(flags.shape, bool), first, learn
        age = self._every
        row, unknown = age[::apart], -self.back - apart  # the episode began before the window
        starts, ends = near[:, self.back :: -1] & START, near[:, self.back :] & self._last != 0
        began = np.where(starts.any(axis=1), -starts.argmax(axis=1), unknown)[:, None]
        ended = np.where(ends.any(axis=1), ends.argmax(axis=1), self.ahead)[:, None]
        inside = (row >= began) & (row <= ended)
        first = inside & (row < began + apart)
        learn = inside
        if view.autoreset == "next_step":
            learn = learn & (flags & RESET == 0)
        if view.burn_in:
            learn = learn & ((began > unknown) | (row >= view.burn_in * apart - self.back))
        if view.bootstrap:
            terminated = ((flags & TERMINATED != 0) & inside).any(axis=1, keepdims=True)
            learn = learn & (terminated | (row <= ended - view.bootstrap * apart))
        return inside, first, learn.copy() if learn is inside else learn


class HostEpisode(HostWindows):
    """Windows of `Episode`."""

    checks = False

    def __init__(self, view: Any, spec: Spec, structure: Any):
        super().__init__(view, spec, structure)
        self._length, self._cuts = view.max_length, view.longer == "cut"
        self._places = np.arange(self._length)

    def opened(self, memory: tuple[int, int], flags: int, before: int) -> tuple[tuple[int, int], tuple[int, ...]]:
        """Return `memory` after a row, and which rows it opens, counted back from it."""
        step = 0 if flags & START else memory[0]
        room = self._length - step
        opens = (flags & self._last and room > 0) or (self._cuts and room == 1)
        return (step + 1, memory[1]), (step,) if opens and not flags & before & RESET else ()

    def _window(self, rows: Any, slot: Numbers) -> tuple[Any, tuple[Numbers, ...]]:
        at = rows.at(slot[:, None] + self._places * rows.lanes)
        near = rows.flags(at)
        ends = near & self._last != 0
        last = np.where(ends.any(axis=1), ends.argmax(axis=1), self._length)[:, None]
        inside = self._places <= last
        first = np.zeros(inside.shape, bool)
        first[:, 0] = True
        return at, (inside, first, inside & (near & RESET == 0))

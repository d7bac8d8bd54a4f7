"""`HostTransition`: what `Transition` returns, in NumPy. Batches are equal bit for bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fbuf._core.pytree import Spec
from fbuf._indexing.anchors import CUT, END, RESET, START, TERMINATED

Numbers = np.ndarray[Any, Any]


class _Ends(NamedTuple):
    """What the end of an episode within n steps decides, by 4 times its row, + 1 if terminated, + 2 if it has a final
    observation; the last entry is of no end."""

    reach: Numbers  # rows to the newest frame of `next_obs`
    rewards: Numbers  # that count
    discount: Numbers
    final: Numbers  # bool, `next_obs` is the final observation


class _Frames:
    """Stacks of the frames of rows."""

    def __init__(self, rows: Any, slot: Numbers, places: Numbers, began: Numbers | None, zero: bool):
        self._rows, self._slot, self._places = rows, slot, places
        self._began, self._zero = began, zero
        self._known: dict[bool, Any] = {}  # places of frames, and which are missing, by whether they follow

    def take(self, number: int, reach: Numbers | None) -> Numbers:
        """Return the frames [B, k, ...] of a leaf, of which the newest is `reach` rows after each anchor, or itself."""
        at, missing = self._known.get(reach is None) or self._find(reach)
        leaf: Numbers = self._rows.take(number, at)
        if missing is not None:
            leaf[missing] = 0
        return leaf

    def _find(self, reach: Numbers | None) -> Any:
        place, missing = self._places if reach is None else reach[:, None] + self._places, None
        if self._began is not None:
            began = self._began[:, None]
            missing = place < began if self._zero else None
            place = np.maximum(place, began)
        at = self._rows.at(self._slot[:, None] + place * self._rows.lanes)
        self._known[reach is None] = at, missing
        return at, missing


class HostTransition:
    """Transitions of rows in NumPy.

    Args:
      view: A `Transition` without ids.
      spec, structure: Of stored rows.
      kinds: The leaves of the observation, of the final one, of the action, and the others.
      stacked: The leaves of the observation that are stacked.
    """

    def __init__(self, view: Any, spec: Spec, structure: Any, kinds: Any, stacked: list[str]):
        self._number = {name: number for number, name in enumerate(spec)}
        self._reward, self._resets = self._number[view.reward], view.autoreset == "next_step"
        self._steps, self._cut_ends = view.n_step, view.rule.cut_ends
        self.back, self.ahead, self.checks = view.back, view.n_step, False
        self._span = np.arange(-self.back, self._steps)[:, None]
        self._frames = np.arange(-self.back, 1)
        self._zero, self._stacked = view.pad == "zero", frozenset(stacked)
        dtype = np.dtype(spec[view.reward].dtype)
        self._float = dtype if dtype.kind == "f" else np.dtype(np.float32)
        self._powers = np.array([view.gamma**i for i in range(self._steps + 1)], self._float)
        flags = np.arange(256)  # of one row, to each of which a step is known
        known = (flags & (END | CUT) == END) & self._cut_ends & self._resets
        self._moves = ((flags & END == 0) | known).astype(np.int64)
        self._discounts = np.where(flags & TERMINATED != 0, self._float.type(0), self._powers[1])
        terminated, final = flags & TERMINATED != 0, self._cut_ends & (flags & CUT == 0)
        self._ends = np.where(flags & END == 0, 4 * self._steps, terminated + 2 * final)  # of one row, for `_Ends`
        self._at = 4 * np.arange(self._steps)[:, None]
        self._by_end = self._every_end(self._resets or view.final_observation is not None)
        self._final = {}
        if view.final_observation is not None:
            self._final = {view.observation + n.removeprefix(view.final_observation): self._number[n] for n in kinds[1]}
        # XLA replaces numbers below `tiny` by 0. Of larger rewards neither products nor sums are.
        info, least = np.finfo(self._float), float(min(self._powers[self._powers > 0]))
        self._word = np.dtype(f"uint{info.bits}")
        self._one = self._word.type(1)
        bound = np.array(min(float(info.tiny) / float(info.eps) * 4 / least, 1.0), self._float)
        self._least = (bound.view(self._word) << self._one) - self._one
        made = list[tuple[Any, tuple[str, Any]]]()

        def leaf(kind: str, name: Any = None) -> Any:
            made.append((np.zeros(0), (kind, name)))
            return made[-1][0]

        self.example = view.batch(spec, structure, kinds, leaf)  # of leaves that tell what they are
        known = {id(array): what for array, what in made}
        self._leaves = [known[id(array)] for array in jax.tree.leaves(self.example)]

    def _every_end(self, reaches_final: bool) -> _Ends:
        at, kind = np.divmod(np.arange(4 * self._steps + 1), 4)
        terminated, final = kind & 1 != 0, kind & 2 != 0
        rewards = at + (terminated | final)
        discount = np.where(terminated, self._float.type(0), self._powers[rewards])
        return _Ends(at + final if reaches_final else at, rewards, discount, final)

    def memory(self, flags: list[int], undecided: int, step: int) -> list[int]:
        """Return the flags of a lane's undecided rows, the last of uint8[W], for `opened`."""
        return flags[len(flags) - undecided :]

    def opened(self, memory: list[int], flags: int, before: int) -> tuple[int, ...]:
        """Return which rows a new one opens, counted back from it, oldest first; see `Transition.decide`."""
        if flags & RESET:
            decided = memory[:]
            memory.clear()
            return self._anchors(decided, len(decided))
        memory.append(flags)
        if flags & END and not self._resets:
            decided = memory[:]
            memory.clear()
            return self._anchors(decided, len(decided) - 1)
        if len(memory) <= self._steps:
            return ()
        oldest = memory.pop(0)
        return () if oldest & END and not self._keeps_end(oldest) else (self._steps,)

    def _anchors(self, decided: list[int], first: int) -> tuple[int, ...]:
        """Return which of successive rows can be drawn, `first` rows back and fewer."""
        return tuple(first - i for i, flags in enumerate(decided) if not flags & END or self._keeps_end(flags))

    def _keeps_end(self, flags: int) -> bool:
        return bool(flags & TERMINATED) or (self._cut_ends and not flags & CUT)

    def read(self, rows: Any, slot: Numbers) -> list[Numbers] | None:
        """Return the leaves of the transitions at slots int64[B] of `rows`, a `HeldRows`; None if NumPy rounds otherwise."""
        return self._read_pairs(rows, slot) if self._span.size == 1 else self._read_steps(rows, slot)

    def _read_pairs(self, rows: Any, slot: Numbers) -> list[Numbers]:
        """Read transitions of one step without a stack."""
        here = rows.at(slot)
        flags = rows.flags(here)
        last = (flags & (END | CUT) == END).nonzero()[0] if self._final else None  # the final observation is known
        following = rows.at(slot + self._moves.take(flags) * rows.lanes)
        leaves = []
        for kind, name in self._leaves:
            if kind == "next_obs":
                leaf = rows.take(self._number[name], following)
                if last is not None and last.size:
                    leaf[last] = rows.take(self._final[name], here)[last]
            elif kind == "reward":
                leaf = rows.take(self._reward, here).astype(self._float, copy=False)
            elif kind == "discount":
                leaf = self._discounts.take(flags)
            else:
                leaf = rows.take(self._number[name], here)
            leaves.append(leaf)
        return leaves

    def _read_steps(self, rows: Any, slot: Numbers) -> list[Numbers] | None:
        lanes, ends = rows.lanes, self._by_end
        around = slot + self._span * lanes
        here, path = rows.at(slot), rows.at(around, by_step=True)
        near = rows.flags(path)
        end = np.minimum.reduce(self._ends.take(near[self.back :]) + self._at)
        steps = rows.at(around[self.back :], by_step=True) if self.back else path
        reward = self._sum(rows.take(self._reward, steps), ends.rewards.take(end, mode="clip"))
        if reward is None:
            return None
        reach = ends.reach.take(end, mode="clip")
        beyond = slot + reach * lanes
        following = rows.at(beyond)
        frames = _Frames(rows, slot, self._frames, self._began(near), self._zero) if self._stacked else None
        leaves = []
        for kind, name in self._leaves:
            stack = frames if name in self._stacked else None
            if kind == "obs" and stack is not None:
                leaf = stack.take(self._number[name], None)
            elif kind == "next_obs":
                number = self._number[name]
                leaf = rows.take(number, following) if stack is None else stack.take(number, reach)
                if self._final and (at := ends.final.take(end, mode="clip").nonzero()[0]).size:
                    leaf[at if stack is None else (at, -1)] = rows.take(self._final[name], rows.at(beyond - lanes))[at]
            elif kind == "reward":
                leaf = reward
            elif kind == "discount":
                leaf = ends.discount.take(end, mode="clip")
            else:
                leaf = rows.take(self._number[name], here)
            leaves.append(leaf)
        return leaves

    def _began(self, near: Numbers) -> Numbers | None:
        """Return the rows from each anchor to the first of its episode, 0 or less, where it is near; None if none is."""
        starts = near[self.back :: -1] & START
        ended = starts.any(axis=0)
        return np.where(ended, -starts.argmax(axis=0), -self.back - self._steps) if ended.any() else None

    def _sum(self, reward: Numbers, counted: Numbers) -> Numbers | None:
        """Return the sums [B, ...] of the rewards [n, B, ...] that count; None where XLA may replace numbers by 0."""
        reward = reward.astype(self._float, copy=False)
        total: Numbers = reward[0]
        if self._steps == 1:
            return total
        if ((reward.view(self._word) << self._one) - self._one).min() < self._least:  # without signs, 0 is the largest
            return None
        with np.errstate(all="ignore"):
            for i in range(1, self._steps):
                product = reward[i] * self._powers[i]
                product[counted <= i] = 0
                total = total + product
        return total

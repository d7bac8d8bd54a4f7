"""`HostTransition`: what `Transition` returns, in NumPy. Batches are equal bit for bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from fbuf._core.pytree import Spec
from fbuf._indexing.anchors import CUT, END, RESET, START, TERMINATED

Numbers = np.ndarray[Any, Any]
_NONE = np.zeros(0, np.int64)


class _Ends(NamedTuple):
    """What the end of an episode within n steps decides, by 4 times its row, + 1 if terminated, + 2 if it has a final
    observation; the last entry is of no end."""

    reach: Numbers  # rows to the newest frame of `next_obs`
    counted: Numbers  # [n - 1, 4 n + 1], words of ones where the reward of a later row counts, else 0
    discount: Numbers
    final: Numbers  # bool, `next_obs` is the final observation


class HostTransition:
    """Transitions of rows in NumPy.

    Args:
      view: A `Transition` without ids.
      spec, structure: Of stored rows.
      kinds: The leaves of the observation, of the final one, of the action, and the others.
      stacked: The leaves of the observation that are stacked.
    """

    def __init__(self, view: Any, spec: Spec, structure: Any, kinds: Any, stacked: list[str]):
        number = {name: number for number, name in enumerate(spec)}
        self._reward, self._resets = number[view.reward], view.autoreset == "next_step"
        self._steps, self._cut_ends = view.n_step, view.rule.cut_ends
        self.back, self.ahead, self.checks = view.back, view.n_step, False
        self._span = np.arange(-self.back, self._steps)[:, None]
        self._frames, self._zero = np.arange(-self.back, 1), view.pad == "zero"
        dtype = np.dtype(spec[view.reward].dtype)
        self._float = dtype if dtype.kind == "f" else np.dtype(np.float32)
        self._powers = np.array([view.gamma**i for i in range(self._steps + 1)], self._float)
        self._later = self._powers[1:-1].reshape(-1, *[1] * (1 + len(spec[view.reward].shape)))
        flags = np.arange(256)  # of one row, to each of which a step is known
        known = (flags & (END | CUT) == END) & self._cut_ends & self._resets
        self._moves = ((flags & END == 0) | known).astype(np.int64)
        self._discounts = np.where(flags & TERMINATED != 0, self._float.type(0), self._powers[1])
        terminated, final = flags & TERMINATED != 0, self._cut_ends & (flags & CUT == 0)
        self._ends = np.where(flags & END == 0, 4 * self._steps, terminated + 2 * final).astype(np.uint8)  # for `_Ends`
        self._at = 4 * np.arange(self._steps, dtype=np.uint8)[:, None]
        final = {}
        if view.final_observation is not None:
            final = {view.observation + n.removeprefix(view.final_observation): number[n] for n in kinds[1]}
        # XLA replaces numbers below `tiny` by 0. Of larger rewards neither products nor sums are.
        info, least = np.finfo(self._float), float(min(self._powers[self._powers > 0]))
        self._word = np.dtype(f"uint{info.bits}")
        self._one = self._word.type(1)
        bound = np.array(min(float(info.tiny) / float(info.eps) * 4 / least, 1.0), self._float)
        self._least = (bound.view(self._word) << self._one) - self._one
        self._by_end = self._every_end(self._resets or view.final_observation is not None)
        observation, _, action, others = kinds
        names = {"obs": observation, "action": action, "next_obs": observation, "other": others}
        every = names | {"reward": [None], "discount": [None]}
        made = {kind: {name: np.zeros(0) for name in some} for kind, some in every.items()}
        self.example = view.batch(spec, structure, made)  # of leaves that tell what they are
        known = {id(array): (kind, name) for kind, some in made.items() for name, array in some.items()}
        leaves = [known[id(array)] for array in jax.tree.leaves(self.example)]
        # In the order in which they are read: at the anchor, after it, sums, stacks at the anchor, and after it.
        sums = {"reward": 2, "discount": 3}
        groups = [sums.get(kind) or (kind == "next_obs") + 4 * (name in stacked) for kind, name in leaves]
        order = sorted(range(len(leaves)), key=groups.__getitem__)
        self._place = [order.index(i) for i in range(len(leaves))]

        def read_in(group: int, by_name: dict[str, int]) -> list[int]:
            return [by_name[leaves[i][1]] for i in order if groups[i] == group]

        self._here, self._next, self._stacks, self._next_stacks = (read_in(group, number) for group in (0, 1, 4, 5))
        self._final, self._final_stacks = (read_in(group, final) if final else [] for group in (1, 5))

    def _every_end(self, reaches_final: bool) -> _Ends:
        at, kind = np.divmod(np.arange(4 * self._steps + 1), 4)
        terminated, final = kind & 1 != 0, kind & 2 != 0
        rewards = at + (terminated | final)  # that count
        counted = np.where(rewards > np.arange(1, self._steps)[:, None], ~self._word.type(0), self._word.type(0))
        discount = np.where(terminated, self._float.type(0), self._powers[rewards])
        return _Ends(at + final if reaches_final else at, counted, discount, final)

    def memory(self, flags: list[int], undecided: int, step: int) -> tuple[int, ...]:
        """Return the flags of a lane's undecided rows, the last of uint8[W], for `opened`."""
        return tuple(flags[len(flags) - undecided :])

    def opened(self, memory: tuple[int, ...], flags: int, before: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return `memory` after a row, and which rows it opens, counted back from it, oldest first; see `Transition.decide`."""
        if flags & RESET:
            return (), self._anchors(memory, len(memory))
        memory = *memory, flags
        if flags & END and not self._resets:
            return (), self._anchors(memory, len(memory) - 1)
        if len(memory) <= self._steps:
            return memory, ()
        return memory[1:], self._anchors(memory[:1], self._steps)

    def _anchors(self, decided: tuple[int, ...], first: int) -> tuple[int, ...]:
        """Return which of successive rows can be drawn, `first` rows back and fewer."""
        return tuple(first - i for i, flags in enumerate(decided) if not flags & END or self._keeps_end(flags))

    def _keeps_end(self, flags: int) -> bool:
        return bool(flags & TERMINATED) or (self._cut_ends and not flags & CUT)

    def read(self, rows: Any, slot: Numbers) -> list[Numbers] | None:
        """Return the leaves of the transitions at slots int64[B] of `rows`, a `HeldRows`.

        None if it cannot read them, or if NumPy rounds otherwise.
        """
        return self._read_pairs(rows, slot) if self._span.size == 1 else self._read_steps(rows, slot)

    def _read_pairs(self, rows: Any, slot: Numbers) -> list[Numbers] | None:
        """Read transitions of one step without a stack."""
        here = rows.at(slot)
        flags = rows.flags(here)
        after = self._moves.take(flags)
        if rows.lanes > 1:
            after *= rows.lanes
        after += slot
        beyond = rows.at(after)
        # Where the final observation is known it replaces the next one.
        last = (flags & (END | CUT) == END).nonzero()[0] if self._final else _NONE
        wanted = [(self._here, here), (self._next, beyond), ([self._reward], here)]
        leaves = rows.read([*wanted, (self._final, here)] if last.size else wanted)
        if leaves is None:
            return None
        first, end = len(self._here), len(self._here) + len(self._next)
        _replace(leaves[first:end], last, leaves[end + 1 :])
        made = [*leaves[:end], leaves[end].astype(self._float, copy=False), self._discounts.take(flags)]
        return [made[place] for place in self._place]

    def _read_steps(self, rows: Any, slot: Numbers) -> list[Numbers] | None:
        lanes, ends = rows.lanes, self._by_end
        around = slot + self._span * lanes
        path = rows.at(around, by_step=True)
        near = rows.flags(path)
        ends_of = self._ends.take(near[self.back :])
        ends_of += self._at
        end = np.minimum.reduce(ends_of)
        steps = rows.at(around[self.back :], by_step=True) if self.back else path
        reach = ends.reach.take(end)
        beyond = slot + reach * lanes
        known = self._final + self._final_stacks
        final = ends.final.take(end).nonzero()[0] if known else _NONE
        wanted = [([self._reward], steps), (self._here, rows.at(slot)), (self._next, rows.at(beyond))]
        missing = next_missing = None
        if self._stacks or self._next_stacks:
            began = self._began(near)
            (at, missing), (next_at, next_missing) = (self._stack_at(rows, slot, began, x) for x in (None, reach))
            wanted += [(self._stacks, at), (self._next_stacks, next_at)]
        if final.size:
            wanted.append((known, rows.at(beyond - lanes)))  # the row before has the final observation
        leaves = rows.read(wanted)
        reward = None if leaves is None else self._sum(leaves[0], end)
        if leaves is None or reward is None:
            return None
        parts, each = list[list[Numbers]](), iter(leaves[1:])
        for numbers in (self._here, self._next, self._stacks, self._next_stacks, known if final.size else ()):
            parts.append([next(each) for _ in numbers])
        here, after, stacks, next_stacks, finals = parts
        for stack in stacks if missing is not None else ():
            stack[missing] = 0
        for stack in next_stacks if next_missing is not None else ():
            stack[next_missing] = 0
        _replace([*after, *(stack[:, -1] for stack in next_stacks)], final, finals)
        made = [*here, *after, reward, ends.discount.take(end), *stacks, *next_stacks]
        return [made[place] for place in self._place]

    def _stack_at(self, rows: Any, slot: Numbers, began: Numbers | None, reach: Numbers | None) -> tuple[Any, Any]:
        """Return the places [B, k] of the frames of which the newest is `reach` rows after each anchor, or itself.

        Also return which of them are missing, and so zero; None: none is.
        """
        place, missing = self._frames if reach is None else reach[:, None] + self._frames, None
        if began is not None:
            missing = place < began[:, None] if self._zero else None
            place = np.maximum(place, began[:, None])
        return rows.at(slot[:, None] + place * rows.lanes), missing

    def _began(self, near: Numbers) -> Numbers | None:
        """Return the rows from each anchor to the first of its episode, 0 or less, where it is near; None if none is."""
        starts = near[self.back :: -1] & START
        ended = starts.any(axis=0)
        return np.where(ended, -starts.argmax(axis=0), -self.back - self._steps) if ended.any() else None

    def _sum(self, reward: Numbers, end: Numbers) -> Numbers | None:
        """Return the sums [B, ...] of the rewards [n, B, ...] that count; None where XLA may replace numbers by 0."""
        reward = reward.astype(self._float, copy=False)
        total: Numbers = reward[0]
        if self._steps == 1:
            return total
        size = reward.view(self._word) << self._one  # without signs
        size -= self._one  # 0 is the largest
        if size.min() < self._least:
            return None
        with np.errstate(all="ignore"):
            products = reward[1:] * self._later
            words, counted = products.view(self._word), self._by_end.counted.take(end, 1)
            words &= counted.reshape(counted.shape + (1,) * (total.ndim - 1)) if total.ndim > 1 else counted
            for product in products:
                total = total + product
        return total


def _replace(leaves: list[Numbers], at: Numbers, finals: list[Numbers]) -> None:
    """Replace entries `at` of leaves by those of their final observations, if there are any."""
    for leaf, final in zip(leaves, finals, strict=False):
        leaf[at] = final[at]

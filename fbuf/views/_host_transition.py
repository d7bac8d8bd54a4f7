"""`HostTransition`: what `Transition` returns, in NumPy, for one step without a stack. Batches are equal bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from fbuf._core.pytree import Spec
from fbuf._indexing.anchors import CUT, END, RESET, TERMINATED


class HostTransition:
    """Transitions of rows in NumPy.

    Args:
      view: A `Transition` of one step, without stack and ids.
      spec, structure: Of stored rows.
      kinds: The leaves of the observation, of the final one, of the action, and the others.
    """

    def __init__(self, view: Any, spec: Spec, structure: Any, kinds: Any):
        names = list(spec)
        self._number = {name: number for number, name in enumerate(names)}
        self._reward, self._resets = self._number[view.reward], view.autoreset == "next_step"
        dtype = np.dtype(spec[view.reward].dtype)
        self._float = dtype if dtype.kind == "f" else np.dtype(np.float32)
        self._gamma, self._cut_ends = self._float.type(view.gamma), view.rule.cut_ends
        self._final = {}
        if view.final_observation is not None:
            self._final = {view.observation + n.removeprefix(view.final_observation): self._number[n] for n in kinds[1]}
        made = list[tuple[Any, tuple[str, Any]]]()

        def leaf(kind: str, name: Any = None) -> Any:
            made.append((np.zeros(0), (kind, name)))
            return made[-1][0]

        self.example = view.batch(spec, structure, kinds, leaf)  # of leaves that tell what they are
        known = {id(array): what for array, what in made}
        self._leaves = [known[id(array)] for array in jax.tree.leaves(self.example)]

    def opens(self, before: int, flags: int) -> tuple[bool, bool]:
        """Return whether a row opens the one before it and itself, by the flags of both; see `Transition.decide`."""
        if self._resets:
            return not before & (RESET | CUT), False
        return not before & END, bool(flags & END and (flags & TERMINATED or self._cut_ends))

    def read(self, rows: Any, slot: np.ndarray[Any, Any], lane: Any) -> list[np.ndarray[Any, Any]]:
        """Return the leaves of the transitions at slots int64[B] of `rows`, a `HeldRows`."""
        here = rows.at(slot, lane)
        flags = rows.flags(here)
        moves, last = flags & END == 0, None
        if self._cut_ends:
            final = flags & (END | CUT) == END  # the final observation is known
            moves = moves | final if self._resets else moves
            last = final.nonzero()[0] if self._final else None
        following = rows.at(rows.next(slot, moves), lane)
        leaves = []
        for kind, name in self._leaves:
            if kind == "next_obs":
                leaf = rows.take(self._number[name], following)
                if last is not None and last.size:
                    leaf[last] = rows.take(self._final[name], here)[last]
            elif kind == "reward":
                leaf = rows.take(self._reward, here).astype(self._float, copy=False)
            elif kind == "discount":
                leaf = np.where(flags & TERMINATED != 0, self._float.type(0), self._gamma)
            else:
                leaf = rows.take(self._number[name], here)
            leaves.append(leaf)
        return leaves

"""Mark episode ends in flat arrays, and keep the final observations.

A row stores each observation once; its next observation is in the next row. Flat data has `terminals` and `timeouts`, or
`next_observations`. Those are compared with the next rows and stored only where an episode ends (`final_obs`, zeros
elsewhere), so a truncated step bootstraps from its true final observation. If they differ without an end, rows are missing:
the row is marked truncated, so no n-step return or window crosses the gap. The last row is truncated unless it terminated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fbuf._core.pytree import under
from fbuf._host.codecs import Codec, Raw, Zstd
from fbuf._interfaces.view import View
from fbuf._rows.columns import Block, empty
from fbuf.views import Row, Transition

_LARGE = 1024  # bytes a row
Leaves = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shapes and dtypes by name."""


@dataclasses.dataclass(frozen=True)
class Ends:
    """How to find ends in blocks of rows.

    Attributes:
      extra: Boolean leaves that end an episode, besides `terminated` and `truncated`.
      follows: `{leaf of the observation: leaf with that of the next row}`; empty: rows have none.
      lanes: E, where blocks are `[n, E, ...]`; None: one stream.
    """

    extra: tuple[str, ...]
    follows: Mapping[str, str]
    lanes: int | None = None

    def mark_blocks(
        self, call: str, first: int, raw: Iterable[Block], after: Block | None, found: list[int]
    ) -> Iterator[Block]:
        """Yield blocks of rows as they are stored, each after the next one was read.

        Args:
          first: Number of the first row, for messages.
          raw: `{name here: [n, ...]}`, n >= 1.
          after: Observations `[1, ...]` of the row after the last; None: there are no more rows.
          found: Receives, for each block, the number of ends found by comparison.
        Raises:
          ValueError: a reward is not finite, or a flag is not 0 or 1.
        """
        last: Block | None = None
        for block in raw:
            if last is not None:
                yield self._mark(call, first, last, {name: block[name][:1] for name in self.follows}, found)
                first += len(next(iter(last.values())))
            last = block
        if last is not None:
            yield self._mark(call, first, last, after, found)

    def _mark(self, call: str, first: int, rows: Block, after: Block | None, found: list[int]) -> Block:
        count = len(next(iter(rows.values())))
        none = np.zeros(count if self.lanes is None else (count, self.lanes), bool)
        check_rewards(call, first, rows)
        flags = {name: as_flag(call, name, first, rows[name], none.ndim) for name in self.flags(rows)}
        terminated, truncated = flags.get("terminated", none), flags.get("truncated", none).copy()
        for name in self.extra:
            truncated |= flags[name] & ~terminated
        cuts = 0
        if after is None:
            cuts = int((~terminated[-1] & ~truncated[-1]).sum())
            truncated[-1] |= ~terminated[-1]
        out = {name: leaf for name, leaf in rows.items() if name not in self.follows.values()} | flags
        if self.follows:
            equal = ~none
            for here, following in self.follows.items():
                now, then = rows[here], rows[following]
                equal[:-1] &= _rows_equal(now[1:], then[:-1], equal[:-1].shape)
                if after is not None:  # else it is an end anyway
                    equal[-1:] &= _rows_equal(after[here], then[-1:], equal[-1:].shape)
            missing = ~equal & ~terminated & ~truncated
            truncated |= missing
            cuts += int(missing.sum())
            for here, following in self.follows.items():
                out[final_name(here)] = only(rows[following], terminated | truncated)
        found.append(cuts)
        return out | {"terminated": terminated, "truncated": truncated}

    def flags(self, names: Iterable[str]) -> list[str]:
        """Return the leaves that say where episodes end."""
        names = list(names)
        return [name for name in dict.fromkeys(("terminated", "truncated", *self.extra)) if name in names]


def ends_of(call: str, leaves: Leaves, extra: Sequence[str] | None, lanes: int | None = None) -> Ends:
    """Return how ends are found in rows of these leaves.

    Args:
      leaves: Shape and dtype by name here.
      extra: The caller's names of further flags; (): rows are independent; None: not stated.
    Raises:
      ValueError: no leaf says where episodes end, or next observations are not like observations.
    """
    for name in extra or ():
        if name not in leaves:
            raise ValueError(f"{call}: episode_end has '{name}', but rows have {', '.join(leaves)}.")
    nexts = under(NEXT, leaves)
    follows = {"obs" + name[len(NEXT) :]: name for name in nexts}
    now = under("obs", leaves)
    if nexts and (set(follows) != set(now) or any(leaves[a] != leaves[b] for a, b in follows.items())):
        odd = next((n for n in nexts if leaves.get("obs" + n[len(NEXT) :]) != leaves[n]), nexts[0])
        expected = ", ".join(f"{n} {_text(leaves[n])}" for n in now) or "none"
        raise ValueError(
            f"{call}: '{odd}' is {_text(leaves[odd])}; expected the observations' {expected}. Leave it out: fields=."
        )
    clash = next((final_name(here) for here in follows if final_name(here) in leaves), None)
    if clash is not None:
        raise ValueError(f"{call}: '{clash}' is made from next observations, but rows have it. Leave one out: fields=.")
    found = Ends(tuple(extra or ()), follows, lanes)
    if extra is None and not found.flags(leaves):
        raise ValueError(
            f"{call}: no leaf says where episodes end; expected terminals and timeouts among {', '.join(leaves)}. "
            f"Name one: episode_end=('done',), or none: episode_end=()."
        )
    return found


def final_name(observation: str) -> str:
    """Return the name of an observation's final leaf: `obs/image` becomes `final_obs/image`."""
    return FINAL + observation[len("obs") :]


def final_codec(shape: tuple[int, ...], dtype: Any) -> Codec:
    """Return the codec of final observations: nearly all are zeros, so chunks unless they would cost more than the rows."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return Raw() if size <= 4 else Zstd(chunk=64, repack=False) if size < _LARGE else Zstd()


def only(rows: np.ndarray, where: np.ndarray) -> np.ndarray:
    """Return rows where a flag is set, zeros elsewhere."""
    out = empty(rows.shape, rows.dtype)
    out[...] = 0
    out[where] = rows[where]
    return out


def as_flag(call: str, name: str, first: int, rows: np.ndarray, axes: int = 1) -> np.ndarray:
    """Return bool[n], or bool[n, E] of two axes. Raises ValueError: a value is neither 0 nor 1, or a row has several."""
    if rows.ndim != axes:
        expected, fix = ("[N]", "x[:, 0], or lanes=") if axes == 1 else ("[N, E]", "x[..., 0]")
        raise ValueError(
            f"{call}: leaf '{name}' has shape {[len(rows), *rows.shape[1:]]}; expected {expected}. Give {fix}."
        )
    if rows.dtype == bool:
        return rows
    flag = rows.astype(bool)
    wrong = np.argwhere(flag != rows)
    if len(wrong):
        at = tuple(wrong[0])
        raise ValueError(f"{call}: leaf '{name}' is {rows[at]} in row {first + at[0]}; expected 0 or 1.")
    return flag


def check_rewards(call: str, first: int, rows: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError if a reward is not finite."""
    reward = rows.get("reward")
    if reward is None or reward.dtype.kind in "iub":
        return
    fine = np.isfinite(reward.astype(np.float32) if reward.dtype.isbuiltin == 2 else reward)
    if not fine.all():
        at = np.flatnonzero(~fine.reshape(len(reward), -1).all(axis=1))[0]
        raise ValueError(f"{call}: leaf 'reward' is {reward[at]} in row {first + at}; expected finite numbers.")


def _rows_equal(a: np.ndarray, b: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return bool of this shape, which rows are equal; NaN equals NaN."""
    equal = np.ones(shape, bool)
    a, b = a.reshape(-1), b.reshape(-1)
    differ = np.flatnonzero(a != b)  # seldom any
    if a.dtype.kind in "fc":
        differ = differ[~((a[differ] != a[differ]) & (b[differ] != b[differ]))]
    if differ.size:
        equal.reshape(-1)[differ // (a.size // equal.size)] = False
    return equal


def _text(leaf: tuple[tuple[int, ...], np.dtype[Any]]) -> str:
    return f"{leaf[1].name}{list(leaf[0])}"


FINAL = "final_obs"
"""The leaf or subtree with the observation after an episode's last step; zeros in other rows."""
NEXT = "next_obs"
"""What comes after each row: not kept as it is, see `fbuf.datasets._arrays.episodes`."""
KNOWN = {
    "observations": "obs",
    "observation": "obs",
    "actions": "action",
    "rewards": "reward",
    "terminals": "terminated",
    "terminal": "terminated",
    "terminations": "terminated",
    "timeouts": "truncated",
    "timeout": "truncated",
    "truncations": "truncated",
    "next_observations": NEXT,
    "next_observation": NEXT,
}
"""First parts of names, and what they become."""


def default_view(leaves: Iterable[str], rows: int) -> View:
    """Return `Transition` of the leaves, exact at truncations; `Row` if rows are not steps, or there is only one."""
    leaves = list(leaves)
    if rows < 2 or not (under("obs", leaves) and "reward" in leaves and "terminated" in leaves):
        return Row()
    return Transition(
        action="action" if under("action", leaves) else None,
        truncated="truncated" if "truncated" in leaves else None,
        final_observation=FINAL if under(FINAL, leaves) else None,
        autoreset="same_step",
    )

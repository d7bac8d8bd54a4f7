"""Plan exports of steps: which rows are steps, and where their next observations are.

The next observation is that of the next row in the episode, or the row's true final observation. A row whose next observation
is unknown is dropped, and the row before it is truncated. After termination it is the row's own observation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from fbuf.interop._row_reader import Reader
from fbuf.torch._tensordict import under

Roles = Mapping[str, str | None]


class Plan(NamedTuple):
    """What to write of each row, bool[T, E]; computed from the flags before any observation is read."""

    keep: np.ndarray
    from_next: np.ndarray  # its next observation is in the next row
    from_final: np.ndarray  # ... is its own final observation
    terminated: np.ndarray
    truncated: np.ndarray
    boundary: np.ndarray  # the first row of an episode
    dropped: int

    def episodes(self) -> Iterator[np.ndarray]:
        """Yield the episode numbers of the kept rows, lane after lane; they grow from lane to lane."""
        first = 0
        for lane in range(self.keep.shape[1]):
            ids = first + np.cumsum(self.boundary[:, lane], dtype=np.int64)
            first = int(ids.max(initial=first - 1)) + 1
            yield ids[self.keep[:, lane]]


def plan_steps(
    reader: Reader,
    observation: str | None = None,
    action: str | None = None,
    reward: str | None = None,
    terminated: str | None = None,
    truncated: str | None = None,
    next_observation: str | None = None,
    final_observation: str | None = None,
) -> tuple[Roles, dict[str, list[str]], Plan]:
    """Return the name of each role, its leaves, and the plan; None: the name that a `Transition` view has, or its default.

    Raises:
      TypeError, ValueError: as `to_ted`.
    """
    spec, view = reader.spec, reader.buffer.view
    roles: dict[str, str | None] = {
        "observation": observation or getattr(view, "observation", None) or "obs",
        "action": action or getattr(view, "action", None) or "action",
        "reward": reward or getattr(view, "reward", None) or "reward",
        "terminated": terminated or getattr(view, "terminated", None) or "terminated",
        "truncated": truncated or getattr(view, "truncated", None) or ("truncated" if "truncated" in spec else None),
        "next_observation": next_observation,
        "final_observation": final_observation or getattr(view, "final_observation", None),
    }
    leaves = {role: under(name, spec) for role, name in roles.items() if name is not None}
    _check(reader, leaves, roles)
    return roles, leaves, _plan(reader, roles, resets=getattr(view, "autoreset", "same_step") == "next_step")


def _check(reader: Reader, leaves: Mapping[str, list[str]], roles: Roles) -> None:
    """Raise unless every role has its leaves, flags are bool, and next and final observations are like observations."""
    if not reader.buffer.geometry.streams:
        raise TypeError(f"{reader.call}: {reader.buffer.writer!r} keeps rows in no order. Use to_file.")
    spec = reader.spec
    for role, found in leaves.items():
        if not found:
            known = ", ".join(spec)
            raise ValueError(f"{reader.call}: {role} is '{roles[role]}', but rows have {known}. Pass {role}=.")
    for role in ("terminated", "truncated"):
        for name in leaves.get(role, []):
            leaf = spec[name]
            if leaf.dtype != np.bool_ or np.prod(leaf.shape, dtype=int) != 1:
                what = f"{leaf.dtype}{list(leaf.shape)}"
                raise ValueError(f"{reader.call}: {role} is '{name}', {what}; expected one bool per row.")
    if len(leaves["reward"]) != 1:
        raise ValueError(f"{reader.call}: reward is '{roles['reward']}', a subtree; expected a leaf.")
    for role in leaves.keys() & {"next_observation", "final_observation"}:
        expected, other = (
            {n.removeprefix(str(roles[r])): (spec[n].shape, spec[n].dtype) for n in leaves[r]}
            for r in ("observation", role)
        )
        if expected != other:
            raise ValueError(f"{reader.call}: {role} is '{roles[role]}' with {other}; expected {expected}.")


def _plan(reader: Reader, roles: Roles, resets: bool) -> Plan:
    """Return what to write of each row; `resets`: the row after an end has the final observation and is not a step."""
    mask = reader.mask(0, reader.steps)
    terminated = reader.flag(str(roles["terminated"]))
    truncated = np.zeros_like(terminated)
    for name in set(reader.buffer.ends) - {roles["terminated"], roles["truncated"]}:
        truncated |= reader.flag(name) & ~terminated
    if roles["truncated"]:
        truncated |= reader.flag(roles["truncated"])
    cut = reader.cuts()
    truncated |= cut & ~terminated
    end = terminated | truncated
    reset, unsure = np.zeros_like(end), np.zeros_like(end)
    if resets:
        for step, lane in np.argwhere(end & ~cut):  # in order of time; a reset row ends no episode
            if not reset[step, lane] and step + 1 < len(end):
                reset[step + 1, lane] = True
        end &= ~reset
        terminated, truncated = terminated & end, truncated & end
        # The row before the oldest of a full lane is unknown: the oldest may be a reset row.
        unsure[:1] = reader.sizes == reader.buffer.geometry.length
    from_final = end & mask & ~cut if roles["final_observation"] and not resets else np.zeros_like(end)
    from_next = mask & _shift(mask, -1) & (~end | resets) & ~cut & ~from_final
    known = (from_next | from_final | terminated | (roles["next_observation"] is not None)) & ~unsure
    keep = mask & known & ~reset
    truncated |= ~end & ~_shift(keep, -1)
    dropped = int((mask & ~known & ~reset).sum())
    return Plan(keep, from_next, from_final, terminated, truncated & keep, _shift(end, 1), dropped)


def _shift(flag: np.ndarray, steps: int) -> np.ndarray:
    """Return the flags of the row `steps` (1 or -1) before each row; False where there is none."""
    out = np.roll(flag, steps, axis=0)
    out[:1] &= steps < 0
    out[-1:] &= steps > 0
    return out

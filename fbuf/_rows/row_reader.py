"""Read the rows of a state in order of arrival, one leaf and one block at a time, for exports.

One compiled program per leaf asks the storage for a block, so buffers larger than memory can be written. Files are written
leaf after leaf: an npz member is one stream, and an h5 data set is contiguous.

`plan_steps` finds which rows are steps, and where their next observations are: in the next row of the episode, or in the
row's true final observation. A row whose next observation is unknown is dropped, and the row before it is truncated.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.pytree import Spec, exact, under
from fbuf._indexing import scatter
from fbuf._indexing.anchors import CUT
from fbuf._interfaces.storage import Read
from fbuf._rows.columns import BLOCK_BYTES
from fbuf.storages import Ragged


@dataclasses.dataclass(frozen=True)
class Exported:
    """Hold what was written.

    Attributes:
      path: The file.
      rows: Number of rows, over all lanes.
      episodes: Number of episodes, partial ones included; None if not counted.
      dropped: Rows left out because the layout cannot hold them.
      nbytes: Size of the file.
    """

    path: Path
    rows: int
    episodes: int | None
    dropped: int
    nbytes: int


class Reader:
    """The rows of a state, oldest first.

    Attributes:
      spec: Of a row.
      lanes: E; None: one stream.
      sizes: int64[E], rows of each lane.
    """

    def __init__(self, call: str, buffer: Buffer, state: BufferState) -> None:
        if not isinstance(buffer, Buffer) or not isinstance(state, BufferState):
            raise TypeError(f"{call}: {type(buffer).__name__} and {type(state).__name__}; expected a Buffer and state.")
        if isinstance(buffer.storage, Ragged):
            raise TypeError(f"{call}: {buffer.storage!r} has rows of several shapes. Use fbuf.save.")
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
            raise TypeError(f"{call}: the state is traced; expected an eager call, outside jax.jit.")
        self.call, self.buffer, self.state = call, buffer, state
        self.spec: Spec = buffer.storage.spec(state.rows)[0]
        self.lanes = buffer.lanes
        self.sizes = np.asarray(state.ring.size).astype(np.int64)
        self._cursor = np.asarray(state.ring.cursor).astype(np.int64)
        self._order = None if state.scatter is None else np.asarray(scatter.by_age(state.scatter))

    @property
    def steps(self) -> int:
        """Rows of the longest lane."""
        return int(self.sizes.max(initial=0))

    def mask(self, first: int, last: int) -> np.ndarray:
        """Return bool[n, E], which rows exist."""
        age = np.arange(first, last)[:, None]
        if self._order is not None:
            return age * len(self.sizes) + np.arange(len(self.sizes)) < self.sizes.sum()
        return age < self.sizes[None, :]

    def slots(self, age: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """Return the slots of rows by age, 0 the oldest of its lane."""
        lanes, length, _ = self.buffer.geometry
        if self._order is not None:
            return self._order[age * lanes + lane]
        return (self._cursor[lane] - self.sizes[lane] + age) % length * lanes + lane

    def block(self, name: str) -> int:
        """Return the number of rows of a leaf in a block, over all lanes."""
        leaf = self.spec[name]
        rows = BLOCK_BYTES // max(1, math.prod(leaf.shape) * leaf.dtype.itemsize)
        return max(1, min(rows, self.buffer.capacity))

    def leaf(self, name: str, slot: np.ndarray, block: int) -> np.ndarray:
        """Return a leaf of up to `block` rows, `[len(slot), item]`; zeros where the slot is C.

        Raises:
          RuntimeError: a row has expired.
        """
        nowhere = self.buffer.capacity
        padded = np.full(block, nowhere, np.int32)
        padded[: len(slot)] = slot
        rows, ok = _gather(self.buffer, name, self.state, jnp.asarray(padded))
        if ok is not None and not np.asarray(ok)[: len(slot)][slot < nowhere].all():
            raise RuntimeError(f"{self.call}: rows of this state have expired. Use the newest state.")
        return np.asarray(exact(self.call, self.spec, {name: rows})[name])[: len(slot)]

    def rows(self, name: str, slots: np.ndarray, most: int) -> np.ndarray:
        """Return a leaf of rows, read in blocks of at most `most`, which bound the memory."""
        block = min(self.block(name), most)
        parts = [self.leaf(name, slots[i : i + block], block) for i in range(0, len(slots), block)]
        return np.concatenate(parts) if parts else np.zeros((0, *self.spec[name].shape), self.spec[name].dtype)

    def steps_of(self, name: str) -> Iterator[np.ndarray]:
        """Yield a leaf of all rows, in blocks `[n, ...]`, with lanes `[n, E, ...]`; zeros where a lane has fewer rows."""
        lanes = len(self.sizes)
        rows = max(1, self.block(name) // lanes)
        for first in range(0, self.steps, rows):
            last = min(first + rows, self.steps)
            mask = self.mask(first, last)
            age, lane = np.nonzero(mask)
            slot = np.full(mask.shape, self.buffer.capacity, np.int64)
            slot[mask] = self.slots(age + first, lane)
            block = self.leaf(name, slot.reshape(-1), rows * lanes)
            yield block if self.lanes is None else block.reshape(last - first, lanes, *block.shape[1:])

    def flag(self, name: str) -> np.ndarray:
        """Return a boolean leaf of all rows, bool[T, E]; False where a lane has fewer."""
        empty = np.zeros((0, len(self.sizes)), bool)
        return np.concatenate([empty, *(block.reshape(len(block), -1) for block in self.steps_of(name))])

    def cuts(self) -> np.ndarray:
        """Return after which rows is a cut, bool[T, E]."""
        exists = self.mask(0, self.steps)
        if self.state.anchors is None:
            return np.zeros_like(exists)
        slots = self.slots(*np.indices(exists.shape))
        return exists & (np.asarray(self.state.anchors.flags)[slots] & CUT > 0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _gather(buffer: Buffer, name: str, state: Any, slot: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    arrays, ok = buffer.storage.read(state.rows, [Read(name, slot)])
    return arrays[0], ok


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

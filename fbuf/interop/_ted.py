"""Write the rows of a buffer as transitions in torchrl's layout ("TED"), to one `.npz` or `.h5`.

TED has, for every step t, `observation` :math:`o_t`, `action` :math:`a_t`, and under `next`: `observation`
:math:`o_{t+1}`, `reward`, `done`, `terminated`, `truncated`; scalars are `[N, 1]`. `next/observation` is that of the next
row in the episode, or the row's true final observation. A row whose next observation is unknown is dropped, and the row
before it is marked truncated, so nothing bootstraps from an invented observation. After termination it is the observation
itself. Lanes are written one after another; the last row of a lane is truncated unless its episode ended.

Source: torchrl's documentation, "TED-format".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Bar, Progress
from fbuf._rows.row_reader import Exported, Plan, Reader, Roles, plan_steps
from fbuf.interop import _export
from fbuf.interop._export import FORMAT, VERSION

_CALL = "to_ted"


def to_ted(
    path: str | os.PathLike[str],
    buffer: Buffer,
    state: BufferState,
    *,
    observation: str | None = None,
    action: str | None = None,
    reward: str | None = None,
    terminated: str | None = None,
    truncated: str | None = None,
    next_observation: str | None = None,
    final_observation: str | None = None,
    names: Mapping[str, str | None] | None = None,
    episode: str | None = "collector/traj_ids",
    compress: bool = False,
    overwrite: bool = False,
    progress: Progress = None,
) -> Exported:
    """Write transitions in torchrl's layout, lane after lane, each in order of time.

    Columns `[N, ...]`: `observation`, `action`, `next/observation`, `next/reward`, `next/done`, `next/terminated`,
    `next/truncated`, `done`, `terminated`, `truncated` (of the step before: False), `collector/traj_ids`, and every other
    leaf
    under its own name. torchrl reads it with `PersistentTensorDict.from_h5(path)`.

    Args:
      path: Ends in .npz, .h5 or .hdf5 (`pip install "fbuf[h5]"`). The file is written atomically.
      buffer, state: A buffer and its state, which is not changed. Other ends, `Buffer(episode_end=)` and cuts, truncate an
        episode.
      observation, action, reward, terminated, truncated: Names of leaves (the first two: or subtrees); None: those of a
        `Transition` view, else these words, `"obs"` for the first. Rows without `truncated` are never truncated.
      next_observation: Name of a leaf or subtree with :math:`o_{t+1}` in every row.
      final_observation: Name of one that has it in an episode's last row; None: that of a `Transition` view. Where it is
        not stored and the episode terminated, `next/observation` is the observation before the last action.
      names: `{leaf or subtree: name in the file}`; None as a name leaves it out. `{"obs": "pixels"}` names `next/pixels` too.
      episode: Name of the column int64[N] with each row's episode number; None: no such column.
      compress, overwrite, progress: As for `to_file`.
    Returns:
      What was written; `dropped` rows have no known next observation.
    Raises:
      ValueError: a leaf is missing or is not a flag; else as `to_file`.
      TypeError: a writer that keeps rows in no order; else as `to_file`.
    Cost: observations are read twice, all else once, in blocks of about 8 MiB; 23 bytes per row for flags and
      row numbers.

    Example:
      >>> import fbuf, tempfile, numpy as np, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(100, view=fbuf.views.Transition(truncated=None, autoreset="same_step"))
      >>> row = {"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False}
      >>> rows = {"obs": jnp.arange(4.0), "action": jnp.arange(4), "reward": jnp.ones(4)}
      >>> state = buffer.extend(buffer.init(row), rows | {"terminated": jnp.array([False, True, False, False])})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     done = fbuf.interop.to_ted(f"{folder}/ted.npz", buffer, state)
      ...     file = np.load(f"{folder}/ted.npz")
      ...     print(done.rows, done.dropped, file["observation"], file["next/observation"], file["collector/traj_ids"])
      3 1 [0. 1. 2.] [1. 1. 3.] [0 0 1]
    """
    reader = Reader(_CALL, buffer, state)
    named = (observation, action, reward, terminated, truncated, next_observation, final_observation)
    roles, leaves, plan = plan_steps(reader, *named)
    rows = int(plan.keep.sum())
    columns: list[_Column] = list(_columns(reader, plan, roles, leaves, names))
    if episode is not None:
        columns.append((episode, (rows,), np.dtype(np.int64), plan.episodes()))
    _export.check_names(_CALL, [name for name, *_ in columns])
    bar, path = Bar(progress, _CALL, len(columns), " leaves"), Path(path)
    with contextlib.closing(bar), _export.open_sink(_CALL, path, compress, overwrite) as sink:
        for name, shape, dtype, blocks in columns:
            sink.column(name, shape, dtype, blocks)
            bar(1)
        sink.finish({"format": FORMAT, "version": VERSION, "layout": "ted", "lanes": None, "steps": rows})
    episodes = sum(len(np.unique(part)) for part in plan.episodes())
    return Exported(path, rows, episodes, plan.dropped, path.stat().st_size)


_Column = tuple[str, tuple[int, ...], "np.dtype[Any]", Iterator[np.ndarray]]


def _columns(
    reader: Reader, plan: Plan, roles: Roles, leaves: Mapping[str, list[str]], names: Roles | None
) -> Iterator[_Column]:
    """Yield the name, shape, dtype and blocks of each column."""
    rows = int(plan.keep.sum())
    lanes = range(plan.keep.shape[1])

    def blocks(leaf: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        for age, lane, block in _kept(reader, plan, leaf):
            yield reader.leaf(leaf, reader.slots(age, lane), block).reshape(len(age), *shape)

    def successors(leaf: str, final: str | None) -> Iterator[np.ndarray]:
        for age, lane, block in _kept(reader, plan, leaf):
            found = reader.leaf(leaf, reader.slots(age + plan.from_next[age, lane], lane), block)
            last = plan.from_final[age, lane]
            if final is not None and last.any():
                slot = np.where(last, reader.slots(age, lane), reader.buffer.capacity)
                expand = last.reshape(-1, *(1,) * (found.ndim - 1))
                found = np.where(expand, reader.leaf(final, slot, block), found)
            yield found

    def flags(flag: np.ndarray) -> Iterator[np.ndarray]:
        return (flag[plan.keep[:, lane], lane][:, None] for lane in lanes)

    defaults = {str(roles[role]): role for role in ("observation", "action", "reward")}
    other = ("terminated", "truncated", "next_observation", "final_observation")
    used = {name for role in other for name in leaves.get(role, [])}
    stored = [name for name in reader.spec if name not in used]
    for leaf, name in _export.rename_leaves(_CALL, stored, {**defaults, **(names or {})}).items():
        spec = reader.spec[leaf]
        shape, dtype = (rows, *spec.shape), np.dtype(spec.dtype)
        if leaf in leaves["reward"]:
            shape = shape if spec.shape else (rows, 1)
            yield f"next/{name}", shape, dtype, blocks(leaf, shape[1:])
            continue
        yield name, shape, dtype, blocks(leaf, spec.shape)
        if leaf in leaves["observation"]:
            rest = leaf.removeprefix(str(roles["observation"]))
            successor, final = (roles[r] and f"{roles[r]}{rest}" for r in ("next_observation", "final_observation"))
            found = successors(leaf, final) if successor is None else blocks(successor, spec.shape)
            yield f"next/{name}", shape, dtype, found
    ends = {"done": plan.terminated | plan.truncated, "terminated": plan.terminated, "truncated": plan.truncated}
    for name, flag in ends.items():
        yield f"next/{name}", (rows, 1), np.dtype(bool), flags(flag)
        yield name, (rows, 1), np.dtype(bool), flags(np.zeros_like(plan.keep))


def _kept(reader: Reader, plan: Plan, name: str) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield ages and lanes of the kept rows in blocks, lane after lane, and the size of a full block."""
    block = reader.block(name)
    lane, age = np.nonzero(plan.keep.T)
    for start in range(0, len(age), block):
        yield age[start : start + block], lane[start : start + block], block

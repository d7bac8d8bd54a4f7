"""Write the rows of a buffer to one `.npz` or `.h5`: leaves `[T, ...]`, oldest first, or transitions in torchrl's layout.

That layout ("TED") has, for every step t, `observation` :math:`o_t`, `action` :math:`a_t`, and under `next`: `observation`
:math:`o_{t+1}`, `reward`, `done`, `terminated`, `truncated`; scalars are `[N, 1]`. `next/observation` is that of the next
row in the episode, or the row's true final observation. A row whose next observation is unknown is dropped, and the row
before it is marked truncated, so nothing bootstraps from an invented observation. After termination it is the observation
itself. Lanes are written one after another; the last row of a lane is truncated unless its episode ended.

Source: torchrl's documentation, "TED-format".
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Bar, Progress
from fbuf._core.pytree import under
from fbuf._rows.columns import check_name
from fbuf._rows.row_reader import Exported, Plan, Reader, Roles, plan_steps
from fbuf.interop import _hdf5, _npz

H5 = (".h5", ".hdf5")
MASK = "__mask__"  # which rows there are, where lanes hold different numbers
RESERVED = (_npz.ABOUT, MASK)


class Sink:
    """Write columns; the description and the dtypes that the format lacks follow at the end."""

    def __init__(self, writer: _npz.Writer | _hdf5.Writer) -> None:
        self._writer = writer
        self.dtypes: dict[str, str] = {}
        self.names: list[str] = []

    def column(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], blocks: Iterable[np.ndarray]) -> None:
        """Write one leaf of all rows from blocks; dtypes beyond numpy's own (bfloat16, float8) as integers."""
        self.names.append(name)
        if dtype.isbuiltin == 2:
            self.dtypes[name] = dtype.name
            dtype = np.dtype(f"u{dtype.itemsize}")
            blocks = (np.ascontiguousarray(block).view(dtype) for block in blocks)
        self._writer.column(name, shape, dtype, blocks)

    def finish(self, about: Mapping[str, Any]) -> None:
        """Write the description."""
        self._writer.close(json.dumps({**about, "columns": self.names, "dtypes": self.dtypes}, sort_keys=True).encode())


@contextlib.contextmanager
def open_sink(call: str, path: Path, compress: bool, overwrite: bool) -> Iterator[Sink]:
    """Yield a `Sink` whose file replaces `path` after the block; an exception leaves everything unchanged.

    Raises:
      ValueError: the name does not end in .npz, .h5 or .hdf5.
      FileExistsError: the file exists, and `overwrite` is False.
      OSError: the file cannot be written.
    """
    if path.suffix not in (".npz", *H5):
        raise ValueError(f"{call}: {path} ends in {path.suffix!r}; expected .npz, .h5 or .hdf5.")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{call}: {path} exists. Pass overwrite=True, or choose another name.")
    if path.suffix in H5:
        _hdf5.library(call)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    writer: _npz.Writer | _hdf5.Writer = (_hdf5.Writer if path.suffix in H5 else _npz.Writer)(part, compress)
    try:
        yield Sink(writer)
        _sync(part)
        if overwrite:
            os.replace(part, path)
        else:
            _place_new(call, part, path)
        _sync(path.parent)
    except BaseException:
        with contextlib.suppress(Exception):
            writer.file.close()
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _place_new(call: str, part: Path, path: Path) -> None:
    """Give a file its name. Raises FileExistsError if another file has got that name in the meantime, which stays."""
    try:
        os.link(part, path)
    except OSError:  # also where a file system has no links
        if os.path.lexists(path):
            raise FileExistsError(f"{call}: {path} exists. Pass overwrite=True, or choose another name.") from None
        os.replace(part, path)
    else:
        part.unlink()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_leaves(call: str, leaves: Iterable[str], names: Mapping[str, str | None] | None) -> dict[str, str]:
    """Return `{leaf: name in the file}`; a subtree may be renamed or left out (None).

    Raises:
      ValueError: no leaf has the name, or the new name is invalid.
    """
    leaves, names = list(leaves), dict(names or {})
    out: dict[str, str | None] = {leaf: leaf for leaf in leaves}
    for name, to in sorted(names.items(), key=lambda item: len(item[0])):  # the longest name counts
        if not (found := under(name, leaves)):
            raise ValueError(f"{call}: names has '{name}', but rows have {', '.join(leaves)}.")
        out |= {leaf: None if to is None else check_name(call, to + leaf[len(name) :]) for leaf in found}
    return {leaf: to for leaf, to in out.items() if to is not None}


def check_names(call: str, names: Iterable[str]) -> None:
    """Raise ValueError if two columns would have one name, or one would be a folder of another."""
    seen: set[str] = set()
    for name in names:
        if name in seen or name in RESERVED:
            what = "is reserved" if name in RESERVED else "would be two columns"
            raise ValueError(f"{call}: '{name}' {what}. Rename a leaf: names={{'{name}': ...}}.")
        seen.add(name)
    for name in seen:
        if len(under(name, seen)) > 1:
            raise ValueError(f"{call}: '{name}' would be a column and a group. Rename it: names={{'{name}': ...}}.")


FORMAT, VERSION = "fbuf rows", 1


def to_file(
    path: str | os.PathLike[str],
    buffer: Buffer,
    state: BufferState,
    *,
    names: Mapping[str, str | None] | None = None,
    episode: str | None = None,
    compress: bool = False,
    overwrite: bool = False,
    progress: Progress = None,
) -> Exported:
    """Write all rows, oldest first, to one `.npz` or `.h5`, which `from_file` reads.

    Leaves are arrays `[T, ...]`, with lanes `[T, E, ...]`, under their names (`"next/obs"`; groups in HDF5). If lanes hold
    different numbers of rows, `__mask__` bool `[T, E]` marks those that exist. Priorities, counters, cuts and the
    buffer's configuration are not in the file: use `fbuf.save`.

    Args:
      path: Ends in .npz, .h5 or .hdf5 (`pip install "fbuf[h5]"`). The file is written atomically.
      buffer, state: A buffer and its state, which is not changed.
      names: `{leaf or subtree: name in the file}`; None as a name leaves it out.
      episode: Name of an additional column, int64: the number of each row's episode, which a cut ends too. Numbers grow along
        a lane, and no two lanes share one.
      compress: Deflate (npz) or gzip with checksums (h5): smaller, and much slower.
      overwrite: Whether to replace an existing file.
      progress: True: a bar; or a function of `(done, total)`, in leaves.
    Returns:
      What was written.
    Raises:
      FileExistsError: the file exists, and overwrite is False.
      ImportError: h5py is missing.
      RuntimeError: rows of this state have expired on the host.
      TypeError: the storage is `Ragged`; the state is traced.
      ValueError: another ending; names that no leaf has or that clash.
    Cost: O(C) reads, one leaf after another in blocks of about 8 MiB; memory for a few of these.

    Example:
      >>> import fbuf, tempfile, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(100)
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     done = fbuf.interop.to_file(f"{folder}/rows.npz", buffer, state, names={"t": "time"})
      ...     buffer, state = fbuf.interop.from_file(done.path).into()
      >>> buffer.rows(state).data["time"].tolist()
      [0, 1, 2, 3, 4]
    """
    call = "to_file"
    reader = Reader(call, buffer, state)
    columns = rename_leaves(call, reader.spec, names)
    check_names(call, [*columns.values(), *([episode] if episode else [])])
    if episode and not ((buffer.ends or buffer.view.rule.episode) and buffer.geometry.streams):
        raise ValueError(f"{call}: episode is '{episode}', but rows have no ends. Use Buffer(episode_end=).")
    lanes = () if reader.lanes is None else (reader.lanes,)
    steps, number = reader.steps, int(reader.sizes.sum())
    episodes = None
    bar, path = Bar(progress, call, len(columns), " leaves"), Path(path)
    with contextlib.closing(bar), open_sink(call, path, compress, overwrite) as sink:
        for leaf, name in columns.items():
            spec = reader.spec[leaf]
            shape = (steps, *lanes, *spec.shape)
            sink.column(name, shape, np.dtype(spec.dtype), reader.steps_of(leaf))
            bar(1)
        if episode:
            ids, episodes = _episodes(reader, buffer.ends)
            sink.column(episode, (steps, *lanes), np.dtype(np.int64), [ids.reshape(steps, *lanes)])
        if number != steps * len(reader.sizes):
            sink.column(MASK, (steps, *lanes), np.dtype(bool), [reader.mask(0, steps).reshape(steps, *lanes)])
        sink.finish({"format": FORMAT, "version": VERSION, "layout": "rows", "lanes": reader.lanes, "steps": steps})
    return Exported(path, number, episodes, 0, path.stat().st_size)


def _episodes(reader: Reader, ends: tuple[str, ...]) -> tuple[np.ndarray, int]:
    """Return the episode of each row, int64[T, E], and the number of episodes."""
    end = reader.cuts()
    for name in ends:
        end |= reader.flag(name)
    exists = reader.mask(0, reader.steps)
    before = np.cumsum(end, axis=0, dtype=np.int64) - end
    ids = before * len(reader.sizes) + np.arange(len(reader.sizes))
    return np.where(exists, ids, -1), len(np.unique(ids[exists]))


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
    check_names(_CALL, [name for name, *_ in columns])
    bar, path = Bar(progress, _CALL, len(columns), " leaves"), Path(path)
    with contextlib.closing(bar), open_sink(_CALL, path, compress, overwrite) as sink:
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
    for leaf, name in rename_leaves(_CALL, stored, {**defaults, **(names or {})}).items():
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

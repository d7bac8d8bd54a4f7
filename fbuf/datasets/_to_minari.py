"""Write the episodes of a buffer as a Minari data set, by the `minari` package."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Bar, Progress
from fbuf._core.pytree import nested
from fbuf._rows.columns import check_name
from fbuf._rows.row_reader import Exported, Plan, Reader, Roles, plan_steps
from fbuf.datasets._minari import VARIABLE, import_minari

_CALL = "to_minari"
_BLOCK = 256  # rows of a read: one program a leaf, for episodes of every length


def to_minari(
    buffer: Buffer,
    state: BufferState,
    id: str,
    *,
    observation_space: Any,
    action_space: Any,
    root: str | os.PathLike[str] | None = None,
    metadata: Mapping[str, Any] | None = None,
    observation: str | None = None,
    action: str | None = None,
    reward: str | None = None,
    terminated: str | None = None,
    truncated: str | None = None,
    next_observation: str | None = None,
    final_observation: str | None = None,
    progress: Progress = None,
) -> Exported:
    """Write all episodes as a new Minari data set, which `minari.load_dataset` and `fbuf.datasets.minari` read.

    Values and dtypes are written as they are (HDF5, images without JPEG). Other leaves of a row become infos of its step.

    Args:
      buffer, state: A buffer and its state, which is not changed. Other ends, `Buffer(episode_end=)` and cuts, truncate an
        episode.
      id: Minari's id, "cartpole/mine-v0".
      observation_space, action_space: Gymnasium spaces of the leaves. `Dict`s, and `Tuple`s of leaves "0", "1", ..., nest as
        these do.
      root: Folder of Minari's data sets; None: `$MINARI_DATASETS_PATH`, or ~/.minari/datasets.
      metadata: Of the data set: `{"algorithm_name": "DQN", "author": {"me"}}`.
      observation, action, reward, terminated, truncated, next_observation, final_observation: As for `interop.to_ted`. A step
        whose next observation is unknown is dropped, and the step before it truncated. After termination an unknown one is
        the observation before the last action.
      progress: True: a bar; or a function of `(done, total)`, in episodes.
    Returns:
      What was written; `dropped` rows have no known next observation.
    Raises:
      FileExistsError: the data set exists.
      ImportError: minari is missing (`pip install "fbuf[minari]"`).
      RuntimeError: rows of this state have expired on the host.
      TypeError: the storage is `Ragged`, or the writer keeps rows in no order; a leaf is of a dtype that NumPy lacks.
      ValueError: a leaf is missing; a space has other leaves, shapes or dtypes; or there is no step.
    Cost: every row is read once; memory for one episode. The folder appears when it is complete.

    Example:
      >>> import fbuf, tempfile, jax.numpy as jnp
      >>> from gymnasium.spaces import Box, Discrete
      >>> buffer = fbuf.Buffer(100, view=fbuf.views.Transition(truncated=None, autoreset="same_step"))
      >>> row = {"obs": jnp.float32(0), "action": 0, "reward": 0.0, "terminated": False}
      >>> rows = {"obs": jnp.arange(4.0), "action": jnp.array([0, 1, 0, 1]), "reward": jnp.ones(4)}
      >>> state = buffer.extend(buffer.init(row), rows | {"terminated": jnp.array([False, True, False, False])})
      >>> with tempfile.TemporaryDirectory() as root:
      ...     spaces = {"observation_space": Box(0, 9, ()), "action_space": Discrete(2)}
      ...     done = fbuf.datasets.to_minari(buffer, state, "toy-v0", root=root, **spaces)
      >>> done.rows, done.episodes, done.dropped
      (3, 2, 1)
    """
    package = import_minari(_CALL)
    base = Path(root if root is not None else os.environ.get(VARIABLE, "~/.minari/datasets")).expanduser()
    path = base / check_name(_CALL, id)
    if path.exists():
        raise FileExistsError(f"{_CALL}: {path} exists, and was not changed. Choose another id, or delete it.")
    reader = Reader(_CALL, buffer, state)
    named = (observation, action, reward, terminated, truncated, next_observation, final_observation)
    roles, leaves, plan = plan_steps(reader, *named)
    if not plan.keep.any():
        raise ValueError(f"{_CALL}: no row has a known next observation; expected one step at least.")
    _check_leaves(reader, leaves)
    for role, space in {"observation": observation_space, "action": action_space}.items():
        _check_space(reader, role, space, str(roles[role]), leaves[role])

    from minari.dataset.minari_storage import MinariStorage

    spaces = {"observation": observation_space, "action": action_space}
    total = sum(1 for _ in _episodes(plan))
    base.mkdir(parents=True, exist_ok=True)
    bar = Bar(progress, _CALL, total, " episodes")
    with contextlib.closing(bar), tempfile.TemporaryDirectory(dir=base, prefix=".to_minari-") as work:
        folder = Path(work) / "set"
        folder.mkdir()
        storage = MinariStorage.new(folder / "data", observation_space, action_space, jpeg_encoding=False)
        about = {"dataset_id": id, "minari_version": package.__version__, **(metadata or {})}
        storage.update_metadata(about)
        storage.update_episodes(_episode_buffers(reader, plan, roles, leaves, spaces, bar))
        path.parent.mkdir(parents=True, exist_ok=True)
        folder.rename(path)
    size = sum(file.stat().st_size for file in (path / "data").iterdir())
    return Exported(path, int(plan.keep.sum()), total, plan.dropped, size)


def _episode_buffers(
    reader: Reader, plan: Plan, roles: Roles, leaves: Mapping[str, Sequence[str]], spaces: Mapping[str, Any], bar: Bar
) -> Iterator[Any]:
    """Yield the episodes as Minari takes them."""
    from minari.data_collector import EpisodeBuffer

    used = {name for found in leaves.values() for name in found}
    infos = [name for name in reader.spec if name not in used]
    final = roles["next_observation"] or roles["final_observation"]
    observation, action = str(roles["observation"]), str(roles["action"])

    read = functools.partial(reader.rows, most=_BLOCK)
    for age, lane in _episodes(plan):
        slot, last = reader.slots(age, np.full_like(age, lane)), (age[-1], lane)
        after = reader.slots(age[-1:] + plan.from_next[last], np.array([lane]))
        seen = {name: read(name, np.concatenate([slot, after])) for name in leaves["observation"]}
        if final is not None and (plan.from_final[last] or roles["next_observation"]):
            for name, leaf in seen.items():
                leaf[-1:] = read(final + name.removeprefix(observation), slot[-1:])
        yield EpisodeBuffer(
            observations=_as_space(spaces["observation"], observation, seen),
            actions=_as_space(spaces["action"], action, {name: read(name, slot) for name in leaves["action"]}),
            rewards=read(leaves["reward"][0], slot),
            terminations=plan.terminated[age, lane],
            truncations=plan.truncated[age, lane],
            infos=nested({name: read(name, slot) for name in infos}),
        )
        bar(1)


def _episodes(plan: Plan) -> Iterator[tuple[np.ndarray, int]]:
    """Yield the ages of the rows of each episode, and its lane."""
    for lane, ids in enumerate(plan.episodes()):
        age = np.flatnonzero(plan.keep[:, lane])
        for part in np.split(age, np.flatnonzero(np.diff(ids)) + 1):
            if len(part):
                yield part, lane


def _check_leaves(reader: Reader, leaves: Mapping[str, Sequence[str]]) -> None:
    """Raise unless HDF5 can hold every leaf, and rewards are single numbers."""
    for name, leaf in reader.spec.items():
        if np.dtype(leaf.dtype).kind not in "biuf":
            raise TypeError(f"{_CALL}: leaf '{name}' is {leaf.dtype}, which HDF5 lacks. Convert it.")
    name = leaves["reward"][0]
    if reader.spec[name].shape:
        raise ValueError(f"{_CALL}: reward is '{name}' of shape {reader.spec[name].shape}; expected one number a row.")


def _parts(space: Any) -> dict[str, Any] | None:
    """Return the spaces within a `Dict` or a `Tuple`, by name; None for other spaces."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    return {str(i): part for i, part in enumerate(space.spaces)} if isinstance(space, spaces.Tuple) else None


def _check_space(reader: Reader, role: str, space: Any, root: str, leaves: Sequence[str]) -> None:
    """Raise unless the space has the leaves, their shapes, and dtypes that hold theirs."""
    expected: dict[str, Any] = {}

    def visit(part: Any, name: str) -> None:
        parts = _parts(part)
        if parts is None:
            expected[name] = part
        for key, child in (parts or {}).items():
            visit(child, f"{name}/{key}")

    visit(space, root)
    found = {name: reader.spec[name] for name in leaves}
    if expected.keys() == found.keys() and all(
        part.shape == found[name].shape and np.can_cast(found[name].dtype, part.dtype)
        for name, part in expected.items()
    ):
        return
    shown = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in found.items()}
    raise ValueError(f"{_CALL}: {role}_space is {space}, but rows have {shown}. Give the space of these leaves.")


def _as_space(space: Any, name: str, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return arrays in dicts and tuples as the space has them."""
    parts = _parts(space)
    if parts is None:
        return arrays[name]
    found = {key: _as_space(part, f"{name}/{key}", arrays) for key, part in parts.items()}
    return found if hasattr(space, "keys") else tuple(found.values())

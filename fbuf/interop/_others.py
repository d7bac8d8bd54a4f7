"""Read buffers of Stable-Baselines3, cpprb and skrl, OGBench's data, and episodes of RLDS; none of them is imported."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fbuf._core.arguments import is_int
from fbuf._rows.columns import Column, Fields, array_column, choose_leaves, columns_of, flag, renamed
from fbuf.datasets._arrays.episodes import NEXT
from fbuf.interop import _npz
from fbuf.interop._formats import NAMES, check_ends, chosen_steps, flags, is_taken, known_steps, squeezed
from fbuf.interop._source import Source

Ends = Literal["terminated", "trajectory"]
_OGBENCH = dict.fromkeys(("terminals", "valids", "masks"), "done")


def from_sb3(buffer: Any, *, fields: Fields = None, dtypes: Mapping[str, str] | None = None) -> Source:
    """Return the rows of a replay buffer of Stable-Baselines3, oldest first: plain, dictionaries, n steps, HER.

    `dones` that are `timeouts` are truncations, others terminations, as Stable-Baselines3 bootstraps; next observations at ends
    become `final_obs`. With `optimize_memory_usage` they are unknown at ends, and the oldest row of a full buffer, which has no
    observation of its own, is left out.

    Args:
      buffer: `model.replay_buffer`, after `model.load_replay_buffer(path)`; its file is a pickle, which is not read here.
      fields, dtypes: As for `from_arrays`; by default discrete actions are `[]`, and 64-bit values become 32-bit ones.
    Returns:
      The source, with lanes if there are several environments.
    Raises:
      TypeError: it is no replay buffer of Stable-Baselines3.

    Example:
      buffer, state = fbuf.interop.from_sb3(model.replay_buffer).into()
    """
    call = "from_sb3"
    names = ("observations", "actions", "rewards", "dones", "timeouts", "pos", "full", "n_envs")
    if missing := [name for name in names if not hasattr(buffer, name)]:
        raise TypeError(
            f"{call}: buffer is a {type(buffer).__name__} without {missing[0]}; expected a ReplayBuffer of Stable-Baselines3. "
            f"Load its pickle first: model.load_replay_buffer(path)."
        )
    room, envs, position = len(buffer.dones), int(buffer.n_envs), int(buffer.pos)
    compact = bool(getattr(buffer, "optimize_memory_usage", False))
    steps, oldest = (room, position) if buffer.full else (position, 0)
    skip = int(compact and bool(buffer.full))
    steps, oldest = steps - skip, oldest + skip
    place = (oldest + np.arange(steps)) % max(room, 1)
    arrays = {"obs": buffer.observations, "action": buffer.actions, "reward": buffer.rewards}
    if not compact:
        arrays[NEXT] = buffer.next_observations

    def ring(leaf: Any) -> Column:
        array = np.asarray(leaf)

        def read(first: int, last: int) -> np.ndarray:
            rows = array[place[first:last]]
            return rows if envs > 1 else rows[:, 0]

        return Column(array.shape[2:], array.dtype, read, steps)

    columns = {name: ring(leaf) for key, value in arrays.items() for name, leaf in _leaves(key, value).items()}
    if not columns["action"].dtype.kind == "f":
        columns["action"] = squeezed(columns["action"])
    done, late = ring(buffer.dones), ring(buffer.timeouts)
    columns |= {"terminated": flag(np.greater, done, late), "truncated": flag(np.logical_and, done, late)}
    made = Source("", {}, 0, call=call, fields=fields, dtypes=dtypes)
    return known_steps(made, "Stable-Baselines3 buffer", columns, steps, lanes=envs if envs > 1 else None)


def _leaves(name: str, value: Any) -> dict[str, Any]:
    return {f"{name}/{key}": leaf for key, leaf in value.items()} if isinstance(value, Mapping) else {name: value}


def from_cpprb(
    transitions: Mapping[str, Any],
    *,
    position: int,
    ends: Ends,
    fields: Fields = None,
    dtypes: Mapping[str, str] | None = None,
) -> Source:
    """Return the rows of `buffer.get_all_transitions()` of cpprb, oldest first.

    `obs`, `act`, `rew`, `next_obs`, `done` become `obs`, `action`, `reward`, `final_obs` at ends, and flags; scalars are `[]`.
    Where the next observation is not the next row's, and `done` is not set, the row is truncated. Rows of a buffer
    with `Nstep` are not steps: nothing tells their sums of rewards from rewards.

    Args:
      transitions: The dict, whose rows are in order of their slots.
      position: `buffer.get_next_index()`, the slot of the oldest row of a full buffer.
      ends: What the caller stored as `done`: "terminated", or "trajectory" if time limits are among them.
      fields, dtypes: As for `from_arrays`; by default 64-bit values become 32-bit ones.
    Returns:
      The source.

    Example:
      buffer, state = fbuf.interop.from_cpprb(
        buffer.get_all_transitions(), position=buffer.get_next_index(), ends="terminated"
      ).into()
    """
    made = Source("", {}, 0, call="from_cpprb", fields=fields, dtypes=dtypes)
    slots = {
        name: c
        for name, c in columns_of(made.call, transitions).items()
        if is_taken(name, NAMES | {"done": "done"}, fields)
    }
    room = min((column.rows for column in slots.values()), default=0)
    if not is_int(position) or not 0 <= position <= room:
        raise ValueError(f"{made.call}: position is {position!r}; expected buffer.get_next_index(), 0 to {room}.")
    found = {name: _rolled(column, position) for name, column in slots.items()}
    columns = {
        renamed(name, NAMES): squeezed(column) if name in ("rew", "done") else column for name, column in found.items()
    }
    done = columns.pop("done", None)
    rows = min((column.rows for column in columns.values()), default=0)
    if done is None or not {"obs", "action", "reward"} <= {name.split("/")[0] for name in columns} or rows != done.rows:
        raise ValueError(
            f"{made.call}: transitions have {', '.join(found)}; expected obs, act, rew and done of one length."
        )
    last = np.arange(rows) == rows - 1
    return known_steps(
        made, "cpprb buffer", columns | flags(done, last, check_ends(made.call, "done", ends, done)), rows
    )


def _rolled(column: Column, oldest: int) -> Column:
    """Return the rows of a ring in order of time."""
    place = np.roll(np.arange(column.rows), -oldest)
    return column if column.refused else array_column(column.read(0, column.rows)[place], column.shape)


def _opened(
    made: Source, data: str | os.PathLike[str] | Mapping[str, Any]
) -> tuple[Source, Callable[[], Mapping[str, Column]]]:
    """Return the source with the path in its messages, and a function that opens the arrays of a dict or an `.npz`."""
    if isinstance(data, Mapping):
        return made, lambda: columns_of(made.call, data)
    path = Path(data).expanduser()
    return dataclasses.replace(made, call=f"{made.call}: {path}"), lambda: _npz.Reader(path).columns


def from_skrl(
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    position: int,
    filled: bool,
    fields: Fields = None,
    dtypes: Mapping[str, str] | None = None,
) -> Source:
    """Return the rows of a memory of skrl, saved as `.npz`, oldest first, in a lane for each environment.

    Memories of gymnasium's vector environments have the steps in which these reset. Pass a buffer whose view has
    `autoreset="next_step"`: it does not draw the step after an end. Without `truncated`, as of DQN, limits are not ends.

    Args:
      path: The file, or its arrays `[memory_size, num_envs, size]` in a dict.
      position: `memory.memory_index`, the next slot to write, which the file does not have.
      filled: `memory.filled`, whether the ring was full once.
      fields, dtypes: As for `from_arrays`; by default 64-bit values become 32-bit ones. `states` are the observations if there
        are no `observations`.
    Returns:
      The source.
    Raises:
      ValueError: a row that was never written is among those of this position: floats that are not numbers.

    Example:
      buffer, state = fbuf.interop.from_skrl("memory.npz", position=memory.memory_index, filled=memory.filled).into()
    """
    made, opened = _opened(Source("", {}, 0, call="from_skrl", fields=fields, dtypes=dtypes), path)
    found = opened()
    names = NAMES | ({} if "observations" in found else {"states": "obs", "next_states": NEXT})
    arrays = {name: c.read(0, c.rows) for name, c in found.items() if is_taken(name, names, fields)}
    lead = {array.shape[:2] for array in arrays.values() if array.ndim == 3}
    if len(lead) != 1 or any(array.ndim != 3 or not array.shape[1] for array in arrays.values()):
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        raise ValueError(
            f"{made.call}: arrays have shapes {shapes}; expected [memory_size, num_envs, size] of a memory."
        )
    room, envs = next(iter(lead))
    if not is_int(position) or not 0 <= position <= room:
        raise ValueError(f"{made.call}: position is {position!r}; expected memory.memory_index, 0 to {room}.")
    position %= room if filled else room + 1
    place = np.roll(np.arange(room), -position) if filled else np.arange(position)
    columns = {}
    for name, array in arrays.items():
        rows = array[place] if envs > 1 else array[place, 0]
        if rows.dtype.kind == "f" and len(rows) and np.isnan(rows).reshape(len(rows), -1).all(axis=1).any():
            raise ValueError(
                f"{made.call}: '{name}' was never written in some of {len(rows)} rows; check position and filled."
            )
        here = names.get(name, name)
        column = array_column(rows, array.shape[2:])
        columns[here] = squeezed(column) if here in ("reward", "terminated", "truncated") else column
    lanes = envs if envs > 1 else None
    if "terminated" not in columns:
        raise ValueError(f"{made.call}: has {', '.join(arrays)}; expected terminated and truncated.")
    return known_steps(made, "skrl memory", columns, len(place), lanes=lanes)


def from_ogbench(
    data: str | os.PathLike[str] | Mapping[str, Any], *, fields: Fields = None, dtypes: Mapping[str, str] | None = None
) -> Source:
    """Return the steps of OGBench's files, or of what its `load_dataset` returns, regular or compact.

    `terminals` end trajectories, and are truncations with the final state as `final_obs`; where `masks` are 0, as in its tasks
    with rewards, steps are terminations. Final states are no steps.

    Args:
      data: An `.npz` of OGBench, or a dict of its loader.
      fields, dtypes: As for `from_arrays`; by default `qpos`, `qvel` and `button_states` are left out, and 64-bit values become
        32-bit ones.
    Returns:
      The source.
    Raises:
      ValueError: it has no observations, actions and terminals, or its trajectories do not end in a final state.

    Example:
      >>> import fbuf, numpy as np
      >>> data = {"observations": np.arange(3.0), "actions": np.zeros((3, 1)), "terminals": np.array([0, 0, 1])}
      >>> buffer, state = fbuf.interop.from_ogbench(data).into()
      >>> buffer.rows(state).data["final_obs"].tolist()
      [0.0, 2.0]
    """
    made, opened = _opened(Source("", {}, 0, call="from_ogbench", fields=fields, dtypes=dtypes), data)
    found = {name: column for name, column in opened().items() if is_taken(name, NAMES | _OGBENCH, fields)}
    sizes = {name: column.rows for name, column in found.items()}
    if not {"observations", "actions", "terminals"} <= set(found) or len(set(sizes.values())) != 1:
        raise ValueError(f"{made.call}: data has {sizes}; expected observations, actions and terminals of one length.")
    total = sizes["terminals"]
    names = {name: renamed(name, NAMES) for name in found if name not in _OGBENCH}
    end = found["terminals"].read(0, total) != 0
    masks = found["masks"].read(0, total) if "masks" in found else np.ones(total)
    if "next_observations" in found:
        step = np.arange(total)
        last = end
    else:
        final = found["valids"].read(0, total) == 0 if "valids" in found else end
        if total and not final[-1]:
            raise ValueError(f"{made.call}: the last row is not the final state of a trajectory. Load the data again.")
        step = np.flatnonzero(~final)
        last = final[step + 1]
        if "valids" in found and (end != (final | np.append(final[1:], True)))[:total].any():
            raise ValueError(f"{made.call}: valids and terminals contradict each other. Load the data again.")

    def taken(column: Column, ahead: int = 0) -> Column:
        def read(first: int, stop: int) -> np.ndarray:
            at = step[first:stop] + ahead
            if not len(at):
                return np.zeros((0, *column.shape), column.dtype)
            return column.read(int(at[0]), int(at[-1]) + 1)[at - at[0]]

        return dataclasses.replace(column, read=read, rows=len(step))

    columns = {here: taken(found[source]) for source, here in names.items()}
    if "next_observations" not in found:
        columns[NEXT] = taken(opened()["observations"], 1)  # a member of a zip is read forwards, once
    ended = masks[step] == 0
    columns |= {"terminated": array_column(ended), "truncated": array_column(last & ~ended)}
    return known_steps(made, "OGBench", columns, len(step), forward=not isinstance(data, Mapping))


def from_rlds(data: Iterable[Any], *, fields: Fields = None, dtypes: Mapping[str, str] | None = None) -> Source:
    """Return the steps of RLDS, from an iterable of episodes or of steps, as `tensorflow_datasets` gives them.

    The last step of an episode has its final observation only. An episode whose last step `is_terminal` ends in a termination,
    any other in a truncation with this final observation. An episode that is cut before `is_last` loses its last step.

    Args:
      data: Dicts with `steps`, an iterable or a dict of arrays; or dicts of single steps (`observation`, `action`, `reward`,
        `is_first`, `is_last`, `is_terminal`), of NumPy or anything that NumPy reads. It is read once.
      fields, dtypes: As for `from_arrays`; by default 64-bit values become 32-bit ones, and `discount` is left out.
    Returns:
      The source: `save` it, or fill a buffer with it that is passed.

    Example:
      >>> import fbuf, numpy as np
      >>> steps = [{"observation": np.float32(t), "action": t, "reward": 1.0, "is_first": t == 0, "is_last": t == 3,
      ...           "is_terminal": t == 3} for t in range(4)]
      >>> buffer, state = fbuf.interop.from_rlds([{"steps": steps}]).into(fbuf.Buffer(10))
      >>> buffer.rows(state).data["terminated"][:3].tolist()
      [False, False, True]
    """
    made = Source("RLDS", {}, -1, call="from_rlds", dtypes=dtypes, plain=False, narrow=True)
    return dataclasses.replace(made, tables=_chosen_tables(made.call, data, fields))


def _chosen_tables(call: str, data: Iterable[Any], fields: Fields) -> Iterator[dict[str, Any]]:
    for table in _episode_tables(call, data):
        if fields is not None:
            names = choose_leaves(call, columns_of(call, table), chosen_steps(call, table, fields))
            table = {here: table[source] for source, here in names.items()}
        yield table


def _episode_tables(call: str, data: Iterable[Any]) -> Iterator[dict[str, Any]]:
    steps: list[Mapping[str, Any]] = []
    for item in data:
        if not isinstance(item, Mapping):
            raise TypeError(f"{call}: data gives a {type(item).__name__}; expected dicts of episodes or steps.")
        if "steps" in item:
            inner = item["steps"]
            if isinstance(inner, Mapping):
                leaves = columns_of(call, inner)
                yield from _table(call, {name: column.read(0, column.rows) for name, column in leaves.items()})
            else:
                yield from _table(call, _stacked(call, list(inner)))
            continue
        if steps and bool(np.asarray(item.get("is_first", False))):
            yield from _table(call, _stacked(call, steps))
            steps = []
        steps.append(item)
        if bool(np.asarray(item.get("is_last", False))):
            yield from _table(call, _stacked(call, steps))
            steps = []
    if steps:
        yield from _table(call, _stacked(call, steps))


def _stacked(call: str, steps: list[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    rows = [_flat(step) for step in steps]
    if rows and any(row.keys() != rows[0].keys() for row in rows):
        raise ValueError(f"{call}: steps of an episode have different leaves; expected {', '.join(rows[0])}.")
    return {name: np.stack([row[name] for row in rows]) for name in (rows[0] if rows else {})}


def _flat(step: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name, value in step.items():
        out |= _flat(value, f"{prefix}{name}/") if isinstance(value, Mapping) else {prefix + name: np.asarray(value)}
    return out


def _table(call: str, steps: Mapping[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    """Yield the rows of one episode."""
    if not steps:
        return
    if missing := [name for name in ("is_last", "is_terminal") if name not in steps]:
        raise ValueError(f"{call}: steps have {', '.join(steps)}; expected {missing[0]}, as RLDS has it.")
    last, terminal = (steps[name].astype(bool) for name in ("is_last", "is_terminal"))
    if last[:-1].any() or terminal[:-1].any():
        raise ValueError(f"{call}: a step within an episode is_last or is_terminal; expected one at its end only.")
    if len(last) < 2:
        return
    end = np.arange(len(last) - 1) == len(last) - 2
    table: dict[str, Any] = {"terminated": end & terminal[-1], "truncated": end & ~terminal[-1]}
    for name, rows in steps.items():
        first, slash, rest = name.partition("/")
        if first in ("is_first", "is_last", "is_terminal", "discount"):
            continue
        table[renamed(name, NAMES)] = rows[:-1]
        if NAMES.get(first, first) == "obs":
            table[NEXT + slash + rest] = rows[1:]
    yield table

"""Recognise and read the files of tianshou, d3rlpy, robomimic and LeRobot; refuse others by name.

Each becomes columns of steps: `obs`, `action`, `reward`, `terminated`, `truncated`, and `next_obs` where the file has it.
Counts in a file are checked against its arrays. Sources: tianshou 2.0.1 `data/utils/converter.py`, `buffer/manager.py`;
d3rlpy 2.8.1 `dataset/io.py`; robomimic 0.3.0 `utils/dataset.py`; LeRobot 0.4.4 `datasets/lerobot_dataset.py` (format
v3.0, which 0.6.1 writes too).
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._core.lazy_import import import_extra
from fbuf._core.pytree import name_of, under
from fbuf._rows import columns as _columns
from fbuf._rows.columns import DTYPES, Column, Fields, array_column, empty, flag, read_json, refused, renamed
from fbuf.datasets._arrays.episodes import KNOWN, NEXT
from fbuf.interop import _guards, _hdf5, _npz
from fbuf.interop._source import Source

_REFUSED = {
    ".pkl": "a pickle, which may run code. Load it with its library, as for from_sb3(model.replay_buffer)",
    ".pt": "a torch pickle, which may run code. Load it with torch, and pass arrays: from_arrays",
    ".parquet": "one parquet file. Pass the folder of a LeRobot data set, or RLlib's episodes, read by RLlib, to from_arrays",
    ".msgpack": "a checkpoint of dopamine, whose elements are stacks and n-step sums. Use its raw logs: datasets.atari_dqn",
    ".gz": "compressed. Logs of dopamine are read by datasets.atari_dqn(source=folder)",
}
_REFUSED[".pickle"] = _REFUSED[".pkl"]

STEPS = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
"""First parts of the leaves that are taken unless `fields` names others."""
NAMES = KNOWN | {"act": "action", "rew": "reward", "obs_next": NEXT}
"""First parts of names in files, and what they become."""


def refuse(call: str, path: Path) -> None:
    """Raise ValueError for a file of a known format that is not read."""
    if path.suffix in _REFUSED:
        raise ValueError(f"{call}: {path} is {_REFUSED[path.suffix]}.")


def recognise(
    path: Path, reader: _npz.Reader | _hdf5.Reader, made: Source, ends: str | None, mask: str | None
) -> Source | None:
    """Return the source of a file whose format is known; None: plain arrays."""
    names = reader.columns
    if isinstance(reader, _npz.Reader):
        if {"data", "safe", "version"} <= set(names):
            raise ValueError(
                f"{made.call}: holds pickled rows of cpprb. Load it with cpprb: "
                f"from_cpprb(buffer.get_all_transitions(), position=buffer.get_next_index(), ends=...)."
            )
        return None
    if "_meta/rew" in names:
        return _tianshou(path, reader, made)
    if {"columns", "num_episodes", "version"} <= set(names):
        return _d3rlpy(path, reader, made)
    if any(re.fullmatch(r"data/demo_\d+/actions", name) for name in names):
        return _robomimic(path, reader, made, ends, mask)
    return None


def from_folder(path: Path, made: Source, ends: str | None) -> Source:
    """Return the source of a folder."""
    if (path / "meta" / "info.json").is_file():
        return _lerobot(path, made, ends)
    if (path / "data" / "metadata.json").is_file():
        raise ValueError(f"{made.call}: is a Minari data set. Use fbuf.datasets.minari({str(path)!r}).")
    raise ValueError(f"{made.call}: is a folder without meta/info.json; expected a file, or a LeRobot v3 data set.")


def without_infos(columns: Mapping[str, Column], fields: Fields) -> Mapping[str, Column]:
    """Return the columns without D4RL's `metadata/` and `infos/`, unless fields are named."""
    d4rl = {"observations", "rewards", "terminals"} <= set(columns)
    if fields is not None or not d4rl:
        return columns
    return {name: column for name, column in columns.items() if name.split("/")[0] not in ("metadata", "infos")}


def known_steps(made: Source, kind: str, columns: Mapping[str, Column], steps: int, **more: Any) -> Source:
    """Return a source of steps; 64-bit values become 32-bit ones, and `fields` may name any column."""
    if not steps:
        raise ValueError(f"{made.call}: there are no rows; expected one at least.")
    fields = chosen_steps(made.call, columns, made.fields)
    known = {"columns": columns, "steps": steps, "plain": False, "fields": fields, "narrow": True, "slots": False}
    return dataclasses.replace(made, format=kind, **{"lanes": None, **known, **more})


def chosen_steps(call: str, columns: Collection[str], fields: Fields) -> dict[str, str]:
    """Return `{name: name here}` of the columns to take; `fields` may use the names that the format has for them.

    Ends are never left out, nor next observations of observations that are taken.
    """
    usual = {name: name for name in columns if name.split("/")[0] in STEPS}
    if fields is None:
        return usual
    if isinstance(fields, str):
        raise TypeError(f"{call}: fields is {fields!r}; expected a dict, or names.")
    known = {name_of(name): renamed(name_of(name), NAMES) for name in fields}
    named = fields.items() if isinstance(fields, Mapping) else known.items()
    chosen = {source if source in columns else known[source]: here for source, here in named}
    ends = {n: n for n in usual if n in ("terminated", "truncated") or chosen.get(n.removeprefix("next_")) == n[5:]}
    lost = [n for n in usual if n.startswith("next_") and n not in chosen and chosen.get(n[5:], n[5:]) != n[5:]]
    if lost:
        raise ValueError(
            f"{call}: fields renames '{lost[0][5:]}', whose next observations would be lost. Keep its name."
        )
    return {name: name for name in ends if name not in chosen.values()} | chosen


def is_taken(name: str, names: Mapping[str, str], fields: Fields) -> bool:
    """Whether a leaf of a file is of a step, by its name, or is asked for; others may be of any length."""
    return renamed(name, names).split("/")[0] in (*STEPS, "done") or name in map(name_of, fields or ())


def concatenate(where: str, parts: Sequence[Column]) -> Column:
    """Return one column of the rows of all parts. Raises ValueError if they differ in shape or dtype."""
    first = parts[0]
    starts = np.cumsum([0, *(part.rows for part in parts)]).tolist()
    for number, part in enumerate(parts):
        if part.refused:
            raise ValueError(part.refused)
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            what = f"{part.dtype.name}{list(part.shape)}"
            raise ValueError(f"{where} of episode {number} are {what}; expected {first.dtype.name}{list(first.shape)}.")

    def read(begin: int, end: int) -> np.ndarray:
        out, at = empty((end - begin, *first.shape), first.dtype), begin
        number = bisect.bisect_right(starts, begin) - 1
        while at < end:
            stop = min(end, starts[number + 1])
            if stop > at:
                out[at - begin : stop - begin] = parts[number].read(at - starts[number], stop - starts[number])
            at, number = max(at, stop), number + 1
        return out

    return Column(first.shape, first.dtype, read, starts[-1])


def squeezed(column: Column) -> Column:
    """Return a column `[N, 1]` as `[N]`, with lanes alike."""
    if column.shape != (1,):
        return column
    return dataclasses.replace(column, shape=(), read=lambda first, last: column.read(first, last)[..., 0])


def flags(done: Column | None, last: np.ndarray, ends: str) -> dict[str, Column]:
    """Return `terminated` and `truncated` of flags of one kind; `last`: the rows after which an episode has no more."""
    none = array_column(np.zeros(len(last), bool))
    over = array_column(last)
    if done is None or ends == "trajectory":
        return {"terminated": none, "truncated": over if done is None else flag(np.logical_or, done, over)}
    return {"terminated": done, "truncated": flag(np.greater, over, done)}


def check_ends(call: str, what: str, ends: str | None, done: Column | None) -> str:
    """Return what flags mean. Raises ValueError: the caller did not state it, or there are none."""
    if done is None:
        if ends is not None:
            raise ValueError(
                f"{call}: ends is {ends!r}, but there are no {what}. Leave it out: ends of episodes truncate."
            )
        return "trajectory"
    if ends not in _guards.ENDS:
        raise ValueError(
            f"{call}: ends is {ends!r}, but nothing says whether {what} are terminations. Pass ends='terminated' "
            f"({_guards.ENDS['terminated']}) or ends='trajectory' ({_guards.ENDS['trajectory']})."
        )
    return ends


def _tianshou(path: Path, reader: _hdf5.Reader, made: Source) -> Source:
    found = (reader.others | reader.columns).items()
    slots = {renamed(name[6:], NAMES): column for name, column in found if name.startswith("_meta/")}
    room = slots["reward"].rows
    if missing := [name for name in ("action", "terminated", "truncated") if name not in slots]:
        raise ValueError(f"{path}: has no _meta/{missing[0]}; expected a ReplayBuffer of tianshou 0.5 or later.")
    other = [name for name in slots if name.split("/")[0] not in (*STEPS, "done", "info", "policy")]
    if other and made.fields is None and not under(NEXT, slots):  # obs_next itself, if its name is damaged
        raise ValueError(
            f"{made.call}: has '_meta/{other[0]}', which is not of tianshou, and no obs_next. Name the leaves if it is "
            f"yours: fields=['obs', 'act', 'rew']."
        )
    if odd := [name for name, column in slots.items() if not column.refused and column.rows != room]:
        raise ValueError(f"{path}: '_meta/{odd[0]}' has {slots[odd[0]].rows} slots; expected {room}. It is damaged.")
    offset, count, sizes, oldest = _tianshou_rings(path, reader, room)
    steps, lanes = int(count.max()), len(count)

    def ring(column: Column) -> Column:
        def lane_rows(lane: int, first: int, last: int) -> np.ndarray:
            begin, size = int(offset[lane]), int(sizes[lane])
            out = np.zeros((last - first, *column.shape), column.dtype)
            stop = min(last, int(count[lane]))
            if stop <= first:
                return out
            at = (int(oldest[lane]) + first) % size
            head = min(stop - first, size - at)
            out[:head] = column.read(begin + at, begin + at + head)
            if head < stop - first:
                out[head : stop - first] = column.read(begin, begin + stop - first - head)
            return out

        def read(first: int, last: int) -> np.ndarray:
            if "_lengths" not in reader.columns:
                return lane_rows(0, first, last)
            return np.stack([lane_rows(lane, first, last) for lane in range(lanes)], axis=1)

        return column if column.refused else dataclasses.replace(column, read=read, rows=steps)

    columns = {name: ring(column) for name, column in slots.items()}
    if "_lengths" not in reader.columns:
        return known_steps(made, "tianshou buffer", columns, steps)
    last = flag(np.greater, array_column(np.arange(steps)[:, None] == count - 1), columns["terminated"])
    columns["truncated"] = flag(np.logical_or, columns["truncated"], last)

    def exists(first: int, last: int) -> np.ndarray:
        return np.arange(first, last)[:, None] < count

    return known_steps(made, "tianshou vector buffer", columns, steps, lanes=lanes, mask=exists)


def _tianshou_rings(
    path: Path, reader: _hdf5.Reader, room: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return of each lane its first slot, its rows, its slots, and the place of its oldest row among these."""
    if "_lengths" in reader.columns:
        offset, count, newest = (reader.array(name) for name in ("_offset", "_lengths", "last_index"))
        sizes = np.diff([*offset, room]) if offset.ndim == count.ndim == 1 and len(offset) else np.zeros(0)
    else:
        size, cursor = (np.array([reader.attribute(name)]) for name in ("_size", "_insertion_idx"))
        if None in (size[0], cursor[0]):
            raise ValueError(f"{path}: _size or _insertion_idx is not an integer; expected both. It is damaged.")
        offset, count, sizes, newest = np.zeros(1, np.int64), size, np.array([room]), cursor - 1
        newest = np.where(newest < 0, room - 1, newest)
        if not (0 <= cursor[0] <= room and (size[0] == room or size[0] == cursor[0])):
            raise ValueError(
                f"{path}: _size is {size[0]} and _insertion_idx {cursor[0]} of {room} slots. It is damaged."
            )
    shape = {a.shape for a in (offset, count, sizes, newest)}
    place = newest - offset if len(shape) == 1 else np.zeros(0)
    if len(shape) != 1 or not len(count) or not np.all([count >= 0, count <= sizes, place >= 0, place < sizes]):
        raise ValueError(f"{path}: the counts of its rows are not those of {room} slots. It is damaged.")
    full = count == sizes
    if (~full & (count > 0) & (place != count - 1)).any():
        raise ValueError(f"{path}: the newest rows are not where its counts say. It is damaged.")
    return offset, count, sizes, np.where(full, (place + 1) % sizes, 0)


def _d3rlpy(path: Path, reader: _hdf5.Reader, made: Source) -> Source:
    number = reader.array("num_episodes")
    if number.shape or number.dtype.kind not in "iu" or not 0 < number <= len(reader.columns):
        raise ValueError(f"{path}: num_episodes is {str(number)[:40]}; expected one for each actions_i. It is damaged.")
    count = int(number)
    episodes: dict[str, dict[str, Column]] = {str(episode): {} for episode in range(count)}
    for name, column in reader.columns.items():
        kind, _, rest = name.partition("_")
        episode, _, part = rest.partition("_")
        if kind in ("observations", "actions", "rewards"):
            if episode not in episodes:
                raise ValueError(f"{path}: has '{name}', but num_episodes is {count}. It is damaged.")
            episodes[episode][KNOWN[kind] + (part and f"/{part}")] = column
    found = dict.fromkeys(name for columns in episodes.values() for name in columns)
    if missing := [name for name in ("obs", "action", "reward") if not under(name, found)]:
        raise ValueError(f"{path}: has no '{missing[0]}' of any episode. It is damaged.")
    parts = {name: [columns[name] for columns in episodes.values() if name in columns] for name in found}
    _, last = _episodes(path, parts, count)
    ended = [reader.array(f"terminated_{episode}") for episode in range(count)]
    if any(flag.shape or flag.dtype.kind not in "biu" for flag in ended):
        raise ValueError(f"{path}: a flag terminated_i is not a number; expected True or False. It is damaged.")
    done = np.zeros(len(last), bool)
    done[last] = [bool(flag) for flag in ended]
    columns = {name: concatenate(f"{path}: {name}", columns) for name, columns in parts.items()}
    columns["reward"] = squeezed(columns["reward"])
    return known_steps(made, "d3rlpy buffer", columns | flags(array_column(done), last, "terminated"), len(last))


def _episodes(path: Path, parts: Mapping[str, Sequence[Column]], count: int) -> tuple[list[int], np.ndarray]:
    """Return the rows of each episode, and which are its last. Raises ValueError if columns of one differ, or one has none."""
    for name, columns in parts.items():
        if len(columns) != count:
            raise ValueError(f"{path}: {len(columns)} of {count} episodes have '{name}'; expected all. It is damaged.")
    lengths = [column.rows for column in next(iter(parts.values()))]
    for name, columns in parts.items():
        for number, column in enumerate(columns):
            if column.refused:
                raise ValueError(column.refused)
            if column.rows != lengths[number] or not column.rows:
                rows = lengths[number] or "some"
                raise ValueError(f"{path}: '{name}' of episode {number} has {column.rows} rows; expected {rows}.")
    last = np.zeros(sum(lengths), bool)
    last[np.cumsum(lengths) - 1] = True
    return lengths, last


def _robomimic(path: Path, reader: _hdf5.Reader, made: Source, ends: str | None, mask: str | None) -> Source:
    demos = sorted({name.split("/")[1] for name in reader.columns if name.startswith("data/demo_")}, key=_number)
    if mask is not None:
        keys = [name.removeprefix("mask/") for name in reader.columns if name.startswith("mask/")]
        if mask not in keys:
            raise ValueError(
                f"{made.call}: mask is {mask!r}; expected one of {', '.join(keys) or 'none in this file'}."
            )
        wanted = [bytes(name).decode(errors="replace") for name in np.atleast_1d(reader.array(f"mask/{mask}"))]
        if missing := [name for name in wanted if name not in demos]:
            raise ValueError(f"{path}: mask/{mask} names '{missing[0]}', which is missing. It is damaged.")
        demos = sorted(set(wanted), key=_number)
    groups: dict[str, dict[str, Column]] = {demo: {} for demo in demos}
    for name, column in reader.columns.items():
        demo, _, leaf = name.removeprefix("data/").partition("/")
        if name.startswith("data/") and demo in groups:
            groups[demo][renamed(leaf, NAMES)] = column
    found = list(dict.fromkeys(name for group in groups.values() for name in group))
    taken = {*chosen_steps(made.call, found, made.fields), "dones"}  # others may be of any length
    parts = {name: [group[name] for group in groups.values() if name in group] for name in found if name in taken}
    if not demos or "action" not in parts:
        where = "data/demo_0" if mask is None else f"those of mask/{mask}"
        raise ValueError(f"{path}: no demonstration with actions; expected some in {where}.")
    lengths, last = _episodes(path, parts, len(demos))
    for demo, rows in zip(demos, lengths, strict=True):
        stated = reader.attribute("num_samples", f"data/{demo}")
        if stated is not None and stated != rows:
            raise ValueError(f"{path}: {demo} has {rows} rows; expected num_samples, {stated}. It is damaged.")
    total = reader.attribute("total", "data")
    if mask is None and total not in (None, sum(lengths)):
        raise ValueError(f"{path}: demonstrations have {sum(lengths)} rows; expected total, {total}. It is damaged.")
    columns = {name: concatenate(f"{path}: {name}", columns) for name, columns in parts.items()}
    done = columns.pop("dones", None)
    kind = check_ends(made.call, "dones", ends, done)
    return known_steps(made, "robomimic demonstrations", columns | flags(done, last, kind), len(last))


def _number(demo: str) -> int:
    return int(demo.rpartition("_")[2]) if demo.rpartition("_")[2].isdigit() else -1


def _row_groups(parquet: Any, path: Path, features: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """Return the files of a data set, and their row groups, in order."""
    groups: list[tuple[Any, int]] = []
    for file in sorted((path / "data").glob("chunk-*/file-*.parquet")):
        try:
            opened = parquet.ParquetFile(file)
        except Exception as error:  # of pyarrow's parser
            raise ValueError(f"{file}: is not parquet ({str(error)[:200]}). It is damaged.") from None
        if lost := [name for name in opened.schema_arrow.names if name not in features]:
            raise ValueError(f"{file}: has a column {lost[0]!r} that meta/info.json does not describe. It is damaged.")
        groups += [(opened, number) for number in range(opened.metadata.num_row_groups)]
    return groups


def _group_rows(group: tuple[Any, int]) -> int:
    file, number = group
    return int(file.metadata.row_group(number).num_rows)


def _parquet_column(
    path: Path, described: Path, groups: Sequence[tuple[Any, int]], name: str, feature: Mapping[str, Any]
) -> Column:
    """Return a column of parquet files, read by row group."""
    dtype = DTYPES.get(str(feature.get("dtype")))
    shape = _columns.check_shape(str(described), feature.get("shape"))
    if dtype is None:
        kind = str(feature.get("dtype"))[:40]
        return refused(f"{path}: leaf '{name}' is {kind}; numbers and booleans are read. Decode it with lerobot.")
    rows = [_group_rows(group) for group in groups]

    @functools.lru_cache(1)
    def values_of(number: int) -> np.ndarray:
        file, part = groups[number]
        try:
            values = file.read_row_group(part, columns=[name]).column(name).combine_chunks()
            while hasattr(values, "flatten") and values.type.num_fields:
                values = values.flatten()
            array: np.ndarray = values.to_numpy(zero_copy_only=False).astype(dtype).reshape(rows[number], *shape)
        except Exception as error:  # of pyarrow and NumPy
            raise ValueError(f"{path}: leaf '{name}' is damaged ({str(error)[:200]}).") from None
        return array

    parts = [
        Column(shape, dtype, lambda first, last, number=number: values_of(number)[first:last], count)  # type: ignore[misc]
        for number, count in enumerate(rows)
    ]
    return concatenate(f"{path}: {name}", parts)


def _lerobot(path: Path, made: Source, ends: str | None) -> Source:
    call = made.call
    parquet = import_extra(call, "pyarrow.parquet", '"fbuf[minari]"')
    described = path / "meta" / "info.json"
    about = read_json(described)
    version, features = about.get("codebase_version"), about.get("features")
    if not str(version).startswith("v3.") or not isinstance(features, dict):
        raise ValueError(
            f"{described}: codebase_version is {str(version)[:40]!r}; expected v3.x. Convert it with LeRobot."
        )
    total = _columns.check_count(str(described), "total_frames", about.get("total_frames"))
    groups = _row_groups(parquet, path, features)
    rows = sum(_group_rows(group) for group in groups)
    if rows != total or not total:
        raise ValueError(
            f"{path}: its parquet files have {rows} rows, total_frames is {total}; expected one number > 0."
        )
    read = functools.partial(_parquet_column, path, described, groups)
    found = {name: read(name, feature) for name, feature in features.items() if isinstance(feature, dict)}
    if not {"episode_index", "action"} <= set(found):
        raise ValueError(f"{described}: features lack episode_index or action; expected both.")
    episode = squeezed(found["episode_index"]).read(0, total)
    if (np.diff(episode) < 0).any():
        raise ValueError(f"{path}: episode_index falls; expected rows in order of time. It is damaged.")
    last = np.append(episode[1:] != episode[:-1], True)
    done = found.pop("next.done", None)
    kind = check_ends(call, "next.done", ends, done)
    columns = {}
    for name, leaf in found.items():
        here = name.replace("observation.", "obs/", 1) if name.startswith("observation.") else name
        columns[_columns.check_name(call, {"next.reward": "reward", "observation": "obs"}.get(here, here))] = leaf
    columns = {n: c if n.split("/")[0] in ("obs", "action") else squeezed(c) for n, c in columns.items()}
    columns |= flags(None if done is None else squeezed(done), last, kind)
    return known_steps(made, f"LeRobot {version}", columns, total)

"""Convert Minari data sets, read by the `minari` package.

An episode of T steps has T + 1 observations. Its rows are the T steps; the observation after each is compared with that of
the next row and stored where the episode ends (`_arrays/episodes.py`). A segment holds whole episodes. 64-bit values become
32-bit ones by default, as JAX holds them; Minari's rewards are always float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.arguments import check_int
from fbuf._core.lazy_import import import_extra
from fbuf._core.progress import Progress
from fbuf._core.pytree import is_under, under
from fbuf._formats.dataset.manifest import NAME, is_dataset, load
from fbuf._host.codecs import Codec
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf._rows.columns import Block, Column, blocks, cast_columns, check_name, columns_of, read_json
from fbuf.datasets import _open
from fbuf.datasets._arrays.episodes import NEXT
from fbuf.datasets._arrays.segments import Work, rows_per_segment, write
from fbuf.datasets._arrays.write import Settings, opened, plan_rows
from fbuf.datasets._info import delete
from fbuf.datasets._open import root_of
from fbuf.torch._dtypes import NARROW

_CALL = "minari"
VARIABLE = "MINARI_DATASETS_PATH"
_BATCH = 2**15 - 1  # steps; Minari takes the first record batch of arrow and parquet, 2^15 rows, for the episode
_KEPT = "algorithm_name author author_email code_permalink dataset_id description env_spec minari_version".split()


def minari(
    id: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    download: bool | str = False,
    skip: Sequence[str] = (),
    infos: Sequence[str] = (),
    dtypes: Mapping[str, str] | None = None,
    codec: Mapping[str, Codec] | None = None,
    segment_rows: int | None = None,
    view: View | None = None,
    sampler: Sampler | None = None,
    workers: int = 0,
    progress: Progress = None,
) -> tuple[Buffer, BufferState]:
    """Open a Minari data set as a frozen buffer; the first call converts it.

    Rows are steps: `obs`, `action`, `reward`, `terminated`, `truncated`, and `final_obs`, the observation after an
    episode's last step (zeros in other rows). Dicts stay dicts; tuples become dicts of "0", "1", .... An episode without an
    end is truncated. The `minari` package reads the files (`pip install "fbuf[minari]"`). A warning says if frames are JPEG,
    Minari's default, and so not exactly those of the environment.

    Args:
      id: Minari's id, "D4RL/door/human-v2"; or the path of a data set's folder.
      root: Folder of converted data sets, this one at `<root>/minari/<id>`; None: `$FBUF_DATASETS`, or
        ~/.cache/fbuf/datasets.
      source: Folder of Minari's data sets; None: `$MINARI_DATASETS_PATH`, or ~/.minari/datasets.
      download: False: a missing data set is an error. True: download it first. "force": download and convert it again.
      skip: Leaves or subtrees to leave out, by their names here, such as text: ("obs/mission",).
      infos: Infos to include, such as ("qpos", "success"): leaves `infos/qpos`. A row has the info of its observation; if
        Minari has one per step only, that of its step.
      dtypes: `{name: dtype}`, in place of the 32-bit defaults for float64 and 64-bit integers (an error where one does not
        fit).
      codec, segment_rows, workers, progress: As for `interop.Source.save`.
      view, sampler: Of the buffer; None: `Transition(final_observation="final_obs")`, and `Uniform`.
    Returns:
      The buffer and its state, as from `fbuf.datasets.open`.
    Raises:
      FileNotFoundError: the data set is missing.
      ImportError: minari, or a package that it needs for these files, is missing.
      ValueError: an episode in arrow or parquet has more than 32,767 steps, of which Minari returns no more; the data set is
        damaged, unfinished or of another version of Minari; a leaf is text, or has values of several shapes; it was converted
        with other settings, or has changed since.
      FileExistsError: the folder to write exists and is not a data set.
    Cost: converting reads every episode once, with one episode per worker in memory. The next call completes an
      interrupted one.

    Example:
      >>> import fbuf
      >>> buffer, state = fbuf.datasets.minari("D4RL/door/human-v2", download=True)  # doctest: +SKIP
      >>> batch = buffer.peek(state, jax.random.key(0), 256)  # doctest: +SKIP
    """
    if download not in (False, True, "force"):
        raise ValueError(f'{_CALL}: download is {download!r}; expected False, True or "force".')
    for argument, value in {"skip": skip, "infos": infos}.items():
        if isinstance(value, str):
            raise TypeError(f"{_CALL}: {argument} is {value!r}; expected names. Write {argument}=({value!r},).")
    check_int(_CALL, "workers", workers, 0)
    _open.check(".", view, sampler)
    name, folder = _found(id, source)
    path = root_of(_CALL, root) / "minari" / name
    asked = json.dumps({"skip": sorted(skip), "infos": sorted(infos), "dtypes": dict(dtypes or {})}, sort_keys=True)
    exists = (path / NAME).exists()
    if download == "force":
        _download(name, folder, source, force=True)
        if is_dataset(path):  # finished or not
            delete(path)
            exists = False
    if not (folder / "metadata.json").is_file():
        if exists:
            _check_same(path, asked, None)
            return opened(path, view, sampler)
        if not download:
            raise FileNotFoundError(f"{_CALL}: no data set '{name}' at {folder}. Pass download=True, or source=.")
        _download(name, folder, source, force=False)
    if exists:
        _check_same(path, asked, _mark(folder))
        return opened(path, view, sampler)
    settings = Settings(None, codec, segment_rows, functools.partial(_open.check, path, view, sampler))
    write(_CALL, path, _work(folder, settings, dtypes, skip, infos, asked), workers=workers, progress=progress)
    return opened(path, view, sampler)


def _found(id: str | os.PathLike[str], source: str | os.PathLike[str] | None) -> tuple[str, Path]:
    """Return the id, and the folder of its metadata.json."""
    text = os.fspath(id)
    if not isinstance(id, str) or text.startswith(("/", "./", "../", "~")):
        folder = Path(text).expanduser()
        folder = folder if (folder / "metadata.json").is_file() else folder / "data"
        if not (folder / "metadata.json").is_file():
            raise FileNotFoundError(f"{_CALL}: {text} is not a Minari data set; expected data/metadata.json in it.")
        named = read_json(folder / "metadata.json").get("dataset_id")
        return check_name(_CALL, str(named or Path(text).resolve().name)), folder
    base = source if source is not None else os.environ.get(VARIABLE, "~/.minari/datasets")
    return check_name(_CALL, text), Path(base).expanduser() / text / "data"


def _check_same(path: Path, settings: str, mark: str | None) -> None:
    """Raise ValueError unless the converted data set has these settings and source."""
    meta = load(path).meta
    what = ""
    if meta.get("settings") != settings:
        what = f"was converted with {meta.get('settings')}; expected {settings}"
    elif mark is not None and meta.get("mark") != mark:
        what = "was converted before the Minari data set changed"
    if what:
        raise ValueError(f"{_CALL}: {path} {what}. Run fbuf.datasets.delete({str(path)!r}), or pass another root=.")


def _mark(folder: Path) -> str:
    """Return a checksum of the description, which identifies the state of the data set."""
    return f"minari {zlib.crc32((folder / 'metadata.json').read_bytes()):08x}"


def _download(name: str, folder: Path, source: str | os.PathLike[str] | None, *, force: bool) -> None:
    package, before = import_minari(_CALL), os.environ.get(VARIABLE)
    if source is not None:
        os.environ[VARIABLE] = str(Path(source).expanduser())
    try:
        package.download_dataset(name, force_download=force)
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before
    if not (folder / "metadata.json").is_file():
        raise FileNotFoundError(f"{_CALL}: minari downloaded '{name}', but there is nothing at {folder}.")


def import_minari(call: str) -> Any:
    """Return the package."""
    return import_extra(call, "minari", '"fbuf[minari]"')


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ImportError(f'{_CALL}: {what} needs more ({error}). Run pip install "fbuf[minari]".') from None
    except Exception as error:  # of h5py, pyarrow, Pillow, JSON, and what minari asserts
        raise ValueError(
            f"{_CALL}: minari cannot read {what} ({type(error).__name__}: {error}). It is damaged."
        ) from error


def _work(
    folder: Path,
    settings: Settings,
    wanted: Mapping[str, str] | None,
    skip: Sequence[str],
    infos: Sequence[str],
    asked: str,
) -> Work:
    """Return the work of writing the rows. Raises errors of the description, the leaves and the episodes' lengths."""
    about, mark = read_json(folder / "metadata.json"), _mark(folder)
    for name in ("observation_space", "action_space"):
        if name not in about:  # minari would make the environment, and import what the description names
            raise ValueError(f"{_CALL}: {folder}/metadata.json has no {name}; expected one. Use interop.from_arrays.")
    package = import_minari(_CALL)
    form = str(about.get("data_format"))
    with _reading(f"{folder}"):
        dataset = package.MinariDataset(folder)
        number, total = dataset.total_episodes, dataset.total_steps
        steps = [int(meta["total_steps"]) for meta in dataset.storage.get_episode_metadata(range(number))]
    if sum(steps) != total or not total:
        raise ValueError(f"{_CALL}: {folder} has {sum(steps)} steps in {number} episodes; expected {total or 'some'}.")

    if form in ("arrow", "parquet") and max(steps) > _BATCH:
        raise ValueError(
            f"{_CALL}: episode {steps.index(max(steps))} in {folder} has {max(steps)} steps, and of {form} Minari returns "
            f"{_BATCH} only, of any episode. Record it again with data_format='hdf5'."
        )

    def read(episode: int) -> dict[str, Column]:
        with _reading(f"episode {episode} in {folder}"):
            data = dataset[episode]
        return _columns(f"{_CALL}: episode {episode}", data, steps[episode], skip, infos)

    first = read(next(episode for episode, length in enumerate(steps) if length))
    dtypes = {name: NARROW[column.dtype.name] for name, column in first.items() if column.dtype.name in NARROW}
    dtypes |= wanted or {}
    dtypes |= {NEXT + name[len("obs") :]: dtypes[name] for name in under("obs", dtypes)}
    plan = plan_rows(_CALL, cast_columns(_CALL, first, dtypes), settings)
    lossy = _lossy(folder, about, first)
    del first
    segments = _whole_episodes(steps, rows_per_segment(_CALL, settings.segment_rows, plan.schema))

    def rows(number: int) -> Iterator[Block]:
        for episode in segments[number]:
            if steps[episode]:
                where = f"{_CALL}: episode {episode}"
                columns, length = cast_columns(where, read(episode), dtypes), steps[episode]
                plan.check(f"{where}:", columns)
                yield from plan.marked(where, 0, blocks(where, columns, 0, length, plan.block), None, [])

    kept = {name: about[name] for name in _KEPT if name in about}
    return Work(
        plan.schema,
        [sum(steps[episode] for episode in episodes) for episodes in segments],
        rows,
        lambda number: f"{mark} {asked} {segments[number].start} {segments[number].stop}",
        lambda: {"from": "minari", "mark": mark, "settings": asked, "episodes": number, "minari": kept, "lossy": lossy},
    )


def _lossy(folder: Path, about: Mapping[str, Any], columns: Mapping[str, Column]) -> list[str]:
    """Return the leaves that Minari stored as JPEG, and warn of them."""
    if about.get("jpeg_encoding") is not True:
        return []
    images = [n for n, c in columns.items() if c.dtype == np.uint8 and len(c.shape) == 3 and c.shape[-1] == 3]
    lossy = [name for name in images if is_under(name, ("obs", "action"))]
    if lossy:
        warnings.warn(
            f"{_CALL}: Minari stored {', '.join(lossy)} of {folder} as JPEG, its default, so these frames are not those of "
            f"the environment. Record them with jpeg_encoding=False.",
            stacklevel=4,
        )
    return lossy


def _columns(where: str, episode: Any, steps: int, skip: Sequence[str], infos: Sequence[str]) -> dict[str, Column]:
    """Return the leaves of an episode to store, and `next_obs`, each with one row per step."""
    ends = {"terminated": episode.terminations, "truncated": episode.truncations}
    found = columns_of(where, _dicts({"obs": episode.observations, "action": episode.actions}))
    if unknown := [name for name in skip if not under(name, found)]:
        raise ValueError(f"{where}: skip has '{unknown[0]}', but leaves are {', '.join(found)}.")
    found = {name: column for name, column in found.items() if not is_under(name, skip)}
    if refused := [name for name, column in found.items() if column.refused]:
        raise ValueError(f"{where}: {found[refused[0]].refused} Leave it out: skip={tuple(sorted({*skip, *refused}))}.")
    if not under("obs", found):
        raise ValueError(f"{where}: skip={tuple(skip)} leaves no observation; expected one at least.")
    found |= columns_of(where, {"reward": episode.rewards, **ends})
    recorded = columns_of(where, _dicts(episode.infos or {}), prefix="infos/")
    for name in infos:
        if not (leaves := under(f"infos/{name}", recorded)):
            names = ", ".join(leaf.removeprefix("infos/") for leaf in recorded) or "nothing"
            raise ValueError(f"{where}: infos has '{name}', but the episode recorded {names}.")
        found |= {leaf: recorded[leaf] for leaf in leaves}
    out = {}
    for name, column in found.items():
        if column.refused:
            raise ValueError(f"{where}: {column.refused} Leave it out of infos.")
        seen = name in under("obs", [name])
        if column.rows != steps + seen and not (name in recorded and column.rows == steps + 1):
            raise ValueError(f"{where}: leaf '{name}' has {column.rows} values; expected {steps + seen}.")
        out[name] = dataclasses.replace(column, rows=steps)
        if seen:
            out[NEXT + name[len("obs") :]] = dataclasses.replace(out[name], read=functools.partial(_next, column))
    return out


def _next(column: Column, first: int, last: int) -> Any:
    return column.read(first + 1, last + 1)


def _dicts(value: Any) -> Any:
    """Return nested dicts, with Minari's tuples as dicts."""
    if isinstance(value, tuple):
        value = {str(number): part for number, part in enumerate(value)}
    return {name: _dicts(part) for name, part in value.items()} if isinstance(value, dict) else value


def _whole_episodes(steps: Sequence[int], size: int) -> list[range]:
    """Return runs of episodes with at least `size` rows each, but the last."""
    out, begin, rows = [], 0, 0
    for episode, number in enumerate(steps):
        rows += number
        if rows >= size:
            out.append(range(begin, episode + 1))
            begin, rows = episode + 1, 0
    if rows:
        out.append(range(begin, len(steps)))
    return out

"""`minari`: where data sets lie, and what is done if they do not."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fbuf._buffer import Buffer
from fbuf._core.progress import Progress
from fbuf._host.codec import Codec
from fbuf._pieces._manifest import NAME, load
from fbuf._state import BufferState
from fbuf._typing import Sampler, View
from fbuf.datasets import _open
from fbuf.datasets._arrays import opened
from fbuf.datasets._info import delete
from fbuf.datasets._minari._convert import work_of
from fbuf.datasets._minari._source import Source
from fbuf.datasets._root import root_of
from fbuf.datasets._writing import check_workers, write
from fbuf.interop._source import check_name, read_json

_CALL = "minari"
_VARIABLE = "MINARI_DATASETS_PATH"


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
    piece_rows: int | None = None,
    view: View | None = None,
    sampler: Sampler | None = None,
    workers: int = 0,
    progress: Progress = None,
) -> tuple[Buffer, BufferState]:
    """A Minari data set as a frozen buffer: converted the first time, then opened at once.

    Rows are steps: `obs`, `action`, `reward`, `terminated`, `truncated`, and `final_obs`, the observation after an
    episode's last step (zeros in other rows). Dicts stay dicts, tuples become dicts of "0", "1", .... An episode that just
    stops is truncated. Both formats are read (hdf5 and arrow, and parquet), images packed as JPEG too.

    Args:
      id: As Minari has it, "D4RL/door/human-v2"; or the path of a data set's folder.
      root: Where converted data sets lie, this one at `<root>/minari/<id>`; None: `$FBUF_DATASETS`, or ~/.cache/fbuf/datasets.
      source: Where Minari's lie; None: `$MINARI_DATASETS_PATH`, or ~/.minari/datasets.
      download: False: what is not there is an error. True: it is downloaded first, by the `minari` package. "force": it is
        downloaded and converted again, whatever is there.
      skip: Leaves or subtrees to leave out, by their names here, such as text: ("obs/mission",).
      infos: What else to take of what was recorded, such as ("qpos", "success"): leaves `infos/qpos`. A row has the info that
        came with its observation; where Minari has one for each step only, that of its step.
      dtypes: `{name: dtype}`, where another is wanted than what JAX holds by default: float64 becomes float32, 64-bit integers
        32-bit ones (an error where one does not fit).
      codec, piece_rows, workers, progress: As for `from_arrays`.
      view, sampler: Of the buffer; None: `Transition(final_observation="final_obs")`, and `Uniform`.
    Returns:
      The buffer and its state, as from `fbuf.datasets.open`.
    Raises:
      FileNotFoundError: it is not there.
      ImportError: h5py, pyarrow or Pillow is missing that its files need, or `minari` to download.
      ValueError: it is damaged or unfinished; a leaf is text, or has values of no one shape; it was converted before with other
        settings, or has changed since.
      FileExistsError: something else lies where it would be converted to.
    Cost: converting reads every file once, in blocks of some 8 MiB (arrow: an episode at a time, packed); what an
      interruption leaves is used by the next call.

    Example:
      >>> import fbuf
      >>> buffer, state = fbuf.datasets.minari("D4RL/door/human-v2", download=True)  # doctest: +SKIP
      >>> batch = buffer.peek(state, jax.random.key(0), 256)  # doctest: +SKIP
    """
    if download not in (False, True, "force"):
        raise ValueError(f'{_CALL}: download is {download!r}; expected False, True or "force".')
    check_workers(_CALL, workers)
    _open.check(".", view, sampler)
    name, folder = _found(id, source)
    path = root_of(_CALL, root) / "minari" / name
    settings = json.dumps({"skip": sorted(skip), "infos": sorted(infos), "dtypes": dict(dtypes or {})}, sort_keys=True)
    there = (path / NAME).exists()
    if download == "force":
        _download(name, folder, source, force=True)
        if there:
            delete(path)
            there = False
    if not (folder / "metadata.json").is_file():
        if there:
            _check_same(path, settings, None)
            return opened(path, view, sampler)
        if not download:
            raise FileNotFoundError(
                f"{_CALL}: there is no data set '{name}' at {folder}. Download it: fbuf.datasets.minari('{name}', "
                f"download=True), or say where Minari keeps its own: source=."
            )
        _download(name, folder, source, force=False)
    found = Source(_CALL, folder, skip, infos)
    if there:
        _check_same(path, settings, found.mark)
        return opened(path, view, sampler)
    reader = found.open()
    try:
        work = work_of(found, reader, dtypes=dtypes, codec=codec, piece_rows=piece_rows, settings=settings)
        _open.check(path, view, sampler, work.schema)
        write(_CALL, path, work, workers=workers, progress=progress)
    finally:
        reader.close()
    return opened(path, view, sampler)


def _found(id: str | os.PathLike[str], source: str | os.PathLike[str] | None) -> tuple[str, Path]:
    """The id, and the folder with its metadata.json."""
    text = os.fspath(id)
    if not isinstance(id, str) or text.startswith(("/", "./", "../", "~")):
        folder = Path(text).expanduser()
        folder = folder if (folder / "metadata.json").is_file() else folder / "data"
        if not (folder / "metadata.json").is_file():
            raise FileNotFoundError(
                f"{_CALL}: there is no Minari data set at {text}; expected a folder with data/metadata.json."
            )
        named = read_json(folder / "metadata.json").get("dataset_id")
        return check_name(_CALL, str(named or Path(text).resolve().name)), folder
    base = source if source is not None else os.environ.get(_VARIABLE, "~/.minari/datasets")
    return check_name(_CALL, text), Path(base).expanduser() / text / "data"


def _check_same(path: Path, settings: str, mark: str | None) -> None:
    """Raises if what was converted is not what is asked for now."""
    meta = load(path).meta
    if meta.get("settings") != settings:
        raise ValueError(
            f"{_CALL}: {path} was converted with {meta.get('settings')}; expected {settings}. Make room: "
            f"fbuf.datasets.delete({str(path)!r}), or choose another root=."
        )
    if mark is not None and meta.get("mark") != mark:
        raise ValueError(
            f"{_CALL}: {path} was converted from another state of the data set than lies there now. Make room: "
            f"fbuf.datasets.delete({str(path)!r}), or choose another root=."
        )


def _download(name: str, folder: Path, source: str | os.PathLike[str] | None, *, force: bool) -> None:
    try:
        import minari as package
    except ImportError as error:
        raise ImportError(
            f"{_CALL}: '{name}' would be downloaded by the minari package, which is missing ({error}). Run pip install "
            f'"minari[hdf5,arrow]" pillow, or: minari download {name}, on any machine, and copy it to {folder.parent}.'
        ) from None
    with _environment(_VARIABLE, None if source is None else str(Path(source).expanduser())):
        package.download_dataset(name, force_download=force)
    if not (folder / "metadata.json").is_file():
        raise FileNotFoundError(f"{_CALL}: minari downloaded '{name}', but there is nothing at {folder}.")


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """A variable set for a while; None: as it is."""
    before: Any = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if value is not None:
            os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)

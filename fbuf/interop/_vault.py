"""Read flashbax Vaults without flashbax: arrays `[E, time, ...]` in tensorstore's OCDBT, block by block.

A Vault has no priorities, since flashbax drops them. Its index is the commit point: rows beyond it belong to a writer that
died, and are ignored. Missing chunks, which tensorstore reads as zeros, raise an error. Shapes come from the arrays, not
from the strings that flashbax evaluates.

Source: flashbax 0.1.3, `vault/vault.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Progress
from fbuf.interop._columns import DTYPES, Column, Fields, Source, check_name, read_json
from fbuf.interop._fill import fill

_CALL = "from_vault"


def from_vault(
    path: str | os.PathLike[str],
    *,
    buffer: Buffer | None = None,
    fields: Fields = None,
    dtypes: Mapping[str, str] | None = None,
    newest: int | None = None,
    progress: Progress = None,
) -> tuple[Buffer, BufferState]:
    """Fill a buffer with the rows of a flashbax Vault, oldest first. Needs tensorstore (`pip install "fbuf[vault]"`).

    Args:
      path: The folder with `metadata.json`: `<rel_dir>/<vault_name>/<vault_uid>`.
      buffer: The buffer to fill; None: one with room for exactly these rows. An `add_batch_size` above 1 becomes lanes.
      fields, dtypes, newest, progress: As for `from_arrays`.
    Returns:
      The buffer, and its state.
    Raises:
      ImportError: tensorstore is missing.
      FileNotFoundError: there is no Vault.
      ValueError: another version; arrays that are damaged, incomplete, or of other dtypes than stated; else as `from_arrays`.
    Cost: O(N), in blocks of about 8 MiB.

    Example:
      buffer, state = fbuf.interop.from_vault("vaults/pong/20260101", newest=100_000)
    """
    return fill(_CALL, _source(Path(path)), buffer, fields=fields, dtypes=dtypes, newest=newest, progress=progress)


def _source(path: Path) -> Source:
    try:
        import tensorstore
    except ImportError as error:
        raise ImportError(f'{_CALL}: tensorstore is missing ({error}). Run pip install "fbuf[vault]".') from None
    described = path / "metadata.json"
    if not described.exists() or not (path / "manifest.ocdbt").exists():
        raise FileNotFoundError(f"{_CALL}: {path} has no metadata.json and manifest.ocdbt; expected a flashbax Vault.")
    about = read_json(described)
    version = about.get("version")
    if not isinstance(version, (int, float)) or int(version) != 1:
        raise ValueError(f"{described}: version is {str(version)[:80]!r}; expected 1.x. Rewrite it by flashbax 0.1.")
    names = dict(_leaves(described, about.get("structure_dtype")))
    if not names:
        raise ValueError(f"{described}: structure_dtype names no leaves; expected at least one.")
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": 64 * 2**20}})
    index = _open(tensorstore, context, path, "vault_index")
    if tuple(index.shape) != (1,) or index.dtype.numpy_dtype.kind not in "iu":
        what = f"{index.dtype.name}{list(index.shape)}"
        raise ValueError(f"{_CALL}: vault_index of {path} is {what}; expected one integer.")
    steps = int(np.asarray(_result(path, index.read()))[0])
    arrays = {name: _open(tensorstore, context, path, name.replace("/", ".") + ".") for name in names}
    lanes = {int(array.shape[0]) for array in arrays.values() if array.rank >= 2}
    if len(lanes) != 1 or any(array.rank < 2 or not 0 <= steps <= array.shape[1] for array in arrays.values()):
        shapes = {name: list(array.shape) for name, array in arrays.items()}
        raise ValueError(f"{_CALL}: {path} has arrays {shapes} and {steps} rows; expected [lanes, rows, ...].")
    number = lanes.pop()
    single = number == 1
    columns: dict[str, Column] = {}
    for name, array in arrays.items():
        dtype = DTYPES.get(array.dtype.name)
        if dtype is None or dtype != DTYPES.get(names[name]):
            raise ValueError(f"{described}: leaf '{name}' is {names[name]!r}, but its array {array.dtype.name!r}.")
        columns[name] = Column(tuple(array.shape[2:]), dtype, _reader(path, name, array, single))
    return Source(columns, steps, None if single else number)


def _leaves(described: Path, tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and dtypes of leaves."""
    if not isinstance(tree, dict) or prefix.count("/") > 64:
        raise ValueError(
            f"{described}: structure_dtype{f' at {prefix!r}' if prefix else ''} is a {type(tree).__name__}; expected nested "
            f"objects. A Vault cannot hold lists."
        )
    for key, value in tree.items():
        name = check_name(str(described), prefix + key)
        if isinstance(value, str):
            yield name, value
        else:
            yield from _leaves(described, value, name + "/")


def _open(tensorstore: Any, context: Any, path: Path, name: str) -> Any:
    base = {"driver": "file", "path": f"{path.resolve()}/"}
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": name}}
    return _result(path, tensorstore.open(spec, open=True, read=True, context=context))


def _result(path: Path, future: Any) -> Any:
    try:
        return future.result()
    except ValueError as error:
        raise ValueError(f"{_CALL}: {path} is damaged, or not a flashbax Vault: {str(error)[:300]}.") from None


def _reader(path: Path, name: str, array: Any, single: bool) -> Any:
    def read(first: int, last: int) -> np.ndarray:
        part = array[:, first:last]
        stored = getattr(part, "storage_statistics", None)  # of tensorstore 0.1.50 or later
        if stored is not None and not _result(path, stored(query_fully_stored=True)).fully_stored:
            raise ValueError(
                f"{_CALL}: rows {first} to {last - 1} of leaf '{name}' in {path} are missing. Take later ones: newest=."
            )
        rows = np.asarray(_result(path, part.read()))
        return rows[0] if single else rows.swapaxes(0, 1)

    return read

"""Write one file atomically: beside its path, synced, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fbuf.interop import _hdf5, _npz
from fbuf.interop._columns import check_name
from fbuf.torch._tensordict import under

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
        if dtype.isbuiltin != 1:
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
        os.replace(part, path)
        _sync(path.parent)
    except BaseException:
        with contextlib.suppress(Exception):
            writer.file.close()
        with contextlib.suppress(OSError):
            part.unlink()
        raise


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

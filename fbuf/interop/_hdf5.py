"""Write and read `.h5` in blocks, through h5py (`pip install "fbuf[h5]"`).

Links, external and virtual data sets, and data sets that were never written in full are refused. HDF5 has no pickles, but
its C library parses the file: prefer npz for files from strangers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._rows.columns import DTYPES, Column, check_name, refused

_ABOUT = "fbuf"  # the attribute that describes the file
_LARGEST_CHUNK = 2**30  # bytes


def library(call: str) -> Any:
    """Return h5py. Raises ImportError: it is missing."""
    try:
        import h5py
    except ImportError as error:
        raise ImportError(f'{call}: h5py is missing ({error}). Run pip install "fbuf[h5]", or write an .npz.') from None
    return h5py


class Writer:
    """Write data sets one after another; nested names become groups."""

    def __init__(self, path: Path, compress: bool) -> None:
        self.file = library("h5").File(path, "w", libver="v110", track_order=True)
        self._compress = compress

    def column(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], blocks: Iterable[np.ndarray]) -> None:
        """Write one data set from blocks of its first axis."""
        settings: dict[str, Any] = {}
        row = math.prod(shape[1:]) * dtype.itemsize
        if self._compress and row * shape[0]:
            settings = {"chunks": (max(1, min(shape[0], 2**18 // max(row, 1))), *shape[1:]), "compression": "gzip"}
            settings |= {"compression_opts": 1, "fletcher32": True}
        data = self.file.create_dataset(name, shape, dtype, **settings)
        rows = 0
        for block in blocks:
            data[rows : rows + len(block)] = block
            rows += len(block)

    def close(self, about: bytes) -> None:
        """Write the description and close the file."""
        self.file.attrs[_ABOUT] = about.decode()
        self.file.close()


@contextlib.contextmanager
def _report_damage(path: Path, what: str = "") -> Iterator[None]:
    """Name the file in errors of the library, which are of any kind where bytes are damaged."""
    try:
        yield
    except Exception as error:
        if str(path) in str(error):  # it was raised here
            raise
        raise ValueError(f"{path}{what} is damaged ({error!r:.200}).") from error


class Reader:
    """Read the data sets of a file.

    Attributes:
      columns: By name; those that cannot be read are refused.
    """

    def __init__(self, path: Path, call: str) -> None:
        self.path = path
        self._h5 = library(call)
        try:
            self._file = self._h5.File(path, "r")
        except OSError as error:
            if not path.exists():
                raise
            raise ValueError(f"{path}: is not an HDF5 file ({error}). It is damaged or truncated.") from None
        self.columns: dict[str, Column] = {}
        try:
            with _report_damage(path):
                self._walk(self._file, "", 0)
        except BaseException:
            self._file.close()
            raise

    def _walk(self, group: Any, prefix: str, depth: int) -> None:
        if depth > 64:
            raise ValueError(f"{self.path}: groups are nested more than 64 deep.")
        for key in group:
            name = check_name(str(self.path), prefix + key)
            if not isinstance(group.get(key, getlink=True), self._h5.HardLink):
                raise ValueError(f"{self.path}: '{name}' is a link; expected a data set. Copy its target.")
            item = group[key]
            if isinstance(item, self._h5.Group):
                self._walk(item, name + "/", depth + 1)
            elif isinstance(item, self._h5.Dataset):
                self.columns[name] = self._column(name, item)

    def _column(self, name: str, data: Any) -> Column:
        where = f"{self.path}: data set '{name}'"
        if data.external or data.is_virtual:
            raise ValueError(f"{where} is stored in other files. Copy it into this file.")
        dtype = DTYPES.get(data.dtype.name) if data.dtype.isnative else None
        if dtype is None or dtype != data.dtype or data.shape is None:
            return refused(f"{where} is {data.dtype}; expected plain little-endian numbers.")
        shape, size = tuple(data.shape), math.prod(data.shape) * dtype.itemsize
        if data.chunks is None:
            whole = data.id.get_storage_size() == size
        else:
            if math.prod(data.chunks) * dtype.itemsize > _LARGEST_CHUNK:
                raise ValueError(f"{where} has chunks of {data.chunks}; expected at most {_LARGEST_CHUNK} bytes each.")
            chunks = math.prod([-(-n // c) for n, c in zip(shape, data.chunks, strict=True)])
            whole = data.id.get_num_chunks() == chunks
        if size and not whole:
            raise ValueError(f"{where} has fewer bytes than {dtype.name}{list(shape)}; its writer did not finish.")
        if not shape:
            return refused(f"{where} is a scalar, of shape []; expected [N, ...].")

        path = self.path  # not the reader: a cycle would keep the file open after its source is dropped

        def read(first: int, last: int) -> np.ndarray:
            with _report_damage(path, f": data set '{name}'"):
                return np.asarray(data[first:last])

        return Column(shape[1:], dtype, read, shape[0])

    def about(self) -> bytes | None:
        """Return the description of the file, or None."""
        with _report_damage(self.path):
            about = self._file.attrs.get(_ABOUT)
            return about.encode() if isinstance(about, str) else None

    def attribute(self, name: str, group: str = "/") -> int | None:
        """Return an integer attribute, or None."""
        with _report_damage(self.path, f": attribute '{name}'"):
            value = self._file[group].attrs.get(name)
        return int(value) if isinstance(value, (int, np.integer)) else None

    def array(self, name: str) -> np.ndarray:
        """Return a small data set as a whole. Raises ValueError: it is missing, large or damaged."""
        with _report_damage(self.path, f": data set '{name}'"):
            if name in self.columns and self._file[name].size <= 2**20:
                return np.asarray(self._file[name][()])
        raise ValueError(f"{self.path}: has no data set '{name}' of this kind of file. It is damaged.")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

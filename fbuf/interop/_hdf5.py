"""Write and read `.h5` in blocks, through h5py (`pip install "fbuf[h5]"`).

Links, external and virtual data sets, and data sets that were never written in full are refused. HDF5 has no pickles, but
its C library parses the file: prefer npz for files from strangers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._core.lazy_import import import_extra
from fbuf._rows.columns import DTYPES, Column, check_name, empty, refused
from fbuf.interop._guards import raise_refused

_ABOUT = "fbuf"  # the attribute that describes the file
_PLAIN = frozenset(DTYPES.values())
_LARGEST_CHUNK = 2**30  # bytes


def library(call: str) -> Any:
    """Return h5py. Raises ImportError: it is missing."""
    return import_extra(call, "h5py", '"fbuf[h5]", or write an .npz')


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
        self.file.attrs[_ABOUT] = np.bytes_(about)  # of a fixed length, see `Reader`
        self.file.close()


class _ReportDamage:
    """Name the file in errors of the library, which are of any kind where bytes are damaged.

    No generator: the error thrown into one refers to itself through the frames of `contextlib`, which keeps the file open.
    """

    def __init__(self, path: Path, what: str = "") -> None:
        self._path, self._what = path, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        raise_refused(self._path, error)
        if isinstance(error, Exception) and str(self._path) not in str(error):  # else it was raised here
            raise ValueError(f"{self._path}{self._what} is damaged ({error!r:.200}).") from error


class Reader:
    """Read the data sets of a file. Text of variable length is never read: where it is damaged, HDF5 may not return.

    Attributes:
      columns: By name; those that cannot be read are refused.
      others: Names that are of no data set, all refused.
    """

    def __init__(self, path: Path, call: str) -> None:
        self.path = path
        self._h5 = library(call)
        try:
            self._file = self._h5.File(path, "r")
        except OSError as error:
            if not path.exists():
                raise
            raise_refused(path, error)
            raise ValueError(f"{path}: is not an HDF5 file ({error}). It is damaged or truncated.") from None
        self.columns: dict[str, Column] = {}
        self.others: dict[str, Column] = {}
        try:
            with _ReportDamage(path):
                self._walk(self._file.id, "", 0)
        except BaseException:
            self._file.close()
            raise

    def _walk(self, group: Any, prefix: str, depth: int) -> None:
        h5 = self._h5
        if depth > 64:
            raise ValueError(f"{self.path}: groups are nested more than 64 deep.")
        links: list[tuple[bytes, Any]] = []
        group.links.iterate(lambda key, link: links.append((key, link.type)), info=True)
        for key, kind in links:
            name = check_name(str(self.path), prefix + key.decode())
            if kind != h5.h5l.TYPE_HARD:
                raise ValueError(f"{self.path}: '{name}' is a link; expected a data set. Copy its target.")
            item = h5.h5o.open(group, key)
            if isinstance(item, h5.h5d.DatasetID):
                self.columns[name] = self._column(name, item)
            elif isinstance(item, h5.h5g.GroupID) and item.get_num_objs():
                self._walk(item, name + "/", depth + 1)
            else:
                self.others[name] = refused(f"{self.path}: '{name}' is empty, or a type; expected a data set.")

    def _column(self, name: str, data: Any) -> Column:
        """Return the column of a data set, by h5py's low-level objects: files may have thousands."""
        h5, where, dtype = self._h5, f"{self.path}: data set '{name}'", data.dtype
        space, settings = data.get_space(), None
        if data.get_offset() is None:  # not one piece of this file
            settings = data.get_create_plist()
            if settings.get_external_count() or settings.get_layout() == h5.h5d.VIRTUAL:
                raise ValueError(f"{where} is stored in other files. Copy it into this file.")
        if dtype not in _PLAIN or space.get_simple_extent_type() == h5.h5s.NULL:
            return refused(f"{where} is {dtype}; expected plain little-endian numbers.")
        shape: tuple[int, ...] = space.shape
        size = math.prod(shape) * dtype.itemsize
        whole = data.get_storage_size() == size
        if settings is not None and settings.get_layout() == h5.h5d.CHUNKED:
            chunk = settings.get_chunk()
            if math.prod(chunk) * dtype.itemsize > _LARGEST_CHUNK:
                raise ValueError(f"{where} has chunks of {chunk}; expected at most {_LARGEST_CHUNK} bytes each.")
            whole = data.get_num_chunks() == math.prod([-(-n // c) for n, c in zip(shape, chunk, strict=True)])
        if size and not whole:
            raise ValueError(f"{where} has fewer bytes than {dtype.name}{list(shape)}; its writer did not finish.")
        if not shape:
            return refused(f"{where} is a scalar, of shape []; expected [N, ...].")

        path = self.path  # not the reader: a cycle would keep the file open after its source is dropped

        def read(first: int, last: int) -> np.ndarray:
            with _ReportDamage(path, f": data set '{name}'"):
                out = empty((last - first, *shape[1:]), dtype)
                here = selection = h5.h5s.ALL
                if out.shape != shape:
                    here, selection = h5.h5s.create_simple(out.shape), data.get_space()
                    selection.select_hyperslab((first, *(0 for _ in shape[1:])), out.shape)
                if out.size:
                    data.read(here, selection, out)
                return out

        return Column(shape[1:], dtype, read, shape[0])

    def about(self) -> bytes | None:
        """Return the description of the file, or None. Raises ValueError: it is not of a fixed length."""
        with _ReportDamage(self.path):
            about: bytes | None = self._attribute(_ABOUT, "/", "S")
            if about is None and self._h5.h5a.exists(self._file.id, _ABOUT.encode()):
                raise ValueError(f"{self.path}: attribute '{_ABOUT}' is not text of a fixed length. Write it again.")
            return about

    def attribute(self, name: str, group: str = "/") -> int | None:
        """Return an integer attribute, or None."""
        with _ReportDamage(self.path, f": attribute '{name}'"):
            value = self._attribute(name, group, "iu")
        return None if value is None else int(value)

    def _attribute(self, name: str, group: str, kinds: str) -> Any:
        """Return an attribute that is one value of these kinds, or None."""
        h5a, at = self._h5.h5a, {"obj_name": group.encode()}
        if not h5a.exists(self._file.id, name.encode(), **at):
            return None
        found = h5a.open(self._file.id, name.encode(), **at)
        if found.dtype.kind not in kinds or found.shape != () or not found.get_storage_size():
            return None
        value = np.zeros((), found.dtype)
        found.read(value)
        return value[()]

    def array(self, name: str) -> np.ndarray:
        """Return a small data set as a whole. Raises ValueError: it is missing, large, damaged or of objects."""
        with _ReportDamage(self.path, f": data set '{name}'"):
            if name in self.columns:
                data = self._file[name]
                if data.size <= 2**20 and not data.dtype.hasobject:
                    return np.asarray(data[()])
        raise ValueError(f"{self.path}: has no data set '{name}' of this kind of file. It is damaged.")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

"""Write and read `.npz` as a stream: a zip of npy members, none of which is ever in memory as a whole.

Member headers are checked against the zip before anything is allocated, and the zip's checksums while the bytes are read.
Object arrays (pickles) are refused by name.
"""

from __future__ import annotations

import contextlib
import io
import math
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from fbuf._rows.columns import DTYPES, Column, check_name, check_shape, refused
from fbuf.interop._guards import raise_refused

ABOUT = "__fbuf__"  # the member that describes the file
_LARGEST_HEADER = 10_000  # bytes, numpy's own limit
_MOST_RATIO = 1040  # what deflate can make of a byte is a little less
_PARSERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_DATE = (1980, 1, 1, 0, 0, 0)  # the same rows give the same file


class Writer:
    """Write members one after another."""

    def __init__(self, path: Path, compress: bool) -> None:
        self.file = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED

    def column(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], blocks: Iterable[np.ndarray]) -> None:
        """Write one array from blocks of its first axis."""
        entry = zipfile.ZipInfo(f"{name}.npy", _DATE)
        entry.compress_type = self._method
        entry.external_attr = 0o644 << 16
        with self.file.open(entry, "w", force_zip64=True) as file:
            header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            npy.write_array_header_1_0(file, header)
            for block in blocks:
                file.write(np.ascontiguousarray(block, dtype).reshape(-1).view(np.uint8).data)

    def close(self, about: bytes) -> None:
        """Write the description and the zip's directory."""
        self.column(ABOUT, (len(about),), np.dtype(np.uint8), [np.frombuffer(about, np.uint8)])
        self.file.close()


class Reader:
    """Read the arrays of a zip, each in ascending order.

    Attributes:
      columns: By name; those that cannot be read are refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: dict[str, Column] = {}
        size = path.stat().st_size
        self._open = contextlib.ExitStack()  # the zip, and above it its members: only both closed, the file is
        try:
            self._zip = self._open.enter_context(zipfile.ZipFile(path))
        except Exception as error:  # also NotImplementedError, struct.error and what else its parser meets
            raise_refused(path, error)
            raise ValueError(f"{path}: is not a zip ({error}); expected an .npz. It is damaged or truncated.") from None
        try:
            self._find_columns(size)
        except BaseException:
            self.close()
            raise

    def _find_columns(self, size: int) -> None:
        path, entries = self.path, self._zip.infolist()
        if (number := _stated(path)) not in (len(entries), None):
            raise ValueError(f"{path}: lists {len(entries)} members; expected {number}. The file is damaged.")
        for entry in entries:
            if not entry.filename.endswith(".npy"):
                raise ValueError(f"{path}: has a member {entry.filename[:80]!r}; expected arrays, 'name.npy'.")
            name = check_name(str(path), entry.filename.removesuffix(".npy"))
            if name in self.columns:
                raise ValueError(f"{path}: has two members {name!r}; expected one.")
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
                raise ValueError(f"{path}: member {name!r} is compressed by another method. Use numpy.savez.")
            most = entry.compress_size * (_MOST_RATIO if entry.compress_type == zipfile.ZIP_DEFLATED else 1)
            if entry.file_size > most or entry.header_offset + entry.compress_size > size:
                raise ValueError(f"{path}: member {name!r} claims {entry.file_size} bytes in a zip of {size}: damaged.")
            member = self._open.enter_context(contextlib.closing(_Member(self._zip, f"{path}: member {name!r}", entry)))
            self.columns[name] = _column(member)

    def about(self) -> bytes | None:
        """Return the description of the file, or None."""
        column = self.columns.get(ABOUT)
        if column is None or column.dtype != np.uint8 or column.shape or column.rows > 2**26:
            return None
        return bytes(column.read(0, column.rows))

    def close(self) -> None:
        """Close the file."""
        self._open.close()


class _Member:
    """Read the bytes of one array, in order."""

    def __init__(self, archive: zipfile.ZipFile, where: str, entry: zipfile.ZipInfo) -> None:
        self.where, self.size = where, entry.file_size
        self._archive, self._entry = archive, entry
        self._file: IO[bytes] | None = None

    def start(self, number: int) -> bytes:
        """Return the first bytes, so many or as many as there are; `read` returns those after them."""
        self.close()
        with _report_damage(self.where):
            self._file = self._archive.open(self._entry)
            return self._file.read(number)

    def read(self, number: int) -> bytes:
        """Return the next bytes."""
        assert self._file is not None, "start first"
        with _report_damage(self.where):
            data = self._file.read(number)
        if len(data) != number:
            raise ValueError(f"{self.where} has fewer bytes than its header says. The file is damaged.")
        return data

    def close(self) -> None:
        """Close the member; the zip stays open."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _column(member: _Member) -> Column:
    where = member.where
    begin, shape, dtype, why = _header(where, member.start(_LARGEST_HEADER))
    member.close()
    if why:
        return refused(f"{where} {why}")
    row = math.prod(shape[1:]) * dtype.itemsize
    size = math.prod(shape) * dtype.itemsize
    if member.size - begin != size:
        has = member.size - begin
        raise ValueError(f"{where} has {has} bytes; expected {size} of {dtype.name}{list(shape)}. The file is damaged.")
    if not shape:
        return refused(f"{where} is a scalar, of shape []; expected [N, ...].")
    at = -1  # the row that the member's next bytes begin; -1: it was not started

    def read(first: int, last: int) -> np.ndarray:
        nonlocal at
        if at < 0 or first < at:
            member.start(begin)
            at = 0
        for skipped in range(at, first, step := max(1, 2**20 // max(1, row))):
            member.read((min(skipped + step, first) - skipped) * row)
        rows = np.frombuffer(member.read((last - first) * row), dtype).reshape(last - first, *shape[1:])
        at = last
        if dtype == np.bool_ and (rows.view(np.uint8) > 1).any():
            raise ValueError(f"{where} has bytes above 1; expected booleans. The file is damaged.")
        return rows

    return Column(shape[1:], dtype, read, shape[0])


def _stated(path: Path) -> int | None:
    """Return the number of members that the zip's end record states; None: unknown. zipfile does not compare it."""
    with open(path, "rb") as file:
        file.seek(-22, 2)
        end = file.read(22)
    number = int.from_bytes(end[10:12], "little")
    return number if end[:4] == b"PK\x05\x06" and number != 0xFFFF else None  # 0xFFFF: of a zip64


@contextlib.contextmanager
def _report_damage(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # BadZipFile, zlib.error, EOFError, ...
        raise_refused(where, error)
        raise ValueError(f"{where} is damaged ({type(error).__name__}: {error}).") from None


def _header(where: str, begin: bytes) -> tuple[int, tuple[int, ...], np.dtype[Any], str]:
    """Return the length of an npy header, shape, dtype; and why the array cannot be read, or ""."""
    file = io.BytesIO(begin)
    try:
        found, columnwise, dtype = _PARSERS[npy.read_magic(file)](file)
    except Exception as error:  # ValueError, and what Python's own parser raises
        raise ValueError(f"{where} has an invalid npy header ({error}). The file is damaged.") from None
    shape = check_shape(where, found)
    why = ""
    if dtype.hasobject:
        why = "holds pickled Python objects; expected plain numbers. Save arrays of numbers."
    elif DTYPES.get(dtype.name) != dtype:
        why = f"is '{dtype.str}'; expected little-endian numbers. Save it as x.astype(np.float32)."
    elif columnwise and len(shape) > 1:
        why = "is in Fortran order; expected C order. Save np.ascontiguousarray(x)."
    return file.tell(), shape, dtype, why

"""`.npz` written and read as a stream: a zip of npy members, none of which is ever whole in memory.

`numpy.savez` wants every array at once and `numpy.load` gives each at once; both also know pickles (object arrays), which
here are refused by name. A member's header is parsed by one regular expression for plain dtypes; what it claims is compared
with the bytes the zip holds before anything is allocated, and the zip's checksums are verified as the bytes pass.
"""

from __future__ import annotations

import contextlib
import math
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fbuf.interop._source import DTYPES, check_name, check_shape

_HEADER = re.compile(
    rb"\{'descr': '([<>|=]?)([a-zA-Z]\d*)', 'fortran_order': (True|False), 'shape': \(([0-9, ]*)\), *\} *\n?"
)
_LARGEST_HEADER = 10_000  # bytes, numpy's own limit
_MOST_RATIO = 1040  # what deflate can make of a byte is a little less
_DATE = (1980, 1, 1, 0, 0, 0)  # the same rows give the same file


class Writer:
    """Members one after another."""

    def __init__(self, path: Path, compress: bool) -> None:
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED

    def column(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], blocks: Iterable[np.ndarray]) -> None:
        """One array, from blocks of its first axis."""
        entry = zipfile.ZipInfo(f"{name}.npy", _DATE)
        entry.compress_type = self._method
        entry.external_attr = 0o644 << 16
        with self._zip.open(entry, "w", force_zip64=True) as file:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            rows = 0
            for block in blocks:
                file.write(np.ascontiguousarray(block, dtype).reshape(-1).view(np.uint8).data)
                rows += len(block)
        assert rows == shape[0], (name, rows, shape)

    def close(self, about: bytes) -> None:
        """The description, and the directory of the zip."""
        self.column("__fbuf__", (len(about),), np.dtype(np.uint8), [np.frombuffer(about, np.uint8)])
        self._zip.close()

    def abort(self) -> None:
        """Lets go of the file, which is of no use."""
        with contextlib.suppress(Exception):
            self._zip.close()


class Reader:
    """The arrays of a zip: shape and dtype of each, and blocks in ascending order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        try:
            self._zip = zipfile.ZipFile(path)
        except PermissionError:
            raise
        except Exception as error:  # also NotImplementedError, struct.error and what else its parser meets
            raise ValueError(f"{path}: is no zip ({error}); expected an .npz. It is damaged or cut off.") from None
        self.arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        self.refused: dict[str, str] = {}
        self._entries: dict[str, zipfile.ZipInfo] = {}
        entries = self._zip.infolist()
        if (number := _stated(path)) is not None and number != len(entries):
            raise ValueError(
                f"{path}: lists {len(entries)} members; expected {number}, as it says. The file is damaged."
            )
        for entry in entries:
            if not entry.filename.endswith(".npy"):
                raise ValueError(f"{path}: has a member {entry.filename[:80]!r}; expected arrays, 'name.npy'.")
            name = check_name(str(path), entry.filename.removesuffix(".npy"))
            if name in self._entries:
                raise ValueError(f"{path}: has two members {name!r}; expected one. Do not load this file.")
            if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or entry.flag_bits & 1:
                raise ValueError(
                    f"{path}: member {name!r} is packed in a way that npz is not. Save it with numpy.savez."
                )
            most = entry.compress_size * (_MOST_RATIO if entry.compress_type == zipfile.ZIP_DEFLATED else 1)
            if entry.file_size > most or entry.header_offset + entry.compress_size > size:
                raise ValueError(
                    f"{path}: member {name!r} is said to have {entry.file_size} bytes, {entry.compress_size} in the zip of "
                    f"{size}; expected what fits. The file is damaged."
                )
            self._entries[name] = entry
            with self._open(name) as file:
                self._describe(name, entry, file)

    def _open(self, name: str) -> Any:
        try:
            return self._zip.open(self._entries[name])
        except Exception as error:
            raise ValueError(f"{self.path}: member {name!r} cannot be read ({error}). The file is damaged.") from None

    def _describe(self, name: str, entry: zipfile.ZipInfo, file: Any) -> None:
        shape, dtype, why, begin = _header(f"{self.path}: member {name!r}", _exactly(self.path, name, file))
        if why:
            self.refused[name] = why
            return
        size = math.prod(shape) * dtype.itemsize
        if entry.file_size - begin != size:
            raise ValueError(
                f"{self.path}: member {name!r} has {entry.file_size - begin} bytes of data; expected {size}, of {dtype.name}"
                f"{list(shape)} as its header says. The file is damaged."
            )
        self.arrays[name] = shape, dtype

    def read(self, name: str) -> Any:
        """A function of rows from the first to before the second number, called in ascending order."""
        shape, dtype = self.arrays[name]
        row = math.prod(shape[1:]) * dtype.itemsize
        state: dict[str, Any] = {"file": None, "at": 0}

        def read(first: int, last: int) -> np.ndarray:
            if state["file"] is None or first < state["at"]:
                state["file"], state["at"] = self._open(name), 0
                _header(f"{self.path}: member {name!r}", _exactly(self.path, name, state["file"]))
            take = _exactly(self.path, name, state["file"])
            skipped = (first - state["at"]) * row
            while skipped:
                skipped -= len(take(min(skipped, 2**20)))
            out = np.frombuffer(take((last - first) * row), dtype).reshape(last - first, *shape[1:])
            if last == shape[0]:
                take(0)  # the end, where the checksum is compared
            state["at"] = last
            return _checked_bools(self.path, name, out)

        return read

    def bytes_of(self, name: str) -> bytes | None:
        """A member of uint8, whole; None if there is none."""
        shape, dtype = self.arrays.get(name, ((), np.dtype(bool)))
        if dtype != np.uint8 or len(shape) != 1 or shape[0] > 2**26:
            return None
        return bytes(self.read(name)(0, shape[0]))

    def close(self) -> None:
        """Lets go of the file."""
        self._zip.close()


def _stated(path: Path) -> int | None:
    """How many members the end of a zip says there are, which zipfile does not compare; None: it does not say."""
    with open(path, "rb") as file:
        file.seek(-22, 2)
        end = file.read(22)
    number = int.from_bytes(end[10:12], "little")
    return number if end[:4] == b"PK\x05\x06" and number != 0xFFFF else None


def _checked_bools(path: Path, name: str, rows: np.ndarray) -> np.ndarray:
    if rows.dtype == np.bool_ and (rows.view(np.uint8) > 1).any():
        raise ValueError(f"{path}: member {name!r} holds bytes above 1; expected booleans. The file is damaged.")
    return rows


def _exactly(path: Path, name: str, file: Any) -> Any:
    """`take(n)`: just so many bytes; 0: that there are no more."""

    def take(number: int) -> bytes:
        try:
            got: bytes = file.read(number or 1)
        except Exception as error:  # BadZipFile, zlib.error, EOFError, ...
            raise ValueError(f"{path}: member {name!r} is damaged ({type(error).__name__}: {error}).") from None
        if len(got) != number:
            raise ValueError(
                f"{path}: member {name!r} has {'more' if not number else 'fewer'} bytes than its header says."
            )
        return got

    return take


def _header(where: str, take: Any) -> tuple[tuple[int, ...], np.dtype[Any], str, int]:
    """Shape and dtype of an npy stream, or why not, and how many bytes the header has."""
    magic = take(8)
    if magic[:6] != b"\x93NUMPY" or magic[6] not in (1, 2, 3):
        raise ValueError(f"{where} is no npy ({magic[:8]!r}); expected one. The file is damaged.")
    width = 2 if magic[6] == 1 else 4
    length = int.from_bytes(take(width), "little")
    if length > _LARGEST_HEADER:
        raise ValueError(
            f"{where} has a header of {length} bytes; expected at most {_LARGEST_HEADER}. Do not load this file."
        )
    begin = 8 + width + length
    text = take(length)
    nothing: tuple[tuple[int, ...], np.dtype[Any]] = ((), np.dtype(bool))
    match = _HEADER.fullmatch(text)
    if match is None or match[2][:1] == b"O":
        pickled = b"'|O'" in text or b"'O'" in text
        what = (
            "holds Python objects, which are pickled"
            if pickled
            else f"is of a kind that is not read here ({text[:80]!r})"
        )
        return *nothing, f"{where} {what}; expected plain numbers. Save it as arrays of numbers.", begin
    order, kind, fortran, axes = match.groups()
    text_of = kind.decode()
    dtype = _PLAIN.get(text_of)
    shape = check_shape(where, [int(n) for n in axes.decode().replace(" ", "").split(",") if n])
    if dtype is None or (order == b">" and dtype.itemsize > 1):
        name = order.decode() + text_of
        return *nothing, f"{where} is '{name}'; expected little-endian numbers. Save it as x.astype(np.float32).", begin
    if fortran == b"True" and len(shape) > 1:
        return *nothing, f"{where} lies column by column; expected rows. Save np.ascontiguousarray(x).", begin
    return shape, dtype, "", begin


_PLAIN = {dtype.str[1:]: dtype for dtype in DTYPES.values() if dtype.isbuiltin}

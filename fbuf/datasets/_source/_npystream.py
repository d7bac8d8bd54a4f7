"""An array in a .npy file, packed or not, as its rows in order, without ever holding more than was asked for.

What the header says is compared with what the caller expects before any memory is taken; the last rows are handed out only
after the end was reached and every checksum on the way (gzip's, the listed hash) was right. So whoever has all rows has right
rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from fbuf._host.arrays import Array, flat
from fbuf.datasets._source import _header
from fbuf.datasets._source._errors import FileCorrupted
from fbuf.datasets._source._gunzip import BLOCK, Gunzip, Plain
from fbuf.datasets._source._passing import Bytes

_MOST_BYTES, _MOST_ROW = 1 << 40, 1 << 26


class NpyStream:
    """Rows of one array.

    Args:
      source: The file's bytes: gzip, of one or more members, or the .npy itself. Closed with this.
      file: Its name, for messages.
      item: The expected shape of one row; None: any of at most 64 MiB.
      dtype: The expected dtype, or some; None: any plain one. Byte order is this machine's in what is handed out.
      rows: The expected number of rows; None: any.
      most_bytes: Of the whole array.
    Attributes:
      shape, dtype: Of the whole array, in this machine's byte order. `rows`: its first axis; 1 for an array without axes.
      done: Rows handed out.
    Raises:
      FileCorrupted: it is no such array, or (later, from `read`) it is damaged, cut short or longer than it says.
      SourceError: from whatever `source` reads.

    Example:
      >>> import gzip, io
      >>> file = io.BytesIO()
      >>> np.save(file, np.arange(5, dtype=np.int32))
      >>> with NpyStream(io.BytesIO(gzip.compress(file.getvalue())), "action.gz", item=(), dtype="int32") as actions:
      ...     [block.tolist() for block in actions.blocks(2)]
      [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        source: Bytes,
        file: str,
        *,
        item: tuple[int, ...] | None = None,
        dtype: Any = None,
        rows: int | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        self._file, self._source = file, source
        self.done = self._ended = 0
        try:
            head = source.read(2)
            while 0 < len(head) < 2 and (more := source.read(1)):
                head += more
            self._content = (Gunzip if head[:1] == b"\x1f" else Plain)(source, file, head)
            self._header = self._parsed()
            self._expect(item, dtype, rows, most_bytes)
        except BaseException:
            source.close()
            raise
        self.shape, self.dtype = self._header.shape, self._header.dtype.newbyteorder("=")
        self.rows, self.item = (self.shape[0], self.shape[1:]) if self.shape else (1, ())

    def read(self, rows: int) -> Array:
        """The next rows `[n, *item]`, a new array; n is less than `rows` at the end only, and 0 after it."""
        out: Array = np.empty((min(rows, self.rows - self.done), *self.item), self.dtype)
        self.read_into(out)
        return out

    def read_into(self, out: Array) -> int:
        """The next rows into a contiguous array `[n, *item]` of this dtype, and how many there were."""
        if out.dtype != self.dtype or out.shape[1:] != self.item or not out.flags.c_contiguous:
            raise ValueError(
                f"NpyStream.read_into: got {out.dtype}{list(out.shape)}; expected a contiguous {self.dtype} array "
                f"[n, {', '.join(map(str, self.item))}]."
            )
        rows = min(len(out), self.rows - self.done)
        self._fill(memoryview(flat(out[:rows])))
        if self._header.dtype != self.dtype:
            out[:rows].byteswap(inplace=True)
        if self.dtype == bool and (out[:rows].view(np.uint8) > 1).any():
            raise self._error("has a byte above 1 among booleans; expected 0 or 1")
        self.done += rows
        if self.done == self.rows:
            self._end()
        return rows

    def blocks(self, rows: int) -> Iterator[Array]:
        """All that is left, `rows` at a time, each a new array."""
        while self.done < self.rows or not self._ended:
            block = self.read(rows)
            if len(block):
                yield block

    def array(self, most_bytes: int = 1 << 30) -> Array:
        """The whole array at once. Raises FileCorrupted: it is larger than `most_bytes`."""
        if self._header.nbytes > most_bytes:
            raise self._error(
                f"has {self._header.nbytes} bytes of shape {list(self.shape)}; expected at most {most_bytes}"
            )
        return self.read(self.rows).reshape(self.shape)

    def close(self) -> None:
        """Gives the file back; again does nothing."""
        self._source.close()

    def __enter__(self) -> NpyStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _parsed(self) -> _header.Header:
        try:
            start = self._exactly(8)
            start += self._exactly(_header.prefix_bytes(start) - 8)
            return _header.parse(self._exactly(_header.text_bytes(start)))
        except ValueError as error:
            raise error if isinstance(error, FileCorrupted) else self._error(str(error)) from None

    def _expect(self, item: tuple[int, ...] | None, dtype: Any, rows: int | None, most_bytes: int) -> None:
        shape, here = self._header.shape, self._header.dtype.newbyteorder("=")
        if item is not None and (shape[1:] != tuple(item) or not shape):
            raise self._error(f"has shape {list(shape)}; expected [n{''.join(f', {n}' for n in item)}]")
        if dtype is not None:
            some = dtype if isinstance(dtype, Sequence) and not isinstance(dtype, str) else (dtype,)
            wanted = [np.dtype(one).newbyteorder("=") for one in some]
            if here not in wanted:
                raise self._error(f"has dtype {here}; expected {' or '.join(map(str, wanted))}")
        if rows is not None and (shape[0] if shape else 1) != rows:
            raise self._error(f"has {shape[0] if shape else 1} rows; expected {rows}")
        if self._header.nbytes > most_bytes:
            raise self._error(f"has {self._header.nbytes} bytes, of shape {list(shape)}; expected at most {most_bytes}")
        row = math.prod(shape[1:]) * here.itemsize
        if row > _MOST_ROW:
            raise self._error(f"has rows of {row} bytes; expected at most {_MOST_ROW}")

    def _fill(self, out: memoryview) -> None:
        at, size, read = 0, len(out), self._content.read
        while at < size:
            data = read(min(BLOCK, size - at))
            if not data:
                begin = self.done * math.prod(self.item) * self.dtype.itemsize + at
                raise self._error(
                    f"ends after {begin} bytes of the array; expected {self._header.nbytes}, for shape {list(self.shape)}"
                )
            out[at : at + len(data)] = data
            at += len(data)

    def _end(self) -> None:
        if not self._ended:
            if self._content.read(1):
                raise self._error(f"goes on after its array; expected an end: its shape is {list(self.shape)}")
            self._ended = 1

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._content.read(size - len(data))
            if not more:
                raise ValueError(f"ends after {self._content.position} bytes, within its header; expected a .npy array")
            data += more
        return data

    def _error(self, what: str) -> FileCorrupted:
        at = self._content.at
        return FileCorrupted(f"{self._file}: byte {at}: {what}.", file=self._file, at=at)

"""Reads the array of a gzipped .npy file as a stream of blocks, in bounded memory.

The header is compared with what the caller expects before anything is allocated. The end of the file, its length and its
checksum are checked after the last block.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from fbuf.datasets._remote.errors import FileCorrupted

Array = np.ndarray[Any, Any]
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npy(
    path: Path,
    dtypes: Sequence[str],
    shape: tuple[int | None, ...],
    rows: int,
    report: Callable[[int], None] | None = None,
) -> Generator[Array, None, None]:
    """Yield an array in blocks of its first axis; an empty array, or one without axes, as one block.

    Args:
      dtypes: Those that are expected.
      shape: The expected shape; None: any size up to `rows`.
      rows: Of a block.
      report: Called with the compressed bytes that each block took.
    Raises:
      FileCorrupted: the file is truncated or damaged, or its array is another one.
    """
    gzip = _gzip()
    try:
        with open(path, "rb") as packed, gzip.open(packed) as content:
            version = npy.read_magic(content)
            if version not in _HEADERS:
                raise ValueError(f"is of .npy version {version}; expected 1.0 or 2.0")
            found, fortran, dtype = _HEADERS[version](content)
            if dtype not in [np.dtype(name) for name in dtypes]:
                raise ValueError(f"has dtype {dtype}; expected {' or '.join(dtypes)}")
            fits = (
                size == want or (want is None and 0 <= size <= rows) for size, want in zip(found, shape, strict=False)
            )
            if len(found) != len(shape) or not all(fits) or (fortran and len(found) > 1):
                expected = [f"at most {rows}" if size is None else size for size in shape]
                raise ValueError(f"has shape {list(found)}{' in Fortran order' * fortran}; expected {expected}")
            count, item, at = (found[0], found[1:], 0) if found else (1, (), 0)
            size = int(np.prod(item)) * dtype.itemsize
            for start in range(0, max(count, 1), rows):
                number = min(rows, count - start)
                data = content.read(number * size)
                if len(data) < number * size:
                    raise ValueError(f"ends after {start * size + len(data)} of {count * size} bytes of its array")
                yield np.frombuffer(data, dtype).reshape((number, *item) if found else ())
                if report is not None:
                    report(packed.tell() - at)
                    at = packed.tell()
            if content.read(1):
                raise ValueError(f"goes on after its array of shape {list(found)}")
            if report is not None:
                report(packed.tell() - at)
    except Exception as error:  # what gzip, zlib and the parser of headers raise for bytes they cannot read
        if isinstance(error, (OSError, MemoryError)) and not isinstance(error, gzip.BadGzipFile):
            raise
        raise FileCorrupted(f"{path.name}: {str(error).rstrip('.')}.") from error


def _gzip() -> Any:
    """Return gzip, or isal's module of the same functions, which is four times as fast."""
    try:
        from isal import igzip
    except ImportError:
        import gzip

        return gzip
    return igzip

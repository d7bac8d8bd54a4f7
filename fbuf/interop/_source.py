"""What rows are read from: columns in order of time, read a block at a time.

Every format becomes columns, so that names, dtypes and lengths are checked once (`fbuf.interop._columns`), and a format
says only where its bytes are. A `Source` of them fills a buffer; `fbuf.datasets.from_arrays` writes them to files.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

MOST_JSON = 64 * 2**20  # bytes
MOST_DEPTH = 64  # folders

_EXTENDED = (
    "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu int2 uint2 int4 uint4"
).split()
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        "bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 float32 float64 complex64 complex128".split()
    )
} | {name: np.dtype(getattr(jnp, name)) for name in _EXTENDED if hasattr(jnp, name)}
"""Every dtype that a file may name, by its name. A closed table: nothing in a file is looked up anywhere else."""


@dataclasses.dataclass(frozen=True)
class Column:
    """One leaf of all rows.

    Attributes:
      shape: Of one row (of one lane).
      dtype: As it lies in the source.
      read: Rows from the first to before the second number, `[n, ...]`, with lanes `[n, E, ...]`. Called in ascending order.
      rows: How many there are; -1 where the source says it for all columns.
      refused: Not empty: why it cannot be read; raised if it is asked for.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[int, int], np.ndarray]
    rows: int = -1
    refused: str = ""


@dataclasses.dataclass(frozen=True)
class Source:
    """Rows of another library or a file, oldest first.

    Attributes:
      columns: By name, as in the source.
      steps: Rows (a lane).
      lanes: E, None for one stream.
      mask: Which rows are there, bool `[n, E]` of rows from the first to before the second number; None: all.
      priority: |p| of each row, `[T]` or `[T, E]`, NaN where it has none of its own; None: there are none.
      largest: |p| of rows that have none of their own.
      structure: Treedef of a row whose leaves are the columns in this order; None: nested dicts.
    """

    columns: Mapping[str, Column]
    steps: int
    lanes: int | None = None
    mask: Callable[[int, int], np.ndarray] | None = None
    priority: np.ndarray | None = None
    largest: float = 1.0
    structure: Any = None


def refused(why: str) -> Column:
    """A column that is there but cannot be read."""

    def read(first: int, last: int) -> np.ndarray:
        raise ValueError(why)

    return Column((), np.dtype(bool), read, refused=why)


def check_name(where: str, name: str) -> str:
    """The name of a leaf from a file, which could be a path to somewhere else.

    Raises:
      ValueError: it has an empty part, `.`, `..`, a backslash or a NUL.
    """
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise ValueError(
            f"{where}: names a leaf {name[:80]!r}; expected a name such as 'next/obs'. Do not load this file."
        )
    return name


def check_count(where: str, what: str, value: Any) -> int:
    """A count that a file states, an int from 0 to 2^62."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise ValueError(f"{where}: {what} is {str(value)[:80]!r}; expected an int >= 0. The file is damaged.")
    return value


def check_shape(where: str, value: Any) -> tuple[int, ...]:
    """A shape that a file states: at most 32 ints whose product stays below 2^62."""
    if not isinstance(value, (list, tuple)) or len(value) > 32:
        raise ValueError(f"{where}: shape is {str(value)[:80]!r}; expected up to 32 ints. The file is damaged.")
    shape = tuple(check_count(where, "an axis", n) for n in value)
    total = 1
    for n in shape:
        total *= n
    if total >= 2**62:
        raise ValueError(f"{where}: shape is {shape}; expected fewer than 2^62 entries. The file is damaged.")
    return shape


def read_json(path: Path) -> dict[str, Any]:
    """An object of a JSON file.

    Raises:
      ValueError: it is larger than 64 MiB, nested too deep, no JSON or no object.
      FileNotFoundError: there is none.
    """
    size = path.stat().st_size
    if size > MOST_JSON:
        raise ValueError(f"{path}: has {size} bytes; expected at most {MOST_JSON}. It is no description of rows.")
    try:
        value = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError(f"{path}: is nested too deep to read. Do not load this file.") from None
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON ({error}). It is damaged, or no part of such a dump.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is a {type(value).__name__}; expected an object. It is damaged.")
    return value

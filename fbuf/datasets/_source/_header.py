"""The header of a .npy file: read by a grammar of its own, never evaluated.

`numpy.load` hands the header to `ast.literal_eval` and takes any dtype, objects (which are pickles) and structures included,
and memory for whatever shape it says. Here a header is at most 4 KiB, has exactly three keys, one of the dtypes of `DTYPES`,
and a shape that the caller expected.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

MAGIC = b"\x93NUMPY"
MOST_HEADER, MOST_AXES = 4096, 8
DTYPES = frozenset(("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"))
_LARGEST = 1 << 48
_DESCR = re.compile(r"([<>|=]?)([a-z][0-9])")
_VALUE = r"'[^'\"\\]{0,40}'|\"[^'\"\\]{0,40}\"|True|False|\([0-9,L ]{0,400}\)"
_ITEM = rf" *(?:'(\w{{1,20}})'|\"(\w{{1,20}})\") *: *({_VALUE}) *"
_HEADER = re.compile(rf"\{{{_ITEM},{_ITEM},{_ITEM}(?:, *)?\}}", re.ASCII)
_STRUCTURE = re.compile(r"['\"]descr['\"] *: *[\[(].{0,40}")
_NUMBER = re.compile(r" *(0|[1-9][0-9]{0,17})L? *")


@dataclass(frozen=True)
class Header:
    """What a file says of its array. `dtype` is that of the file, of any byte order."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def prefix_bytes(start: bytes) -> int:
    """Bytes before the header's text, from the first 8. Raises ValueError: no .npy file, or a version that is not known."""
    if start[:6] != MAGIC:
        raise ValueError(f"begins with {start[:6]!r}; expected {MAGIC!r}, a .npy array")
    if start[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise ValueError(f"is of .npy version {'.'.join(map(str, start[6:8]))}; expected 1.0, 2.0 or 3.0")
    return 10 if start[6] == 1 else 12


def text_bytes(prefix: bytes) -> int:
    """Bytes of the header's text, from all before it. Raises ValueError."""
    size = int.from_bytes(prefix[8:], "little")
    if size > MOST_HEADER:
        raise ValueError(f"has a header of {size} bytes; expected at most {MOST_HEADER}")
    return size


def parse(text: bytes) -> Header:
    """The header from its text. Raises ValueError: it is not one that can be read here."""
    try:
        value = text.decode("ascii").strip(" \n")
    except UnicodeDecodeError:
        raise ValueError(f"has a header of {text[:60]!r}; expected ASCII") from None
    items = _items(value)
    if set(items) != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"has a header {value[:120]!r}; expected 'descr', 'fortran_order' and 'shape'")
    shape, dtype = _shape(items["shape"]), _dtype(items["descr"])
    fortran = items["fortran_order"]
    if fortran not in ("True", "False"):
        raise ValueError(f"has fortran_order {fortran[:40]}; expected False")
    if fortran == "True" and sum(n > 1 for n in shape) > 1:
        raise ValueError(f"has shape {list(shape)} in Fortran order, its rows scattered; expected C order")
    if math.prod(n for n in shape if n) * dtype.itemsize >= _LARGEST:
        raise ValueError(f"has shape {list(shape)}, which is larger than any file")
    return Header(shape, dtype)


def _items(value: str) -> dict[str, str]:
    found = _HEADER.fullmatch(value)
    if not found:
        structure = _STRUCTURE.search(value)
        if structure:
            raise ValueError(f"has a structure of dtypes, {structure[0]}...; expected {_wanted()}")
        raise ValueError(f"has a header {value[:120]!r}; expected a dict of 'descr', 'fortran_order' and 'shape'")
    groups = found.groups()
    return {first or second: text for first, second, text in (groups[:3], groups[3:6], groups[6:])}


def _dtype(text: str) -> np.dtype[Any]:
    found = _DESCR.fullmatch(text[1:-1]) if text[0] in "'\"" else None
    if not found or found[2] not in DTYPES:
        what = ", objects, which are pickles" if text[1:-1].endswith("O") else ""
        raise ValueError(f"has dtype {text}{what}; expected {_wanted()}")
    return np.dtype(found[1].replace("|", "=") + found[2])


def _shape(text: str) -> tuple[int, ...]:
    if not text.startswith("("):
        raise ValueError(f"has shape {text[:60]}; expected a tuple of whole numbers")
    parts = text[1:-1].split(",")
    if parts[-1].strip() == "":
        parts.pop()
    found = [_NUMBER.fullmatch(part) for part in parts]
    if len(parts) > MOST_AXES or not all(found) or (len(parts) == 1 and "," not in text):
        raise ValueError(f"has shape {text[:60]}; expected a tuple of at most {MOST_AXES} whole numbers")
    return tuple(int(match[1]) for match in found if match)


def _wanted() -> str:
    return f"one of {', '.join(sorted(DTYPES))}"

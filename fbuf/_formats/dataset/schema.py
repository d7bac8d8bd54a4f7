"""The schema of a data set's rows: names, shapes, dtypes and codecs of leaves, and the structure of a row.

A leaf of 1 KiB a row or more is stored in encoded chunks, a smaller one as it is, unless a codec is given. Codecs come from a
closed set, so that a file cannot cause an import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._formats.checkpoint.dtypes import canonical, dtype_named
from fbuf._host.codecs import BitPack, Codec, Raw, Zstd

CHUNKED_BYTES = 1024
"""Leaves of this many bytes a row or more are encoded."""
TRUNCATED = "truncated"
"""The leaf that reads True at the cut of a segment; always stored as flags."""
MAX_LEAVES, MAX_AXES, MAX_ROW_BYTES = 4096, 32, 1 << 30


@dataclass(frozen=True)
class Leaf:
    """One leaf of a row."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    codec: Zstd | BitPack | None  # None: as it is

    @property
    def nbytes(self) -> int:
        """Return the bytes of a row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def text(self) -> str:
        """Return `uint8[84, 84]`."""
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, init=False)
class Schema:
    """The leaves of a row, in order.

    Args:
      leaves: Shape and dtype by name; names are paths, `"next/obs"`.
      structure: The structure of a row, if it is not the nested dicts that the names imply: JSON in which a leaf is its number,
        a dict `{"dict": [[key, child], ...]}` (`"ordered"` alike), `{"list": [...]}`, `{"tuple": [...]}` and null.
      codec: `Zstd`, `BitPack` or `Raw` by leaf, if not the default: `Zstd()` for leaves of 1 KiB a row or more, else none.
    Raises:
      TypeError, ValueError: a leaf, a codec or the structure is invalid.
    """

    leaves: tuple[Leaf, ...]
    structure: Any

    def __init__(
        self, leaves: Mapping[str, tuple[Any, Any]], structure: Any = None, codec: Mapping[str, Codec] | None = None
    ) -> None:
        codecs = dict(codec or {})
        unknown = [name for name in codecs if name not in leaves]
        if unknown or not leaves or len(leaves) > MAX_LEAVES:
            what = f"codec names '{unknown[0]}'" if unknown else f"there are {len(leaves)} leaves"
            raise ValueError(f"Schema: {what}; expected some of {', '.join(leaves) or '1 leaf or more'}.")
        made = [_leaf(name, shape, dtype, codecs.get(name)) for name, (shape, dtype) in leaves.items()]
        object.__setattr__(self, "leaves", tuple(made))
        if structure is not None and sorted(_numbers(structure)) != list(range(len(made))):
            raise ValueError(f"Schema: structure is {str(structure)[:200]}; expected each of {len(made)} leaves once.")
        object.__setattr__(self, "structure", structure)

    def __hash__(self) -> int:
        return hash(self.leaves)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the leaves."""
        return tuple(leaf.name for leaf in self.leaves)

    @property
    def row_bytes(self) -> int:
        """Return the raw bytes of a row."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def texts(self) -> dict[str, str]:
        """Return `"uint8[84, 84]"` by name."""
        return {leaf.name: leaf.text for leaf in self.leaves}

    @property
    def kinds(self) -> dict[str, str]:
        """Return how each leaf is stored, as far as segments must agree: `"Zstd(chunk=8)"`, or `"Raw()"`."""
        return {
            leaf.name: "Raw()" if leaf.codec is None else f"{type(leaf.codec).__name__}(chunk={leaf.codec.chunk})"
            for leaf in self.leaves
        }

    @property
    def common_rows(self) -> int:
        """Return the rows after which the chunks of all leaves end together."""
        return math.lcm(*(leaf.codec.chunk for leaf in self.leaves if leaf.codec is not None))

    def __getitem__(self, name: str) -> Leaf:
        for leaf in self.leaves:
            if leaf.name == name:
                return leaf
        raise KeyError(f"leaf '{name}' is not in this data set (it has: {', '.join(self.names)})")

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form."""
        leaves = [[leaf.name, list(leaf.shape), leaf.dtype.name, _codec_json(leaf.codec)] for leaf in self.leaves]
        return {"leaves": leaves, "structure": self.structure}

    @classmethod
    def from_json(cls, value: Any) -> Schema:
        """Return the schema of a JSON form. Raises ValueError, TypeError, KeyError: it is invalid."""
        if type(value) is not dict or set(value) != {"leaves", "structure"} or type(value["leaves"]) is not list:
            raise TypeError("a schema is not an object of leaves and structure")
        leaves: dict[str, tuple[Any, Any]] = {}
        codecs: dict[str, Codec] = {}
        for entry in value["leaves"]:
            if type(entry) is not list or len(entry) != 4 or type(entry[0]) is not str or type(entry[2]) is not str:
                raise TypeError("a leaf is not a list of name, shape, dtype and codec")
            if entry[0] in leaves or type(entry[1]) is not list or len(entry[1]) > MAX_AXES:
                raise ValueError(f"leaf {entry[0][:40]!r} is repeated, or has no shape")
            if any(type(n) is not int or not 0 <= n < MAX_ROW_BYTES for n in entry[1]):
                raise ValueError(f"leaf {entry[0][:40]!r} has no shape")
            leaves[entry[0]] = tuple(entry[1]), dtype_named(entry[2])
            codecs[entry[0]] = _codec_of(entry[3])
        return cls(leaves, value["structure"], codecs)


def _leaf(name: Any, shape: Any, dtype: Any, codec: Any) -> Leaf:
    if type(name) is not str or not name.isprintable() or "#" in name:
        raise ValueError(f"Schema: a leaf has the name {name!r}; expected printable text without '#'.")
    sizes = tuple(int(n) for n in shape)
    try:
        kind = canonical(np.dtype(dtype))
    except TypeError:
        raise TypeError(f"Schema: leaf '{name}' is {dtype}; expected numbers or booleans.") from None
    row = math.prod(sizes) * kind.itemsize
    if len(sizes) > MAX_AXES or any(n < 0 for n in sizes) or row > MAX_ROW_BYTES:
        raise ValueError(f"Schema: leaf '{name}' has shape {list(sizes)}; expected at most 1 GiB a row, and 32 axes.")
    if name == TRUNCATED and kind == np.bool_ and not sizes:
        codec = Raw()
    if codec is None:
        codec = Zstd() if row >= CHUNKED_BYTES else Raw()
    if not isinstance(codec, Zstd | BitPack | Raw):
        raise TypeError(f"Schema: codec of '{name}' is {codec!r}; expected Zstd(...), BitPack() or Raw().")
    return Leaf(name, sizes, kind, None if isinstance(codec, Raw) or not row else codec)


def _codec_json(codec: Zstd | BitPack | None) -> list[Any]:
    if isinstance(codec, Zstd):
        return ["zstd", codec.level, codec.chunk, codec.dictionary, codec.repack]
    return ["raw"] if codec is None else ["bits", codec.chunk]


def _codec_of(value: Any) -> Codec:
    if type(value) is not list or not value:
        raise TypeError("a codec is not a list")
    if value == ["raw"]:
        return Raw()
    if value[0] == "zstd" and len(value) == 5:
        return Zstd(*value[1:])
    if value[0] == "bits" and len(value) == 2 and type(value[1]) is int and 1 <= value[1] <= 4096:
        return BitPack(chunk=value[1])
    raise ValueError(f"{str(value)[:80]} in place of a codec")


def _numbers(structure: Any) -> list[int]:
    """Return the leaves that a structure names. Raises ValueError: it is invalid."""
    found: list[int] = []
    waiting = [structure]
    while waiting:
        node = waiting.pop()
        if type(node) is int:
            found.append(node)
        elif node is not None:
            waiting += _children(node)
    return found


def _children(node: Any) -> list[Any]:
    if type(node) is dict and len(node) == 1:
        ((kind, value),) = node.items()
        if type(value) is list and kind in ("list", "tuple"):
            return value
        if type(value) is list and kind in ("dict", "ordered"):
            if all(type(pair) is list and len(pair) == 2 and type(pair[0]) in (str, int) for pair in value):
                return [pair[1] for pair in value]
    raise ValueError(f"Schema: structure has {str(node)[:80]}; expected dicts, lists and tuples of numbers of leaves.")

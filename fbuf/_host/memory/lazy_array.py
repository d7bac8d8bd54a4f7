"""Arrays of a checkpoint that are read on demand, when they are saved and when they are loaded.

A `Source` is a numpy array, or anything with its shape and dtype that gives rows of its first axis. `Lazy` is one that a
function reads. It says in which blocks it is best read, and gives each block a mark: the same mark means the same bytes, so
that what was saved before need not be read again.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from fbuf._host.types import Array, unfit

BLOCK_BYTES = 1 << 18
MAX_BLOCKS = 4096  # of one array


class Source(Protocol):
    """An array or anything sliced like one; its contents must not change during a save. Optional attributes:

    - `block: int`, rows of axis 0 in one block;
    - `cuts: Sequence[int]` and `keys: Sequence[str]` instead: the first row of each block and the end, and the key by which
      each block is matched with the last save;
    - `marks: Sequence[str | None]`, one per block: the same mark as in the last save means the same bytes, so the block is not
      read. None: unknown; the block is read and compared;
    - `slices_are_views: bool`, whether `[a:b]` copies nothing, so that several blocks are read and compared at once.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis 0 is cut into blocks."""

    @property
    def dtype(self) -> Any:
        """A numpy dtype, of any byte order."""

    def __getitem__(self, rows: Any, /) -> Any:
        """Return rows `[a:b]`; of a source without axes, `[()]`."""


Sources = Mapping[str, Source]
"""Arrays of a checkpoint by name."""


class Lazy:
    """A source that a function reads.

    Args:
      shape, dtype: What it is as an array.
      read: (start, stop) -> rows of the first axis, an array that is not written again. Called from any thread.
      block: Rows of a block, the first of which begins at row 0.
      cuts: In place of that, where blocks begin, and the end of the last.
      keys: With `cuts`, a name for each block.
      marks: For each block, what it is known by; None: nothing.
      slices_are_views: Whether `read` copies nothing.
    """

    __slots__ = ("shape", "dtype", "block", "cuts", "keys", "marks", "slices_are_views", "_read")

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: Any,
        read: Callable[[int, int], Array],
        *,
        block: int | None = None,
        cuts: Sequence[int] | None = None,
        keys: Sequence[str] | None = None,
        marks: Sequence[str | None] | None = None,
        slices_are_views: bool = False,
    ) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.block, self.cuts, self.keys, self.marks = block, cuts, keys, marks
        self.slices_are_views, self._read = slices_are_views, read

    def __getitem__(self, rows: slice) -> Array:
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise ValueError(f"Lazy: step is {step}; expected 1. Write numpy.asarray(array)[::{step}].")
        return self._read(start, max(start, stop))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        whole = self._read(0, self.shape[0])
        return whole.astype(self.dtype if dtype is None else dtype, copy=bool(copy) and not whole.flags.owndata)


class Identity:
    """Name an object by 64 random bits; a fork knows it by another name."""

    __slots__ = ("_word",)
    _process = secrets.token_hex(8)

    def __init__(self) -> None:
        self._word = secrets.token_hex(8)

    def __str__(self) -> str:
        return f"{self._word}{Identity._process}"

    @classmethod
    def renew(cls) -> None:
        """Rename all objects."""
        cls._process = secrets.token_hex(8)


os.register_at_fork(after_in_child=Identity.renew)


def block_rows(rows: int, nbytes: int, block_bytes: int | None = None) -> int:
    """Return the rows of a block, of `rows` rows of this size: a power of two."""
    fit = max((block_bytes or BLOCK_BYTES) // max(nbytes, 1), 1)
    return max(1 << fit.bit_length() - 1, 1 << max(-(-rows // MAX_BLOCKS) - 1, 0).bit_length())


def in_small_blocks(array: Array) -> Lazy:
    """Return an array of which little changes between two saves, as a source in blocks of 32 KiB."""
    block = block_rows(len(array), array[:1].nbytes, BLOCK_BYTES // 8)
    return Lazy(array.shape, array.dtype, lambda start, stop: array[start:stop], block=block, slices_are_views=True)


def in_parts(parts: Sequence[tuple[str, str | None, int, Callable[[], Array]]]) -> Lazy:
    """Concatenate byte strings, uint8[sum of sizes], each given by its key, its mark, its size and what reads it."""
    cuts = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([size for _, _, size, _ in parts], out=cuts[1:])

    def read(start: int, stop: int) -> Array:
        at = int(np.searchsorted(cuts, start, side="right")) - 1
        if at < len(parts) and start < stop <= cuts[at + 1]:
            part = parts[at][3]()[start - cuts[at] : stop - cuts[at]]
            part.flags.writeable = False
            return part
        out = np.empty(stop - start, np.uint8)
        while start < stop:
            first, end = int(cuts[at]), min(int(cuts[at + 1]), stop)
            out[len(out) - (stop - start) : len(out) - (stop - end)] = parts[at][3]()[start - first : end - first]
            start, at = end, at + 1
        return out

    keys, marks = [key for key, *_ in parts], [mark for _, mark, *_ in parts]
    return Lazy((int(cuts[-1]),), np.uint8, read, cuts=cuts.tolist(), keys=keys, marks=marks)


def steps(source: Source) -> Iterator[tuple[int, Array]]:
    """Yield a source block by block, with the row at which each begins."""
    rows = source.shape[0]
    stated = getattr(source, "block", None)
    nbytes = int(np.prod(source.shape[1:], dtype=np.int64)) * source.dtype.itemsize
    block = stated if isinstance(stated, int) and stated > 0 else block_rows(rows, nbytes)
    for start in range(0, rows, block):
        yield start, np.asarray(source[start : min(start + block, rows)])


def read_into(source: Source, start: int, out: Array) -> None:
    """Read rows of a source from `start` on into an array of its dtype."""
    fill = getattr(source, "fill", None)  # of an array in a checkpoint
    if callable(fill) and not isinstance(source, np.ndarray):
        fill(start, out)
    else:
        out[:] = source[start : start + len(out)]


def lazily(arrays: Sources, name: str, dtype: Any, shape: tuple[int | None, ...]) -> Source:
    """Return a source of a checkpoint, unread, after a check of its dtype and shape; None takes any size.

    Raises:
      ValueError: it is missing, or something else.
    """
    if name not in arrays:
        raise unfit(f"'{name}' is missing", "an array")
    array = arrays[name]
    sizes = len(array.shape) == len(shape) and all(
        want in (None, have) for have, want in zip(array.shape, shape, strict=True)
    )
    if array.dtype != np.dtype(dtype) or not sizes:
        raise unfit(f"'{name}' is {array.dtype}{list(array.shape)}", f"{np.dtype(dtype)}{list(shape)}")
    return array


def expect(arrays: Sources, name: str, dtype: Any, shape: tuple[int | None, ...]) -> Array:
    """Return a small source of a checkpoint, read and checked."""
    return np.asarray(lazily(arrays, name, dtype, shape))


def within(arrays: Sources, prefix: str) -> dict[str, Source]:
    """Return the sources whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

"""`RowBlock`: rows of `Replay.add` in host memory, until one `extend` writes all of them.

One jitted call costs about 50 us, whether it writes one row or sixteen. `Replay` copies single rows into a NumPy array of
records instead, and writes them when it is full or before anything reads the state. The records cross to JAX as one array of
bytes, because each array costs some microseconds. They have a mask, and one of few lengths, so that few programs are compiled.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import checks
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.pytree import DTYPES, PyTree, fits, flat_keys, needs_x64

_SHORT = 16  # rows; XLA runs such a write in the calling thread
_MOST_READ = 512  # rows of all lanes; a draw from more costs more than to write them
_MOST_BYTES = 1 << 20
_NUMBERS = {"b": (bool,), "i": (bool, int), "u": (bool, int), "f": (bool, int, float), "V": (bool, int, float)}


class RowBlock:
    """Rows of one step per lane each, with their masks.

    Args:
      buffer, state: Of the replay; rows have the format of `Buffer.add`.
      length: Rows that fit.
    """

    def __init__(self, buffer: Buffer, state: BufferState, length: int):
        record, self._structure = _record(buffer, state)
        keys = flat_keys(self._structure) or ()  # of a plain dict of leaves, in their order
        self._keys = dict.fromkeys(keys)
        self._items: Any = operator.itemgetter(*keys) if len(keys) > 1 else lambda row: [row[key] for key in keys]
        self._records = np.zeros(length, record)
        self._bytes = self._records.view(np.uint8).reshape(length, -1)
        *names, _ = record.names or ()
        self.columns = [self._records[name] for name in names]  # the memory of each leaf, [N, ...] or [N, E, ...]
        self._formats: list[tuple[Any, ...]] = []  # of the leaves
        for column in self.columns:
            dtype, shape = column.dtype, column.shape[1:]
            wide = next((w for w in DTYPES if w != dtype and jax.dtypes.canonicalize_dtype(w) == dtype), dtype)
            scalar, numbers = (None, ()) if shape else (dtype.type, (*_NUMBERS[dtype.kind], wide.type))
            self._formats.append((dtype, shape, scalar, (wide, numbers, *_bounds(dtype))))
        # Of the row before: the types of its leaves; number, dtype, shape of arrays and to what they narrow; bounds of numbers.
        self._usual: tuple[list[type], list[tuple[int, Any, Any, Any]], list[tuple[int, Any, Any]]] = [], [], []
        lengths = {_SHORT, _MOST_READ // buffer.geometry.lanes, length}
        self.lengths = sorted(number for number in lengths if _SHORT <= number <= length or number == length)
        # Of more rows, a draw writes them first.
        self.most_read = length if len(self.lengths) < 3 else self.lengths[1] * 3 // 4
        self.length, self.count = length, 0
        self.cleared = 0  # how often
        self.masked = False  # some row has a mask

    def append(self, row: PyTree, mask: Any) -> bool:
        """Copy one row. Return False, and keep nothing, unless its leaves are NumPy arrays or numbers of the row format."""
        if self._keys and type(row) is dict and row.keys() == self._keys.keys():
            leaves = self._items(row)  # `flatten` takes 25 us between calls of torch
        else:
            try:
                leaves, structure = jax.tree.flatten(row)
            except ValueError:  # keys without an order, which the checks of rows refuse
                return False
            if structure != self._structure:
                return False
        kinds, arrays, bounded = self._usual
        usual = [*map(type, leaves)] == kinds
        for i, dtype, shape, narrow in arrays if usual else ():
            usual = usual and leaves[i].dtype == dtype and leaves[i].shape == shape
            usual = usual and (narrow is None or fits(leaves[i], narrow))
        for i, least, most in bounded if usual else ():
            usual = usual and least <= leaves[i] <= most
        if not usual and not self._takes(leaves):
            return False
        if mask is not None:
            if type(mask) not in (bool, np.bool_, np.ndarray) or np.shape(mask) != self._records["mask"].shape[1:]:
                return False
            if np.asarray(mask).dtype != bool:
                return False
            self.masked = True
        self._records[self.count] = *leaves, True if mask is None else mask
        self.count += 1
        return True

    def _takes(self, leaves: Sequence[Any]) -> bool:
        """Return whether NumPy copies each leaf to the row format as JAX does; note their types."""
        arrays, bounded = [], []
        for i, (leaf, (dtype, shape, scalar, others)) in enumerate(zip(leaves, self._formats, strict=True)):
            kind = type(leaf)
            if kind is scalar:
                continue
            wide, numbers, least, most = others
            if kind is np.ndarray and leaf.shape == shape:
                narrow = None if leaf.dtype == dtype else dtype
                if narrow is not None and not (leaf.dtype == wide and fits(leaf, narrow)):
                    return False  # JAX narrows those that fit, without x64
                arrays.append((i, leaf.dtype, shape, narrow))
            elif kind in numbers:
                if dtype.kind == "V" and kind is int:  # bfloat16 takes no larger ones
                    least, most = 1 - (1 << 63), (1 << 63) - 1
                if not least <= leaf <= most:
                    return False
                bounded.append((i, least, most))
            else:
                return False
        self._usual = [*map(type, leaves)], arrays, bounded
        return True

    def packed(self, length: int | None = None) -> np.ndarray[Any, Any]:
        """Return the records as uint8[N, bytes], padded with masked rows to `length`, by default the least that holds them."""
        length = length or next(n for n in self.lengths if n >= self.count)
        # A copy, because the jitted call may share NumPy memory and read it later.
        packed = self._bytes[:length].copy()
        self._mask_in(packed)[self.count :] = False
        return packed

    def _mask_in(self, packed: np.ndarray[Any, Any]) -> Any:
        return packed.reshape(-1).view(self._records.dtype)["mask"]

    def rows_in(self, packed: np.ndarray[Any, Any]) -> int:
        """Return the rows in packed records, of all lanes, without masked ones."""
        return int(self._mask_in(packed).sum())

    def clear(self) -> None:
        """Remove every row."""
        self.count, self.masked = 0, False
        self.cleared += 1


def collects_rows(buffer: Buffer) -> bool:
    """Return whether one `extend` of up to `longest` rows leaves the state of as many `add`s, and rows may wait for it."""
    if buffer.on_read is not None and buffer.on_read.remembers:  # it learns from the rows of each write
        return False
    mapped = buffer.on_write is None or buffer.on_write.row_by_row
    return mapped and buffer.storage.row_by_row and buffer.writer.row_by_row and buffer.sampler.row_by_row(buffer.dense)


def longest(buffer: Buffer) -> int:
    """Return the rows of a lane in which no anchor both opens and closes."""
    rule = buffer.rule
    return buffer.geometry.length + 1 - rule.rows - rule.closes


def block_of(buffer: Buffer, state: BufferState, most: int) -> RowBlock | None:
    """Return a block for at most `most` rows of `buffer`, or None where one `extend` is not known to equal as many `add`s."""
    if not collects_rows(buffer):
        return None
    spec, _ = checks.given_spec(buffer, state)
    dtypes = [np.dtype(leaf.dtype) for leaf in spec.values()]
    if not all(dtype.kind in "biuf" or dtype.name == "bfloat16" for dtype in dtypes):
        return None  # numbers of int4 have no byte of their own; NumPy rounds to float8 otherwise than JAX
    size = sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in spec.values()) * (buffer.lanes or 1)
    length = min(most, longest(buffer), max(8, _MOST_BYTES // max(size, 1)))
    return RowBlock(buffer, state, length) if length > 1 else None


def _bounds(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the least and the largest finite number of a dtype."""
    if dtype.kind == "b":
        return False, True
    floats = jnp.issubdtype(dtype, jnp.floating)
    info: Any = (jnp.finfo if floats else jnp.iinfo)(dtype)
    return (float(info.min), float(info.max)) if floats else (info.min, info.max)


def _record(buffer: Buffer, state: BufferState) -> tuple[np.dtype[Any], Any]:
    """Return the dtype of one row per lane with its mask, and the structure of a row."""
    spec, structure = checks.given_spec(buffer, state)
    lanes = () if buffer.lanes is None else (buffer.lanes,)
    leaves = [(f"leaf {i}", np.dtype(x.dtype), (*lanes, *x.shape)) for i, x in enumerate(spec.values())]
    return np.dtype([*leaves, ("mask", np.dtype(bool), lanes)], align=True), structure


def unpack(buffer: Buffer, state: BufferState, packed: jax.Array) -> tuple[PyTree, jax.Array]:
    """Return the rows and the mask of packed records. Traced."""
    record, structure = _record(buffer, state)
    leaves = []
    for dtype, offset, *_ in (record.fields or {}).values():
        base, shape = dtype.subdtype or (dtype, ())
        part = packed[:, offset : offset + dtype.itemsize].reshape(len(packed), *shape, base.itemsize)
        if needs_x64(base):
            part, base = part.reshape(*part.shape[:-1], 2, 4), np.dtype(np.uint32)
        part = part if base.itemsize > 1 else part[..., 0]
        leaves.append(part != 0 if base.kind == "b" else jax.lax.bitcast_convert_type(part, base))
    return structure.unflatten(leaves[:-1]), leaves[-1]


def extend(buffer: Buffer, state: BufferState, packed: jax.Array) -> BufferState:
    """Write packed records. If they cannot be stored, they are given again before others. Traced."""
    rows, mask = unpack(buffer, state, packed)
    return buffer._extend_checked(state, rows, None, mask, "Buffer.extend", repeats=True)[0]


write = jax.jit(extend, static_argnums=0, donate_argnums=1)

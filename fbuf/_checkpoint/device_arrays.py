"""Arrays of the state as sources of blocks, and blocks as arrays again, without a second copy of a large array.

Trailing rows whose elements all equal the array's last element are not stored; their number and bits are. This is exact for
any array and needs no knowledge of how far a buffer is filled. On an accelerator a block has a mark, computed there: eight
strongly universal sums of 16-bit words, which miss a change with probability :math:`2^{-136}`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._core.packed_leaf import PackedLeaf, Packing, pack_on_host, unpack_on_host
from fbuf._core.sub_byte import to_bytes
from fbuf._formats.checkpoint import SavedArray
from fbuf._host.types import flat

_SUMS = 8
_SEED = 0x6662_7566


def hash_device_blocks(array: jax.Array, rows: int, block: int) -> list[str]:
    """Return marks of the first `rows` of an array, `block` rows each; one jitted call a shape, whatever `rows`."""
    sums = np.asarray(_sums(array, block))
    number = -(-rows // block)
    lengths = [min(block, rows - i * block) for i in range(number)]
    return [f"m{n:x}-{bytes(each.astype('>u4')).hex()}" for n, each in zip(lengths, sums[:number], strict=True)]


@functools.partial(jax.jit, static_argnums=1)
def _sums(array: jax.Array, block: int) -> jax.Array:
    """Return uint32[blocks, 8], the sums of each block's words times random keys."""
    words = _hash_words(array)
    rows, width = words.shape
    key = jax.random.key(_SEED, impl="threefry2x32")
    keys = [jax.random.bits(jax.random.fold_in(key, i), (min(block, rows), width), jnp.uint32) for i in range(_SUMS)]

    def of(part: jax.Array) -> jax.Array:
        return jnp.stack(
            [jnp.sum(part * k[None, : part.shape[1]], axis=(1, 2), dtype=jnp.uint32) for k in keys], axis=-1
        )

    whole = rows // block * block
    out = [of(words[:whole].reshape(-1, block, width))] if whole else []
    out += [of(words[None, whole:])] if whole < rows else []
    return jnp.concatenate(out)


@jax.jit
def _count_written_device(array: jax.Array) -> jax.Array:
    bits = _element_bits(array)
    differs = jnp.any(bits != bits[-1, -1][None, None, :], axis=(1, 2))
    return jnp.max(jnp.where(differs, lax.iota(jnp.int32, differs.shape[0]) + jnp.int32(1), jnp.int32(0)))


def _hash_words(array: jax.Array) -> jax.Array:
    """Return uint32[C, n]: each row's bits, 16 to a word, or 8 for rows of an odd number of bytes."""
    bits = _element_bits(array)
    flat = bits.reshape(bits.shape[0], -1)
    if flat.dtype == jnp.uint8 and flat.shape[1] % 2 == 0:
        flat = lax.bitcast_convert_type(flat.reshape(flat.shape[0], -1, 2), jnp.uint16)
    return flat.astype(jnp.uint32)


def _element_bits(array: jax.Array) -> jax.Array:
    """Return uint8 or uint16[C, elements of a row, words of an element]."""
    rows, name = array.shape[0], jnp.dtype(array.dtype).name
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if name == "bool":
        array = array.astype(jnp.uint8)
    array = to_bytes(array)
    narrow = array.dtype.itemsize == 1
    bits = lax.bitcast_convert_type(array, jnp.uint8 if narrow else jnp.uint16)
    each = {"complex64": 4, "complex128": 8}.get(name, 1 if narrow else array.dtype.itemsize // 2)
    return bits.reshape(rows, -1, each)


BLOCK_BYTES = 256 * 1024
_MIN_BLOCK_BYTES = 32 * 1024
_USUAL_BLOCKS, _MAX_BLOCKS = 1024, 4096
SMALL_BYTES = 64 * 1024
"""Arrays of up to this many bytes are fetched whole."""
_HOST_BYTES = 4 * 1024 * 1024
"""Arrays of up to this many bytes are assembled on the host."""
_PUT_BYTES = 1024 * 1024
"""Bytes of larger arrays copied to the device at a time."""


def rows_of_block(shape: tuple[int, ...], itemsize: int) -> int:
    """Return the rows of a block, a power of two.

    A block has about 32 KiB, since each lane of a buffer is written at its own position; up to 256 KiB in large arrays,
    and more if there were too many. It depends on the whole shape, so an array has the same blocks however full it is.
    """
    item = max(int(np.prod(shape[1:], dtype=np.int64)) * itemsize, 1)
    size = min(max(shape[0] * item // _USUAL_BLOCKS, _MIN_BLOCK_BYTES), BLOCK_BYTES)
    wanted = max(size // item, -(-shape[0] // _MAX_BLOCKS), 1)
    return 1 << (wanted - 1).bit_length() if wanted > 1 else 1


class DeviceLeaf:
    """An array of the state as a source: its first rows, block by block.

    Attributes:
      shape, dtype: Of the stored rows.
      block: Rows of a block.
      rows: The number of all rows.
      fill: The bits of every element of the rows not stored, or b"".
    """

    def __init__(self, array: jax.Array, rows: int | None = None, *, whole: bool = False):
        self._array = array if array.ndim else array.reshape(1)
        self.rows = self._array.shape[0] if rows is None else rows
        self.dtype = np.dtype(array.dtype)
        self._single_device = len(self._array.sharding.device_set) == 1
        kept, self.fill = (self.rows, b"") if whole else self._written()
        self.shape = (kept, *self._array.shape[1:])
        self.block = rows_of_block((self.rows, *self.shape[1:]), self.dtype.itemsize)
        self._fetched: tuple[int, np.ndarray] | None = None  # first row, and the rows of some blocks

    @functools.cached_property
    def slices_are_views(self) -> bool:
        """Return whether the array is on the host, so that slices are views, or is small."""
        return self._single_device and (
            self._array.size * self.dtype.itemsize <= SMALL_BYTES or _platform(self._array) == "cpu"
        )

    @functools.cached_property
    def marks(self) -> list[str] | None:
        """Mark of each block; None where comparing bytes is as fast."""
        if self.slices_are_views or not self._single_device:
            return None
        return hash_device_blocks(self._array, self.shape[0], self.block)

    def __getitem__(self, at: slice) -> np.ndarray:
        start, stop, _ = at.indices(self.shape[0])
        if not self._single_device:
            return self._from_shards(start, stop)
        if self.slices_are_views:
            return np.asarray(self._array)[start:stop]  # a view
        whole, item = self._array.shape[0], int(np.prod(self.shape[1:], dtype=np.int64)) * self.dtype.itemsize
        size = min(max(BLOCK_BYTES // max(item, 1), self.block), whole)
        if self._fetched is None or not self._fetched[0] <= start <= stop <= self._fetched[0] + len(self._fetched[1]):
            first = min(start, whole - size)
            if stop - first > size:
                return np.asarray(self._array[start:stop])
            self._fetched = first, np.asarray(_cut(self._array, first, size))
        first, rows = self._fetched
        return rows[start - first : stop - first]

    def _from_shards(self, start: int, stop: int) -> np.ndarray:
        out = np.empty((stop - start, *self._array.shape[1:]), self.dtype)
        for shard in self._array.addressable_shards:
            if shard.replica_id:
                continue
            first, last, _ = shard.index[0].indices(self._array.shape[0])
            low, high = max(first, start), min(last, stop)
            if low < high:
                rows = np.asarray(shard.data[low - first : high - first])
                out[(slice(low - start, high - start), *shard.index[1:])] = rows
        return out

    def _written(self) -> tuple[int, bytes]:
        """Return the rows up to the last that differs from the last element, and that element's bits."""
        array, rows = self._array, self.rows
        if not array.size or not self._single_device:
            return rows, b""
        if self.slices_are_views:
            view = np.asarray(array)[:rows]
            return _count_written_host(view), view[-1:].reshape(-1)[-1:].tobytes()
        part = array if rows == array.shape[0] else array[:rows]
        return int(_count_written_device(part)), np.asarray(part[-1:]).reshape(-1)[-1:].tobytes()


class PackedSource(DeviceLeaf):
    """A packed leaf as a source of rows `[C, ...]`: what is fetched at a time is unpacked on the host.

    Marks are of the stored elements, so those of another layout differ, and its blocks are written again.
    """

    def __init__(self, leaf: PackedLeaf):
        self._packing = packing = leaf.packing
        self._axis = packing.stored[0] if packing.form == "flat" else 1  # elements of a row along the stored first axis
        self._stored = DeviceLeaf(leaf.array, whole=True)
        written = DeviceLeaf(leaf.array)
        self.rows, self.dtype, self.fill = leaf.shape[0], np.dtype(leaf.dtype), written.fill
        self.shape = (-(-written.shape[0] // self._axis), *packing.shape)
        self.block = rows_of_block((self.rows, *packing.shape), self.dtype.itemsize)

    @functools.cached_property
    def slices_are_views(self) -> bool:
        """Return whether slices copy nothing: rows in tiles are copied."""
        return self._packing.form == "flat" and self._stored.slices_are_views

    @functools.cached_property
    def marks(self) -> list[str] | None:
        """Mark of each block; None where comparing bytes is as fast."""
        stored = self._stored
        if stored.slices_are_views or not stored._single_device:
            return None
        marks = hash_device_blocks(stored._array, self.shape[0] * self._axis, self.block * self._axis)
        return [f"{self._packing.form}-{mark}" for mark in marks]

    def __getitem__(self, at: slice) -> np.ndarray:
        start, stop, _ = at.indices(self.shape[0])
        return unpack_on_host(self._stored[start * self._axis : stop * self._axis], self._packing)


def _platform(array: jax.Array) -> str:
    device: Any = next(iter(array.sharding.device_set))
    return str(device.platform)


@functools.partial(jax.jit, static_argnums=2)
def _cut(array: jax.Array, start: Any, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(array, start, size)


def _count_written_host(view: np.ndarray) -> int:
    """Return the rows up to the last that differs from the last element, searching from the end."""
    rows, size = view.shape[0], view.dtype.itemsize
    word = np.dtype({1: "u1", 2: "u2", 4: "u4"}.get(size, "u8"))
    step = max(BLOCK_BYTES // max(view[:1].nbytes, 1), 1)
    last, same = None, bytearray()  # the last element, and a block of it
    for stop in range(rows, 0, -step):
        start = max(stop - step, 0)
        part = np.ascontiguousarray(view[start:stop])
        if same.startswith(flat(part)):
            continue
        bits = part.reshape(-1).view(np.uint8).view(word).reshape(-1, max(size // word.itemsize, 1))
        last = bits[-1].copy() if last is None else last
        differs = (bits != (last if len(last) > 1 else last[0])).reshape(-1)
        at = len(differs) - 1 - int(differs[::-1].argmax())  # of the last that differs, if any does
        if differs[at]:
            return start + at * (stop - start) // len(differs) + 1
        same = bytearray(flat(part))
    return 0


def to_device(
    source: SavedArray, shape: tuple[int, ...], dtype: Any, fill: bytes, packing: Packing | None = None
) -> jax.Array | PackedLeaf:
    """Return a new array on the default device, or a packed leaf: a source's rows, then rows of one element's bits.

    A large one is created there, and filled a few blocks at a time, in place.
    """
    if packing is None:
        return _to_array(source, shape, dtype, fill, shape, lambda rows: rows, 1)
    axis = packing.stored[0] if packing.form == "flat" else 1
    stored = (shape[0] * axis,) if packing.form == "flat" else (shape[0], *packing.stored)
    pack = functools.partial(pack_on_host, packing=packing)
    return PackedLeaf(_to_array(source, shape, dtype, fill, stored, pack, axis), packing)


def _to_array(
    source: SavedArray,
    shape: tuple[int, ...],
    dtype: Any,
    fill: bytes,
    stored: tuple[int, ...],
    pack: Callable[[np.ndarray], np.ndarray],
    axis: int,
) -> jax.Array:
    """Return an array of shape `stored`, whose first axis has `axis` elements a row, with `pack` of the rows."""
    dtype, flat = np.dtype(dtype), shape or (1,)
    element = np.frombuffer(fill, dtype)[0] if fill else np.zeros((), dtype)
    kept = source.shape[0]
    if int(np.prod(flat, dtype=np.int64)) * dtype.itemsize <= _HOST_BYTES:
        whole = np.empty(flat, dtype)
        source.fill(0, whole[:kept])
        whole[kept:] = element
        return jnp.array(pack(whole.reshape(shape)))
    with jax.debug_nans(False), jax.debug_infs(False):  # NaNs that were saved are loaded
        out = jnp.full(stored or (1,), element, dtype)
        block = rows_of_block(flat, dtype.itemsize)
        size = min(max(_PUT_BYTES * flat[0] // out.nbytes // block, 1) * block, flat[0])
        for start in range(0, kept, size):
            first = min(start, flat[0] - size)
            stop = min(first + size, kept)
            part = np.empty((size, *flat[1:]), dtype)
            source.fill(first, part[: stop - first])
            part[stop - first :] = element
            out = _put(out, pack(part), first * axis)
        return out.reshape(stored)


@functools.partial(jax.jit, donate_argnums=0)
def _put(array: jax.Array, part: jax.Array, start: Any) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(array, part, start, 0)

"""Slots: their layout in lanes, the ring of each lane, and reading and writing rows of arrays `[C, ...]` by slot.

A *slot*, int32 in [0, C), holds one row. Each of E lanes (parallel environments) has a ring of L = C / E rows; row `position`
of lane `e` is in slot `position * E + e`. Slot C means "no slot": reads return zeros, and writes are dropped.

Each lane advances separately, because a mask may skip some lanes. The *generation* of a slot is the lap of its last write.
Slot and generation name a row, so a stale index differs in generation. It is computed from the cursor and takes no memory.
Gathers are unchecked (`promise_in_bounds`), and zeroing masked rows fuses into them; scatters write only the given rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._core import control_flow
from fbuf._core.component import state
from fbuf._core.packed_leaf import TILE, PackedLeaf, Packing, pack, unpack
from fbuf._core.pytree import Leaves

Ranges = Iterator[tuple[str, Any, Any, Any]]
"""What fields of a state hold; see `fbuf._core.component.state`."""
FEW = 4  # lanes whose numbers are selected and added one by one, which XLA fuses with the reader
_FEW_CHANNELS, _MOST_PARTS = 16, 32  # of rows that a TPU reads in parts; its program grows with them
_MOST_BYTES = 48 * 2**20  # of such a batch without channels, whose parts are joined in VMEM
_MANY = 2**32 - 2**20  # rows, beyond which the float32 sum cannot exclude an overflow


class Geometry(NamedTuple):
    """The layout of slots. Static."""

    lanes: int  # E, parallel environments; 1 without lanes
    length: int  # L, rows a lane holds
    streams: bool = True  # whether rows replace the oldest of their lane; otherwise any row of any lane

    @property
    def capacity(self) -> int:
        """C, all slots."""
        return self.lanes * self.length


@state
class Ring:
    """The position where each lane writes next. Rows are counted as (cursor, lap), which never overflows."""

    cursor: jax.Array  # int32[E], position of the next row, in [0, L)
    size: jax.Array  # int32[E], rows held, in [0, L]
    # uint32[E], rounds (and clears) of the lane, from 1; wraps around, and is compared for equality only
    lap: jax.Array

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "cursor", self.cursor, 0, geometry.length - 1
        yield "size", self.size, 0, geometry.length
        yield "lap", self.lap, 1, 2**32 - 1


class Placement(NamedTuple):
    """The slots of one write."""

    slot: jax.Array  # int32[N, E]; distinct and out of range where nothing is written
    rank: jax.Array  # int32[N, E], number of the row among those of the lane in this write
    rows: jax.Array  # int32[E], rows of this write per lane
    ring: Ring  # the rings afterwards


def zeros(*sizes: int) -> tuple[jax.Array, ...]:
    """Return arrays int32 of zeros, which do not share memory."""
    return tuple(jnp.zeros((size,), jnp.int32) for size in sizes)


def lengthened(old: jax.Array, fresh: jax.Array) -> jax.Array:
    """Return an array with the empty entries of a longer one behind its own."""
    return old if old.shape == fresh.shape else jnp.concatenate([old, fresh[old.shape[0] :]])


def init_rings(geometry: Geometry) -> Ring:
    """Make an empty ring for each lane."""
    cursor, size = zeros(geometry.lanes, geometry.lanes)
    return Ring(cursor, size, lap=jnp.ones((geometry.lanes,), jnp.uint32))


def resume_rings(geometry: Geometry, count: np.ndarray) -> Ring:
    """Return the rings after int64[E] rows without `clear`."""
    lap = jnp.asarray(count // geometry.length % (2**32 - 1) + 1, jnp.uint32)
    size = np.minimum(count, geometry.length)
    return Ring(jnp.asarray(count % geometry.length, jnp.int32), jnp.asarray(size, jnp.int32), lap)


def modulo(number: jax.Array, length: int) -> jax.Array:
    """Return int32 modulo `length`, in [0, length), in half the operations of `%`."""
    rest = lax.rem(number, lax.full_like(number, length))
    return lax.select(rest < jnp.int32(0), rest + jnp.int32(length), rest)


def of_lane(values: jax.Array, lane: jax.Array) -> jax.Array:
    """Return the values [E] of lanes int32[...]; one value, [], if there is one lane."""
    if values.shape[0] > FEW:
        return values.at[lane].get(mode="promise_in_bounds")
    found = values[0]
    for number in range(1, values.shape[0]):
        found = jnp.where(lane == jnp.int32(number), values[number], found)
    return found


def sum_of_lanes(values: jax.Array) -> jax.Array:
    """Return the sum int32[] of the values int32[E] of all lanes."""
    if values.shape[0] > FEW:
        return jnp.sum(values, dtype=jnp.int32)
    return functools.reduce(lax.add, (values[number] for number in range(values.shape[0])))


def place(ring: Ring, geometry: Geometry, num: int, keep: jax.Array | None, skipped: int = 0) -> Placement:
    """Return slots for `num` rows a lane, after `skipped` rows that are already overwritten.

    Of more rows than a lane holds the newest stay, in the slots of row-by-row writes.
    """
    lanes, length, _ = geometry
    order = jnp.arange(num, dtype=jnp.int32)[:, None]
    if keep is None:
        rank = jnp.broadcast_to(order + jnp.int32(skipped), (num, lanes))
        count = jnp.full((lanes,), num + skipped, jnp.int32)
    else:
        rank = jnp.cumsum(keep, axis=0, dtype=jnp.int32) - jnp.int32(1)
        count = jnp.sum(keep, axis=0, dtype=jnp.int32)
    position = ring.cursor[None, :]
    if num + skipped != 1:  # on CPU a remainder would be a kernel of its own
        position = modulo(position + rank, length)
    slot = slot_at(geometry, position)
    if keep is not None:
        written = keep & (rank >= (count - jnp.int32(length))[None, :])
        slot = where_written(written, slot, geometry.capacity)
    return Placement(slot, rank, count, advance(ring, geometry, count))


def where_written(written: jax.Array, slot: jax.Array, capacity: int) -> jax.Array:
    """Return `slot` where `written`, and elsewhere distinct slots out of range, where a scatter drops what it would write."""
    nowhere = jnp.arange(written.size, dtype=jnp.int32).reshape(written.shape) + jnp.int32(capacity)
    return jnp.where(written, slot, nowhere)


def put_in_queues(
    queues: jax.Array, geometry: Geometry, place: jax.Array, values: jax.Array, mask: jax.Array, token: jax.Array
) -> jax.Array:
    """Write int32[A, E] to distinct places [A, E] of each lane where `mask`; place p of lane e is element p * E + e."""
    at = where_written(mask, slot_at(geometry, place), geometry.capacity).reshape(-1) + token
    return queues.at[at].set(values.reshape(-1), mode="drop", unique_indices=True)


def advance(ring: Ring, geometry: Geometry, count: jax.Array) -> Ring:
    """Return the rings after `count` int32[E] more rows."""
    length = jnp.int32(geometry.length)
    end = ring.cursor + count
    return Ring(
        cursor=modulo(end, geometry.length),
        size=jnp.minimum(ring.size + count, length),
        lap=next_lap(ring.lap, lax.div(end, lax.full_like(end, geometry.length)).astype(jnp.uint32)),
    )


def next_lap(lap: jax.Array, more: jax.Array) -> jax.Array:
    """Return `lap + more` cyclically in 1 .. 2^32 - 1; 0 is the generation of empty slots."""
    new = lap + more
    return new + (new < lap).astype(jnp.uint32)


def evict(ring: Ring, count: jax.Array) -> Ring:
    """Return the rings without their `count` int32[E] oldest rows."""
    return Ring(ring.cursor, ring.size - count, ring.lap)


def clear_rings(ring: Ring) -> Ring:
    """Return empty rings; every earlier index becomes stale. At cursor 0 no slot has been written in this lap."""
    lap = next_lap(ring.lap, (ring.cursor > jnp.int32(0)).astype(jnp.uint32))
    return Ring(jnp.zeros_like(ring.cursor), jnp.zeros_like(ring.size), lap)


def head(ring: Ring, geometry: Geometry) -> tuple[jax.Array, jax.Array]:
    """Return the cursor, int32[], -1 where lanes differ, and the rows written, uint32[], 2^32 - 1 for that many or more.

    A `clear` counts as the rest of the round: cursor = writes modulo L, for one lane.
    """
    cursor, rounds, length = ring.cursor, ring.lap - jnp.uint32(1), geometry.length
    writes = jnp.sum(rounds * jnp.uint32(length) + cursor.astype(jnp.uint32), dtype=jnp.uint32)
    about = jnp.sum(rounds.astype(jnp.float32) * jnp.float32(length) + cursor.astype(jnp.float32))
    writes = jnp.where(about < jnp.float32(_MANY), writes, jnp.uint32(2**32 - 1))
    return jnp.where(jnp.all(cursor == cursor[0]), cursor[0], jnp.int32(-1)), writes


def slot_at(geometry: Geometry, position: jax.Array) -> jax.Array:
    """Return the slots of positions int32[..., E], one column a lane."""
    if geometry.lanes == 1:
        return position
    lane = jnp.arange(geometry.lanes, dtype=jnp.int32).reshape((1,) * (position.ndim - 1) + (geometry.lanes,))
    return position * jnp.int32(geometry.lanes) + lane


def by_age(ring: Ring, geometry: Geometry, age: jax.Array) -> jax.Array:
    """Return the slots int32[A, E] of each lane's rows at `age` int32[A, E], 0 the oldest; ages are not checked."""
    return slot_at(geometry, modulo((ring.cursor - ring.size)[None, :] + age, geometry.length))


def shift(geometry: Geometry, slot: jax.Array, offset: jax.Array) -> jax.Array:
    """Return the slot `offset` rows later in the same lane."""
    if geometry.lanes == 1:
        return modulo(slot + offset, geometry.length)
    lanes = jnp.int32(geometry.lanes)
    return modulo(slot // lanes + offset, geometry.length) * lanes + slot % lanes


def generation(ring: Ring, geometry: Geometry, slot: jax.Array) -> jax.Array:
    """Return the generation of each slot, uint32; 0 for empty slots and those out of range."""
    inside = (slot >= jnp.int32(0)) & (slot < jnp.int32(geometry.capacity))
    position = lax.select(inside, slot, lax.full_like(slot, 0))
    lanes = lax.full_like(position, geometry.lanes)
    lane, position = lax.rem(position, lanes), lax.div(position, lanes)
    cursor, size, lap = (of_lane(x, lane) for x in (ring.cursor, ring.size, ring.lap))
    previous = position >= cursor  # written in the previous lap
    behind = cursor - jnp.int32(1) - position
    behind = lax.select(previous, behind + jnp.int32(geometry.length), behind)
    lap = lap - previous.astype(jnp.uint32)
    lap = lap - (lap == jnp.uint32(0)).astype(jnp.uint32)  # 0 is no lap
    return lax.select(inside & (behind < size), lap, lax.full_like(lap, 0))


Stored = TypeVar("Stored", bound="jax.Array | PackedLeaf")


def write_rows(
    arrays: Mapping[str, Stored], slot: jax.Array, values: Leaves, token: jax.Array, inside: bool = False
) -> dict[str, Stored]:
    """Write `values` `[..., item]` of some arrays to unique slots int32[...] and return all; out-of-range slots are dropped.

    If all slots are known to be `inside`, one row is written without the comparisons of a scatter.
    """
    at = (slot + token).reshape(-1)
    changed = {name: array for name, array in arrays.items() if name in values}
    rows = {name: _as_stored(values[name], at.shape[0], array) for name, array in changed.items()}
    if inside and at.shape[0] == 1:
        return {**arrays, **_write_each(_write_row, changed, at, rows)}
    by_windows, by_items = (functools.partial(_write_each, write) for write in (_write_windows, _write_items))
    return {**arrays, **control_flow.platform_dependent(changed, at, rows, cpu=by_windows, default=by_items)}


def _as_stored(values: jax.Array, number: int, array: jax.Array | PackedLeaf) -> jax.Array:
    """Return the values of `number` rows as `array` stores them."""
    item = array.shape[1:]
    if isinstance(array, PackedLeaf):
        values, item = pack(values, array.packing), array.packing.stored
    return values.reshape((number, *item)).astype(array.dtype)


_Write = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _write_each(
    write: _Write, arrays: Mapping[str, Stored], at: jax.Array, rows: Mapping[str, jax.Array]
) -> dict[str, Stored]:
    """Write the rows of each leaf; those along one axis `[C * n]` element by element."""

    def write_leaf(array: Any, values: jax.Array) -> Any:
        if not isinstance(array, PackedLeaf):
            return write(array, at, values)
        write_packed = _write_flat if array.packing.form == "flat" else write
        return PackedLeaf(write_packed(array.array, at, values), array.packing)

    return {name: write_leaf(array, rows[name]) for name, array in arrays.items()}


def _write_row(array: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(array, values, at[0], 0)


def _write_windows(array: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    """Write windows of one row: for items XLA on CPU copies the values first."""
    windows = lax.ScatterDimensionNumbers(tuple(range(1, array.ndim + 1)), (), (0,))
    return _scatter(array, at, values[:, None], windows)


def _write_items(array: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    """Write items: windows become a loop over the rows on a TPU, which copies the array out and back."""
    items = lax.ScatterDimensionNumbers(tuple(range(1, array.ndim)), (0,), (0,))
    return _scatter(array, at, values, items)


def _write_flat(array: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    """Write the elements of rows one by one: windows of them become a loop over the rows on a TPU."""
    number, elements = values.shape
    capacity = array.shape[0] // elements
    row = where_written((at >= jnp.int32(0)) & (at < jnp.int32(capacity)), at, capacity)
    element = row[:, None] * jnp.int32(elements) + jnp.arange(elements, dtype=jnp.int32)[None, :]
    single = lax.ScatterDimensionNumbers((), (0,), (0,))
    return _scatter(array, element.reshape(-1), values.reshape(-1), single)


def _scatter(array: jax.Array, at: jax.Array, values: jax.Array, dimensions: lax.ScatterDimensionNumbers) -> jax.Array:
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(array, at[:, None], values, dimensions, unique_indices=True, mode=mode)


def read_rows(array: Any, slot: jax.Array) -> jax.Array:
    """Return `[..., item]` of slots int32[...]; zeros for slots out of range."""
    inside = (slot >= jnp.int32(0)) & (slot < jnp.int32(array.shape[0]))
    at = jnp.where(inside, slot, jnp.int32(0))
    if not isinstance(array, PackedLeaf):
        return zero_unless(inside, array.at[at].get(mode="promise_in_bounds"))
    if array.packing.form == "tiles":
        read_tiles = functools.partial(_read_tiles, packing=array.packing)
        lines = _lines_read(array.packing, array.dtype, at.shape) if at.ndim > 1 else 0
        on_tpus = functools.partial(_read_parts, lines=lines) if lines else _read_halves
        on_tpus = functools.partial(on_tpus, packing=array.packing)
        return control_flow.platform_dependent(array.array, inside, at, cpu=read_tiles, gpu=read_tiles, default=on_tpus)
    # Rows last: a TPU pads the last axis of an array, here the elements of a row, to 128.
    within = jnp.arange(array.packing.elements, dtype=jnp.int32).reshape((-1,) + (1,) * at.ndim)
    found = array.array.at[at.T[None] * jnp.int32(array.packing.elements) + within].get(mode="promise_in_bounds")
    return zero_unless(inside, unpack(found.T, array.packing))


def _read_tiles(stored: jax.Array, inside: jax.Array, at: jax.Array, packing: Packing) -> jax.Array:
    return zero_unless(inside, unpack(stored.at[at].get(mode="promise_in_bounds"), packing))


def _read_halves(stored: jax.Array, inside: jax.Array, at: jax.Array, packing: Packing) -> jax.Array:
    """Read windows in two halves of the batch: a TPU copies each from tiles to the batch's shape, in half the memory."""
    half = at.shape[0] // 2 if at.ndim > 1 else 0
    parts = [(inside[:half], at[:half]), (inside[half:], at[half:])] if half else [(inside, at)]
    return jnp.concatenate([_read_tiles(stored, *part, packing) for part in parts])


def _lines_read(packing: Packing, dtype: Any, windows: tuple[int, ...]) -> int:
    """Return the lines of each row that a TPU reads at once for windows `[B, T]`; 0: whole rows."""
    if _has_channels(packing):
        lines = TILE[0]
    else:  # parts of bytes, if the batch is stored without padding, and not copied through the chip's main memory
        dense = packing.shape[-1] % 32 == 0 or windows[1] == 4 or windows[1] % 8 == 0
        small = math.prod(windows) * packing.elements <= _MOST_BYTES
        lines = TILE[0] // 2 if dense and small and jnp.dtype(dtype).itemsize == 1 else 0
    return lines if packing.stored[0] <= _MOST_PARTS * lines else 0


def _has_channels(packing: Packing) -> bool:
    """Return whether rows end in a few channels, which a TPU pads to 128 where it copies parts of a batch."""
    return 1 < packing.shape[-1] < _FEW_CHANNELS


def _read_parts(stored: jax.Array, inside: jax.Array, at: jax.Array, packing: Packing, lines: int) -> jax.Array:
    """Read the first lines of every row, then the next: a TPU orders each part as the batch, whose first axis is innermost."""
    parts, number, size = stored.reshape(-1, lines, TILE[1]), packing.stored[0] // lines, lines * TILE[1]
    found = []
    for start in range(0, packing.elements, size):
        part = parts.at[at * jnp.int32(number) + jnp.int32(start // size)].get(mode="promise_in_bounds")
        part = zero_unless(inside, part).reshape((*at.shape, size))
        found.append(jnp.moveaxis(part, 0, -1)[..., : packing.elements - start, :])
    elements = jnp.concatenate(found, axis=-2)
    if not _has_channels(packing):
        return jnp.moveaxis(lax.optimization_barrier(elements), -1, 0).reshape(at.shape + packing.shape)
    return lax.optimization_barrier(jnp.moveaxis(elements, -1, 0).reshape(at.shape + packing.shape))


def expand(mask: jax.Array, ndim: int) -> jax.Array:
    """Append axes to `mask` until it has `ndim`."""
    return mask.reshape(mask.shape + (1,) * (ndim - mask.ndim))


def zero_unless(mask: jax.Array, leaf: jax.Array) -> jax.Array:
    """Return `leaf` where `mask` (over its leading axes) is True, and zeros elsewhere."""
    return jnp.where(expand(mask, leaf.ndim), leaf, jnp.zeros((), leaf.dtype))

"""Rows as ids of blocks: the state of `Deduplicated`, and the conversion between rows and ids.

A write handles chunks of rows. The rows it overwrites release their blocks, the new rows are cut, and each block is compared
with the one at the same position of the row before. Changed blocks are looked up or added (`fbuf._algorithms.block_table`);
then references are counted and ids stored. A row with a block that finds no entry is dropped: its ids are 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._algorithms import block_grid, block_table
from fbuf._algorithms.block_grid import Grid
from fbuf._algorithms.block_table import Table
from fbuf._core import control_flow
from fbuf._core.component import component, state
from fbuf._core.control_flow import order_after_reads
from fbuf._core.pytree import Leaves, PyTree, named_leaves
from fbuf._core.slots import Geometry, Ranges, read_rows, where_written, write_rows
from fbuf._core.text_table import WHOLE, spec_text
from fbuf._interfaces.storage import Read

_CHUNK_BLOCKS = block_table.CHUNK_ITEMS  # at most, encoded at once
_COUNTED_IDS = 1 << 22  # at once, as 64-bit numbers
GROWTH_ROWS = 256
"""The number of rows that `DeduplicatedRows.growth` refers to."""


@component
class Cut:
    """A deduplicated leaf: its rows, its grid of blocks, and the number of its table."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    grid: Grid
    table: int

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))


@state
class DeduplicatedRows:
    """The rows of `Deduplicated`: the user's pytree with ids in place of the deduplicated leaves, and the blocks."""

    tree: PyTree  # leaves [C, ...]; deduplicated ones uint[C, blocks]: ids of blocks, 0 without a row
    last: dict[str, Array]  # uint[E, blocks]: ids of each lane's newest row
    tables: tuple[Table, ...]
    growth: Array  # uint32[T], distinct blocks that 256 rows of the latest write added, without removals
    cuts: tuple[Cut, ...]  # static

    def ranges(self, geometry: Geometry) -> Ranges:
        leaves = named_leaves(self.tree)
        for cut in self.cuts:
            places = self.tables[cut.table].count.shape[0]
            yield cut.name, leaves[cut.name], 0, places - 1
            yield f"last/{cut.name}", self.last[cut.name], 0, places - 1
        for number, table in enumerate(self.tables):
            ids = [np.asarray(leaves[cut.name]) for cut in self.cuts if cut.table == number]
            referred = _references(ids, table.count.shape[0])
            yield f"tables/{number}/count", table.count, referred, referred

    def outline(self) -> tuple[int | None, dict[str, tuple[str, str]]]:
        """Return the capacity, and shape and storage of each leaf, for display."""
        arrays, cuts = named_leaves(self.tree), {cut.name: cut for cut in self.cuts}
        shown = {
            n or WHOLE: (spec_text(cuts[n].shape, cuts[n].dtype), "device, blocks")
            if n in cuts
            else (spec_text(a.shape[1:], a.dtype), "device")
            for n, a in arrays.items()
        }
        return next(iter(arrays.values())).shape[0], shown

    @property
    def live(self) -> Array:
        """Return uint32[T], the distinct blocks of each table that rows refer to."""
        return jnp.stack([table.live for table in self.tables])


def _references(ids: Sequence[np.ndarray], places: int) -> np.ndarray:
    """Return int64[M], how often each place occurs among the ids `[C, blocks]`; 1 for place 0."""
    found = np.zeros(places, np.int64)
    for array in ids:
        size = max(_COUNTED_IDS // array.shape[1], 1)
        for start in range(0, len(array), size):
            found += np.bincount(array[start : start + size].reshape(-1), minlength=places)
    found[0] = 1
    return found


def drop(rows: DeduplicatedRows, slot: Array, token: Array) -> tuple[DeduplicatedRows, Array]:
    """Drop the rows in slots int32[...]; their blocks may be overwritten."""
    number, limit = slot.size, _rows_per_chunk(rows, block_table.CHUNK_ITEMS)
    slot = slot.reshape(-1)
    slots = jnp.int32(capacity(rows))
    slot = jnp.where(slot < slots, slot, slots + jnp.arange(number, dtype=jnp.int32))

    def some(carry: tuple[DeduplicatedRows, Array], begin: Array) -> Any:
        rows, token = carry
        at = lax.dynamic_slice(slot, (begin,), (min(limit, number),))
        rows, token = _release(rows, at, token)
        leaves = named_leaves(rows.tree)
        nothing = {cut.name: jnp.zeros((at.size, cut.grid.blocks), leaves[cut.name].dtype) for cut in rows.cuts}
        return (with_leaves(rows, write_rows(leaves, at, nothing, token)), token), None

    # Chunks may overlap at the end: dropping a row twice is harmless.
    (rows, token), _ = _scan_chunks(some, (rows, token), number, limit)
    return rows, token


def write(
    rows: DeduplicatedRows, slot: Array, leaves: Leaves, keep: Array | None, token: Array
) -> tuple[DeduplicatedRows, Array]:
    """See `Storage.write`; at most `_CHUNK_BLOCKS` blocks at a time."""
    num, lanes = slot.shape
    flat = {n: x.reshape(num * lanes, *x.shape[2:]) for n, x in leaves.items()}
    slots = slot.reshape(-1)
    kept = jnp.ones(slots.shape, bool) if keep is None else keep.reshape(-1)
    other = _without_cuts(flat, rows.cuts)
    rows = with_leaves(rows, write_rows(named_leaves(rows.tree), slots, other, token))
    limit = _rows_per_chunk(rows, _CHUNK_BLOCKS)
    limit = limit // lanes * lanes if limit > lanes else limit
    size = min(limit, num * lanes)

    def some(carry: tuple[DeduplicatedRows, Array], begin: Array) -> Any:
        rows, token = carry
        first = jnp.minimum(begin, jnp.int32(num * lanes - size))
        new = first + jnp.arange(size, dtype=jnp.int32) >= begin  # the last chunk starts earlier, to have the same size
        part = {cut.name: lax.dynamic_slice_in_dim(flat[cut.name], first, size) for cut in rows.cuts}
        at = lax.dynamic_slice_in_dim(slots, first, size)
        fresh = lax.dynamic_slice_in_dim(kept, first, size) & new
        lane = (first + jnp.arange(min(size, lanes), dtype=jnp.int32)) % jnp.int32(lanes)
        *carry_out, no_room, added = _write_chunk(rows, at, part, fresh, lane, token)
        return tuple(carry_out), (no_room, added)

    (rows, _), (no_room, added) = _scan_chunks(some, (rows, token), num * lanes, size)
    growth = jnp.sum(added, axis=0, dtype=jnp.uint32).astype(jnp.float32)
    number = jnp.sum(kept, dtype=jnp.int32)
    each = jnp.float32(GROWTH_ROWS) / jnp.maximum(number, jnp.int32(1)).astype(jnp.float32)
    growth = jnp.where(number > jnp.int32(0), jnp.ceil(growth * each).astype(jnp.uint32), rows.growth)
    return dataclasses.replace(rows, growth=growth), jnp.sum(no_room, dtype=jnp.uint32)


def update(rows: DeduplicatedRows, slot: Array, leaves: Leaves, token: Array) -> tuple[DeduplicatedRows, Array | None]:
    """See `Storage.update`; a row whose new blocks find no entry is unchanged."""
    inside = (slot >= jnp.int32(0)) & (slot < jnp.int32(capacity(rows)))
    number = slot.shape[0]
    cuts = tuple(cut for cut in rows.cuts if cut.name in leaves and number)
    accepted = inside
    if cuts:
        size = min(_rows_per_chunk(rows, _CHUNK_BLOCKS), number)

        def some(carry: tuple[DeduplicatedRows, Array], begin: Array) -> Any:
            rows, token = carry
            first = jnp.minimum(begin, jnp.int32(number - size))
            new = first + jnp.arange(size, dtype=jnp.int32) >= begin
            part = {cut.name: lax.dynamic_slice_in_dim(leaves[cut.name], first, size) for cut in cuts}
            at = lax.dynamic_slice_in_dim(slot, first, size)
            fresh = lax.dynamic_slice_in_dim(inside, first, size) & new
            *carry_out, fine = _update_chunk(rows, at, part, fresh, cuts, token)
            return tuple(carry_out), fine

        (rows, token), fine = _scan_chunks(some, (rows, token), number, size)
        order = _starts(number, size)[:, None] + jnp.arange(size, dtype=jnp.int32)[None, :]
        order = jnp.minimum(order, jnp.int32(number - size) + jnp.arange(size, dtype=jnp.int32)[None, :])
        accepted = jnp.zeros((number,), bool).at[order.reshape(-1)].max(fine.reshape(-1))
    at = where_written(accepted, slot, capacity(rows))
    arrays = write_rows(named_leaves(rows.tree), at, _without_cuts(leaves, cuts), token)
    return with_leaves(rows, arrays), jnp.sum(inside & ~accepted, dtype=jnp.uint32) if cuts else None


_ByRead = dict[int, Array]  # by the number of a read


class _BlockRead(NamedTuple):
    """A read of a deduplicated leaf."""

    first: int  # number of the first read of the same slots, whose ids and blocks serve both
    read: Read
    cut: Cut


def read(rows: DeduplicatedRows, reads: Sequence[Read]) -> tuple[list[Array], Array | None]:
    """See `Storage.read`: ids, then blocks. Dropped rows are masked and read as zeros.

    Looking up blocks takes the time, so overlapping reads (the stacks of a transition) share their look-ups.
    """
    arrays = named_leaves(rows.tree)
    cuts = {cut.name: cut for cut in rows.cuts}
    slots = jnp.int32(capacity(rows))
    pools = [read.slot if read.pool is None else read.pool for read in reads]
    frames, ids, made = dict[int, _BlockRead](), _ByRead(), _ByRead()
    ok: Array | None = None
    for number, (read, slot) in enumerate(zip(reads, pools, strict=True)):
        if read.name not in cuts:
            continue
        first = next(i for i in range(number + 1) if reads[i].name == read.name and pools[i] is slot)
        if first == number:
            ids[first] = read_rows(arrays[read.name], slot).astype(jnp.int32)
        frames[number] = _BlockRead(first, read, cuts[read.name])
        is_stored = (ids[first][..., 0] != jnp.int32(0)) | (slot < jnp.int32(0)) | (slot >= slots)
        is_stored = _window(read, is_stored)
        is_stored = jnp.all(is_stored, axis=tuple(range(1, is_stored.ndim))) if is_stored.ndim else is_stored
        ok = is_stored if ok is None else ok & is_stored
    if frames:
        # Pinned: XLA would look the ids up again for every word it copies.
        _, ids = order_after_reads(jnp.max(reads[0].slot, initial=0), ids)
        words = {number: rows.tables[frames[number].cut.table].words for number in ids}
        by_row, rows_last = partial(_assemble_by_row, frames), partial(_assemble_rows_last, frames)
        made = control_flow.platform_dependent(ids, words, cpu=by_row, gpu=by_row, default=rows_last)
    return [made[i] if i in made else read_rows(arrays[read.name], read.slot) for i, read in enumerate(reads)], ok


def _assemble_by_row(frames: Mapping[int, _BlockRead], ids: _ByRead, words: _ByRead) -> _ByRead:
    """Return the frames of each read, whose blocks have the ids `[..., blocks]` of its first read."""
    blocks = {number: words[number].at[at].get(mode="promise_in_bounds") for number, at in ids.items()}
    made = {}
    for number, (first, read, cut) in frames.items():
        mine = _window(read, blocks[first]).reshape(-1, cut.grid.blocks, cut.grid.block_words)
        made[number] = block_grid.from_blocks(mine, cut.grid, cut.spec).reshape(*read.slot.shape, *cut.shape)
    return made


def _assemble_rows_last(frames: Mapping[int, _BlockRead], ids: _ByRead, words: _ByRead) -> _ByRead:
    """Return the same, with the axes of rows last and in reverse: a TPU pads the last axis of an array to 128."""
    blocks = {
        number: jnp.moveaxis(words[number].at[at.T].get(mode="promise_in_bounds"), -1, 0) for number, at in ids.items()
    }
    made = {}
    for number, (first, read, cut) in frames.items():
        mine = _window(read, blocks[first], batch=-1, row=-2)
        rows, frame = read.slot.ndim, len(cut.shape)
        order = (*range(frame + rows - 1, frame - 1, -1), *range(frame))
        made[number] = block_grid.from_words_of_blocks(mine, cut.grid, cut.spec).transpose(order)
    return made


def _window(read: Read, pooled: Array, batch: int = 0, row: int = 1) -> Array:
    """Select a read's part of its pool, along the axis `row`: a choice among few shifts, which fuses with what follows."""
    if read.pool is None or read.start is None:
        return pooled
    length, shape = read.slot.shape[1], [1] * pooled.ndim
    shape[batch] = -1
    chosen = lax.slice_in_dim(pooled, 0, length, axis=row)
    for shift in range(1, pooled.shape[row] - length + 1):
        here = (read.start == jnp.int32(shift)).reshape(shape)
        chosen = jnp.where(here, lax.slice_in_dim(pooled, shift, shift + length, axis=row), chosen)
    return chosen


def clear(rows: DeduplicatedRows) -> DeduplicatedRows:
    """Remove all rows; the blocks stay, to be found again or overwritten."""
    arrays = named_leaves(rows.tree)
    for cut in rows.cuts:
        arrays[cut.name] = jnp.zeros_like(arrays[cut.name])
    tables = tuple(map(block_table.forget, rows.tables))
    growth = jnp.zeros_like(rows.growth)
    last = jax.tree.map(jnp.zeros_like, rows.last)
    return dataclasses.replace(with_leaves(rows, arrays), last=last, tables=tables, growth=growth)


def capacity(rows: DeduplicatedRows) -> int:
    """Return C."""
    leaves = jax.tree.leaves(rows.tree)
    return int(leaves[0].shape[0])


def with_leaves(rows: DeduplicatedRows, leaves: Leaves) -> DeduplicatedRows:
    """Return the rows with other leaves, in the tree's order."""
    structure: Any = jax.tree.structure(rows.tree)
    return dataclasses.replace(rows, tree=structure.unflatten(leaves.values()))


def _rows_per_chunk(rows: DeduplicatedRows, items: int) -> int:
    """Return the rows of a chunk of at most `items` blocks, at least one."""
    return max(1, items // sum(cut.grid.blocks for cut in rows.cuts))


def _starts(number: int, size: int) -> Array:
    return jnp.arange(0, number, size, dtype=jnp.int32)


def _scan_chunks(body: Any, carry: Any, number: int, size: int) -> Any:
    """Scan `body` over the starts of chunks; without a loop for one chunk."""
    starts = _starts(number, size)
    if starts.shape[0] == 1:
        carry, out = body(carry, starts[0])
        return carry, jax.tree.map(lambda x: x[None], out)
    return control_flow.scan(body, carry, starts)


def _set_table(rows: DeduplicatedRows, number: int, table: Table) -> DeduplicatedRows:
    """Replace a table."""
    return dataclasses.replace(rows, tables=rows.tables[:number] + (table,) + rows.tables[number + 1 :])


def _release(
    rows: DeduplicatedRows, slot: Array, token: Array, only: Array | None = None, names: Any = None
) -> tuple[DeduplicatedRows, Array]:
    """Release the references of rows int32[R] (those in `only`), before their ids are overwritten."""
    arrays = named_leaves(rows.tree)
    for cut in rows.cuts:
        if names is not None and cut.name not in names:
            continue
        ids = read_rows(arrays[cut.name], slot).astype(jnp.int32)
        if only is not None:
            ids = jnp.where(only[:, None], ids, jnp.int32(0))
        token, (ids,) = order_after_reads(token, (ids,))
        table, token = block_table.release(rows.tables[cut.table], ids.reshape(-1), token)
        rows = _set_table(rows, cut.table, table)
    return rows, token


class _EncodedLeaf(NamedTuple):
    """One encoded leaf of a chunk."""

    ids: Array  # int32[R, blocks]; 0 where a block found no entry
    won: Array  # bool[R, blocks], see `block_table.Placed`


def _encode(
    table: Table, cut: Cut, values: Array, guess: Array, keep: Array, token: Array
) -> tuple[Table, _EncodedLeaf, Array]:
    """Return the ids of rows `[R, *shape]`.

    Args:
      guess: int32[G, blocks], probable ids of the first G rows; row r >= G resembles row r - G.
      keep: bool[R]; other rows are ignored.
    """
    grid, number = cut.grid, values.shape[0]
    lanes, items = guess.shape[0], number * cut.grid.blocks
    words = block_grid.to_words(values, grid)
    guessed = table.words.at[guess].get(mode="promise_in_bounds")
    alive = table.count.at[guess].get(mode="promise_in_bounds") != jnp.uint32(0)
    changed = block_grid.differ_from_blocks(words[:lanes], guessed, grid) | ~alive | (guess == jnp.int32(0))
    token, (changed,) = order_after_reads(token, (changed,))
    if number > lanes:
        later = block_grid.differ(words[lanes:], words[:-lanes], grid) | ~keep[:-lanes, None]
        changed = jnp.concatenate([changed, later])
    changed = changed & keep[:, None]

    flat = changed.reshape(-1)
    place = jnp.cumsum(flat, dtype=jnp.int32) - jnp.int32(1)
    iota = jnp.arange(items, dtype=jnp.int32)
    heads = jnp.zeros((items,), jnp.int32).at[jnp.where(flat, place, jnp.int32(items))].set(iota, mode="drop")
    chunk = block_table.chunk_size(items, table.count.shape[0])
    table, placed, token = block_table.insert(
        table, lambda item: block_grid.take(words, grid, item), heads, place[-1] + jnp.int32(1), chunk, token
    )
    # An unchanged block has the id of the last changed one at its position.
    place = jnp.where(flat, place, jnp.int32(-1)).reshape(-1, lanes, grid.blocks)
    latest = lax.cummax(place, axis=0).reshape(number, grid.blocks)
    known = jnp.broadcast_to(guess[None], (number // lanes, lanes, grid.blocks)).reshape(number, grid.blocks)
    at = jnp.maximum(latest, jnp.int32(0))
    ids = jnp.where(latest < jnp.int32(0), known, placed.place.at[at].get(mode="promise_in_bounds"))
    won = changed & placed.won.at[at].get(mode="promise_in_bounds")
    return table, _EncodedLeaf(ids, won), token


def _count_references(
    rows: DeduplicatedRows, cuts: tuple[Cut, ...], coded: Mapping[str, _EncodedLeaf], accept: Array, token: Array
) -> tuple[DeduplicatedRows, Array]:
    """Count the references of accepted rows, and release those of the others."""
    for number in sorted({cut.table for cut in cuts}):
        # All leaves of a table at once: a block added by one leaf may be referenced by another only.
        mine = [coded[cut.name] for cut in cuts if cut.table == number]
        ids = jnp.concatenate([one.ids.reshape(-1) for one in mine])
        won = jnp.concatenate([one.won.reshape(-1) for one in mine])
        refers = jnp.concatenate([jnp.broadcast_to(accept[:, None], one.ids.shape).reshape(-1) for one in mine])
        table, token = block_table.refer(rows.tables[number], ids, refers, won, token)
        rows = _set_table(rows, number, table)
    return rows, token


def _write_chunk(
    rows: DeduplicatedRows, slot: Array, leaves: Leaves, keep: Array, lane: Array, token: Array
) -> tuple[DeduplicatedRows, Array, Array, Array]:
    """Write rows `[R, ...]` in order of time, of lanes `lane` int32[G].

    Also return the number of dropped rows, and uint32[T], distinct blocks added to each table.
    """
    number, lanes = slot.shape[0], lane.shape[0]
    rows, token = _release(rows, slot, token, only=keep)
    before = rows.live
    coded, accept = {}, keep
    for cut in rows.cuts:
        guess = rows.last[cut.name].at[lane].get(mode="promise_in_bounds").astype(jnp.int32)
        table, coded[cut.name], token = _encode(rows.tables[cut.table], cut, leaves[cut.name], guess, keep, token)
        rows = _set_table(rows, cut.table, table)
        accept = accept & jnp.all(coded[cut.name].ids != jnp.int32(0), axis=1)
    rows, token = _count_references(rows, rows.cuts, coded, accept, token)
    arrays = named_leaves(rows.tree)
    at = where_written(keep, slot, capacity(rows))
    step = jnp.arange(number // lanes, dtype=jnp.int32)[:, None]
    newest = jnp.max(jnp.where(keep.reshape(-1, lanes), step, jnp.int32(-1)), axis=0)
    from_row = jnp.maximum(newest, jnp.int32(0)) * jnp.int32(lanes) + jnp.arange(lanes, dtype=jnp.int32)
    ids = {name: made.ids for name, made in coded.items()}
    arrays = write_rows(arrays, at, {n: jnp.where(accept[:, None], x, jnp.int32(0)) for n, x in ids.items()}, token)
    lanes_at = jnp.where(newest >= jnp.int32(0), lane, jnp.int32(capacity(rows)) + lane)
    last = write_rows(rows.last, lanes_at, {n: x[from_row] for n, x in ids.items()}, token)
    rows = dataclasses.replace(with_leaves(rows, arrays), last=last)
    return rows, token, jnp.sum(keep & ~accept, dtype=jnp.uint32), rows.live - before


def _without_cuts(leaves: Leaves, cuts: tuple[Cut, ...]) -> Leaves:
    names = {cut.name for cut in cuts}
    return {name: values for name, values in leaves.items() if name not in names}


def _update_chunk(
    rows: DeduplicatedRows, slot: Array, leaves: Leaves, keep: Array, cuts: tuple[Cut, ...], token: Array
) -> tuple[DeduplicatedRows, Array, Array]:
    """Replace leaves of rows; a row whose new blocks find no entry is unchanged."""
    arrays = named_leaves(rows.tree)
    coded, accept = {}, keep
    for cut in cuts:
        guess = read_rows(arrays[cut.name], slot).astype(jnp.int32)
        token, (guess,) = order_after_reads(token, (guess,))
        table, coded[cut.name], token = _encode(rows.tables[cut.table], cut, leaves[cut.name], guess, keep, token)
        rows = _set_table(rows, cut.table, table)
        accept = accept & jnp.all(coded[cut.name].ids != jnp.int32(0), axis=1)
    rows, token = _count_references(rows, cuts, coded, accept, token)
    rows, token = _release(rows, slot, token, only=accept, names={cut.name for cut in cuts})
    arrays = named_leaves(rows.tree)
    at = where_written(accept, slot, capacity(rows))
    arrays = write_rows(arrays, at, {name: made.ids for name, made in coded.items()}, token)
    return with_leaves(rows, arrays), token, accept

"""`Deduplicated`: frames on the device as ids of distinct blocks, written and read inside XLA, without loss.

A frame is cut into blocks; each distinct block is stored once in a table, and a row keeps their ids. Reading is two gathers.
Without callbacks it works under scan, vmap, grad, shard_map and `jax.export`, and checkpoints as plain arrays. A block is
first compared with the same block of the previous row of its lane; changed blocks are looked up in the table
(`fbuf._algorithms.block_table`), whose size is fixed. `on_full` says what happens when it fills up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import block_grid, block_table
from fbuf._algorithms.block_stats import UNIT
from fbuf._algorithms.block_table import Table
from fbuf._core.component import component, to_config
from fbuf._core.pytree import Leaves, PyTree, Spec, item_bytes, name_of, named_leaves, tree_bytes
from fbuf._core.slots import Geometry
from fbuf._interfaces.storage import Forecast, LeafBytes, Storage
from fbuf.storages import _array_rows, _block_fit, _block_rows
from fbuf.storages._block_rows import Cut, DeduplicatedRows

MIN_BYTES = 1024
"""Without keys, leaves of this many bytes a row or more are deduplicated."""
BLOCKS_PER_ENTRY = 4
"""By default a table has one entry for every 4 blocks of a full buffer."""
MAX_LOAD = 0.95
"""The oldest rows are evicted if a write like the latest would exceed this load. The rest absorbs larger writes, and keeps
the search for a free entry short."""


@component
class Deduplicated(Storage):
    """Store large leaves as ids of distinct blocks, on the device.

    Attributes:
      keys: Leaves (or subtrees) to deduplicate, by their paths, `("obs/image",)`; None: every leaf of 1 KiB a row or more. Any
        dtype but complex numbers.
      block: Rows and pixels of a block, `(h, w)`, or such a pair by leaf as `{"obs": (12, 12)}`; None: about 12 lines of
        12 bytes. `fit` finds the best for given rows.
      blocks: Table entries for distinct blocks, a multiple of 32, or by leaf; None: one for every 4 blocks of a full buffer.
        Leaves whose blocks have the same number of bytes share one table, with the sum of their entries.
      on_full: What happens when the table is full. "retire" (the default): a write that would exceed 95 % load first evicts
        twice as many of the oldest rows as it adds. "refuse": new rows that do not fit are dropped. A row that still finds no
        entry (one write added more than was free: write some hundred rows at a time) is dropped and counted, and samples of
        it have `mask` False.

    Cost: a write touches its rows and the changed blocks; a read is two gathers. Device bytes are those of the ids (1, 2 or
      4 bytes a block) and of all table entries, used or not.

    Example:
      >>> import fbuf
      >>> fbuf.storages.Deduplicated(keys=("obs",), blocks=65_504)
      Deduplicated(keys=('obs',), blocks=65504)
    """

    keys: tuple[str, ...] | None = None
    block: Any = None
    blocks: Any = None
    on_full: Literal["retire", "refuse"] = "retire"

    def __post_init__(self) -> None:
        if isinstance(self.keys, str):
            raise TypeError(f"Deduplicated: keys is {self.keys!r}; expected a tuple. Write keys=({self.keys!r},).")
        if self.keys is not None:
            object.__setattr__(self, "keys", tuple(name_of(key) for key in self.keys))
        object.__setattr__(self, "block", _by_leaf(self.block, _checked_block))
        object.__setattr__(self, "blocks", _by_leaf(self.blocks, _checked_blocks))

    masks_expired = True
    grows = True

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        self._cuts(spec)
        return ()

    def _cuts(self, spec: Spec) -> tuple[Cut, ...]:
        """Return how the leaves of `spec` are cut into blocks."""
        cuts: list[Cut] = []
        sizes: list[int] = []
        for name in _array_rows.select_leaves("Deduplicated", self.keys, spec, MIN_BYTES):
            leaf = spec[name]
            if jnp.issubdtype(leaf.dtype, jnp.complexfloating) or not leaf.size:
                raise TypeError(
                    f"Deduplicated: leaf '{name}' is {leaf.dtype}{list(leaf.shape)}; expected one or more integers, booleans "
                    f"or floats. Name the leaves to deduplicate with keys=(...)."
                )
            grid = block_grid.grid(leaf, _of_leaf(self.block, name))
            if grid.blocks > block_table.CHUNK_ITEMS:
                raise ValueError(
                    f"Deduplicated: leaf '{name}' has {grid.blocks} blocks. Use larger ones: block=(h, w)."
                )
            if grid.block_words not in sizes:
                sizes.append(grid.block_words)
            cuts.append(Cut(name, tuple(leaf.shape), str(leaf.dtype), grid, sizes.index(grid.block_words)))
        _check_names("block", self.block, cuts)
        _check_names("blocks", self.blocks, cuts)
        return tuple(cuts)

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> DeduplicatedRows:
        cuts = self._cuts(spec)
        places = self._places(cuts, geometry.capacity)
        leaves = dict(spec)
        last = {}
        for cut in cuts:
            ids = jax.ShapeDtypeStruct((cut.grid.blocks,), _id_dtype(places[cut.table]))
            leaves[cut.name], last[cut.name] = ids, jnp.zeros((geometry.lanes, *ids.shape), ids.dtype)
        words = {cut.table: cut.grid.block_words for cut in cuts}
        return DeduplicatedRows(
            tree=structure.unflatten(_array_rows.allocate(geometry.capacity, leaves).values()),
            last=last,
            tables=tuple(block_table.init(number, words[i]) for i, number in enumerate(places)),
            growth=jnp.zeros((len(places),), jnp.uint32),
            cuts=cuts,
        )

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> DeduplicatedRows:
        return jax.eval_shape(lambda: self.init(geometry, spec, structure))

    def _places(self, cuts: tuple[Cut, ...], capacity: int) -> list[int]:
        """Return the entries of each table."""
        places = []
        for table in range(1 + max(cut.table for cut in cuts)):
            members = [cut for cut in cuts if cut.table == table]
            references = sum(capacity * cut.grid.blocks for cut in members)
            if references >= 2**32 - 1:
                raise ValueError(
                    f"Deduplicated: {capacity} rows of {references // capacity} blocks are {references} references; "
                    f"expected less than 2^32. Use larger blocks: block=(h, w)."
                )
            numbers = [_of_leaf(self.blocks, cut.name) for cut in members]
            if _is_by_leaf(self.blocks):
                known = [number for number in numbers if number is not None]
                places.append(sum(known) if len(known) == len(members) else default_places(references))
            else:
                places.append(numbers[0] or default_places(references))
        return places

    def fit(self, rows: PyTree, capacity: int, lanes: int | None = None) -> Deduplicated:
        """Return the same storage with `block` and `blocks` chosen for rows like these, where they are None.

        Four block sizes are tried, of multiples of 4 lines, which XLA reads fast. For each, distinct blocks are counted,
        and their number at `capacity` is predicted by a cautious power law. The fewest bytes win. The table gets a fifth more
        entries, at most as many as there are blocks. `Buffer.plan` shows the outcome; `Buffer.grow` helps if the prediction was
        too low.

        Args:
          rows: Rows as `extend` takes them, in order of time: leaves `[N, ...]`, with lanes `[N, E, ...]`. At least 64, better
            2,000 or more; the first 64 MiB are used.
          capacity: C of the buffer.
          lanes: E of the buffer.
        Returns:
          The storage: `block` and `blocks` for its one leaf, or by leaf.
        Raises:
          TypeError: rows are traced, or a leaf cannot be deduplicated.
          ValueError: there are fewer than 64 rows, or their shapes differ.
        Cost: eager, on the host; less than a second for 2,000 frames of 84 by 84, about five for 64 MiB of rows.

        Example:
          >>> import fbuf, numpy as np
          >>> frames = np.zeros((100, 84, 84), np.uint8)
          >>> frames[np.arange(100), np.arange(100) % 84] = 255
          >>> fbuf.storages.Deduplicated(keys=("obs",)).fit({"obs": frames}, capacity=10_000)
          Deduplicated(keys=('obs',), block=(12, 28), blocks=128)
        """
        spec, leaves = _block_fit.sample(rows, capacity, lanes)
        names = [cut.name for cut in self._cuts(spec)]
        block = {name: _of_leaf(self.block, name) for name in names}
        whole = self.blocks if not _is_by_leaf(self.blocks) else None
        places = {name: _of_leaf(self.blocks, name) if whole is None else None for name in names}
        if all(block.values()) and (whole or all(places.values())):
            return self
        choice = _block_fit.choose(leaves, spec, block, places, whole, capacity, lanes or 1)
        one = len(names) == 1
        return dataclasses.replace(
            self,
            block=choice.block[names[0]] if one else choice.block,
            blocks=whole or (choice.places[names[0]] if one else choice.places),
        )

    def forecast(self, geometry: Geometry, spec: Spec, trial: Leaves | None) -> Forecast:
        cuts = self._cuts(spec)
        places = self._places(cuts, geometry.capacity)
        members = {cut.name: (cut.grid, cut.table) for cut in cuts}
        return _block_fit.forecast(trial, spec, members, places, geometry, MAX_LOAD, self.on_full)

    def spec(self, rows: DeduplicatedRows) -> tuple[Spec, Any]:
        if not isinstance(rows, DeduplicatedRows):
            raise TypeError("Deduplicated: another storage made this state. Use the buffer that made it.")
        leaves = named_leaves(rows.tree)
        spec = {name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for name, a in leaves.items()}
        spec |= {cut.name: cut.spec for cut in rows.cuts}
        return spec, jax.tree.structure(rows.tree)

    def needs_eviction(self, rows: DeduplicatedRows, more: jax.Array) -> jax.Array | None:
        if self.on_full == "refuse":
            return None
        places = jnp.asarray([table.count.shape[0] for table in rows.tables], jnp.float32)
        growth = rows.growth.astype(jnp.float32) * (more.astype(jnp.float32) / jnp.float32(_block_rows.GROWTH_ROWS))
        return jnp.any(rows.live.astype(jnp.float32) + growth > jnp.float32(MAX_LOAD) * places)

    drop = staticmethod(_block_rows.drop)
    write = staticmethod(_block_rows.write)
    update = staticmethod(_block_rows.update)
    read = staticmethod(_block_rows.read)
    clear = staticmethod(_block_rows.clear)

    def grow(self, rows: DeduplicatedRows, blocks: Any = None) -> tuple[Deduplicated, DeduplicatedRows]:
        """Return a storage with larger tables, and the same rows in them; see `Buffer.grow`."""
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(rows)):
            raise TypeError("Deduplicated.grow: the state is traced; growing changes shapes. Call it outside jit.")
        members = {i: [cut for cut in rows.cuts if cut.table == i] for i in range(len(rows.tables))}
        asked = dataclasses.replace(self, blocks=blocks).blocks
        _check_names("blocks", asked, rows.cuts)
        arrays, last, tables, sizes = named_leaves(rows.tree), dict(rows.last), [], {}
        for i, table in enumerate(rows.tables):
            places = table.count.shape[0]
            numbers = [_of_leaf(asked, cut.name) for cut in members[i]]
            if blocks is None:
                wanted = -(-places * 3 // (2 * UNIT)) * UNIT
                wanted = max(wanted, 2 * UNIT * len(members[i]))
            elif None in numbers:
                raise ValueError(
                    f"Deduplicated.grow: blocks is {blocks!r}, without '{members[i][numbers.index(None)].name}'. "
                    f"Give one number, or one for each of: {', '.join(cut.name for cut in rows.cuts)}."
                )
            else:
                wanted = sum(numbers) if _is_by_leaf(asked) else numbers[0]
            if wanted < places:
                raise ValueError(f"Deduplicated.grow: blocks is {wanted}; expected at least the present {places}.")
            if wanted == places:
                made, moved, lost = table, jnp.arange(places, dtype=jnp.int32), 0
            else:
                made, moved, lost = block_table.rebuild(table, wanted)
            if int(lost):
                raise ValueError(f"grow: {int(lost)} blocks do not fit in {wanted} entries. Use blocks={2 * wanted}.")
            tables.append(made)
            share = [wanted // len(members[i]) // UNIT * UNIT for _ in members[i]]
            share[0] += wanted - sum(share)
            for cut, part in zip(members[i], share, strict=True):
                sizes[cut.name] = part
                arrays[cut.name] = moved[arrays[cut.name].astype(jnp.int32)].astype(_id_dtype(wanted))
                last[cut.name] = moved[last[cut.name].astype(jnp.int32)].astype(_id_dtype(wanted))
        one = len(rows.cuts) == 1
        storage = dataclasses.replace(self, blocks=next(iter(sizes.values())) if one else tuple(sizes.items()))
        grown = dataclasses.replace(_block_rows.with_leaves(rows, arrays), last=last, tables=tuple(tables))
        return storage, grown

    def stats(self, rows: DeduplicatedRows, exists: jax.Array) -> dict[str, jax.Array]:
        """Return the distinct blocks of all tables, the load of the fullest, and raw bytes over bytes."""
        places = jnp.asarray([table.count.shape[0] - 1 for table in rows.tables], jnp.float32)
        raw = sum(item_bytes(cut.spec) for cut in rows.cuts)
        arrays = named_leaves(rows.tree)
        stored = tree_bytes((rows.tables, rows.last, [arrays[cut.name] for cut in rows.cuts]))
        return {
            "blocks": jnp.sum(rows.live, dtype=jnp.uint32),
            "blocks_load": jnp.max(rows.live.astype(jnp.float32) / places),
            "blocks_ratio": exists.astype(jnp.float32) * jnp.float32(raw / stored),
        }

    def nbytes(self, rows: DeduplicatedRows) -> dict[str, int]:
        return {"device": tree_bytes(rows), "host": 0, "disk": 0}

    def bytes_per_leaf(self, rows: DeduplicatedRows) -> dict[str, LeafBytes]:
        """Ids, and a share of each table by the blocks a row has of each leaf."""
        size = {name: tree_bytes(array) for name, array in named_leaves(rows.tree).items()}
        for number, table in enumerate(rows.tables):
            members = [cut for cut in rows.cuts if cut.table == number]
            left, blocks = tree_bytes(table), sum(cut.grid.blocks for cut in members)
            for cut in members:
                share = left * cut.grid.blocks // blocks
                left, blocks = left - share, blocks - cut.grid.blocks
                size[cut.name] += share + tree_bytes(rows.last[cut.name])
        return {name: LeafBytes(device=number) for name, number in size.items()}

    def to_arrays(self, rows: DeduplicatedRows) -> dict[str, Any]:
        return {"cuts": _as_bytes(rows.cuts), "growth": rows.growth, **_by_name(rows)}

    def from_arrays(
        self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any
    ) -> DeduplicatedRows:
        made = self.abstract(geometry, spec, structure)
        if not np.array_equal(arrays["cuts"], _as_bytes(made.cuts)):
            raise ValueError("Deduplicated: blocks differ. Load the arrays with the buffer that saved them.")
        for name, leaf in {**_by_name(made), "growth": made.growth}.items():
            came = arrays[name]
            if came.shape != leaf.shape or came.dtype != leaf.dtype:
                raise ValueError(
                    f"Deduplicated: '{name}' is {came.dtype}{list(came.shape)}; expected {leaf.dtype}{list(leaf.shape)}. "
                    f"Load it with the buffer that saved it (after `grow`, the one it returned)."
                )
        leaves = {n: _restored(arrays, f"rows:{n}") for n in named_leaves(made.tree)}
        last = {n: _restored(arrays, f"last:{n}") for n in made.last}
        tables = tuple(
            Table(**{f.name: _restored(arrays, f"table{i}:{f.name}") for f in dataclasses.fields(Table)})
            for i in range(len(made.tables))
        )
        growth = _restored(arrays, "growth")
        return DeduplicatedRows(structure.unflatten(leaves.values()), last, tables, growth, made.cuts)


def _restored(arrays: Mapping[str, Any], name: str) -> jax.Array:
    return _array_rows.as_device_array(arrays[name], arrays[name].dtype)


def _as_bytes(cuts: tuple[Cut, ...]) -> np.ndarray:
    """Return uint8[...], the meaning of a checkpoint's ids."""
    return np.frombuffer(json.dumps(to_config(cuts), sort_keys=True).encode(), np.uint8)


def _by_name(rows: DeduplicatedRows) -> dict[str, Any]:
    """Return every array of the rows but `growth`."""
    arrays = {f"rows:{n}": a for n, a in named_leaves(rows.tree).items()} | {
        f"last:{n}": a for n, a in rows.last.items()
    }
    for i, table in enumerate(rows.tables):
        arrays |= {f"table{i}:{f.name}": getattr(table, f.name) for f in dataclasses.fields(table)}
    return arrays


def default_places(references: int) -> int:
    """Return the default entries of a table, for a full buffer of this many blocks."""
    return max(2 * UNIT, -(-references // (BLOCKS_PER_ENTRY * UNIT)) * UNIT)


def _id_dtype(places: int) -> Any:
    """Return the narrowest type for ids below `places`."""
    return jnp.uint8 if places <= 2**8 else jnp.uint16 if places <= 2**16 else jnp.uint32


def _checked_block(block: Any) -> tuple[int, int]:
    is_pair = isinstance(block, (tuple, list)) and len(block) == 2
    if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in block):
        raise ValueError(f"Deduplicated: block is {block!r}; expected (rows, pixels), two ints >= 1, as (12, 12).")
    return (int(block[0]), int(block[1]))


def _checked_blocks(number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 2 * UNIT:
        least = 2 * UNIT
        raise ValueError(f"Deduplicated: blocks is {number!r}; expected an int >= {least}. Write blocks={least}.")
    if number % UNIT or number >= 2**30:
        near = min(-(-int(number) // UNIT) * UNIT, 2**30 - 2**20)
        raise ValueError(f"Deduplicated: blocks is {number}; expected a multiple of {UNIT} below 2^30. Use {near}.")
    return int(number)


def _is_by_leaf(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and isinstance(value[0], tuple)


def _by_leaf(value: Any, check: Any) -> Any:
    """Return a setting for all leaves, or by leaf as sorted pairs (a mapping does not hash)."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if _is_by_leaf(value):
        return tuple(sorted((name_of(name), check(item)) for name, item in value))
    return check(value)


def _check_names(field: str, value: Any, cuts: Sequence[Cut]) -> None:
    """Raise ValueError if a setting by leaf names a leaf that is not deduplicated."""
    names = [cut.name for cut in cuts]
    for name, _ in value if _is_by_leaf(value) else ():
        if name not in names:
            raise ValueError(f"Deduplicated: {field} names '{name}', but leaves are {', '.join(names)}.")


def _of_leaf(value: Any, name: str) -> Any:
    return dict(value).get(name) if _is_by_leaf(value) else value

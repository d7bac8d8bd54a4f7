"""Choose block and table sizes from real rows, by leaf: `Deduplicated.fit` and `Deduplicated.forecast`.

Leaves whose frames have the same shape, dtype and axes get the same block, so that they share a table and each other's blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fbuf._algorithms import block_grid, block_stats
from fbuf._algorithms.block_grid import Grid
from fbuf._algorithms.block_stats import Curve
from fbuf._core import arguments
from fbuf._core.pytree import PyTree, Spec, item_bytes, leaf_spec, named_leaves
from fbuf._core.slots import Geometry
from fbuf._interfaces.storage import Forecast

BlockSize = tuple[int, int]
Blocks = Mapping[str, BlockSize | None]
Places = Mapping[str, int | None]
Grids = Mapping[str, tuple[Grid, int]]
Leaves = Mapping[str, Any]


class FittedSizes(NamedTuple):
    """The chosen sizes, by leaf."""

    block: dict[str, BlockSize]
    places: dict[str, int]  # the leaf's share of its table's entries


def sample(rows: PyTree, capacity: Any, lanes: int | None) -> tuple[Spec, dict[str, Any]]:
    """Return the spec of one row, and leaves `[R, *shape]` in order of time, R <= N * E.

    Raises:
      TypeError: rows are traced, or capacity or lanes are not numbers.
      ValueError: leading axes differ, there are fewer than 64 rows, or capacity is not a multiple of lanes.
    """
    call = "Deduplicated.fit"
    for what, number in (("capacity", capacity), ("lanes", 1 if lanes is None else lanes)):
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < 1:
            raise TypeError(f"{call}: {what} is {number!r}; expected an int >= 1, as the buffer's.")
    if capacity % (lanes or 1):
        raise ValueError(f"{call}: capacity is {capacity}, not a multiple of lanes={lanes}. Give those of the buffer.")
    leaves = named_leaves(rows)
    lead = 1 if lanes is None else 2
    axes = "N" if lanes is None else "N, E"
    spec, head = {}, None
    for name, leaf in leaves.items():
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"{call}: leaf '{name}' is traced; expected an array. Call it outside jit.")
        got = leaf_spec(leaf)
        if len(got.shape) < lead or (lanes is not None and got.shape[1] != lanes):
            raise ValueError(f"{call}: leaf '{name}' has shape {list(got.shape)}; expected [{axes}, ...].")
        if head is not None and got.shape[:lead] != head:
            raise ValueError(f"{call}: leaf '{name}' has leading axes {list(got.shape[:lead])}; expected {list(head)}.")
        head = got.shape[:lead]
        spec[name] = jax.ShapeDtypeStruct(got.shape[lead:], got.dtype)
    arguments.check_spec(call, spec)
    return spec, {name: leaf if lead == 1 else leaf.reshape(-1, *spec[name].shape) for name, leaf in leaves.items()}


def _sample_arrays(leaves: Leaves, spec: Spec, names: list[str]) -> dict[str, Any]:
    """Return the first rows of the named leaves, as numpy arrays."""
    number = len(leaves[names[0]])
    if number < block_stats.LEAST_ROWS:
        raise ValueError(f"Deduplicated.fit: there are {number} rows; expected {block_stats.LEAST_ROWS}, better 2,000.")
    number = block_stats.rows_looked_at(number, sum(item_bytes(spec[name]) for name in names))
    return {name: np.asarray(leaves[name][:number]).astype(spec[name].dtype, copy=False) for name in names}


def choose(
    leaves: Leaves, spec: Spec, block: Blocks, places: Places, each: int | None, capacity: int, lanes: int
) -> FittedSizes:
    """Choose blocks for leaves given None, and entries for their tables.

    Args:
      leaves: `[R, *shape]` by name, at least those to deduplicate.
      block: By leaf to deduplicate, or None.
      places: The same for entries.
      each: Entries of each table, if one number is given for all.
    """
    names = list(block)
    arrays = _sample_arrays(leaves, spec, names)
    chosen: dict[str, BlockSize] = {}
    # By words of a block: leaves, distinct blocks, references.
    tables: dict[int, list[tuple[list[str], float, int]]] = {}
    for members, wanted in _group_leaves(spec, block):
        _, height, width, channels, _ = block_grid.frame_shape(spec[members[0]].shape)
        pixel = channels * spec[members[0]].dtype.itemsize
        tried = [wanted] if wanted is not None else block_stats.candidates(height, width, pixel)
        grids = [{name: block_grid.grid(spec[name], pixels) for name in members} for pixels in tried]
        cuts = [(grid[members[0]].rows, grid[members[0]].words) for grid in grids]
        blocks = [sum(g.blocks for g in grid.values()) for grid in grids]
        curves = block_stats.count([(arrays[name], grids[0][name]) for name in members], cuts, lanes)
        known = [number for name in members if (number := places[name]) is not None]
        room = sum(known) if len(known) == len(members) else each
        best = block_stats.smallest(curves, cuts, blocks, capacity, room)
        chosen |= dict.fromkeys(members, tried[best])
        found = (members, curves[best].at(capacity), capacity * blocks[best])
        tables.setdefault(cuts[best][0] * cuts[best][1], []).append(found)
    shares: dict[str, int] = {}
    for groups in tables.values():
        total = block_stats.places_for(sum(group[1] for group in groups), sum(group[2] for group in groups))
        shares |= _split_entries([name for group in groups for name in group[0]], places, total)
    return FittedSizes(chosen, {name: shares[name] for name in names})


def _group_leaves(spec: Spec, block: Blocks) -> list[tuple[list[str], BlockSize | None]]:
    """Return groups of leaves that get the same block, and that block if given."""
    frames: dict[Any, dict[BlockSize | None, list[str]]] = {}
    for name, size in block.items():
        leaf = spec[name]
        kind = (*block_grid.frame_shape(leaf.shape)[1:], leaf.dtype.itemsize)
        frames.setdefault(kind, {}).setdefault(size, []).append(name)
    groups: list[tuple[list[str], BlockSize | None]] = []
    for by_block in frames.values():
        known = [size for size in by_block if size is not None]
        if known and None in by_block:  # leaves without a block get that of the others
            by_block[known[0]] += by_block.pop(None)
        groups += [(members, size) for size, members in by_block.items()]
    return groups


def _split_entries(names: list[str], places: Places, total: int) -> dict[str, int]:
    """Return shares of a table's entries: given ones, and the rest divided among the others."""
    fixed = {name: number for name in names if (number := places[name]) is not None}
    free = [name for name in names if name not in fixed]
    if not free:
        return fixed
    unit, least = block_stats.UNIT, 2 * block_stats.UNIT
    rest = max(total - sum(fixed.values()), least * len(free))
    share = rest // len(free) // unit * unit
    return fixed | dict.fromkeys(free, share) | {free[0]: rest - share * (len(free) - 1)}


def forecast(
    trial: Leaves | None, spec: Spec, cuts: Grids, places: list[int], geometry: Geometry, full: float, on_full: str
) -> Forecast:
    """Predict how full tables with `places` entries will get, given each leaf's grid and table number.

    Args:
      trial: Rows `[N, E, ...]`, or None.
      full: Load at which rows are evicted or dropped.
    """
    number = 0 if trial is None else next(iter(trial.values())).shape[0] * geometry.lanes
    if trial is None or number < block_stats.LEAST_ROWS:
        known = f"{number} rows are too few to tell" if number else "give rows to see how many are taken"
        return Forecast(None, sum(places), None, None, geometry.capacity, "", known)
    leaves = {name: trial[name].reshape(-1, *spec[name].shape) for name in cuts}
    curves = _table_curves(leaves, spec, cuts, geometry.lanes)
    blocks = [curve.at(geometry.capacity) for curve in curves]
    loads = [distinct / room for distinct, room in zip(blocks, places, strict=True)]
    references = [0] * len(places)
    for grid, table in cuts.values():
        references[table] += geometry.capacity * grid.blocks
    wanted = map(block_stats.places_for, blocks, references)
    gives_way, most = "", geometry.capacity
    if max(loads) > full:
        gives_way = "retired" if on_full == "retire" else "refused"
        fits = min(curve.until(full * room) for curve, room in zip(curves, places, strict=True))
        most = min(most, round(fits))
    known = f"sample of {curves[0].rows[-1]} rows"
    return Forecast(round(sum(blocks)), sum(places), sum(wanted), max(loads), most, gives_way, known)


def _table_curves(leaves: Leaves, spec: Spec, cuts: Grids, lanes: int) -> list[Curve]:
    """Return a curve for each table."""
    arrays = _sample_arrays(leaves, spec, list(cuts))
    parts: dict[int, dict[tuple[int, int, int], list[str]]] = {}
    for name, (grid, table) in cuts.items():
        parts.setdefault(table, {}).setdefault((grid.rows, grid.words, grid.planes), []).append(name)
    out = []
    for table in sorted(parts):
        of_parts = [
            block_stats.count([(arrays[name], cuts[name][0]) for name in names], [cut[:2]], lanes)[0]
            for cut, names in parts[table].items()
        ]
        distinct = tuple(sum(numbers) for numbers in zip(*(curve.distinct for curve in of_parts), strict=True))
        out.append(Curve(of_parts[0].rows, distinct))
    return out

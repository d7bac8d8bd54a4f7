"""What sorting all rows that ever came would leave, in Python's numbers."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import fbuf
from fbuf import _tournament
from fbuf.testing import assert_inplace
from fbuf.writers import TopK

CAPACITY, AT_ONCE = 12, 40
KINDS = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
}
NAN = float("nan")
wide = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64


def order_of(rank: Any) -> tuple[bool, Any]:
    """What ranks are sorted by: NaN below all."""
    rank = Fraction(int(rank)) if isinstance(rank, (np.integer, np.bool_, bool, int)) else float(rank)
    return (False, 0) if isinstance(rank, float) and math.isnan(rank) else (True, rank)


def best(ranks: list[Any], capacity: int = CAPACITY) -> list[int]:
    """Numbers of the rows that stay, in order of arrival."""
    by_rank = sorted(
        range(len(ranks)), key=lambda i: order_of(ranks[i]), reverse=True
    )  # stable: of equal ones the first
    return sorted(by_rank[:capacity])


def buffer_of(rank: Any = "rank", capacity: int = CAPACITY, **parts: Any) -> fbuf.Buffer:
    return fbuf.Buffer(capacity, writer=TopK(rank), **parts)


def put(buffer: fbuf.Buffer, state: Any, ranks: Any, first: int = 0, mask: Any = None) -> Any:
    """Adds rows with these ranks and the numbers from `first` on: a call for each forty."""
    ranks, mask = np.asarray(ranks), np.ones(len(ranks), bool) if mask is None else mask
    for i in range(0, len(ranks), AT_ONCE):
        short = (0, max(i + AT_ONCE - len(ranks), 0))
        rank, there = np.pad(ranks[i : i + AT_ONCE], short), np.pad(mask[i : i + AT_ONCE], short)
        number = first + i + np.arange(AT_ONCE, dtype=np.int32)
        state = buffer.extend(state, {"rank": rank, "id": number}, mask=there)
    return state


def example_of(dtype: Any) -> dict[str, Any]:
    return {"rank": jax.ShapeDtypeStruct((), dtype), "id": jax.ShapeDtypeStruct((), np.int32)}


def ids(buffer: fbuf.Buffer, state: Any) -> list[int]:
    rows = jax.device_get(buffer.rows(state))
    return rows.data["id"][rows.mask].tolist()


def held(state: Any) -> list[int]:
    """What a full buffer holds, which were added in the order of their numbers; read without a verb, as that compiles."""
    return np.sort(np.asarray(state.rows["id"]), axis=-1).tolist()


def ranks_of(rng: np.random.Generator, dtype: Any, count: int) -> np.ndarray:
    """Few distinct numbers, so that many are equal; the edges of the dtype among them."""
    if dtype == np.bool_:
        return rng.random(count) < 0.5
    if np.issubdtype(dtype, np.integer):
        edges = [np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1, 2, 3, 100]
    else:
        tiny = 2.0**-24 if np.dtype(dtype).itemsize == 2 else 1e-45
        edges = [NAN, -NAN, math.inf, -math.inf, 0.0, -0.0, 1.5, -1.5, 1.75, 3.0, -3.0, tiny, -tiny]
    with np.errstate(all="ignore"):
        return np.asarray([edges[i] for i in rng.integers(len(edges), size=count)]).astype(dtype)


def check_program(kind: str, program: list[tuple[int, int, bool]]) -> None:
    """Keep what sorting would leave, of rows given as number, seed and whether some are masked."""
    dtype, buffer = KINDS[kind], buffer_of()
    state, ranks, names, came = buffer.init(example_of(dtype)), [], [], 0
    for number, seed, masked in program:
        rng = np.random.default_rng(seed)
        new = ranks_of(rng, dtype, number)
        mask = rng.random(number) < 0.6 if masked else np.ones(number, bool)
        state = put(buffer, state, new, came, mask)
        ranks += [r for r, m in zip(new, mask, strict=True) if m]
        names += (came + np.flatnonzero(mask)).tolist()
        came += number
        assert ids(buffer, state) == [names[i] for i in best(ranks)]
    nans = sum(order_of(r) == (False, 0) for r in ranks)
    stats = buffer.stats(state)
    assert int(stats["nan_ranks"]) == nans and int(stats["refused_rows"]) == 0
    lowest = min((order_of(ranks[i]) for i in best(ranks)), default=(False, 0))
    floating = jnp.issubdtype(dtype, jnp.floating)
    least = -math.inf if floating else 0 if kind == "bool" else np.iinfo(dtype).min
    expected = lowest[1] if len(ranks) >= CAPACITY and lowest[0] else least
    assert stats["lowest_rank"].dtype == dtype and stats["lowest_rank"].item() == expected


def check_ways(capacity: int, number: int) -> None:
    """Keep the same rows one by one, as CPUs put them in, and all at once, as accelerators do."""

    @functools.partial(jax.jit, static_argnums=0)
    def by(way: Any, tree: Any, rows: Any, keep: Any, held: Any) -> Any:
        return way(tree, rows, keep, held, capacity=capacity)

    ways = {
        way: [_tournament.init(capacity, 1), 0] for way in (_tournament._insert_one_by_one, _tournament._insert_at_once)
    }
    lowest = jax.jit(_tournament.lowest, static_argnums=(1, 2))
    rng, came, every = np.random.default_rng(0), 0, []
    for turn in range(30):
        rank, keep = rng.integers(0, 40 + turn, number), rng.random(number) < 0.8
        arrival = came + np.arange(number)
        rows = np.stack([rank, np.full(number, 2**32 - 1), 2**32 - 1 - arrival], axis=-1).astype(np.uint32)
        came += number
        every += [tuple(row) for row in rows[keep].tolist()]
        kept = sorted(every)[-capacity:]
        for way, (tree, held) in ways.items():
            tree, slots = by(way, tree, jnp.asarray(rows), jnp.asarray(keep), jnp.int32(held))
            held, slots = min(capacity, held + int((np.asarray(slots) < capacity).sum())), np.asarray(slots)
            leaves = np.asarray(tree)[:capacity]
            assert sorted(tuple(row[:3]) for row in leaves[:held].tolist()) == kept
            assert leaves[:held, 3].tolist() == list(range(held)) and (leaves[held:] == 2**32 - 1).all()
            last = {int(slot): i for i, slot in enumerate(slots) if slot < capacity}
            assert all(tuple(leaves[slot, :3]) == tuple(rows[i]) for slot, i in last.items())
            assert tuple(_tournament.root(np.asarray(tree))) == min(map(tuple, leaves))
            low = np.asarray(lowest(tree, capacity, number))
            assert [tuple(row[:3]) for row in low.tolist()][: len(kept)] == kept[:number]
            ways[way] = [tree, held]


def check_inplace(form: str) -> None:
    buffer = buffer_of(capacity=200_000, lanes=2)
    example = example_of(np.float32)

    def step(state: Any, given: Any) -> Any:
        state, batch = buffer.sample(state, given[1], 8)
        state = buffer.extend(state, given[0])
        return state, (batch, buffer.stats(state))

    def shaped(*axes: int) -> Any:
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, 3, 2, *x.shape), x.dtype), example)
        return rows, jax.ShapeDtypeStruct((*axes, 2), jnp.uint32)

    state = jax.eval_shape(buffer.init, example)
    if form == "vmap":
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), state)
        assert_inplace(jax.vmap(step), state, shaped(3))
    elif form == "scan":
        assert_inplace(lambda state, given: lax.scan(step, state, given), state, shaped(4))
    else:
        assert_inplace(step, state, shaped())


def check_capacity(capacity: int) -> None:
    """Keep the best however many there is room for."""
    buffer, rng, ranks = buffer_of(capacity=capacity), np.random.default_rng(capacity), []
    state = buffer.init(example_of(np.float32))
    for _ in range(3):
        new = rng.integers(0, 50, 50).astype(np.float32)
        state = put(buffer, state, new, len(ranks))
        ranks += new.tolist()
        empty = max(capacity - len(ranks), 0)  # slots, which hold zeros
        assert held(state)[empty:] == best(ranks, capacity)

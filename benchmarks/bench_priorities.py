"""Is a prioritized step (sample, weights, update) inside a scan as fast as with flashbax's tree?

Both sides do the same work on scalars: stratified draws, importance weights `(n P)^-beta` over the
batch's largest, new priorities `(|p| + eps)^alpha`, the running maximum. Ours also refuses values that
are not finite. flashbax runs its scan update, which is its faster one on CPU; its tree is called
directly, so none of its buffer's overhead counts. Expected: at least parity at a million rows, 0.8x at
ten thousand, where the whole tree fits the first cache level or two.

A second table shows what flashbax's running differences cost: the root against its leaves after all
priorities have shrunk from 1e6 to 1e-3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks._harness import Absent, absent_row, interleave, load_peer, ratio, row, spread
from fbuf import _sumtree

STEP = "Prioritized step in a scan: time of flashbax's tree over ours"
DRIFT = "Relative error of the root after priorities shrink from 1e6 to 1e-3"

ALPHA, BETA, EPS = np.float32(0.6), np.float32(0.4), np.float32(1e-6)


def _weight(leaf: jax.Array, total: jax.Array, capacity: int) -> jax.Array:
    weight = (np.float32(capacity) * (leaf / total)) ** -BETA
    return weight / jnp.max(weight)


def _error(index: jax.Array, step: jax.Array) -> jax.Array:
    """TD errors in [-2, 2) that change with every step and cost next to nothing."""
    mixed = index.astype(jnp.uint32) * np.uint32(2654435761) + step.astype(jnp.uint32)
    return (mixed >> np.uint32(8)).astype(jnp.int32).astype(jnp.float32) * np.float32(2**-22) - np.float32(2)


def _scanned(step: Callable[..., Any], steps: int) -> Callable[..., Any]:
    @functools.partial(jax.jit, donate_argnums=0)
    def run(state: Any, key: jax.Array) -> Any:
        items = (jax.random.split(key, steps), np.arange(steps, dtype=np.int32))
        (state, seen), _ = lax.scan(step, (state, jnp.zeros((), jnp.float32)), items)
        return state, seen

    return run


def ours(capacity: int, batch: int, steps: int, leaves: np.ndarray) -> Callable[[], jax.Array]:
    """A thunk that runs `steps` steps with `fbuf._sumtree`."""

    def step(carry: Any, item: Any) -> Any:
        ((tree, largest), seen), (key, now) = carry, item
        index, leaf = _sumtree.draw(tree, key, batch, capacity, stratified=True)
        weight = _weight(leaf, _sumtree.root(tree), capacity)
        priority = jnp.abs(_error(index, now) * weight)
        finite = jnp.isfinite(priority)
        priority = jnp.where(finite, priority, np.float32(0))
        new = (priority + EPS) ** ALPHA
        largest = jnp.maximum(largest, jnp.max(priority))
        tree = _sumtree.set(tree, jnp.where(finite, index, np.int32(capacity)), new, capacity)
        return ((tree, largest), seen + jnp.sum(weight)), None

    state = (_sumtree.rebuild(jnp.asarray(leaves)), jnp.ones((), jnp.float32))
    return _thunk(_scanned(step, steps), state)


def flashbax(peer: Any, capacity: int, batch: int, steps: int, leaves: np.ndarray) -> Callable[[], jax.Array]:
    """The same with `flashbax.buffers.sum_tree`, which keeps the running maximum itself."""

    def step(carry: Any, item: Any) -> Any:
        (tree, seen), (key, now) = carry, item
        index = peer.stratified_sample(tree, batch, key)
        weight = _weight(peer.get_batch(tree, index), tree.nodes[0], capacity)
        new = (jnp.abs(_error(index, now) * weight) + EPS) ** ALPHA
        tree = peer.set_batch_scan(tree, index, new)
        return (tree, seen + jnp.sum(weight)), None

    return _thunk(_scanned(step, steps), _flashbax_tree(peer, leaves))


def _flashbax_tree(peer: Any, leaves: np.ndarray) -> Any:
    """A fresh flashbax tree, summed without its drift: a million single updates take minutes."""
    tree = peer.init(len(leaves))
    level = np.zeros(2**tree.tree_depth, np.float32)
    level[: len(leaves)] = leaves
    levels = [level]
    while len(level) > 1:
        level = level.reshape(-1, 2).sum(axis=1)
        levels.append(level)
    return tree.replace(nodes=jnp.asarray(np.concatenate(levels[::-1])))


def _thunk(run: Callable[..., Any], state: Any) -> Callable[[], jax.Array]:
    """Carries the donated state from call to call; every call has its own key."""
    held, calls = [state], 0

    def thunk() -> jax.Array:
        nonlocal calls
        calls += 1
        held[0], seen = run(held[0], jax.random.key(calls))
        return seen

    return thunk


def drift(peer: Any, capacity: int) -> tuple[float, float]:
    """Root over true sum, less 1, of (ours, flashbax's)."""
    order = np.random.default_rng(0).permutation(capacity).astype(np.int32).reshape(-1, 256)
    ours, theirs = _sumtree.init(capacity), peer.init(capacity)
    set_ours = jax.jit(lambda t, i, v: _sumtree.set(t, i, v, capacity))
    set_theirs = jax.jit(peer.set_batch_scan)
    random = np.random.default_rng(1)
    for scale in (1e6, 1e-3):
        for index in order:
            value = (scale * (0.5 + random.random(256))).astype(np.float32)
            ours, theirs = set_ours(ours, index, value), set_theirs(theirs, index, value)
    true = float(np.sum(np.asarray(ours[:capacity]), dtype=np.float64))
    return float(_sumtree.root(ours)) / true - 1, float(theirs.nodes[0]) / true - 1


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for 10^4 and 10^6 (10^5 and 10^7 as well unless `quick`) and B = 32, 256, 4096."""
    peer = load_peer("flashbax.buffers.sum_tree")
    if isinstance(peer, Absent):
        return [absent_row(STEP, "all", peer), absent_row(DRIFT, "65,536 rows", peer)]
    rows = []
    for capacity in (10**4, 10**6) if quick else (10**4, 10**5, 10**6, 10**7):
        leaves = np.random.default_rng(0).random(capacity).astype(np.float32) + np.float32(0.1)
        target = ">= 0.8" if capacity <= 10**4 else ">= 1.0"
        for batch in (32, 256, 4096):
            steps = max(16, int((1e4 if quick else 1e5) / batch**0.8))
            timings = interleave(
                {
                    "ours": ours(capacity, batch, steps, leaves),
                    "flashbax": flashbax(peer, capacity, batch, steps, leaves),
                },
                rounds=7 if quick else 15,
            )
            mine, theirs = timings["ours"], timings["flashbax"]
            rows.append(
                row(
                    STEP,
                    f"N={capacity:,} B={batch}",
                    ours=spread([t / steps for t in mine]),
                    peer=spread([t / steps for t in theirs]),
                    ratio=ratio(theirs, mine),
                    target=target,
                )
            )
    mine, theirs = drift(peer, 65_536)
    rows.append(row(DRIFT, "65,536 rows", ours=f"{mine:.1e}", peer=f"{theirs:.1e}"))
    return rows


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))

"""Are priorities as fast as they can be, in a scan and one call at a time?

In a scan (STEP): stratified draws, importance weights `(n P)^-beta` over the batch's largest, new priorities
`(|p| + eps)^alpha`, the running maximum, the tree's update; on scalars alone, no rows. Both sides do the same work with
the same `jnp` arithmetic around their trees. Ours refuses values that are not finite one by one; flashbax's tree is told
to take a small priority instead, without which its own draws of zero leaves (from drift) turn it into NaN within seconds
at ten million rows, and a dead tree is fast. flashbax runs the update that its buffers choose for the device, and its tree is
called directly, so none of its buffer's overhead counts. GROWTH is the exponent of the same times from 10^4 to 10^7 rows; on
CPUs also that of a program that reads and writes as many random places of the tree and computes nothing.

One call at a time (DISPATCHED): one jitted call for draw and weights, one for priorities, maximum and update, against
the same two of flashbax, against torchrl's two C++ trees (sum and min, weights by torch as its sampler computes them; no
Python of its buffer; where JAX runs on a GPU also against its two trees there) and against cpprb's `sample` and
`update_priorities` (which bring a row of one float along).
WRITE is `add` of one row and `extend` of 256 rows of one float into a full prioritized buffer, jitted and donated, against
flashbax's prioritised flat buffer likewise: everything a user's call does. `peers_*` ask the same of whole buffers.

DRIFT shows what flashbax's running differences cost: the root against its leaves after all priorities have shrunk from
1e6 to 1e-3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fbuf
from benchmarks._harness import Absent, absent_row, exponent, interleave, load_peer, ratio, row, spread
from fbuf._algorithms import sum_tree

STEP = "Prioritized step in a scan: time of flashbax's tree over ours"
GROWTH = "Prioritized step in a scan, 10^4 to {:,} rows: growth exponent"
DISPATCHED = "Prioritized step on {:,} rows, two dispatched calls: time of the peer's trees over ours"
WRITE = "Writing to a full prioritized buffer of {:,} rows, one dispatched call: time of flashbax's over ours"
DRIFT = "Relative error of the root after priorities shrink from 1e6 to 1e-3"

GROWING = (("ours", "ours", "<= 0.12"), ("memory", "reads and writes alone", None), ("flashbax", "flashbax", None))
ALPHA, BETA, EPS = np.float32(0.6), np.float32(0.4), np.float32(1e-6)


def _weight(leaf: jax.Array, total: jax.Array, capacity: int) -> jax.Array:
    weight = (np.float32(capacity) * (leaf / total)) ** -BETA
    return weight / jnp.max(weight)


def _finite(leaf: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(leaf), leaf, EPS)


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
    """A thunk that runs `steps` steps with `fbuf._algorithms.sum_tree`."""

    def step(carry: Any, item: Any) -> Any:
        ((tree, largest), seen), (key, now) = carry, item
        index, leaf = sum_tree.draw(tree, key, batch, capacity, stratified=True)
        weight = _weight(leaf, sum_tree.root(tree), capacity)
        priority = jnp.abs(_error(index, now) * weight)
        finite = jnp.isfinite(priority)
        priority = jnp.where(finite, priority, np.float32(0))
        new = (priority + EPS) ** ALPHA
        largest = jnp.maximum(largest, jnp.max(priority))
        tree = sum_tree.set(tree, jnp.where(finite, index, np.int32(capacity)), new, capacity)
        return ((tree, largest), seen + jnp.sum(weight)), None

    state = (sum_tree.rebuild(jnp.asarray(leaves)), jnp.ones((), jnp.float32))
    return _thunk(_scanned(step, steps), state)


def memory(capacity: int, batch: int, steps: int, leaves: np.ndarray) -> Callable[[], jax.Array]:
    """One read a level for each query, then one write a level that `sum_tree.set` writes index by index."""
    counts, offsets = sum_tree.layout(capacity)
    shifts = [np.uint32(3 * level) for level in range(len(counts) - 1)]
    starts = [np.uint32(offset) for offset in offsets]
    written = [level for level in range(len(shifts)) if level == 0 or counts[level] > batch]

    def step(carry: Any, item: Any) -> Any:
        (tree, seen), (_, now) = carry, item
        stratum = lax.iota(np.int32, batch)
        place = stratum.astype(jnp.float32) + (_error(stratum, now) + np.float32(2)) / np.float32(4)
        index = jnp.minimum(place * np.float32(capacity / batch), np.float32(capacity - 1)).astype(jnp.uint32)
        value = jnp.zeros((batch,), jnp.float32)
        for level in reversed(range(len(shifts))):  # each index depends on the value above it
            node = jnp.where(value < 0, np.uint32(0), index >> shifts[level])
            value = tree.at[node + starts[level]].get(mode="promise_in_bounds")

        def write(tree: jax.Array, item: Any) -> tuple[jax.Array, None]:
            index, value = item
            for level in written:
                tree = lax.dynamic_update_slice(tree, value[None], ((index >> shifts[level]) + starts[level],))
            return tree, None

        tree, _ = lax.scan(write, tree, (index, value))
        return (tree, seen + value[0]), None

    return _thunk(_scanned(step, steps), sum_tree.rebuild(jnp.asarray(leaves)))


def flashbax(peer: Any, capacity: int, batch: int, steps: int, leaves: np.ndarray) -> Callable[[], jax.Array]:
    """The same with `flashbax.buffers.sum_tree`, which keeps the running maximum itself."""

    def step(carry: Any, item: Any) -> Any:
        (tree, seen), (key, now) = carry, item
        index = peer.stratified_sample(tree, batch, key)
        weight = _weight(peer.get_batch(tree, index), tree.nodes[0], capacity)
        new = _finite((jnp.abs(_error(index, now) * weight) + EPS) ** ALPHA)
        tree = _flashbax_set(peer)(tree, index, new)
        return (tree, seen + jnp.sum(weight)), None

    return _thunk(_scanned(step, steps), _flashbax_tree(peer, leaves))


def _flashbax_set(peer: Any) -> Callable[..., Any]:
    """Its update for the device that runs here, as its buffers choose it."""
    return peer.set_batch_scan if jax.default_backend() == "cpu" else peer.set_batch_bincount


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
    ours, theirs = sum_tree.init(capacity), peer.init(capacity)
    set_ours = jax.jit(lambda t, i, v: sum_tree.set(t, i, v, capacity))
    set_theirs = jax.jit(_flashbax_set(peer))
    random = np.random.default_rng(1)
    for scale in (1e6, 1e-3):
        for index in order:
            value = (scale * (0.5 + random.random(256))).astype(np.float32)
            ours, theirs = set_ours(ours, index, value), set_theirs(theirs, index, value)
    true = float(np.sum(np.asarray(ours[:capacity]), dtype=np.float64))
    return float(sum_tree.root(ours)) / true - 1, float(theirs.nodes[0]) / true - 1


# ------------------------------------------------------------------------------- one call at a time


def _keys() -> Callable[[], jax.Array]:
    """A new key a call, made beforehand: neither side pays for splitting."""
    keys, calls = list(jax.random.split(jax.random.key(0), 64)), 0

    def key() -> jax.Array:
        nonlocal calls
        calls += 1
        return keys[calls % len(keys)]

    return key


def dispatched_ours(capacity: int, batch: int, leaves: np.ndarray, error: np.ndarray) -> Callable[[], Any]:
    """Draw and weights; then priorities, maximum and update."""

    @jax.jit
    def sample(tree: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        index, leaf = sum_tree.draw(tree, key, batch, capacity, stratified=True)
        return index, _weight(leaf, sum_tree.root(tree), capacity)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(tree: jax.Array, largest: jax.Array, index: jax.Array, error: jax.Array) -> tuple[jax.Array, jax.Array]:
        finite = jnp.isfinite(error)
        priority = jnp.where(finite, jnp.abs(error), np.float32(0))
        index = jnp.where(finite, index, np.int32(capacity))
        tree = sum_tree.set(tree, index, (priority + EPS) ** ALPHA, capacity)
        return tree, jnp.maximum(largest, jnp.max(priority))

    held, key = [(sum_tree.rebuild(jnp.asarray(leaves)), jnp.ones((), jnp.float32))], _keys()

    def thunk() -> Any:
        index, weight = sample(held[0][0], key())
        held[0] = update(*held[0], index, error)
        return held[0], weight

    return thunk


def dispatched_flashbax(
    peer: Any, capacity: int, batch: int, leaves: np.ndarray, error: np.ndarray
) -> Callable[[], Any]:
    """The same two calls with its tree."""

    @jax.jit
    def sample(tree: Any, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = peer.stratified_sample(tree, batch, key)
        return index, _weight(peer.get_batch(tree, index), tree.nodes[0], capacity)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(tree: Any, index: jax.Array, error: jax.Array) -> Any:
        return _flashbax_set(peer)(tree, index, _finite((jnp.abs(error) + EPS) ** ALPHA))

    held, key = [_flashbax_tree(peer, leaves)], _keys()

    def thunk() -> Any:
        index, weight = sample(held[0], key())
        held[0] = update(held[0], index, error)
        return held[0].nodes, weight

    return thunk


def dispatched_torchrl(
    peer: Any, capacity: int, batch: int, leaves: np.ndarray, error: np.ndarray
) -> Callable[[], Any]:
    """Its sum and min trees, called as its sampler calls them."""
    import torch

    every, tensor = torch.arange(capacity), torch.from_numpy(error)
    total, least = peer.SumSegmentTreeFp32(capacity), peer.MinSegmentTreeFp32(capacity)
    total[every], least[every] = torch.from_numpy(leaves), torch.from_numpy(leaves)

    def thunk() -> Any:
        mass, low = total.query(0, capacity), least.query(0, capacity)
        index = torch.as_tensor(total.scan_lower_bound(np.random.uniform(0.0, mass, size=batch)))
        index.clamp_max_(capacity - 1)
        weight = torch.pow(torch.as_tensor(total[index]) / low, -float(BETA))
        new = torch.pow(tensor.abs() + float(EPS), float(ALPHA))
        total[index], least[index] = new, new
        return weight, new.max()

    return thunk


def dispatched_torchrl_cuda(
    peer: Any, capacity: int, batch: int, leaves: np.ndarray, error: np.ndarray
) -> Callable[[], Any]:
    """Its trees for a GPU, called as its sampler calls them there."""
    import torch

    device = torch.device("cuda")
    every, tensor = torch.arange(capacity, device=device), torch.from_numpy(error).to(device)
    low, high = torch.zeros((), dtype=torch.long, device=device), torch.full((), capacity, device=device)
    total, least = peer.CudaSumSegmentTreeFp32(capacity, device), peer.CudaMinSegmentTreeFp32(capacity, device)
    total[every] = least[every] = torch.from_numpy(leaves).to(device)

    def thunk() -> Any:
        mass, smallest = total.query(low, high), least.query(low, high)
        index = total.scan_lower_bound(torch.rand(batch, device=device) * mass).clamp_max_(capacity - 1)
        weight = torch.pow(total[index] / smallest, -float(BETA))
        new = torch.pow(tensor.abs() + float(EPS), float(ALPHA))
        total[index], least[index] = new, new
        largest = new.max()
        torch.cuda.synchronize()
        return weight, largest

    return thunk


def dispatched_cpprb(peer: Any, capacity: int, batch: int, leaves: np.ndarray, error: np.ndarray) -> Callable[[], Any]:
    """Its prioritized buffer of rows of one float."""
    buffer = peer.PrioritizedReplayBuffer(capacity, {"x": {}}, alpha=float(ALPHA), eps=float(EPS))
    buffer.add(x=leaves, priorities=leaves)

    def thunk() -> Any:
        drawn = buffer.sample(batch, beta=float(BETA))
        buffer.update_priorities(drawn["indexes"], np.abs(error))
        return drawn["weights"]

    return thunk


def load_trees(without_torchrl: str = "") -> dict[str, Any]:
    """The peers of DISPATCHED, each a module or `Absent`: torchrl's if there is a reason to do without them."""
    names = {"flashbax": "flashbax.buffers.sum_tree", "torchrl": "torchrl._torchrl", "cpprb": "cpprb"}
    absent = {"torchrl": Absent("torchrl", without_torchrl)} if without_torchrl else {}
    trees = {name: absent.get(name) or load_peer(module) for name, module in names.items()}
    if jax.default_backend() != "cpu":
        trees[ON_GPU] = trees["torchrl"]
        if not isinstance(trees[ON_GPU], Absent) and not hasattr(trees[ON_GPU], "CudaSumSegmentTreeFp32"):
            reason = "torchrl was built without trees for it: torch sees no GPU, or there is no nvcc"
            trees[ON_GPU] = Absent(ON_GPU, reason)
    return trees


ON_GPU = "torchrl on the GPU"
DISPATCH = {
    "flashbax": dispatched_flashbax,
    "torchrl": dispatched_torchrl,
    ON_GPU: dispatched_torchrl_cuda,
    "cpprb": dispatched_cpprb,
}


def dispatched(capacity: int, batch: int, rounds: int, trees: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each peer."""
    random = np.random.default_rng(0)
    leaves = random.random(capacity, np.float32) + np.float32(0.1)
    error = random.standard_normal(batch, np.float32)
    here = {name: peer for name, peer in trees.items() if not isinstance(peer, Absent)}
    thunks = {"ours": dispatched_ours(capacity, batch, leaves, error)}
    thunks |= {name: DISPATCH[name](peer, capacity, batch, leaves, error) for name, peer in here.items()}
    timings, report = interleave(thunks, rounds=rounds, calls=8 if batch <= 256 else 2), []
    for name, peer in trees.items():
        question, case = DISPATCHED.format(capacity), f"B={batch} against {name}"
        target = ">= 1.0" if name in ("torchrl", "cpprb") and batch in (256, 4096) else None
        if name == ON_GPU and batch == 65_536:
            target = ">= 5.0"
        if isinstance(peer, Absent):
            report.append(absent_row(question, case, peer, target))
            continue
        mine, theirs = timings["ours"], timings[name]
        report.append(
            row(question, case, ours=spread(mine), peer=spread(theirs), ratio=ratio(theirs, mine), target=target)
        )
    return report


# -------------------------------------------------------------------------------------------- writing

_add = jax.jit(fbuf.Buffer.add, static_argnums=0, donate_argnums=1)
_extend = jax.jit(fbuf.Buffer.extend, static_argnums=0, donate_argnums=1)


def _carried(run: Callable[..., Any], state: Any, rows: Any) -> Callable[[], Any]:
    held = [state]

    def thunk() -> Any:
        held[0] = run(held[0], rows)
        return held[0]

    return thunk


def write_ours(capacity: int, number: int) -> Callable[[], Any]:
    """`add` of one row or `extend` of more, into a full buffer."""
    buffer = fbuf.Buffer(capacity, sampler=fbuf.samplers.Prioritized(alpha=float(ALPHA)))
    state = buffer.extend(buffer.init({"x": np.float32(0)}), {"x": jnp.zeros((capacity,), jnp.float32)})
    if number == 1:
        return _carried(functools.partial(_add, buffer), state, {"x": jnp.float32(1)})
    return _carried(functools.partial(_extend, buffer), state, {"x": jnp.ones((number,), jnp.float32)})


def write_flashbax(peer: Any, capacity: int, number: int) -> Callable[[], Any]:
    """The same with its prioritised flat buffer (whose items are pairs of neighbours)."""
    sizes = {"max_length": capacity, "min_length": 1, "sample_batch_size": 1, "priority_exponent": float(ALPHA)}
    buffer = peer.make_prioritised_flat_buffer(**sizes, add_sequences=number > 1)
    state = jax.tree.map(lambda x: jnp.array(x, copy=True), buffer.init({"x": jnp.zeros((), jnp.float32)}))
    state = state.replace(is_full=jnp.array(True))  # what a full one does; filling ten million rows takes minutes
    rows = {"x": jnp.float32(1) if number == 1 else jnp.ones((number,), jnp.float32)}
    return _carried(jax.jit(buffer.add, donate_argnums=0), state, rows)


def writes(capacity: int, rounds: int, peer: Any) -> list[dict[str, Any]]:
    """Rows for one row and for 256."""
    report, question = [], WRITE.format(capacity)
    for number, case in ((1, "add(1)"), (256, "extend(256)")):
        if isinstance(peer, Absent):
            report.append(absent_row(question, case, peer, ">= 2.0"))
            continue
        thunks = {"ours": write_ours(capacity, number), "flashbax": write_flashbax(peer, capacity, number)}
        timings = interleave(thunks, rounds=rounds, calls=16)
        mine, theirs = timings["ours"], timings["flashbax"]
        report.append(
            row(question, case, ours=spread(mine), peer=spread(theirs), ratio=ratio(theirs, mine), target=">= 2.0")
        )
    return report


# --------------------------------------------------------------------------------------------- report


def scanned(sizes: Sequence[int], batch: int, rounds: int, work: float, peer: Any) -> list[dict[str, Any]]:
    """Rows of STEP for each size, and of GROWTH for both sides; all sizes in turn."""
    thunks, steps = {}, max(8, int(work / batch**0.8))
    for capacity in sizes:
        leaves = np.random.default_rng(0).random(capacity).astype(np.float32) + np.float32(0.1)
        thunks[f"ours {capacity}"] = ours(capacity, batch, steps, leaves)
        if len(sizes) > 1 and jax.default_backend() == "cpu":
            thunks[f"memory {capacity}"] = memory(capacity, batch, steps, leaves)
        if not isinstance(peer, Absent):
            thunks[f"flashbax {capacity}"] = flashbax(peer, capacity, batch, steps, leaves)
    timings = {name: [t / steps for t in times] for name, times in interleave(thunks, rounds=rounds).items()}
    report = []
    for capacity in sizes:
        case, target = f"N={capacity:,} B={batch}", ">= 1.0" if capacity <= 10**4 else ">= 2.0"
        if capacity == 10**6 and batch == 65_536 and jax.default_backend() != "cpu":
            target = ">= 5.0"
        if isinstance(peer, Absent):
            report.append(absent_row(STEP, case, peer, target))
            continue
        mine, theirs = timings[f"ours {capacity}"], timings[f"flashbax {capacity}"]
        report.append(row(STEP, case, ours=spread(mine), peer=spread(theirs), ratio=ratio(theirs, mine), target=target))
    for name, side, target in GROWING:
        times = {n: timings[f"{name} {n}"] for n in sizes if f"{name} {n}" in timings}
        if len(times) > 1:
            question = GROWTH.format(sizes[-1])
            report.append(row(question, f"{side}, B={batch}", ratio=exponent(times), target=target))
    return report


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for 10^4 to 10^7 and B = 32, 256, 4096 and 65,536 (`quick`: 10^4 and 10^5, and B = 32 and 4096)."""
    trees = load_trees()
    peer, rounds = trees["flashbax"], 2 if quick else 15
    sizes = (10**4, 10**5) if quick else (10**4, 10**5, 10**6, 10**7)
    batches = (32, 4096) if quick else (32, 256, 4096, 65_536)
    report = [r for batch in batches for r in scanned(sizes, batch, rounds, 1e4 if quick else 5e4, peer)]
    report.sort(key=lambda r: r["question"] != STEP)  # stable: first one table, then the other
    for batch in batches if ON_GPU in trees else batches[:3]:
        report += dispatched(min(10**6, sizes[-1]), batch, 2 * rounds, trees)
    report += writes(min(10**6, sizes[-1]), 2 * rounds, load_peer("flashbax"))
    if isinstance(peer, Absent):
        return [*report, absent_row(DRIFT, "65,536 rows", peer)]
    mine, theirs = drift(peer, 65_536)
    return [*report, row(DRIFT, "65,536 rows", ours=f"{mine:.1e}", peer=f"{theirs:.1e}")]


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))

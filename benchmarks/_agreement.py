"""Do an accelerator's batches equal the CPU's? Both run the same programs on the same rows with the same keys.

Draws without powers are equal bit for bit, and so are batches from every storage. Priorities are powers, whose last bits
differ between devices; so prioritized samplers start from the CPU's state. Their slots are then equal, but where a query is
within `NEAR` ulp of the boundary between two leaves, and their weights are within 4 ulp.
"""

from __future__ import annotations

import itertools
import os
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from benchmarks._harness import row
from fbuf._algorithms import sum_tree
from fbuf._host.priorities import Layout, Tree
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Compressed, Deduplicated, Device
from fbuf.views import Episode, Hindsight, Row, Sequence, Transition

EQUAL = "The same batches as on the CPU: share of leaves equal bit for bit"
SLOTS = "Slots from the CPU's priorities: share equal to the CPU's"
WEIGHTS = "Weights from the CPU's priorities: ulp from the CPU's"
TREE = "Draws from the CPU's tree: slots that differ although no boundary is near"
NEAR = 2  # ulp
LANES, STEPS, CALLS, BATCH = 4, 32, 3, 64  # three calls write over the oldest rows
CAPACITY = 2 * LANES * STEPS


def _missed(achieved: jax.Array, goal: jax.Array) -> jax.Array:
    return -(achieved != goal).astype(jnp.float32)


ENDS = {"autoreset": "same_step"}
STACKS = Transition(n_step=3, stack=4, **ENDS)
EXACT: dict[str, dict[str, Any]] = {
    "Device": {"view": STACKS},
    "Deduplicated": {"view": STACKS, "storage": Deduplicated(keys=("obs",), blocks=2**14)},
    "Compressed": {"view": STACKS, "storage": Compressed(keys=("obs",))},
    "Uniform(over='episodes')": {"sampler": Uniform(over="episodes")},
    "Epoch": {"sampler": Epoch()},
    "Consume": {"sampler": Consume(2)},
    "Consume(order='fifo')": {"sampler": Consume(order="fifo")},
    "Staleness": {"sampler": Staleness(STEPS)},
    "Row": {"view": Row()},
    "Sequence": {"view": Sequence(8, **ENDS)},
    "Episode": {"view": Episode(8, **ENDS)},
    "Hindsight": {"view": Hindsight(STACKS, _missed, goal="goal", achieved="reached")},
}
PRIORITIZED: dict[str, Any] = {
    "Prioritized": Prioritized(),
    "Prioritized(stratified=False, normalize='buffer')": Prioritized(stratified=False, normalize="buffer"),
    "Prioritized(replace=False)": Prioritized(replace=False),
    "Ranked": Ranked(),
}
QUICK = ("Device", "Deduplicated", "Compressed", "Epoch", "Prioritized", "Ranked")


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Rows for each storage, sampler and view (`quick`: some), then for a tree of 10^6 leaves.

    Nearly all of the time is XLA's, so cases run in threads; one that fails is a row.
    """
    devices = jax.devices()[0], jax.devices("cpu")[0]
    tree = (10**4, 2**10) if quick else (10**6, 2**16)
    cases: dict[str, Callable[[], list[dict[str, Any]]]] = {
        **{name: partial(_exact, name, parts, *devices) for name, parts in EXACT.items()},
        **{name: partial(_prioritized, name, sampler, *devices) for name, sampler in PRIORITIZED.items()},
    }
    if quick:
        cases = {name: cases[name] for name in QUICK}
    cases["tree"] = partial(_tree, *tree, *devices)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for case, future in [(case, pool.submit(run)) for case, run in cases.items()]:
            try:
                yield from future.result()
            except Exception as error:
                traceback.print_exc()
                failure = f"failed: {type(error).__name__}: {error}"[:500]
                yield row(EQUAL, case, ratio=0.0, target=">= 1", note=failure)


def _exact(name: str, parts: dict[str, Any], accelerator: Any, cpu: Any) -> list[dict[str, Any]]:
    here, there = batches(parts, accelerator), batches(parts, cpu)
    unequal = differences(here, there)
    share = 1 - len(unequal) / len(jax.tree.leaves(there))
    note = "; ".join(f"{leaf}: {how}" for leaf, how in unequal.items())
    return [row(EQUAL, name, ratio=share, target=">= 1", note=note)]


def played(call: int) -> dict[str, np.ndarray]:
    """Rows of one call: leaves `[STEPS, LANES, ...]`, frames of a few shades in blocks, so that they compress."""
    random, shape = np.random.default_rng(call), (STEPS, LANES)
    return {
        "obs": np.kron(random.integers(0, 4, (*shape, 7, 7), np.uint8), np.ones((12, 12), np.uint8)),
        "action": random.integers(0, 9, shape).astype(np.int32),
        "goal": random.integers(0, 9, shape).astype(np.int32),
        "reached": random.integers(0, 9, shape).astype(np.int32),
        "reward": random.standard_normal(shape, np.float32),
        "terminated": random.random(shape) < 0.05,
        "truncated": random.random(shape) < 0.05,
    }


def _make(parts: dict[str, Any]) -> fbuf.Buffer:
    settings = {"storage": Device(), "sampler": Uniform(), "view": STACKS, **parts}
    return fbuf.Buffer(CAPACITY, lanes=LANES, episode_end=("terminated", "truncated"), **settings)


def batches(parts: dict[str, Any], device: Any) -> list[Any]:
    """The batches of some steps on a device, each drawn after rows were written."""
    buffer = _make(parts)
    step = jax.jit(lambda s, r, k: buffer.sample(buffer.extend(s, r), k, BATCH), donate_argnums=0)
    drawn = []
    with jax.default_device(device):
        state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], played(0)))
        for call in range(CALLS):
            state, batch = step(
                state, jax.device_put(played(call), device), jax.device_put(jax.random.key(call), device)
            )
            drawn.append(jax.device_get(batch))
    return drawn


def differences(ours: Any, theirs: Any) -> dict[str, str]:
    """How leaves differ, by name: those that are not equal bit for bit."""
    found = {}
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.tobytes() != b.tobytes():
            far = f", by up to {ulps(a, b).max()} ulp" if a.dtype == b.dtype == np.float32 else ""
            found[jax.tree_util.keystr(path)] = f"{np.sum(a != b)} of {a.size} differ{far}"
    return found


def ulps(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """How many float32 numbers apart two arrays are, elementwise."""
    steps = []
    for x in (a, b):
        bits = np.ascontiguousarray(x, np.float32).view(np.int32).astype(np.int64)
        steps.append(np.where(bits < 0, -(bits & 0x7FFFFFFF), bits))
    return np.abs(steps[0] - steps[1])


def _prioritized(name: str, sampler: Any, accelerator: Any, cpu: Any) -> list[dict[str, Any]]:
    buffer = _make({"sampler": sampler, "view": Row()})
    with jax.default_device(cpu):
        state = buffer.init(jax.tree.map(lambda leaf: leaf[0, 0], played(0)))
        for call in range(CALLS):
            error = np.random.default_rng(call).standard_normal((STEPS, LANES), np.float32)
            state = jax.jit(buffer.extend)(state, played(call), priority=error)
    draw = jax.jit(lambda s, k: buffer.peek(s, k, BATCH))
    here, there = (
        jax.device_get([draw(jax.device_put(state, device), jax.device_put(key, device)) for key in _keys()])
        for device in (accelerator, cpu)
    )
    slots = [np.concatenate([batch.index.slot for batch in side]) for side in (here, there)]
    weights = [np.concatenate([batch.weight for batch in side]) for side in (here, there)]
    same = slots[0] == slots[1]
    # Few queries: none is expected near a boundary. `_tree` has many, and looks.
    far = int(ulps(weights[0][same], weights[1][same]).max(initial=0))
    return [
        row(SLOTS, name, ratio=float(same.mean()), target=">= 1", note=f"{same.size} slots"),
        row(WEIGHTS, name, ratio=far, target="<= 4"),
    ]


def _keys() -> list[jax.Array]:
    return list(jax.random.split(jax.random.key(0), 4))


def _tree(capacity: int, batch: int, accelerator: Any, cpu: Any) -> list[dict[str, Any]]:
    leaves = np.random.default_rng(0).random(capacity, np.float32) ** 4  # a hundredth of them below 1e-8
    with jax.default_device(cpu):
        tree = sum_tree.rebuild(jax.device_put(leaves, cpu))
    drawn, key = [], jax.random.key(1)
    for device in (accelerator, cpu):
        draw = jax.jit(lambda t, k: sum_tree.draw(t, k, batch, capacity, stratified=True)[0])
        drawn.append(np.asarray(draw(jax.device_put(tree, device), jax.device_put(key, device))))
    with jax.default_device(cpu):
        top, bottom = map(np.asarray, sum_tree.uniforms(jax.device_put(key, cpu), batch, stratified=True))
    unlike = np.flatnonzero(drawn[0] != drawn[1])
    far = unexplained(leaves, drawn[0][unlike], top[unlike], bottom[unlike])
    case = f"{capacity:,} leaves, {batch:,} draws"
    return [row(TREE, case, ours=float(unlike.size), ratio=far, target="<= 0", note="ours: slots that differ")]


def unexplained(leaves: np.ndarray, slots: np.ndarray, top: np.ndarray, bottom: np.ndarray) -> int:
    """How many slots are not drawn by any query within `NEAR` ulp of theirs, on the CPU.

    Args:
      leaves: float32[C].
      slots: int32[D], drawn elsewhere.
      top, bottom: float32[D], the queries that drew them: the uniforms of both halves of the descent.
    """
    tree = host_tree(leaves)
    near = np.zeros(slots.shape, np.bool_)
    for up, down in itertools.product(range(-NEAR, NEAR + 1), repeat=2):
        near |= tree.draw(_moved(top, up), _moved(bottom, down)) == slots
    return int(np.sum(~near))


def host_tree(leaves: np.ndarray) -> Tree:
    """The tree of float32[C] in NumPy."""
    tree = Tree(Layout(*sum_tree.layout(len(leaves)), sum_tree.middle(len(leaves))), False)
    tree.fill(leaves)
    return tree


def _moved(uniform: np.ndarray, steps: int) -> np.ndarray:
    """The float32 number so many ulp further, within [0, 1)."""
    bits = uniform.view(np.int32).astype(np.int64) + steps
    return np.clip(bits, 0, np.float32(1).view(np.int32) - 1).astype(np.int32).view(np.float32)

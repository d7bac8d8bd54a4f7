"""`storages.Deduplicated` beside a `Device` of the same rows: full tables, retired rows and batches."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Staleness, Uniform
from fbuf.storages import Deduplicated, Device
from fbuf.views import Row, Transition
from tests.support.deduplicated import KEY, Fields, Trial
from tests.support.store import same as same_bits
from tests.support.trees import row_with


def numbered(number: np.ndarray) -> np.ndarray:
    """Frames uint8[..., 8, 8] of four blocks, two that no other has; the first word is the number."""
    rng = np.random.default_rng(number.reshape(-1)[0])
    frames = np.zeros((*number.shape, 8, 8), np.uint8)
    frames[..., :4, :] = rng.integers(0, 256, (*number.shape, 4, 8), np.uint8)
    frames[..., 0, :4] = number.astype(np.int32)[..., None].view(np.uint8)
    frames[..., 4:, :4] = (number % 7)[..., None, None]
    return frames


def numbers_in(frames: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(frames[..., 0, :4]).view(np.int32)[..., 0]


PLAYED = {name: (leaf.shape, leaf.dtype) for name, leaf in row_with(np.zeros((8, 8), np.uint8)).items()}
TRANSITION = Transition(n_step=2, stack=4, autoreset="same_step")
SAMPLERS = {
    "uniform": Uniform(),
    "prioritized": Prioritized(normalize="buffer"),
    "batch": Prioritized(),
    "none": Prioritized(normalize=None, stratified=False),
}
OTHERS = {"consume": Consume(), "epoch": Epoch(), "staleness": Staleness(500)}
VIEWS = {"row": Row(), "transition": TRANSITION}


def played(rng: np.random.Generator, first: int, axes: tuple[int, int]) -> Fields:
    number = np.arange(first, first + axes[0] * axes[1]).reshape(axes)
    return {
        "obs": numbered(number),
        "action": number.astype(np.int32),
        "reward": rng.normal(size=axes).astype(np.float32),
        "terminated": rng.random(axes) < 0.1,
        "truncated": rng.random(axes) < 0.1,
    }


def full_trial(sampler: str, view: str, on_full: str = "refuse") -> tuple[Trial, list[Any]]:
    """A buffer twice as large as its table has room for, and all it was given."""
    storage = Deduplicated(keys=("obs",), block=(4, 4), blocks=96, on_full=on_full)
    buffer = fbuf.Buffer(80, storage=storage, sampler=(SAMPLERS | OTHERS)[sampler], view=VIEWS[view], lanes=2)
    trial, rng, history = Trial(buffer, PLAYED), np.random.default_rng(1), []
    for _ in range(14):
        rows = played(rng, trial.next, (5, 2))
        priority = rng.exponential(size=(5, 2)).astype(np.float32) if buffer.sampler.prioritized else None
        history.append((rows | {"number": rows["action"]}, priority))
        trial.extend(rows, None, priority)
    trial.compare()
    return trial, history


def device_twin(trial: Trial, history: list[Any], capacity: int = 80) -> tuple[fbuf.Buffer, Any]:
    twin = dataclasses.replace(trial.buffer, storage=Device(), capacity=capacity)
    state = twin.init({name: x[0, 0] for name, x in history[0][0].items()})
    extend = jax.jit(lambda s, rows, priority: twin.extend(s, rows, priority=priority))
    for rows, priority in history:
        state = extend(state, rows, priority)
    return twin, state


def check_masked_draws(sampler: str, view: str) -> None:
    """One key, one batch: `Device` says which rows a draw reads, and so which must be masked."""
    trial, history = full_trial(sampler, view)
    buffer = trial.buffer
    assert len(trial.refused) > 20
    twin, state = device_twin(trial, history)
    before = int(buffer.stats(trial.state)["draws_refused"])
    after, batch = buffer.sample(trial.state, KEY, 256)
    got, want = jax.device_get(batch), jax.device_get(twin.peek(state, KEY, 256))
    read = numbers_in(want.data["obs"]).reshape(256, -1)
    if view == "transition":
        read = np.concatenate([read, numbers_in(want.data["next_obs"]).reshape(256, -1)], axis=1)
    masked = np.isin(read, list(trial.refused)).any(axis=1)
    assert 0 < masked.sum() < 256
    np.testing.assert_array_equal(got.mask, ~masked)
    assert int(buffer.stats(after)["draws_refused"]) - before == masked.sum()
    parts = (jax.tree.leaves((b.data, b.probability, b.weight, b.index.generation)) for b in (got, want))
    for a, b in zip(*parts, strict=True):
        assert same_bits(a[~masked], b[~masked])
        assert not a[masked].any()
    np.testing.assert_array_equal(got.index.slot, np.where(masked, buffer.capacity, want.index.slot))
    # Indices of masked rows are skipped and not counted as refused.
    if buffer.sampler.prioritized:
        stats = buffer.stats(buffer.update_priority(after, batch.index, np.ones(256, np.float32)))
        assert not int(stats["refused_stale"]) and not int(stats["refused_out_of_range"])


def check_retirement(sampler: str, view: str) -> None:
    """Rows, anchors, priorities and batches are those of a `Device` buffer with room for just these rows."""
    trial, history = full_trial(sampler, view, "retire")
    buffer, held = trial.buffer, trial.sizes()
    assert (held == held[0]).all() and buffer.view.rule.rows <= held[0] < trial.length
    assert trial.counters()[1] > 0 and not trial.refused
    twin, state = device_twin(trial, history, int(held.sum()))
    ours, theirs = jax.device_get(buffer.rows(trial.state)), jax.device_get(twin.rows(state))
    for a, b in zip(jax.tree.leaves(ours.data), jax.tree.leaves(theirs.data), strict=True):
        assert same_bits(a[: held[0]], b)
    stats, expected = jax.device_get((buffer.stats(trial.state), twin.stats(state)))
    assert all(stats[name] == expected[name] for name in ("size", "anchors"))
    found, once = [], sampler in ("consume", "epoch")
    for batch in (buffer.peek(trial.state, KEY, 1024), twin.peek(state, KEY, 1024)):  # every anchor, many times over
        batch, there = jax.device_get(batch), np.flatnonzero(batch.mask)
        order = there[np.unique(batch.data["number"][there], return_index=True)[1]]
        assert len(order) == stats["anchors"] > 3 and len(there) == (len(order) if once else 1024)
        found.append(jax.tree.map(lambda x, at=order: x[at], (batch.data, batch.probability)))
    jax.tree.map(np.testing.assert_array_equal, found[0][0], found[1][0])
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-5)


OBS = {"obs": jax.ShapeDtypeStruct((16, 16), np.uint8)}


def noise_rows(number: int, *lead: int, seed: int = 0) -> Fields:
    return {"obs": np.random.default_rng(seed).integers(0, 256, (number, *lead, 16, 16), dtype=np.uint8)}


def check_full_table(number: int, view: Any) -> None:
    """A table with room for all rows of the ring gives up none, however large a share of the ring a write is."""
    fields = {"reward": 0.0, "action": 0, "terminated": False, "truncated": False} if view != Row() else {}
    distinct = noise_rows(1)["obs"].nbytes // 64 * 300
    places = -(-int(distinct / 0.94) // 32) * 32
    buffer = fbuf.Buffer(300, view=view, storage=Deduplicated(keys=("obs",), block=(8, 8), blocks=places))
    extend = jax.jit(buffer.extend, donate_argnums=0)
    state = buffer.init(OBS | fields)
    rows = {name: np.full(number, value) for name, value in fields.items()}
    for i in range(max(12, 1200 // number)):
        state = extend(state, rows | noise_rows(number, seed=i))
    stats = buffer.stats(state)
    assert (int(stats["size"]), int(stats["retired_rows"]), int(stats["refused_rows"])) == (300, 0, 0)
    assert float(stats["blocks_load"]) > 0.9


FRAMES = 256
BATCH_BYTES = FRAMES * 84 * 84
SIZES = [(10**3, 2**14), (10**5, 2**18)]  # both large enough to look up 1,024 blocks at once


def shapes(tree: Any, *axes: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), tree)


def atari(capacity: int, blocks: int, **more: Any) -> tuple[fbuf.Buffer, Any, Any]:
    """A buffer of 84 by 84 frames, its state and 256 rows, as shapes."""
    buffer = fbuf.Buffer(capacity, storage=Deduplicated(keys=("obs",), blocks=blocks), **more)
    example = {"obs": jax.ShapeDtypeStruct((84, 84), jnp.uint8), "reward": jax.ShapeDtypeStruct((), jnp.float32)}
    return buffer, jax.eval_shape(buffer.init, example), shapes(example, FRAMES)

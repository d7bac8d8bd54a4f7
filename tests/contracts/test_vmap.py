"""`jax.vmap` of every method: three stacked states give what each gives alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from tests.support import combinations
from tests.support.trees import close

pytestmark = pytest.mark.more

STORAGES = {"device": fbuf.storages.Device(), "deduplicated": fbuf.storages.Deduplicated(keys=("obs",))}
SHARED = ("extend", "sample", "update_rows", "get", "rows", "stats", "clear")
"""Methods that both storages run. The others reach the storage by the same code, or not at all, and compile for seconds."""
NOT_TRACED = {"init", "resume", "flush", "plan", "summary", "nbytes", "grow", "replace"}
N = 12


def buffer_of(storage):
    sampler = fbuf.samplers.Prioritized(largest="held") if storage == "device" else fbuf.samplers.Uniform()
    return fbuf.Buffer(20, storage=STORAGES[storage], sampler=sampler)


def rows_of(seed, count=N):
    number = seed * 100 + jnp.arange(count)
    obs = jnp.broadcast_to((number % 256).astype(jnp.uint8)[:, None, None], (count, 8, 8))
    return {"obs": obs, "t": number}


def every_method(buffer, state, seed):
    """Call every traceable method on one state, or those that call the storage; return what each returned."""
    key = jax.random.fold_in(jax.random.key(0), seed)
    state = buffer.extend(state, rows_of(seed), priority=jnp.arange(N) + 1.0 if buffer.sampler.prioritized else None)
    one = jax.tree.map(lambda leaf: leaf[0], rows_of(seed + 1, 1))
    sampled, batch = buffer.sample(state, key, 4)
    called = {"extend": state, "sample": (sampled, batch), "rows": buffer.rows(state), "stats": buffer.stats(state)}
    called["update_rows"] = buffer.update_rows(sampled, batch.index, {"t": -jnp.arange(4)})
    called["get"] = (buffer.get(state, batch.index), buffer.get(state, jnp.arange(3)))
    called["clear"] = buffer.clear(state)
    if buffer.storage != STORAGES["device"]:
        return called
    windows = dataclasses.replace(buffer, view=fbuf.views.Sequence(3, episode_end=()))
    in_windows, annealed = buffer.convert(windows, state), buffer.set(state, alpha=0.3)
    called |= {name: getattr(buffer, name)(state) for name in ("can_sample", "can_add", "size")}
    called |= {"set": (annealed, buffer.set(annealed, rebuild=True)), "convert": in_windows}
    return called | {
        "add": buffer.add(state, one),
        "rows": (buffer.rows(state), buffer.rows(state, last=5)),
        "peek": buffer.peek(state, key, 4),
        "update_priority": buffer.update_priority(sampled, batch.index, jnp.arange(4.0)),
        "priorities": (buffer.priorities(state), buffer.priorities(state, batch.index)),
        "window_index": windows.window_index(in_windows, batch.index),
        "cut": windows.cut(in_windows),
    }


@pytest.mark.parametrize("storage", STORAGES)
def test_vmap_of_every_method(storage):
    buffer = buffer_of(storage)
    empty, seeds = buffer.init({"obs": np.zeros((8, 8), np.uint8), "t": 0}), jnp.arange(3)
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), empty)
    many = jax.jit(jax.vmap(lambda state, seed: every_method(buffer, state, seed)))(states, seeds)
    alone = jax.jit(lambda seed: every_method(buffer, empty, seed))
    for i in range(3):
        expected = alone(seeds[i])
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda leaf, i=i: leaf[i], many), expected)
    assert "drawn" not in {*dir(buffer), *dir(fbuf.Buffer)} and "geometry" not in dir(buffer)
    public = {n for n in dir(buffer) if callable(getattr(buffer, n)) and not n.startswith("_")}
    public -= NOT_TRACED | {f.name for f in dataclasses.fields(buffer)}
    assert set(many) == (public if storage == "device" else set(SHARED))


HERE = [s for s in combinations.SAMPLERS if "host" not in s]
VMAPPED = [(s, "Sequence('mask')", "Ring") for s in HERE]
VMAPPED += [("Prioritized", "Row", w) for w in combinations.UNORDERED_WRITERS]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("sampler", "view", "writer"), VMAPPED)
def test_vmapped_states_give_what_each_gives_alone_with_every_sampler(sampler, view, writer):
    buffer, rng = combinations.make("Device", sampler, view, writer), np.random.default_rng(0)

    def step(state, given):
        rows, mask, key = given
        state, batch = buffer.sample(buffer.extend(state, rows, mask=mask), key, combinations.BATCH)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, jnp.arange(1.0, combinations.BATCH + 1))
        return state, batch

    def run(given):
        return jax.lax.scan(step, buffer.init(combinations.EXAMPLE), given)

    rows = jax.tree.map(lambda x: x.reshape(3, 8, 5, *x.shape[1:]), combinations.rows_of(rng, 120))
    mask = rng.random(rows["action"].shape) < np.array([0.2, 0.6, 1.0])[:, None, None, None]
    given = rows, mask, jax.random.split(jax.random.key(0), (3, 8))
    many, alone = jax.jit(jax.vmap(run))(given), jax.jit(run)
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i], (many, given))
        close(one[0], alone(one[1]), rtol=1e-6)

"""Mixtures of sharded buffers on eight devices. `test_sharded.py` runs these in a process of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import fbuf
from fbuf.samplers import Epoch
from fbuf.sharded import Sharded
from tests.support import sharded as support
from tests.support.refusals import raises
from tests.support.tables import by_tier

SAMPLERS = {"a": "prioritized", "b": "uniform"}
MODES = [
    {"fractions": {"a": 0.25, "b": 0.75}},
    {"fractions": {"a": 0.4, "b": 0.6}, "quota": "random", "target": "source"},
    {"normalize": None, "beta": 0.6},
]


def mixture_of(parts=(), **settings):
    buffers = {name: support.buffer_of(sampler, **dict(parts)) for name, sampler in SAMPLERS.items()}
    mesh = support.mesh_of()
    return fbuf.Mixture({name: Sharded(buffer, mesh) for name, buffer in buffers.items()}, **settings)


def filled(mixture, *names):
    states = {name: buffer.init(support.example()) for name, buffer in mixture.members}
    rows, mask, priority = support.rows_and_masks()
    for name in names:
        given = {"priority": priority} if name == "a" else {}
        states[name] = mixture[name].extend(states[name], rows, mask=mask, **given)
    return states


@pytest.mark.parametrize("mode", by_tier(MODES[0], exhaustive=MODES[1:], ids=str))
def test_rows_have_the_probabilities_and_weights_of_one_mixture(mode):
    """Weighted means over all rows estimate what the unsharded mixture's do, although shards differ in fill and mass."""
    mixture, size = mixture_of(**mode), 4096
    state = filled(mixture, "a", "b")
    assert bool(mixture.can_sample(state))
    given = {} if "fractions" in mode else {"fractions": {"a": jnp.float32(0.5)}}
    batch = jax.device_get(jax.jit(lambda *args: mixture.peek(*args, size, **given))(state, jax.random.key(0)))
    chance = {n: support.chances(mixture[n].buffer, support.fill(mixture[n].buffer)) for n in "ab"}
    fractions = np.array(list(mode.get("fractions", {"a": 0.5, "b": 0.5}).values()))
    ids, source, there = support.ids(batch), batch.index.source, batch.mask
    assert 0 < (~there).sum() < size / 4 and set(batch.index.shard[~there]) == {8} and not batch.weight[~there].any()
    within = np.where(source == 0, chance["a"][ids], chance["b"][ids])[there]
    share = fractions[source[there]]
    np.testing.assert_allclose(batch.probability[there], share * within, rtol=2e-6)
    anchors = {n: np.count_nonzero(of) for n, of in chance.items()}
    every = {n: support.shard_of(np.arange(of.size)) for n, of in chance.items()}
    of_shard = {n: np.bincount(every[n], weights=of, minlength=8) for n, of in chance.items()}
    shard = support.shard_of(ids)[there]
    factor = 8 * np.where(source[there] == 0, of_shard["a"][shard], of_shard["b"][shard])
    number = np.where(source[there] == 0, anchors["a"], anchors["b"])
    relative = number * within if mode.get("target") == "source" else sum(anchors.values()) * share * within
    weight = factor * relative ** -mode.get("beta", 1.0)
    weight /= weight.max() if mode.get("normalize", "batch") else 1
    np.testing.assert_allclose(batch.weight[there], weight, rtol=1e-5)
    np.testing.assert_array_equal(batch.index.shard[there], shard)
    if "random" not in mode.values():  # each device has its share of each buffer
        for part in np.split(np.where(there, source, -1), 8):
            assert (part == 0).sum() in (0, round(fractions[0] * size / 8))


@pytest.mark.exhaustive
def test_errors_and_rows_go_where_rows_came_from():
    """Also inside `jax.shard_map`, and in any order over devices; invalid indices are counted."""
    mixture = mixture_of(fractions={"a": 0.5, "b": 0.5})
    state = filled(mixture, "a", "b")

    def step(state, key):
        state, batch = mixture.sample(state, key, 64)
        state = mixture.update_priority(state, batch.index, jnp.float32(1) + batch.data["id"].astype(jnp.float32))
        return mixture.update_rows(state, batch.index, {"version": batch.data["id"] + 1000}), batch

    specs = {"in_specs": (P("data"), P()), "out_specs": (P("data"), P("data"))}
    for run in (step, jax.shard_map(step, mesh=mixture["a"].mesh, **specs)):
        after, batch = jax.jit(run)(state, jax.random.key(1))
        batch = jax.device_get(batch)
        for name, number in (("a", 0), ("b", 1)):
            rows = jax.device_get(mixture[name].rows(after[name]))
            drawn = set(batch.data["id"][batch.index.source == number].tolist())
            assert {int(i) for i in rows.data["id"][rows.mask & (rows.data["version"] >= 1000)]} == drawn != set()
        priority = np.asarray(mixture["a"].priorities(after["a"]))
        rows = jax.device_get(mixture["a"].rows(after["a"]))
        mine = np.isin(rows.data["id"], batch.data["id"][batch.index.source == 0]) & rows.mask
        np.testing.assert_allclose(priority[mine], 1.0 + rows.data["id"][mine], rtol=1e-5)
    order = np.random.default_rng(0).permutation(64)
    index = jax.tree.map(lambda x: np.asarray(x)[order].copy(), batch.index)
    there = np.flatnonzero(batch.mask[order])
    index.source[there[0]] = 7
    index.shard[there[1]] = 9
    after = mixture.update_priority(state, index, np.full(64, 3.0, np.float32))
    refused = int(mixture["a"].stats(after["a"])["refused_out_of_range"])
    assert refused == 1 + (batch.index.source[order][there[1]] == 0)


@pytest.mark.exhaustive
def test_rows_of_windows_return_to_their_buffers():
    view = fbuf.views.Sequence(3, boundary="mask", autoreset="same_step")
    mixture = mixture_of({"view": view}, fractions={"a": 0.25, "b": 0.75})
    state = filled(mixture, "a", "b")
    batch = jax.jit(mixture.peek, static_argnums=2)(state, jax.random.key(0), 32)
    index = jax.tree.map(lambda x: np.asarray(x)[::-1].copy(), batch.index)
    data, first = (jax.tree.map(lambda x: np.asarray(x)[::-1], each) for each in (batch.data, batch.index.source))
    index.source[0] = 7
    at = jax.device_get(jax.jit(mixture.window_index)(state, index))
    there = data["mask"] & (np.arange(32) > 0)[:, None]
    np.testing.assert_array_equal(at.source[1:], np.where(there, first[:, None], 2)[1:])
    np.testing.assert_array_equal(at.shard[1:], np.where(there, index.shard[:, None], 8)[1:])
    assert (at.source[0] == 7).all() and not at.generation[1:][~there[1:]].any()
    after = mixture.update_rows(state, at, {"version": data["id"] + 7}, mask=there)
    for number, name in enumerate(SAMPLERS):
        rows = jax.device_get(mixture[name].get(after[name], mixture.route(at, name)))
        mine = there & (first == number)[:, None]
        np.testing.assert_array_equal(rows.mask, mine)
        assert mine.any() and (rows.data["version"][mine] == data["id"][mine] + 7).all()


@pytest.mark.more
@pytest.mark.parametrize("shares", [(1.0, 0.0), (0.0, 1.0)])
def test_fractions_belong_to_their_buffers_in_any_order(shares):
    """A jitted call sorts the names of a state."""
    buffers = dict.fromkeys("ba", Sharded(fbuf.Buffer(64), support.mesh_of()))
    mixture = fbuf.Mixture(buffers, fractions=dict(zip("ba", shares, strict=True)))
    sharded, rows = mixture["b"], {"id": np.arange(16, dtype=np.int32)}
    states = {name: buffer.init({"id": np.int32(0)}) for name, buffer in mixture.members}
    states = jax.jit(lambda states: states | {"b": sharded.extend(states["b"], rows)})(states)
    assert bool(mixture.can_sample(states)) == (shares[0] > 0)
    assert mixture.peek(states, jax.random.key(0), 8, beta=0.5).mask.any() == (shares[0] > 0)


@pytest.mark.more
def test_a_buffer_is_empty_if_all_its_shards_are():
    mixture = mixture_of(fractions={"a": 0.5, "b": 0.5})
    state, batch = mixture.sample(filled(mixture), jax.random.key(0), 64)
    counts = [int(mixture[name].stats(state[name])["empty_samples"]) for name in "ab"]
    assert not bool(batch.mask.any()) and counts == [1, 0]
    assert not bool(mixture.can_sample(state))
    state, batch = mixture.sample(filled(mixture, "b"), jax.random.key(0), 64)
    assert set(np.asarray(batch.index.source)[np.asarray(batch.mask)].tolist()) == {1}
    with pytest.raises(ValueError, match="batch_size is 20, not a multiple of the 8 shards"):
        mixture.peek(state, jax.random.key(0), 20)


@pytest.mark.exhaustive
def test_buffers_that_do_not_draw_together_are_refused():
    mesh, one = support.mesh_of(), fbuf.Buffer(64)
    epoch, moving = Sharded(fbuf.Buffer(64, sampler=Epoch()), mesh), Sharded(one, mesh, draw="global")
    other = Sharded(one, support.mesh_of(4))
    mixture = fbuf.Mixture({"a": Sharded(one, mesh)})
    raises(ValueError, "Mixture: 'a': .*Epoch.* draws without replacement", fbuf.Mixture, {"a": epoch})
    raises(ValueError, "'a' has draw='global'; expected 'local'", fbuf.Mixture, {"a": moving})
    raises(TypeError, "'b' is Buffer, but 'a' is Sharded", fbuf.Mixture, {"a": mixture["a"], "b": one})
    raises(ValueError, "'b' is over another mesh or axis", fbuf.Mixture, {"a": mixture["a"], "b": other})
    state, plain = mixture["a"].init({"t": 0}), one.init({"t": 0})
    raises(TypeError, "the state of 'a' is BufferState; expected ShardedState", mixture.can_sample, {"a": plain})
    batch = mixture.peek({"a": state}, jax.random.key(0), 8)
    index = fbuf.Index(batch.index.slot, batch.index.generation, batch.index.source)
    raises(TypeError, "is an Index of source; expected one of source, shard", mixture.route, index, "a")

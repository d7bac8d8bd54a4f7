"""Mixtures: every sampler, storage and target in every mode, saved and loaded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Consume, Prioritized
from fbuf.storages import Compressed, Memmap
from fbuf.transforms import Normalize, NormalizeReward, Scale
from tests.support import mixture as support
from tests.support.mixture import EXAMPLE, filled, played, same, two
from tests.support.uniformity import chi_square_z


@pytest.mark.parametrize("mode", support.MODES)
@pytest.mark.parametrize("sampler", support.SAMPLERS)
def test_batches_hold_rows_of_each_buffer(sampler, mode):
    support.check_sampler(sampler, mode)


@pytest.mark.parametrize(
    ("mode", "target"), [("exact", "source"), ("annealed", "source"), ("random", "source"), ("all", "union")]
)
def test_weights_are_those_of_the_mixture(mode, target):
    support.check_weights(mode, target, 1.0)


@pytest.mark.optimized
@pytest.mark.parametrize("mode", support.MODES)
@pytest.mark.parametrize(
    "sampler", ["Uniform", "Epoch", "Consume", "Prioritized", "Prioritized(replace=False)", "Ranked"]
)
def test_steps_are_in_place(sampler, mode):
    support.check_in_place(sampler, mode)


@pytest.mark.parametrize("quota", ["exact", "random"])
def test_rows_of_an_empty_buffer_are_masked(quota):
    mixture = support.three(quota=quota, if_empty="mask")
    state = support.filled(mixture, a=0)
    _, probability, source, _ = map(
        np.asarray, support.numbers(mixture)(state, jax.random.split(jax.random.key(0), 300))
    )
    counts = np.bincount(source, minlength=4)
    if quota == "random":
        assert chi_square_z(counts[[1, 2, 3]], np.array([0.25, 0.5, 0.25])) < 4 and counts[0] == 0
    else:
        assert counts.tolist() == [0, 4 * 300, 8 * 300, 4 * 300]
    assert not bool(mixture.can_sample(state))
    np.testing.assert_allclose(probability[source == 2], 0.5 / 40, rtol=1e-6)


@pytest.mark.parametrize("mode", support.MODES)
def test_eager_jitted_and_scanned_give_the_same(mode):
    samplers = (Prioritized(), Consume(2))
    one, other = (fbuf.Buffer(c, sampler=s) for c, s in zip((20, 40), samplers, strict=True))
    mixture = support.two(one, other, **support.MODES[mode])

    def step(state, i):
        rows = {"obs": jnp.zeros((2, 8, 8), jnp.uint8) + i.astype(jnp.uint8), "id": jnp.full((2,), i, jnp.int32)}
        state = mixture.extend(state, "a", rows)
        state, batch = mixture.sample(state, jax.random.fold_in(jax.random.key(3), i), 8)
        state = mixture.update_priority(state, batch.index, batch.data["id"] + 1.0)
        return state, batch

    start = support.filled(mixture, a=0)
    eager, out = start, []
    for i in range(4):
        eager, batch = step(eager, jnp.int32(i))
        out.append(batch)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *out)
    scanned, batches = jax.jit(lambda state: lax.scan(step, state, jnp.arange(4)))(start)
    for a, b in zip(jax.tree.leaves((eager, stacked)), jax.tree.leaves((scanned, batches)), strict=True):
        assert a.dtype == b.dtype and bool(jnp.all(a == b))


@pytest.mark.parametrize("annealed", [False, True])
def test_other_buffers_give_the_rows_of_an_empty_one(annealed):
    support.check_empty(annealed=annealed)


def test_priorities_go_where_rows_came_from():
    sampler = Prioritized(alpha=1.0, eps=0.0)
    mixture = fbuf.Mixture(
        {"a": fbuf.Buffer(20, sampler=sampler), "u": fbuf.uniform(20), "b": fbuf.Buffer(20, sampler=sampler)}
    )
    state = support.filled(mixture)
    state, batch = mixture.sample(state, jax.random.key(0), 12)
    error = jnp.where(jnp.arange(12) == 0, jnp.nan, jnp.arange(12) + 2.0)
    new = mixture.update_priority(state, batch.index, error)
    for i, name in enumerate(mixture.names):
        if name == "u":
            continue
        leaves = np.ones(20)
        for row in range(12):
            if int(batch.source[row]) == i and row:
                leaves[int(batch.index.slot[row])] = row + 2
        np.testing.assert_allclose(new[name].sampler.tree[:20], leaves, rtol=1e-6)
        assert int(mixture.stats(new)[f"{name}/refused_nonfinite"]) == (name == "a")
    assert jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.all(x == y)), state["u"], new["u"]))


def test_every_stratum_of_a_prioritized_buffer_is_drawn():
    """The first rows of a batch drawn in order would all be of the lower half."""
    mixture = fbuf.Mixture({name: fbuf.prioritized(100, alpha=1.0) for name in "ab"}, annealed=True)
    ids, *_ = map(
        np.asarray, support.numbers(mixture)(support.filled(mixture), jax.random.split(jax.random.key(0), 600))
    )
    counts = np.array([np.sum(ids == 1000 * s + i) for s in (1, 2) for i in range(100)])
    assert counts.min() > 0 and chi_square_z(counts, np.full(200, 1 / 200)) < 4


def test_statistics_of_transforms_are_saved_by_buffer(tmp_path):
    """A stage with other settings learns again, from the rows held."""
    online = fbuf.Buffer(
        20,
        storage=Compressed(keys=("obs",)),
        on_write={"w": Normalize("reward", clip=5.0)},
        on_read={"r": NormalizeReward(), "s": Scale("obs", 0.5, 1.0)},
    )
    offline = fbuf.Buffer(40, sampler=Prioritized(), on_read={"r": NormalizeReward(clip=3.0), "s": Scale("obs")})
    mixture = fbuf.Mixture({"online": online, "offline": offline}, fractions={"online": 0.25, "offline": 0.75})
    example = {"obs": jnp.zeros((2, 2), jnp.uint8), "reward": 0.0}
    state = mixture.init({"online": example, "offline": example})

    def rows(seed, count):
        rng = np.random.default_rng(seed)
        reward = rng.normal(2, 7, count).astype(np.float32)
        return {"obs": rng.integers(0, 256, (count, 2, 2), np.uint8), "reward": reward}

    def play(mixture, state):
        out = []
        for i in range(3):
            state = mixture.extend(mixture.extend(state, "online", rows(10 + i, 3)), "offline", rows(20 + i, 4))
            state, batch = mixture.sample(state, jax.random.key(i), 8)
            state = mixture.update_priority(state, batch.index, batch.data["reward"])
            out.append((batch.data, batch.index, batch.weight, mixture.stats(state)))
        return out

    state = mixture.extend(mixture.extend(state, "online", rows(0, 33)), "offline", rows(1, 22))
    fbuf.save(tmp_path, mixture, state)
    changed = dataclasses.replace(online, on_read={"r": NormalizeReward(eps=0.1), "s": Scale("obs", 0.5, 1.0)})
    other, learnt = fbuf.load(tmp_path, dataclasses.replace(mixture, buffers={"online": changed, "offline": offline}))
    assert int(learnt["online"].transforms.read["r"]["reward"].seen[1]) == 20
    assert int(learnt["online"].transforms.write["w"]["reward"].seen[1]) == 33
    assert same(learnt["offline"].transforms, state["offline"].transforms)
    loaded, again = fbuf.load(tmp_path)
    assert loaded == mixture and same(
        jax.tree.leaves(again["online"].transforms), jax.tree.leaves(state["online"].transforms)
    )
    assert same(play(loaded, again), play(mixture, state))


def test_buffers_are_loaded_into_other_capacities_and_storages(tmp_path):
    mixture = two(fbuf.Buffer(20, sampler=Prioritized()), fbuf.uniform(40))
    state, _ = played(mixture, filled(mixture), 0, 1)
    fbuf.save(tmp_path / "c", mixture, state)
    small, fewer = fbuf.load(tmp_path / "c", resize={"a": 5})
    assert small["a"].capacity == 5 and small["b"].capacity == 40
    assert small["a"].last(fewer["a"], 5).data["id"].tolist() == list(range(1015, 1020))
    files = two(mixture["a"], fbuf.Buffer(40, storage=Memmap(str(tmp_path / "rows"), keys=("obs",))))
    loaded, again = fbuf.load(tmp_path / "c", files)
    assert loaded == files and same(played(mixture, state, 1, 2)[1], played(loaded, again, 1, 2)[1])
    annealed = dataclasses.replace(mixture, annealed=True, fractions={"a": 0.25, "b": 0.75}, target="source")
    loaded, again = fbuf.load(tmp_path / "c", annealed, example={"a": EXAMPLE, "b": EXAMPLE})
    assert loaded == annealed and again.fractions.tolist() == [0.25, 0.75]

"""Mixtures of two buffers whose rows carry a number, and what must hold of every batch of them.

The number tells the buffer and when the row came. Chances are compared with a closed form.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.testing import assert_inplace

EXAMPLE = {"obs": np.zeros((8, 8), np.uint8), "id": np.int32(0)}
B = 16
SAMPLERS = {
    "Uniform": Uniform(),
    "Epoch": Epoch(),
    "Consume": Consume(),
    "Consume(3)": Consume(3),
    "Prioritized": Prioritized(),
    "Prioritized(replace=False)": Prioritized(replace=False),
    "Prioritized(on='host')": Prioritized(on="host"),
    "Ranked": Ranked(),
    "Staleness": Staleness(100),
}
MODES = {
    "exact": {"fractions": {"a": 0.25, "b": 0.75}},
    "annealed": {},
    "random": {"fractions": {"a": 0.25, "b": 0.75}, "quota": "random"},
    "all": {"quota": "all"},
}


def rows_of(first, number):
    ids = first + np.arange(number, dtype=np.int32)
    return {"obs": (ids[:, None, None] % 251 * np.ones((8, 8))).astype(np.uint8), "id": ids}


def two(one=None, other=None, **settings):
    """Rows of a are numbered from 1000, those of b from 2000."""
    buffers = {"a": one or fbuf.Buffer(20), "b": other or fbuf.Buffer(40)}
    return fbuf.Mixture(buffers, **settings)


def filled(mixture, **counts):
    states = {name: buffer.init(EXAMPLE) for name, buffer in mixture.members}
    for i, (name, buffer) in enumerate(mixture.members):
        states = extended(mixture, states, name, rows_of(1000 * (i + 1), counts.get(name, buffer.capacity)))
    return states


def extended(mixture, states, name, rows):
    return states | {name: mixture[name].extend(states[name], rows)}


def traced(mode):
    return {"fractions": {"a": jnp.float32(0.25)}} if mode == "annealed" else {}


def refused(mixture, states):
    stats = {name: buffer.stats(states[name]) for name, buffer in mixture.members}
    return {f"{n}/{key}": int(x) for n, of in stats.items() for key, x in of.items() if "refused" in key and int(x)}


def size_of(mixture, size=B):
    return {"a": size // 4, "b": size - size // 4} if mixture.quota == "all" else size


@functools.cache
def sampling(mixture, mode=""):
    return jax.jit(lambda state, key: mixture.sample(state, key, size_of(mixture), **traced(mode)), donate_argnums=0)


def check(mixture, batch, held):
    batch = jax.device_get(batch)
    source, mask, ids = batch.index.source, batch.mask, batch.data["id"]
    assert ((source == len(mixture.names)) == ~mask).all()
    for leaf in (*batch.data.values(), batch.index.slot, batch.index.generation, batch.probability, batch.weight):
        assert not leaf[~mask].any()
    assert (ids[mask] // 1000 == source[mask] + 1).all()
    assert (batch.data["obs"][mask] == (ids[mask] % 251)[:, None, None]).all()
    for i, name in enumerate(mixture.names):
        mine = source == i
        number, capacity = held[name], mixture[name].capacity
        first = max(number - capacity, 0)
        assert ((ids[mine] % 1000 >= first) & (ids[mine] % 1000 < number)).all()
        assert (batch.index.slot[mine] == ids[mine] % 1000 % capacity).all()
    assert (batch.probability[mask] > 0).all() and np.isfinite(batch.weight).all()
    if mixture.normalize == "batch" and mask.any():
        assert batch.weight.max() == pytest.approx(1)


@functools.cache
def numbers(mixture, batch_size=B, mode=""):
    """A jitted draw of many batches: numbers, probabilities, sources and weights, flat."""

    @jax.jit
    def run(state, keys):
        batch = jax.vmap(lambda key: mixture.peek(state, key, size_of(mixture, batch_size), **traced(mode)))(keys)
        return tuple(x.reshape(-1) for x in (batch.data["id"], batch.probability, batch.index.source, batch.weight))

    return run


def check_sampler(sampler, mode):
    """Nine batches: rows of each buffer as its quota says, and as its sampler draws them."""
    one, other = (fbuf.Buffer(c, sampler=SAMPLERS[sampler]) for c in (20, 40))
    mixture = two(one, other, **MODES[mode])
    state, step = filled(mixture), sampling(mixture, mode)
    drawn = {0: [], 1: []}
    empty = 0
    for i in range(9):
        state, batch = step(state, jax.random.key(i))
        check(mixture, batch, {"a": 20, "b": 40})
        empty += not bool(jnp.any(batch.mask))
        mask, source = np.asarray(batch.mask), np.asarray(batch.index.source)
        for s in (0, 1):
            mine = np.asarray(batch.data["id"])[mask & (source == s)].tolist()
            if not sampler.startswith(("Uniform", "Prioritized'", "Ranked", "Staleness")) and "replace" in sampler:
                assert len(set(mine)) == len(mine)
            drawn[s] += mine
        if mode != "random" and sampler not in ("Epoch", "Consume", "Consume(3)"):
            assert np.bincount(source, minlength=3).tolist() == [4, 12, 0]
        if mixture["a"].sampler.prioritized:
            error = jnp.where(batch.index.source == 0, 3.0, batch.data["id"] % 7)
            state = mixture.update_priority(state, batch.index, error)
    for s, capacity in ((0, 20), (1, 40)):
        if sampler == "Epoch":  # each once before any comes again
            for start in range(0, len(drawn[s]) - capacity + 1, capacity):
                assert len(set(drawn[s][start : start + capacity])) == capacity
        if sampler.startswith("Consume"):
            times = 3 if "3" in sampler else 1
            assert max(np.unique(drawn[s], return_counts=True)[1]) <= times
    assert not refused(mixture, state)
    counts = [int(mixture[name].stats(state[name])["empty_samples"]) for name in "ab"]
    assert counts == [empty, 0] and (not empty or sampler == "Consume")


def density(mixture, state, share):
    """Chance of each row by its number, from priorities (alpha = 1, eps = 0)."""
    out = {}
    for i, name in enumerate(mixture.names):
        ids = np.asarray(mixture[name].rows(state[name]).data["id"])
        weight = 1.0 + ids % 5 if mixture[name].sampler.prioritized else np.ones(len(ids))
        out |= {int(n): share[name] * w / weight.sum() for n, w in zip(ids, weight, strict=True)}
        assert all(n // 1000 == i + 1 for n in ids)
    return out


def weighted(mode, **settings):
    sampler = Prioritized(alpha=1.0, eps=0.0)
    mixture = two(fbuf.Buffer(20, sampler=sampler), fbuf.Buffer(40), **mode, **settings)
    state = filled(mixture)
    index = mixture["a"].rows(state["a"]).index
    online = mixture["a"].update_priority(state["a"], index, 1.0 + np.arange(1000, 1020) % 5)
    return mixture, state | {"a": online}


BIG = 400_000
ROW = {"obs": jax.ShapeDtypeStruct((8,), np.uint8), "id": jax.ShapeDtypeStruct((), np.int32)}


def check_in_place(sampler, mode):
    mixture = two(*(fbuf.Buffer(BIG, sampler=SAMPLERS[sampler]) for _ in "ab"), **MODES[mode])
    state = jax.eval_shape(lambda: {name: mixture[name].init(ROW) for name in "ab"})

    def step(state, rows, key):
        state, batch = mixture.sample(state, key, size_of(mixture), **traced(mode))
        if mixture["a"].sampler.prioritized:
            state = mixture.update_priority(state, batch.index, jnp.ones(B))
        state = mixture.update_rows(state, batch.index, {"id": jnp.zeros(B, jnp.int32)})
        return {name: mixture[name].extend(state[name], rows) for name in "ab"}, batch

    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), ROW)
    assert_inplace(step, state, rows, jax.eval_shape(lambda: jax.random.key(0)), bound=BIG)


THREE = {"a": 0.25, "b": 0.25, "c": 0.5}


def three(**settings):
    return fbuf.Mixture({n: fbuf.Buffer(40, sampler=Epoch()) for n in THREE}, fractions=THREE, **settings)


def same(one, two):
    alike = jax.tree.structure(one) == jax.tree.structure(two)
    return alike and jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), one, two))


def played(mixture, state, first, steps):
    out = []
    for i in range(first, first + steps):
        state, batch = mixture.sample(state, jax.random.key(i), size_of(mixture, 8))
        if mixture["a"].sampler.prioritized:
            state = mixture.update_priority(state, batch.index, batch.data["id"] % 7 + 1.0)
        state = extended(mixture, state, "b", rows_of(2040 + 3 * i, 3))
        out.append((batch.data, batch.index.source, batch.index.slot, batch.probability, batch.weight, batch.mask))
    return state, out


HELD = [
    ({"a": 40, "b": 40, "c": 40}, [4, 4, 8]),
    ({"a": 0, "b": 40, "c": 40}, [0, 5, 11]),
    ({"a": 0, "b": 40, "c": 0}, [0, 16, 0]),
    ({"a": 0, "b": 0, "c": 0}, [0, 0, 0]),
]


def check_empty(annealed):
    """Other buffers give the rows of one that is empty, by their quotas."""
    mixture = three()
    draw = sampling(mixture, "annealed" * annealed)
    for held, quota in HELD:
        state, batch = draw(filled(mixture, **held), jax.random.key(0))
        check(mixture, batch, held)
        assert np.bincount(batch.index.source, minlength=4).tolist() == [*quota, 16 - sum(quota)]
        stats = {name: mixture[name].stats(state[name]) for name in THREE}
        assert [int(of["empty_samples"]) for of in stats.values()] == [not sum(quota), 0, 0]
        assert bool(mixture.can_sample(state)) == bool(sum(quota))
        for i, (name, number) in enumerate(zip(THREE, quota, strict=True)):
            assert int(stats[name]["epoch_left"]) == (held[name] - number if number else 0)  # the others can be drawn
            got = np.asarray(batch.probability)[np.asarray(batch.index.source) == i]
            np.testing.assert_allclose(got, number / 16 / 40, rtol=1e-6)
        ids = np.asarray(batch.data["id"])[np.asarray(batch.mask)]
        assert len(set(ids.tolist())) == len(ids)

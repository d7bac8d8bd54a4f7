import jax
import jax.numpy as jnp
import pytest

from tests.support import prefetch
from tests.support.ownership import store_of
from tests.support.refusals import raises
from tests.support.tables import pairwise
from tests.support.trees import same

STORAGES = ("device", "deduplicated", "host", "compressed")
ORDERS = [
    ("device", "prioritized", "transition", "sesu"),
    ("compressed", "consume", "row", "ses"),
    ("deduplicated", "epoch", "sequence", "esr"),
    ("device", "consume", "row", "esr"),
    ("device", "uniform", "transition", "se"),
    ("compressed", "prioritized", "transition", "sesu"),
]

KEY = jax.random.key(7)


@pytest.mark.parametrize(
    ("sampler", "view", "storage", "form"),
    pairwise(prefetch.SAMPLERS, prefetch.VIEWS, STORAGES, ("eager", "jit", "donated", "scan")),
)
def test_sample_returns_the_batch_of_the_previous_call(sampler, view, storage, form):
    prefetch.check_batches(storage, sampler, view, form)


@pytest.mark.parametrize("storage", ["compressed", "deduplicated"])
@pytest.mark.parametrize("check", prefetch.CHECKS)
def test_a_pending_batch_survives(check, storage):
    check(storage)


@pytest.mark.optimized
@pytest.mark.parametrize(("storage", "sampler", "view", "order"), ORDERS)
def test_a_donated_step_copies_nothing(storage, sampler, view, order):
    prefetch.check_in_place(storage, sampler, view, order)


def test_states_under_vmap_draw_independently():
    for sampler in ("prioritized", "consume"):
        buffer = prefetch.make("device", sampler)
        filled = buffer.extend(new := buffer.init(prefetch.EXAMPLE), prefetch.rows_at(0))
        states, keys = [buffer.sample(filled, KEY)[0], filled, new], jax.random.split(jax.random.key(1), 3)
        together = jax.vmap(buffer.sample)(jax.tree.map(lambda *x: jnp.stack(x), *states), keys)
        for i, state in enumerate(states):
            same(buffer.sample(state, keys[i]), jax.tree.map(lambda x, i=i: x[i], together))


def test_many_keys_of_one_state():
    buffer = prefetch.make("device", "consume")
    state = buffer.extend(buffer.init(prefetch.EXAMPLE), prefetch.rows_at(0))
    keys = jax.random.split(jax.random.key(1), 3)
    together = jax.vmap(lambda key: buffer.sample(state, key))(keys)
    for i, key in enumerate(keys):
        same(buffer.sample(state, key), jax.tree.map(lambda x, i=i: x[i], together))
    buffer = prefetch.make("compressed")
    state = buffer.extend(buffer.init(prefetch.EXAMPLE), prefetch.rows_at(0))
    assert jax.vmap(lambda key: buffer.peek(state, key).mask)(keys).all()
    raises(TypeError, "cannot be vmapped", lambda: jax.vmap(lambda key: buffer.sample(state, key)[1])(keys))


def test_no_two_leaves_share_an_array():
    for storage in ("deduplicated", "compressed"):
        buffer = prefetch.make(storage, view="sequence")
        state = buffer.init(prefetch.EXAMPLE)
        for now in (state, buffer.sample(buffer.extend(state, prefetch.rows_at(0)), KEY)[0]):
            pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(now) if leaf.size]
            assert len(set(pointers)) == len(pointers)


def test_grow_and_set_keep_the_pending_batch():
    buffer = prefetch.make("deduplicated", "prioritized")
    state = buffer.sample(buffer.extend(buffer.init(prefetch.EXAMPLE), prefetch.rows_at(0)), KEY)[0]
    larger, grown = buffer.grow(buffer.set(state, alpha=0.9))
    same(larger.sample(grown, jax.random.key(1))[1], buffer.sample(state, jax.random.key(1))[1])


@pytest.mark.parametrize("storage", ["device", "host"])
def test_plan_and_nbytes_count_the_pending_batch(storage):
    buffer, plain = prefetch.make(storage, view="transition"), prefetch.make(storage, view="transition", prefetch=0)
    stacks = 2 * prefetch.BATCH * 4 * 64
    state = buffer.init(prefetch.EXAMPLE)
    plan, before = buffer.plan(prefetch.EXAMPLE), plain.plan(prefetch.EXAMPLE)
    assert plan.device == buffer.nbytes(state)["device"]
    if storage == "device":
        assert plan.device - before.device > stacks and plan.host == 0
        return
    assert plan.host - before.host == 2 * stacks
    empty = buffer.nbytes(state)["host"]
    for i in range(4):
        state = buffer.extend(state, prefetch.rows_at(i))
        state, batch = buffer.sample(state, jax.random.key(i))
    jax.block_until_ready(batch)
    prefetch.settle(store_of(state))
    grown = buffer.nbytes(state)["host"] - empty
    assert 2 * stacks < grown <= 2 * stacks + 40 * 64


def test_other_platforms(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "elsewhere")
    jax.clear_caches()
    try:
        prefetch.check_batches("compressed", "epoch", "row", "donated")
    finally:
        monkeypatch.undo()
        jax.clear_caches()

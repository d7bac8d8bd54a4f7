"""Checked buffers, plans, summaries and prefetched batches of every storage, sampler, view and writer."""

import itertools

import jax
import jax.numpy as jnp
import pytest

import fbuf
from tests.buffer import test_checked as support
from tests.buffer.test_plan import EXAMPLE, SAMPLERS, STORAGES, VIEWS, check_fixed, deduplicated, distinct_rows
from tests.support import combinations as parts
from tests.support import prefetch
from tests.support.host import trace_for_accelerators
from tests.support.ownership import store_of
from tests.support.refusals import raises
from tests.support.summary import check_all, check_unordered
from tests.support.tables import checks, pairwise
from tests.support.trees import same

pytestmark = pytest.mark.exhaustive

OTHERS = [(n, s) for n, case in support.CASES.items() for s in case.storages if (n, s) not in support.FIRST]


@pytest.mark.parametrize("on_full", ["retire", "refuse"])
def test_plan_predicts_a_table_that_is_too_small(on_full):
    buffer = deduplicated(1024, on_full)
    given = distinct_rows(2000)
    plan = buffer.plan(EXAMPLE, rows=jax.tree.map(lambda x: x[:500], given))
    table = plan.table
    assert table is not None and table.load is not None and table.load > 1.5
    assert table.gives_way == {"retire": "retired", "refuse": "refused"}[on_full]
    state = buffer.init(EXAMPLE)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for start in range(0, 2000, 20):
        state = extend(state, jax.tree.map(lambda x, s=start: x[s : s + 20], given))
    stats = buffer.stats(state)
    assert int(stats["refused_rows" if on_full == "refuse" else "retired_rows"]) > 900
    held = 2000 - int(stats["refused_rows"]) - int(stats["retired_rows"])
    assert table.rows == pytest.approx(held, rel=0.15)
    who = "oldest" if on_full == "retire" else "others"
    assert f"{who} are {table.gives_way}: {table.wanted:,} places" in str(plan)
    larger = deduplicated(table.wanted, on_full).plan(EXAMPLE, rows=given).table
    assert larger is not None and larger.gives_way == "" and larger.rows == 2000


def test_plan_counts_rows_of_all_lanes():
    storage = fbuf.storages.Deduplicated(keys=("obs",), block=(7, 8), blocks=4096)
    one = fbuf.Buffer(2000, storage=storage).plan(EXAMPLE, rows=distinct_rows(400)).table
    lanes = jax.tree.map(lambda x: x.reshape(100, 4, *x.shape[1:]), distinct_rows(400))
    assert fbuf.Buffer(2000, storage=storage, lanes=4).plan(EXAMPLE, rows=lanes).table == one


test_in_place_checks = pytest.mark.in_place(checks((check_fixed, pairwise(VIEWS, SAMPLERS, STORAGES))))


SUMMARIES = pairwise(parts.STORAGES, parts.SAMPLERS, parts.VIEWS, refused=lambda storage, *case: case in parts.REFUSED)
test_checks = checks(
    (support.check_eager, OTHERS),
    (support.check_jitted, support.FIRST + OTHERS),
    (check_all, SUMMARIES),
    (check_unordered, itertools.product(parts.UNORDERED_STORAGES, parts.UNORDERED_WRITERS)),
)


PREFETCHED = ("device", "deduplicated", "host", "compressed")
ORDERS = [(s, "prioritized", "transition", "sesu") for s in ("device", "compressed")]
ORDERS += [("compressed", "consume", "row", "ses"), ("device", "consume", "row", "esr")]
ORDERS += [("deduplicated", "epoch", "sequence", "esr"), ("device", "uniform", "transition", "se")]

KEY = jax.random.key(7)


DRAWN = pairwise(PREFETCHED, prefetch.SAMPLERS, prefetch.VIEWS, ("eager", "jit", "donated", "scan"))
test_prefetched_batches = checks(
    (prefetch.check_batches, DRAWN), *((check, ["compressed", "deduplicated"]) for check in prefetch.CHECKS)
)
test_a_donated_step_copies_nothing = pytest.mark.in_place(checks((prefetch.check_in_place, ORDERS)))


def test_states_and_keys_under_vmap_draw_independently():
    keys = jax.random.split(jax.random.key(1), 3)
    for sampler in ("prioritized", "consume"):
        buffer = prefetch.make("device", sampler)
        filled = buffer.extend(new := buffer.init(prefetch.EXAMPLE), prefetch.rows_at(0))
        states = [buffer.sample(filled, KEY)[0], filled, new]
        together = jax.vmap(buffer.sample)(jax.tree.map(lambda *x: jnp.stack(x), *states), keys)
        of_one = jax.vmap(lambda key, buffer=buffer, state=filled: buffer.sample(state, key))(keys)
        for i, state in enumerate(states):
            same(buffer.sample(state, keys[i]), jax.tree.map(lambda x, i=i: x[i], together))
            same(buffer.sample(filled, keys[i]), jax.tree.map(lambda x, i=i: x[i], of_one))
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
    trace_for_accelerators(monkeypatch)
    jax.clear_caches()
    try:
        prefetch.check_batches("compressed", "epoch", "row", "donated")
    finally:
        monkeypatch.undo()
        jax.clear_caches()

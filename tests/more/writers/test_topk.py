"""More of `writers.TopK`: ranks of other kinds, other capacities, lanes and scans, a replay, conversions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax import lax

import fbuf
from fbuf._algorithms import top_k_tree
from fbuf.testing import assert_inplace
from tests.support.tables import checks
from tests.support.trees import x64
from tests.writers.test_topk import (
    CAPACITY,
    PROGRAM,
    best,
    buffer_of,
    check_capacity,
    check_program,
    check_ways,
    example_of,
    held,
    ids,
    put,
    ranks_of,
)


@pytest.mark.parametrize("kind", ["bfloat16", "uint32"])
@given(program=PROGRAM)
def test_what_sorting_all_rows_would_leave_stays(kind, program):
    check_program(kind, program)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64])
def test_ranks_of_64_bits(dtype):
    rng = np.random.default_rng(0)
    if dtype == np.float64:
        new = np.concatenate([ranks_of(rng, dtype, 40), 1 + rng.integers(0, 20, 40) * 2.0**-50]).astype(dtype)
    else:
        new = (np.uint64(2**32 - 3) + rng.integers(0, 6, 80, np.uint64)).astype(dtype)
        new = np.concatenate([new, -new if dtype == np.int64 else new[:5], np.asarray([np.iinfo(dtype).max], dtype)])
    with x64():
        buffer = buffer_of()
        state = buffer.init(example_of(dtype))
        state = put(buffer, state, new)
        assert held(state) == best(list(new))
        assert state.scatter.own.lowest.item() == min(new[i] for i in best(list(new)))


def test_it_makes_no_difference_which_rows_come_in_one_call():
    rng, buffer, laned = np.random.default_rng(0), buffer_of(), buffer_of(lanes=4)
    ranks = rng.integers(0, 30, 96).astype(np.float32)
    ranks[rng.random(96) < 0.1] = np.nan
    rows = {"rank": ranks, "id": np.arange(96, dtype=np.int32)}
    few = buffer.init(example_of(np.float32))
    for i in range(0, 96, 7):
        few = put(buffer, few, ranks[i : i + 7], i)
    many = laned.extend(laned.init(example_of(np.float32)), {n: x.reshape(24, 4) for n, x in rows.items()})

    def step(state, given):
        return buffer.add(state, given), None

    run = jax.jit(lambda state: lax.scan(step, state, rows)[0], donate_argnums=0)
    scanned = run(buffer.init(example_of(np.float32)))
    assert ids(buffer, few) == ids(buffer, scanned) == held(many) == best(ranks.tolist())


@pytest.mark.optimized
@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="how programs say what is one kernel differs")
@pytest.mark.parametrize("words", [1, 2])
def test_a_row_is_put_in_by_one_kernel(words):
    """Loops that XLA thinks too large for one take several times as long, and look the same in every other way."""

    def insert(tree, rows):
        return top_k_tree._insert_one_by_one(tree, rows, jnp.ones(100, bool), jnp.int32(70), capacity=70)

    tree = jax.eval_shape(lambda: top_k_tree.init(70, words))
    compiled = jax.jit(insert).lower(tree, jax.ShapeDtypeStruct((100, words + 2), jnp.uint32)).compile()
    assert compiled.as_text().count("xla_cpu_small_call") == 2


def test_vmapped_buffers_keep_their_own():
    buffer, ranks = buffer_of(), np.random.default_rng(0).integers(0, 50, (3, 40)).astype(np.float32)
    ranks[1] = 0
    numbers = np.tile(np.arange(40, dtype=np.int32), (3, 1))
    extend = jax.jit(jax.vmap(buffer.extend))
    states = jax.tree.map(lambda x: np.stack([x] * 3), buffer.init(example_of(np.float32)))
    states = extend(states, {"rank": ranks, "id": numbers})
    states = extend(states, {"rank": ranks + np.float32([[0], [1], [0]]), "id": numbers + 40})
    for i in range(3):
        assert held(states)[i] == best([*ranks[i].tolist(), *(ranks[i] + (i == 1)).tolist()])


def test_a_replay_draws_ahead_from_it():
    rows = {"rank": np.arange(40, dtype=np.float32), "id": np.arange(40, dtype=np.int32)}
    rows["rank"][3] = np.nan
    replay = fbuf.Replay(buffer_of(prefetch=1, batch_size=4), example_of(np.float32))
    replay.extend(rows)
    assert min(replay.sample().data["id"].tolist()) >= 28 and len(replay) == CAPACITY
    assert replay.stats()["lowest_rank"] == 28 and replay.stats()["nan_ranks"] == 1


@pytest.mark.optimized
@pytest.mark.parametrize("number", [1, 100])
def test_a_write_alone_copies_nothing(number):
    buffer = buffer_of(capacity=200_000)
    example = example_of(np.float32)
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((number, *x.shape), x.dtype), example)
    memory = assert_inplace(buffer.extend, jax.eval_shape(buffer.init, example), rows)
    assert memory.bound < 200_000


test_checks = checks((check_capacity, [2, 65]), (check_ways, [(5, 9), (70, 3)]))

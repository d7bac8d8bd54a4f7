"""`writers.TopK`: what sorting all rows that ever came would leave stays, whatever the ranks are and however they come."""

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._algorithms import top_k_tree
from fbuf.testing import assert_inplace
from fbuf.writers import TopK
from tests.support import inplace, refusals
from tests.support.refusals import raises
from tests.support.tables import by_tier, checks
from tests.support.trees import x64

CAPACITY, AT_ONCE = 12, 40
DTYPES = np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint32, np.int8, np.uint8, np.bool_
KINDS = {np.dtype(dtype).name: dtype for dtype in DTYPES}
NAN = float("nan")


def order_of(rank):
    rank = Fraction(int(rank)) if isinstance(rank, (np.integer, np.bool_, bool, int)) else float(rank)
    return (False, 0) if isinstance(rank, float) and math.isnan(rank) else (True, rank)


def best(ranks, capacity=CAPACITY):
    by_rank = sorted(range(len(ranks)), key=lambda i: order_of(ranks[i]), reverse=True)  # of equal ones the first
    return sorted(by_rank[:capacity])


def buffer_of(rank="rank", capacity=CAPACITY, **parts):
    return fbuf.Buffer(capacity, writer=TopK(rank), **parts)


def put(buffer, state, ranks, first=0, mask=None):
    ranks, mask = np.asarray(ranks), np.ones(len(ranks), bool) if mask is None else mask
    for i in range(0, len(ranks), AT_ONCE):
        short = (0, max(i + AT_ONCE - len(ranks), 0))
        rank, there = np.pad(ranks[i : i + AT_ONCE], short), np.pad(mask[i : i + AT_ONCE], short)
        number = first + i + np.arange(AT_ONCE, dtype=np.int32)
        state = buffer.extend(state, {"rank": rank, "id": number}, mask=there)
    return state


def example_of(dtype):
    return {"rank": jax.ShapeDtypeStruct((), dtype), "id": jax.ShapeDtypeStruct((), np.int32)}


def ids(buffer, state):
    rows = jax.device_get(buffer.rows(state))
    return rows.data["id"][rows.mask].tolist()


def held(state):
    return np.sort(np.asarray(state.rows["id"]), axis=-1).tolist()


def ranks_of(rng, dtype, count):
    if dtype == np.bool_:
        return rng.random(count) < 0.5
    if np.issubdtype(dtype, np.integer):
        edges = [np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1, 2, 3, 100]
    else:
        tiny = 2.0**-24 if np.dtype(dtype).itemsize == 2 else 1e-45
        edges = [NAN, -NAN, math.inf, -math.inf, 0.0, -0.0, 1.5, -1.5, 1.75, 3.0, -3.0, tiny, -tiny]
    with np.errstate(all="ignore"):
        return np.asarray([edges[i] for i in rng.integers(len(edges), size=count)]).astype(dtype)


def check_program(kind, program):
    """Keep what sorting would leave, of rows given as number, seed and whether some are masked."""
    dtype, buffer = KINDS[kind], buffer_of()
    state, ranks, names, came = buffer.init(example_of(dtype)), [], [], 0
    for number, seed, masked in program:
        rng = np.random.default_rng(seed)
        new = ranks_of(rng, dtype, number)
        mask = rng.random(number) < 0.6 if masked else np.ones(number, bool)
        state = put(buffer, state, new, came, mask)
        ranks += [r for r, m in zip(new, mask, strict=True) if m]
        names += (came + np.flatnonzero(mask)).tolist()
        came += number
        assert ids(buffer, state) == [names[i] for i in best(ranks)]
    nans = sum(order_of(r) == (False, 0) for r in ranks)
    stats = buffer.stats(state)
    assert int(stats["nan_ranks"]) == nans and int(stats["refused_rows"]) == 0
    lowest = min((order_of(ranks[i]) for i in best(ranks)), default=(False, 0))
    floating = jnp.issubdtype(dtype, jnp.floating)
    least = -math.inf if floating else 0 if kind == "bool" else np.iinfo(dtype).min
    expected = lowest[1] if len(ranks) >= CAPACITY and lowest[0] else least
    assert stats["lowest_rank"].dtype == dtype and stats["lowest_rank"].item() == expected


def check_ways(capacity, number):
    """Keep the same rows one by one, as CPUs put them in, and all at once, as accelerators do."""

    @functools.partial(jax.jit, static_argnums=0)
    def by(way, tree, rows, keep, held):
        return way(tree, rows, keep, held, capacity=capacity)

    every_way = top_k_tree._insert_one_by_one, top_k_tree._insert_at_once
    ways = {way: [top_k_tree.init(capacity, 1), 0] for way in every_way}
    lowest = jax.jit(top_k_tree.lowest, static_argnums=(1, 2))
    undo = jax.jit(top_k_tree.undo, static_argnums=1)
    rng, came, every = np.random.default_rng(0), 0, []
    for turn in range(30):
        rank, keep = rng.integers(0, 40 + turn, number), rng.random(number) < 0.8
        arrival = came + np.arange(number)
        rows = np.stack([rank, np.full(number, 2**32 - 1), 2**32 - 1 - arrival], axis=-1).astype(np.uint32)
        came += number
        every += [tuple(row) for row in rows[keep].tolist()]
        kept = sorted(every)[-capacity:]
        for way, (tree, held) in ways.items():
            before = tree
            done = top_k_tree.Inserted(*by(way, tree, jnp.asarray(rows), jnp.asarray(keep), jnp.int32(held)))
            for wanted, same in ((True, before), (False, done.tree)):
                nodes = np.asarray(undo(done, capacity, wanted))
                np.testing.assert_array_equal(nodes[:-7], np.asarray(same)[:-7])  # the root's padding is for any use
            tree, slots = done.tree, done.slot
            held, slots = min(capacity, held + int((np.asarray(slots) < capacity).sum())), np.asarray(slots)
            leaves = np.asarray(tree)[:capacity]
            assert sorted(tuple(row[:3]) for row in leaves[:held].tolist()) == kept
            assert leaves[:held, 3].tolist() == list(range(held)) and (leaves[held:] == 2**32 - 1).all()
            last = {int(slot): i for i, slot in enumerate(slots) if slot < capacity}
            assert all(tuple(leaves[slot, :3]) == tuple(rows[i]) for slot, i in last.items())
            assert tuple(top_k_tree.root(np.asarray(tree))) == min(map(tuple, leaves))
            low = np.asarray(lowest(tree, capacity, number))
            assert [tuple(row[:3]) for row in low.tolist()][: len(kept)] == kept[:number]
            ways[way] = [tree, held]


def check_inplace(form):
    buffer, row = buffer_of(capacity=200_000, lanes=2), example_of(np.float32)
    if form == "vmap":
        state = inplace.leading(jax.eval_shape(buffer.init, row), 3)
        assert_inplace(jax.vmap(inplace.step_of(buffer, "set")), state, inplace.inputs((3,), row))
    else:
        inplace.assert_order(buffer, "set", row, steps=4 if form == "scan" else 0)


def check_capacity(capacity):
    """Keep the best however many there is room for."""
    buffer, rng, ranks = buffer_of(capacity=capacity), np.random.default_rng(capacity), []
    state = buffer.init(example_of(np.float32))
    for _ in range(3):
        new = rng.integers(0, 50, 50).astype(np.float32)
        state = put(buffer, state, new, len(ranks))
        ranks += new.tolist()
        empty = max(capacity - len(ranks), 0)  # slots, which hold zeros
        assert held(state)[empty:] == best(ranks, capacity)


PROGRAM = st.lists(st.tuples(st.sampled_from([1, 7, 40]), st.integers(0, 2**16), st.booleans()), max_size=6)
UNRANKED = """
init("score") => ValueError rank is 'score'; expected one of the leaves pair, rank, z.
init("pair") => TypeError
    leaf 'pair' is float32[2]; expected a number. Write TopK(lambda row: row['pair'].sum()).
init("z") => TypeError leaf 'z' is complex64[]
TopK(3) => TypeError TopK: rank is 3; expected the name of a leaf, or a function of a row
TopK(["rank"]) => TypeError TopK: rank is ['rank']; expected the name of a leaf
init(lambda row: row["pair"]) => TypeError
    > is float32[2]; expected a number. Write TopK(lambda row: row['reward'].sum()).
init(lambda row: None) => TypeError TopK: | returns NoneType; expected one real number a row
init(lambda row: {"rank": row["rank"]}) => TypeError TopK: | returns dict; expected one real number a row
"""


@pytest.mark.parametrize("kind", by_tier("float32", more=["bfloat16", "uint32"], exhaustive=KINDS))
@given(program=PROGRAM)
def test_what_sorting_all_rows_would_leave_stays(kind, program):
    check_program(kind, program)


@pytest.mark.more
def test_ranks_of_four_bits():
    buffer, dtype = buffer_of(capacity=3), jnp.dtype("int4")
    state = buffer.init(example_of(dtype))
    assert int(buffer.stats(state)["lowest_rank"]) == -8
    state = buffer.extend(state, {"rank": jnp.array([3, -8, 7, 0, 7], dtype), "id": np.arange(5, dtype=np.int32)})
    assert held(state) == [0, 2, 4] and int(buffer.stats(state)["lowest_rank"]) == 3


test_the_best_stay = checks((check_capacity, [1, 9]), (check_ways, [(70, 9)]))


def test_arrivals_beyond_2_to_32():
    buffer = buffer_of()
    state = buffer.init(example_of(np.float32))
    own = dataclasses.replace(state.scatter.own, arrived=jnp.array([0, 2**32 - 5], jnp.uint32))
    state = dataclasses.replace(state, scatter=dataclasses.replace(state.scatter, own=own))
    state = put(buffer, state, np.ones(20, np.float32))
    assert np.asarray(state.scatter.own.arrived).tolist() == [1, 35] and ids(buffer, state) == list(range(12))
    state = put(buffer, state, np.full(3, 2, np.float32), 40)
    assert ids(buffer, state) == [*range(9), 40, 41, 42]


def test_words_are_in_the_order_of_the_ranks():
    @jax.jit
    def there_and_back(ranks):
        words = [top_k_tree.encode(rank) for rank in ranks]
        return words, [top_k_tree.decode(w, r.dtype, jnp.zeros((), r.dtype)) for w, r in zip(words, ranks, strict=True)]

    every = [ranks_of(np.random.default_rng(0), dtype, 100) for dtype in KINDS.values()]
    for ranks, words, back in zip(every, *map(jax.device_get, there_and_back(every)), strict=True):
        order = [order_of(r) for r in ranks]
        place = {rank: i for i, rank in enumerate(sorted(set(order)))}
        assert np.array_equal(np.unique(words[:, 0], return_inverse=True)[1], [place[rank] for rank in order])
        assert all(b == r or order_of(r) == (False, 0) for b, r in zip(back, ranks, strict=True))


def test_a_function_of_a_row_ranks_it():
    pairs = np.arange(80, dtype=np.float32).reshape(40, 2) % 7
    rows = {"next": {"reward": pairs}, "id": np.arange(40, dtype=np.int32)}
    buffer = buffer_of(lambda row: row["next"]["reward"].sum() - row["id"] * jnp.float32(0.5))
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    assert held(state) == best((pairs.sum(axis=1) - rows["id"] * 0.5).tolist())
    assert buffer_of(("next", "value")).writer == TopK("next/value")
    array = buffer_of(lambda row: -row[0], capacity=2)
    state = array.extend(array.init(jnp.zeros(2)), jnp.array([[3.0, 0], [1.0, 0], [2.0, 0]]))
    assert sorted(np.asarray(state.rows)[:, 0].tolist()) == [1, 2]


def test_update_rows_does_not_change_a_rank_and_clear_begins_anew():
    buffer = buffer_of()
    state = put(buffer, buffer.init(example_of(np.float32)), np.arange(5, 17, dtype=np.float32))
    state = buffer.update_rows(state, buffer.rows(state).index, {"rank": np.zeros(12, np.float32)})
    assert ids(buffer, put(buffer, state, np.float32([5, 1, 5.5]), 40)) == [*range(1, 12), 42]
    state = buffer.clear(state)
    assert buffer.stats(state)["lowest_rank"] == -np.inf and not buffer.can_sample(state)
    assert ids(buffer, put(buffer, state, np.float32([5, 1, 5.5]), 40)) == [40, 41, 42]


def test_it_is_saved_with_its_ranks(tmp_path):
    buffer = buffer_of()
    ranks = np.random.default_rng(0).integers(0, 99, 80).astype(np.float32)
    state = put(buffer, buffer.init(example_of(np.float32)), ranks[:40])
    fbuf.save(tmp_path, buffer, state)
    again, loaded = fbuf.load(tmp_path)
    assert again == buffer
    loaded, state = (put(buffer, s, ranks[40:], 40) for s in (loaded, state))
    assert ids(again, loaded) == ids(buffer, state) == best(ranks.tolist())
    raises(fbuf.SchemaError, "chooses slots itself", fbuf.load, tmp_path, resize=5)
    raises(fbuf.SchemaError, "the writer of .* is another", fbuf.load, tmp_path, fbuf.Buffer(CAPACITY))


def test_what_cannot_rank_is_named():
    example = {"rank": jnp.float32(0), "pair": jnp.zeros(2), "z": jnp.complex64(0)}
    refusals.check_all(UNRANKED, {"init": lambda rank: buffer_of(rank).init(example), "TopK": TopK})


@pytest.mark.more
@pytest.mark.in_place
def test_a_step_copies_nothing():
    check_inplace("scan")


@pytest.mark.more
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


@pytest.mark.more
@pytest.mark.in_place
@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="how programs say what is one kernel differs")
@pytest.mark.parametrize("words", [1, 2])
def test_a_row_is_put_in_by_one_kernel(words):
    """Loops that XLA thinks too large for one take several times as long, and look the same in every other way."""

    def insert(tree, rows):
        return top_k_tree._insert_one_by_one(tree, rows, jnp.ones(100, bool), jnp.int32(70), capacity=70)

    tree = jax.eval_shape(lambda: top_k_tree.init(70, words))
    compiled = jax.jit(insert).lower(tree, jax.ShapeDtypeStruct((100, words + 2), jnp.uint32)).compile()
    assert compiled.as_text().count("xla_cpu_small_call") == 2


@pytest.mark.more
@pytest.mark.in_place
@pytest.mark.parametrize("number", [1, 64])
def test_what_takes_back_a_failed_write_copies_no_tree(number):
    buffer = fbuf.Buffer(50_000, writer=fbuf.writers.TopK("rank"), storage=fbuf.storages.Host())
    state = buffer.init({"rank": np.float32(0)})
    rows = {"rank": jax.ShapeDtypeStruct((number,), np.float32)}
    compiled = jax.jit(buffer.extend, donate_argnums=0).lower(state, rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < state.scatter.own.tree.nbytes // 2


test_checks = checks(more=[(check_capacity, [65]), (check_ways, [(5, 9)])])


test_ways = checks(exhaustive=[(check_ways, [(600, 40)])])


test_topk_in_place = pytest.mark.in_place(checks(exhaustive=[(check_inplace, ["jit", "vmap"])]))

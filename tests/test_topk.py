"""`writers.TopK`: what sorting all rows that ever came would leave stays, whatever the ranks are and however they come.

How such a writer goes together with storages, samplers and verbs is in tests/test_scattered.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf import _tournament
from fbuf.views import Row, Sequence, Transition
from fbuf.writers import TopK
from tests.support.topk import (
    CAPACITY,
    KINDS,
    best,
    buffer_of,
    check_capacity,
    check_inplace,
    check_program,
    check_ways,
    example_of,
    held,
    ids,
    order_of,
    put,
    ranks_of,
)

PROGRAM = st.lists(st.tuples(st.sampled_from([1, 7, 40]), st.integers(0, 2**16), st.booleans()), max_size=6)


@given(program=PROGRAM)
def test_what_sorting_all_rows_would_leave_stays(program: list[tuple[int, int, bool]]) -> None:
    check_program("float32", program)


def test_ranks_of_four_bits() -> None:
    buffer, dtype = buffer_of(capacity=3), jnp.dtype("int4")
    state = buffer.init(example_of(dtype))
    assert int(buffer.stats(state)["lowest_rank"]) == -8
    state = buffer.extend(state, {"rank": jnp.array([3, -8, 7, 0, 7], dtype), "id": np.arange(5, dtype=np.int32)})
    assert held(state) == [0, 2, 4] and int(buffer.stats(state)["lowest_rank"]) == 3


def test_one_slot() -> None:
    check_capacity(1)


def test_arrivals_beyond_2_to_32() -> None:
    """Of equal ranks the first stay, though the low word of the count came round between them."""
    buffer = buffer_of()
    state = buffer.init(example_of(np.float32))
    own = dataclasses.replace(state.scatter.own, arrived=jnp.array([0, 2**32 - 5], jnp.uint32))
    state = dataclasses.replace(state, scatter=dataclasses.replace(state.scatter, own=own))
    state = put(buffer, state, np.ones(20, np.float32))
    assert np.asarray(state.scatter.own.arrived).tolist() == [1, 35] and ids(buffer, state) == list(range(12))
    state = put(buffer, state, np.full(3, 2, np.float32), 40)
    assert ids(buffer, state) == [*range(9), 40, 41, 42]


def test_one_by_one_and_at_once_keep_the_same_rows() -> None:
    check_ways(70, 9)


def test_words_are_in_the_order_of_the_ranks() -> None:
    @jax.jit
    def there_and_back(ranks: Any) -> Any:
        words = [_tournament.encode(rank) for rank in ranks]
        return words, [
            _tournament.decode(w, r.dtype, jnp.zeros((), r.dtype)) for w, r in zip(words, ranks, strict=True)
        ]

    every = [ranks_of(np.random.default_rng(0), dtype, 100) for dtype in KINDS.values()]
    for ranks, words, back in zip(every, *map(jax.device_get, there_and_back(every)), strict=True):
        order = [order_of(r) for r in ranks]
        place = {rank: i for i, rank in enumerate(sorted(set(order)))}
        assert np.array_equal(np.unique(words[:, 0], return_inverse=True)[1], [place[rank] for rank in order])
        assert all(b == r or order_of(r) == (False, 0) for b, r in zip(back, ranks, strict=True))


def test_a_function_of_a_row_ranks_it() -> None:
    pairs = np.arange(80, dtype=np.float32).reshape(40, 2) % 7
    rows = {"next": {"reward": pairs}, "id": np.arange(40, dtype=np.int32)}
    buffer = buffer_of(lambda row: row["next"]["reward"].sum() - row["id"] * jnp.float32(0.5))
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    assert held(state) == best((pairs.sum(axis=1) - rows["id"] * 0.5).tolist())
    assert buffer_of(("next", "value")).writer == TopK("next/value")
    array = buffer_of(lambda row: -row[0], capacity=2)
    state = array.extend(array.init(jnp.zeros(2)), jnp.array([[3.0, 0], [1.0, 0], [2.0, 0]]))
    assert sorted(np.asarray(state.rows)[:, 0].tolist()) == [1, 2]


def test_update_rows_does_not_change_a_rank_and_clear_begins_anew() -> None:
    buffer = buffer_of()
    state = put(buffer, buffer.init(example_of(np.float32)), np.arange(5, 17, dtype=np.float32))
    state = buffer.update_rows(state, buffer.rows(state).index, {"rank": np.zeros(12, np.float32)})
    assert ids(buffer, put(buffer, state, np.float32([5, 1, 5.5]), 40)) == [*range(1, 12), 42]
    state = buffer.clear(state)
    assert buffer.stats(state)["lowest_rank"] == -np.inf and not buffer.can_sample(state)
    assert ids(buffer, put(buffer, state, np.float32([5, 1, 5.5]), 40)) == [40, 41, 42]


def test_it_is_saved_with_its_ranks(tmp_path: Path) -> None:
    buffer = buffer_of()
    ranks = np.random.default_rng(0).integers(0, 99, 80).astype(np.float32)
    state = put(buffer, buffer.init(example_of(np.float32)), ranks[:40])
    fbuf.save(tmp_path, buffer, state)
    again, loaded = fbuf.load(tmp_path)
    assert again == buffer
    loaded, state = (put(buffer, s, ranks[40:], 40) for s in (loaded, state))
    assert ids(again, loaded) == ids(buffer, state) == best(ranks.tolist())
    with pytest.raises(fbuf.SchemaError, match="says itself where rows go"):
        fbuf.load(tmp_path, resize=5)
    with pytest.raises(fbuf.SchemaError, match=r"the writer of .* is another"):
        fbuf.load(tmp_path, fbuf.Buffer(CAPACITY, storage=buffer.storage))


def _by_id(row: Any) -> Any:
    return row["id"]


def test_a_function_is_saved_by_name(tmp_path: Path) -> None:
    buffer = buffer_of(_by_id)
    state = buffer.init(example_of(np.float32))
    fbuf.save(tmp_path, buffer, state)
    with pytest.raises(fbuf.SchemaError, match=r"with the function .*_by_id, which no file can hold"):
        fbuf.load(tmp_path)
    assert fbuf.load(tmp_path, buffer)[0] == buffer


@pytest.mark.parametrize("view", [Transition(), Sequence(4)])
def test_views_that_look_at_neighbours_are_refused(view: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"looks at neighbouring rows, but TopK\(rank='rank'\) may replace any\. Use view=fbuf\.views\.Row",
    ):
        buffer_of(view=view)
    assert buffer_of(view=Row()).dense


@pytest.mark.parametrize(
    ("rank", "error", "message"),
    [
        ("score", ValueError, r"rank names leaf 'score', but rows have pair, rank, z\. Use one of those"),
        (
            "pair",
            TypeError,
            r"leaf 'pair' is float32\[2\]; expected one real number a row\. Write TopK\(lambda row: row\['pair'\]",
        ),
        ("z", TypeError, r"leaf 'z' is complex64\[\]"),
        (lambda row: row["pair"], TypeError, r"what .* gives is float32\[2\]; expected one real number"),
        (lambda row: None, TypeError, r"TopK: what .* gives is NoneType; expected one real number a row. Write TopK"),
        (lambda row: {"rank": row["rank"]}, TypeError, r"what .* gives is dict; expected one real number a row"),
    ],
)
def test_what_cannot_rank_is_named(rank: Any, error: type[Exception], message: str) -> None:
    example = {"rank": jnp.float32(0), "pair": jnp.zeros(2), "z": jnp.complex64(0)}
    with pytest.raises(error, match=message):
        buffer_of(rank).init(example)


def test_a_rank_is_a_name_or_a_function() -> None:
    for wrong in (3, None, ["rank"]):
        with pytest.raises(TypeError, match=r"TopK: rank is .*; expected the name of a leaf, or a function of a row"):
            TopK(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"writer is the class TopK; expected a value. Write TopK\(\.\.\.\)"):
        fbuf.Buffer(10, writer=TopK)  # type: ignore[arg-type]


@pytest.mark.optimized
def test_a_step_copies_nothing() -> None:
    check_inplace("scan")

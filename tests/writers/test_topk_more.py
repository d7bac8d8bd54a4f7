"""More of `writers.TopK`: ranks of other kinds, other capacities, lanes and scans, a replay, conversions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from fbuf._algorithms import top_k_tree
from tests.support.tables import checks
from tests.support.trees import x64
from tests.writers import test_topk as quick

pytestmark = pytest.mark.more


@pytest.mark.parametrize("kind", ["bfloat16", "uint32"])
@given(program=quick.PROGRAM)
def test_what_sorting_all_rows_would_leave_stays(kind, program):
    quick.check_program(kind, program)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint64])
def test_ranks_of_64_bits(dtype):
    rng = np.random.default_rng(0)
    if dtype == np.float64:
        new = np.concatenate([quick.ranks_of(rng, dtype, 40), 1 + rng.integers(0, 20, 40) * 2.0**-50]).astype(dtype)
    else:
        new = (np.uint64(2**32 - 3) + rng.integers(0, 6, 80, np.uint64)).astype(dtype)
        new = np.concatenate([new, -new if dtype == np.int64 else new[:5], np.asarray([np.iinfo(dtype).max], dtype)])
    with x64():
        buffer = quick.buffer_of()
        state = buffer.init(quick.example_of(dtype))
        state = quick.put(buffer, state, new)
        assert quick.held(state) == quick.best(list(new))
        assert state.scatter.own.lowest.item() == min(new[i] for i in quick.best(list(new)))


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


test_checks = checks((quick.check_capacity, [65]), (quick.check_ways, [(5, 9)]))

"""Samplers, views, writers and storages inside `jax.shard_map(check_vma=True)`."""

import jax
import pytest

from tests.support.combinations import EXAMPLE, SAMPLERS, VIEWS, make
from tests.support.shard_map import check_types, check_values
from tests.support.tables import checks

_HERE = [name for name in SAMPLERS if "host" not in name]
_VIEWS = list(VIEWS)


@pytest.mark.parametrize("sampler", _HERE)
def test_samplers_keep_the_types_of_their_arrays(sampler):
    number = _HERE.index(sampler)
    view = "Episode" if "episodes" in sampler else _VIEWS[number % len(_VIEWS)]
    check_types(("Device", "Deduplicated")[number % 2], sampler, view)


CASES = [("Device", "Epoch"), ("Device", "Prioritized(replace=False)"), ("Deduplicated", "Prioritized")]


@pytest.mark.parametrize("sampler", _HERE)
def test_no_leaf_of_a_state_is_empty(sampler):
    """XLA replicates arrays without elements, and a second call would compile again."""
    for storage, view in (("Device", "Row"), ("Deduplicated", "Episode"), ("Device", "Hindsight")):
        state = jax.eval_shape(make(storage, sampler, view).init, EXAMPLE)
        empty = [path for path, leaf in jax.tree_util.tree_leaves_with_path(state) if not leaf.size]
        assert not empty


test_checks = checks(
    (check_types, [("Device", "Prioritized", "Row", writer) for writer in ["TopK", "Reservoir"]]),
    (check_values, [(storage, sampler, "Transition") for storage, sampler in CASES]),
)

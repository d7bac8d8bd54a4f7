"""A sharded buffer on one device; everything else is in tests/more/sharded."""

import jax

from fbuf.sharded import Sharded
from tests.support.sharded import buffer_of, example, mesh_of


def test_arrays_of_all_shards_are_split() -> None:
    sharded = Sharded(buffer_of("prioritized"), mesh_of(1))
    state = sharded.init(example())
    assert all(leaf.ndim and leaf.size for leaf in jax.tree.leaves(state))
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(state)} == {jax.sharding.PartitionSpec("data")}

"""A sharded buffer on one device, and some cases on eight in a process of their own; the others are of higher tiers."""

import jax

from fbuf.sharded import Sharded
from tests.support.sharded import buffer_of, example, mesh_of, run

FILES = [f"tests/sharded/{name}.py" for name in ("eight_devices", "eight_devices_rows", "eight_devices_mixture")]
CASES = (
    "(priorities_reach and batch and local) or (mass and local) or (every_anchor and sampler0 and view1) or all_its or "
    "(probabilities_of_one and batch and global) or (rows_are_those and local) or (0.25 and 0.75) or fractions_belong"
)


def test_arrays_of_all_shards_are_split() -> None:
    sharded = Sharded(buffer_of("prioritized"), mesh_of(1))
    state = sharded.init(example())
    assert all(leaf.ndim and leaf.size for leaf in jax.tree.leaves(state))
    split = jax.sharding.NamedSharding(sharded.mesh, jax.sharding.PartitionSpec("data"))
    assert all(leaf.sharding.is_equivalent_to(split, leaf.ndim) for leaf in jax.tree.leaves(state))


def test_eight_devices() -> None:
    run(FILES[0], CASES, *FILES[1:])

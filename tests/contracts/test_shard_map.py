"""A buffer inside `jax.shard_map(check_vma=True)`."""

from tests.support.shard_map import check_types


def test_methods_work_inside_shard_map():
    check_types("Deduplicated", "Prioritized", "Transition")

"""Every sampler with every view inside `jax.shard_map(check_vma=True)`: see `tests/more/contracts/test_shard_map.py`."""

import pytest

from tests.contracts.test_shard_map import check_types
from tests.support.combinations import REFUSED, SAMPLERS, VIEWS

CASES = [
    (storage, sampler, view)
    for storage in ("Device", "Deduplicated")
    for sampler in SAMPLERS
    for view in VIEWS
    if "host" not in sampler and (sampler, view) not in REFUSED
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_methods_keep_the_types_of_their_arrays(case: tuple[str, str, str]) -> None:
    check_types(*case)

"""The other storages, with and without prefetch: see `tests/torch/test_torch_safety.py`."""

import pytest

from tests.more.torch.test_torch_safety import test_writes_are_in_place_while_batches_are_held  # noqa: F401
from tests.torch.test_torch_safety import (  # noqa: F401
    STORAGES,
    test_methods_of_a_replay_take_tensors,
    test_tensors_are_stored_as_numpy_arrays_are,
    test_writing_into_a_batch_changes_no_buffer_and_no_other_batch,
)


@pytest.fixture(params=[(name, prefetch) for name in STORAGES for prefetch in (0, 1)], ids=str)
def case(request):
    return request.param

"""The other storages, with and without prefetch: see `tests/torch/test_torch_safety.py`."""

from tests.more.torch.test_torch_safety import (  # noqa: F401
    test_tensors_are_stored_as_numpy_arrays_are,
    test_writes_are_in_place_while_batches_are_held,
)
from tests.support.tables import one_of
from tests.torch.test_torch_safety import (  # noqa: F401
    STORAGES,
    test_methods_of_a_replay_take_tensors,
    test_writing_into_a_batch_changes_no_buffer_and_no_other_batch,
)

case = one_of(*[(name, prefetch) for name in STORAGES for prefetch in (0, 1)])

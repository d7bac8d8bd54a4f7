"""Rows on the device, and writes in place while batches are held: see `tests/torch/test_torch_safety.py`."""

import jax
import pytest
import torch

from fbuf.torch import to_torch
from tests.support.tables import one_of
from tests.torch.test_torch_safety import (  # noqa: F401
    replay,
    rows,
    test_methods_of_a_replay_take_tensors,
    test_tensors_are_stored_as_numpy_arrays_are,
    test_writing_into_a_batch_changes_no_buffer_and_no_other_batch,
)

case = one_of(("device", 0))


@pytest.mark.optimized
def test_writes_are_in_place_while_batches_are_held(case):
    made, alive = replay(case, strict=False), []
    made.extend(rows(32))

    def places():
        leaves = jax.tree.leaves((made.state.sampler, made.state.rows))
        return [x.unsafe_buffer_pointer() for x in leaves if isinstance(x, jax.Array) and x.nbytes >= 32]

    for turn in range(3):
        alive.append(made.sample(to="torch"))
        alive.append(to_torch(made.rows()))
        before = places()
        made.extend(rows(4, turn))
        made.update_priority(alive[-2].index, torch.rand(8))
        assert sorted(places()) == sorted(before)

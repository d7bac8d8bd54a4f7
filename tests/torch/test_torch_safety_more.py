"""Rows on the device, tensors of any layout, and writes in place while batches are held; see `tests/torch`."""

import jax
import numpy as np
import pytest

import fbuf
from fbuf.torch import to_torch
from tests.support.tables import one_of, select_tests

torch = pytest.importorskip("torch")

from tests.torch import test_torch_safety as quick  # noqa: E402
from tests.torch.test_torch_safety import replay, rows  # noqa: E402

pytestmark = pytest.mark.more

case = one_of(("device", 0))
globals().update(select_tests(quick, "case"))


def as_tensors(way, x):
    """The values of `x` in memory of their own."""
    if way == "strided":
        return torch.from_numpy(np.repeat(x, 2, axis=0))[::2]
    if way == "transposed":
        return torch.from_numpy(np.ascontiguousarray(x.T)).permute(*range(x.ndim - 1, -1, -1))
    return torch.from_numpy(x.copy())


def test_tensors_are_stored_as_numpy_arrays_are(case):
    plain, ours = replay(case), replay(case)
    for turn, way in enumerate(("as it is", "strided", "transposed", "beside numpy")):
        new = rows(6, turn)
        tensors = {n: as_tensors(way, x) for n, x in new.items()}
        if way == "beside numpy":
            tensors["reward"] = new["reward"]
        one = {n: x[0].clone() if isinstance(x, torch.Tensor) else x[0] for n, x in tensors.items()}
        plain.extend(new)
        ours.extend(tensors)
        plain.add({n: x[0] for n, x in new.items()})
        ours.add(one)
        for x in (*tensors.values(), *one.values()):  # after the call they are the caller's again
            if isinstance(x, torch.Tensor):
                x.fill_(7)
    jax.tree.map(np.testing.assert_array_equal, ours.rows().data, plain.rows().data)
    a, b = plain.sample(to="torch"), ours.sample(to="torch")
    assert all(torch.equal(x, y) for x, y in zip(jax.tree.leaves(a.data), jax.tree.leaves(b.data), strict=True))
    if case[0] != "ragged":
        example = {"obs": torch.zeros(8, 8, dtype=torch.uint8), "reward": torch.tensor(0.0)}
        fbuf.Replay(ours.buffer, example).extend(new)


@pytest.mark.in_place
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

"""Ragged rows as nested tensors, in and out."""

import sys

import numpy as np
import pytest
import torch

import fbuf
from fbuf.torch import nested, to_tensordict
from tests.support.refusals import raises

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def ragged():
    storage = fbuf.storages.Ragged(maximum={"padded": (6,), "grid": (4, 3)})
    row = {
        "tokens": np.zeros(0, np.int32),
        "padded": np.zeros(0, np.int32),
        "grid": np.zeros((0, 3), np.float32),
        "text": "",
    }
    return fbuf.Replay(fbuf.Buffer(16, storage=storage), row)


def plain():
    replay = fbuf.Replay(fbuf.Buffer(4), {"obs": np.float32(0)})
    replay.extend({"obs": np.ones(2, np.float32)})
    return replay.sample(2)


def test_nested_tensors_are_stored_and_returned():
    replay = ragged()
    lengths = [3, 0, 6, 1]
    values = [torch.arange(n, dtype=torch.int32) + 10 * i for i, n in enumerate(lengths)]
    jagged = torch.nested.nested_tensor(values, layout=torch.jagged)
    strided = torch.nested.nested_tensor(values)
    grids = [np.full((min(n, 4), 3), n, np.float32) for n in lengths]
    replay.extend({"tokens": jagged, "padded": strided, "grid": grids, "text": list("abcd")})
    rows = replay.last(4)
    for name in ("tokens", "padded"):
        out = nested(rows, name)
        assert out.layout == torch.jagged and [x.tolist() for x in out.unbind()] == [x.tolist() for x in values]
    assert [tuple(x.shape) for x in nested(rows, "grid").unbind()] == [(min(n, 4), 3) for n in lengths]
    raises(KeyError, r"no ragged leaf 'other' \(there are: ", nested, rows, "other")
    batch = replay.sample(8, to="torch")
    assert nested(batch, "padded").shape[0] == 8
    raises(KeyError, r"no ragged leaf 'obs' \(there are: none\)", lambda: nested(plain(), "obs"))


def test_rows_that_differ_in_a_second_axis_are_refused():
    storage = fbuf.storages.Ragged(maximum={"x": (3, 3)})
    replay = fbuf.Replay(fbuf.Buffer(8, storage=storage), {"x": np.zeros((0, 0), np.float32)})
    replay.extend([{"x": np.ones((2, 3), np.float32)}, {"x": np.ones((3, 1), np.float32)}])
    raises(ValueError, r"rows of leaf 'x' differ in axis 1\. Use", lambda: nested(replay.last(2), "x"))


def test_a_missing_tensordict_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensordict", None)
    raises(ImportError, "tensordict is missing .*pip install tensordict", lambda: to_tensordict(plain()))

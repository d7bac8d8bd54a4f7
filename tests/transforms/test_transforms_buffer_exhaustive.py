import dataclasses

import jax
import numpy as np
import pytest

from fbuf.transforms import Chain, Map, Normalize, Rename, Scale
from tests.support.tables import one_of
from tests.support.transforms import close, laned_windows
from tests.transforms.test_transforms_buffer_more import test_steps_are_in_place  # noqa: F401

pytestmark = pytest.mark.exhaustive

settings = one_of({})


def collapsed(window):
    """One value a window beside its rows: a number, a vector as wide as rows are, and the state it begins with."""
    total = {"total": window["reward"].sum(), "wide": window["x"].sum(0), "begins": window["x"][0]}
    return {**window, **total}


def test_one_value_a_window_is_not_taken_for_its_rows():
    """Though it is as long as the window, and rows are missing there."""
    names = ("total", "wide", "begins", "reward")
    later = (Scale(names, 2.0, 1.0), Rename({"wide": "x/wide", "x": "x/rows"}), Normalize(("x/wide", "x/rows"), of="x"))
    buffer, state = laned_windows(4, (Map(collapsed), Chain(later)))
    x = np.asarray(state.rows["x"])[:9]
    batch = buffer.peek(state, jax.random.key(0), 16).data
    plain_buffer = dataclasses.replace(buffer, on_read=None)
    plain = plain_buffer.peek(buffer.convert(plain_buffer, state), jax.random.key(0), 16).data
    there = np.asarray(plain["mask"])
    assert not there.all()
    before = np.asarray(plain["x"])
    close(batch["total"], np.asarray(plain["reward"]).sum(1) * 2 + 1)
    close(batch["begins"], before[:, 0] * 2 + 1)
    close(batch["reward"], np.where(there, np.asarray(plain["reward"]) * 2 + 1, 0).astype(np.float32))
    mean, std = x.mean(0), x.std(0)
    close(batch["x"]["wide"], (before.sum(1) * 2 + 1 - mean) / std)
    close(batch["x"]["rows"], np.where(there[..., None], (before - mean) / std, 0))

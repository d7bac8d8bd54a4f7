"""`Device(layout="tiles")` gives the batches, rows and checkpoints of `Device(layout="rows")`."""

from typing import Any

import jax
import numpy as np
import pytest

from fbuf._checkpoint import device_arrays
from fbuf.storages import Device
from tests.support.layouts import (
    EXAMPLE,
    buffer_of,
    check_checkpoints,
    check_layouts_agree,
    packed_of,
    rows_of,
)


def test_both_layouts_give_the_same_batches() -> None:
    check_layouts_agree("stacks")


def test_by_default_the_device_that_init_places_on_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Device().layout is None
    for platform, packs in ("cpu", False), ("gpu", False), ("tpu", True):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert bool(packed_of(buffer_of(None).init(EXAMPLE))) is packs
    with pytest.raises(ValueError, match="layout"):
        Device("columns")


def test_plan_tells_the_padded_bytes() -> None:
    buffers = [buffer_of(layout) for layout in ("rows", "tiles")]
    stored = [buffer.nbytes(buffer.init(EXAMPLE))["device"] for buffer in buffers]
    planned = [buffer.plan(EXAMPLE).device for buffer in buffers]
    assert stored[1] - stored[0] == planned[1] - planned[0] == 24 * (1024 - 12 * 84)


def test_checkpoints_move_between_layouts(tmp_path: Any) -> None:
    check_checkpoints("tiles", "rows", tmp_path / "a")


def test_marks_of_packed_blocks_tell_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an accelerator, where blocks are compared by marks."""
    monkeypatch.setattr(device_arrays, "SMALL_BYTES", 0)
    monkeypatch.setattr(device_arrays, "_platform", lambda array: "tpu")
    buffer = buffer_of("tiles", capacity=600)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0, 100))
    rows = jax.tree.map(np.array, rows_of(0, 100))
    for name, row in ("obs", 44), ("action", 299):
        rows[name].reshape(300, -1)[row] = 7
    later = buffer.extend(buffer.init(EXAMPLE), rows)
    for name, row in ("obs", 44), ("action", 299):
        before, after = (device_arrays.PackedSource(s.rows[name]) for s in (state, later))
        assert before.shape == (300, *EXAMPLE[name].shape) and before.marks is not None
        assert np.array_equal(before[3:9], np.asarray(state.rows[name])[3:9])
        differs = [a != b for a, b in zip(before.marks, after.marks, strict=True)]
        assert np.flatnonzero(differs).tolist() == [row // before.block]

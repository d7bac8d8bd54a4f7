"""`Device(layout="tiles")` gives the batches, rows and checkpoints of `Device(layout="rows")`."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._checkpoint import device_arrays
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, Deduplicated, Device
from tests.support.layouts import (
    EXAMPLE,
    buffer_of,
    check_checkpoints,
    check_layouts_agree,
    packed_of,
    rows_of,
)
from tests.support.tables import by_tier
from tests.support.trees import same


@pytest.mark.parametrize("view", by_tier("row", more=["stacks", "windows"]))
def test_both_layouts_give_the_same_batches(view: str) -> None:
    check_layouts_agree(view)


def test_by_default_the_device_that_init_places_on_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Device().layout is None
    for platform, packs in ("cpu", False), ("gpu", False), ("tpu", True):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert bool(packed_of(buffer_of(None).init(EXAMPLE))) is packs
    with pytest.raises(ValueError, match="layout"):
        Device("columns")


@pytest.mark.more
def test_plan_tells_the_padded_bytes() -> None:
    buffers = [buffer_of(layout) for layout in ("rows", "tiles")]
    stored = [buffer.nbytes(buffer.init(EXAMPLE))["device"] for buffer in buffers]
    planned = [buffer.plan(EXAMPLE).device for buffer in buffers]
    assert stored[1] - stored[0] == planned[1] - planned[0] == 24 * (1024 - 12 * 84)


@pytest.mark.more
def test_checkpoints_move_between_layouts(tmp_path: Any) -> None:
    check_checkpoints("tiles", "rows", tmp_path / "a")


@pytest.mark.more
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


@pytest.mark.more
@pytest.mark.parametrize("calls", [2, 5])  # a part of the capacity, and all of it
@pytest.mark.parametrize(("saved", "loaded"), [*itertools.product(("rows", "tiles"), repeat=2)])
def test_checkpoints_are_filled_block_by_block(
    saved: str, loaded: str, calls: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fbuf._checkpoint.device_arrays._HOST_BYTES", 16)
    monkeypatch.setattr("fbuf._checkpoint.device_arrays._PUT_BYTES", 8192)
    check_checkpoints(saved, loaded, tmp_path / "a", calls)


@pytest.mark.more
@pytest.mark.parametrize("storage", [Compressed(("obs",)), Deduplicated(("obs",), blocks=1024)], ids=str)
def test_packed_rows_move_to_other_storages_and_back(storage: Any, tmp_path: Any) -> None:
    buffer = buffer_of("tiles", sampler=Prioritized())
    other = dataclasses.replace(buffer, storage=storage)
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(0))
    rows = buffer.rows(state)
    fbuf.save(tmp_path / "a", buffer, state)
    moved = fbuf.load(tmp_path / "a", other)[1]
    same(rows.data, other.rows(moved).data)
    fbuf.save(tmp_path / "b", other, moved)
    back = fbuf.load(tmp_path / "b", buffer)[1]
    assert packed_of(back)
    same(rows.data, buffer.rows(back).data)


@pytest.mark.more
def test_packed_states_are_vmapped_replayed_and_shown() -> None:
    plain, buffer = (buffer_of(layout) for layout in ("rows", "tiles"))
    rows = [rows_of(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
    out = []
    for each in (plain, buffer):
        states = jax.vmap(lambda rows, each=each: each.extend(each.init(EXAMPLE), rows))(stacked)
        keys = jax.random.split(jax.random.key(0), 3)
        out.append(jax.vmap(lambda s, k, each=each: each.peek(s, k, 4))(states, keys))
    same(*out)
    state = buffer.extend(buffer.init(EXAMPLE), rows[0])
    replay = fbuf.Replay(buffer, EXAMPLE)
    replay.extend(rows[0])
    got = replay.sample(8, to="numpy")
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(got.data))
    known = {bytes(frame) for frame in rows[0]["obs"].reshape(-1, 12 * 84)}
    assert all(frame.tobytes() in known for frame in got.data["obs"])
    assert str(buffer.summary(state)).count("float32[5]") == 1


@pytest.mark.more
@pytest.mark.in_place
def test_steps_are_in_place() -> None:
    buffer = buffer_of("tiles", "stacks", 30_000, sampler=Prioritized())

    def step(state: Any, rows: Any, key: Any) -> Any:
        state, batch = buffer.sample(buffer.extend(state, rows), key, 8)
        return buffer.update_priority(state, batch.index, jnp.ones(8)), batch.data

    abstract = jax.eval_shape(buffer.init, EXAMPLE)
    compiled = jax.jit(step, donate_argnums=0).lower(abstract, rows_of(0, 2), jax.random.key(0)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 100_000  # the rows take 31 MB

"""Both layouts of `Device` with other views, in checkpoints that are filled block by block, in files of other storages."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, Deduplicated
from tests.support.layouts import EXAMPLE, buffer_of, check_checkpoints, check_layouts_agree, packed_of, rows_of
from tests.support.trees import same

pytestmark = pytest.mark.more


@pytest.mark.parametrize("view", ["row", "windows"])
def test_both_layouts_give_the_same_batches(view: str) -> None:
    check_layouts_agree(view)


@pytest.mark.parametrize("calls", [2, 5])  # a part of the capacity, and all of it
@pytest.mark.parametrize(("saved", "loaded"), [*itertools.product(("rows", "tiles"), repeat=2)])
def test_checkpoints_are_filled_block_by_block(
    saved: str, loaded: str, calls: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fbuf._checkpoint.device_arrays._HOST_BYTES", 16)
    monkeypatch.setattr("fbuf._checkpoint.device_arrays._PUT_BYTES", 8192)
    check_checkpoints(saved, loaded, tmp_path / "a", calls)


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


@pytest.mark.in_place
def test_steps_are_in_place() -> None:
    buffer = buffer_of("tiles", "stacks", 30_000, sampler=Prioritized())

    def step(state: Any, rows: Any, key: Any) -> Any:
        state, batch = buffer.sample(buffer.extend(state, rows), key, 8)
        return buffer.update_priority(state, batch.index, jnp.ones(8)), batch.data

    abstract = jax.eval_shape(buffer.init, EXAMPLE)
    compiled = jax.jit(step, donate_argnums=0).lower(abstract, rows_of(0, 2), jax.random.key(0)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 100_000  # the rows take 31 MB

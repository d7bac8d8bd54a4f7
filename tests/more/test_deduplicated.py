"""`storages.Deduplicated`: kinds of leaves, chunks, bad hashes, counters, growth, loops and memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import _blocktable
from fbuf.samplers import Prioritized
from fbuf.storages import Deduplicated, _coded
from fbuf.views import Transition
from tests.support.deduplicated import (
    KEY,
    SMALL,
    Trial,
    check,
    check_leaves,
    check_programs,
    same,
    same_bits,
    small,
)
from tests.support.deduplicated_device import (
    OBS,
    check_masked_draws,
    noise_rows,
    numbered,
    play,
)


@pytest.mark.parametrize("kind", ["frames, colour, stacks", "one table"])
def test_leaves_of_every_kind_are_exact(kind: str) -> None:
    check_leaves(kind, 3)


def test_rows_and_references_are_right_after_any_calls() -> None:
    check_programs("refuse", 14, 33)  # two of three lanes at once


def test_draws_of_refused_rows_are_masked() -> None:
    check_masked_draws("prioritized", "transition")


def sprites(number: int, side: int) -> np.ndarray:
    """Shapes that move and turn over a picture."""
    rng = np.random.default_rng(1)
    frames = np.repeat(rng.integers(0, 256, (1, side, side), np.uint8), number, axis=0)
    step = np.arange(number)
    for sprite in range(3):
        speed = rng.integers(1, 5, 2)
        y, x = (step * speed[0] + 7 * sprite) % (side - 6), (step * speed[1]) % (side - 6)
        for i in range(6):
            for j in range(6):
                frames[step, y + i, x + j] = (40 * sprite + 8 * i + (j * step) % 3).astype(np.uint8)
    return frames


def test_frames_of_noise_of_one_value_and_of_sprites_are_exact() -> None:
    """Through one ring, which is cleared in between; each block distinct, then few."""
    trial = Trial(fbuf.Buffer(900, storage=Deduplicated(keys=("obs",), blocks=2**15)), {"obs": ((42, 42), np.uint8)})
    rng, number = np.random.default_rng(1), 4000
    value = np.repeat(rng.integers(0, 256, 1 + number // 37).astype(np.uint8), 37)[:number]
    kinds = {
        "noise": rng.integers(0, 256, (number, 42, 42), np.uint8),
        "constant": value[:, None, None] * np.ones((1, 42, 42), np.uint8),
        "sprites": sprites(number, 42),
    }
    for kind, frames in kinds.items():
        trial.clear()
        play(trial, frames, 250)
        stats = jax.device_get(trial.buffer.stats(trial.state))
        assert stats["refused_rows"] == stats["retired_rows"] == 0
        if kind == "noise":
            assert stats["blocks"] == 900 * trial.state.rows.cuts[0].grid.blocks
        elif kind == "constant":
            assert stats["blocks"] < 150
    assert trial.compared >= 3 * number


def test_lanes_by_the_dozen() -> None:
    lanes = _coded._CHUNK // 4 + 3
    buffer = fbuf.Buffer(3 * lanes, lanes=lanes, storage=Deduplicated(keys=("obs",), block=(4, 4), blocks=2**13))
    trial, rng = Trial(buffer, {"obs": ((8, 8), np.uint8)}), np.random.default_rng(0)
    pool = rng.integers(0, 256, (400, 8, 8), np.uint8)
    for _ in range(3):
        trial.extend({"obs": pool[rng.integers(0, 400, (2, lanes))]})
    trial.compare()
    assert trial.counters().tolist() == [0, 0]


def test_rows_of_very_many_blocks_keep_the_count_of_blocks() -> None:
    """More blocks a row than `release` may take at once."""
    blocks = 4 * _blocktable.CHUNK_ITEMS
    try:
        buffer = fbuf.Buffer(1, storage=Deduplicated(keys=("obs",), block=(1, 1), blocks=2 * blocks))
        state = buffer.init({"obs": np.zeros((4, blocks // 4), np.uint32)})
    except ValueError as error:
        assert "Use larger blocks" in str(error)
        return
    for turn in range(3):
        rows = np.arange(turn * blocks, (turn + 1) * blocks, dtype=np.uint32).reshape(1, 4, -1)
        state = buffer.extend(state, {"obs": rows})
        assert same_bits(np.asarray(buffer.rows(state).data["obs"]), rows)
        check(state)


def test_indices_of_retired_rows_are_stale() -> None:
    storage = Deduplicated(keys=("a", "b"), block=(4, 4), blocks=64)  # room for fewer rows than the ring has
    buffer = small("retire", storage=storage, sampler=Prioritized())
    trial = Trial(buffer, SMALL)
    indices: dict[int, tuple[int, int]] = {}
    for _ in range(20):
        number = np.arange(trial.next, trial.next + 12)
        trial.extend(
            {"a": numbered(number.reshape(4, 3)), "b": np.zeros((4, 3, 4, 12), np.uint8)},
            np.ones((4, 3), bool),
            np.ones((4, 3), np.float32),
        )
        readable = [n for lane in trial.arrived for n in lane if n not in trial.refused]
        index = jax.device_get(trial.index_of(readable))
        indices |= dict(zip(readable, zip(index.slot.tolist(), index.ticket.tolist(), strict=True), strict=True))
    assert trial.counters()[1] >= 20
    held = {n for lane in trial.arrived for n in lane}
    gone = sorted(set(indices) - held)
    assert len(gone) >= 15
    slots, tickets = zip(*(indices[n] for n in gone), strict=True)
    index = fbuf.Index(jnp.asarray(slots, jnp.int32), jnp.asarray(np.array(tickets, np.uint32)))
    state = trial.state
    assert not np.any(buffer.get(state, index).mask)
    assert not any(np.any(x) for x in buffer.get(state, index).data.values())
    after = buffer.update_priority(state, index, np.full(len(gone), 9, np.float32))
    assert int(buffer.stats(after)["refused_stale"]) == len(gone)
    assert float(buffer.stats(after)["max_priority"]) == float(buffer.stats(state)["max_priority"])
    after = buffer.update_rows(after, index, {"a": np.full((len(gone), 8, 8), 7, np.uint8)})
    assert int(buffer.stats(after)["refused_stale"]) == 2 * len(gone)
    before, now = jax.device_get((buffer.rows(state).data, buffer.rows(after).data))
    jax.tree.map(np.testing.assert_array_equal, before, now)
    check(after)
    drawn = jax.device_get(buffer.peek(after, KEY, 512))
    assert set(drawn.data["number"][drawn.mask].tolist()) <= held and drawn.mask.any()


def test_rows_before_a_clear_do_not_count_after_convert() -> None:
    """The first two rows are the first of all: no stack reaches across the clear."""
    fields = {"reward": 0.0, "action": 0, "terminated": False, "truncated": False}
    rows = noise_rows(20) | {
        "reward": np.arange(20, dtype=np.float32),
        "action": np.zeros(20, np.int32),
        "terminated": np.zeros(20, bool),
        "truncated": np.zeros(20, bool),
    }
    buffer = fbuf.Buffer(64, storage=Deduplicated(keys=("obs",), blocks=1024))
    other = dataclasses.replace(buffer, view=Transition(stack=4, n_step=2))
    state = buffer.extend(buffer.clear(buffer.extend(buffer.init(OBS | fields), rows)), rows)
    converted = buffer.convert(other, state)
    assert int(other.stats(converted)["drawable"]) == 18
    check(converted)
    same(other.rows(converted).data, buffer.rows(state).data)

"""`storages.Deduplicated`: every kind of leaf, sampler and view, games, loops in place, and export."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Deduplicated
from fbuf.testing import assert_inplace
from tests.support.deduplicated import (
    LEAVES,
    Trial,
    check_leaves,
    values,
)
from tests.support.deduplicated_device import (
    BATCH_BYTES,
    SAMPLERS,
    SIZES,
    VIEWS,
    atari,
    check_masked_draws,
    check_retirement,
    play,
    shapes,
)


@pytest.mark.parametrize("lanes", [3, None])
@pytest.mark.parametrize("kind", LEAVES)
def test_leaves_of_every_kind_are_exact(kind: str, lanes: int | None) -> None:
    check_leaves(kind, lanes)


def test_64_bit_leaves_are_exact() -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        leaves = {"real": ((3, 5), np.float64), "whole": ((7,), np.int64)}
        trial = Trial(fbuf.Buffer(8, storage=Deduplicated(keys=tuple(leaves), blocks=512)), leaves)
        for seed in range(3):
            rng = np.random.default_rng(seed)
            trial.extend({name: values(rng, (5, 1), *leaf) for name, leaf in leaves.items()})
            trial.compare()
    assert trial.compared > 15


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("check", [check_masked_draws, check_retirement])
def test_full_tables_are_exact(check: Any, sampler: str, view: str) -> None:
    check(sampler, view)


GAMES = ("Pong", "Breakout", "Seaquest", "MsPacman", "SpaceInvaders", "Qbert", "Freeway", "Enduro", "Asterix", "Krull")
FRAME = {"obs": ((84, 84), np.uint8)}
STREAM = fbuf.Buffer(2048, storage=Deduplicated(keys=("obs",)))
SIXTEEN = fbuf.Buffer(2048, lanes=16, storage=Deduplicated(keys=("obs",), on_full="refuse"))


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("form", ["stream", "sixteen lanes"])
def test_frames_of_real_games_are_exact(game: str, form: str) -> None:
    """20,000 frames through a ring of 2,048, in a table of the default size."""
    pytest.importorskip("ale_py")
    from benchmarks import _atari

    frames, _ = _atari.frames(game, 20_000)
    if form == "stream":
        trial = Trial(STREAM, FRAME)
        play(trial, frames, 250)
    else:
        trial = Trial(SIXTEEN, FRAME)
        play(trial, frames, 25, masked=True)
    stats = jax.device_get(STREAM.stats(trial.state) if form == "stream" else SIXTEEN.stats(trial.state))
    assert form == "stream" or stats["retired_rows"] == 0
    if game in ("Breakout", "MsPacman"):
        assert stats["refused_rows"] == stats["retired_rows"] == 0
        assert trial.compared > 15_000
    assert stats["blocks_load"] < 1


@pytest.mark.optimized
def test_a_scan_of_steps_is_in_place() -> None:
    needed = []
    for capacity, blocks in SIZES:
        buffer, state, rows = atari(capacity, blocks, sampler=Prioritized())

        def one(state: Any, given: Any, buffer: fbuf.Buffer = buffer) -> Any:
            rows, key = given
            state, batch = buffer.sample(buffer.extend(state, rows), key, 8)
            return buffer.update_priority(state, batch.index, batch.data["reward"]), batch.weight

        given = (shapes(rows, 3), jax.ShapeDtypeStruct((3, 2), jnp.uint32))
        scan = lambda s, g, one=one: lax.scan(one, s, g)  # noqa: E731
        # The slice of the rows that a turn takes is one more batch.
        needed.append(assert_inplace(scan, state, given, bound=5 * BATCH_BYTES).temporary)
    assert max(needed) < 1.02 * min(needed) + 64 * 1024


@pytest.mark.optimized
def test_vmapped_writes_are_in_place() -> None:
    needed = []
    for capacity, blocks in SIZES:
        buffer, state, rows = atari(capacity, blocks)
        memory = assert_inplace(jax.vmap(buffer.extend), shapes(state, 3), shapes(rows, 3), bound=3 * 4 * BATCH_BYTES)
        needed.append(memory.temporary)
    assert max(needed) < 1.02 * min(needed) + 64 * 1024

"""`Replay`: the batches of the functional buffer, in place, with errors for refused values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from tests.support.refusals import raises
from tests.support.replay import FRAME, frame_rows, make_frames, same_batches_as_the_buffer, soak

ONES = np.ones(4, np.float32)
NOTHING = r"no row can be sampled\. Add rows, or ask can_sample first; in a step learn only where mask is True\."


@pytest.mark.optimized
def test_batches_are_those_of_the_buffer():
    same_batches_as_the_buffer(fbuf.storages.Device())


def test_actors_and_learners_lose_and_double_no_row():
    soak("consumed", batches=40)


@pytest.mark.in_place
def test_writes_are_in_place():
    replay = make_frames()
    before, old = replay.state.rows["obs"].unsafe_buffer_pointer(), replay.state
    replay.extend(frame_rows(0))
    assert replay.state.rows["obs"].unsafe_buffer_pointer() == before
    assert old.rows["obs"].is_deleted()


def test_an_empty_replay_has_nothing_to_draw():
    replay = make_frames()
    raises(ValueError, NOTHING, replay.sample, 4)
    assert not replay.can_sample()
    replay.extend(frame_rows(0))
    assert replay.can_sample() and replay.sample(4).mask.all()
    assert {type(leaf) for leaf in jax.tree.leaves(replay.sample(4, to="numpy"))} == {np.ndarray}
    raises(ValueError, 'to is \'tf\'; expected "jax", "numpy" or "torch"', replay.sample, 4, to="tf")


def test_refused_priorities_are_errors_that_name_the_reason():
    replay = make_frames()
    replay.extend(frame_rows(0))
    batch = replay.sample(4)
    said = "1 priorities are NaN .*refused; the others took effect"
    for bad in (np.nan, np.inf, -np.inf):
        raises(ValueError, said, replay.update_priority, batch.index, np.array([1, bad, 1, 1], np.float32))
        replay.update_priority(batch.index, ONES)  # counted once
    wild = fbuf.Index(jnp.array([99, -5, 99, -5], jnp.int32), jnp.ones(4, jnp.uint32))
    raises(ValueError, "4 indices name no slot", replay.update_priority, wild, ONES)
    for start in (8, 16):
        replay.extend(frame_rows(start))
    raises(ValueError, "4 indices are stale", replay.update_priority, batch.index, ONES)
    raises(ValueError, "4 indices are stale", replay.update_rows, batch.index, {"reward": ONES})
    with pytest.raises(ValueError, match="Replay.extend: 1 priorities are NaN"):
        replay.extend(frame_rows(0), priority=np.array([np.inf] + [1.0] * 7, np.float32))
    assert len(replay) == 16 and replay.sample(4).mask.all()


def test_a_lenient_replay_only_counts():
    replay = make_frames(strict=False)
    assert not replay.sample(4).mask.any()
    replay.extend(frame_rows(0), priority=np.array([np.nan] + [1.0] * 7, np.float32))
    stats = replay.stats()
    assert stats["empty_samples"] == 1 and stats["refused_nonfinite"] == 1
    replay.set(alpha=0.0)
    assert replay.stats()["alpha"] == 0 and replay.nbytes()["device"] > 0


def test_a_seed_is_an_int():
    for wrong in ("x", 1.5, None, np.zeros(2, int), jax.random.key(0)):
        with pytest.raises(TypeError, match=r"Replay: seed is [^;]*; expected an int\. Write Replay\(.*seed=0\)"):
            fbuf.Replay(fbuf.Buffer(4), 0, wrong)
    for seed in (2, np.int64(2), jnp.int32(2)):
        assert len(fbuf.Replay(fbuf.Buffer(4), 0, seed)) == 0


def test_checked_raises_for_a_jitted_step():
    buffer = fbuf.prioritized(16)
    state = buffer.extend(buffer.init(FRAME), frame_rows(0))

    @jax.jit
    def learn(state, scale):
        state, batch = buffer.sample(state, jax.random.key(0), 4)
        return buffer.update_priority(state, batch.index, batch.data["reward"] * scale)

    fine = fbuf.checked(learn)(state, jnp.float32(1))
    raises(ValueError, "checked: 4 priorities are NaN", lambda: fbuf.checked(learn)(fine, jnp.float32(jnp.nan)))
    raises(ValueError, NOTHING, fbuf.checked(learn), buffer.init(FRAME), jnp.float32(1))

"""`fbuf.integrations.flashbax` beside flashbax: the same calls, and what both give."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
import fbuf.integrations.flashbax as ours

pytestmark = pytest.mark.more

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import flashbax as theirs

equal = partial(np.testing.assert_array_equal, strict=True)  # shapes and dtypes too
EXAMPLE = {"t": jnp.int32(0), "x": jnp.zeros(3)}
FLAT = {"max_length": 15, "min_length": 3, "sample_batch_size": 5}
WINDOWS = {"add_batch_size": 2, "sample_batch_size": 6, "sample_sequence_length": 4, "period": 3}
UNIFORM = {
    "flat": ("flat_buffer", (), FLAT),
    "flat, lanes": ("flat_buffer", (2,), FLAT | {"add_batch_size": 2}),
    "flat, sequences": ("flat_buffer", (4,), FLAT | {"add_sequences": True}),
    "flat, lanes, sequences": ("flat_buffer", (2, 3), FLAT | {"add_batch_size": 2, "add_sequences": True}),
    "item": ("item_buffer", (), FLAT),
    "item, batches, sequences": ("item_buffer", (2, 3), FLAT | {"add_batches": True, "add_sequences": True}),
    "trajectory": ("trajectory_buffer", (2, 3), WINDOWS | {"min_length_time_axis": 5, "max_size": 27}),
}
PRIORITISED = {
    "flat": ("flat_buffer", (3,), FLAT | {"max_length": 8, "add_sequences": True}),
    "item": ("item_buffer", (3,), FLAT | {"max_length": 8, "add_batches": True}),
    "trajectory": ("trajectory_buffer", (2, 3), WINDOWS | {"min_length_time_axis": 5, "max_length_time_axis": 12}),
}


@pytest.fixture(autouse=True)
def flashbax_allowed():
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def rows(number, lead):
    t = 100 * number + jnp.arange(np.prod(lead, dtype=int), dtype=jnp.int32).reshape(lead)
    return {"t": t, "x": t[..., None] * jnp.ones(3)}


def history(buffer, lead):
    """Return what can be seen of a uniform buffer while it fills and wraps around."""
    state, seen = buffer.init(EXAMPLE), []
    add, sample = jax.jit(buffer.add), jax.jit(buffer.sample)
    for number in range(9):
        state = add(state, rows(number, lead))
        ready = np.asarray(buffer.can_sample(state))
        seen.append((state.current_index, state.is_full, ready, state.experience))
        if ready:
            seen.append(sample(state, jax.random.key(number)).experience)
    return seen


@pytest.mark.parametrize("kind", UNIFORM)
def test_uniform_buffers_draw_flashbaxs_batches(kind):
    maker, lead, arguments = UNIFORM[kind]
    found = history(getattr(ours, f"make_{maker}")(**arguments), lead)
    expected = history(getattr(theirs, f"make_{maker}")(**arguments), lead)
    for a, b in zip(found, expected, strict=True):
        jax.tree.map(equal, jax.tree.leaves(a), jax.tree.leaves(b))


def draw(buffer, state):
    """Return indices of many windows, the t of their rows, and their probabilities by the first."""
    batch = jax.vmap(buffer.sample, (None, 0))(state, jax.random.split(jax.random.key(0), 100))
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
    t = jax.tree.leaves(batch.experience)[0]
    t = t.reshape(len(t), -1)
    return batch.indices, t, dict(zip(t[:, 0].tolist(), batch.probabilities.tolist(), strict=True))


@pytest.mark.parametrize("kind", PRIORITISED)
def test_prioritised_buffers_have_flashbaxs_probabilities(kind):
    maker, lead, arguments = PRIORITISED[kind]
    seen = {ours: [], theirs: []}
    for module, out in seen.items():
        buffer = getattr(module, f"make_prioritised_{maker}")(**arguments, priority_exponent=0.5)
        state, add = buffer.init(EXAMPLE), jax.jit(buffer.add, donate_argnums=0)
        for number in range(9):
            state = add(state, rows(number, lead))
            if not buffer.can_sample(state):
                continue
            indices, t, found = draw(buffer, state)
            out.append(found)
            # squares: flashbax truncates the powers of new windows to integers
            state = buffer.set_priorities(state, indices, (t[:, 0] % 4) ** 2.0)
            out.append(draw(buffer, state)[2])
    for found, expected in zip(seen[ours], seen[theirs], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def test_queues_pass_on_the_same_windows():
    seen = {ours: [], theirs: []}
    for module, out in seen.items():
        queue = module.make_trajectory_queue(13, 2, add_sequence_length=3, sample_sequence_length=5)
        state, add, sample = queue.init(EXAMPLE), jax.jit(queue.add), jax.jit(queue.sample)
        for number in range(30):
            for _ in range(3):
                if number % 4 == 3 and queue.can_sample(state):
                    state, batch = sample(state)
                    out.append(batch.experience)
            if queue.can_add(state):
                state = add(state, rows(number, (2, 3)))
            out.append((state.read_index, state.write_index, state.is_full, queue.can_add(state)))
    jax.tree.map(equal, seen[ours], seen[theirs])


def test_mixers_take_the_same_rows():
    batches = []
    for module in (ours, theirs):
        maker, lead, arguments = UNIFORM["flat, sequences"]
        buffer = getattr(module, f"make_{maker}")(**arguments)
        states = [buffer.add(buffer.init(EXAMPLE), rows(number, lead)) for number in (0, 1, 2)]
        mixer = module.make_mixer([buffer] * 3, 5, [1, 1, 2])
        assert bool(mixer.can_sample(states))
        batches.append(jax.tree.leaves(jax.jit(mixer.sample)(states, jax.random.key(0)).experience))
    jax.tree.map(equal, *batches)


def test_a_saved_state_goes_on(tmp_path):
    buffer = ours.make_flat_buffer(10, 2, 4, add_sequences=True)
    state = buffer.add(buffer.init(EXAMPLE), rows(0, (7,)))
    fbuf.save(tmp_path / "saved", state.buffer, state.state)
    core, loaded = fbuf.load(tmp_path / "saved")
    again = ours.TrajectoryBufferState(loaded, core)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    jax.tree.map(equal, again.experience, state.experience)

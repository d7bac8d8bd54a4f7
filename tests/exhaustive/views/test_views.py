"""Views in more programs, in place, and with every option."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized, Uniform
from fbuf.views import Episode, Hindsight, Sequence, Transition
from tests.support.inplace import assert_draw_write_draw, assert_order
from tests.support.tables import checks
from tests.support.trees import row_with
from tests.views.test_hindsight import VIEWS, follow, observation, reward
from tests.views.test_transition import CASES, LAYOUTS, check_accumulated
from tests.views.test_windows import ENDS, EXAMPLE, ROW, check_chances, check_cuts, check_late_priorities, rows_of


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("view", VIEWS)
def test_goals_are_of_the_same_episode(view, strategy, lanes):
    for seed in range(1, 3):
        follow(view, strategy, lanes, seed)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_always_and_never(fraction):
    follow("one step", "future", None, 0, fraction=fraction)


@pytest.mark.optimized
@pytest.mark.parametrize("storage", [fbuf.storages.Device(), fbuf.storages.Compressed(keys=("obs/frame",))])
def test_steps_are_in_place(storage):
    view = Hindsight(Transition(n_step=2, stack=2, final_observation="last"), reward)
    buffer = fbuf.Buffer(200_000, lanes=2, view=view, storage=storage)
    number = np.zeros((), int)
    rows = row_with(observation(number, number, 0.0), last=observation(number, number, 0.0))
    assert_draw_write_draw(buffer, rows, buffer.init(rows))


def test_what_is_not_relabelled_is_as_without_it():
    """The same key draws the same transitions."""
    rows = row_with(
        {"desired_goal": jnp.arange(40.0), "achieved_goal": jnp.arange(40.0), "frame": jnp.arange(40, dtype=jnp.uint8)},
        40,
        action=jnp.arange(40),
        reward=jnp.arange(40.0),
        terminated=jnp.arange(40) % 9 == 8,
    )
    inner = Transition(n_step=3, stack=4, autoreset="same_step")
    plain = fbuf.Buffer(100, view=inner, sampler=fbuf.samplers.Prioritized())
    view = Hindsight(inner, lambda achieved, goal: achieved - goal, fraction=0.5)
    both = dataclasses.replace(plain, view=view)
    batches = []
    for buffer in (plain, both):
        state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
        batches.append(buffer.sample(state, jax.random.key(0), 256)[1])
    one, two = batches
    new = two.data.pop("relabelled")
    assert 60 < int(new.sum()) < 140 and bool((one.index.slot == two.index.slot).all())
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[~new], b[~new]), one.data, two.data)
    for name in ("action", "discount", "terminated"):
        assert bool((one.data[name] == two.data[name]).all())
    assert bool((one.data["obs"]["frame"] == two.data["obs"]["frame"]).all())


def test_an_episode_far_longer_than_the_ring():
    """Nothing is known of where it began; goals are of rows still held."""
    view = Hindsight(
        Transition(autoreset="same_step"), lambda achieved, goal: achieved - goal, strategy="episode", fraction=1.0
    )
    buffer = fbuf.Buffer(16, view=view)
    example = row_with({"desired_goal": np.float32(0), "achieved_goal": np.float32(0)})
    state = buffer.init(example)
    for i in range(0, 200, 5):
        rows = jax.tree.map(lambda x: np.zeros((5, *x.shape), x.dtype), example)
        rows["obs"]["achieved_goal"] = np.arange(i, i + 5, dtype=np.float32)
        state = buffer.extend(state, rows)
        goals = buffer.peek(state, jax.random.key(i), 512).data["obs"]["desired_goal"]
        assert set(goals.tolist()) == set(range(max(i + 4 - 15, 0) + 1, i + 5))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transitions_equal_accumulating_before_storing(layout, case):
    check_accumulated(layout, *case)


def test_many_buffers_at_once():
    buffer = fbuf.Buffer(40, view=Sequence(4, boundary="mask", autoreset="same_step"), sampler=Uniform("episodes"))
    every = [rows_of([3, 8, 1, 5]), rows_of([10, 2, 4, 1], 50), rows_of([1, 1, 1, 14], 100)]
    alone = [buffer.extend(buffer.init(EXAMPLE), rows) for rows in every]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *every)
    states = jax.vmap(buffer.extend)(jax.tree.map(lambda x: jnp.stack([x] * 3), buffer.init(EXAMPLE)), stacked)
    keys = jax.random.split(jax.random.key(0), 3)
    _, batches = jax.vmap(lambda s, k: buffer.sample(s, k, 6))(states, keys)
    for i, state in enumerate(alone):
        got, want = jax.tree.map(lambda x, i=i: x[i], batches), buffer.sample(state, keys[i], 6)[1]
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, got, want)))


def test_nothing_to_draw():
    """Too few rows, or no episode over yet: nothing, and it is counted."""
    for view, sampler in (
        (Sequence(4, autoreset="same_step"), Uniform("episodes")),
        (Episode(9, autoreset="same_step"), Prioritized()),
        (Sequence(4, boundary="mask", autoreset="same_step"), Uniform()),
    ):
        buffer = fbuf.Buffer(20, view=view, sampler=sampler)
        rows = rows_of([3]) | {"terminated": np.zeros(3, bool)}
        state, batch = buffer.sample(buffer.extend(buffer.init(EXAMPLE), rows), jax.random.key(0), 5)
        assert not any(np.asarray(x).any() for x in jax.tree.leaves((batch.data, batch.mask, batch.probability)))
        assert int(buffer.stats(state)["empty_samples"]) == 1 and not bool(buffer.can_sample(state))


test_checks = checks(
    (check_chances, [(Sequence(1, episode_end=ENDS, autoreset="same_step"), Uniform(over="episodes"))]),
    (check_late_priorities, [Sequence(8, autoreset="same_step"), Sequence(8, boundary="mask", autoreset="same_step")]),
    (check_cuts, [0, 4]),
)


@pytest.mark.optimized
def test_steps_of_episodes_are_in_place():
    view = Episode(12, longer="cut", autoreset="same_step")
    buffer = fbuf.Buffer(400_000, lanes=2, view=view, sampler=Uniform("episodes"), episode_end=ENDS)
    for steps in (0, 4):
        assert_order(buffer, "es", ROW, steps=steps)

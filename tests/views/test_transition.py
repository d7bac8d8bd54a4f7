"""`Transition` against returns and stacks accumulated before storing, and in cases small enough to check by hand."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.views import Transition
from tests.support.tables import by_tier, checks
from tests.support.trees import row_with

CASES = [(1, None, "zero"), (3, 4, "zero"), (5, 2, "repeat")]  # n_step, stack, pad
LAYOUTS = ["final", "none", "next_step"]


def episodes_of(rng, steps):
    """Episodes of 1 to 9 steps, each with one more frame: frames, actions, rewards and their end; the last is still open."""
    episodes, total = [], 0
    while total < steps:
        number = min(int(rng.integers(1, 10)), steps - total)
        end = str(rng.choice(["terminated", "truncated"])) if total + number < steps else "open"
        frames, rewards = rng.integers(1, 256, (number + 1, 3)).astype(np.uint8), rng.normal(size=number)
        episodes.append((frames, np.arange(total, total + number, dtype=np.int32), rewards.astype(np.float32), end))
        total += number
    return episodes


def accumulated(frames, actions, rewards, end, n, gamma, stack, pad):
    """What a frame-stack wrapper and an n-step deque make of an episode: obs, reward, discount, next_obs, step; by action."""
    before = np.zeros_like(frames[0]) if pad == "zero" else frames[0]
    seen, waiting, made = collections.deque([before] * (stack - 1) + [frames[0]], maxlen=stack), collections.deque(), {}
    for t, action in enumerate(actions.tolist()):
        waiting.append((action, np.stack(seen), float(rewards[t]), t))
        seen.append(frames[t + 1])
        ended = t + 1 == len(actions) and end != "open"
        while len(waiting) == n or (ended and waiting):
            total = sum(gamma**i * step[2] for i, step in enumerate(waiting))
            discount = 0.0 if ended and end == "terminated" else gamma ** len(waiting)
            first, obs, _, step = waiting.popleft()
            made[first] = obs, total, discount, np.stack(seen), step
    return made


def stored(episodes, layout):
    """Rows in order of arrival, as an environment of this kind would give them."""
    rows = []
    for frames, actions, rewards, end in episodes:
        for t, action in enumerate(actions):
            last = t + 1 == len(actions)
            final = frames[t + 1] if last and end != "open" else np.full(3, 77, np.uint8)
            flags = last and end == "terminated", last and end == "truncated"
            rows.append((frames[t], final, action, rewards[t], *flags))
        if layout == "next_step" and end != "open":
            rows.append((frames[-1], frames[-1], np.int32(-1), np.float32(99), False, False))
    names = ("obs", "final", "action", "reward", "terminated", "truncated")
    return {name: np.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def check_accumulated(layout, n, stack, pad):
    """Compare every transition of 150 steps with what the accumulator emits, as the ring turns."""
    gamma, capacity, piece, expected, seen = 0.9, 48, 7, {}, 0
    episodes = episodes_of(np.random.default_rng([n, len(layout)]), 150)
    for frames, actions, rewards, end in episodes:
        known = len(actions) - (layout == "none" and end == "truncated")  # of its last step nothing else is known
        episode = frames[: known + 1], actions[:known], rewards[:known], end
        expected |= accumulated(*episode, n, gamma, stack or 1, pad)
    final, mode = "final" if layout == "final" else None, "next_step" if layout == "next_step" else "same_step"
    view = Transition(n_step=n, gamma=gamma, stack=stack, pad=pad, final_observation=final, autoreset=mode)
    rows, buffer = stored(episodes, layout), fbuf.Buffer(capacity=capacity, view=view)
    extend, peek = jax.jit(buffer.extend), jax.jit(lambda s, key: buffer.peek(s, key, 2048))
    state = buffer.init({name: x[0] for name, x in rows.items()})
    place = {int(action): i for i, action in enumerate(rows["action"])}
    for begin in range(0, len(rows["action"]) - piece + 1, piece):
        state, arrived = extend(state, {name: x[begin : begin + piece] for name, x in rows.items()}), begin + piece
        batch = jax.device_get(peek(state, jax.random.key(begin)))
        got = {int(action): i for i, action in enumerate(batch.data["action"])} if batch.mask[0] else {}
        can = {a for a, one in expected.items() if place[a] - min(one[4], (stack or 1) - 1) >= arrived - capacity}
        assert {a for a in can if place[a] + n < arrived} <= set(got) <= can  # of later ones the end may not have come
        for action, i in got.items():
            obs, reward, discount, next_obs, _ = expected[action]
            cut = slice(None) if stack else -1
            np.testing.assert_array_equal(batch.data["obs"][i], obs[cut])
            if discount or layout != "none":
                np.testing.assert_array_equal(batch.data["next_obs"][i], next_obs[cut])
            np.testing.assert_allclose(batch.data["reward"][i], reward, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(batch.data["discount"][i], discount, rtol=1e-6)
        seen += len(got)
    assert seen > 300


TWO = Transition(n_step=2, gamma=0.5, autoreset="same_step")


def rows_of(rewards, ends):
    """Rows that observe their rewards; a letter of `ends` per row: `-`, or `t` for terminated."""
    rewards = np.asarray(rewards, np.float32)
    return row_with(rewards, len(ends), reward=rewards, terminated=np.asarray([e == "t" for e in ends]))


def test_a_buffer_of_just_the_rows_one_draw_needs():
    rows = rows_of([1, 2, 3, 4, 5, 6], "------")
    view = Transition(stack=2, n_step=2, gamma=1.0, autoreset="same_step")
    buffer = fbuf.Buffer(4, view=view)
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))
    for i in (0, 2, 4):
        state = buffer.extend(state, {name: x[i : i + 2] for name, x in rows.items()})
    data = jax.device_get(buffer.peek(state, jax.random.key(0), 8).data)
    for name, value in {"obs": [3, 4], "reward": 4 + 5, "discount": 1, "next_obs": [5, 6]}.items():
        assert (data[name] == value).all()


def drawn_from(buffer, state):
    """Newest frame, return, discount and next stack of every transition that is drawn."""
    data = jax.device_get(buffer.peek(state, jax.random.key(0), 64).data)
    columns = data["obs"][:, 1], data["reward"], data["discount"], *data["next_obs"].T
    return {*zip(*(column.tolist() for column in columns), strict=True)}


def test_ends_whose_reset_rows_are_not_there_yet():
    view = Transition(n_step=2, gamma=0.5, stack=2, autoreset="next_step")
    buffer = fbuf.Buffer(8, view=view)
    for name, expected in {
        "truncated": {(2, 2 + 4 / 2, 0.25, 4, 8), (4, 4, 0.5, 4, 8)},
        "terminated": {(2, 2 + 4 / 2, 0, 4, 8), (4, 4, 0, 4, 8)},
    }.items():
        first = (1, 1 + 2 / 2, 0.25, 2, 4)
        rows = rows_of([1, 2, 4, 8], "----") | {name: np.arange(4) == 2}
        state = buffer.init(jax.tree.map(lambda x: x[0], rows))
        state = buffer.extend(state, jax.tree.map(lambda x: x[:3], rows))
        assert drawn_from(buffer, state) == {first}
        ended = buffer.extend(state, jax.tree.map(lambda x: x[3:], rows))
        assert drawn_from(buffer, ended) == {first} | expected
        unknown = (4, 4, 0, 2, 4) if name == "terminated" else None  # a cut: the final observation will never be stored
        without = {(2, 2 + 4 / 2, 0, 2, 4), unknown} if unknown else {(2, 2, 0.5, 2, 4)}
        assert drawn_from(buffer, buffer.cut(state)) == {first} | without


@pytest.mark.more
def test_nested_observations_other_leaves_and_rewards_of_several_integers():
    view = Transition(observation="o", action=None, stack=2, gamma=0.5, n_step=2, autoreset="same_step")
    buffer = fbuf.Buffer(capacity=8, view=view)
    rows = {
        "o": {"image": np.arange(4, dtype=np.uint8)[:, None], "speed": np.arange(4, dtype=np.float32)},
        "reward": np.asarray([[1, 10], [2, 20], [3, 30], [4, 40]], np.int32),
        "terminated": np.zeros(4, bool),
        "truncated": np.zeros(4, bool),
        "info": {"lives": np.arange(4, dtype=np.int8)},
    }
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    data = jax.device_get(buffer.peek(state, jax.random.key(0), 32).data)
    assert set(data) == {"obs", "reward", "discount", "next_obs", "terminated", "truncated", "info"}
    assert data["reward"].dtype == data["discount"].dtype == jnp.float32
    assert data["obs"]["image"].shape == (32, 2, 1) and data["obs"]["image"].dtype == jnp.uint8
    assert data["next_obs"]["speed"].shape == (32, 2)
    at = data["info"]["lives"]
    assert set(at) == {0, 1}
    np.testing.assert_array_equal(data["reward"], np.outer(1 + at + (2 + at) / 2, [1, 10]))
    np.testing.assert_array_equal(data["next_obs"]["speed"], np.stack([at + 1, at + 2], axis=1))
    np.testing.assert_array_equal(data["obs"]["image"][:, 1, 0], at)


WITHOUT = ("none", 2, None, "zero")  # final observations
test_transitions_equal_accumulating_before_storing = checks(
    (check_accumulated, [WITHOUT, ("final", *CASES[1]), ("next_step", *CASES[2])])
)


@pytest.mark.parametrize("pad", by_tier("zero", more=["repeat"]))
def test_the_pool_of_frames_holds_every_stack(pad):
    view = Transition(n_step=2, stack=3, pad=pad, autoreset="same_step")
    buffer = fbuf.Buffer(8, view=view)
    rows = rows_of(list(range(1, 9)), "--t-----")
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    slot, mask = jnp.arange(8, dtype=jnp.int32), jnp.arange(8) != 5
    spec, _ = buffer.storage.spec(state.rows)

    @jax.jit
    def pools(state):
        window = view.window(spec, fbuf._buffer.state.anchor_set(buffer, state), slot, mask, jax.random.key(0))
        return [(read.pool, read.start, read.slot) for read in window.reads if read.name == "obs"]

    for pool, start, slots in jax.device_get(pools(state)):
        np.testing.assert_array_equal(np.take_along_axis(pool, start[:, None] + np.arange(3), axis=1), slots)


@pytest.mark.more
@pytest.mark.parametrize("layout", by_tier("final", more=LAYOUTS))
def test_leaves_that_are_not_stacked_are_the_newest_of_their_stack(layout):
    episodes = episodes_of(np.random.default_rng(0), 60)
    rows = stored(episodes, layout)
    for name in ("obs", "final"):
        rows[name] = {"image": {"grey": rows[name]}, "speed": rows[name].astype(np.float32)}
    settings = {"final": {"final_observation": "final"}, "none": {"autoreset": "same_step"}}
    settings = settings.get(layout, {"autoreset": "next_step"}) | {"n_step": 2, "stack": 3}
    batches = []
    for stack_keys in (None, ("obs/image",)):
        buffer = fbuf.Buffer(100, view=Transition(stack_keys=stack_keys, **settings))
        state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
        batches.append(jax.device_get(buffer.peek(state, jax.random.key(0), 128).data))
    every, some = batches
    assert some["obs"]["image"]["grey"].shape == (128, 3, 3) and some["obs"]["speed"].shape == (128, 3)
    for name in ("obs", "next_obs"):
        every[name]["speed"] = every[name]["speed"][:, -1]
    jax.tree.map(np.testing.assert_array_equal, every, some)


@pytest.mark.parametrize(("name", "usual"), [("observation", "obs"), ("reward", "reward")])
def test_leaves_that_every_transition_has_need_a_name(name, usual):
    with pytest.raises(TypeError, match=f"Transition: {name} is None; expected the name of a leaf, such as '{usual}'"):
        Transition(autoreset="same_step", **{name: None})


def test_what_cannot_be_stacked_is_refused():
    pytest.raises(TypeError, Transition, stack=2, stack_keys="obs/x", autoreset="same_step").match(
        "stack_keys=..obs/x.,"
    )
    pytest.raises(ValueError, Transition, stack_keys=("obs/x",), autoreset="same_step").match("Write stack=4")
    pytest.raises(ValueError, Transition, stack=2, stack_keys=(), autoreset="same_step").match("stack_keys is empty")
    row = row_with({"x": np.float32(0), "y": np.float32(0)})
    for name in ("x", "action", "obs/z"):
        buffer = fbuf.Buffer(8, view=Transition(stack=2, stack_keys=(name,), autoreset="same_step"))
        said = f"stack_keys has '{name}'; 'obs' has obs/x, obs/y. Write whole paths: stack_keys=..obs/x.,"
        pytest.raises(ValueError, buffer.init, row).match(said)


def test_rewards_and_flags_of_several_agents():
    view = Transition(gamma=0.5, n_step=2, terminated="done/__all__", truncated=None, autoreset="same_step")
    reward = {"a": np.float32(1), "b": np.float32(2)}
    row = {"obs": np.float32(0), "action": 0, "reward": reward, "done": {"__all__": False, "a": False}}
    buffer = fbuf.Buffer(8, view=view)
    said = r"subtree of reward/a, reward/b; .* np.stack\(jax.tree.leaves\(reward\), axis=-1\), or .*reward='reward/a'"
    pytest.raises(ValueError, buffer.init, row).match(said)
    row["reward"] = np.stack(jax.tree.leaves(reward), axis=-1)
    rows = jax.tree.map(lambda x: np.stack([x] * 4), row)
    data = buffer.peek(buffer.extend(buffer.init(row), rows), jax.random.key(0), 4).data
    assert data["reward"].tolist() == [[1.5, 3]] * 4 and data["discount"].tolist() == [0.25] * 4
    wrong = fbuf.Buffer(8, view=Transition(terminated="done", truncated=None, autoreset="same_step"))
    said = r"terminated is 'done', a subtree of done/__all__, done/a; .* Write Transition\(terminated='done/__all__'\)"
    pytest.raises(ValueError, wrong.init, row).match(said)


def test_narrow_rewards_stay_as_they_are():
    rows = rows_of([1, 2, 4], "---")
    buffer = fbuf.Buffer(4, view=TWO)
    rows["reward"] = rows["reward"].astype(np.float16)
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    data = buffer.peek(state, jax.random.key(0), 1).data
    assert data["reward"].dtype == data["discount"].dtype == np.float16
    assert float(data["reward"][0]) == 2 and float(data["discount"][0]) == 0.25


test_every_layout_equals_accumulating_before_storing = checks(
    exhaustive=[
        (check_accumulated, [(layout, *case) for layout in LAYOUTS for case in CASES]),
    ]
)

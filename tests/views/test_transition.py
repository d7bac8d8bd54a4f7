"""`Transition` in cases small enough to check by hand, and against returns and stacks accumulated before storing."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.views import Transition

CASES = [(1, None, "zero"), (3, 4, "zero"), (5, 2, "repeat")]  # n_step, stack, pad
LAYOUTS = ["final", "none", "next_step"]
Step = collections.namedtuple("Step", "obs action reward next_obs terminated ended number")  # `number`: in its episode
Emitted = collections.namedtuple("Emitted", "obs reward discount next_obs frames")  # `frames` of its episode before it

# Frames [T + 1, 3], the last one seen after the last action; actions [T], each another number; rewards [T]; and `end`, which is
# "terminated", "truncated" or "open" (still running).
Episode = collections.namedtuple("Episode", "frames actions rewards end")


def play(rng, steps):
    """Episodes of 1 to 9 steps, `steps` in all; the last one is still running."""
    episodes, total = [], 0
    while total < steps:
        length = min(int(rng.integers(1, 10)), steps - total)
        episodes.append(
            Episode(
                rng.integers(1, 256, (length + 1, 3)).astype(np.uint8),
                np.arange(total, total + length, dtype=np.int32),
                rng.normal(size=length).astype(np.float32),
                str(rng.choice(["terminated", "truncated"])),
            )
        )
        total += length
    return [*episodes[:-1], episodes[-1]._replace(end="open")]


def accumulate(episode, n, gamma, stack, pad):
    """What a frame-stack wrapper and an n-step deque make of an episode, by action."""
    emitted = {}
    waiting = collections.deque()

    def emit():
        first, last = waiting[0], waiting[-1]
        total = sum(gamma**i * step.reward for i, step in enumerate(waiting))
        discount = 0.0 if last.terminated else gamma ** len(waiting)
        emitted[first.action] = Emitted(first.obs, total, discount, last.next_obs, first.number)
        waiting.popleft()

    first = episode.frames[0]
    frames = collections.deque([np.zeros_like(first) if pad == "zero" else first] * (stack - 1) + [first], maxlen=stack)
    for t, action in enumerate(episode.actions):
        obs = np.stack(frames)
        frames.append(episode.frames[t + 1])
        ended = t + 1 == len(episode.actions) and episode.end != "open"
        terminated = ended and episode.end == "terminated"
        reward = float(episode.rewards[t])
        waiting.append(Step(obs, int(action), reward, np.stack(frames), terminated, ended, t))
        if len(waiting) == n:
            emit()
        while ended and waiting:
            emit()
    return emitted


def store(episodes, layout):
    """Rows in arrival order, as an environment of this kind would give them."""
    rows = []
    for episode in episodes:
        for t, action in enumerate(episode.actions):
            last = t + 1 == len(episode.actions) and episode.end != "open"
            rows.append(
                {
                    "obs": episode.frames[t],
                    "final": episode.frames[t + 1] if last else np.full(3, 77, np.uint8),
                    "action": action,
                    "reward": episode.rewards[t],
                    "terminated": last and episode.end == "terminated",
                    "truncated": last and episode.end == "truncated",
                }
            )
        if layout == "next_step" and episode.end != "open":
            ignored = {"action": np.int32(-1), "reward": np.float32(99), "final": rows[-1]["final"]}
            flags = {"terminated": False, "truncated": False}
            rows.append({"obs": episode.frames[-1], **ignored, **flags})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def check_accumulated(layout, n, stack, pad):
    """Compare every transition of 150 steps with what the accumulator emits, as the ring turns."""
    gamma, capacity, piece = 0.9, 48, 7
    episodes = play(np.random.default_rng([n, len(layout)]), 150)
    view = Transition(
        n_step=n,
        gamma=gamma,
        stack=stack,
        pad=pad,
        final_observation="final" if layout == "final" else None,
        autoreset="next_step" if layout == "next_step" else "same_step",
    )
    rows = store(episodes, layout)
    expected = {}
    for episode in episodes:
        made = accumulate(episode, n, gamma, stack or 1, pad)
        if layout == "none" and episode.end == "truncated":
            # all that is known: an episode cut off one step earlier
            known = len(episode.actions) - 1
            shorter = Episode(
                episode.frames[: known + 1], episode.actions[:known], episode.rewards[:known], "truncated"
            )
            made = accumulate(shorter, n, gamma, stack or 1, pad)
        expected |= made

    buffer = fbuf.Buffer(capacity=capacity, view=view)
    state = buffer.init({k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in rows.items()})
    place = {int(action): i for i, action in enumerate(rows["action"])}
    seen = 0
    for begin in range(0, len(rows["action"]) - piece + 1, piece):
        new = {k: x[begin : begin + piece] for k, x in rows.items()}
        state = buffer.extend(state, new)
        arrived = begin + piece
        batch = jax.device_get(buffer.peek(state, jax.random.key(begin), 2048))
        got = {int(action): i for i, action in enumerate(batch.data["action"])} if batch.mask[0] else {}
        oldest = arrived - capacity
        behind = (stack or 1) - 1
        can = {action for action, one in expected.items() if place[action] - min(one.frames, behind) >= oldest}
        settled = {action for action in can if place[action] + n < arrived}
        assert settled <= set(got) <= can  # later ones depend on whether their episode's end came
        for action, i in got.items():
            one = expected[action]
            next_obs = one.next_obs
            if one.discount == 0 and layout != "final":  # the last stack before the end
                next_obs = stack_before_end(episodes, action, stack or 1, pad)
            cut = slice(None) if stack is not None else -1
            np.testing.assert_array_equal(batch.data["obs"][i], one.obs[cut])
            np.testing.assert_array_equal(batch.data["next_obs"][i], next_obs[cut])
            np.testing.assert_allclose(batch.data["reward"][i], one.reward, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(batch.data["discount"][i], one.discount, rtol=1e-6)
        seen += len(got)
    assert seen > 300


def stack_before_end(episodes, action, stack, pad):
    episode = next(e for e in episodes if action in e.actions)
    last = int(episode.actions[-1])
    return accumulate(episode, 1, 1.0, stack, pad)[last].obs


ONE = Transition(gamma=0.5, autoreset="same_step")
TWO = Transition(n_step=2, gamma=0.5, autoreset="same_step")
NEXT_STEP = Transition(n_step=2, gamma=0.5, stack=2, autoreset="next_step")
PIECE = 8  # rows of every call, masked beyond those given, so that a view compiles once
QUICK = [("final", CASES[1]), ("next_step", CASES[2])]


def rows_of(obs, ends, **more):
    """Rows with action 10 o_t and reward o_t; `ends` has a letter per row: `-`, (t)erminated or truncated (c)."""
    return {
        "obs": np.asarray(obs, np.float32),
        "action": np.asarray(obs, np.int32) * np.int32(10),
        "reward": np.asarray(obs, np.float32),
        "terminated": np.asarray([e == "t" for e in ends]),
        "truncated": np.asarray([e == "c" for e in ends]),
        **more,
    }


@functools.cache
def verbs(buffer):
    return jax.jit(lambda s, rows, mask: buffer.extend(s, rows, mask=mask)), jax.jit(
        lambda s: buffer.peek(s, jax.random.key(0), 512)  # 8 anchors at most: none is missed
    )


def drawn(view, rows, capacity=8, times=1):
    buffer = fbuf.Buffer(capacity=capacity, view=view)
    extend, peek = verbs(buffer)
    state = buffer.init({name: x[0] for name, x in rows.items()})
    size = len(rows["obs"]) // times
    for i in range(times):
        piece = {name: x[i * size : (i + 1) * size] for name, x in rows.items()}
        padded = {name: np.resize(x, (PIECE, *x.shape[1:])) for name, x in piece.items()}
        state = extend(state, padded, np.arange(PIECE) < size)
    batch = jax.device_get(peek(state))
    if not batch.mask[0]:
        return {}
    found = {}
    for i, action in enumerate(batch.data["action"].tolist()):
        fields = ("obs", "reward", "discount", "next_obs")
        found[action // 10] = tuple(batch.data[name][i].tolist() for name in fields)
    return dict(sorted(found.items()))


BY_HAND = {
    "one step": (ONE, [1, 2, 3], "---", {1: (1, 1, 0.5, 2), 2: (2, 2, 0.5, 3)}),
    "one row, truncated": (ONE, [1, 2, 4], "cc-", {}),
    "two steps": (TWO, [1, 2, 4, 8], "----", {1: (1, 1 + 2 / 2, 0.25, 4), 2: (2, 2 + 4 / 2, 0.25, 8)}),
    "terminated": (TWO, [1, 2, 4, 8], "--t-", {1: (1, 1 + 2 / 2, 0.25, 4), 2: (2, 2 + 4 / 2, 0, 4), 4: (4, 4, 0, 4)}),
    "truncated": (TWO, [1, 2, 4, 8], "--c-", {1: (1, 1 + 2 / 2, 0.25, 4), 2: (2, 2, 0.5, 4)}),
    "reset row": (
        NEXT_STEP,
        [1, 2, 4, 8, 16, 32],
        "-c----",
        {1: ([0, 1], 1 + 2 / 2, 0.25, [2, 4]), 2: ([1, 2], 2, 0.5, [2, 4]), 8: ([0, 8], 8 + 16 / 2, 0.25, [16, 32])},
    ),
    "no reset row yet": (NEXT_STEP, [1, 2, 4], "--c", {1: ([0, 1], 1 + 2 / 2, 0.25, [2, 4])}),
    "terminated, no reset row": (
        NEXT_STEP,
        [1, 2, 4],
        "--t",
        {1: ([0, 1], 1 + 2 / 2, 0.25, [2, 4]), 2: ([1, 2], 2 + 4 / 2, 0, [2, 4]), 4: ([2, 4], 4, 0, [2, 4])},
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_cases_by_hand(case):
    view, obs, ends, expected = BY_HAND[case]
    assert drawn(view, rows_of(obs, ends)) == expected


@pytest.mark.parametrize("ends", ["--c-", "--t-"])
def test_final_observation_is_what_follows_the_last_row(ends):
    final = np.asarray([91, 92, 93, 94], np.float32)
    view = Transition(n_step=2, gamma=0.5, final_observation="last")
    discount = 0.25 if ends == "--c-" else 0
    assert drawn(view, rows_of([1, 2, 4, 8], ends, last=final)) == {
        1: (1, 1 + 2 / 2, 0.25, 4),
        2: (2, 2 + 4 / 2, discount, 93),
        4: (4, 4, discount * 2, 93),
    }


def test_terminated_wins_over_truncated():
    rows = rows_of([1, 2], "-t", truncated=np.asarray([False, True]))
    assert drawn(ONE, rows)[2] == (2, 2, 0, 2)


@pytest.mark.parametrize("view", [ONE, TWO])
def test_only_terminated_rows_are_terminal(view):
    """torchrl's MultiStep took every row for terminal with one step, and the last of unfinished data with more."""
    found = drawn(view, rows_of([1, 2, 4, 8, 16, 32], "--t---"))
    terminal = {o for o, (_, _, discount, _) in found.items() if discount == 0}
    assert terminal == ({4} if view == ONE else {2, 4}) and max(found) == (16 if view == ONE else 8)


@pytest.mark.parametrize(("pad", "first", "before"), [("zero", 0, 0), ("repeat", 1, 4)])
def test_stacks_stop_at_the_first_frame_of_the_episode(pad, first, before):
    assert drawn(Transition(stack=3, gamma=0.5, pad=pad, autoreset="same_step"), rows_of([1, 2, 4, 8], "-t--")) == {
        1: ([first, first, 1], 1, 0.5, [first, 1, 2]),
        2: ([first, 1, 2], 2, 0, [first, 1, 2]),
        4: ([before, before, 4], 4, 0.5, [before, 4, 8]),
    }


def test_rows_whose_frames_were_overwritten_are_not_drawn():
    rows = rows_of([1, 2, 3, 4, 5, 6, 7], "-------")
    assert list(drawn(Transition(stack=2, autoreset="same_step"), rows, capacity=5)) == [4, 5, 6]
    rows = rows_of([1, 2, 3, 4, 5, 6, 7], "-t-----")  # row 3 begins an episode: nothing is lost
    assert list(drawn(Transition(stack=2, autoreset="same_step"), rows, capacity=5)) == [3, 4, 5, 6]


def test_a_buffer_of_just_the_rows_one_draw_needs():
    rows = rows_of([1, 2, 3, 4, 5, 6], "------")
    view = Transition(stack=2, n_step=2, gamma=1.0, autoreset="same_step")
    assert drawn(view, rows, capacity=4, times=3) == {4: ([3, 4], 9, 1, [5, 6])}


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


@pytest.mark.parametrize(("layout", "case"), QUICK)
def test_transitions_equal_accumulating_before_storing(layout, case):
    check_accumulated(layout, *case)


@pytest.mark.parametrize("pad", ["zero", "repeat"])
def test_the_pool_of_frames_holds_every_stack(pad):
    view = Transition(n_step=2, stack=3, pad=pad, autoreset="same_step")
    buffer = fbuf.Buffer(8, view=view)
    rows = rows_of(list(range(1, 9)), "--t-----")
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    slot, mask = jnp.arange(8, dtype=jnp.int32), jnp.arange(8) != 5
    spec, _ = buffer.storage.spec(state.rows)

    @jax.jit
    def pools(state):
        window = view.window(spec, fbuf._buffer.state_ops.eligible_set(buffer, state), slot, mask, jax.random.key(0))
        return [(read.pool, read.start, read.slot) for read in window.reads if read.name == "obs"]

    for pool, start, slots in jax.device_get(pools(state)):
        np.testing.assert_array_equal(np.take_along_axis(pool, start[:, None] + np.arange(3), axis=1), slots)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_rewards_stay_as_they_are(dtype):
    view = Transition(n_step=2, gamma=0.5, autoreset="same_step")
    rows = rows_of([1, 2, 4], "---")
    buffer = fbuf.Buffer(4, view=view)
    rows["reward"] = rows["reward"].astype(dtype)
    state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
    data = buffer.peek(state, jax.random.key(0), 1).data
    assert data["reward"].dtype == data["discount"].dtype == dtype
    assert float(data["reward"][0]) == 2 and float(data["discount"][0]) == 0.25

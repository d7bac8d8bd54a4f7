"""`Transition` in cases small enough to check by hand, and against returns and stacks accumulated before storing."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.views import Transition
from tests.support.transition import CASES, check_accumulated

ONE = Transition(gamma=0.5)
TWO = Transition(n_step=2, gamma=0.5)
NEXT_STEP = Transition(n_step=2, gamma=0.5, stack=2, autoreset="next_step")
PIECE = 8  # rows of every call, masked beyond those given, so that a view compiles once
QUICK = [("final", CASES[1]), ("none", CASES[2]), ("next_step", CASES[1])]


def rows_of(obs: list[int], ends: str, **more: Any) -> dict[str, Any]:
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
def verbs(buffer: fbuf.Buffer) -> tuple[Any, Any]:
    return jax.jit(lambda s, rows, mask: buffer.extend(s, rows, mask=mask)), jax.jit(
        lambda s: buffer.peek(s, jax.random.key(0), 512)  # 8 anchors at most: none is missed
    )


def drawn(view: Transition, rows: dict[str, Any], capacity: int = 8, times: int = 1) -> Any:
    """`{o_t: (obs, reward, discount, next_obs)}` of every anchor, after the rows arrived in `times` equal pieces."""
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


def test_one_step():
    assert drawn(ONE, rows_of([1, 2, 3], "---")) == {1: (1, 1, 0.5, 2), 2: (2, 2, 0.5, 3)}


def test_n_steps_need_the_row_n_later():
    assert drawn(TWO, rows_of([1, 2, 4, 8], "----")) == {1: (1, 1 + 2 / 2, 0.25, 4), 2: (2, 2 + 4 / 2, 0.25, 8)}


def test_termination_shortens_the_return_and_ends_bootstrapping():
    assert drawn(TWO, rows_of([1, 2, 4, 8], "--t-")) == {
        1: (1, 1 + 2 / 2, 0.25, 4),
        2: (2, 2 + 4 / 2, 0, 4),
        4: (4, 4, 0, 4),
    }


def test_truncation_without_a_final_observation_bootstraps_from_the_last_one():
    assert drawn(TWO, rows_of([1, 2, 4, 8], "--c-")) == {1: (1, 1 + 2 / 2, 0.25, 4), 2: (2, 2, 0.5, 4)}


def test_an_episode_of_one_truncated_row_is_not_drawn():
    assert drawn(ONE, rows_of([1, 2, 4], "cc-")) == {}


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


def test_next_step_autoreset_takes_the_final_observation_from_the_row_after():
    assert drawn(NEXT_STEP, rows_of([1, 2, 4, 8, 16, 32], "-c----")) == {
        1: ([0, 1], 1 + 2 / 2, 0.25, [2, 4]),
        2: ([1, 2], 2, 0.5, [2, 4]),
        8: ([0, 8], 8 + 16 / 2, 0.25, [16, 32]),
    }


def test_next_step_truncation_waits_for_its_final_observation():
    assert drawn(NEXT_STEP, rows_of([1, 2, 4], "--c")) == {1: ([0, 1], 1 + 2 / 2, 0.25, [2, 4])}
    assert drawn(NEXT_STEP, rows_of([1, 2, 4], "--t")) == {
        1: ([0, 1], 1 + 2 / 2, 0.25, [2, 4]),
        2: ([1, 2], 2 + 4 / 2, 0, [2, 4]),
        4: ([2, 4], 4, 0, [2, 4]),
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
    assert drawn(Transition(stack=3, gamma=0.5, pad=pad), rows_of([1, 2, 4, 8], "-t--")) == {
        1: ([first, first, 1], 1, 0.5, [first, 1, 2]),
        2: ([first, 1, 2], 2, 0, [first, 1, 2]),
        4: ([before, before, 4], 4, 0.5, [before, 4, 8]),
    }


def test_rows_whose_frames_were_overwritten_are_not_drawn():
    """Five rows of seven are left: the oldest lost its predecessor, the newest has no successor."""
    rows = rows_of([1, 2, 3, 4, 5, 6, 7], "-------")
    assert list(drawn(Transition(stack=2), rows, capacity=5)) == [4, 5, 6]
    rows = rows_of([1, 2, 3, 4, 5, 6, 7], "-t-----")  # row 3 begins an episode: nothing is lost
    assert list(drawn(Transition(stack=2), rows, capacity=5)) == [3, 4, 5, 6]


def test_a_buffer_of_just_the_rows_one_draw_needs():
    rows = rows_of([1, 2, 3, 4, 5, 6], "------")
    view = Transition(stack=2, n_step=2, gamma=1.0)
    assert drawn(view, rows, capacity=4, times=3) == {4: ([3, 4], 9, 1, [5, 6])}


def test_nested_observations_other_leaves_and_integer_rewards():
    view = Transition(observation="o", action=None, stack=2, gamma=0.5, n_step=2)
    buffer = fbuf.Buffer(capacity=8, view=view)
    rows = {
        "o": {"image": np.arange(4, dtype=np.uint8)[:, None], "speed": np.arange(4, dtype=np.float32)},
        "reward": np.asarray([1, 2, 3, 4], np.int32),
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
    np.testing.assert_array_equal(data["reward"], 1 + at + (2 + at) / 2)
    np.testing.assert_array_equal(data["next_obs"]["speed"], np.stack([at + 1, at + 2], axis=1))
    np.testing.assert_array_equal(data["obs"]["image"][:, 1, 0], at)


def test_rewards_of_several_numbers_add_up_one_by_one():
    rows = rows_of([1, 2, 3], "---", reward=np.asarray([[1, 10], [2, 20], [4, 40]], np.float32))
    assert drawn(TWO, rows) == {1: (1, [2, 20], 0.25, 3)}


@pytest.mark.parametrize(("layout", "case"), QUICK)
def test_transitions_equal_accumulating_before_storing(layout, case):
    check_accumulated(layout, *case)

"""`fbuf.gymnasium`: rows of vector environments, in each autoreset mode."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("gymnasium")
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import fbuf
from tests.support.lander import GAMMA, MODES, Lander, Structured, by_hand, drawn, play, resetting, vectorise


def recorded(mode: AutoresetMode) -> tuple[Any, fbuf.Replay, Any]:
    envs = vectorise(Lander, 3, mode, copy=False)
    example = fbuf.gymnasium.spec(envs)
    view = fbuf.gymnasium.view(envs, gamma=GAMMA)
    replay = fbuf.Replay(fbuf.Buffer(300, view=view, sampler=fbuf.samplers.Epoch(), lanes=3), example)
    return fbuf.gymnasium.Recorder(envs, replay), replay, example


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_draws_are_the_transitions_of_environments_stepped_by_hand(mode: AutoresetMode) -> None:
    envs, replay, example = recorded(mode)
    counts = play(envs, 60)
    assert drawn(replay, example) == by_hand(Lander, example, counts)
    envs, replay, example = recorded(mode)
    expected = resetting(envs, example, 60, np.random.default_rng(0))  # no transition crosses a reset by the caller
    assert drawn(replay, example) == expected


def test_the_example_has_the_leaves_of_all_spaces() -> None:
    def described(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)

    row = described(fbuf.gymnasium.spec(Structured()))
    assert row == {
        "obs": {"state": "float32[3]", "time": "int32[]", "pair": ("int8[2]", "int32[2]")},
        "action": {"thrust": "float32[]", "legs": "int32[2]"},
        "reward": "float32[]",
        "terminated": "bool[]",
        "truncated": "bool[]",
    }
    assert described(fbuf.gymnasium.spec(vectorise(Structured, 2, AutoresetMode.NEXT_STEP))) == row
    for space in (spaces.Text(3), spaces.Dict(x=spaces.Sequence(spaces.Discrete(2)))):
        with pytest.raises(TypeError, match="has no fixed shape; expected Box, Discrete"):
            fbuf.gymnasium.spec(SimpleNamespace(observation_space=space, action_space=spaces.Discrete(2)))


def test_what_does_not_fit_is_refused() -> None:
    envs = vectorise(Lander, 3, AutoresetMode.NEXT_STEP)
    example, view = fbuf.gymnasium.spec(envs), fbuf.gymnasium.view(envs)

    def replay(view: Any = view, lanes: int | None = 3) -> fbuf.Replay:
        return fbuf.Replay(fbuf.Buffer(9, view=view, lanes=lanes), example)

    windows = fbuf.Buffer(9, view=fbuf.views.Sequence(2, autoreset="next_step"), lanes=3)
    without_reward = fbuf.Replay(windows, {name: leaf for name, leaf in example.items() if name != "reward"})
    for make, kind, message in (
        (lambda: (replay(), envs), TypeError, r"expected a Replay"),
        (lambda: (envs, replay(lanes=None)), ValueError, "lanes=None, but envs is 3 environments. Write lanes=3"),
        (lambda: (Lander(), replay()), ValueError, "lanes=3, but envs is one gymnasium.Env. Write lanes=None"),
        (lambda: (envs, replay(fbuf.views.Transition(autoreset="same_step"))), ValueError, 'autoreset="next_step"'),
        (lambda: (envs, without_reward), ValueError, r"no leaf 'reward'\. Write .*fbuf\.gymnasium\.spec\(envs\)\)"),
        (lambda: (envs, replay(fbuf.views.Row())), ValueError, r"Write view=fbuf.gymnasium.view\(envs\)"),
    ):
        with pytest.raises(kind, match=message):
            fbuf.gymnasium.Recorder(*make())
    recorder = fbuf.gymnasium.Recorder(envs, replay())
    pytest.raises(RuntimeError, lambda: recorder.step(np.zeros(3, int))).match(r"not running. Call reset\(\)")
    with pytest.raises(RuntimeError, match=r"not running. Call reset\(\)"):
        recorder.reset(options={"reset_mask": np.array([True, False, True])})
    with pytest.raises(AttributeError, match="would bypass the replay"):
        _ = recorder.step_async
    assert recorder.single_action_space == spaces.Discrete(3)
    envs.metadata.pop("autoreset_mode")
    said = r"envs\.metadata\['autoreset_mode'\] is None; expected an AutoresetMode\. Set it\."
    pytest.raises(ValueError, fbuf.gymnasium.view, envs).match(said)

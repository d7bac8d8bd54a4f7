"""`fbuf.gymnasium`: rows of vector environments, in each autoreset mode."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("gymnasium")
import gymnasium
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import fbuf
from tests.support.lander import GAMMA, MODES, Lander, Structured, by_hand, drawn, play, resetting, vectorise
from tests.support.tables import by_tier


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
        (lambda: (replay(), envs), TypeError, r"expected a Replay. Write Recorder\(envs, fbuf.Replay"),
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
    del envs.autoreset_mode
    envs.metadata.pop("autoreset_mode")
    said = r"mode of envs is None; expected an AutoresetMode\. Set envs\.metadata\['autoreset_mode'\]\."
    pytest.raises(ValueError, fbuf.gymnasium.view, envs).match(said)


def test_the_mode_is_that_of_the_environments_not_of_shared_metadata() -> None:
    """The metadata of ale-py's environments is one dict, which names the mode of the environments opened last."""

    class Plain(gymnasium.vector.VectorWrapper[Any, Any, Any, Any, Any]):
        def __getattr__(self, name: str) -> Any:
            raise AttributeError(name)

    for mode, other in ((MODES[0], MODES[1]), (MODES[1], MODES[0]), (MODES[2], MODES[0])):
        inner = vectorise(Lander, 3, mode, copy=False)
        for envs in (inner, gymnasium.vector.VectorWrapper(inner), Plain(inner)):
            inner.metadata = envs.metadata = {"autoreset_mode": other}
            replay = fbuf.Replay(fbuf.Buffer(90, view=fbuf.gymnasium.view(envs), lanes=3), fbuf.gymnasium.spec(envs))
            assert fbuf.gymnasium.Recorder(envs, replay)._mode == mode.value
        del inner.autoreset_mode
        assert fbuf.gymnasium.Recorder(inner, replay)._mode == other.value


def contents(replay: fbuf.Replay) -> Any:
    rows, batch = replay.rows(), replay.sample(64)
    return jax.device_get((rows.data, rows.mask, batch.data, batch.index.slot))


@pytest.mark.parametrize("mode", by_tier(more=MODES), ids=lambda mode: mode.name)
def test_an_interrupted_run_equals_one_that_was_not(mode: AutoresetMode, tmp_path: Any) -> None:
    rng = np.random.default_rng(len(mode.name))
    expected = None
    stops = [None, *rng.choice(np.arange(1, 25), 3, replace=False).tolist(), "ended"]
    for number, stop in enumerate(stops):
        inner = vectorise(Lander, 3, mode, copy=False)
        example = fbuf.gymnasium.spec(inner) | {"step": np.int32(0)}
        replay = fbuf.Replay(fbuf.Buffer(300, view=fbuf.gymnasium.view(inner, n_step=2), lanes=3), example)
        envs: Any = fbuf.gymnasium.Recorder(inner, replay)
        obs, stopped = envs.reset(seed=0)[0], 0
        for step in range(30):
            action = np.arange(3) * step % 3
            obs, _, terminated, truncated, _ = envs.step(action, step=np.full(3, step, np.int32))
            ended = terminated | truncated
            if step == stop or (stop == "ended" and ended.any()):
                path = tmp_path / f"{number}_{stopped}"
                stopped += 1
                replay.save(path, extra={"obs": obs})
                replay, extra = fbuf.Replay.load(path, extra=True, cut=False)
                envs = fbuf.gymnasium.Recorder(inner, replay, obs=extra["obs"])
            if step == 20:
                obs = envs.reset(seed=1)[0]
            elif mode == AutoresetMode.DISABLED and ended.any():
                obs = envs.reset(options={"reset_mask": ended})[0]
        found = contents(replay)
        expected = found if expected is None else expected
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        assert stopped >= 3 if stop == "ended" else stopped == (stop is not None)


@pytest.mark.more
def test_what_does_not_continue_is_refused() -> None:
    envs = vectorise(Lander, 3, AutoresetMode.NEXT_STEP)
    for scale in (None, fbuf.transforms.Scale("obs", offset=1.0)):
        buffer = fbuf.Buffer(90, view=fbuf.gymnasium.view(envs), lanes=3, on_write=scale)
        replay = fbuf.Replay(buffer, fbuf.gymnasium.spec(envs))
        recorder = fbuf.gymnasium.Recorder(envs, replay)
        recorder.reset(seed=0)
        ended = np.zeros(3, bool)
        while not ended.any():
            obs, _, terminated, truncated, _ = recorder.step(np.zeros(3, int))
            ended = terminated | truncated
        for wrong in (obs[:2], obs[:, :1], {"x": obs}):
            pytest.raises(ValueError, fbuf.gymnasium.Recorder, envs, replay, obs=wrong).match(
                "what step or reset returned"
            )
        if scale is not None:
            pytest.raises(ValueError, fbuf.gymnasium.Recorder, envs, replay, obs=obs).match("Save after another step")
            recorder.step(np.zeros(3, int))
        fbuf.gymnasium.Recorder(envs, replay, obs=obs)
        if scale is None:
            replay.cut()
            pytest.raises(ValueError, fbuf.gymnasium.Recorder, envs, replay, obs=obs).match(r"cut\. Write .*cut=False")

"""What needs pyarrow or Stable-Baselines3; every transition drawn from what other libraries wrote, from both sinks."""

import ast
import dataclasses

import gymnasium.spaces as spaces
import numpy as np
import pytest
import stable_baselines3.common.buffers as buffers

import fbuf
from fbuf import interop
from tests.support.foreign import FILES, world
from tests.support.foreign.check import check_draws
from tests.support.foreign.check import check_rows as check
from tests.support.refusals import raises

pytestmark = pytest.mark.more

PARTS = {"part": world.steps(25), "wrapped": world.steps(57)[-40:]}
WHOLE = [step for steps in world.episodes(6) for step in steps]


def cpprb(name):
    with np.load(FILES / f"cpprb_{name}.npz") as file:
        return interop.from_cpprb(dict(file), position=25 if name == "part" else 17, ends="terminated")


CASES = {
    "tianshou part": (lambda: interop.from_file(FILES / "tianshou_part.hdf5"), [PARTS["part"]], True),
    "tianshou wrapped": (lambda: interop.from_file(FILES / "tianshou_wrapped.hdf5"), [PARTS["wrapped"]], True),
    "tianshou ignore": (lambda: interop.from_file(FILES / "tianshou_ignore.hdf5"), [PARTS["wrapped"]], False),
    "d3rlpy": (
        lambda: interop.from_file(FILES / "d3rlpy_tuple.h5"),
        [[s for steps in world.episodes(7) if len(steps) > 1 or steps[0].terminated for s in steps]],
        False,
    ),
    "robomimic": (lambda: interop.from_file(FILES / "robomimic_0.hdf5", ends="terminated"), [WHOLE], True),
    "cpprb part": (lambda: cpprb("part"), [PARTS["part"]], True),
    "cpprb wrapped": (lambda: cpprb("wrapped"), [PARTS["wrapped"]], True),
    "skrl": (
        lambda: interop.from_skrl(FILES / "skrl_wrapped.npz", position=13, filled=True),
        [world.steps(33, lane)[-20:] for lane in range(2)],
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_transition_is_drawn(name, tmp_path):
    make, lanes, final = CASES[name]
    check_draws(make, lanes, tmp_path / "set", final)


def test_lerobot(tmp_path):
    late = [s for steps in world.episodes(5) for s in steps]
    late = [dataclasses.replace(s, terminated=False, truncated=s.terminated or s.truncated) for s in late]
    path = FILES / "lerobot_rewards"
    raises(ValueError, "whether next.done are.*Pass ends='terminated'", interop.from_file, path)
    check(lambda: interop.from_file(path, ends="trajectory"), [late], tmp_path, final=False)
    ended = [dataclasses.replace(s, terminated=s.truncated, truncated=False) for s in late]
    check(lambda: interop.from_file(path, ends="terminated"), [ended], tmp_path / "b", final=False)
    buffer, state = interop.from_file(FILES / "lerobot_plain").save(tmp_path / "c", view=fbuf.views.Row())
    rows = buffer.rows(state).data
    assert rows["truncated"].tolist() == [s.truncated for s in late] and "reward" not in rows
    names = {"task_index": "task", "obs/state": "obs", "episode_index": "episode"}
    task = interop.from_file(FILES / "lerobot_plain", fields=names).stored()[1](0, len(late), 50)
    assert sorted(set(next(task)["task"].tolist())) == [0, 1]
    with pytest.raises(ValueError, match="lerobot_video: leaf '.*front' is video; numbers .* fields=") as caught:
        interop.from_file(FILES / "lerobot_video").save(tmp_path / "d")
    advice = ast.literal_eval(str(caught.value).partition("fields=")[2][:-1])
    again, _ = interop.from_file(FILES / "lerobot_video", fields=advice).save(tmp_path / "d", view=fbuf.views.Row())
    assert again.capacity == len(late)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("number", "envs"), [(9, 1), (33, 1), (9, 3), (33, 3)])
def test_stable_baselines(number, envs, compact, tmp_path):
    settings = {"optimize_memory_usage": compact, "handle_timeout_termination": not compact}
    space = spaces.Box(-9, 9999, (3,), np.float32), spaces.Discrete(3)
    made = buffers.ReplayBuffer(20 * envs, *space, device="cpu", n_envs=envs, **settings)
    lanes = [world.steps(number, lane) for lane in range(envs)]
    for together in zip(*lanes, strict=True):
        stacked = (np.stack([getattr(s, name) for s in together]) for name in ("obs", "next_obs", "action", "reward"))
        done = np.array([s.terminated or s.truncated for s in together])
        made.add(*stacked, done, [{"TimeLimit.truncated": s.truncated} for s in together])
    kept = [steps[-20:] for steps in lanes]
    if compact:  # as Stable-Baselines3 then has it: time limits terminate, final observations are lost
        kept = [steps[1:] if number > 20 else steps for steps in kept]
        kept = [
            [dataclasses.replace(s, terminated=s.terminated or s.truncated, truncated=False) for s in k] for k in kept
        ]
    check(lambda: interop.from_sb3(made), kept, tmp_path, final=not compact)
    raises(TypeError, "expected a ReplayBuffer of Stable", interop.from_sb3, {})


def test_arguments_that_lerobot_does_not_use_are_refused():
    for name, value in {"lanes": 2, "mask": "train", "episode_end": ("x",)}.items():
        with pytest.raises(ValueError, match=rf"{name} is .*, which the format 'LeRobot v3.0' has no use for"):
            interop.from_file(FILES / "lerobot_rewards", ends="trajectory", **{name: value})
    with pytest.raises(ValueError, match=r"ends is 'terminated', but there are no next.done"):
        interop.from_file(FILES / "lerobot_plain", ends="terminated")

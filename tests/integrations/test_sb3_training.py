"""Training with the compressed buffers of Stable-Baselines3 ends with the parameters that its own buffers give."""

from pathlib import Path
from typing import Any

import gymnasium
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("stable_baselines3")
contrib = pytest.importorskip("sb3_contrib")

from stable_baselines3 import DDPG, DQN, SAC, TD3, HerReplayBuffer  # noqa: E402
from stable_baselines3.common import buffers as theirs  # noqa: E402
from stable_baselines3.common.envs import BitFlippingEnv, FakeImageEnv, SimpleMultiObsEnv  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize  # noqa: E402

from fbuf.integrations import sb3  # noqa: E402

pytestmark = pytest.mark.more

COMPRESSED = {
    theirs.ReplayBuffer: sb3.CompressedReplayBuffer,
    theirs.DictReplayBuffer: sb3.CompressedDictReplayBuffer,
    theirs.NStepReplayBuffer: sb3.CompressedNStepReplayBuffer,
    HerReplayBuffer: sb3.CompressedHerReplayBuffer,
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def image() -> gymnasium.Env:
    env = FakeImageEnv(screen_height=36, screen_width=36, n_channels=4, channel_first=True)
    env.observation_space.seed(0)
    return env


def bits(discrete: bool = True) -> gymnasium.Env:
    return BitFlippingEnv(n_bits=5, continuous=not discrete, max_steps=5)


def normalised() -> VecNormalize:
    return VecNormalize(DummyVecEnv([lambda: gymnasium.make("Pendulum-v1")] * 2))


CASES: dict[str, tuple[Any, str, Any, Any, dict[str, Any]]] = {
    "DQN": (DQN, "MlpPolicy", "CartPole-v1", theirs.ReplayBuffer, {}),
    "DQN of images": (DQN, "CnnPolicy", image, theirs.ReplayBuffer, {"batch_size": 8}),
    "DQN of 3 steps": (DQN, "MlpPolicy", "CartPole-v1", theirs.NStepReplayBuffer, {"n_steps": 3, "gamma": 0.9}),
    "DQN of dictionaries": (DQN, "MultiInputPolicy", SimpleMultiObsEnv, theirs.DictReplayBuffer, {}),
    "DQN with goals": (DQN, "MultiInputPolicy", bits, HerReplayBuffer, {"copy_info_dict": True}),
    "SAC": (SAC, "MlpPolicy", "Pendulum-v1", theirs.ReplayBuffer, {}),
    "SAC, two normalised environments": (SAC, "MlpPolicy", normalised, theirs.ReplayBuffer, {}),
    "SAC with goals": (SAC, "MultiInputPolicy", lambda: bits(False), HerReplayBuffer, {"n_sampled_goal": 2}),
    "TD3": (TD3, "MlpPolicy", "Pendulum-v1", theirs.ReplayBuffer, {}),
    "DDPG": (DDPG, "MlpPolicy", "Pendulum-v1", theirs.ReplayBuffer, {}),
    "QR-DQN": (contrib.QRDQN, "MlpPolicy", "CartPole-v1", theirs.ReplayBuffer, {}),
    "TQC": (contrib.TQC, "MlpPolicy", "Pendulum-v1", theirs.ReplayBuffer, {}),
}
OF_BUFFER = ("n_steps", "gamma", "copy_info_dict", "n_sampled_goal")


def trained(case: str, compressed: bool, steps: int = 220) -> Any:
    """Return a model after `steps` steps, with every observation compressed or none."""
    algorithm, policy, env, kind, settings = CASES[case]
    kwargs = {name: value for name, value in settings.items() if name in OF_BUFFER}
    if compressed:
        kind, kwargs = COMPRESSED[kind], kwargs | {"min_bytes": 1}
    own = {"replay_buffer_class": kind, "replay_buffer_kwargs": kwargs, "learning_starts": 60, "buffer_size": 150}
    own |= {} if policy == "CnnPolicy" else {"policy_kwargs": {"net_arch": [16]}}
    made = env if isinstance(env, str) else env()
    model = algorithm(policy, made, batch_size=settings.get("batch_size", 16), seed=0, device="cpu", **own)
    return model.learn(steps)


def same_parameters(one: Any, other: Any) -> None:
    a, b = one.policy.state_dict(), other.policy.state_dict()
    assert a.keys() == b.keys() and all(a[name].numpy().tobytes() == b[name].numpy().tobytes() for name in a)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("case", CASES)
def test_final_parameters_are_identical(case: str) -> None:
    one, other = trained(case, False), trained(case, True)
    assert other.replay_buffer.full
    same_parameters(one, other)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize("case", ["DQN of images", "SAC with goals"])
def test_training_resumes_with_a_saved_buffer(case: str, truncate: bool, tmp_path: Path) -> None:
    results = []
    for compressed in (False, True):
        model = trained(case, compressed)
        model.save_replay_buffer(tmp_path / "replay")
        model.load_replay_buffer(tmp_path / "replay", truncate_last_traj=truncate)
        results.append(model.learn(60, reset_num_timesteps=False))
    same_parameters(*results)

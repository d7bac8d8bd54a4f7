"""Write the files that tests of readers read, each by the library whose format it is: `python make.py [name ...]`.

Run it in an environment with requirements.txt, in this folder. What the files hold is in world.py.
"""

import json
import pathlib
import shutil
import sys
import unittest.mock

import numpy as np
import world

FILES = pathlib.Path(__file__).parent / "files"


def tianshou():
    from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer, VectorReplayBuffer

    def batch(step, **more):
        one = dict(obs=step.obs, act=step.action, rew=step.reward, terminated=step.terminated)
        return Batch(**one, truncated=step.truncated, obs_next=step.next_obs, info={}, **more)

    for name, number, ignore in (("part", 25, False), ("wrapped", 57, False), ("ignore", 57, True)):
        buffer = ReplayBuffer(40, ignore_obs_next=ignore)
        for step in world.steps(number):
            buffer.add(batch(step))
        buffer.save_hdf5(FILES / f"tianshou_{name}.hdf5")
    buffer = PrioritizedReplayBuffer(40, alpha=0.6, beta=0.4)
    for step in world.steps(57):
        buffer.add(batch(step))
    buffer.save_hdf5(FILES / "tianshou_prioritized.hdf5")
    buffer = VectorReplayBuffer(60, 3)  # 20 slots a lane: 11 steps, 33 and none
    for lane, number in enumerate((11, 33, 0)):
        for step in world.steps(number, lane):
            one = batch(step)
            buffer.add(Batch([one]), buffer_ids=[lane])
    buffer.save_hdf5(FILES / "tianshou_vector.hdf5")


def d3rlpy():
    import d3rlpy as d3

    for name, discrete, pair in (("continuous", False, False), ("discrete", True, False), ("tuple", False, True)):
        found = []
        for episode in world.episodes(7):
            seen = np.stack([step.obs for step in episode])
            action = np.array([[step.action] for step in episode], np.int32 if discrete else np.float32)
            reward = np.array([[step.reward] for step in episode], np.float32)
            obs = [seen, seen[:, :2] * 2] if pair else seen
            found.append(d3.dataset.Episode(obs, action, reward, terminated=episode[-1].terminated))
        buffer = d3.dataset.create_infinite_replay_buffer(found)
        with open(FILES / f"d3rlpy_{name}.h5", "w+b") as file:
            buffer.dump(file)


def ogbench():
    """OGBench's files, as its generators write them, and what its own loader makes of them."""
    from ogbench.utils import load_dataset

    every = {"observations": [], "actions": [], "terminals": [], "qpos": []}
    for episode in world.episodes(6):
        for t, step in enumerate([*episode, None]):
            last = step is None
            every["observations"].append(episode[-1].next_obs if last else step.obs)
            every["actions"].append([9.0 if last else step.action])
            every["terminals"].append(last)
            every["qpos"].append([t])
    arrays = {"observations": np.float32, "actions": np.float32, "terminals": bool, "qpos": np.float32}
    np.savez_compressed(FILES / "ogbench.npz", **{name: np.array(every[name], kind) for name, kind in arrays.items()})
    for name, compact in (("regular", False), ("compact", True)):
        loaded = load_dataset(FILES / "ogbench.npz", compact_dataset=compact)
        np.savez_compressed(FILES / f"ogbench_{name}.npz", **loaded)


def skrl():
    import torch
    from skrl.memories.torch import RandomMemory

    for name, number in (("part", 9), ("wrapped", 33)):
        memory = RandomMemory(memory_size=20, num_envs=2, device="cpu", export=False)
        sizes = {"observations": (3, torch.float32), "actions": (1, torch.int64), "rewards": (1, torch.float32)}
        sizes |= {"terminated": (1, torch.bool), "truncated": (1, torch.bool), "next_observations": (3, torch.float32)}
        for field, (size, dtype) in sizes.items():
            memory.create_tensor(name=field, size=size, dtype=dtype)
        lanes = [world.steps(number, lane) for lane in range(2)]
        for both in zip(*lanes, strict=True):
            memory.add_samples(
                observations=torch.tensor(np.stack([s.obs for s in both])),
                actions=torch.tensor([[s.action] for s in both]),
                rewards=torch.tensor([[s.reward] for s in both]),
                terminated=torch.tensor([[s.terminated] for s in both]),
                truncated=torch.tensor([[s.truncated] for s in both]),
                next_observations=torch.tensor(np.stack([s.next_obs for s in both])),
            )
        memory.save(str(FILES), format="npz")
        newest = max(FILES.glob("memories/*.npz"), key=lambda path: path.stat().st_mtime)
        newest.rename(FILES / f"skrl_{name}.npz")
        shutil.rmtree(FILES / "memories")


def cpprb():
    import cpprb as library

    env = {"obs": {"shape": 3}, "act": {"shape": 1, "dtype": np.int32}, "rew": {}, "next_obs": {"shape": 3}, "done": {}}
    for name, number in (("part", 25), ("wrapped", 57)):
        buffer = library.ReplayBuffer(40, env)
        for step in world.steps(number):
            one = dict(obs=step.obs, act=step.action, rew=step.reward, next_obs=step.next_obs, done=step.terminated)
            buffer.add(**one)
            if step.terminated or step.truncated:
                buffer.on_episode_end()
        np.savez_compressed(FILES / f"cpprb_{name}.npz", **buffer.get_all_transitions())
        buffer.save_transitions(str(FILES / f"cpprb_saved_{name}.npz"))


def robomimic():
    """Demonstrations in robomimic's layout, read back by its own loader; `done_mode` 0, 1 and 2."""
    import h5py
    from robomimic.utils.dataset import SequenceDataset

    for mode in (0, 1, 2):
        path = FILES / f"robomimic_{mode}.hdf5"
        with h5py.File(path, "w") as file:
            data = file.create_group("data")
            demos = world.episodes(6)
            data.attrs["env_args"] = json.dumps({"env_name": "world", "type": 1, "env_kwargs": {}})
            data.attrs["total"] = sum(map(len, demos))
            for i, demo in enumerate(demos):
                group = data.create_group(f"demo_{i}")
                group.attrs["num_samples"] = len(demo)
                success = [step.terminated for step in demo]
                end = [t == len(demo) - 1 for t in range(len(demo))]
                done = [(mode < 2 and s) or (mode > 0 and e) for s, e in zip(success, end, strict=True)]
                if mode == 2:
                    done = [s or e for s, e in zip(success, end, strict=True)]
                group["actions"] = np.array([[step.action] for step in demo], np.float64)
                group["rewards"] = np.array([step.reward for step in demo], np.float64)
                group["dones"] = np.array(done, np.int64)
                group["states"] = np.stack([step.obs for step in demo]).astype(np.float64)
                group["obs/place"] = np.stack([step.obs for step in demo])
                group["next_obs/place"] = np.stack([step.next_obs for step in demo])
            file["mask/train"] = np.array([b"demo_0", b"demo_2", b"demo_5"])
            file["mask/valid"] = np.array([b"demo_1"])
        keys = {"hdf5_path": str(path), "obs_keys": ["place"], "dataset_keys": ["actions", "rewards", "dones"]}
        loaded = SequenceDataset(**keys, load_next_obs=True, hdf5_cache_mode=None, hdf5_use_swmr=False)
        assert len(loaded) == sum(map(len, demos))
        for row, step in zip(range(len(loaded)), (s for demo in demos for s in demo), strict=True):
            item = loaded[row]
            assert np.array_equal(item["obs"]["place"][0], step.obs)
            assert np.array_equal(item["next_obs"]["place"][0], step.next_obs)


def lerobot():
    import datasets  # noqa: F401

    for name in ("", ".transforms", ".transforms.v2", ".transforms.v2.functional"):  # decodes videos only
        sys.modules[f"torchvision{name}"] = unittest.mock.MagicMock()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    for name, rewards, images in (("rewards", True, False), ("plain", False, False), ("video", False, True)):
        path = FILES / f"lerobot_{name}"
        shutil.rmtree(path, ignore_errors=True)
        features = {
            "observation.state": {"dtype": "float32", "shape": (3,), "names": ["lane", "episode", "t"]},
            "action": {"dtype": "float32", "shape": (1,), "names": ["a"]},
        }
        if rewards:
            features["next.reward"] = {"dtype": "float32", "shape": (1,), "names": None}
            features["next.done"] = {"dtype": "bool", "shape": (1,), "names": None}
        if images:
            features["observation.images.front"] = {"dtype": "video", "shape": (16, 16, 3), "names": ["h", "w", "c"]}
        made = LeRobotDataset.create("world/world", fps=10, features=features, root=path, use_videos=images)
        for number, episode in enumerate(world.episodes(5)):
            for step in episode:
                frame = {"observation.state": step.obs, "action": np.array([step.action], np.float32)}
                frame["task"] = "reach" if number % 2 else "push"
                if rewards:
                    frame["next.reward"] = np.array([step.reward], np.float32)
                    frame["next.done"] = np.array([step.terminated or step.truncated])
                if images:
                    frame["observation.images.front"] = np.zeros((16, 16, 3), np.uint8)
                made.add_frame(frame)
            made.save_episode()
        made.finalize()


if __name__ == "__main__":
    FILES.mkdir(exist_ok=True)
    writers = [tianshou, d3rlpy, ogbench, skrl, cpprb, robomimic, lerobot]
    chosen = sys.argv[1:] or [writer.__name__ for writer in writers]
    for writer in writers:
        if writer.__name__ in chosen:
            print(writer.__name__)
            writer()

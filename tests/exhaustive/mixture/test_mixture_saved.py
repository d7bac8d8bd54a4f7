"""Further cases: see `tests/more/mixture/test_mixture_saved.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, Memmap
from fbuf.transforms import Normalize, NormalizeReward, Scale
from tests.support.mixture import EXAMPLE, filled, played, same, two


def test_statistics_of_transforms_are_saved_by_buffer(tmp_path):
    """A stage with other settings learns again, from the rows held."""
    online = fbuf.Buffer(
        20,
        storage=Compressed(keys=("obs",)),
        on_write={"w": Normalize("reward", clip=5.0)},
        on_read={"r": NormalizeReward(), "s": Scale("obs", 0.5, 1.0)},
    )
    offline = fbuf.Buffer(40, sampler=Prioritized(), on_read={"r": NormalizeReward(clip=3.0), "s": Scale("obs")})
    mixture = fbuf.Mixture({"online": online, "offline": offline}, fractions={"online": 0.25, "offline": 0.75})
    example = {"obs": jnp.zeros((2, 2), jnp.uint8), "reward": 0.0}
    state = mixture.init({"online": example, "offline": example})

    def rows(seed, count):
        rng = np.random.default_rng(seed)
        reward = rng.normal(2, 7, count).astype(np.float32)
        return {"obs": rng.integers(0, 256, (count, 2, 2), np.uint8), "reward": reward}

    def play(mixture, state):
        out = []
        for i in range(3):
            state = mixture.extend(mixture.extend(state, "online", rows(10 + i, 3)), "offline", rows(20 + i, 4))
            state, batch = mixture.sample(state, jax.random.key(i), 8)
            state = mixture.update_priority(state, batch.index, batch.data["reward"])
            out.append((batch.data, batch.index, batch.weight, mixture.stats(state)))
        return out

    state = mixture.extend(mixture.extend(state, "online", rows(0, 33)), "offline", rows(1, 22))
    fbuf.save(tmp_path, mixture, state)
    changed = dataclasses.replace(online, on_read={"r": NormalizeReward(eps=0.1), "s": Scale("obs", 0.5, 1.0)})
    other, learnt = fbuf.load(tmp_path, dataclasses.replace(mixture, buffers={"online": changed, "offline": offline}))
    assert int(learnt["online"].transforms.read["r"]["reward"].seen[1]) == 20
    assert int(learnt["online"].transforms.write["w"]["reward"].seen[1]) == 33
    assert same(learnt["offline"].transforms, state["offline"].transforms)
    loaded, again = fbuf.load(tmp_path)
    assert loaded == mixture and same(
        jax.tree.leaves(again["online"].transforms), jax.tree.leaves(state["online"].transforms)
    )
    assert same(play(loaded, again), play(mixture, state))


def test_buffers_are_loaded_into_other_capacities_and_storages(tmp_path):
    mixture = two(fbuf.Buffer(20, sampler=Prioritized()), fbuf.uniform(40))
    state, _ = played(mixture, filled(mixture), 0, 1)
    fbuf.save(tmp_path / "c", mixture, state)
    small, fewer = fbuf.load(tmp_path / "c", resize={"a": 5})
    assert small["a"].capacity == 5 and small["b"].capacity == 40
    assert small["a"].last(fewer["a"], 5).data["id"].tolist() == list(range(1015, 1020))
    files = two(mixture["a"], fbuf.Buffer(40, storage=Memmap(str(tmp_path / "rows"), keys=("obs",))))
    loaded, again = fbuf.load(tmp_path / "c", files)
    assert loaded == files and same(played(mixture, state, 1, 2)[1], played(loaded, again, 1, 2)[1])
    annealed = dataclasses.replace(mixture, annealed=True, fractions={"a": 0.25, "b": 0.75}, target="source")
    loaded, again = fbuf.load(tmp_path / "c", annealed, example={"a": EXAMPLE, "b": EXAMPLE})
    assert loaded == annealed and again.fractions.tolist() == [0.25, 0.75]

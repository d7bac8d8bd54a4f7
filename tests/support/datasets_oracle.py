"""Episodes in plain Python, and what each view is to make of the rows of a data set that holds them."""

import dataclasses
import os

import jax
import numpy as np

import fbuf
from fbuf._formats import dataset as _dataset


@dataclasses.dataclass
class Episode:
    """T steps: `obs` by leaf `[T + 1, ...]`; of what ended them `terminated`, else they were cut off."""

    obs: dict[str, np.ndarray]
    action: dict[str, np.ndarray]
    reward: np.ndarray
    terminated: bool

    @property
    def steps(self):
        return len(self.reward)


def episodes(seed, lengths, obs, action):
    rng = np.random.default_rng(seed)

    def leaf(shape, dtype, rows):
        if np.dtype(dtype).kind == "f":
            return rng.normal(size=(rows, *shape)).astype(dtype)
        return rng.integers(0, 2 if dtype == np.int8 else 200, (rows, *shape)).astype(dtype)

    return [
        Episode(
            {name: leaf(shape, dtype, length + 1) for name, (shape, dtype) in obs.items()},
            {name: leaf(shape, dtype, length) for name, (shape, dtype) in action.items()},
            rng.normal(size=length),
            number % 3 == 0,
        )
        for number, length in enumerate(lengths)
    ]


def rows_of(all_of, final=True):
    out = {}
    for name in all_of[0].obs:
        out[name] = np.concatenate([e.obs[name][:-1] for e in all_of])
        if final:
            last = [np.concatenate([np.zeros_like(e.obs[name][1:-1]), e.obs[name][-1:]]) for e in all_of]
            out["final_" + name] = np.concatenate(last)
    for name in all_of[0].action:
        out[name] = np.concatenate([e.action[name] for e in all_of])
    out["reward"] = np.concatenate([e.reward for e in all_of])
    ends = np.concatenate([np.arange(e.steps) == e.steps - 1 for e in all_of])
    terminated = np.concatenate([np.full(e.steps, e.terminated) for e in all_of])
    return out | {"terminated": ends & terminated, "truncated": ends & ~terminated}


def transitions(all_of, n, gamma, final):
    """By row number: what an n-step transition from it is to be. `final`: the last observations are known."""
    out = {}
    first = 0
    for e in all_of:
        for t in range(e.steps):
            stop = min(t + n, e.steps)  # rewards t to stop - 1
            if stop == e.steps and not e.terminated and not final:
                stop = e.steps - 1
            if stop == t:
                continue
            total, ended = 0.0, e.terminated and stop == e.steps
            for i in range(t, stop):
                total += gamma ** (i - t) * float(np.float32(e.reward[i]))
            out[first + t] = {
                "reward": total,
                "discount": 0.0 if ended else gamma ** (stop - t),
                "next_obs": None if ended and not final else {name: leaf[stop] for name, leaf in e.obs.items()},
            }
        first += e.steps
    return out


def leaf_of(tree, name):
    for key in name.split("/"):
        tree = tree[key]
    return np.asarray(tree)


def all_of(buffer, state, view, number):
    other = dataclasses.replace(buffer, view=view, sampler=fbuf.samplers.Epoch(shuffle=False))
    state = buffer.convert(other, state)
    batch = other.peek(state, jax.random.key(0), number + 1)
    assert int(np.asarray(batch.mask).sum()) == number, (int(np.asarray(batch.mask).sum()), number)
    return batch


def check_rows(buffer, state, expected):
    data = buffer.rows(state).data
    for name, leaf in expected.items():
        found = leaf_of(data, name)
        assert np.array_equal(found, leaf.astype(found.dtype)), name
    assert len(jax.tree.leaves(data)) == len(expected)


def check_files(path, expected):
    with _dataset.DataSet.open(path) as dataset:
        found = dataset.read_rows(0, dataset.rows)
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        assert np.array_equal(found[name], leaf.astype(found[name].dtype)), name


def check_transitions(buffer, state, episodes, *, n, final, gamma=0.9):
    expected = transitions(episodes, n, gamma, final)
    name = "final_obs" if final else None
    view = fbuf.views.Transition(n_step=n, gamma=gamma, final_observation=name, autoreset="same_step")
    batch = all_of(buffer, state, view, len(expected))
    assert np.asarray(batch.index.slot)[:-1].tolist() == list(expected)
    here = rows_of(episodes)
    for i, (row, wanted) in enumerate(expected.items()):
        for name in episodes[0].obs:
            found = leaf_of(batch.data, name)[i]
            assert np.array_equal(found, here[name][row].astype(found.dtype))
            if wanted["next_obs"] is not None:
                found = leaf_of(batch.data, "next_" + name)[i]
                assert np.array_equal(found, wanted["next_obs"][name].astype(found.dtype)), (row, name)
        for name in episodes[0].action:
            assert np.array_equal(leaf_of(batch.data, name)[i], here[name][row].astype(leaf_of(batch.data, name).dtype))
        assert np.allclose(np.asarray(batch.data["reward"])[i], wanted["reward"], rtol=1e-5)
        assert np.allclose(np.asarray(batch.data["discount"])[i], wanted["discount"])


def from_arrays(data, *, path, **settings):
    """Read arrays, an iterable or a file, and write a data set of them."""
    sink = ("codec", "segment_rows", "view", "sampler", "metadata", "workers", "progress")
    saved = {name: settings.pop(name) for name in sink if name in settings}
    read = fbuf.interop.from_file if isinstance(data, (str, os.PathLike)) else fbuf.interop.from_arrays
    return read(data, **settings).save(path, **saved)

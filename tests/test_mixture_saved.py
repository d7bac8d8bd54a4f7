"""A mixture that is saved and loaded goes on with the same batches; what does not fit is refused with the names."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized
from fbuf.storages import Compressed, Memmap
from fbuf.transforms import Normalize, NormalizeReward, Scale
from tests.test_mixture import EXAMPLE, MODES, filled, refused, rows_of, size_of, two


def same(one: Any, two: Any) -> bool:
    return jax.tree.structure(one) == jax.tree.structure(two) and jax.tree.all(
        jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), one, two)
    )


def played(mixture: fbuf.Mixture, state: Any, first: int, steps: int) -> tuple[Any, list[Any]]:
    out = []
    for i in range(first, first + steps):
        state, batch = mixture.sample(state, jax.random.key(i), size_of(mixture, 8))
        if mixture["a"].sampler.prioritized:
            state = mixture.update_priority(state, batch.index, batch.data["id"] % 7 + 1.0)
        state = mixture.extend(state, "b", rows_of(2040 + 3 * i, 3))
        out.append((batch.data, batch.index.source, batch.index.slot, batch.probability, batch.weight, batch.mask))
    return state, out


@pytest.mark.parametrize("mode", [pytest.param(m, marks=() if m == "annealed" else pytest.mark.slow) for m in MODES])
def test_batches_go_on(mode: str, tmp_path: Path) -> None:
    one = fbuf.Buffer(20, sampler=Prioritized(normalize="buffer"))
    other = fbuf.Buffer(40, storage=Compressed(keys=("obs",)), sampler=Epoch())
    mixture = two(one, other, **MODES[mode])
    state, _ = played(mixture, filled(mixture), 0, 2)
    if mixture.annealed:
        state = mixture.set(state, fractions={"a": 0.5}, beta=0.6)
    fbuf.save(tmp_path, mixture, state, extra={"step": 7})
    loaded, again, extra = fbuf.load(tmp_path, extra=True)
    assert loaded == mixture and extra == {"step": 7}
    assert same((again.fractions, again.beta, again.counters), (state.fractions, state.beta, state.counters))
    assert same(played(mixture, state, 2, 3)[1], played(loaded, again, 2, 3)[1])


@pytest.mark.slow
def test_what_transforms_know_goes_on(tmp_path: Path) -> None:
    """Of each buffer on its own, under names that both have; a stage that was changed learns anew, from the rows held."""
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

    def rows(seed: int, count: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        reward = rng.normal(2, 7, count).astype(np.float32)
        return {"obs": rng.integers(0, 256, (count, 2, 2), np.uint8), "reward": reward}

    def play(mixture: fbuf.Mixture, state: Any) -> Any:
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


def test_a_second_save_writes_what_is_new_and_need_not_be_waited_for(tmp_path: Path) -> None:
    mixture = two(fbuf.Buffer(2000), fbuf.Buffer(2000))
    state = filled(mixture)
    first = fbuf.save(tmp_path, mixture, state).result()
    state = mixture.extend(state, "a", rows_of(1500, 3))
    second = fbuf.save(tmp_path, mixture, state, wait=False)
    assert second.result().bytes_written < first.bytes_written / 1.5
    loaded, again = fbuf.load(tmp_path)
    assert same(jax.tree.leaves(again), jax.tree.leaves(state)) and loaded == mixture


def test_buffers_are_loaded_into_others(tmp_path: Path) -> None:
    """Of another capacity or storage, each for itself; and into files."""
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


def test_a_buffer_of_a_loaded_mixture_is_a_buffer(tmp_path: Path) -> None:
    """Its state goes on alone, and one that was alone joins a mixture."""
    buffer = fbuf.Buffer(20, sampler=Consume())
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(1000, 20))
    mixture = two(buffer)
    joined = mixture.init({"a": state, "b": EXAMPLE})
    fbuf.save(tmp_path, mixture, joined)
    loaded, again = fbuf.load(tmp_path)
    _, batch = loaded["a"].sample(again["a"], jax.random.key(0), 4)
    assert same(batch, buffer.sample(state, jax.random.key(0), 4)[1])


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    mixture = two()
    state = filled(mixture)
    fbuf.save(tmp_path / "m", mixture, state)
    fbuf.save(tmp_path / "b", mixture["a"], state["a"])
    path = str(tmp_path / "m")
    refused(fbuf.SchemaError, "holds a mixture of a, b, but a Buffer is given", lambda: fbuf.load(path, mixture["a"]))
    other = fbuf.Mixture({"b": mixture["b"], "a": mixture["a"]})
    refused(fbuf.SchemaError, "expected b, a. Use the same names", lambda: fbuf.load(path, other))
    refused(TypeError, "expected a dict by name", lambda: fbuf.load(path, resize=7))
    refused(ValueError, "resize names 'c'", lambda: fbuf.load(path, resize={"c": 7}))
    larger = two(fbuf.uniform(21))
    refused(fbuf.SchemaError, "capacity of .* is 20; expected 21", lambda: fbuf.load(path, larger))
    refused(fbuf.SchemaError, "not like the example", lambda: fbuf.load(path, example={"a": {"id": np.int32(0)}}))
    refused(TypeError, "buffer is Mixture; expected a Buffer", lambda: fbuf.load(tmp_path / "b", mixture))
    refused(TypeError, "expected a MixtureState", lambda: fbuf.save(path, mixture, state["a"]))
    refused(
        ValueError,
        "the state is of a, b; expected a",
        lambda: fbuf.save(path, fbuf.Mixture({"a": mixture["a"]}), state),
    )
    refused(TypeError, "buffer is Buffer|BufferState", lambda: fbuf.save(path, mixture["a"], state))
    refused(fbuf.SchemaError, "Replay", lambda: fbuf.Replay.load(path))
    step = jax.jit(lambda state: fbuf.save(path, mixture, state) and jnp.zeros(()))
    refused(TypeError, "traced", lambda: step(state))


def test_a_damaged_note_is_refused(tmp_path: Path) -> None:
    """Whatever the manifest says of its buffers."""
    from fbuf import _files

    mixture = two()
    fbuf.save(tmp_path / "m", mixture, filled(mixture))
    with _files.read(str(tmp_path / "m")) as saved:
        meta, arrays = saved.meta, {name: np.asarray(a) for name, a in saved.arrays.items()}
    for number, spoil in enumerate(
        (
            lambda meta, arrays: meta["buffers"].pop(),
            lambda meta, arrays: meta["names"].append("c"),
            lambda meta, arrays: meta["mixture"].pop("quota") and meta["mixture"].update(odd=1),
            lambda meta, arrays: arrays.pop("mixture/beta"),
            lambda meta, arrays: arrays.update({"mixture/beta": np.zeros(3, np.float32)}),
        )
    ):
        import copy

        about, given = copy.deepcopy(meta), dict(arrays)
        spoil(about, given)
        path = str(tmp_path / f"spoiled{number}")
        _files.write(path, given, about)
        with pytest.raises((fbuf.SchemaError, fbuf.VersionError, TypeError)):
            fbuf.load(path)

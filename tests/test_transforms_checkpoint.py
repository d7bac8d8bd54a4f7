"""Buffers with every transform, saved and loaded: the same batches go on, and chains may change as documented."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import SchemaError, transforms
from fbuf.storages import Compressed, Device
from fbuf.transforms import (
    Augment,
    Cast,
    Chain,
    Concatenate,
    Drop,
    Map,
    Normalize,
    NormalizeReward,
    Rename,
    RewardToGo,
    Scale,
    Select,
    Split,
    Stack,
    Unstack,
)
from tests.support.checkpoint import same


def doubled(row: Any) -> Any:
    """A function of the user's."""
    return {**row, "f": row["f"] * 2}


def halved(row: Any) -> Any:
    """Its inverse."""
    return {**row, "f": row["f"] / 2}


EVERY_WRITE = Chain(
    (
        Rename({"o": "obs"}),
        Drop("junk"),
        Concatenate(("a", "b"), "ab"),
        Stack(("c", "d"), "cd"),
        Cast("action", "int16"),
        RewardToGo(0.9, episode_end=("terminated",)),
        ("at_write", Normalize("ab", clip=3.0)),
    )
)
EVERY_READ = Chain(
    (
        Select(("obs", "ab", "cd", "action", "reward", "reward_to_go")),
        Split("ab", ("a", "b"), (2, 1)),
        Unstack("cd", ("c", "d")),
        NormalizeReward(),
        Augment("obs", 1),
        ("inner", Chain((Scale("obs"), Normalize("c", of="action")))),
    )
)


def rows_of(seed: int, count: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "o": rng.integers(0, 256, (count, 4, 4), np.uint8),
        "junk": np.zeros(count, np.int8),
        "a": rng.normal(size=(count, 2)).astype(np.float32),
        "b": rng.normal(size=(count, 1)).astype(np.float32),
        "c": rng.normal(size=count).astype(np.float32),
        "d": rng.normal(size=count).astype(np.float32),
        "action": rng.integers(0, 9, count).astype(np.int32),
        "reward": rng.normal(3, 4, count).astype(np.float32),
        "terminated": rng.random(count) < 0.2,
    }


EXAMPLE = jax.tree.map(lambda x: x[0], rows_of(0))


def test_every_transform_is_among_them() -> None:
    def names(chain: Chain) -> set[str]:
        return {type(t).__name__ for _, t in chain}.union(*(names(t) for _, t in chain if isinstance(t, Chain)))

    members = set(transforms.__all__) - {
        "apply",
        "Map",
        "Denormalize",
    }  # a function needs the buffer to load; an inverse
    assert names(EVERY_WRITE) | names(EVERY_READ) == members


def steps(buffer: fbuf.Buffer, state: Any, first: int, number: int) -> Any:
    def step(state: Any, rows: Any, key: Any) -> Any:
        state, batch = buffer.sample(buffer.extend(state, rows), key, 4)
        return state, (batch.data, batch.index, batch.weight)

    run, out = jax.jit(step), []
    for i in range(first, first + number):
        state, batch = run(state, rows_of(i), jax.random.key(i))
        out.append(jax.device_get(batch))
    return state, out


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Path) -> None:
    on_read = (Normalize("a", eps=np.float32(1e-3), clip=np.int32(3)), NormalizeReward("a", eps=np.float64(0), of="a"))
    buffer = fbuf.Buffer(8, on_read=on_read)
    plain = (Normalize("a", eps=float(np.float32(1e-3)), clip=3.0), NormalizeReward("a", eps=0.0, of="a"))
    state = buffer.extend(buffer.init({"a": 0.0}), {"a": jnp.arange(5.0)})
    fbuf.save(tmp_path, buffer, state)
    other = dataclasses.replace(buffer, on_read=plain)
    assert other == buffer and hash(other) == hash(buffer)
    for given in (None, buffer, other):
        loaded, again = fbuf.load(tmp_path, given)
        assert loaded == buffer
        same(again.transforms, state.transforms)


_OTHER = """
import sys
import jax, numpy as np
import fbuf
from tests.test_transforms_checkpoint import steps
buffer, state = fbuf.load(sys.argv[1])
np.savez(sys.argv[2], *[np.asarray(x) for x in jax.tree.leaves(steps(buffer, state, 100, 3)[1])])
"""


@pytest.mark.parametrize(
    ("storage", "prefetch"),
    [(Device(), 1), pytest.param(Compressed(keys=("obs",)), 0, marks=pytest.mark.slow)],
    ids=["Device", "Compressed"],
)
def test_batches_go_on_bit_for_bit(storage: Any, prefetch: int, tmp_path: Path) -> None:
    ahead = {"prefetch": 1, "batch_size": 4} if prefetch else {}
    buffer = fbuf.Buffer(20, storage=storage, on_write=EVERY_WRITE, on_read=EVERY_READ, **ahead)
    state, _ = steps(buffer, buffer.init(EXAMPLE), 0, 9)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    assert loaded == buffer and again.transforms.given == state.transforms.given
    same(again.transforms, state.transforms)
    want = steps(buffer, state, 100, 3)[1]
    same(steps(loaded, again, 100, 3)[1], want)


@pytest.mark.slow
def test_another_process_goes_on(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(20, on_write=EVERY_WRITE, on_read=EVERY_READ, prefetch=1, batch_size=4)
    state, _ = steps(buffer, buffer.init(EXAMPLE), 0, 9)
    fbuf.save(tmp_path / "saved", buffer, state)
    command = [sys.executable, "-c", _OTHER, str(tmp_path / "saved"), str(tmp_path / "batches.npz")]
    done = subprocess.run(command, cwd=Path(fbuf.__file__).parent.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    want = [np.asarray(x) for x in jax.tree.leaves(steps(buffer, state, 100, 3)[1])]
    with np.load(tmp_path / "batches.npz") as file:
        same([file[name] for name in file.files], want)


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """A buffer of twelve rows with rewards 0 to 11, of which it holds eight."""
    buffer = fbuf.Buffer(8, on_write=Rename({"r": "reward"}), on_read=(NormalizeReward(), Scale("reward", 2.0)))
    state = buffer.init({"r": 0.0})
    for first in (0.0, 6.0):
        state = buffer.extend(state, {"r": first + jnp.arange(6.0)})
    fbuf.save(tmp_path / "saved", buffer, state)
    return tmp_path / "saved", buffer, state


def test_another_on_read_goes_on_with_what_its_stages_know(saved: Any) -> None:
    """The same stage under the same name; others learn from the rows that are held."""
    path, buffer, _ = saved
    ever, held = 5.5, 7.5
    chain = buffer.on_read.remove("scale").append(NormalizeReward(clip=5.0), name="clipped")
    loaded, state = fbuf.load(path, dataclasses.replace(buffer, on_read=chain))
    stats = loaded.stats(state)
    assert float(stats["normalize_reward_mean"]) == ever and float(stats["clipped_mean"]) == held
    none, state = fbuf.load(path, dataclasses.replace(buffer, on_read=None))
    assert "normalize_reward_mean" not in none.stats(state) and none.on_read is None
    larger, state = fbuf.load(path, resize=30)
    assert float(larger.stats(state)["normalize_reward_mean"]) == ever
    both = dataclasses.replace(
        buffer, on_read={"new": NormalizeReward()}, capacity=30, storage=Compressed(keys=("reward",))
    )
    moved, state = fbuf.load(path, both, resize=True)
    assert float(moved.stats(state)["new_mean"]) == held
    again = moved.extend(state, {"r": jnp.array([100.0])})
    assert float(moved.last(again, 1).data["reward"][0]) == 100.0


def test_another_on_write_is_refused(saved: Any) -> None:
    path, buffer, _ = saved
    for other in (None, Rename({"r": "reward2"}), (Rename({"r": "reward"}), Scale("reward"))):
        with pytest.raises(SchemaError, match="the on_write of .* is another"):
            fbuf.load(path, dataclasses.replace(buffer, on_write=other, on_read=None))


def test_examples_are_of_rows_as_they_are_given(saved: Any) -> None:
    path, buffer, state = saved
    same(fbuf.load(path, buffer, example={"r": 0.0})[1], state)
    with pytest.raises(SchemaError, match=r"not like the example(.|\n)*reward: found nothing"):
        fbuf.load(path, buffer, example={"reward": 0.0})


def test_functions_are_noted_by_name(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(8, on_write=Map(doubled, halved), on_read=Map(halved))
    state = buffer.extend(buffer.init({"f": 0.0}), {"f": jnp.arange(5.0)})
    fbuf.save(tmp_path, buffer, state)
    with pytest.raises(SchemaError, match="the function .*test_transforms_checkpoint:doubled"):
        fbuf.load(tmp_path)
    loaded, again = fbuf.load(tmp_path, buffer)
    same(loaded.rows(again), buffer.rows(state))
    with pytest.raises(SchemaError, match="the on_write of .* is another"):
        fbuf.load(tmp_path, fbuf.Buffer(8, on_write=Map(halved), on_read=Map(halved)))
    fbuf.load(tmp_path, fbuf.Buffer(8, on_write=Map(doubled, halved), on_read=Scale("f")))


class Row(NamedTuple):
    """A node of the user's own."""

    f: Any


def test_rows_of_ones_own_need_an_example(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(8, on_write=Scale("f", 2.0))
    state = buffer.extend(buffer.init(Row(0.0)), Row(jnp.arange(5.0)))
    fbuf.save(tmp_path, buffer, state)
    with pytest.raises(SchemaError, match="nothing is imported for; expected an example"):
        fbuf.load(tmp_path)
    loaded, again = fbuf.load(tmp_path, example=Row(0.0))
    assert isinstance(loaded.rows(again).data, Row)
    same(loaded.extend(again, Row(jnp.ones(1))), buffer.extend(state, Row(jnp.ones(1))))


def test_a_replay_goes_on(tmp_path: Path) -> None:
    replay = fbuf.Replay(fbuf.Buffer(8, on_write=Rename({"r": "reward"}), on_read=NormalizeReward()), {"r": 0.0})
    replay.extend({"r": np.arange(5, dtype=np.float32)})
    replay.save(tmp_path)
    again = fbuf.Replay.load(tmp_path)
    same(again.sample(4).data, replay.sample(4).data)
    again.extend({"r": np.arange(5, dtype=np.float32)})

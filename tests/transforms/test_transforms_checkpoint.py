"""Buffers with transforms, saved and loaded: what stages have learnt is kept, and chains may change as documented."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import SchemaError
from fbuf.storages import Compressed
from fbuf.transforms import Map, Normalize, NormalizeReward, Rename, Scale
from tests.support.refusals import raises
from tests.support.trees import same


def doubled(row):
    return {**row, "f": row["f"] * 2}


def halved(row):
    return {**row, "f": row["f"] / 2}


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path):
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


@pytest.fixture
def saved(tmp_path):
    buffer = fbuf.Buffer(8, on_write=Rename({"r": "reward"}), on_read=(NormalizeReward(), Scale("reward", 2.0)))
    state = buffer.init({"r": 0.0})
    for first in (0.0, 6.0):
        state = buffer.extend(state, {"r": first + jnp.arange(6.0)})
    fbuf.save(tmp_path / "saved", buffer, state)
    return tmp_path / "saved", buffer, state


@pytest.mark.more
def test_another_on_read_keeps_the_statistics_of_its_stages(saved):
    path, buffer, _ = saved
    ever, held = 5.5, 7.5
    chain = buffer.on_read.remove("scale").append(NormalizeReward(clip=5.0), name="clipped")
    loaded, state = fbuf.load(path, dataclasses.replace(buffer, on_read=chain))
    stats = loaded.stats(state)
    assert float(stats["normalize_reward_mean"]) == ever and float(stats["clipped_mean"]) == held
    chain = {"normalize_reward": NormalizeReward(clip=5.0)}
    other, state = fbuf.load(path, dataclasses.replace(buffer, on_read=chain))
    assert float(other.stats(state)["normalize_reward_mean"]) == held
    none, state = fbuf.load(path, dataclasses.replace(buffer, on_read=None))
    assert "normalize_reward_mean" not in none.stats(state) and none.on_read is None
    larger, state = fbuf.load(path, resize=30)
    assert float(larger.stats(state)["normalize_reward_mean"]) == ever
    more = {"capacity": 30, "storage": Compressed(keys=("reward",))}
    both = dataclasses.replace(buffer, on_read={"new": NormalizeReward()}, **more)
    moved, state = fbuf.load(path, both, resize=True)
    assert float(moved.stats(state)["new_mean"]) == held
    again = moved.extend(state, {"r": jnp.array([100.0])})
    assert float(moved.rows(again, last=1).data["reward"][0]) == 100.0


def test_another_on_write_is_refused(saved):
    path, buffer, _ = saved
    for other in (None, Rename({"r": "reward2"}), (Rename({"r": "reward"}), Scale("reward"))):
        given = dataclasses.replace(buffer, on_write=other, on_read=None)
        raises(SchemaError, "the on_write of .* is another", fbuf.load, path, given)


def test_examples_are_of_rows_as_they_are_given(saved):
    path, buffer, state = saved
    same(fbuf.load(path, buffer, example={"r": 0.0})[1], state)
    said = r"not like the example(.|\n)*reward: found nothing"
    raises(SchemaError, said, fbuf.load, path, buffer, example={"reward": 0.0})


def test_functions_are_saved_by_name(tmp_path):
    buffer = fbuf.Buffer(8, on_write=Map(doubled, halved), on_read=Map(halved))
    state = buffer.extend(buffer.init({"f": 0.0}), {"f": jnp.arange(5.0)})
    fbuf.save(tmp_path, buffer, state)
    raises(SchemaError, "the function .*test_transforms_checkpoint:doubled", fbuf.load, tmp_path)
    loaded, again = fbuf.load(tmp_path, buffer)
    same(loaded.rows(again), buffer.rows(state))
    other = fbuf.Buffer(8, on_write=Map(halved), on_read=Map(halved))
    raises(SchemaError, "the on_write of .* is another", fbuf.load, tmp_path, other)
    fbuf.load(tmp_path, fbuf.Buffer(8, on_write=Map(doubled, halved), on_read=Scale("f")))

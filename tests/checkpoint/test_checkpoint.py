"""A saved buffer goes on as if nothing had happened: its batches, rows, structures, and `Replay`."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.storages import Device, Ragged
from tests.support import checkpoint as support
from tests.support.refusals import raises
from tests.support.tables import checks
from tests.support.trees import same

PAIRS = (
    ("Device", "Prioritized", "Transition", 0),
    ("Memmap", "Prioritized(on='host')", "Row", 0),
)
test_batches_go_on_bit_for_bit = checks(
    (support.check_goes_on, [(pair, 8) for pair in PAIRS]),
    (support.check_every_number_of_rows, [Device()]),
    (support.check_old_state, ["Compressed"]),  # saved as it was
)


def test_golden_checkpoints_load_and_are_saved_again(tmp_path):
    for name in support.golden.BUFFERS:
        support.check_golden(name, tmp_path / name)
    assert {path.name for path in support.GOLDEN.iterdir()} == {*support.golden.BUFFERS, "replay"}


def test_a_golden_replay_loads():
    replay = fbuf.Replay.load(support.GOLDEN / "replay")
    assert len(replay) == 16
    same(replay.last(8).data["obs"], support.golden.rows(support.golden.STEPS - 8, 8)["obs"])
    assert replay._impl == "threefry2x32"
    same(replay._key, jax.random.key_data(jax.random.key(5)))  # its seed


BITS = ("bool_", "int2", "int4", "float4_e2m1fn")  # which take 0 and 1 here; the others any bits, also NaN and -0.0
DTYPES = (*BITS, "uint8", "float8_e4m3fn", "uint16", "bfloat16", "uint32", "float32", "complex64")


def test_a_dtype_of_every_width_and_every_shape_return(tmp_path):
    rng, rows = np.random.default_rng(0), {}
    shapes = {"scalar": (), "one": (1,), "some": (3, 5), "none": (0,), "neither": (2, 0)}
    example = {n: jax.ShapeDtypeStruct((2,), getattr(jnp, n)) for n in DTYPES if hasattr(jnp, n)}
    example |= {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    for name, leaf in example.items():
        bits = rng.integers(0, 2 if name in BITS else 256, (5, *leaf.shape, leaf.dtype.itemsize), np.uint8)
        rows[name] = bits[..., 0].astype(leaf.dtype) if name in BITS else bits.view(leaf.dtype).reshape(5, *leaf.shape)
    buffer = fbuf.Buffer(7)
    state = buffer.extend(buffer.init(example), rows)
    fbuf.save(tmp_path / "saved", buffer, state)
    again = fbuf.load(tmp_path / "saved")[1]
    same(again, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    same(jax.tree.map(lambda x: x[:5], again.rows), rows)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_structures_of_rows_return(tmp_path):
    one = jnp.float32(1)
    for example in (
        one,
        [one, (one, None, {"a": [one], "b": ()})],
        {"z": one, "a": {"deep": {"er": (one,)}}},
        collections.OrderedDict([("z", one), ("a", [one])]),
        {3: one, 7: [one]},
    ):
        buffer = fbuf.Buffer(4)
        state = buffer.add(buffer.init(example), example)
        fbuf.save(tmp_path / "saved", buffer, state, sync=False)
        again = fbuf.load(tmp_path / "saved", example=example)[1]
        assert jax.tree.structure(again) == jax.tree.structure(state)
        assert jax.tree.structure(fbuf.load(tmp_path / "saved")[1]) == jax.tree.structure(state)


def test_rows_of_custom_nodes_need_an_example(tmp_path):
    example = {"both": Pair(jnp.float32(1), jnp.zeros(3))}
    buffer = fbuf.Buffer(4)
    state = buffer.add(buffer.init(example), example)
    fbuf.save(tmp_path / "saved", buffer, state)
    words = r"a \S*test_checkpoint:Pair\. Write fbuf.load\(path, example=row\)"
    raises(fbuf.SchemaError, words, fbuf.load, tmp_path / "saved")
    again = fbuf.load(tmp_path / "saved", example=example)[1]
    assert isinstance(again.rows["both"], Pair)
    same(again, state)
    example = {"both": [jnp.float32(1), jnp.zeros(3)]}
    raises(fbuf.SchemaError, "both/left: found float32", fbuf.load, tmp_path / "saved", example=example)


def test_text_returns_and_objects_are_refused(tmp_path):
    buffer = fbuf.Buffer(5, storage=Ragged())
    rows = [{"obs": np.arange(n, dtype=np.float32), "text": "é" * n, "reward": float(n)} for n in range(7)]
    state = buffer.extend(buffer.init(rows[0]), rows)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    rest, kept = loaded.rows(again), buffer.rows(state)
    assert rest.lazy["text"] == kept.lazy["text"] == ["é" * n for n in range(2, 7)]
    same(rest.lazy["obs"], kept.lazy["obs"])
    again = loaded.extend(again, rows[:1])
    assert loaded.last(again, 1).lazy["text"] == [""]
    objects = buffer.init({"any": None, "n": 0})
    objects = buffer.add(objects, {"any": object(), "n": 1})
    pytest.raises(TypeError, lambda: fbuf.save(tmp_path / "saved", buffer, objects)).match("holds Python objects")
    assert fbuf.load(tmp_path / "saved")[0] == buffer  # unchanged


@pytest.mark.parametrize("count", [10, 2_000_000])
def test_nan_rows_load_under_debug_nans(count, tmp_path):
    buffer = fbuf.Buffer(2_000_000)
    state = buffer.extend(buffer.init({"t": 0.0}), {"t": jnp.full(count, jnp.nan)})
    fbuf.save(tmp_path / "saved", buffer, state, sync=False)
    with jax.debug_nans(True):
        _, again = fbuf.load(tmp_path / "saved")
    same(again.rows, state.rows)


def test_a_legacy_key_is_kept(tmp_path):
    replay = fbuf.Replay(fbuf.Buffer(4), {"t": 0.0})
    replay._key, replay._impl = jax.random.key_data(jax.random.key(0, impl="rbg")), "rbg"
    replay.extend({"t": np.zeros(2, np.float32)})
    replay.save(tmp_path / "saved")
    again = fbuf.Replay.load(tmp_path / "saved")
    assert again._impl == "rbg"
    same(again.sample(2), replay.sample(2))

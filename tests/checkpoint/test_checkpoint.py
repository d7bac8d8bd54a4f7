"""A saved buffer goes on as if nothing had happened: its batches, rows, structures, and `Replay`."""

import collections
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.storages import Device, Ragged
from tests.support import combinations
from tests.support.checkpoint import (
    GOLDEN,
    check_every_number_of_rows,
    check_goes_on,
    check_golden,
    check_killed,
    check_old_state,
    golden,
    step,
    steps,
)
from tests.support.trees import same


@pytest.mark.parametrize(
    "pair",
    [
        ("Device", "Prioritized", "Transition", 0),
        ("Compressed", "Prioritized", "Row", 0),  # the buffer that is killed below
        ("Memmap", "Prioritized(on='host')", "Row", 0),
    ],
)
def test_batches_go_on_bit_for_bit(pair: tuple[str, str, str, int], tmp_path: Path) -> None:
    check_goes_on(pair, 8, tmp_path)


@pytest.mark.parametrize("storage", ["Deduplicated", "Host", "Ragged"])
def test_the_rows_of_further_storages_return(storage: str, tmp_path: Path) -> None:
    buffer = combinations.make(storage, "Uniform", "Row")
    extend, state = jax.jit(buffer.extend), buffer.init(combinations.EXAMPLE)
    for i in range(9):  # rows are evicted
        state = extend(state, combinations.rows_of(np.random.default_rng(i), 3))
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    assert loaded == buffer
    if storage == "Deduplicated":  # all of it is in the state
        return same(again, state)
    found, held = buffer.rows(again), buffer.rows(state)
    same((found.data, found.mask, found.index, again.ring), (held.data, held.mask, held.index, state.ring))


def test_a_kill_leaves_the_old_or_the_new_save(tmp_path: Path) -> None:
    check_killed("Compressed", 0, tmp_path)


def test_golden_checkpoints_load() -> None:
    for name in golden.BUFFERS:
        check_golden(name, draw=False)
    assert {path.name for path in GOLDEN.iterdir()} == {*golden.BUFFERS, "replay"}


def test_a_golden_replay_loads() -> None:
    replay = fbuf.Replay.load(GOLDEN / "replay")
    assert len(replay) == 16
    same(replay.last(8).data["obs"], golden.rows(golden.STEPS - 8, 8)["obs"])
    _, key = jax.random.split(jax.random.key(5))  # its seed
    same(replay.buffer.peek(replay.state, key, 4).data, replay.sample(4).data)


def test_every_number_of_rows(tmp_path: Path) -> None:
    check_every_number_of_rows(Device(), tmp_path)


def test_an_old_state_is_saved_as_it_was(tmp_path: Path) -> None:
    check_old_state("Compressed", tmp_path)


DTYPES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32", "float16"),
    *("bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn"),
]


def bits_of(dtype: Any, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return any bits, NaN and -0.0 among them."""
    dtype = np.dtype(dtype)
    if dtype.name in ("bool", "int2", "int4", "uint2", "uint4", "float4_e2m1fn"):
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)


def test_every_dtype_and_shape_returns(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    dtypes = {
        name: jnp.dtype(getattr(jnp, name if name != "bool" else "bool_"))
        for name in DTYPES
        if hasattr(jnp, name) or name == "bool"
    }
    shapes = {"scalar": (), "one": (1,), "some": (3, 5), "none": (0,), "neither": (2, 0)}
    example = {n: jax.ShapeDtypeStruct((2,), d) for n, d in dtypes.items()}
    example |= {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
    buffer = fbuf.Buffer(7)
    rows = {n: bits_of(leaf.dtype, (5, *leaf.shape), rng) for n, leaf in example.items()}
    state = buffer.extend(buffer.init(example), rows)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    same(again, state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    same(jax.tree.map(lambda x: x[:5], again.rows), rows)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_structures_of_rows_return(tmp_path: Path) -> None:
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


def test_rows_of_custom_nodes_need_an_example(tmp_path: Path) -> None:
    example = {"both": Pair(jnp.float32(1), jnp.zeros(3))}
    buffer = fbuf.Buffer(4)
    state = buffer.add(buffer.init(example), example)
    fbuf.save(tmp_path / "saved", buffer, state)
    with pytest.raises(fbuf.SchemaError, match=r"a \S*test_checkpoint:Pair\. Write fbuf.load\(path, example=row\)"):
        fbuf.load(tmp_path / "saved")
    again = fbuf.load(tmp_path / "saved", example=example)[1]
    assert isinstance(again.rows["both"], Pair)
    same(again, state)
    with pytest.raises(fbuf.SchemaError, match="both/left: found float32"):
        fbuf.load(tmp_path / "saved", example={"both": [jnp.float32(1), jnp.zeros(3)]})


def test_text_returns_and_objects_are_refused(tmp_path: Path) -> None:
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
    with pytest.raises(TypeError, match="holds Python objects"):
        fbuf.save(tmp_path / "saved", buffer, objects)
    assert fbuf.load(tmp_path / "saved")[0] == buffer  # unchanged


@pytest.mark.parametrize("count", [10, 2_000_000])
def test_nan_rows_load_under_debug_nans(count: int, tmp_path: Path) -> None:
    buffer = fbuf.Buffer(2_000_000)
    state = buffer.extend(buffer.init({"t": 0.0}), {"t": jnp.full(count, jnp.nan)})
    fbuf.save(tmp_path / "saved", buffer, state, sync=False)
    with jax.debug_nans(True):
        _, again = fbuf.load(tmp_path / "saved")
    same(again.rows, state.rows)


def test_the_step_is_compiled_once(tmp_path: Path) -> None:
    """A loaded buffer equals the saved one, so that jitted steps do not retrace."""
    buffer = combinations.make("Device", "Uniform", "Row")
    state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, 1)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    before = step._cache_size()  # type: ignore[attr-defined]
    steps(loaded, again, 100, 1)
    assert step._cache_size() == before  # type: ignore[attr-defined]


def test_a_legacy_key_is_kept(tmp_path: Path) -> None:
    replay = fbuf.Replay(fbuf.uniform(4), {"t": 0.0})
    replay._key, replay._impl = jax.random.key_data(jax.random.key(0, impl="rbg")), "rbg"
    replay.extend({"t": np.zeros(2, np.float32)})
    replay.save(tmp_path / "saved")
    again = fbuf.Replay.load(tmp_path / "saved")
    assert again._impl == "rbg"
    same(again.sample(2), replay.sample(2))

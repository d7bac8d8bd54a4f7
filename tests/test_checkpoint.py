"""What is saved in the middle goes on as if nothing had happened: every storage, sampler and view, bit for bit."""

from __future__ import annotations

import collections
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
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked
from fbuf.storages import Compressed, Deduplicated, Device, Ragged
from fbuf.views import Transition
from tests import test_combinations as combinations
from tests.checkpointing import elsewhere, load, same, step, steps
from tests.support.scattered import Anywhere, Largest

VIEWS = ("Row", "Transition", "Episode", "Hindsight", "Sequence('mask')")
PAIRS = [  # each storage with each sampler twice, with another view and with and without prefetch
    (storage, sampler, VIEWS[(i + j + k) % len(VIEWS)], (j + k) % 2)
    for i, storage in enumerate(combinations.STORAGES)
    for j, sampler in enumerate(combinations.SAMPLERS)
    for k in (0, 1)
]
DEFAULT = [
    ("Compressed", "Uniform", "Transition", 1),
    ("Memmap", "Prioritized(on='host')", "Row", 0),
    ("Ragged", "Epoch", "Row", 0),
]


def made(storage: str, sampler: str, view: str, prefetch: int) -> fbuf.Buffer:
    buffer = combinations.make(storage, sampler, view)
    return dataclasses.replace(buffer, prefetch=prefetch, batch_size=combinations.BATCH) if prefetch else buffer


@pytest.mark.parametrize(
    "pair",
    [
        *(pytest.param(p, id="-".join(map(str, p))) for p in DEFAULT),
        *(pytest.param(p, id="-".join(map(str, p)), marks=pytest.mark.slow) for p in PAIRS if p not in DEFAULT),
    ],
)
def test_batches_go_on_bit_for_bit(pair: Any, tmp_path: Path) -> None:
    buffer = made(*pair)
    number = 8 if pair in DEFAULT else 40
    for before in (4, 9):  # before and after the rings came round
        state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, before)
        assert fbuf.save(tmp_path / "saved", buffer, state).result().generation == 1 + (before == 9)
        loaded, again = load(tmp_path / "saved", buffer, tmp_path / f"rows{before}")
        same(jax.device_get(loaded.stats(again)), jax.device_get(buffer.stats(state)))
        _, want = steps(buffer, state, 100, number)
        _, got = steps(loaded, again, 100, number)
        same(got, want)
        if elsewhere(buffer, tmp_path) is not buffer:
            break  # its files are taken


_OTHER = """
import sys
import jax, numpy as np
import fbuf
from tests.checkpointing import steps
buffer, state = fbuf.load(sys.argv[1])
out = steps(buffer, state, 100, int(sys.argv[3]))[1]
np.savez(sys.argv[2], *[np.asarray(x) for x in jax.tree.leaves(out)])
"""


@pytest.mark.parametrize(
    ("storage", "sampler"),
    [
        pytest.param("Compressed", "Prioritized(on='host')"),
        *(
            pytest.param(storage, sampler, marks=pytest.mark.slow)
            for storage in combinations.STORAGES
            if storage != "Compressed(path=...)"
            for sampler in ("Uniform", "Prioritized", "Ranked", "Epoch")
        ),
    ],
)
def test_another_process_goes_on(storage: str, sampler: str, tmp_path: Path) -> None:
    buffer = combinations.make(storage, sampler, "Transition")
    state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, 5)
    fbuf.save(tmp_path / "saved", buffer, state)
    command = [sys.executable, "-c", _OTHER, str(tmp_path / "saved"), str(tmp_path / "batches.npz"), "10"]
    root = Path(fbuf.__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    want = [np.asarray(x) for x in jax.tree.leaves(steps(buffer, state, 100, 10)[1])]
    with np.load(tmp_path / "batches.npz") as file:
        same([file[name] for name in file.files], want)


# ------------------------------------------------------------------------------------------------- every moment


def numbered(buffer: fbuf.Buffer, state: Any, first: int, count: int) -> Any:
    return buffer.extend(state, {"t": jnp.arange(first, first + count, dtype=jnp.float32)})


@pytest.mark.parametrize(
    "storage",
    [
        pytest.param(Device(), id="Device"),
        pytest.param(Compressed(keys=("t",)), id="Compressed", marks=pytest.mark.slow),
    ],
)
def test_at_every_number_of_rows(storage: Any, tmp_path: Path) -> None:
    """Empty, partly full, just full, come round; and of a buffer of one row."""
    for capacity, counts in ((5, (0, 1, 4, 5, 6, 9, 10, 11)), (1, (0, 1, 2, 3))):
        buffer = fbuf.Buffer(capacity, storage=storage, sampler=Prioritized())
        for count in counts:
            state = buffer.init({"t": 0.0})
            for i in range(count):
                state = numbered(buffer, state, i, 1)
            fbuf.save(tmp_path / "saved", buffer, state, sync=False)
            loaded, again = fbuf.load(tmp_path / "saved")
            for i in range(3):
                key = jax.random.key(i)
                same(loaded.peek(again, key, 4), buffer.peek(state, key, 4))
                same(loaded.rows(again), buffer.rows(state))
                same(again.ring, state.ring)
                state, again = numbered(buffer, state, 50 + i, 1), numbered(loaded, again, 50 + i, 1)


@pytest.mark.parametrize(
    "storage", ["Compressed", *(pytest.param(s, marks=pytest.mark.slow) for s in ("Device", "Deduplicated"))]
)
def test_an_old_state_is_saved_as_it_was(storage: str, tmp_path: Path) -> None:
    """Two futures of one state; the one that is saved is not the newest of its store."""
    buffer = combinations.make(storage, "Uniform", "Row")
    old, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, 3)
    steps(buffer, old, 50, 2)
    fbuf.save(tmp_path / "saved", buffer, old)
    loaded, again = fbuf.load(tmp_path / "saved")
    same(loaded.rows(again), buffer.rows(old))
    same(steps(loaded, again, 100, 3)[1], steps(buffer, old, 100, 3)[1])


@pytest.mark.slow
def test_what_clear_forgot_stays_forgotten(tmp_path: Path) -> None:
    buffer = combinations.make("Device", "Ranked", "Transition")
    state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, 12)
    index = buffer.last(state, 1).index
    state, _ = steps(buffer, buffer.clear(state), 20, 2)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    same(steps(loaded, again, 100, 9)[1], steps(buffer, state, 100, 9)[1])
    assert not np.asarray(loaded.get(again, index).mask).any()


@pytest.mark.slow
def test_annealed_numbers_and_indices_survive(tmp_path: Path) -> None:
    buffer = combinations.make("Device", "Prioritized", "Row")
    state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, 5)
    state = buffer.set(state, alpha=0.25, beta=0.75)
    index = buffer.last(state, 2).index
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    assert float(again.sampler.alpha) == 0.25 and float(again.sampler.beta) == 0.75
    same(loaded.get(again, index), buffer.get(state, index))
    again, _ = steps(loaded, again, 200, 20)
    assert not np.asarray(loaded.get(again, index).mask).any()


@pytest.mark.parametrize("writer", [Largest("reward"), Anywhere(3)], ids=["Largest", "Anywhere"])
@pytest.mark.parametrize("storage", ["Device", pytest.param("Compressed", marks=pytest.mark.slow)])
def test_writers_of_ones_own(writer: Any, storage: str, tmp_path: Path) -> None:
    buffer = fbuf.Buffer(20, lanes=2, storage=combinations.STORAGES[storage], sampler=Prioritized(), writer=writer)
    state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, 6)
    fbuf.save(tmp_path / "saved", buffer, state)
    with pytest.raises(
        fbuf.SchemaError, match=rf"(?s)test_scattered:{type(writer).__name__}.*Write fbuf.load\(path, b"
    ):
        fbuf.load(tmp_path / "saved")
    loaded, again = fbuf.load(tmp_path / "saved", buffer)
    same(steps(loaded, again, 100, 9)[1], steps(buffer, state, 100, 9)[1])
    with pytest.raises(fbuf.SchemaError, match="the writer of .* is another"):
        fbuf.load(tmp_path / "saved", dataclasses.replace(buffer, writer=fbuf.writers.Ring()))
    with pytest.raises(fbuf.SchemaError, match="says itself where rows go"):
        fbuf.load(tmp_path / "saved", buffer, resize=40)


# ------------------------------------------------------------------------------------------------------- rows

DTYPES = [
    *("bool", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32", "float16"),
    *("bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float4_e2m1fn"),
]


def bits_of(dtype: Any, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values of any kind, NaN and -0.0 among them."""
    dtype = np.dtype(dtype)
    if dtype.name in ("bool", "int2", "int4", "uint2", "uint4", "float4_e2m1fn"):
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype).reshape(shape)


def test_every_dtype_and_shape(tmp_path: Path) -> None:
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


def test_structures_of_rows(tmp_path: Path) -> None:
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


def test_rows_of_ones_own_nodes_want_an_example(tmp_path: Path) -> None:
    example = {"both": Pair(jnp.float32(1), jnp.zeros(3))}
    buffer = fbuf.Buffer(4)
    state = buffer.add(buffer.init(example), example)
    fbuf.save(tmp_path / "saved", buffer, state)
    with pytest.raises(
        fbuf.SchemaError, match=r"made of \S*test_checkpoint:Pair, .* Write fbuf.load\(path, example=row\)"
    ):
        fbuf.load(tmp_path / "saved")
    again = fbuf.load(tmp_path / "saved", example=example)[1]
    assert isinstance(again.rows["both"], Pair)
    same(again, state)
    with pytest.raises(fbuf.SchemaError, match="both/left: found float32"):
        fbuf.load(tmp_path / "saved", example={"both": [jnp.float32(1), jnp.zeros(3)]})


def test_text_and_objects(tmp_path: Path) -> None:
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
    assert fbuf.load(tmp_path / "saved")[0] == buffer  # as it was


@pytest.mark.slow
def test_a_table_that_grew(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(64, storage=Deduplicated(keys=("obs",), blocks=512))
    rows = {"obs": np.random.default_rng(0).integers(0, 255, (30, 16, 16), np.uint8)}
    state = buffer.extend(buffer.init({"obs": jax.ShapeDtypeStruct((16, 16), np.uint8)}), rows)
    buffer, state = buffer.grow(state)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    assert loaded == buffer
    same(again, state)


def test_only_what_was_written_is_stored(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(100_000, sampler=Prioritized(largest="held", normalize="buffer"), view=Transition())
    example = {"obs": jnp.zeros(25), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
    state = buffer.init(example)
    rows = {n: np.ones((1000, *jnp.shape(x)), jnp.asarray(x).dtype) for n, x in example.items()}
    rows["terminated"][:] = rows["truncated"][:] = False
    state = buffer.extend(state, rows)
    written = fbuf.save(tmp_path / "saved", buffer, state).result()
    assert written.bytes_total < 1000 * (100 + 4 + 4 + 2 + 3 * 4 + 1) + 2000
    again = fbuf.load(tmp_path / "saved")[1]
    same(again, state)


# ------------------------------------------------------------------------------------------------------ Replay


def test_replay_goes_on(tmp_path: Path) -> None:
    buffer = fbuf.prioritized(40, storage=Compressed(keys=("t",)), prefetch=1, batch_size=4)
    replay = fbuf.Replay(buffer, {"t": 0.0}, seed=3, strict=False)
    replay.extend({"t": np.arange(30, dtype=np.float32)})
    replay.update_priority(replay.sample().index, np.array([1.0, np.nan, 2.0, 3.0]))
    replay.save(tmp_path / "saved", extra={"step": 9})
    again, extra = fbuf.Replay.load(tmp_path / "saved", extra=True)
    assert extra == {"step": 9} and not again.strict and again.stats() == replay.stats()
    for i in range(20):
        got, want = again.sample(to="numpy"), replay.sample(to="numpy")
        same(got, want)
        for one, batch in ((again, got), (replay, want)):
            one.update_priority(batch.index, np.arange(4.0))
            one.extend({"t": np.full(3, i, np.float32)})
    fbuf.save(tmp_path / "plain", buffer, replay.state)
    with pytest.raises(fbuf.SchemaError, match=r"saved by fbuf.save, without a key; .* fbuf.load\(path\)"):
        fbuf.Replay.load(tmp_path / "plain")


def test_a_legacy_key_is_kept(tmp_path: Path) -> None:
    replay = fbuf.Replay(fbuf.uniform(4), {"t": 0.0})
    replay._key = jax.random.key(0, impl="rbg")
    replay.extend({"t": np.zeros(2, np.float32)})
    replay.save(tmp_path / "saved")
    again = fbuf.Replay.load(tmp_path / "saved")
    assert jax.random.key_impl(again._key) == jax.random.key_impl(replay._key)
    same(again.sample(2), replay.sample(2))


# -------------------------------------------------------------------------------------------------- other buffers


def saved_transitions(tmp_path: Path, **parts: Any) -> tuple[fbuf.Buffer, Any]:
    settings = {"sampler": Prioritized(), "view": Transition(gamma=0.9), **parts}
    buffer = fbuf.Buffer(40, lanes=2, **settings)
    state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, 5)
    fbuf.save(tmp_path / "saved", buffer, state)
    return buffer, state


OTHERS: dict[str, dict[str, Any]] = {
    "gamma": {"view": Transition(gamma=0.5)},
    "numbers": {"sampler": Prioritized(alpha=0.1, beta=0.9, stratified=False)},
    "replace": {"sampler": Prioritized(replace=False)},
    "prefetch": {"prefetch": 1, "batch_size": 6},
    "on": {"sampler": Prioritized(on="host")},
    "Compressed": {"storage": Compressed(keys=("obs",))},
    "Deduplicated": {"storage": Deduplicated(keys=("obs",), blocks=512)},
}


@pytest.mark.parametrize(
    "what", [pytest.param(n, marks=() if n in ("gamma", "Compressed") else pytest.mark.slow) for n in OTHERS]
)
def test_what_may_differ(what: str, tmp_path: Path) -> None:
    buffer, state = saved_transitions(tmp_path)
    other = dataclasses.replace(buffer, **OTHERS[what])
    loaded, again = fbuf.load(tmp_path / "saved", other)
    assert loaded is other
    same(loaded.rows(again).data, buffer.rows(state).data)
    same(again.ring, state.ring)
    same(again.sampler.alpha, state.sampler.alpha)
    if what in ("on", "Compressed", "Deduplicated"):
        same(steps(loaded, again, 100, 4)[1], steps(buffer, state, 100, 4)[1])
    else:
        steps(loaded, again, 100, 1)


def test_what_may_not_differ(tmp_path: Path) -> None:
    buffer, _ = saved_transitions(tmp_path)
    path = tmp_path / "saved"

    def refused(other: fbuf.Buffer, match: str, **settings: Any) -> None:
        with pytest.raises(fbuf.SchemaError, match=match) as caught:
            fbuf.load(path, other, **settings)
        assert str(path) in str(caught.value)

    replace = dataclasses.replace
    refused(
        replace(buffer, sampler=fbuf.samplers.Uniform()),
        r"sampler: found Prioritized\(.*expected Uniform\(.*\n.*convert",
    )
    refused(
        replace(buffer, sampler=Prioritized(largest="held")),
        r"state/sampler/top: found nothing, expected float32\[40\]",
    )
    refused(replace(buffer, view=Transition(gamma=0.9, n_step=3)), r"draws other rows.*\n.*ahead: found 1, expected 3")
    refused(replace(buffer, view=fbuf.views.Row(), episode_end=()), "expected none: every row is drawn")
    refused(replace(buffer, capacity=80), r"capacity of .* is 40; expected 80.*resize=True")
    refused(replace(buffer, lanes=4), "lanes of .* is 2; expected 4")
    refused(replace(buffer, storage=Ragged()), "cannot come to lie in Ragged")
    example = {**combinations.EXAMPLE, "obs": jax.ShapeDtypeStruct((8, 8), np.float32)}
    refused(buffer, r"obs: found uint8\[8, 8\], expected float32\[8, 8\]", example=example)
    example = {n: x for n, x in combinations.EXAMPLE.items() if n != "goal"} | {"new": 0}
    refused(buffer, r"goal: found int32\[\], expected nothing\n.*new: found nothing, expected int32", example=example)
    with pytest.raises(TypeError, match="buffer is str; expected a Buffer"):
        fbuf.load(path, "buffer")  # type: ignore[arg-type]


@pytest.mark.slow
def test_other_settings_that_the_state_depends_on(tmp_path: Path) -> None:
    for sampler, other, match in (
        (Consume(2), Consume(1), r"state/sampler/left: found int32\[40\], expected int32\[0\]"),
        (Epoch(), Epoch(shuffle=False), "sampler.shuffle: found True, expected False"),
        (Ranked(), Prioritized(), "sampler: found Ranked"),
    ):
        buffer, _ = saved_transitions(tmp_path, sampler=sampler)
        with pytest.raises(fbuf.SchemaError, match=match):
            fbuf.load(tmp_path / "saved", dataclasses.replace(buffer, sampler=other))


def test_functions_are_named_and_not_imported(tmp_path: Path) -> None:
    buffer = combinations.make("Device", "Uniform", "Hindsight")
    state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, 3)
    fbuf.save(tmp_path / "saved", buffer, state)
    with pytest.raises(fbuf.SchemaError, match=r"the function tests.test_combinations:missed, which no file can hold"):
        fbuf.load(tmp_path / "saved")
    loaded, again = fbuf.load(tmp_path / "saved", buffer)
    same(steps(loaded, again, 100, 3)[1], steps(buffer, state, 100, 3)[1])


def test_rows_in_files_come_to_lie_where_they_are_told(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(10, storage=fbuf.storages.Memmap(str(tmp_path / "rows")))
    state = numbered(buffer, buffer.init({"t": 0.0}), 0, 15)
    fbuf.save(tmp_path / "saved", buffer, state)
    with pytest.raises(BlockingIOError, match="give another path"):
        fbuf.load(tmp_path / "saved")
    other = elsewhere(buffer, tmp_path / "others")
    loaded, again = fbuf.load(tmp_path / "saved", other)
    same(loaded.rows(again), buffer.rows(state))
    again = numbered(loaded, again, 15, 1)
    want = jax.device_get(loaded.rows(again).data)
    del again
    same(jax.device_get(loaded.rows(loaded.resume({"t": 0.0})).data), want)


def test_a_load_that_fails_leaves_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next one would find its path taken, by rows that nobody can say are whole."""
    buffer = fbuf.Buffer(10)
    fbuf.save(tmp_path / "saved", buffer, numbered(buffer, buffer.init({"t": 0.0}), 0, 15), extra={"a": 1})
    other = fbuf.Buffer(10, storage=fbuf.storages.Memmap(str(tmp_path / "rows")))
    with pytest.raises(fbuf.SchemaError, match="is not like the example"):
        fbuf.load(tmp_path / "saved", other, extra={"b": 1})
    with monkeypatch.context() as patch:
        patch.setattr(fbuf.Buffer, "check_state", lambda *_: 1 // 0)  # the last that is done
        with pytest.raises(ZeroDivisionError):
            fbuf.load(tmp_path / "saved", other)
    assert not (tmp_path / "rows").exists()
    loaded, again = fbuf.load(tmp_path / "saved", other)
    held = jax.device_get(loaded.rows(again).data["t"])
    with pytest.raises(OSError, match="taken|in use"):
        fbuf.load(tmp_path / "saved", other)  # what was there before it stays
    del again
    same(jax.device_get(loaded.rows(loaded.resume({"t": 0.0})).data["t"]), held)


def test_the_step_is_compiled_once(tmp_path: Path) -> None:
    """A loaded buffer is the same value, so that a jitted step which closes over it does not compile again."""
    buffer = combinations.make("Device", "Uniform", "Row")
    state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, 1)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    before = step._cache_size()  # type: ignore[attr-defined]
    steps(loaded, again, 100, 1)
    assert step._cache_size() == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [10, 2_000_000])
def test_nan_rows_load_while_jax_looks_for_nan(count: int, tmp_path: Path) -> None:
    buffer = fbuf.Buffer(2_000_000)
    state = buffer.extend(buffer.init({"t": 0.0}), {"t": jnp.full(count, jnp.nan)})
    fbuf.save(tmp_path / "saved", buffer, state, sync=False)
    with jax.debug_nans(True):
        _, again = fbuf.load(tmp_path / "saved")
    same(again.rows, state.rows)

"""A saved buffer goes on as if nothing had happened: its batches, rows, structures, and `Replay`."""

import collections
import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, Device, Host, Ragged
from fbuf.views import Transition
from tests.support import checkpoint as support
from tests.support import combinations
from tests.support.checkpoint import check_killed
from tests.support.checkpoint_saving import check_mangled_meta, check_marks, check_second_save, check_store_in_use
from tests.support.refusals import raises
from tests.support.replay import counts
from tests.support.scattered import Anywhere
from tests.support.tables import by_tier, checks, pairwise
from tests.support.trees import same

PAIRS = (
    ("Device", "Prioritized", "Transition", 0),
    ("Memmap", "Prioritized(on='host')", "Row", 0),
)
test_batches_go_on_bit_for_bit = checks(
    (support.check_goes_on, [(PAIRS[0], 8)]),
    more=[
        (support.check_old_state, ["Compressed"]),  # saved as it was
        (support.check_goes_on, [(PAIRS[1], 8), (("Device", "Staleness", "Sequence('mask')", 1), 8)]),
        (support.check_every_number_of_rows, [Device()]),
    ],
)


def test_golden_checkpoints_load_and_are_saved_again(tmp_path):
    for name in support.golden.BUFFERS:
        support.check_golden(name, tmp_path / name)
    assert {path.name for path in support.GOLDEN.iterdir()} == {*support.golden.BUFFERS, "replay"}


def test_a_golden_replay_loads():
    replay = fbuf.Replay.load(support.GOLDEN / "replay")
    assert len(replay) == 16
    same(replay.rows(last=8).data["obs"], support.golden.rows(support.golden.STEPS - 8, 8)["obs"])
    assert replay._engine.impl == "threefry2x32"
    same(replay._engine.key, jax.random.key_data(jax.random.key(5)))  # its seed


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
    assert loaded.rows(again, last=1).lazy["text"] == [""]
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
    replay._engine.key, replay._engine.impl = jax.random.key_data(jax.random.key(0, impl="rbg")), "rbg"
    replay.extend({"t": np.zeros(2, np.float32)})
    replay.save(tmp_path / "saved")
    again = fbuf.Replay.load(tmp_path / "saved")
    assert again._engine.impl == "rbg"
    same(again.sample(2), replay.sample(2))


@pytest.mark.more
def test_a_killed_save_leaves_the_old_or_the_new_one(tmp_path):
    check_killed("Compressed", 0, tmp_path)


@pytest.mark.more
def test_a_host_store_is_saved(tmp_path, monkeypatch):
    check_second_save(Host(keys=("obs",)), True, tmp_path / "one")
    check_second_save(Host(keys=("obs",)), False, tmp_path / "two")
    check_store_in_use(Host(keys=("obs",)), tmp_path / "three", monkeypatch)


@pytest.mark.more
def test_mangled_metadata_is_refused(tmp_path):
    check_mangled_meta("device", 1, tmp_path / "device")
    check_mangled_meta("compressed", 1, tmp_path / "compressed")


@pytest.mark.more
def test_only_written_rows_are_stored(tmp_path):
    sampler = Prioritized(largest="held", normalize="buffer")
    buffer = fbuf.Buffer(100_000, sampler=sampler, view=Transition(autoreset="same_step"))
    example = {"obs": jnp.zeros(25), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
    state = buffer.init(example)
    rows = {n: np.ones((1000, *jnp.shape(x)), jnp.asarray(x).dtype) for n, x in example.items()}
    rows["terminated"][:] = rows["truncated"][:] = False
    state = buffer.extend(state, rows)
    written = fbuf.save(tmp_path / "saved", buffer, state).result()
    assert written.bytes_total < 1000 * (100 + 4 + 4 + 2 + 3 * 4 + 1) + 2000
    again = fbuf.load(tmp_path / "saved")[1]
    same(again, state)


@pytest.mark.more
def test_replay_goes_on(tmp_path):
    buffer = fbuf.prioritized(40, storage=Compressed(keys=("t",)), prefetch=1, batch_size=4)
    replay = fbuf.Replay(buffer, {"t": 0.0}, seed=3, strict=False)
    replay.extend({"t": np.arange(30, dtype=np.float32)})
    replay.update_priority(replay.sample().index, np.array([1.0, np.nan, 2.0, 3.0]))
    replay.save(tmp_path / "saved", extra={"step": 9})
    again, extra = fbuf.Replay.load(tmp_path / "saved", extra=True)
    assert extra == {"step": 9} and not again.strict and counts(again) == counts(replay)
    for i in range(20):
        got, want = again.sample(to="numpy"), replay.sample(to="numpy")
        same(got, want)
        for one, batch in ((again, got), (replay, want)):
            one.update_priority(batch.index, np.arange(4.0))
            one.extend({"t": np.full(3, i, np.float32)})
    fbuf.save(tmp_path / "plain", buffer, replay.state)
    with pytest.raises(fbuf.SchemaError, match=r"saved without a key\. .* fbuf.load\(path\)"):
        fbuf.Replay.load(tmp_path / "plain")


VIEWS = ("Row", "Transition", "Episode", "Hindsight", "Sequence('mask')")
EVERY_PAIR = pairwise(combinations.STORAGES, combinations.SAMPLERS, VIEWS, (0, 1))  # with and without prefetch
RESIZED = ("Device", "Compressed", "Deduplicated", "Memmap", "Ragged")
CASES = pairwise(RESIZED, combinations.SAMPLERS, VIEWS, (16, 60), (5, 9))


# `Prioritized(replace=False)` draws by the capacity, and so other rows before the save.
GROWN = [s for s in combinations.SAMPLERS if s not in ("Prioritized(on='host')", "Prioritized(replace=False)")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampler", GROWN)
def test_a_grown_buffer_draws_the_batches_of_a_larger_one(sampler, tmp_path):
    for view in ("Row", "Transition", "Episode", "Hindsight"):
        small = combinations.make("Device", sampler, view)
        large = dataclasses.replace(small, capacity=60)
        state, want = (support.steps(b, b.init(combinations.EXAMPLE), 0, 5)[0] for b in (small, large))
        fbuf.save(tmp_path / "saved", small, state, sync=False)
        again = fbuf.load(tmp_path / "saved", large, resize=True)[1]
        drawn = [support.steps(large, state, 100, 8)[1] for state in (again, want)]
        same(*([(data, index.slot, *rest) for data, index, *rest in found] for found in drawn))


test_checks = checks(
    exhaustive=[
        (support.check_goes_on, [(pair, 40) for pair in EVERY_PAIR]),
        (support.check_resize, [(case,) for case in CASES]),
        (support.check_old_state, ["Device", "Deduplicated"]),
        (support.check_every_number_of_rows, [Compressed(keys=("t",))]),
        (support.check_other_buffer, support.OTHERS),
        (support.check_killed, itertools.product(combinations.STORAGES, range(1, 6))),
        (check_mangled_meta, itertools.product(["device", "compressed"], range(2, 20))),
    ]
)


@pytest.mark.parametrize("name", by_tier(more=["ragged"], exhaustive=support.golden.BUFFERS))
def test_golden_checkpoints_go_on(name, tmp_path):
    support.check_golden(name, tmp_path, draw=True)


@pytest.mark.exhaustive
def test_a_resized_epoch_goes_on_or_starts_again(tmp_path):
    buffer = fbuf.Buffer(20, sampler=fbuf.samplers.Epoch())
    state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(12)})
    state, first = buffer.sample(state, jax.random.key(0), 4)
    fbuf.save(tmp_path / "saved", buffer, state)
    for capacity, epoch in ((40, 1), (12, 1), (10, 2)):
        loaded, again = fbuf.load(tmp_path / "saved", resize=capacity)
        again, rest = loaded.sample(again, jax.random.key(1), 8)
        drawn = set(np.asarray(rest.data["t"])[np.asarray(rest.mask)].tolist())
        assert int(loaded.stats(again)["epoch"]) == epoch
        if epoch == 1:
            assert drawn == set(range(12)) - set(np.asarray(first.data["t"]).tolist())


@pytest.mark.exhaustive
def test_another_storage_and_capacity_at_once(tmp_path):
    buffer = combinations.make("Device", "Prioritized", "Row")
    state, _ = support.steps(buffer, buffer.init(combinations.EXAMPLE), 0, 9)
    fbuf.save(tmp_path / "saved", buffer, state)
    other = dataclasses.replace(buffer, capacity=24, storage=Compressed(keys=("obs",)))
    loaded, again = fbuf.load(tmp_path / "saved", other, resize=True)
    same(loaded.rows(again, last=12).data, buffer.rows(state, last=12).data)
    same(again.sampler.max_priority, state.sampler.max_priority)


@pytest.mark.exhaustive
def test_a_custom_writer_is_named(tmp_path):
    storage, path = combinations.STORAGES["Compressed"], tmp_path / "saved"
    buffer = fbuf.Buffer(20, lanes=2, storage=storage, sampler=Prioritized(), writer=Anywhere(3))
    state, _ = support.steps(buffer, buffer.init(combinations.EXAMPLE), 0, 6)
    fbuf.save(path, buffer, state)
    raises(fbuf.SchemaError, r"(?s):Anywhere.*Write fbuf.load\(path, b", fbuf.load, path)
    loaded, again = fbuf.load(path, buffer)
    same(support.steps(loaded, again, 100, 9)[1], support.steps(buffer, state, 100, 9)[1])
    other = dataclasses.replace(buffer, writer=fbuf.writers.Ring())
    raises(fbuf.SchemaError, "the writer of .* is another", fbuf.load, path, other)
    raises(fbuf.SchemaError, "chooses slots itself", fbuf.load, path, buffer, resize=40)


@pytest.mark.exhaustive
def test_marks_made_on_the_device(monkeypatch):
    for dtype in ("bool", "float32", "bfloat16", "int4", "float8_e4m3fn"):
        check_marks(dtype, monkeypatch)

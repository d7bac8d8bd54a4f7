"""Checkpoints: every storage with every sampler, capacities, many kills, and resized states."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked
from fbuf.storages import Compressed, Deduplicated, Ragged
from tests.support import checkpoint as support
from tests.support import combinations
from tests.support.checkpoint_saving import check_mangled_meta, check_marks
from tests.support.scattered import Anywhere, Largest
from tests.support.trees import same

VIEWS = ("Row", "Transition", "Episode", "Hindsight", "Sequence('mask')")
PAIRS = [  # each storage with each sampler twice, with another view and with and without prefetch
    (storage, sampler, VIEWS[(i + j + k) % len(VIEWS)], (j + k) % 2)
    for i, storage in enumerate(combinations.STORAGES)
    for j, sampler in enumerate(combinations.SAMPLERS)
    for k in (0, 1)
]
CASES = [
    (storage, sampler, VIEWS[(i + j) % len(VIEWS)], capacity, 9 if (i + j) % 3 else 5)
    for i, storage in enumerate(("Device", "Compressed", "Deduplicated", "Memmap", "Ragged"))
    for j, sampler in enumerate(combinations.SAMPLERS)
    for capacity in (16, 60)
]
# `Prioritized(replace=False)` draws by the capacity, and so other rows before the save.
GROWN = [s for s in combinations.SAMPLERS if s not in ("Prioritized(on='host')", "Prioritized(replace=False)")]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_batches_go_on_bit_for_bit(pair: tuple[str, str, str, int], tmp_path: Path) -> None:
    support.check_goes_on(pair, 40, tmp_path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_newest_rows_stay(case: tuple[str, str, str, int, int], tmp_path: Path) -> None:
    support.check_resize(case, tmp_path)


@pytest.mark.parametrize("view", ["Row", "Transition", "Episode", "Hindsight"])
@pytest.mark.parametrize("sampler", GROWN)
def test_a_grown_buffer_draws_the_batches_of_a_larger_one(sampler: str, view: str, tmp_path: Path) -> None:
    support.check_grown(sampler, view, tmp_path)


@pytest.mark.parametrize("storage", ["Device", "Deduplicated"])
def test_an_old_state_is_saved_as_it_was(storage: str, tmp_path: Path) -> None:
    support.check_old_state(storage, tmp_path)


def test_every_number_of_rows(tmp_path: Path) -> None:
    support.check_every_number_of_rows(Compressed(keys=("t",)), tmp_path)


@pytest.mark.parametrize("what", support.OTHERS)
def test_another_buffer(what: str, tmp_path: Path) -> None:
    support.check_other_buffer(what, tmp_path)


@pytest.mark.parametrize("name", support.golden.BUFFERS)
def test_golden_checkpoints_go_on(name: str) -> None:
    support.check_golden(name, draw=True)


@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("storage", combinations.STORAGES)
def test_a_kill_leaves_the_old_or_the_new_save(storage: str, seed: int, tmp_path: Path) -> None:
    support.check_killed(storage, seed, tmp_path)


@pytest.mark.parametrize("seed", range(2, 20))
@pytest.mark.parametrize("name", ["device", "compressed"])
def test_mangled_metadata_is_refused(name: str, seed: int, tmp_path: Path) -> None:
    check_mangled_meta(name, seed, tmp_path)


def test_cleared_rows_stay_cleared(tmp_path: Path) -> None:
    buffer = combinations.make("Device", "Ranked", "Transition")
    state, _ = support.steps(buffer, buffer.init(combinations.EXAMPLE), 0, 12)
    index = buffer.last(state, 1).index
    state, _ = support.steps(buffer, buffer.clear(state), 20, 2)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    same(support.steps(loaded, again, 100, 9)[1], support.steps(buffer, state, 100, 9)[1])
    assert not np.asarray(loaded.get(again, index).mask).any()


def test_a_grown_table_of_blocks_returns(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(64, storage=Deduplicated(keys=("obs",), blocks=512))
    rows = {"obs": np.random.default_rng(0).integers(0, 255, (30, 16, 16), np.uint8)}
    state = buffer.extend(buffer.init({"obs": jax.ShapeDtypeStruct((16, 16), np.uint8)}), rows)
    buffer, state = buffer.grow(state)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved")
    assert loaded == buffer
    same(again, state)


def test_a_resized_epoch_goes_on_or_starts_again(tmp_path: Path) -> None:
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


def test_another_storage_and_capacity_at_once(tmp_path: Path) -> None:
    buffer = support.resized("Device", "Prioritized", "Row", 40)
    state = support.at_rest(buffer, 9, tmp_path)
    other = dataclasses.replace(buffer, capacity=24, storage=Compressed(keys=("obs",)))
    loaded, again = fbuf.load(tmp_path / "saved", other, resize=True)
    same(support.newest_rows(loaded, again, 12), support.newest_rows(buffer, state, 12))
    same(again.sampler.max_priority, state.sampler.max_priority)
    tight = dataclasses.replace(buffer, storage=Deduplicated(keys=("obs",), blocks=64, block=(1, 4), on_full="refuse"))
    noise = np.random.default_rng(0).integers(0, 256, (20, 2, 8, 8), np.uint8)
    full = buffer.extend(
        buffer.init(combinations.EXAMPLE), combinations.rows_of(np.random.default_rng(0), 20) | {"obs": noise}
    )
    fbuf.save(tmp_path / "saved", buffer, full)
    with pytest.raises(fbuf.SchemaError, match="rows do not fit in Deduplicated"):
        fbuf.load(tmp_path / "saved", tight)


def test_custom_writers_are_named(tmp_path: Path) -> None:
    support.check_custom_writer(Largest("reward"), "Device", tmp_path / "one")
    support.check_custom_writer(Anywhere(3), "Compressed", tmp_path / "two")


def test_samplers_with_another_state_are_refused(tmp_path: Path) -> None:
    for sampler, other, match in (
        (Consume(2), Consume(1), r"state/sampler/left: found int32\[40\], expected int32\[0\]"),
        (Epoch(), Epoch(shuffle=False), "sampler.shuffle: found True, expected False"),
        (Ranked(), Prioritized(), "sampler: found Ranked"),
    ):
        buffer, _ = support.saved_transitions(tmp_path, sampler=sampler)
        with pytest.raises(fbuf.SchemaError, match=match):
            fbuf.load(tmp_path / "saved", dataclasses.replace(buffer, sampler=other))


def test_marks_made_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in ("bool", "float32", "bfloat16", "int4", "float8_e4m3fn"):
        check_marks(dtype, monkeypatch)


def test_text_moves(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(10, storage=Ragged())
    rows = [{"text": "x" * n, "n": n} for n in range(14)] + [{"n": 14}]
    state = buffer.extend(buffer.init({"text": "", "n": 0}), rows)
    fbuf.save(tmp_path / "saved", buffer, state)
    for capacity in (4, 25):
        loaded, again = fbuf.load(tmp_path / "saved", resize=capacity)
        again = loaded.extend(again, [{"text": "new", "n": 15}])
        last = loaded.last(again, 4)
        assert last.lazy.get("text") == ["x" * 12, "x" * 13, None, "new"]
        assert np.asarray(last.data["n"]).tolist() == [12, 13, 14, 15]

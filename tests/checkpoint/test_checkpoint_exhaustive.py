"""Checkpoints: every storage with every sampler, capacities, many kills, and resized states."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed
from tests.support import checkpoint as support
from tests.support import combinations
from tests.support.checkpoint_saving import check_mangled_meta, check_marks
from tests.support.refusals import raises
from tests.support.scattered import Anywhere
from tests.support.tables import checks, pairwise
from tests.support.trees import same

pytestmark = pytest.mark.exhaustive

VIEWS = ("Row", "Transition", "Episode", "Hindsight", "Sequence('mask')")
PAIRS = pairwise(combinations.STORAGES, combinations.SAMPLERS, VIEWS, (0, 1))  # with and without prefetch
RESIZED = ("Device", "Compressed", "Deduplicated", "Memmap", "Ragged")
CASES = pairwise(RESIZED, combinations.SAMPLERS, VIEWS, (16, 60), (5, 9))


# `Prioritized(replace=False)` draws by the capacity, and so other rows before the save.
GROWN = [s for s in combinations.SAMPLERS if s not in ("Prioritized(on='host')", "Prioritized(replace=False)")]


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
    (support.check_goes_on, [(pair, 40) for pair in PAIRS]),
    (support.check_resize, [(case,) for case in CASES]),
    (support.check_old_state, ["Device", "Deduplicated"]),
    (support.check_every_number_of_rows, [Compressed(keys=("t",))]),
    (support.check_other_buffer, support.OTHERS),
    (support.check_killed, itertools.product(combinations.STORAGES, range(1, 6))),
    (check_mangled_meta, itertools.product(["device", "compressed"], range(2, 20))),
)


@pytest.mark.parametrize("name", support.golden.BUFFERS)
def test_golden_checkpoints_go_on(name, tmp_path):
    support.check_golden(name, tmp_path, draw=True)


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


def test_another_storage_and_capacity_at_once(tmp_path):
    buffer = combinations.make("Device", "Prioritized", "Row")
    state, _ = support.steps(buffer, buffer.init(combinations.EXAMPLE), 0, 9)
    fbuf.save(tmp_path / "saved", buffer, state)
    other = dataclasses.replace(buffer, capacity=24, storage=Compressed(keys=("obs",)))
    loaded, again = fbuf.load(tmp_path / "saved", other, resize=True)
    same(loaded.last(again, 12).data, buffer.last(state, 12).data)
    same(again.sampler.max_priority, state.sampler.max_priority)


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


def test_marks_made_on_the_device(monkeypatch):
    for dtype in ("bool", "float32", "bfloat16", "int4", "float8_e4m3fn"):
        check_marks(dtype, monkeypatch)

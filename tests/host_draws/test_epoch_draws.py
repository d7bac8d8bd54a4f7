"""Batches of `Epoch` that `Replay` draws in NumPy are those of the jitted program, and so is every state that is read."""

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf._host_draws.epoch import EpochDraws
from fbuf.samplers import Epoch
from fbuf.storages import Device, Host
from fbuf.views import Row
from tests.support import host_views, two_replays
from tests.support.tables import by_tier
from tests.support.trees import same

pytestmark = pytest.mark.filterwarnings("ignore:.*each at most once")
SAMPLERS = {"shuffled": Epoch(), "whole": Epoch(drop_last=True), "in order": Epoch(shuffle=False)}
VIEWS = host_views.VIEWS | {"row": Row()}


CASES = by_tier(
    ("n", None, "shuffled", 17, Device()),
    more=[
        ("row", 3, "in order", 17, Device()),
        ("row", None, "whole", 17, Device()),
        ("stack", 2, "whole", 40, Device()),
        ("n", 2, "shuffled", 17, Host(keys=("obs",))),
    ],
)


@pytest.mark.parametrize(("view", "lanes", "sampler", "length", "storage"), CASES, ids=str)
def test_batches_and_states_are_those_of_the_program(
    view: str, lanes: int | None, sampler: str, length: int, storage: Any
) -> None:
    share = host_views.compare(VIEWS[view], lanes, length, sampler=SAMPLERS[sampler], storage=storage)
    assert share == 1 or (sampler == "whole" and share > 0.8)  # of too few anchors a program masks the batch


@pytest.mark.more
@pytest.mark.parametrize(("sampler", "view", "lanes"), by_tier(("whole", "row", 2), more=[("epoch", "step", None)]))
def test_other_calls_see_the_position(sampler: str, view: str, lanes: int | None) -> None:
    pair = two_replays.make_pair("device", sampler, view, lanes, capacity=48)
    assert isinstance(pair[0]._engine.host, EpochDraws)
    two_replays.compare(pair, 60, sizes=(7, 3, 12))


@pytest.mark.more
@pytest.mark.parametrize("impl", by_tier("threefry2x32", more=["rbg"]))
@pytest.mark.parametrize(
    ("sampler", "view", "lanes", "batch"), by_tier(("whole", "row", None, 200), more=[("epoch", "step", 2, 60)])
)
def test_large_epochs(
    sampler: str, view: str, lanes: int | None, batch: int, impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of more than 1024 anchors is a keyed permutation, of which one call computes some places."""
    monkeypatch.setattr("fbuf._host_draws.epoch._AHEAD", 300)
    with jax.default_prng_impl(impl):
        pair = two_replays.make_pair("device", sampler, view, lanes, capacity=3000)
    random, lead = np.random.default_rng(0), () if lanes is None else (lanes,)
    for replay in pair:
        replay.extend(two_replays.rows_of(np.random.default_rng(1), 3000 // (lanes or 1), *lead))
    begun = 0
    for step in range(60):
        for _ in range(int(random.integers(0, 40 if step % 7 else 120))):  # soon many of an epoch have closed
            row = two_replays.rows_of(random, *lead)
            for replay in pair:
                replay.add(row)
        batches = [replay.sample(batch + step % 2, to="numpy") for replay in pair]
        same(*batches)
        begun += bool(batches[0].last)
    same(*(replay.state for replay in pair))
    assert begun > 2 or lanes


def filled() -> fbuf.Replay:
    replay = fbuf.Replay(fbuf.Buffer(20, sampler=Epoch()), {"t": np.int32(0)})
    replay.extend({"t": np.arange(20, dtype=np.int32)})
    return replay


READS = {
    "state": lambda replay, _: replay.state.sampler.position.taken,
    "stats": lambda replay, _: 20 - replay.stats()["epoch_left"],
    "peek": lambda replay, _: 20 - replay.buffer.peek(replay.state, jax.random.key(0), 99).mask.sum(),
    "load": lambda replay, path: (replay.save(path / "r"), 20 - fbuf.Replay.load(path / "r").stats()["epoch_left"])[1],
    "jax": lambda replay, _: 20 - replay.sample(99).mask.sum(),
}


@pytest.mark.parametrize("read", READS)
def test_every_read_sees_the_position(read: str, tmp_path: Path) -> None:
    replay = filled()
    drawn = [replay.sample(size, to="numpy").data["t"] for size in (6, 7)]
    assert len(set(np.concatenate(drawn))) == 13
    assert READS[read](replay, tmp_path) == 13
    if read != "jax":
        assert replay.sample(9, to="numpy").mask.sum() == 7


def test_draws_are_clean_under_transfer_guards() -> None:
    replay = filled()
    with jax.transfer_guard("disallow"):
        drawn = [replay.sample(10, to="numpy").data["t"] for _ in range(4)]  # of two epochs
        assert len(replay.sample(10).data["t"]) == 10
    assert all(len(set(np.concatenate(drawn[i : i + 2]))) == 20 for i in (0, 2))


@pytest.mark.parametrize("keep", [copy.deepcopy, lambda state: state], ids=["a copy", "itself"])
def test_another_state_has_its_own_position(keep: Any) -> None:
    replay = filled()
    replay.sample(6, to="numpy")
    before = keep(replay.state)
    first = replay.sample(7, to="numpy")
    replay.state = before
    assert replay.stats()["epoch_left"] == 14
    same(first, replay.sample(7, to="numpy"))
    replay.clear()
    replay.add({"t": np.int32(3)})
    batch = replay.sample(1, to="numpy")
    assert batch.data["t"].tolist() == [3] and batch.last and replay.stats()["epoch"] == 2


def test_the_index_of_a_masked_batch_does_not_keep_what_draws() -> None:
    replay = filled()
    first, last = (replay.sample(13, to="numpy").index for _ in range(2))
    draws = weakref.ref(replay._engine.deferred)
    del replay
    gc.collect()
    assert draws() is None and first.slot.max() < last.slot.max() == 20


@pytest.mark.more
def test_compile_leaves_nothing_to_compile(caplog: pytest.LogCaptureFixture) -> None:
    replay = fbuf.Replay(fbuf.Buffer(21, sampler=Epoch()), {"t": np.int32(0)})
    replay.extend({"t": np.arange(21, dtype=np.int32)})
    replay.compile(4, to="numpy", progress=False)
    with jax.log_compiles():
        for number in range(70):
            replay.add({"t": np.int32(number)})
            replay.sample(4, to="numpy")
        assert "Compiling" not in caplog.text
        replay.sample(5)
        assert "Compiling" in caplog.text


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("view", VIEWS)
def test_batches_and_states_of_every_view_are_those_of_the_program(view: str, lanes: int | None, sampler: str) -> None:
    host_views.compare(VIEWS[view], lanes, seed=4, sampler=SAMPLERS[sampler])

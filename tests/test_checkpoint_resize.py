"""Another capacity: the newest rows stay, with their priorities, episodes and what was drawn of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.storages import Compressed, Deduplicated, Ragged
from tests.support import combinations
from tests.support.checkpoint import elsewhere, same, steps

LANES, LENGTH = 2, 20
SAMPLERS = [s for s in combinations.SAMPLERS if s != "Prioritized(on='host')"]


def made(storage: str, sampler: str, view: str, capacity: int) -> fbuf.Buffer:
    buffer = combinations.make(storage, sampler, view)
    return dataclasses.replace(buffer, capacity=capacity)


def at_rest(buffer: fbuf.Buffer, number: int, tmp_path: Path) -> Any:
    state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, number)
    fbuf.save(tmp_path / "saved", buffer, state, sync=False)
    return state


def rows(buffer: fbuf.Buffer, state: Any, newest: int) -> Any:
    """Data of the newest rows, and which there are."""
    last = buffer.last(state, newest)
    return jax.device_get((last.data, last.mask))


def drawable(buffer: fbuf.Buffer, state: Any) -> list[Any]:
    """Age (0 the newest) and lane of every anchor, with its priority where there is one."""
    cursor = np.asarray(state.ring.cursor)
    length, lanes = buffer.geometry.length, buffer.geometry.lanes
    every = np.arange(buffer.capacity)
    if state.anchors is not None:
        is_open = (np.asarray(state.anchors.flags) & 8) != 0
    else:
        age = (cursor[every % lanes] - 1 - every // lanes) % length
        is_open = age < np.asarray(state.ring.size)[every % lanes]
    own = state.sampler
    leaf = np.asarray(own.tree)[: buffer.capacity] if hasattr(own, "tree") else np.zeros(buffer.capacity)
    found = []
    for slot in np.flatnonzero(is_open).tolist():
        lane = slot % lanes
        found.append((lane, int((cursor[lane] - 1 - slot // lanes) % length), float(leaf[slot])))
    return sorted(found)


VIEWS = ("Row", "Transition", "Sequence('mask')", "Episode", "Hindsight")
DEFAULT = [("Device", "Prioritized", "Transition", 16, 9), ("Compressed", "Uniform", "Row", 60, 9)]
CASES = [
    (storage, sampler, VIEWS[(i + j) % len(VIEWS)], capacity, 9 if (i + j) % 3 else 5)
    for i, storage in enumerate(("Device", "Compressed", "Deduplicated", "Memmap", "Ragged"))
    for j, sampler in enumerate(combinations.SAMPLERS)
    for capacity in (16, 60)
]


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(c, id="-".join(map(str, c))) for c in DEFAULT),
        *(pytest.param(c, id="-".join(map(str, c)), marks=pytest.mark.slow) for c in CASES if c not in DEFAULT),
    ],
)
def test_the_newest_rows_stay(case: Any, tmp_path: Path) -> None:
    storage, sampler, view, capacity, number = case
    buffer = made(storage, sampler, view, 40)
    state = at_rest(buffer, number, tmp_path)
    other = elsewhere(dataclasses.replace(buffer, capacity=capacity), tmp_path / "rows")
    loaded, again = fbuf.load(tmp_path / "saved", other, resize=True)
    assert loaded is other
    held = min(capacity, 40) // LANES
    same(rows(loaded, again, held), rows(buffer, state, held))
    if not sampler.endswith("'host')"):
        kept = [(lane, age, leaf) for lane, age, leaf in drawable(buffer, state) if age < held]
        moved = drawable(loaded, again)
        # The oldest rows that stay may have lost frames behind them.
        gone = {(lane, age) for lane, age, _ in kept} - {(lane, age) for lane, age, _ in moved}
        assert set(moved) <= set(kept) and all(age >= held - 3 for _, age in gone)
        assert capacity == 16 or not gone
    stats = jax.device_get(loaded.stats(again))
    assert stats["size"] == min(int(buffer.size(state)), capacity)
    again, drawn = steps(loaded, again, 100, 12)
    assert any(mask.any() for *_, mask in drawn)
    stats = jax.device_get(loaded.stats(again))
    assert not any(stats[name] for name in stats if name.startswith(("refused", "expired", "retired")))


@pytest.mark.parametrize(
    ("sampler", "view"),
    [
        pytest.param(s, v, marks=() if (s, v) == ("Consume", "Row") else pytest.mark.slow)
        for s in SAMPLERS
        if s != "Prioritized(replace=False)"  # draws by the capacity: the two drew other rows before the save
        for v in ("Row", "Transition", "Episode", "Hindsight")
    ],
)
def test_grown_before_it_came_round_it_is_as_if_it_had_been_larger(sampler: str, view: str, tmp_path: Path) -> None:
    """Rows lie where they would lie, so that even the batches are the same."""
    small, large = made("Device", sampler, view, 40), made("Device", sampler, view, 60)
    at_rest(small, 5, tmp_path)
    want, _ = steps(large, large.init(combinations.EXAMPLE), 0, 5)
    again = fbuf.load(tmp_path / "saved", large, resize=True)[1]
    got = steps(large, again, 100, 8)[1]
    for (data, index, *rest), (data2, index2, *rest2) in zip(got, steps(large, want, 100, 8)[1], strict=True):
        same((data, index.slot, rest), (data2, index2.slot, rest2))


def test_rows_in_files_at_a_path_move_there(tmp_path: Path) -> None:
    buffer = fbuf.Buffer(20, storage=Compressed(path=str(tmp_path / "one")))
    state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(35)})
    fbuf.save(tmp_path / "saved", buffer, state)
    for capacity, where in ((10, "two"), (30, "three")):
        other = fbuf.Buffer(capacity, storage=Compressed(path=str(tmp_path / where)))
        loaded, again = fbuf.load(tmp_path / "saved", other, resize=True)
        assert np.asarray(loaded.last(again, 4).data["t"]).tolist() == [31, 32, 33, 34]
        assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("fbuf-")) == []
    del again
    assert np.asarray(loaded.last(loaded.resume({"t": 0}), 2).data["t"]).tolist() == [33, 34]


@pytest.mark.parametrize("capacity", [10, pytest.param(30, marks=pytest.mark.slow)])
def test_indices_of_before_are_stale(capacity: int, tmp_path: Path) -> None:
    buffer = fbuf.Buffer(20)
    state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(35)})
    index = fbuf.Index(jnp.arange(20), buffer.rows(state).index.ticket)
    fbuf.save(tmp_path / "saved", buffer, state)
    loaded, again = fbuf.load(tmp_path / "saved", resize=capacity)
    assert loaded == dataclasses.replace(buffer, capacity=capacity)
    for i in range(4):
        assert not np.asarray(loaded.get(again, index).mask).any()
        again = loaded.extend(again, {"t": jnp.arange(10 * i, 10 * i + 10)})
    assert np.asarray(loaded.last(again, 5).data["t"]).tolist() == [35, 36, 37, 38, 39]


@pytest.mark.slow
def test_an_epoch_goes_on_or_begins_anew(tmp_path: Path) -> None:
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


def test_text_moves_as_well(tmp_path: Path) -> None:
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


def test_to_another_storage_and_capacity_at_once(tmp_path: Path) -> None:
    buffer = made("Device", "Prioritized", "Row", 40)
    state = at_rest(buffer, 9, tmp_path)
    other = dataclasses.replace(buffer, capacity=24, storage=Compressed(keys=("obs",)))
    loaded, again = fbuf.load(tmp_path / "saved", other, resize=True)
    same(rows(loaded, again, 12), rows(buffer, state, 12))
    same(again.sampler.max_priority, state.sampler.max_priority)
    tight = dataclasses.replace(buffer, storage=Deduplicated(keys=("obs",), blocks=64, block=(1, 4), on_full="refuse"))
    noise = np.random.default_rng(0).integers(0, 256, (20, 2, 8, 8), np.uint8)
    full = buffer.extend(
        buffer.init(combinations.EXAMPLE), combinations.rows_of(np.random.default_rng(0), 20) | {"obs": noise}
    )
    fbuf.save(tmp_path / "saved", buffer, full)
    with pytest.raises(fbuf.SchemaError, match="rows found no place in Deduplicated"):
        fbuf.load(tmp_path / "saved", tight)

"""What a store hands out to be saved: it stays what it was, its marks tell the truth, and it is never all in memory.

Every kind of column is gone through the same calls. What a snapshot gives after them must be what it gave before; a block with
the mark that it had in an earlier snapshot must have its bytes; and what is loaded from it, block by block, must be the store.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fbuf._host import arena, filearena, repack, rowends, source, spans
from fbuf._host.arrays import StoreCorrupted
from fbuf._host.codec import Zstd
from fbuf._host.records import Records
from fbuf._host.shelf import Leaf
from fbuf._host.source import Identity, Lazy, block_rows, pieces, steps
from fbuf._host.store import PATCH, Column, Store
from fbuf._host.tracked import Tracked
from fbuf._host.values import MISSING
from tests.support import disk

SHAPE = (6, 8, 12)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything in many blocks, segments and lots."""
    for module, name, value in (
        (source, "BLOCK_BYTES", 2048),
        (arena, "_SMALL", 2048),
        (arena, "_LARGE", 4096),
        (arena, "_PIECE", 4096),
        (arena, "_SLAB", 8192),
        (filearena, "_SMALL", 16_384),
        (filearena, "_LEAST_PIECE", 4096),
        (spans, "_AT_ONCE", 4096),
        (rowends, "_AT_ONCE", 1),
        (repack, "LOT_BYTES", 1 << 16),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(repack, "start", lambda store: threading.current_thread())  # when it is asked for


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of column."""

    name: str
    codec: Any
    shape: tuple[int, ...] = (24, 24)
    lanes: int = 2
    stacks: bool = False
    streams: bool = True
    files: bool = False
    length: int = 60

    def columns(self) -> tuple[Column, ...]:
        return (Column("c", self.shape, np.dtype(np.uint8), self.codec, self.stacks),)

    @property
    def sizes(self) -> dict[str, Any]:
        return {"lanes": self.lanes, "length": self.length, "slack": 9}

    def make(self, path: Path, arrays: Any = None) -> Store:
        if self.files:
            return disk.make(path, self.columns(), **self.sizes, arrays=arrays)
        settings = self.sizes | {"streams": self.streams}
        return (
            Store(self.columns(), **settings)
            if arrays is None
            else Store.from_arrays(self.columns(), arrays, **settings)
        )


CASES = [
    Case("ring", None),
    Case("zstd", Zstd(chunk=4)),
    Case("zstd-one-lane", Zstd(chunk=4, dictionary=4), lanes=1),
    Case("own", disk.Deflate()),
    Case("stacks", Zstd(chunk=4), (4, 16, 16), stacks=True),
    Case("no-stacks", Zstd(chunk=4), (4, 16, 16), stacks=True, lanes=1),
    Case("places", Zstd(), streams=False),
    Case("places-ring", None, streams=False),
    Case("file-ring", None, files=True),
    Case("file-zstd", Zstd(chunk=4), files=True),
    Case("file-own", disk.Deflate(), files=True),
]
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
_OFTEN = ("ring", "zstd", "stacks", "places", "file-ring")
SOME = pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c.name in _OFTEN else pytest.mark.slow) for c in CASES],
    ids=[case.name for case in CASES],
)
"""All, of which a few are enough by default."""


class Life:
    """A store that lives: rows come, are masked, replaced, changed, compressed again."""

    def __init__(self, case: Case, path: Path, seed: int) -> None:
        self.case, self.rng = case, np.random.default_rng(seed)
        self.store = case.make(path)
        self.game = self._game()
        self.tickets: list[int] = []
        self.rows: dict[int, bytes] = {}  # by ticket

    def _game(self) -> Iterator[np.ndarray]:
        """Rows of one lane after another, [*shape]: pictures in which little changes, or stacks of them."""
        rng, lanes, shape = self.rng, self.case.lanes, self.case.shape
        frame = shape[-2:]
        pictures = [np.kron(rng.integers(0, 9, (4, 4)), np.ones((frame[0] // 4, frame[1] // 4))) for _ in range(lanes)]
        stacks = [np.repeat(p[None], 4, 0) for p in pictures]
        for step in itertools.count():
            for lane in range(lanes):
                picture = pictures[lane]
                picture[tuple(rng.integers(0, frame))] = rng.integers(256)
                if len(shape) == 2:
                    yield picture.astype(np.uint8)
                    continue
                stacks[lane] = np.concatenate([stacks[lane][1:], picture[None]])
                noise = self.case.name == "no-stacks" and np.roll(stacks[lane], step, axis=0)
                yield (stacks[lane] if noise is False else noise).astype(np.uint8)

    def write(self, number: int, share: float) -> None:
        rows = np.stack(list(itertools.islice(self.game, number * self.case.lanes)))
        rows = rows.reshape(number, self.case.lanes, *self.case.shape)
        keep = None if share == 1 else self.rng.random((number, self.case.lanes)) < share
        slots = None
        if not self.case.streams:
            every = self.case.lanes * self.case.length
            number = min(number, every // self.case.lanes)
            rows, keep = rows[:number], None if keep is None else keep[:number]
            slots = self.rng.permutation(every)[: number * self.case.lanes].astype(np.int32).reshape(number, -1)
        got = self.store.write([rows], keep, slots)
        for place in np.argwhere(got).tolist():
            self.rows[int(got[tuple(place)])] = rows[tuple(place)].tobytes()
        self.tickets += got[got > 0].tolist()

    def patch(self) -> None:
        if self.tickets:
            old = self.rng.choice(np.array(self.tickets[-40:], np.uint64), 2)
            rows = np.stack(list(itertools.islice(self.game, 2)))
            new = self.store.patch(old, np.ones(2, bool), {0: rows})
            self.rows |= {
                int(t): row.tobytes() for t, row in zip(new, rows, strict=True) if t >= PATCH and t not in old
            }
            self.tickets += [int(t) for t in new if t >= PATCH]

    def step(self, call: str) -> None:
        if call == "patch":
            self.patch()
        elif call == "repack":
            self.store.repack()
        elif call == "wrap":
            self.write(self.case.length + 10, 1)
        else:
            self.write(int(self.rng.choice([1, 3, 17])), 1 if call == "write" else 0.5)


def whole(arrays: dict[str, Any]) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def blocks_of(array: Any) -> dict[Any, tuple[str | None, bytes]]:
    """The blocks of a source by key or place: marks and bytes."""
    if not isinstance(array, Lazy):
        return {}
    if array.cuts is not None:
        cuts, keys = array.cuts, array.keys
        assert keys is not None and len(set(keys)) == len(keys) == len(cuts) - 1 and cuts[-1] == len(array)
    else:
        assert array.block is not None and array.block & array.block - 1 == 0
        cuts = [*range(0, len(array), array.block), len(array)] if len(array) else [0]
        keys = range(len(cuts) - 1)
    assert array.marks is not None and len(array.marks) == len(cuts) - 1
    spans_of = zip(cuts[:-1], cuts[1:], strict=True)
    return {k: (m, array[a:b].tobytes()) for k, m, (a, b) in zip(keys, array.marks, spans_of, strict=True)}


def check_marks(before: dict[str, Any], after: dict[str, Any]) -> tuple[int, int]:
    """Equal marks mean equal bytes. How many marks are equal, and how many blocks there are."""
    alike = number = 0
    for name, array in after.items():
        old = blocks_of(before[name]) if name in before else {}
        for key, (mark, data) in blocks_of(array).items():
            number += 1
            if key in old and mark is not None and old[key][0] == mark:
                assert old[key][1] == data, f"{name} {key}"
                alike += 1
    return alike, number


CALLS = ["write", "write", "masked", "patch", "repack", "wrap"]


@EVERY
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    calls=st.lists(st.sampled_from(CALLS), max_size=6),
    more=st.lists(st.sampled_from(CALLS), max_size=4),
    seed=st.integers(0, 99),
)
def test_marks_tell_the_truth_and_snapshots_stay(
    case: Case, calls: list[str], more: list[str], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    life = Life(case, tmp_path_factory.mktemp("store") / "a", seed)
    for call in ["write", "wrap", *calls]:
        life.step(call)
    before, same = life.store.to_arrays(), life.store.to_arrays()
    first = whole(before)
    alike, number = check_marks(before, same)
    assert alike == number > 0  # nothing was written in between
    for call in more:
        life.step(call)
    after = life.store.to_arrays()
    check_marks(before, after)
    assert whole(before) == whole(same) == first
    life.store.close()
    assert whole(before) == first


@EVERY
def test_what_is_loaded_is_the_store_and_its_next_save_the_same(case: Case, tmp_path: Path) -> None:
    life = Life(case, tmp_path / "a", 3)
    for call in ["write", "wrap", "patch", "repack", "wrap", "masked", "patch", "write"]:
        life.step(call)
    arrays = life.store.to_arrays()
    loaded = case.make(tmp_path / "b", arrays)  # block by block
    plain = case.make(tmp_path / "c", {n: np.array(a) for n, a in arrays.items()})
    tickets = np.array(life.tickets, np.uint64)
    rows, ok = disk.fetch(life.store, tickets)
    assert ok.any() and not ok.all()
    for other in (loaded, plain):
        again, there = disk.fetch(other, tickets)
        assert np.array_equal(there, ok) and np.array_equal(again, rows)
    twice = loaded.to_arrays()
    assert check_marks(arrays, twice)[0] == 0  # no mark is another store's
    if not case.files:  # but the bytes are: what is saved of it to the same path is nothing
        assert whole(twice) == whole(arrays)
        assert all(getattr(twice[n], "keys", None) == getattr(a, "keys", None) for n, a in arrays.items())
    more = np.stack(list(itertools.islice(life.game, 5 * case.lanes))).reshape(5, case.lanes, *case.shape)
    slots = None if case.streams else np.arange(5 * case.lanes, dtype=np.int32).reshape(5, -1)
    new = loaded.write([more], None, slots)
    assert np.array_equal(new, life.store.write([more], None, slots))
    assert np.array_equal(disk.fetch(loaded, new)[0], more)


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.name in ("ring", "zstd", "own", "file-zstd", "file-own", "file-ring")],
    ids=lambda c: c.name,
)
def test_files_load_into_memory_and_back(case: Case, tmp_path: Path) -> None:
    life = Life(case, tmp_path / "a", 5)
    for call in ["write", "wrap", "masked", "patch", "wrap", "write"]:
        life.step(call)
    other = dataclasses.replace(case, files=not case.files)
    tickets = np.array(life.tickets, np.uint64)
    rows, ok = disk.fetch(life.store, tickets)
    there = other.make(tmp_path / "b", life.store.to_arrays())
    back = case.make(tmp_path / "c", there.to_arrays())
    for store in (there, back):
        again, known = disk.fetch(store, tickets)
        assert np.array_equal(known, ok) and np.array_equal(again, rows)
    on_disk = there if other.files else back
    count = on_disk._count.copy()
    on_disk.close()
    resumed = disk.make(tmp_path / ("b" if other.files else "c"), case.columns(), **case.sizes, resume=True)
    assert np.array_equal(resumed._count, count)
    streamed = tickets[tickets < PATCH]
    assert np.array_equal(disk.fetch(resumed, streamed)[0], disk.fetch(life.store, streamed)[0])


@SOME
def test_little_of_what_was_saved_changes(case: Case, tmp_path: Path) -> None:
    """Of a store that goes on by a few rows most marks stay."""
    life = Life(dataclasses.replace(case, length=500), tmp_path / "a", 7)
    for _ in range(3):
        life.write(200, 1)
    before = life.store.to_arrays()
    life.write(5, 1)
    after = life.store.to_arrays()
    large = [n for n, a in after.items() if len(blocks_of(a)) > 3]
    alike, number = check_marks(before, {n: after[n] for n in large})
    assert number > 10 and alike >= 0.8 * number, (alike, number)


# --------------------------------------------------------------------------------------------------------- threads


@SOME
def test_a_snapshot_is_read_while_others_write(case: Case, tmp_path: Path) -> None:
    """Writes, changes and compression go on in one thread, reads in another; a third reads snapshots, slowly."""
    life = Life(case, tmp_path / "a", 11)
    for call in ("write", "wrap", "patch"):
        life.step(call)
    stop, errors = threading.Event(), list[BaseException]()

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                while not stop.is_set():
                    work()
            except BaseException as error:
                errors.append(error)
                stop.set()

        return run

    def writes() -> None:
        life.step(str(life.rng.choice(CALLS)))

    def reads() -> None:
        disk.fetch(life.store, np.array(life.tickets[-50:], np.uint64))

    threads = [threading.Thread(target=guarded(work)) for work in (writes, reads)]
    for thread in threads:
        thread.start()
    found_then = []
    try:
        for turn in range(4):
            arrays = life.store.to_arrays()
            plain = {}
            for name, array in arrays.items():  # as a saver does, block by block
                found = [np.array(rows) for _, rows in steps(array)]
                plain[name] = np.concatenate(found) if found else np.array(array)
                time.sleep(0.002)
            assert whole(arrays) == whole(plain)
            found_then.append(dataclasses.replace(case, files=False).make(tmp_path / str(turn), plain))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors, errors
    every = np.array(list(life.rows), np.uint64)
    for loaded in found_then:
        rows, there = disk.fetch(loaded, every)
        assert np.count_nonzero(there & (every < PATCH)) == loaded.stats()["rows_live"] > 0
        for at in np.flatnonzero(there).tolist():
            assert rows[at].tobytes() == life.rows[int(every[at])]


def test_a_snapshot_of_rows_that_are_written_over_keeps_them_and_no_more() -> None:
    table = np.zeros((64, 1024), np.uint8)
    tracked = Tracked(64, 1024)
    assert tracked.block == 2

    def take() -> Lazy:
        return tracked.snapshot((60, 1024), np.uint8, lambda a, b: table[a:b].copy())

    first = take()
    tracemalloc.start()
    for row in range(0, 8):
        tracked.touch(row, row + 1)
        table[row] = 1
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 8 * 1024 <= kept < 12 * 1024
    assert not first[0:60].any() and not np.asarray(first).any()
    second = take()
    assert [a == b for a, b in zip(first.marks or (), second.marks or (), strict=True)] == [False] * 4 + [True] * 26
    tracked.touch_at(np.array([5, 63, 59]))
    table[[5, 63, 59]] = 2
    assert second[5:6].all() and not second[58:60].any() and not first[4:6].any()
    del first, second
    gc.collect()
    tracked.touch(0, 64)
    assert tracked._snapshots == []


@pytest.mark.parametrize("error", [MemoryError(), OSError("broken"), StoreCorrupted("damaged")], ids=repr)
def test_what_cannot_be_kept_is_the_savers_to_hear_of(error: Exception) -> None:
    table = np.zeros((8, 1024), np.uint8)
    tracked, full = Tracked(8, 1024), False

    def read(start: int, stop: int) -> np.ndarray:
        if full:
            raise error
        return table[start:stop].copy()

    snapshot = tracked.snapshot((8, 1024), np.uint8, read)
    full = True
    tracked.touch(0, 1)
    full = False
    with pytest.raises(type(error), match="save again|broken|damaged"):
        snapshot[4:5]


def test_marks_of_a_fork_are_others() -> None:
    names = Identity(), Identity()
    before = [str(n) for n in names]
    assert len({*before}) == 2 and before == [str(n) for n in names]
    own = Identity._process
    try:
        Identity.renew()
        assert not {*before} & {str(n) for n in names}
    finally:
        Identity._process = own
    assert before == [str(n) for n in names]


# ------------------------------------------------------------------------------------------------------------ memory


def peak(work: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that numpy and Python held at most beside what they held before, and the result."""
    gc.collect()
    tracemalloc.start()
    try:
        result = work()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("files", [False, True], ids=["memory", "files"])
@pytest.mark.parametrize("codec", [None, disk.Deflate(chunk=8)], ids=["ring", "chunks"])
def test_a_save_and_a_load_hold_little(
    codec: Any, files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # real sizes
    monkeypatch.setattr(repack, "start", lambda store: threading.current_thread())
    columns = (Column("c", (64, 64), np.dtype(np.uint8), codec),)
    sizes = {"lanes": 1, "length": 6000, "slack": 0}
    rng = np.random.default_rng(0)
    store = disk.make(tmp_path / "a", columns, **sizes) if files else Store(columns, **sizes)
    noise = rng.integers(0, 256, (64, 64), np.uint8)
    for _ in range(24):
        rows = np.repeat(noise[None, None], 250, 0)
        rows[:, 0, :24] = rng.integers(0, 64, (250, 24, 64))
        store.write([rows], None)

    kept = tmp_path / "kept"
    kept.mkdir()

    def save() -> int:
        total = 0
        for name, array in store.to_arrays().items():
            with open(kept / name.replace("/", "_"), "wb") as file:
                cuts = getattr(array, "cuts", None)
                spans_of = zip(cuts[:-1], cuts[1:], strict=True) if cuts else None
                for rows in (array[a:b] for a, b in spans_of) if spans_of else (r for _, r in steps(array)):
                    total += file.write(np.ascontiguousarray(rows).tobytes())
        return total

    held, total = peak(save)
    assert total > 4_000_000
    assert held < 0.1 * total + (2 << 20), (held, total)

    def saved(name: str, like: Any) -> Any:
        path, item = kept / name.replace("/", "_"), int(np.prod(like.shape[1:])) * like.dtype.itemsize

        def read(start: int, stop: int) -> np.ndarray:
            with open(path, "rb") as file:
                file.seek(start * item)
                return np.frombuffer(file.read((stop - start) * item), like.dtype).reshape(
                    stop - start, *like.shape[1:]
                )

        return Lazy(like.shape, like.dtype, read)

    arrays = {name: saved(name, array) for name, array in store.to_arrays().items()}
    before = store.nbytes
    last = store.read([(0, np.array([6000], np.uint64), out := np.empty((1, 64, 64), np.uint8))])
    assert last.all() and (out[0, 24:] == noise[24:]).all()
    store.close()

    def load() -> Store:
        if files:
            return disk.make(tmp_path / "b", columns, **sizes, arrays=arrays)
        return Store.from_arrays(columns, arrays, **sizes)

    held, loaded = peak(load)
    assert held - (0 if files else loaded.nbytes) < 0.1 * total + (9 << 19), (held, loaded.nbytes, total)
    assert loaded.nbytes < 1.1 * before + (1 << 20)
    again = np.empty_like(out)
    loaded.read([(0, np.array([6000], np.uint64), again)])
    assert np.array_equal(again, out)


# ---------------------------------------------------------------------------------------------------------- sources


@given(sizes=st.lists(st.integers(1, 9), max_size=6), data=st.data())
def test_pieces_are_one_after_another(sizes: list[int], data: st.DataObject) -> None:
    parts = [np.arange(n, dtype=np.uint8) + 16 * i for i, n in enumerate(sizes)]
    lazy = pieces([(str(i), None, len(p), lambda p=p: p) for i, p in enumerate(parts)])
    joined = np.concatenate([np.zeros(0, np.uint8), *parts])
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, len(joined))] * 2)))
    assert np.array_equal(lazy[a:b], joined[a:b]) and np.array_equal(np.asarray(lazy), joined)
    assert lazy.shape == (len(joined),) and len(lazy) == lazy.size == lazy.nbytes and lazy.ndim == 1
    owned = np.array(lazy)
    owned[:] = 255
    assert np.array_equal(np.asarray(lazy), joined)


def test_a_source_says_what_it_is_and_what_it_cannot_do() -> None:
    lazy = Lazy((3, 2), np.int32, lambda a, b: np.arange(6, dtype=np.int32).reshape(3, 2)[a:b])
    assert repr(lazy) == "Lazy(int32[3, 2])" and len(lazy) == 3
    assert np.array_equal(np.asarray(lazy, np.float64), [[0, 1], [2, 3], [4, 5]]) and lazy[2:9].shape == (1, 2)
    assert lazy[2:1].shape == (0, 2)
    with pytest.raises(ValueError, match="step is 2"):
        lazy[::2]
    with pytest.raises(ValueError, match="copy is False"):
        lazy.__array__(copy=False)


@given(rows=st.integers(0, 1 << 40), nbytes=st.integers(0, 1 << 30))
def test_blocks_are_neither_small_nor_many(rows: int, nbytes: int) -> None:
    block = block_rows(rows, nbytes)
    assert block & block - 1 == 0 and -(-rows // block) <= 4096
    assert block == 1 or block * nbytes <= source.BLOCK_BYTES or rows / (block // 2) > 4096


# --------------------------------------------------------------------------------------------------------- records


LEAVES = (Leaf("a", "array", "<f4", (9,)), Leaf("b", "text"))


def records(count: int) -> tuple[Records, Callable[[int], None], list[int]]:
    store = Records(LEAVES, lanes=2, length=60, slack=9)
    rng, tickets = np.random.default_rng(0), list[int]()

    def write(number: int) -> None:
        values = [
            [rng.random(int(rng.integers(1, 10))).astype(np.float32) for _ in range(2 * number)],
            [MISSING if i % 5 == 0 else "x" * int(rng.integers(0, 90)) for i in range(2 * number)],
        ]
        tickets.extend(store.put(values, number, None).reshape(-1).tolist())

    write(count)
    return store, write, tickets


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=st.integers(1, 80), more=st.lists(st.sampled_from([1, 4, 40]), max_size=4))
def test_records_stay_and_load_too(first: int, more: list[int]) -> None:
    store, write, tickets = records(first)
    before = store.to_arrays()
    now = whole(before)
    for number in more:
        write(number)
    after = store.to_arrays()
    check_marks(before, after)
    assert whole(before) == now
    loaded = Records.from_arrays(after, lanes=2, length=60, slack=9)
    every = np.array(tickets, np.uint64)
    for leaf in range(2):
        (own, ok), (other, there) = store.values(leaf, every), loaded.values(leaf, every)
        assert np.array_equal(ok, there)
        assert all(a is b or np.array_equal(a, b) for a, b in zip(own, other, strict=True))
    assert whole(loaded.to_arrays()) == whole(after)

"""The host store where a row replaces that in any slot, against plain Python: what is read is that row, or zeros and False."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._host import arena
from fbuf._host.arrays import StoreCorrupted
from fbuf._host.bits import BitPack
from fbuf._host.chunks import Chunks
from fbuf._host.codec import Codec, Zstd
from fbuf._host.places import Places
from fbuf._host.ring import Ring
from fbuf._host.store import PATCH, Column, Store
from tests.support.store import DTYPES, Deflate, Plain, fetch, frames, same

CODECS: list[Codec | None] = [None, Zstd(), Zstd(dictionary=0), Deflate(1)]
KINDS = pytest.mark.parametrize("codec", [None, Zstd(), Deflate(1)], ids=["raw", "zstd", "own"])


def make(*codecs: Codec | None, shape=(5,), dtype="uint8", lanes=1, length=16, slack=4, first_seq=0) -> Store:
    columns = tuple(Column(f"c{i}", shape, np.dtype(dtype), c) for i, c in enumerate(codecs))
    return Store(columns, lanes=lanes, length=length, slack=slack, first_seq=first_seq, streams=False)


def reload(store: Store) -> Store:
    arrays = {n: np.array(a) for n, a in store.to_arrays().items()}
    assert all(a.dtype.kind in "iu" for a in arrays.values())
    fixed = {"lanes": store.lanes, "length": store.length, "slack": store.slack}
    return Store.from_arrays(store.columns, arrays, **fixed, streams=False)


class Model:
    """Every row ever written, by ticket; a row replaced can be read until `slack` others (a lane) were replaced after it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.spare = store.lanes * (store.length + store.slack)  # places nobody had
        self.newest: dict[int, int] = {}  # ticket by slot
        self.replaced: deque[int] = deque()
        self.rows: dict[int, list[bytes]] = {}
        self.alive: set[int] = set()
        self.origin: dict[int, int] = {}  # of patches

    def write(self, rows: list[np.ndarray], keep: np.ndarray | None, slots: np.ndarray) -> np.ndarray:
        tickets = self.store.write(rows, keep, slots)
        assert tickets.dtype == np.uint64 and tickets.shape == rows[0].shape[:2]
        capacity, taken = self.store.lanes * self.store.length, []
        for n, e in np.ndindex(*tickets.shape):
            ticket, slot = int(tickets[n, e]), int(slots[n, e])
            assert (ticket != 0) == ((keep is None or bool(keep[n, e])) and 0 <= slot < capacity)
            if ticket:
                assert ticket not in self.rows and ticket < PATCH
                self.rows[ticket] = [r[n, e].tobytes() for r in rows]
                if slot in self.newest:
                    self.replaced.append(self.newest[slot])
                self.newest[slot] = ticket
                taken.append(ticket)
        for _ in taken:
            if self.spare:
                self.spare -= 1
            else:
                self.alive.remove(self.replaced.popleft())
        self.alive.update(taken)
        return tickets

    def patch(self, tickets: np.ndarray, keep: np.ndarray, fields: dict[int, np.ndarray]) -> None:
        there = self.live()
        new = self.store.patch(tickets, keep, fields)
        for i, (old, ticket) in enumerate(zip(tickets.tolist(), new.tolist(), strict=True)):
            if not keep[i] or old not in there:
                assert ticket == old
                continue
            assert ticket >= PATCH and ticket not in self.rows
            self.rows[ticket] = [fields[c][i].tobytes() if c in fields else v for c, v in enumerate(self.rows[old])]
            self.origin[ticket] = self.origin.get(old, old)

    def live(self) -> set[int]:
        return self.alive | {t for t, o in self.origin.items() if o in self.alive}

    def check(self, rng: np.random.Generator) -> None:
        tickets = rng.permutation(np.array([0, 0, 1, 2**62, PATCH | 2**40, *self.rows], np.uint64))
        split = len(tickets) // 2
        there, requests = self.live(), []
        for c, column in enumerate(self.store.columns):
            for part in (tickets[:split], tickets[split:]):
                requests.append((c, part, np.full((len(part), *column.shape), 1).astype(column.dtype)))
        ok = self.store.read(requests)
        at = 0
        for c, part, out in requests:
            for ticket, row in zip(part.tolist(), out, strict=True):
                assert ok[at] == (ticket in there or ticket == 0), ticket
                assert row.tobytes() == (self.rows[ticket][c] if ticket in there else bytes(row.nbytes)), ticket
                at += 1
        stats = self.store.stats()
        assert stats["rows_live"] == len(self.alive) and stats["rows_accepted"] == len(self.rows) - len(self.origin)
        assert stats["patches"] == sum(o in self.alive for o in self.origin.values())


@given(data=st.data())
def test_any_sequence_of_calls_agrees_with_a_dict(data: st.DataObject) -> None:
    lanes = data.draw(st.integers(1, 3), "lanes")
    length, slack = data.draw(st.integers(1, 20), "length"), data.draw(st.integers(0, 9), "slack")
    shape = data.draw(st.sampled_from([(), (7,), (2, 3), (0,)]), "shape")
    chosen = data.draw(st.lists(st.sampled_from(CODECS), min_size=1, max_size=3), "codecs")
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES), "dtype"))
    first = data.draw(st.sampled_from([0, 2**32 - 2]), "first")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    store = make(*chosen, shape=shape, dtype=dtype, lanes=lanes, length=length, slack=slack, first_seq=first)
    model, capacity = Model(store), lanes * length

    def values(*lead: int) -> np.ndarray:
        return (rng.integers(0, 2, (*lead, *shape)) * rng.integers(1, 99)).astype(dtype)

    for _ in range(data.draw(st.integers(1, 14), "calls")):
        call = data.draw(st.sampled_from(["write", "write", "masked", "patch", "reload"]))
        if call in ("write", "masked"):
            n = int(rng.integers(0, length + 1))
            slots = rng.permutation(capacity)[: n * lanes].reshape(n, lanes).astype(np.int32)
            keep = None
            if call == "masked":  # what is not kept may name any slot
                keep = rng.random((n, lanes)) < rng.choice([0.0, 0.3, 0.9])
                slots = np.where(keep, slots, rng.integers(-9, capacity + 9, slots.shape)).astype(np.int32)
                away = rng.random(slots.shape) < 0.2
                slots = np.where(away, rng.choice([-1, capacity, 2**31 - 1], slots.shape), slots).astype(np.int32)
            model.write([values(n, lanes) for _ in chosen], keep, slots)
        elif call == "patch" and slack == 9 and len(model.rows) > 2 and len(model.origin) < 9:
            known = np.array([0, *model.rows], np.uint64)
            tickets = rng.choice(known[known < PATCH], 3, replace=False).astype(np.uint64)
            model.patch(tickets, rng.random(3) < 0.8, {int(rng.integers(len(chosen))): values(3)})
        elif call == "reload":
            model.store = reload(model.store)
        model.check(rng)


@KINDS
def test_a_row_replaced_stays_until_slack_more_are(codec: Codec | None) -> None:
    store = make(codec, length=3, slack=2)

    def put(slot: int, value: int) -> int:
        return int(store.write([np.full((1, 1, 5), value, np.uint8)], None, np.array([[slot]], np.int32))[0, 0])

    tickets = [put(slot, 10 + slot) for slot in range(3)]
    replaced = tickets[1]
    tickets[1] = put(1, 20)
    for value in (21, 22):
        assert (fetch(store, [replaced])[0] == 11).all()
        tickets[0] = put(0, value)
    got, ok = fetch(store, [replaced])
    assert not ok.any() and not got.any()
    assert [int(r[0]) for r in fetch(store, tickets)[0]] == [22, 20, 12]


@KINDS
def test_futures_of_one_state_never_read_each_other_and_never_fill_the_store(codec: Codec | None) -> None:
    """Each of 200 futures replaces the same rows of the same state, and is dropped."""
    store, rng = make(codec, length=8, slack=3), np.random.default_rng(0)
    model = Model(store)
    model.write([rng.integers(0, 9, (8, 1, 5), np.uint8)], None, np.arange(8, dtype=np.int32)[:, None])
    for _ in range(200):
        slots = rng.choice(3, 2, replace=False).astype(np.int32)[:, None]
        model.write([rng.integers(0, 9, (2, 1, 5), np.uint8)], None, slots)
        model.check(rng)
    old = [t for t in model.rows if t in model.alive][:5]
    assert fetch(store, old)[1].all()  # slots 3 to 7, which no future touched


@given(data=st.data())
def test_whatever_futures_are_carried_on_each_reads_its_own_rows(data: st.DataObject) -> None:
    """States as a buffer keeps them: tickets by slot, and which write made them. Any of them may be written to."""
    length, slack = data.draw(st.integers(1, 12), "length"), data.draw(st.integers(0, 12), "slack")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    store = make(data.draw(st.sampled_from(CODECS), "codec"), length=length, slack=slack)
    states, rows = [(0, np.zeros(length, np.uint64))], {0: 0}
    readable = 0

    def reads(table: np.ndarray) -> bool:
        """Never other data; whether all rows were there."""
        got, ok = fetch(store, table)
        expected = np.where(ok, [rows[t] for t in table.tolist()], 0)
        assert (got == expected[:, None]).all()
        return bool(ok.all())

    for _ in range(data.draw(st.integers(1, 40), "writes")):
        last, table = states[int(rng.choice([len(states) - 1, rng.integers(len(states))]))]
        whole = reads(table)
        slots = rng.permutation(length)[: rng.integers(0, length + 1)]
        values = rng.integers(1, 200, len(slots)).astype(np.uint8)
        tickets = store.write(
            [np.repeat(values[:, None, None], 5, 2)], None, slots[:, None].astype(np.int32), (last, table)
        )[:, 0]
        rows |= dict(zip(tickets.tolist(), values.tolist(), strict=True))
        assert len(rows) == 1 + store.stats()["rows_accepted"]  # no ticket twice
        table = table.copy()
        table[slots] = tickets
        states.append((int(tickets[0]) if len(tickets) else last, table))
        if whole:
            readable += 1
            assert reads(table), "a state of which every row was there has lost one by its own write"
        if rng.random() < 0.1:
            store = reload(store)
        for _, other in states[-5:]:
            reads(other)
    assert readable


def test_a_future_that_is_dropped_costs_nothing() -> None:
    store = make(None, length=8, slack=4)
    table, last = np.zeros(8, np.uint64), 0

    def write(slots: list[int], value: int) -> tuple[int, np.ndarray]:
        rows = np.full((len(slots), 1, 5), value, np.uint8)
        tickets = store.write([rows], None, np.array(slots, np.int32)[:, None], (last, table))[:, 0]
        new = table.copy()
        new[slots] = tickets
        return int(tickets[0]), new

    last, table = write(list(range(8)), 1)
    for i in range(100):
        write([0, 1, 2], 99)  # dropped
        last, table = write([7], i)
        got, ok = fetch(store, table)
        assert ok.all() and (got[:7] == 1).all() and (got[7] == i).all()


@pytest.mark.parametrize("first", [0, 2**40])
def test_tickets_are_never_alike(first: int) -> None:
    places, rng, seen, number = Places(7, 5, first), np.random.default_rng(0), set(), 0
    for _ in range(5000):
        move = places.plan(rng.permutation(7)[: rng.integers(1, 8)])
        places.commit(move)
        seen.update(move.ticket.tolist())
        number += len(move.ticket)
    assert len(seen) == number == places.accepted and max(seen) < PATCH
    assert min(seen) > first * 12


def test_every_place_has_one_owner_whatever_is_written() -> None:
    places, rng = Places(9, 4), np.random.default_rng(0)
    for _ in range(2000):
        places.commit(places.plan(rng.permutation(9)[: rng.integers(0, 10)]))
        waiting = places._queue[(places._head + np.arange(places._waiting)) % places.size].tolist()
        held = [int(p) - 1 for p in places._of_slot if p]
        assert sorted(waiting + held) == list(range(places.touched))


# ---------------------------------------------------------------------------------------------- compression, memory


def churn(store: Store, rows: np.ndarray, times: int, step: int = 50) -> list[int]:
    """Replaces random slots; what the store takes from time to time, once every slot has been written."""
    capacity, rng, sizes = store.length, np.random.default_rng(0), []
    for i in range(0, capacity, step):
        slots = np.arange(i, min(i + step, capacity), dtype=np.int32)[:, None]
        store.write([rows[rng.integers(len(rows), size=slots.shape)]], None, slots)
    for i in range(0, times, step):
        slots = rng.permutation(capacity)[:step].astype(np.int32)[:, None]
        store.write([rows[rng.integers(len(rows), size=slots.shape)]], None, slots)
        if i % (step * 20) == 0:
            sizes.append(store.nbytes)
    return sizes


@pytest.mark.parametrize("codec", [Zstd(), Deflate(1)], ids=["zstd", "own"])
def test_random_replacement_takes_no_more_and_no_more(codec: Codec) -> None:
    store = make(codec, shape=(24, 24), length=2000, slack=50)
    sizes = churn(store, frames(3000), 12_000)
    part = store._parts[0]
    assert isinstance(part, Chunks) and part.arena.capacity < 1.6 * part.arena.live + 5 * 32 * 1024
    assert max(sizes[2:]) < 1.25 * min(sizes[2:])
    assert store.stats()["chunks"] == 2050
    assert store.nbytes < 2050 * 576 / 2 or not isinstance(codec, Zstd)  # the dictionary knows the background


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_hundred_thousand_replacements_take_no_memory() -> None:
    store, rows = make(Zstd(), shape=(40, 40), length=5000, slack=300), frames(6000, 40)
    churn(store, rows, 20_000)
    gc.collect()
    before, size = rss(), store.nbytes
    sizes = churn(store, rows, 100_000)
    gc.collect()
    assert rss() - before < 4 << 20
    assert max(sizes) < 1.3 * size and store.stats()["dictionaries"] <= 3


def test_a_dictionary_is_made_and_goes_with_its_last_row() -> None:
    store, rng = make(Zstd(), shape=(24, 24), length=1000, slack=0), np.random.default_rng(0)
    seen = []
    for seed in range(3):
        rows = frames(5000, seed=seed)
        for i in range(0, 5000, 100):
            slots = rng.permutation(1000)[:100].astype(np.int32)[:, None] if i or seed else None
            if slots is None or i < 1000 and seed == 0:
                slots = np.arange(i, i + 100, dtype=np.int32)[:, None]
            store.write([rows[i : i + 100, None]], None, slots)
        seen.append(store._parts[0].coder.current)
    every = np.arange(1000, dtype=np.int32)[:, None]
    tickets = store.write([rows[:1000, None]], None, every)
    assert same(fetch(store, tickets)[0], rows[:1000, None])
    assert len(set(map(id, seen))) == 3 and store.stats()["dictionaries"] == 1


def test_noise_becomes_raw_and_stays_where_it_was() -> None:
    store, rng = make(Zstd(), None, shape=(50, 50), length=60, slack=4), np.random.default_rng(0)
    model = Model(store)
    for i in range(30):
        slots = np.arange(i * 2, i * 2 + 2) if i < 20 else rng.permutation(60)[:9]
        rows = rng.integers(0, 256, (len(slots), 1, 50, 50)).astype(np.uint8)
        model.write([rows, rows], None, slots[:, None].astype(np.int32))
    assert isinstance(store._parts[0], Ring) and store.stats()["chunks"] == 0
    model.check(rng)
    model.store = store = reload(store)
    assert isinstance(store._parts[0], Ring)
    model.check(rng)


def test_empty_slots_and_slots_nobody_wrote_cost_little() -> None:
    store = make(Zstd(), None, shape=(84, 84), length=1_000_000, slack=10)
    store.write([np.zeros((1, 1, 84, 84), np.uint8)] * 2, None, np.array([[999_999]], np.int32))
    assert store.nbytes < 500_000


# ------------------------------------------------------------------------------------------ all or nothing, damage


class Moody(Plain):
    """A codec that fails when it is told to."""

    left = 1 << 30

    def encode(self, rows: np.ndarray) -> bytes:
        Moody.left -= 1
        if Moody.left < 0:
            raise OSError("full")
        return super().encode(rows)


@pytest.mark.parametrize("nth", range(5))
def test_a_codec_that_fails_at_any_row_leaves_the_store_as_it_was(nth: int) -> None:
    rng = np.random.default_rng(0)
    store = make(None, Zstd(), Moody(1), length=8, slack=2)
    model = Model(store)
    model.write([rng.integers(0, 9, (8, 1, 5), np.uint8)] * 3, None, rng.permutation(8).astype(np.int32)[:, None])
    before = store.to_arrays()
    slots = rng.permutation(8)[:5].astype(np.int32)[:, None]
    with mock.patch.object(Moody, "left", nth), pytest.raises(OSError, match="full"):
        store.write([rng.integers(0, 9, (5, 1, 5), np.uint8)] * 3, None, slots)
    after = store.to_arrays()
    assert all(same(before[n], after[n]) for n in before if n.startswith(("places", "count", "patch")))
    model.check(rng)
    model.write([rng.integers(0, 9, (5, 1, 5), np.uint8)] * 3, None, slots)
    model.check(rng)


@pytest.mark.parametrize("nth", range(4))
def test_running_out_of_memory_leaves_the_store_as_it_was(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store, rng = make(Zstd(), Zstd(), shape=(1000,), length=200, slack=4), np.random.default_rng(0)
    model = Model(store)

    def write() -> None:
        rows = [rng.integers(0, 2, (150, 1, 1000), np.uint8) for _ in range(2)]
        model.write(rows, None, rng.permutation(200)[:150].astype(np.int32)[:, None])

    write()
    live, real, allocated = [p.arena.live for p in store._parts], arena.Segment, []

    def scarce(size: int) -> Any:
        allocated.append(size)
        if len(allocated) > nth // 2:
            raise MemoryError
        return real(size)

    monkeypatch.setattr(arena, "Segment", scarce)
    rows = [rng.integers(0, 2, (200, 1, 1000), np.uint8) for _ in range(2)]
    with pytest.raises(MemoryError):
        store.write(rows, None, np.arange(200, dtype=np.int32)[:, None])
    monkeypatch.undo()
    assert [p.arena.live for p in store._parts] == live
    model.check(rng)
    write()
    model.check(rng)


@pytest.mark.parametrize("own", [Zstd(), Plain(1)], ids=["zstd", "plain"])
def test_every_flipped_byte_of_a_row_is_noticed(own: Codec) -> None:
    store, rows = make(own, shape=(24, 24), length=64, slack=4), frames(64)[:, None]
    tickets = store.write([rows], None, np.random.default_rng(0).permutation(64).astype(np.int32)[:, None])
    part = store._parts[0]
    segment, size = part.arena.segments[0], int(part.length[0, 0])
    for at in range(0, size, 1 if size < 300 else 13):
        segment.array[at] ^= 4
        with pytest.raises(StoreCorrupted, match="damaged"):
            fetch(store, tickets[:1])
        assert fetch(store, tickets[1:])[1].all()
        segment.array[at] ^= 4
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows)
    part.address[[1, 2]] = part.address[[2, 1]]
    with pytest.raises(StoreCorrupted, match="a chunk has checksum"):
        fetch(store, tickets[1])


@pytest.mark.parametrize("codec", [None, Zstd()], ids=["raw", "zstd"])
def test_a_thread_reads_while_one_replaces(codec: Codec | None) -> None:
    """Rows tell their own slot and how often it was written: readers see them or zeros, never a mixture."""
    store = make(codec, shape=(300,), dtype="uint64", length=40, slack=3)
    tickets = np.zeros(40, np.uint64)
    values: dict[int, int] = {0: 0}
    stop, failures, found = threading.Event(), [], [0]

    def read() -> None:
        rng = np.random.default_rng(1)
        try:
            while not stop.is_set():
                wanted = tickets[rng.integers(0, 40, 30)]
                got, ok = fetch(store, wanted)
                expected = [values[t] if o else 0 for t, o in zip(wanted.tolist(), ok.tolist(), strict=True)]
                assert (got == np.array(expected, np.uint64)[:, None]).all()
                found[0] += int((ok & (wanted > 0)).sum())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    rng = np.random.default_rng(0)
    for i in range(400):
        slots = rng.permutation(40)[:7]
        rows = np.repeat((slots + 1000 * i + 1).astype(np.uint64)[:, None, None], 300, 2)
        new = store.write([rows], None, slots.astype(np.int32)[:, None])[:, 0]
        values |= dict(zip(new.tolist(), rows[:, 0, 0].tolist(), strict=True))
        tickets[slots] = new
    stop.set()
    thread.join()
    assert not failures, failures[0]
    assert found[0] > 0


# ---------------------------------------------------------------------------------------------- checkpoints, messages


def test_a_loaded_store_goes_on_alike() -> None:
    store, rng = make(*CODECS, shape=(24, 24), lanes=2, length=300, slack=10), np.random.default_rng(0)
    rows = frames(4000).reshape(2000, 2, 24, 24)
    tickets = []
    for i in range(0, 2000, 100):
        slots = rng.permutation(600)[:200].astype(np.int32).reshape(100, 2)
        tickets.append(store.write([rows[i : i + 100]] * 4, None, slots))
    new = store.patch(tickets[-1][:9, 0], np.ones(9, bool), {0: rows[:9, 0]})
    loaded, every = reload(store), np.concatenate([np.concatenate(tickets).reshape(-1), new])
    for _ in range(3):
        for column in range(4):
            (a, ok_a), (b, ok_b) = fetch(store, every, column), fetch(loaded, every, column)
            assert same(a, b) and (ok_a == ok_b).all() and 0 < ok_a.sum() < ok_a.size
        slots = rng.permutation(600)[:200].astype(np.int32).reshape(100, 2)
        more = store.write([rows[:100]] * 4, None, slots)
        assert same(more, loaded.write([rows[:100]] * 4, None, slots))
        every = np.concatenate([every, more.reshape(-1)])
    own = {n: store.stats()[n] for n in ("rows_live", "rows_accepted", "chunks", "patches", "raw_bytes")}
    assert own == {n: loaded.stats()[n] for n in own}


def test_arrays_that_do_not_fit_are_refused() -> None:
    store, rng = make(None, Zstd(), length=8, slack=2), np.random.default_rng(0)
    for _ in range(5):
        slots = rng.permutation(8)[:5].astype(np.int32)[:, None]
        store.write([rng.integers(0, 9, (5, 1, 5), np.uint8)] * 2, None, slots)
    arrays, fits = store.to_arrays(), {"lanes": 1, "length": 8, "slack": 2}
    Store.from_arrays(store.columns, arrays, **fits, streams=False)
    with pytest.raises(ValueError, match="rows were saved in any order; expected streams"):
        Store.from_arrays(store.columns, arrays, **fits)
    stream = Store(store.columns, **fits)
    with pytest.raises(ValueError, match="rows were saved streams; expected in any order"):
        Store.from_arrays(store.columns, stream.to_arrays(), **fits, streams=False)
    for name in (n for n in arrays if n.startswith("places:")):
        for wrong in (None, arrays[name].astype(np.float32), arrays[name][:-1]):
            changed = {n: a for n, a in arrays.items() if n != name} | ({} if wrong is None else {name: wrong})
            with pytest.raises(ValueError, match="Store.from_arrays"):
                Store.from_arrays(store.columns, changed, **fits, streams=False)
    for name in ("places:slot", "places:retired", "places:ticket"):
        wrong = arrays[name].copy()
        wrong[0] = wrong[1]
        with pytest.raises(ValueError, match="Store.from_arrays: places:"):
            Store.from_arrays(store.columns, arrays | {name: wrong}, **fits, streams=False)
    with pytest.raises(ValueError, match="Store.from_arrays: count is"):
        Store.from_arrays(store.columns, arrays | {"count": np.array([3])}, **fits, streams=False)


def test_wrong_slots_are_named_and_change_nothing() -> None:
    store, rows = make(None, length=4), np.zeros((2, 1, 5), np.uint8)
    for slots, error, text in (
        (None, ValueError, "slots is None, but rows lie in no order"),
        (np.zeros((2, 1), np.int64), TypeError, "slots is int64; expected int32"),
        (np.zeros((3, 1), np.int32), ValueError, r"slots has shape \[3, 1\]; expected \[2, 1\]"),
        (
            np.full((2, 1), 3, np.int32),
            ValueError,
            "from 3 to 3, 1 of 2 different; expected different ones from 0 to 3",
        ),
    ):
        with pytest.raises(error, match=text):
            store.write([rows], None, slots)
    assert store.stats()["rows_accepted"] == 0


def test_codecs_for_several_rows_take_them_one_by_one_or_are_refused() -> None:
    store = make(Zstd(chunk=8), BitPack(chunk=8), Zstd(level=3, chunk=1))
    assert [c.codec.chunk for c in store.columns] == [1, 1, 1] and store.columns[2].codec == Zstd(
        level=3, chunk=1, repack=False
    )
    with pytest.raises(ValueError, match=r"codec of 'c0' has chunk 4, .* expected 1. Use Deflate\(chunk=1\)"):
        make(Deflate(4))


def test_a_write_that_fails_on_an_old_state_costs_the_newest_none_of_its_rows() -> None:
    store = Store((Column("x", (2,), np.dtype("float32"), Deflate(1)),), lanes=1, length=4, slack=4, streams=False)

    def write(values: list[int], slots: list[int], state: tuple[int, np.ndarray] | None) -> np.ndarray:
        rows = np.array(values, np.float32)[:, None, None].repeat(2, 2)
        return store.write([rows], None, np.array(slots, np.int32)[:, None], state)[:, 0]

    old = write([0, 1, 2, 3], [0, 1, 2, 3], None)
    new = write([10, 11, 12, 13], [0, 1, 2, 3], (int(old[0]), old))
    part = store._parts[0]
    encode = part.coder.encode  # type: ignore[attr-defined]

    def fails(rows: np.ndarray) -> bytes:
        raise MemoryError("no more")

    part.coder.encode = fails  # type: ignore[attr-defined]
    with pytest.raises(MemoryError):
        write([99], [0], (int(old[0]), old))
    part.coder.encode = encode  # type: ignore[attr-defined]
    last, table = int(new[0]), new.copy()
    for i in range(4):
        ticket = write([20 + i], [0], (last, table))
        last, table = int(ticket[0]), np.concatenate([ticket, table[1:]])
        out = np.empty((4, 2), np.float32)
        assert store.read([(0, table, out)]).all()
        assert out[:, 0].tolist() == [20 + i, 11, 12, 13]

"""Compare a store whose rows replace any slot with a plain-Python model."""

from collections import deque
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._host.codecs import BitPack, Zstd
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.columns.raw import RawColumn
from fbuf._host.store.store import Store
from tests.support import store as stores
from tests.support.refusals import raises
from tests.support.store import Deflate, Failing, fetch, frames, load, same
from tests.support.store_model import Drawn, Model
from tests.support.tables import by_tier

CODECS = [None, Zstd(), Zstd(dictionary=0), Deflate(1)]


def make(*codecs, **more):
    return stores.make(*codecs, **more, streams=False)


def reload(store):
    return load(store, streams=False)


class Scattered(Model):
    """A row replaced can be read until `slack` others (a lane) were replaced after it."""

    def __init__(self, store):
        super().__init__(store)
        self.spare = store.lanes * (store.length + store.slack)  # places without a row
        self.of_slot = {}  # newest ticket
        self.replaced = deque()
        self.alive = set()

    def write_at(self, rows, slots, keep=None):
        tickets = self.store.write(rows, keep, slots)
        inside = (slots >= 0) & (slots < self.store.lanes * self.store.length)
        taken = self.learn(tickets, rows, inside if keep is None else inside & keep)
        for at, ticket in taken:
            if int(slots[at]) in self.of_slot:
                self.replaced.append(self.of_slot[int(slots[at])])
            self.of_slot[int(slots[at])] = ticket
        for _ in taken:
            if self.spare:
                self.spare -= 1
            else:
                self.alive.remove(self.replaced.popleft())
        self.alive.update(ticket for _, ticket in taken)

    def newest(self):
        return self.alive

    def check(self, rng):
        super().check(rng)
        stats = self.store.stats()
        assert stats["rows_live"] == len(self.alive) and stats["rows_accepted"] == len(self.rows) - len(self.origin)
        assert stats["row_updates"] == sum(o in self.alive for o in self.origin.values())


@given(data=st.data())
def test_any_sequence_of_calls_agrees_with_a_dict(data):
    drawn = Drawn(data, CODECS)
    first = data.draw(st.sampled_from([0, 2**32 - 2]), "first")
    model = Scattered(Store(drawn.columns, **drawn.sizes, first_seq=first, streams=False))
    capacity, rng = drawn.lanes * drawn.length, drawn.rng
    for _ in range(data.draw(st.integers(1, 14), "calls")):
        call = data.draw(st.sampled_from(["write", "write", "masked", "patch", "reload"]))
        if call in ("write", "masked"):
            n = int(rng.integers(0, drawn.length + 1))
            slots = rng.permutation(capacity)[: n * drawn.lanes].reshape(n, drawn.lanes).astype(np.int32)
            keep = None
            if call == "masked":  # what is not kept may name any slot
                keep = rng.random(slots.shape) < rng.choice([0.0, 0.3, 0.9])
                slots = np.where(keep, slots, rng.integers(-9, capacity + 9, slots.shape)).astype(np.int32)
                away = rng.random(slots.shape) < 0.2
                slots = np.where(away, rng.choice([-1, capacity, 2**31 - 1], slots.shape), slots).astype(np.int32)
            model.write_at(drawn.rows(n), slots, keep)
        elif call == "patch" and len(model.origin) < 9:
            model.patch_some(drawn)
        elif call == "reload":
            model.store = reload(model.store)
        model.check(rng)


@given(data=st.data())
def test_each_future_reads_its_own_rows(data):
    """States as a buffer keeps them: tickets by slot, and which write made them. Any of them may be written to."""
    length, slack = data.draw(st.integers(1, 12), "length"), data.draw(st.integers(0, 12), "slack")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    store = make(data.draw(st.sampled_from(CODECS), "codec"), length=length, slack=slack)
    states, rows = [(0, np.zeros(length, np.uint64))], {0: 0}
    readable = 0

    def reads(table):
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


@pytest.mark.parametrize("codec", by_tier(Zstd(), more=[Deflate(1)], ids=lambda codec: type(codec).__name__))
def test_random_replacement_takes_constant_memory(codec):
    store = make(codec, shape=(24, 24), length=2000, slack=50)
    rows, rng, sizes = frames(3000), np.random.default_rng(0), []
    for at in range(-2000, 12_000, 50):  # the slots in their order, then any
        slots = (at + 2000 + np.arange(50) if at < 0 else rng.permutation(2000)[:50]).astype(np.int32)[:, None]
        store.write([rows[rng.integers(3000, size=slots.shape)]], None, slots)
        if at % 1000 == 0 and at >= 2000:
            sizes.append(store.nbytes)
    part = store._parts[0]
    assert isinstance(part, ChunkedColumn) and part.arena.capacity < 1.6 * part.arena.live + 5 * 32 * 1024
    assert max(sizes) < 1.25 * min(sizes)
    assert store.stats()["chunks"] == 2050
    assert store.nbytes < 2050 * 576 / 2 or not isinstance(codec, Zstd)  # the dictionary knows the background


def test_noise_becomes_raw_in_place():
    store, rng = make(Zstd(), None, shape=(50, 50), length=60, slack=4), np.random.default_rng(0)
    model = Scattered(store)
    for i in range(30):
        slots = np.arange(i * 2, i * 2 + 2) if i < 20 else rng.permutation(60)[:9]
        rows = rng.integers(0, 256, (len(slots), 1, 50, 50)).astype(np.uint8)
        model.write_at([rows, rows], slots[:, None].astype(np.int32))
    assert isinstance(store._parts[0], RawColumn) and store.stats()["chunks"] == 0
    model.check(rng)
    model.store = store = reload(store)
    assert isinstance(store._parts[0], RawColumn)
    model.check(rng)


@pytest.mark.parametrize("nth", range(5))
def test_a_failing_codec_leaves_the_slots_unchanged(nth):
    rng = np.random.default_rng(0)
    store = make(None, Zstd(), Failing(1), length=8, slack=2)
    model = Scattered(store)
    model.write_at([rng.integers(0, 9, (8, 1, 5), np.uint8)] * 3, rng.permutation(8).astype(np.int32)[:, None])
    before = store.to_arrays()
    slots = rng.permutation(8)[:5].astype(np.int32)[:, None]
    with mock.patch.object(Failing, "left", nth), pytest.raises(OSError, match="full"):
        store.write([rng.integers(0, 9, (5, 1, 5), np.uint8)] * 3, None, slots)
    after = store.to_arrays()
    assert all(same(before[n], after[n]) for n in before if n.startswith(("places", "count", "patch")))
    model.check(rng)
    model.write_at([rng.integers(0, 9, (5, 1, 5), np.uint8)] * 3, slots)
    model.check(rng)


def test_arrays_that_do_not_fit_are_refused():
    store, rng = make(None, Zstd(), length=8, slack=2), np.random.default_rng(0)
    for _ in range(5):
        slots = rng.permutation(8)[:5].astype(np.int32)[:, None]
        store.write([rng.integers(0, 9, (5, 1, 5), np.uint8)] * 2, None, slots)
    arrays, fits = store.to_arrays(), {"lanes": 1, "length": 8, "slack": 2}
    load(store, arrays, streams=False)
    raises(ValueError, "rows were saved in any order; expected", load, store, arrays)
    stream = Store(store.columns, **fits).to_arrays()
    cases = [
        (stream, "rows were saved streams; expected in any order"),
        (arrays | {"count": np.array([3])}, "count is"),
    ]
    for name in (n for n in arrays if n.startswith("places:")):
        cases.append(({n: a for n, a in arrays.items() if n != name}, ""))
        cases += [(arrays | {name: wrong}, "") for wrong in (arrays[name].astype(np.float32), arrays[name][:-1])]
    for name in ("places:slot", "places:retired", "places:ticket"):
        wrong = arrays[name].copy()
        wrong[0] = wrong[1]
        cases.append((arrays | {name: wrong}, "places"))
    for wrong, words in cases:
        raises(ValueError, f"Store.from_arrays: .*{words}", load, store, wrong, streams=False)


def test_equal_slots_are_refused():
    store, rows = make(None, length=4), np.zeros((2, 1, 5), np.uint8)
    words = "from 3 to 3, 1 of 2 different; expected different ones from 0 to 3"
    raises(ValueError, words, store.write, [rows], None, np.full((2, 1), 3, np.int32))
    assert store.stats()["rows_accepted"] == 0


def test_codecs_of_several_rows_encode_one_or_are_refused():
    store = make(Zstd(chunk=8), BitPack(chunk=8), Zstd(level=3, chunk=1))
    assert [(type(c.codec), c.codec.chunk) for c in store.columns] == [(Zstd, 1), (BitPack, 1), (Zstd, 1)]
    assert store.columns[2].codec.level == 3
    raises(ValueError, r"'c0' needs Deflate\(chunk=1\)", lambda: make(Deflate(4)))


def test_a_failed_write_on_an_old_state_keeps_the_newest_rows():
    store = make(Failing(1), length=4)

    def write(values, slots, state):
        rows = np.array(values, np.uint8)[:, None, None].repeat(5, 2)
        return store.write([rows], None, np.array(slots, np.int32)[:, None], state)[:, 0]

    old = write([0, 1, 2, 3], [0, 1, 2, 3], None)
    new = write([10, 11, 12, 13], [0, 1, 2, 3], (int(old[0]), old))
    with mock.patch.object(Failing, "left", 0), pytest.raises(OSError, match="full"):
        write([99], [0], (int(old[0]), old))
    last, table = int(new[0]), new
    for i in range(4):
        ticket = write([20 + i], [0], (last, table))
        last, table = int(ticket[0]), np.concatenate([ticket, table[1:]])
        got, ok = fetch(store, table)
        assert ok.all() and got[:, 0].tolist() == [20 + i, 11, 12, 13]

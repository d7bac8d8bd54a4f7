"""Compare a store whose rows replace any slot with a plain-Python model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._host.codecs.codec import Codec, Zstd
from fbuf._host.store.slot_map import SlotMap
from fbuf._host.store.store import UPDATE_BIT, Store
from tests.support.slot_map import CODECS, Scattered, make, reload
from tests.support.store import Deflate, fetch
from tests.support.store_model import Drawn

KINDS = pytest.mark.parametrize("codec", [None, Zstd(), Deflate(1)], ids=["raw", "zstd", "own"])


@given(data=st.data())
def test_any_sequence_of_calls_agrees_with_a_dict(data: st.DataObject) -> None:
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


@KINDS
def test_a_replaced_row_stays_for_slack_more(codec: Codec | None) -> None:
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
def test_futures_of_one_state_are_separate_and_bounded(codec: Codec | None) -> None:
    """Each of 200 futures replaces the same rows of the same state, and is dropped."""
    store, rng = make(codec, length=8, slack=3), np.random.default_rng(0)
    model = Scattered(store)
    model.write_at([rng.integers(0, 9, (8, 1, 5), np.uint8)], np.arange(8, dtype=np.int32)[:, None])
    for _ in range(200):
        slots = rng.choice(3, 2, replace=False).astype(np.int32)[:, None]
        model.write_at([rng.integers(0, 9, (2, 1, 5), np.uint8)], slots)
        model.check(rng)
    old = [t for t in model.rows if t in model.alive][:5]
    assert fetch(store, old)[1].all()  # slots 3 to 7, which no future touched


@given(data=st.data())
def test_each_future_reads_its_own_rows(data: st.DataObject) -> None:
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


def test_tickets_differ_and_every_place_has_one_owner() -> None:
    for first in (0, 2**40):
        places, rng, seen, number = SlotMap(9, 5, first), np.random.default_rng(0), set(), 0
        for _ in range(2000):
            move = places.plan(rng.permutation(9)[: rng.integers(0, 10)])
            places.commit(move)
            seen.update(move.ticket.tolist())
            number += len(move.ticket)
            waiting = places._queue[(places._head + np.arange(places._waiting)) % places.size].tolist()
            held = [int(p) - 1 for p in places._of_slot if p]
            assert sorted(waiting + held) == list(range(places.used))
        assert len(seen) == number == places.accepted and first * 14 < min(seen) and max(seen) < UPDATE_BIT

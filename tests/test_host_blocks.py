"""Columns of blocks: the promises of the store (tests/test_store.py), and their own: references, damage, reuse, growth."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf import _config
from fbuf._host import blocks, blocktable
from fbuf._host.arrays import StoreCorrupted
from fbuf._host.blocks import Blocked, BlockFetch, Blocks, cut_of
from fbuf._host.blocktable import Table
from fbuf._host.changes import Changes
from fbuf._host.codec import Codec, Zstd
from fbuf._host.ring import Ring
from fbuf._host.store import Store
from tests.test_store import DTYPES, Failing, Model, fetch, frames, make, race, same

CODECS = [Blocks(chunk=8), Blocks(chunk=1), Blocks(chunk=3, block=(2, 3)), Blocks(chunk=1, block=(1, 2))]
BOTH = pytest.mark.parametrize("codec", [Blocks(chunk=8), Blocks(chunk=1)], ids=["changes", "ring"])


@pytest.fixture
def never_raw() -> Iterator[None]:
    """Columns keep their blocks, however little they save."""
    with mock.patch.object(blocks, "_PROBE_ROWS", 1 << 60), mock.patch.object(blocks, "_PROBE_BYTES", 1 << 60):
        yield


def recount(store: Store) -> None:
    """References are as many as live ids, and what nobody refers to is spare."""
    for part in store._parts:
        if not isinstance(part, Blocked):
            continue
        low = part._oldest(store._count)
        lane = np.repeat(np.arange(store.lanes), store._count - low)
        count = np.concatenate([np.arange(a, b) for a, b in zip(low, store._count, strict=True)])
        places, damaged = part._rows(lane, count, store._count)
        table = part.table
        counted = np.bincount(places.reshape(-1), minlength=table.places)
        counted[0] = 0
        assert not damaged.any() and (table.count == counted).all()
        idle = np.flatnonzero(counted[1 : table.used] == 0) + 1
        assert np.isin(idle, table._spare).all() and table._queued[idle].all()
        assert len(set(table._spare.tolist())) == len(table._spare)


# ------------------------------------------------------------------------------------------------ the store


@given(data=st.data())
def test_any_sequence_of_calls_agrees_with_a_dict(data: st.DataObject) -> None:
    lanes = data.draw(st.integers(1, 3), "lanes")
    length, slack = data.draw(st.integers(1, 30), "length"), data.draw(st.integers(0, 9), "slack")
    shape = data.draw(st.sampled_from([(), (7,), (5, 6), (3, 4, 2), (2, 5, 6)]), "shape")
    chosen = data.draw(st.lists(st.sampled_from([*CODECS, None]), min_size=1, max_size=3), "codecs")
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES), "dtype"))
    first = data.draw(st.sampled_from([0, 2**32 - 5]), "first")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    weak = data.draw(st.booleans(), "weak fingerprints")
    real = blocktable.digest

    def values(*lead: int) -> np.ndarray:
        return (rng.integers(0, 2, (*lead, *shape)) * rng.integers(1, 99)).astype(dtype)

    with (
        mock.patch.object(blocks, "_PROBE_ROWS", data.draw(st.sampled_from([40, 1 << 60]), "probe")),
        mock.patch.object(blocktable, "digest", lambda b: real(b) % np.uint64(3) if weak else real(b)),
    ):
        store = make(*chosen, shape=shape, dtype=dtype, lanes=lanes, length=length, slack=slack, first_seq=first)
        model = Model(store, length + slack, lanes)
        for _ in range(data.draw(st.integers(1, 10), "calls")):
            call = data.draw(st.sampled_from(["write", "write", "masked", "patch", "reload"]))
            if call in ("write", "masked"):
                n = data.draw(st.sampled_from([0, 1, 2, 5, 9, 70]))
                keep = None if call == "write" else rng.random((n, lanes)) < rng.choice([0.0, 0.1, 0.8])
                model.write([values(n, lanes) for _ in chosen], keep)
            elif call == "patch" and slack == 9 and len(model.rows) > 2:
                known = np.array([0, *model.rows], np.uint64)
                tickets = rng.choice(known[known < 1 << 63], 3, replace=False).astype(np.uint64)
                model.patch(tickets, rng.random(3) < 0.8, {int(rng.integers(len(chosen))): values(3)})
            elif call == "reload":
                store = model.store = load(store, {n: np.array(a) for n, a in store.to_arrays().items()})
            model.check(rng)
            recount(store)


def load(store: Store, arrays: dict[str, np.ndarray]) -> Store:
    assert all(a.dtype.kind in "iu" for a in arrays.values())
    fixed = {"lanes": store.lanes, "length": store.length, "slack": store.slack}
    return Store.from_arrays(store.columns, arrays, **fixed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(), (3,), (40, 40), (4, 20, 21), (21, 20, 3), (300, 2), (8, 8, 12), (9000,)], ids=str
)
@pytest.mark.usefixtures("never_raw")
def test_every_dtype_and_shape_round_trips(dtype: Any, shape: tuple[int, ...]) -> None:
    for block in (None, (3, 5), (1000, 1000)):
        store = make(Blocks(block=block), Blocks(block=block, chunk=1), shape=shape, dtype=dtype, lanes=2, length=100)
        rows = np.random.default_rng(0).integers(0, 3, (20, 2, *shape)).astype(dtype)
        tickets = store.write([rows] * 2, None)
        for column in range(2):
            got, ok = fetch(store, tickets, column)
            assert ok.all() and same(got, rows)


def test_blocks_are_whole_lines_or_what_was_asked_for() -> None:
    for shape, size, block, expected in (
        ((84, 84), 1, None, (2, 84, 42)),
        ((84, 84), 1, (12, 12), (12, 12, 49)),
        ((4, 84, 84), 1, None, (2, 84, 168)),
        ((64, 64, 3), 1, None, (1, 192, 64)),
        ((64, 64, 3), 1, (8, 8), (8, 24, 64)),
        ((84, 84), 4, None, (1, 336, 84)),
        ((8, 8, 12), 1, None, (8, 12, 8)),
        ((7056,), 1, None, (1, 504, 14)),
        ((), 4, None, (1, 4, 1)),
    ):
        cut = cut_of(shape, size, block)
        assert (cut.h, cut.w, cut.blocks) == expected, shape


@pytest.mark.parametrize("chunk", [1, 8])
def test_repetitive_frames_take_little(chunk: int) -> None:
    rows = frames(6000)[:, None]
    store = make(Blocks(block=(8, 8), chunk=chunk), shape=(24, 24), length=6000)
    tickets = np.concatenate([store.write([rows[i : i + 100]], None) for i in range(0, 6000, 100)])
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows)
    assert isinstance(store._parts[0], Blocked)
    assert store.nbytes < rows.nbytes / 3, store.nbytes / rows.nbytes


@BOTH
def test_noise_becomes_a_raw_ring(codec: Blocks) -> None:
    store = make(codec, None, shape=(50, 50), lanes=2, length=400, slack=0)
    rows = np.random.default_rng(0).integers(0, 256, (500, 2, 50, 50)).astype(np.uint8)
    tickets = np.concatenate([store.write([rows[i : i + 50]] * 2, None) for i in range(0, 500, 50)])
    assert isinstance(store._parts[0], Ring) and store.stats()["chunks"] == 0
    got, ok = fetch(store, tickets)
    assert ok.sum() == 800 and same(got[100:], rows[100:])
    assert store.nbytes < 2.01 * 800 * 2500 + 1000


@BOTH
def test_a_patch_leaves_the_old_row_and_is_packed(codec: Blocks) -> None:
    store = make(codec, shape=(24, 24), length=40)
    rows = frames(40)[:, None]
    tickets = store.write([rows], None)[:, 0]
    value = np.full((1, 24, 24), 200, np.uint8)
    new = store.patch(tickets[:1], np.array([True]), {0: value})
    assert same(fetch(store, new)[0], value) and same(fetch(store, tickets)[0], rows[:, 0])
    assert store.to_arrays()["patch:data"].size < 100


@BOTH
@pytest.mark.usefixtures("never_raw")
def test_places_of_expired_rows_are_used_again(codec: Blocks) -> None:
    store = make(codec, shape=(16, 16), lanes=2, length=100, slack=0)
    rng, places = np.random.default_rng(0), []
    for _ in range(60):
        rows = rng.integers(0, 256, (20, 2, 16, 16)).astype(np.uint8)
        tickets = store.write([rows], None)
        places.append(store._parts[0].table.places)
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows)
    recount(store)
    # 216 rows of 2 blocks are live at most, and 40 more are entered before as many go.
    assert places[-1] == places[9] and places[-1] < 1.3 * 256 * 2 + 64


def test_a_block_that_comes_back_finds_its_place() -> None:
    table = Table(8)
    one, two = np.arange(8, dtype=np.uint8)[None], np.full((1, 8), 7, np.uint8)
    place = table.refer(one, np.array([3]))
    table.release(np.repeat(place, 3))
    assert table.live == 0
    assert table.refer(one, np.array([1])) == place  # and is not given away, though it is among the spare ones
    assert table.refer(two, np.array([1])) != place
    assert table.held[0][place].tobytes() == one.tobytes() and table.used == 3


def test_a_table_that_cannot_grow_has_changed_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    table, rng = Table(8), np.random.default_rng(0)
    known = rng.integers(0, 256, (60, 8)).astype(np.uint8)
    places = table.refer(known, np.ones(60, np.int64))
    table.release(places[:20])
    before = table.count.copy()
    new = np.concatenate([known, rng.integers(0, 256, (90, 8)).astype(np.uint8)])
    monkeypatch.setattr(Table, "_grow", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        table.refer(new, np.full(150, 2))
    monkeypatch.undo()
    assert (table.count == before).all() and np.isin(places[:20], table._spare).all()
    again = table.refer(new, np.full(150, 2))
    assert (again[:60] == places).all() and len(np.unique(again)) == 150 and table.live == 150
    assert (table.held[0][again] == new).all()


def test_an_index_that_fills_with_old_entries_is_made_anew() -> None:
    """A table that never grows, but whose blocks all change again and again."""
    table, rng = Table(8), np.random.default_rng(0)
    for _ in range(200):
        blocks_ = rng.integers(0, 256, (50, 8)).astype(np.uint8)
        places = table.refer(blocks_, np.ones(50, np.int64))
        assert (table.held[0][places] == blocks_).all() and (
            table.refer(blocks_, np.ones(50, np.int64)) == places
        ).all()
        table.release(np.tile(places, 2))
    assert table.places == 64 and 4 * table._filled <= 3 * len(table._slots)


@pytest.mark.parametrize("bits", [0, 1, 64], ids=["one fingerprint", "two", "real"])
def test_the_table_against_a_dict(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all blocks have one fingerprint: then content alone tells them apart."""
    real, rng = blocktable.digest, np.random.default_rng(bits)
    monkeypatch.setattr(blocktable, "digest", lambda b: real(b) % np.uint64(1 << bits) if bits < 64 else real(b))
    table, known = Table(6), dict[bytes, list[int]]()  # place and references
    for _ in range(150):
        if rng.random() < 0.6 or not known:
            new = rng.integers(0, 5, (rng.integers(1, 40), 6), np.uint8) // [1, 1, 1, 9, 9, 9]
            new, number = new.astype(np.uint8), rng.integers(1, 4, len(new))
            for content, place, n in zip(new, table.refer(new, number).tolist(), number.tolist(), strict=True):
                own = known.setdefault(content.tobytes(), [place, 0])
                assert own[0] == place > 0
                own[1] += n
        else:
            gone = [c for c in known if rng.random() < 0.7]
            table.release(np.array([known[c][0] for c in gone for _ in range(known[c][1])], np.uint32))
            for content in gone:
                del known[content]
        assert table.live == len(known) == len({p for p, _ in known.values()})
        for content, (place, n) in known.items():
            assert table.held[0][place].tobytes() == content and table.count[place] == n
    assert not len(blocktable.damaged_places(table.held, np.array([p for p, _ in known.values()])))


# -------------------------------------------------------------------------------------------------- changes


@given(data=st.data())
def test_changes_round_trip(data: st.DataObject) -> None:
    """Any ids: also such that leave no room for a position beside them."""
    k, n = data.draw(st.integers(1, 9)), data.draw(st.sampled_from([1, 2, 3, 42, 257]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    codec, chunks = Changes(k, n), []
    for _ in range(data.draw(st.integers(1, 4))):
        high = data.draw(st.sampled_from([2, 1000, 1 << 23, 1 << 32]))
        first = rng.integers(0, high, (1, n), np.uint32)
        changed = rng.random((k, n)) < data.draw(st.sampled_from([0.0, 0.1, 1.0]))
        chunks.append(np.where(changed, rng.integers(0, high, (k, n), np.uint32), first))
    blobs = [codec.encode(c) for c in chunks]
    out = np.empty((k, n), np.uint32)
    codec.decode(blobs[0], out)
    assert same(out, chunks[0])
    which, at = rng.integers(0, len(chunks), 20), rng.integers(0, k, 20)
    assert same(codec.rows([memoryview(b) for b in blobs], which, at), np.stack(chunks)[which, at])


def test_rows_with_very_many_changes_are_kept_as_they_are() -> None:
    codec = Changes(8, 20_000)
    rows = np.random.default_rng(0).integers(0, 1000, (8, 20_000), np.uint32)
    out = np.empty_like(rows)
    codec.decode(codec.encode(rows), out)
    assert same(out, rows)


def test_chunks_of_other_ids_are_refused() -> None:
    """With a checksum that fits: whatever a checkpoint holds, nothing is read beside a chunk."""
    codec, rows = Changes(4, 10), np.arange(40, dtype=np.uint32).reshape(4, 10)
    good, out = codec.encode(rows), np.empty((4, 10), np.uint32)
    for bad in (
        good[:-1],
        good[:-4],
        good + bytes(4),
        b"",
        Changes(4, 9).encode(rows[:, :9]),
        b"\1\0" + good[2:],
        good[:2] + b"\xff" * 2 + good[4:],
        good[:-4] + b"\xff" * 4,
    ):
        try:
            codec.decode(bad, out)
            assert same(out, rows) and bad[2:] == good[2:]  # the first row's end is 0 whatever it says
        except StoreCorrupted as error:
            assert "expected" in str(error)


# ------------------------------------------------------------------------------------------------ damaged bytes


def filled(codec: Codec, count: int = 64, **more: Any) -> tuple[Store, np.ndarray, np.ndarray]:
    store = make(codec, shape=(24, 24), length=count, slack=0, **more)
    rows = frames(count)[:, None].repeat(store.lanes, 1)
    return store, rows, store.write([rows], None)


def shows(store: Store, tickets: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Whether each row can be read; those that can are right."""
    good = np.zeros(len(tickets), bool)
    for i, ticket in enumerate(tickets.reshape(-1)):
        try:
            got, ok = fetch(store, ticket)
            assert ok.all() and same(got, rows.reshape(-1, 24, 24)[i])
            good[i] = True
        except StoreCorrupted as error:
            assert "damaged" in str(error)
    return good


@BOTH
def test_every_flipped_bit_of_a_block_is_noticed_by_the_rows_that_show_it(codec: Blocks) -> None:
    store, rows, tickets = filled(codec)
    part = store._parts[0]
    places, _ = part._rows(np.zeros(64, np.int64), np.arange(64), store._count)
    place = int(places[40, 0])
    showing = (places == place).any(axis=1)
    block = part.table.held[0][place]
    for bit in range(0, block.size * 8, 5):
        block[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreCorrupted, match="other checksums .* expected the same"):
            fetch(store, tickets)
        block[bit // 8] ^= 1 << bit % 8
    block[3] ^= 1
    assert (shows(store, tickets, rows) == ~showing).all() and 0 < showing.sum() < 64
    again = store.write([rows[40:41]], None)  # the same content does not become the damaged block
    assert same(fetch(store, again)[0], rows[40:41])
    block[3] ^= 1
    part.table.held[1][place] ^= np.uint64(1 << 17)
    assert (shows(store, tickets[1:], rows[1:]) == ~showing[1:]).all()


def test_every_flipped_bit_of_ids_is_noticed() -> None:
    store, rows, tickets = filled(Blocks(chunk=1))
    ids = store._parts[0].ids.array
    for bit in range(32 * ids.shape[-1]):
        ids[9, 0, bit // 32] ^= np.uint32(1 << bit % 32)
        with pytest.raises(StoreCorrupted, match="damaged"):
            fetch(store, tickets[9])
        ids[9, 0, bit // 32] ^= np.uint32(1 << bit % 32)
    ids[[9, 10]] = ids[[10, 9]]
    assert (np.flatnonzero(~shows(store, tickets, rows)) == [9, 10]).all()

    store, rows, tickets = filled(Blocks(chunk=8))
    part = store._parts[0].ids
    data = part.arena.segments[0].array
    for bit in range(0, 8 * int(part.length[0, 0]), 3):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreCorrupted, match="a chunk has checksum .* damaged"):
            fetch(store, tickets[:8])
        data[bit // 8] ^= 1 << bit % 8
    part.address[[1, 2]] = part.address[[2, 1]]
    assert (np.flatnonzero(~shows(store, tickets, rows)) == np.arange(8, 24)).all()


@BOTH
def test_no_changed_byte_of_a_checkpoint_gives_other_data(codec: Blocks) -> None:
    store, rows, tickets = filled(codec)
    arrays, rng = store.to_arrays(), np.random.default_rng(0)
    names = [n for n in arrays if n.startswith("column0:") and n != "column0:probed"]
    refused = dict.fromkeys(names, 0)
    for name in names:
        for _ in range(6 if arrays[name].size else 0):
            array = np.array(arrays[name])
            data = array.reshape(-1).view(np.uint8)
            data[rng.integers(data.size)] ^= rng.integers(1, 256, dtype=np.uint8)
            try:
                damaged = load(store, arrays | {name: array})
            except (StoreCorrupted, ValueError):
                refused[name] += 1
                continue
            refused[name] += not shows(damaged, tickets, rows).all()
    always = {"references", "table_checksum", "block", "fingerprint"}
    always |= {"ids:rows"} if codec.chunk == 1 else {"ids:payload", "ids:checksum", "ids:length"}
    assert all(refused[f"column0:{n}"] == 6 for n in always), refused


@BOTH
def test_a_damaged_row_that_expires_does_not_stop_the_store(codec: Blocks) -> None:
    store, rows, tickets = filled(codec, 320)
    part = store._parts[0]
    if isinstance(part.ids, Ring):
        part.ids.array[5] ^= 1
    else:
        part.ids.arena.segments[0].array[7] ^= 1
    with pytest.raises(StoreCorrupted):
        fetch(store, tickets[:8])
    for _ in range(3):
        tickets = store.write([rows[::-1]], None)
        got, ok = fetch(store, tickets)
        assert ok.all() and same(got, rows[::-1])


def test_arrays_that_do_not_fit_are_refused() -> None:
    for codec, other in (
        (Blocks(chunk=8), Blocks(chunk=4)),
        (Blocks(chunk=8), Blocks(block=(3, 3))),
        (Blocks(chunk=8), Blocks(chunk=1)),
    ):
        store, _, _ = filled(codec)
        arrays = store.to_arrays()
        columns = tuple(type(c)(c.name, c.shape, c.dtype, other) for c in store.columns)
        with pytest.raises(ValueError, match="Store.from_arrays"):
            Store.from_arrays(columns, arrays, lanes=1, length=64, slack=0)
        for name, array in arrays.items():
            with pytest.raises(ValueError, match="is missing"):
                load(store, {n: a for n, a in arrays.items() if n != name})
            with pytest.raises(ValueError, match="Store.from_arrays"):
                Store.from_arrays(
                    store.columns, arrays | {name: np.asarray(array, np.float32)}, lanes=1, length=64, slack=0
                )


# ------------------------------------------------------------------------------------------- all or nothing


@BOTH
def test_a_failure_in_another_column_leaves_the_references_as_they_were(codec: Blocks) -> None:
    store = make(codec, Failing(), codec, shape=(30,), lanes=2, length=40)
    rng = np.random.default_rng(0)
    model = Model(store, 44, 2)
    model.write([rng.integers(0, 9, (35, 2, 30), np.uint8) for _ in range(3)], None)
    counts = [store._parts[c].table.count.sum() for c in (0, 2)]
    for _ in range(3):
        bad = [np.full((17, 2, 30), 77, np.uint8) + np.arange(17, dtype=np.uint8)[:, None, None] for _ in range(3)]
        with pytest.raises(OSError, match="full"):
            store.write(bad, None)
        assert [store._parts[c].table.count.sum() for c in (0, 2)] == counts
        recount(store)
    model.check(rng)
    model.write([rng.integers(0, 9, (19, 2, 30), np.uint8) for _ in range(3)], None)
    model.check(rng)
    recount(store)


@BOTH
@pytest.mark.usefixtures("never_raw")
def test_running_out_of_memory_leaves_the_store_as_it_was(codec: Blocks, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(codec, codec, shape=(1000,), length=200)
    model, rng = Model(store, 204, 1), np.random.default_rng(0)
    model.write([rng.integers(0, 2, (101, 1, 1000), np.uint8) for _ in range(2)], None)
    model.write([rng.integers(0, 2, (150, 1, 1000), np.uint8) for _ in range(2)], None)  # some places are spare now
    more = [rng.integers(0, 2, (190, 1, 1000), np.uint8) for _ in range(2)]
    real, grown = Table._grow, []
    for allowed in (0, 1):
        grown.clear()

        def scarce(self: Table, places: int, allowed: int = allowed) -> None:
            grown.append(places)
            if len(grown) > allowed:
                raise MemoryError
            real(self, places)

        monkeypatch.setattr(Table, "_grow", scarce)
        with pytest.raises(MemoryError):
            store.write(more, None)
        monkeypatch.undo()
        recount(store)
        model.check(rng)
    model.write(more, None)
    recount(store)
    model.check(rng)


# ------------------------------------------------------------------------------------------------------ threads


@BOTH
@pytest.mark.usefixtures("never_raw")
def test_rows_overwritten_during_a_read_are_expired_not_other_rows(
    codec: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the plan of a read and its bytes the rows go, and others get their places."""
    rng = np.random.default_rng(0)
    store = make(codec, shape=(24, 24), length=40, slack=0)
    rows = rng.integers(0, 256, (40, 1, 24, 24)).astype(np.uint8)
    tickets = store.write([rows], None)
    held, real = store._parts[0].table.held, BlockFetch.run

    def late(self: BlockFetch, outs: Any) -> Any:
        for _ in range(6):
            store.write([rng.integers(0, 256, (10, 1, 24, 24)).astype(np.uint8)], None)
        return real(self, outs)

    monkeypatch.setattr(BlockFetch, "run", late)
    got, ok = fetch(store, tickets)
    assert not ok.any() and not got.any()
    monkeypatch.undo()
    changed = (store._parts[0].table.held[0][: len(held[0])] != held[0]).any() or store._parts[0].table.held is held
    assert changed

    tickets = store.write([rows], None)  # the control: without asking again, rubbish comes out
    monkeypatch.setattr(BlockFetch, "run", late)
    monkeypatch.setattr(BlockFetch, "volatile", False)
    got, ok = fetch(store, tickets)
    assert ok.any() and not same(got, rows)


@BOTH
@pytest.mark.usefixtures("never_raw")
def test_two_threads_read_while_one_writes(codec: Blocks) -> None:
    store = make(codec, shape=(8, 20), dtype="uint64", lanes=2, length=300, slack=0)
    found = race(store, back=900, turns=150)
    assert found > 1000 and isinstance(store._parts[0], Blocked)
    recount(store)


# ------------------------------------------------------------------------------------------------------- memory


@BOTH
def test_nbytes_is_what_a_store_takes(codec: Blocks) -> None:
    rows = frames(3000, 60)[:, None]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        store = make(codec, shape=(60, 60), length=2500, slack=0)
        for i in range(0, 3000, 50):
            store.write([rows[i : i + 50]], None)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # A ring's pages are counted as far as they were written; all of it was.
    assert 0.97 < store.nbytes / grown < 1.03, (store.nbytes, grown)
    stats = store.stats()
    assert stats["nbytes"] == store.nbytes and stats["payload_bytes"] < store.nbytes
    assert stats["chunks"] == (2500 if codec.chunk == 1 else 375 - 500 // 8)


# ------------------------------------------------------------------------------------------------- as a storage


def buffer_of(storage: Any) -> fbuf.Buffer:
    return fbuf.Buffer(capacity=60, storage=storage, lanes=2, view=fbuf.views.Transition(stack=4))


@BOTH
def test_a_buffer_gives_the_same_batches_as_on_the_device(codec: Blocks) -> None:
    example = {
        "obs": np.zeros((24, 24), np.uint8),
        "action": np.int32(0),
        "reward": np.float32(0),
        "terminated": np.bool_(False),
        "truncated": np.bool_(False),
    }
    seen = frames(90).reshape(45, 2, 24, 24)
    storages = [fbuf.storages.Device(), fbuf.storages.Compressed(keys=("obs",), codec=codec)]
    batches = []
    for storage in storages:
        buffer = buffer_of(storage)
        state = buffer.init(example)
        for i in range(0, 45, 15):
            rows = {n: np.zeros((15, 2), x.dtype) for n, x in example.items() if n != "obs"}
            state = buffer.extend(state, rows | {"obs": seen[i : i + 15]})
        state, batch = buffer.sample(state, jax.random.key(3), 32)
        state = buffer.update_rows(state, batch.index, {"obs": np.asarray(batch.data["obs"][:, -1]) + np.uint8(1)})
        batches.append([batch, buffer.sample(state, jax.random.key(4), 32)[1]])
        if storage is storages[1]:
            arrays = buffer.storage.to_arrays(state.rows)
            assert isinstance(fbuf._host.owner.find(next(iter(fbuf.stores())).id)._parts[0], Blocked)
            assert any(n.endswith("fingerprint") for n in arrays)
    for one, two in zip(*batches, strict=True):
        for name in one.data:
            assert same(np.asarray(one.data[name]), np.asarray(two.data[name])), name
        assert one.mask.any()


def test_a_codec_is_a_value_that_crosses_config() -> None:
    assert Blocks() == Blocks(block=None, chunk=1) and hash(Blocks()) == hash(Blocks())
    assert isinstance(Blocks(chunk=8), Codec)
    storage = fbuf.storages.Compressed(codec=Blocks(block=(6, 12), chunk=4))
    assert _config.from_config(_config.to_config(storage)) == storage
    rows = np.arange(30, dtype=np.uint8).reshape(3, 10)
    out = np.empty_like(rows)
    Blocks(chunk=8).decode(Blocks(chunk=8).encode(rows), out)
    assert same(out, rows)
    Zstd().decode(Blocks(chunk=8).encode(rows), out)


@pytest.mark.parametrize(
    "bad", [{"chunk": 0}, {"chunk": 65}, {"chunk": True}, {"block": 12}, {"block": (12,)}, {"block": (0, 4)}], ids=str
)
def test_settings_out_of_range(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"Blocks: {name} is .*; expected .*Blocks\\({name}="):
        Blocks(**bad)


def test_fingerprints_of_one_changed_word_differ() -> None:
    """What damage is noticed by: every single flipped bit, whatever the word size."""
    for size in (1, 2, 3, 4, 8, 12, 84, 168):
        block = np.random.default_rng(size).integers(0, 256, (1, size), np.uint8)
        flipped = block.repeat(size * 8, 0)
        bits = np.arange(size * 8)
        flipped[bits, bits // 8] ^= (1 << bits % 8).astype(np.uint8)
        assert not np.isin(blocktable.digest(flipped), blocktable.digest(block)).any()
    # Checkpoints hold fingerprints: they must be the same in every version.
    known = blocktable.digest(np.arange(160, dtype=np.uint8).reshape(2, 80))
    assert known.tolist() == [11946797195064667597, 6245888885038075359]

"""The host store against a dict of every row ever written: what is read is that row, or zeros and False."""

from __future__ import annotations

import ast
import dataclasses
import gc
import sys
import threading
import weakref
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fbuf._host import arena, zstd
from fbuf._host.arrays import StoreCorrupted
from fbuf._host.chunks import Chunks
from fbuf._host.codec import Codec, Zstd
from fbuf._host.ring import Ring
from fbuf._host.store import PATCH, Column, Store, StoreClosed

DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "uint64", "float16", "float32", "float64", "complex64"]
DTYPES += ["uint16", "uint32", "complex128", ml_dtypes.bfloat16]
DTYPES += [getattr(ml_dtypes, n) for n in dir(ml_dtypes) if n.startswith(("float8", "float6", "float4", "int", "uint"))]


@dataclasses.dataclass(frozen=True)
class Deflate:
    """A codec of the user's own."""

    chunk: int = 4

    def encode(self, rows: np.ndarray) -> bytes:
        return zlib.compress(rows.tobytes())

    def decode(self, data: bytes | memoryview, out: np.ndarray) -> None:
        out[...] = np.frombuffer(zlib.decompress(data), out.dtype).reshape(out.shape)


@dataclasses.dataclass(frozen=True)
class Plain:
    """A codec that takes any damage for data (and does not compress: for few rows)."""

    chunk: int = 4

    def encode(self, rows: np.ndarray) -> bytes:
        return rows.tobytes()

    def decode(self, data: bytes | memoryview, out: np.ndarray) -> None:
        out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)


def make(*codecs: Codec | None, shape=(5,), dtype="uint8", lanes=1, length=16, slack=4, first_seq=0) -> Store:
    columns = tuple(Column(f"c{i}", shape, np.dtype(dtype), c) for i, c in enumerate(codecs))
    return Store(columns, lanes=lanes, length=length, slack=slack, first_seq=first_seq)


def fetch(store: Store, tickets: Any, column: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Reads into an output full of rubbish, so that what is not written shows."""
    tickets = np.asarray(tickets, np.uint64)
    spec = store.columns[column]
    out = np.frombuffer(bytes([171]) * (tickets.size * spec.nbytes), np.uint8).copy().view(spec.dtype)
    out = out.reshape(*tickets.shape, *spec.shape)
    return out, store.read([(column, tickets, out)])


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def frames(count: int, size: int = 24, seed: int = 0) -> np.ndarray:
    """A fixed background and a few moving squares: as repetitive as a game."""
    rng = np.random.default_rng(seed)
    out = np.repeat(rng.integers(0, 255, (1, size, size), np.uint8), count, 0)
    for _ in range(3):
        y, x = (np.cumsum(rng.integers(-1, 2, count)) % (size - 4) for _ in range(2))
        for t in range(count):
            out[t, y[t] : y[t] + 4, x[t] : x[t] + 4] = rng.integers(200, 202)
    return out


# ------------------------------------------------------------------------------------------------ the oracle


class Model:
    """Every row ever written, by ticket, and which are live: a plain-Python store."""

    def __init__(self, store: Store, depth: int, lanes: int) -> None:
        self.store, self.depth = store, depth
        self.rows: dict[int, list[bytes]] = {}
        self.lanes: list[list[int]] = [[] for _ in range(lanes)]  # stream tickets in order
        self.origin: dict[int, int] = {}  # of patches

    def write(self, rows: list[np.ndarray], keep: np.ndarray | None) -> None:
        tickets = self.store.write(rows, keep)
        assert tickets.dtype == np.uint64 and tickets.shape == rows[0].shape[:2]
        for n, e in np.ndindex(*tickets.shape):
            ticket = int(tickets[n, e])
            assert (ticket == 0) == (keep is not None and not keep[n, e])
            if ticket:
                assert ticket not in self.rows and ticket < PATCH
                self.rows[ticket] = [r[n, e].tobytes() for r in rows]
                self.lanes[e].append(ticket)

    def patch(self, tickets: np.ndarray, keep: np.ndarray, fields: dict[int, np.ndarray]) -> None:
        alive = self.live()
        new = self.store.patch(tickets, keep, fields)
        for i, (old, ticket) in enumerate(zip(tickets.tolist(), new.tolist(), strict=True)):
            if not keep[i] or old not in alive:
                assert ticket == old
                continue
            assert ticket >= PATCH and ticket not in self.rows
            self.rows[ticket] = [fields[c][i].tobytes() if c in fields else v for c, v in enumerate(self.rows[old])]
            self.origin[ticket] = self.origin.get(old, old)

    def live(self) -> set[int]:
        stream = {t for lane in self.lanes for t in lane[-self.depth :]}
        return stream | {t for t, o in self.origin.items() if o in stream}

    def check(self, rng: np.random.Generator) -> None:
        tickets = rng.permutation(np.array([0, 0, 2**62, PATCH | 2**40, *self.rows], np.uint64))
        split = len(tickets) // 2
        alive, requests = self.live(), []
        for c, column in enumerate(self.store.columns):
            for part in (tickets[:split], tickets[split:]):  # two requests of a column
                requests.append((c, part, np.full((len(part), *column.shape), 1).astype(column.dtype)))
        ok = self.store.read(requests)
        assert ok.dtype == bool and ok.size == len(tickets) * len(self.store.columns)
        at = 0
        for c, part, out in requests:
            for ticket, row in zip(part.tolist(), out, strict=True):
                there = ticket in alive
                assert ok[at] == (there or ticket == 0), ticket
                assert row.tobytes() == (self.rows[ticket][c] if there else bytes(row.nbytes)), ticket
                at += 1


CODECS = [None, Zstd(), Zstd(chunk=1), Zstd(chunk=3, dictionary=0), Deflate()]


@given(data=st.data())
def test_any_sequence_of_calls_agrees_with_a_dict(data: st.DataObject) -> None:
    lanes = data.draw(st.integers(1, 4), "lanes")
    length, slack = data.draw(st.integers(1, 30), "length"), data.draw(st.integers(0, 9), "slack")
    shape = data.draw(st.sampled_from([(), (7,), (2, 3), (0,)]), "shape")
    chosen = data.draw(st.lists(st.sampled_from(CODECS), min_size=1, max_size=3), "codecs")
    dtype = np.dtype(data.draw(st.sampled_from(DTYPES), "dtype"))
    first = data.draw(st.sampled_from([0, 2**32 - 5]), "first")
    store = make(*chosen, shape=shape, dtype=dtype, lanes=lanes, length=length, slack=slack, first_seq=first)
    model = Model(store, length + slack, lanes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))

    def values(*lead: int) -> np.ndarray:
        return (rng.integers(0, 2, (*lead, *shape)) * rng.integers(1, 99)).astype(dtype)

    for _ in range(data.draw(st.integers(1, 12), "calls")):
        call = data.draw(st.sampled_from(["write", "write", "masked", "patch", "reload"]))
        if call in ("write", "masked"):
            n = data.draw(st.sampled_from([0, 1, 2, 5, 9, 70]))
            keep = None if call == "write" else rng.random((n, lanes)) < rng.choice([0.0, 0.1, 0.8])
            model.write([values(n, lanes) for _ in chosen], keep)
        elif call == "patch" and slack == 9 and len(model.rows) > 2:
            known = np.array([0, *model.rows], np.uint64)
            tickets = rng.choice(known[known < PATCH], 3, replace=False).astype(np.uint64)
            column = int(rng.integers(len(chosen)))
            model.patch(tickets, rng.random(3) < 0.8, {column: values(3)})
        elif call == "reload":
            arrays = {n: np.array(a) for n, a in store.to_arrays().items()}
            assert all(a.dtype.kind in "iu" for a in arrays.values())
            store = Store.from_arrays(store.columns, arrays, lanes=lanes, length=length, slack=slack)
            model.store = store
        model.check(rng)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (40, 40)], ids=str)
@pytest.mark.parametrize("zstd", [None, Zstd()], ids=["raw", "zstd"])
def test_every_dtype_and_shape_round_trips(dtype: Any, shape: tuple[int, ...], zstd: Zstd | None) -> None:
    store = make(zstd, shape=shape, dtype=dtype, lanes=2, length=100)
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):  # some of these cannot hold 2
        rows = rng.integers(0, 3, (50, 2, *shape)).astype(dtype)
    tickets = store.write([rows], None)
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows)


def test_strided_and_read_only_input_is_taken() -> None:
    base = np.arange(2 * 40 * 6, dtype=np.int32).reshape(2, 6, 40)
    rows = base.transpose(2, 0, 1)[:, :, ::2]
    rows.flags.writeable = False
    for c in (None, Zstd(chunk=4)):
        store = make(c, shape=(3,), dtype="int32", lanes=2, length=40)
        got, ok = fetch(store, store.write([rows], None))
        assert ok.all() and same(got, np.ascontiguousarray(rows))


# --------------------------------------------------------------------------------------------- tickets, expiry


@pytest.mark.parametrize("zstd", [None, Zstd()], ids=["raw", "zstd"])
def test_the_newest_length_plus_slack_rows_of_each_lane_are_there(zstd: Zstd | None) -> None:
    store = make(zstd, length=16, slack=4, lanes=2)
    rows = np.arange(90 * 2 * 5, dtype=np.int64).astype(np.uint8).reshape(90, 2, 5)
    tickets = np.concatenate([store.write([rows[a:b]], None) for a, b in ((0, 7), (7, 30), (30, 90))])
    got, ok = fetch(store, tickets)
    ok = ok.reshape(tickets.shape)
    assert not ok[:70].any() and ok[70:].all()
    assert not got[:70].any() and same(got[70:], rows[70:])


@pytest.mark.parametrize("zstd", [None, Zstd()], ids=["raw", "zstd"])
def test_more_rows_at_once_than_are_kept(zstd: Zstd | None) -> None:
    store = make(zstd, length=16, slack=4)
    store.write([np.ones((3, 1, 5), np.uint8)], None)
    rows = np.random.default_rng(0).integers(0, 9, (1000, 1, 5), np.uint8)
    got, ok = fetch(store, store.write([rows], None))
    assert ok.sum() == 20 and ok[-20:].all() and same(got[-20:], rows[-20:])


@pytest.mark.parametrize("zstd", [None, Zstd()], ids=["raw", "zstd"])
def test_tickets_go_on_past_2_to_32(zstd: Zstd | None) -> None:
    store = make(zstd, lanes=3, length=30, slack=0, first_seq=2**32 - 5)
    rows = np.random.default_rng(0).integers(0, 9, (25, 3, 5), np.uint8)
    tickets = store.write([rows], None)
    assert (tickets == np.arange(75).reshape(25, 3) + (2**32 - 5) * 3 + 1).all()
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows)
    assert not fetch(store, [1, 2**32 - 6, (2**32 - 5) * 3])[1].any()  # before the first


def test_two_futures_of_a_state_draw_different_tickets() -> None:
    store = make(None, length=8)
    one = store.write([np.full((4, 1, 5), 1, np.uint8)], None)
    two = store.write([np.full((4, 1, 5), 2, np.uint8)], None)
    assert not np.intersect1d(one, two).size
    assert (fetch(store, one)[0] == 1).all() and (fetch(store, two)[0] == 2).all()


# --------------------------------------------------------------------------------------------- changed rows


@pytest.mark.parametrize("zstd", [None, Zstd(), Deflate()], ids=["raw", "zstd", "own"])
def test_a_patch_leaves_the_old_row_and_the_other_columns(zstd: Codec | None) -> None:
    store = make(zstd, None, shape=(100,), length=10, slack=2)
    rows = [np.random.default_rng(c).integers(0, 9, (9, 1, 100), np.uint8) for c in range(2)]
    tickets = store.write(rows, None)[:, 0]
    value = np.full((3, 100), 200, np.uint8)
    pick = np.array([tickets[2], 0, tickets[4]], np.uint64)
    new = store.patch(pick, np.array([True, True, False]), {0: value})
    assert new[0] >= PATCH and new[1] == 0 and new[2] == tickets[4]
    assert same(fetch(store, new[0])[0], value[0]) and same(fetch(store, new[0], 1)[0], rows[1][2, 0])
    assert same(fetch(store, tickets)[0], rows[0][:, 0])
    again = store.patch(new[:1], np.array([True]), {1: value[:1]})  # both changes
    assert same(fetch(store, again)[0], value[:1]) and same(fetch(store, again, 1)[0], value[:1])
    assert same(fetch(store, new[:1], 1)[0], rows[1][2])


def test_a_patch_expires_with_the_row_it_replaced() -> None:
    store = make(Zstd(), length=10, slack=2)
    tickets = store.write([np.ones((10, 1, 5), np.uint8)], None)[:, 0]
    new = store.patch(tickets[:1], np.array([True]), {0: np.full((1, 5), 9, np.uint8)})
    before = store.nbytes
    store.write([np.zeros((2, 1, 5), np.uint8)], None)
    assert fetch(store, new)[1].all()
    store.write([np.zeros((1, 1, 5), np.uint8)], None)
    got, ok = fetch(store, new)
    assert not ok.any() and not got.any()
    assert store.stats()["patches"] == 0 and store.nbytes < before
    assert store.patch(new, np.array([True]), {0: np.ones((1, 5), np.uint8)}) == new


def test_superseded_patches_are_dropped_after_slack_more() -> None:
    store = make(None, length=10, slack=6)
    ticket = store.write([np.ones((10, 1, 5), np.uint8)], None)[:1, 0]
    chain = [ticket]
    for i in range(200):
        chain.append(store.patch(chain[-1], np.array([True]), {0: np.full((1, 5), i, np.uint8)}))
    assert store.stats()["patches"] <= 8
    for i in range(6):  # the last is in force, those before it were replaced fewer than `slack` patches ago
        assert (fetch(store, chain[-1 - i])[0] == 199 - i).all()
    assert not fetch(store, chain[100])[1].any()
    assert (fetch(store, ticket)[0] == 1).all()


# ------------------------------------------------------------------------------------------------- compression


def test_repetitive_frames_take_little_and_dictionaries_help() -> None:
    rows = frames(6000)[:, None]
    sizes = {}
    for dictionary in (0, 16):
        store = make(Zstd(dictionary=dictionary), shape=(24, 24), length=6000)
        tickets = np.concatenate([store.write([rows[i : i + 100]], None) for i in range(0, 6000, 100)])
        got, ok = fetch(store, tickets)
        assert ok.all() and same(got, rows)
        sizes[dictionary] = store.stats()["payload_bytes"]
    assert store.stats()["dictionaries"] >= 1
    assert sizes[16] * 1.5 < sizes[0] < rows.nbytes / 4


def test_a_dictionary_goes_with_its_last_chunk_and_drift_brings_a_new_one() -> None:
    store = make(Zstd(), shape=(24, 24), length=2000, slack=0)
    seen = []
    for seed in range(4):  # four games
        rows = frames(7000, seed=seed)[:, None]
        for i in range(0, 7000, 70):
            tickets = store.write([rows[i : i + 70]], None)
        got, ok = fetch(store, tickets)
        assert ok.all() and same(got, rows[i : i + 70])
        seen.append(store._parts[0].coder.current)
        assert store.stats()["dictionaries"] <= 2
    assert len(set(map(id, seen))) == 4
    held = store._parts[0].table.values()
    assert all(d.count == 0 and d not in held for d in seen[:-1])


def test_dictionaries_are_not_made_where_they_cannot_pay() -> None:
    store = make(Zstd(), shape=(24, 24), length=100, slack=0)
    rows = frames(6000)[:, None]
    for i in range(0, 6000, 50):
        store.write([rows[i : i + 50]], None)
    assert store.stats()["dictionaries"] == 0


def test_noise_becomes_a_raw_ring() -> None:
    store = make(Zstd(), None, shape=(50, 50), lanes=2, length=60, slack=0)
    rows = np.random.default_rng(0).integers(0, 256, (90, 2, 50, 50)).astype(np.uint8)
    tickets = np.concatenate([store.write([rows[i : i + 9]] * 2, None) for i in range(0, 90, 9)])
    assert isinstance(store._parts[0], Ring) and store.stats()["chunks"] == 0
    got, ok = fetch(store, tickets)
    assert ok.sum() == 120 and same(got[30:], rows[30:])
    assert store.nbytes < 2.01 * 120 * 2500 + 1000


def test_small_noise_becomes_a_ring_before_it_costs_much() -> None:
    store = make(Zstd(), shape=(3,), dtype="float32", length=10_000)
    store.write([np.random.default_rng(0).normal(size=(2100, 1, 3)).astype(np.float32)], None)
    assert isinstance(store._parts[0], Ring)


def test_rows_that_only_repeat_one_another_keep_their_codec() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (12, 64, 64)).astype(np.uint8)
    rows = noise[np.random.default_rng(1).integers(0, 12, 3000)][:, None]
    store = make(Zstd(chunk=1), shape=(64, 64), length=3000, slack=0)
    tickets = np.concatenate([store.write([rows[i : i + 100]], None) for i in range(0, 3000, 100)])
    assert isinstance(store._parts[0], Chunks)
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows) and store.nbytes < rows.nbytes / 3


def test_a_chunk_is_decoded_once_a_call() -> None:
    calls: list[int] = []

    class Counting(Deflate):
        def decode(self, data: bytes | memoryview, out: np.ndarray) -> None:
            calls.append(1)
            super().decode(data, out)

    store = make(Counting(), length=40)
    tickets = store.write([np.zeros((40, 1, 5), np.uint8)], None)[:, 0]
    stack = tickets[np.arange(8, 20)[:, None] + np.arange(-3, 1)]
    outs = [np.empty((12, 4, 5), np.uint8) for _ in range(2)]
    store.read([(0, stack, outs[0]), (0, stack + np.uint64(1), outs[1])])
    assert len(calls) == 5  # rows 5 to 20 lie in chunks 1 to 5


def test_a_request_begins_where_another_ends_in_a_chunk() -> None:
    store, rows, tickets = compressible()
    outs = [np.empty((n, 24, 24), np.uint8) for n in (3, 0, 2, 6)]
    bounds = np.cumsum([0] + [len(out) for out in outs]).tolist()
    requests = [(0, tickets[a:b, 0], out) for a, b, out in zip(bounds, bounds[1:], outs, strict=False)]
    assert store.read(requests).all()
    assert same(np.concatenate(outs), rows[:11, 0])


# ------------------------------------------------------------------------------------------------ damaged bytes


def compressible(zstd: Codec | None = None, **more: Any) -> tuple[Store, np.ndarray, np.ndarray]:
    store = make(zstd or Zstd(), shape=(24, 24), length=64, slack=0, **more)
    rows = frames(64)[:, None].repeat(store.lanes, 1)
    return store, rows, store.write([rows], None)


@pytest.mark.parametrize("own", [Zstd(), Deflate(8), Plain(8)], ids=["zstd", "deflate", "plain"])
def test_every_flipped_bit_of_a_chunk_is_noticed(own: Codec) -> None:
    store, rows, tickets = compressible(own)
    part = store._parts[0]
    segment, size = part.arena.segments[0], int(part.length[0, 0])
    for bit in range(0, size * 8, 3 if size < 2000 else 31):
        segment.array[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreCorrupted, match="damaged"):
            fetch(store, tickets[:8])
        segment.array[bit // 8] ^= 1 << bit % 8
    assert isinstance(store.last_error, StoreCorrupted)
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows)


def with_dictionaries() -> tuple[Store, np.ndarray, np.ndarray]:
    store = make(Zstd(), Deflate(), shape=(24, 24), length=800, slack=0)
    rows = frames(800)[:, None]
    tickets = np.concatenate([store.write([rows[i : i + 100]] * 2, None) for i in range(0, 800, 100)])
    assert store.stats()["dictionaries"] == 1
    return store, rows, tickets


def load(store: Store, arrays: dict[str, np.ndarray]) -> Store:
    fixed = {"lanes": store.lanes, "length": store.length, "slack": store.slack}
    return Store.from_arrays(store.columns, arrays, **fixed)


@pytest.mark.parametrize("column", [0, 1], ids=["zstd", "own"])
@pytest.mark.parametrize("name", ["payload", "checksum", "dictionary", "length", "address"])
def test_no_changed_byte_of_a_checkpoint_gives_other_data(column: int, name: str) -> None:
    """What is read is the row or an error, and the error comes for the changed chunk."""
    store, rows, tickets = with_dictionaries()
    arrays, rng = store.to_arrays(), np.random.default_rng(0)
    for _ in range(8):
        array = np.array(arrays[f"column{column}:{name}"])
        data = array.reshape(-1).view(np.uint8)
        data[rng.integers(data.size)] ^= rng.integers(1, 256, dtype=np.uint8)
        failed = 0
        try:
            damaged = load(store, arrays | {f"column{column}:{name}": array})
        except ValueError:  # lengths do not add up, no such dictionary
            assert name in ("dictionary", "length", "address")
            continue
        k = store.columns[column].codec.chunk
        for i in range(0, 800, k):
            try:
                got, ok = fetch(damaged, tickets[i : i + k], column)
                assert ok.all() and same(got, rows[i : i + k])
            except StoreCorrupted as error:
                assert "damaged" in str(error)
                failed += 1
        assert failed == 1


def test_a_changed_byte_of_a_dictionary_is_noticed_when_it_is_loaded() -> None:
    store, _, _ = with_dictionaries()
    arrays, rng = store.to_arrays(), np.random.default_rng(0)
    for name in ("dictionaries", "dictionary_checksum"):
        for _ in range(40):
            array = np.array(arrays[f"column0:{name}"])
            data = array.view(np.uint8)
            data[rng.integers(data.size)] ^= rng.integers(1, 256, dtype=np.uint8)
            with pytest.raises(StoreCorrupted, match="a dictionary has checksum .* damaged"):
                load(store, arrays | {f"column0:{name}": array})


def test_a_dictionary_that_was_replaced_is_noticed_by_its_chunks() -> None:
    """The dictionary's own checksum fits, but it is not the one that the chunks were encoded against."""
    store, rows, tickets = with_dictionaries()
    arrays = store.to_arrays()
    content = np.array(arrays["column0:dictionaries"])
    content[100] ^= 1
    changed = {"dictionaries": content, "dictionary_checksum": np.array([zlib.crc32(content)], np.uint32)}
    damaged = load(store, arrays | {f"column0:{n}": a for n, a in changed.items()})
    uses = np.repeat(arrays["column0:dictionary"] > 0, 8)
    assert 0 < uses.sum() < 800
    got, ok = fetch(damaged, tickets[~uses])
    assert ok.all() and same(got, rows[~uses])
    for i in np.flatnonzero(uses)[::8]:
        with pytest.raises(StoreCorrupted, match="damaged"):
            fetch(damaged, tickets[i])


def test_swapped_chunks_are_noticed() -> None:
    store, _, tickets = compressible(Plain(8))
    part = store._parts[0]
    part.address[[1, 2]] = part.address[[2, 1]]
    assert fetch(store, tickets[:8])[1].all()
    for row in (8, 16):
        with pytest.raises(StoreCorrupted, match="a chunk has checksum"):
            fetch(store, tickets[row])


@pytest.mark.parametrize("own", [None, Zstd(), Deflate()], ids=["raw", "zstd", "own"])
def test_every_flipped_bit_of_a_changed_row_is_noticed(own: Codec | None) -> None:
    store = make(own, shape=(100,), length=10)
    tickets = store.write([np.zeros((4, 1, 100), np.uint8)], None)[:, 0]
    (new,) = store.patch(tickets[:1], np.array([True]), {0: np.arange(100, dtype=np.uint8)[None] // 9})
    arrays = store.to_arrays()
    for bit in range(arrays["patch:data"].size * 8):
        data = arrays["patch:data"].copy()
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreCorrupted, match="damaged"):
            fetch(load(store, arrays | {"patch:data": data}), new)


def test_a_dictionary_is_not_made_of_damaged_rows() -> None:
    store = make(Zstd(), shape=(24, 24), length=1600, slack=0)
    rows = frames(1600)[:, None]
    store.write([rows[:504]], None)
    store._parts[0].arena.segments[0].array[: store._parts[0].arena.live] ^= 1
    tickets = store.write([rows[504:520]], None)  # who writes need not hear of it; who reads does
    assert store.stats()["dictionaries"] == 0
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows[504:520])


def test_a_frame_that_claims_another_size_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _, _ = compressible()
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    out = np.empty((8, 24, 24), np.uint8)

    class Refuses:
        def __init__(self, **_: Any) -> None: ...

        def decompress(self, data: Any) -> bytes:
            raise AssertionError("decoded")

    monkeypatch.setattr(zstd.zstandard, "ZstdDecompressor", Refuses)
    with pytest.raises(StoreCorrupted, match="claims 16777216 bytes; expected 4608"):
        Zstd().decode(bomb, out)
    arrays = store.to_arrays()
    arrays["column0:payload"] = np.frombuffer(bomb, np.uint8)
    arrays["column0:span"] = np.array([[0, 0, len(bomb)]])
    arrays["column0:address"] = np.zeros((8, 1), np.uint64)
    arrays["column0:length"] = np.array([[len(bomb)]] + [[0]] * 7, np.uint32)
    arrays["column0:checksum"] = np.full((8, 1), zlib.crc32(bomb), np.uint32)
    loaded = Store.from_arrays(store.columns, arrays, lanes=1, length=64, slack=0)
    with pytest.raises(StoreCorrupted, match="claims 16777216 bytes"):
        fetch(loaded, [1])


def test_a_frame_without_a_size_is_refused() -> None:
    packer = zstandard.ZstdCompressor(write_content_size=False)
    with pytest.raises(StoreCorrupted):
        Zstd().decode(packer.compress(bytes(100)), np.empty(100, np.uint8))


# ------------------------------------------------------------------------------------------ all or nothing


@dataclasses.dataclass(frozen=True)
class Failing(Deflate):
    """Fails at its third chunk."""

    def encode(self, rows: np.ndarray) -> bytes:
        if (rows == 77).any():
            raise OSError("full")
        return super().encode(rows)


def test_a_failing_codec_leaves_the_store_as_it_was() -> None:
    store = make(None, Zstd(chunk=2), Failing(), lanes=2, length=40)
    rng = np.random.default_rng(0)
    model = Model(store, 44, 2)
    keep = np.ones((5, 2), bool)
    keep[0, 1] = False
    model.write([rng.integers(0, 9, (5, 2, 5), np.uint8) for _ in range(3)], keep)
    before = store.stats(), store.to_arrays()
    bad = [np.full((17, 2, 5), 77, np.uint8) for _ in range(3)]
    bad[2][:6] = 0
    with pytest.raises(OSError, match="full"):
        store.write(bad, None)
    assert isinstance(store.last_error, OSError)
    model.check(rng)
    assert store.stats()["rows_accepted"] == before[0]["rows_accepted"]
    model.write([rng.integers(0, 9, (9, 2, 5), np.uint8) for _ in range(3)], None)
    model.check(rng)


@pytest.mark.parametrize("column", [0, 1])
def test_a_write_that_ends_half_way_is_never_read_from(column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(None, Zstd(chunk=2), length=40)
    rows = [np.arange(50, dtype=np.uint8).reshape(10, 1, 5) for _ in range(2)]
    tickets = store.write(rows, None)[:, 0]

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store._parts[column], "commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.write(rows, None)
    for use in (lambda: fetch(store, tickets), lambda: store.write(rows, None), store.to_arrays, store.stats):
        with pytest.raises(StoreCorrupted, match="half-way"):
            use()
    store.close()


def test_running_out_of_memory_leaves_the_store_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(Zstd(chunk=2), Zstd(chunk=2), shape=(1000,), length=200)
    model, rng = Model(store, 204, 1), np.random.default_rng(0)
    rows = [rng.integers(0, 4, (101, 1, 1000), np.uint8) for _ in range(2)]
    model.write(rows, None)
    live = [p.arena.live for p in store._parts]
    allocated, real = [], arena.Segment

    def scarce(size: int) -> Any:
        allocated.append(size)
        if len(allocated) > 2:
            raise MemoryError
        return real(size)

    monkeypatch.setattr(arena, "Segment", scarce)
    with pytest.raises(MemoryError):
        store.write([r.repeat(2, 0) for r in rows], None)
    monkeypatch.undo()
    assert [p.arena.live for p in store._parts] == live
    model.check(rng)
    model.write(rows, None)
    model.check(rng)


# ------------------------------------------------------------------------------------------------------ threads


def race(store: Store, back: int, turns: int) -> int:
    """Two threads read the latest `back` tickets while one writes `turns` batches; how many rows they found.

    Rows, uint64 in two lanes, tell their own ticket: readers see them, or zeros, never a mixture.
    """
    shape = store.columns[0].shape
    ones = (1,) * len(shape)
    top, stop, failures, seen = [0], threading.Event(), [], [0, 0]

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                high = top[0]
                wanted = rng.integers(max(high - back, 0), high + 20, (64, 4)).astype(np.uint64)
                got, ok = fetch(store, wanted)
                there = ok.reshape(wanted.shape) & (wanted > 0)
                assert (got == np.where(there, wanted, 0).reshape(*wanted.shape, *ones).astype(np.uint64)).all()
                seen[seed] += int(there.sum())
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for reader in readers:
        reader.start()
    rng = np.random.default_rng(9)
    for _ in range(turns):
        n = int(rng.integers(1, 40))
        expected = np.arange(2 * n, dtype=np.uint64).reshape(n, 2) + np.uint64(top[0] + 1)
        rows = np.broadcast_to(expected.reshape(n, 2, *ones), (n, 2, *shape))
        assert (store.write([np.ascontiguousarray(rows)], None) == expected).all()
        top[0] = int(expected[-1, -1])
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures, failures[0]
    return sum(seen)


@pytest.mark.parametrize("zstd", [None, Zstd()], ids=["raw", "zstd"])
def test_two_threads_read_while_one_writes(zstd: Zstd | None) -> None:
    store = make(zstd, shape=(600,), dtype="uint64", lanes=2, length=300, slack=0)
    race(store, back=1500, turns=250)
    assert isinstance(store._parts[0], Chunks if zstd else Ring)


class Watched:
    """A decompressor that notices a second thread inside it."""

    meetings = 0
    barrier: threading.Barrier | None = None

    def __init__(self, **options: Any) -> None:
        self.real, self.users = REAL(**options), 0

    def decompress(self, data: Any) -> bytes:
        self.users += 1
        if Watched.barrier is not None:
            try:
                Watched.barrier.wait(0.2)  # both threads are in some decompressor now
            except threading.BrokenBarrierError:
                pass
        Watched.meetings += self.users > 1
        self.users -= 1
        return self.real.decompress(data)


REAL = zstandard.ZstdDecompressor


@pytest.mark.parametrize("shared", [False, True], ids=["ours", "control"])
def test_no_decompressor_is_used_by_two_threads(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _, tickets = compressible()
    Watched.meetings, Watched.barrier = 0, threading.Barrier(2)
    one = Watched()
    monkeypatch.setattr(zstd.zstandard, "ZstdDecompressor", (lambda **_: one) if shared else Watched)
    threads = [threading.Thread(target=fetch, args=(store, tickets[:8])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (Watched.meetings > 0) == shared


# ------------------------------------------------------------------------------------------------------- memory


def test_nbytes_counts_what_is_held() -> None:
    rows = frames(4000, 40)[:, None]
    store = make(Zstd(), None, shape=(40, 40), length=4000, slack=0)
    store.write([rows[:0]] * 2, None)
    empty = store.nbytes
    for i in range(0, 4000, 50):
        store.write([rows[i : i + 50]] * 2, None)
    stats, (chunks, ring) = store.stats(), store._parts
    contexts = chunks.coder.nbytes + sum(d.nbytes for d in chunks.table.values())
    known = stats["payload_bytes"] + rows.nbytes + 18 * stats["chunks"] + chunks.open.nbytes + contexts
    assert stats["nbytes"] == store.nbytes and ring.nbytes == rows.nbytes
    assert known <= store.nbytes <= known + max(0.05 * stats["payload_bytes"], 40_000)
    assert empty < 600_000 and stats["raw_bytes"] == 2 * rows.nbytes and stats["rows_live"] == 4000


def test_a_segment_is_freed_with_its_last_chunk() -> None:
    store = make(Zstd(), shape=(40, 40), length=500, slack=0)
    noise = np.random.default_rng(0).integers(0, 4, (4000, 1, 40, 40), np.uint8)
    store.write([noise[:400]], None)
    first = weakref.ref(store._parts[0].arena.segments[0].array)
    sizes = []
    for i in range(400, 4000, 50):
        store.write([noise[i : i + 50]], None)
        sizes.append(store._parts[0].arena.capacity)
    gc.collect()
    assert first() is None
    assert max(sizes[20:]) < 1.2 * min(sizes[20:]) and sizes[-1] < 1.2 * store.stats()["payload_bytes"]


def test_a_slow_lane_does_not_keep_everything() -> None:
    store = make(Zstd(chunk=1), shape=(40, 40), lanes=2, length=300, slack=0)
    rng = np.random.default_rng(0)
    keep = np.ones((60, 2), bool)
    keep[1:, 1] = False
    slow = []
    for _ in range(200):  # of 12,000 rows of lane 0, 300 are live, and all 200 of lane 1
        rows = rng.integers(0, 4, (60, 2, 40, 40), np.uint8)
        slow.append((store.write([rows], keep)[0, 1], rows[0, 1]))
    part = store._parts[0].arena
    assert part.capacity < 1.5 * part.live + 5 * 32 * 1024
    got, ok = fetch(store, [t for t, _ in slow])
    assert ok.all() and same(got, np.stack([r for _, r in slow]))


def test_a_read_under_way_finishes_when_the_store_is_closed() -> None:
    class Closes(Deflate):
        def decode(self, data: bytes | memoryview, out: np.ndarray) -> None:
            store.close()
            super().decode(data, out)

    store = make(Closes(), None, length=20)
    tickets = store.write([np.full((8, 1, 5), 3, np.uint8)] * 2, None)[:, 0]
    tickets[:1] = store.patch(tickets[:1], np.array([True]), {0: np.full((1, 5), 9, np.uint8)})
    outs = [np.empty((8, 5), np.uint8) for _ in range(2)]
    assert store.read([(c, tickets, out) for c, out in enumerate(outs)]).all()
    assert (outs[0][0] == 9).all() and (outs[0][1:] == 3).all() and (outs[1] == 3).all()
    with pytest.raises(StoreClosed):
        store.stats()


def test_close_frees_everything_and_later_calls_say_so() -> None:
    store, _, tickets = compressible()
    arrays = weakref.ref(store._parts[0].arena.segments[0].array)
    store.close()
    store.close()
    gc.collect()
    assert arrays() is None
    for call in (
        lambda: fetch(store, tickets),
        lambda: store.write([np.zeros((1, 1, 24, 24), np.uint8)], None),
        lambda: store.patch(tickets[:1, 0], np.array([True]), {}),
        lambda: store.nbytes,
        store.stats,
        store.to_arrays,
    ):
        with pytest.raises(StoreClosed, match="closed"):
            call()


# -------------------------------------------------------------------------------------------------- checkpoints


def test_a_loaded_store_reads_the_same_rows_and_goes_on_alike() -> None:
    store = make(Zstd(), Deflate(), None, shape=(24, 24), lanes=2, length=1500, slack=10)
    rows = frames(2600).reshape(1300, 2, 24, 24)
    keep = np.random.default_rng(0).random((1300, 2)) < 0.9
    tickets = np.concatenate([store.write([rows[i : i + 50]] * 3, keep[i : i + 50]) for i in range(0, 1300, 50)])
    new = store.patch(tickets[-9:, 0], keep[-9:, 0], {0: rows[:9, 0]})
    assert store.stats()["dictionaries"] >= 1 and store.stats()["patches"] > 0
    arrays = {n: np.array(a) for n, a in store.to_arrays().items()}
    loaded = Store.from_arrays(store.columns, arrays, lanes=2, length=1500, slack=10)
    every = np.concatenate([tickets.reshape(-1), new])
    for column in range(3):
        (a, ok_a), (b, ok_b) = fetch(store, every, column), fetch(loaded, every, column)
        assert same(a, b) and (ok_a == ok_b).all() and ok_a.any()
    more = [rows[:700]] * 3
    t = store.write(more, None)
    assert (t == loaded.write(more, None)).all()
    for column in range(3):
        assert same(fetch(store, t, column)[0], fetch(loaded, t, column)[0])
    p = store.patch(t[:3, 0], np.ones(3, bool), {2: rows[:3, 0]})
    assert (p == loaded.patch(t[:3, 0], np.ones(3, bool), {2: rows[:3, 0]})).all()
    own = {n: store.stats()[n] for n in ("rows_live", "chunks", "patches", "raw_bytes")}
    assert own == {n: loaded.stats()[n] for n in own}


def test_arrays_that_do_not_fit_are_refused() -> None:
    store, _, tickets = compressible()
    store.patch(tickets[:1, 0], np.array([True]), {0: np.zeros((1, 24, 24), np.uint8)})
    arrays = {n: np.array(a) for n, a in store.to_arrays().items()}
    fits = {"lanes": 1, "length": 64, "slack": 0}
    Store.from_arrays(store.columns, arrays, **fits)
    with pytest.raises(ValueError, match="lanes, length and slack"):
        Store.from_arrays(store.columns, arrays, lanes=1, length=65, slack=0)
    with pytest.raises(ValueError, match="chunks hold 8 rows; expected 4"):
        columns = (dataclasses.replace(store.columns[0], codec=Zstd(chunk=4)),)
        Store.from_arrays(columns, arrays, **fits)
    for name, array in arrays.items():
        with pytest.raises(ValueError, match="is missing"):
            Store.from_arrays(store.columns, {n: a for n, a in arrays.items() if n != name}, **fits)
        with pytest.raises(ValueError, match="Store.from_arrays"):
            Store.from_arrays(store.columns, arrays | {name: array.astype(np.float32)}, **fits)
    for name in ("column0:payload", "column0:length", "column0:dictionary", "patch:data", "count", "patch:value"):
        if arrays[name].size:
            with pytest.raises(ValueError, match="Store.from_arrays"):
                Store.from_arrays(store.columns, arrays | {name: arrays[name][:-1]}, **fits)


# ----------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    "bad",
    [{"level": 0}, {"level": 23}, {"level": True}, {"chunk": 0}, {"chunk": 65}, {"chunk": 8.0}, {"dictionary": -1}],
    ids=str,
)
def test_settings_out_of_range(bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=f"Zstd: {name} is .*; expected an integer from"):
        Zstd(**bad)


def test_a_codec_is_a_value() -> None:
    assert Zstd() == Zstd(level=1, chunk=8, dictionary=16) and hash(Zstd()) == hash(Zstd())
    assert isinstance(Zstd(), Codec) and isinstance(Deflate(), Codec)
    rows = np.arange(30, dtype=np.uint8).reshape(3, 10)
    out = np.empty_like(rows)
    Zstd().decode(Zstd().encode(rows), out)
    assert same(out, rows)


def test_wrong_arguments_are_named_and_change_nothing() -> None:
    store = make(Zstd(), lanes=2)
    good = np.zeros((3, 2, 5), np.uint8)
    for rows, keep, error, text in (
        ([], None, ValueError, "rows has 0 arrays; expected 1"),
        ([good.astype(np.int8)], None, TypeError, "column 'c0' is int8; expected uint8. Cast with"),
        ([good[:, :1]], None, ValueError, r"has shape \[3, 1, 5\]; expected \[3, 2, 5\]"),
        ([good.tolist()], None, TypeError, "is list; expected a numpy array"),
        ([good], np.ones((3, 1), bool), ValueError, r"keep has shape \[3, 1\]; expected \[3, 2\]"),
        ([good], np.ones((3, 2), np.uint8), TypeError, "keep is uint8; expected bool"),
    ):
        with pytest.raises(error, match=text):
            store.write(rows, keep)
    assert store.stats()["rows_accepted"] == 0
    tickets = store.write([good], None)
    out = np.empty((3, 2, 5), np.uint8)
    for request, error, text in (
        ((1, tickets, out), ValueError, "column is 1; expected 0 to 0"),
        ((0, tickets.astype(np.int64), out), TypeError, "tickets is int64; expected uint64"),
        ((0, tickets, out[:2]), ValueError, "expected \\[3, 2, 5\\]"),
        ((0, tickets[:, :1], out[:, :1]), ValueError, "strided or read-only"),
    ):
        with pytest.raises(error, match=text):
            store.read([request])
    with pytest.raises(ValueError, match="column is 3"):
        store.patch(tickets[:, 0], np.ones(3, bool), {3: good[:, 0]})
    with pytest.raises(TypeError, match="Column: column 'x' is object"):
        Column("x", (), np.dtype(object), None)
    with pytest.raises(TypeError, match="expected a value with chunk, encode and decode"):
        Column("x", (), np.dtype("uint8"), "zstd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Store: lanes is 0; expected 1 or more"):
        make(None, lanes=0)


def test_a_codec_must_give_bytes() -> None:
    class Lazy(Deflate):
        def encode(self, rows: np.ndarray) -> Any:
            return memoryview(rows.tobytes())

    store = make(Lazy(), length=20)
    with pytest.raises(TypeError, match="gave memoryview; expected bytes"):
        store.write([np.zeros((4, 1, 5), np.uint8)], None)


def test_the_store_needs_numpy_and_zstandard_only() -> None:
    folder = Path(arena.__file__).parent
    for path in sorted(folder.glob("*.py")):
        if path.stem in ("callback", "owner", "treecall"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for imported in names:
                assert imported.split(".")[0] not in ("jax", "jaxlib", "torch"), (path.stem, imported)
                assert not imported.startswith("fbuf") or imported.startswith("fbuf._host"), (path.stem, imported)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_million_operations_leave_memory_flat() -> None:
    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    store = make(Zstd(chunk=4, dictionary=4), None, shape=(16, 16), lanes=2, length=600)
    for part in store._parts:
        part.lot_size = 64  # type: ignore[attr-defined]
    source, rng = frames(4000, 16), np.random.default_rng(0)
    known = np.zeros((0, 2), np.uint64)
    done, before = 0, 0
    while done < 1_000_000:
        at = int(rng.integers(0, 3990))
        rows = source[at : at + 2].reshape(1, 2, 16, 16)
        tickets = store.write([rows, rows], None)
        known = np.concatenate([known[-500:], tickets])
        pick = known[rng.integers(0, len(known), 4), rng.integers(0, 2, 4)]
        out, ok = fetch(store, pick, column=int(rng.integers(0, 2)))
        assert ok.all() and out.any()
        done += 2
        if done % 50 == 0:
            store.patch(pick[:1], np.ones(1, bool), {0: rows[0, :1]})
            done += 1
        if done >= 100_000 and not before:
            before = resident()
    if store._thread is not None:
        store._thread.join(60)
    assert resident() - before < 3 << 20
    assert store.nbytes < 4 << 20

"""Stacks handed in as rows: recognised and stored as single frames, and read back bit for bit, whatever comes."""

from __future__ import annotations

import dataclasses
import gc
import threading
import tracemalloc
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._host import checkpoint, rowends, stacks
from fbuf._host.arrays import StoreCorrupted
from fbuf._host.chunks import Chunks
from fbuf._host.codec import Zstd
from fbuf._host.framestream import FrameStream
from fbuf._host.rowends import RowEnds
from fbuf._host.stacking import Stacking, stackings
from fbuf._host.stacks import Stacks
from fbuf._host.store import Column, Store
from tests.test_store import DTYPES, Deflate, Failing, Model, fetch, frames, same

SIZE = 12  # pixels of a line of a small frame


def make(*shapes: tuple[int, ...], lanes: int = 1, length: int = 100, slack: int = 4, **more: Any) -> Store:
    codec, dtype = more.get("codec", Zstd(chunk=more.get("chunk", 4))), np.dtype(more.get("dtype", np.uint8))
    columns = tuple(Column(f"c{i}", shape, dtype, codec, stacks=True) for i, shape in enumerate(shapes))
    return Store(columns, lanes=lanes, length=length, slack=slack, first_seq=more.get("first_seq", 0))


def part(store: Store, column: int = 0) -> Chunks | FrameStream:
    """What a column's rows are kept as."""
    own = store._parts[column]
    assert isinstance(own, Stacks)
    return own.inner


def stream(store: Store, column: int = 0) -> FrameStream:
    """A column that was recognised."""
    own = part(store, column)
    assert isinstance(own, FrameStream)
    return own


def stacked(seen: np.ndarray, starts: np.ndarray, depth: int = 4, axis: int = 1) -> np.ndarray:
    """Stacks `[T, ...]` of frames `[T, ...]`, the first of an episode repeated before it."""
    first = np.maximum.accumulate(np.where(starts, np.arange(len(seen)), 0))
    at = [np.maximum(np.arange(len(seen)) - ago, first) for ago in range(depth - 1, -1, -1)]
    if axis == -1 and seen.ndim == 4:
        return np.concatenate([seen[a] for a in at], axis=-1)
    return np.ascontiguousarray(np.stack([seen[a] for a in at], axis))


def episodes(count: int, every: int = 50) -> np.ndarray:
    return np.arange(count) % every == 0


def game(count: int, size: int = 24, depth: int = 4, axis: int = 1, seed: int = 0, every: int = 50) -> np.ndarray:
    return stacked(frames(count, size, seed), episodes(count, every), depth, axis)


def write(store: Store, *rows: np.ndarray, at_once: int = 16) -> np.ndarray:
    """Rows `[T, E, ...]` of all columns in batches; their tickets."""
    size = len(rows[0])
    return np.concatenate([store.write([r[i : i + at_once] for r in rows], None) for i in range(0, size, at_once)])


def check_frames(store: Store) -> None:
    """Chunks are kept for the frames that rows show, and no others."""
    for column in range(len(store.columns)):
        own = part(store, column)
        if isinstance(own, FrameStream):
            plane = own.plane
            held = int((own.count // plane.k - own.low // plane.k).sum())
            assert plane.census(own.count, own.low).chunks == held
            assert sum(s.chunks for s in plane.arena.segments.values()) == held
            assert (own.low <= own.count).all() and (own.low >= 0).all()


# ------------------------------------------------------------------------------------------------ the oracle

LAYOUTS: list[tuple[tuple[int, ...], int, int]] = [  # shape of a row, axis of the stack, channels side by side on it
    ((4, SIZE, SIZE), 0, 1),
    ((SIZE, SIZE, 4), -1, 1),
    ((2, 16, SIZE), 0, 1),
    ((SIZE, SIZE, 12), -1, 3),
    ((9, SIZE, SIZE), 0, 3),
    ((3, 100), 0, 1),
    ((3, 7, 7, 3), 0, 1),
]


class Player:
    """Makes rows of a lane: the next of an episode, the first of one, the same again, one some frames on, or any."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, ...], axis: int, channels: int, dtype: Any) -> None:
        self.rng, self.axis, self.channels, self.dtype = rng, axis, channels, np.dtype(dtype)
        self.shape = shape
        self.row = self.noise()

    def noise(self) -> np.ndarray:
        return (self.rng.integers(0, 2, self.shape) * self.rng.integers(1, 99)).astype(self.dtype)

    def next(self, kind: str) -> np.ndarray:
        length = self.shape[self.axis]
        new = self.noise()
        if kind == "any":
            self.row = new
        elif kind == "first":
            last = np.take(new, range(length - self.channels, length), self.axis)
            self.row = np.concatenate([last] * (length // self.channels), self.axis)
        elif kind in ("next", "later"):
            by = self.channels * (1 if kind == "next" else 2)
            old = np.take(self.row, range(min(by, length), length), self.axis)
            self.row = np.concatenate([old, np.take(new, range(length - old.shape[self.axis]), self.axis)], self.axis)
        return self.row


KINDS = ["next", "first", "again", "later", "any"]
WAYS = {
    "episodes": [0.9, 0.1, 0, 0, 0],
    "mixed": [0.5, 0.1, 0.1, 0.1, 0.2],
    "shuffled": [0, 0, 0, 0, 1],
    "still": [0, 0.1, 0.9, 0, 0],
    "skipping": [0.1, 0.1, 0, 0.8, 0],
}


@given(data=st.data())
def test_any_sequence_of_calls_agrees_with_a_dict(data: st.DataObject) -> None:
    lanes = data.draw(st.integers(1, 3), "lanes")
    length, slack = data.draw(st.sampled_from([1, 5, 30, 150]), "length"), data.draw(st.sampled_from([0, 9]), "slack")
    shape, axis, channels = data.draw(st.sampled_from(LAYOUTS), "layout")
    dtype = np.dtype(data.draw(st.sampled_from(["uint8", "float32", "bool", DTYPES[-3]]), "dtype"))
    first = data.draw(st.sampled_from([0, 2**32 - 5]), "first")
    store = make(shape, lanes=lanes, length=length, slack=slack, dtype=dtype, first_seq=first)
    model = Model(store, length + slack, lanes)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    players = [Player(rng, shape, axis, channels, dtype) for _ in range(lanes)]
    with mock.patch.object(stacks, "_AT_ONCE", data.draw(st.sampled_from([3, 64]), "converted at once")):
        if data.draw(st.booleans(), "begins with episodes"):
            model.write([np.array([[p.next("next") for p in players] for _ in range(18)])], None)
        for _ in range(data.draw(st.integers(1, 8), "calls")):
            call = data.draw(st.sampled_from(["write", "write", "masked", "patch", "reload"]))
            if call in ("write", "masked"):
                n = data.draw(st.sampled_from([0, 1, 2, 5, 9, 70]))
                keep = None if call == "write" else rng.random((n, lanes)) < rng.choice([0.0, 0.1, 0.8])
                way = WAYS[data.draw(st.sampled_from(list(WAYS)), "way")]
                rows = [[p.next(str(rng.choice(KINDS, p=way))) for p in players] for _ in range(n)]
                model.write([np.array(rows, dtype).reshape(n, lanes, *shape)], keep)
            elif call == "patch" and len(model.rows) > 2:
                known = np.array([0, *model.rows], np.uint64)
                tickets = rng.choice(known[known < 1 << 63], 3, replace=False).astype(np.uint64)
                if slack == 9:
                    model.patch(tickets, rng.random(3) < 0.8, {0: np.array([players[0].noise() for _ in range(3)])})
            elif call == "reload":
                store = model.store = load(store)
            model.check(rng)
            check_frames(store)


def load(store: Store, arrays: dict[str, np.ndarray] | None = None) -> Store:
    arrays = {n: np.array(a) for n, a in store.to_arrays().items()} if arrays is None else arrays
    assert all(a.dtype.kind in "iu" for a in arrays.values())
    return Store.from_arrays(store.columns, arrays, lanes=store.lanes, length=store.length, slack=store.slack)


# ----------------------------------------------------------------------------------------------- recognition


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("axis", "depth"), [(1, 4), (-1, 4), (1, 2), (-1, 3)])
def test_stacks_of_every_dtype_are_recognised_and_round_trip(dtype: Any, axis: int, depth: int) -> None:
    seen = np.random.default_rng(0).integers(0, 99, (200, 13, 11)).astype(dtype)
    rows = np.stack([stacked(seen[e::2], episodes(100), depth, axis) for e in range(2)], 1)
    store = make(rows.shape[2:], lanes=2, dtype=dtype)
    got, ok = fetch(store, write(store, rows))
    assert ok.all() and same(got, rows)
    assert stream(store).stacking.frames == depth
    assert stream(store).count.tolist() == [100 + 2 * (depth - 1)] * 2


def test_values_are_compared_as_bytes() -> None:
    """NaN differs from itself and -0.0 equals 0.0: neither may change what is read."""
    seen = np.random.default_rng(0).normal(size=(80, 9, 9)).astype(np.float32)
    seen[::3] = np.nan
    seen[1::3] = -0.0
    seen[2::6] = 0.0
    rows = stacked(seen, episodes(80))[:, None]
    store = make(rows.shape[2:], dtype="float32")
    got, ok = fetch(store, write(store, rows))
    assert ok.all() and same(got, rows) and stream(store).count[0] == 80 + 3 * 2


def test_frames_of_several_channels_side_by_side() -> None:
    seen = np.random.default_rng(0).integers(0, 9, (90, 10, 10, 3), np.uint8)
    for rows, stacking in (
        (stacked(seen, episodes(90), axis=-1), Stacking(100, 4, 3)),  # (10, 10, 12)
        (stacked(seen, episodes(90), axis=1), Stacking(1, 4, 300)),  # (4, 10, 10, 3)
        (stacked(np.moveaxis(seen, -1, 1), episodes(90)).reshape(90, 12, 10, 10), Stacking(1, 4, 300)),
    ):
        store = make(rows.shape[1:])
        got, ok = fetch(store, write(store, rows[:, None]))
        assert ok.all() and same(got, rows[:, None])
        assert stream(store).stacking == stacking and stream(store).count[0] == 90 + 2 * 3


def test_colours_are_no_stack() -> None:
    grey = np.repeat(frames(200)[..., None], 3, axis=-1)
    colour = grey // np.array([1, 2, 3], np.uint8)
    still = grey[np.repeat(np.arange(10), 20)]  # a grey picture that stands still looks shifted
    for rows in (grey, colour, still, np.moveaxis(grey, -1, 1), np.zeros_like(grey)):
        store = make(rows.shape[1:], length=200)
        got, ok = fetch(store, write(store, rows[:, None]))
        assert ok.all() and same(got, rows[:, None]) and isinstance(part(store), Chunks)


@pytest.mark.parametrize("at_once", [1, 7, 500])
def test_rows_that_are_no_stacks_are_soon_looked_at_no_more(at_once: int) -> None:
    rows = np.random.default_rng(0).integers(0, 2, (60, 1, 4, 20, 20), np.uint8)
    store = make((4, 20, 20))
    with mock.patch.object(Stacks, "_look", autospec=True, side_effect=Stacks._look) as look:
        got, ok = fetch(store, write(store, rows, at_once=at_once))
    assert ok.all() and same(got, rows) and isinstance(part(store), Chunks)
    assert look.call_count == {1: 17, 7: 3, 500: 1}[at_once]
    assert not store._parts[0]._last.size


def test_a_still_picture_is_not_looked_at_for_ever() -> None:
    store = make((4, 20, 20), length=3000)
    rows = np.ones((1500, 1, 4, 20, 20), np.uint8)
    got, ok = fetch(store, write(store, rows, at_once=100))
    assert ok.all() and same(got, rows) and isinstance(part(store), Chunks) and not store._parts[0].watching


def test_noise_that_is_no_stack_becomes_a_ring() -> None:
    store = make((4, 60, 60))
    rows = np.random.default_rng(0).integers(0, 256, (60, 1, 4, 60, 60), np.uint8)
    got, ok = fetch(store, write(store, rows))
    assert ok.all() and same(got, rows) and not isinstance(store._parts[0], Stacks)


def test_noise_in_stacks_takes_a_frame_a_row() -> None:
    seen = np.random.default_rng(0).integers(0, 256, (400, 40, 40), np.uint8)
    store = make((4, 40, 40), length=400)
    rows = stacked(seen, episodes(400, 1000))[:, None]
    got, ok = fetch(store, write(store, rows))
    assert ok.all() and same(got, rows) and store.stats()["payload_bytes"] <= 1.01 * seen.nbytes


def test_short_episodes_are_recognised() -> None:
    rows = game(90, every=3)
    store = make(rows.shape[1:])
    write(store, rows[:, None])
    assert stream(store).count[0] == 30 * (4 + 2)


def test_what_is_known_of_shapes() -> None:
    assert stackings((4, 84, 84), 1) == (Stacking(1, 4, 84 * 84), Stacking(1, 2, 2 * 84 * 84))
    assert stackings((84, 84, 4), 1) == (Stacking(84 * 84, 4, 1), Stacking(84 * 84, 2, 2))
    assert Stacking(64 * 64, 4, 3) in stackings((64, 64, 12), 1)
    assert stackings((84, 84), 1) == stackings((4, 3), 1) == stackings((), 4) == stackings((1000,), 4) == ()


@pytest.mark.parametrize("shared", range(1, 5))
@pytest.mark.parametrize(
    "stacking", [Stacking(1, 4, 6), Stacking(1, 4, 8), Stacking(5, 4, 1), Stacking(5, 4, 3)], ids=str
)
def test_one_byte_decides_whether_a_stack_follows(stacking: Stacking, shared: int) -> None:
    rng = np.random.default_rng(0)
    shape = (stacking.outer, stacking.frames, stacking.inner)
    before = rng.integers(0, 256, shape, np.uint8)
    after = rng.integers(0, 256, shape, np.uint8)
    after[:, :shared] = before[:, 4 - shared :]
    assert stacking.follows(before, after, shared)
    for place in np.ndindex(*shape):
        other = after.copy()
        other[place] ^= 1
        assert stacking.follows(before, other, shared) == (place[1] >= shared)
    assert stacking.fresh(before[None], after[None]) == 4 - shared


# ---------------------------------------------------------------------------------------------------- size


def test_a_row_takes_what_its_frame_would_singly() -> None:
    rows = game(4000, every=200)
    single = Store((Column("o", (24, 24), np.dtype(np.uint8), Zstd()),), lanes=1, length=4000, slack=0)
    write(single, frames(4000)[:, None])
    store = make((4, 24, 24), length=4000, codec=Zstd())
    tickets = write(store, rows[:, None])
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows[:, None])
    assert store.stats()["payload_bytes"] <= 1.1 * single.stats()["payload_bytes"]
    assert store.nbytes <= 1.3 * single.nbytes


@pytest.mark.slow
def test_real_frames_take_what_they_would_singly() -> None:
    from benchmarks._atari import frames as atari

    seen, starts = atari("Breakout", 4000)
    single = Store((Column("o", (84, 84), np.dtype(np.uint8), Zstd()),), lanes=1, length=4000, slack=0)
    write(single, seen[:, None], at_once=256)
    for axis in (1, -1):
        rows = stacked(seen, starts, axis=axis)
        store = make(rows.shape[1:], length=4000, codec=Zstd())
        got, ok = fetch(store, write(store, rows[:, None], at_once=256))
        assert ok.all() and same(got, rows[:, None])
        assert store.nbytes <= 1.3 * single.nbytes


def test_rows_in_no_order_take_little_more_than_plain_ones() -> None:
    rows = game(3000)
    order = np.random.default_rng(0).permutation(3000)
    plain = Store((Column("o", (4, 24, 24), np.dtype(np.uint8), Zstd()),), lanes=1, length=3000, slack=0)
    store = make((4, 24, 24), length=3000, slack=0, codec=Zstd())
    write(store, rows[:40, None]), write(plain, rows[:40, None])
    tickets = write(store, rows[order][:, None])
    write(plain, rows[order][:, None])
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows[order][:, None])
    assert stream(store).count[0] > 4 * 2900 and stream(store).plane.ring > 3000 * 4 // 8
    assert store.nbytes <= 1.6 * plain.nbytes


def test_repeated_rows_add_no_frames_and_skipped_ones_those_between() -> None:
    rows = game(60, every=1000)
    store = make((4, 24, 24))
    write(store, rows[:30, None])
    assert stream(store).count[0] == 30 + 3
    write(store, np.repeat(rows[29:30], 20, 0)[:, None])
    assert stream(store).count[0] == 30 + 3
    write(store, rows[31::2][:10, None])  # every second
    assert stream(store).count[0] == 33 + 20


def test_nbytes_is_what_a_store_takes() -> None:
    rows = game(3000)[:, None]
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    store = make((4, 24, 24), lanes=1, length=2000, codec=Zstd())
    for i in range(0, 3000, 50):
        store.write([rows[i : i + 50]], None)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # numpy's empty pages are counted here but never touched; zstd's contexts are not counted here.
    coder = stream(store).plane.coder
    assert 0.7 * held <= store.nbytes - coder.nbytes <= 1.3 * held + 4096


@pytest.mark.slow
def test_memory_is_flat_over_many_rows() -> None:
    rng = np.random.default_rng(0)
    store = make((4, 16, 16), lanes=2, length=1000, codec=Zstd())
    players = [Player(rng, (4, 16, 16), 0, 1, np.uint8) for _ in range(2)]
    sizes = []
    for turn in range(500):
        kinds = ["next", "next", "next", "next", "again", "first"] if turn % 50 else ["any"]
        rows = np.array([[p.next(str(rng.choice(kinds))) for p in players] for _ in range(100)])
        keep = rng.random((100, 2)) < 0.9 if turn % 3 else None
        tickets = store.write([rows], keep)
        sizes.append(store.nbytes)
    got, ok = fetch(store, tickets)
    there = tickets != 0
    assert ok.all() and same(got[there], rows[there])
    check_frames(store)
    assert max(sizes[250:]) <= 1.2 * max(sizes[50:250])


# ----------------------------------------------------------------------------------------------- where rows end


@given(data=st.data())
def test_row_ends_are_sums_of_what_was_added(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    lanes, depth = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 63, 64, 200]))
    ends = RowEnds(lanes, depth)
    rows, frames, known = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64), [list[int]() for _ in range(lanes)]
    for _ in range(data.draw(st.integers(1, 6))):
        for e in range(lanes):
            n = int(rng.integers(0, 150))
            added = rng.integers(0, 5, n)
            end = frames[e] + np.cumsum(added)
            known[e] += end.tolist()
            new = slice(max(n - depth - 64, 0), None)
            ends.write(np.full(n, e)[new], (rows[e] + np.arange(n))[new], added[new].astype(np.uint8), end[new])
            rows[e] += n
            frames[e] = known[e][-1] if known[e] else 0
        low = np.maximum(rows - depth, 0)
        lane = np.repeat(np.arange(lanes), rows - low)
        count = np.concatenate([np.arange(a, b) for a, b in zip(low, rows, strict=True)])
        live = [known[e][a:] for e, a in enumerate(low)]
        assert ends.of(lane, count, rows, frames).tolist() == [x for own in live for x in own]


# --------------------------------------------------------------------------------------------------- damage


def filled(count: int = 200, axis: int = 1, **more: Any) -> tuple[Store, np.ndarray, np.ndarray]:
    rows = np.stack([game(count, axis=axis, seed=e, every=37) for e in range(2)], 1)
    store = make(rows.shape[2:], lanes=2, length=count - 60, **more)
    tickets = write(store, rows)
    stream(store)
    return store, rows[-100:], tickets[-100:]


@pytest.mark.parametrize("axis", [1, -1])
def test_a_damaged_chunk_is_noticed_by_the_rows_that_show_it(axis: int) -> None:
    store, rows, tickets = filled(axis=axis)
    plane = stream(store).plane
    lane, chunk = plane.live(stream(store).count, stream(store).low)
    noticed = 0
    for i in range(0, len(lane), 5):
        at = chunk[i] % plane.ring, lane[i]
        view = plane.arena.view(int(plane.address[at]), int(plane.length[at]))
        view[3] ^= 16
        for ticket, row in zip(tickets[:, lane[i]], rows[:, lane[i]], strict=True):
            try:
                got, ok = fetch(store, ticket)
            except StoreCorrupted:
                noticed += 1
            else:
                assert ok.all() and same(got, row)
        view[3] ^= 16
    assert noticed > 20
    assert same(fetch(store, tickets)[0], rows)


def test_a_damaged_index_is_noticed_or_makes_no_difference() -> None:
    store, rows, tickets = filled()
    added = stream(store).ends.added
    noticed = 0
    for at in np.ndindex(*added.shape):
        added[at] ^= 2
        try:
            got, ok = fetch(store, tickets)
        except StoreCorrupted:
            noticed += 1
        else:
            assert ok.all() and same(got, rows)
        added[at] ^= 2
    assert noticed >= rows.shape[0] * rows.shape[1]


def test_no_changed_byte_of_a_checkpoint_gives_other_data() -> None:
    store, rows, tickets = filled(100)
    rows, tickets = rows[-40:], tickets[-40:]
    arrays = store.to_arrays()
    rng = np.random.default_rng(0)
    for name in [n for n in arrays if n.startswith("column")]:
        if name.endswith(":encoded") or not arrays[name].nbytes:
            continue
        for _ in range(12):
            damaged = {n: np.array(a) for n, a in arrays.items()}
            flat = damaged[name].reshape(-1).view(np.uint8)
            flat[rng.integers(len(flat))] ^= 1 << rng.integers(8)
            try:
                got, ok = fetch(load(store, damaged), tickets)
            except (StoreCorrupted, ValueError):
                continue
            assert same(got[ok.reshape(tickets.shape)], rows[ok.reshape(tickets.shape)]), name
    assert same(fetch(load(store), tickets)[0], rows)


def test_a_damaged_last_row_costs_frames_and_no_more() -> None:
    store, rows, tickets = filled(100)
    arrays = {n: np.array(a) for n, a in store.to_arrays().items()}
    k, count = stream(store).plane.k, stream(store).count
    payload = arrays["column0:frame:payload"]
    payload[-int(arrays["column0:frame:length"][-2:].sum()) :] ^= 1  # the newest closed chunks
    again = load(store, arrays)
    assert (count % k < 4).any() and not stream(again).known.all()
    more = np.stack([game(140, seed=e, every=37)[100:] for e in range(2)], 1)
    assert same(fetch(again, write(again, more))[0], more)


@pytest.mark.parametrize("watching", [True, False])
def test_damage_while_rows_wait_leaves_them_as_they_are(watching: bool) -> None:
    rows = game(60)[:, None]
    store = make((4, 24, 24))
    tickets = write(store, rows[:12], at_once=1)
    own = part(store)
    assert isinstance(own, Chunks) and own.closed == 3
    own.arena.view(int(own.address[0, 0]), int(own.length[0, 0]))[3] ^= 1
    if watching:
        more = write(store, rows[12:])
        assert isinstance(part(store), Chunks)
        assert same(fetch(store, more)[0], rows[12:])
    with pytest.raises(StoreCorrupted):
        fetch(store, tickets)


# ------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("count", [1, 5, 16, 17, 18, 60, 250])
def test_a_store_goes_on_from_a_checkpoint(count: int) -> None:
    rows = np.stack([game(count + 200, seed=e) for e in range(2)], 1)
    one = make(rows.shape[2:], lanes=2, length=150)
    tickets = write(one, rows[:count])
    two = load(one)
    assert type(part(two)) is type(part(one)) and two._parts[0].watching == one._parts[0].watching
    if isinstance(part(one), FrameStream):
        assert same(stream(two).last, stream(one).last) and stream(two).known.all()
    for store in (one, two):
        tickets = np.concatenate([tickets, write(store, rows[count:])])
        got, ok = fetch(store, tickets[-150:])
        assert ok.all() and same(got, rows[-150:])
        tickets = tickets[:count]
        assert stream(store).stacking == Stacking(1, 4, 24 * 24)
    if isinstance(part(load(one)), FrameStream) and count > 20:
        assert (stream(one).count == stream(two).count).all() and (stream(one).low == stream(two).low).all()


def test_checkpoints_cross_the_setting() -> None:
    rows = game(100)[:, None]
    on = make(rows.shape[2:])
    off = tuple(dataclasses.replace(c, stacks=False) for c in on.columns)
    fixed = {"lanes": 1, "length": 100, "slack": 4}
    tickets = write(on, rows)
    plain = Store(off, **fixed)
    write(plain, rows)
    one = Store.from_arrays(off, on.to_arrays(), **fixed)  # type: ignore[arg-type]
    two = Store.from_arrays(on.columns, plain.to_arrays(), **fixed)  # type: ignore[arg-type]
    assert isinstance(part(one), FrameStream) and isinstance(part(two), Chunks)
    for store in (one, two):
        assert same(fetch(store, tickets)[0], rows)
        assert same(fetch(store, write(store, rows))[0], rows)


def test_arrays_that_do_not_fit_are_refused() -> None:
    store, _, _ = filled(100)
    arrays = store.to_arrays()
    for wrong in (arrays["column0:frames"] * 2, arrays["column0:frames"] << np.array([[0], [50]])):
        crc = checkpoint._checksum(wrong, arrays["column0:added"])
        own = {"column0:frames": wrong, "column0:added_checksum": np.array([crc], np.uint32)}
        with pytest.raises(ValueError, match="Store.from_arrays: rows show .* frames; expected"):
            load(store, arrays | own)
    for name, change in {
        "column0:stacking": lambda a: a + 1,
        "column0:frames": lambda a: a[:, :1],
        "column0:added": lambda a: a[1:],
        "column0:frame:length": lambda a: a[1:],
    }.items():
        with pytest.raises(ValueError, match="Store.from_arrays: .*expected"):
            load(store, arrays | {name: np.ascontiguousarray(change(arrays[name]))})
        with pytest.raises(ValueError, match="missing"):
            load(store, {n: a for n, a in arrays.items() if n != name})


# ----------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("written", [0, 10, 14, 60])
def test_a_failure_in_another_column_leaves_the_store_as_it_was(written: int) -> None:
    """Before, while and after it is decided what rows are."""
    columns = tuple(
        Column(f"c{i}", (4, 24, 24), np.dtype(np.uint8), c, stacks=True)
        for i, c in enumerate((Zstd(chunk=4), Failing()))
    )
    store = Store(columns, lanes=1, length=50, slack=4)
    model, rng = Model(store, 54, 1), np.random.default_rng(0)
    rows = game(120)[:, None]
    bad = rows[written : written + 20].copy()
    bad[:] = np.maximum(bad, 1)
    for i in range(0, written, 5):
        model.write([rows[i : i + 5], np.zeros_like(rows[i : i + 5])], None)
    before = type(part(store)), store.nbytes
    for _ in range(2):
        with pytest.raises(OSError, match="full"):
            store.write([rows[written : written + 20], np.full_like(bad, 77)], None)
        assert (type(part(store)), store.nbytes) == before
        model.check(rng)
    model.write([rows[written : written + 60], np.zeros_like(rows[written : written + 60])], None)
    model.check(rng)
    assert isinstance(part(store), FrameStream)


@pytest.mark.parametrize("place", ["append", "widen", "encode"])
def test_running_out_of_memory_leaves_the_store_as_it_was(place: str) -> None:
    store = make((4, 24, 24), (4, 24, 24), length=60)
    model, rng = Model(store, 64, 1), np.random.default_rng(0)
    rows = game(400)
    order = rng.permutation(400)
    kind = {
        "append": "fbuf._host.arena.Arena.append",
        "widen": "numpy.zeros",
        "encode": "fbuf._host.coder.ZstdCoder.encode",
    }
    for new in (rows[:10], rows[10:50], rows[order[:50]], rows[order[:70]], rows[50:150]):
        for call in range(4):
            real, calls = _resolve(kind[place]), [0]

            def scarce(*args: Any, call: int = call, calls: list[int] = calls, real: Any = real, **more: Any) -> Any:
                calls[0] += 1
                if calls[0] > call:
                    raise MemoryError
                return real(*args, **more)

            failed = False
            with mock.patch(kind[place], scarce):
                try:
                    model.write([new[:, None]] * 2, None)
                except MemoryError:
                    failed = True
            if not failed:
                break
            model.check(rng)
            check_frames(store)
        else:
            model.write([new[:, None]] * 2, None)
        model.check(rng)
        check_frames(store)
    stream(store, 0), stream(store, 1)


def _resolve(name: str) -> Any:
    import importlib

    module, _, rest = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), rest)
    except ModuleNotFoundError:
        module, _, owner = module.rpartition(".")
        return getattr(getattr(importlib.import_module(module), owner), rest)


@pytest.mark.parametrize("axis", [1, -1])
def test_two_threads_read_while_one_writes(axis: int) -> None:
    """Rows tell their own tickets, two lanes: readers see them, or zeros, never a mixture."""
    ago = np.arange(6, -2, -2).reshape((4, 1) if axis == 1 else (1, 4))
    shape = (4, 9) if axis == 1 else (9, 4)
    store = make(shape, lanes=2, length=300, slack=20, dtype="int64")
    top, stop, failures, seen = [0], threading.Event(), list[BaseException](), [0, 0]

    def rows_of(tickets: np.ndarray) -> np.ndarray:
        return np.broadcast_to(tickets[..., None, None].astype(np.int64) - ago, (*tickets.shape, *shape))

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not stop.is_set():
                wanted = rng.integers(max(top[0] - 700, 0), top[0] + 20, (64, 4)).astype(np.uint64)
                got, ok = fetch(store, wanted)
                there = ok.reshape(wanted.shape) & (wanted > 0)
                assert (got[there] == rows_of(wanted)[there]).all() and not got[~there].any()
                seen[seed] += int(there.sum())
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for reader in readers:
        reader.start()
    rng = np.random.default_rng(9)
    for _ in range(150):
        n = int(rng.integers(1, 40))
        expected = np.arange(2 * n, dtype=np.uint64).reshape(n, 2) + np.uint64(top[0] + 1)
        assert (store.write([np.ascontiguousarray(rows_of(expected))], None) == expected).all()
        top[0] = int(expected[-1, -1])
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures, failures[0]
    assert sum(seen) and stream(store).count[0] == stream(store).count[1] == store._count[0] + 3


# -------------------------------------------------------------------------------------------------- as a storage


def transitions(count: int, lanes: int, axis: int = 1) -> dict[str, np.ndarray]:
    shown = np.stack([game(count + 1, axis=axis, seed=e, every=17) for e in range(lanes)], 1)
    ends = np.broadcast_to((np.arange(count) % 17 == 16)[:, None], (count, lanes))
    return {
        "obs": shown[:-1],
        "next_obs": shown[1:],
        "action": np.arange(count * lanes, dtype=np.int32).reshape(count, lanes),
        "reward": np.ones((count, lanes), np.float32),
        "terminated": np.ascontiguousarray(ends),
    }


@pytest.mark.parametrize("axis", [1, -1])
def test_a_buffer_gives_the_same_batches_as_on_the_device(axis: int) -> None:
    rows = transitions(90, 2, axis)
    example = {n: x[0, 0] for n, x in rows.items()}
    batches: list[list[Any]] = []
    for storage in (
        fbuf.storages.Device(),
        fbuf.storages.Compressed(keys=("obs", "next_obs")),
        fbuf.storages.Compressed(keys=("obs", "next_obs"), stacks=False),
    ):
        buffer = fbuf.Buffer(capacity=60, storage=storage, lanes=2)
        state = buffer.init(example)
        for i in range(0, 90, 15):
            state = buffer.extend(state, {n: x[i : i + 15] for n, x in rows.items()})
        state, batch = buffer.sample(state, jax.random.key(3), 32)
        state = buffer.update_rows(state, batch.index, {"obs": np.asarray(batch.data["obs"]) + np.uint8(1)})
        batches.append([batch, buffer.sample(state, jax.random.key(4), 32)[1]])
        if not isinstance(storage, fbuf.storages.Device):
            (handle,) = fbuf.stores()
            held = fbuf._host.owner.find(handle.id)._parts
            assert all(isinstance(p, Stacks) and isinstance(p.inner, FrameStream) for p in held) == storage.stacks
            assert handle.stats()["rows_live"] > 0
        del state
    for others in zip(*batches, strict=True):
        for name in others[0].data:
            for other in others[1:]:
                assert same(np.asarray(others[0].data[name]), np.asarray(other.data[name])), name
        assert others[0].mask.any()


def test_only_zstd_looks_for_stacks() -> None:
    assert not isinstance(make((4, 24, 24), codec=Deflate())._parts[0], Stacks)
    with pytest.raises(TypeError, match="Compressed: stacks is 4; expected True or False"):
        fbuf.storages.Compressed(stacks=4)  # type: ignore[arg-type]


def test_a_plan_counts_frames() -> None:
    rows = {"obs": game(400, every=200)}
    hosts = {}
    for on in (True, False):
        buffer = fbuf.Buffer(20_000, storage=fbuf.storages.Compressed(keys=("obs",), stacks=on))
        hosts[on] = buffer.plan({"obs": rows["obs"][0]}, rows=rows).host
    single = fbuf.Buffer(20_000, storage=fbuf.storages.Compressed(keys=("obs",)))
    alone = single.plan({"obs": frames(1)[0]}, rows={"obs": frames(400)}).host
    assert hosts[True] < 1.3 * alone and hosts[True] < hosts[False]


def test_row_blocks_are_small() -> None:
    assert RowEnds(1, 100_000).size(np.array([100_000])) / 100_000 < 1.2
    assert rowends._BLOCK == 64

"""Stacks of frames as a game gives them, and stores that recognise them."""

from unittest import mock

import numpy as np
from hypothesis import strategies as st

from fbuf._host.codecs import Zstd
from fbuf._host.columns import stacked as _stacked
from fbuf._host.columns.frame_stream import FrameStream, Stacking
from fbuf._host.columns.stacked import StackedColumn
from fbuf._host.store.store import Column, Store
from tests.support.store import DTYPES, check_rows, frames, load, same
from tests.support.store_model import Model

SIZE = 12  # pixels of a line of a small frame


def make(*shapes, lanes=1, length=100, slack=4, **more):
    codec, dtype = more.get("codec", Zstd(chunk=more.get("chunk", 4))), np.dtype(more.get("dtype", np.uint8))
    columns = tuple(Column(f"c{i}", shape, dtype, codec, stacks=True) for i, shape in enumerate(shapes))
    return Store(columns, lanes=lanes, length=length, slack=slack, first_seq=more.get("first_seq", 0))


def part(store, column=0):
    own = store._parts[column]
    assert isinstance(own, StackedColumn)
    return own.inner


def stream(store, column=0):
    own = part(store, column)
    assert isinstance(own, FrameStream)
    return own


def stacked(seen, starts, depth=4, axis=1):
    """Stacks `[T, ...]` of frames `[T, ...]`, the first of an episode repeated before it."""
    first = np.maximum.accumulate(np.where(starts, np.arange(len(seen)), 0))
    at = [np.maximum(np.arange(len(seen)) - ago, first) for ago in range(depth - 1, -1, -1)]
    if axis == -1 and seen.ndim == 4:
        return np.concatenate([seen[a] for a in at], axis=-1)
    return np.ascontiguousarray(np.stack([seen[a] for a in at], axis))


def episodes(count, every=50):
    return np.arange(count) % every == 0


def game(count, size=24, depth=4, axis=1, seed=0, every=50):
    return stacked(frames(count, size, seed), episodes(count, every), depth, axis)


def write(store, *rows, at_once=16):
    """Rows `[T, E, ...]` of all columns in batches; their tickets."""
    size = len(rows[0])
    return np.concatenate([store.write([r[i : i + at_once] for r in rows], None) for i in range(0, size, at_once)])


def check_frames(store):
    """Chunks are kept for the frames that rows show, and no others."""
    for column in range(len(store.columns)):
        own = part(store, column)
        if isinstance(own, FrameStream):
            plane = own.plane
            held = int((own.count // plane.k - own.low // plane.k).sum())
            assert plane.column_stats(own.count, own.low).chunks == held
            assert sum(s.chunks for s in plane.arena.segments.values()) == held
            assert (own.low <= own.count).all() and (own.low >= 0).all()


LAYOUTS = [  # shape of a row, axis of the stack, channels side by side on it
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

    def __init__(self, rng, shape, axis, channels, dtype):
        self.rng, self.axis, self.channels, self.dtype = rng, axis, channels, np.dtype(dtype)
        self.shape = shape
        self.row = self.noise()

    def noise(self):
        return (self.rng.integers(0, 2, self.shape) * self.rng.integers(1, 99)).astype(self.dtype)

    def next(self, kind):
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


def check_calls(data):
    """Agree with a dict after any sequence of calls."""
    lanes = data.draw(st.integers(1, 3), "lanes")
    length, slack = data.draw(st.sampled_from([1, 5, 30, 150]), "length"), data.draw(st.sampled_from([0, 9]), "slack")
    shape, axis, channels = data.draw(st.sampled_from(LAYOUTS), "layout")
    dtype = np.dtype(data.draw(st.sampled_from(["uint8", "float32", "bool", DTYPES[-3]]), "dtype"))
    first = data.draw(st.sampled_from([0, 2**32 - 5]), "first")
    store = make(shape, lanes=lanes, length=length, slack=slack, dtype=dtype, first_seq=first)
    model = Model(store)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), "seed"))
    players = [Player(rng, shape, axis, channels, dtype) for _ in range(lanes)]
    with mock.patch.object(_stacked, "_AT_ONCE", data.draw(st.sampled_from([3, 64]), "converted at once")):
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
                    model.update_rows(
                        tickets, rng.random(3) < 0.8, {0: np.array([players[0].noise() for _ in range(3)])}
                    )
            elif call == "reload":
                store = model.store = load(store)
            model.check(rng)
            check_frames(store)


def check_recognised(dtype, axis, depth):
    seen = np.random.default_rng(0).integers(0, 99, (200, 13, 11)).astype(dtype)
    rows = np.stack([stacked(seen[e::2], episodes(100), depth, axis) for e in range(2)], 1)
    store = make(rows.shape[2:], lanes=2, dtype=dtype)
    check_rows(store, write(store, rows), rows)
    assert stream(store).stacking.frames == depth
    assert stream(store).count.tolist() == [100 + 2 * (depth - 1)] * 2


def filled(count=200, axis=1, **more):
    rows = np.stack([game(count, axis=axis, seed=e, every=37) for e in range(2)], 1)
    store = make(rows.shape[2:], lanes=2, length=count - 60, **more)
    tickets = write(store, rows)
    stream(store)
    return store, rows[-100:], tickets[-100:]


def check_goes_on(count):
    """Write on after a checkpoint of so many rows as the store itself does."""
    rows = np.stack([game(count + 200, seed=e) for e in range(2)], 1)
    one = make(rows.shape[2:], lanes=2, length=150)
    tickets = write(one, rows[:count])
    two = load(one)
    assert type(part(two)) is type(part(one)) and two._parts[0].watching == one._parts[0].watching
    if isinstance(part(one), FrameStream):
        assert same(stream(two).last, stream(one).last) and stream(two).known.all()
    for store in (one, two):
        tickets = np.concatenate([tickets, write(store, rows[count:])])
        check_rows(store, tickets[-150:], rows[-150:])
        tickets = tickets[:count]
        assert stream(store).stacking == Stacking(1, 4, 24 * 24)
    if isinstance(part(load(one)), FrameStream) and count > 20:
        assert (stream(one).count == stream(two).count).all() and (stream(one).low == stream(two).low).all()

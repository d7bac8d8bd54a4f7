"""Stores of every kind of column, what is done to them, and the blocks of what they hand out to be saved."""

import dataclasses
import itertools
from typing import Any

import numpy as np

from fbuf._host.codecs import Zstd
from fbuf._host.memory.lazy_array import Lazy
from fbuf._host.store.store import UPDATE_BIT, Column, Store
from tests.support import disk
from tests.support.store import Deflate


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    codec: Any
    shape: tuple[int, ...] = (24, 24)
    lanes: int = 2
    stacks: bool = False
    streams: bool = True
    files: bool = False
    length: int = 60

    def columns(self):
        return (Column("c", self.shape, np.dtype(np.uint8), self.codec, self.stacks),)

    @property
    def sizes(self):
        return {"lanes": self.lanes, "length": self.length, "slack": 9}

    def make(self, path, arrays=None):
        if self.files:
            return disk.make(path, self.columns(), **self.sizes, arrays=arrays)
        settings = self.sizes | {"streams": self.streams}
        if arrays is None:
            return Store(self.columns(), **settings)
        return Store.from_arrays(self.columns(), arrays, **settings)


CASES = [
    Case("ring", None),
    Case("zstd", Zstd(chunk=4)),
    Case("zstd-one-lane", Zstd(chunk=4, dictionary=4), lanes=1),
    Case("own", Deflate()),
    Case("stacks", Zstd(chunk=4), (4, 16, 16), stacks=True),
    Case("no-stacks", Zstd(chunk=4), (4, 16, 16), stacks=True, lanes=1),
    Case("places", Zstd(), streams=False),
    Case("places-ring", None, streams=False),
    Case("file-ring", None, files=True),
    Case("file-zstd", Zstd(chunk=4), files=True),
    Case("file-own", Deflate(), files=True),
]


class Life:
    def __init__(self, case, path, seed):
        self.case, self.rng = case, np.random.default_rng(seed)
        self.store = case.make(path)
        self.game = self._game()
        self.tickets = []
        self.rows = {}  # by ticket

    def _game(self):
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

    def write(self, number, share):
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

    def update_rows(self):
        if self.tickets:
            old = self.rng.choice(np.array(self.tickets[-40:], np.uint64), 2)
            rows = np.stack(list(itertools.islice(self.game, 2)))
            new = self.store.update_rows(old, np.ones(2, bool), {0: rows})
            self.rows |= {
                int(t): row.tobytes() for t, row in zip(new, rows, strict=True) if t >= UPDATE_BIT and t not in old
            }
            self.tickets += [int(t) for t in new if t >= UPDATE_BIT]

    def step(self, call):
        if call == "patch":
            self.update_rows()
        elif call == "repack":
            self.store.repack()
        elif call == "wrap":
            self.write(self.case.length + 10, 1)
        else:
            self.write(int(self.rng.choice([1, 3, 17])), 1 if call == "write" else 0.5)


def whole(arrays):
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def blocks_of(array):
    """The blocks of a source by key or place: marks and bytes. Views are compared, and have no marks."""
    if not isinstance(array, Lazy) or array.slices_are_views:
        return {}
    rows = array.shape[0]
    if array.cuts is not None:
        cuts, keys = array.cuts, array.keys
        assert keys is not None and len(set(keys)) == len(keys) == len(cuts) - 1 and cuts[-1] == rows
    else:
        assert array.block is not None and array.block & array.block - 1 == 0
        cuts = [*range(0, rows, array.block), rows] if rows else [0]
        keys = range(len(cuts) - 1)
    assert array.marks is not None and len(array.marks) == len(cuts) - 1
    spans_of = zip(cuts[:-1], cuts[1:], strict=True)
    return {k: (m, array[a:b].tobytes()) for k, m, (a, b) in zip(keys, array.marks, spans_of, strict=True)}


def check_marks(before, after):
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

"""Stores in files whose every call of the file system is recorded, and the folders that a power failure leaves.

The model: names, sizes and removals reach the disk, bytes do unless they were written after the last `fsync` of their file.
`Disk` replays the calls; that all of them give the very files that are there (`check_complete`) shows that none was missed.
"""

import os
import shutil
from pathlib import Path

import numpy as np

from fbuf._host.codecs import Zstd
from fbuf._host.store.store import Column
from fbuf._host.types import StoreCorrupted
from tests.support.disk import make
from tests.support.store import Deflate, columns_of, fetch

SMALL = Column("small", (), np.dtype("int64"), None)
KINDS = {
    "raw": (*columns_of(None, shape=(96,)), SMALL),
    "chunks": (*columns_of(Zstd(chunk=4), shape=(96,)), SMALL),
    "dictionaries": (*columns_of(Zstd(chunk=2), shape=(512,)), SMALL),
    "own": columns_of(None, Deflate(chunk=3), shape=(96,)),
    "noise": (*columns_of(Zstd(chunk=4), shape=(512,)), SMALL),
}
LANES, LENGTH, SLACK = 3, 60, 10
_NOISE = np.random.default_rng(0).integers(0, 256, (4096, 512), np.uint8)


def content(kind, column, lane, count, version):
    """Return the rows of these lanes and counts, `[M, *shape]`; updates of a row have versions from 1 on."""
    name = (count * 3 + lane) + version * 1_000_000
    if column.shape == ():
        return name.astype(np.int64)
    if kind == "noise":
        return _NOISE[name % 4096][:, : column.shape[0]]
    words = np.repeat(name[:, None].astype("<u4"), column.shape[0] // 4, 1)
    if kind == "dictionaries":  # alike between rows, not within one
        words = words * np.uint32(0) + np.arange(column.shape[0] // 4, dtype="<u4") ** 2
        words[:, :2] = name[:, None]
    return np.ascontiguousarray(words).view(np.uint8)


class Node:
    """The bytes of a file, and those of them that are on the disk, with its size."""

    def __init__(self, data=b""):
        self.data, self.durable = bytearray(data), bytearray(data)

    def truncate(self, size):
        for bytes_ in (self.data, self.durable):
            del bytes_[size:]
            bytes_.extend(bytes(size - len(bytes_)))

    def write(self, at, data):
        self.truncate(max(len(self.data), at + len(data)))
        self.data[at : at + len(data)] = data


class Recorder:
    """Record the calls that change files under `path`, in a `with` block."""

    CALLS = ("open", "pwrite", "ftruncate", "replace", "rename", "unlink", "remove", "fsync", "link")

    def __init__(self, path):
        self.path = str(path)
        self.calls = []
        self.start = {p.name: p.read_bytes() for p in Path(path).iterdir()} if os.path.isdir(path) else {}
        self._nodes = {name: name for name in self.start}  # by name: what the calls say of its file
        self._files = {}  # by descriptor
        self._number = 0

    def __enter__(self):
        self._real = {name: getattr(os, name) for name in self.CALLS}
        for name in self.CALLS:
            setattr(os, name, getattr(self, f"_{name}"))
        return self

    def __exit__(self, *_):
        for name, call in self._real.items():
            setattr(os, name, call)

    def _name(self, path):
        folder, name = os.path.split(os.path.abspath(os.fspath(path)))
        return name if folder == self.path else None

    def _open(self, path, flags, mode=0o777, **more):
        fd = self._real["open"](path, flags, mode, **more)
        name = self._name(path)
        self._files.pop(fd, None)
        if name is not None:
            if name not in self._nodes:
                self._number += 1
                self._nodes[name] = self._number
                self.calls.append(("create", name, self._number))
            elif flags & os.O_TRUNC:
                self.calls.append(("truncate", self._nodes[name], 0))
            self._files[fd] = self._nodes[name]
        return fd

    def _pwrite(self, fd, data, at):
        done = self._real["pwrite"](fd, data, at)
        if fd in self._files:
            self.calls.append(("write", self._files[fd], at, bytes(memoryview(data)[:done])))
        return done

    def _ftruncate(self, fd, size):
        self._real["ftruncate"](fd, size)
        if fd in self._files:
            self.calls.append(("truncate", self._files[fd], size))

    def _replace(self, old, new, **more):
        self._real["replace"](old, new, **more)
        a, b = self._name(old), self._name(new)
        if a is not None and b is not None:
            self._nodes[b] = self._nodes.pop(a)
            self.calls.append(("rename", a, b))

    _rename = _replace

    def _unlink(self, path, **more):
        self._real["unlink"](path, **more)
        name = self._name(path)
        if name is not None:
            del self._nodes[name]
            self.calls.append(("unlink", name))

    _remove = _unlink

    def _link(self, *_, **__):
        raise NotImplementedError("links are not recorded")

    def _fsync(self, fd):  # not done: it would only cost time
        if fd in self._files:
            self.calls.append(("sync", self._files[fd]))

    def note(self, *what):
        """Add something of the test's own to the calls."""
        self.calls.append(("note", *what))


class Disk:
    """What the calls so far left: names, bytes, and those of them that a power failure leaves."""

    def __init__(self, start):
        self.nodes = {name: Node(data) for name, data in start.items()}
        self.names = dict(self.nodes)

    def apply(self, kind, *args):
        if kind == "create":
            self.names[args[0]] = self.nodes[args[1]] = Node()
        elif kind == "truncate":
            self.nodes[args[0]].truncate(args[1])
        elif kind == "write":
            self.nodes[args[0]].write(*args[1:])
        elif kind == "rename":
            self.names[args[1]] = self.names.pop(args[0])
        elif kind == "unlink":
            del self.names[args[0]]
        elif kind == "sync":
            self.nodes[args[0]].durable[:] = self.nodes[args[0]].data

    def leave(self, target):
        """Write what a power failure leaves into a new folder."""
        target.mkdir()
        for name, node in self.names.items():
            (target / name).write_bytes(node.durable)

    def check_complete(self, path):
        there = {p.name: p.read_bytes() for p in Path(path).iterdir()}
        assert there == {name: bytes(node.data) for name, node in self.names.items()}


class Expected:
    """What must be there after a power failure: `flushed` rows still within capacity, with one of the known versions."""

    def __init__(self):
        self.flushed = np.zeros(LANES, np.int64)
        self.after = np.zeros(LANES, np.int64)  # rows of each lane, those that are being written included
        self.versions = {}  # by row, those that it may have now

    def apply(self, what, *args):
        if what == "write":
            (self.after,) = args
        elif what == "update":
            for row, version in args[0].items():
                self.versions.setdefault(row, {0}).add(version)
        elif what == "flush":
            self.flushed, latest = args
            self.versions = {row: {version} for row, version in latest.items()}


def opened(kind, path, resume):
    return make(path, KINDS[kind], lanes=LANES, length=LENGTH, slack=SLACK, resume=resume)


def check(kind, store, expected):
    """Read every row of a resumed store: each flushed one within capacity is there, and none is another."""
    count, tickets, _ = store.newest()
    place, lane = np.nonzero(tickets)
    row = place + (count[lane] - 1 - place) // LENGTH * LENGTH
    there = set(zip(lane.tolist(), row.tolist(), strict=True))
    for e in range(LANES):
        needed = range(max(int(expected.after[e]) - LENGTH, 0), int(expected.flushed[e]))
        missing = [r for r in needed if (e, r) not in there]
        assert not missing, f"lane {e}: {len(missing)} of {len(needed)} flushed rows are missing, first {missing[0]}"
    versions = None
    for i, column in enumerate(store.columns):
        got, ok = fetch(store, tickets[place, lane], i)
        assert ok.all()
        same = np.zeros((len(row), 0), bool)
        allowed = [sorted(expected.versions.get((e, r), {0})) for e, r in zip(lane.tolist(), row.tolist(), strict=True)]
        most = max(map(len, allowed), default=1)
        table = np.array([(a * most)[:most] for a in allowed], np.int64).reshape(-1, most)
        for at in range(most):
            want = content(kind, column, lane, row, table[:, at])
            same = np.concatenate([same, (got == want).reshape(len(row), -1).all(axis=1)[:, None]], axis=1)
        assert same.any(axis=1).all(), f"column {i}: rows {row[~same.any(axis=1)][:5]} of {lane[~same.any(axis=1)][:5]}"
        found = table[np.arange(len(row)), np.argmax(same, axis=1)]
        assert versions is None or (versions == found).all()
        versions = found
    return len(row)


def work(kind, seed, path, steps):
    """Write, update, flush and resume at random; return the recorded calls and what the folder held first."""
    rng = np.random.default_rng(seed)
    latest, version = {}, 0
    with Recorder(path) as recorder:
        store = opened(kind, path, resume=False)
        slow = rng.random(LANES) < 0.4  # lanes that get few rows: their chunks are moved
        for _ in range(steps):
            chance = rng.random()
            if chance < 0.1:
                store.flush()
                recorder.note("flush", store._count.copy(), dict(latest))
            elif chance < 0.13:
                store.close()
                store = opened(kind, path, resume=True)
                assert not store.warning
            elif chance < 0.4:
                count, tickets, _ = store.newest()
                place, lane = np.nonzero(tickets)
                pick = rng.permutation(len(place))[: int(rng.integers(1, 20))]
                place, lane, version = place[pick], lane[pick], version + 1
                row = place + (count[lane] - 1 - place) // LENGTH * LENGTH
                made = {(e, r): version for e, r in zip(lane.tolist(), row.tolist(), strict=True)}
                recorder.note("update", made)
                values = {
                    i: content(kind, c, lane, row, np.full(len(row), version)) for i, c in enumerate(store.columns)
                }
                store.update_rows(tickets[place, lane], np.ones(len(row), bool), values)
                latest |= made
            else:
                n = int(rng.integers(1, 24))
                keep = rng.random((n, LANES)) < np.where(slow, 0.04, 0.9)
                count = store._count + np.cumsum(keep, axis=0) - 1
                lanes = np.broadcast_to(np.arange(LANES), count.shape)
                recorder.note("write", store._count + keep.sum(axis=0))
                rows = [
                    content(kind, c, lanes.reshape(-1), count.reshape(-1), np.zeros(count.size, np.int64)).reshape(
                        n, LANES, *c.shape
                    )
                    for c in store.columns
                ]
                store.write(rows, keep)
        store.close()
    return recorder


def check_prefixes(kind, seed, path, steps, prefixes=None, again=0.0):
    """Resume after a power failure at each of some calls: `prefixes` at random, or after each that removes or renames.

    Args:
      again: The share of cases in which the power fails again while the store is resumed, at each call.
    Returns:
      How many cases there were, and the recorded calls.
    """
    rng = np.random.default_rng(seed)
    recorder = work(kind, seed, path / "0", steps)
    calls = recorder.calls
    if prefixes is None:
        wanted = {i + 1 for i, call in enumerate(calls) if call[0] in ("rename", "unlink")}
    else:
        wanted = set(rng.integers(1, len(calls), prefixes).tolist())
    published = next(i for i, call in enumerate(calls) if call[:3] == ("rename", "manifest.json.new", "manifest.json"))
    disk, expected, cases = Disk(recorder.start), Expected(), 0
    for at, call in enumerate(calls, 1):
        (expected if call[0] == "note" else disk).apply(*call[call[0] == "note" :])
        if at in wanted and at > published and expected.flushed.any():
            cases += 1 + resumed(kind, disk, expected, path / "1", again and rng.random() < again)
    disk.check_complete(path / "0")
    return cases, calls


def resumed(kind, disk, expected, target, again):
    """Resume from what a power failure leaves; return how many further failures, while it resumed, were tried."""
    disk.leave(target)
    store = None
    try:
        with Recorder(target) as recorder:
            store = opened(kind, target, resume=True)
        check(kind, store, expected)
        assert not [p.name for p in target.iterdir() if p.name.endswith(".old")]
    except StoreCorrupted:
        assert (expected.flushed <= np.maximum(expected.after - LENGTH, 0)).all()  # only expired rows are left
        return 0
    finally:
        if store is not None:
            store.close()
        shutil.rmtree(target)
    if not again:
        return 0
    second = Disk(recorder.start)
    for call in recorder.calls:
        second.apply(*call)
        resumed(kind, second, expected, target, False)
    return len(recorder.calls)

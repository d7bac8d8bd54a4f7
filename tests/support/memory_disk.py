"""Arrays that change from save to save, and disks for them: in memory, or failing at the n-th call."""

from __future__ import annotations

import errno
import os

import numpy as np

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint import Disk
from fbuf._formats.checkpoint.filesystem import DISK

CALLS = ("open", "pwritev", "pread", "size", "fsync", "rename", "unlink", "mkdir", "listdir")
PATH = "/checkpoint"  # in memory


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def same(saved, arrays):
    assert list(saved.arrays) == list(arrays)
    for name, array in arrays.items():
        got = np.asarray(saved.arrays[name])
        assert got.shape == saved.arrays[name].shape == array.shape, name
        assert got.dtype == saved.arrays[name].dtype == array.dtype, name
        assert bits(got) == bits(array), name


class Source:
    """An array with or without marks that counts its reads."""

    def __init__(self, array, marks):
        self.array, self.marks, self.reads = array, marks, 0
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, rows):
        self.reads += 1
        return self.array[rows]


class Blocks(Source):
    def __init__(self, array, block, marks=None):
        super().__init__(array, marks)
        self.block = block


class Keyed(Source):
    def __init__(self, parts, marked=True):
        array = np.concatenate([*parts.values(), np.zeros(0, np.uint8)]).astype(np.uint8)
        super().__init__(array, list(parts) if marked else None)
        self.keys = list(parts)
        self.cuts = np.cumsum([0, *(len(p) for p in parts.values())])


class File:
    def __init__(self):
        self.data = bytearray()
        self.durable = b""
        self.pending = []


class Memory(Disk):
    """A disk in memory with one folder; it knows what is durable."""

    def __init__(self, path=PATH):
        self.path = path
        self.names = {}
        self.durable = {}
        self.pending = []  # entries created and (None) removed since
        self._open = {}
        self._next = 1 << 40

    def copy(self):
        other = Memory(self.path)
        for name, file in self.names.items():
            other.put(name, bytes(file.data))
        return other

    def put(self, name, data):
        file = File()
        file.data[:] = data
        file.durable = data
        self.names[name] = self.durable[name] = file

    def contents(self):
        return {name: bytes(file.data) for name, file in self.names.items() if name != "lock"}

    def open(self, path, flags):
        folder, name = os.path.split(path)
        if name == "lock":
            return os.memfd_create("lock")
        fd, self._next = self._next, self._next + 1
        if flags & os.O_DIRECTORY:
            self._open[fd] = None
            return fd
        there = name in self.names
        if not there and not flags & os.O_CREAT:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        if there and flags & os.O_EXCL:
            raise FileExistsError(errno.EEXIST, "it is there", path)
        if not there or flags & os.O_TRUNC:
            self.names[name] = File()
            self.pending.append((name, self.names[name]))
        self._open[fd] = self.names[name]
        return fd

    def close(self, fd):
        if fd < 1 << 40:
            os.close(fd)
        else:
            del self._open[fd]

    def is_at(self, lock, path):
        return True

    def pwritev(self, fd, parts, at):
        file, new = self._open[fd], b"".join(parts)
        write_at(file.data, new, at)
        file.pending.append((at, new))
        return len(new)

    def pread(self, fd, out, at):
        part = self._open[fd].data[at : at + out.nbytes]
        out[: len(part)] = part
        return len(part)

    def size(self, fd):
        return len(self._open[fd].data)

    def start_writeback(self, fd, at, size):
        pass

    def fsync(self, fd):
        file = self._open[fd]
        if file is None:
            self.durable, self.pending = dict(self.names), []
        else:
            file.durable, file.pending = bytes(file.data), []

    def rename(self, old, new):
        file = self.names.pop(os.path.basename(old))
        self.names[os.path.basename(new)] = file
        self.pending += [(os.path.basename(new), file), (os.path.basename(old), None)]

    def unlink(self, path):
        name = os.path.basename(path)
        if name not in self.names:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        del self.names[name]
        self.pending.append((name, None))

    def mkdir(self, path):
        raise FileExistsError(errno.EEXIST, "it is there", path)

    def isdir(self, path):
        return True

    def listdir(self, path):
        return list(self.names)

    def crashes(self, chance, count):
        """Yield disks that a power failure may leave: none, all, or any part of what was not synced."""
        for trial in range(count):
            share = (0.0, 1.0, 0.5, 0.9, 0.1)[trial % 5]
            left = Memory(self.path)
            names = dict(self.durable)
            for name, file in self.pending if trial % 2 else chance.sample(self.pending, len(self.pending)):
                if chance.random() < share or share == 1.0:
                    if file is None:
                        names.pop(name, None)
                    else:
                        names[name] = file
            for name, file in names.items():
                data = bytearray(file.durable)
                for at, new in file.pending:
                    if chance.random() < share:
                        write_at(data, new, at)
                    elif chance.random() < 0.5:  # the length was written, the bytes were not
                        write_at(data, b"", at + len(new))
                left.put(name, bytes(data))
            yield left


def write_at(data, new, at):
    data.extend(bytes(max(at + len(new) - len(data), 0)))
    data[at : at + len(new)] = new


class Killed(BaseException):
    """The process ended."""


class Faulty(Disk):
    """Another disk whose n-th call fails (`error` None: is the last), or writes half, alone or with all calls after it."""

    def __init__(self, disk=DISK, at=None, error=errno.EIO, kinds=CALLS, dead=False, short=False):
        self.disk, self.at, self.error, self.kinds = disk, at, error, kinds
        self.dead, self.short = dead, short
        self.count, self.failed = 0, False
        for kind in CALLS:
            setattr(self, kind, self._call(kind))
        self.close, self.isdir, self.is_at, self.start_writeback = (
            disk.close,
            disk.isdir,
            disk.is_at,
            disk.start_writeback,
        )

    def _call(self, kind):
        def call(*args):
            if self.failed and self.dead:
                self._fail()
            if kind in self.kinds:
                self.count += 1
                if self.count - 1 == self.at:
                    self.failed = True
                    if self.short and kind == "pwritev":
                        whole = b"".join(args[1])
                        return self.disk.pwritev(args[0], [memoryview(whole)[: max(len(whole) // 2, 1)]], args[2])
                    self._fail()
            return getattr(self.disk, kind)(*args)

        return call

    def _fail(self):
        if self.error is None:
            raise Killed
        raise OSError(self.error, os.strerror(self.error))


def state(k, rows=40):
    """Return the arrays of save `k`: some rows change from save to save, some arrays grow, some stay."""
    rng = np.random.default_rng(k)
    log = np.concatenate([np.random.default_rng(i).integers(0, 256, 50, np.uint8) for i in range(k + 1)])
    table = np.zeros((rows, 5), np.float32)
    for i in range(k + 1):
        table[i % rows] = i
    return {
        "log": log,
        "table": table,
        "priority": rng.random(30).astype(np.float32),
        "fixed": np.arange(60, dtype=np.int32).reshape(20, 3),
        "step": np.array(k),
    }


def sources(k, rows=40):
    """Return the same as sources: keyed with marks, blocks with marks, blocks without."""
    arrays = state(k, rows)
    pieces = {f"piece-{i}": arrays["log"][50 * i : 50 * i + 50] for i in range(k + 1)}
    last = [max((i for i in range(k + 1) if i % rows // 4 == b), default=-1) for b in range(-(-rows // 4))]
    return arrays | {
        "log": Keyed(pieces),
        "table": Blocks(arrays["table"], 4, [f"written at {i}" for i in last]),
        "priority": Blocks(arrays["priority"], 8),
    }


def save(path, k, disk=DISK, **how):
    return checkpoint.write(path, sources(k), {"k": k}, disk=disk, **how)


def disk_of(*numbers, **how):
    disk = Memory()
    for k in numbers:
        save(PATH, k, disk, **how)
    return disk


def load(path, disk=DISK, **how):
    with checkpoint.read(path, disk=disk, **how) as saved:
        k = saved.meta["k"]
        same(saved, state(k))
    return k

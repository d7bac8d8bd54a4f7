"""A save by several processes is atomic: every call of each may fail, or be its last."""

import errno
import random
import threading

import numpy as np
import pytest

from fbuf._formats import checkpoint
from tests.support.memory_disk import PATH, Faulty, Killed, Memory, load, save, sources
from tests.support.threads import PATIENCE

pytestmark = pytest.mark.more


class Together:
    """One of several processes."""

    def __init__(self, index, barrier, said):
        self.index, self.count, self._barrier, self._said = index, len(said), barrier, said

    def first(self, work):
        return str(self._turn(work if self.index == 0 else lambda: self._said[0])[0])

    def each(self, work):
        return self._turn(work)[self.index]

    def _turn(self, work):
        error = None
        self._said[self.index] = None
        self._barrier.wait(PATIENCE)
        for turn in range(self.count):
            if turn == self.index:
                try:
                    self._said[turn] = work()
                except Exception as raised:
                    error = raised
            self._barrier.wait(PATIENCE)
        found = list(self._said)
        self._barrier.wait(PATIENCE)
        if error is not None or None in found:
            raise error or RuntimeError("the other process failed")
        return found


def save_together(k, disks, **how):
    """Write save `k`, each process its arrays; return what the processes returned, raised, or Killed."""
    count = len(disks)
    barrier, said, out = threading.Barrier(count), [None] * count, [None] * count
    arrays = sources(k)
    mine = [{str(name): arrays[name] for name in names} for names in np.array_split(list(arrays), count)]

    def run(index):
        group, meta = Together(index, barrier, said), {"k": k, "process": index}
        try:
            out[index] = checkpoint.write_jointly(
                PATH, mine[index], meta, group, lambda parts: parts[0], disk=disks[index], **how
            )
        except (Exception, Killed) as raised:
            out[index] = raised
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return out


def found(disk):
    try:
        return load(PATH, disk)
    except checkpoint.CheckpointNotFound:
        return -1


def test_saves_build_on_one_another_with_any_number_of_processes():
    disk = Memory()
    first = save_together(0, (disk, disk))
    assert [each.generation for each in first] == [2, 2] and found(disk) == 0
    second = save_together(1, (disk, disk))
    assert found(disk) == 1 and sum(each.bytes_written for each in second) < sum(w.bytes_written for w in first) + 600
    save(PATH, 2, disk)
    assert found(disk) == 2
    save_together(3, (disk, disk, disk), keep=1)
    assert found(disk) == 3
    assert not [name for name in disk.contents() if name.endswith(".new")]
    assert len([name for name in disk.contents() if name.startswith("manifest")]) == 1


@pytest.mark.parametrize("number", [None, errno.ENOSPC], ids=["killed", "full"])
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("before", [0, 2])
def test_a_failure_at_any_call_leaves_the_old_save_or_the_new(before, process, number):
    base, chance, tried = Memory(), random.Random(0), 0
    for k in range(before):
        save_together(k, (base, base))
    for at in range(1000):
        disk = base.copy()
        faulty = Faulty(disk, at, number, dead=number is None)
        disks = (faulty, disk) if process == 0 else (disk, faulty)
        out = save_together(before, disks)
        assert not faulty.failed or number is not None or isinstance(out[process], Killed)
        now = found(disk)
        assert now in ((before - 1, before) if faulty.failed else (before,)), (at, out)
        for left in disk.crashes(chance, 3 if number is None else 0):  # power fails too
            assert found(left) in (before - 1, before), at
        tried += faulty.failed
        save_together(before + 1, (disk, disk))
        assert found(disk) == before + 1
        assert not [name for name in disk.contents() if name.endswith(".new")]
        if not faulty.failed:
            break
    assert tried > 5

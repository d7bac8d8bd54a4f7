"""A save by several processes is atomic: every call of each may fail, or be its last."""

import errno
import random

import pytest

from fbuf._formats import checkpoint
from tests.support.joint_saves import save_together
from tests.support.memory_disk import PATH, Faulty, Killed, Memory, load, save


def found(disk: Memory) -> int:
    try:
        return load(PATH, disk)
    except checkpoint.CheckpointNotFound:
        return -1


def test_saves_build_on_one_another_with_any_number_of_processes() -> None:
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
def test_a_failure_at_any_call_leaves_the_old_save_or_the_new(before: int, process: int, number: int | None) -> None:
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

"""More of `Replay.epoch`: storages on the host, writers that choose slots, closed replays."""

import pytest

import fbuf
from tests.replay.test_epoch import EXAMPLE, numbers, rows


@pytest.mark.parametrize("storage", [fbuf.storages.Compressed(keys=("t",)), fbuf.storages.Ragged()], ids=repr)
def test_rows_on_the_host(storage):
    replay = fbuf.Replay(fbuf.Buffer(10, storage=storage), EXAMPLE)
    replay.extend(rows(0, 14))
    assert sorted(numbers(replay.epoch(3))) == list(range(4, 14))


def test_it_works_for_every_writer_and_after_close():
    replay = fbuf.Replay(fbuf.Buffer(8, writer=fbuf.writers.TopK("t")), EXAMPLE)
    replay.extend(rows(0, 30))
    replay.close()
    assert sorted(numbers(replay.epoch(3))) == list(range(22, 30))

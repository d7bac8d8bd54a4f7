"""`Replay.epoch`: every row that can be sampled at its start, once, whatever happens meanwhile."""

import jax
import numpy as np
import pytest

import fbuf
from fbuf import samplers, views
from tests.support.refusals import raises
from tests.support.tables import by_tier

EXAMPLE = {"t": np.int32(0), "terminated": False}


def rows(first, count, lanes=None):
    shape = (count,) if lanes is None else (count, lanes)
    t = np.arange(first, first + count * (lanes or 1), dtype=np.int32).reshape(shape)
    return {"t": t, "terminated": np.zeros(shape, bool)}


def numbers(batches):
    return [int(t) for batch in batches for t in batch.data["t"][np.asarray(batch.mask)].reshape(-1)]


@pytest.mark.parametrize("sampler", by_tier(samplers.Consume(), more=[samplers.Prioritized()], ids=repr))
def test_each_row_once_and_nothing_else_changes(sampler):
    """Consumed rows are drawn too; sampler, limit and counts stay as they are; only one key is taken."""
    limit = fbuf.limits.at_most(1)
    one, other = (fbuf.Replay(fbuf.Buffer(16, sampler=sampler), EXAMPLE, limit=limit) for _ in range(2))
    for replay in (one, other):
        replay.extend(rows(0, 20))
        replay.sample(5)
    epoch = one.epoch(6, to="numpy")
    first, second = list(epoch), list(epoch)
    assert [len(batch.mask) for batch in first] == [6, 6, 4] and len(epoch) == 3
    assert sorted(numbers(first)) == sorted(numbers(second)) == list(range(4, 20))
    assert numbers(first) != numbers(second) != sorted(numbers(second))
    assert all((batch.probability == np.float32(1 / 16)).all() and (batch.weight == 1).all() for batch in first)
    assert one.stats() == other.stats()
    state, old = one.state, other.state
    assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(*map(jax.tree.leaves, (state, old)), strict=True))
    one.update_priority(first[0].index, np.ones(6, np.float32)) if sampler.prioritized else None
    again = fbuf.Replay(fbuf.Buffer(16, sampler=sampler), EXAMPLE)  # equal seeds and histories, equal batches
    again.extend(rows(0, 20))
    again.sample(5)
    assert numbers(again.epoch(6)) == numbers(first)


@pytest.mark.parametrize(
    ("count", "drop_last", "sizes"), [(11, True, [4, 4]), (8, False, [4, 4]), (3, True, []), (0, False, [])]
)
def test_the_length_is_right(count, drop_last, sizes):
    replay = fbuf.Replay(fbuf.Buffer(16, batch_size=4), EXAMPLE)
    replay.extend(rows(0, count))
    epoch = replay.epoch(drop_last=drop_last, shuffle=False)
    assert len(epoch) == len(sizes) and [len(batch.mask) for batch in epoch] == sizes
    assert numbers(epoch) == list(range(sum(sizes)))


def test_rows_written_meanwhile_are_not_in_it_and_overwritten_ones_are_masked():
    replay = fbuf.Replay(fbuf.Buffer(20, lanes=2), {"t": np.int32(0), "terminated": False})
    replay.extend(rows(0, 10, lanes=2))
    epoch = replay.epoch(6, shuffle=False)
    seen = []
    for i, batch in enumerate(epoch):
        assert len(epoch) == 4
        seen.append(np.where(batch.mask, batch.data["t"], -1).tolist())
        if i == 0:
            for row in range(4):  # collected one by one, and overwriting 0 to 7
                replay.add({"t": np.full(2, 100 + row, np.int32), "terminated": np.zeros(2, bool)})
    assert seen == [[0, 1, 2, 3, 4, 5], [-1, -1, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17], [18, 19]]
    replay.clear()
    assert numbers(epoch) == [] and len(epoch) == 4


@pytest.mark.more
def test_windows_that_lost_a_row_are_masked():
    """The anchor is still held; its stack is not."""
    view = views.Transition(
        observation="t", action=None, reward="t", truncated=None, stack=3, n_step=2, autoreset="same_step"
    )
    replay = fbuf.Replay(fbuf.Buffer(12, view=view), EXAMPLE)
    replay.extend(rows(0, 12))
    epoch = replay.epoch(12, shuffle=False)
    (batch,) = epoch
    assert np.asarray(batch.data["obs"])[:, -1].tolist() == list(range(10)) and batch.mask.all()
    replay.extend(rows(12, 3))
    (batch,) = epoch
    assert np.asarray(batch.mask).tolist() == [False] * 5 + [True] * 5
    assert not np.asarray(batch.data["obs"])[:5].any()


@pytest.mark.more
def test_leaves_of_64_bits_are_exact():
    replay = fbuf.Replay(fbuf.Buffer(8, storage=fbuf.storages.Host(keys=("id",))), {"id": np.int64(0), "t": 0})
    ids = np.arange(5) + 2**40
    replay.extend({"id": ids, "t": np.arange(5)})
    batches = list(replay.epoch(3, shuffle=False, to="numpy"))
    assert np.concatenate([batch.data["id"] for batch in batches]).tolist() == ids.tolist()


def test_arguments_are_checked():
    replay = fbuf.Replay(fbuf.Buffer(8), EXAMPLE)
    raises(TypeError, "Replay.epoch: drop_last is 'no'; expected a bool", replay.epoch, 4, drop_last="no")
    raises(ValueError, "Replay.epoch: to is 'numpi'", replay.epoch, 4, to="numpi")
    raises(TypeError, r"Replay.epoch: batch_size is missing. Write epoch\(batch_size\)", replay.epoch)


PARTS = [{"storage": fbuf.storages.Compressed(keys=("t",))}, {"storage": fbuf.storages.Ragged()}]
PARTS += [{"writer": fbuf.writers.TopK("t")}]


@pytest.mark.more
@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_epochs_of_other_parts_also_after_close(parts):
    replay = fbuf.Replay(fbuf.Buffer(10, **parts), EXAMPLE)
    replay.extend(rows(0, 30))
    replay.close()
    assert sorted(numbers(replay.epoch(3))) == list(range(20, 30))

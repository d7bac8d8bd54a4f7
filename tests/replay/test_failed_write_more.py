"""Rows that a storage lost: gaps, cuts, and all states after writes that failed; see `tests/replay/test_failed_write.py`."""

import jax
import numpy as np
import pytest

import fbuf
from tests.support.failing_writes import PLAIN, check, failing, held, plain_buffer, plain_rows, wait

pytestmark = pytest.mark.more


@pytest.mark.parametrize("storage", ["memmap", "files"])
def test_no_window_spans_the_rows_that_a_scan_lost(storage, tmp_path):
    view = fbuf.views.Sequence(3, episode_end=())
    buffer = fbuf.Buffer(40, storage=plain_buffer(storage, tmp_path / "store").storage, view=view)

    @jax.jit
    def steps(state, rows):
        return jax.lax.scan(lambda state, row: (buffer.add(state, row), None), state, rows)[0]

    state = steps(buffer.init(PLAIN), plain_rows(0, 6))
    with failing(after=8, times=2):
        state = wait(steps(state, plain_rows(6, 12)))
    with pytest.raises(OSError, match=r"([12]) rows were not written") as caught:
        buffer.size(state)
    text = str(caught.value)
    del caught
    there = held(buffer, state)
    lost = sorted(set(range(18)) - set(there))
    assert f" {len(lost)} rows were not written" in text and lost[0] > 6 and lost[-1] < 16
    windows = np.asarray(buffer.sample(state, jax.random.key(0), 500)[1].data["t"])
    assert (np.diff(windows, axis=1) == 1).all()
    expected = {t for t in range(16) if not {t, t + 1, t + 2} & set(lost)}
    assert set(windows[:, 0].tolist()) == expected
    del state
    again = buffer.resume(PLAIN)  # the files know of the gap too
    assert held(buffer, again) == there
    windows = np.asarray(buffer.sample(again, jax.random.key(0), 500)[1].data["t"])
    assert set(windows[:, 0].tolist()) == expected


def test_a_cut_that_the_files_cannot_record_is_recorded_by_the_next_write(tmp_path):
    view = fbuf.views.Sequence(3, episode_end=())
    buffer = fbuf.Buffer(40, storage=fbuf.storages.Memmap(str(tmp_path / "store")), view=view)
    replay = fbuf.Replay(buffer, PLAIN)
    replay.extend(plain_rows(0, 6))
    with failing():
        replay.cut()
    replay.extend(plain_rows(6, 4))
    starts = {0, 1, 2, 3, 6, 7}
    assert set(np.asarray(replay.sample(200).data["t"])[:, 0].tolist()) == starts
    del replay
    replay = fbuf.Replay(buffer, PLAIN, resume=True)
    assert set(np.asarray(replay.sample(200).data["t"])[:, 0].tolist()) == starts


@pytest.mark.parametrize(
    ("storage", "view", "sampler"),
    [("memmap", "rows", "prioritized"), ("files", "stop", "uniform"), ("host", "transition", "fifo")],
)
def test_a_write_that_failed_is_one_of_the_rows_that_were_stored(storage, view, sampler, tmp_path):
    check(storage, view, sampler, 0, str(tmp_path / "store"), counts=(40,), turns=6)

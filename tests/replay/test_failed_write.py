"""Test what is raised, and how a `Replay` or a step goes on, where a storage cannot write."""

import errno
import gc
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._host import failed_writes
from fbuf._host.priorities import Priorities
from fbuf._host.ragged.store import Records
from fbuf._host.store.reads import TicketReads
from fbuf._host.types import StoreCorrupted, records_errors
from tests.support.failing_writes import PLAIN, check, failing, held, plain_buffer, plain_rows, wait
from tests.support.processes import run_python
from tests.support.refusals import raises, raises_late
from tests.support.tables import by_tier

LOST = "5 rows were not written: write them again"


@pytest.mark.parametrize(
    ("storage", "prioritized"), by_tier(("memmap", False), ("compressed", False), more=[("files", False)])
)
def test_a_replay_goes_on_after_a_write_that_failed(storage, prioritized, tmp_path):
    in_files = storage in ("memmap", "files")
    replay = fbuf.Replay(plain_buffer(storage, tmp_path / "store", prioritized), PLAIN)
    replay.extend(plain_rows(0, 20))
    with failing():
        with pytest.raises(OSError, match=LOST) as caught:
            replay.extend(plain_rows(20, 5))
            wait(replay.state)
            len(replay)  # a store in memory is not waited for
    text, number = str(caught.value), caught.value.errno
    del caught  # its traceback holds the state
    assert number == (errno.ENOSPC if in_files else errno.ENOMEM)
    assert "Traceback" not in text and len(text) < 600 and (not in_files or f"{tmp_path}/store/column" in text)
    assert len(replay) == 20 and int(replay.stats()["refused_rows"]) == 5
    assert set(np.asarray(replay.sample(200).data["t"]).tolist()) == set(range(20))
    replay.save(str(tmp_path / "checkpoint"))
    replay.extend(plain_rows(20, 5))
    buffer = replay.buffer
    assert held(buffer, replay.state) == list(range(25))
    del replay
    if in_files:
        assert held(buffer, buffer.resume(PLAIN)) == list(range(25))
    else:
        assert len(fbuf.Replay.load(str(tmp_path / "checkpoint"))) == 20


@pytest.mark.parametrize(
    ("storage", "by"),
    by_tier(
        ("memmap", "step"), ("files", "sample"), more=[("host", "save"), ("compressed", "leaves"), ("files", "flush")]
    ),
)
def test_the_next_call_with_the_state_of_a_donated_step_raises(storage, by, tmp_path):
    buffer = plain_buffer(storage, tmp_path / "store")
    step = jax.jit(buffer.extend, donate_argnums=0)
    state = step(buffer.init(PLAIN), plain_rows(0, 20))
    calls = {
        "step": lambda state: step(state, plain_rows(20, 5)),
        "sample": lambda state: buffer.sample(state, jax.random.key(0), 4),
        "save": lambda state: fbuf.save(str(tmp_path / "checkpoint"), buffer, state),
        "leaves": jax.tree.leaves,
        "flush": buffer.flush,
    }
    for _ in range(2):
        with failing():
            state = wait(step(state, plain_rows(20, 5)))
        raises(OSError, LOST, calls[by], state)
        assert held(buffer, state) == list(range(20))  # raised once
    assert int(buffer.stats(state)["refused_rows"]) == 10
    state = step(state, plain_rows(20, 5))
    assert held(buffer, state) == list(range(25))


def test_eager_methods_raise_at_once(tmp_path):
    buffer = plain_buffer("files", tmp_path / "store")
    state = buffer.extend(buffer.init(PLAIN), plain_rows(0, 20))
    index = buffer.rows(state, last=3).index
    fields = {"obs": np.ones((3, 64), np.uint8), "t": np.full(3, 99, np.int32)}
    with failing():
        raises(OSError, LOST, buffer.extend, state, plain_rows(20, 5))
        raises(OSError, "3 rows were not written", buffer.update_rows, state, index, fields)
    assert held(buffer, state) == list(range(20))
    state = buffer.update_rows(state, index, fields)
    assert held(buffer, state) == [*range(17), 99, 99, 99]


@pytest.mark.more
def test_a_row_update_that_failed_changes_neither_files_nor_device(tmp_path):
    buffer = fbuf.Buffer(50, storage=fbuf.storages.Memmap(str(tmp_path / "store"), keys=("obs",)))
    state = buffer.extend(buffer.init(PLAIN), plain_rows(0, 20))
    before = jax.device_get(buffer.rows(state).data)
    step = jax.jit(buffer.update_rows, donate_argnums=0)
    index, fields = buffer.rows(state, last=3).index, {"obs": np.ones((3, 64), np.uint8), "t": np.full(3, 99, np.int32)}
    with failing():
        state = wait(step(state, index, fields))
    raises(OSError, "3 rows were not written", buffer.size, state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(buffer.rows(state).data), before)
    assert int(buffer.stats(state)["refused_rows"]) == 3
    assert held(buffer, step(state, index, fields))[-3:] == [99, 99, 99]


def test_a_checked_step_raises_with_what_it_returned(tmp_path):
    buffer = plain_buffer("memmap", tmp_path / "store")
    step = fbuf.checked(jax.jit(buffer.extend, donate_argnums=0))
    state = step(buffer.init(PLAIN), plain_rows(0, 20))
    with failing(), pytest.raises(OSError, match=LOST) as caught:
        step(state, plain_rows(20, 5))
    assert held(buffer, step(caught.value.result, plain_rows(20, 5))) == list(range(25))


@pytest.mark.parametrize("storage", by_tier("memmap", more=["files"]))
def test_rows_whose_sync_failed_are_held(storage, tmp_path, monkeypatch):
    kind = {"memmap": fbuf.storages.Memmap, "files": fbuf.storages.Compressed}[storage]
    replay = fbuf.Replay(fbuf.Buffer(100, storage=kind(path=str(tmp_path / "store"), sync=0)), PLAIN)

    def fail(_):
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", fail)
        raises(OSError, "Input/output error.*All rows were written", replay.extend, plain_rows(0, 5))
    assert held(replay.buffer, replay.state) == list(range(5))


@pytest.mark.more
def test_statistics_of_transforms_do_not_count_rows_that_were_lost(tmp_path):
    transform = fbuf.transforms.Normalize("x")
    buffer = fbuf.Buffer(40, storage=fbuf.storages.Memmap(str(tmp_path / "store")), on_read=transform)
    step = jax.jit(buffer.extend, donate_argnums=0)
    state = step(buffer.init({"x": 0.0}), {"x": jnp.arange(8.0)})
    before = jax.device_get(state.transforms)
    with failing():
        state = wait(step(state, {"x": jnp.full(8, 100.0)}))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.transforms), before)
    raises(OSError, "8 rows", buffer.size, state)


try:
    np.empty(1 << 60, np.uint8)
except MemoryError as error:
    NO_MEMORY = error.with_traceback(None)

CAUSES = {
    "disk": (OSError(errno.EIO, "cannot read column0.rows: Input/output error."), "cannot read column0.rows"),
    "damage": (StoreCorrupted("Store.read: 1 rows have other checksums"), "^Store.read: 1 rows have other checksums$"),
    "memory": (MemoryError("Unable to allocate 1 GiB"), "^Unable to allocate 1 GiB$"),
    "memory of NumPy": (NO_MEMORY, "^Unable to allocate 1.00 EiB for an array"),
}


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("through", ["replay", "buffer", "mixture"])
def test_a_read_that_fails_raises_what_failed(cause, through, monkeypatch):
    error, said = CAUSES[cause]
    kind = MemoryError if "memory" in cause else type(error)
    replay = fbuf.Replay(fbuf.Buffer(100, storage=fbuf.storages.Host()), PLAIN)
    replay.extend(plain_rows(0, 20))
    buffer, state, key = replay.buffer, replay.state, jax.random.key(0)
    mixture = fbuf.Mixture({"a": buffer})
    calls = {
        "replay": lambda: replay.sample(4),
        "buffer": lambda: buffer.sample(state, key, 4),
        "mixture": lambda: mixture.sample({"a": state}, key, 4),
    }

    @records_errors
    def fail(self, *_):
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(TicketReads, "read", fail)
        with pytest.raises(kind, match=said) as caught:
            jax.block_until_ready(calls[through]())
    assert (
        type(caught.value) is (MemoryError if "memory" in cause else type(error)) and caught.value.__suppress_context__
    )
    assert "Traceback" not in str(caught.value)
    if cause == "disk":
        assert caught.value.errno == errno.EIO
    del caught
    assert len(replay.sample(4).data["t"]) == 4 and len(replay) == 20


def test_the_error_of_an_eager_write_has_the_state_with_what_was_written(tmp_path):
    buffer = fbuf.Buffer(50, storage=fbuf.storages.Memmap(str(tmp_path / "store"), slack=4))
    before = buffer.extend(buffer.init(PLAIN), plain_rows(0, 50))
    with failing(after=6), pytest.raises(OSError, match=r"first (\d+) of 50 rows .* carry it on") as caught:
        buffer.extend(before, plain_rows(50, 50))
    after, text = caught.value.result, str(caught.value)
    done = int(re.search(r"The first (\d+) of", text)[1])
    del caught
    assert 0 < done < 50 and held(buffer, after) == list(range(done, 50 + done))
    after = buffer.extend(after, plain_rows(50 + done, 50 - done))
    assert held(buffer, after) == list(range(50, 100))
    del before, after
    assert held(buffer, buffer.resume(PLAIN)) == list(range(50, 100))  # none doubled in the files


@pytest.mark.parametrize("end", ["drop", "close"])
def test_a_failure_that_no_call_told_is_a_warning(end, tmp_path):
    buffer = plain_buffer("memmap", tmp_path / "store")
    state = jax.block_until_ready(buffer.extend(buffer.init(PLAIN), plain_rows(0, 20)))
    with failing():
        state = wait(jax.jit(buffer.extend, donate_argnums=0)(state, plain_rows(20, 5)))
    with pytest.warns(RuntimeWarning, match=f"{LOST}.*No call took the state since"):
        if end == "close":
            fbuf.stores()[-1].close()
        else:
            del state
            gc.collect()
            assert not fbuf.stores()
    assert not failed_writes.failed


_AT_EXIT = """
import os, sys, jax
from tests.support.failing_writes import PLAIN, plain_buffer, plain_rows, wait
buffer = plain_buffer("memmap", sys.argv[1])
step = jax.jit(buffer.extend, donate_argnums=0)
state = wait(step(buffer.init(PLAIN), plain_rows(0, 20)))
def fail(*_):
    raise OSError(28, "injected")
os.pwrite = fail
state = step(state, plain_rows(20, 5))
print("end of the script")
"""


@pytest.mark.more
def test_a_failure_of_the_last_step_is_a_warning_at_exit(tmp_path):
    done = run_python(_AT_EXIT, tmp_path / "store")
    assert done.stdout == "end of the script\n"
    assert "RuntimeWarning: fbuf: cannot write" in done.stderr and LOST in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.more
def test_a_prefetched_batch_that_one_write_overtakes_says_to_write_less(tmp_path):
    storage = fbuf.storages.Compressed(keys=("obs",), slack=4)
    buffer = fbuf.Buffer(20, storage=storage, prefetch=1, batch_size=4)
    replay = fbuf.Replay(buffer, PLAIN)
    replay.extend(plain_rows(0, 20))
    replay.sample()
    replay.save(str(tmp_path))
    for count in (20, 4):
        replay = fbuf.Replay.load(str(tmp_path), buffer)  # the prefetched batch is read when it is returned
        replay.extend(plain_rows(20, count))
        if count > 4:
            said = r"^fbuf: \d of 4 rows have expired: the batch was prefetched, .*Write fewer rows between two draws"
            raises(RuntimeError, said, replay.sample)
        else:
            assert replay.sample().mask.all()


WRITERS = {"top-k": fbuf.writers.TopK("rank"), "reservoir": fbuf.writers.Reservoir(seed=3)}
IN_MEMORY = {"host": fbuf.storages.Host(), "compressed": fbuf.storages.Compressed(keys=("obs",))}


@pytest.mark.parametrize(("writer", "storage"), by_tier(("top-k", "host"), more=[("reservoir", "compressed")]))
@pytest.mark.parametrize("sampler", by_tier(fbuf.samplers.Uniform(), more=[fbuf.samplers.Prioritized()]))
def test_a_failed_write_to_chosen_slots_changes_nothing(writer, storage, sampler):
    """All that follows is that of a buffer to which these rows were never given."""
    rng = np.random.default_rng(0)
    transform = fbuf.transforms.Normalize("rank")
    parts = {"writer": WRITERS[writer], "sampler": sampler, "on_read": transform, "lanes": 2}
    buffer = fbuf.Buffer(60, storage=IN_MEMORY[storage], **parts)
    reference = fbuf.Buffer(60, **parts)
    step, other_step = jax.jit(buffer.extend, donate_argnums=0), jax.jit(reference.extend)
    example = {**PLAIN, "rank": np.float32(0)}
    state, other = buffer.init(example), reference.init(example)
    first = lost = 0
    for turn in range(24):
        count = int(rng.choice([1, 3, 9]))
        rows = {name: x.reshape(count, 2, *x.shape[1:]) for name, x in plain_rows(first, 2 * count).items()}
        rows["rank"] = rng.normal(size=(count, 2)).astype(np.float32)
        mask, first = rng.random((count, 2)) < 0.9, first + 2 * count
        if turn % 3 == 1:
            with failing():
                state = wait(step(state, rows, mask=mask))
            with pytest.raises(OSError, match=r"rows were (not )?written") as caught:
                buffer.size(state)
            found = re.search(r"(\d+) rows were not", str(caught.value))
            del caught
            if found is None:  # none was chosen
                other = other_step(other, rows, mask=mask)
            else:
                lost += int(found[1])
        else:
            state, other = step(state, rows, mask=mask), other_step(other, rows, mask=mask)
        for part in ("ring", "scatter", "sampler", "transforms"):
            jax.tree.map(np.testing.assert_array_equal, getattr(state, part), getattr(other, part))
        jax.tree.map(np.testing.assert_array_equal, buffer.rows(state), reference.rows(other))
    assert int(buffer.stats(state)["refused_rows"]) == lost > 10


@pytest.mark.parametrize("storage", by_tier("host", more=["compressed"]))
def test_rows_that_were_collected_are_kept_until_they_are_stored(storage, tmp_path):
    """Calls that raised and are repeated leave every row once, in order; meanwhile others read what is stored."""
    replay = fbuf.Replay(fbuf.Buffer(2000, storage=IN_MEMORY[storage]), PLAIN)
    length = replay._engine.block.length
    kept = f"{length} rows were not written: they are kept, and written before the next rows"
    added = raised = 0

    def add(times):
        nonlocal added, raised
        for _ in range(times):
            try:
                replay.add(jax.tree.map(lambda x: x[0], plain_rows(added, 1)))
                added += 1
            except OSError as error:
                assert kept in str(error)
                raised += 1

    add(length + 3)
    assert len(replay) == length + 3
    with failing():
        add(2 * length)
        assert (added, raised) == (3 * length - 1, 4)  # the second block failed, the third is full but for a row
        for _ in range(2):
            assert len(replay) == length == int(replay.rows().mask.sum())
            assert (replay.sample(100).data["t"] < length).all()
        with pytest.warns(RuntimeWarning, match=f"{added - length:,} rows that were added"):
            replay.save(str(tmp_path))
        raises(OSError, kept, replay.extend, plain_rows(added, 2))
    if storage == "host":
        replay.extend(plain_rows(added, 2))
        added += 2
    add(5)
    assert held(replay.buffer, replay.state) == list(range(added)) and len(replay) == added
    assert len(fbuf.Replay.load(str(tmp_path))) == length


def one_row(number):
    return jax.tree.map(lambda x: x[0], plain_rows(number, 1))


def test_added_rows_that_wait_are_never_dropped_silently(tmp_path):
    replay = fbuf.Replay(fbuf.Buffer(1000, storage=fbuf.storages.Host()), PLAIN)
    replay.extend(plain_rows(0, 5))
    replay.add(one_row(5))
    with failing():
        raises(OSError, "1 rows were not written: they are kept", replay.sample, 4)
        replay.add(one_row(6))
        assert len(replay) == 5 and (replay.sample(20).data["t"] < 5).all()
        raises(OSError, "1 rows were not written: they are kept", lambda: replay.state)
        raises(OSError, "they are kept", replay.cut)
        with pytest.warns(
            RuntimeWarning, match=r"Replay.save: 2 rows .* could not be stored yet. Make room and read `replay.state`"
        ):
            replay.save(str(tmp_path))
        with pytest.warns(RuntimeWarning, match="Replay.close: 2 rows"):
            replay.close()
    assert held(replay.buffer, replay.state) == list(range(7))
    assert int(replay.stats()["refused_rows"]) == 0
    assert len(fbuf.Replay.load(str(tmp_path))) == 5
    replay = fbuf.Replay(replay.buffer, PLAIN)
    replay.add(one_row(0))
    with failing():
        raises(OSError, "they are kept", replay.sample, 4)
        replay.clear()
    assert len(replay) == 0 and held(replay.buffer, replay.state) == []


@pytest.mark.more
def test_windows_go_on_across_rows_that_were_kept():
    view = fbuf.views.Sequence(3, episode_end=())
    replay = fbuf.Replay(fbuf.Buffer(100, storage=fbuf.storages.Host(), view=view), PLAIN)
    replay.extend(plain_rows(0, 3))
    for number in range(3, 5):
        replay.add(one_row(number))
    with failing():
        raises(OSError, "2 rows were not written: they are kept", replay.sample, 4)
    for number in range(5, 8):
        replay.add(one_row(number))
    assert set(replay.sample(300).data["t"][:, 0].tolist()) == set(range(6))


def test_a_row_whose_block_cannot_be_packed_is_for_the_caller_to_add_again(monkeypatch):
    replay = fbuf.Replay(fbuf.Buffer(1000, storage=fbuf.storages.Host()), PLAIN)
    block = replay._engine.block

    def fail(*_):
        raise MemoryError("Unable to allocate")

    with monkeypatch.context() as broken:
        broken.setattr(type(block), "packed", fail)
        for number in range(block.length - 1):
            replay.add(one_row(number))
        raises(MemoryError, "Unable to allocate", replay.add, one_row(block.length - 1))
    replay.add(one_row(block.length - 1))
    assert held(replay.buffer, replay.state) == list(range(block.length))


@pytest.mark.parametrize("storage", ["host", "memmap"])
def test_a_limit_counts_the_rows_that_are_stored(storage, tmp_path):
    buffer = plain_buffer(storage, tmp_path / "store")
    replay = fbuf.Replay(buffer, PLAIN, limit=fbuf.limits.queue(30))
    replay.extend(plain_rows(0, 10))
    with failing():
        raises(OSError, "20 rows were not written: write them again", replay.extend, plain_rows(10, 20))
    assert int(replay.stats()["limit_added"]) == 10
    replay.extend(plain_rows(10, 20), timeout=5)
    assert held(buffer, replay.state) == list(range(30))


def test_statistics_count_the_rows_of_a_write_that_failed_half_way(tmp_path):
    transform = fbuf.transforms.Normalize("t")
    storage = fbuf.storages.Memmap(str(tmp_path / "store"), slack=4)
    buffer = fbuf.Buffer(50, storage=storage, on_read=transform)
    state = buffer.extend(buffer.init(PLAIN), plain_rows(0, 50))
    with failing(after=6), pytest.raises(OSError, match=r"first (\d+) of 50") as caught:
        buffer.extend(state, plain_rows(50, 50))
    after, done = caught.value.result, int(re.search(r"The first (\d+) of", str(caught.value))[1])
    del caught
    reference = fbuf.Buffer(50, on_read=transform)
    other = reference.extend(reference.extend(reference.init(PLAIN), plain_rows(0, 50)), plain_rows(50, done))
    jax.tree.map(
        np.testing.assert_allclose, jax.device_get(after.transforms.read), jax.device_get(other.transforms.read)
    )


@pytest.mark.more
def test_leaves_may_have_names_like_parts_of_the_state():
    names = ("_last", "last", "ticket")
    for parts in ({}, {"writer": fbuf.writers.Reservoir()}):
        buffer = fbuf.Buffer(8, storage=fbuf.storages.Host(), **parts)
        state = buffer.extend(buffer.init(dict.fromkeys(names, 0)), {n: np.arange(5) + i for i, n in enumerate(names)})
        assert np.asarray(buffer.rows(state).data["_last"])[:5].tolist() == list(range(5))
        raises(ValueError, "a leaf is named '_ticket', like a part of the state. Rename", buffer.init, {"_ticket": 0})


def test_a_load_whose_rows_cannot_be_stored_raises(tmp_path):
    buffer = fbuf.Buffer(40, storage=fbuf.storages.Host())
    fbuf.save(str(tmp_path), buffer, buffer.extend(buffer.init(PLAIN), plain_rows(0, 20)))
    with failing():
        raises(OSError, "do not fit in Host.*Free memory or disk, and load again", fbuf.load, str(tmp_path), resize=80)
    assert held(*fbuf.load(str(tmp_path), resize=80)) == list(range(20))


@pytest.mark.more
def test_a_failed_write_of_ragged_rows_in_a_step_changes_nothing(monkeypatch):
    buffer = fbuf.Buffer(100, storage=fbuf.storages.Ragged(maximum={"obs": (64,)}))
    step = jax.jit(buffer.extend, donate_argnums=0)
    state = step(buffer.init(PLAIN), plain_rows(0, 20))

    def fail(*_):
        raise MemoryError("Unable to allocate")

    with monkeypatch.context() as broken:
        broken.setattr(Records, "put", fail)
        state = wait(step(state, plain_rows(20, 5)))
        raises(OSError, LOST, step, state, plain_rows(20, 5))
        assert held(buffer, state) == list(range(20))
        replay = fbuf.Replay(buffer, PLAIN)
        raises(MemoryError, "^Unable to allocate$", replay.extend, plain_rows(20, 5))  # nothing is donated before
    assert held(buffer, step(state, plain_rows(20, 5))) == list(range(25))
    replay.extend(plain_rows(20, 5))
    assert held(buffer, replay.state) == list(range(20, 25))


@pytest.mark.more
@pytest.mark.parametrize("through", ["replay", "step"])
def test_priorities_without_any_memory_say_how_to_recover(through, tmp_path, monkeypatch):
    storage = fbuf.storages.Memmap(str(tmp_path / "store"))
    buffer = fbuf.Buffer(100, storage=storage, sampler=fbuf.samplers.Prioritized(on="host"))
    replay = fbuf.Replay(buffer, PLAIN)
    replay.extend(plain_rows(0, 20))
    replay.save(str(tmp_path / "saved"))

    @records_errors
    def fail(*_):
        raise MemoryError("Unable to allocate")

    with monkeypatch.context() as broken:
        broken.setattr(Priorities, "write", fail)
        if through == "replay":
            raises(MemoryError, "^Unable to allocate$", replay.extend, plain_rows(20, 5))
        else:
            step = jax.jit(buffer.extend, donate_argnums=0)
            raises_late("Unable to allocate", step, replay.state, plain_rows(20, 5))
    raises(RuntimeError, "after a step that failed `del replay`, and use Replay.load", replay.sample, 4)
    del replay
    replay = fbuf.Replay(buffer, PLAIN, resume=True)
    assert held(buffer, replay.state)[:20] == list(range(20))


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
@pytest.mark.parametrize(
    ("storage", "view", "sampler"),
    [("memmap", "rows", "prioritized"), ("files", "stop", "uniform"), ("host", "transition", "fifo")],
)
def test_a_write_that_failed_is_one_of_the_rows_that_were_stored(storage, view, sampler, tmp_path):
    check(storage, view, sampler, 0, str(tmp_path / "store"), counts=(40,), turns=6)

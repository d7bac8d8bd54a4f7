"""Batches that `Replay` draws in NumPy from stores on the host, and errors, are those of the jitted program."""

import errno
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._bridge import lifetime
from fbuf._host.store.reads import TicketReads
from fbuf._host.types import StoreCorrupted, records_errors
from fbuf._host_draws.deferred import Deferred
from tests.support.failing_writes import PLAIN, failing, plain_rows
from tests.support.host_views import SAMPLERS, STORAGES, UNIFORM, VIEWS, compare
from tests.support.refusals import raises
from tests.support.replay import counts
from tests.support.tables import by_tier
from tests.support.trees import same
from tests.support.two_replays import compare as compare_calls
from tests.support.two_replays import leaves_of, make_pair


@pytest.mark.parametrize(
    ("storage", "view", "lanes", "sampler", "seed"),
    by_tier(
        ("compressed", "mask", None, UNIFORM, 0),
        more=[
            # A priority is set while collected rows are in the tree: the next draw reads their anchors again.
            ("host", "n, final", None, SAMPLERS["seen"], 3),
            ("host", "stack, n, final", 2, UNIFORM, 0),
        ],
    ),
    ids=str,
)
def test_batches_are_those_of_the_program(storage, view, lanes, sampler, seed):
    assert compare(VIEWS[view], lanes, storage=STORAGES[storage], steps=35, seed=seed, sampler=sampler) == 1


@pytest.mark.more
@pytest.mark.parametrize(
    ("storage", "sampler", "view", "lanes"),
    by_tier(
        ("host", "uniform", "row", 2),
        more=[("compressed", "uniform", "final", None)],
        exhaustive=[("host", "prioritized", "step", 1)],
    ),
)
def test_batches_after_any_calls_are_those_of_the_program(storage, sampler, view, lanes):
    pair = make_pair(storage, sampler, view, lanes)
    assert pair[0]._engine.host is not None
    compare_calls(pair, 40, sizes=(7, 7, 12))


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampler", [None, "seen", "buffer"])
@pytest.mark.parametrize(("view", "lanes"), [(view, (None, 2)[number % 2]) for number, view in enumerate(VIEWS)])
@pytest.mark.parametrize("storage", STORAGES)
def test_batches_of_every_storage_are_those_of_the_program(storage, view, lanes, sampler):
    chosen = {} if sampler is None else {"sampler": SAMPLERS[sampler]}
    assert compare(VIEWS[view], lanes, storage=STORAGES[storage], seed=4, **chosen) == 1


def pair_of(storage, rows=40, sampler=UNIFORM):
    """Two replays of 32 rows, of which the second calls programs alone."""
    buffer = fbuf.Buffer(32, storage=storage, sampler=sampler)
    pair = [fbuf.Replay(buffer, PLAIN, seed=1, strict=False) for _ in range(2)]
    assert pair[0]._engine.host is not None
    pair[1]._engine.host, pair[1]._engine.deferred = None, Deferred()
    for replay in pair:
        add(replay, 0, rows)
    return pair


def add(replay, first, count):
    for number in range(first, first + count):
        replay.add(jax.tree.map(lambda x: x[0], plain_rows(number, 1)))


def outcome(replay, size=8, to="numpy"):
    """Return a batch, or the kind and text of an error."""
    try:
        return replay.sample(size, to=to)
    except Exception as error:
        return type(error), str(error), getattr(error, "errno", None)


def compare_draws(pair, raises=None):
    """Draw from both: equal batches, or equal errors of a kind."""
    ours, theirs = map(outcome, pair)
    if raises is None:
        same(ours, theirs)
    else:
        assert ours == theirs and ours[0] is raises
    assert counts(pair[0]) == counts(pair[1])


HOST = fbuf.storages.Host(slack=4)
COMPRESSED = fbuf.storages.Compressed(keys=("obs",), slack=4)
PRIORITIZED = fbuf.samplers.Prioritized()


@pytest.mark.parametrize(("storage", "sampler"), by_tier((HOST, UNIFORM), more=[(COMPRESSED, PRIORITIZED)]))
def test_rows_that_expired_are_an_error(storage, sampler):
    pair = pair_of(storage, sampler=sampler)
    states = [replay.state for replay in pair]
    copies = jax.tree.map(lambda x: x + 0 if isinstance(x, jax.Array) else x, states)
    for replay in pair:
        add(replay, 40, 3)
    compare_draws(pair)
    for replay in pair:
        add(replay, 43, 30)
    compare_draws(pair)
    for replay, state in zip(pair, copies, strict=True):
        replay.state = state
    compare_draws(pair, raises=RuntimeError)
    for replay in pair:
        add(replay, 80, 1)  # a collected row, in the slot of an expired one
    compare_draws(pair, raises=RuntimeError)
    for replay in pair:
        add(replay, 81, 31)
    compare_draws(pair)


@pytest.mark.more
def test_rows_that_expired_are_masked():
    pair = pair_of(fbuf.storages.Host(slack=4, on_expired="mask"))
    states = jax.tree.map(lambda x: x + 0, [replay.state for replay in pair])
    for replay in pair:
        add(replay, 40, 20)
    compare_draws(pair)
    for replay, state in zip(pair, states, strict=True):
        replay.state = state
    compare_draws(pair)
    assert 0 < counts(pair[0])["expired_rows"]
    batch = pair[0].sample(30, to="numpy")
    assert 0 < batch.mask.sum() < 30 and not batch.data["t"][~batch.mask].any()


CAUSES = [
    OSError(errno.EIO, "cannot read"),
    StoreCorrupted("Store.read: 1 rows have other checksums"),
    MemoryError("no"),
]


@pytest.mark.parametrize("cause", CAUSES, ids=repr)
def test_reads_that_fail_raise_what_the_program_raises(cause, monkeypatch):
    pair = pair_of(HOST)

    @records_errors
    def fail(*_):
        raise cause

    with monkeypatch.context() as broken:
        broken.setattr(TicketReads, "read", fail)
        compare_draws(pair, raises=type(cause))
    compare_draws(pair)


def test_a_store_that_was_closed_is_an_error():
    pair = pair_of(HOST)
    ids = [lifetime.join_id(np.asarray(replay.state.rows.id)) for replay in pair]
    for handle in fbuf.stores():
        if handle.id in ids:
            handle.close()
    for replay, id in zip(pair, ids, strict=True):
        kind, text, _ = outcome(replay)
        assert kind is RuntimeError and f"({id:016x}) is not open" in text


@pytest.mark.more
@pytest.mark.parametrize("sampler", by_tier(UNIFORM, more=[PRIORITIZED]), ids=repr)
def test_draws_go_on_after_rows_that_could_not_be_stored(sampler):
    pair = pair_of(HOST, sampler=sampler)
    length = max(replay._engine.block.length for replay in pair)
    for replay in pair:
        replay.extend(plain_rows(40, 3))
        with failing(), pytest.raises(OSError, match="3 rows were not written: write them again"):
            replay.extend(plain_rows(43, 3))
            replay.sample(8, to="numpy")  # a write into memory is not waited for
    for replay in pair:
        assert set(replay.sample(200, to="numpy").data["t"].tolist()) == set(range(11, 43))
    for replay in pair:
        add(replay, 43, 1)
        with failing():
            for number in range(44, 44 + 2 * length):  # until a block could not be written
                try:
                    add(replay, number, 1)
                except OSError as error:
                    assert "they are kept, and written before the next rows" in str(error)
                    break
            assert replay._engine.block_failed
            assert max(replay.sample(200, to="numpy").data["t"]) < 44
            assert max(replay.sample(200).data["t"]) < 44
        assert max(replay.sample(200, to="numpy").data["t"]) >= number - 1


@pytest.mark.more
def test_rows_after_a_clear_are_drawn_although_earlier_ones_could_not_be_stored():
    replay = fbuf.Replay(fbuf.Buffer(24, storage=HOST, sampler=PRIORITIZED), PLAIN)
    add(replay, 0, 5)
    replay.sample(4, to="numpy")  # opens them in the tree
    with failing():
        add(replay, 5, 24)
        raises(OSError, "they are kept", replay.sample, 4)
        replay.clear()
    add(replay, 100, 8)
    assert set(replay.sample(200, to="numpy").data["t"].tolist()) == set(range(100, 108))


@pytest.mark.parametrize(
    ("sampler", "view"),
    by_tier(
        ({"normalize": "buffer"}, fbuf.views.Row()),
        more=[
            ({"largest": "held"}, fbuf.views.Row()),
            ({}, fbuf.views.Sequence(3, episode_end=())),
            ({}, fbuf.views.Sequence(4, episode_end=(), boundary="mask")),
        ],
    ),
    ids=repr,
)
def test_priorities_are_as_before_rows_that_could_not_be_stored(sampler, view):
    buffer = fbuf.Buffer(24, storage=HOST, sampler=fbuf.samplers.Prioritized(**sampler), view=view)
    replay, random = fbuf.Replay(buffer, PLAIN, seed=2), np.random.default_rng(0)
    add(replay, 0, 40)
    expected = jax.tree.map(lambda x: x + 0, replay.state)
    for number in range(40, 50):
        add(replay, number, 1)
        batch = replay.sample(16, to="numpy")
        error = random.random(16).astype(np.float32) / 2
        replay.update_priority(batch.index, error)
        expected = buffer.update_priority(expected, batch.index, error)  # not of collected rows
    engine = replay._engine
    assert engine.block.count == 10 and (batch.data["t"] > 40).any()
    assert engine.deferred.update is not None
    with failing():
        raises(OSError, "10 rows were not written: they are kept", lambda: replay.state)
        expected = buffer.cut(expected)
        for _ in range(2):
            for part in ("anchors", "sampler"):
                same(*({part: getattr(state, part)} for state in (engine.state, expected)))
            assert (replay.sample(100, to="numpy").index.generation < 3).all()
    same({"sampler": replay.state.sampler}, {"sampler": buffer.extend(expected, plain_rows_each(40, 10)).sampler})


def test_a_row_after_a_draw_of_collected_rows_gets_their_largest_priority():
    sampler = fbuf.samplers.Prioritized(largest="held")
    replay = fbuf.Replay(fbuf.Buffer(24, storage=HOST, sampler=sampler), PLAIN)
    add(replay, 0, 3)
    index = replay.sample(8, to="numpy").index
    replay.update_priority(index, np.full(8, 5, np.float32))
    replay.sample(8, to="numpy")  # sets them in the tree
    add(replay, 3, 1)
    assert replay._engine.block.count == 4 and np.rint(replay.priorities()[3]) == 5


def plain_rows_each(first, count):
    each = [jax.tree.map(lambda x: x[0], plain_rows(number, 1)) for number in range(first, first + count)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *each)


@pytest.mark.more
def test_rows_are_drawn_after_a_save_and_a_load(tmp_path):
    pair = pair_of(COMPRESSED)
    for number, replay in enumerate(pair):
        replay.sample(4, to="numpy")
        add(replay, 40, 3)
        replay.save(str(tmp_path / str(number)))
    compare_draws(pair)
    pair = [fbuf.Replay.load(str(tmp_path / str(number))) for number in range(2)]
    pair[1]._engine.host, pair[1]._engine.deferred = None, Deferred()
    for first in (43, 50):
        for replay in pair:
            add(replay, first, 7)
        compare_draws(pair)
    same(*(leaves_of(replay.state) for replay in pair))


def test_a_draw_waits_for_a_write_that_runs():
    replay = pair_of(HOST)[0]
    step, waited = jax.jit(replay.buffer.extend, donate_argnums=0), False

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 200, lambda _, x: jnp.sin(x @ x), x)[0, 0]

    for first in range(40, 168, 32):  # the first one compiles
        rows, late = plain_rows(first, 32), slow(jnp.ones((200, 200)))
        state = step(replay.state, rows | {"t": rows["t"] + (late * 0).astype(jnp.int32)})
        replay.state = state
        waited |= not late.is_ready()
        assert min(replay.sample(64, to="numpy").data["t"]) >= first
    assert waited


@pytest.mark.parametrize("to", ["numpy", "torch"])
def test_threads_read_rows_that_belong_together(to):
    if to == "torch":
        pytest.importorskip("torch")
    example = {"a": np.zeros(3, np.float32), "b": np.int32(0)}
    replay = fbuf.Replay(fbuf.Buffer(64, storage=fbuf.storages.Host(slack=0)), example)
    replay.add(example)
    last, drawn = 0, 0

    def write():
        nonlocal last
        for number in itertools.takewhile(lambda number: number <= 500 or drawn <= 10, itertools.count(1)):
            last = number
            replay.add({"a": np.full(3, number, np.float32), "b": np.int32(number)})
            if number % 50 == 0:
                replay.sample(16)  # by a program, which may still run

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        batch, drawn = replay.sample(32, to=to), drawn + 1
        a, b = np.asarray(batch.data["a"]), np.asarray(batch.data["b"])
        assert (a == b[:, None]).all() and b.max() - b.min() < 64
    writer.join()
    assert max(replay.sample(300, to="numpy").data["b"]) == last


def test_arrays_belong_to_the_caller():
    pair = pair_of(HOST)
    batch = pair[0].sample(8, to="numpy")
    batch.data["obs"][:] = 0
    pair[1].sample(8, to="numpy")
    compare_draws(pair)

"""Test stacks given as rows: recognised, stored as single frames, and read back bit for bit."""

import dataclasses
import pkgutil
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.columns.frame_stream import FrameStream, Stacking
from fbuf._host.columns.stacked import StackedColumn
from fbuf._host.store.store import Store
from fbuf._host.types import StoreCorrupted, crc_of
from tests.support import stacks as support
from tests.support.refusals import raises
from tests.support.store import Deflate, check_readers, check_rows, fetch, frames, same
from tests.support.store_model import Model
from tests.support.tables import by_tier


@given(data=st.data())
def test_any_sequence_of_calls_agrees_with_a_dict(data):
    support.check_calls(data)


def test_stacks_are_recognised_and_round_trip():
    for dtype, axis, depth in (("uint8", 1, 4), ("float32", -1, 3), ("bool", 1, 2), (support.DTYPES[-3], -1, 4)):
        support.check_recognised(dtype, axis, depth)


def test_values_are_compared_as_bytes():
    seen = np.random.default_rng(0).normal(size=(80, 9, 9)).astype(np.float32)
    seen[::3] = np.nan
    seen[1::3] = -0.0
    seen[2::6] = 0.0
    rows = support.stacked(seen, support.episodes(80))[:, None]
    store = support.make(rows.shape[2:], dtype="float32")
    check_rows(store, support.write(store, rows), rows)
    assert support.stream(store).count[0] == 80 + 3 * 2


def test_colours_are_not_a_stack():
    grey = np.repeat(frames(200)[..., None], 3, axis=-1)
    colour = grey // np.array([1, 2, 3], np.uint8)
    still = grey[np.repeat(np.arange(10), 20)]  # a grey picture that stands still looks shifted
    for rows in (grey, colour, still, np.moveaxis(grey, -1, 1), np.zeros_like(grey)):
        store = support.make(rows.shape[1:], length=200)
        got, ok = fetch(store, support.write(store, rows[:, None]))
        assert ok.all() and same(got, rows[:, None]) and isinstance(support.part(store), ChunkedColumn)


@pytest.mark.parametrize("at_once", [1, 7, 500])
def test_other_rows_are_soon_not_compared(at_once):
    rows = np.random.default_rng(0).integers(0, 2, (60, 1, 4, 20, 20), np.uint8)
    store = support.make((4, 20, 20))
    with mock.patch.object(StackedColumn, "_look", autospec=True, side_effect=StackedColumn._look) as look:
        got, ok = fetch(store, support.write(store, rows, at_once=at_once))
    assert ok.all() and same(got, rows) and isinstance(support.part(store), ChunkedColumn)
    assert look.call_count == {1: 17, 7: 3, 500: 1}[at_once]
    assert not store._parts[0]._last.size


@pytest.mark.parametrize("shared", range(1, 5))
@pytest.mark.parametrize(
    "stacking", [Stacking(1, 4, 6), Stacking(1, 4, 8), Stacking(5, 4, 1), Stacking(5, 4, 3)], ids=str
)
def test_one_byte_decides_whether_a_stack_follows(stacking, shared):
    shape = (stacking.outer, stacking.frames, stacking.inner)
    before, after = np.random.default_rng(0).integers(0, 256, (2, *shape), np.uint8)
    after[:, :shared] = before[:, 4 - shared :]
    assert stacking.follows(before, after, shared)
    for place in np.ndindex(*shape):
        other = after.copy()
        other[place] ^= 1
        assert stacking.follows(before, other, shared) == (place[1] >= shared)
    assert stacking.fresh(before[None], after[None]) == 4 - shared


def test_rows_add_only_new_frames():
    rows = support.game(60, every=1000)
    store = support.make((4, 24, 24))
    support.write(store, rows[:30, None])
    assert support.stream(store).count[0] == 30 + 3
    support.write(store, np.repeat(rows[29:30], 20, 0)[:, None])
    assert support.stream(store).count[0] == 30 + 3
    support.write(store, rows[31::2][:10, None])  # every second
    assert support.stream(store).count[0] == 33 + 20


@pytest.mark.parametrize("watching", [True, False])
def test_damage_before_conversion_keeps_plain_rows(watching):
    rows = support.game(60)[:, None]
    store = support.make((4, 24, 24))
    tickets = support.write(store, rows[:12], at_once=1)
    own = support.part(store)
    assert isinstance(own, ChunkedColumn) and own.closed == 3
    own.arena.view(int(own.address[0, 0]), int(own.length[0, 0]))[3] ^= 1
    if watching:
        more = support.write(store, rows[12:])
        assert isinstance(support.part(store), ChunkedColumn)
        assert same(fetch(store, more)[0], rows[12:])
    pytest.raises(StoreCorrupted, fetch, store, tickets)


@pytest.mark.parametrize("count", by_tier(5, 17, 60, more=[1, 16, 18, 250]))
def test_a_store_resumes_from_a_checkpoint(count):
    support.check_goes_on(count)


def test_checkpoints_load_under_either_setting():
    rows = support.game(100)[:, None]
    on = support.make(rows.shape[2:])
    off = tuple(dataclasses.replace(c, stacks=False) for c in on.columns)
    fixed = {"lanes": 1, "length": 100, "slack": 4}
    tickets = support.write(on, rows)
    plain = Store(off, **fixed)
    support.write(plain, rows)
    one = Store.from_arrays(off, on.to_arrays(), **fixed)
    two = Store.from_arrays(on.columns, plain.to_arrays(), **fixed)
    assert isinstance(support.part(one), FrameStream) and isinstance(support.part(two), ChunkedColumn)
    for store in (one, two):
        assert same(fetch(store, tickets)[0], rows)
        assert same(fetch(store, support.write(store, rows))[0], rows)


def test_arrays_that_do_not_fit_are_refused():
    store, _, _ = support.filled(100)
    arrays = store.to_arrays()
    for wrong in (arrays["column0:frames"] * 2, arrays["column0:frames"] << np.array([[0], [50]])):
        crc = crc_of((wrong, arrays["column0:added"]))
        own = {"column0:frames": wrong, "column0:added_checksum": np.array([crc], np.uint32)}
        raises(ValueError, "Store.from_arrays: rows show .* frames; expected", support.load, store, arrays | own)
    for name, change in {
        "column0:stacking": lambda a: a + 1,
        "column0:frames": lambda a: a[:, :1],
        "column0:added": lambda a: a[1:],
        "column0:frame:length": lambda a: a[1:],
    }.items():
        wrong = arrays | {name: np.ascontiguousarray(change(arrays[name]))}
        raises(ValueError, "Store.from_arrays: .*expected", support.load, store, wrong)
        raises(ValueError, "missing", support.load, store, {n: a for n, a in arrays.items() if n != name})


def test_only_zstd_recognises_stacks():
    assert not isinstance(support.make((4, 24, 24), codec=Deflate())._parts[0], StackedColumn)
    raises(TypeError, "Compressed: stacks is 4; expected True or False", fbuf.storages.Compressed, stacks=4)


def test_a_damaged_index_of_frames_is_found():
    store, _, tickets = support.filled()
    support.stream(store).ends.added[:, 0, 0] += 1
    pytest.raises(StoreCorrupted, fetch, store, tickets).match("rows end at frame")


@pytest.mark.more
@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
def test_stacks_of_every_dtype_are_recognised(dtype):
    for axis, depth in ((1, 4), (-1, 3)):
        support.check_recognised(dtype, axis, depth)


@pytest.mark.more
def test_a_changed_byte_of_a_checkpoint_gives_no_wrong_row():
    store, rows, tickets = support.filled(100)
    rows, tickets = rows[-40:], tickets[-40:]
    arrays = store.to_arrays()
    rng = np.random.default_rng(0)
    for name in [n for n in arrays if n.startswith("column")]:
        if name.endswith(":encoded") or not np.asarray(arrays[name]).nbytes:
            continue
        for _ in range(12):
            damaged = {n: np.array(a) for n, a in arrays.items()}
            flat = damaged[name].reshape(-1).view(np.uint8)
            flat[rng.integers(len(flat))] ^= 1 << rng.integers(8)
            try:
                got, ok = fetch(support.load(store, damaged), tickets)
            except (StoreCorrupted, ValueError):
                continue
            assert same(got[ok.reshape(tickets.shape)], rows[ok.reshape(tickets.shape)]), name
    assert same(fetch(support.load(store), tickets)[0], rows)


PLACES = ["fbuf._host.memory.arena.Arena.append", "numpy.zeros", "fbuf._host.codecs.ZstdCoder.encode"]


@pytest.mark.more
@pytest.mark.parametrize("place", PLACES)
def test_a_failed_allocation_leaves_the_store_unchanged(place):
    store = support.make((4, 24, 24), (4, 24, 24), length=60)
    model, rng = Model(store), np.random.default_rng(0)
    rows = support.game(400)
    order = rng.permutation(400)
    for new in (rows[:10], rows[10:50], rows[order[:50]], rows[order[:70]], rows[50:150]):
        for call in range(4):
            real, calls = pkgutil.resolve_name(place), [0]

            def scarce(*args, call=call, calls=calls, real=real, **more):
                calls[0] += 1
                if calls[0] > call:
                    raise MemoryError
                return real(*args, **more)

            failed = False
            with mock.patch(place, scarce):
                try:
                    model.write([new[:, None]] * 2, None)
                except MemoryError:
                    failed = True
            if not failed:
                break
            model.check(rng)
            support.check_frames(store)
        else:
            model.write([new[:, None]] * 2, None)
        model.check(rng)
        support.check_frames(store)
    support.stream(store, 0), support.stream(store, 1)


@pytest.mark.more
def test_two_threads_read_while_one_writes():
    store, ago = support.make((4, 9), lanes=2, length=300, slack=20, dtype="int64"), np.arange(6, -2, -2)[:, None]

    def rows_of(tickets):
        return np.broadcast_to(tickets[..., None, None].astype(np.int64) - ago, (*tickets.shape, 4, 9))

    check_readers(store, rows_of, 150)
    assert (support.stream(store).count == store._count[0] + 3).all()  # frames, not stacks

"""Test stacks given as rows: damage, failures, threads, and memory."""

import pkgutil
from unittest import mock

import numpy as np
import pytest

from fbuf._host.types import StoreCorrupted
from tests.support import stacks as support
from tests.support.store import check_readers, fetch, same
from tests.support.store_model import Model

pytestmark = pytest.mark.more


@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
def test_stacks_of_every_dtype_are_recognised(dtype):
    for axis, depth in ((1, 4), (-1, 3)):
        support.check_recognised(dtype, axis, depth)


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


@pytest.mark.parametrize("count", [1, 16, 18, 250])
def test_a_store_resumes_from_a_checkpoint(count):
    support.check_goes_on(count)


PLACES = ["fbuf._host.memory.arena.Arena.append", "numpy.zeros", "fbuf._host.codecs.ZstdCoder.encode"]


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


def test_two_threads_read_while_one_writes():
    store, ago = support.make((4, 9), lanes=2, length=300, slack=20, dtype="int64"), np.arange(6, -2, -2)[:, None]

    def rows_of(tickets):
        return np.broadcast_to(tickets[..., None, None].astype(np.int64) - ago, (*tickets.shape, 4, 9))

    check_readers(store, rows_of, 150)
    assert (support.stream(store).count == store._count[0] + 3).all()  # frames, not stacks

"""Test stacks given as rows: damage, failures, threads, and memory."""

import gc
import pkgutil
import threading
import tracemalloc
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

import fbuf
from fbuf._host.codecs.codec import Zstd
from fbuf._host.columns.chunked import ChunkedColumn
from fbuf._host.columns.frame_stream import FrameStream
from fbuf._host.columns.stacked import StackedColumn
from fbuf._host.store.store import Column, Store
from fbuf._host.types import StoreCorrupted
from tests.support import stacks as support
from tests.support.store import fetch, frames, same
from tests.support.store_model import Model
from tests.support.threads import Thread


@pytest.mark.parametrize("dtype", support.DTYPES, ids=str)
def test_stacks_of_every_dtype_are_recognised(dtype: Any) -> None:
    for axis, depth in ((1, 4), (-1, 3)):
        support.check_recognised(dtype, axis, depth)


def test_a_still_picture_is_not_compared_forever() -> None:
    store = support.make((4, 20, 20), length=3000)
    rows = np.ones((1500, 1, 4, 20, 20), np.uint8)
    got, ok = fetch(store, support.write(store, rows, at_once=100))
    assert (
        ok.all() and same(got, rows) and isinstance(support.part(store), ChunkedColumn) and not store._parts[0].watching
    )


def test_noisy_stacks_take_a_frame_a_row() -> None:
    seen = np.random.default_rng(0).integers(0, 256, (400, 40, 40), np.uint8)
    store = support.make((4, 40, 40), length=400)
    rows = support.stacked(seen, support.episodes(400, 1000))[:, None]
    got, ok = fetch(store, support.write(store, rows))
    assert ok.all() and same(got, rows) and store.stats()["payload_bytes"] <= 1.01 * seen.nbytes


def test_short_episodes_are_recognised() -> None:
    rows = support.game(90, every=3)
    store = support.make(rows.shape[1:])
    support.write(store, rows[:, None])
    assert support.stream(store).count[0] == 30 * (4 + 2)


def test_a_stack_takes_as_much_as_its_frame() -> None:
    rows = support.game(4000, every=200)
    single = Store((Column("o", (24, 24), np.dtype(np.uint8), Zstd()),), lanes=1, length=4000, slack=0)
    support.write(single, frames(4000)[:, None])
    store = support.make((4, 24, 24), length=4000, codec=Zstd())
    tickets = support.write(store, rows[:, None])
    got, ok = fetch(store, tickets)
    assert ok.all() and same(got, rows[:, None])
    assert store.stats()["payload_bytes"] <= 1.1 * single.stats()["payload_bytes"]
    assert store.nbytes <= 1.3 * single.nbytes


def test_nbytes_matches_the_memory() -> None:
    rows = support.game(3000)[:, None]
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    store = support.make((4, 24, 24), lanes=1, length=2000, codec=Zstd())
    for i in range(0, 3000, 50):
        store.write([rows[i : i + 50]], None)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    # numpy's empty pages are counted here but never touched; zstd's contexts and digests are not counted here.
    coder = support.stream(store).plane.coder
    assert coder.current is not None and coder.nbytes == 0
    assert 0.7 * held <= store.nbytes - coder.current.digest <= 1.3 * held + 4096


def test_a_changed_byte_of_a_checkpoint_gives_no_wrong_row() -> None:
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


def test_a_damaged_last_row_costs_frames_only() -> None:
    store, rows, tickets = support.filled(100)
    arrays = {n: np.array(a) for n, a in store.to_arrays().items()}
    k, count = support.stream(store).plane.k, support.stream(store).count
    payload = arrays["column0:frame:payload"]
    payload[-int(arrays["column0:frame:length"][-2:].sum()) :] ^= 1  # the newest closed chunks
    again = support.load(store, arrays)
    assert (count % k < 4).any() and not support.stream(again).known.all()
    more = np.stack([support.game(140, seed=e, every=37)[100:] for e in range(2)], 1)
    assert same(fetch(again, support.write(again, more))[0], more)


@pytest.mark.parametrize("count", [1, 16, 18, 250])
def test_a_store_resumes_from_a_checkpoint(count: int) -> None:
    support.check_goes_on(count)


@pytest.mark.parametrize("place", ["append", "widen", "encode"])
def test_a_failed_allocation_leaves_the_store_unchanged(place: str) -> None:
    store = support.make((4, 24, 24), (4, 24, 24), length=60)
    model, rng = Model(store), np.random.default_rng(0)
    rows = support.game(400)
    order = rng.permutation(400)
    kind = {
        "append": "fbuf._host.memory.arena.Arena.append",
        "widen": "numpy.zeros",
        "encode": "fbuf._host.codecs.encoder.ZstdCoder.encode",
    }
    for new in (rows[:10], rows[10:50], rows[order[:50]], rows[order[:70]], rows[50:150]):
        for call in range(4):
            real, calls = pkgutil.resolve_name(kind[place]), [0]

            def scarce(*args: Any, call: int = call, calls: list[int] = calls, real: Any = real, **more: Any) -> Any:
                calls[0] += 1
                if calls[0] > call:
                    raise MemoryError
                return real(*args, **more)

            failed = False
            with mock.patch(kind[place], scarce):
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


@pytest.mark.parametrize("axis", [1, -1])
def test_two_threads_read_while_one_writes(axis: int) -> None:
    """Rows tell their own tickets, two lanes: readers see them, or zeros, never a mixture."""
    ago = np.arange(6, -2, -2).reshape((4, 1) if axis == 1 else (1, 4))
    shape = (4, 9) if axis == 1 else (9, 4)
    store = support.make(shape, lanes=2, length=300, slack=20, dtype="int64")
    top, stop = [0], threading.Event()

    def rows_of(tickets: np.ndarray) -> np.ndarray:
        return np.broadcast_to(tickets[..., None, None].astype(np.int64) - ago, (*tickets.shape, *shape))

    def read(seed: int) -> int:
        rng, seen = np.random.default_rng(seed), 0
        while not stop.is_set():
            wanted = rng.integers(max(top[0] - 700, 0), top[0] + 20, (64, 4)).astype(np.uint64)
            got, ok = fetch(store, wanted)
            there = ok.reshape(wanted.shape) & (wanted > 0)
            assert (got[there] == rows_of(wanted)[there]).all() and not got[~there].any()
            seen += int(there.sum())
        return seen

    readers = [Thread(read, i) for i in range(2)]
    rng = np.random.default_rng(9)
    for _ in range(150):
        n = int(rng.integers(1, 40))
        expected = np.arange(2 * n, dtype=np.uint64).reshape(n, 2) + np.uint64(top[0] + 1)
        assert (store.write([np.ascontiguousarray(rows_of(expected))], None) == expected).all()
        top[0] = int(expected[-1, -1])
    stop.set()
    assert (
        sum(reader.ends() for reader in readers)
        and support.stream(store).count[0] == support.stream(store).count[1] == store._count[0] + 3
    )


def test_batches_equal_those_of_a_device_buffer() -> None:
    rows = {
        "obs": np.stack([support.game(90, seed=e, every=17) for e in range(2)], 1),
        "id": np.arange(180).reshape(90, 2),
    }
    batches: list[list[Any]] = []
    storages: list[Any] = [
        fbuf.storages.Device(),
        *(fbuf.storages.Compressed(("obs",), stacks=on) for on in (True, False)),
    ]
    for storage in storages:
        buffer = fbuf.Buffer(capacity=60, storage=storage, lanes=2)
        state = buffer.init({"obs": rows["obs"][0, 0], "id": np.int32(0)})
        for i in range(0, 90, 15):
            state = buffer.extend(state, {"obs": rows["obs"][i : i + 15], "id": np.int32(rows["id"][i : i + 15])})
        state, batch = buffer.sample(state, jax.random.key(3), 32)
        state = buffer.update_rows(state, batch.index, {"obs": np.asarray(batch.data["obs"]) + np.uint8(1)})
        batches.append([batch.data, buffer.sample(state, jax.random.key(4), 32)[1].data])
        if storage != storages[0]:
            (handle,) = fbuf.stores()
            (held,) = fbuf._bridge.lifetime.find(handle.id)._parts
            assert (isinstance(held, StackedColumn) and isinstance(held.inner, FrameStream)) == storage.stacks
        del state
    for other in batches[1:]:
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, batches[0], other)))


def test_a_plan_counts_frames() -> None:
    rows = {"obs": support.game(400, every=200)}
    hosts = {}
    for on in (True, False):
        buffer = fbuf.Buffer(20_000, storage=fbuf.storages.Compressed(keys=("obs",), stacks=on))
        hosts[on] = buffer.plan({"obs": rows["obs"][0]}, rows=rows).host
    single = fbuf.Buffer(20_000, storage=fbuf.storages.Compressed(keys=("obs",)))
    alone = single.plan({"obs": frames(1)[0]}, rows={"obs": frames(400)}).host
    assert hosts[True] < 1.3 * alone and hosts[True] < hosts[False]

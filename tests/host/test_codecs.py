"""Codecs return every bit, pack zeros and ones, and their decoded chunks are cached."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._host.codecs import is_packable
from fbuf._host.columns.chunked import ChunkCache
from fbuf._host.columns.raw import RawColumn
from fbuf._host.columns.stacked import StackedColumn
from fbuf._host.store.store import Store
from fbuf._host.types import StoreCorrupted
from fbuf.storages import BitPack, Compressed, Raw, Zstd
from tests.support.ownership import store_of
from tests.support.store import DTYPES, Deflate, check_rows, fetch, frames, make, same
from tests.support.tables import by_tier
from tests.support.threads import Thread


def boards(count, dtype, seed=0):
    """One-hot `[count, 8, 8, 12]`, a few squares changing from one to the next."""
    rng = np.random.default_rng(seed)
    kind = np.repeat(rng.integers(0, 12, (1, 8, 8)), count, 0)
    for t in range(1, count):
        kind[t] = kind[t - 1]
        kind[t, rng.integers(0, 8, 2), rng.integers(0, 8, 2)] = rng.integers(0, 12, 2)
    return (kind[..., None] == np.arange(12)).astype(dtype)


def test_bits_round_trip():
    rng, codec, packed = np.random.default_rng(0), BitPack(chunk=4), 0
    for number, dtype in enumerate(DTYPES):
        for most in (2, 100):
            shape = [(), (3,), (8, 5)][number % 3]
            rows = rng.integers(0, most, (4, *shape)).astype(dtype)
            data, out = codec.encode(rows), np.full((4, *shape), 1).astype(dtype)
            codec.decode(data, out)
            assert same(out, rows), (dtype, most)
            if most == 2 and is_packable(rows):  # one kind of float8 has no 0
                packed += 1
                assert len(data) == 1 + 4 * -(-int(np.prod(shape)) // 8)
    assert packed > 20


@pytest.mark.parametrize("codec", [BitPack(chunk=2), Zstd(chunk=2)], ids=["bits", "zstd"])
def test_values_other_than_zero_and_one_are_kept(codec):
    for odd in (-0.0, np.nan, 2.0, -1.0, np.inf, 5e-324):
        rows = np.ones((14, 40))
        rows[6:8], rows[7, 7] = 0, odd
        store = make(codec, shape=(40,), dtype="float64", length=512)
        out, ok = fetch(store, store.write([rows[:, None]], None)[:, 0])
        assert ok.all() and same(out, rows), odd


def test_damaged_bits_are_refused():
    rows = np.ones((4, 40), np.uint8)
    data = BitPack(chunk=4).encode(rows)
    for bad in (*(data[:cut] for cut in (0, 1, 5, 20)), data + b"0", bytes([7]) + data[1:]):
        pytest.raises(StoreCorrupted, BitPack(chunk=4).decode, bad, np.empty_like(rows)).match("damaged")


@pytest.mark.parametrize(("dtype", "least"), by_tier(("bool", 60), more=[("uint8", 60), ("float32", 240)]))
def test_boards_are_packed_before_they_are_compressed(dtype, least):
    rows = boards(4096, dtype)
    packed, plain = (make(Zstd(chunk=16), shape=(8, 8, 12), dtype=dtype, length=4096) for _ in range(2))
    plain._parts[0].coder._bits = False
    for store in (plain, packed):
        tickets = store.write([rows[:, None]], None)[:, 0]
        store.repack()
    assert packed.stats()["payload_bytes"] < plain.stats()["payload_bytes"]
    assert rows.nbytes > least * packed.stats()["payload_bytes"]
    check_rows(packed, tickets, rows)


@pytest.mark.more
@given(st.data())
def test_columns_may_change_between_bits_and_numbers(data):
    dtype = data.draw(st.sampled_from(["uint8", "float32", "int64", ml_dtypes.bfloat16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    codec = Zstd(chunk=data.draw(st.sampled_from([1, 4])), dictionary=4)
    store = make(codec, shape=(30,), dtype=dtype, length=4000, slack=0)
    rows = []
    for _ in range(data.draw(st.integers(1, 5))):
        n = data.draw(st.integers(1, 700))
        rows.append(rng.integers(0, data.draw(st.sampled_from([2, 3])), (n, 30)).astype(dtype))
    tickets = np.concatenate([store.write([r[:, None]], None)[:, 0] for r in rows])
    if data.draw(st.booleans()):
        store.repack()
    all_rows = np.concatenate(rows)
    check_rows(store, tickets, all_rows)
    loaded = Store.from_arrays(store.columns, store.to_arrays(), lanes=1, length=4000, slack=0)
    check_rows(loaded, tickets, all_rows)
    more = rng.integers(0, 2, (900, 30)).astype(dtype)
    tickets = loaded.write([more[:, None]], None)[:, 0]
    check_rows(loaded, tickets, more)


def test_raw_makes_a_raw_column():
    assert isinstance(make(Raw())._parts[0], RawColumn)
    codec, rows, out = Raw(), np.arange(12, dtype=np.int32).reshape(1, 12), np.empty((1, 12), np.int32)
    codec.decode(codec.encode(rows), out)
    assert same(out, rows)


EXAMPLE = {
    "obs": np.zeros((40, 40), np.uint8),
    "board": np.zeros((8, 8, 12), np.float32),
    "noise": np.zeros(400, np.float32),
}


def test_each_leaf_has_its_codec():
    rng = np.random.default_rng(0)
    obs, noise = np.zeros((500, 40, 40), np.uint8), rng.random((500, 400), np.float32)
    obs[np.arange(500), np.arange(500) % 40] = 200
    rows = {"obs": obs, "board": boards(500, np.float32), "noise": noise}
    codecs = {"board": BitPack(), "noise": Raw()}
    buffer = fbuf.Buffer(300, storage=Compressed(keys=tuple(rows), codec=codecs, cache=1 << 21))
    state = buffer.extend(buffer.init(EXAMPLE), rows)
    store = store_of(state)
    assert [column.codec for column in store.columns] == [BitPack(), None, Zstd()]  # board, noise, obs
    for _ in range(2):
        for name, leaf in buffer.rows(state).data.items():
            np.testing.assert_array_equal(leaf, rows[name][200:])
    assert cache_of(store).hits == cache_of(store).misses > 0
    assert hash(buffer) == hash(dataclasses.replace(buffer))


def test_a_codec_for_a_missing_leaf_is_refused():
    buffer = fbuf.Buffer(300, storage=Compressed(keys=("obs",), codec={"board": BitPack()}))
    pytest.raises(ValueError, buffer.init, EXAMPLE).match(r"codec names 'board', but the host has obs\.")


def cache_of(store):
    part = store._parts[0]
    return (part.inner if isinstance(part, StackedColumn) else part).cache


@pytest.mark.parametrize("codec", [Zstd(), Deflate(), Zstd(chunk=4)])
@pytest.mark.parametrize("bits", [False, True])
def test_cached_chunks_are_decoded_once(codec, bits):
    rows = boards(1500, "float32").reshape(1500, -1) if bits else frames(1500)
    store = make(codec, shape=rows.shape[1:], dtype=rows.dtype, length=1000, slack=0, cache=1 << 30)
    tickets = store.write([rows[:1000, None]], None)[:, 0]
    pick = np.random.default_rng(0).integers(0, 1000, 300)
    for turn in range(3):
        check_rows(store, tickets[pick], rows[pick])
        chunks = len(np.unique(pick // codec.chunk))
        assert (cache_of(store).hits, cache_of(store).misses) == (turn * chunks, chunks)
    store.write([rows[1000:, None]], None)  # expired rows are not served from the cache
    out, ok = fetch(store, tickets[:500])
    assert not ok.any() and not out.any()


def test_the_least_recently_used_chunk_is_evicted():
    cache = ChunkCache(30)
    for address in range(4):
        cache.put(address, memoryview(bytes([address]) * 10))
        assert cache.get(0) is not None or address == 3
    assert cache.nbytes == 30
    assert [cache.get(address) is not None for address in range(4)] == [True, False, True, True]
    cache.put(9, memoryview(bytes(31)))  # larger than the cache
    assert cache.get(9) is None and cache.nbytes == 30


def test_threads_share_the_cache():
    rows, store = frames(1000), make(Zstd(), shape=(24, 24), length=1000, cache=40_000)
    tickets = store.write([rows[:, None]], None)[:, 0]

    def reader(seed):
        for pick in np.random.default_rng(seed).integers(0, 1000, (60, 50)):
            check_rows(store, tickets[pick], rows[pick])

    for thread in [Thread(reader, i) for i in range(4)]:
        thread.ends()
    cache = cache_of(store)
    assert cache.nbytes == sum(map(len, cache._rows.values())) <= 40_000

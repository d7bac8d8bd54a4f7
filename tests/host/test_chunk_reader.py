"""Test the cache of decoded chunks: the same rows, fewer decompressions, bounded bytes."""

from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from fbuf._bridge import lifetime
from fbuf._host.codecs.codec import Zstd
from fbuf._host.columns.chunked import ChunkCache, ChunkedColumn
from fbuf._host.columns.stacked import StackedColumn
from fbuf._host.store.store import Column, Store
from fbuf.storages import Compressed
from tests.host.test_codecs import boards
from tests.support.store import Deflate, fetch, frames, same
from tests.support.threads import Thread


def make(codec: Any, cache: int, shape: tuple[int, ...] = (24, 24), dtype: str = "uint8") -> Store:
    return Store((Column("x", shape, np.dtype(dtype), codec),), lanes=1, length=1000, slack=0, cache=cache)


def cache_of(store: Store) -> ChunkCache:
    part = store._parts[0]
    part = part.inner if isinstance(part, StackedColumn) else part
    assert isinstance(part, ChunkedColumn) and part.cache is not None
    return part.cache


@pytest.mark.parametrize("codec", [Zstd(), Deflate(), Zstd(chunk=4)])
@pytest.mark.parametrize("bits", [False, True])
def test_cached_chunks_are_decoded_once(codec: Any, bits: bool) -> None:
    rows = boards(1500, "float32").reshape(1500, -1) if bits else frames(1500)
    store = make(codec, 1 << 30, rows.shape[1:], str(rows.dtype))
    tickets = store.write([rows[:1000, None]], None)[:, 0]
    pick = np.random.default_rng(0).integers(0, 1000, 300)
    for turn in range(3):
        out, ok = fetch(store, tickets[pick])
        assert ok.all() and same(out, rows[pick])
        chunks = len(np.unique(pick // codec.chunk))
        assert (cache_of(store).hits, cache_of(store).misses) == (turn * chunks, chunks)
    store.write([rows[1000:, None]], None)  # expired rows are not served from the cache
    out, ok = fetch(store, tickets[:500])
    assert not ok.any() and not out.any()


def test_the_least_recently_used_chunk_is_evicted() -> None:
    cache = ChunkCache(30)
    for address in range(4):
        cache.put(address, memoryview(bytes([address]) * 10))
        assert cache.get(0) is not None or address == 3
    assert cache.nbytes == 30
    assert [cache.get(address) is not None for address in range(4)] == [True, False, True, True]
    cache.put(9, memoryview(bytes(31)))  # larger than the cache
    assert cache.get(9) is None and cache.nbytes == 30


def test_nbytes_counts_the_cache() -> None:
    rows = frames(1000)
    plain, kept = make(Zstd(), 0), make(Zstd(), 100_000)
    for store in (plain, kept):
        fetch(store, store.write([rows[:, None]], None)[:, 0])
    assert 0 < kept.nbytes - plain.nbytes == cache_of(kept).nbytes <= 100_000


def test_threads_share_the_cache() -> None:
    rows, store = frames(1000), make(Zstd(), 40_000)
    tickets = store.write([rows[:, None]], None)[:, 0]

    def reader(seed: int) -> None:
        for pick in np.random.default_rng(seed).integers(0, 1000, (60, 50)):
            out, ok = fetch(store, tickets[pick])
            assert ok.all() and same(out, rows[pick])

    for thread in [Thread(reader, i) for i in range(4)]:
        thread.ends()
    cache = cache_of(store)
    assert cache.nbytes == sum(map(len, cache._rows.values())) <= 40_000


def test_a_buffer_reads_through_its_cache() -> None:
    rows = {"obs": frames(300), "t": np.arange(300)}
    buffer = fbuf.Buffer(300, storage=Compressed(keys=("obs",), cache=1 << 20))
    state = buffer.extend(buffer.init({"obs": rows["obs"][0], "t": 0}), rows)
    for _ in range(2):
        batch = buffer.peek(state, jax.random.key(0), 50)
        np.testing.assert_array_equal(batch.data["obs"], rows["obs"][np.asarray(batch.data["t"])])
    cache = cache_of(lifetime.find(lifetime.join_id(np.asarray(state.rows.id))))
    assert cache.hits == cache.misses > 0


def test_invalid_sizes_are_refused() -> None:
    for cache in (-1, True, 1.5):
        with pytest.raises(ValueError, match="Compressed: cache is"):
            Compressed(cache=cache)  # type: ignore[arg-type]

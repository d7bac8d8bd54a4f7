"""Codecs: what comes back is what went in, to the bit; zeros and ones take an eighth before zstd has begun."""

from __future__ import annotations

import dataclasses
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._host import bits
from fbuf._host.arrays import StoreCorrupted
from fbuf._host.chunks import Chunks
from fbuf._host.ring import Ring
from fbuf._host.store import Column, Store
from fbuf.storages import BitPack, Compressed, Raw, Zstd
from tests.support.store import DTYPES, fetch, same


@dataclasses.dataclass(frozen=True)
class Shades:
    """The example of `Codec`: lossy, sixteen shades."""

    chunk: int = 8

    def encode(self, rows: np.ndarray) -> bytes:
        shades = (rows.reshape(-1) >> 4).astype(np.uint8)
        shades = np.append(shades, np.zeros(shades.size % 2, np.uint8))
        return zlib.compress(shades[0::2] << 4 | shades[1::2])

    def decode(self, data: bytes | memoryview, out: np.ndarray) -> None:
        pairs = np.frombuffer(zlib.decompress(data), np.uint8)
        shades = np.stack([pairs >> 4, pairs & 15], axis=1).reshape(-1)[: out.size]
        out[...] = (shades * 17).reshape(out.shape)


def store_of(codec: Any, shape: tuple[int, ...], dtype: Any, length: int = 512) -> Store:
    return Store((Column("x", shape, np.dtype(dtype), codec),), lanes=1, length=length, slack=0)


def boards(count: int, dtype: Any, seed: int = 0) -> np.ndarray:
    """One-hot `[count, 8, 8, 12]`, a few squares changing from one to the next."""
    rng = np.random.default_rng(seed)
    kind = np.repeat(rng.integers(0, 12, (1, 8, 8)), count, 0)
    for t in range(1, count):
        kind[t] = kind[t - 1]
        kind[t, rng.integers(0, 8, 2), rng.integers(0, 8, 2)] = rng.integers(0, 12, 2)
    return (kind[..., None] == np.arange(12)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (8, 5)])
@pytest.mark.parametrize("ones", [True, False])
def test_bits_round_trip(dtype: Any, shape: tuple[int, ...], ones: bool) -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 2, (4, *shape)).astype(dtype)
    if not ones:
        rows = (rng.integers(0, 100, (4, *shape))).astype(dtype)
    codec, out = BitPack(chunk=4), np.full((4, *shape), 1).astype(dtype)
    data = codec.encode(rows)
    codec.decode(data, out)
    assert same(out, rows)
    if ones and bits.packable(rows):  # one kind of float8 has no 0
        assert len(data) == 1 + 4 * -(-int(np.prod(shape)) // 8)


@pytest.mark.parametrize("odd", [-0.0, np.nan, 2.0, -1.0, np.inf, 5e-324])
def test_what_is_nearly_a_bit_is_kept_as_it_is(odd: float) -> None:
    rows = np.zeros((2, 40), np.float64)
    rows[1, 7] = odd
    for codec in (BitPack(chunk=2), Zstd(chunk=2)):
        store = store_of(codec, (40,), np.float64)
        ones = np.ones((6, 40))
        tickets = store.write([np.concatenate([ones, rows, ones])[:, None]], None)[:, 0]
        out, ok = fetch(store, tickets)
        assert ok.all() and same(out, np.concatenate([ones, rows, ones]))


@pytest.mark.parametrize("cut", [0, 1, 5, 20])
def test_damaged_bits_are_refused(cut: int) -> None:
    rows = np.ones((4, 40), np.uint8)
    data = BitPack(chunk=4).encode(rows)
    for bad in (data[:cut], data + b"0", bytes([7]) + data[1:]):
        with pytest.raises(StoreCorrupted, match="damaged"):
            BitPack(chunk=4).decode(bad, np.empty_like(rows))


@pytest.mark.parametrize(("dtype", "least"), [("uint8", 60), ("float32", 240), ("bool", 60)])
def test_boards_are_packed_before_they_are_compressed(dtype: str, least: int) -> None:
    rows = boards(4096, dtype)
    packed, plain = store_of(Zstd(chunk=16), (8, 8, 12), dtype, 4096), store_of(Zstd(chunk=16), (8, 8, 12), dtype, 4096)
    part = plain._parts[0]
    assert isinstance(part, Chunks)
    part.coder._bits = False  # type: ignore[attr-defined]
    tickets = packed.write([rows[:, None]], None)[:, 0]
    plain.write([rows[:, None]], None)
    packed.repack()
    plain.repack()
    assert packed.stats()["payload_bytes"] < plain.stats()["payload_bytes"]
    assert rows.nbytes > least * packed.stats()["payload_bytes"]
    out, ok = fetch(packed, tickets)
    assert ok.all() and same(out, rows)


@given(st.data())
def test_columns_that_turn_from_bits_to_numbers_and_back(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["uint8", "float32", "int64", ml_dtypes.bfloat16]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    store = store_of(Zstd(chunk=data.draw(st.sampled_from([1, 4])), dictionary=4), (30,), dtype, 4000)
    rows = []
    for _ in range(data.draw(st.integers(1, 5))):
        n = data.draw(st.integers(1, 700))
        rows.append(rng.integers(0, data.draw(st.sampled_from([2, 3])), (n, 30)).astype(dtype))
    tickets = np.concatenate([store.write([r[:, None]], None)[:, 0] for r in rows])
    if data.draw(st.booleans()):
        store.repack()
    all_rows = np.concatenate(rows)
    out, ok = fetch(store, tickets)
    assert ok.all() and same(out, all_rows)
    loaded = Store.from_arrays(store.columns, store.to_arrays(), lanes=1, length=4000, slack=0)
    out, ok = fetch(loaded, tickets)
    assert ok.all() and same(out, all_rows)
    more = rng.integers(0, 2, (900, 30)).astype(dtype)
    tickets = loaded.write([more[:, None]], None)[:, 0]
    out, ok = fetch(loaded, tickets)
    assert ok.all() and same(out, more)


def test_raw_is_a_ring() -> None:
    store = store_of(Raw(), (30,), "uint8")
    assert isinstance(store._parts[0], Ring)
    codec, rows, out = Raw(), np.arange(12, dtype=np.int32).reshape(1, 12), np.empty((1, 12), np.int32)
    codec.decode(codec.encode(rows), out)
    assert same(out, rows)


EXAMPLE = {"obs": np.zeros((40, 40), np.uint8), "board": np.zeros((8, 8, 12), np.float32), "noise": np.zeros(400)}


def rows_of(count: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    obs = np.zeros((count, 40, 40), np.uint8)
    obs[np.arange(count), np.arange(count) % 40] = 200
    return {
        "obs": jnp.asarray(obs),
        "board": jnp.asarray(boards(count, np.float32)),
        "noise": jnp.asarray(rng.random((count, 400)), jnp.float32),
    }


def test_a_codec_for_each_leaf_gives_the_batches_of_device() -> None:
    example = {**EXAMPLE, "noise": np.zeros(400, np.float32)}
    codec = {"board": BitPack(), "noise": Raw()}
    buffer = fbuf.Buffer(300, storage=Compressed(keys=("obs", "board", "noise"), codec=codec))
    plain = fbuf.Buffer(300)
    batches = []
    for b in (buffer, plain):
        state = b.init(example)
        state = jax.jit(b.extend, donate_argnums=0)(state, rows_of(500))
        _, batch = b.sample(state, jax.random.key(0), 64)
        batches.append(batch.data)
    for a, b in zip(*map(jax.tree.leaves, batches), strict=True):
        np.testing.assert_array_equal(a, b)
    assert hash(buffer) == hash(dataclasses.replace(buffer))


def test_a_codec_for_a_leaf_that_is_not_there() -> None:
    buffer = fbuf.Buffer(300, storage=Compressed(keys=("obs",), codec={"board": BitPack()}))
    with pytest.raises(ValueError, match=r"codec names 'board', but the leaves on the host are obs\. Use one of those"):
        buffer.init(EXAMPLE)


def test_a_lossy_codec_of_ones_own() -> None:
    storage = Compressed(keys=("obs",), codec=Shades())
    buffer = fbuf.Buffer(64, storage=storage)
    obs = np.random.default_rng(0).integers(0, 256, (64, 6, 7), np.uint8)
    state = buffer.extend(buffer.init({"obs": obs[0]}), {"obs": obs})
    back = np.asarray(buffer.rows(state).data["obs"])
    assert 0 < np.abs(back.astype(int) - obs).max() <= 16


@pytest.mark.parametrize("chunk", [0, 65, True, 1.5])
def test_settings_of_bitpack(chunk: Any) -> None:
    with pytest.raises(ValueError, match="BitPack: chunk is"):
        BitPack(chunk=chunk)

"""Test damaged bytes of a host store and of its checkpoint: the written row, or an error."""

import dataclasses
import zlib
from unittest import mock

import numpy as np
import pytest
import zstandard

from fbuf._host import codecs as zstd
from fbuf._host.codecs import Zstd
from fbuf._host.store.store import Store
from fbuf._host.types import StoreCorrupted
from tests.support.refusals import raises
from tests.support.store import Deflate, Plain, check_rows, compressible, fetch, frames, load, make
from tests.support.tables import by_tier


@pytest.mark.parametrize("own", by_tier(Zstd(), Plain(8), more=[Deflate(8)], ids=lambda own: type(own).__name__))
def test_every_flipped_bit_of_a_loaded_chunk_is_found(own):
    store, rows, tickets = compressible(own)
    store = load(store)
    part = store._parts[0]
    segment, size = part.arena.segments[0], int(part.length[0, 0])
    for bit in range(0, size * 8, 3 if size < 2000 else 31):
        segment.array[bit // 8] ^= 1 << bit % 8
        raises(StoreCorrupted, "damaged", lambda: fetch(store, tickets[:8]))
        segment.array[bit // 8] ^= 1 << bit % 8
    assert isinstance(store.last_error, StoreCorrupted)
    check_rows(store, tickets, rows)


def with_dictionaries():
    store = make(Zstd(), Deflate(), shape=(24, 24), length=800, slack=0)
    rows = frames(800)[:, None]
    tickets = np.concatenate([store.write([rows[i : i + 100]] * 2, None) for i in range(0, 800, 100)])
    assert store.stats()["dictionaries"] == 1
    return store, rows, tickets


@pytest.mark.parametrize("column", by_tier(0, more=[1]))
@pytest.mark.parametrize("name", ["payload", "checksum", "dictionary", "length", "address"])
def test_a_changed_byte_of_a_checkpoint_gives_no_wrong_row(column, name):
    store, rows, tickets = with_dictionaries()
    arrays, rng = store.to_arrays(), np.random.default_rng(0)
    for _ in range(8):
        array = np.array(arrays[f"column{column}:{name}"])
        data = array.reshape(-1).view(np.uint8)
        data[rng.integers(data.size)] ^= rng.integers(1, 256, dtype=np.uint8)
        failed = 0
        try:
            damaged = load(store, arrays | {f"column{column}:{name}": array})
        except ValueError:  # lengths do not add up, no such dictionary
            assert name in ("dictionary", "length", "address")
            continue
        k = store.columns[column].codec.chunk
        for i in range(0, 800, k):
            try:
                check_rows(damaged, tickets[i : i + k], rows[i : i + k], column)
            except StoreCorrupted as error:
                assert "damaged" in str(error)
                failed += 1
        assert failed == 1


def test_a_changed_byte_of_a_chunk_that_is_not_full_is_found_at_load():
    store = make(Zstd(chunk=8), shape=(24, 24), length=64)
    store.write([frames(5)[:, None]], None)
    arrays = store.to_arrays()
    whole = np.array(arrays["column0:open"])
    assert len(whole) > 20
    for at in range(len(whole)):
        flipped = whole ^ (np.arange(len(whole)) == at).astype(np.uint8)
        raises(StoreCorrupted, "not full", load, store, arrays | {"column0:open": flipped})


def test_a_damaged_dictionary_is_found_at_load():
    store, _, _ = with_dictionaries()
    arrays, rng = store.to_arrays(), np.random.default_rng(0)
    for name in ("dictionaries", "dictionary_checksum"):
        for _ in range(40):
            array = np.array(arrays[f"column0:{name}"])
            data = array.view(np.uint8)
            data[rng.integers(data.size)] ^= rng.integers(1, 256, dtype=np.uint8)
            raises(StoreCorrupted, "a dictionary has checksum ", load, store, arrays | {f"column0:{name}": array})


def test_chunks_find_a_replaced_dictionary():
    store, rows, tickets = with_dictionaries()
    arrays = store.to_arrays()
    content = np.array(arrays["column0:dictionaries"])
    content[100] ^= 1
    changed = {"dictionaries": content, "dictionary_checksum": np.array([zlib.crc32(content)], np.uint32)}
    damaged = load(store, arrays | {f"column0:{n}": a for n, a in changed.items()})
    uses = np.repeat(np.array(arrays["column0:dictionary"]) > 0, 8)
    assert 0 < uses.sum() < 800
    check_rows(damaged, tickets[~uses], rows[~uses])
    for i in np.flatnonzero(uses)[::8]:
        raises(StoreCorrupted, "damaged", fetch, damaged, tickets[i])


@pytest.mark.parametrize("own", by_tier(None, more=[Zstd(), Deflate()]))
def test_every_flipped_bit_of_an_update_is_found(own):
    store = make(own, shape=(100,), length=10)
    tickets = store.write([np.zeros((4, 1, 100), np.uint8)], None)[:, 0]
    (new,) = store.update_rows(tickets[:1], np.array([True]), {0: np.arange(100, dtype=np.uint8)[None] // 9})
    arrays = store.to_arrays()
    for bit in range(arrays["patch:data"].size * 8):
        data = arrays["patch:data"].copy()
        data[bit // 8] ^= 1 << bit % 8
        raises(StoreCorrupted, "damaged", fetch, load(store, arrays | {"patch:data": data}), new)


def test_a_dictionary_is_not_made_of_damaged_rows():
    store = make(Zstd(), shape=(24, 24), length=1600, slack=0)
    rows = frames(1600)[:, None]
    store.write([rows[:504]], None)
    store._parts[0].arena.segments[0].array[: store._parts[0].arena.live] ^= 1
    tickets = store.write([rows[504:520]], None)  # who writes need not hear of it; who reads does
    assert store.stats()["dictionaries"] == 0
    check_rows(store, tickets, rows[504:520])


def test_a_frame_of_another_size_is_refused_before_decoding():
    sizeless = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    raises(StoreCorrupted, None, Zstd().decode, sizeless, np.empty(100, np.uint8))
    bomb, out = zstandard.ZstdCompressor().compress(bytes(1 << 24)), np.empty((8, 24, 24), np.uint8)
    with mock.patch.object(zstd.zstandard, "ZstdDecompressor") as decompressor:
        raises(StoreCorrupted, "claims 16777216 bytes; expected 4608", Zstd().decode, bomb, out)
    assert not decompressor().decompress.called


def test_arrays_that_do_not_fit_are_refused():
    store, _, tickets = compressible()
    store.update_rows(tickets[:1, 0], np.array([True]), {0: np.zeros((1, 24, 24), np.uint8)})
    arrays = {n: np.array(a) for n, a in store.to_arrays().items()}
    load(store, arrays)
    pytest.raises(ValueError, load, store, arrays, length=65).match("lanes, length and slack")
    columns, fits = (dataclasses.replace(store.columns[0], codec=Zstd(chunk=4)),), {"length": 64, "slack": 0}
    raises(ValueError, "chunks hold 8 rows; expected 4", Store.from_arrays, columns, arrays, lanes=1, **fits)
    row = arrays["patch:row"] + np.array([0, 0, len(tickets), 0])
    raises(ValueError, "patch:row has", load, store, arrays | {"patch:row": row})
    for name, array in arrays.items():
        raises(ValueError, "is missing", load, store, {n: a for n, a in arrays.items() if n != name})
        raises(ValueError, "Store.from_arrays", load, store, arrays | {name: array.astype(np.float32)})
    for name in ("column0:payload", "column0:length", "column0:dictionary", "patch:data", "count", "patch:value"):
        if arrays[name].size:
            raises(ValueError, "Store.from_arrays", load, store, arrays | {name: arrays[name][:-1]})


@pytest.mark.parametrize(
    ("name", "at", "number", "words"),
    [
        ("first", 0, 1 << 61, "first is 2305843009213693952"),
        ("first", 0, (1 << 64) - 1, "first is 18446744073709551615"),
        ("count", 0, (1 << 63) - 1, "count is"),
        ("column0:state", 1, -1, "-1 chunks are closed"),
        ("column0:state", 1, (1 << 63) - 1, "chunks are closed"),
        ("column0:state", 2, -1, "of -1 bytes"),
        ("column0:state", 2, (1 << 63) - 1, "of 9223372036854775807 bytes"),
        ("column0:packed", 0, -1, "packed is .-1."),
        ("column0:packed", 0, 1 << 40, "packed is .1099511627776."),
    ],
)
def test_counts_that_no_store_reaches_are_refused(name, at, number, words):
    """Otherwise the next read, write or save raises OverflowError."""
    store, *_ = compressible()
    arrays = {n: np.array(a) for n, a in store.to_arrays().items()}
    arrays[name][at] = number
    raises(ValueError, words, load, store, arrays)

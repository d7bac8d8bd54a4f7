"""Checkpoint folders: arrays of every kind return bit for bit, and a second save writes only what changed."""

import functools
import sys
import tracemalloc
import zlib
from pathlib import Path
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint.dtypes import NAMES, dtype_named
from fbuf._host.io import checksum
from tests.support.disk import flip
from tests.support.memory_disk import PATH, Blocks, Faulty, Keyed, Memory, bits, load, same, save, state
from tests.support.refusals import raises


def back(path, arrays):
    with checkpoint.read(str(path)) as saved:
        same(saved, arrays)


def loaded(disk, name="a"):
    return np.asarray(checkpoint.read(PATH, disk=disk).arrays[name])


def test_every_dtype_and_shape_returns(tmp_path):
    shapes, rng = [(), (0,), (0, 3), (3, 0), (1,), (1000, 3), (2, 1, 3)], np.random.default_rng(0)
    names = [name for name in NAMES if hasattr(ml_dtypes, name) or hasattr(np, name)]  # of this ml_dtypes
    assert len(names) > 20
    arrays = {f"{n}{list(s)}": rng.integers(0, 2, s).astype(dtype_named(n)) for n in names for s in shapes}
    written = checkpoint.write(str(tmp_path), arrays, {}, sync=False)
    assert (written.generation, written.bytes_total) == (1, sum(a.nbytes for a in arrays.values()))
    back(tmp_path, arrays)
    checkpoint.write(str(tmp_path), {}, {}, sync=False)
    back(tmp_path, {})


def test_every_dtype_of_jax_has_a_name():
    kinds = [getattr(jnp, n) for n in dir(jnp) if n.startswith(("int", "uint", "float", "bfloat", "complex"))]
    names = {np.dtype(kind.dtype).name for kind in kinds if isinstance(getattr(kind, "dtype", None), np.dtype)}
    assert len(names) > 15 and names <= set(NAMES)


def test_arrays_of_any_memory_layout_return():
    table, cube = np.arange(600.0).reshape(20, 30), np.arange(24).reshape(2, 3, 4)
    other_bytes = (np.arange(7, dtype=">i4"), np.arange(7, dtype=">c16"), np.array(5, ">f8"))
    shared = np.broadcast_to(np.float32(3), (50, 4))
    for array in (table.T, table[::-2, ::3], shared, np.asfortranarray(cube), *other_bytes):
        disk = Memory()
        checkpoint.write(PATH, {"a": array}, {}, disk=disk)
        got = loaded(disk)
        assert np.array_equal(got, array) and got.shape == array.shape and got.dtype == array.dtype.newbyteorder("=")


def test_meta_returns():
    disk = Memory()
    meta = {"text": 'ä\ud800\n"#[{', "list": [-(2**70), 0.1, None, True, {"": []}], "deep": {"a": {"b": {}}}}
    checkpoint.write(PATH, {"α/β#\\": np.zeros(3)}, meta, disk=disk)
    saved = checkpoint.read(PATH, disk=disk)
    assert saved.meta == meta and list(saved.arrays) == ["α/β#\\"]


@given(st.data())
def test_slices_are_those_of_the_array(data):
    rows = data.draw(st.integers(0, 40))
    array = np.arange(rows * 3, dtype=np.int32).reshape(rows, 3)
    if data.draw(st.booleans()):
        source = Blocks(array, data.draw(st.integers(1, 50)))
    else:
        cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=6)))
        array = array[:, 0].astype(np.uint8)
        pieces = {f"k{i}": piece for i, piece in enumerate(np.split(array, cuts))}
        source = Keyed(pieces, data.draw(st.booleans()))
    disk = Memory()
    checkpoint.write(PATH, {"a": source}, {}, disk=disk)
    found = checkpoint.read(PATH, disk=disk, verify="lazy").arrays["a"]
    a, b = (data.draw(st.none() | st.integers(-50, 50)) for _ in range(2))
    assert np.array_equal(found[a:b], array[a:b]) and found[a:b].shape == array[a:b].shape
    first = found.block_places()[0].tolist()
    parts = [found[a:b] for a, b in zip(first, [*first[1:], rows], strict=True)] if first else []
    assert np.array_equal(np.concatenate([array[:0], *parts]), array)
    if isinstance(source, Keyed):
        assert first == list(source.cuts[: len(found.checked)])
    assert np.array_equal(found[()], array)
    pytest.raises(IndexError, lambda: found[::2])


def test_checksums_are_crc32_with_and_without_isal(monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.random.default_rng(0).integers(0, 256, 100_003, np.uint8).tobytes()
    for _ in range(2):
        checksum._function.cache_clear()
        for size in (0, 1, 15, 64, 4097, 100_003):
            assert checksum.crc32(memoryview(data)[:size], 7) == zlib.crc32(data[:size], 7)
        monkeypatch.setitem(sys.modules, "isal", None)
    assert checksum._function() is zlib.crc32
    checksum._function.cache_clear()


def test_loaded_arrays_are_sources(tmp_path: Path) -> None:
    save(str(tmp_path / "a"), 3)
    with checkpoint.read(str(tmp_path / "a")) as saved:
        checkpoint.write(str(tmp_path / "b"), saved.arrays, saved.meta)
        again = checkpoint.write(str(tmp_path / "a"), saved.arrays, saved.meta)
    assert load(str(tmp_path / "b")) == load(str(tmp_path / "a")) == 3
    assert again.bytes_written < 3000


def test_a_save_after_one_that_found_damage_writes_everything(tmp_path):
    marks, array = np.repeat(["a"], 10), np.arange(80)
    checkpoint.write(tmp_path, {"a": Blocks(array, 8, marks.tolist())}, {})
    flip(*tmp_path.glob("data*"), -1)
    array[:48], marks[:6] = -1, "b"  # most of the file, so that the rest is moved out of it
    copy = functools.partial(checkpoint.snapshot, tmp_path, {"a": Blocks(array, 8, marks.tolist())}, lambda *_: True)
    raises(OSError, "rows 72 to 80 of array 'a'", checkpoint.write, tmp_path, copy(), {})
    checkpoint.write(tmp_path, copy(), {})
    back(tmp_path, {"a": array})


class Views(Blocks):
    slices_are_views = True  # blocks are read and compared several at a time


def test_a_block_that_returns_to_earlier_bytes_is_not_taken_for_its_neighbours() -> None:
    disk, array = Memory(), np.zeros(40, np.uint8)
    for value in (0, 1, 0, 2):
        array = array.copy()
        array[15] = value
        checkpoint.write(PATH, {"a": Views(array, 10)}, {}, disk=disk)
        assert np.array_equal(loaded(disk), array)


@given(st.data())
def test_a_save_writes_what_changed_and_nothing_else(data):
    disk, rows = Memory(), data.draw(st.sampled_from([1, 9, 700, 40_000]))
    array = np.random.default_rng(0).integers(0, 256, (rows, 24), np.uint8)
    block = data.draw(st.sampled_from([1 + rows // 40, 1 + rows // 3, rows]))
    blocks = -(-rows // block)

    kind = data.draw(st.sampled_from([Views, Blocks]))
    checkpoint.write(PATH, {"a": kind(array, block)}, {}, disk=disk)
    for turn in range(data.draw(st.integers(1, 3))):
        changed = data.draw(st.sets(st.integers(0, blocks - 1), max_size=6))
        array = array.copy()
        for number in changed:
            array[data.draw(st.integers(number * block, min((number + 1) * block, rows) - 1)), 3] ^= 1
        written = checkpoint.write(PATH, {"a": kind(array, block)}, {}, disk=disk, keep=data.draw(st.integers(1, 2)))
        size = sum(24 * len(array[n * block : (n + 1) * block]) for n in changed)
        moves = turn > 0 or 2 * size > array.nbytes  # a file of which less than half is in use is written again
        assert size <= written.bytes_written <= (array.nbytes if moves else size) + 300 * blocks + 2000
        with checkpoint.read(PATH, disk=disk) as saved:
            same(saved, {"a": array})


def test_equal_marks_mean_equal_blocks_and_no_mark_means_nothing():
    array = np.arange(8)
    for marks, second in ((["a", "b"], 0), (["a", None], 4), ([None, None], 8), (["x", "b"], 4), (None, 8)):
        disk = Memory()
        checkpoint.write(PATH, {"a": Blocks(array, 4, ["a", "b"])}, {}, disk=disk)
        checkpoint.write(PATH, {"a": Blocks(array + 100, 4, marks)}, {}, disk=disk)
        assert (loaded(disk) >= 100).sum() == second, marks
    disk = Memory()
    for size in (5, 7, 3):  # the same mark, another length
        checkpoint.write(PATH, {"a": Keyed({"same": np.full(size, size, np.uint8)})}, {}, disk=disk)
        assert loaded(disk).tolist() == [size] * size


def test_a_snapshot_is_saved_as_it_was_unless_another_save_came_between(tmp_path: Path) -> None:
    first, array = np.arange(8), np.arange(8) ** 2
    array[:4] = first[:4]
    want = array.copy()
    checkpoint.write(tmp_path, {"a": Blocks(first, 4)}, {})
    copied = checkpoint.snapshot(tmp_path, {"a": Blocks(array, 4)}, lambda *_: True)
    array[:] = -1
    assert checkpoint.write(tmp_path, copied, {}).bytes_written < 4000
    back(tmp_path, {"a": want})
    raises(OSError, "rows 0 to 4 of array 'a' were not copied", checkpoint.write, tmp_path, copied, {})
    back(tmp_path, {"a": want})


def test_keyed_pieces_are_reordered_and_removed_without_reading() -> None:
    disk, pieces = Memory(), {f"p{i}": np.full(5 + i, i, np.uint8) for i in range(20)}
    checkpoint.write(PATH, {"log": Keyed(pieces)}, {}, disk=disk)
    del pieces["p0"], pieces["p7"]
    pieces = {"new": np.zeros(0, np.uint8)} | dict(reversed(pieces.items())) | {"last": np.ones(3, np.uint8)}
    source = Keyed(pieces)
    checkpoint.write(PATH, {"log": source}, {}, disk=disk)
    assert source.reads == 2
    assert bits(loaded(disk, "log")) == bits(source.array)


def test_another_shape_dtype_or_block_is_written_again() -> None:
    disk, marks = Memory(), ["m"] * 5
    array = np.arange(40, dtype=np.int32)
    for source in (
        Blocks(array, 8, marks),
        Blocks(array.astype(np.uint32) + 1, 8, marks),
        Blocks(array.reshape(20, 2)[::-1], 4, marks),
        Blocks(array.reshape(40, 1) * 2, 8, marks),
        Blocks(array * 3, 9, marks),
    ):
        checkpoint.write(PATH, {"a": source}, {}, disk=disk)
        assert np.array_equal(loaded(disk), source.array)


def test_generations_and_their_files_are_kept_and_removed():
    for keep in (1, 2, 3):
        disk = Memory()
        for k in range(30):
            save(PATH, k, disk, keep=keep)
            names = sorted(n for n in disk.contents() if n.startswith("manifest"))
            assert len(names) == min(keep, k + 1)
        with checkpoint.read(PATH, disk=disk) as saved:
            assert saved.generation == 30
        size = sum(len(data) for name, data in disk.contents().items() if name.startswith("data"))
        assert size < 2 * keep * sum(a.nbytes for a in state(29).values()) + 30 * 1200
        for name in names[1:]:
            del disk.names[name]
        assert load(PATH, disk) == 30 - keep


@pytest.mark.more
def test_the_number_of_files_is_bounded():
    disk, rows, most = Memory(), np.zeros((140, 16), np.uint8), 0
    for k in range(140):
        rows[k] = k + 1
        checkpoint.write(PATH, {"a": Blocks(rows, 1)}, {}, disk=disk, sync=False, keep=1)
        most = max(most, len(disk.contents()))
    assert 40 < most <= 66
    assert np.array_equal(loaded(disk), rows)


def test_compaction_reads_the_source_only_where_the_file_is_damaged():
    disk = Memory()
    array = np.arange(100, dtype=np.uint8)
    checkpoint.write(PATH, {"a": Blocks(array, 10, [f"0-{i}" for i in range(10)])}, {}, disk=disk)
    for i in range(7):
        array = array.copy()
        array[10 * i : 10 * i + 10] += 100
        if i == 4:  # before compaction: damage a block that the source can replace
            disk.names["data-000000000001.safetensors"].data[-1] ^= 1
        source = Blocks(array, 10, [f"{int(j <= i)}-{j}" for j in range(10)])
        checkpoint.write(PATH, {"a": source}, {}, disk=disk, keep=1)
        assert source.reads in (1, 2)
    assert "data-000000000001.safetensors" not in disk.contents()
    assert np.array_equal(loaded(disk), array)


def test_a_damaged_block_without_a_mark_is_written_again():
    disk, array = Memory(), np.arange(100, dtype=np.uint8)
    checkpoint.write(PATH, {"a": Blocks(array, 10)}, {}, disk=disk)
    disk.names["data-000000000001.safetensors"].data[-5] ^= 1
    checkpoint.write(PATH, {"a": Blocks(array, 10)}, {}, disk=disk)
    assert np.array_equal(loaded(disk), array)


def test_a_save_believes_its_memory_of_the_last_manifest_only_if_that_is_in_the_folder():
    mine, other = Memory(), Memory()
    save(PATH, 1, mine)
    save(PATH, 1, other)  # the same path: this one is remembered
    assert save(PATH, 2, mine).bytes_written < 4000
    mine.names["manifest-000000000002.json"].data[300] ^= 1
    save(PATH, 3, mine)
    assert load(PATH, mine) == 3


def test_a_synced_save_syncs_the_files_of_earlier_saves():
    disk = Memory()
    save(PATH, 4, disk, sync=False)
    assert disk.pending
    save(PATH, 4, disk)
    name = "data-000000000001.safetensors"
    assert disk.durable[name].durable == disk.contents()[name]


def test_restore_reads_each_byte_once_and_falls_back():
    disk = Memory()
    save(PATH, 1, disk)
    save(PATH, 2, disk)
    counter, tried = Faulty(disk), []

    def build(saved):
        tried.append(saved.generation)
        same(saved, state(saved.meta["k"]))
        return saved.meta["k"]

    assert checkpoint.restore(PATH, build, disk=counter) == 2
    once = counter.count
    counter = Faulty(disk)
    checkpoint.read(PATH, disk=counter).close()
    assert once <= counter.count and tried == [2]  # blocks that follow one another are read in one call
    assert checkpoint.restore(PATH, lambda saved: saved.meta["k"], disk=disk) == 2
    disk.names["data-000000000002.safetensors"].data[-3] ^= 4
    for use in (build, lambda saved: saved.meta["k"]):
        with pytest.warns(RuntimeWarning, match="is loaded, not the newest"):
            assert checkpoint.restore(PATH, use, disk=disk) == 1
    assert checkpoint.restore(PATH, lambda saved: saved.meta["k"], disk=disk, verify="lazy") == 2
    assert tried == [2, 2, 1]


@pytest.mark.parametrize("sync", [True, False])
def test_large_files_are_flushed_while_they_are_written(sync: bool, tmp_path: Path) -> None:
    arrays, begin = {"a": np.arange(20 << 18, dtype=np.int32)}, checkpoint.Disk.start_writeback
    with mock.patch.object(checkpoint.Disk, "start_writeback", autospec=True, side_effect=begin) as watched:
        checkpoint.write(str(tmp_path), arrays, {}, sync=sync)
    back(tmp_path, arrays)
    begun = [call.args[2:] for call in watched.call_args_list]
    assert len(begun) in ((20, 21) if sync else (0,))
    assert all(at + size == after for (at, size), (after, _) in zip(begun, begun[1:], strict=False))


class Generated:
    """64 MiB that are never in memory as a whole."""

    shape, dtype = (1 << 26,), np.dtype(np.uint8)

    def __getitem__(self, rows):
        return np.arange(rows.start, rows.stop, dtype=np.int64).astype(np.uint8)


def test_memory_is_bounded(tmp_path):
    tracemalloc.start()
    try:
        for _ in range(2):
            checkpoint.write(tmp_path, {"a": Generated()}, {}, sync=False)
        with checkpoint.read(tmp_path) as saved:
            for start in range(0, 1 << 26, 1 << 18):
                saved.arrays["a"][start : start + (1 << 18)]
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


def test_the_last_bytes_of_a_block_are_compared(tmp_path: Path) -> None:
    array = np.arange(13, dtype=np.uint8)
    for value in (12, 99):
        array[-1] = value
        checkpoint.write(tmp_path, {"a": array}, {}, sync=False)
    with checkpoint.read(tmp_path) as saved:
        assert saved.arrays["a"][()].tolist() == array.tolist()

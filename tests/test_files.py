"""Checkpoint folders: arrays of every kind come back as they were, and a second save costs what is new."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import threading
import tracemalloc
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf import _files
from fbuf.__main__ import main
from fbuf._files._dtypes import NAMES, dtype_named
from fbuf._files._layout import MOST_BLOCKS, Layout, block_rows
from tests.checkpoints import PATH, Blocks, Faulty, Keyed, Memory, bits, load, same, save, sources, state


def back(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with _files.read(str(path)) as saved:
        same(saved, arrays)


# ------------------------------------------------------------------------------------------------------------ arrays


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_and_shape(name: str, tmp_path: Path) -> None:
    if not hasattr(ml_dtypes, name) and not hasattr(np, name):
        pytest.skip(f"ml_dtypes {ml_dtypes.__version__} has no {name}")
    shapes = [(), (0,), (0, 3), (3, 0), (1,), (1000, 3), (2, 1, 3)]
    rng = np.random.default_rng(0)
    arrays = {f"a{list(shape)}": rng.integers(0, 2, shape).astype(dtype_named(name)) for shape in shapes}
    written = _files.write(str(tmp_path), arrays, {}, sync=False)
    assert (written.generation, written.bytes_total) == (1, sum(a.nbytes for a in arrays.values()))
    back(tmp_path, arrays)


def test_all_of_jax_s_dtypes_are_in_the_table() -> None:
    kinds = [getattr(jnp, n) for n in dir(jnp) if n.startswith(("int", "uint", "float", "bfloat", "complex"))]
    names = {np.dtype(kind.dtype).name for kind in kinds if isinstance(getattr(kind, "dtype", None), np.dtype)}
    assert len(names) > 15 and names <= set(NAMES)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(600.0).reshape(20, 30).T,
        np.arange(600.0).reshape(20, 30)[::-2, ::3],
        np.broadcast_to(np.float32(3), (50, 4)),
        np.asfortranarray(np.arange(24).reshape(2, 3, 4)),
        np.arange(7, dtype=">i4"),
        np.arange(7, dtype=">c16"),
        np.array(5, ">f8"),
    ],
    ids=["transposed", "strided", "broadcast", "fortran", "big endian", "big endian complex", "big endian scalar"],
)
def test_arrays_that_do_not_lie_plainly_in_memory(array: np.ndarray, tmp_path: Path) -> None:
    if array.flags.writeable:
        array.flags.writeable = False
    _files.write(str(tmp_path), {"a": array}, {}, sync=False)
    with _files.read(str(tmp_path)) as saved:
        got = np.asarray(saved.arrays["a"])
    assert np.array_equal(got, array) and got.shape == array.shape and got.dtype == array.dtype.newbyteorder("=")


def test_nothing_at_all_can_be_saved(tmp_path: Path) -> None:
    _files.write(str(tmp_path), {}, {}, sync=False)
    back(tmp_path, {})


def test_meta_comes_back() -> None:
    disk = Memory()
    meta = {
        "text": 'ä\ud800\n"#[{',
        "number": -(2**70),
        "half": 0.1,
        "list": [None, True, {"": []}],
        "deep": {"a": {"b": {}}},
    }
    _files.write(PATH, {"α/β#\\": np.zeros(3)}, meta, disk=disk)
    saved = _files.read(PATH, disk=disk)
    assert saved.meta == meta and list(saved.arrays) == ["α/β#\\"]


@given(st.data())
def test_slices(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 40))
    array = np.arange(rows * 3, dtype=np.int32).reshape(rows, 3)
    if data.draw(st.booleans()):
        source: object = Blocks(array, data.draw(st.integers(1, 50)))
    else:
        cuts = sorted(data.draw(st.lists(st.integers(0, rows), max_size=6)))
        array = array[:, 0].astype(np.uint8)
        pieces = zip([0, *cuts], [*cuts, rows], strict=True)
        source = Keyed({f"k{i}": array[a:b] for i, (a, b) in enumerate(pieces)}, data.draw(st.booleans()))
    disk = Memory()
    _files.write(PATH, {"a": source}, {}, disk=disk)  # type: ignore[dict-item]
    found = _files.read(PATH, disk=disk, verify="lazy").arrays["a"]
    a, b = (data.draw(st.none() | st.integers(-50, 50)) for _ in range(2))
    assert np.array_equal(found[a:b], array[a:b]) and found[a:b].shape == array[a:b].shape
    assert np.array_equal(np.concatenate([array[:0], *(part for _, part in found.blocks())]), array)
    assert [start for start, _ in found.blocks()] == list(
        getattr(source, "cuts", range(0, rows, 1))[: len(found.checked)]
    ) or (not hasattr(source, "cuts"))
    if rows:
        row = data.draw(st.integers(-rows, rows - 1))
        assert np.array_equal(found[row], array[row])
    assert len(found) == rows and np.array_equal(found[...], array)
    with pytest.raises(IndexError):
        found[::2]
    with pytest.raises(IndexError):
        found[rows]


def test_what_was_loaded_is_a_source(tmp_path: Path) -> None:
    save(str(tmp_path / "a"), 3)
    with _files.read(str(tmp_path / "a")) as saved:
        _files.write(str(tmp_path / "b"), saved.arrays, saved.meta)
        again = _files.write(str(tmp_path / "a"), saved.arrays, saved.meta)
    assert load(str(tmp_path / "b")) == load(str(tmp_path / "a")) == 3
    assert again.bytes_written < 3000


def test_blocks_that_we_choose() -> None:
    for rows in (0, 1, 1000, 10**6, 10**9, 10**13):
        for size in (0, 1, 3, 4096, 7056, 10**6):
            block = block_rows(rows, size)
            assert block >= 1 and (not size or block & (block - 1) == 0)
            assert -(-rows // block) <= MOST_BLOCKS
    assert block_rows(10**4, 7056) == 32


# ------------------------------------------------------------------------------------------------- saves build on saves


def test_a_second_save_writes_and_reads_what_is_new() -> None:
    disk, calls = Memory(), []
    save(PATH, 9, disk)
    later = sources(10)
    written = _files.write(PATH, later, {"k": 10}, disk=disk)
    assert load(PATH, disk) == 10
    assert later["log"].reads == 1 and later["table"].reads == 1 and later["priority"].reads == 4
    fresh = 50 + 80 + 120 + 8
    header = disk.contents()["data-000000000002.safetensors"].__len__() - fresh
    assert 0 < header < 1500
    assert written.bytes_written == fresh + header + len(disk.contents()["manifest-000000000002.json"])
    assert not calls


def test_a_save_of_the_same_writes_no_data() -> None:
    disk = Memory()
    save(PATH, 5, disk)
    save(PATH, 5, disk)
    assert load(PATH, disk) == 5
    assert sum(name.startswith("data") for name in disk.contents()) == 1


def test_a_mark_is_believed_and_none_is_not() -> None:
    disk, array = Memory(), np.arange(8)
    for marks, second in ((["a", "b"], 0), (["a", None], 4), ([None, None], 8), (["x", "b"], 4), (None, 8)):
        disk = Memory()
        _files.write(PATH, {"a": Blocks(array, 4, ["a", "b"])}, {}, disk=disk)
        _files.write(PATH, {"a": Blocks(array + 100, 4, marks)}, {}, disk=disk)
        got = np.asarray(_files.read(PATH, disk=disk).arrays["a"])
        assert (got >= 100).sum() == second, marks


def test_keys_move_and_go() -> None:
    disk, rng = Memory(), np.random.default_rng(0)
    pieces = {f"p{i}": rng.integers(0, 256, 5 + i, np.uint8) for i in range(20)}
    _files.write(PATH, {"log": Keyed(pieces)}, {}, disk=disk)
    del pieces["p0"], pieces["p7"]
    pieces = {"new": np.zeros(0, np.uint8)} | dict(reversed(pieces.items())) | {"last": np.ones(3, np.uint8)}
    source = Keyed(pieces)
    _files.write(PATH, {"log": source}, {}, disk=disk)
    assert source.reads == 2
    assert bits(np.asarray(_files.read(PATH, disk=disk).arrays["log"])) == bits(source.array)


def test_a_mark_is_not_believed_of_a_block_of_another_length() -> None:
    disk = Memory()
    for size in (5, 7, 3):
        _files.write(PATH, {"log": Keyed({"same": np.full(size, size, np.uint8)})}, {}, disk=disk)
        assert np.asarray(_files.read(PATH, disk=disk).arrays["log"]).tolist() == [size] * size


def test_other_shapes_dtypes_and_blocks_are_written_anew() -> None:
    disk, marks = Memory(), ["m"] * 5
    array = np.arange(40, dtype=np.int32)
    for source in (
        Blocks(array, 8, marks),
        Blocks(array.astype(np.uint32) + 1, 8, marks),
        Blocks(array.reshape(20, 2)[::-1], 4, marks),
        Blocks(array.reshape(40, 1) * 2, 8, marks),
        Blocks(array * 3, 9, marks),
    ):
        _files.write(PATH, {"a": source}, {}, disk=disk)
        assert np.array_equal(np.asarray(_files.read(PATH, disk=disk).arrays["a"]), source.array)


def test_generations_and_files_are_kept_and_removed() -> None:
    for keep in (1, 2, 3):
        disk = Memory()
        for k in range(30):
            save(PATH, k, disk, keep=keep)
            names = sorted(n for n in disk.contents() if n.startswith("manifest"))
            assert len(names) == min(keep, k + 1)
        with _files.read(PATH, disk=disk) as saved:
            assert saved.generation == 30
        size = sum(len(data) for name, data in disk.contents().items() if name.startswith("data"))
        assert size < 2 * keep * sum(a.nbytes for a in state(29).values()) + 30 * 1200
        for name in names[1:]:
            del disk.names[name]
        assert load(PATH, disk) == 30 - keep


def test_the_number_of_files_stays_bounded() -> None:
    disk, rows, most = Memory(), np.zeros((140, 16), np.uint8), 0
    for k in range(140):
        rows[k] = k + 1
        _files.write(PATH, {"a": Blocks(rows, 1)}, {}, disk=disk, sync=False, keep=1)
        most = max(most, len(disk.contents()))
    assert 40 < most <= 66
    assert np.array_equal(np.asarray(_files.read(PATH, disk=disk).arrays["a"]), rows)


def test_compaction_reads_no_source_and_heals_from_it() -> None:
    disk = Memory()
    array = np.arange(100, dtype=np.uint8)
    _files.write(PATH, {"a": Blocks(array, 10, [f"0-{i}" for i in range(10)])}, {}, disk=disk)
    for i in range(7):
        array = array.copy()
        array[10 * i : 10 * i + 10] += 100
        if i == 4:  # the file is about to be compacted: damage a block that the source still has
            file = disk.names["data-000000000001.safetensors"]
            file.data[-1] ^= 1
        source = Blocks(array, 10, [f"{int(j <= i)}-{j}" for j in range(10)])
        _files.write(PATH, {"a": source}, {}, disk=disk, keep=1)
        assert source.reads in (1, 2)
    assert "data-000000000001.safetensors" not in disk.contents()
    assert np.array_equal(np.asarray(_files.read(PATH, disk=disk).arrays["a"]), array)


def test_a_damaged_block_without_a_mark_is_written_again() -> None:
    disk, array = Memory(), np.arange(100, dtype=np.uint8)
    _files.write(PATH, {"a": Blocks(array, 10)}, {}, disk=disk)
    disk.names["data-000000000001.safetensors"].data[-5] ^= 1
    _files.write(PATH, {"a": Blocks(array, 10)}, {}, disk=disk)
    assert np.array_equal(np.asarray(_files.read(PATH, disk=disk).arrays["a"]), array)


def test_saves_that_did_not_wait_are_waited_for_by_one_that_does() -> None:
    disk = Memory()
    save(PATH, 4, disk, sync=False)
    assert disk.pending
    save(PATH, 4, disk)
    name = "data-000000000001.safetensors"
    assert disk.durable[name].durable == disk.contents()[name]


# ---------------------------------------------------------------------------------------------------- what can be wrong


@pytest.mark.parametrize("sync", [True, False])
def test_the_disk_begins_early_where_it_is_waited_for(sync: bool, tmp_path: Path) -> None:
    begun: list[tuple[int, int]] = []

    class Watched(_files.Disk):
        def begin(self, fd: int, at: int, size: int) -> None:
            begun.append((at, size))
            super().begin(fd, at, size)

    arrays = {"a": np.arange(20 << 18, dtype=np.int32)}
    _files.write(str(tmp_path), arrays, {}, sync=sync, disk=Watched())
    back(tmp_path, arrays)
    assert len(begun) == (2 if sync else 0)
    assert all(at + size == after for (at, size), (after, _) in zip(begun, begun[1:], strict=False))


def test_there_is_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(
            _files.CheckpointNotFound, match="there is no checkpoint at .*; expected one. Give the path"
        ):
            _files.read(str(path))
    assert not list(tmp_path.iterdir())


class Odd:
    shape, dtype = (4, 2), np.dtype(np.float32)

    def __getitem__(self, rows: object) -> np.ndarray:
        return np.zeros((4, 3), np.float32)


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"a": np.array([object()])}, TypeError, "array 'a' is object; expected numbers"),
        ({"a": np.array(["x"])}, TypeError, "array 'a' is <U1; expected numbers"),
        ({"a": np.zeros(2, [("x", "i4")])}, TypeError, "expected numbers"),
        ({"a": np.zeros(2, "V2")}, TypeError, "expected numbers"),
        ({"a": np.zeros(2, "M8[s]")}, TypeError, "expected numbers"),
        ({"a": np.zeros(2, np.longdouble)}, TypeError, "expected numbers"),
        ({"a": [1, 2]}, TypeError, "array 'a' is list; expected an array. Convert it: numpy.asarray"),
        ({3: np.zeros(2)}, ValueError, "an array has the name 3; expected printable text"),
        ({"a\n": np.zeros(2)}, ValueError, "expected printable text"),
        ({"a": Odd()}, ValueError, r"gave float32\[4, 3\] for rows 0 to 4; expected float32\[4, 2\]"),
        ({"a": np.zeros((1,) * 33)}, ValueError, "has 33 axes; expected at most 32"),
        ({"a": Blocks(np.zeros(9), 0)}, ValueError, "has blocks of 0 rows"),
        ({"a": Blocks(np.zeros(9), 4, ["a"])}, ValueError, "has 1 marks; expected one for each of its 3 blocks"),
        ({"a": Blocks(np.zeros(1 << 20), 1)}, ValueError, "1048577 blocks; expected at most .* larger blocks"),
    ],
)
def test_what_cannot_be_saved_is_refused_before_anything_is_written(
    arrays: dict, error: type[Exception], message: str, tmp_path: Path
) -> None:
    save(str(tmp_path), 1)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(error, match=message):
        _files.write(str(tmp_path), {"fine": np.zeros(3), **arrays}, {})
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("cuts", [[0], [0, 3], [1, 3, 9], [0, 5, 3, 9], [0, 3, 8]])
def test_cuts_that_do_not_fit(cuts: list[int]) -> None:
    source = Keyed({"a": np.zeros(3, np.uint8), "b": np.zeros(6, np.uint8)})
    source.cuts = np.array(cuts)
    with pytest.raises(ValueError, match="expected cuts that rise from 0 to its length"):
        _files.write(PATH, {"a": source}, {}, disk=Memory())
    source.cuts, source.keys = np.array([0, 3, 9]), ["a", "a"]
    with pytest.raises(ValueError, match="keys that repeat"):
        _files.write(PATH, {"a": source}, {}, disk=Memory())


@pytest.mark.parametrize(
    "meta", [{"a": {1: 2}}, {"a": [object()]}, {"a": float("nan")}, {"a": b"x"}, {"a": np.int64(3)}]
)
def test_meta_is_json(meta: dict) -> None:
    with pytest.raises((TypeError, ValueError)):
        _files.write(PATH, {}, meta, disk=Memory())
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        _files.write(PATH, {}, {"a": deep}, disk=Memory())


def test_one_saver_at_a_time(tmp_path: Path) -> None:
    save(str(tmp_path), 1)
    code = f"""
import fcntl, os, sys
fd = os.open({str(tmp_path / "lock")!r}, os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
os.ftruncate(fd, 0); os.pwrite(fd, str(os.getpid()).encode(), 0)
print("held", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout and other.stdout.readline() == "held\n"
    with pytest.raises(
        BlockingIOError, match=f"in use by process {other.pid}; expected nobody. Wait for that save, or"
    ):
        save(str(tmp_path), 2)
    assert load(str(tmp_path)) == 1
    other.kill()
    other.communicate()
    save(str(tmp_path), 2)
    assert load(str(tmp_path)) == 2


def test_two_threads_do_not_save_to_one_path_at_once(tmp_path: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    def slowly(done: int, total: int) -> None:
        inside.set()
        assert go.wait(20)

    first = threading.Thread(target=save, args=(str(tmp_path), 1), kwargs={"progress": slowly})
    first.start()
    assert inside.wait(20)
    with pytest.raises(BlockingIOError, match="in use by this process"):
        save(str(tmp_path), 2)
    go.set()
    first.join()
    assert load(str(tmp_path)) == 1


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("fbuf._host.locks.fcntl.flock", none)
    with pytest.warns(RuntimeWarning, match="has no locks"):
        save(str(tmp_path), 1)
    assert load(str(tmp_path)) == 1


def test_folders_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "manifest.json").write_text("{}")
    with pytest.raises(FileExistsError, match="holds the files of a live store"):
        save(str(tmp_path / "store"), 1)
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match="use the path of a folder"):
            save(str(path), 1)
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "notes.txt").write_text("mine")
    for k in range(4):
        save(str(tmp_path / "mixed"), k, keep=1)
    assert (tmp_path / "mixed" / "notes.txt").read_text() == "mine" and load(str(tmp_path / "mixed")) == 3
    (tmp_path / "link").symlink_to(tmp_path / "mixed")
    save(str(tmp_path / "link"), 4)
    assert load(str(tmp_path / "mixed")) == load(str(tmp_path / "link")) == 4
    save(str(tmp_path / "new" / "deep" / "er"), 1)
    assert load(str(tmp_path / "new" / "deep" / "er")) == 1


def test_after_the_last_number_nothing_is_saved(tmp_path: Path) -> None:
    """It would have a name that no load looks for."""
    save(str(tmp_path), 0)
    (tmp_path / "manifest-999999999999.json").touch()
    with pytest.raises(FileExistsError, match="has the number 999999999999, which is the last there is"):
        save(str(tmp_path), 1)
    with pytest.warns(RuntimeWarning, match="generation 1 of"):
        assert load(str(tmp_path)) == 0


def test_where_nothing_may_be_written_no_source_is_read() -> None:
    for number in (errno.EACCES, errno.EROFS):
        given = sources(3)
        with pytest.raises(OSError, match="Use a path that this process may write to"):
            _files.write(PATH, given, {}, disk=Faulty(Memory(), 0, number, kinds=("open",)))
        assert given["log"].reads == given["table"].reads == given["priority"].reads == 0


def test_a_later_version_is_never_taken_for_damage_nor_overwritten() -> None:
    disk = Memory()
    save(PATH, 1, disk)
    save(PATH, 2, disk)
    name = "manifest-000000000002.json"
    body = disk.contents()[name].split(b"\n")[1].replace(b'{"version":1,', b'{"version":2,')
    import zlib

    head = b'{"format":"fbuf checkpoint","version":2,"bytes":%d,"crc32":%d}' % (len(body), zlib.crc32(body))
    disk.put(name, head + b"\n" + body + b"\n")
    before = disk.contents()
    with pytest.raises(
        _files.VersionError, match=f"{name} is of version 2; expected 1 or less. Use the release of fbuf that"
    ):
        load(PATH, disk)
    with pytest.raises(_files.VersionError):
        save(PATH, 3, disk)
    assert disk.contents() == before


# -------------------------------------------------------------------------------------------------------- falling back


def test_the_generation_before_is_taken_with_a_warning() -> None:
    disk = Memory()
    save(PATH, 1, disk)
    save(PATH, 2, disk)
    whole = disk.copy()
    disk.names["data-000000000002.safetensors"].data[-3] ^= 4
    for again in range(2):
        with pytest.warns(
            RuntimeWarning, match="generation 1 of .* is loaded, not the newest. generation 2: .*step"
        ) as w:
            assert load(PATH, disk) == 1
        assert len(w) == 1 and again < 2
    with pytest.raises(_files.StoreCorrupted, match="bytes [0-9]+ to [0-9]+, rows 0 to 1 of array 'step'"):
        load(PATH, disk, verify="lazy")
    disk.names["manifest-000000000001.json"].data[100] ^= 1
    with pytest.raises(_files.StoreCorrupted, match="no generation at .* is whole.*generation 2: .*generation 1: "):
        load(PATH, disk)
    del whole.names["manifest-000000000001.json"]
    assert load(PATH, whole) == 2


@given(st.data())
def test_what_changed_is_written_and_nothing_else(data: st.DataObject) -> None:
    """Blocks of arrays and of other sources, small and large, of which any were changed, in any order of files."""
    disk, rows = Memory(), data.draw(st.sampled_from([1, 9, 700, 40_000]))
    array = np.random.default_rng(0).integers(0, 256, (rows, 24), np.uint8)
    block = data.draw(st.sampled_from([1 + rows // 40, 1 + rows // 3, rows]))
    blocks = -(-rows // block)

    class Near(Blocks):
        near = True

    kind = data.draw(st.sampled_from([Near, Blocks]))
    _files.write(PATH, {"a": kind(array, block)}, {}, disk=disk)
    for turn in range(data.draw(st.integers(1, 3))):
        changed = data.draw(st.sets(st.integers(0, blocks - 1), max_size=6))
        array = array.copy()
        for number in changed:
            array[data.draw(st.integers(number * block, min((number + 1) * block, rows) - 1)), 3] ^= 1
        written = _files.write(PATH, {"a": kind(array, block)}, {}, disk=disk, keep=data.draw(st.integers(1, 2)))
        size = sum(24 * len(array[n * block : (n + 1) * block]) for n in changed)
        moves = turn > 0 or 2 * size > array.nbytes  # where less than half of a file is in use, that is written again
        assert size <= written.bytes_written <= (array.nbytes if moves else size) + 300 * blocks + 2000
        with _files.read(PATH, disk=disk) as saved:
            same(saved, {"a": array})


def test_a_manifest_that_was_written_by_somebody_else_is_read() -> None:
    """What this process remembers of its last save is believed only if it is what lies there."""
    mine, other = Memory(), Memory()
    save(PATH, 1, mine)
    save(PATH, 1, other)  # the same path, so this is what is remembered
    assert save(PATH, 2, mine).bytes_written < 4000
    mine.names["manifest-000000000002.json"].data[300] ^= 1
    save(PATH, 3, mine)
    assert load(PATH, mine) == 3


def test_the_manifest_gets_its_name_when_all_else_is_on_the_disk(tmp_path: Path) -> None:
    done: list[str] = []

    class Watched(_files.Disk):
        def fsync(self, fd: int) -> None:
            super().fsync(fd)
            done.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))

        def rename(self, old: str, new: str) -> None:
            done.append("rename")
            super().rename(old, new)

    for k in (1, 2):
        done.clear()
        save(str(tmp_path / "c"), k, Watched())
        at, folder, number = done.index("rename"), "c", f"00000000000{k}"
        before = done[:at] if k == 2 else done[1:at]  # the first save waits for the folder's own name, too
        assert sorted(before) == [folder, f"data-{number}.safetensors", f"manifest-{number}.json.new"]
        assert done[at + 1 :] == [folder]


def test_what_cannot_be_looked_at_is_not_removed() -> None:
    disk = Memory()
    for k in (1, 2, 3):
        save(PATH, k, disk, keep=3)
    counter = Faulty(disk.copy(), kinds=("open",))
    save(PATH, 4, counter, keep=3)
    kept = 0
    for at in range(counter.count):
        trial = disk.copy()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                save(PATH, 4, Faulty(trial, at, errno.EMFILE, kinds=("open",)), keep=3)
            except OSError as error:
                assert "ulimit -n" in str(error)
                continue
        assert (
            "older ones were not removed" in str(told[0].message) and "manifest-000000000001.json" in trial.contents()
        )
        kept += 1
    assert kept > 1


def test_folders_that_cannot_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.EINVAL, errno.EOPNOTSUPP, errno.EIO):
        disk = Memory()
        whole = disk.fsync

        def fsync(fd: int, disk: Memory = disk, whole=whole, number: int = number) -> None:  # type: ignore[no-untyped-def]
            if disk._open[fd] is None:
                raise OSError(number, "a folder")
            whole(fd)

        monkeypatch.setattr(disk, "fsync", fsync)
        if number == errno.EIO:
            with pytest.raises(OSError, match="cannot sync"):
                save(PATH, 1, disk)
            assert not disk.contents()
        else:
            save(PATH, 1, disk)
            assert load(PATH, disk) == 1


def test_restore_reads_each_byte_once_and_falls_back() -> None:
    disk = Memory()
    save(PATH, 1, disk)
    save(PATH, 2, disk)
    counter, tried = Faulty(disk), []

    def build(saved: _files.Saved) -> int:
        tried.append(saved.generation)
        same(saved, state(saved.meta["k"]))
        return saved.meta["k"]

    assert _files.restore(PATH, build, disk=counter) == 2
    once = counter.count
    counter = Faulty(disk)
    _files.read(PATH, disk=counter).close()
    assert once == counter.count and tried == [2]
    assert _files.restore(PATH, lambda saved: saved.meta["k"], disk=disk) == 2
    disk.names["data-000000000002.safetensors"].data[-3] ^= 4
    for use in (build, lambda saved: saved.meta["k"]):
        with pytest.warns(RuntimeWarning, match="is loaded, not the newest"):
            assert _files.restore(PATH, use, disk=disk) == 1
    assert _files.restore(PATH, lambda saved: saved.meta["k"], disk=disk, verify="lazy") == 2
    assert tried == [2, 2, 1]


def test_a_save_after_falling_back_does_not_build_on_what_is_damaged() -> None:
    """Nor does it keep that, and remove the generation that was whole."""
    for read in (_files.read, lambda path, **how: _files.restore(path, lambda saved: saved.meta, **how)):
        disk = Memory()
        for k in (1, 2):
            rows = np.full(40, k, np.uint8)
            _files.write(PATH, {"a": Blocks(rows, 8, [f"{k}-{b}" for b in range(5)])}, {"k": k}, disk=disk)
        disk.names["data-000000000002.safetensors"].data[-3] ^= 1
        with pytest.warns(RuntimeWarning, match="not the newest"):
            read(PATH, disk=disk)
        _files.write(PATH, {"a": Blocks(rows, 8, [f"2-{b}" for b in range(5)])}, {"k": 3}, disk=disk)
        assert np.array_equal(np.asarray(_files.read(PATH, disk=disk).arrays["a"]), rows)
        assert sorted(n for n in disk.contents() if n[0] == "m") == [
            "manifest-000000000001.json",
            "manifest-000000000003.json",
        ]


class Made:
    """64 MiB that are nowhere in memory."""

    shape, dtype = (1 << 26,), np.dtype(np.uint8)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return np.arange(rows.start, rows.stop, dtype=np.int64).astype(np.uint8)


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """A first save, one that compares, one that is read and one that is verified: some megabytes for 64."""
    tracemalloc.start()
    try:
        for _ in range(2):
            _files.write(tmp_path, {"a": Made()}, {}, sync=False)
        with _files.read(tmp_path) as saved:
            for _ in saved.arrays["a"].blocks():
                pass
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("fault", ["missing", "short", "long", "empty", "folder", "link", "pipe"])
def test_files_that_are_not_what_they_were(fault: str, tmp_path: Path) -> None:
    for name in ("data-000000000002.safetensors", "manifest-000000000002.json"):
        folder = tmp_path / name
        save(str(folder), 1)
        save(str(folder), 2)
        file = folder / name
        data = file.read_bytes()
        file.unlink()
        if fault in ("short", "long", "empty"):
            file.write_bytes({"short": data[:-1], "long": data + b" ", "empty": b""}[fault])
        elif fault == "folder":
            file.mkdir()
        elif fault == "link":
            (tmp_path / "elsewhere").write_bytes(data)
            file.symlink_to(tmp_path / "elsewhere")
        elif fault == "pipe":
            os.mkfifo(file)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert load(str(folder)) == 1
        assert len(told) == (not (fault == "missing" and name.startswith("manifest")))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            save(str(folder), 3)  # builds on what is whole
        assert ["cannot remove" in str(w.message) for w in told] == [True] * (fault == "folder")
        assert load(str(folder)) == 3


def test_files_of_two_saves_mixed(tmp_path: Path) -> None:
    """Two runs with the same names, shapes and numbers: any file of the one among those of the other is found."""
    for run in "ab":
        for k in (1, 2):
            arrays = {"x": np.full(100, k, np.uint8), "y": np.arange(100)}
            _files.write(str(tmp_path / run), arrays, {"k": k}, keep=1)
    names = [p.name for p in (tmp_path / "a").iterdir() if p.name != "lock"]
    assert len(names) == 3
    for name in names:
        (tmp_path / "a" / name).rename(tmp_path / "held")
        (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
        with pytest.raises(_files.StoreCorrupted, match="a file of another save|no generation"):
            _files.read(str(tmp_path / "a"))
        (tmp_path / "held").rename(tmp_path / "a" / name)
    (tmp_path / "a" / "manifest-000000000009.json").write_bytes(
        (tmp_path / "a" / "manifest-000000000002.json").read_bytes()
    )
    with pytest.warns(RuntimeWarning, match="it is of generation 2 and has the name of 9"):
        _files.read(str(tmp_path / "a")).close()


# ---------------------------------------------------------------------------------------------------------- at the side


def test_progress() -> None:
    disk, seen = Memory(), []
    save(PATH, 3, disk, progress=lambda done, total: seen.append((done, total)))
    total = sum(a.nbytes for a in state(3).values())
    assert seen[-1] == (total, total) and seen == sorted(seen) and len(seen) > 10
    seen.clear()
    _files.read(PATH, disk=disk, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (total, total) and seen == sorted(seen)
    text = io.StringIO()
    with redirect_stderr(text):
        save(PATH, 4, disk, progress=True)
        _files.read(PATH, disk=disk, progress=True)
    assert "fbuf.save" in text.getvalue() and "fbuf.load" in text.getvalue()


def test_progress_without_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    text = io.StringIO()
    with redirect_stderr(text):
        save(PATH, 3, Memory(), progress=True)
    assert text.getvalue().endswith("fbuf.save: 100 %\n")


def test_an_error_in_a_callable_ends_the_save_and_leaves_nothing() -> None:
    disk = Memory()
    save(PATH, 1, disk)
    before = disk.contents()

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(PATH, 2, disk, progress=stop)
    assert disk.contents() == before


def test_readers_beside_a_saver_that_prunes(tmp_path: Path) -> None:
    save(str(tmp_path), 0, keep=1, sync=False)
    wrong: list[BaseException] = []
    stop = threading.Event()

    def reader() -> None:
        last = 0
        try:
            while not stop.is_set():
                k = load(str(tmp_path))
                assert k >= last
                last = k
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=reader) for _ in range(2)]
    for thread in threads:
        thread.start()
    for k in range(1, 60):
        save(str(tmp_path), k, keep=1, sync=False)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


def test_a_reader_that_holds_a_generation_keeps_it(tmp_path: Path) -> None:
    save(str(tmp_path), 1, keep=1)
    saved = _files.read(str(tmp_path), verify="lazy")
    for k in range(2, 6):
        save(str(tmp_path), k, keep=1)
    same(saved, state(1))
    saved.close()
    saved.close()
    with pytest.raises(ValueError, match="closed"):
        saved.arrays["log"][:]


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


_KEPT_TO_THE_END = """
import sys
from fbuf import _files
one, two = _files.read(sys.argv[1]), _files.read(sys.argv[1])
two.close()
sys.modules["kept"] = [one, two]  # until the last
"""


def test_what_is_open_when_a_process_ends_says_nothing(tmp_path: Path) -> None:
    save(str(tmp_path), 0)
    done = subprocess.run([sys.executable, "-c", _KEPT_TO_THE_END, str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_inspect_and_verify(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    assert run("inspect", path)[0] == run("verify", path)[0] == 1
    assert "there is no checkpoint" in run("verify", path)[2]
    save(path, 1)
    _files.write(path, sources(2), {"k": 2, "buffer": "Buffer(capacity=9)", "long": ["x" * 1000], "\x1b[2J": "\x1b[2J"})
    (tmp_path / "c" / "notes").touch()
    status, out, _ = run("inspect", path)
    assert status == 0
    for text in ("generation 2: 5 arrays", "generation 1:", "buffer: Buffer(capacity=9)", "... (1004 characters)"):
        assert text in out
    assert "\x1b" not in out
    for text in ("table", "float32", "[40, 5]", "data-000000000001.safetensors", "%", "not looked at: notes"):
        assert text in out
    assert run("verify", path) == (0, "whole\n", "")
    file = tmp_path / "c" / "data-000000000002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    data[-60] ^= 1
    file.write_bytes(data)
    status, out, _ = run("verify", path)
    assert status == 1 and out.count("damaged: generation 2: ") == 2 and "array 'step'" in out and "2 damaged" in out
    (tmp_path / "c" / "manifest-000000000002.json").write_text("{}")
    assert "manifest-000000000002.json is damaged" in run("inspect", path)[1]
    assert run("verify", path)[0] == 1
    (tmp_path / "c" / "manifest-000000000001.json").write_text("{}")
    assert run("inspect", path)[0] == 1


def test_inspect_says_the_date_of_a_save(tmp_path: Path) -> None:
    for number, (moment, shown) in enumerate(
        ((1795355945.48, "(2026-11-22 13:59:05 UTC)"), (0, "(1970-01-01 00:00:00 UTC)"))
        + tuple((other, None) for other in (True, "now", None, 1e300, -1e300, [1], "1795355945"))
    ):
        path = str(tmp_path / str(number))
        _files.write(path, sources(1), {"time": moment})
        line = next(line for line in run("inspect", path)[1].splitlines() if line.startswith("  time:"))
        assert line.endswith(shown) if shown else "UTC" not in line


def test_layouts_of_every_form() -> None:
    layout = Layout((10, 2), np.dtype(np.int16), None, (0, 4, 4, 10), ("a", "b", "c"))
    assert [layout.first(r) for r in (0, 3, 4, 9)] == [0, 0, 2, 2]
    assert layout.sizes.tolist() == [16, 0, 24]

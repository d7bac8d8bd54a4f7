"""Files of a data set: rows read are those written, and a segment is there once it is committed."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._formats import dataset
from fbuf._formats import dataset as _dataset
from fbuf._formats.checkpoint import Disk, data_file
from fbuf._host.store.store import StoreClosed
from fbuf.storages import BitPack, Raw, Zstd
from tests.support import segments
from tests.support.memory_disk import Killed
from tests.support.refusals import raises
from tests.support.segments import check, same
from tests.support.threads import Thread

SegmentRows = _dataset.SegmentRows
DTYPES = ("bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64", "complex64", "bfloat16")


@st.composite
def data_sets(draw):
    leaves, codecs, used = {"truncated": ((), "bool")}, {}, []
    for i in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(["", "a/"])) + f"x{i}"
        leaves[name] = draw(st.sampled_from([(), (1,), (3, 2), (0,), (7,)])), draw(st.sampled_from(DTYPES))
        codec = draw(st.sampled_from([None, Zstd(chunk=3), Zstd(chunk=8), BitPack(chunk=5), Raw()]))
        codecs |= {} if codec is None else {name: codec}
    sizes = draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    for number, size in enumerate(sizes):
        begin = draw(st.integers(0, size - 1))
        used.append(SegmentRows(number, begin, draw(st.integers(begin + 1, size)), draw(st.booleans())))
    values = draw(st.sampled_from([2, 3, 1000]))
    return leaves, codecs, sizes, draw(st.permutations(used)), values, draw(st.integers(1, 9))


@given(
    made=data_sets(),
    seed=st.integers(0, 9),
    memory=st.sampled_from([0, 40, 1 << 28]),
    more=st.sampled_from([{}, {"cache": 200}, {"verify": "full"}]),
)
def test_any_rows_read_as_written(tmp_path_factory, made, seed, memory, more):
    leaves, codecs, sizes, used, values, step = made
    path, rng = tmp_path_factory.mktemp("made"), np.random.default_rng(seed)
    schema = _dataset.Schema(leaves, codec=codecs)
    rows = {}
    for number, size in enumerate(sizes):
        most = values if number else 2
        numbers = {leaf: rng.integers(0, most, (size, *leaf.shape)) - 1 for leaf in schema.leaves}
        rows[number] = {leaf.name: array.astype(leaf.dtype) for leaf, array in numbers.items()}
        segments.write(path, number, schema, rows[number], step)
    _dataset.finish(path, used, sync=False)
    check(path, segments.used_of(rows, tuple(used)), memory=memory, **more)


def test_few_values_are_stored_as_codes_bit_for_bit(tmp_path):
    odd = np.array([0x7FC00001, 0x7FC00000, 0x80000000, 0, 0x3F800000], np.uint32).view(np.float32)
    schema = _dataset.Schema({"few": ((), "float32"), "many": ((), "int32"), "mixed": ((), "int64")})
    rows, number = {}, np.arange(300)
    for k in range(3):
        few = np.resize(odd, 300) if k else np.full(300, 7, np.float32)
        rows[k] = {"few": few, "many": (number + 200 * k).astype(np.int32), "mixed": number * (k == 1)}
        segments.write(tmp_path, k, schema, rows[k], 100)
    used = tuple(SegmentRows(k) for k in rows)
    _dataset.finish(tmp_path, used)
    for memory in (0, 1 << 20):
        check(tmp_path, segments.used_of(rows, used), memory=memory)
    with _dataset.DataSet.open(tmp_path, memory=0) as dataset:
        # a byte a row of `few`, and of `mixed` in the two segments where it is one value
        assert 900 + 600 <= dataset.store.nbytes < 900 + 600 + 64


@pytest.mark.parametrize("cache", [0, 1 << 20])
def test_many_threads_read_at_once(cache, tmp_path):
    want = segments.make(tmp_path)
    with _dataset.DataSet.open(tmp_path, memory=0, cache=cache) as dataset:

        def read(seed):
            for at in np.random.default_rng(seed).integers(0, dataset.rows, (30, 16)):
                same(dataset.read(dict.fromkeys(want, at)), {name: array[at] for name, array in want.items()})

        for thread in [Thread(read, seed) for seed in range(4)]:
            thread.ends()


def test_invalid_reads_and_writes_are_refused(tmp_path):
    segments.make(tmp_path)
    dataset = _dataset.DataSet.open(tmp_path)
    pytest.raises(IndexError, lambda: dataset.read({"action": np.array([34])})).match("there are 34")
    pytest.raises(IndexError, dataset.read_rows, -1, 3).match("there are 34")
    pytest.raises(KeyError, lambda: dataset.read({"no_such": np.array([0])})).match("no_such")
    pytest.raises(TypeError, lambda: dataset.read({"action": np.array([0.0])})).match("float64; expected integers")
    assert dataset.read({"action": np.zeros((0, 3), int)})["action"].shape == (0, 3)
    assert dataset.read({"action": 3})["action"] == dataset.read_rows(3, 4)["action"][0]
    pytest.raises(TypeError, dataset.store.try_write, [], None).match("read-only")
    assert dataset.store.to_arrays() == {}
    dataset.close()
    dataset.close()
    pytest.raises(StoreClosed, dataset.read_rows, 0, 1)


def test_a_segment_is_there_once_committed(tmp_path):
    rows = segments.rows_of(np.random.default_rng(0), 9)
    with _dataset.SegmentWriter(tmp_path, 7, segments.SCHEMA) as segment:
        segment.append(rows)
        assert segment.rows == 9 and segment.nbytes > 0
    assert _dataset.committed(tmp_path) == {} and not _dataset.is_dataset(tmp_path)
    segments.write(tmp_path, 7, segments.SCHEMA, rows, meta={"url": "x"})
    info = _dataset.committed(tmp_path)[7]
    assert (info.rows, info.meta, info.schema) == (9, {"url": "x"}, segments.SCHEMA)
    assert _dataset.is_dataset(tmp_path)
    raises(FileExistsError, r"has a segment 7", _dataset.SegmentWriter, tmp_path, 7, segments.SCHEMA)
    _dataset.discard(tmp_path, 7)
    _dataset.discard(tmp_path, 7)
    assert _dataset.committed(tmp_path) == {} and not (tmp_path / "pieces" / "7").exists()
    segments.write(tmp_path, 7, segments.SCHEMA, rows)


def test_of_two_writers_of_a_segment_one_commits(tmp_path):
    rows = segments.rows_of(np.random.default_rng(0), 9)
    writers = [_dataset.SegmentWriter(tmp_path, 0, segments.SCHEMA) for _ in range(2)]
    with writers[0] as one, writers[1] as two:
        one.append(rows)
        two.append(rows)
        one.commit()
        pytest.raises(FileExistsError, two.commit).match("has a segment 0")


def test_rows_that_do_not_fit_a_segment_are_refused(tmp_path):
    rows = segments.rows_of(np.random.default_rng(0), 4)
    with _dataset.SegmentWriter(tmp_path, 0, segments.SCHEMA) as segment:
        for change, match in (
            ({"action": rows["action"].astype(np.int64)}, r"int64\[4\]; expected int32\[4\]"),
            ({"action": rows["action"][:2]}, r"'action' is int32\[2\]"),
            ({"obs": rows["obs"][:, :3]}, r"'obs' is uint8\[4, 3, 6\]; expected"),
        ):
            pytest.raises(ValueError, segment.append, {**rows, **change}).match(match)
        assert segment.rows == 0
        pytest.raises(ValueError, segment.commit).match("has no rows")
    pytest.raises(ValueError, segment.append, rows).match("is closed")
    raises(ValueError, "expected an int from 0", _dataset.SegmentWriter, tmp_path, -1, segments.SCHEMA)
    leaves = {name: ((3,), "uint8") for name in "abc"}
    odd = _dataset.Schema(leaves, codec={"a": Zstd(chunk=64), "b": Zstd(chunk=63), "c": BitPack(chunk=61)})
    words = r"'c': 'BitPack\(chunk=61\)'.* every 245952 rows; expected at most 4096"
    raises(ValueError, words, _dataset.SegmentWriter, tmp_path, 1, odd)  # a segment of one row would take a minute


def test_invalid_schemas_are_refused():
    cases = [
        ({}, {}, "1 leaf or more"),
        ({"x": ((), "object")}, {}, "expected numbers or booleans"),
        ({"x": ((-1,), "int32")}, {}, "has shape"),
        ({"x#": ((), "int32")}, {}, "without '#'"),
        ({"x": ((), "int32")}, {"codec": {"y": Zstd()}}, "codec names 'y'"),
        ({"x": ((), "int32")}, {"codec": {"x": "zlib"}}, r"expected Zstd\(\.\.\.\), BitPack\(\) or Raw\(\)"),
        ({"x": ((), "int32")}, {"structure": {"dict": [["x", 1]]}}, "each of 1 leaves once"),
        ({"x": ((), "int32")}, {"structure": {"own": "os:system"}}, "dicts, lists and tuples"),
    ]
    for leaves, settings, match in cases:
        pytest.raises((ValueError, TypeError), _dataset.Schema, leaves, **settings).match(match)


def test_a_schema_is_stored_as_json():
    structure = {"tuple": [1, {"dict": [["a", 0], ["b", None]]}]}
    leaves = {"1/a": ((2,), "bfloat16"), "0": ((40, 40), "uint8")}
    schema = _dataset.Schema(leaves, structure, {"1/a": BitPack(chunk=2)})
    assert _dataset.Schema.from_json(json.loads(json.dumps(schema.to_json()))) == schema
    assert schema["0"].codec == Zstd() and schema.row_bytes == 1604
    for change in ({"leaves": 3}, {"leaves": [["x", [1]]]}, {"more": 1}, {"leaves": [["x", [1], "object", ["raw"]]]}):
        raises((ValueError, TypeError, KeyError), None, _dataset.Schema.from_json, {**schema.to_json(), **change})


def test_a_data_set_is_finished_with_whole_segments(tmp_path):
    pytest.raises(FileNotFoundError, _dataset.DataSet.open, tmp_path).match("there is no data set at")
    rng = np.random.default_rng(0)
    segments.write(tmp_path, 0, segments.SCHEMA, segments.rows_of(rng, 3))
    pytest.raises(FileNotFoundError, _dataset.DataSet.open, tmp_path).match("not finished: 1 segments are there")
    raises(ValueError, "segment 1 is not at", lambda: _dataset.finish(tmp_path, [SegmentRows(0), SegmentRows(1)]))
    pytest.raises(ValueError, lambda: _dataset.finish(tmp_path, [SegmentRows(0), SegmentRows(0)])).match("each once")
    assert not (tmp_path / "dataset.json").exists()


def test_segments_are_added_later(tmp_path):
    rng = np.random.default_rng(0)
    rows = {number: segments.rows_of(rng, 6) for number in range(2)}
    segments.write(tmp_path, 0, segments.SCHEMA, rows[0])
    _dataset.finish(tmp_path, [SegmentRows(0, cut=True)])
    before = _dataset.DataSet.open(tmp_path)
    segments.write(tmp_path, 1, segments.SCHEMA, rows[1])
    _dataset.finish(tmp_path, [SegmentRows(0), SegmentRows(1)])
    check(tmp_path, segments.used_of(rows, (SegmentRows(0), SegmentRows(1))))
    same(
        before.read_rows(0, 6), segments.used_of(rows, (SegmentRows(0, cut=True),))
    )  # an open data set does not change
    with _dataset.DataSet.open(tmp_path) as after:
        assert after.identity != before.identity


def test_a_data_set_with_a_segment_written_again_is_unfinished(tmp_path):
    segments.make(tmp_path)
    _dataset.discard(tmp_path, 1)
    pytest.raises(FileNotFoundError, _dataset.DataSet.open, tmp_path).match("segment 1 of .* is missing")
    segments.write(tmp_path, 1, segments.SCHEMA, segments.rows_of(np.random.default_rng(5), segments.SIZES[1]))
    pytest.raises(FileNotFoundError, _dataset.DataSet.open, tmp_path).match("was rewritten")


def killed_at(path, call):
    """Make a data set; from the given call on, the disk does nothing but close files, as a killed process does."""
    calls = itertools.count(1)

    def dying(name):
        real = getattr(Disk(), name)

        def run(_, *args):
            if next(calls) >= call:
                raise Killed
            return real(*args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_file, "_WRITE_BLOCKS", 1)
        for name in ("open", "pwritev", "fsync", "rename", "unlink"):
            patch.setattr(Disk, name, dying(name))
        try:
            segments.make(path)
        except Killed:
            return True
    return False


@pytest.mark.more
def test_a_killed_process_leaves_whole_segments(tmp_path):
    rng = np.random.default_rng(0)
    rows = {number: segments.rows_of(rng, size) for number, size in segments.SIZES.items()}
    for call in range(1, 1000):
        path = tmp_path / str(call)
        path.mkdir()
        if not killed_at(path, call):
            break
        there = dataset.committed(path)
        pytest.raises(FileNotFoundError, dataset.DataSet.open, path)
        for number in rows.keys() - there.keys():
            segments.write(path, number, segments.SCHEMA, rows[number])
        dataset.finish(path, segments.USED)
        segments.check(path, segments.used_of(rows, segments.USED), verify="full")
    assert call > 60

"""Damaged and hostile files of a data set: every row that is read is right, or there is an error."""

import errno
import json
import os

import numpy as np
import pytest

import fbuf
from fbuf._formats import checkpoint
from fbuf._formats import dataset as _dataset
from fbuf.storages import Zstd
from tests.support import segments
from tests.support.hostile_manifests import dumps, signed
from tests.support.refusals import raises
from tests.support.tables import by_tier

SegmentRows = _dataset.SegmentRows


def files_of(path):
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != "lock" and file.stat().st_size)


@pytest.mark.more
def test_a_damaged_byte_is_an_error_or_changes_no_row(tmp_path):
    want = segments.make(tmp_path)
    number, opened = len(want["action"]), 0
    for file in files_of(tmp_path):
        text = file.read_bytes()
        for at in range(0, len(text), max(len(text) // 15, 1)):
            file.write_bytes(text[:at] + bytes([text[at] ^ 0x41]) + text[at + 1 :])
            with pytest.raises((fbuf.StoreCorrupted, FileNotFoundError, fbuf.VersionError)):
                _dataset.DataSet.open(tmp_path, verify="full").close()
                raise AssertionError(f"{file.name} byte {at} of {len(text)}")
            for memory in (0, 1 << 20):
                try:
                    with _dataset.DataSet.open(tmp_path, memory=memory) as dataset:
                        opened += 1
                        segments.same(dataset.read_rows(0, number), want)
                except (fbuf.StoreCorrupted, FileNotFoundError, fbuf.VersionError):
                    pass
        file.write_bytes(text)
    assert opened  # damaged rows are found when they are read
    segments.check(tmp_path, want)


def test_a_file_truncated_while_open_is_an_error(tmp_path):
    schema = _dataset.Schema({"obs": ((6,), "uint8"), "vector": ((3,), "float32")}, codec={"obs": Zstd()})
    segments.write(tmp_path, 0, schema, {"obs": np.ones((9, 6), np.uint8), "vector": np.ones((9, 3), np.float32)})
    _dataset.finish(tmp_path, [SegmentRows(0)])
    with _dataset.DataSet.open(tmp_path, memory=0) as dataset:
        for file in files_of(tmp_path / "pieces"):
            os.truncate(file, 64)
        for leaf in ("obs", "vector"):
            pytest.raises(fbuf.StoreCorrupted, dataset.read_rows, 0, 5, [leaf]).match("cut short")
        assert isinstance(dataset.store.last_error, fbuf.StoreCorrupted)


def test_a_read_that_fails_is_repeated_and_one_that_keeps_failing_is_no_damage(tmp_path, monkeypatch):
    schema = _dataset.Schema({"obs": ((6,), "uint8"), "vector": ((3,), "float32")}, codec={"obs": Zstd()})
    rows = {"obs": np.ones((9, 6), np.uint8), "vector": np.ones((9, 3), np.float32)}
    segments.write(tmp_path, 0, schema, rows)
    _dataset.finish(tmp_path, [SegmentRows(0)])
    left = [0]

    def failing(real):
        def call(*args):
            if left[0]:
                left[0] -= 1
                raise OSError(errno.EIO, "a hiccup")
            return real(*args)

        return call

    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, failing(getattr(os, name)))
    for leaf, want in rows.items():
        for times in (1, 2, 1 << 20):
            with _dataset.DataSet.open(tmp_path, memory=0) as dataset:
                left[0] = times
                if times < 3:
                    assert (dataset.read_rows(0, 9, [leaf])[leaf] == want).all()
                else:
                    raises(OSError, "cannot read .*Input/output error. Try again", dataset.read_rows, 0, 9, [leaf])
            left[0] = 0
    assert _dataset.committed(tmp_path)
    left[0] = 1 << 20
    raises(OSError, "cannot read", _dataset.committed, tmp_path)  # which would be written again
    left[0] = 0


def test_another_version_is_refused_by_name(tmp_path):
    segments.make(tmp_path)
    file = tmp_path / "dataset.json"
    body = file.read_bytes().splitlines()[1].replace(b'"version":1', b'"version":9', 1)
    file.write_bytes(signed(body, 9, b"data set"))
    pytest.raises(fbuf.VersionError, _dataset.DataSet.open, tmp_path).match("version 9")
    os.truncate(file, 10)
    pytest.raises(fbuf.StoreCorrupted, _dataset.DataSet.open, tmp_path).match("first line")
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    pytest.raises(fbuf.StoreCorrupted, _dataset.DataSet.open, tmp_path).match("is a link")


def leaf(name, **changes):
    def altered(value):
        (found,) = (one for one in value["schema"]["leaves"] if one[0] == name)
        for key, new in changes.items():
            found[("name", "shape", "dtype", "codec").index(key)] = new
        return value

    return altered


def used(*ends, **fields):
    def altered(value):
        number, save, *rows = value["pieces"][1]
        return {**value, "pieces": [[fields.get("number", number), fields.get("save", save), *(ends or rows)]]}

    return altered


HOSTILE = {
    "no object": lambda v: [],
    "another key": lambda v: {**v, "more": 1},
    "version": lambda v: {**v, "version": 2},
    "no segments": lambda v: {**v, "pieces": []},
    "segments twice": lambda v: {**v, "pieces": v["pieces"] * 2},
    "path in a save": used(0, 3, False, number=0, save="../../etc"),
    "path in a number": used(number="../x"),
    "2**60 rows": used(0, 1 << 60, False),
    "a row too many": used(0, 4, False),
    "ends before it begins": used(2, 1, False),
    "0.5 GB a row": leaf("obs", shape=[1 << 29]),
    "other codec": leaf("obs", codec=["raw"]),
    "other chunk": leaf("obs", codec=["zstd", 1, 5, 16, True]),
    "other dtype": leaf("action", dtype="bool"),
    "other shape": leaf("reward", shape=[2]),
    "unknown codec": leaf("obs", codec=["pickle"]),
}


@pytest.mark.parametrize("case", by_tier(*list(HOSTILE)[::2], more=HOSTILE))
def test_a_hostile_data_set_is_refused(tmp_path, case):
    segments.make(tmp_path)
    file = tmp_path / "dataset.json"
    value = HOSTILE[case](json.loads(file.read_bytes().splitlines()[1]))
    file.write_bytes(signed(dumps(value), kind=b"data set"))
    pytest.raises((fbuf.StoreCorrupted, FileNotFoundError), lambda: _dataset.DataSet.open(tmp_path).read_rows(0, 1))


def index(name, change):
    name = f"rows/obs/{name}"
    return lambda arrays: arrays.update({name: change(np.array(arrays[name]))})


def put(name, value):
    return lambda arrays: arrays.update({f"rows/{name}": value})


@pytest.mark.parametrize(
    "change",
    [
        index("address", lambda a: a + np.uint64(1 << 30)),
        index("address", lambda a: a[:-1]),
        index("address", lambda a: a.astype(np.int64)),
        index("length", lambda a: a * 0),
        index("length", lambda a: a * 0 + np.uint32(0xFFFFFFFF)),
        index("length", lambda a: a + np.uint32(1)),
        index("checksum", lambda a: a + np.uint32(1)),
        index("dictionary", lambda a: a + np.uint16(7)),
        index("state", lambda a: a * 0 + 5),
        index("span", lambda a: a * 2),
        index("span", lambda a: a * 0 - 1),
        index("payload", lambda a: a[:-1]),
        put("obs/dictionary_length", np.array([-1])),
        put("obs/dictionary_slot", np.array([1, 1], np.uint16)),
        put("few/codes", np.full(9, 200, np.uint8)),
        put("few/codes", np.zeros(8, np.uint8)),
        put("few/palette", np.zeros(0, np.uint32)),
        put("few/palette", np.zeros(300, np.uint32)),
        put("few/palette", np.zeros(3, np.uint64)),
        put("flag/bits", np.zeros(1, np.uint8)),
        put("flag/bits", np.zeros(1 << 12, np.uint8)),
        put("vector/values", np.zeros((9, 4), np.float32)),
        put("vector/values", np.zeros((9, 3), np.int32)),
        lambda arrays: arrays.pop("rows/vector/values"),
        lambda arrays: arrays.pop("rows/obs/address"),
    ],
)
def test_a_hostile_segment_is_refused(tmp_path, monkeypatch, change):
    leaves = {"obs": ((6, 6), "uint8"), "few": ((), "float32"), "flag": ((), "bool"), "vector": ((3,), "float32")}
    schema = _dataset.Schema(leaves, codec={"obs": Zstd(chunk=4)})
    rows = {one.name: np.ones((9, *one.shape), one.dtype) for one in schema.leaves}
    write = checkpoint.write

    def altered(path, arrays, *args, **settings):
        change(arrays)
        return write(path, arrays, *args, **settings)

    monkeypatch.setattr(checkpoint, "write", altered)
    segments.write(tmp_path, 0, schema, rows)
    _dataset.finish(tmp_path, [SegmentRows(0)])
    pytest.raises(fbuf.StoreCorrupted, lambda: _dataset.DataSet.open(tmp_path).read_rows(0, 9))

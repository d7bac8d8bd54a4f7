"""Gzipped .npy files as streams: what was written is read; whatever else is named and refused, in bounded memory."""

import gzip
import io
import math
import pickle
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format as npy

from fbuf.datasets._remote import FileCorrupted, _gzip, read_npy
from tests.support.tables import by_tier

FRAMES = np.random.default_rng(0).integers(0, 3, (20, 6, 6), np.uint8)


def npy_bytes(array, version=None):
    file = io.BytesIO()
    npy.write_array(file, array, version, allow_pickle=array.dtype == object)
    return file.getvalue()


def with_header(text, body=b"", version=1):
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode() + body


def header_of(descr="'|u1'", order="False", shape="(3,)"):
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


PACKED = gzip.compress(npy_bytes(FRAMES)[:300]) + gzip.compress(npy_bytes(FRAMES)[300:])


@pytest.fixture(scope="module", params=by_tier("gzip", more=["isal"]))
def path(request, tmp_path_factory):
    """A file, which the standard library or isal reads."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "gzip":
            patch.setitem(sys.modules, "isal", None)
        yield tmp_path_factory.mktemp("npy") / "some.gz"


def read(path, data, dtypes=("uint8",), shape=(20, 6, 6), rows=7):
    path.write_bytes(data)
    return list(read_npy(path, dtypes, shape, rows))


def refused(path, data, **expected):
    with pytest.raises(FileCorrupted, match=r"^some\.gz: ") as info:
        read(path, data, **expected)
    return str(info.value)


@given(
    st.sampled_from(["bool", "int8", "uint8", "int32", "int64", "float32"]),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from([(1, 0), (2, 0)]),
    st.integers(1, 7),
    st.integers(0, 200),
)
def test_arrays_read_as_written(path, dtype, shape, version, rows, cut):
    count = math.prod(shape)
    array = np.arange(count).astype(dtype).reshape(shape)
    plain = npy_bytes(array, version)
    reports = []
    path.write_bytes(gzip.compress(plain[:cut]) + gzip.compress(plain[cut:]))
    blocks = list(read_npy(path, ("uint16", dtype), tuple(shape), rows, reports.append))
    assert all(len(block) == rows for block in blocks[:-1]) or not shape
    np.testing.assert_array_equal(np.concatenate(blocks) if shape else blocks[0], array)
    assert all(block.dtype == dtype for block in blocks) and sum(reports) == path.stat().st_size
    if shape:
        (whole,) = read_npy(path, (dtype,), (None, *shape[1:]), max(shape[0], 1))
        np.testing.assert_array_equal(whole, array)


HEADERS = {
    "objects": (header_of("'|O'"), "dtype object; expected uint8"),
    "structure": (header_of("[('a', '<i4')]"), "dtype .*expected uint8"),
    "another order of bytes": (header_of("'>i4'"), "dtype >i4; expected uint8"),
    "code": (header_of("__import__('os').system('true')"), "."),
    "Fortran": (header_of(order="True", shape="(20, 6, 6)"), "in Fortran order"),
    "other shape": (header_of(shape="(20, 36)"), r"shape \[20, 36\]; expected \[20, 6, 6\]"),
    "more rows": (header_of(shape="(100000000, 6, 6)"), r"expected \[20, 6, 6\]"),
    "negative": (header_of(shape="(-3, 6, 6)"), "expected"),
    "key missing": ("{'descr': '|u1', 'shape': (3,), }\n", "."),
    "deep": ("(" * 4000, "."),
    "open": ("{'descr': '''", "."),
    "nothing": ("", "."),
    "long": (header_of().ljust(60_000), "."),
}


def test_invalid_headers_are_refused(path):
    for text, said in HEADERS.values():
        pytest.raises(FileCorrupted, read, path, gzip.compress(with_header(text, b"abc"))).match(said)


def test_other_files_are_refused(path):
    assert "NUMPY" in refused(path, gzip.compress(pickle.dumps([1, 2, 3])))
    assert "version (3, 0)" in refused(path, gzip.compress(with_header(header_of(), b"abc", 3)))
    for data in (b"", b"\x93NUMPY", npy_bytes(FRAMES), gzip.compress(b"")):
        refused(path, data)
    shape = (None, 6, 6)
    assert "expected ['at most 19', 6, 6]" in refused(path, PACKED, shape=shape, rows=19)
    assert len(read(path, PACKED, shape=shape, rows=20)) == 1


@given(st.integers(0, len(PACKED) - 1), st.integers(0, 255))
def test_a_truncated_or_damaged_file_is_refused(path, at, by):
    refused(path, PACKED[:at])
    damaged = bytearray(PACKED)
    damaged[at] ^= by
    try:
        got = read(path, bytes(damaged))
    except FileCorrupted:
        return
    np.testing.assert_array_equal(np.concatenate(got), FRAMES)


@pytest.mark.more
def test_bytes_after_the_array_are_refused(path):
    refused(path, PACKED + b"garbage")
    assert "has bytes after its array" in refused(path, PACKED + gzip.compress(b"x"))
    bomb = gzip.compress(bytes(64 << 20), 9)
    tracemalloc.start()
    try:
        assert "has bytes after its array" in refused(path, PACKED + bomb)
        lie = gzip.compress(with_header(header_of(shape="(100000000, 6, 6)"), bytes(100)))
        assert "ends after" in refused(path, lie, shape=(100_000_000, 6, 6))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_an_error_of_the_disk_is_not_damage(path, tmp_path):
    for missing in (tmp_path / "none.gz", tmp_path):
        pytest.raises(OSError, next, read_npy(missing, ("uint8",), (3,), 3)).match(str(missing))


@pytest.mark.more
def test_isal_is_used_where_it_is_installed():
    from isal import igzip

    assert _gzip() is igzip

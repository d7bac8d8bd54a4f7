"""gzip and .npy as streams: what is right comes out as it went in, whatever else is named and refused, in bounded memory."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.lib import format as npy

from fbuf.datasets._source import FileCorrupted, NpyStream, rows_of
from fbuf.datasets._source._header import DTYPES, MOST_HEADER, parse
from tests._fault_server import FaultServer

ROOT = Path(__file__).resolve().parent.parent


class Dribble:
    """A file whose reads give at most some bytes."""

    def __init__(self, data: bytes, most: int = 1 << 20) -> None:
        self.file, self.most, self.closed = io.BytesIO(data), most, 0

    def read(self, size: int) -> bytes:
        return self.file.read(min(size, self.most))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True, scope="module", params=["isal", "zlib"])
def inflating(request: pytest.FixtureRequest) -> Iterator[None]:
    """With what is installed, and with the standard library alone."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "zlib":
            patch.setitem(sys.modules, "isal", None)
        else:
            pytest.importorskip("isal")
        yield


def npy_bytes(array: np.ndarray, version: tuple[int, int] | None = None) -> bytes:
    file = io.BytesIO()
    npy.write_array(file, array, version, allow_pickle=False)
    return file.getvalue()


def with_header(text: str | bytes, body: bytes = b"", version: int = 1) -> bytes:
    text = text.encode() if isinstance(text, str) else text
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + body


def header_of(descr: str = "'|u1'", order: str = "False", shape: str = "(3,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


def read(data: bytes, most: int = 1 << 20, block: int = 3, **expected: Any) -> np.ndarray:
    with NpyStream(Dribble(data, most), "x.gz", **expected) as stream:
        blocks = list(stream.blocks(block))
        assert stream.done == stream.rows and not len(stream.read(5))
        return np.concatenate([np.empty((0, *stream.item), stream.dtype), *blocks]).reshape(stream.shape)


def refused(data: bytes, **expected: Any) -> str:
    file = Dribble(data)
    with pytest.raises(FileCorrupted) as info:
        with NpyStream(file, "some/name.gz", **expected) as stream:
            for _ in stream.blocks(2):
                pass
    assert info.value.file == "some/name.gz" and str(info.value).startswith("some/name.gz: byte ")
    assert info.value.at is not None and 0 <= info.value.at <= len(data)
    assert file.closed
    return str(info.value)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype = np.dtype(draw(st.sampled_from(sorted(DTYPES)))).newbyteorder(draw(st.sampled_from("<>")))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    data = draw(st.randoms(use_true_random=False)).randbytes(math.prod(shape) * dtype.itemsize)
    array = np.frombuffer(data, np.uint8 if dtype.kind == "b" else dtype)
    return (array % 2 == 0 if dtype.kind == "b" else array).reshape(shape)


@given(
    arrays(), st.sampled_from([(1, 0), (2, 0), (3, 0)]), st.integers(1, 300), st.lists(st.integers(1, 400)), st.data()
)
def test_what_was_written_is_read(
    array: np.ndarray, version: tuple[int, int], most: int, cuts: list[int], data: st.DataObject
) -> None:
    """Any plain dtype, byte order, shape and version; in any number of gzip members, and however reads are cut."""
    plain = npy_bytes(array, version)
    places = sorted({min(c, len(plain)) for c in cuts} | {0, len(plain)})
    packed = b"".join(gzip.compress(plain[a:b]) for a, b in zip(places, places[1:], strict=False))
    for stored in (plain, packed):
        got = read(stored, most, data.draw(st.integers(1, 7)), dtype=array.dtype)
        assert got.dtype == array.dtype.newbyteorder("=")
        np.testing.assert_array_equal(got, array)


def test_rows_are_read_into_an_array_that_is_there() -> None:
    frames = np.arange(60, dtype=np.int32).reshape(10, 2, 3)
    with NpyStream(Dribble(gzip.compress(npy_bytes(frames))), "x") as stream:
        out = np.zeros((4, 2, 3), np.int32)
        assert [stream.read_into(out) for _ in range(4)] == [4, 4, 2, 0]
        np.testing.assert_array_equal(out[:2], frames[8:])
        for wrong in (np.zeros((4, 2, 3), np.int64), np.zeros((4, 6), np.int32), np.zeros((2, 3, 4), np.int32).T):
            with pytest.raises(ValueError, match="expected a contiguous int32"):
                stream.read_into(wrong)


def test_arrays_without_axes_and_small_ones_are_read_whole(tmp_path: Path) -> None:
    for array in (np.array(999_999), np.arange(5), np.zeros((0, 84, 84), np.uint8)):
        (tmp_path / "x.gz").write_bytes(gzip.compress(npy_bytes(array)))
        with rows_of(tmp_path / "x.gz") as stream:
            got = stream.array()
        assert got.shape == array.shape and got.dtype == array.dtype
        np.testing.assert_array_equal(got, array)


HEADERS = {
    "objects": (header_of("'|O'"), "pickles"),
    "structure": (header_of("[('a', '<i4')]"), "structure of dtypes"),
    "text": (header_of("'<U5'"), "dtype '<U5'; expected one of b1"),
    "bytes": (header_of("'|S3'"), "dtype '|S3'"),
    "complex": (header_of("'<c8'"), "dtype '<c8'"),
    "dates": (header_of("'<M8[ns]'"), "dtype '<M8"),
    "code": (header_of("__import__('os').system('true')"), "expected a dict of"),
    "no text": (header_of("3"), "expected a dict of"),
    "Fortran": (header_of(order="True", shape="(3, 2)"), "Fortran order"),
    "order is no boolean": (header_of(order="1"), "expected a dict of"),
    "order is text": (header_of(order="'True'"), "fortran_order"),
    "shape is a number": (header_of(shape="3"), "expected a dict of"),
    "shape is no tuple": (header_of(shape="(3)"), "expected a tuple"),
    "shape is text": (header_of(shape="'(3,)'"), "expected a tuple"),
    "negative": (header_of(shape="(-3,)"), "expected a dict of"),
    "octal": (header_of(shape="(010,)"), "expected a tuple"),
    "too many axes": (header_of(shape="(1,1,1,1,1,1,1,1,1)"), "at most 8"),
    "huge": (header_of(shape="(999999999999999999, 999999999999999999)"), "larger than any file"),
    "huge beside zero": (header_of(shape="(0, 999999999999999999)"), "larger than any file"),
    "deep": ("(" * 4000, "expected a dict of"),
    "key missing": ("{'descr': '|u1', 'shape': (3,), }\n", "expected a dict of"),
    "key twice": (
        "{'descr': '|u1', 'descr': '|u1', 'shape': (3,), }\n",
        "expected 'descr', 'fortran_order' and 'shape'",
    ),
    "key unknown": (header_of().replace("descr", "dtype"), "expected 'descr', 'fortran_order' and 'shape'"),
    "key more": (header_of().replace("}", "'x': True}"), "expected a dict of"),
    "no dict": ("[]\n", "expected a dict of"),
    "nothing": ("", "expected a dict of"),
    "not ASCII": (header_of("'|u\u0661'"), "expected ASCII"),
    "more after it": (header_of() + "{}", "expected a dict of"),
}


@pytest.mark.parametrize("case", HEADERS)
@pytest.mark.parametrize("packed", [False, True])
def test_headers_that_are_refused(case: str, packed: bool) -> None:
    text, said = HEADERS[case]
    data = with_header(text, b"abc")
    assert said in refused(gzip.compress(data) if packed else data)


def test_no_header_is_longer_than_it_may_be_and_versions_are_known() -> None:
    assert f"at most {MOST_HEADER}" in refused(with_header(header_of().ljust(MOST_HEADER + 1), b"abc", 2))
    assert f"at most {MOST_HEADER}" in refused(b"\x93NUMPY\x02\x00\xff\xff\xff\xff")
    read(with_header(header_of().ljust(MOST_HEADER), b"abc", 3))
    assert "version 4.0" in refused(b"\x93NUMPY\x04\x00" + bytes(20))
    assert "version 1.1" in refused(b"\x93NUMPY\x01\x01" + bytes(20))
    assert "begins with" in refused(pickle.dumps([1, 2, 3]))
    assert "begins with" in refused(gzip.compress(pickle.dumps([1, 2, 3])))


@given(st.data())
@example(None)
def test_what_is_taken_for_a_header_is_what_numpy_takes_it_for(data: st.DataObject | None) -> None:
    """A header that is mended here and there: refused, or read as numpy reads it. numpy evaluates a literal, this does not."""
    text = header_of(shape="(3, 2)")
    if data is not None:
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(text)))
            piece = data.draw(
                st.sampled_from([*"'\"{}(), :0123LTFu|<>=-_\\\n#", "True", "(1,)", "'descr'", "1_0", "0x1", "\x0b"])
            )
            text = text[:at] + piece + text[at + data.draw(st.integers(0, 3)) :]
    try:
        header = parse(text.encode())
    except ValueError:
        return
    file = io.BytesIO(len(text).to_bytes(2, "little") + text.encode())
    shape, fortran, dtype = npy.read_array_header_1_0(file)
    assert (header.shape, header.dtype) == (shape, dtype)
    assert not fortran or sum(n > 1 for n in shape) < 2


@given(st.binary(max_size=200), st.sampled_from([b"", b"\x93NUMPY\x01\x00", b"\x1f\x8b\x08\x00"]), st.booleans())
def test_no_bytes_do_anything_but_be_refused(noise: bytes, start: bytes, packed: bool) -> None:
    data = start + noise
    try:
        read(gzip.compress(data) if packed else data, most_bytes=1 << 16)
    except FileCorrupted:
        pass


FRAMES = np.random.default_rng(0).integers(0, 3, (20, 6, 6), np.uint8)
PACKED = gzip.compress(npy_bytes(FRAMES)[:300]) + gzip.compress(npy_bytes(FRAMES)[300:])


@given(st.integers(0, len(PACKED) - 1), st.integers(1, 255))
def test_a_byte_that_changed_is_noticed(at: int, by: int) -> None:
    """Or it is one of those of gzip's header that say nothing of the content: time, system, flags for text."""
    damaged = bytearray(PACKED)
    damaged[at] ^= by
    try:
        got = read(bytes(damaged), item=(6, 6), dtype="uint8")
    except FileCorrupted:
        return
    np.testing.assert_array_equal(got, FRAMES)


@given(st.integers(0, len(PACKED) - 1), st.integers(1, 100))
def test_a_file_that_was_cut_short_is_noticed(stop: int, most: int) -> None:
    with pytest.raises(FileCorrupted, match=r"ends|begins"):
        read(PACKED[:stop], most, item=(6, 6))


def test_what_follows_is_noticed() -> None:
    assert "after a member" in refused(PACKED + b"garbage")
    assert "after a member" in refused(PACKED + bytes(8))
    assert "does not decompress" in refused(PACKED + b"\x1f")[:200] or "ends within" in refused(PACKED + b"\x1f")
    assert "goes on after its array" in refused(PACKED + gzip.compress(b"x"))
    assert "goes on after its array" in refused(npy_bytes(FRAMES) + b"x")
    np.testing.assert_array_equal(read(PACKED + gzip.compress(b"") * 3), FRAMES)


def test_checksums_and_lengths_of_gzip_are_compared() -> None:
    plain = npy_bytes(FRAMES)
    good = gzip.compress(plain)
    for at, said in ((-8, "does not decompress"), (-4, "does not decompress")):
        wrong = bytearray(good)
        wrong[at] ^= 1
        assert said in refused(bytes(wrong))
    assert read(good).sum() == FRAMES.sum()


def test_the_last_rows_come_after_the_checks_only() -> None:
    wrong = bytearray(gzip.compress(npy_bytes(FRAMES)))
    wrong[-8] ^= 1
    with NpyStream(Dribble(bytes(wrong)), "x") as stream:
        assert len(stream.read(19)) == 19
        with pytest.raises(FileCorrupted, match="does not decompress"):
            stream.read(1)


@pytest.mark.parametrize(
    ("expected", "said"),
    [
        ({"item": (84, 84)}, r"has shape [20, 6, 6]; expected [n, 84, 84]"),
        ({"item": ()}, r"has shape [20, 6, 6]; expected [n]"),
        ({"dtype": "int32"}, "has dtype uint8; expected int32"),
        ({"dtype": ("bool", "int8")}, "has dtype uint8; expected bool or int8"),
        ({"rows": 21}, "has 20 rows; expected 21"),
        ({"most_bytes": 719}, "has 720 bytes"),
    ],
)
def test_what_the_caller_expects_is_compared(expected: Any, said: str) -> None:
    assert said in refused(PACKED, **expected)
    np.testing.assert_array_equal(read(PACKED, item=(6, 6), dtype=("bool", np.uint8), rows=20, most_bytes=720), FRAMES)


def test_booleans_are_zero_or_one() -> None:
    assert "expected 0 or 1" in refused(with_header(header_of("'|b1'"), b"\x00\x01\x02"))
    np.testing.assert_array_equal(read(with_header(header_of("'|b1'"), b"\x00\x01\x01")), [False, True, True])


def test_a_header_that_lies_takes_no_memory() -> None:
    """A terabyte announced, 100 bytes there: refused for what was expected, or at the end that comes too soon."""
    lie = gzip.compress(with_header(header_of(shape="(100000000, 84, 84)"), bytes(100)))
    tracemalloc.start()
    try:
        assert "expected at most" in refused(lie, most_bytes=1 << 36)
        assert "rows; expected 1000000" in refused(lie, rows=1_000_000)
        assert "ends after 100 bytes" in refused(lie, item=(84, 84))
        with NpyStream(Dribble(lie), "x") as stream, pytest.raises(FileCorrupted, match="expected at most 1073741824"):
            stream.array()
        wide = gzip.compress(with_header(header_of(shape="(10, 100000000)"), bytes(100)))
        assert "rows of 100000000 bytes" in refused(wide)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_members_without_content_are_only_as_many_as_the_file_has_bytes_for() -> None:
    np.testing.assert_array_equal(read(gzip.compress(b"") * 2000 + PACKED), FRAMES)


@pytest.mark.parametrize("how", ["honest", "bomb"])
def test_memory_is_bounded(how: str, tmp_path: Path) -> None:
    """700 MB of frames through 7 MB blocks; then 14 GB behind a header that says 10 frames."""
    million = gzip.compress(bytes(7056 * 1000), 1)
    count = 100 if how == "honest" else 2000
    shape = "(100000, 84, 84)" if how == "honest" else "(10, 84, 84)"
    data = gzip.compress(with_header(header_of(shape=shape))) + million * count
    with FaultServer({"frames.gz": data}) as server:
        done = subprocess.run(
            [sys.executable, "-m", "tests.fetcher", "stream", server.base, "frames.gz", "1000"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["grew"] < 40 << 10
    assert (said["rows"], said["refused"]) == (100_000, "") or "goes on after its array" in said["refused"]
    assert bool(said["refused"]) == (how == "bomb")


def test_decompressing_gives_no_more_than_was_asked_for() -> None:
    """A megabyte of zeros is a kilobyte of gzip: one call gives what it was asked for all the same."""
    from fbuf.datasets._source._gunzip import Gunzip

    stream = Gunzip(Dribble(gzip.compress(bytes(1 << 20))), "x")
    sizes = [len(stream.read(1000)) for _ in range(5)]
    assert sizes == [1000] * 5 and stream.position == 5000
    assert zlib.crc32(stream.read(1)) == zlib.crc32(b"\0")

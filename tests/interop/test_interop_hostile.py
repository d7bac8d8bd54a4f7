"""npz and h5 files that are damaged, cut off or malicious: an error, or the rows that were written."""

import contextlib
import gc
import importlib
import io
import json
import os
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._rows.columns import check_name, check_shape, read_json
from fbuf.interop import to_file
from tests.support.interop import (
    ROWS,
    check_flips,
    check_truncations,
    from_arrays,
    from_file,
    npy,
    packed,
    read_file,
    written,
)
from tests.support.refusals import raises
from tests.support.tables import by_tier


@pytest.mark.parametrize("compress", by_tier(False, more=[True]))
def test_truncations_and_flipped_bits_are_noticed(compress, tmp_path):
    file = written(tmp_path, compress)
    check_truncations(file, tmp_path, every=3)
    check_flips(file, tmp_path, every=23)


@pytest.mark.parametrize("compress", [False, True])
def test_errors_of_damaged_h5_files_name_the_path(compress, tmp_path):
    buffer, state = from_arrays(ROWS)
    text = to_file(tmp_path / "a.h5", buffer, state, compress=compress).path.read_bytes()
    refused = 0
    for at in range(0, len(text), max(len(text) // 60, 1)):
        path = tmp_path / "b.h5"
        path.write_bytes(text[:at] + bytes([text[at] ^ 0x41]) + text[at + 1 :])
        try:
            read_file(path)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 5


@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "a.npz"
    path.write_bytes(data)
    pytest.raises(ValueError, read_file, path)
    try:
        assert isinstance(read_json(path), dict)
    except ValueError as error:
        assert str(path) in str(error)


DTYPES = ["'<f4'", "'|O'", "'<f8'", "[('a', '<f4')]", "'>i4'", "__import__('os')", "'<U3'", "'|b1'", "'<V2'"]
SHAPES = ["(3,)", "()", "(0,)", "(1000000000000,)", "(-1,)", "(3, 4)", "(3", "(3.5,)", "(9" + "9" * 19 + ",)"]
HEADERS = st.binary(max_size=120) | st.builds(
    "{{'descr': {}, 'fortran_order': {}, 'shape': {}, }}".format,
    st.sampled_from(DTYPES),
    st.sampled_from(["True", "False", "1", "x()"]),
    st.sampled_from(SHAPES),
).map(str.encode)


@given(header=HEADERS, version=st.integers(0, 4), body=st.binary(max_size=64))
def test_any_header_is_refused_or_describes_the_bytes(header, version, body, tmp_path_factory):
    path = tmp_path_factory.mktemp("header") / "a.npz"
    width = 2 if version < 2 else 4
    text = b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(width, "little") + header + body
    try:
        got = read_file(packed(path, {"x.npy": text}))
    except (ValueError, TypeError):
        return
    assert sum(x.nbytes for x in got.values()) == len(body)


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"../x.npy": npy(np.zeros(3))}, "leaf '../x' has an invalid name"),
        ({"/etc/x.npy": npy(np.zeros(3))}, "leaf '/etc/x' has an invalid name"),
        ({"x.txt": b"hello"}, "expected arrays, 'name.npy'"),
        ({"x.npy": npy(np.array([{}], object))}, "holds pickled Python objects"),
        ({"x.npy": npy(np.zeros((3, 2), order="F"))}, "is in Fortran order; expected C order"),
        ({"x.npy": npy(np.zeros(3, ">f4"))}, "is '>f4'; expected little-endian"),
        ({"x.npy": npy(np.zeros(3, "datetime64[s]"))}, "is '<M8\\[s\\]'; expected little-endian numbers"),
        ({"x.npy": npy(np.zeros(3, [("a", "<f4")]))}, "expected little-endian numbers"),
        ({"x.npy": npy(np.array(["a"]))}, "expected little-endian numbers"),
        ({"x.npy": npy(np.zeros(3)) + b"more"}, "has 28 bytes; expected 24"),
        ({"x.npy": npy(np.zeros(3))[:-1]}, "has 23 bytes; expected 24"),
        ({"x.npy": b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little")}, "expected 2147483648 bytes"),
        ({"x.npy": npy(np.zeros(3)), "y.npy": npy(np.zeros(4))}, "'y' has 4 rows; expected 3"),
        ({"b.npy": npy(np.array([2, 1], np.uint8)).replace(b"|u1", b"|b1")}, "has bytes above 1"),
        ({"__fbuf__.npy": npy(np.frombuffer(b"{}", np.uint8))}, "does not describe rows"),
        ({"__fbuf__.npy": npy(np.frombuffer(b"[" * 9999, np.uint8))}, "does not describe rows"),
    ],
)
def test_invalid_members_are_refused(members, match, tmp_path):
    path = packed(tmp_path / "a.npz", members)
    refusal = pytest.raises(ValueError, read_file, path)  # its traceback keeps all frames, and what they hold
    refusal.match(match)
    if match == "has bytes above 1":  # found by a source that `read_file` has made, and holds
        del refusal
    assert str(path) not in map(os.path.realpath, Path("/proc/self/fd").iterdir())


def test_false_descriptions_are_refused(tmp_path):
    written(tmp_path, False)
    with zipfile.ZipFile(tmp_path / "a.npz") as file:
        members = {name: file.read(name) for name in file.namelist()}
    about = json.loads(np.load(io.BytesIO(members["__fbuf__.npy"])).tobytes())
    for entries, match in (
        ({"version": 2}, "has version '2'; expected 1"),
        ({"format": "other"}, "does not describe rows"),
        ({"steps": 7}, "expected \\[7, '...'\\]"),
        ({"steps": -1}, "steps is '-1'"),
        ({"lanes": 3}, "expected \\[6, 3, '...'\\]"),
        ({"dtypes": {"a": "object"}}, "dtype of 'a' is 'object'"),
        ({"dtypes": {"a": "bfloat16"}}, "dtype of 'a' is 'bfloat16'; expected one of 4 bytes"),
        ({"dtypes": 3}, "lists no columns"),
        ({"columns": ["a"]}, "column 'b' is missing or unknown"),
    ):
        members["__fbuf__.npy"] = npy(np.frombuffer(json.dumps(about | entries).encode(), np.uint8))
        raises(ValueError, match, lambda: read_file(packed(tmp_path / "b.npz", members)))


def test_a_zip_that_claims_more_than_it_can_hold_allocates_nothing(tmp_path):
    huge = npy(np.zeros(1, np.float32)).replace(b"(1,), }        ", b"(1073741824,), }")
    path = packed(tmp_path / "a.npz", {"x.npy": huge}, compression=zipfile.ZIP_DEFLATED)
    text = bytearray(path.read_bytes())
    start = text.index(b"PK\x01\x02")
    text[start + 24 : start + 28] = (2**32 - 2).to_bytes(4, "little")
    path.write_bytes(text)
    pytest.raises(ValueError, read_file, path).match("claims 4294967294 bytes")


@pytest.mark.more
@given(name=st.text("./\\\0ab", max_size=6) | st.text(max_size=20))
def test_names_stay_in_their_folder(name):
    with contextlib.suppress(ValueError):
        check_name("here", name)
        path = Path("/x").joinpath(name)
        assert ".." not in path.parts and path.is_relative_to("/x") and path != Path("/x")


@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_shapes_are_small_or_refused(value):
    with contextlib.suppress(ValueError):
        shape = check_shape("here", value)
        assert len(shape) <= 32 and all(type(n) is int and n >= 0 for n in shape)


def test_links_to_other_files_are_refused(tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = np.arange(3, dtype=np.int32)
    (tmp_path / "raw").write_bytes(bytes(12))
    layout = h5py.VirtualLayout((3,), np.int32)
    layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "x", (3,))
    links = (
        lambda file: file.__setitem__("x", h5py.ExternalLink(str(tmp_path / "secret.h5"), "x")),
        lambda file: file.__setitem__("y", h5py.SoftLink("/x")),
        lambda file: file.create_dataset("x", (3,), np.int32, external=[(str(tmp_path / "raw"), 0, 12)]),
        lambda file: file.create_virtual_dataset("x", layout),
    )
    for number, link in enumerate(links):
        path = tmp_path / f"{number}.h5"
        with h5py.File(path, "w") as file:
            link(file)
        pytest.raises(ValueError, from_file, path).match("is a link|is stored in other files")


def test_data_that_was_never_written_is_refused(tmp_path):
    """HDF5 would read zeros."""
    for name, settings in {"chunks": {"chunks": (2,)}, "whole": {}}.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            data = file.create_dataset("x", (6,), np.int32, **settings)
            if name == "chunks":
                data[:4] = 1
        raises(ValueError, "its writer did not finish", from_file, tmp_path / f"{name}.h5")


def test_invalid_and_missing_files_are_named(tmp_path):
    (tmp_path / "a.h5").write_bytes(b"hello")
    for name, error, match in (
        ("a.h5", ValueError, "is not an HDF5 file"),
        ("none.h5", FileNotFoundError, "none.h5"),
        ("none.npz", FileNotFoundError, "none.npz"),
        ("a.csv", ValueError, "expected .npz, .h5 or .hdf5"),
    ):
        raises(error, match, from_file, tmp_path / name)


def test_missing_packages_are_named(monkeypatch, tmp_path):
    buffer, state = from_arrays(ROWS)
    for name in ("h5py", "tensorstore", "minari", "orbax", "orbax.checkpoint"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "fbuf.orbax", raising=False)
    raises(ImportError, r'pip install "fbuf\[h5\]", or write an .npz', to_file, tmp_path / "a.h5", buffer, state)
    pytest.raises(ImportError, fbuf.interop.from_vault, tmp_path).match(r'pip install "fbuf\[vault\]"')
    where, words = {"root": tmp_path / "ours", "source": tmp_path}, r'minari is missing .* Run pip install "fbuf\[min'
    raises(ImportError, words, fbuf.datasets.minari, "D4RL/door", download=True, **where)
    raises(ImportError, r"fbuf.orbax: orbax is missing .*pip install", importlib.import_module, "fbuf.orbax")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("ending", ["npz", "h5"])
def test_a_dropped_source_closes_its_file(ending, tmp_path):
    path = tmp_path / f"a.{ending}"
    gc.disable()  # a cycle would keep it open, and HDF5's library returns an open file's rows for a path written again
    try:
        for first in range(3):
            to_file(path, *from_arrays({"a": np.arange(first, first + 4, dtype=np.int32)}), overwrite=True)
            assert read_file(path)["a"].tolist() == list(range(first, first + 4))
            assert str(path) not in map(os.path.realpath, Path("/proc/self/fd").iterdir())
    finally:
        gc.enable()

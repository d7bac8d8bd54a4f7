"""npz and h5 files that are damaged, cut off, or made to deceive: an error, or the very rows that were written."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf.interop import _columns, _load, from_arrays, from_file, to_file
from fbuf.interop._source import check_name, check_shape, read_json

ROOT = Path(__file__).resolve().parent.parent
ROWS = {"a": np.arange(6, dtype=np.int32), "b": np.arange(12, dtype=np.uint8).reshape(6, 2) % 2 == 0}


def taken(path: Path) -> dict[str, np.ndarray]:
    """What `from_file` reads, without a buffer to put it into."""
    with _load.opened("from_file", path) as reader:
        source = _load._source(path, reader, None, None)
        names = _columns.chosen("from_file", source.columns, None)
        return {name: source.columns[name].read(0, source.steps) for name in names}


def equal(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return got.keys() == wanted.keys() and all(
        got[n].dtype == x.dtype and got[n].shape == x.shape and got[n].tobytes() == x.tobytes()
        for n, x in wanted.items()
    )


@pytest.fixture(scope="module", params=[False, True], ids=["stored", "deflated"])
def file(request, tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    buffer, state = from_arrays(ROWS)
    to_file(path, buffer, state, compress=request.param)
    assert equal(taken(path), ROWS)
    return path.read_bytes()


def test_every_truncation_is_noticed(file, tmp_path):
    path = tmp_path / "a.npz"
    for size in range(len(file)):
        path.write_bytes(file[:size])
        with pytest.raises(ValueError):
            taken(path)


@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_bit_is_noticed_or_harmless(file, every, tmp_path):
    """Harmless: of a zip's dates, attributes and the like."""
    path = tmp_path / "a.npz"
    noticed = 0
    for bit in range(0, 8 * len(file), every):
        damaged = bytearray(file)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            got = taken(path)
        except ValueError:
            noticed += 1
        else:
            assert equal(got, ROWS), bit
    assert noticed > 0.6 * 8 * len(file) / every


@given(data=st.binary(max_size=300))
def test_any_bytes(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "a.npz"
    path.write_bytes(data)
    with pytest.raises(ValueError):
        taken(path)


HEADERS = st.one_of(
    st.binary(max_size=120),
    st.builds(
        "{{'descr': {}, 'fortran_order': {}, 'shape': {}, }}".format,
        st.sampled_from(
            ["'<f4'", "'|O'", "'<f8'", "[('a', '<f4')]", "'>i4'", "__import__('os')", "'<U3'", "'|b1'", "'<V2'"]
        ),
        st.sampled_from(["True", "False", "1", "x()"]),
        st.sampled_from(
            ["(3,)", "()", "(0,)", "(1000000000000,)", "(-1,)", "(3, 4)", "(3", "(3.5,)", "(9" + "9" * 19 + ",)"]
        ),
    ).map(str.encode),
)


@given(header=HEADERS, version=st.integers(0, 4), body=st.binary(max_size=64))
def test_any_header(header, version, body, tmp_path_factory):
    """It is plain numbers of just the size that is there, or an error; nothing is allocated for what is not there."""
    path = tmp_path_factory.mktemp("header") / "a.npz"
    width = 2 if version < 2 else 4
    text = b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(width, "little") + header + body
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("x.npy", text)
    try:
        got = taken(path)
    except (ValueError, TypeError):
        return
    assert sum(x.nbytes for x in got.values()) == len(body)


def packed(path: Path, members: dict[str, bytes], **settings) -> Path:
    with zipfile.ZipFile(path, "w", **settings) as out:
        for name, text in members.items():
            out.writestr(name, text)
    return path


def npy(array: np.ndarray, **settings) -> bytes:
    text = io.BytesIO()
    np.save(text, array, **settings)
    return text.getvalue()


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ({"../x.npy": npy(np.zeros(3))}, "names a leaf '../x'"),
        ({"/etc/x.npy": npy(np.zeros(3))}, "names a leaf '/etc/x'"),
        ({"x.txt": b"hello"}, "expected arrays, 'name.npy'"),
        ({"x.npy": npy(np.array([{}], object), allow_pickle=True)}, "holds Python objects, which are pickled"),
        ({"x.npy": npy(np.zeros((3, 2), order="F"))}, "lies column by column; expected rows"),
        ({"x.npy": npy(np.zeros(3, ">f4"))}, "is '>f4'; expected little-endian"),
        ({"x.npy": npy(np.zeros(3, "datetime64[s]"))}, "is '<M8\\[s\\]'; expected little-endian numbers"),
        ({"x.npy": npy(np.zeros(3, [("a", "<f4")]))}, "expected little-endian numbers"),
        ({"x.npy": npy(np.array(["a"]))}, "expected little-endian numbers"),
        ({"x.npy": npy(np.zeros(3)) + b"more"}, "has 28 bytes of data; expected 24"),
        ({"x.npy": npy(np.zeros(3))[:-1]}, "has 23 bytes of data; expected 24"),
        ({"x.npy": b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little")}, "expected 2147483648 bytes"),
        (
            {"x.npy": npy(np.zeros(3, np.float32)), "y.npy": npy(np.zeros(4, np.float32))},
            "'y' has 4 rows, but 'x' has 3",
        ),
        ({"b.npy": npy(np.array([2, 1], np.uint8)).replace(b"|u1", b"|b1")}, "holds bytes above 1"),
        ({"__fbuf__.npy": npy(np.frombuffer(b"{}", np.uint8))}, "does not describe rows"),
        ({"__fbuf__.npy": npy(np.frombuffer(b"[" * 9999, np.uint8))}, "does not describe rows"),
    ],
)
def test_members_that_are_refused(members, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        taken(packed(tmp_path / "a.npz", members))


def test_what_cannot_be_read_can_be_left_out(tmp_path):
    members = {"o.npy": npy(np.array([{}], object), allow_pickle=True), "x.npy": npy(np.arange(3, dtype=np.int32))}
    buffer, state = from_file(packed(tmp_path / "a.npz", members), fields=["x"])
    assert buffer.rows(state).data["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"version": 2}, "has version '2'; this fbuf reads 1"),
        ({"format": "other"}, "does not describe rows"),
        ({"steps": 7}, "expected \\[7, '...'\\]"),
        ({"steps": -1}, "steps is '-1'"),
        ({"lanes": 3}, "expected \\[6, 3, '...'\\]"),
        ({"dtypes": {"a": "object"}}, "says 'a' is 'object'"),
        ({"dtypes": {"a": "bfloat16"}}, "says 'a' is 'bfloat16'; expected a dtype of 4 bytes"),
        ({"dtypes": 3}, "does not describe rows"),
    ],
)
def test_descriptions_that_lie(entries, match, tmp_path):
    buffer, state = from_arrays(ROWS)
    to_file(tmp_path / "a.npz", buffer, state)
    with zipfile.ZipFile(tmp_path / "a.npz") as file:
        members = {name: file.read(name) for name in file.namelist()}
    about = json.loads(np.load(io.BytesIO(members["__fbuf__.npy"])).tobytes()) | entries
    members["__fbuf__.npy"] = npy(np.frombuffer(json.dumps(about).encode(), np.uint8))
    with pytest.raises(ValueError, match=match):
        taken(packed(tmp_path / "b.npz", members))


def test_a_zip_that_claims_more_than_it_can_hold(tmp_path):
    """A member of a few bytes that says it becomes gigabytes is refused before anything is allocated."""
    huge = npy(np.zeros(1, np.float32)).replace(b"(1,), }        ", b"(1073741824,), }")
    path = packed(tmp_path / "a.npz", {"x.npy": huge}, compression=zipfile.ZIP_DEFLATED)
    text = bytearray(path.read_bytes())
    start = text.index(b"PK\x01\x02")
    text[start + 24 : start + 28] = (2**32 - 2).to_bytes(4, "little")
    path.write_bytes(text)
    with pytest.raises(ValueError, match="is said to have 4294967294 bytes"):
        taken(path)


@given(name=st.text(max_size=20))
def test_names_never_lead_anywhere(name):
    try:
        check_name("here", name)
    except ValueError:
        return
    path = (ROOT / "x").joinpath(name)
    assert ".." not in path.parts and path.is_relative_to(ROOT / "x") and path != ROOT / "x"


@given(value=st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_shapes_are_small_or_refused(value):
    try:
        shape = check_shape("here", value)
    except ValueError:
        return
    assert len(shape) <= 32 and all(type(n) is int and n >= 0 for n in shape)


@given(text=st.binary(max_size=100))
def test_any_json(text, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_bytes(text)
    try:
        assert isinstance(read_json(path), dict)
    except ValueError as error:
        assert str(path) in str(error)


# ---------------------------------------------------------------------------------------------------------- HDF5


@pytest.fixture
def h5py():
    return pytest.importorskip("h5py")


def test_data_that_lies_elsewhere_is_refused(h5py, tmp_path):
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["x"] = np.arange(3, dtype=np.int32)
    (tmp_path / "raw").write_bytes(bytes(12))
    cases = {
        "external link": lambda file: file.__setitem__("x", h5py.ExternalLink(str(tmp_path / "secret.h5"), "x")),
        "soft link": lambda file: file.__setitem__("y", h5py.SoftLink("/x")),
        "other file": lambda file: file.create_dataset("x", (3,), np.int32, external=[(str(tmp_path / "raw"), 0, 12)]),
        "virtual": lambda file: file.create_virtual_dataset("x", layout),
    }
    layout = h5py.VirtualLayout((3,), np.int32)
    layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "x", (3,))
    for name, make in cases.items():
        path = tmp_path / f"{name}.h5"
        with h5py.File(path, "w") as file:
            make(file)
        with pytest.raises(ValueError, match="is a link to elsewhere|lies in other files"):
            from_file(path)


def test_data_that_was_never_written_is_refused(h5py, tmp_path):
    """It would read as zeros."""
    for name, settings in {"chunks": {"chunks": (2,)}, "whole": {}}.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            data = file.create_dataset("x", (6,), np.int32, **settings)
            if name == "chunks":
                data[:4] = 1
        with pytest.raises(ValueError, match="its writer did not finish"):
            from_file(tmp_path / f"{name}.h5")


def test_other_kinds_of_data_are_refused_by_name(h5py, tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(3, dtype=np.int32)
        file["text"] = ["a", "b", "c"]
        file.create_dataset("big", data=np.arange(3, dtype=">i4"))
    with pytest.raises(ValueError, match="data set 'big' is >i4; expected plain little-endian numbers. Leave it out"):
        from_file(tmp_path / "a.h5")
    with pytest.raises(ValueError, match="data set 'text' is object"):
        from_file(tmp_path / "a.h5", fields=["text"])
    buffer, state = from_file(tmp_path / "a.h5", fields=["x"])
    assert buffer.rows(state).data["x"].tolist() == [0, 1, 2]


def test_what_is_no_hdf5(h5py, tmp_path):
    (tmp_path / "a.h5").write_bytes(b"hello")
    with pytest.raises(ValueError, match="is no HDF5 file"):
        from_file(tmp_path / "a.h5")
    with pytest.raises(FileNotFoundError):
        from_file(tmp_path / "none.h5")
    with pytest.raises(FileNotFoundError):
        from_file(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="expected .npz, .h5 or .hdf5"):
        from_file(tmp_path / "a.csv")


FLIPS = """
import sys
import numpy as np
from pathlib import Path
from fbuf.interop import _columns, _load
path = Path(sys.argv[1])
whole = path.read_bytes()
other = path.with_name("b.h5")

def taken(path):
    with _load.opened("from_file", path) as reader:
        source = _load._source(path, reader, None, None)
        names = _columns.chosen("from_file", source.columns, None)
        return {n: source.columns[n].read(0, source.steps).tobytes() for n in names}

wanted, noticed, kept = taken(path), 0, 0
generator = np.random.default_rng(0)
for at in generator.integers(0, len(whole), 400):
    damaged = bytearray(whole)
    damaged[at] ^= 1 << int(generator.integers(8))
    other.write_bytes(damaged)
    try:
        got = taken(other)
    except (ValueError, KeyError, RuntimeError, OSError):
        noticed += 1
    else:
        assert got == wanted, at
        kept += 1
print("noticed", noticed, "kept", kept)
"""


@pytest.mark.slow
def test_flipped_bits_of_a_compressed_h5(h5py, tmp_path):
    """Its data have checksums. (Without `compress` HDF5 has none of data; npz always has.)"""
    generator = np.random.default_rng(1)
    buffer, state = from_arrays({"x": generator.integers(0, 4, (600, 16)).astype(np.uint8)})
    to_file(tmp_path / "a.h5", buffer, state, compress=True)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FLIPS), str(tmp_path / "a.h5")], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0 and "noticed" in done.stdout, done.stderr[-2000:]


def test_missing_libraries_are_named(monkeypatch, tmp_path):
    buffer, state = from_arrays(ROWS)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match=r'pip install "fbuf\[h5\]", or write an .npz'):
        to_file(tmp_path / "a.h5", buffer, state)
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(ImportError, match=r'pip install "fbuf\[vault\]"'):
        fbuf.interop.from_vault(tmp_path)

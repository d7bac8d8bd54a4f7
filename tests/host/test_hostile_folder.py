"""Folders of live stores that someone else wrote: links, pipes, large and deep files, and impossible numbers."""

import os
import shutil
import struct
import tracemalloc
import warnings

import numpy as np
import pytest

from fbuf._host.codecs import Zstd
from fbuf._host.io.directory import Folder
from fbuf._host.types import StoreCorrupted
from tests.support.disk import flipped, identity, make
from tests.support.processes import run_python
from tests.support.refusals import raises
from tests.support.store import columns_of, fetch, frames
from tests.support.tables import by_tier

COLUMNS = columns_of(None, Zstd(chunk=4, dictionary=4), shape=(576,))
SIZES = {"lanes": 2, "length": 200, "slack": 20}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("store")
    store = make(path, COLUMNS, **SIZES)
    stream = np.stack([frames(512, seed=0), frames(512, seed=1)], 1).reshape(512, 2, -1)
    for rows in np.split(stream, 32):
        tickets = store.write([rows, rows], None)
    store.flush()
    store.update_rows(tickets[:3, 0], np.ones(3, bool), {0: rows[:3, 1]})  # counted by one place of the head only
    store.close()
    names = sorted(file.name for file in path.iterdir())
    assert {"changes", "column0.rows", "column0.sums", "column1.open", "head", "lock", "manifest.json"} < set(names)
    assert any("segment" in n for n in names) and any("dictionary" in n for n in names)
    return path


def opened(path, verify):
    """Resume; return the error, after a look at its text."""
    try:
        with warnings.catch_warnings(action="ignore"):
            store = make(path, COLUMNS, **SIZES, resume=True, verify=verify)
    except (StoreCorrupted, ValueError, OSError) as error:
        assert str(path) in str(error), error
        return error
    store.close()
    return None


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device"])
def test_nothing_but_plain_files_is_opened(folder, tmp_path, kind, verify):
    for name in sorted(file.name for file in folder.iterdir()):
        path, victim = tmp_path / name, tmp_path / f"{name}.victim"
        shutil.copytree(folder, path)
        content = (path / name).read_bytes()
        (path / name).unlink()
        if kind == "link":
            victim.write_bytes(content)
            (path / name).symlink_to(victim)
        elif kind == "pipe":
            os.mkfifo(path / name)
        elif kind == "folder":
            (path / name).mkdir()
        else:
            (path / name).symlink_to("/dev/zero")
        error = opened(path, verify)
        assert isinstance(error, OSError if name == "lock" else StoreCorrupted), error
        assert kind != "link" or victim.read_bytes() == content


@pytest.mark.parametrize(
    "name", ["changes.new", "changes.old", "column1.dictionary-0123456789abcdef", "column1.segment-00000042"]
)
def test_stray_links_and_folders_are_named(folder, tmp_path, name):
    for make_stray in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        path = tmp_path / make_stray.__name__
        shutil.copytree(folder, path)
        make_stray(path / name)
        with pytest.raises(
            StoreCorrupted, match=f"{path}/{name} is not a plain file; expected one. Remove it, and resume"
        ):
            make(path, COLUMNS, **SIZES, resume=True)
        (path / name).rmdir() if make_stray is os.mkdir else (path / name).unlink()
        assert opened(path, True) is None


@pytest.mark.parametrize("verify", by_tier(True, more=[False]))
def test_one_wrong_byte_of_one_read_discards_nothing(folder, tmp_path, monkeypatch, verify):
    """Only bytes that were wrong twice are damage."""
    reads, wrong, real = list[str](), -1, os.pread

    def pread(fd, size, at):
        text = real(fd, size, at)
        reads.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        if len(reads) - 1 == wrong and text:
            text = flipped(text, 8 * places[wrong % len(places)](len(text)))
        return text

    places = (lambda size: size // 2, lambda size: 0, lambda size: size // 3)
    path = tmp_path / "store"
    shutil.copytree(folder, path)
    monkeypatch.setattr(os, "pread", pread)
    expected = rows_there(path, verify)
    count, errors = len(reads), set()
    assert {"head", "changes", "column1.open", "column1.segment-00000000"} < set(reads)
    for wrong in range(count):
        reads.clear()
        try:
            assert rows_there(path, verify) == expected, reads[wrong]
        except (StoreCorrupted, ValueError):
            errors.add(reads[wrong])
    assert errors <= {"manifest.json", "column0.sums"}  # they discard nothing
    assert rows_there(path, verify) == expected


def rows_there(path, verify):
    """Return all rows; a warning is an error."""
    store = make(path, COLUMNS, **SIZES, resume=True, verify=verify)
    try:
        assert not store.warning
        tickets = store.newest()[1]
        return [fetch(store, tickets, c)[0].tobytes() for c in range(2)]
    finally:
        store.close()


@pytest.mark.parametrize("verify", [True, False])
def test_large_and_deep_files_take_no_memory(folder, tmp_path, verify):
    for name in sorted(file.name for file in folder.iterdir() if file.name != "lock" and "segment" not in file.name):
        path = tmp_path / name
        shutil.copytree(folder, path)
        os.truncate(path / name, 6 << 30)
        tracemalloc.start()
        opened(path, verify)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 100 << 20, name
    for text in ("", "[" * 200_000 + "]" * 200_000, "[]", "3", '{"format": []}', '{"columns": 3}', "\x00", "9" * 5000):
        (path / "manifest.json").write_text(text)
        raises(StoreCorrupted, f"{path}/manifest.json is damaged", make, path, COLUMNS, **SIZES, resume=True)


def test_a_store_whose_folder_was_removed_is_still_described(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "store")
    store = make(tmp_path / "store", COLUMNS, **SIZES, resume=True)
    assert store.disk > 0
    shutil.rmtree(tmp_path / "store")
    assert store.disk == 0
    store.close()


def test_a_read_of_a_missing_or_damaged_file_names_the_store(folder, tmp_path):
    for column, name, content in (
        (0, "rows", bytes),
        (1, "segment-00000000", lambda size: b""),
        (1, "segment-00000000", None),
    ):
        path = tmp_path / f"{name}-{content is None}"
        shutil.copytree(folder, path)
        file = path / f"column{column}.{name}"
        size = file.stat().st_size
        file.unlink()
        if content is not None:
            file.write_bytes(content(size))
        store = make(path, COLUMNS, **SIZES, resume=True, verify=False)
        raises(StoreCorrupted, f"^Store.read: at {path}, .*damaged", fetch, store, store.newest()[1], column)
        assert str(path) in str(store.last_error)
        store.close()


def test_foreign_names_are_left_alone(folder, tmp_path):
    path = tmp_path / "store"
    shutil.copytree(folder, path)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (path / "column1.segment-x").write_text("theirs")
    (path / "column1.segment-99999999999").write_text("theirs")
    (path / "notes").symlink_to(victim)
    os.mkfifo(path / "pipe")
    store = make(path, COLUMNS, **SIZES, resume=True)
    store.write([np.zeros((3, 2, 576), np.uint8)] * 2, None)
    store.flush()
    assert store.disk > 0
    store.close()
    assert victim.read_text() == "precious" and (path / "column1.segment-x").read_text() == "theirs"


FAR = 1 << 62
IMPOSSIBLE = [
    {"count": np.array([-1, 64])},
    {"count": np.array([FAR, 64])},
    {"first": np.array([513, 0])},
    {"first": np.array([-1, 0])},
    {"flushed": np.array([0, -5])},
    {"flushed": np.array([0, 1 << 40])},
    {"changes": FAR},
    {"kinds": b"cc"},
    {"kinds": b"xr"},
    {"kinds": b"nn"},
]


@pytest.mark.parametrize("change", IMPOSSIBLE, ids=str)
@pytest.mark.parametrize("verify", [True, False])
def test_impossible_numbers_in_the_head_are_refused(folder, tmp_path, change, verify):
    path = tmp_path / "store"
    shutil.copytree(folder, path)
    held = Folder("Memmap", str(path), identity(COLUMNS, **SIZES), resume=True)
    for name, value in change.items():
        setattr(held, name, value)
    for _ in range(2):
        held.save(held.kinds, held.count, held.changes)
    held.close()
    with pytest.raises(StoreCorrupted, match=f"{path}/head holds impossible numbers"):
        make(path, COLUMNS, **SIZES, resume=True, verify=verify)


def test_a_log_of_updates_with_a_right_checksum_and_wrong_content(folder, tmp_path):
    path = tmp_path / "store"
    shutil.copytree(folder, path)
    held = Folder("Memmap", str(path), identity(COLUMNS, **SIZES), resume=True)
    for body in (b"", b"\0" * 8, struct.pack("<QQIQI", 1, 1, 0, 60, 1 << 30), struct.pack("<QI", 1, 7)):
        record = struct.pack("<4sII", b"fbp1", len(body), held.crc(body)) + body
        (path / "changes").write_bytes(record)
        held.close()
        raises(
            StoreCorrupted,
            f"{path}/changes holds something else",
            make,
            path,
            COLUMNS,
            **SIZES,
            resume=True,
            verify=False,
        )
        held = Folder("Memmap", str(path), identity(COLUMNS, **SIZES), resume=True)
    held.close()


CUT = """
import glob, os, sys, numpy as np
from fbuf._host.codecs import Zstd
from fbuf._host.types import StoreCorrupted
from tests.support.disk import make
from tests.support.refusals import raises
from tests.support.store import columns_of, fetch
CASES = [("rows", None, 4096), ("rows", None, 0), ("segment-*", Zstd(chunk=2), 4096), ("segment-*", Zstd(chunk=2), 0)]
for name, codec, size in CASES:
    path = f"{sys.argv[1]}/{codec is None}-{size}"
    store = make(path, columns_of(codec, shape=(600,)), length=64)
    tickets = store.write([np.random.default_rng(0).integers(0, 4, (64, 1, 600), np.uint8)], None)
    fetch(store, tickets)
    for file in glob.glob(f"{path}/column0.{name}"):
        os.truncate(file, size)
    raises(StoreCorrupted, "column0.* has [0-9]+ bytes; expected [0-9]+: it was cut short", fetch, store, tickets)
    store.close()
    print("alive")
"""


@pytest.mark.more
def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(tmp_path):
    assert run_python(CUT, tmp_path).stdout == "alive\n" * 4

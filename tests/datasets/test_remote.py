"""Files of data sets from a web server that fails, a folder and fsspec: the right bytes, or an error that says what to do."""

import errno
import gzip
import pickle
import sys
from unittest import mock

import numpy as np
import pytest

from fbuf.datasets import _remote
from fbuf.datasets._remote import FileCorrupted, SourceError, SpaceError, address_of, fetch, list_files
from tests.support.fault_server import LISTING, Cut, Damage, FaultServer, Status

FOLDER = "dqn/Pong/1/replay_logs/"
NAME = FOLDER + "$store$_observation_ckpt.0.gz"
SMALL = FOLDER + "add_count_ckpt.0.gz"
DATA = np.random.default_rng(1).bytes(300_000)
FILES = {NAME: DATA, SMALL: gzip.compress(b"small"), FOLDER + "old/add_count_ckpt.0.gz": b"old", "readme": b"x"}


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(_remote, "WAITS", (0.0, 0.0))


@pytest.fixture
def server():
    with FaultServer(FILES) as server:
        yield server


def listed(source, name=NAME):
    return next(file for file in list_files(address_of("get", source), FOLDER) if file.name == name)


def got(file, path):
    reports = []
    fetch(file, path / "file.gz", reports.append)
    return (path / "file.gz").read_bytes(), sum(reports)


def source_of(server, monkeypatch):
    """The address of a server, which is that of the public bucket where it lists its files as one."""
    if server.listing != "bucket":
        return server.base + "/"
    monkeypatch.setattr(_remote, "BUCKET", server.base)
    monkeypatch.setattr(_remote, "LISTING", f"{server.base}/listing")


@pytest.mark.parametrize("listing", ["bucket", "index", "html"])
def test_files_of_a_web_server_are_listed(listing, tmp_path, monkeypatch):
    with FaultServer(FILES, listing, page=1) as server:
        address = address_of("get", source_of(server, monkeypatch))
        found = {file.name: file for file in list_files(address, FOLDER) if file.name.endswith(".gz")}
        assert sorted(found) == sorted([NAME, SMALL])
        for name, file in found.items():
            assert got(file, tmp_path) == (FILES[name], len(FILES[name]))
            assert (file.size, bool(file.md5)) == ((None, False) if listing == "html" else (len(FILES[name]), True))
        assert list_files(address, "dqn/Breakout/1/replay_logs/") == []


def test_files_of_a_folder_and_of_fsspec_are_listed(tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    for name, data in FILES.items():
        memory.pipe(f"/mirror/{name}", data)
        (tmp_path / "a b" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a b" / name).write_bytes(data)
    (tmp_path / "link").symlink_to(tmp_path / "a b")
    for source in (tmp_path / "a b", str(tmp_path / "link"), (tmp_path / "a b").as_uri(), "memory://mirror"):
        file = listed(source)
        assert file.size == len(DATA) and got(file, tmp_path) == (DATA, len(DATA))
        assert list_files(address_of("get", source), FOLDER + "nowhere/") == []
    memory.rm("/mirror", recursive=True)


def test_the_default_source_is_the_public_bucket():
    assert address_of("get", None) == _remote.BUCKET == "https://storage.googleapis.com/atari-replay-datasets"
    pytest.raises(TypeError, address_of, "get", 3).match("get: source is a int; expected an address, a folder or None")


def test_an_invalid_index_is_refused(server, monkeypatch):
    names = [b'"../x"', b'""', b"3", b'"a/"']
    values = [b'"size": -1', b'"size": "3"', b'"size": true', b'"md5": "12"', b'"md5": 3']
    entries = [b'{"name": %s}' % name for name in names] + [b'{"name": "a", %s}' % value for value in values]
    texts = [b'{"files": [%s]}' % entry for entry in (*entries, b'{"size": 3}', b"3")]
    for text in (b"<html>log in</html>", b"[]", b'{"files": 3}', *texts):
        monkeypatch.setattr("tests.support.fault_server._Handler._index", lambda *_, text=text: text)
        pytest.raises(SourceError, listed, server.base).match(r"index.json: is no index; expected \{\"files\"")


@pytest.mark.parametrize("listing", ["bucket", "index"])
def test_listings_are_retried(listing, monkeypatch):
    with FaultServer(FILES, listing) as server:
        server.faults[LISTING] = [Status(503)] * 2
        assert listed(source_of(server, monkeypatch)).name == NAME
        assert server.faults[LISTING] == []


def test_an_unavailable_listing_names_its_address(server):
    server.faults[LISTING] = [Status(503)] * 3
    pytest.raises(SourceError, lambda: listed(server.base)).match(f"{server.base}.*503 Service Unavailable")
    pytest.raises(SourceError, listed, "http://127.0.0.1:9").match(r"http://127.0.0.1:9/dqn.*Cannot connect to host")


def test_a_missing_package_is_named(monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "gcsfs", None)
        pytest.raises(ImportError, listed, "gs://bucket").match(r'gs://bucket.*gcsfs.*Run pip install "fsspec\[gs\]"')
    for package, source in (("aiohttp", "http://x"), ("fsspec.core", "memory://x")):
        monkeypatch.setitem(sys.modules, package, None)
        pytest.raises(ImportError, listed, source).match(r'Run pip install "fbuf\[datasets\]"')


@pytest.mark.parametrize("faults", [[Cut(100_000), Cut(0)], [Status(503), Status(429)], [Damage(200_000)]], ids=repr)
def test_a_truncated_or_damaged_file_is_downloaded_again(server, faults, tmp_path):
    file = listed(server.base)
    server.faults[NAME] = list(faults)
    assert got(file, tmp_path) == (DATA, len(DATA))  # bytes of failed attempts are not counted
    assert server.asked == [NAME] * (len(faults) + 1)


FAILURES = [
    (Cut(100_000), SourceError, "observation_ckpt.0.gz: ClientPayloadError", 3),
    (Status(500), SourceError, "500 Internal Server Error", 3),
    (Status(403), SourceError, "403 Forbidden", 1),
    (Status(404), SourceError, "not found", 1),
    (Damage(7), FileCorrupted, "has md5 [0-9a-f]{32}; expected [0-9a-f]{32}", 3),
]


def test_the_last_of_several_failures_is_raised(server, tmp_path):
    file = listed(server.base)
    for fault, kind, said, attempts in FAILURES:
        server.asked.clear()
        server.faults[NAME] = [fault] * 9
        with pytest.raises(kind, match=said) as info:
            got(file, tmp_path)
        assert server.base in str(info.value) and server.asked == [NAME] * attempts


@pytest.mark.parametrize("lie", [{"size": len(DATA) + 1}, {"md5": "0" * 32}], ids=repr)
def test_a_file_other_than_the_listed_one_is_refused(server, lie, tmp_path):
    server.lies[NAME] = lie
    with pytest.raises(FileCorrupted, match=rf"observation_ckpt.0.gz: has .*; expected {next(iter(lie.values()))}"):
        got(listed(server.base), tmp_path)


def test_stored_bytes_are_not_decoded(server, tmp_path):
    """A bucket calls a packed file an encoding of its content, which clients unpack."""
    server.headers["Content-Encoding"] = "gzip"
    assert got(listed(server.base, SMALL), tmp_path)[0] == FILES[SMALL]


def test_a_full_disk_is_not_an_error_of_the_source(server, tmp_path, monkeypatch):
    file, full = listed(server.base), mock.MagicMock()
    full.return_value.__enter__.return_value.write.side_effect = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(_remote, "open", full, raising=False)
    assert type(pytest.raises(OSError, got, file, tmp_path).value) is OSError and server.asked == [NAME]


def test_errors_are_pickled():
    for error in (SourceError("x"), FileCorrupted("x"), SpaceError(errno.ENOSPC, "x", "y")):
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is type(error) and str(back) == str(error)

"""Files of data sets over HTTP, from folders and through fsspec: whatever fails, the right bytes or an error with a name."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.client
import importlib.util
import io
import json
import os
import pickle
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf.datasets import _source
from fbuf.datasets._source import (
    Bucket,
    Entry,
    FileCorrupted,
    Folder,
    Mirror,
    Passing,
    Retry,
    SourceChanged,
    SourceError,
    SpaceError,
    check_name,
    check_space,
    connect,
    fetch,
    inside,
    missing,
    rows,
    rows_of,
)
from tests._fault_server import (
    LISTING,
    Damage,
    Drop,
    Fault,
    FaultServer,
    IgnoreRange,
    NoLength,
    Redirect,
    Replace,
    Short,
    Slow,
    Stall,
    Status,
    Truncate,
    WrongLength,
    WrongRange,
)

KINDS = ("gcs", "index", "html")  # of listings
ROOT = Path(__file__).resolve().parent.parent
RETRY = Retry(attempts=4, first=0.001, most=0.01, timeout=0.25)
ONCE = Retry(attempts=1, timeout=5.0)
FRAMES = np.random.default_rng(1).integers(0, 256, (40, 84, 84), np.uint8)
NAME = "dqn/Pong/1/replay_logs/$store$_observation_ckpt.0.gz"
SMALL = "dqn/Pong/1/replay_logs/add_count_ckpt.0.gz"


def packed(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return gzip.compress(file.getvalue(), 1)


DATA = packed(FRAMES)  # random bytes: some 280 kB, several blocks of any reader
FILES = {NAME: DATA, SMALL: packed(np.array(39))}


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[FaultServer]:
    with FaultServer(FILES, listings=(request.param,), page=1) as server:
        yield server


@pytest.fixture
def bucket() -> Iterator[FaultServer]:
    with FaultServer(FILES) as server:
        yield server


def entry_of(source: _source.Source, name: str = NAME) -> Entry:
    return next(entry for entry in source.files(name) if entry.name == name)


def through(source: _source.Source, entry: Entry) -> bytes:
    """All bytes, straight through."""
    with Passing(source, entry) as stream:
        return b"".join(iter(lambda: stream.read(10_000), b""))


def get(how: str, source: _source.Source, entry: Entry, folder: Path) -> bytes:
    if how == "stream":
        return through(source, entry)
    path = fetch(source, entry, folder / "file.gz")
    assert os.listdir(folder) == ["file.gz"]
    return path.read_bytes()


# ---------------------------------------------------------------------------------------------------------- listings


def test_files_are_listed_page_by_page(server: FaultServer) -> None:
    source = connect(server.base, retry=RETRY)
    assert [entry.name for entry in source.files("dqn/Pong/")] == sorted([NAME, SMALL])
    assert [entry.name for entry in source.files("dqn/Pong/1/replay_logs/$")] == [NAME]
    entry = entry_of(source)
    if server.listings != {"html"}:
        assert entry.size == len(DATA) and entry.md5 == hashlib.md5(DATA).digest()
    if server.listings == {"gcs"}:
        assert len(server.listed) >= 4 and entry.generation == "1"
    assert source.files("dqn/Nothing/") == []


def test_an_address_that_lists_nothing_is_an_error() -> None:
    with FaultServer(FILES, listings=()) as server, pytest.raises(SourceError, match="no listing.*404.*index.json"):
        connect(server.base, retry=RETRY).files("dqn/Nothing/")
    with FaultServer({"a/b/c/d": b"1", "a/b/c/e": b"2", "a/f": b"3"}, listings=("html",)) as server:
        source = connect(server.base, retry=RETRY)
        assert [e.name for e in source.files()] == ["a/b/c/d", "a/b/c/e", "a/f"]
        assert [e.name for e in source.files("a/b")] == ["a/b/c/d", "a/b/c/e"]
        server.pages["html"] = b"<html>hello</html>"
        with pytest.raises(SourceError, match="has no links"):
            source.files("a/")
        server.pages["html"] = b"\xff\xfe"
        with pytest.raises(SourceError, match="is no page of a folder"):
            source.files("a/")


def test_the_bucket_is_listed_as_the_public_one(bucket: FaultServer) -> None:
    source = Bucket(bucket.base, retry=RETRY)
    assert through(source, entry_of(source)) == DATA
    path = bucket.listed[0].path
    assert path.startswith("/storage/v1/b/atari-replay-datasets/o?prefix=dqn%2FPong") and "md5Hash" in path
    assert bucket.log[0].path.endswith("?alt=media&generation=1")


@pytest.mark.parametrize("fault", [Status(503, times=2), Status(429, retry_after="0"), Truncate(20), Status(500)])
def test_a_listing_that_fails_is_asked_again(bucket: FaultServer, fault: Fault) -> None:
    bucket.fault(LISTING, replace(fault))
    assert len(connect(bucket.base, retry=RETRY).files("dqn")) == 2


def test_a_listing_without_end(bucket: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fbuf.datasets._source._page.MOST", 100)
    with pytest.raises(SourceError, match="has more than 100 bytes; expected a listing"):
        connect(bucket.base, retry=RETRY).files("dqn")
    monkeypatch.undo()
    monkeypatch.setattr("fbuf.datasets._source._bucket._MOST_PAGES", 1)
    bucket.page = 1
    with pytest.raises(SourceError, match="more than 1 pages"):
        connect(bucket.base, retry=RETRY).files("dqn")


def test_a_listing_that_never_comes_is_an_error(bucket: FaultServer) -> None:
    bucket.fault(LISTING, Status(503, times=100))
    with pytest.raises(SourceError, match=r"storage/v1.*failed 4 times in a row.*503 Service Unavailable"):
        connect(bucket.base, retry=RETRY).files("dqn")
    with pytest.raises(SourceError, match="failed 4 times.*Connection refused"):
        connect("http://127.0.0.1:1", retry=RETRY).files()


def test_a_long_wait_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute in which nothing happens and nothing is said looks like a program that hangs."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.warns(UserWarning, match=r"127.0.0.1:1.*Connection refused.*trying again in \d+ s \(\d of 6\)") as told:
        with pytest.raises(SourceError, match="failed 6 times"):
            connect("http://127.0.0.1:1", retry=Retry(attempts=6, first=1.0, most=60.0)).files()
    assert len(told) == 2  # and short ones are not


HOSTILE = [
    "../x", "dqn/../../x", "/etc/passwd", "dqn//x", "dqn/./x", "a\\b", "C:x", "a\x00b", "a\nb", "", "x" * 300, "é\udc80",
    "~/x\x1b[31m", 7, None, "../", "https://x/y",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_of_a_listing_leads_out_of_a_folder(name: Any) -> None:
    with pytest.raises(SourceError, match="the listing names a file"):
        check_name(name, "http://there")
    if isinstance(name, str):
        with pytest.raises(SourceError):
            inside("/folder", name)
    body = {"gcs": {"items": [{"name": name}]}, "index": {"files": [{"name": name}]}}
    for kind, value in body.items():
        with FaultServer(listings=(kind,)) as server:
            server.pages[kind] = json.dumps(value).encode()
            with pytest.raises(SourceError):
                connect(server.base, retry=ONCE).files()


@pytest.mark.parametrize("kind", ["gcs", "index"])
def test_what_stands_for_a_folder_in_a_listing_is_no_file(kind: str) -> None:
    """Empty objects named `folder/`, which consoles and copying programs leave in buckets."""
    items = [{"name": name} for name in ("dqn/", "dqn/x/", "dqn/x/y.gz")]
    with FaultServer(listings=(kind,)) as server:
        server.pages[kind] = json.dumps({"items" if kind == "gcs" else "files": items}).encode()
        assert [entry.name for entry in connect(server.base, retry=ONCE).files("dqn/")] == ["dqn/x/y.gz"]


def test_what_stands_for_a_folder_is_no_file_of_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    from fbuf.datasets._source import Fsspec

    class System:
        def exists(self, folder: str) -> bool:
            return True

        def find(self, folder: str, detail: bool) -> dict[str, dict[str, int]]:
            return {f"{folder}/": {"size": 0}, f"{folder}/y.gz": {"size": 3}}

    monkeypatch.setattr(Fsspec, "_system", lambda self: (System(), "bucket"))
    assert [entry.name for entry in Fsspec("s3://bucket").files("dqn/x/")] == ["dqn/x/y.gz"]


@given(st.one_of(st.text("a./\\:~\0 \x1b\udc80%$", max_size=8), st.lists(st.sampled_from(["..", ".", "", "a", "/"]))))
def test_a_name_that_is_taken_stays_below_its_folder(name: str | list[str]) -> None:
    name = name if isinstance(name, str) else "/".join(name)
    try:
        path = inside("/folder", name)
    except SourceError:
        return
    assert Path(os.path.normpath(path)) == path and path.is_relative_to("/folder") and path != Path("/folder")


def test_names_of_the_data_set_and_odd_ones_are_taken(tmp_path: Path) -> None:
    odd = ["a b/c%20d+e&f#g.gz", "dqn/é/ü.gz", "x/$store$_y.gz", "-rf", "x/..y", "100%/[1]"]
    with FaultServer({name: name.encode() for name in odd}, listings=("html", "index", "gcs")) as server:
        for kind in ("gcs", "index", "html"):
            server.listings = {kind}
            source = connect(server.base, retry=RETRY)
            found = source.files()
            assert [entry.name for entry in found] == sorted(odd), kind
            for entry in found:
                assert through(source, entry) == entry.name.encode()
                assert fetch(source, entry, inside(tmp_path / kind, entry.name)).read_bytes() == entry.name.encode()
    for where in (tmp_path / "gcs", str(tmp_path / "html"), (tmp_path / "index").as_uri()):
        source = connect(where)
        assert [entry.name for entry in source.files()] == sorted(odd)
        assert all(through(source, entry) == entry.name.encode() for entry in source.files())


def _listing(server: FaultServer, value: Any) -> Any:
    server.pages["gcs"] = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Bucket(server.base, retry=ONCE).files


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"<html>log in</html>", "is no listing"),
        (b"[1, 2]", "is no listing"),
        (b"{}", "is no listing"),
        (b"[" * 100_000, "is no listing"),
        ({"kind": "storage#objects", "items": 3}, "items are no list"),
        ({"items": [3]}, "names a file 'None'"),
        ({"items": [{"name": "x", "size": "-3"}]}, "size of 'x'"),
        ({"items": [{"name": "x", "size": "9" * 30}]}, "which cannot be"),
        ({"items": [{"name": "x", "generation": "1&alt=json"}]}, "generation of 'x'"),
        ({"items": [], "nextPageToken": "again"}, "is 'again' again"),
        ({"items": [], "nextPageToken": [1]}, "next page is"),
    ],
)
def test_listings_that_are_none(bucket: FaultServer, value: Any, said: str) -> None:
    with pytest.raises(SourceError, match=said):
        _listing(bucket, value)("")


def test_hashes_that_cannot_be_read_are_none(bucket: FaultServer) -> None:
    items = [
        {"name": "a", "md5Hash": "x"},
        {"name": "b", "md5Hash": "AAAA", "crc32c": "AAAAAQ=="},
        {"name": "c", "md5Hash": 3},
    ]
    found = _listing(bucket, {"items": items})("")
    assert [(e.md5, e.crc32c, e.size) for e in found] == [(None, None, None), (None, 1, None), (None, None, None)]


@pytest.mark.parametrize(
    "files",
    [
        3,
        [3],
        [{"size": 3}],
        [{"name": "x", "size": "3"}],
        [{"name": "x", "size": -1}],
        [{"name": "x", "md5": "z" * 32}],
    ],
)
def test_an_index_that_is_none(files: Any) -> None:
    with FaultServer(listings=("index",)) as server:
        server.pages["index"] = json.dumps({"files": files}).encode()
        with pytest.raises(SourceError, match="is no index of files"):
            connect(server.base, retry=ONCE).files()


def test_pages_of_folders_point_only_below_themselves() -> None:
    links = [
        "../up.gz",
        "/abs.gz",
        "http://other/x.gz",
        "//other/x.gz",
        "a/b.gz",
        "?C=N",
        "x.gz?y",
        "#top",
        "..",
        "./",
        "",
    ]
    links += ["javascript:x", "good.gz", "./fine.gz"]
    page = "".join(f'<a href="{link}">x</a>' for link in links).encode() + b'<a name="no">x</a>'
    with FaultServer(listings=("html",)) as server:
        server.pages["html"] = page
        assert [e.name for e in connect(server.base, retry=ONCE).files("dqn/")] == ["dqn/fine.gz", "dqn/good.gz"]
        server.pages["html"] = page + b'<a href="%2e%2e/">x</a>'
        with pytest.raises(SourceError):
            connect(server.base, retry=ONCE).files("dqn/")
        server.pages["html"] = b'<a href="deeper/">x</a>'
        with pytest.raises(SourceError, match="too many folders"):
            connect(server.base, retry=ONCE).files("dqn/")


def test_what_source_takes(tmp_path: Path) -> None:
    assert connect() == Bucket("https://storage.googleapis.com", "atari-replay-datasets")
    assert connect("gs://other") == Bucket(bucket="other")
    assert connect("https://host/folder/") == Mirror("https://host/folder")
    assert connect("file:///a%20b") == Folder("/a b") == connect(Path("/a b"))
    assert connect(Folder("x")) == Folder("x")
    for wrong in (
        "https://user:word@host",
        "https://",
        "http://host/?x",
        "file://other/x",
        "gs://",
        "gs://bucket/folder",
    ):
        with pytest.raises(ValueError, match="source='.*expected"):
            connect(wrong)
    with pytest.raises(TypeError, match="source= is int"):
        connect(3)  # type: ignore[arg-type]
    with pytest.raises(SourceError, match="no such folder"):
        connect(tmp_path / "none").files()
    for values in ({"attempts": 0}, {"first": 2.0, "most": 1.0}, {"timeout": 0}):
        with pytest.raises(ValueError, match="Retry: got"):
            Retry(**values)


# ---------------------------------------------------------------------------------------------------- faults on the way

FORGIVEN: dict[str, list[Fault]] = {
    "nothing": [],
    "dropped at once": [Drop(0)],
    "dropped": [Drop(100_000), Drop(1)],
    "dropped often": [Drop(70_000, times=3)],
    "cut short": [Truncate(123_456)],
    "503": [Status(503, times=3)],
    "429 with a wait": [Status(429, retry_after="0")],
    "503 with a date": [Status(503, retry_after="Sat, 21 Nov 2020 10:00:00 GMT")],
    "503 with nonsense": [Status(503, retry_after="soon")],
    "stalled": [Stall(50_000)],
    "stalled at once": [Stall()],
    "slow": [Slow(0.002, 30_000)],
    "too long": [WrongLength(100)],
    "too short": [WrongLength(-100)],
    "no ranges": [Drop(100_000), IgnoreRange()],
    "no ranges, dropped again": [Drop(100_000), replace(Drop(50_000)), IgnoreRange()],
    "another range": [Drop(100_000), WrongRange()],
    "redirected": [Redirect()],
    "redirected after a drop": [Drop(100_000), Redirect(code=307)],
    "no length": [NoLength()],
    "in chunks": [NoLength(chunked=True)],
    "in chunks, cut short": [NoLength(chunked=True, after=150_000)],
    "no length after a drop": [Drop(100_000), NoLength()],
    "502, 504": [Status(502), Status(504)],
}


CASES = [
    pytest.param(kind, faults, how, marks=[pytest.mark.slow] if (one + two + three) % 3 else [])
    for one, faults in enumerate(FORGIVEN)
    for two, how in enumerate(("stream", "fetch"))
    for three, kind in enumerate(KINDS)
    if not (faults.startswith("too ") and kind == "html")  # nobody says how long it is but the answer that lies
]


@pytest.mark.parametrize(("kind", "faults", "how"), CASES)
def test_faults_that_pass(kind: str, faults: str, how: str, tmp_path: Path) -> None:
    with FaultServer(FILES, listings=(kind,)) as server:
        source = connect(server.base, retry=RETRY)
        entry = entry_of(source)
        server.fault(NAME, *map(replace, FORGIVEN[faults]))
        assert get(how, source, entry, tmp_path) == DATA


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Status(404), "404 Not Found. It is not there, or no longer: list again"),
        (Status(403), "403 Forbidden. It is not public"),
        (Status(418), "answered 418"),
        (Status(203), "answered 203; expected 200 or 206"),
        (Status(503), "failed twice in a row; the last time: the server answered 503"),
        (Status(503, retry_after="3600"), "asks to come back in 3600 s"),
        (Drop(0), "failed twice in a row; the last time:"),
        (Drop(100), "failed twice in a row; the last time:"),
        (Truncate(100), "the connection ended at byte"),
        (Stall(), "nothing came within the timeout"),
        (WrongLength(7), f"{len(DATA) + 7} bytes; expected {len(DATA)}"),
        (Short(1000), f"says that it has 1000 bytes; expected {len(DATA)}"),
        (Redirect("file:///etc/passwd"), "302 Found - Redirection to url 'file:///etc/passwd' is not allowed"),
        (Redirect("ftp://127.0.0.1/x"), "redirects to 'ftp:"),
        (Redirect("http://127.0.0.1:1/x"), "Connection refused"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, Fault) else "",
)
def test_faults_that_stay_are_errors_that_name_the_address(fault: Fault, said: str, tmp_path: Path) -> None:
    with FaultServer(FILES, listings=("index",)) as server:
        source = connect(server.base, retry=replace(RETRY, attempts=2))
        entry = entry_of(source)
        server.fault(NAME, replace(fault, times=1000))
        for how in ("stream", "fetch"):
            with pytest.raises(SourceError) as info:
                get(how, source, entry, tmp_path)
            assert said in str(info.value) and server.base in str(info.value)
            assert not (tmp_path / "file.gz").exists()


def test_what_no_other_try_would_change_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from fbuf.datasets._source import _web

    problems: list[tuple[Exception, str]] = [
        (
            urllib.error.URLError(ssl.SSLCertVerificationError(1, "self-signed")),
            "certificate does not verify.*self-signed",
        ),
        (urllib.error.URLError(socket.gaierror(socket.EAI_NONAME, "unknown")), "there is no such host"),
        (http.client.InvalidURL("a blank"), "no address that can be asked .a blank"),
        (_web.Refused("https://x: redirected"), "https://x: redirected"),
    ]
    for problem, said in problems:
        asked: list[str] = []

        class Opener:
            def open(
                self, request: Any, timeout: float, asked: list[str] = asked, problem: Exception = problem
            ) -> None:
                asked.append(request.full_url)
                raise problem

        monkeypatch.setattr(_web, "_opener", Opener)
        with pytest.raises(SourceError, match=said):
            through(Mirror("https://x", retry=RETRY), Entry("y", "https://x/y"))
        assert asked == ["https://x/y"]
    monkeypatch.undo()
    redirects, body = _web._Redirects(), io.BytesIO()
    for old, new, fine in [
        ("https", "https", True),
        ("http", "https", True),
        ("http", "http", True),
        ("https", "http", False),
    ]:
        request = urllib.request.Request(f"{old}://x/y", headers={"Range": "bytes=3-"})
        if fine:
            after = redirects.redirect_request(request, body, 302, "Found", {}, f"{new}://z/y")
            assert (after.full_url, after.get_header("Range")) == (f"{new}://z/y", "bytes=3-")
        else:
            with pytest.raises(SourceError, match="expected an address as safe"):
                redirects.redirect_request(request, body, 302, "Found", {}, f"{new}://z/y")
            assert body.closed


def test_a_server_that_redirects_in_circles(bucket: FaultServer) -> None:
    source = connect(bucket.base, retry=RETRY)
    entry = entry_of(source)
    bucket.fault(NAME, Redirect(times=100))
    with pytest.raises(SourceError, match="302"):
        through(source, entry)
    assert len(bucket.log) < 20


def test_a_file_that_changed_on_the_way_is_never_joined_with_the_other(tmp_path: Path) -> None:
    """Of the same length, so that only the ETag tells. Streams say so; a file on the disk is fetched anew."""
    other = bytes(reversed(DATA))
    with FaultServer(FILES, listings=("html",)) as server:
        source = connect(server.base, retry=RETRY)
        entry = entry_of(source)
        server.fault(NAME, Replace(100_000, other))
        with pytest.raises(SourceChanged, match="at byte 100000 the server has"):
            through(source, entry)
        server.fault(NAME, Replace(100_000, DATA))
        assert get("fetch", source, entry, tmp_path) == DATA
        server.fault(NAME, Replace(100_000, other), Fault(), Replace(100_000, DATA))
        with pytest.raises(SourceChanged):
            fetch(source, entry, tmp_path / "1" / "file.gz")
        assert os.listdir(tmp_path / "1") == []
    with FaultServer(FILES, listings=("index",)) as server:
        source = connect(server.base, retry=RETRY)
        entry = entry_of(source)
        server.fault(NAME, Replace(100_000, other))
        with pytest.raises(FileCorrupted, match="has md5 .*; expected .*, as listed"):
            get("fetch", source, entry, tmp_path / "2")
        assert os.listdir(tmp_path / "2") == []
    with FaultServer(FILES) as server:
        source = connect(server.base, retry=RETRY)
        entry = entry_of(source)
        server.fault(NAME, Replace(100_000, other))
        with pytest.raises(SourceError, match="404.*list again"):
            through(source, entry)


def test_a_file_that_became_shorter_or_longer(tmp_path: Path) -> None:
    for other in (DATA[:50_000], DATA[:100_000], DATA + b"more"):
        with FaultServer(FILES, listings=("html",)) as server:
            source = connect(server.base, retry=RETRY)
            entry = entry_of(source)
            server.fault(NAME, Replace(100_000, other))
            with pytest.raises(SourceError):
                through(source, entry)
    with FaultServer(FILES, listings=("html",), validators=False) as server:
        source = connect(server.base, retry=RETRY)
        server.fault(NAME, Replace(100_000, DATA[:50_000]))
        with pytest.raises(SourceChanged, match="asked for byte 100000, the server has 50000"):
            through(source, entry_of(source))


def test_servers_that_know_no_ranges_or_say_nothing_of_the_file(tmp_path: Path) -> None:
    for number, (ranges, validators) in enumerate([(False, True), (True, False), (False, False)]):
        with FaultServer(FILES, ranges=ranges, validators=validators) as server:
            source = connect(server.base, retry=RETRY)
            entry = entry_of(source)
            for how in ("stream", "fetch"):
                server.fault(NAME, Drop(100_000), Drop(150_000))
                assert get(how, source, entry, tmp_path / str(number)) == DATA


@pytest.mark.parametrize("how", ["stream", "fetch"])
def test_what_is_not_what_was_listed(how: str, tmp_path: Path) -> None:
    lies = [
        {"md5Hash": base64.b64encode(bytes(16)).decode()},
        {"size": str(len(DATA) - 1)},
        {"size": str(len(DATA) + 1)},
    ]
    for number, lie in enumerate(lies):
        with FaultServer(FILES) as server:
            server.files[NAME].lies = lie
            source = connect(server.base, retry=RETRY)
            entry = entry_of(source)
            (tmp_path / str(number)).mkdir()
            with pytest.raises(FileCorrupted if "md5Hash" in lie else SourceError, match="expected"):
                get(how, source, entry, tmp_path / str(number))
            assert "file.gz" not in os.listdir(tmp_path / str(number))


def test_a_byte_damaged_on_the_way_is_noticed_and_fetched_again(server: FaultServer, tmp_path: Path) -> None:
    source = connect(server.base, retry=RETRY)
    entry = entry_of(source)
    server.fault(NAME, Damage(200_000))
    with pytest.raises(FileCorrupted, match=r"observation_ckpt\.0\.gz"):
        with rows(source, entry, item=(84, 84)) as stream:
            list(stream.blocks(10))
    server.fault(NAME, Damage(200_000))
    path = fetch(source, entry, tmp_path / "file.gz")
    if entry.md5 is None:  # nobody said what it should be: gzip does, when it is parsed
        with pytest.raises(FileCorrupted), rows_of(path, item=(84, 84)) as stream:
            list(stream.blocks(10))
    else:
        assert path.read_bytes() == DATA


def test_crc32c_is_used_where_there_is_no_md5(tmp_path: Path) -> None:
    crc32c = pytest.importorskip("google_crc32c")
    good = base64.b64encode(crc32c.value(DATA).to_bytes(4, "big")).decode()
    with FaultServer(FILES) as server:
        source = connect(server.base, retry=RETRY)
        server.files[NAME].lies = {"md5Hash": None, "crc32c": good}
        assert get("fetch", source, entry_of(source), tmp_path) == DATA
        server.files[NAME].lies = {"md5Hash": None, "crc32c": "AAAAAA=="}
        with pytest.raises(FileCorrupted, match="has crc32c"):
            through(source, entry_of(source))


def test_rows_come_straight_through_and_progress_is_told(server: FaultServer) -> None:
    source = connect(server.base, retry=RETRY)
    seen: list[tuple[int, int | None]] = []
    server.fault(NAME, Drop(100_000), Drop(90_000))
    with rows(source, entry_of(source), item=(84, 84), dtype="uint8", progress=lambda *at: seen.append(at)) as stream:
        np.testing.assert_array_equal(np.concatenate(list(stream.blocks(7))), FRAMES)
    assert seen[-1] == (len(DATA), len(DATA)) and [a for a, _ in seen] == sorted(a for a, _ in seen)
    assert server.sent(NAME) <= len(DATA) + 8  # nothing was asked for twice
    with rows(source, entry_of(source, SMALL)) as stream:
        assert stream.array() == 39


some_faults = st.lists(
    st.one_of(
        st.builds(Drop, st.integers(0, 300_000)),
        st.builds(Truncate, st.integers(0, 300_000)),
        st.builds(Short, st.integers(0, 300_000)),
        st.builds(WrongLength, st.integers(-1000, 1000)),
        st.builds(WrongRange, st.integers(0, 1000)),
        st.builds(Damage, st.integers(0, 300_000)),
        st.builds(NoLength, st.booleans(), st.none() | st.integers(0, 300_000)),
        st.builds(Status, st.sampled_from([404, 429, 500, 503])),
        st.builds(Replace, st.integers(0, 300_000), st.sampled_from([DATA[:1000], bytes(len(DATA))])),
        st.just(Redirect()),
        st.just(IgnoreRange()),
    ),
    max_size=8,
)


@given(
    faults=some_faults,
    listing=st.sampled_from(KINDS),
    validators=st.booleans(),
    how=st.sampled_from(["stream", "fetch"]),
)
def test_whatever_fails_the_rows_are_right_or_there_is_an_error(
    faults: list[Fault], listing: str, validators: bool, how: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("any") / "file.gz"
    with FaultServer(FILES, listings=(listing,), validators=validators) as server:
        source = connect(server.base, retry=replace(RETRY, first=0.0, most=0.0))
        entry = entry_of(source)
        server.fault(NAME, *map(replace, faults))
        try:
            if how == "fetch":
                fetch(source, entry, path)
                assert entry.md5 is None or path.read_bytes() == DATA
            with rows_of(path) if how == "fetch" else rows(source, entry) as stream:
                got = np.concatenate(list(stream.blocks(11)))
        except (SourceError, FileCorrupted) as error:
            assert NAME.rsplit("$", 1)[1] in str(error) or str(path) in str(error)
            return
        np.testing.assert_array_equal(got, FRAMES)


# --------------------------------------------------------------------------------------------------------------- resume


def test_what_arrived_is_not_asked_for_again(server: FaultServer, tmp_path: Path) -> None:
    entry = entry_of(connect(server.base, retry=RETRY))
    path = tmp_path / "deep" / "er" / "file.gz"
    for _ in range(2):
        server.fault(NAME, Drop(100_000))
        with pytest.raises(SourceError, match="what is on the disk is kept"):
            fetch(connect(server.base, retry=ONCE), entry, path)
    assert not path.exists()
    seen: list[tuple[int, int | None]] = []
    fetch(connect(server.base, retry=ONCE), entry, path, progress=lambda *at: seen.append(at))
    assert path.read_bytes() == DATA and server.sent(NAME) == len(DATA)
    assert [r.range for r in server.log] == [None, "bytes=100000-", "bytes=200000-"]
    assert {r.if_range for r in server.log[1:]} == {server.files[NAME].etag}
    assert seen[0][0] > 200_000 and seen[-1] == (len(DATA), len(DATA))
    fetch(connect(server.base, retry=ONCE), entry, path)
    assert server.sent(NAME) == len(DATA) and len(server.log) == 3


def test_a_process_killed_while_it_fetches_is_resumed_at_its_last_byte(tmp_path: Path) -> None:
    path, part = tmp_path / "file.gz", tmp_path / "file.gz.part"
    with FaultServer(FILES) as server:
        kept = 0
        for _ in range(2):
            server.fault(NAME, Slow(0.01, 2000))
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.fetcher", "fetch", server.base, NAME, str(path)],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip
            until = time.monotonic() + 30
            while not (part.exists() and part.stat().st_size > kept + 20_000) and time.monotonic() < until:
                time.sleep(0.005)
            child.send_signal(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
            kept = part.stat().st_size
        assert 40_000 < kept < len(DATA) and not path.exists()
        before = len(server.log)
        source = connect(server.base, retry=ONCE)
        fetch(source, entry_of(source), path)
        assert [r.range for r in server.log[before:]] == [f"bytes={kept}-"]
        assert server.log[before].sent == len(DATA) - kept
    assert path.read_bytes() == DATA and os.listdir(tmp_path) == ["file.gz"]


def interrupted(server: FaultServer, path: Path, at: int = 100_000) -> Entry:
    """A part of a file, left behind."""
    source = connect(server.base, retry=ONCE)
    entry = entry_of(source)
    server.fault(NAME, Drop(at))
    with pytest.raises(SourceError):
        fetch(source, entry, path)
    return entry


@pytest.mark.parametrize(
    "damage", ["bytes", "zeros", "longer", "no description", "description", "other identity", "empty"]
)
def test_a_part_that_cannot_be_trusted_is_thrown_away(server: FaultServer, damage: str, tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    part, about = tmp_path / "file.gz.part", tmp_path / "file.gz.part.json"
    entry = interrupted(server, path)
    data = bytearray(part.read_bytes())
    if damage == "bytes":
        data[500] ^= 1
    elif damage == "zeros":  # after a failure of power
        data[-5000:] = bytes(5000)
    elif damage == "longer":
        data += bytes(len(DATA))
    elif damage == "empty":
        data.clear()
    part.write_bytes(data)
    if damage == "no description":
        about.unlink()
    elif damage == "description":
        about.write_text("{" * 10_000)
    elif damage == "other identity":
        about.write_text(json.dumps({**json.loads(about.read_text()), "identity": "other"}))
    source = connect(server.base, retry=ONCE)
    fetch(source, entry, path)
    if entry.md5 is None and damage in ("bytes", "zeros"):
        with pytest.raises(FileCorrupted), rows_of(path) as stream:
            list(stream.blocks(10))
    else:
        assert path.read_bytes() == DATA and os.listdir(tmp_path) == ["file.gz"]


def test_a_part_of_a_file_that_changed_since_is_thrown_away(server: FaultServer, tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    interrupted(server, path)
    other = packed(FRAMES[::-1])
    server.replace(NAME, other)
    source = connect(server.base, retry=ONCE)
    fetch(source, entry_of(source), path)
    assert path.read_bytes() == other


def test_generations_tell_files_apart_where_no_hash_is_listed(bucket: FaultServer, tmp_path: Path) -> None:
    path, other = tmp_path / "file.gz", bytes(reversed(DATA))
    bucket.files[NAME].lies = {"md5Hash": None}
    interrupted(bucket, path)
    bucket.replace(NAME, other)
    bucket.files[NAME].lies = {"md5Hash": None}
    source = connect(bucket.base, retry=ONCE)
    fetch(source, entry_of(source), path)
    assert path.read_bytes() == other


def test_an_etag_that_says_the_same_but_not_the_same_bytes_is_not_one(bucket: FaultServer) -> None:
    bucket.files[NAME].etag = 'W/"weak"'
    bucket.fault(NAME, Drop(100_000))
    source = connect(bucket.base, retry=RETRY)
    assert through(source, entry_of(source)) == DATA
    assert [r.if_range for r in bucket.log] == [None, "Sat, 21 Nov 2020 10:00:00 GMT"]


def test_another_mirror_goes_on_where_the_hash_is_known(tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    for listing in ("index", "html"):
        with FaultServer(FILES, listings=(listing,)) as server:
            interrupted(server, path)
        with FaultServer(FILES, listings=(listing,)) as server:
            server.files[NAME].etag = '"its own"'
            source = connect(server.base, retry=ONCE)
            fetch(source, entry_of(source), path)
            assert [r.range for r in server.log] == (["bytes=100000-"] if listing == "index" else [None])
            assert path.read_bytes() == DATA
        path.unlink()


def test_a_part_that_is_whole_already(server: FaultServer, tmp_path: Path) -> None:
    """Killed between the last byte and the name."""
    path = tmp_path / "file.gz"
    entry = interrupted(server, path)
    (tmp_path / "file.gz.part").write_bytes(DATA)
    source = connect(server.base, retry=ONCE)
    before = server.sent()
    fetch(source, entry, path)
    assert path.read_bytes() == DATA and server.sent() == before


def test_a_file_that_is_there_is_kept_if_it_is_right(server: FaultServer, tmp_path: Path) -> None:
    path = tmp_path / "file.gz"
    source = connect(server.base, retry=ONCE)
    entry = entry_of(source)
    path.write_bytes(DATA)
    fetch(source, entry, path)
    assert not server.log and os.listdir(tmp_path) == ["file.gz"]
    if entry.md5 is not None:
        path.write_bytes(bytes(len(DATA)))
        fetch(source, entry, path)
        assert path.read_bytes() == DATA


def test_two_do_not_fetch_one_file_at_once(bucket: FaultServer, tmp_path: Path) -> None:
    from fbuf.datasets._source._fetch import _locked

    source = connect(bucket.base, retry=ONCE)
    with _locked(tmp_path / "file.gz"), pytest.raises(SourceError, match="another process is fetching"):
        fetch(source, entry_of(source), tmp_path / "file.gz")
    fetch(source, entry_of(source), tmp_path / "file.gz")


def test_a_link_in_the_place_of_a_part_is_not_followed(bucket: FaultServer, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "file.gz.part").symlink_to(tmp_path / "precious")
    source = connect(bucket.base, retry=ONCE)
    with pytest.raises(OSError):
        fetch(source, entry_of(source), tmp_path / "file.gz")
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_full_disk(bucket: FaultServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = connect(bucket.base, retry=ONCE)
    entry, path = entry_of(source), tmp_path / "file.gz"
    real, left = os.pwrite, [100_000]

    def full(fd: int, data: Any, at: int) -> int:
        if not left[0]:
            raise OSError(28, "No space left on device")
        done = real(fd, memoryview(data)[: left[0]], at)
        left[0] -= done
        return done

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SpaceError, match=r"file\.gz: the disk is full.*what arrived is kept"):
        fetch(source, entry, path)
    monkeypatch.undo()
    fetch(source, entry, path)
    assert path.read_bytes() == DATA and bucket.log[-1].range == "bytes=100000-"


# ------------------------------------------------------------------------------------------- folders, fsspec, the rest


def test_a_folder_is_a_source(tmp_path: Path) -> None:
    for name, data in FILES.items():
        inside(tmp_path, name).parent.mkdir(parents=True, exist_ok=True)
        inside(tmp_path, name).write_bytes(data)
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    (tmp_path / "dqn/half.gz.part").write_bytes(b"x")
    (tmp_path / "dqn/notes: mine").write_bytes(b"x")
    for where in (tmp_path, str(tmp_path), tmp_path.as_uri()):
        source = connect(where)
        assert [e.name for e in source.files("dqn/")] == sorted(FILES)
        assert source.files("dqn/None/") == []
        entry = entry_of(source)
        assert entry.size == len(DATA)
        with rows(source, entry, item=(84, 84)) as stream:
            np.testing.assert_array_equal(np.concatenate(list(stream.blocks(7))), FRAMES)
        assert get("fetch", source, entry, tmp_path / "out") == DATA
        (tmp_path / "out" / "file.gz").unlink()
    with pytest.raises(SourceError, match="cannot be opened"):
        rows_of(tmp_path / "none")
    with pytest.raises(SourceError, match="no plain file"):
        rows_of(tmp_path / "pipe")
    with pytest.raises(SourceError):
        source.files("../")


def test_a_file_of_a_folder_that_is_written_again(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    source = connect(tmp_path)
    (entry,) = source.files()
    first = source.stream(entry)
    assert source.stream(entry, 10, first.validator).read(5) == DATA[10:15]
    (tmp_path / "x").write_bytes(DATA + b"more")
    with pytest.raises(SourceChanged, match="written again"):
        source.stream(entry, 10, first.validator)
    with pytest.raises(FileCorrupted, match=f"has {len(DATA) + 4} bytes; expected {len(DATA)}"):
        through(source, entry)


@pytest.mark.skipif(importlib.util.find_spec("fsspec") is None, reason="needs fsspec")
def test_whatever_fsspec_knows_is_a_source(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name, data in FILES.items():
        memory.pipe(f"/mirror/{name}", data)
    source = connect("memory://mirror")
    assert [e.name for e in source.files("dqn/Pong/1/")] == sorted(FILES)
    assert source.files("dqn/None/") == []
    with rows(source, entry_of(source), item=(84, 84)) as stream:
        np.testing.assert_array_equal(np.concatenate(list(stream.blocks(7))), FRAMES)
    assert get("fetch", source, entry_of(source), tmp_path) == DATA
    memory.rm("/mirror", recursive=True)
    with pytest.raises(SourceError, match="cannot be opened"):
        source.stream(Entry(NAME, f"/mirror/{NAME}"))
    with pytest.raises(SourceError, match="does not know such an address"):
        connect("nonsense://x").files()


def test_without_fsspec_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        ImportError, match=r"source='s3://x': fsspec reads 's3://' and is not installed.*pip install fsspec"
    ):
        connect("s3://x").files()


def test_space_is_asked_for_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "not" / "there"
    assert check_space(path, 1, "Pong/1") > 0
    with pytest.raises(
        SpaceError, match=r"Pong/1 needs 1000.0 TB on the disk of .*, which has .* free; nothing was begun"
    ):
        check_space(path, 10**15, "Pong/1")
    assert not path.parent.exists()
    (tmp_path / "a").write_bytes(bytes(10))
    (tmp_path / "b.part").write_bytes(bytes(3))
    assert missing({tmp_path / "a": 10, tmp_path / "b": 10, str(tmp_path / "c"): 10}) == 17
    assert [_source.size_text(n) for n in (7, 7e4, 7.06e9, 353e9, 2e15)] == [
        "7 bytes", "70.0 kB", "7.1 GB", "353.0 GB", "2000.0 TB"
    ]  # fmt: skip


def test_sources_entries_and_errors_cross_processes() -> None:
    values: list[Any] = [
        connect(),
        connect("http://x/y", retry=RETRY),
        Folder("x"),
        connect("s3://x"),
        Entry("a", "b", 3, bytes(16)),
    ]
    for value in values:
        assert pickle.loads(pickle.dumps(value)) == value and hash(value) == hash(pickle.loads(pickle.dumps(value)))
    corrupted = pickle.loads(pickle.dumps(FileCorrupted("x", file="f", at=3)))
    assert (str(corrupted), corrupted.file, corrupted.at) == ("x", "f", 3)
    for kind in (SourceError, SourceChanged, SpaceError):
        assert str(pickle.loads(pickle.dumps(kind("x")))) == "x"


@pytest.mark.filterwarnings("ignore:there")
def test_waits_double_with_chance_and_leave_the_users_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from fbuf.datasets._source._retry import Again, Tries

    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    before = random.getstate()
    tries = Tries(Retry(attempts=9, first=0.5, most=8.0), "there")
    for _ in range(8):
        tries.failed(Again("no"))
    for wait, most in zip(waits, [0.5, 1, 2, 4, 8, 8, 8, 8], strict=True):
        assert most / 2 <= wait <= most
    assert len(set(waits)) == 8 and random.getstate() == before
    with pytest.raises(SourceError, match="there: failed 9 times in a row; the last time: no"):
        tries.failed(Again("no"))
    tries = Tries(Retry(attempts=2), "there")
    for _ in range(50):  # as long as enough arrives in between
        tries.failed(Again("no"))
        tries.gained(1 << 16)
    waits.clear()
    Tries(Retry(), "there").failed(Again("busy", wait=30.0))
    assert waits == [30.0]

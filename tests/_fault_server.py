"""A server of files over HTTP that fails as told, for tests of what downloads: nothing here imports pytest or fbuf.

Serves each file under three addresses, `/<name>` (a mirror), `/<bucket>/<name>` and the bucket's JSON API
(`/storage/v1/b/<bucket>/o/<quoted name>?alt=media`), with Range, If-Range, ETag and Last-Modified, on a thread a connection;
lists them as the JSON API does, page by page, as `index.json` and as HTML. Each request for a name takes the first fault
that waits for that name. What was asked and how many bytes were sent is in `log`.

    with FaultServer({"dqn/Pong/1/replay_logs/add_count_ckpt.0.gz": data}) as server:
        server.fault("dqn/Pong/1/replay_logs/add_count_ckpt.0.gz", Status(503, times=2), Drop(after=1000))
        download(server.base)
        assert [request.range for request in server.log] == [None, None, None, "bytes=1000-"]
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

BUCKET = "atari-replay-datasets"
LISTING = "listing"
"""The name whose faults requests for a listing take."""
_BLOCK = 1 << 16


@dataclass
class Fault:
    """What goes wrong with `times` requests, one after the other; this one: nothing."""

    times: int = field(default=1, kw_only=True)


@dataclass
class Drop(Fault):
    """The connection is reset `after` bytes of the answer's body."""

    after: int


@dataclass
class Truncate(Fault):
    """The connection is closed in order `after` bytes, though Content-Length said more."""

    after: int


@dataclass
class Short(Fault):
    """A whole answer by its own headers, with only `after` bytes: Content-Length lies with it."""

    after: int


@dataclass
class Status(Fault):
    """An answer without a file."""

    code: int
    retry_after: str | None = None


@dataclass
class Slow(Fault):
    """Sends `block` bytes, waits, and so on."""

    wait: float
    block: int = 1024


@dataclass
class Stall(Fault):
    """Sends nothing more `after` bytes, and keeps the connection, until the server is closed."""

    after: int = 0


@dataclass
class WrongLength(Fault):
    """Content-Length is `by` more than it is; the connection is then closed."""

    by: int


@dataclass
class NoLength(Fault):
    """No Content-Length: the body ends with the connection, or is sent in chunks; `after` bytes it is cut short."""

    chunked: bool = False
    after: int | None = None


@dataclass
class WrongRange(Fault):
    """Content-Range says it begins `by` bytes later than asked, and so it does."""

    by: int = 1


@dataclass
class IgnoreRange(Fault):
    """200 with the whole file, whatever part was asked for."""


@dataclass
class Replace(Fault):
    """The connection is reset `after` bytes, and from then on the file is `data`, of another ETag and generation."""

    after: int
    data: bytes


@dataclass
class Damage(Fault):
    """The byte `at` of the file is another one."""

    at: int


@dataclass
class Redirect(Fault):
    """An answer that points to another address of the same file; `to`: or to any."""

    to: str | None = None
    code: int = 302


@dataclass
class Request:
    """What was asked. `sent`: bytes of the body so far; `begin`: the first one's place in the file."""

    method: str
    path: str
    name: str
    range: str | None
    if_range: str | None
    status: int = 0
    begin: int = 0
    sent: int = 0


@dataclass
class Served:
    """A file; `lies` replaces keys of its entry in listings: `{"md5Hash": ..., "size": "7"}`; None removes one."""

    data: bytes | Path
    generation: int = 1
    etag: str | None = None
    lies: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.size = self.data.stat().st_size if isinstance(self.data, Path) else len(self.data)
        self.md5 = self._md5()
        self.etag = self.etag if self.etag is not None else f'"{self.md5.hex()}-{self.generation}"'

    def _md5(self) -> bytes:
        digest = hashlib.md5()
        for begin in range(0, self.size, 1 << 20):
            digest.update(self.read(begin, 1 << 20))
        return digest.digest()

    def read(self, at: int, size: int) -> bytes:
        """Bytes from `at` on."""
        if isinstance(self.data, bytes):
            return self.data[at : at + size]
        with self.data.open("rb") as file:
            file.seek(at)
            return file.read(size)

    def item(self, name: str, bucket: str) -> dict[str, Any]:
        """As the JSON API lists it."""
        item = {
            "kind": "storage#object",
            "name": name,
            "bucket": bucket,
            "size": str(self.size),
            "md5Hash": base64.b64encode(self.md5).decode(),
            "generation": str(self.generation),
        }
        return {k: v for k, v in {**item, **self.lies}.items() if v is not None}


class FaultServer:
    """Serves `files` from when it is made until it is closed.

    Args:
      files: Name -> bytes, or the path of a file.
      page: Entries of one page of a listing.
      listings: Those that there are: "gcs", "index" (`/index.json`), "html".
      validators: ETag, Last-Modified and generation headers; without them no answer says which file it is of.
      ranges: Whether parts of files can be asked for at all.
    Attributes:
      log: Requests for files, oldest first. `listed`: those for listings.
      pages: What is answered for a kind of listing whatever was asked: `{"gcs": b"..."}`.
    """

    def __init__(
        self,
        files: Mapping[str, bytes | Path] | None = None,
        *,
        bucket: str = BUCKET,
        page: int = 1000,
        listings: Iterable[str] = ("gcs",),
        validators: bool = True,
        ranges: bool = True,
    ) -> None:
        self.files = {name: Served(data) for name, data in (files or {}).items()}
        self.bucket, self.page, self.listings = bucket, page, set(listings)
        self.validators, self.ranges = validators, ranges
        self.log: list[Request] = []
        self.listed: list[Request] = []
        self.pages: dict[str, bytes] = {}
        self.closing = threading.Event()
        self._faults: dict[str, list[Fault]] = {}
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"server_of_faults": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        os.environ.setdefault("no_proxy", "127.0.0.1")  # no proxy of this machine's stands between
        self.base = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.005,), daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, folder: Path | str, **options: Any) -> FaultServer:
        """Serves what lies in a folder."""
        root = Path(folder)
        files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
        return cls(files, **options)

    def fault(self, name: str, *faults: Fault) -> None:
        """From now on requests for `name` take these, in order, after those that wait already."""
        with self._lock:
            self._faults.setdefault(name, []).extend(faults)

    def replace(self, name: str, data: bytes | Path) -> None:
        """Another file of the same name, with a new ETag and generation."""
        with self._lock:
            before = self.files.get(name)
            self.files[name] = Served(data, 1 + (before.generation if before else 0))

    def sent(self, name: str | None = None) -> int:
        """Bytes of bodies sent for a name, or for all."""
        return sum(request.sent for request in self.log if name in (None, request.name))

    def take(self, name: str) -> Fault | None:
        """The fault of this request."""
        with self._lock:
            waiting = self._faults.get(name)
            if not waiting:
                return None
            fault = waiting[0]
            fault.times -= 1
            if fault.times <= 0:
                waiting.pop(0)
            return fault

    def close(self) -> None:
        """Ends it, and answers that stall."""
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> FaultServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    server_of_faults: FaultServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server, parts = self.server_of_faults, urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        objects = f"/storage/v1/b/{server.bucket}/o"
        name = unquote(parts.path).lstrip("/")
        if parts.path == objects:
            return self._listed("gcs", query)
        if parts.path.startswith(objects + "/"):
            name = unquote(parts.path.removeprefix(objects + "/"))
        elif name not in server.files and name.startswith(server.bucket + "/"):
            name = name.removeprefix(server.bucket + "/")
        elif name not in server.files and name == "index.json":
            return self._listed("index", query)
        elif name not in server.files and (name == "" or name.endswith("/")):
            return self._listed("html", query, name)
        request = Request(self.command, self.path, name, self.headers.get("Range"), self.headers.get("If-Range"))
        server.log.append(request)
        file = server.files.get(name)
        generation = query.get("generation")
        if file is None or (generation is not None and generation != str(file.generation)):
            return self._say(request, 404, b"no such file")
        self._serve(request, file, server.take(name))

    def _serve(self, request: Request, file: Served, fault: Fault | None) -> None:
        server = self.server_of_faults
        if isinstance(fault, Status):
            headers = {} if fault.retry_after is None else {"Retry-After": fault.retry_after}
            return self._say(request, fault.code, b"not now", headers)
        if isinstance(fault, Redirect):
            to = fault.to if fault.to is not None else f"/{server.bucket}/{quote(request.name)}"
            return self._say(request, fault.code, b"", {"Location": to})
        begin, stop, status = 0, file.size, 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.range or "")
        current = not request.if_range or (server.validators and request.if_range in (file.etag, _DATE))
        if asked and server.ranges and current and not isinstance(fault, IgnoreRange):
            begin = int(asked[1])
            stop = min(file.size, int(asked[2]) + 1) if asked[2] else file.size
            if begin >= file.size:
                return self._say(request, 416, b"", {"Content-Range": f"bytes */{file.size}"})
            status = 206
            if isinstance(fault, WrongRange):
                begin = min(begin + fault.by, file.size)
        headers = {"Content-Type": "application/octet-stream"}
        if server.ranges:
            headers["Accept-Ranges"] = "bytes"
        if server.validators:
            headers |= {"ETag": str(file.etag), "Last-Modified": _DATE, "x-goog-generation": str(file.generation)}
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{stop - 1}/{file.size}"
        length = stop - begin
        if isinstance(fault, Short):
            length = stop = min(fault.after, length)
            stop += begin
        if not isinstance(fault, NoLength):
            headers["Content-Length"] = str(length + (fault.by if isinstance(fault, WrongLength) else 0))
        elif fault.chunked:
            headers["Transfer-Encoding"] = "chunked"
        else:
            headers["Connection"] = "close"
        request.status, request.begin = status, begin
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self._body(request, file, begin, stop, fault)

    def _body(self, request: Request, file: Served, begin: int, stop: int, fault: Fault | None) -> None:
        server = self.server_of_faults
        last = stop
        if isinstance(fault, (Drop, Truncate, Stall, Replace)):
            last = min(stop, begin + fault.after)
        elif isinstance(fault, WrongLength):
            last = min(stop, stop + fault.by)
        elif isinstance(fault, NoLength) and fault.after is not None:
            last = min(stop, begin + fault.after)
        chunked = isinstance(fault, NoLength) and fault.chunked
        block = fault.block if isinstance(fault, Slow) else _BLOCK
        at = begin
        while at < last and not server.closing.is_set():
            data = bytearray(file.read(at, min(block, last - at)))
            if isinstance(fault, Damage) and at <= fault.at < at + len(data):
                data[fault.at - at] ^= 0xFF
            try:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
            except OSError:
                self.close_connection = True
                return
            at += len(data)
            request.sent += len(data)
            if isinstance(fault, Slow):
                time.sleep(fault.wait)
        if isinstance(fault, (Drop, Replace)):
            if isinstance(fault, Replace):
                server.replace(request.name, fault.data)
            time.sleep(0.02)  # what was sent arrives before the reset, which would throw it away
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.rfile.close()
            self.connection.close()
            self.close_connection = True
        elif isinstance(fault, Stall):
            server.closing.wait(60)
            self.close_connection = True
        elif chunked and last == stop:
            self.wfile.write(b"0\r\n\r\n")
        elif isinstance(fault, (Truncate, WrongLength, NoLength)):
            self.close_connection = True

    def _say(self, request: Request, code: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        request.status = code
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _listed(self, kind: str, query: Mapping[str, str], folder: str = "") -> None:
        server = self.server_of_faults
        request = Request(self.command, self.path, LISTING, None, None)
        server.listed.append(request)
        fault = server.take(LISTING)
        if isinstance(fault, Status):
            headers = {} if fault.retry_after is None else {"Retry-After": fault.retry_after}
            return self._say(request, fault.code, b"not now", headers)
        if kind not in server.listings:
            return self._say(request, 404, b"no listing")
        body = server.pages.get(kind)
        if body is None:
            body = {"gcs": self._gcs, "index": self._index, "html": self._html}[kind](query, folder)
        if body is None:
            return self._say(request, 404, b"no such folder")
        page = "text/html" if kind == "html" else "application/json"
        if isinstance(fault, Truncate):
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: fault.after])
            self.close_connection = True
            return
        self._say(request, 200, body, {"Content-Type": f"{page}; charset=utf-8"})

    def _gcs(self, query: Mapping[str, str], folder: str) -> bytes | None:
        server = self.server_of_faults
        names = sorted(name for name in server.files if name.startswith(query.get("prefix", "")))
        begin = int(query.get("pageToken", "0"))
        page = names[begin : begin + min(server.page, int(query.get("maxResults", "1000")))]
        out: dict[str, Any] = {"kind": "storage#objects"}
        if page:
            out["items"] = [server.files[name].item(name, server.bucket) for name in page]
        if begin + len(page) < len(names):
            out["nextPageToken"] = str(begin + len(page))
        return json.dumps(out).encode()

    def _index(self, query: Mapping[str, str], folder: str) -> bytes | None:
        files = [
            {"name": name, "size": file.size, "md5": file.md5.hex()}
            for name, file in sorted(self.server_of_faults.files.items())
        ]
        return json.dumps({"files": files}).encode()

    def _html(self, query: Mapping[str, str], folder: str) -> bytes | None:
        below = [name.removeprefix(folder) for name in self.server_of_faults.files if name.startswith(folder)]
        if not below:
            return None
        heads = sorted({name.split("/")[0] + ("/" if "/" in name else "") for name in below})
        rows = "".join(f'<li><a href="{quote(head)}">{html.escape(head)}</a></li>' for head in heads)
        above = '<a href="?C=M;O=A">Last modified</a><a href="../">Parent</a>'
        return f"<!DOCTYPE HTML><html><body>{above}<ul>{rows}</ul></body></html>".encode()


_DATE = "Sat, 21 Nov 2020 10:00:00 GMT"

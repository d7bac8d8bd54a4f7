"""A web server of files on this machine that fails as told, for tests of downloads."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

LISTING = "listing"
"""The name whose faults requests for a listing take."""


class Status(NamedTuple):
    code: int


class Cut(NamedTuple):
    after: int  # the connection ends after some bytes of the file


class Damage(NamedTuple):
    at: int


class Stall(NamedTuple):
    after: int  # nothing comes after some bytes, until the server is closed


class FaultServer:
    """Serves files by name, listed as a Google bucket, an index, a page of links or not at all, with faults by name."""

    def __init__(self, files, listing="index", page=1000):
        self.files, self.listing, self.page = dict(files), listing, page
        self.faults = {}
        self.lies = {}
        self.headers = {}
        self.asked = []
        self.stalled, self.closing = threading.Event(), threading.Event()
        handler = type("Handler", (_Handler,), {"faulty": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        os.environ.setdefault("no_proxy", "127.0.0.1")  # no proxy of this machine's stands between
        self.base = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.005,), daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, root, **options):
        paths = [path for path in sorted(root.rglob("*")) if path.is_file()]
        return cls({path.relative_to(root).as_posix(): path.read_bytes() for path in paths}, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    faulty: FaultServer

    def log_message(self, *args):
        pass

    def do_GET(self):
        server, parts = self.faulty, urlsplit(self.path)
        name = unquote(parts.path).lstrip("/")
        listed = {
            "bucket": (name == "listing", self._bucket),
            "index": (name == "index.json", self._index),
            "html": (name.endswith("/"), self._html),
        }.get(server.listing)
        is_listing = listed is not None and listed[0]
        if not is_listing:
            server.asked.append(name)
        waiting = server.faults.get(LISTING if is_listing else name, [])
        fault = waiting.pop(0) if waiting else None
        if isinstance(fault, Status):
            return self._send(fault.code, b"not now")
        if is_listing and listed is not None:
            body = listed[1](name, {key: value[0] for key, value in parse_qs(parts.query).items()})
            return self._send(200 if body is not None else 404, body or b"")
        if name not in server.files:
            return self._send(404, b"no such file")
        self._send(200, server.files[name], server.headers, fault)

    def _send(self, code, body, headers=None, fault=None):
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if isinstance(fault, Damage):
            body = body[: fault.at] + bytes([body[fault.at] ^ 255]) + body[fault.at + 1 :]
        if isinstance(fault, Cut | Stall):
            body = body[: fault.after]
        self.wfile.write(body)
        if isinstance(fault, Stall):
            self.faulty.stalled.set()
            self.faulty.closing.wait()

    def _bucket(self, name, query):
        names = sorted(name for name in self.faulty.files if name.startswith(query["prefix"]))
        names = [name for name in names if query.get("delimiter", "//") not in name.removeprefix(query["prefix"])]
        begin = int(query.get("pageToken", 0))
        items = []
        for name in names[begin : begin + self.faulty.page]:
            data = self.faulty.files[name]
            md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
            items.append({"name": name, "size": str(len(data)), "md5Hash": md5} | self.faulty.lies.get(name, {}))
        after = begin + len(items)
        return json.dumps({"items": items} | ({"nextPageToken": str(after)} if after < len(names) else {})).encode()

    def _index(self, name, query):
        files = []
        for name, data in self.faulty.files.items():
            entry = {"name": name, "size": len(data), "md5": hashlib.md5(data).hexdigest()}
            files.append(entry | self.faulty.lies.get(name, {}))
        return json.dumps({"files": files}).encode()

    def _html(self, folder, query):
        below = [name.removeprefix(folder) for name in self.faulty.files if name.startswith(folder)]
        links = sorted({name.partition("/")[0] + ("/" if "/" in name else "") for name in below})
        page = "".join(f'<li><a href="{quote(link)}">{link}</a></li>' for link in ["../", "?C=M;O=A", *links])
        return f"<!DOCTYPE HTML><html><body><ul>{page}</ul></body></html>".encode() if below else None

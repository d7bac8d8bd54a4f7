"""List and download the files that data sets are made from, through fsspec, and read gzipped .npy files as streams.

A source is an address: the public bucket, a web server, a folder, or any URL that fsspec opens. Listings of the bucket and
of a web server's `index.json` have sizes and hashes; those of other sources have what fsspec knows.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

import numpy as np
from numpy.lib import format as npy


class SourceError(OSError):
    """A file or a listing is not available now; the message names its address."""


class FileCorrupted(ValueError):
    """A file of a data set is truncated, damaged or of another kind; the message names it."""


class SpaceError(OSError):
    """The disk has too little room for the data set. Nothing was downloaded."""


Report = Callable[[int], None]
"""Called with the bytes that were read since the last call; negative if a file is fetched again."""
BUCKET = "https://storage.googleapis.com/atari-replay-datasets"
LISTING = "https://storage.googleapis.com/storage/v1/b/atari-replay-datasets/o"
WAITS = (1.0, 5.0, 20.0)
"""Seconds before each further attempt to download a file."""
_FINAL = (400, 401, 403, 404, 405, 410)
"""HTTP statuses that another attempt does not change."""
_FATAL = (ImportError, MemoryError)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_STORED = {"block_size": 0, "size": 1, "headers": {"Accept-Encoding": "gzip"}}
"""Options for the web: the whole file by one request, and its bytes as they are stored, also if that is compressed."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class File:
    """A listed file: its path below the source, its URL, and its size and hash if known."""

    name: str
    url: str
    size: int | None = None
    md5: str | None = None
    """32 hexadecimal digits."""


def address_of(call: str, source: str | os.PathLike[str] | None) -> str:
    """Return the address of a source: a URL, or the absolute path of a folder; None is the public bucket."""
    if source is None:
        return BUCKET
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"{call}: source is a {type(source).__name__}; expected an address, a folder or None.")
    text = os.fspath(source)
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://").removeprefix("localhost"))
    return text.rstrip("/") if "://" in text else os.path.abspath(os.path.expanduser(text))


def is_local(address: str) -> bool:
    """Return whether the address is a path of this machine."""
    return "://" not in address


def _is_web(address: str) -> bool:
    """Return whether the address is one of a web server."""
    return address.startswith(("http://", "https://"))


def list_files(address: str, folder: str) -> list[File]:
    """Return the files directly in `folder`, a path below the source; none if there is no such folder.

    Raises:
      SourceError: the source cannot be listed. ImportError: a package is missing; the text says which.
    """
    url = f"{address}/{folder}"
    try:
        if is_local(address):
            with os.scandir(url) as entries:
                return [File(folder + e.name, e.path, e.stat().st_size) for e in entries if e.is_file()]
        if address == BUCKET:
            return _list_bucket(folder)
        if _is_web(address) and (index := _read_index(address)) is not None:
            return [file for file in index if file.name.rpartition("/")[0] == folder.rstrip("/")]
        system, path = _filesystem(url)
        found = system.ls(path, detail=True)
    except FileNotFoundError:
        return []
    except (ImportError, SourceError):
        raise
    except Exception as error:  # each file system raises its own kinds
        raise SourceError(f"{url}: {_text(error)}.") from error
    return [
        File(
            folder + unquote(info["name"].rpartition("/")[2]),
            system.unstrip_protocol(info["name"]),
            info.get("size"),
            _hex(info.get("md5Hash")),
        )
        for info in found
        if info["type"] != "directory" and info["name"].rpartition("/")[0] == path.rstrip("/")
    ]


def fetch(file: File, path: Path, report: Report) -> None:
    """Download a file to `path`. A truncated or damaged download is repeated, up to three times.

    Args:
      report: Called with the bytes of each block; with a negative number when a download begins again.
    Raises:
      SourceError: the file is not available now. FileCorrupted: its size or hash is not the listed one.
      OSError: the disk fails.
    """
    try:
        _retry(lambda: _download(file, path, report))
    except Exception as error:  # each file system raises its own kinds
        if isinstance(error, (*_FATAL, FileCorrupted)) or getattr(error, "errno", None) in _FULL:
            raise
        raise SourceError(f"{file.url}: {_text(error)}.") from error


def _retry(attempt: Callable[[], Any]) -> Any:
    """Return the result of a function; call it up to three times if it may succeed later."""
    for wait in WAITS:
        try:
            return attempt()
        except Exception as error:  # each file system raises its own kinds
            if isinstance(error, _FATAL) or getattr(error, "errno", None) in _FULL or _is_final(error):
                raise
            time.sleep(wait)
    return attempt()


def _download(file: File, path: Path, report: Report) -> None:
    """Download a file once. Raises FileCorrupted: it is not what was listed."""
    system, name = _filesystem(file.url)
    options = _STORED if _is_web(file.url) else {}
    digest, size = hashlib.md5(usedforsecurity=False), 0
    try:
        with system.open(name, "rb", **options) as remote, open(path, "wb") as local:
            while block := remote.read(_BLOCK):
                local.write(block)
                digest.update(block)
                size += len(block)
                report(len(block))
        if file.size not in (None, size):
            raise FileCorrupted(f"{file.name}: has {size} bytes; expected {file.size} ({file.url}).")
        if file.md5 not in (None, digest.hexdigest()):
            raise FileCorrupted(f"{file.name}: has md5 {digest.hexdigest()}; expected {file.md5} ({file.url}).")
    except BaseException:
        report(-size)
        raise


def _filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Raises ImportError: a package is missing."""
    scheme = url.partition("://")[0]
    options: dict[str, Any] = {}
    try:
        from fsspec.core import url_to_fs

        if _is_web(url):
            from aiohttp import ClientTimeout

            timeout = ClientTimeout(total=None, sock_connect=30, sock_read=60)
            options["client_kwargs"] = {"timeout": timeout, "trust_env": True, "auto_decompress": False}
            options["headers"] = {"Accept-Encoding": "identity"}
        system, path = url_to_fs(url, **options)
    except ImportError as error:
        ours = _is_web(url) or (error.name or "").startswith("fsspec")
        extra = "fbuf[datasets]" if ours else f"fsspec[{scheme}]"
        raise ImportError(f'{url}: {error}. Run pip install "{extra}".') from error
    return system, path


def _read(url: str) -> bytes:
    """Return a small file of a web server."""
    system, path = _filesystem(url)
    return bytes(_retry(lambda: system.cat_file(path)))


def _list_bucket(folder: str) -> list[File]:
    """Return the files that the bucket's JSON interface lists."""
    query = {"prefix": folder, "delimiter": "/", "fields": "nextPageToken,items(name,size,md5Hash)"}
    files: list[File] = []
    while True:
        page = json.loads(_read(f"{LISTING}?{urlencode(query)}"))
        for item in page.get("items", []):
            name = item["name"]
            files.append(File(name, f"{BUCKET}/{quote(name)}", int(item["size"]), _hex(item.get("md5Hash"))))
        if not page.get("nextPageToken"):
            return files
        query["pageToken"] = page["nextPageToken"]


def _read_index(address: str) -> list[File] | None:
    """Return the files of a web server's `index.json`; None if it has none."""
    url = f"{address}/index.json"
    try:
        text = _read(url)
    except Exception as error:
        if _is_final(error):
            return None
        raise
    try:
        return [_index_entry(address, **entry) for entry in json.loads(text)["files"]]
    except (ValueError, TypeError, KeyError) as error:
        raise SourceError(f'{url}: is no index; expected {{"files": [{{"name": ..., "size": ...}}]}}.') from error


def _index_entry(address: str, name: Any, size: Any = None, md5: Any = None, **_: Any) -> File:
    """Return a file of an index. Raises ValueError: its name, size or hash is invalid."""
    valid = isinstance(name, str) and name and not {"", ".", ".."} & set(name.split("/"))
    valid = valid and (size is None or (type(size) is int and size >= 0))
    if not valid or not (md5 is None or (isinstance(md5, str) and re.fullmatch("[0-9a-fA-F]{32}", md5))):
        raise ValueError(f"entry {name!r}")
    return File(name, f"{address}/{quote(name)}", size, md5 and md5.lower())


def _is_final(error: Exception) -> bool:
    """Return whether another attempt would fail in the same way."""
    return isinstance(error, (FileNotFoundError, PermissionError)) or getattr(error, "status", None) in _FINAL


def _hex(md5: str | None) -> str | None:
    """Return the hexadecimal digits of a hash in base64."""
    return base64.b64decode(md5).hex() if md5 else None


def _text(error: Exception) -> str:
    """Return what an error says on one line, with its status or kind."""
    if isinstance(error, FileNotFoundError):
        return "not found"
    text = str(getattr(error, "message", None) or error).rstrip(".")
    return f"{getattr(error, 'status', type(error).__name__)} {text}".rstrip()


Array = np.ndarray[Any, Any]
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npy(
    path: Path, dtypes: Sequence[str], shape: tuple[int | None, ...], rows: int, report: Report | None = None
) -> Generator[Array, None, None]:
    """Yield an array in blocks of its first axis; an empty array, or one without axes, as one block.

    Args:
      dtypes: Those that are expected.
      shape: The expected shape; None: any size up to `rows`.
      rows: Of a block.
      report: Called with the compressed bytes that each block took.
    Raises:
      FileCorrupted: the file is truncated or damaged, or its array is another one.
    """
    gzip = _gzip()
    try:
        with open(path, "rb") as packed, gzip.open(packed) as content:
            version = npy.read_magic(content)
            if version not in _HEADERS:
                raise ValueError(f"is of .npy version {version}; expected 1.0 or 2.0")
            found, fortran, dtype = _HEADERS[version](content)
            if dtype not in [np.dtype(name) for name in dtypes]:
                raise ValueError(f"has dtype {dtype}; expected {' or '.join(dtypes)}")
            fits = (n == want or (want is None and 0 <= n <= rows) for n, want in zip(found, shape, strict=False))
            if len(found) != len(shape) or not all(fits) or (fortran and len(found) > 1):
                expected = [f"at most {rows}" if size is None else size for size in shape]
                raise ValueError(f"has shape {list(found)}{' in Fortran order' * fortran}; expected {expected}")
            count, item, at = (found[0], found[1:], 0) if found else (1, (), 0)
            size = int(np.prod(item)) * dtype.itemsize
            for start in range(0, max(count, 1), rows):
                number = min(rows, count - start)
                data = content.read(number * size)
                if len(data) < number * size:
                    raise ValueError(f"ends after {start * size + len(data)} of {count * size} bytes of its array")
                yield np.frombuffer(data, dtype).reshape((number, *item) if found else ())
                if report is not None:
                    report(packed.tell() - at)
                    at = packed.tell()
            if content.read(1):
                raise ValueError(f"has bytes after its array of shape {list(found)}")
            if report is not None:
                report(packed.tell() - at)
    except Exception as error:  # what gzip, zlib and the parser of headers raise for bytes they cannot read
        if isinstance(error, (OSError, MemoryError)) and not isinstance(error, gzip.BadGzipFile):
            raise
        raise FileCorrupted(f"{path.name}: {str(error).rstrip('.')}.") from error


def _gzip() -> Any:
    """Return gzip, or isal's module of the same functions, which is four times as fast."""
    try:
        from isal import igzip
    except ImportError:
        import gzip

        return gzip
    return igzip

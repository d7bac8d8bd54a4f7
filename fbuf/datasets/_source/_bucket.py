"""A public bucket of Google Cloud Storage, or what speaks its JSON interface, over plain HTTP.

Listing needs no account: `GET /storage/v1/b/<bucket>/o?prefix=` gives names, sizes, hashes and generations, page by page. Files
are read by the same interface, by generation, so that a file that was replaced since is an error and not another file's
bytes. gsutil and gcsfs were rejected: an external program, and five packages, for what are two kinds of request.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from fbuf.datasets._source._entry import Entry
from fbuf.datasets._source._errors import SourceError
from fbuf.datasets._source._names import check_name, is_folder
from fbuf.datasets._source._page import page
from fbuf.datasets._source._retry import Retry
from fbuf.datasets._source._webstream import WebStream

PUBLIC = "https://storage.googleapis.com"
ATARI = "atari-replay-datasets"
_FIELDS = "kind,nextPageToken,items(name,size,md5Hash,crc32c,generation)"
_MOST_PAGES = 1000


class NoListing(SourceError):
    """What is at this address is no such listing."""


@dataclass(frozen=True)
class Bucket:
    """The files of one bucket.

    Args:
      base: Address before `/storage/v1`.
      bucket: Name.
    """

    base: str = PUBLIC
    bucket: str = ATARI
    retry: Retry = dataclasses.field(default_factory=Retry)

    @property
    def address(self) -> str:
        """Of the listing."""
        return f"{self.base.rstrip('/')}/storage/v1/b/{quote(self.bucket, safe='')}/o"

    def files(self, prefix: str = "") -> list[Entry]:
        """All files whose names begin with `prefix`, by name. Raises SourceError; NoListing: there is no such listing."""
        found: dict[str, Entry] = {}
        token, seen = None, set[str]()
        for _ in range(_MOST_PAGES):
            query = {"prefix": prefix, "fields": _FIELDS} | ({} if token is None else {"pageToken": token})
            url = f"{self.address}?{urlencode(query)}"
            value = self._page(url)
            for item in value.get("items", []):
                item = item if isinstance(item, dict) else {}
                if is_folder(item.get("name")):
                    continue
                entry = self._entry(item, url)
                if entry.name.startswith(prefix):
                    found[entry.name] = entry
            token = value.get("nextPageToken")
            if not token:
                return [found[name] for name in sorted(found)]
            if type(token) is not str or token in seen:
                raise SourceError(f"{url}: the listing's next page is {str(token)[:80]!r} again; expected an end.")
            seen.add(token)
        raise SourceError(f"{self.address}: the listing has more than {_MOST_PAGES} pages. Ask for a longer prefix.")

    def stream(self, entry: Entry, start: int = 0, validator: str | None = None) -> WebStream:
        """The bytes of a file from `start` on."""
        return WebStream(entry, self.retry, start, validator, encoding="gzip")

    def _page(self, url: str) -> dict[str, Any]:
        text = page(url, self.retry)
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not (value.get("kind") == "storage#objects" or "items" in value):
            raise NoListing(f"{url}: {text[:60]!r} is no listing of a bucket.")
        if not isinstance(value.get("items", []), list):
            raise NoListing(f"{url}: its items are no list.")
        return value

    def _entry(self, item: dict[str, Any], url: str) -> Entry:
        name = check_name(item.get("name"), url)
        size, generation = item.get("size"), item.get("generation")
        for key, value in (("size", size), ("generation", generation)):
            if value is not None and not (type(value) in (str, int) and str(value).isascii() and str(value).isdigit()):
                raise SourceError(f"{url}: {key} of '{name}' is {str(value)[:40]!r}; expected a whole number.")
        if size is not None and len(str(size)) > 18:
            raise SourceError(f"{url}: '{name}' has {str(size)[:40]} bytes, which cannot be.")
        crc = _decoded(item.get("crc32c"), 4)
        query = {"alt": "media"} | ({} if generation is None else {"generation": str(generation)})
        return Entry(
            name,
            f"{self.address}/{quote(name, safe='')}?{urlencode(query)}",
            None if size is None else int(size),
            _decoded(item.get("md5Hash"), 16),
            None if crc is None else int.from_bytes(crc, "big"),
            None if generation is None else str(generation),
        )


def _decoded(value: object, size: int) -> bytes | None:
    """A hash, or None: one that cannot be read is none."""
    try:
        data = base64.b64decode(value, validate=True) if type(value) is str else b""
    except (binascii.Error, ValueError):
        return None
    return data if len(data) == size else None

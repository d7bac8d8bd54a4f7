"""A copy of the files on any web server, under the same names: `<base>/<name>`.

Three ways to know what is there, asked in this order: the bucket's JSON interface under `<base>/storage/v1`, which brings
hashes; a file `<base>/index.json`, which whoever made the mirror wrote; and the page that a server shows for a folder. That
last one says names only, so sizes come with the files and damage is noticed by gzip's own checksum alone.

`index.json` is `{"files": [{"name": "dqn/Pong/1/replay_logs/add_count_ckpt.0.gz", "size": 123, "md5": "0123..."}]}`; `size` and
`md5` (32 hexadecimal digits) may be left out.
"""

from __future__ import annotations

import dataclasses
import html.parser
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from fbuf.datasets._source._bucket import ATARI, Bucket, NoListing
from fbuf.datasets._source._entry import Entry
from fbuf.datasets._source._errors import SourceError
from fbuf.datasets._source._names import check_name, is_folder
from fbuf.datasets._source._page import page
from fbuf.datasets._source._retry import Retry
from fbuf.datasets._source._web import Refused
from fbuf.datasets._source._webstream import WebStream

_NOT_HERE = frozenset((400, 403, 404, 405, 406, 410, 501))
_MOST_DEPTH, _MOST_FOLDERS = 8, 4096
_ELSEWHERE = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:|[/#]|\.\.?(/|$)")
_MD5 = re.compile(r"[0-9a-fA-F]{32}")


@dataclass(frozen=True)
class Mirror:
    """The files under one address.

    Args:
      base: Address before the names.
      bucket: Which one it is a copy of, for the JSON interface.
    """

    base: str
    bucket: str = ATARI
    retry: Retry = dataclasses.field(default_factory=Retry)

    def files(self, prefix: str = "") -> list[Entry]:
        """All files whose names begin with `prefix`, by name. Raises SourceError: no way to know is there."""
        said = []
        for way in (self._bucket, self._index, self._folders):
            try:
                return way(prefix)
            except NoListing as error:
                said.append(str(error))
            except Refused as error:
                if error.status not in _NOT_HERE:
                    raise
                said.append(str(error))
        raise SourceError(
            f"{self.base}: no listing of the files below '{prefix}': {' '.join(said)} Give the mirror an index.json: "
            f'{{"files": [{{"name": ..., "size": ..., "md5": ...}}]}}.'
        )

    def stream(self, entry: Entry, start: int = 0, validator: str | None = None) -> WebStream:
        """The bytes of a file from `start` on."""
        encoding = "gzip" if entry.address.startswith(self._api.address + "/") else "identity"
        return WebStream(entry, self.retry, start, validator, encoding)

    @property
    def _api(self) -> Bucket:
        return Bucket(self.base, self.bucket, self.retry)

    def _address(self, name: str) -> str:
        return f"{self.base.rstrip('/')}/{quote(name)}"

    def _bucket(self, prefix: str) -> list[Entry]:
        return self._api.files(prefix)

    def _index(self, prefix: str) -> list[Entry]:
        url = self._address("index.json")
        try:
            value = json.loads(page(url, self.retry))
            files = [item for item in value["files"] if not is_folder(item["name"])]
            entries = [self._entry(item, url) for item in files if str(item["name"]).startswith(prefix)]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise NoListing(f"{url}: is no index of files ({type(error).__name__}: {str(error)[:60]}).") from None
        return sorted(entries, key=lambda entry: entry.name)

    def _entry(self, item: Any, url: str) -> Entry:
        name, size, md5 = check_name(item["name"], url), item.get("size"), item.get("md5")
        if size is not None and (type(size) is not int or not 0 <= size < 1 << 60):
            raise ValueError(f"size of '{name}' is {str(size)[:40]!r}")
        if md5 is not None and not (type(md5) is str and _MD5.fullmatch(md5)):
            raise ValueError(f"md5 of '{name}' is {str(md5)[:40]!r}")
        return Entry(name, self._address(name), size, None if md5 is None else bytes.fromhex(md5))

    def _folders(self, prefix: str) -> list[Entry]:
        above = prefix[: prefix.rfind("/") + 1]
        try:
            shown = self._shown(above)
        except Refused as error:
            if not above or error.status not in _NOT_HERE or not self._shown(""):
                raise
            return []  # it does show folders, and has not this one
        if not shown:
            raise NoListing(f"{self._address(above)}: has no links.")
        names: list[str] = []
        waiting, asked = [(above, shown)], 1
        while waiting:
            folder, shown = waiting.pop()
            for link in shown:
                name = folder + check_name(link.rstrip("/"), self._address(folder))
                if not link.endswith("/"):
                    names += [name] if name.startswith(prefix) else []
                elif (name + "/").startswith(prefix):
                    asked += 1
                    if asked > _MOST_FOLDERS or name.count("/") > above.count("/") + _MOST_DEPTH:
                        raise SourceError(f"{self.base}: too many folders in '{name}'. Give the mirror an index.json.")
                    waiting.append((name + "/", self._shown(name + "/")))
        return [Entry(name, self._address(name)) for name in sorted(set(names))]

    def _shown(self, folder: str) -> list[str]:
        """What a folder's page points to right below it: not its parent, not other orders of the same page."""
        url, parser = self._address(folder), _Links()
        text = page(url, self.retry)
        try:
            parser.feed(text.decode())
            parser.close()
        except (ValueError, AssertionError):
            raise NoListing(f"{url}: {text[:40]!r} is no page of a folder.") from None
        links = (link.removeprefix("./") for link in parser.found)
        below = [unquote(link) for link in links if link and "?" not in link and not _ELSEWHERE.match(link)]
        return [name for name in below if "/" not in name[:-1]]


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for key, value in attrs if key == "href" and value]

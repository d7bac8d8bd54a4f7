"""From what a user gives as `source=` to a source."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from fbuf.datasets._source._bucket import ATARI, PUBLIC, Bucket
from fbuf.datasets._source._entry import Source
from fbuf.datasets._source._folder import Folder
from fbuf.datasets._source._fsspec import Fsspec
from fbuf.datasets._source._mirror import Mirror
from fbuf.datasets._source._retry import Retry


def connect(
    source: str | os.PathLike[str] | Source | None = None, *, bucket: str = ATARI, retry: Retry | None = None
) -> Source:
    """Where files come from. Asks nobody yet.

    Args:
      source: None: the public bucket. `https://...`: a mirror (`_mirror.py` says what it needs); `gs://name`: another public
        bucket; `file://...` or a path: a folder; another scheme: fsspec's; or a source, which is given back.
      bucket: The one that a mirror copies.
      retry: How often, and how long to wait; of HTTP only.
    Raises:
      ValueError: an address that is none. TypeError: something else.
    """
    retry = Retry() if retry is None else retry
    if source is None:
        return Bucket(PUBLIC, bucket, retry)
    if not isinstance(source, (str, os.PathLike)):
        if hasattr(source, "files") and hasattr(source, "stream"):
            return source
        raise TypeError(f"source= is {type(source).__name__}; expected an address, a folder, or None.")
    text = os.fspath(source)
    found = re.match(r"([a-zA-Z][a-zA-Z0-9+.-]*)://", text)
    scheme = found[1].lower() if found and isinstance(source, str) else ""
    if scheme in ("http", "https"):
        parts = urlsplit(text)
        if not parts.hostname or parts.username or parts.query or parts.fragment:
            raise ValueError(
                f"source='{text}': expected an address without a user, '?' or '#', as https://host/folder."
            )
        return Mirror(text.rstrip("/"), bucket, retry)
    if scheme == "gs":
        name, _, rest = text.partition("://")[2].partition("/")
        if not name or rest:
            raise ValueError(f"source='{text}': expected 'gs://' and the name of a bucket alone.")
        return Bucket(PUBLIC, name, retry)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"source='{text}': expected a path of this machine: file:///folder.")
        return Folder(unquote(parts.path))
    if scheme:
        return Fsspec(text.rstrip("/"))
    return Folder(os.path.expanduser(text))

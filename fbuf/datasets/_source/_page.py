"""A listing's text: short, and read whole or not at all."""

from __future__ import annotations

from fbuf.datasets._source._retry import Again, Retry, Tries
from fbuf.datasets._source._web import Refused, get

MOST = 1 << 26
"""Bytes of a page: 64 MiB are some 200,000 files."""


def page(url: str, retry: Retry) -> bytes:
    """All of what is at an address. Raises SourceError: it cannot be had, or is too long to be a listing."""
    tries = Tries(retry, url)
    while True:
        try:
            return _once(url, retry.timeout)
        except Again as error:
            tries.failed(error)


def _once(url: str, timeout: float) -> bytes:
    answer = get(url, timeout)
    try:
        parts, size = [], 0
        while data := answer.read(1 << 16):
            parts.append(data)
            size += len(data)
            if size > MOST:
                raise Refused(f"{url}: has more than {MOST} bytes; expected a listing.")
    finally:
        answer.close()
    if answer.length is not None and size != answer.length:
        raise Again(f"the connection ended at byte {size} of {answer.length}")
    return b"".join(parts)

"""Hashes of files as they pass: the strongest that the listing gives and this machine computes quickly.

md5 where it is listed; crc32c (all that buckets have for files put together from parts) where google_crc32c is installed, since
in plain Python it would take a minute for what comes in a second; else none, and gzip's own checksum is what there is.
"""

from __future__ import annotations

import hashlib
from typing import Any

from fbuf.datasets._source._entry import Entry
from fbuf.datasets._source._errors import FileCorrupted


class Digest:
    """Of the bytes of `entry` in order.

    Attributes:
      kind: "md5", "crc32c" or None.
    """

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._hash: Any = None
        self.kind: str | None = None
        self.size = 0
        if entry.md5 is not None:
            self.kind, self._hash = "md5", hashlib.md5(usedforsecurity=False)
        elif entry.crc32c is not None:
            try:
                from google_crc32c import Checksum
            except ImportError:
                return
            self.kind, self._hash = "crc32c", Checksum()

    def update(self, data: bytes) -> None:
        """The next bytes."""
        self.size += len(data)
        if self._hash is not None:
            self._hash.update(data)

    def wrong(self) -> str | None:
        """What is wrong with the whole file, or None."""
        entry = self._entry
        if entry.size is not None and self.size != entry.size:
            return f"has {self.size} bytes; expected {entry.size}, as listed"
        if self._hash is None:
            return None
        expected = entry.md5 if self.kind == "md5" else (entry.crc32c or 0).to_bytes(4, "big")
        got = self._hash.digest()
        if got == expected:
            return None
        return f"has {self.kind} {got.hex()}; expected {expected.hex() if expected else None}, as listed"

    def check(self) -> None:
        """Raises FileCorrupted: these are not the bytes that were listed."""
        wrong = self.wrong()
        if wrong:
            raise FileCorrupted(
                f"{self._entry.name}: {wrong} (from {self._entry.address}). Get it again, or from another mirror.",
                file=self._entry.name,
            )

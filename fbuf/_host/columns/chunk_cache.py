"""Decoded chunks kept for a while, the least recently used given up first.

For draws that come back to the same rows: priorities that a few rows dominate, windows that overlap. Uniform draws over many
chunks gain nothing, so it is off unless asked for. Addresses are not used twice, so nothing in here is ever out of date.
"""

from __future__ import annotations

import threading
from collections import OrderedDict


class Cache:
    """Rows of chunks by address, for any number of threads.

    Args:
      limit: Bytes of rows kept at most.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.nbytes = 0
        self.hits = self.misses = 0
        self._held: OrderedDict[int, memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, address: int) -> memoryview | None:
        """The rows of a chunk, if they are here."""
        with self._lock:
            rows = self._held.get(address)
            if rows is None:
                self.misses += 1
            else:
                self.hits += 1
                self._held.move_to_end(address)
            return rows

    def put(self, address: int, rows: memoryview) -> None:
        """Keeps rows that nobody writes to any more."""
        with self._lock:
            if len(rows) > self.limit or address in self._held:
                return
            self._held[address] = rows
            self.nbytes += len(rows)
            while self.nbytes > self.limit:
                self.nbytes -= len(self._held.popitem(last=False)[1])

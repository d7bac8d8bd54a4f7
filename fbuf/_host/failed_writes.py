"""Writes of host stores that failed, and the errors that the next calls with their states raise.

A write runs in a callback of a compiled program, where an exception would become JAX's error and lose the state. So the
callback records the error here. A store that ends before any call warns of it.
"""

from __future__ import annotations

import errno
import threading
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from fbuf._host.types import StoreCorrupted

_lock = threading.Lock()
failed: dict[int, FailedWrite] = {}
"""Writes whose errors were not raised yet, by id of the store."""


class FailedWrite(NamedTuple):
    """Writes of a store that failed since the last error was raised."""

    error: Exception
    rows: int  # not stored, or not changed

    shards: str = ""  # how many rows of which shard, in brackets

    @property
    def reason(self) -> str:
        """Why it failed, without a full stop."""
        known = self.error.strerror if isinstance(self.error, OSError) else None
        return (known or f"fbuf: a write failed: {self.error!r}").rstrip(".")

    def to_error(self, advice: str = "write them again") -> OSError | StoreCorrupted:
        """Return the error to raise; `write_of` gives this write."""
        what = f"{self.rows} rows{self.shards} were not written"
        if isinstance(self.error, StoreCorrupted):
            raised: Any = StoreCorrupted(f"{self.error} {what}.")
        else:
            number = self.error.errno or errno.EIO if isinstance(self.error, OSError) else errno.ENOMEM
            lost = f"{what}: {advice}" if self.rows else "All rows were written"
            raised = OSError(number, f"{self.reason}. {lost}. The state is whole.")
        raised.write = self
        return cast("OSError | StoreCorrupted", raised)


def write_of(error: BaseException) -> FailedWrite | None:
    """Return the write that an error of `raise_failed` is about; None for other errors."""
    return getattr(error, "write", None)


def record(id: int, error: Exception, rows: int) -> None:
    """Keep the error of a write, which the next call that takes a state of the store raises."""
    with _lock:
        before = failed.get(id)
        failed[id] = FailedWrite(error, rows) if before is None else before._replace(rows=before.rows + rows)


def raise_failed(ids: Mapping[int | None, int]) -> None:
    """Raise OSError or StoreCorrupted, once, if a write failed of stores with these ids, by shard or None.

    A failure of another cause is for the next call.
    """
    with _lock:
        writes = {shard: failed[id] for shard, id in ids.items() if id in failed}
        if not writes:
            return
        error = next(iter(writes.values())).error
        same = {shard: write for shard, write in writes.items() if repr(write.error) == repr(error)}
        for shard in same:
            del failed[ids[shard]]
    shards = " and ".join(f"{write.rows} of shard {shard}" for shard, write in same.items())
    raise FailedWrite(
        error, sum(write.rows for write in same.values()), "" if None in ids else f" ({shards})"
    ).to_error()


def warn(id: int) -> None:
    """Warn of a write that failed, of which no later call with the state told."""
    write = failed.pop(id, None)
    if write is not None:
        error = write.to_error()
        text = error.strerror if isinstance(error, OSError) else str(error)  # without the number
        warnings.warn(f"{text} No call took the state since.", RuntimeWarning, stacklevel=2)


def warn_all() -> None:
    """Warn of every failed write of which no call told."""
    for id in list(failed):
        warn(id)

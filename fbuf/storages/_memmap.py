"""`Memmap`: leaves in files as they are, read inside jit through the page cache.

For more rows than memory holds, and for rows that outlive the process. Files are written with `pwrite`, so that a full disk
raises OSError; a mapping would end the process with SIGBUS.
"""

from __future__ import annotations

from typing import Literal

from fbuf._core.component import component
from fbuf.storages._host_storage import HostStorage


@component
class Memmap(HostStorage):
    """Rows whose leaves are in files.

    A write that fails (full or broken disk) raises and leaves the rows unchanged. A killed process loses no row whose write
    returned: `Buffer.resume` finds them. After a power failure the rows synced by `Buffer.flush`, or by a write every `sync`
    seconds, are safe, as long as fewer rows than the slack came later (of encoded leaves without the newest `chunk - 1` a
    lane). `resume` checks which later rows are complete: each has a checksum of its contents and identity, so damaged,
    missing, older and foreign bytes are detected. Files are sparse and grow with the rows. A folder serves one store at a time,
    and holds nothing else.

    Attributes:
      path: The folder, created if missing; it must not hold a store yet (`Buffer.resume` continues one). None: a temporary
        folder (in `tempfile.gettempdir()`), removed with the last state, and at exit.
      keys: Leaves (or subtrees) in files; None: all. With leaves on the device the rows cannot be resumed. Leaves named here
        may have 64 bits, as in `Host`.
      slack: Rows kept beyond the capacity, so that a slightly old state still reads its own rows; None: a sixteenth of the
        capacity, at most 4096 a lane.
      on_expired: A read of a row evicted since raises ("raise"), or returns zeros with `mask` False ("mask").
      sync: Seconds after which a write waits until everything is on the disk; 0: each write; None: only `Buffer.flush`.
    Raises:
      TypeError, ValueError: a setting is invalid. `init` raises FileExistsError (the folder is not empty), BlockingIOError
        (another store holds it), OSError (it cannot be created).

    Cost: a write or read is one callback and one copy of its rows, if the pages are in memory; a write adds a checksum, at
      some 8 GB/s and a few microseconds a leaf. On disk a sixteenth more rows than capacity and slack (16 to 1024 a lane), so
      that writes never touch readable rows, and 8 bytes a row and leaf.

    Example:
      >>> import fbuf
      >>> fbuf.storages.Memmap("/data/replay").path
      '/data/replay'
    """

    path: str | None = None
    keys: tuple[str, ...] | None = None
    slack: int | None = None
    on_expired: Literal["raise", "mask"] = "raise"
    sync: float | None = None

    def __post_init__(self) -> None:
        self._check()

    @property
    def in_files(self) -> bool:
        """Return True."""
        return True

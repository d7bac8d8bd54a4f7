"""`Memmap`: leaves live in files as they are, and are read inside jit through the page cache.

For more rows than memory holds, and for rows that are to outlive the process. Files are written with `pwrite`, not through a
mapping, so that a full disk is an error with words and not a signal that ends the process.
"""

from __future__ import annotations

from fbuf._core.component import component
from fbuf.storages._host_storage import Hosted


@component
class Memmap(Hosted):
    """Rows whose leaves lie in files.

    A write that fails (no room, a broken disk) raises and leaves the rows as they were. A process that is killed, at any
    moment, loses no row whose write had returned: `Buffer.resume` finds them. After a failure of power those are safe that
    `Buffer.flush`, or a write every `sync` seconds, has waited for (as long as no more rows came since than the slack holds;
    of encoded leaves without the newest `chunk - 1` a lane); of later ones `resume` finds out which are whole. Every row
    has a checksum that knows which row of which store it is, so damaged, missing, older and foreign bytes are never taken
    for it: `resume` looks at all of them. Files are sparse and take room as rows come. A folder serves one store at a time, and
    holds nothing else.

    Attributes:
      path: The folder, made if it is not there; it must hold no store yet (`Buffer.resume` goes on with one). None: a
        temporary one (in `tempfile.gettempdir()`), which is removed with the last state, and at exit.
      keys: Leaves (or subtrees) that go to files; None: all of them. Where some stay on the device there is no resuming.
      slack: Rows kept beyond the capacity, so that a state a little old reads its own rows; None: a sixteenth of the
        capacity, at most 4096 a lane.
      on_expired: What a read of a row dropped since does: "raise", or "mask" (zeros, and `mask` False).
      sync: Seconds after which a write waits until everything is on the disk; 0: each does; None: none does, only
        `Buffer.flush`. A failure of power then costs at most the rows of so many seconds.
    Raises:
      TypeError, ValueError: a setting is of another kind or out of range. What `init` raises: FileExistsError (the folder is
        not empty), BlockingIOError (another store holds it), OSError (it cannot be made).

    Cost: a write or read is one callback and one copy of its rows, where the pages are in memory; a write adds a checksum, at
      some 8 GB/s and a few microseconds a leaf. On disk a sixteenth more rows than capacity and slack (16 to 1024 a lane), so
      that writes never touch rows that can be read, and 8 bytes a row and leaf.

    Example:
      >>> import fbuf
      >>> fbuf.storages.Memmap("/data/replay").path
      '/data/replay'
    """

    path: str | None = None
    keys: tuple[str, ...] | None = None
    slack: int | None = None
    on_expired: str = "raise"
    sync: float | None = None

    def __post_init__(self) -> None:
        self._check()

    @property
    def in_files(self) -> bool:
        """Always."""
        return True

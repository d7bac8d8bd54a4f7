"""`Memmap`: leaves live in files as they are, and are read inside jit through the page cache.

For more rows than memory holds, and for rows that are to outlive the process. Files are written with `pwrite`, not through a
mapping, so that a full disk is an error with words and not a signal that ends the process.
"""

from __future__ import annotations

from fbuf._config import component
from fbuf.storages._hosted import Hosted


@component
class Memmap(Hosted):
    """Rows whose leaves lie in files.

    A write that fails (no room, a broken disk) raises and leaves the rows as they were. A process that is killed loses no row
    whose write had returned: `Buffer.resume` finds them. What a failure of power leaves is another matter: nothing waits for
    the disk. Files are sparse and take room as rows come. A folder serves one store at a time, and holds nothing else.

    Attributes:
      path: The folder, made if it is not there; it must hold no store yet (`Buffer.resume` goes on with one). None: a
        temporary one (in `tempfile.gettempdir()`), which is removed with the last state, and at exit.
      keys: Leaves (or subtrees) that go to files; None: all of them. Where some stay on the device there is no resuming.
      slack: Rows kept beyond the capacity, so that a state a little old reads its own rows; None: a sixteenth of the
        capacity, at most 4096 a lane.
      on_expired: What a read of a row dropped since does: "raise", or "mask" (zeros, and `mask` False).
    Raises:
      TypeError, ValueError: a setting is of another kind or out of range. What `init` raises: FileExistsError (the folder is
        not empty), BlockingIOError (another store holds it), OSError (it cannot be made).

    Cost: a write or read is one callback and one copy of its rows, where the pages are in memory. On disk a sixteenth more
      rows than capacity and slack (16 to 1024 a lane), so that writes never touch rows that can be read.

    Example:
      >>> import fbuf
      >>> fbuf.storages.Memmap("/data/replay").path
      '/data/replay'
    """

    path: str | None = None
    keys: tuple[str, ...] | None = None
    slack: int | None = None
    on_expired: str = "raise"

    def __post_init__(self) -> None:
        self._check()

    @property
    def in_files(self) -> bool:
        """Always."""
        return True

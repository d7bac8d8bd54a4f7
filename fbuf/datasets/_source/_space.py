"""Whether the disk has room, asked before any work."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from fbuf.datasets._source._errors import SpaceError


def check_space(path: str | os.PathLike[str], needed: int, what: str) -> int:
    """Free bytes of the disk that `path` is or will be on.

    Args:
      needed: Bytes that will be written there.
      what: What they are, for the message: "Pong/1".
    Raises:
      SpaceError: there are fewer; nothing was made.
    """
    there = Path(path).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    free = shutil.disk_usage(there).free
    if needed > free:
        raise SpaceError(
            errno.ENOSPC,
            f"{what} needs {size_text(needed)} on the disk of {there}, which has {size_text(free)} free; nothing was begun. "
            f"Make room, take fewer pieces, or name another folder with root=",
        )
    return free


def missing(sizes: dict[str | os.PathLike[str], int]) -> int:
    """Bytes still to come of files of these sizes: what is there, or arrived in part, is not needed again.

    Args:
      sizes: Where each file will be -> its bytes.
    """
    return sum(max(0, size - max(_bytes(path), _bytes(f"{os.fspath(path)}.part"))) for path, size in sizes.items())


def size_text(size: float) -> str:
    """`"7.1 GB"`"""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _bytes(path: str | os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0

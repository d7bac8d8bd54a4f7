"""Names of files as listings say them: by strangers, and the only thing from outside that becomes part of a path.

A name is a relative path with `/` between its parts. What would lead out of a folder, or mean something to a shell, a terminal
or another system, is refused, not mended: a mended name is another file.
"""

from __future__ import annotations

import os
from pathlib import Path

from fbuf.datasets._source._errors import SourceError

_MOST_BYTES, _MOST_PART = 1024, 255
_REFUSED = frozenset('\\:*?"<>|')


def is_name(name: object) -> bool:
    """Whether it is the name of a file."""
    return not _wrong(name)


def check_name(name: object, where: str) -> str:
    """The name, if it is one.

    Args:
      where: The address of the listing that says it, for the message.
    Raises:
      SourceError: it is no relative path of plain parts.
    """
    wrong = _wrong(name)
    if wrong:
        raise SourceError(
            f"{where}: the listing names a file {str(name)[:120]!r}, which {wrong}; expected a path such as "
            f"'dqn/Pong/1/replay_logs/add_count_ckpt.0.gz'. Nothing of this listing is used."
        )
    return str(name)


def _wrong(name: object) -> str:
    if type(name) is not str or not name:
        return "is no text"
    parts = name.split("/")
    try:
        lengths = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "is no Unicode text"
    if max(lengths) > _MOST_PART or sum(lengths) + len(parts) > _MOST_BYTES:
        return "is too long"
    if not name.isprintable() or _REFUSED & set(name):
        return "has characters that paths should not have"
    if any(part in ("", ".", "..") for part in parts):
        return "leads out of its folder"
    return ""


def is_folder(name: object) -> bool:
    """Whether it is `folder/`: an empty object that stands for a folder in a bucket, and is no file."""
    return type(name) is str and name.endswith("/") and is_name(name[:-1])


def inside(root: str | os.PathLike[str], name: str) -> Path:
    """Where a file of that name lies under `root`. Raises SourceError for a name that is none."""
    return Path(root, *check_name(name, os.fspath(root)).split("/"))

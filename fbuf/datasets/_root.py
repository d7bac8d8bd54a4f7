"""Where data sets lie that are known by an id."""

from __future__ import annotations

import os
from pathlib import Path

from fbuf.datasets._atari import default_root


def root_of(root: str | os.PathLike[str] | None) -> Path:
    """The folder given, or the default one."""
    return (default_root() if root is None else Path(root).expanduser()).absolute()

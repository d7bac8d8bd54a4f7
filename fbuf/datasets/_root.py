"""Where data sets lie that are known by an id."""

from __future__ import annotations

import os
from pathlib import Path


def root_of(root: str | os.PathLike[str] | None) -> Path:
    """The folder given, or `$FBUF_DATASETS`, or `~/.cache/fbuf/datasets` (below `$XDG_CACHE_HOME` if that is set)."""
    if root is not None:
        return Path(root).expanduser().absolute()
    if given := os.environ.get("FBUF_DATASETS"):
        return Path(given).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fbuf" / "datasets"

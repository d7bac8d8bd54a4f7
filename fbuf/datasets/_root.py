"""Where data sets lie that are known by an id."""

from __future__ import annotations

import os
from pathlib import Path

from fbuf.datasets._writing import path_of


def default_root() -> Path:
    """`$FBUF_DATASETS`, else `~/.cache/fbuf/datasets` (or below `$XDG_CACHE_HOME`)."""
    if given := os.environ.get("FBUF_DATASETS"):
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fbuf" / "datasets"


def root_of(call: str, root: str | os.PathLike[str] | None) -> Path:
    """The folder given, or the default one. Raises TypeError: it is no path."""
    return (default_root() if root is None else path_of(call, "root", root, "or None for the default one")).absolute()

"""Versions of what a library's figures stand on."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.peers import Library


def versions(library: Library) -> dict[str, str | None]:
    """Distribution to version; None: not installed."""
    return {name: version(name) for name in library.distributions}


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None

"""Minari data sets, read from their files: neither Gymnasium nor the `minari` package is needed, but to download."""

from fbuf.datasets._minari._load import minari

__all__ = ["minari"]

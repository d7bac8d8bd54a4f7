"""The errors of sources. All can be pickled, since worker processes raise them."""

from __future__ import annotations


class SourceError(OSError):
    """A file or a listing is not available now; the message names its address."""


class FileCorrupted(ValueError):
    """A file of a data set is truncated, damaged or of another kind; the message names it."""


class SpaceError(OSError):
    """The disk has less room than the data set needs. Nothing was downloaded."""

"""The errors of checkpoints besides `StoreCorrupted`, which reports damaged bytes."""

from __future__ import annotations


class CheckpointNotFound(FileNotFoundError):
    """There is no checkpoint at that path."""


class VersionError(ValueError):
    """Another release of fbuf wrote the checkpoint, with features that this release lacks."""


class SchemaError(ValueError):
    """The checkpoint holds other leaves, shapes, dtypes or settings than requested."""

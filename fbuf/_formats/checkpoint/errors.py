"""The errors of checkpoints, beside `StoreCorrupted`, which is for bytes that are not what was written."""

from __future__ import annotations


class CheckpointNotFound(FileNotFoundError):
    """There is no checkpoint at that path."""


class VersionError(ValueError):
    """A checkpoint was written by another release of fbuf and needs what this one does not have."""


class SchemaError(ValueError):
    """What a checkpoint holds is not what was asked for: other leaves, shapes or dtypes."""

"""The errors of sources: files that cannot be had, and files that are not what they should be.

They are two, because they ask for two things: of the first kind another try or another mirror helps, of the second only
leaving the file out. Both cross processes.
"""

from __future__ import annotations


class SourceError(OSError):
    """A file or a listing could not be had; the message names its address and what happened."""


class SourceChanged(SourceError):
    """Another file has taken the name since it was listed, or since its first bytes were read: list again."""


class FileCorrupted(ValueError):
    """A file of a data set is not what it should be.

    Attributes:
      file: Its name.
      at: The byte where it was noticed, of the file as it is stored; None: of the whole file.
    """

    def __init__(self, message: str, *, file: str = "", at: int | None = None) -> None:
        super().__init__(message)
        self.file, self.at = file, at


class SpaceError(OSError):
    """The disk has less room than is needed; the message says whether nothing was begun, or what is kept."""

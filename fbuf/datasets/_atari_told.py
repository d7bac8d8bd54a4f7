"""What a user is told when a piece of a run cannot be had: which, why, and what to do."""

from __future__ import annotations

from pathlib import Path

from fbuf.datasets._atari_piece import Damaged
from fbuf.datasets._source import FileCorrupted, SourceError, SpaceError
from fbuf.datasets._workers import WorkerError


def spans(numbers: list[int]) -> str:
    """`0-48, 50`"""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def told(call: str, dataset_id: str, path: Path, number: int, error: BaseException) -> BaseException:
    """The error of a piece, which says what to do."""
    what = f"{call}: piece {number} of {dataset_id}"
    kept = f"Pieces that are whole stay at {path}."
    if isinstance(error, (FileCorrupted, Damaged)):
        text = f"{what} is damaged: {error} Leave it out with on_corrupt='skip', or try another source=. {kept}"
        file = getattr(error, "file", "")
        return _from(FileCorrupted(text, file=file, at=getattr(error, "at", None)), error)
    if isinstance(error, OSError):
        text = f"{what}: {(error.strerror or str(error)).rstrip('.')}. {kept} Call again to go on."
        if isinstance(error, SourceError):
            return _from(type(error)(text), error)
        kind = SpaceError if isinstance(error, SpaceError) else OSError
        return _from(kind(error.errno, text, error.filename), error)
    if isinstance(error, (WorkerError, MemoryError)):
        return _from(WorkerError(f"{what}: {error}. {kept} Call again to go on."), error)
    return _from(RuntimeError(f"{what}: {type(error).__name__}: {error} {kept}"), error)


def _from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error

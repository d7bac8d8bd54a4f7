"""Types of the host side: an array, its bytes, and the errors of a closed store and of damaged bytes."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
DType = np.dtype[Any]
F = TypeVar("F", bound=Callable[..., Any])


class StoreClosed(RuntimeError):
    """The store was closed; its rows are gone."""


class StoreCorrupted(RuntimeError):
    """Stored bytes do not decode to what was stored."""


def raise_if_corrupted(damaged: Array | None, there: Array) -> None:
    """Raise StoreCorrupted if a row that is there is damaged."""
    if damaged is not None and (damaged & there).any():
        raise StoreCorrupted(
            f"Store.read: {int((damaged & there).sum())} rows have other checksums than they were stored "
            f"with; expected the same. Their bytes were damaged: load the last checkpoint with fbuf.load(path)."
        )


def without_traceback(error: Exception) -> Exception:
    """Return a copy of an error without its traceback, whose frames would keep states and their store alive."""
    try:
        return copy.copy(error).with_traceback(None)
    except Exception:  # made of what it does not say
        return RuntimeError(f"{type(error).__name__}: {error}")


def flat(array: Array) -> memoryview:
    """Return the bytes of a C-contiguous array of any dtype (bfloat16 and float8 have no buffer protocol)."""
    return memoryview(cast(Any, array.reshape(-1).view(np.uint8)))


def records_errors(method: F) -> F:
    """Keep what a method raises as `last_error`: JAX turns exceptions of callbacks into text."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.last_error = without_traceback(error)
            raise

    return cast(F, call)


def unfit(found: str, expected: str, fix: str = "Load another checkpoint.") -> ValueError:
    """Return the error of arrays that a store cannot load."""
    return ValueError(f"Store.from_arrays: {found}; expected {expected}. {fix}")


def corrupted(found: str, expected: str) -> StoreCorrupted:
    """Return the error of damaged rows."""
    return StoreCorrupted(
        f"Store.read: {found}; expected {expected}. Bytes were damaged: load the last checkpoint with fbuf.load(path)."
    )


def damaged_file(found: str, expected: str) -> StoreCorrupted:
    """Return the error of a damaged file of a store."""
    return StoreCorrupted(
        f"Buffer.resume: {found}; expected {expected}. Bytes were damaged: start a new store at another path."
    )

"""Whether what a checkpoint says its state takes is there to be taken, before any of it is.

Rows that were never written are not stored, so that a few bytes may stand for all the memory of a machine: rightly, in the
first minute of a run, or because a file lies. Which it is no file can prove; a buffer that is given is what its user wants,
and all else must fit. Rejected: a bound by the bytes that are stored (it refuses what was saved early in a run).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

_MEMORY = Path("/proc/meminfo")


def nbytes(arrays: Iterable[tuple[Iterable[int], Any]]) -> int:
    """Bytes of arrays of some shapes and dtypes, however large these say that they are."""
    return sum(math.prod(shape) * jax.numpy.dtype(dtype).itemsize for shape, dtype in arrays)


def check(call: str, path: str, needed: int, stored: int) -> None:
    """Raises MemoryError if a state takes more than is free; of other devices than the CPU nothing: they say so themselves."""
    free = _free() if jax.default_backend() == "cpu" else None
    if free is not None and needed > free:
        raise MemoryError(
            f"{call}: the state in {path} takes {needed:,} bytes, of which {stored:,} are stored; expected at most {free:,}, "
            f"which are free. Load it where there is more memory, or say what you know to be there: {call}(path, buffer, "
            f"example=row). If it is larger than what was saved, do not trust it."
        )


def _free() -> int | None:
    """Bytes that the system can still give, swap included; None where it does not say."""
    try:
        lines = [line.split() for line in _MEMORY.read_text().splitlines()]
        sizes = {words[0]: int(words[1]) * 1024 for words in lines}
        return sizes["MemAvailable:"] + sizes["SwapFree:"]
    except (OSError, LookupError, ValueError):
        return None

"""Refuse arrays that look like another library's storage, and say how to read them.

Their names are those of usual data sets, but their rows are not: slots of a ring, final states that are no steps, slots that
were never written. A caller who means the arrays as they are says so by `fields=`, `ends=` or `rows=`.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from fbuf._core.arguments import is_int
from fbuf._core.pytree import under
from fbuf._rows.columns import Column, Fields

RING = ("_size", "_insertion_idx", "_lengths", "_offset", "last_index")
"""Names of a ring's cursor, as tianshou writes it beside the slots."""
TERMINALS = ("terminals", "terminal")
"""Names that mean terminations in D4RL, and ends of trajectories in OGBench."""
_TRUNCATIONS = ("timeouts", "timeout", "truncated", "truncations")
ENDS = {"terminated": "no bootstrap after them", "trajectory": "bootstrap, as after a time limit"}


def raise_refused(path: Any, error: BaseException | None) -> None:
    """Raise OSError with the path if the system refused to read; without an errno, or with EINVAL, the bytes are wrong."""
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        text = error.strerror if str(path) in str(error.strerror) else f"{path}: {error.strerror}"
        raise OSError(error.errno, f"{text}. Check the disk and the permissions; the file may be intact.") from error


def check_ring(call: str, names: Collection[str], fields: Fields) -> None:
    """Raise ValueError if leaves are the slots of a ring, or its cursor, unless `fields` names what each leaf is."""
    parts = {part: name for name in names for part in str(name).split("/")}
    found = [name for name in ("_meta", *RING) if name in parts]
    if found and not isinstance(fields, Mapping):
        name = parts[found[0]]
        raise ValueError(
            f"{call}: '{name}' is of a ring, whose slots are in no order of time. Save tianshou's buffer by save_hdf5(path) "
            f"and call from_file(path), or name all leaves if it is yours: fields={{'{name}': '{name}', ...}}."
        )


def check_terminals(call: str, names: Collection[str], fields: Fields, ends: str | None) -> None:
    """Raise ValueError if it is unknown what `terminals` mean: names are those there."""
    if ends is not None and ends not in ENDS:
        raise ValueError(f"{call}: ends is {ends!r}; expected 'terminated', 'trajectory' or None.")
    terminals = next((name for name in TERMINALS if name in names), None)
    renamed = isinstance(fields, Mapping)
    if odd := [name for name in ("valids", "masks") if name in names and not renamed]:
        raise ValueError(
            f"{call}: '{odd[0]}' is a leaf of OGBench, whose terminals end trajectories. Use from_ogbench(data), or name "
            f"all leaves if it is not: fields={{'terminals': 'terminated', ...}}."
        )
    if terminals is None:
        if ends is not None:
            raise ValueError(f"{call}: ends is {ends!r}, but no leaf is 'terminals'. Name them: fields={{...}}.")
        return
    if ends is None and not renamed and not any(name in names for name in _TRUNCATIONS):
        raise ValueError(
            f"{call}: '{terminals}' comes without timeouts. Pass ends='terminated' (discount 0: {ENDS['terminated']}) or "
            f"ends='trajectory' ({ENDS['trajectory']})."
        )


def checked_rows(call: str, stated: int, rows: int) -> int:
    """Return the stated number of rows. Raises ValueError if there are fewer."""
    if not is_int(stated) or not 1 <= stated <= rows:
        raise ValueError(f"{call}: rows is {stated!r}; expected an int from 1 to {rows}.")
    return int(stated)


def check_written(call: str, columns: Mapping[str, Column], rows: int) -> None:
    """Raise ValueError if two rows or more at the end are zeros in all leaves, as slots that were never written."""
    if rows < 3 or not (under("obs", columns) and ("reward" in columns or under("action", columns))):
        return
    size, last = 2, rows
    while last and (block := _zero(columns, max(0, last - size), last)).all():
        last, size = max(0, last - size), min(2 * size, 4096)
    if not last:
        return  # all rows are zeros
    written = last - int(np.argmin(block[::-1]))
    if rows - written < 2:
        return
    raise ValueError(
        f"{call}: rows {written} to {rows - 1} are zeros in every leaf, like slots that were never written. "
        f"Pass rows={written}, or rows={rows} if they are steps."
    )


def _zero(columns: Mapping[str, Column], first: int, last: int) -> Any:
    """Return bool[n], which rows are zeros."""
    zero = np.ones(last - first, bool)
    for column in columns.values():
        zero &= ~column.read(first, last).astype(bool).reshape(last - first, -1).any(axis=1)
    return zero

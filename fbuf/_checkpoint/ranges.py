"""Check the numbers of a loaded state: checksums do not say that a buffer wrote them.

Positions beyond the rows would be read unchecked on a device, and priorities that are not finite give such weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import host_ring
from fbuf._formats.checkpoint import SchemaError


def check_ranges(call: str, path: str, buffer: Buffer, leaves: Mapping[str, Any]) -> None:
    """Raise SchemaError if saved leaves of a state, by name, hold numbers that no buffer writes."""
    length = buffer.geometry.length
    cursor, size, _ = host_ring(leaves["state/header"])
    _check(call, path, "the cursor of a lane", cursor, (cursor >= 0) & (cursor < length), f"0 to {length - 1}")
    _check(call, path, "the size of a lane", size, (size >= 0) & (size <= length), f"0 to {length}")
    if type(buffer.sampler).__module__.split(".")[0] != "fbuf":
        return
    for name, leaf in leaves.items():
        field = name.rpartition("/")[2]
        if not name.startswith("state/sampler/") or field not in ("tree", "low", "top", "numbers", "held"):
            continue
        values = np.asarray(leaf)
        if field == "held":
            _check(call, path, f"'{name}'", values, (values >= 0) & (values <= length), f"0 to {length}")
        elif field == "tree":
            _check(call, path, f"'{name}'", values, np.isfinite(values) & (values >= 0), "finite numbers, 0 or more")
        elif field == "low":
            _check(call, path, f"'{name}'", values, values >= 0, "0 or more")
        elif field == "top":
            _check(call, path, f"'{name}'", values, values < np.inf, "finite numbers, or -inf")
        else:
            _check(call, path, f"'{name}'", values, ~np.isnan(values), "numbers")
            _check(call, path, "the largest priority", values[:1], np.isfinite(values[:1]), "a finite number")


def _check(call: str, path: str, what: str, values: Any, right: Any, expected: str) -> None:
    if not np.all(right):
        found = values[~right].reshape(-1)[0]
        raise SchemaError(f"{call}: {what} in {path} is {found}; expected {expected}. Load another checkpoint.")

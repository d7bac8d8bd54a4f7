"""The repr of a `BufferState`: leaves with shapes and dtypes, rows held, and bytes of the rest.

It must not fail or compute, also for states of tracers, shapes or donated arrays. It uses shapes only, and the number of rows
held where that can be read.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from fbuf._core.text_table import Section, html, human, text

WHOLE = "(row)"
"""Name shown for the leaf of rows that are bare arrays."""


def outline(state: Any) -> tuple[str, list[Section]]:
    """Return title and tables of a state."""
    capacity, leaves = _leaves(state.rows)
    title = f"BufferState({_held(state, capacity)})"
    beside = [(f.name, getattr(state, f.name)) for f in dataclasses.fields(state) if f.name != "rows"]
    parts = [(name, _kind(value), human(size)) for name, value in beside if (size := _size(value))]
    sections = [Section("rows", ("one row", "place"), tuple(leaves), left=3)] if leaves else []
    return title, [*sections, Section("beside", ("kept as", "bytes"), tuple(parts), left=2)]


def as_text(state: Any) -> str:
    """Return aligned text, or the class's name if that fails."""
    try:
        return text(*outline(state))
    except Exception:  # jax.tree.map may make any leaves
        return "BufferState(...)"


def as_html(state: Any) -> str:
    """Return HTML for notebooks."""
    try:
        return html(*outline(state))
    except Exception:
        return "<code>BufferState(...)</code>"


def _leaves(rows: Any) -> tuple[int | None, list[tuple[str, str, str]]]:
    """Return the capacity, and for each leaf its name, shape with dtype, and place."""
    described = getattr(rows, "outline", None)
    if described is not None:
        capacity, leaves = described()
        return capacity, [(name, *cells) for name, cells in leaves.items()]
    pairs = jax.tree_util.tree_flatten_with_path(rows)[0]
    found = [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]
    capacity = next((leaf.shape[0] for _, leaf in found if getattr(leaf, "shape", ())), None)
    return capacity, [(name or WHOLE, spec_text(leaf.shape[1:], leaf.dtype), "device") for name, leaf in found]


def spec_text(shape: Any, dtype: Any) -> str:
    """Return a spec as text: `uint8[84, 84]`."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _held(state: Any, capacity: int | None) -> str:
    room = "" if capacity is None else f" of {capacity:,}"
    header = state.header
    if isinstance(header, jax.core.Tracer):
        return f"traced,{room} rows"
    if isinstance(header, jax.Array) and header.is_deleted():
        return f"donated,{room} rows"
    try:
        return f"{int(np.asarray(state.ring.size).sum()):,}{room} rows"
    except Exception:  # shapes, or shards of other processes
        return f"?{room} rows"


def _kind(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return spec_text(value.shape, value.dtype)
    return type(value).__name__


def _size(value: Any) -> int:
    leaves = [leaf for leaf in jax.tree.leaves(value) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

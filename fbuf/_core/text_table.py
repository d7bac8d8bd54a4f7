"""Tables as aligned text, as HTML for notebooks, and for rich's consoles, from the same sections of cells; states as such.

HTML is escaped, has no external references, and takes its colours from the page.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from fbuf._core.packed_leaf import stored_leaves


class Section(NamedTuple):
    """A part of a table: the first columns are text, the others numbers."""

    title: str
    heads: tuple[str, ...]  # of the columns after the first; () for none, and then all are text
    rows: tuple[tuple[str, ...], ...]
    left: int = 1  # columns of text

    def side(self, column: int) -> Literal["left", "right"]:
        """Return the alignment of a column: "left" or "right"."""
        return "left" if column < self.left or not self.heads else "right"


def human(size: float) -> str:
    """Return bytes with a unit: "16.0 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 row", "2,000 rows"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def printable(text: str) -> str:
    """Return text as it is, or its repr if parts of it cannot be printed."""
    return text if text.isprintable() else repr(text)


def number(value: float | None) -> str:
    """Return a number with all digits before the point, or four digits; "" for None."""
    if value is None:
        return ""
    if isinstance(value, int) or (1e3 <= abs(value) < 1e9) or (float(value).is_integer() and abs(value) < 1e9):
        return f"{round(value):,}"
    return f"{value:.4g}"


def _printable(title: str, sections: Sequence[Section]) -> tuple[str, list[Section]]:
    """Return title and sections with characters that are not printable escaped: names of leaves may have any."""

    def clean(cell: str) -> str:
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cell)

    def cleaned(cells: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(clean, cells))

    return clean(title), [
        Section(clean(s.title), cleaned(s.heads), tuple(map(cleaned, s.rows)), s.left) for s in sections
    ]


def text(title: str, sections: Sequence[Section]) -> str:
    """Return aligned text, one line per row, without trailing blanks. First columns have equal widths."""
    title, sections = _printable(title, sections)
    first = max((len(row[0]) for section in sections for row in section.rows), default=0) + 2
    lines = [title] if title else []
    for section in sections:
        if lines:
            lines.append("")
        grid = [(section.title, *section.heads), *(("  " + row[0], *row[1:]) for row in section.rows)]
        columns = range(1, max(map(len, grid)))
        widths = [first, *(max(len(row[i]) if section.heads else 0 for row in grid) for i in columns)]
        for row in grid:
            padded = [
                cell.ljust(width) if section.side(i) == "left" else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=False))
            ]
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


_STYLE = "border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:90%"
_HEAD = "padding:0.5em 0.8em 0.1em 0;text-align:{};border-bottom:1px solid currentColor;background:none"
_CELL = "padding:0.1em 0.8em 0.1em 0;text-align:{};background:none"


def html(title: str, sections: Sequence[Section]) -> str:
    """Return an HTML table: well-formed, escaped, without scripts or external resources."""
    from html import escape  # slow to import: a table of 2,000 entities

    title, sections = _printable(title, sections)
    columns = max((len(row) for s in sections for row in (("", *s.heads), *s.rows)), default=1)
    out = [f'<table style="{_STYLE}">']
    if title:
        out.append(f'<caption style="text-align:left;padding:0"><code>{escape(title)}</code></caption>')

    def line(section: Section, cells: Sequence[str], tag: str, style: str) -> str:
        spans = [(cell, section.side(i), 1) for i, cell in enumerate(cells)] + [("", "left", columns - len(cells))]
        if not section.heads and tag == "td":
            spans = [(cells[0], "left", 1), ("  ".join(cells[1:]), "left", columns - 1)]
        parts = (f'<{tag} colspan="{n}" style="{style.format(side)}">{escape(c)}</{tag}>' for c, side, n in spans if n)
        return f"<tr>{''.join(parts)}</tr>"

    for section in sections:
        head = line(section, (section.title, *section.heads), "th", _HEAD)
        out.append(f"<tbody>{head}{''.join(line(section, row, 'td', _CELL) for row in section.rows)}</tbody>")
    return "".join(out) + "</table>"


def bars(title: str, counts: Sequence[int], low: str, high: str, note: str = "") -> str:
    """Return a small histogram as HTML: an inline SVG in the colour of the text, and the least and largest value below."""
    from html import escape

    most, step = max(counts, default=0) or 1, 4
    rects = (
        f'<rect x="{step * i}" y="{30 - max(30 * n / most, 1):.1f}" width="{step - 1}" height="{max(30 * n / most, 1):.1f}"/>'
        for i, n in enumerate(counts)
        if n
    )
    size = f'width="{step * len(counts)}" height="30"'
    return (
        f'<div style="display:inline-block;margin:0.8em 1.5em 0 0;font-size:80%">{escape(title)}{escape(note)}<br/>'
        f'<svg {size} fill="currentColor" role="img" aria-label="histogram of {escape(title)}">{"".join(rects)}</svg>'
        f'<div style="display:flex;justify-content:space-between"><span>{escape(low)}</span><span>{escape(high)}</span>'
        "</div></div>"
    )


WHOLE = "(row)"
"""Name shown for the leaf of rows that are bare arrays."""


def outline(state: Any, joined: str = "") -> tuple[str, list[Section]]:
    """Return title and tables of a state, of shapes only: it must not compute, also for tracers and donated arrays.

    `joined` names the state whose shards it joins; others may be stacked.
    """
    rows, leading = state.rows, () if joined else state.leading
    if leading:
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[len(leading) :], x.dtype), rows)
    capacity, leaves = _leaves(rows)
    room = "" if capacity is None else f" of {''.join(f'{n:,} x ' for n in leading)}{capacity:,}"
    title = f"{joined or 'BufferState'}({_rows_text(state, room)})"
    beside = [(f.name, getattr(state, f.name)) for f in dataclasses.fields(state) if f.name != "rows"]
    parts = [(name, _kind(value), human(size)) for name, value in beside if (size := _size(value))]
    sections = [Section("rows", ("one row", "place"), tuple(leaves), left=3)] if leaves else []
    return title, [*sections, Section("beside", ("kept as", "bytes"), tuple(parts), left=2)]


def as_text(state: Any, joined: str = "") -> str:
    """Return aligned text, or the name of the class if that fails."""
    try:
        return text(*outline(state, joined))
    except Exception:  # jax.tree.map may make any leaves
        return f"{joined or 'BufferState'}(...)"


def as_html(state: Any, joined: str = "") -> str:
    """Return HTML for notebooks."""
    try:
        return html(*outline(state, joined))
    except Exception:
        return f"<code>{joined or 'BufferState'}(...)</code>"


def _leaves(rows: Any) -> tuple[int | None, list[tuple[str, str, str]]]:
    """Return the capacity, and for each leaf its name, shape with dtype, and place."""
    described = getattr(rows, "outline", None)
    if described is not None:
        capacity, leaves = described()
        return capacity, [(name, *cells) for name, cells in leaves.items()]
    found = stored_leaves(rows)
    capacity = next((leaf.shape[0] for leaf in found.values() if getattr(leaf, "shape", ())), None)
    return capacity, [(name or WHOLE, spec_text(leaf.shape[1:], leaf.dtype), "device") for name, leaf in found.items()]


def spec_text(shape: Any, dtype: Any) -> str:
    """Return a spec as text: `uint8[84, 84]`."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _rows_text(state: Any, room: str) -> str:
    if isinstance(state.header, jax.core.Tracer):
        return f"traced,{room} rows"
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        return f"donated,{room} rows"  # in JAX 0.11.2 the header stays if it was read before
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

"""Buffers of a mixture hand out rows of one structure, or an error says which leaf is not the same and what to do.

What they store may differ; what counts is what `sample` gives, after view and transforms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from fbuf._tree import named_leaves, spec_of


def check_alike(call: str, parts: Sequence[tuple[str, Any]]) -> None:
    """Raises unless data of all buffers, arrays or shapes, have the same leaves but for their first axis.

    Raises:
      ValueError: another structure, or a leaf of another shape or dtype.
    """
    first, one = parts[0]
    structure: Any = jax.tree.structure(one)
    for other, two in parts[1:]:
        if structure == jax.tree.structure(two) and _texts(one) == _texts(two):
            continue
        ours, theirs = _texts(one), _texts(two)
        lines = [
            f"  {name or '(the row)'}: {ours.get(name, 'nothing')} in '{first}', {theirs.get(name, 'nothing')} in '{other}'"
            for name in dict.fromkeys((*ours, *theirs))
            if ours.get(name) != theirs.get(name)
        ]
        if not lines:
            lines = [f"  {structure} in '{first}', {jax.tree.structure(two)} in '{other}'"]
        raise ValueError(
            f"{call}: what the buffers hand out is not alike; expected the same leaves of the same shapes and dtypes:\n"
            + "\n".join(lines)
            + "\nBring both to one form with Buffer(on_read=...), as fbuf.transforms.Select, Rename and Cast do, or give them "
            "the same view."
        )


def _texts(data: Any) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape[1:])}" for name, leaf in spec_of(named_leaves(data)).items()}

"""Return the drawn rows themselves. Every row held is an anchor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec
from fbuf._interfaces.sampler import AnchorSet
from fbuf._interfaces.storage import Read
from fbuf._interfaces.view import AnchorRule, View, Window


class HostRow:
    """Rows in NumPy."""

    back = ahead = 0

    def __init__(self, spec: Spec, structure: Any):
        self._numbers = list(range(len(spec)))
        self.example = structure.unflatten([np.zeros(0) for _ in spec])

    def read(self, rows: Any, slot: np.ndarray) -> list[np.ndarray] | None:
        """Return the leaves of the rows in slots int64[B] of `rows`, a `HeldRows`; None if it cannot read them."""
        return rows.read([(self._numbers, rows.at(slot))])


@component
class Row(View):
    """Return rows, leaves `[B, ...]`, in the structure in which they were added.

    Example:
      >>> import fbuf
      >>> fbuf.Buffer(capacity=1000).view
      Row()
    """

    rule = AnchorRule("row")

    def window(self, spec: Spec, anchors: AnchorSet, slot: jax.Array, mask: jax.Array, key: jax.Array) -> Window:
        return Window(tuple(Read(name, slot) for name in spec), None)

    def assemble(self, spec: Spec, structure: Any, arrays: Sequence[jax.Array], window: Window) -> PyTree:
        return structure.unflatten(arrays)

    def on_host(self, spec: Spec, structure: Any) -> HostRow:
        """Return these rows in NumPy."""
        return HostRow(spec, structure)

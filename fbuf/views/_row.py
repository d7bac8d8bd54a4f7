"""Return the drawn rows themselves. Every row held is an anchor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec
from fbuf._interfaces.sampler import EligibleSet
from fbuf._interfaces.storage import Read
from fbuf._interfaces.view import EligibilityRule, View, Window


@component
class Row(View):
    """Return rows, leaves `[B, ...]`, in the structure in which they were added.

    Example:
      >>> import fbuf
      >>> fbuf.Buffer(capacity=1000).view
      Row()
    """

    rule = EligibilityRule("row")

    def window(self, spec: Spec, eligible: EligibleSet, slot: jax.Array, mask: jax.Array, key: jax.Array) -> Window:
        return Window(tuple(Read(name, slot) for name in spec), None)

    def assemble(self, spec: Spec, structure: Any, arrays: Sequence[jax.Array], window: Window) -> PyTree:
        return structure.unflatten(arrays)

"""`Row`: a drawn anchor is the row itself, in the structure it was added with. Every row held is an anchor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._config import component
from fbuf._tree import PyTree, Spec
from fbuf._typing import Geometry, Read, Window


@component
class Row:
    """Batches are rows, leaves `[B, ...]`.

    Example:
      >>> import fbuf
      >>> fbuf.Buffer(capacity=1000).view
      Row()
    """

    @property
    def back(self) -> int:
        return 0

    @property
    def ahead(self) -> int:
        return 0

    @property
    def cut_ends(self) -> bool:
        return True

    @property
    def reset_rows(self) -> bool:
        return False

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        return (), None

    def check(self, spec: Spec) -> None:
        """Any rows will do."""

    def decide(self, flags: jax.Array, available: jax.Array) -> tuple[jax.Array, jax.Array]:
        every = jnp.arange(flags.shape[0], dtype=jnp.int32)[:, None] < available[None, :]
        return every, every

    def window(
        self,
        spec: Spec,
        geometry: Geometry,
        flags: jax.Array | None,
        slot: jax.Array,
        mask: jax.Array,
    ) -> Window:
        return Window(tuple(Read(name, slot) for name in spec), None)

    def assemble(self, spec: Spec, structure: Any, arrays: Sequence[jax.Array], window: Window) -> PyTree:
        return structure.unflatten(arrays)

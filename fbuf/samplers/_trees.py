"""What `Prioritized` asks of its priorities, wherever they lie: `_devicetree` or `_hosttree`."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax


class Drawn(NamedTuple):
    """Leaves drawn, and what their weights are reckoned by."""

    slot: jax.Array  # int32[B]
    leaf: jax.Array  # float32[B]
    mass: jax.Array  # float32[], sum of all leaves
    least: jax.Array  # float32[], the least leaf above 0; infinite if there is none, 0 if nobody asked


class Trees(Protocol):
    """The leaves float32[C] of a buffer with their sum and, if asked for, the least of them.

    `tree` and `low` are pytrees of arrays, what `init` gives or an earlier call; nobody else knows which of them holds what.
    The draws, the leaves and the numbers beside them are the same wherever they lie, bit for bit.
    """

    def init(self, capacity: int, least: bool) -> tuple[Any, Any]:
        """All leaves 0."""

    def set(
        self, tree: Any, low: Any, slot: jax.Array, leaf: jax.Array, capacity: int, token: jax.Array
    ) -> tuple[Any, Any]:
        """Writes leaves float32[B] to slots int32[B]; those out of range are skipped, of equal ones the last wins."""

    def draw(self, tree: Any, low: Any, key: jax.Array, batch_size: int, capacity: int, stratified: bool) -> Drawn:
        """Draws leaves in proportion; see `fbuf._sumtree.draw`."""

    def clear(self, tree: Any, low: Any, capacity: int, least: bool) -> tuple[Any, Any]:
        """All leaves 0 again."""

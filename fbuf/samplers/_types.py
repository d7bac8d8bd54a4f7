"""What the two trees of `Prioritized`, on the device and on the host, return."""

from __future__ import annotations

from typing import NamedTuple

import jax


class Drawn(NamedTuple):
    """Leaves drawn, and what their weights are computed from."""

    slot: jax.Array  # int32[B]
    leaf: jax.Array  # float32[B]
    mass: jax.Array  # float32[], sum of all leaves
    least: jax.Array  # float32[], the smallest leaf above 0; infinite if there is none, 0 if it was not asked for

"""`BufferState`: everything about a buffer that changes, as one pytree of arrays."""

from __future__ import annotations

from typing import Any

import jax

from fbuf._anchors import Anchors
from fbuf._config import state
from fbuf._scatter import Scatter
from fbuf._typing import Ring

COUNTERS = (
    "refused_nonfinite",
    "refused_out_of_range",
    "refused_stale",
    "refused_closed",
    "empty_samples",
    "expired_rows",
    "refused_rows",
    "retired_rows",
    "draws_refused",
)
"""What is counted rather than raised: priorities and indices refused, draws from nothing, rows read too late, rows that
found no room, and (by design, so that nothing raises for them) the oldest rows given up for new ones and the draws that
landed on rows which had found no room."""
BY_DESIGN = ("retired_rows", "draws_refused")


@state
class BufferState:
    """Everything that changes. Arrays only, so it jits, scans, donates, shards and checkpoints.

    Nothing here is meant to be touched; `stats`, `rows`, `get` and `last` look inside.
    """

    rows: Any  # the storage's: for Device the rows themselves, leaves [C, ...]
    ring: Ring  # where each lane writes next; where rows lie in no order, how many there are
    anchors: Anchors | None  # which rows can be drawn; None where all can
    sampler: Any  # the sampler's: logs, priorities
    counters: jax.Array  # uint32[9], see `COUNTERS`
    token: jax.Array  # int32[], always 0: orders reads before writes (`fbuf._pin`)
    scatter: Scatter | None = None  # which row lies in each slot; None where the rings say it

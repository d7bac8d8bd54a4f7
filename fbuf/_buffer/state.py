"""`BufferState`: everything about a buffer that changes, as one pytree of arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core import state_repr
from fbuf._core.component import component, state
from fbuf._core.geometry import Ring
from fbuf._core.row_format import RowFormat
from fbuf._core.sample import Sample
from fbuf._indexing.anchors import Anchors
from fbuf._indexing.scatter import Scatter

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


@component
class ReadNames:
    """The leaves that a view reads, read by read. Static."""

    names: tuple[str, ...]


@state
class Ahead:
    """The batch drawn ahead, which the next `sample` hands out (`Buffer(prefetch=1)`)."""

    batch: Sample  # as it was drawn, without data; `mask` False throughout: nothing is pending
    reads: ReadNames  # the view's, and what it wants remembered
    context: Any
    held: Any  # the storage's: what is read, or what to read it by
    stale: jax.Array  # uint32[], draws handed out whose anchor had gone since they were drawn
    reading: Any = None  # `fbuf._buffer.transforms.Reading`, of when it was drawn; None where `on_read` needs none

    def dropped(self) -> Ahead:
        """With nothing pending."""
        nothing = dataclasses.replace(self.batch, mask=jnp.zeros_like(self.batch.mask))
        return dataclasses.replace(self, batch=nothing)


@state
class Transforms:
    """What transforms know, by the names of their stages: what `transforms.apply` takes as `memory`."""

    given: RowFormat | None  # what rows are before `on_write`; None where they are stored as they come
    write: dict[str, Any]  # of `on_write`
    read: dict[str, Any]  # of `on_read`


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
    token: jax.Array  # int32[], always 0: orders reads before writes (`fbuf._core.ordering`)
    scatter: Scatter | None = None  # which row lies in each slot; None where the rings say it
    ahead: Ahead | None = None  # None without prefetch
    transforms: Transforms | None = None  # None where transforms remember nothing, and none stands before the rows

    def __repr__(self) -> str:
        return state_repr.as_text(self)

    def _repr_html_(self) -> str:
        return state_repr.as_html(self)


def refuse_donated(call: str, state: BufferState) -> None:
    """Raises if its arrays are gone. A tracer and a shape have none to lose."""
    token = state.token
    if not isinstance(token, jax.core.Tracer) and hasattr(token, "is_deleted") and token.is_deleted():
        raise RuntimeError(
            f"{call}: the state was donated, and its arrays are gone; expected one that is not. Use the state that the "
            f"step returned: state = step(state)."
        )

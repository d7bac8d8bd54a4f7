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
"""What is counted instead of raised: refused priorities and indices, draws from an empty buffer, expired rows, and rows that
did not fit. Those of `BY_DESIGN` are not errors: old rows evicted for new ones, and draws of rows that did not fit."""
BY_DESIGN = ("retired_rows", "draws_refused")


@component
class ReadNames:
    """The leaf of each read of a view. Static."""

    names: tuple[str, ...]


@state
class Ahead:
    """The prefetched batch, which the next `sample` returns (`Buffer(prefetch=1)`)."""

    batch: Sample  # as it was drawn, without data; `mask` is False throughout if nothing is pending
    reads: ReadNames  # of the view
    context: Any
    held: Any  # of the storage: the rows, or what it needs to read them
    stale: jax.Array  # uint32[], draws returned after their anchor was evicted
    reading: Any = None  # `fbuf._buffer.transforms.Reading` of the draw; None unless `on_read` needs it

    def dropped(self) -> Ahead:
        """Return it without a pending batch."""
        nothing = dataclasses.replace(self.batch, mask=jnp.zeros_like(self.batch.mask))
        return dataclasses.replace(self, batch=nothing)


@state
class Transforms:
    """The memory of transforms by the names of their stages, as `transforms.apply` takes it."""

    given: RowFormat | None  # format of rows before `on_write`; None without `on_write`
    write: dict[str, Any]  # of `on_write`
    read: dict[str, Any]  # of `on_read`


@state
class BufferState:
    """The state of a buffer: a pytree of arrays.

    Its fields are private; read it with `stats`, `rows`, `get` and `last`.
    """

    rows: Any  # of the storage: for Device the rows themselves, leaves [C, ...]
    ring: Ring  # where each lane writes next; with a Scattering writer, how many rows are held
    anchors: Anchors | None  # which rows can be drawn; None if all can
    sampler: Any  # of the sampler: logs, priorities
    counters: jax.Array  # uint32[9], see `COUNTERS`
    token: jax.Array  # int32[], always 0: orders reads before writes (`fbuf._core.ordering`)
    scatter: Scatter | None = None  # the row in each slot; None with a Streaming writer
    ahead: Ahead | None = None  # None without prefetch
    transforms: Transforms | None = None  # None without `on_write` and without memory

    def __repr__(self) -> str:
        return state_repr.as_text(self)

    def _repr_html_(self) -> str:
        return state_repr.as_html(self)


def refuse_donated(call: str, state: BufferState) -> None:
    """Raise if the arrays of a state were donated."""
    token = state.token
    if not isinstance(token, jax.core.Tracer) and hasattr(token, "is_deleted") and token.is_deleted():
        raise RuntimeError(
            f"{call}: the state was donated, and its arrays are gone; expected one that is not. Use the state that the step "
            f"returned: state = step(state)."
        )


def given_of(state: BufferState) -> RowFormat | None:
    """Return the format of rows before `on_write`."""
    return None if state.transforms is None else state.transforms.given

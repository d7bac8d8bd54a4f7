r"""Draw one batch from several shards: how many rows of each, and their weights.

A shard's share :math:`g_s = M_s / M` of a draw from the whole is that of its mass. The shares :math:`h_s` that decided the
numbers of rows are those of the masses last told, which may be a few batches old. Row i of shard s is expected
:math:`B h_s P_s(i)` times in a batch and has :math:`P(i) = g_s P_s(i)`, so its weight is :math:`g_s / h_s` times that of a draw
from one buffer: exact however old the shares are, and equal to it where they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_Array = np.ndarray[Any, Any]


class Facts(NamedTuple):
    """What a shard tells of its rows."""

    total: float  # mass of its anchors
    unit: float  # log2 of the unit of `total` and `least`
    least: float  # smallest mass of an anchor; 0 if it is not tracked
    number: float  # anchors
    beta: float  # of the sampler
    rarest: float = np.inf  # smallest probability of a row drawn there


NONE = Facts(0.0, 0.0, 0.0, 0.0, 0.0)


def shares(facts: Sequence[Facts]) -> _Array:
    """Return float64[K], the share of each shard; by the numbers of anchors if nothing has mass, zeros if there are none."""
    mass = _masses(facts, "total")
    if not mass.any():
        mass = np.array([f.number for f in facts], np.float64)
    return mass / (mass.sum() or 1.0)


def _masses(facts: Sequence[Facts], field: str) -> _Array:
    """Return `total` or `least` of all shards in one unit; 0 where it is not known."""
    largest = max((f.unit for f in facts if f.total > 0), default=0.0)
    values = (getattr(f, field) if f.total > 0 else 0.0 for f in facts)
    masses = [
        value * np.exp2(f.unit - largest) if 0 < value < np.inf else 0.0 for value, f in zip(values, facts, strict=True)
    ]
    return np.array(masses, np.float64)


def counts(share: _Array, batch_size: int, uniform: float) -> _Array:
    r"""Return int64[K], rows of each shard, :math:`\lfloor B \sum_{r \le s} h_r + u \rfloor` differences."""
    upto = np.cumsum(share)
    ends = np.minimum(np.floor(upto / upto[-1] * batch_size + uniform).astype(np.int64), batch_size)
    return np.diff(ends, prepend=0)


def weigh(
    facts: Sequence[Facts],
    used: _Array,
    shard: _Array,
    chance: _Array,
    mask: _Array,
    beta: float | None,
    sampler: Any,
) -> tuple[_Array, _Array]:
    """Return probabilities and weights float32[B] of rows drawn from several shards.

    Args:
      facts: Told with the rows.
      used: float64[K], the shares that decided the numbers of rows.
      shard, chance, mask: [B], of each row its shard, its probability there, and whether it is one.
      beta: None: that of the state of the sampler.
    """
    share = shares(facts)
    factor = share / np.where(used > 0, used, 1.0)
    whole = np.where(mask, chance * share[shard], 0.0)
    weight, drawable = factor[shard], whole > 0  # a shard whose mass was set to 0 may still have been drawn from
    if sampler.prioritized:
        normalize = getattr(sampler, "normalize", None)
        number = sum(f.number for f in facts)
        beta = max(f.beta for f in facts) if beta is None else beta
        weight = weight * (number * np.where(drawable, whole, 1.0)) ** -beta
        top: Any = 1.0
        if normalize == "batch":  # of which these may be some rows
            rarest = np.array([f.rarest for f in facts])
            some = (share > 0) & (rarest < np.inf)
            top = np.max(factor[some] * (number * rarest[some] * share[some]) ** -beta, initial=0.0)
        elif normalize == "buffer":
            least = _masses(facts, "least") / (_masses(facts, "total").sum() or 1.0)
            top = np.max((number * least[least > 0]) ** -beta, initial=0.0)
        weight = weight / (top or 1.0)
    return whole.astype(np.float32), np.where(drawable, weight, 0.0).astype(np.float32)

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

from fbuf._members import quota, weights

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
    return _by_mass(facts)[0]


def _by_mass(facts: Sequence[Facts]) -> Any:
    columns = np.array([(f.total, f.unit, f.least, f.number) for f in facts], np.float64)
    return weights.by_mass(*columns.T)


def counts(share: _Array, batch_size: int, uniform: float) -> _Array:
    """Return int64[K], rows of each shard."""
    return np.diff(quota.ends_by_mass(share, batch_size, uniform), prepend=0)


def weigh(
    facts: Sequence[Facts], used: _Array, shard: _Array, chance: _Array, mask: _Array, beta: float | None, sampler: Any
) -> tuple[_Array, _Array]:
    """Return probabilities and weights float32[B] of rows drawn from several shards.

    Args:
      facts: Told with the rows.
      used: float64[K], the shares that decided the numbers of rows.
      shard, chance, mask: [B], of each row its shard, its probability there, and whether it is one.
      beta: None: that of the state of the sampler.
    """
    share, least = _by_mass(facts)
    factor = share / np.where(used > 0, used, 1.0)
    whole = np.where(mask, chance * share[shard], 0.0)
    has_mass = whole > 0  # a shard whose mass was set to 0 may still have been drawn from
    if sampler.prioritized:
        normalize, number = sampler.normalize, sum(f.number for f in facts)
        beta = max(f.beta for f in facts) if beta is None else beta
        weight = weights.weigh(number * whole, has_mass, beta, factor[shard])
        if normalize == "batch":  # of which these may be some rows
            rarest = weights.least_drawn(share, np.array([f.rarest for f in facts]))
            weight = weights.normalized(weight, weights.largest_weight(number, rarest, beta, factor))
        elif normalize == "buffer":
            weight = weights.normalized(weight, weights.largest_weight(number, least, beta))
    else:
        weight = np.where(has_mass, factor[shard], 0.0)
    return whole.astype(np.float32), weight.astype(np.float32)

"""Quantiles (also weighted), effective sizes, and lengths of episodes, with numpy in float64.

A quantile is a value that occurs: the smallest whose share of lower or equal values is large enough. Quantiles of integers
are integers, and weighted and unweighted quantiles have one definition.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

WIDE = 30.0
"""Largest over smallest, from which bins have equal ratios."""
LEVELS = (0, 0.05, 0.25, 0.5, 0.75, 0.95, 1)


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """Count, mean, minimum, maximum, and the 5, 25, 50, 75 and 95 % quantiles of values."""

    count: int
    mean: float
    min: float
    q05: float
    q25: float
    median: float
    q75: float
    q95: float
    max: float


class Episodes(NamedTuple):
    """Complete and incomplete episodes."""

    number: int  # complete: from first row to last
    lengths: Quantiles | None  # rows of each complete episode; None: there is none
    cut: int  # incomplete: first rows overwritten, or last rows missing


class Histogram(NamedTuple):
    """Numbers of values in bins of equal width, or of equal ratio if the values differ by a factor of 30 or more."""

    counts: tuple[int, ...]
    low: float
    high: float
    is_log: bool


def bin_edges(values: np.ndarray, most: int) -> tuple[np.ndarray, bool]:
    """Return the edges of at most so many bins of values [N], N > 0, and whether they have equal ratios.

    Bins of integers hold equally many. Values <= 0 are below bins of equal ratio.
    """
    low, high = values.min(), values.max()
    if values.dtype.kind in "iu":
        step = -(-(int(high) - int(low) + 1) // most)
        return np.arange(low, int(high) + 1 + step, step) - 0.5, False
    least = values[values > 0].min(initial=np.inf)
    if high > WIDE * least:
        return np.geomspace(least, high * (1 + 1e-6), most + 1, dtype=np.float64), True
    if low == high:
        low, high = 0.95 * low, 1.05 * high or 1.0
    return np.linspace(low, high, most + 1, dtype=np.float64), False


def histogram(values: np.ndarray, most: int = 32) -> Histogram | None:
    """Return the histogram of values [N] in at most so many bins; None if there are none. Values <= 0 are in the first bin."""
    if not values.size:
        return None
    edges, is_log = bin_edges(values, most)
    counts = np.histogram(np.maximum(values, edges[0]), edges)[0]
    return Histogram(tuple(counts.tolist()), float(edges[0] if is_log else values.min()), float(values.max()), is_log)


def quantiles(values: np.ndarray, weights: np.ndarray | None = None) -> Quantiles | None:
    """Return quantiles of values [N] with weights [N] >= 0; None if there are none with a positive weight."""
    if weights is not None:
        values, weights = values[weights > 0], weights[weights > 0].astype(np.float64)
    if not values.size:
        return None
    levels = np.quantile(values, LEVELS, weights=weights, method="inverted_cdf").tolist()
    mean = float(np.average(values.astype(np.float64), weights=weights))
    return Quantiles(values.size, mean, *levels)


def effective_size(chance: np.ndarray) -> float:
    r"""Return the effective number of values drawn with probabilities [N]: :math:`(\sum p)^2 / \sum p^2`.

    Source: Kish 1965, "Survey Sampling".
    """
    chance = chance.astype(np.float64)
    square = np.sum(chance * chance)
    return float(np.sum(chance) ** 2 / square) if square > 0 else 0.0


def share_of_likeliest(chance: np.ndarray, part: float) -> float:
    """Return the share of draws of the most probable `part` in (0, 1] of values (rounded up)."""
    chance = chance.astype(np.float64)
    total = np.sum(chance)
    if not total > 0:
        return 0.0
    number = int(np.ceil(part * chance.size))
    return float(np.sum(np.partition(chance, chance.size - number)[chance.size - number :]) / total)


def episode_lengths(
    exists: np.ndarray, start: np.ndarray, end: np.ndarray, reset: np.ndarray
) -> tuple[np.ndarray, int]:
    """Return lengths int64[K] of complete episodes, lane by lane, oldest first; and the number of incomplete ones.

    Args:
      exists, start, end, reset: bool[L, E], rows of each lane in order, those that exist first. A `reset` row has the final
        observation of the previous episode, and is not counted.
    """
    lengths, cut = [], 0
    for lane in range(exists.shape[1]):
        here = exists[:, lane]
        begins = np.flatnonzero(start[:, lane] & here)
        ends = np.flatnonzero(end[:, lane] & here)
        steps = np.cumsum(here & ~reset[:, lane])
        # Of each beginning the first end from there on, if it comes before the next beginning.
        which = np.searchsorted(ends, begins)
        last = np.append(ends, exists.shape[0])[which]
        whole = last < np.append(begins[1:], exists.shape[0])
        before = np.where(begins > 0, steps[begins - 1], 0)
        lengths.append(steps[last[whole]] - before[whole])
        first = begins[0] if begins.size else int(here.sum())
        orphans = bool((here & ~reset[:, lane])[:first].any())
        cut += int((~whole).sum()) + orphans
    return np.concatenate(lengths).astype(np.int64), cut

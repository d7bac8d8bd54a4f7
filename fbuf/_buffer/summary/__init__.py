"""`buffer.summary(state)`: statistics of every row, for people and loggers.

One jitted call reads the state (`collect`); numpy computes statistics in float64 (`statistics`), because float32 cannot sum
millions of probabilities. For scalars inside a step there is `Buffer.stats`.
"""

from fbuf._buffer.summary.collect import Seen, seen
from fbuf._buffer.summary.statistics import Episodes, Quantiles
from fbuf._buffer.summary.summary import LeafSummary, Summary, summary

__all__ = ["Episodes", "LeafSummary", "Quantiles", "Seen", "Summary", "seen", "summary"]

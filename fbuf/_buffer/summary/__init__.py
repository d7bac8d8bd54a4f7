"""`buffer.summary(state)`: statistics of every row, for people and loggers.

One jitted call reads the state (`collect`); numpy computes statistics in float64 (`statistics`), because float32 cannot sum
millions of probabilities. For scalars inside a step there is `Buffer.stats`.
"""

from fbuf._buffer.summary.collect import Seen, look, newest_of_each, seen, seen_of, seen_without_rows
from fbuf._buffer.summary.statistics import Episodes, Quantiles
from fbuf._buffer.summary.summary import LeafSummary, Summary, checked_compare, summary, summary_of

__all__ = [
    "Episodes",
    "LeafSummary",
    "Quantiles",
    "Seen",
    "Summary",
    "checked_compare",
    "look",
    "newest_of_each",
    "seen",
    "seen_of",
    "seen_without_rows",
    "summary",
    "summary_of",
]

"""`buffer.summary(state)`: what a buffer holds and would draw, worked out once, for people and loggers.

`stats` is for inside a step and so knows scalars only. This looks at every row: one jitted call reads what the state says of
each (`_look`), and numpy makes numbers of it in double precision (`_numbers`): a float32 cannot add up millions of chances.
"""

from fbuf._buffer.summary.collect import Seen, seen
from fbuf._buffer.summary.statistics import Episodes, Quantiles
from fbuf._buffer.summary.summary import LeafSummary, Summary, summary

__all__ = ["Episodes", "LeafSummary", "Quantiles", "Seen", "Summary", "seen", "summary"]

"""`buffer.summary(state)`: statistics of every row, for people and loggers.

One jitted call reads the state (`collect`); numpy computes statistics in float64 (`statistics`), because float32 cannot sum
millions of probabilities. For scalars inside a step there is `Buffer.stats`.
"""

"""Priorities kept on the host: a sum tree in NumPy."""

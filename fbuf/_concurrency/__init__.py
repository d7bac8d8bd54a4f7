"""Threads: prefetching, background tasks, parallel calls, wake-ups."""

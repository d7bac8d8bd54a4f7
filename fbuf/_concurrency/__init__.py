"""Threads: a fair lock, prefetching, background tasks, parallel calls, wake-ups, deferred interrupts."""

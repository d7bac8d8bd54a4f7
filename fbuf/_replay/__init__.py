"""`Replay`: a buffer, its state and its key in one object, which threads may share.

`replay` is the object, `fair_lock` its lock, `limiter` lets calls wait for a limit, `batches` prefetches in a thread,
`arguments` checks and converts arrays, `defer_interrupt` protects a donated state from Ctrl-C.
"""

from fbuf._concurrency.wakeup import ReplayClosed
from fbuf._replay.batches import Batches
from fbuf._replay.replay import Replay

__all__ = ["Batches", "Replay", "ReplayClosed"]

"""`Replay`: a buffer, its state and its key in one object, which threads may share.

`replay` is the object, `engine` what it does with buffer, state and key: it calls `programs`, collects rows and draws in NumPy
(`fbuf._host_draws`). `packed` holds other batches on their way to NumPy and torch. Methods hold a `FairLock` by `locked`;
`limiter` lets calls wait for a limit, `batches` prefetches in a thread, `arguments` checks and converts arrays, `written`
computes the index that `extend` returns.
"""

from fbuf._concurrency.wakeup import ReplayClosed
from fbuf._replay.batches import Batches
from fbuf._replay.replay import Replay

__all__ = ["Batches", "Replay", "ReplayClosed"]

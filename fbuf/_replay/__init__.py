"""`Replay`: a buffer, its state and its key in one object, which threads may share.

`replay` is the object, `rows` its methods that read or change rows, `state` what it holds, `locked` that behind a lock.
`programs` are its jitted calls, `row_block` and `priority_update` hold what is not yet written, `host_draws` draws in NumPy,
`host_reads` reads drawn rows in NumPy, `host_rings` knows which rows are held, `packed` holds other batches on their way to
NumPy and torch. `fair_lock` is the lock, `limiter` lets calls wait for a limit, `batches` prefetches in a thread,
`arguments` checks and converts arrays.
"""

from fbuf._concurrency.wakeup import ReplayClosed
from fbuf._replay.batches import Batches
from fbuf._replay.replay import Replay

__all__ = ["Batches", "Replay", "ReplayClosed"]

"""`Replay`: a buffer, its state and its key in one object, which threads may share.

`replay` is the object, `engine` what it does with buffer, state and key: it calls `programs`, and keeps rows in a `row_block`.
In CPU memory `host_draws` and `priority_draws` draw in NumPy; they read rows by `host_reads`, and know from `host_rings` and
`host_anchors` which are held and can be drawn. `packed` holds other batches on their way to NumPy and torch. `fair_lock` is the
lock, which the methods hold by `locked`; `limiter` lets calls wait for a limit, `interrupts` lets Ctrl-C wait for a write,
`batches` prefetches in a thread, `arguments` checks and converts arrays, `written` is what `extend` returns.
"""

from fbuf._concurrency.wakeup import ReplayClosed
from fbuf._replay.batches import Batches
from fbuf._replay.replay import Replay

__all__ = ["Batches", "Replay", "ReplayClosed"]

"""`Replay`: a buffer, its state and its key in one object, which threads may share.

`_replay` is the object. `_turns` says whose turn it is, `_pacing` who waits for a limit and why, `_batches` is the iterator
that draws ahead, `_arrays` takes and gives arrays of any kind.
"""

from fbuf._concurrency.wakeup import ReplayClosed
from fbuf._replay.batches import Batches
from fbuf._replay.replay import Replay

__all__ = ["Batches", "Replay", "ReplayClosed"]

"""Which anchors a batch is drawn from: `Uniform`, `Epoch`, `Consume`, `Prioritized`, `Ranked`, `Staleness`."""

from fbuf.samplers._consume import Consume, ConsumeState
from fbuf.samplers._epoch import Epoch, EpochState
from fbuf.samplers._prioritized import Prioritized, PrioritizedState
from fbuf.samplers._ranked import Ranked, RankedState
from fbuf.samplers._staleness import Staleness, StalenessState
from fbuf.samplers._uniform import Uniform

__all__ = [
    "Consume",
    "ConsumeState",
    "Epoch",
    "EpochState",
    "Prioritized",
    "PrioritizedState",
    "Ranked",
    "RankedState",
    "Staleness",
    "StalenessState",
    "Uniform",
]

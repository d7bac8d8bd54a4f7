"""Which anchors a batch is drawn from: `Uniform`, `Prioritized`."""

from fbuf.samplers._prioritized import Prioritized, PrioritizedState
from fbuf.samplers._uniform import Uniform

__all__ = ["Prioritized", "PrioritizedState", "Uniform"]

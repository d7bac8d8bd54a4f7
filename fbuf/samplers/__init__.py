"""Which anchors a batch is drawn from: `Uniform`, `Epoch`, `Consume`, `Prioritized`, `Ranked`, `Staleness`."""

from fbuf.samplers._consume import Consume
from fbuf.samplers._epoch import Epoch
from fbuf.samplers._prioritized import Prioritized
from fbuf.samplers._ranked import Ranked
from fbuf.samplers._staleness import Staleness
from fbuf.samplers._uniform import Uniform

__all__ = ["Consume", "Epoch", "Prioritized", "Ranked", "Staleness", "Uniform"]

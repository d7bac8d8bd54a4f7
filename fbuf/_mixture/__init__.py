"""`Mixture`: several buffers, one `sample`.

`_value` is the configuration and its verbs, `_state` what changes and what is handed out, `_quota` says how many rows of each
buffer a batch has, `_draw` draws and reads them, `_weigh` says how likely each was and what it counts, `_route` takes an index
back to the buffer it came from, `_match` compares what the buffers hand out.
"""

from fbuf._mixture.mixture import Mixture
from fbuf._mixture.state import MixtureIndex, MixtureSample, MixtureState

__all__ = ["Mixture", "MixtureIndex", "MixtureSample", "MixtureState"]

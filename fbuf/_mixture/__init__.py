"""Sample from several buffers as one: `Mixture`.

`mixture` holds the methods, `state` the configuration and state, `quota` the rows of each buffer, `draw` draws, reads and
weighs them, `feedback` routes updates back to the buffers, `checks` checks arguments.
"""

from fbuf._mixture.mixture import Mixture
from fbuf._mixture.state import MixtureIndex, MixtureSample, MixtureState

__all__ = ["Mixture", "MixtureIndex", "MixtureSample", "MixtureState"]

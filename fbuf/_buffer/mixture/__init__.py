"""Sample from several buffers as one: `Mixture`.

`mixture` holds the methods, `state` the configuration and state, `quota` the rows of each buffer, `draw` draws, reads and
weighs them, `checks` checks arguments.
"""

from fbuf._buffer.mixture.mixture import Mixture
from fbuf._buffer.mixture.state import MixtureState

__all__ = ["Mixture", "MixtureState"]

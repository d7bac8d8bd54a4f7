"""Draw one batch from several buffers: `Mixture`.

`mixture` holds the methods, `draw` draws, reads and weighs batches, `shards` does so on each device of a mesh, `checks` checks
arguments.
"""

from fbuf._members.mixture.mixture import Mixture

__all__ = ["Mixture"]

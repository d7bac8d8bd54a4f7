"""One logical buffer over the devices of a mesh axis, for data-parallel learners.

Each device holds a shard: some of the lanes, with their own rows and priorities. Probabilities and importance weights are
those of the whole buffer. `Sharded` has the methods of a buffer, for arrays that span the mesh and inside `jax.shard_map`.
An `fbuf.Mixture` draws from several.

Example:
  >>> import fbuf, jax, jax.numpy as jnp
  >>> from fbuf.sharded import Sharded
  >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
  >>> replay = Sharded(fbuf.prioritized(64 * mesh.size, lanes=mesh.size), mesh)
  >>> state = replay.init({"obs": jnp.zeros(3)})
  >>> state = replay.extend(state, {"obs": jnp.ones((5, mesh.size, 3))})
  >>> state, batch = replay.sample(state, jax.random.key(0), 4 * mesh.size)
  >>> state = replay.update_priority(state, batch.index, jnp.ones(4 * mesh.size))
  >>> int(replay.size(state)) == 5 * mesh.size
  True
"""

from fbuf.sharded._sharded import Sharded
from fbuf.sharded._state import ShardedState

__all__ = ["Sharded", "ShardedState"]

__dir__ = __all__.copy  # without the imports

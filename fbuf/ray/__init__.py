"""A replay for many processes, in actors of Ray.

Actors write, learners draw and set priorities, through clients that pickle. One actor or several hold the rows; they restart
from checkpoints. Ray is imported when a `RayReplay` is made: `pip install "fbuf[ray]"`.

Example:
  >>> import fbuf, ray, numpy as np
  >>> replay = fbuf.ray.RayReplay(fbuf.prioritized(1000), {"obs": np.zeros(3, np.float32)})  # doctest: +SKIP
  >>> @ray.remote
  ... def act(client):
  ...     client.extend({"obs": np.ones((5, 3), np.float32)})
  ...     client.flush()
  >>> ray.get([act.remote(replay.client()) for _ in range(2)])
  [None, None]
  >>> replay.client().sample(4, to="numpy").data["obs"].shape
  (4, 3)
  >>> replay.close()  # doctest: +SKIP
"""

from fbuf.ray._client import Client
from fbuf.ray._service import RayReplay

__all__ = ["Client", "RayReplay"]

__dir__ = __all__.copy  # without the imports

"""Pictures of a buffer: what it holds, what it would draw, what it takes. Needs matplotlib: `pip install "fbuf[plot]"`.

Each function draws into `ax` (or a new figure) and returns the axes; `overview` draws all that make sense. Colours are told
apart by colour-blind people too, and follow the background: light, or dark (`plt.style.use("dark_background")`).

Example:
  >>> import fbuf, jax.numpy as jnp
  >>> from matplotlib.figure import Figure
  >>> buffer = fbuf.prioritized(100)
  >>> state = buffer.extend(buffer.init({"obs": jnp.zeros(3)}), {"obs": jnp.ones((50, 3))})
  >>> axes = fbuf.plot.ages(buffer, state, ax=Figure().subplots())
  >>> axes.get_xlabel()
  'age: rows of the lane that came later'
"""

from fbuf.plot._frames import frames
from fbuf.plot._histograms import Evolution, ages, episode_lengths, priorities
from fbuf.plot._overview import memory, overview

__all__ = ["Evolution", "ages", "episode_lengths", "frames", "memory", "overview", "priorities"]

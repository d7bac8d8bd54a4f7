"""Plot a buffer: its contents, its sampling, its memory. Needs matplotlib: `pip install "fbuf[plot]"`.

Each function takes a buffer and its state, or a `Replay`. It draws into `ax` (or a new figure) and returns the axes; `overview`
draws all that apply and returns the first. `episode` returns a player, and needs no matplotlib.
The colours suit colour-blind readers, and light or dark backgrounds (`plt.style.use("dark_background")`).

Example:
  >>> import fbuf, jax.numpy as jnp
  >>> from matplotlib.figure import Figure
  >>> buffer = fbuf.prioritized(100)
  >>> state = buffer.extend(buffer.init({"obs": jnp.zeros(3)}), {"obs": jnp.ones((50, 3))})
  >>> axes = fbuf.plot.ages(buffer, state, ax=Figure().subplots())
  >>> axes.get_xlabel()
  'age: later rows of the lane'
"""

from fbuf.plot._episode import episode
from fbuf.plot._frames import frames
from fbuf.plot._histograms import Evolution, ages, episode_lengths, priorities
from fbuf.plot._overview import memory, overview

__all__ = ["Evolution", "ages", "episode", "episode_lengths", "frames", "memory", "overview", "priorities"]

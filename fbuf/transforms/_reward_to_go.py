r"""`RewardToGo`: the discounted sum of the rewards from a row to the end of its episode.

What a row does to the sum :math:`x` of those after it is affine, :math:`x \mapsto a x + b`, with :math:`b` its reward and
:math:`a = \gamma`, or 0 where the episode ends with it; rows that are not there do nothing, :math:`a = 1, b = 0`. Such maps
compose associatively, so all sums of T rows take O(log T) steps, not T.
"""

from __future__ import annotations

import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from fbuf._core.component import component
from fbuf._core.pytree import PyTree, expand
from fbuf._interfaces.transform import Context
from fbuf.transforms._fields import as_dict, checked_keys, checked_name, rebuilt


@component
class RewardToGo:
    r"""Adds :math:`G_t = \sum_{k \ge t} \gamma^{k - t} r_k`, the sum to the end of the episode.

    At read it goes over windows (`views.Sequence`, `views.Episode`); at write over the rows of one call, lane by lane. It knows
    nothing of rows before or after those: where the episode goes on, the sum ends with the last row there is, as if nothing
    came after, and `complete` says so. For exact sums at write add whole episodes; at read use `views.Episode`.

    Attributes:
      gamma: Discount, in [0, 1].
      reward: Name of the rewards, numbers of any shape; integers are summed in float32.
      into: Name of the leaf with the sums; the rewards' own name replaces them.
      episode_end: Names of the boolean leaves of which any ends an episode with its row; `()`: nothing does.
      complete: Name for a leaf bool, whether the end of the row's episode was there, and nothing was left out of the sum; None:
        no such leaf.

    Rows that are masked (`mask` of `extend`, missing rows of a window) count as if they were not there. It has no inverse.

    Cost: O(N log N), in place of what is written or read; nothing is stored but the sums.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(10, on_write=fbuf.transforms.RewardToGo(0.5, episode_end=("done",), complete="whole"))
      >>> rows = {"reward": jnp.array([1.0, 2.0, 4.0, 8.0]), "done": jnp.array([False, False, True, False])}
      >>> state = buffer.extend(buffer.init({"reward": 0.0, "done": False}), rows)
      >>> buffer.last(state, 4).data["reward_to_go"].tolist(), buffer.last(state, 4).data["whole"].tolist()
      ([3.0, 4.0, 4.0, 8.0], [True, True, True, False])
    """

    gamma: float = 1.0
    reward: str = "reward"
    into: str = "reward_to_go"
    episode_end: tuple[str, ...] = ("terminated", "truncated")
    complete: str | None = None

    def __post_init__(self) -> None:
        fine = isinstance(self.gamma, (int, float, np.integer, np.floating)) and not isinstance(self.gamma, bool)
        if not fine or not 0 <= self.gamma <= 1:
            raise ValueError(f"RewardToGo: gamma is {self.gamma!r}; expected a number in [0, 1].")
        object.__setattr__(self, "gamma", float(self.gamma))
        for field in ("reward", "into") + (("complete",) if self.complete is not None else ()):
            object.__setattr__(self, field, checked_name("RewardToGo", getattr(self, field)))
        if isinstance(self.episode_end, str):
            raise TypeError(
                f"RewardToGo: episode_end is {self.episode_end!r}; expected a tuple. Write episode_end=({self.episode_end!r},)."
            )
        object.__setattr__(
            self, "episode_end", checked_keys("RewardToGo", self.episode_end) if self.episode_end else ()
        )

    def apply(self, data: PyTree, context: Context) -> PyTree:
        time = context.time
        if time is None:
            raise ValueError(
                "RewardToGo: it goes along time, but these are single rows; expected windows, or rows on their way in. Use a "
                "view of windows (views.Sequence, views.Episode), or Buffer(on_write=...); with transforms.apply write time=1."
            )
        leaves = as_dict("RewardToGo", data)
        for name in (self.reward, *self.episode_end):
            if name not in leaves:
                field = "reward" if name == self.reward else "episode_end"
                raise ValueError(
                    f"RewardToGo: {field} names '{name}', but there are {', '.join(leaves)}. Write RewardToGo({field}=...)."
                )
        lead = context.lead
        end = jnp.zeros(context.mask.shape, bool)
        for name in self.episode_end:
            flag = leaves[name]
            if flag.dtype != jnp.bool_ or flag.ndim != lead:
                raise TypeError(
                    f"RewardToGo: leaf '{name}' is {flag.dtype}{list(flag.shape[lead:])} a row; expected bool[]. Cast with "
                    f"x.astype(bool)."
                )
            end = end | flag
        reward = leaves[self.reward]
        if not jnp.issubdtype(reward.dtype, jnp.floating):
            reward = reward.astype(jnp.float32)
        there, zero = context.mask, jnp.zeros((), reward.dtype)
        gamma = jnp.where(end, zero, jnp.asarray(self.gamma, reward.dtype))
        keeps = expand(jnp.where(there, gamma, jnp.ones((), reward.dtype)), reward.ndim)
        brings = jnp.where(expand(there, reward.ndim), reward, zero)
        sums = lax.associative_scan(_after, (jnp.broadcast_to(keeps, brings.shape), brings), reverse=True, axis=time)[1]
        new = {self.into: jnp.where(expand(there, reward.ndim), sums, zero)}
        if self.complete is not None:
            seen = lax.associative_scan(jnp.logical_or, end & there, reverse=True, axis=time)
            new[self.complete] = seen & there
        for name in new:
            if name in leaves and name != self.reward:
                raise ValueError(
                    f"RewardToGo: there is a leaf '{name}' already; expected a free name, or '{self.reward}', to replace the "
                    f"rewards. Use another one."
                )
        return rebuilt("RewardToGo", {**leaves, **new})


def _after(later: tuple[Array, Array], sooner: tuple[Array, Array]) -> tuple[Array, Array]:
    """One map after another: what is later in time comes first. Past an end nothing counts, not even NaN."""
    zero = jnp.zeros((), sooner[0].dtype)
    carried = jnp.where(sooner[0] == zero, zero, sooner[0] * later[1])
    return later[0] * sooner[0], carried + sooner[1]

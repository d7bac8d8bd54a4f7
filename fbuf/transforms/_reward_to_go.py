r"""Sum the discounted rewards from a row to the end of its episode.

A row maps the sum :math:`x` of later rows to :math:`a x + b`, with :math:`b` its reward and :math:`a = \gamma`, or 0 at the
end of the episode. Missing rows have :math:`a = 1, b = 0`. Such maps compose associatively, so T rows take O(log T) steps.
"""

from __future__ import annotations

from jax import Array, lax
from jax import numpy as jnp

from fbuf._core.component import component
from fbuf._core.pytree import PyTree
from fbuf._core.slots import expand
from fbuf._interfaces.transform import Context, Transform
from fbuf.transforms._fields import as_dict, checked_keys, checked_name, convert, is_number, rebuilt


@component
class RewardToGo(Transform):
    r"""Add :math:`G_t = \sum_{k \ge t} \gamma^{k - t} r_k`, the sum to the end of the episode.

    At read it sums over windows (`views.Sequence`, `views.Episode`); at write over the rows of one call, lane by lane. Rows
    before or after are unknown: if the episode continues, the sum ends with the last row, and `complete` is False. For
    exact sums add whole episodes at write, or use `views.Episode` at read.

    Attributes:
      gamma: Discount, in [0, 1].
      reward: Name of the rewards, of any shape; integers are summed in float32.
      into: Name of the leaf with the sums; the name of the rewards replaces them.
      episode_end: Names of the boolean leaves that end an episode with their row; `()`: none.
      complete: Name of a boolean leaf: the end of the episode was included in the sum; None: no such leaf.

    Masked rows (`mask` of `extend`, missing rows of a window) do not count. It has no inverse.

    Cost: O(N log N), in place; only the sums are stored.

    Example:
      >>> import fbuf, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(10, on_write=fbuf.transforms.RewardToGo(0.5, episode_end=("done",), complete="whole"))
      >>> rows = {"reward": jnp.array([1.0, 2.0, 4.0, 8.0]), "done": jnp.array([False, False, True, False])}
      >>> state = buffer.extend(buffer.init({"reward": 0.0, "done": False}), rows)
      >>> buffer.rows(state, last=4).data["reward_to_go"].tolist(), buffer.rows(state, last=4).data["whole"].tolist()
      ([3.0, 4.0, 4.0, 8.0], [True, True, True, False])
    """

    gamma: float = 1.0
    reward: str = "reward"
    into: str = "reward_to_go"
    episode_end: tuple[str, ...] = ("terminated", "truncated")
    complete: str | None = None

    def __post_init__(self) -> None:
        call = "RewardToGo"
        if not is_number(self.gamma) or not 0 <= self.gamma <= 1:
            raise ValueError(f"{call}: gamma is {self.gamma!r}; expected a number in [0, 1].")
        if isinstance(self.episode_end, str):
            raise TypeError(f"{call}: episode_end is {self.episode_end!r}; expected ({self.episode_end!r},).")
        complete = None if self.complete is None else checked_name(call, self.complete)
        ends = checked_keys(call, self.episode_end) if self.episode_end else ()
        convert(self, gamma=float(self.gamma), complete=complete, episode_end=ends)
        convert(self, reward=checked_name(call, self.reward), into=checked_name(call, self.into))

    def apply(self, data: PyTree, context: Context) -> PyTree:
        time = context.time
        if time is None:
            raise ValueError(
                "RewardToGo: data are single rows; expected windows, of views.Sequence, on_write= or apply(time=1)."
            )
        leaves = as_dict("RewardToGo", data)
        for name in (self.reward, *self.episode_end):
            if name not in leaves:
                field = "reward" if name == self.reward else "episode_end"
                raise ValueError(f"RewardToGo: {field} names '{name}'; expected leaves of {', '.join(leaves)}.")
        lead = context.lead
        end = jnp.zeros(context.mask.shape, bool)
        for name in self.episode_end:
            flag = leaves[name]
            if flag.dtype != jnp.bool_ or flag.ndim != lead:
                found = f"{flag.dtype}{list(flag.shape[lead:])}"
                raise TypeError(f"RewardToGo: leaf '{name}' is {found} a row; expected bool[]. Use Cast before.")
            end = end | flag
        reward = leaves[self.reward]
        if not jnp.issubdtype(reward.dtype, jnp.floating):
            reward = reward.astype(jnp.float32)
        kept, zero = context.mask, jnp.zeros((), reward.dtype)
        gamma = jnp.where(end, zero, jnp.asarray(self.gamma, reward.dtype))
        keeps = expand(jnp.where(kept, gamma, jnp.ones((), reward.dtype)), reward.ndim)
        brings = jnp.where(expand(kept, reward.ndim), reward, zero)
        sums = lax.associative_scan(_after, (jnp.broadcast_to(keeps, brings.shape), brings), reverse=True, axis=time)[1]
        new = {self.into: jnp.where(expand(kept, reward.ndim), sums, zero)}
        if self.complete is not None:
            seen = lax.associative_scan(jnp.logical_or, end & kept, reverse=True, axis=time)
            new[self.complete] = seen & kept
        for name in new:
            if name in leaves and name != self.reward:
                raise ValueError(f"RewardToGo: leaf '{name}' already exists. Use another name, or '{self.reward}'.")
        return rebuilt("RewardToGo", {**leaves, **new})


def _after(later: tuple[Array, Array], sooner: tuple[Array, Array]) -> tuple[Array, Array]:
    """Compose two maps, the later one in time first. Beyond an end nothing counts, not even NaN."""
    zero = jnp.zeros((), sooner[0].dtype)
    carried = jnp.where(sooner[0] == zero, zero, sooner[0] * later[1])
    return later[0] * sooner[0], carried + sooner[1]

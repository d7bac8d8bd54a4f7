r"""`Transition`: frame stack behind an anchor, n-step return and next observation ahead of it.

Rows hold each frame once; everything else is read from neighbours. With k frames a stack and n steps, anchor t gives

    obs       o_{t-k+1} .. o_t                       (one observation, without the stack's axis, where stack is None)
    action    a_t
    reward    r_{t+1} + gamma r_{t+2} + ... + gamma^{m-1} r_{t+m}
    discount  gamma^m, or 0 where the episode terminated within these m steps
    next_obs  o_{t+m-k+1} .. o_{t+m}

with m = n, or fewer where the episode ends earlier. No stack or return crosses an episode's end or the place where new
rows overwrite old ones. What happens at an end:

* terminated: `discount` is 0, so `next_obs` does not matter; it is the true final observation where `final_observation`
  names one, else the last stack before the end.
* truncated, with the true final observation at hand (`final_observation`, or the row after the end under
  `autoreset="next_step"`): bootstrapped from it.
* truncated without it: anchors before the end bootstrap from the last observation there is (m is one less), and the last
  step, which has no successor at all, is not drawn.

Computing these before storing, as most libraries do, was rejected: it stores every frame 2k times, and fixes n and k for
the life of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec, expand, name_of
from fbuf._indexing import ring
from fbuf._indexing.anchors import END, RESET, START, TERMINATED, has
from fbuf._interfaces.sampler import EligibleSet
from fbuf._interfaces.storage import Read
from fbuf._interfaces.view import EligibilityRule, Window
from fbuf.views._fields import check_flag, check_free, place, subtree, under

MADE = ("obs", "action", "reward", "discount", "next_obs")


@component
class Transition:
    """Batches are n-step transitions with stacked frames.

    `batch.data` is a dict: `obs` and `next_obs` `[B, stack, ...]` (without the stack's axis where `stack` is None),
    `action` `[B, ...]`, `reward` and `discount` `[B]` (float32, or the reward's floating dtype), and every other leaf of
    the row at t under its own name.

    Attributes:
      n_step: n >= 1.
      gamma: Discount of one step, in [0, 1].
      stack: Frames a stack, or None for plain observations.
      observation: Name of the leaf or subtree with o_t.
      action: Name of a_t (leaf or subtree), or None.
      reward: Name of r_{t+1}, what came of the action in the same row.
      terminated: Name of the boolean leaf: the episode ended for good with this step.
      truncated: Name of the boolean leaf: it was cut off here; None: never.
      final_observation: Name of a leaf or subtree like `observation` with o_{t+1} of the last row of an episode (any
        content in other rows), for environments that reset within the step. None: there is none.
      pad: Frames before an episode's first: "zero", or "repeat" the first.
      autoreset: "same_step": the row after an end is the first of the next episode (also right for manual resets);
        "next_step" (Gymnasium's default vector mode): the row after an end holds the final observation and an action
        that is ignored; it is never drawn itself.

    Cost: reads 2k frames a draw (k + n distinct ones).

    Example:
      >>> import fbuf
      >>> fbuf.views.Transition(n_step=3, gamma=0.99, stack=4).n_step
      3
    """

    n_step: int = 1
    gamma: float = 0.99
    stack: int | None = None
    observation: str = "obs"
    action: str | None = "action"
    reward: str = "reward"
    terminated: str = "terminated"
    truncated: str | None = "truncated"
    final_observation: str | None = None
    pad: str = "zero"
    autoreset: str = "same_step"

    def __post_init__(self) -> None:
        for name in (
            "observation",
            "action",
            "reward",
            "terminated",
            "truncated",
            "final_observation",
        ):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, name_of(value))
        if not (isinstance(self.n_step, int) and self.n_step >= 1):
            raise ValueError(f"Transition: n_step is {self.n_step!r}; expected an int >= 1.")
        if self.stack is not None and not (isinstance(self.stack, int) and self.stack >= 1):
            raise ValueError(f"Transition: stack is {self.stack!r}; expected an int >= 1, or None for no stack.")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"Transition: gamma is {self.gamma!r}; expected a number in [0, 1].")
        if self.pad not in ("zero", "repeat"):
            raise ValueError(f'Transition: pad is {self.pad!r}; expected "zero" or "repeat".')
        if self.autoreset not in ("same_step", "next_step"):
            raise ValueError(
                f'Transition: autoreset is {self.autoreset!r}; expected "same_step" (also for manual resets) or '
                f'"next_step".'
            )
        if self.autoreset == "next_step" and self.final_observation is not None:
            raise ValueError(
                "Transition: final_observation is not needed with autoreset='next_step', where the row after an end "
                "holds it. Drop one of the two."
            )

    @property
    def back(self) -> int:
        """Frames behind an anchor's own."""
        return (self.stack or 1) - 1

    @property
    def rule(self) -> EligibilityRule:
        resets = self.autoreset == "next_step"
        cut_ends = self.final_observation is not None or resets
        return EligibilityRule("steps", self.back, self.n_step, prompt=False, reset_rows=resets, cut_ends=cut_ends)

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        ends = (self.terminated,) + ((self.truncated,) if self.truncated is not None else ())
        return ends, self.terminated

    def check(self, spec: Spec) -> None:
        fields = ("observation", "action", "reward", "terminated", "truncated", "final_observation")
        for field in fields:
            name = getattr(self, field)
            single = field in ("reward", "terminated", "truncated")  # no subtree
            if name is not None and not (name in spec if single else under(name, spec)):
                optional = "" if field in ("observation", "reward", "terminated") else ", or None if there is none"
                raise ValueError(
                    f"Transition: {field} is '{name}', but rows have {', '.join(spec)}. "
                    f"Name the leaf: Transition({field}=...){optional}."
                )
        for name in self.episode_fields()[0]:
            check_flag("Transition", name, spec)
        if self.final_observation is not None:
            now = {n.removeprefix(self.observation): spec[n] for n in under(self.observation, spec)}
            last = {n.removeprefix(self.final_observation): spec[n] for n in under(self.final_observation, spec)}
            if now != last:
                raise ValueError(
                    f"Transition: '{self.final_observation}' is {last}; expected what '{self.observation}' is: {now}."
                )
        check_free("Transition", MADE, self._others(spec))

    def decide(
        self, flags: jax.Array, available: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        del step
        index = jnp.arange(flags.shape[0], dtype=jnp.int32)[:, None]
        end = has(flags, END)
        never = jnp.int32(2**30)
        next_end = lax.cummin(jnp.where(end, index, never), axis=0, reverse=True)
        terminated = has(flags, TERMINATED)
        at_end = end
        needs_next = jnp.zeros_like(end)
        if self.rule.reset_rows:
            # a truncated end is complete only with the row that holds its final observation
            next_cut = lax.cummin(jnp.where(end & ~terminated, index, never), axis=0, reverse=True)
            needs_next = next_cut == next_end
        exist = available[None, :]
        complete = next_end + needs_next.astype(jnp.int32) < exist
        by_end = (next_end < index + jnp.int32(self.n_step)) & complete
        by_row = (next_end >= index + jnp.int32(self.n_step)) & (index + jnp.int32(self.n_step) < exist)
        reset = has(flags, RESET)
        decided = (index < exist) & (by_end | by_row | reset)
        drawable = ~reset
        if not self.rule.cut_ends:
            drawable = drawable & ~(at_end & ~terminated)
        return decided, drawable, None

    def window(
        self,
        spec: Spec,
        eligible: EligibleSet,
        slot: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> Window:
        geometry, flags = eligible.geometry, eligible.flags
        assert flags is not None
        steps, back, nowhere = self.n_step, self.back, jnp.int32(geometry.capacity)
        safe = jnp.where(mask, slot, jnp.int32(0))
        offset = jnp.arange(-back, steps, dtype=jnp.int32)[None, :]
        around = ring.shift(geometry, safe[:, None], offset)
        near = flags.at[around].get(mode="promise_in_bounds")  # [B, back + n]

        # where the episode ends ahead (n: not within n steps), and begins behind (-back - 1 and less: further away)
        ahead = jnp.arange(steps, dtype=jnp.int32)[None, :]
        end_at = jnp.min(jnp.where(has(near[:, back:], END), ahead, jnp.int32(steps)), axis=1)
        ended = end_at < jnp.int32(steps)
        last = near.at[
            jnp.arange(near.shape[0], dtype=jnp.int32), jnp.int32(back) + jnp.minimum(end_at, jnp.int32(steps - 1))
        ].get(mode="promise_in_bounds")
        terminated = ended & has(last, TERMINATED)
        began = jnp.max(
            jnp.where(has(near[:, : back + 1], START), offset[:, : back + 1], jnp.int32(-back - steps - 1)),
            axis=1,
        )
        counts_last = terminated | jnp.bool_(self.rule.cut_ends)
        rewards = jnp.where(ended, end_at + counts_last.astype(jnp.int32), jnp.int32(steps))
        # the row whose observation comes last in `next_obs`
        reach = jnp.where(
            ended & ~jnp.bool_(self.rule.reset_rows),
            end_at,
            jnp.where(ended, end_at + 1, jnp.int32(steps)),
        )
        if self.rule.reset_rows:  # a terminated end is drawn before its reset row may have come
            reach = jnp.where(terminated, end_at, reach)

        def slots_of(frames: jax.Array) -> jax.Array:
            slots = ring.shift(geometry, safe[:, None], jnp.maximum(frames, began[:, None]))
            keep = mask[:, None]
            if self.pad == "zero":
                keep = keep & (frames >= began[:, None])
            return jnp.where(keep, slots, nowhere)

        def stack_at(final: jax.Array) -> jax.Array:
            slots = slots_of(final[:, None] + jnp.arange(-back, 1, dtype=jnp.int32)[None, :])
            return slots if self.stack is not None else slots[:, 0]

        obs_slot = stack_at(jnp.zeros_like(reach))
        final = None
        if self.final_observation is not None:
            # one more frame than the rows have: shift the stack on by one and put the final observation last
            next_slot = stack_at(jnp.where(ended, end_at + jnp.int32(1), reach))
            newest = jnp.where(ended & mask, nowhere, next_slot[:, -1] if self.stack is not None else next_slot)
            next_slot = next_slot.at[:, -1].set(newest) if self.stack is not None else newest
            end_slot = ring.shift(geometry, safe, jnp.where(ended, end_at, jnp.int32(0)))
            final = jnp.where(ended & mask, end_slot, nowhere)
        else:
            next_slot = stack_at(reach)

        pool = None
        if self.stack is not None and steps < self.stack and self.final_observation is None:
            frames = jnp.broadcast_to(
                jnp.arange(-back, steps + 1, dtype=jnp.int32)[None, :], (slot.shape[0], back + steps + 1)
            )
            pool = slots_of(frames)
        observation = under(self.observation, spec)
        reads = [Read(n, obs_slot, pool, jnp.zeros_like(reach)) for n in observation]
        reads += [Read(n, next_slot, pool, reach) for n in observation]
        if final is not None and self.final_observation is not None:
            reads += [Read(n, final) for n in under(self.final_observation, spec)]
        counted = mask[:, None] & (ahead < rewards[:, None])
        reward_slot = jnp.where(counted, ring.shift(geometry, safe[:, None], ahead), nowhere)
        reads.append(Read(self.reward, reward_slot))
        here = jnp.where(mask, slot, nowhere)
        if self.action is not None:
            reads += [Read(n, here) for n in under(self.action, spec)]
        reads += [Read(n, here) for n in self._others(spec)]
        return Window(tuple(reads), (mask, rewards, ended, terminated))

    def assemble(self, spec: Spec, structure: Any, arrays: Sequence[jax.Array], window: Window) -> PyTree:
        mask, rewards, ended, terminated = window.context
        rest = iter(arrays)
        names = under(self.observation, spec)
        obs = {n: next(rest) for n in names}
        next_obs = {n: next(rest) for n in names}
        if self.final_observation is not None:
            for name in names:
                final, stacked = next(rest), next_obs[name]
                if self.stack is not None:
                    newest = jnp.where(expand(ended, final.ndim), final, stacked[:, -1])
                    next_obs[name] = jnp.concatenate([stacked[:, :-1], newest[:, None]], axis=1)
                else:
                    next_obs[name] = jnp.where(expand(ended, final.ndim), final, stacked)
        reward = next(rest)
        if not jnp.issubdtype(reward.dtype, jnp.floating):
            reward = reward.astype(jnp.float32)
        powers = jnp.asarray([self.gamma**i for i in range(self.n_step + 1)], reward.dtype)
        shape = (1, self.n_step) + (1,) * (reward.ndim - 2)
        total = jnp.sum(reward * powers[:-1].reshape(shape), axis=1)
        discount = jnp.where(
            mask & ~terminated,
            powers.at[rewards].get(mode="promise_in_bounds"),
            jnp.zeros((), reward.dtype),
        )
        data = {"obs": subtree(structure, spec, self.observation, obs)}
        if self.action is not None:
            actions = {n: next(rest) for n in under(self.action, spec)}
            data["action"] = subtree(structure, spec, self.action, actions)
        data |= {"reward": total, "discount": discount}
        data["next_obs"] = subtree(structure, spec, self.observation, next_obs)
        for name in self._others(spec):
            place(data, name.split("/"), next(rest))
        return data

    def _others(self, spec: Spec) -> list[str]:
        """Leaves of the row that are passed on as they are."""
        used = [self.observation, self.reward]
        used += [n for n in (self.action, self.final_observation) if n is not None]
        return [n for n in spec if not any(n == u or n.startswith(u + "/") for u in used)]

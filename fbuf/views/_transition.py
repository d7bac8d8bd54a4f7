"""Return n-step transitions and frame stacks, padded at an episode's start (`pad`).

Rows store each frame once; stacks and returns are computed when a batch is read. With k frames a stack and n steps, anchor
t gives

    obs       o_{t-k+1} .. o_t                       (one observation, without the stack axis, if stack is None)
    action    a_t
    reward    r_{t+1} + gamma r_{t+2} + ... + gamma^{m-1} r_{t+m}
    discount  gamma^m, or 0 if the episode terminated within these m steps
    next_obs  o_{t+m-k+1} .. o_{t+m}

with m = n, or fewer if the episode ends earlier. `Transition` documents the ends of episodes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._algorithms.rounding import rounded_product, to_float32
from fbuf._core.arguments import check_int
from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec, beside, is_under, listed, name_of, needs_x64, outside, subtree, under
from fbuf._core.slots import expand, shift
from fbuf._indexing.anchors import CUT, END, RESET, START, TERMINATED, has
from fbuf._interfaces.sampler import AnchorSet
from fbuf._interfaces.storage import Read
from fbuf._interfaces.view import AnchorRule, View, Window
from fbuf.views._autoreset import check_autoreset
from fbuf.views._fields import check_flag, check_free, check_id, check_single
from fbuf.views._host_transition import HostTransition

MOST_IN_ORDER = 32
"""Largest n whose rewards are added one by one, each sum rounded as in NumPy; more are added in any order."""
MADE = ("obs", "action", "reward", "discount", "next_obs")
_NAMES = ("observation", "action", "reward", "terminated", "truncated", "final_observation", "episode")


@component
class Transition(View):
    """Return n-step transitions with stacked frames.

    `batch.data` is a dict: `obs` and `next_obs` `[B, stack, ...]` (without the stack axis if `stack` is None), `action`
    `[B, ...]`, `reward` `[B]` (of vectors `[B, ...]`: one return for each agent or objective) and `discount` `[B]` (float32,
    or the reward's floating dtype), and every other leaf of the row at t under its own name.

    No stack or return crosses the end of an episode or the write head. If the true final observation is stored
    (`final_observation`, or autoreset="next_step"), it is the newest frame of `next_obs` where the episode ended within the
    n steps. `discount` is 0 if it terminated; if it was truncated, the return bootstraps from `next_obs`. Where it is not
    stored, `next_obs` ends with the observation before the last action. A truncated episode then bootstraps from that one,
    and its last step is not drawn. Episodes that were cut (`Buffer.cut`) have no final observation.

    Attributes:
      n_step: n >= 1.
      gamma: Discount of one step, in [0, 1].
      stack: Frames a stack, or None for plain observations.
      stack_keys: Names of the leaves or subtrees of the observation that are stacked; None: all. Names are paths:
        `("obs/image",)` is the leaf `image` of a dict `obs`. Others are `[B, ...]`, the newest observation.
      observation: Name of the leaf or subtree with o_t.
      action: Name of a_t (leaf or subtree), or None.
      reward: Name of the leaf with r_{t+1}, the result of the action in the same row: a number, or a vector. Integers, and the
        64 bits of a storage on the host without x64, are rounded once to float32.
      terminated: Name of the boolean leaf that marks termination with this step, such as `"terminated"` or the path
        `"done/__all__"`; None: never.
      truncated: Name of the boolean leaf that marks truncation after this step; None: never.
      final_observation: Name of a leaf or subtree like `observation` with o_{t+1} of the last row of an episode (any
        content in other rows), for environments that reset within the step. None: it is not stored.
      pad: Frames before the first of an episode: "zero", or "repeat" the first.
      autoreset: Required, unless `final_observation` is given. "same_step": the row after an end is the first of the next
        episode (also for manual resets). "next_step" (Gymnasium's default vector mode): the row after an end holds the
        final observation and an ignored action. It is never drawn, and the steps that need it are drawn once it is stored.
      episode: Name of an integer leaf that is equal in all rows of an episode (trajectory ids). A row with another id than the
        one before it begins an episode, as after `Buffer.cut`. With `terminated=None, truncated=None` no flags are read.

    Cost: reads 2k frames a draw (k + n distinct ones).

    Example:
      >>> import fbuf
      >>> fbuf.views.Transition(n_step=3, gamma=0.99, stack=4, autoreset="same_step").n_step
      3
    """

    n_step: int = 1
    gamma: float = 0.99
    stack: int | None = None
    stack_keys: tuple[str, ...] | None = None
    observation: str = "obs"
    action: str | None = "action"
    reward: str = "reward"
    terminated: str | None = "terminated"
    truncated: str | None = "truncated"
    final_observation: str | None = None
    pad: Literal["zero", "repeat"] = "zero"
    autoreset: Literal["same_step", "next_step"] | None = None
    episode: str | None = None

    def __post_init__(self) -> None:
        for name in _NAMES:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, name_of(value))
            elif name in ("observation", "reward"):
                raise TypeError(
                    f"Transition: {name} is None; expected the name of a leaf, such as '{vars(Transition)[name]}'."
                )
        check_int("Transition", "n_step", self.n_step)
        if self.stack is not None:
            check_int("Transition", "stack", self.stack, hint=", or None for no stack")
        if self.stack_keys is not None:
            if not isinstance(self.stack_keys, (tuple, list)):
                raise TypeError(
                    f"Transition: stack_keys is {self.stack_keys!r}; expected a tuple of names. Write "
                    f"stack_keys=({self.stack_keys!r},)."
                )
            if self.stack is None:
                raise ValueError(f"Transition: stack_keys is {self.stack_keys!r}, but stack is None. Write stack=4.")
            if not self.stack_keys:
                raise ValueError("Transition: stack_keys is empty; expected names. Write stack=None to stack no leaf.")
            object.__setattr__(self, "stack_keys", tuple(name_of(name) for name in self.stack_keys))
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"Transition: gamma is {self.gamma!r}; expected a number in [0, 1].")
        if self.autoreset is None and self.final_observation is not None:
            object.__setattr__(self, "autoreset", "same_step")
        check_autoreset("Transition", self.autoreset, self.episode_fields()[0])
        if self.autoreset == "next_step" and self.final_observation is not None:
            raise ValueError(
                f"Transition: final_observation is {self.final_observation!r}; expected None with autoreset='next_step'."
            )

    @functools.cached_property
    def back(self) -> int:
        """Frames before the anchor's own."""
        return (self.stack or 1) - 1

    @property
    def reads_pairs(self) -> tuple[str | None, ...]:
        return self.reward, self.episode

    @functools.cached_property
    def rule(self) -> AnchorRule:
        return AnchorRule(
            "steps",
            self.back,
            self.n_step,
            prompt=False,
            reset_rows=self.autoreset == "next_step",
            cut_ends=self.final_observation is not None or self.autoreset == "next_step",
            episode=self.episode,
        )

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        return tuple(name for name in (self.terminated, self.truncated) if name is not None), self.terminated

    def check(self, spec: Spec) -> None:
        for field in _NAMES:
            name = getattr(self, field)
            single = field in ("reward", "terminated", "truncated", "episode")  # no subtree
            if name is not None and single and name not in spec and (leaves := under(name, spec)):
                raise ValueError(
                    f"Transition: {field} is '{name}', a subtree of {listed(leaves)}; {_one_leaf(field, leaves)}"
                )
            if name is not None and not (name in spec if single else under(name, spec)):
                optional = "" if field in ("observation", "reward") else ", or None"
                raise ValueError(
                    f"Transition: no leaf named '{name}'; rows have {listed(spec)}. Write Transition({field}=...){optional}."
                )
        for name in self.episode_fields()[0]:
            check_flag("Transition", name, spec)
        for name in self.stack_keys or ():
            if not under(name, observation := under(self.observation, spec)):
                raise ValueError(
                    f"Transition: stack_keys has '{name}'; '{self.observation}' has {listed(observation)}. Write whole paths: "
                    f"stack_keys=('{observation[0]}',)."
                )
        check_id("Transition", self.episode, spec)
        check_single("Transition", self.reward, spec, "one number")
        if self.final_observation is not None:
            now = {n.removeprefix(self.observation): spec[n] for n in under(self.observation, spec)}
            last = {n.removeprefix(self.final_observation): spec[n] for n in under(self.final_observation, spec)}
            if now != last:
                raise ValueError(f"Transition: '{self.final_observation}' is {last}; '{self.observation}' is {now}.")
        check_free("Transition", MADE, _leaves(self, tuple(spec))[3], nest=False)

    def decide(self, flags: Array, count: Array, step: Array) -> tuple[Array, Array, Array | None]:
        index = jnp.arange(flags.shape[0], dtype=jnp.int32)[:, None]
        end, never = has(flags, END), jnp.int32(2**30)
        next_end = lax.cummin(jnp.where(end, index, never), axis=0, reverse=True)
        truncated, cut = end & ~has(flags, TERMINATED), has(flags, CUT)
        needs_next = jnp.zeros_like(end)
        if self.rule.reset_rows:  # an end needs the next row, which holds its final observation
            next_uncut = lax.cummin(jnp.where(end & ~cut, index, never), axis=0, reverse=True)
            needs_next = next_uncut == next_end
        exist = count[None, :]
        complete = next_end + needs_next.astype(jnp.int32) < exist
        by_end = (next_end < index + jnp.int32(self.n_step)) & complete
        by_row = (next_end >= index + jnp.int32(self.n_step)) & (index + jnp.int32(self.n_step) < exist)
        reset = has(flags, RESET)
        decided = (index < exist) & (by_end | by_row | reset)
        is_anchor = ~reset & ~(truncated & (cut if self.rule.cut_ends else True))
        return decided, is_anchor, None

    def window(self, spec: Spec, anchors: AnchorSet, slot: Array, mask: Array, key: Array) -> Window:
        geometry, flags = anchors.geometry, anchors.flags
        assert flags is not None
        rule, steps, back, nowhere = self.rule, self.n_step, self.back, jnp.int32(geometry.capacity)
        safe = jnp.where(mask, slot, jnp.int32(0))
        offset = jnp.arange(-back, steps, dtype=jnp.int32)[None, :]
        around = shift(geometry, safe[:, None], offset)
        near = flags.at[around].get(mode="promise_in_bounds")  # [B, back + n]

        ahead = jnp.arange(steps, dtype=jnp.int32)[None, :]
        end_at, last = self._end(near, ahead)
        ended = end_at < jnp.int32(steps)
        terminated = ended & has(last, TERMINATED)
        began = self._start(near, offset)
        has_final = ended & jnp.bool_(rule.cut_ends) & ~has(last, CUT)
        counts_last = terminated | has_final
        rewards = jnp.where(ended, end_at + counts_last.astype(jnp.int32), jnp.int32(steps))
        # the row of the newest frame of `next_obs`
        after_end = end_at + has_final.astype(jnp.int32) if rule.reset_rows else end_at
        reach = jnp.where(ended, after_end, jnp.int32(steps))

        def slots_of(frames: Array) -> Array:
            slots = shift(geometry, safe[:, None], jnp.maximum(frames, began[:, None]))
            keep = mask[:, None]
            if self.pad == "zero":
                keep = keep & (frames >= began[:, None])
            return jnp.where(keep, slots, nowhere)

        def stack_at(final: Array) -> Array:
            slots = slots_of(final[:, None] + jnp.arange(-back, 1, dtype=jnp.int32)[None, :])
            return slots if self.stack is not None else slots[:, 0]

        obs_slot = stack_at(jnp.zeros_like(reach))
        final = None
        if self.final_observation is not None:
            # shift the stack by one and append the final observation
            next_slot = stack_at(jnp.where(has_final, end_at + jnp.int32(1), reach))
            newest = jnp.where(has_final & mask, nowhere, next_slot[:, -1] if self.stack is not None else next_slot)
            next_slot = next_slot.at[:, -1].set(newest) if self.stack is not None else newest
            end_slot = shift(geometry, safe, jnp.where(has_final, end_at, jnp.int32(0)))
            final = jnp.where(has_final & mask, end_slot, nowhere)
        else:
            next_slot = stack_at(reach)

        counted = mask[:, None] & (ahead < rewards[:, None])
        reward_slot = jnp.where(counted, shift(geometry, safe[:, None], ahead), nowhere)
        here = jnp.where(mask, slot, nowhere)

        pool = None
        if self.stack is not None and steps < self.stack and self.final_observation is None:
            frames = jnp.arange(-back, steps + 1, dtype=jnp.int32)[None, :]
            pool = slots_of(jnp.broadcast_to(frames, (slot.shape[0], back + steps + 1)))
        observation, final_observation, action, others = _leaves(self, tuple(spec))
        stacked = observation if self.stack is None else self._stacked(spec)
        reads = _frames(observation, stacked, obs_slot, pool, jnp.zeros_like(reach))
        reads += _frames(observation, stacked, next_slot, pool, reach)
        reads += [Read(n, final) for n in final_observation]
        reads.append(Read(self.reward, reward_slot))
        reads += [Read(n, here) for n in (*action, *others)]
        return Window(tuple(reads), (mask, rewards, has_final, terminated))

    def _start(self, near: Array, offset: Array) -> Array:
        """Return the offset of the start of the episode (below -back: further away)."""
        back = self.back
        starts = has(near[:, : back + 1], START)
        at = jnp.where(starts, offset[:, : back + 1], jnp.int32(-back - self.n_step - 1))
        if back >= MOST_IN_ORDER:
            return jnp.max(at, axis=1)
        return functools.reduce(jnp.maximum, [at[:, k] for k in range(back + 1)])  # a GPU fuses it with the reads

    def _end(self, near: Array, ahead: Array) -> tuple[Array, Array]:
        """Return the offset of the end of the episode (n: beyond n steps), and the flags of the last of these rows."""
        end_at = jnp.min(jnp.where(has(near[:, self.back :], END), ahead, jnp.int32(self.n_step)), axis=1)
        last_at = jnp.int32(self.back) + jnp.minimum(end_at, jnp.int32(self.n_step - 1))
        return end_at, near.at[jnp.arange(near.shape[0], dtype=jnp.int32), last_at].get(mode="promise_in_bounds")

    def assemble(self, spec: Spec, structure: Any, arrays: Sequence[Array], window: Window) -> PyTree:
        mask, rewards, has_final, terminated = window.context
        rest = iter(arrays)
        names, _, action, others = _leaves(self, tuple(spec))
        obs = {n: next(rest) for n in names}
        next_obs = {n: next(rest) for n in names}
        if self.final_observation is not None:
            stacked = self._stacked(spec)
            for name in names:
                final, following = next(rest), next_obs[name]
                if name in stacked:
                    newest = jnp.where(expand(has_final, final.ndim), final, following[:, -1])
                    next_obs[name] = jnp.concatenate([following[:, :-1], newest[:, None]], axis=1)
                else:
                    next_obs[name] = jnp.where(expand(has_final, final.ndim), final, following)
        reward = as_float(next(rest), spec[self.reward].dtype)
        powers = jnp.asarray([self.gamma**i for i in range(self.n_step + 1)], reward.dtype)
        total = self._total(reward, powers, rewards)
        discount = powers.at[rewards].get(mode="promise_in_bounds")
        discount = jnp.where(mask & ~terminated, discount, jnp.zeros((), reward.dtype))
        leaves: dict[str, dict[Any, Any]] = {"obs": obs, "next_obs": next_obs}
        leaves |= {"reward": {None: total}, "discount": {None: discount}}
        for kind, some in (("action", action), ("other", others)):
            leaves[kind] = {n: next(rest) for n in some}
        return self.batch(spec, structure, leaves)

    def _total(self, reward: Array, powers: Array, count: Array) -> Array:
        """Return the sums [B, ...] of the first `count` int32[B] rewards of [B, n, ...]."""
        if self.n_step > MOST_IN_ORDER:
            return jnp.sum(reward * powers[:-1].reshape((1, self.n_step) + (1,) * (reward.ndim - 2)), axis=1)
        total = reward[:, 0]  # one reward is not rounded
        for i in range(1, self.n_step):
            total = total + rounded_product(reward[:, i], powers[i], expand(count > jnp.int32(i), total.ndim))
        return total

    def batch(self, spec: Spec, structure: Any, leaves: Mapping[str, dict[Any, Any]]) -> dict[str, Any]:
        """Return a batch of leaves by kind and name; a kind is a key of the batch, or "other" for leaves that are passed on."""
        batch = {"obs": subtree(structure, spec, self.observation, leaves["obs"])}
        if self.action is not None:
            batch["action"] = subtree(structure, spec, self.action, leaves["action"])
        batch |= {"reward": leaves["reward"][None], "discount": leaves["discount"][None]}
        batch["next_obs"] = subtree(structure, spec, self.observation, leaves["next_obs"])
        return batch | beside(structure, spec, leaves["other"])

    def on_host(self, spec: Spec, structure: Any) -> HostTransition | None:
        """Return these transitions in NumPy; None with ids, and for sums that NumPy rounds otherwise."""
        in_order = self.n_step == 1 or (self.n_step <= MOST_IN_ORDER and spec[self.reward].dtype != np.float16)
        if self.episode is not None or not in_order:
            return None
        return HostTransition(self, spec, structure, _leaves(self, tuple(spec)), self._stacked(spec))

    def _stacked(self, spec: Spec) -> list[str]:
        """Return the leaves of the observation that are stacked."""
        if self.stack is None:
            return []
        return [n for n in under(self.observation, spec) if self.stack_keys is None or is_under(n, self.stack_keys)]


@functools.lru_cache(maxsize=64)
def _leaves(view: Transition, names: tuple[str, ...]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return the leaves of the observation, of its final one, of the action, and those that are passed on unchanged."""
    final = [] if view.final_observation is None else under(view.final_observation, names)
    action = [] if view.action is None else under(view.action, names)
    observation = under(view.observation, names)
    return observation, final, action, outside((*observation, *final, *action, view.reward), names)


def _frames(names: Sequence[str], stacked: Sequence[str], slots: Array, pool: Array | None, start: Array) -> list[Read]:
    """Return the reads of leaves of an observation: the frames of those stacked, the newest frame of others."""
    return [Read(n, slots, pool, start) if n in stacked else Read(n, slots[:, -1]) for n in names]


def _one_leaf(field: str, leaves: Sequence[str]) -> str:
    """Return what to do where rows have several leaves for one."""
    if field == "reward":
        return (
            f"expected one leaf. Store a vector, np.stack(jax.tree.leaves(reward), axis=-1), or write "
            f"Transition(reward='{leaves[0]}')."
        )
    chosen = next((name for name in leaves if name.endswith("/__all__")), leaves[0])
    return f"expected one leaf. Write Transition({field}='{chosen}')."


def as_float(values: Array, dtype: Any) -> Array:
    """Return values of a leaf of `dtype` as numbers: integers, and the pairs of 64 bits without x64, as the nearest float32."""
    if jnp.issubdtype(values.dtype, jnp.floating):
        return values
    return to_float32(values, dtype) if needs_x64(dtype) else values.astype(jnp.float32)

"""What `Prioritized` and `Ranked` have in common: what they take, what a write tells them, and draws that go by no priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._indexing.anchor_log import Log
from fbuf._indexing.importance import alike, ignoring, unit
from fbuf._interfaces.sampler import EligibilityUpdate, EligibleSet


def check(sampler: Any, names: tuple[str, ...]) -> None:
    """Convert numbers to Python floats and check every field that the samplers share.

    Raises:
      ValueError: a number is not in [0, `sampler.most`], or `normalize` or `largest` is invalid.
    """
    kind = type(sampler).__name__
    for name in names:
        value, most = getattr(sampler, name), sampler.most.get(name, float("inf"))
        if value is None and getattr(type(sampler), name) is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (number and 0 <= value <= most and value < float("inf")):
            what = "finite Python number >= 0" if most > 1 else "Python number from 0 to 1"
            raise ValueError(
                f"{kind}: {name} is {value!r}; expected a {what}. Numbers that change go "
                f"through buffer.set(state, {name}=...) or sample(..., beta=...)."
            )
        object.__setattr__(sampler, name, float(value))
    if sampler.normalize not in ("batch", "buffer", None):
        raise ValueError(f'{kind}: normalize is {sampler.normalize!r}; expected "batch", "buffer" or None.')
    if sampler.largest not in ("seen", "held"):
        raise ValueError(f'{kind}: largest is {sampler.largest!r}; expected "seen" or "held".')


def numbers(sampler: Any, names: tuple[str, ...]) -> Mapping[str, Any]:
    """Those that can be annealed: all but a `uniform` of None."""
    return dict.fromkeys((name for name in names if getattr(sampler, name) is not None), np.float32)


def options(sampler: Any) -> Mapping[str, Any]:
    """Those that can be given for one draw."""
    return dict.fromkeys(("beta",) if sampler.uniform is None else ("beta", "uniform"), np.float32)


def initial(sampler: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Numbers for the state, None for those that cannot be annealed."""
    known = numbers(sampler, names)
    return {name: jnp.full((), getattr(sampler, name), jnp.float32) if name in known else None for name in names}


def written(change: EligibilityUpdate, capacity: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Slots int32[K + A] that close, then those that open, C for none; bool[A], which of these were given a priority; and the
    largest given, float32[]."""
    nowhere = jnp.int32(capacity)
    slot = jnp.concatenate(
        [
            jnp.where(change.close_mask, change.close_slot, nowhere).reshape(-1),
            jnp.where(change.open_mask, change.open_slot, nowhere).reshape(-1),
        ]
    )
    given = change.priority >= jnp.float32(0)
    largest = jnp.max(jnp.where(given & change.open_mask, change.priority, jnp.float32(0)), initial=0.0)
    return slot, given.reshape(-1), largest


def sharing(
    slot: jax.Array,
    key: jax.Array,
    share: jax.Array,
    eligible: EligibleSet,
    log: Log | None,
    some: jax.Array,
    *,
    stratified: bool,
) -> jax.Array:
    """Slots int32[B], a `share` float32[] in [0, 1] of them replaced by any anchor's; `some` bool[B]: there are anchors."""
    batch_size = slot.shape[0]
    ignores = ignoring(jax.random.fold_in(key, 3), share, batch_size, spread=stratified)
    return jnp.where(ignores, alike(jax.random.fold_in(key, 4), eligible, log, batch_size, some), slot)


def shared(chance: jax.Array, share: jax.Array | None, eligible: EligibleSet) -> jax.Array:
    """float32[C], chances of anchors where a `share` float32[] of draws goes by none of them."""
    if share is None:
        return chance
    number = jnp.maximum(jnp.sum(eligible.available, dtype=jnp.int32), jnp.int32(1)).astype(jnp.float32)
    return (jnp.float32(1) - unit(share)) * chance + unit(share) / number

"""`NthSampler`: a sampler of one's own that says which anchors, by their place in time, and how likely each was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.geometry import Geometry
from fbuf._indexing import anchor_log
from fbuf._indexing.anchor_log import Log
from fbuf._interfaces.sampler import NO_NUMBERS, NO_STAMP, Draw, EligibilityUpdate, EligibleSet


class NthSampler:
    """Base of a sampler without priorities that remembers nothing but which anchors there are.

    A subclass is a `component` with one method, `pick`. Set `in_order = True` if it means something that anchors come oldest
    first: it is then refused beside a writer that replaces any row.

    Cost: as `samplers.Uniform`, and what `pick` costs.

    Example: the newest row is drawn most often, the oldest least.
      >>> import fbuf, jax, jax.numpy as jnp
      >>> @fbuf.parts.component
      ... class Lately(fbuf.parts.NthSampler):
      ...     in_order = True
      ...
      ...     def pick(self, key, batch_size, total):
      ...         count = total.astype(jnp.float32)
      ...         nth = jnp.sqrt(jax.random.uniform(key, (batch_size,))) * count
      ...         nth = jnp.minimum(nth.astype(jnp.int32), total - 1)
      ...         return nth, (2 * nth.astype(jnp.float32) + 1) / count**2
      >>> buffer = fbuf.Buffer(1000, sampler=Lately())
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(1000)})
      >>> state, batch = buffer.sample(state, jax.random.key(0), 4096)
      >>> bool(batch.data["t"].mean() > 600)
      True
    """

    numbers = NO_NUMBERS
    options = NO_NUMBERS
    prioritized = False
    by_episode = False
    by_rank = True
    in_order = False
    stamp = NO_STAMP

    def pick(self, key: jax.Array, batch_size: int, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which of the `total` int32[] anchors, int32[B] in [0, total), and the chance of each in one draw, float32[B].

        Anchors are counted lane by lane, a lane's oldest first. Where `total` is 0 the answer is not used; it may be NaN.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a sampler that derives from NthSampler needs a method pick. Write "
            f"def pick(self, key, batch_size, total): return nth, probability."
        )

    def init(self, geometry: Geometry, dense: bool) -> Log:
        return anchor_log.init(geometry, dense)

    def change(self, sampler: Log, change: EligibilityUpdate, geometry: Geometry, token: jax.Array) -> Log:
        return anchor_log.follow(sampler, change, geometry, token)

    def draw(
        self,
        sampler: Log,
        key: jax.Array,
        batch_size: int,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[Log, Draw]:
        del options, token
        total = jnp.sum(eligible.available, dtype=jnp.int32)
        mask = jnp.broadcast_to(total > jnp.int32(0), (batch_size,))
        nth, probability = self.pick(key, batch_size, jnp.maximum(total, jnp.int32(1)))
        nth = jnp.clip(nth.astype(jnp.int32), jnp.int32(0), jnp.maximum(total - jnp.int32(1), jnp.int32(0)))
        slot = anchor_log.nth(sampler, eligible, nth)
        return sampler, Draw(
            slot=jnp.where(mask, slot, jnp.int32(eligible.geometry.capacity)),
            probability=jnp.where(mask, probability.astype(jnp.float32), jnp.float32(0)),
            weight=mask.astype(jnp.float32),
            mask=mask,
        )

    def update(self, sampler: Log, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array) -> Log:
        return sampler

    def set(self, sampler: Log, **numbers: Any) -> Log:
        return sampler

    def clear(self, sampler: Log, geometry: Geometry, dense: bool) -> Log:
        return anchor_log.clear(sampler)

    def available(self, sampler: Log, count: jax.Array) -> jax.Array:
        return count

    def stats(self, sampler: Log) -> dict[str, jax.Array]:
        return {}

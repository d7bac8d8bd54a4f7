r"""How likely a row of a mixture was, and what it counts.

Buffer s has :math:`n_s` anchors that may be drawn, and its sampler draws anchor i with chance :math:`P_s(i)`. Of a batch the
share :math:`g_s` comes from it: :math:`quota_s / B` where quotas are exact, the chance of the source where it is drawn for each
row. So the chance of anchor i of buffer s in one row of the batch is

.. math:: q(i) = g_s P_s(i)

and with :math:`N = \sum_{s: g_s > 0} n_s` its weight is

.. math:: w(i) = (N q(i))^{-\beta}

for the target "union": with :math:`\beta = 1` the weighted mean over a batch is, in expectation, the plain mean over all
anchors of all buffers that are drawn from. For the target "source" it is

.. math:: w(i) = (n_s P_s(i))^{-\beta}

so that with :math:`\beta = 1` it is :math:`\sum_s g_s \bar f_s`, the fractions' mean of the buffers' own means: priorities are
corrected for, the mixing is meant. Both are divided by the largest of the batch, or not.

The weights that the samplers give themselves are not used: each is normalised by its own largest, so that weights of
different buffers would say nothing of one another (in a mixture of one prioritized and one uniform buffer the first would
count too low).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fbuf._indexing.importance import importance_weights


class Weighed(NamedTuple):
    """Of each row."""

    probability: jax.Array  # float32[B]; 0 where mask is False
    weight: jax.Array  # float32[B]; 0 where mask is False


def weigh(
    source: jax.Array,
    chance: jax.Array,
    mask: jax.Array,
    share: jax.Array,
    number: jax.Array,
    beta: jax.Array,
    target: str,
    normalize: str | None,
) -> Weighed:
    """Chances and weights.

    Args:
      source: int32[B], which buffer; S where mask is False.
      chance: float32[B], P_s of each row.
      mask: bool[B].
      share: float32[S], g.
      number: int32[S], n.
      beta: float32[].
      target: "union" or "source".
      normalize: "batch" or None.
    """
    anchors = number.astype(jnp.float32)
    mine = jnp.minimum(source, jnp.int32(share.shape[0] - 1))
    probability = jnp.where(mask, share[mine] * chance, jnp.float32(0))
    if target == "union":
        total = jnp.sum(jnp.where(share > jnp.float32(0), anchors, jnp.float32(0)))
        relative = total * probability
    else:
        relative = anchors[mine] * chance
    least = jnp.float32(1)  # not used
    weight = importance_weights(jnp.float32(1), relative, mask, beta, normalize, least)
    return Weighed(probability, weight)

r"""Weigh rows that are drawn from several members as rows of one whole.

Member s has the share :math:`g_s` of the draws of the whole, and provides the share :math:`h_s` of the rows of a batch. Its row
i, which it draws with probability :math:`P_s(i)`, has in the whole of N rows the probability and the weight

.. math:: q(i) = g_s P_s(i), \qquad w(i) = \frac{g_s}{h_s} (N q(i))^{-\beta}.

| members | g | h |
|---|---|---|
| buffers of a mixture | its fractions | g |
| shards that draw B / D rows each | by mass | 1 / D |
| shards whose rows are exchanged | by mass | g |
| shards of several processes | by mass | by the newest reported masses |

The functions take arrays of JAX or of NumPy and return the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def by_mass(total: Any, unit: Any, least: Any, number: Any) -> tuple[Any, Any]:
    """Return the share g of each member by its mass, and the least probability of a row of each in the whole, floats [K].

    If no member has mass, shares are by numbers of rows; all are 0 if there are no rows. A least probability of -1 says that it
    is unknown, or that the member has no mass.

    Args:
      total: float[K], mass of the rows of each member, in units of 2^unit.
      unit: float[K].
      least: float[K], least mass of a row, in the same unit; 0 or infinite: unknown.
      number: float[K], rows.
    """
    xp = _namespace(total)
    has_mass = total > 0
    largest = xp.max(xp.where(has_mass, unit, -np.inf))
    is_flat, scale = xp.isneginf(largest), xp.exp2(xp.where(has_mass, unit - largest, -np.inf))
    mass = xp.where(is_flat, number, xp.where(has_mass, total * scale, 0.0))
    whole = _or_one(xp.sum(mass))
    share = mass / whole
    least = xp.where(is_flat, 1.0, xp.where(xp.isfinite(least), least, 0.0) * scale) / whole
    return share, xp.where((least > 0) & (share > 0), least, -1.0)


def least_drawn(share: Any, chance: Any) -> Any:
    """Return the least probability in the whole of the rows drawn from each member, floats [K]; -1 where there are none.

    Args:
      share: float[K], g.
      chance: float[K], the least :math:`P_s` of a row drawn from each member; infinite if there is none.
    """
    xp = _namespace(share)
    is_drawn = xp.isfinite(chance)
    return xp.where(is_drawn & (share > 0), xp.where(is_drawn, chance, 0.0) * share, -1.0)


def importance(relative: Any, beta: Any) -> Any:
    r"""Return :math:`r^{-\beta}`, finite for any numbers; `relative` is N q."""
    xp = _namespace(relative)
    with np.errstate(over="ignore"):
        return xp.minimum(xp.power(xp.maximum(relative, 1e-30), -finite_exponent(beta)), 1e30)


def finite_exponent(number: Any) -> Any:
    """Clip an annealed exponent to [0, 1000]; NaN becomes 0."""
    xp = _namespace(number)
    return xp.where(number >= 0, xp.minimum(number, 1000.0), 0.0)


def weigh(relative: Any, mask: Any, beta: Any, factor: Any = 1.0) -> Any:
    r"""Return the weight :math:`f r^{-\beta}` of each row, float[B], 0 where `mask` is False.

    Args:
      relative: float[B], N q of each row.
      mask: bool[B].
      beta: float[].
      factor: float[B] or float[], g / h of the member of each row.
    """
    xp = _namespace(relative)
    return xp.where(mask, factor * importance(xp.where(mask, relative, 1.0), beta), 0.0)


def largest_weight(number: Any, least: Any, beta: Any, factor: Any = 1.0) -> Any:
    """Return the largest weight of any row, float[], from the least probability of a row of each member.

    Args:
      number: float[], N.
      least: float[K], as `by_mass` or `least_drawn` return it.
      beta: float[].
      factor: float[K] or float[], g / h of each member.
    """
    xp = _namespace(least)
    return xp.max(xp.where(least >= 0, factor * importance(number * least, beta), 0.0))


def normalized(weight: Any, largest: Any) -> Any:
    """Divide weights by the largest one; 0: by nothing. XLA would rewrite only some quotients as this product."""
    return weight * (1 / _or_one(largest))


def _or_one(number: Any) -> Any:
    return _namespace(number).where(number > 0, number, 1.0)


def _namespace(array: Any) -> Any:
    return jnp if isinstance(array, jax.Array) else np

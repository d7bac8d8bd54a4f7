"""How jitted code reaches priorities on the host: a write, a draw and a clearing, each one callback.

Ordered by versions alone: a write takes the version that the write before it gave, a draw is a pure function of a version and
the numbers it falls by (see `fbuf._host.priorities.store`). A write takes the token of earlier reads besides, so that they run
first and nobody has to walk back.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._bridge.callbacks import call, guard, view
from fbuf._bridge.lifetime import find, join_id, split_id
from fbuf._host.priorities.store import Priorities


def _of(id: Any) -> Priorities:
    return cast(Priorities, find(join_id(view(id))))


def _write(context: Any, out: Any, id: Any, token: Any, version: Any, slot: Any, leaf: Any) -> None:
    np.asarray(out)[...] = split_id(_of(id).write(join_id(view(version)), view(slot), view(leaf)))


def _clear(context: Any, out: Any, id: Any, version: Any) -> None:
    np.asarray(out)[...] = split_id(_of(id).clear(join_id(view(version))))


def _draw(context: Any, out: Any, id: Any, version: Any, top: Any, bottom: Any) -> None:
    """Under `vmap` over keys every operand has a leading axis, along which id and version are the same."""
    index, leaf, mass, least = (np.asarray(x) for x in out)
    drawn = _of(id).draw(join_id(view(version)), view(top).reshape(-1), view(bottom).reshape(-1))
    index[...], leaf[...] = drawn[0].reshape(index.shape), drawn[1].reshape(leaf.shape)
    mass[...], least[...] = drawn[2:]


_VERSION = jax.ShapeDtypeStruct((2,), jnp.uint32)


def write(id: jax.Array, token: jax.Array, version: jax.Array, slot: jax.Array, leaf: jax.Array) -> jax.Array:
    """Writes leaves float32[B] of a version uint32[2]; the new one. Slots int32[B] out of range are skipped, the last of equal
    ones wins."""
    operands = guard(id, token, version, slot, lax.stop_gradient(leaf), what="priorities")
    made: jax.Array = call(_write, _VERSION, operands, effect=True)
    return made


def clear(id: jax.Array, version: jax.Array) -> jax.Array:
    """The version uint32[2] with all leaves 0."""
    made: jax.Array = call(_clear, _VERSION, guard(id, version, what="priorities"), effect=True)
    return made


def draw(
    id: jax.Array, version: jax.Array, top: jax.Array, bottom: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """int32[B] and float32[B], leaves drawn from a version by `fbuf._algorithms.sum_tree.uniforms`; the sum float32[] of
    all, and the least float32[] above 0."""
    id, version = guard(id, version, what="priorities")
    number = jax.ShapeDtypeStruct((), jnp.float32)
    shapes = [jax.ShapeDtypeStruct(top.shape, jnp.int32), jax.ShapeDtypeStruct(top.shape, jnp.float32), number, number]
    index, leaf, mass, least = call(_draw, shapes, (id, version, top, bottom), effect=False)
    return index, leaf, mass, least

"""`FieldsView`: a view of one's own that says of each leaf of a batch which leaf of which row it is.

`earlier` and `later` find the rows around a drawn one without leaving its episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec, nested
from fbuf._indexing import ring
from fbuf._indexing.anchors import END, START, has
from fbuf._interfaces.sampler import EligibleSet
from fbuf._interfaces.storage import Read
from fbuf._interfaces.view import EligibilityRule, Window


@component
class _Names:
    """Of the leaves of a batch, static."""

    names: tuple[str, ...]


class FieldsView:
    """Base of a view whose batches are dicts of leaves of rows.

    A subclass is a `component` with a `rule` and one method, `fields`. With `EligibilityRule("name", back=b, ahead=a)` a row
    can be drawn while the `b` rows before it are held (fewer at the start of an episode) and once `a` more rows of its episode
    are written. The name distinguishes its states from those of other views. `Buffer(episode_end=...)` names what ends
    episodes.

    Example: the action before, zeros where an episode begins.
      >>> import fbuf, jax.numpy as jnp
      >>> @fbuf.parts.component
      ... class WithLastAction(fbuf.parts.FieldsView):
      ...     rule = fbuf.parts.EligibilityRule("last_action", back=1)
      ...
      ...     def fields(self, spec, eligible, slot):
      ...         before = fbuf.parts.earlier(eligible, slot, 1)
      ...         return {name: (name, slot) for name in spec} | {"last_action": ("action", before)}
      >>> buffer = fbuf.Buffer(100, view=WithLastAction(), episode_end=("done",))
      >>> state = buffer.init({"action": 0, "done": False})
      >>> state = buffer.extend(state, {"action": jnp.arange(1, 9), "done": jnp.arange(8) == 3})
      >>> batch = buffer.peek(state, jax.random.key(0), 64).data
      >>> sorted(set(zip(batch["action"].tolist(), batch["last_action"].tolist())))
      [(1, 0), (2, 1), (3, 2), (4, 3), (5, 0), (6, 5), (7, 6), (8, 7)]
    """

    rule = EligibilityRule()

    def fields(self, spec: Spec, eligible: EligibleSet, slot: jax.Array) -> Mapping[str, tuple[str, jax.Array]]:
        """Name of each leaf of the batch ("a/b": nested), to a leaf of rows and its slots int32[B, ...].

        `slot` int32[B] was drawn. A slot C gives zeros; `earlier` and `later` make it where there is no such row.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a view that derives from FieldsView needs a method fields. Write "
            f"def fields(self, spec, eligible, slot): return {{name: (name, slot) for name in spec}}."
        )

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        return (), None

    def check(self, spec: Spec) -> None:
        """Any rows will do; override it to say early what is missing."""

    def opens(self, step: jax.Array, flags: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        ahead = jnp.int32(self.rule.ahead)
        return jnp.full_like(step, ahead), step >= ahead

    def window(self, spec: Spec, eligible: EligibleSet, slot: jax.Array, mask: jax.Array, key: jax.Array) -> Window:
        nowhere = jnp.int32(eligible.geometry.capacity)
        fields = self.fields(spec, eligible, jnp.where(mask, slot, nowhere))
        unknown = [name for name, _ in fields.values() if name not in spec]
        if unknown:
            raise ValueError(
                f"{type(self).__name__}.fields: names leaf '{unknown[0]}', but rows have {', '.join(spec)}. Use one of those."
            )
        return Window(tuple(Read(name, at) for name, at in fields.values()), _Names(tuple(fields)))

    def assemble(self, spec: Spec, structure: Any, arrays: Sequence[jax.Array], window: Window) -> PyTree:
        return nested(dict(zip(window.context.names, arrays, strict=True)))


def earlier(eligible: EligibleSet, slot: jax.Array, steps: int) -> jax.Array:
    """Slots of the rows `steps` before those in `slot` int32[...], in the same episode; C where there is none.

    The view's rule needs `back >= steps`. Cost: O(steps) flags a slot.
    """
    return _moved("earlier", eligible, slot, -steps, START)


def later(eligible: EligibleSet, slot: jax.Array, steps: int) -> jax.Array:
    """Slots of the rows `steps` after those in `slot` int32[...], in the same episode; C where there is none.

    The view's rule needs `ahead >= steps`. Cost: O(steps) flags a slot.
    """
    return _moved("later", eligible, slot, steps, END)


def _moved(call: str, eligible: EligibleSet, slot: jax.Array, offset: int, border: int) -> jax.Array:
    geometry, nowhere = eligible.geometry, jnp.int32(eligible.geometry.capacity)
    if eligible.flags is None:
        need = "back" if offset < 0 else "ahead"
        raise ValueError(
            f"fbuf.parts.{call}: this view looks at no neighbours; expected a rule that says so. Write "
            f'rule = fbuf.parts.EligibilityRule("name", {need}={abs(offset)}).'
        )
    inside = (slot >= jnp.int32(0)) & (slot < nowhere)
    safe = jnp.where(inside, slot, jnp.int32(0))
    sign = jnp.int32(-1 if offset < 0 else 1)
    passed = (sign * jnp.arange(abs(offset), dtype=jnp.int32)).reshape((1,) * slot.ndim + (-1,))
    near = eligible.flags.at[ring.shift(geometry, safe[..., None], passed)].get(mode="promise_in_bounds")
    whole = ~jnp.any(has(near, border), axis=-1)
    return jnp.where(inside & whole, ring.shift(geometry, safe, jnp.int32(offset)), nowhere)

"""Errors from counters: what traced verbs can only mask and count, raised on the host.

Inside jit a value cannot raise, so verbs skip what they refuse and count it in the state. Whoever wants an error looks at
the counters before and after a step: this does, for any step (`fbuf.checked`), and for `Replay`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import numpy as np

from fbuf._state import BY_DESIGN, COUNTERS, BufferState
from fbuf._typing import Joint

F = TypeVar("F", bound=Callable[..., Any])


def raise_for(call: str, before: np.ndarray, after: np.ndarray, hint: str, ahead: bool = False) -> None:
    """Raises if more was refused `after` than `before`, both uint32 counters.

    Where batches are drawn `ahead`, rows may go before they are handed out, so that stale indices are nobody's mistake.
    """
    new = dict(zip(COUNTERS, (int(n) for n in after - before), strict=True))
    for name in (*BY_DESIGN, *(("refused_stale",) if ahead else ())):
        del new[name]
    if new.pop("empty_samples"):
        raise ValueError(
            f"{call}: there is nothing to draw now. Ask can_sample first, or learn only where the mask is True."
        )
    if any(new.values()):
        names = {name: name.removeprefix("refused_").replace("_", " ") for name in new}
        what = ", ".join(f"{n} {names[name]}" for name, n in new.items() if n)
        if new["refused_rows"]:
            hint = f"Make room for distinct blocks with `grow`. {hint}"
        raise ValueError(f"{call}: refused one by one: {what}; the others took effect. {hint}")


def _states(tree: Any) -> list[Any]:
    """Of buffers and mixtures, each mixture before its buffers."""
    found = []
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, (BufferState, Joint))):
        if isinstance(leaf, Joint):
            found += [leaf, *_states(leaf.buffers)]
        elif isinstance(leaf, BufferState):
            found.append(leaf)
    return found


def _counters(state: Any) -> np.ndarray:
    """uint32, as `COUNTERS` names them, copied to the host."""
    if isinstance(state, BufferState):
        return np.array(state.counters)
    counts = jax.device_get(state.refused)
    return np.array([counts.get(name, 0) for name in COUNTERS], np.uint32)


def checked_step(step: F) -> F:
    """A step that raises for values its verbs refused: see `fbuf.checked`."""

    @functools.wraps(step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before = [_counters(state) for state in _states((args, kwargs))]
        result = step(*args, **kwargs)
        for old, new in zip(before, _states(result), strict=False):
            ahead = getattr(new, "ahead", None) is not None
            raise_for("checked", old, _counters(new), "buffer.stats(state) has the totals.", ahead)
        return result

    return cast(F, wrapped)

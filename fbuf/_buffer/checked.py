"""`checked`: a step that raises for values which methods under jit can only mask and count.

A traced method cannot raise for a value: it counts each refusal in the state (`fbuf._buffer.state.COUNTERS`) and continues.
The counts of the states that a step takes and returns are compared outside of it, so the step compiles as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import numpy as np

from fbuf._buffer.state import BY_DESIGN, COUNTERS, BufferState

F = TypeVar("F", bound=Callable[..., Any])

_NEWEST = "Call it before `extend`, with the index of the newest batch"
_GROW = "Make room with buffer.grow(state) or replay.grow()"
_MESSAGES: Mapping[str, tuple[str, str]] = {
    "refused_nonfinite": (
        "{n} priorities are NaN or infinite and were refused; the others took effect",
        "Look for the NaN in the loss, or pass jnp.nan_to_num(x) of the TD errors or priorities",
    ),
    "refused_out_of_range": (
        "{n} indices name no slot and were skipped",
        "Pass batch.index of a batch of this buffer, as it is",
    ),
    "refused_stale": ("{n} indices are stale and were skipped: their rows have been overwritten since", _NEWEST),
    "refused_closed": ("{n} indices name rows that can no longer be drawn, and were skipped", _NEWEST),
    "expired_rows": (
        "{n} rows have expired and are masked: the state is too old, or more rows than the slack were written since a "
        "prefetched batch was drawn",
        "Carry on the newest state, write fewer rows between two draws, or keep more with slack=",
    ),
    "refused_rows": (
        "{n} rows were not stored: they found no room, or could not be written",
        f"{_GROW}; ask buffer.can_add(state, n) of a queue",
    ),
}


def checked(step: F) -> F:
    """Return a step that raises for values which methods under jit can only mask and count.

    It raises for draws from nothing; priorities that are NaN or infinite; indices out of range, stale or closed; expired rows;
    and rows that were not stored. The message says how many, and the fix. Stale and closed indices of prefetched batches are
    expected.

    Args:
      step: A function that takes states (also of mixtures) and returns them in the same order, jitted or not; a method of a
        buffer is one: `fbuf.checked(buffer.extend)`.
    Returns:
      The step, which now waits for each call, and cannot be called inside jit.
    Raises:
      TypeError: the step is not callable; (what is returned) it is called inside jit.
      ValueError: (what is returned) something was refused; the step has run nevertheless. `error.result` is what it returned.
      OSError: (what is returned) a storage could not write rows; the state in `error.result` keeps those it had.
    Cost: nine counters of each state are fetched before and after a call.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(10)
      >>> draw = fbuf.checked(jax.jit(lambda state, key: buffer.sample(state, key, 4)))
      >>> draw(buffer.init(jnp.zeros(2)), jax.random.key(0))
      Traceback (most recent call last):
      ValueError: checked: no row can be sampled. Add rows, or ask can_sample first; in a step learn only where mask is True.
    """
    if not callable(step):
        raise TypeError(
            f"checked: step is {type(step).__name__}; expected a function of states. Write fbuf.checked(buffer.sample), or "
            f"pass a jitted step."
        )

    @functools.wraps(step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        states = _states((args, kwargs))
        if any(isinstance(state.header, jax.core.Tracer) for state in states):
            raise TypeError("checked: called inside jit, where no value is known. Write fbuf.checked(jax.jit(step)).")
        before = [np.array(state.counters) for state in states]
        result = step(*args, **kwargs)
        try:
            for old, new in zip(before, _states(result), strict=False):
                after, ahead = np.array(new.counters), new.ahead is not None  # waits for the step
                jax.tree.leaves(new)  # raises if a write failed
                raise_for("checked", old, after, "buffer.stats(state) has the totals.", ahead)
        except (OSError, RuntimeError, ValueError) as error:
            error.result = result  # type: ignore[union-attr]
            raise
        return result

    return cast(F, wrapped)


def raise_for(call: str, before: np.ndarray, after: np.ndarray, hint: str, ahead: bool = False) -> None:
    """Raise if uint32 counters increased. If batches are drawn `ahead`, indices of rows that are gone are expected."""
    new = dict(zip(COUNTERS, (int(n) for n in after - before), strict=True))
    for name in (*BY_DESIGN, *(("refused_stale", "refused_closed") if ahead else ())):
        del new[name]
    if new.pop("empty_samples"):
        raise ValueError(
            f"{call}: no row can be sampled. Add rows, or ask can_sample first; in a step learn only where mask is True."
        )
    if any(new.values()):
        found = [(message.format(n=new[name]), fix) for name, (message, fix) in _MESSAGES.items() if new.get(name)]
        raise ValueError(f"{call}: {'; '.join(message for message, _ in found)}. {found[0][1]}; {hint}")


def _states(tree: Any) -> list[BufferState]:
    """Return the states of buffers, those of a mixture among them."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, BufferState))
    return [leaf for leaf in leaves if isinstance(leaf, BufferState)]

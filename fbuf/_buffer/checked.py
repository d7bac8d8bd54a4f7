"""`checked`: errors for values that methods under jit can only mask and count.

A traced method cannot raise for a value: it counts each refusal in the state (`fbuf._buffer.state.COUNTERS`) and continues.
`checked(buffer)` has the same methods with a `checkify.check` of these counts: eager calls raise at once, jitted ones after
`checkify.checkify`. Counts are compared outside the methods, so an unchecked buffer compiles as before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from fbuf._buffer import calls
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BY_DESIGN, COUNTERS, BufferState
from fbuf._core.component import component
from fbuf._core.sample import Rows, Sample

_NEWEST = "Call it before `extend`, with the index of the newest batch"
_GROW = "Make room with buffer.grow(state) or replay.grow()"
_MESSAGES: Mapping[str, tuple[str, str]] = {
    "refused_nonfinite": (
        "{n} priorities are NaN or infinite and were refused; the others took effect",
        "Look for the NaN in the loss, or write jnp.nan_to_num(td_error)",
    ),
    "refused_out_of_range": (
        "{n} indices name no slot and were skipped",
        "Pass batch.index of a batch of this buffer, as it is",
    ),
    "refused_stale": ("{n} indices are stale and were skipped: their rows have been overwritten since", _NEWEST),
    "refused_closed": ("{n} indices name rows that can no longer be drawn, and were skipped", _NEWEST),
    "empty_samples": ("no row can be sampled", "Ask buffer.can_sample(state) first"),
    "expired_rows": (
        "{n} rows have expired and are masked: the state is too old",
        "Carry on the state that `sample` and `extend` return, or keep more rows with slack=",
    ),
    "refused_rows": (
        "{n} rows were not stored: they found no room, or could not be written",
        f"{_GROW}; ask buffer.can_add(state, n) of a queue",
    ),
    "retired_rows": (
        "{n} of the oldest rows were evicted before the buffer was full",
        f"{_GROW}, or write fbuf.checked(buffer, allow=('retired_rows',))",
    ),
    "draws_refused": (
        "{n} drawn rows had found no room",
        f"{_GROW}, or write fbuf.checked(buffer, allow=('draws_refused',))",
    ),
}


def _require(fine: Any, message: str, **numbers: Any) -> None:
    """Raise `message` unless `fine` bool[]: at once if its value is known, else through `checkify`."""
    if any(isinstance(x, jax.core.Tracer) for x in (fine, *numbers.values())):
        arrays: Any = {k: jnp.asarray(v) for k, v in numbers.items()}
        checkify.check(fine, message, **arrays)
    elif not fine:
        raise ValueError(message.format(**{k: np.asarray(v).item() for k, v in numbers.items()}))


def _with_counts(name: str, changes_by_index: bool = False) -> Any:
    """Return a method of `Buffer` that raises for every new count; with prefetch, stale indices are expected."""
    method = getattr(Buffer, name)

    @functools.wraps(method)
    def checked_method(self: Checked, state: BufferState, *args: Any, **kwargs: Any) -> BufferState:
        after: BufferState = method(self.buffer, state, *args, **kwargs)
        expected = ("refused_stale",) if changes_by_index and self.buffer.prefetch else ()
        self._compare(f"Buffer.{name}", state, after, *expected)
        return after

    return checked_method


@component
class Checked:
    """A buffer whose methods raise for values; `fbuf.checked(buffer)` makes one. It hashes and compares by value.

    Attributes:
      buffer: The buffer; states are its states.
      allow: Names of counts (as in `stats`) that are not errors.
    """

    buffer: Buffer
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.allow, str):
            raise TypeError(f"checked: allow is {self.allow!r}; expected a tuple. Write allow=({self.allow!r},).")
        unknown = [name for name in self.allow if name not in COUNTERS]
        if unknown:
            raise ValueError(f"checked: allow names '{unknown[0]}'; expected some of {', '.join(COUNTERS)}.")
        object.__setattr__(self, "allow", tuple(self.allow))

    def __getattr__(self, name: str) -> Any:
        """Return members that need no checks: capacity, storage, geometry, init, resume, plan, clear, stats, ..."""
        if name.startswith("_") or name == "buffer":
            raise AttributeError(name)
        return getattr(self.buffer, name)

    def _compare(self, call: str, before: BufferState, after: BufferState, *expected: str) -> None:
        """Raise if counts increased, other than those allowed or `expected`."""
        new = after.counters - before.counters
        for i, name in enumerate(COUNTERS):
            if name not in self.allow and name not in expected:
                what, fix = _MESSAGES[name]
                _require(new[i] == jnp.uint32(0), f"{call}: {what}. {fix}.", n=new[i])

    def _check_arrays(self, call: str, numbers: Mapping[str, Any]) -> None:
        """Raise for arrays, traced or not, that are out of range; the methods check numbers of Python and numpy."""
        most = self.buffer.sampler.most
        for name, value in numbers.items():
            if isinstance(value, jax.Array) and value.shape == ():
                x = value.astype(jnp.float32)
                fine = jnp.isfinite(x) & (x >= jnp.float32(0)) & (x <= jnp.float32(most.get(name, np.inf)))
                limit = f"a number from 0 to {most[name]:g}" if name in most else "a finite number >= 0"
                _require(fine, f"{call}: {name} is {{value}}; expected {limit}. Write jnp.clip(x, ...).", value=x)

    add = _with_counts("add")
    extend = _with_counts("extend")
    update_rows = _with_counts("update_rows", changes_by_index=True)
    _update_priority = _with_counts("update_priority", changes_by_index=True)

    @functools.wraps(Buffer.update_priority)
    def update_priority(self, state: BufferState, *args: Any, **settings: Any) -> BufferState:
        eta = settings.get("eta")
        if isinstance(eta, jax.core.Tracer):
            message = "Buffer.update_priority: eta is {value}; expected one number from 0 to 1."
            _require((eta >= 0) & (eta <= 1), message, value=eta)
        after: BufferState = self._update_priority(state, *args, **settings)
        return after

    @functools.wraps(Buffer.set)
    def set(self, state: BufferState, **numbers: Any) -> BufferState:
        self._check_arrays("Buffer.set", numbers)
        return self.buffer.set(state, **numbers)

    @functools.wraps(Buffer.sample)
    def sample(self, state: BufferState, *args: Any, **options: Any) -> tuple[BufferState, Sample]:
        self._check_arrays("Buffer.sample", options)
        after, batch = self.buffer.sample(state, *args, **options)
        self._compare("Buffer.sample", state, after)
        return after, batch

    @functools.wraps(Buffer.peek)
    def peek(self, state: BufferState, key: jax.Array, batch_size: int | None = None, **options: Any) -> Sample:
        self._check_arrays("Buffer.peek", options)
        after, batch = calls.peek(self.buffer, state, key, batch_size, options)
        self._compare("Buffer.peek", state, after)
        return batch

    @functools.wraps(Buffer.get)
    def get(self, state: BufferState, index: Any) -> Rows:
        rows = self.buffer.get(state, index)
        if "refused_stale" not in self.allow:
            what = "{n} indices name no row of this state: they are stale, out of range or masked"
            self._check_mask("Buffer.get", rows, f"{what}. Pass an index of rows that are held, batch.index")
        return rows

    @functools.wraps(Buffer.last)
    def last(self, state: BufferState, n: int) -> Rows:
        rows = self.buffer.last(state, n)
        self._check_mask("Buffer.last", rows, "{n} of the rows asked for are not held. Ask buffer.size(state) first")
        return rows

    @functools.wraps(Buffer.rows)
    def rows(self, state: BufferState) -> Rows:
        rows = self.buffer.rows(state)
        why = "draws_refused" if self.buffer.storage.grows else "expired_rows"
        if self.buffer.storage.masks_expired and why not in self.allow:
            gone = self.buffer.size(state) - jnp.sum(rows.mask, dtype=jnp.int32)
            what = "{n} rows have expired" if why == "expired_rows" else "{n} rows had found no room"
            _require(gone == jnp.int32(0), f"Buffer.rows: {what}. {_MESSAGES[why][1]}.", n=gone)
        return rows

    def _check_mask(self, call: str, rows: Rows, what: str) -> None:
        gone = jnp.sum(~rows.mask, dtype=jnp.int32)
        _require(gone == jnp.int32(0), f"{call}: {what}.", n=gone)

    @functools.wraps(Buffer.convert)
    def convert(self, other: Any, state: BufferState) -> BufferState:
        return self.buffer.convert(other.buffer if isinstance(other, Checked) else other, state)

    @functools.wraps(Buffer.grow)
    def grow(self, state: BufferState, *args: Any, **kwargs: Any) -> tuple[Checked, BufferState]:
        buffer, state = self.buffer.grow(state, *args, **kwargs)
        return dataclasses.replace(self, buffer=buffer), state


def checked(what: Any, *, allow: tuple[str, ...] = ()) -> Any:
    """Return a buffer, or a step, that raises for values which methods under jit can only mask and count.

    A checked buffer has the same methods. Eager calls raise at once; jit, scan, cond and vmap raise through `checkify`:
    `err, out = jax.jit(checkify.checkify(step))(...)`, then `err.throw()`. It raises for draws from nothing; priorities that
    are NaN or infinite; indices out of range, stale or closed; expired rows; rows and draws refused by a full storage; traced
    numbers (`beta`, `alpha`, `eta`) out of range; `get` and `last` of missing rows. Each message names the method, how many,
    and the fix.

    A checked step compares the counters before and after the call, on the host; it cannot be called inside jit.

    Args:
      what: A `Buffer`, checked or not (then what it allows stays allowed); or a function that takes states (also of
        mixtures) and returns them in the same order, jitted or not.
      allow: Of a buffer: counts that are not errors, by their names in `stats`: `("retired_rows",)`.
    Returns:
      A buffer-like value (static for jit, hashed and compared by value; `.buffer` is the one without checks), or the step,
      which now waits for each call.
    Raises:
      ValueError: (what is returned) something was refused; the method, or the step, has run nevertheless. Through checkify its
        subclass `JaxRuntimeError`.
      OSError: (what is returned, eagerly) a storage could not write rows; the state keeps those it had. What a step returned
        is then `error.result`, as for a ValueError.
    Cost: a comparison of nine counters per method; eager calls wait for the method. Unchecked buffers cost nothing.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> from jax.experimental import checkify
      >>> buffer = fbuf.checked(fbuf.Buffer(10))
      >>> draw = jax.jit(checkify.checkify(lambda state, key: buffer.sample(state, key, 4)))
      >>> error, (state, batch) = draw(buffer.init(jnp.zeros(2)), jax.random.key(0))
      >>> print(error.get().splitlines()[0].split(" (")[0])
      Buffer.sample: no row can be sampled. Ask buffer.can_sample(state) first.

      >>> draw = fbuf.checked(jax.jit(lambda state, key: fbuf.Buffer(10).sample(state, key, 4)))
      >>> draw(buffer.init(jnp.zeros(2)), jax.random.key(0))
      Traceback (most recent call last):
      ValueError: checked: no row can be sampled. Add rows, or ask can_sample first; in a step learn only where mask is True.
    """
    if isinstance(what, Checked):
        more = Checked(what.buffer, allow).allow  # validates the names
        return Checked(what.buffer, tuple(dict.fromkeys((*what.allow, *more))))
    if isinstance(what, Buffer):
        return Checked(what, allow)
    if not callable(what):
        raise TypeError(f"checked: got {type(what).__name__}; expected a Buffer, or a step of states.")
    if allow:
        raise TypeError(f"checked: allow is {allow!r}, but a step is given; expected a Buffer with it. Leave it out.")
    return checked_step(what)


F = TypeVar("F", bound=Callable[..., Any])


def raise_for(call: str, before: np.ndarray, after: np.ndarray, hint: str, ahead: bool = False) -> None:
    """Raise if uint32 counters increased. If batches are drawn `ahead`, stale indices are expected."""
    new = dict(zip(COUNTERS, (int(n) for n in after - before), strict=True))
    for name in (*BY_DESIGN, *(("refused_stale",) if ahead else ())):
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


def checked_step(step: F) -> F:
    """Return a step that raises for refused values: see `fbuf.checked`."""

    @functools.wraps(step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before = [np.array(state.counters) for state in _states((args, kwargs))]
        result = step(*args, **kwargs)
        try:
            for old, new in zip(before, _states(result), strict=False):
                after, ahead = np.array(new.counters), new.ahead is not None  # waits for the step
                jax.tree.leaves(new)  # raises if a write failed
                raise_for("checked", old, after, "buffer.stats(state) has the totals.", ahead)
        except (OSError, ValueError) as error:
            error.result = result  # type: ignore[union-attr]
            raise
        return result

    return cast(F, wrapped)

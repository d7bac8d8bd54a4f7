"""`checked`: errors for the values that verbs under jit can only mask and count.

A traced verb cannot raise for a value, so it refuses one by one, counts in the state (`fbuf._buffer.state.COUNTERS`), and goes
on. `checked(buffer)` gives the same verbs with a `jax.experimental.checkify.check` for each of these counts: eager calls raise
at once, jitted ones once the step is functionalised with `checkify.checkify`. The counts are compared outside the verbs, so
that a buffer that is not checked compiles to what it did before.

Rejected: a field of `Buffer` (every user's buffer would carry it, and one that differs in it would be another buffer), and
checks inside the verbs (they would have to be traced away again).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BY_DESIGN, COUNTERS, BufferState
from fbuf._core.component import component
from fbuf._core.pytree import PyTree
from fbuf._core.sample import Index, Rows, Sample
from fbuf._interfaces.storage import Growable

if TYPE_CHECKING:
    from fbuf._buffer.plan import Plan


_SAYS: Mapping[str, tuple[str, str]] = {
    "refused_nonfinite": (
        "{n} priorities are NaN or infinite and were refused; the others took effect",
        "Look for the NaN in the loss, or write jnp.nan_to_num(td_error)",
    ),
    "refused_out_of_range": (
        "{n} indices name no slot and were skipped",
        "Pass batch.index of a batch of this buffer, as it is",
    ),
    "refused_stale": (
        "{n} indices are stale and were skipped: their rows have been overwritten since",
        "Call it before `extend`, with the index of the newest batch",
    ),
    "refused_closed": (
        "{n} indices name rows that can no longer be drawn, and were skipped",
        "Call it before `extend`, with the index of the newest batch",
    ),
    "empty_samples": (
        "there is nothing to draw",
        "Ask buffer.can_sample(state) first",
    ),
    "expired_rows": (
        "{n} rows have expired and are masked: the state is too old",
        "Carry on the state that `sample` and `extend` return, or keep more rows with slack=",
    ),
    "refused_rows": (
        "{n} rows found no room and were not stored",
        "Make room with buffer, state = buffer.grow(state)",
    ),
    "retired_rows": (
        "{n} of the oldest rows were given up for new ones before the buffer was full",
        "Make room with buffer, state = buffer.grow(state), or write fbuf.checked(buffer, allow=('retired_rows',))",
    ),
    "draws_refused": (
        "{n} draws landed on rows that had found no room",
        "Make room with buffer, state = buffer.grow(state), or write fbuf.checked(buffer, allow=('draws_refused',))",
    ),
}


def _require(fine: Any, message: str, **numbers: Any) -> None:
    """Raises `message` unless `fine` bool[]: at once where its value is known, else through `checkify`."""
    if any(isinstance(x, jax.core.Tracer) for x in (fine, *numbers.values())):
        arrays: Any = {k: jnp.asarray(v) for k, v in numbers.items()}
        checkify.check(fine, message, **arrays)
    elif not fine:
        raise ValueError(message.format(**{k: np.asarray(v).item() for k, v in numbers.items()}))


@component
class Checked:
    """A buffer whose verbs raise for values; `fbuf.checked(buffer)` makes one. It hashes and compares by value.

    Attributes:
      buffer: The buffer; states are its states.
      allow: Names of counts (as in `stats`) that are no errors.
    """

    buffer: Buffer
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.buffer, Buffer):
            raise TypeError(
                f"checked: buffer is {type(self.buffer).__name__}; expected a Buffer. Write fbuf.checked(buffer)."
            )
        if isinstance(self.allow, str):
            raise TypeError(f"checked: allow is {self.allow!r}; expected a tuple. Write allow=({self.allow!r},).")
        unknown = [name for name in self.allow if name not in COUNTERS]
        if unknown:
            raise ValueError(f"checked: allow names '{unknown[0]}'; expected some of {', '.join(COUNTERS)}.")
        object.__setattr__(self, "allow", tuple(self.allow))

    def __getattr__(self, name: str) -> Any:
        """What is the same without checks: capacity, storage, geometry, init, resume, plan, clear, stats, ..."""
        if name.startswith("_") or name == "buffer":
            raise AttributeError(name)
        return getattr(self.buffer, name)

    def _look(self, call: str, before: BufferState, after: BufferState, *also: str) -> None:
        new = after.counters - before.counters
        for i, name in enumerate(COUNTERS):
            if name not in self.allow and name not in also:
                what, fix = _SAYS[name]
                _require(new[i] == jnp.uint32(0), f"{call}: {what}. {fix}.", n=new[i])

    def _numbers(self, call: str, numbers: Mapping[str, Any]) -> None:
        """Numbers that are arrays, traced or not: those of Python and numpy the verbs check themselves."""
        most = getattr(self.buffer.sampler, "most", {})
        for name, value in numbers.items():
            if isinstance(value, jax.Array) and value.shape == ():
                x = value.astype(jnp.float32)
                fine = jnp.isfinite(x) & (x >= jnp.float32(0)) & (x <= jnp.float32(most.get(name, np.inf)))
                limit = f"a number from 0 to {most[name]:g}" if name in most else "a finite number >= 0"
                _require(fine, f"{call}: {name} is {{value}}; expected {limit}. Write jnp.clip(x, ...).", value=x)

    # ----------------------------------------------------------------------------------------------- writing

    def add(self, state: BufferState, row: PyTree, *, priority: Any = None, mask: Any = None) -> BufferState:
        """`Buffer.add`; raises for priorities that are not finite, and for rows refused or given up for want of room."""
        after = self.buffer.add(state, row, priority=priority, mask=mask)
        self._look("Buffer.add", state, after)
        return after

    def extend(self, state: BufferState, rows: PyTree, *, priority: Any = None, mask: Any = None) -> BufferState:
        """`Buffer.extend`; raises for priorities that are not finite, and for rows refused or given up for want of room."""
        after = self.buffer.extend(state, rows, priority=priority, mask=mask)
        self._look("Buffer.extend", state, after)
        return after

    def update_priority(
        self, state: BufferState, index: Index, td_error: Any, *, mask: Any = None, eta: Any = 0.9
    ) -> BufferState:
        """`Buffer.update_priority`; raises for errors that are not finite and indices out of range, stale or closed.

        With `prefetch=1` rows may go between the draw and the hand-out: then stale indices are no error.
        """
        call = "Buffer.update_priority"
        if isinstance(eta, jax.core.Tracer):
            fine = (eta >= 0) & (eta <= 1)
            _require(fine, f"{call}: eta is {{value}}; expected one number from 0 to 1.", value=eta)
        after = self.buffer.update_priority(state, index, td_error, mask=mask, eta=eta)
        self._look(call, state, after, *(("refused_stale",) if self.buffer.prefetch else ()))
        return after

    def update_rows(self, state: BufferState, index: Index, fields: PyTree) -> BufferState:
        """`Buffer.update_rows`; raises for indices out of range or stale, and for rows that find no room.

        With `prefetch=1` rows may go between the draw and the hand-out: then stale indices are no error.
        """
        after = self.buffer.update_rows(state, index, fields)
        self._look("Buffer.update_rows", state, after, *(("refused_stale",) if self.buffer.prefetch else ()))
        return after

    def set(self, state: BufferState, **numbers: Any) -> BufferState:
        """`Buffer.set`; raises for traced numbers that are not finite, negative or too large."""
        self._numbers("Buffer.set", numbers)
        return self.buffer.set(state, **numbers)

    # ----------------------------------------------------------------------------------------------- reading

    def sample(
        self, state: BufferState, key: jax.Array, batch_size: int | None = None, **options: Any
    ) -> tuple[BufferState, Sample]:
        """`Buffer.sample`; raises if there is nothing to draw, or if rows have expired or had found no room."""
        self._numbers("Buffer.sample", options)
        after, batch = self.buffer.sample(state, key, batch_size, **options)
        self._look("Buffer.sample", state, after)
        return after, batch

    def peek(self, state: BufferState, key: jax.Array, batch_size: int | None = None, **options: Any) -> Sample:
        """`Buffer.peek`; raises for what `sample` does."""
        self._numbers("Buffer.peek", options)
        after, batch = self.buffer.peeked(state, key, batch_size, **options)
        self._look("Buffer.peek", state, after)
        return batch

    def get(self, state: BufferState, index: Any) -> Rows:
        """`Buffer.get`; raises for indices that name no row of this state, and for rows that have expired."""
        rows = self.buffer.get(state, index)
        if "refused_stale" not in self.allow:
            what = "{n} indices name no row of this state: they are stale, out of range or masked"
            fix = "Pass an index of rows that are held, batch.index"
            self._there("Buffer.get", rows.mask, f"{what}. {fix}")
        return rows

    def last(self, state: BufferState, n: int) -> Rows:
        """`Buffer.last`; raises where fewer than `n` rows are held (a lane), or some are not there."""
        rows = self.buffer.last(state, n)
        self._there("Buffer.last", rows.mask, "{n} of the rows asked for are not held. Ask buffer.size(state) first")
        return rows

    def rows(self, state: BufferState) -> Rows:
        """`Buffer.rows`; raises if rows that are held have expired, or had found no room."""
        rows = self.buffer.rows(state)
        why = "draws_refused" if isinstance(self.buffer.storage, Growable) else "expired_rows"
        if self.buffer.storage.masks_expired and why not in self.allow:
            gone = self.buffer.size(state) - jnp.sum(rows.mask, dtype=jnp.int32)
            what = "{n} rows have expired" if why == "expired_rows" else "{n} rows had found no room"
            _require(gone == jnp.int32(0), f"Buffer.rows: {what}. {_SAYS[why][1]}.", n=gone)
        return rows

    def _there(self, call: str, mask: jax.Array, what: str) -> None:
        gone = jnp.sum(~mask, dtype=jnp.int32)
        _require(gone == jnp.int32(0), f"{call}: {what}.", n=gone)

    # ----------------------------------------------------------------------------------------- other buffers

    def convert(self, other: Any, state: BufferState) -> BufferState:
        """`Buffer.convert`; `other` may be checked or not."""
        return self.buffer.convert(other.buffer if isinstance(other, Checked) else other, state)

    def grow(
        self, state: BufferState, blocks: Any = None, *, capacity: int | None = None
    ) -> tuple[Checked, BufferState]:
        """`Buffer.grow`; the buffer it gives is checked too."""
        buffer, state = self.buffer.grow(state, blocks, capacity=capacity)
        return dataclasses.replace(self, buffer=buffer), state

    def plan(self, example: PyTree, **settings: Any) -> Plan:
        """`Buffer.plan`, of the buffer without checks."""
        return self.buffer.plan(example, **settings)


def checked(what: Any, *, allow: tuple[str, ...] = ()) -> Any:
    """Raises for the values that verbs can only mask and count under jit; for a buffer, or for a whole step.

    Given a buffer, a value with the same verbs whose eager calls raise at once, and which raises from jit, scan, cond and vmap
    through `checkify`: `err, out = jax.jit(checkify.checkify(step))(...)`, then `err.throw()`. What it raises for: draws from
    nothing; priorities that are NaN or infinite; indices that are out of range, stale or closed; rows that have expired;
    rows refused or given up, and draws refused, where a storage is full; traced numbers (`beta`, `alpha`, `eta`) out of range;
    `get` and `last` of rows that are not there. Each message says which verb, how many, and what to write instead.

    Given a step, any function that takes states (of buffers, of mixtures) and returns them in the same order, jitted or not, it
    is the function with a look at the counters before and after, on the host; not to be called inside jit.

    Args:
      what: A `Buffer`, checked or not (then what it allows stays allowed), or a step.
      allow: Of a buffer: counts that are no errors, by their names in `stats`: `("retired_rows",)`.
    Returns:
      A buffer-like value (static for jit, hashed and compared by value; `.buffer` is the one without checks), or the step,
      which now waits for each call.
    Raises:
      ValueError: (what is returned) something was refused; the verb, or the step, has run all the same. Through checkify its
        subclass `JaxRuntimeError`.
    Cost: a comparison of nine counters a verb; eager calls wait for the verb. A buffer that is not checked costs nothing.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> from jax.experimental import checkify
      >>> buffer = fbuf.checked(fbuf.uniform(10))
      >>> draw = jax.jit(checkify.checkify(lambda state, key: buffer.sample(state, key, 4)))
      >>> error, (state, batch) = draw(buffer.init(jnp.zeros(2)), jax.random.key(0))
      >>> print(error.get().splitlines()[0].split(" (")[0])
      Buffer.sample: there is nothing to draw. Ask buffer.can_sample(state) first.

      >>> draw = fbuf.checked(jax.jit(lambda state, key: fbuf.uniform(10).sample(state, key, 4)))
      >>> draw(buffer.init(jnp.zeros(2)), jax.random.key(0))
      Traceback (most recent call last):
      ValueError: checked: there is nothing to draw now. Ask can_sample first, or learn only where the mask is True.
    """
    if isinstance(what, Checked):
        more = Checked(what.buffer, allow).allow  # looked at by it
        return Checked(what.buffer, (*what.allow, *(name for name in more if name not in what.allow)))
    if isinstance(what, Buffer):
        return Checked(what, allow)
    if not callable(what):
        raise TypeError(
            f"checked: got {type(what).__name__}; expected a Buffer, or a step that takes and returns states. Write "
            f"fbuf.checked(buffer)."
        )
    if allow:
        raise TypeError(f"checked: allow is {allow!r}, but a step is given; expected a Buffer with it. Leave it out.")
    return checked_step(what)


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
    for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, BufferState) or _is_joint(x)):
        if _is_joint(leaf):
            found += [leaf, *_states(leaf.buffers)]
        elif isinstance(leaf, BufferState):
            found.append(leaf)
    return found


def _is_joint(state: Any) -> bool:
    """Whether it is the state of a mixture."""
    return hasattr(state, "buffers") and hasattr(state, "refused")


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

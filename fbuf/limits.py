"""Limits on the number of rows sampled per row added, as pure state for jitted loops and as counts for threads.

A `Limit` is a value; its state is a pytree of a few words beside the buffer's state. Actors ask `can_add`, learners
`can_sample`, and both report with `added` and `sampled`. The surplus decides: `samples_per_insert` times the rows added, less
the rows drawn. It is a whole number (the ratio is a fraction), so it stays exact. `init(host=True)` counts in Python ints.

    limit = fbuf.limits.samples_per_insert(8, min_size=1000, rows=16, draws=256)
    state, pace = buffer.extend(state, rows), limit.added(limit.init(), 16)
    lax.while_loop(lambda carry: limit.can_sample(carry[1], 256), learn, (state, pace, key))

Source: Cassirer et al. 2021, "Reverb: a framework for experience replay", section 3.4; semantics of dm-reverb's RateLimiter.
"""

from __future__ import annotations

import math
import numbers
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import uint64
from fbuf._algorithms.uint64 import Wide
from fbuf._core.arguments import is_int
from fbuf._core.component import component, state

__all__ = ["Limit", "at_most", "min_size", "queue", "samples_per_insert"]

__dir__ = __all__.copy  # without the imports

_MOST = 2**31 - 1


@state
class LimitState:
    """Hold the counts of a limit: arrays, or Python ints with `init(host=True)`."""

    added: Any  # uint32[2], rows, high word first; or an int
    drawn: Any  # uint32[2], rows, duplicates counted; or an int
    surplus: Any  # uint32[2], numerator * added - denominator * drawn, signed; or an int


@component
class Limit:
    r"""Bounds on the surplus :math:`samples\_per\_insert \cdot added - drawn`.

    Attributes:
      samples_per_insert: Rows drawn per row added, on average: a number > 0, read as its decimal text (0.1 is a tenth), or a
        `fractions.Fraction`. Batches of B after every N rows give B / N. Divided by B it is the replay ratio.
      min_size: Rows that must be held before the first draw. Rows can always be added up to this number.
      min_diff: The least surplus after a draw; None for no bound.
      max_diff: The largest surplus after adding rows; None for no bound.

    Raises:
      ValueError: a number is out of range, a fraction has numbers beyond 2^31 - 1, or no draw would be possible once
        `min_size` rows are added.

    Example:
      >>> import fbuf
      >>> limit = fbuf.limits.Limit(samples_per_insert=2, min_size=2, min_diff=0)
      >>> pace = limit.added(limit.init(), 3)
      >>> bool(limit.can_sample(pace, 6)), bool(limit.can_sample(pace, 7))
      (True, False)
    """

    samples_per_insert: float | Fraction = 1
    min_size: int = 1
    min_diff: float | Fraction | None = None
    max_diff: float | Fraction | None = None

    def __post_init__(self) -> None:
        _check_count("min_size", self.min_size, 1)
        ratio = _fraction("samples_per_insert", self.samples_per_insert)
        if ratio <= 0:
            raise ValueError(f"Limit: samples_per_insert is {self.samples_per_insert!r}; expected a number > 0.")
        if max(ratio.numerator, ratio.denominator) > _MOST:
            raise ValueError(
                f"Limit: samples_per_insert is {self.samples_per_insert!r}, which is {ratio}; expected a fraction of "
                f"numbers up to 2^31 - 1. Use Fraction(x).limit_denominator(1_000_000)."
            )
        for name in ("min_diff", "max_diff"):
            value = getattr(self, name)
            if value is not None and abs(_fraction(name, value)) * ratio.denominator >= 2**62:
                raise ValueError(f"Limit: {name} is {value!r}; expected less than 2^62 / {ratio.denominator}.")
        if None not in (self.min_diff, self.max_diff) and _fraction("", self.min_diff) > _fraction("", self.max_diff):
            raise ValueError(f"Limit: min_diff is {self.min_diff!r}, above max_diff={self.max_diff!r}. Swap them.")
        if self.min_diff is not None and _fraction("min_diff", self.min_diff) > ratio * self.min_size:
            raise ValueError(
                f"Limit: min_diff is {self.min_diff!r}; expected at most samples_per_insert * min_size = "
                f"{float(ratio * self.min_size):g}. Use a smaller min_diff."
            )

    def init(self, *, added: int = 0, drawn: int = 0, host: bool = False) -> LimitState:
        """Return the counts before the first row, or after a known number of rows.

        Args:
          added, drawn: Rows so far, less than 2^64.
          host: Count in Python ints instead of arrays, for threads.
        """
        for name, value in (("added", added), ("drawn", drawn)):
            _check_count(name, value, 0, 2**64 - 1)
        surplus = self._ratio.numerator * added - self._ratio.denominator * drawn
        if host:
            return LimitState(added, drawn, surplus)
        if not -(2**63) <= surplus < 2**63:
            raise ValueError(f"Limit.init: the surplus of {added} and {drawn} rows is beyond 63 bits. Use host=True.")
        return LimitState(*(jnp.stack(uint64.of(n)) for n in (added, drawn, surplus)))

    def added(self, pace: LimitState, rows: Any = 1) -> LimitState:
        """Count `rows` more added rows, an int or int32[]. Cost: a few operations on scalars."""
        more = _count("Limit.added", "rows", pace, rows)
        surplus = _sum(pace.surplus, _scaled(more, self._ratio.numerator))
        return LimitState(_sum(pace.added, more), pace.drawn, surplus)

    def sampled(self, pace: LimitState, draws: Any = 1) -> LimitState:
        """Count `draws` more draws, an int or int32[]; B for a batch."""
        more = _count("Limit.sampled", "draws", pace, draws)
        surplus = _sum(pace.surplus, _scaled(more, -self._ratio.denominator))
        return LimitState(pace.added, _sum(pace.drawn, more), surplus)

    def can_add(self, pace: LimitState, rows: Any = 1, *, size: Any = None) -> Any:
        """Return bool[]: whether `rows` more rows may be added now.

        Args:
          pace: The counts of this limit.
          rows: An int, or int32[].
          size: Rows held, `buffer.size(state)`. Needed where rows are removed before the buffer is full (`clear`, `Consume`);
            None uses the rows added.
        """
        (_, high), call = self._bounds, "Limit.can_add"
        more = _count(call, "rows", pace, rows)
        total = _sum(_rows_in(call, pace, size), more)
        if high is None:
            return True if isinstance(more, int) else jnp.ones((), bool)
        surplus = _sum(pace.surplus, _scaled(more, self._ratio.numerator))
        return _at_most(surplus, high) | _at_most(total, self.min_size)

    def can_sample(self, pace: LimitState, draws: Any = 1, *, size: Any = None) -> Any:
        """Return bool[]: whether `draws` rows may be drawn now.

        Args:
          pace: The counts of this limit.
          draws: B of a batch: an int, or int32[].
          size: As for `can_add`.
        """
        (low, _), call = self._bounds, "Limit.can_sample"
        more = _count(call, "draws", pace, draws)
        enough = _at_most(self.min_size, _rows_in(call, pace, size))
        if low is None:
            return enough
        return enough & _at_most(low, _sum(pace.surplus, _scaled(more, -self._ratio.denominator)))

    def stats(self, pace: LimitState) -> dict[str, Any]:
        """Return `added`, `drawn`, and `surplus` in rows drawn, as float32 or Python numbers."""
        parts = self._ratio.denominator
        if _on_host("Limit.stats", pace):
            return {"added": pace.added, "drawn": pace.drawn, "surplus": pace.surplus / parts}
        added, drawn, surplus = (Wide(*words) for words in (pace.added, pace.drawn, pace.surplus))
        negative = (surplus.high >> jnp.uint32(31)) != jnp.uint32(0)
        size = jnp.where(negative, -uint64.as_float(uint64.negative(surplus)), uint64.as_float(surplus))
        return {"added": uint64.as_float(added), "drawn": uint64.as_float(drawn), "surplus": size / jnp.float32(parts)}

    def check_steps(self, rows: int, draws: int) -> None:
        """Raise if calls of `rows` rows and of `draws` draws could deadlock.

        Raises:
          ValueError: one call of each exceeds the range from `min_diff` to `max_diff`; or `max_diff` is reached before
            `min_size` rows are added.
        """
        _check_count("rows", rows, 1)
        _check_count("draws", draws, 1)
        low, high = self._bounds
        if high is None:
            return
        ratio, parts = self._ratio, self._ratio.denominator
        need = ratio.numerator * rows + parts * draws - 1  # then one of the two calls is always possible
        if low is not None and high - low < need:
            raise ValueError(
                f"Limit: from min_diff={float(self.min_diff or 0):g} to max_diff={float(self.max_diff or 0):g} there is room "
                f"for {(high - low) / parts:g}; expected {need / parts:g} or more, or calls of {rows} rows and of {draws} "
                f"draws could deadlock. Use error_buffer={math.ceil(need / parts / 2)} or more."
            )
        start = -(-self.min_size // rows) * rows  # rows added when `min_size` is reached
        if start > self.min_size and ratio.numerator * start > high:
            raise ValueError(
                f"Limit: max_diff is {float(self.max_diff or 0):g}, but calls of {rows} rows reach min_size={self.min_size} "
                f"with {start} rows, a surplus of {float(ratio * start):g}. Use min_size={start}."
            )

    def check_call(self, *, rows: int = 0, draws: int = 0) -> None:
        """Raise if a call of `rows` rows, or of `draws` draws, could never be allowed once `min_size` rows are held.

        Raises:
          ValueError: the call exceeds the range from `min_diff` to `max_diff`.
        """
        _check_count("rows", rows, 0)
        _check_count("draws", draws, 0)
        low, high = self._bounds
        if low is None or high is None:
            return
        ratio, parts = self._ratio, self._ratio.denominator
        most = max(high, ratio.numerator * self.min_size)  # up to min_size rows can always be added
        for count, each, top, what in ((rows, ratio.numerator, high, "rows"), (draws, parts, most, "draws")):
            if each * count > top - low:
                raise ValueError(
                    f"Limit: a call of {count} {what} moves the surplus by {each * count / parts:g}, but from min_diff="
                    f"{float(self.min_diff or 0):g} there is room for {(top - low) / parts:g}: it could never be allowed. Use "
                    f"samples_per_insert(..., {what}={count}), or smaller calls."
                )

    @property
    def _ratio(self) -> Fraction:
        return _fraction("samples_per_insert", self.samples_per_insert)

    @property
    def _bounds(self) -> tuple[int | None, int | None]:
        """Return the bounds in units of 1 / denominator."""
        parts = self._ratio.denominator
        low = None if self.min_diff is None else math.ceil(_fraction("min_diff", self.min_diff) * parts)
        high = None if self.max_diff is None else math.floor(_fraction("max_diff", self.max_diff) * parts)
        return low, high


def samples_per_insert(
    ratio: float | Fraction,
    min_size: int,
    error_buffer: float | Fraction | tuple[float | Fraction, float | Fraction] | None = None,
    *,
    rows: int = 1,
    draws: int = 1,
) -> Limit:
    """Keep the rows drawn per row added at `ratio`, within `error_buffer` (Reverb's SampleToInsertRatio).

    No row is drawn until `min_size` rows are held. Then adding waits where the surplus would exceed `ratio * min_size +
    error_buffer`, and drawing waits where it would fall below `ratio * min_size - error_buffer`.

    Args:
      ratio, min_size: `samples_per_insert` and `min_size` of `Limit`.
      error_buffer: Allowed deviation in rows drawn; or (min_diff, max_diff). None uses one call of each, `ratio * rows +
        draws`.
      rows, draws: Rows per call that adds (N, or N * E with lanes), and per call that draws (B).
    Raises:
      ValueError: a number is out of range; or `error_buffer` is so small that calls of this size could deadlock.

    Example:
      >>> import fbuf
      >>> fbuf.limits.samples_per_insert(8, min_size=1000, rows=16, draws=256)
      Limit(samples_per_insert=8, min_size=1000, min_diff=7616, max_diff=8384)
    """
    _check_count("min_size", min_size, 1)
    for name, value in (("rows", rows), ("draws", draws)):
        _check_count(name, value, 1, where="limits.samples_per_insert: ")
    each = _fraction("samples_per_insert", ratio)
    if isinstance(error_buffer, (tuple, list)):
        if len(error_buffer) != 2:
            raise ValueError(f"limits.samples_per_insert: error_buffer is {error_buffer!r}; expected a number or two.")
        low, high = (_fraction("error_buffer", bound) for bound in error_buffer)
    else:
        apart = each * rows + draws if error_buffer is None else _fraction("error_buffer", error_buffer)
        low, high = each * min_size - apart, each * min_size + apart
    limit = Limit(ratio, min_size, _plain(low), _plain(high))
    least = max(Fraction(1), each)
    if high - low < 2 * least:
        raise ValueError(f"samples_per_insert: error_buffer is {error_buffer!r}; expected {float(least):g} or more.")
    limit.check_steps(rows, draws)
    return limit


def min_size(size: int) -> Limit:
    """Allow draws once `size` rows are held (Reverb's MinSize).

    Example:
      >>> import fbuf
      >>> fbuf.limits.min_size(1000)
      Limit(min_size=1000)
    """
    return Limit(min_size=size)


def at_most(draws: float | Fraction, min_size: int = 1) -> Limit:
    """Bound the rows drawn by `draws` per row added; adding never waits.

    The bound is an average. `samplers.Consume(times=k)` bounds the draws of each single row.

    Example:
      >>> import fbuf
      >>> fbuf.limits.at_most(4)
      Limit(samples_per_insert=4, min_diff=0)
    """
    return Limit(draws, min_size, min_diff=0)


def queue(size: int) -> Limit:
    """Draw no more rows than were added, and add at most `size` rows ahead (Reverb's Queue).

    With `samplers.Consume()` each row is drawn once, in the sampler's order.

    Example:
      >>> import fbuf
      >>> fbuf.limits.queue(128)
      Limit(min_diff=0, max_diff=128)
    """
    _check_count("size", size, 1)
    return Limit(min_diff=0, max_diff=size)


def _check_count(name: str, value: Any, least: int, most: int = _MOST, where: str = "Limit: ") -> None:
    if not is_int(value) or not least <= value <= most:
        good = isinstance(value, (float, np.floating)) and value == value // 1 and least <= value <= most
        fix = f" Write {int(value)}." if good else ""
        raise ValueError(f"{where}{name} is {value!r}; expected an int from {least} to {most}.{fix}")


def _fraction(name: str, value: Any) -> Fraction:
    """Return a number as its decimal text reads: 0.1 is a tenth."""
    if isinstance(value, Fraction):
        return value
    if not isinstance(value, (numbers.Real, np.number)) or isinstance(value, bool) or not math.isfinite(float(value)):
        none = " Write None for no bound." if name in ("min_diff", "max_diff") else ""
        raise ValueError(f"Limit: {name} is {value!r}; expected a finite number, or a fractions.Fraction.{none}")
    return Fraction(str(value))


def _plain(value: Fraction) -> int | Fraction:
    return value.numerator if value.denominator == 1 else value


def _on_host(call: str, pace: Any) -> bool:
    """Return whether `pace` counts in Python ints.

    Raises:
      TypeError: it is not a LimitState.
    """
    if not isinstance(pace, LimitState):
        raise TypeError(f"{call}: pace is {type(pace).__name__}; expected a LimitState. Use pace = limit.init().")
    return isinstance(pace.surplus, int)


def _count(call: str, name: str, pace: Any, count: Any) -> Any:
    """Return an argument as an int on the host, else as uint32[2]."""
    host, what = _on_host(call, pace), f"{call}: {name}"
    if isinstance(count, (int, np.integer)):
        _check_count(what, count, 0, where="")
    elif np.shape(count) != () or not jnp.issubdtype(getattr(count, "dtype", np.void), jnp.integer):
        raise TypeError(f"{what} is {count!r}; expected an int, or an integer []. Write rows.shape[0].")
    if not host:
        return jnp.stack([jnp.uint32(0), jnp.asarray(count).astype(jnp.uint32)])
    _check_count(what, int(count), 0, where="")
    return int(count)


def _rows_in(call: str, pace: LimitState, size: Any) -> Any:
    """Return the rows held; 2^62 stands for larger numbers."""
    if size is not None:
        return _count(call, "size", pace, size)
    return pace.added if _on_host(call, pace) else pace.added.at[0].min(jnp.uint32(2**30))


def _sum(a: Any, b: Any) -> Any:
    return a + b if isinstance(a, int) else jnp.stack(uint64.add(Wide(*a), Wide(*b)))


def _scaled(count: Any, factor: int) -> Any:
    """Return `count * factor`, in two's complement."""
    if isinstance(count, int):
        return count * factor
    product = uint64.multiply(count[1], jnp.uint32(abs(factor)))
    return jnp.stack(uint64.negative(product) if factor < 0 else product)


def _at_most(a: Any, b: Any) -> Any:
    """Return a <= b, of Python ints or signed uint32[2]."""
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    return uint64.at_most(*(uint64.of(x) if isinstance(x, int) else Wide(*x) for x in (a, b)))

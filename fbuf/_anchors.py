"""Which rows a draw may land on, kept up to date as rows arrive: O(rows written), never a scan of the buffer.

A view that looks at neighbours (frames behind, rewards ahead) cannot start anywhere: the newest rows lack their future,
the oldest lose the frames behind them, a truncated row may have no next observation. Every row therefore carries a byte
of flags, and a lane's last few rows are kept beside them (`tail`), so that a write decides at once which rows *open*
(become anchors) and which *close*. Rows of a lane open in order of arrival and close in the same order, whatever the
episodes, which is what lets `Uniform` keep a plain log of them.

Finding episodes again at every sample (as torchrl's slice sampler does) was rejected: it is O(C).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from fbuf import _ring
from fbuf._config import component, state
from fbuf._pin import pin
from fbuf._typing import Change, Geometry, Ring, View

START = 1  # first row of an episode
END = 2  # last row of an episode
TERMINATED = 4  # ... which terminated: nothing is to be bootstrapped
OPEN = 8  # an anchor
RESET = 16  # holds the final observation only (Gymnasium's next-step autoreset)

NO_PRIORITY = -1.0


@component
class Rule:
    """What decides which rows are anchors: two views with one rule can share a state."""

    back: int
    ahead: int
    reset_rows: bool
    cut_ends: bool


def rule(view: View) -> Rule:
    """The rule of a view."""
    return Rule(view.back, view.ahead, view.reset_rows, view.cut_ends)


@state
class Anchors:
    """Flags of all rows, and each lane's last `W` rows again for the next write."""

    flags: jax.Array  # uint8[C] by slot
    tail_flags: jax.Array  # uint8[W, E], newest last; before the first row: the end of an episode
    tail_priority: jax.Array  # float32[W, E], given to `extend`, negative where none was
    pending: jax.Array  # int32[E], newest rows not decided yet, <= W
    count: jax.Array  # int32[E], rows that are open
    rule: Rule  # static: what they were decided by


def has(flags: jax.Array, bit: int) -> jax.Array:
    """Whether `bit` is set."""
    return (flags & jnp.uint8(bit)) != jnp.uint8(0)


def _bit(condition: jax.Array, bit: int) -> jax.Array:
    return condition.astype(jnp.uint8) * jnp.uint8(bit)


def width(view: View) -> int:
    """W, rows of the tail: as many as can be undecided, and the two that say whether an episode starts."""
    return max(view.ahead, 2)


def init(geometry: Geometry, view: View) -> Anchors:
    """No rows; the next row of every lane begins an episode."""
    shape = (width(view), geometry.lanes)
    before = jnp.uint8(RESET if view.reset_rows else END)
    return Anchors(
        flags=jnp.zeros((geometry.capacity,), jnp.uint8),
        tail_flags=jnp.zeros(shape, jnp.uint8).at[-1].set(before),
        tail_priority=jnp.full(shape, NO_PRIORITY, jnp.float32),
        pending=jnp.zeros((geometry.lanes,), jnp.int32),
        count=jnp.zeros((geometry.lanes,), jnp.int32),
        rule=rule(view),
    )


def _compact(keep: jax.Array | None, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Moves each lane's kept rows to the front, in order."""
    if keep is None:
        return arrays
    order = jnp.argsort(~keep, axis=0, stable=True)
    return tuple(jnp.take_along_axis(a, order, axis=0) for a in arrays)


def _row_flags(tail: jax.Array, end: jax.Array, terminated: jax.Array, reset_rows: bool) -> jax.Array:
    """START, END, TERMINATED and RESET of tail and new rows together, uint8[W + N, E]."""
    new = _bit(end | terminated, END) | _bit(terminated, TERMINATED)
    both = jnp.concatenate([tail, new])
    before = both[tail.shape[0] - 1 : -1]
    if reset_rows:
        reset = has(before, END)
        before_that = jnp.concatenate([tail[-1:], _bit(reset, RESET)])[:-1]
        start = has(before_that, RESET) & ~reset
        new = new | _bit(reset, RESET) | _bit(start, START)
    else:
        new = new | _bit(has(before, END), START)
    return jnp.concatenate([tail, new])


def extend(
    anchors: Anchors,
    view: View,
    geometry: Geometry,
    ring: Ring,
    end: jax.Array,
    terminated: jax.Array,
    priority: jax.Array | None,
    keep: jax.Array | None,
    token: jax.Array,
    retire: tuple[jax.Array, int] | None = None,
) -> tuple[Anchors, Change, jax.Array]:
    """Follows a write of `N` rows a lane, or the giving up of a lane's oldest.

    Args:
      ring: As it was before the write.
      end, terminated: bool[N, E].
      priority: float32[N, E], or None.
      keep: bool[N, E], or None for all.
      retire: int32[E], rows given up, all of them decided, and the most these can be; then N is 0.
    Returns:
      The anchors, what opened and closed, and the token.
    """
    lanes, length = geometry
    num, tail_rows = end.shape[0], width(view)
    whole = jnp.int32(length)
    given = jnp.full(end.shape, NO_PRIORITY, jnp.float32) if priority is None else priority
    end, terminated, given = _compact(keep, end, terminated, given)
    count = jnp.full((lanes,), num, jnp.int32) if keep is None else jnp.sum(keep, axis=0, dtype=jnp.int32)

    flags = _row_flags(anchors.tail_flags, end, terminated, view.reset_rows)
    given = jnp.concatenate([anchors.tail_priority, given])
    index = jnp.arange(tail_rows + num, dtype=jnp.int32)[:, None]
    available = jnp.int32(tail_rows) + count
    exists = index < available[None, :]
    flags = jnp.where(exists, flags, jnp.uint8(0))

    # Rows by age, 0 the oldest before this write; `lost` of them are overwritten.
    size = ring.size[None, :]
    lost, most = jnp.maximum(ring.size + count - whole, jnp.int32(0)), num
    if retire is not None:
        lost, most = retire
    behind = min(view.back, length)
    oldest = jnp.arange(min(min(most, length) + behind, length), dtype=jnp.int32)[:, None]
    context = lost[None, :] + jnp.arange(behind, dtype=jnp.int32)[:, None]
    near = _ring.by_age(ring, geometry, jnp.broadcast_to(oldest, (oldest.shape[0], lanes)))
    around = _ring.by_age(ring, geometry, context)
    token, (near_flags, around_flags) = pin(
        token,
        (
            anchors.flags.at[near].get(mode="promise_in_bounds"),
            anchors.flags.at[around].get(mode="promise_in_bounds"),
        ),
    )
    # The first `back` rows that stay have lost frames behind them, unless an episode starts in between.
    newer = jnp.clip(context - size + jnp.int32(tail_rows), 0, index.shape[0] - 1)
    fresh = jnp.take_along_axis(flags, newer, axis=0)
    context_flags = jnp.where(context < size, around_flags, fresh)
    cut = ~lax.associative_scan(jnp.logical_or, has(context_flags, START), axis=0) if behind else None

    def is_cut(age: jax.Array) -> jax.Array:
        """Whether the row at this age (before the write) lacks frames behind it; negative ages are overwritten."""
        if cut is None:
            return jnp.zeros(age.shape, bool)
        place = age - lost[None, :]
        inside = (place >= jnp.int32(0)) & (place < jnp.int32(behind))
        return inside & jnp.take_along_axis(cut, jnp.clip(place, 0, behind - 1), axis=0)

    near_age = jnp.broadcast_to(oldest, near.shape)
    closing = has(near_flags, OPEN) & (near_age < size) & ((near_age < lost[None, :]) | is_cut(near_age))

    decided, drawable = view.decide(flags, available)
    undecided_before = index >= (jnp.int32(tail_rows) - anchors.pending)[None, :]
    age = index - jnp.int32(tail_rows) + size
    stays = exists & (age >= lost[None, :])
    opening = undecided_before & decided & drawable & stays & ~is_cut(age)

    flags = (flags & jnp.uint8(0xFF - OPEN)) | _bit(opening, OPEN)
    slot = _ring.by_age(ring, geometry, age)
    nowhere = jnp.arange(slot.size, dtype=jnp.int32).reshape(slot.shape) + jnp.int32(geometry.capacity)
    written = jnp.where(undecided_before & stays, slot, nowhere)
    unset = closing if retire is not None else closing & (near_age >= lost[None, :])
    closed_slot = jnp.where(unset, near, jnp.int32(slot.size + geometry.capacity) + _iota(near))
    at = jnp.concatenate([written.reshape(-1), closed_slot.reshape(-1)]) + token
    values = jnp.concatenate([flags.reshape(-1), (near_flags & jnp.uint8(0xFF - OPEN)).reshape(-1)])

    last = count[None, :] + jnp.arange(tail_rows, dtype=jnp.int32)[:, None]
    waiting = undecided_before & exists & ~decided
    closed = jnp.sum(closing, axis=0, dtype=jnp.int32)
    opened = jnp.sum(opening, axis=0, dtype=jnp.int32)
    after = Anchors(
        flags=anchors.flags.at[at].set(values, mode="drop", unique_indices=True),
        tail_flags=jnp.take_along_axis(flags, last, axis=0) & jnp.uint8(0xFF - OPEN),
        tail_priority=jnp.take_along_axis(given, last, axis=0),
        pending=jnp.sum(waiting, axis=0, dtype=jnp.int32),
        count=anchors.count - closed + opened,
        rule=anchors.rule,
    )
    change = Change(open_slot=slot, open_mask=opening, priority=given, close_slot=near, close_mask=closing)
    return after, change, token


def _iota(like: jax.Array) -> jax.Array:
    return jnp.arange(like.size, dtype=jnp.int32).reshape(like.shape)


def dense(slot: jax.Array, keep: jax.Array, priority: jax.Array | None) -> Change:
    """The change of a write where every row held is an anchor: all that is written opens, in place of what it replaces."""
    given = jnp.full(slot.shape, NO_PRIORITY, jnp.float32) if priority is None else priority
    none = slot[:0]
    return Change(
        open_slot=slot,
        open_mask=keep,
        priority=given,
        close_slot=none,
        close_mask=jnp.zeros(none.shape, bool),
    )


def nth_open(flags: jax.Array, geometry: Geometry, nth: jax.Array, wanted: jax.Array, block: int = 4096) -> jax.Array:
    """Slots of the `nth` int32[B] open rows in order of slot, found by counting; C where `wanted` is False.

    The fallback where a prioritized sampler finds every priority zero: O(C), in blocks so that it needs no memory, and
    not entered at all unless some draw wants it.
    """
    capacity = geometry.capacity
    block = min(block, capacity)
    blocks = -(-capacity // block)
    found = jnp.full(nth.shape, capacity, jnp.int32)

    def search(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        number, seen, found = carry
        at = number * jnp.int32(block) + jnp.arange(block, dtype=jnp.int32)
        inside = at < jnp.int32(capacity)
        here = (
            has(
                flags.at[jnp.minimum(at, jnp.int32(capacity - 1))].get(mode="promise_in_bounds"),
                OPEN,
            )
            & inside
        )
        total = jnp.cumsum(here, dtype=jnp.int32)
        want = nth - seen
        place = jnp.searchsorted(total, want, side="right").astype(jnp.int32)
        hit = (want >= jnp.int32(0)) & (want < total[-1]) & (found == jnp.int32(capacity))
        found = jnp.where(hit, number * jnp.int32(block) + place, found)
        return number + jnp.int32(1), seen + total[-1], found

    def unfinished(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        number, _, found = carry
        return (number < jnp.int32(blocks)) & jnp.any(wanted & (found == jnp.int32(capacity)))

    zero = jnp.zeros((), jnp.int32)
    found = lax.while_loop(unfinished, search, (zero, zero, found))[2]
    return jnp.where(wanted, found, jnp.int32(capacity))

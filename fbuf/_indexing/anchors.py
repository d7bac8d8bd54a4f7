"""Track which rows can be sampled (anchors) as rows arrive: O(rows written), never a scan of the buffer.

A view that reads neighbours cannot use every row: the newest rows lack their future, the oldest lack earlier frames, and a
truncated row may lack its next observation. Every row has a byte of flags, and the last rows of each lane are stored again
(`tail`), so a write decides at once which rows *open* (become anchors) and which *close*. Rows of a lane open and close in
order of arrival, so samplers keep them in a queue (`fbuf._indexing.anchor_log`).

If a new row completes at most one anchor (`AnchorRule.prompt`), only that anchor is examined, so long windows cost the
same as short ones. Otherwise the last `ahead` rows are examined again. Where rows never change, the open rows before each block
of flags are counted, and `nth_by_count` finds the n-th.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf._core import control_flow
from fbuf._core.component import state
from fbuf._core.control_flow import computed_once, number_up_to, order_after_reads
from fbuf._core.pytree import Spec
from fbuf._core.slots import Geometry, Ranges, Ring, by_age, expand, put_in_queues, where_written, zeros
from fbuf._interfaces.sampler import AnchorChange, EpisodeStarts, Sampler
from fbuf._interfaces.view import AnchorRule

START = 1  # first row of an episode
END = 2  # last row of an episode
TERMINATED = 4  # last row of a terminated episode: no bootstrapping
ANCHOR = 8  # an anchor
RESET = 16  # holds the final observation only (Gymnasium's next-step autoreset)
CUT = 32  # with END: the next row begins an episode, and the final observation is unknown

NO_PRIORITY = -1.0
BLOCK = 128  # rows of a block of `Anchors.before`
_GROUP = 128  # blocks counted at once
MOST_COUNTED = 2**24  # rows of which GPUs count the open ones instead of searching them
_PARTS = 8  # of a block, among which `_nth_by_sums` chooses
_WORD = 32  # rows whose flags are bits of one word
_MOST_BLOCKS = 4096  # that it compares with each other
_FEW = 32  # rows of a lane, of which reading more than needed takes no time


@state
class Anchors:
    """Hold the flags of all rows, and the last `W` rows of each lane for the next write."""

    flags: Array  # uint8[C] by slot
    tail_flags: Array  # uint8[W, E], newest last; before the first row: the end of an episode
    tail_priority: Array | None  # float32[W, E], negative: not given; None if rows open at once, without priorities
    pending: Array | None  # int32[E], newest undecided rows, <= W; None if rows open immediately
    step: Array | None  # int32[E], rows of the running episode (of the lane if windows cross); None if unused
    episode: Array | None  # uint32[E], episodes begun; None unless the sampler needs it
    tail_stamp: Array | None  # int32[W, E]; None if the sampler needs no stamps
    starts: EpisodeStarts | None  # None unless the view needs them
    count: Array  # int32[E], open rows
    rule: AnchorRule  # static: the rule that decided them
    before: Array | None = None  # int32[blocks], open rows before each block of a data set
    # [E], or uint32[E, 2] of 64 bits: episode id of each lane's newest row; None without ids
    newest_id: Array | None = None

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "flags", self.flags, 0, 2 * CUT - 1
        yield "tail_flags", self.tail_flags, 0, 2 * CUT - 1
        yield "count", self.count, 0, geometry.length
        if self.pending is not None:
            yield "pending", self.pending, 0, self.tail_flags.shape[0]
        if self.step is not None:
            yield "step", self.step, 0, _LONG - 1
        if self.before is not None:
            yield "before", self.before, 0, geometry.capacity


_LONG = 2**30  # rows; steps of longer episodes are stored modulo the stride


def has(flags: Array, bits: int) -> Array:
    """Return whether one of `bits` is set."""
    return (flags & bits) != 0


def bit(condition: Array, bits: int) -> Array:
    """Return `bits` where `condition` holds, uint8."""
    return condition.astype(jnp.uint8) * jnp.uint8(bits)


def width(rule: AnchorRule) -> int:
    """Return W, rows of the tail: as many as can be undecided, and at least two to detect the start of an episode."""
    earlier = rule.closes or (rule.learns is not None and rule.reset_rows)  # the row before the undecided ones matters
    return 2 if rule.prompt else max(rule.ahead + earlier, 2)


def init(geometry: Geometry, rule: AnchorRule, sampler: Sampler, spec: Spec, counted: bool = False) -> Anchors:
    """Make an empty state; the next row of every lane begins an episode. `counted`: allocate counts of a data set."""
    lanes = geometry.lanes
    shape = (width(rule), lanes)
    before = jnp.uint8(RESET if rule.reset_rows else END)
    counts = rule.prompt or rule.stride > 1 or rule.learns is not None
    return Anchors(
        flags=jnp.zeros((geometry.capacity,), jnp.uint8),
        tail_flags=jnp.zeros(shape, jnp.uint8).at[-1].set(before),
        tail_priority=None if rule.prompt and not sampler.prioritized else jnp.full(shape, NO_PRIORITY, jnp.float32),
        pending=None if rule.prompt else jnp.zeros((lanes,), jnp.int32),
        step=jnp.zeros((lanes,), jnp.int32) if counts else None,
        episode=jnp.zeros((lanes,), jnp.uint32) if sampler.by_episode else None,
        tail_stamp=None if sampler.stamp is None else jnp.zeros(shape, jnp.int32),
        starts=EpisodeStarts(*zeros(geometry.capacity, lanes, lanes)) if rule.spans else None,
        count=jnp.zeros((lanes,), jnp.int32),
        rule=rule,
        before=jnp.zeros((-(-geometry.capacity // BLOCK),), jnp.int32) if counted else None,
        newest_id=None if rule.episode is None else _no_id(lanes, spec[rule.episode].dtype),
    )


def _no_id(lanes: int, dtype: Any) -> Array:
    """Return zeros as the episode ids of rows: pairs of uint32 if they have 64 bits, with x64 or without."""
    return jnp.zeros((lanes, 2), jnp.uint32) if dtype.itemsize == 8 else jnp.zeros((lanes,), dtype)


def _compact(keep: Array | None, *arrays: Array | None) -> tuple[Any, ...]:
    """Move each lane's kept rows to the front, in order; None stays None."""
    if keep is None:
        return arrays
    order = jnp.argsort(~keep, axis=0, stable=True)
    return tuple(None if a is None else jnp.take_along_axis(a, expand(order, a.ndim), axis=0) for a in arrays)


def _row_flags(tail: Array, new: Array, changed: Array | None, reset_rows: bool) -> Array:
    """Return the flags of tail and new rows, uint8[W + N, E].

    Args:
      tail, new: Flags uint8[W, E], and END, TERMINATED and CUT of uint8[N, E].
      changed: bool[N, E], new rows that begin an episode: the row before each is cut. The last of the tail already is.
    """
    before = jnp.concatenate([tail[-1:], new])[:-1]
    if reset_rows:
        reset = has(before, END) & ~has(before, CUT)
        new = new | bit(reset if changed is None else reset & ~changed, RESET)
    if changed is not None:
        new = _cut(new, jnp.concatenate([changed[1:], jnp.zeros_like(changed[:1])]), reset_rows)
    before = jnp.concatenate([tail[-1:], new])[:-1]
    start = (has(before, RESET) & ~has(new, RESET)) | has(before, CUT) if reset_rows else has(before, END)
    return control_flow.platform_dependent(
        tail, new | bit(start, START), gpu=_joined, default=lambda *parts: jnp.concatenate(parts)
    )


def _joined(tail: Array, new: Array) -> Array:
    """Concatenate rows so that a GPU computes them in the kernel that reads them."""
    rows, num, none = tail.shape[0], new.shape[0], jnp.uint8(0)
    return lax.pad(tail, none, [(0, num, 0), (0, 0, 0)]) | lax.pad(new, none, [(rows, 0, 0), (0, 0, 0)])


def _cut(flags: Array, wanted: Array, reset_rows: bool) -> Array:
    """Return the flags with END and CUT where `wanted`, unless the next row begins an episode already."""
    closed = has(flags, RESET) & ~has(flags, END) if reset_rows else has(flags, END)
    return flags | bit(wanted & ~closed, END | CUT)


class NewRows(NamedTuple):
    """Hold what a write says of its rows, `[N, E]`, oldest first."""

    flags: Array  # uint8, END, TERMINATED and CUT
    priority: Array | None = None  # float32
    stamp: Array | None = None  # int32
    ids: Array | None = None  # or uint32[N, E, 2] of 64 bits: episode ids; a change is a cut before that row
    keep: Array | None = None  # bool; None: all
    # int32[E], how many exist, in a ring that has room and never lost a row; `keep` is None.
    number: Array | None = None


def no_rows(geometry: Geometry) -> NewRows:
    """Return the rows of a cut or an eviction."""
    return NewRows(jnp.zeros((0, geometry.lanes), jnp.uint8))


class _Write(NamedTuple):
    """Hold the `W` rows of the tail and the `N` new ones, `[W + N, E]`. Ages count from the oldest row before the write."""

    view: Any
    geometry: Geometry
    ring: Ring
    tail_rows: int  # W
    row: Array  # int32[W + N, 1], 0 the first of the tail
    end: Array  # int32[E], tail and new rows that exist
    exists: Array  # bool
    flags: Array  # uint8
    was: Array  # uint8[1, E], flags of the newest row of the tail before a cut
    again: bool  # whether that row is decided again
    size: Array  # int32[1, E], rows before the write
    lost: Array  # int32[1, E], the oldest of them, which are overwritten or evicted
    age: Array  # int32
    stays: Array  # bool, in the buffer afterwards
    step: Array | None  # int32, rows of its episode before each


class _Decided(NamedTuple):
    """Hold what is known of tail and new rows, `[W + N, E]`."""

    flags: Array  # uint8
    undecided_before: Array  # bool
    undecided_after: Array  # bool
    chosen: Array  # bool, decided to be an anchor


class _Opened(NamedTuple):
    """Hold the anchors that a write opens, `[A, E]`, and the flags it writes."""

    slot: Array  # int32
    mask: Array  # bool
    flags: Array  # uint8[W + N, E]
    written: list[tuple[Array, Array, Array]]  # rows as of `_set_flags`
    source: slice | Array | None  # the rows whose priorities and stamps the anchors have; None: their own
    pending: Array | None = None  # int32[E], rows that are undecided; None if rows open at once


def extend(
    anchors: Anchors,
    view: Any,
    geometry: Geometry,
    ring: Ring,
    rows: NewRows,
    token: Array,
    evict: tuple[Array, int] | None = None,
    cut: Array | None = None,
) -> tuple[Anchors, AnchorChange, Array]:
    """Update the anchors after a write, a cut, or an eviction of the oldest rows.

    Args:
      view: A View with its optional `opens` or `decide`.
      ring: Before the write.
      evict: int32[E], decided rows to evict, and their maximum; then there are no new rows.
      cut: bool[E], lanes that are cut before the write.
    Returns:
      The anchors, what opened and closed, and the token.
    """
    rule, again, most = anchors.rule, rows.ids is not None or cut is not None, rows.flags.shape[0]
    all_kept = rows.keep is None and rows.number is None
    anchors, rows, count, was = _compact_and_cut(anchors, geometry, ring, rows, cut, token)
    lost, behind = jnp.maximum(ring.size + count - geometry.length, 0), rule.back
    if evict is not None:
        lost, most = evict
    elif rows.number is not None:  # the oldest row begins an episode, so nothing is cut
        lost, most, behind = jnp.zeros_like(count), 0, 0
    write, step_after = _placed(anchors, view, geometry, ring, rows.flags, count, was, again, lost)

    behind = min(behind, geometry.length)
    near_age = jnp.arange(min(min(most, geometry.length) + behind, geometry.length), dtype=jnp.int32)[:, None]
    near_age = jnp.broadcast_to(near_age, (near_age.shape[0], geometry.lanes))
    near = by_age(ring, geometry, near_age)
    opened, lacks, near_flags, token = _open_anchors(anchors, write, near, behind, token)
    closing = has(near_flags, ANCHOR) & (near_age < write.size)
    closing = closing & ((near_age < write.lost) | _lacks_frames(write, lacks, near_age))
    unset = closing if evict is not None else closing & (near_age >= write.lost)
    written = [*opened.written, (unset, near_age, near_flags & (0xFF - ANCHOR))]
    closed, opening = (jnp.sum(mask, axis=0, dtype=jnp.int32) for mask in (closing, opened.mask))

    starts = anchors.starts
    if starts is not None:
        overwritten = has(near_flags, START) & (near_age < write.size) & (near_age < write.lost)
        new = has(write.flags, START) & write.stays & (write.row >= write.tail_rows)
        starts = _update_starts(starts, geometry, ring, overwritten, new, write.age, token)
    tail, priorities, stamp = _next_tail(anchors, rows, count, all_kept, opened.flags)
    episode, episode_after = _episodes(anchors, write.flags, count)
    after = dataclasses.replace(
        tail,
        flags=_set_flags(anchors.flags, ring, geometry, written, token),
        pending=opened.pending,
        step=step_after,
        episode=episode_after,
        starts=starts,
        count=anchors.count - closed + opening,
    )
    priorities, stamp = (
        _of_source(array, opened.source) for array in (priorities, None if evict is not None else stamp)
    )
    episode = _of_source(episode, opened.source) if isinstance(opened.source, slice) else episode
    return after, AnchorChange(opened.slot, opened.mask, episode, stamp, None, priorities, near, closing), token


def _compact_and_cut(
    anchors: Anchors, geometry: Geometry, ring: Ring, rows: NewRows, cut: Array | None, token: Array
) -> tuple[Anchors, NewRows, Array, Array]:
    """Cut the newest rows, by `cut` and by the ids of new rows.

    Returns:
      The anchors; the new rows, those kept first and with all their flags; int32[E], how many they are; and uint8[1, E], the
      flags of the newest rows before the cut.
    """
    priority = jnp.full(rows.flags.shape, NO_PRIORITY, jnp.float32) if rows.priority is None else rows.priority
    new, priority, stamp, ids = _compact(rows.keep, rows.flags, priority, rows.stamp, rows.ids)
    if rows.number is not None:
        count = rows.number
    elif rows.keep is not None:
        count = jnp.sum(rows.keep, axis=0, dtype=jnp.int32)
    else:
        count = jnp.full((geometry.lanes,), new.shape[0], jnp.int32)
    changed = None
    if ids is not None:
        assert anchors.newest_id is not None
        every = jnp.concatenate([anchors.newest_id[None], ids])
        differs = every[1:] != every[:-1]
        differs = differs if differs.ndim == 2 else jnp.any(differs, axis=2)
        changed = differs & (jnp.arange(new.shape[0], dtype=jnp.int32)[:, None] < count[None, :])
        newest = jnp.take_along_axis(every, expand(count[None, :], every.ndim), axis=0)[0]
        cut = changed[0] if cut is None else changed[0] | cut
        anchors = dataclasses.replace(anchors, newest_id=newest)
    was = anchors.tail_flags[-1:]
    if cut is not None:
        anchors = _cut_newest(anchors, geometry, ring, cut, token)
    flags = _row_flags(anchors.tail_flags, new, changed, anchors.rule.reset_rows)
    return anchors, NewRows(flags, priority, stamp, ids, rows.keep, rows.number), count, was


def _placed(
    anchors: Anchors,
    view: Any,
    geometry: Geometry,
    ring: Ring,
    flags: Array,
    count: Array,
    was: Array,
    again: bool,
    lost: Array,
) -> tuple[_Write, Array | None]:
    """Return tail and new rows, of which `count` int32[E] are new, and the rows of the running episode afterwards."""
    tail_rows = width(anchors.rule)
    index = jnp.arange(flags.shape[0], dtype=jnp.int32)[:, None]
    end, size, lost = tail_rows + count, ring.size[None, :], lost[None, :]
    exists = index < end[None, :]
    flags = jnp.where(exists, flags, jnp.uint8(0))
    age = index - tail_rows + size
    step, after = _steps(anchors, flags, exists, count)
    place = size, lost, age, exists & (age >= lost), step
    return _Write(view, geometry, ring, tail_rows, index, end, exists, flags, was, again, *place), after


def _open_anchors(
    anchors: Anchors, write: _Write, near: Array, behind: int, token: Array
) -> tuple[_Opened, Array | None, Array, Array]:
    """Return what opens; which of the first `behind` rows that stay lack earlier frames; the flags at `near`; and the token."""
    context = write.lost + jnp.arange(behind, dtype=jnp.int32)[:, None]
    # A GPU reads both in one kernel if they are equally many.
    most = near.shape[0] if behind < near.shape[0] <= _FEW else behind
    around = write.lost + jnp.arange(most, dtype=jnp.int32)[:, None]
    slots = [near, by_age(write.ring, write.geometry, around)]
    if anchors.rule.prompt:
        age, opens = _completed(write)
        slots.append(by_age(write.ring, write.geometry, age))
    values: tuple[Any, ...] = tuple(anchors.flags.at[at].get(mode="promise_in_bounds") for at in slots)
    if not anchors.rule.prompt:
        decided, chosen, source = write.view.decide(
            write.flags, write.end, write.row if write.step is None else write.step
        )
        assert anchors.pending is not None
        before = write.row >= (write.tail_rows - anchors.pending)[None, :]
        # A GPU would compute them from copies of the tail. A CPU copies what passes with the reads: the last of them only.
        flags, before, after = computed_once((write.flags, before, before & write.exists & ~decided))
        write = write._replace(flags=flags)
        values += (decided & chosen,)
    token, (near_flags, around_flags, other) = order_after_reads(token, values)
    # The first `behind` rows that stay lack earlier frames, unless an episode starts in between.
    newer = jnp.clip(context - write.size + write.tail_rows, 0, write.row.shape[0] - 1)
    newer_flags = jnp.take_along_axis(write.flags, newer, axis=0)
    context_flags = jnp.where(context < write.size, around_flags[:behind], newer_flags)
    lacks = ~lax.associative_scan(jnp.logical_or, has(context_flags, START), axis=0) if behind else None
    if anchors.rule.prompt:
        return _open_completed(write, slots[2], age, opens, other, lacks), lacks, near_flags, token
    return _open_decided(anchors, write, _Decided(flags, before, after, other), source, lacks), lacks, near_flags, token


def _lacks_frames(write: _Write, lacks: Array | None, age: Array) -> Array:
    """Return whether the row at each age lacks earlier frames, as `lacks` bool[K, E] says of the first that stay."""
    if lacks is None:
        return jnp.zeros(age.shape, bool)
    behind, place = lacks.shape[0], age - write.lost
    inside = (place >= 0) & (place < behind)
    return inside & jnp.take_along_axis(lacks, jnp.clip(place, 0, behind - 1), axis=0)


def _completed(write: _Write) -> tuple[Array, Array]:
    """Return the ages of the anchors that new rows complete, or the newest before (`again`), and which there are: [A, E]."""
    assert write.step is not None
    first, flags, step = write.tail_rows - write.again, write.flags, write.step
    rows_back, opens = write.view.opens(step[first:], flags[first:], flags[first - 1 : -1])
    age = write.age[first:] - rows_back
    opens = opens & write.exists[first:] & (age >= write.lost)
    if write.again:  # the newest row opens what only its new flags open
        newest = flags[first : write.tail_rows]
        already = write.view.opens(step[first : write.tail_rows], write.was, flags[first - 1 : first])[1]
        opens = opens.at[:1].set(opens[:1] & ~already & (newest != write.was))
    return age, opens


def _open_completed(
    write: _Write, slot: Array, age: Array, opens: Array, before: Array, lacks: Array | None
) -> _Opened:
    """Open the completed anchors at `age` where `opens`; their flags are `before`."""
    tail_rows = write.tail_rows
    mask = opens if lacks is None else opens & ~_lacks_frames(write, lacks, age)
    new = _among_new(age, mask, write.size, tail_rows, write.row.shape[0] - tail_rows)
    flags = write.flags | bit(new, ANCHOR)
    written = [(write.stays[tail_rows:], write.age[tail_rows:], flags[tail_rows:])]
    written += [(mask & (age < write.size), age, before | ANCHOR)]
    return _Opened(slot, mask, flags, written, slice(tail_rows - write.again, None))


def _open_decided(
    anchors: Anchors, write: _Write, rows: _Decided, source: Array | None, lacks: Array | None
) -> _Opened:
    """Open the rows of tail and write that were undecided before and are no longer."""
    rule, newest = anchors.rule, write.tail_rows - 1
    examined = rows.undecided_before
    if write.again and rule.closes:  # the window that the newest row completed closes the episode if it is cut there
        uncut = write.view.decide(write.flags.at[newest].set(write.was[0]), write.end, write.step)[1]
        complete = write.row == (newest - rule.ahead)
        cut = (write.flags[newest] != write.was[0])[None, :]
        examined = examined | complete & ~uncut & rows.chosen & cut
    mask = examined & rows.chosen & write.stays & ~_lacks_frames(write, lacks, write.age)
    flags = write.flags | bit(mask, ANCHOR)
    written = [(examined & write.stays, write.age, flags)]
    pending = jnp.sum(rows.undecided_after, axis=0, dtype=jnp.int32)
    return _Opened(by_age(write.ring, write.geometry, write.age), mask, flags, written, source, pending)


def _next_tail(
    anchors: Anchors, rows: NewRows, count: Array, all_kept: bool, flags: Array
) -> tuple[Anchors, Array, Array | None]:
    """Return the anchors with the next tail, and the priorities and stamps of tail and new rows, `[W + N, E]`."""
    tail_rows, lanes = anchors.tail_flags.shape
    last = count[None, :] + jnp.arange(tail_rows, dtype=jnp.int32)[:, None]

    def newest_of(rows: Array) -> Array:
        """Return the rows of the next tail. A gather would make GPUs copy the present one first."""
        return rows[-tail_rows:] if all_kept else jnp.take_along_axis(rows, last, axis=0)

    before, stamp, tail_stamp = anchors.tail_priority, rows.stamp, anchors.tail_stamp
    unknown = jnp.full((tail_rows, lanes), NO_PRIORITY, jnp.float32) if before is None else before
    assert rows.priority is not None
    priority = jnp.concatenate([unknown, rows.priority])
    if tail_stamp is not None:
        stamp = tail_stamp if stamp is None else jnp.concatenate([tail_stamp, stamp])
        tail_stamp = newest_of(stamp)
    tail = dataclasses.replace(
        anchors,
        tail_flags=newest_of(flags) & (0xFF - ANCHOR),
        tail_priority=None if before is None else newest_of(priority),
        tail_stamp=tail_stamp,
    )
    return tail, priority, stamp


def _of_source(rows: Array | None, source: slice | Array | None) -> Any:
    """Return the rows `[W + N, E]` of `source` as of `_Opened`."""
    if rows is None or source is None:
        return rows
    return rows[source] if isinstance(source, slice) else jnp.take_along_axis(rows, source, axis=0)


def _cut_newest(anchors: Anchors, geometry: Geometry, ring: Ring, cut: Array, token: Array) -> Anchors:
    """Set the flags of the newest row of the lanes `cut` bool[E]. A lane that is empty, or was cut, stays as it is."""
    newest = anchors.tail_flags[-1]
    after = _cut(newest, cut, anchors.rule.reset_rows)
    slot = by_age(ring, geometry, ring.size[None, :] - 1)[0]
    at = where_written(after != newest, slot, geometry.capacity) + token
    flags = anchors.flags.at[at].add(after - newest, mode="drop", unique_indices=True)
    return dataclasses.replace(anchors, flags=flags, tail_flags=anchors.tail_flags.at[-1].set(after))


def _among_new(age: Array, opens: Array, size: Array, tail_rows: int, num: int) -> Array:
    """Return which of tail and `num` new rows are new and open, bool[W + N, E]."""
    lanes = age.shape[1]
    at = jnp.where(opens & (age >= size), age - size, jnp.int32(num))
    lane = jnp.broadcast_to(jnp.arange(lanes, dtype=jnp.int32)[None, :], at.shape)
    new = jnp.zeros((num, lanes), bool).at[at, lane].max(opens, mode="drop")
    return jnp.concatenate([jnp.zeros((tail_rows, lanes), bool), new])


def _steps(anchors: Anchors, flags: Array, exists: Array, count: Array) -> tuple[Array | None, Array | None]:
    """Return the rows of its episode before each of tail and new rows, int32[W + N, E], exact from the running episode on.

    Also return the rows of the running episode afterwards, int32[E].
    """
    if anchors.step is None:
        return None, None
    rule, tail_rows = anchors.rule, anchors.tail_flags.shape[0]
    index = jnp.arange(flags.shape[0], dtype=jnp.int32)[:, None] - tail_rows
    step, after = anchors.step[None, :] + index, anchors.step + count
    if not rule.crosses:
        starts = has(flags, START) & exists & (index >= 0)
        begun = lax.cummax(jnp.where(starts, index, jnp.int32(-1)), axis=0)
        step = jnp.where(begun >= 0, index - begun, step)
        after = jnp.where(begun[-1] >= 0, count - begun[-1], after)
    return step, jnp.where(after >= _LONG, after - unknown_step(anchors), after)


def undecided(anchors: Anchors) -> Array:
    """Return the newest rows that anchors to come need, int32[E], without the rows before an anchor (`rule.back`)."""
    rule, step = anchors.rule, anchors.step
    if anchors.pending is not None:
        return anchors.pending
    assert step is not None
    if rule.closes:  # the next row may end the episode
        number = jnp.minimum(step, rule.ahead)
        return jnp.where(has(anchors.tail_flags[-1], RESET | CUT if rule.reset_rows else END), jnp.int32(0), number)
    after = step - (rule.ahead + 1)  # rows since the first window was complete
    partial = after % jnp.int32(rule.stride) + (rule.ahead + 1 - rule.stride)
    number = jnp.where(after < 0, step, jnp.maximum(partial, 0))
    ended = has(anchors.tail_flags[-1], RESET | CUT if rule.reset_rows else END)
    return number if rule.crosses else jnp.where(ended, jnp.int32(0), number)


def unknown_step(anchors: Anchors) -> Array:
    """Return the step of a row whose episode start is unknown, int32[]: longer than any window."""
    stride = anchors.rule.stride
    return jnp.int32(_LONG // 2 // stride * stride)


def _episodes(anchors: Anchors, flags: Array, count: Array) -> tuple[Array | None, Array | None]:
    """Return the number of each row's episode, uint32[W + N, E], and of the running one, uint32[E]."""
    if anchors.episode is None:
        return None, None
    begun = jnp.cumsum(has(flags, START), axis=0, dtype=jnp.uint32)
    before = begun[anchors.tail_flags.shape[0] - 1]
    first = anchors.episode - before
    return first[None, :] + begun, first + begun[-1]


def _update_starts(
    starts: EpisodeStarts, geometry: Geometry, ring: Ring, overwritten: Array, new: Array, age: Array, token: Array
) -> EpisodeStarts:
    """Remove the `overwritten` bool[K, E] first rows, and add the `new` bool[A, E] ones at `age` int32[A, E]."""
    length = jnp.int32(geometry.length)
    lost = jnp.sum(overwritten, axis=0, dtype=jnp.int32)
    head, count = (starts.head + lost) % length, starts.count - lost
    entry = (head + count)[None, :] + jnp.cumsum(new, axis=0, dtype=jnp.int32) - 1
    value = ((ring.cursor - ring.size)[None, :] + age) % length
    return EpisodeStarts(
        position=put_in_queues(starts.position, geometry, entry % length, value, new, token),
        head=head,
        count=count + jnp.sum(new, axis=0, dtype=jnp.int32),
    )


def episode_around(
    starts: EpisodeStarts, ring: Ring, geometry: Geometry, lane: Array, age: Array
) -> tuple[Array, Array]:
    """Return the ages int32[B] of the first and the last held row of the episode of each row at `age` int32[B] of `lane`.

    With `AnchorRule.reset_rows` the row after an end is the last of its episode. Cost: O(log L), by bisection.
    """
    length, lanes = jnp.int32(geometry.length), jnp.int32(geometry.lanes)
    count, oldest = starts.count[lane], ring.cursor[lane] - ring.size[lane]

    def age_of(entry: Array) -> Array:
        place = (starts.head[lane] + entry) % length * lanes + lane
        return (starts.position.at[place].get(mode="promise_in_bounds") - oldest) % length

    # The first entry later than the row, in [low, high].
    low, high = jnp.zeros_like(age), count
    for _ in range(geometry.length.bit_length()):
        middle = (low + high) // jnp.int32(2)
        open_still = low < high
        later = age_of(middle) > age
        high = jnp.where(open_still & later, middle, high)
        low = jnp.where(open_still & ~later, middle + 1, low)
    first = jnp.where(low > 0, age_of(jnp.maximum(low - 1, 0)), jnp.int32(0))
    last = jnp.where(low < count, age_of(low), ring.size[lane]) - 1
    return first, last


def _set_flags(
    flags: Array, ring: Ring, geometry: Geometry, written: list[tuple[Array, Array, Array]], token: Array
) -> Array:
    """Write bytes [A, E] of rows at `age` [A, E] where `mask`; no row twice."""
    at, values, first = [], [], geometry.capacity
    for mask, age, value in written:
        slot = by_age(ring, geometry, age)
        nowhere = first + jnp.arange(slot.size, dtype=jnp.int32).reshape(slot.shape)
        at.append(jnp.where(mask, slot, nowhere).reshape(-1))
        values.append(value.reshape(-1))
        first += slot.size
    index = jnp.concatenate(at) + token
    return flags.at[index].set(jnp.concatenate(values), mode="drop", unique_indices=True)


def count_before(flags: Array) -> Array:
    """Return the open rows of uint8[C] before each block, int32[blocks], for rows that never change.

    It loops over groups of `_GROUP` blocks, which needs little memory.
    """
    capacity = flags.shape[0]
    blocks = -(-capacity // BLOCK)
    within = jnp.arange(_GROUP, dtype=jnp.int32)
    earlier = within[None, :] < within[:, None]  # a prefix sum that compiles fast

    def count(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        before, total = carry
        block = number.astype(jnp.int32) * _GROUP + within
        each = jnp.sum(_anchors_in_blocks(flags, block, BLOCK), axis=1, dtype=jnp.int32)
        upto = total + jnp.sum(jnp.where(earlier, each[None, :], jnp.int32(0)), axis=1, dtype=jnp.int32)
        before = before.at[block].set(upto, mode="drop", unique_indices=True)
        return before, total + jnp.sum(each, dtype=jnp.int32)

    start = (jnp.zeros((blocks,), jnp.int32), jnp.zeros((), jnp.int32))
    return control_flow.fori_loop(0, -(-blocks // _GROUP), count, start)[0]


def _anchors_in_blocks(flags: Array, block: Array, size: int) -> Array:
    """Return which rows of each block int32[K] of `size` rows are open, bool[K, size]; False beyond the end."""
    at = block[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None, :]
    last = jnp.int32(flags.shape[0] - 1)
    return has(flags.at[jnp.minimum(at, last)].get(mode="promise_in_bounds"), ANCHOR) & (at <= last)


def nth_by_count(flags: Array, before: Array, nth: Array) -> Array:
    """Return the slots of the `nth` int32[B] open rows in order of slot, by the counts before each block. O(log C)."""
    block = jnp.maximum(number_up_to(before, nth) - 1, 0)
    upto = jnp.cumsum(_anchors_in_blocks(flags, block, BLOCK), axis=1, dtype=jnp.int32)
    passed = upto <= (nth - before.at[block].get(mode="promise_in_bounds"))[:, None]
    slot = block * BLOCK + jnp.sum(passed, axis=1, dtype=jnp.int32)
    return jnp.minimum(slot, flags.shape[0] - 1)


def nth_anchor(flags: Array, nth: Array, wanted: Array) -> Array:
    """Return the slots of the `nth` int32[B] open rows in order of slot; C where `wanted` is False.

    Prioritized samplers without a queue need it when every priority is 0. It is O(C); on GPUs up to `MOST_COUNTED` rows even if
    no row is wanted, because a loop of unknown length takes longer: the host waits for each iteration.
    """
    if flags.shape[0] > MOST_COUNTED:
        return nth_by_scan(flags, nth, wanted)
    return control_flow.platform_dependent(flags, nth, wanted, gpu=_nth_by_sums, default=nth_by_scan)


def nth_by_scan(flags: Array, nth: Array, wanted: Array, block: int = 4096) -> Array:
    """`nth_anchor` block by block, and not at all if no row is wanted."""
    capacity = flags.shape[0]
    block = min(block, capacity)

    def search(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        number, seen, found = carry
        total = jnp.cumsum(_anchors_in_blocks(flags, number[None], block)[0], dtype=jnp.int32)
        want = nth - seen
        place = number_up_to(total, want)
        hit = (want >= 0) & (want < total[-1]) & (found == capacity)
        found = jnp.where(hit, number * block + place, found)
        return number + 1, seen + total[-1], found

    def unfinished(carry: tuple[Array, Array, Array]) -> Array:
        number, _, found = carry
        return (number < -(-capacity // block)) & jnp.any(wanted & (found == capacity))

    zero = jnp.zeros((), jnp.int32)
    found = control_flow.while_loop(unfinished, search, (zero, zero, jnp.full(nth.shape, capacity, jnp.int32)))[2]
    return jnp.where(wanted, found, jnp.int32(capacity))


def _nth_by_sums(flags: Array, nth: Array, wanted: Array) -> Array:
    """`nth_by_scan` without a loop: count the blocks, then the parts of the block that each row is in. It reads all flags."""
    capacity, block = flags.shape[0], _PARTS * _WORD
    while capacity > _MOST_BLOCKS * block:
        block *= _PARTS
    blocks = -(-capacity // block)
    padded = lax.pad(flags, jnp.uint8(0), [(0, blocks * block - capacity, 0)])
    each = jnp.sum(has(padded, ANCHOR).reshape(blocks, block), axis=1, dtype=jnp.int32)
    place = jnp.arange(blocks, dtype=jnp.int32)
    earlier = place[None, :] < place[:, None]  # a prefix sum in one kernel
    before = jnp.sum(jnp.where(earlier, each[None, :], jnp.int32(0)), axis=1, dtype=jnp.int32)
    number = jnp.sum(before[None, :] <= nth[:, None], axis=1, dtype=jnp.int32) - 1
    rest = nth - before.at[number].get(mode="promise_in_bounds")

    def parts() -> Array:
        """Return the parts int32[P, B] of the blocks."""
        return number[None, :] * _PARTS + jnp.arange(_PARTS, dtype=jnp.int32)[:, None]

    while block > _PARTS * _WORD:
        block //= _PARTS
        opened = _anchors_in_blocks(flags, parts().reshape(-1), block)
        count = jnp.sum(opened, axis=1, dtype=jnp.int32).reshape(_PARTS, -1)
        number, rest, _ = _part_of(number, rest, count, count)
    bits = _anchors_in_blocks(flags, parts().reshape(-1), _WORD).astype(jnp.uint32)
    words = jnp.sum(bits << jnp.arange(_WORD, dtype=jnp.uint32)[None, :], axis=1, dtype=jnp.uint32)
    words = words.reshape(_PARTS, -1)
    number, rest, word = _part_of(number, rest, lax.population_count(words).astype(jnp.int32), words)
    slot = number * _WORD + _nth_bit(word, rest)
    return jnp.where(wanted & (nth < before[-1] + each[-1]), slot, jnp.int32(capacity))


def _part_of(number: Array, rest: Array, count: Array, values: Array) -> tuple[Array, Array, Array]:
    """Return of each block int32[B] the part that holds its row number `rest`, the row's number in it, and the part's value.

    `count` int32[P, B] are the open rows of each part.
    """
    number, upto, earlier, value = number * count.shape[0], count[0], jnp.zeros_like(rest), values[0]
    for part in range(1, count.shape[0]):  # one by one, which a GPU computes within the kernel that reads the result
        passed = upto <= rest
        number = number + passed.astype(jnp.int32)
        earlier, value = jnp.where(passed, upto, earlier), jnp.where(passed, values[part], value)
        upto = upto + count[part]
    return number, rest - earlier, value


def _nth_bit(word: Array, rest: Array) -> Array:
    """Return the place int32[B] of the bit of uint32[B] that `rest` other set bits precede."""
    place = jnp.zeros_like(rest)
    for size in (16, 8, 4, 2, 1):
        low = lax.population_count(word & np.uint32(2**size - 1)).astype(jnp.int32)
        above = rest >= low
        place, rest = jnp.where(above, place + size, place), jnp.where(above, rest - low, rest)
        word = jnp.where(above, word >> np.uint32(size), word)
    return place

"""What the verbs of `Buffer` do: pure functions `(buffer, state, ...) -> (state, result)` over checked arguments.

`Buffer` checks what users hand in and documents; these functions let the parts meet. Each is wrapped into one jitted
dispatch by `fbuf._dispatch.Verb`. A read that a later verb may overwrite goes through `pin`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fbuf import _anchors, _ring, _scatter, _transforming
from fbuf._bufferconfig import BufferConfig
from fbuf._dispatch import Verb, scoped
from fbuf._duplicates import keep_last
from fbuf._given import Given
from fbuf._pin import any_of, pin
from fbuf._sample import Index, Rows, Sample
from fbuf._state import COUNTERS, BufferState
from fbuf._tree import zero_unless
from fbuf._typing import (
    Change,
    Draw,
    Growable,
    Population,
    Read,
    Rebuilding,
    Recording,
    Reporting,
    Ring,
    Scattering,
    Streaming,
    Window,
    host_kept,
)

_VIEW = 0x7669  # what tells a view's random numbers from the sampler's


def count(state: BufferState) -> jax.Array:
    """int32[E], anchors of each lane."""
    return state.ring.size if state.anchors is None else state.anchors.count


def empty_state(buffer: BufferConfig, rows: Any, given: Given | None = None) -> BufferState:
    """No rows yet, over a storage's empty `rows`; `given` is what rows are before `on_write`."""
    geometry, writer = buffer.geometry, buffer.writer
    scatter = None
    if isinstance(writer, Scattering) and not writer.streams:
        scatter = _scatter.init(writer, geometry, buffer.storage.spec(rows)[0])
    return BufferState(
        rows=rows,
        ring=_ring.init(geometry) if scatter is not None else _streaming(buffer).init(geometry),
        anchors=None if buffer.dense else _anchors.init(geometry, buffer.rule, buffer.sampler, buffer.counted),
        sampler=buffer.sampler.init(geometry, buffer.dense or buffer.counted),
        counters=jnp.zeros((len(COUNTERS),), jnp.uint32),
        token=jnp.zeros((), jnp.int32),
        scatter=scatter,
        transforms=_transforming.empty(buffer, buffer.storage.spec(rows)[0], given),
    )


def opened(buffer: BufferConfig, call: str, sampler: Any) -> Any:
    """The sampler's state over a store, where it keeps something on the host: what its `init` gave names none. Eager."""
    kept = host_kept(buffer.sampler)
    return sampler if kept is None else kept.open(call, sampler, buffer.geometry)


def fresh_sampler(buffer: BufferConfig, call: str) -> Any:
    """The state of a sampler that keeps something on the host, of an empty buffer; None of any other. Eager."""
    if host_kept(buffer.sampler) is None:
        return None
    return opened(buffer, call, buffer.sampler.init(buffer.geometry, buffer.dense or buffer.counted))


def _streaming(buffer: BufferConfig) -> Streaming:
    assert isinstance(buffer.writer, Streaming)
    return buffer.writer


def _scattering(buffer: BufferConfig) -> Scattering:
    assert isinstance(buffer.writer, Scattering)
    return buffer.writer


def generation(buffer: BufferConfig, state: BufferState, slot: jax.Array) -> jax.Array:
    """uint32, of the row that lies in each slot."""
    if state.scatter is not None:
        return _scatter.generation(state.scatter, slot)
    return _streaming(buffer).generation(state.ring, buffer.geometry, slot)


def index_of(buffer: BufferConfig, state: BufferState, slot: jax.Array) -> Index:
    """Slots with the generations that lie there now."""
    return Index(slot, generation(buffer, state, slot))


def ending(buffer: BufferConfig, leaves: dict[str, jax.Array], shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Which rows end an episode, and which of them because it terminated."""
    end = jnp.zeros(shape, bool)
    for name in buffer.ends:
        end = end | leaves[name].reshape(shape)
    terminated = buffer.view.episode_fields()[1]
    return end, jnp.zeros(shape, bool) if terminated is None else leaves[terminated].reshape(shape)


def stamp_of(buffer: BufferConfig, leaves: dict[str, jax.Array], shape: tuple[int, ...]) -> jax.Array | None:
    """int32, what the sampler wants to know of each row."""
    name = buffer.sampler.stamp
    return None if name is None else leaves[name].reshape(shape).astype(jnp.int32)


def largest(stamp: jax.Array | None, keep: jax.Array | None) -> jax.Array | None:
    """int32[], of the rows written, those overwritten by the same write too; the least there is where none are."""
    if stamp is None:
        return None
    least = -(2**31)
    return jnp.max(stamp if keep is None else jnp.where(keep, stamp, jnp.int32(least)), initial=least)


def _count_up(state: BufferState, **counts: jax.Array) -> jax.Array:
    more = [counts.get(name, jnp.zeros((), jnp.uint32)).astype(jnp.uint32) for name in COUNTERS]
    return state.counters + jnp.stack(more)


def _extend_core(
    buffer: BufferConfig,
    state: BufferState,
    leaves: dict[str, jax.Array],
    priority: Any,
    mask: Any,
    shape: tuple[int, int],
    axes: int,
) -> tuple[BufferState, None]:
    """`shape` is [N, E]; the leaves have `axes` leading axes of these, and lack those that are 1 by definition."""
    num = shape[0]
    state = scoped("retire", _retire)(buffer, state, shape, mask)
    geometry, token = buffer.geometry, state.token
    leaves = {n: x.reshape(shape + x.shape[axes:]) for n, x in leaves.items()}
    priority = None if priority is None else priority.reshape(shape)
    mask = None if mask is None else mask.reshape(shape)
    leaves, transforms = _transforming.write(buffer, state, leaves, mask, shape)
    counts: dict[str, jax.Array] = {}
    if priority is not None:
        priority = jnp.abs(priority.astype(jnp.float32))
        fine = jnp.isfinite(priority)
        refused = ~fine if mask is None else ~fine & mask
        priority = jnp.where(fine, priority, jnp.float32(_anchors.NO_PRIORITY))
        counts["refused_nonfinite"] = jnp.sum(refused, dtype=jnp.uint32)
    end, terminated = ending(buffer, leaves, (num, geometry.lanes))
    stamp = stamp_of(buffer, leaves, (num, geometry.lanes))

    # Of more rows than a lane holds only the newest are touched.
    skipped = max(num - geometry.length, 0) if mask is None and geometry.streams else 0
    kept = {n: x[skipped:] for n, x in leaves.items()} if skipped else leaves
    scatter = state.scatter
    if scatter is None:
        place = scoped("place", _streaming(buffer).place)(state.ring, geometry, num - skipped, mask, skipped)
        slot, ring = place.slot, place.ring
    else:
        placed = scoped("place", _scatter.place)(
            _scattering(buffer), geometry, scatter, state.ring, leaves, mask, token
        )
        slot, ring, scatter = placed.slot, placed.ring, placed.scatter
        counts["refused_rows"] = placed.refused
    keep = None if mask is None and geometry.streams else slot < jnp.int32(geometry.capacity)
    if state.anchors is None:
        anchors = None
        all_kept = jnp.ones(slot.shape, bool) if keep is None else keep
        given = None if priority is None else priority[skipped:]
        change = _anchors.dense(slot, all_kept, given, None if stamp is None else stamp[skipped:])
    else:
        anchors, change, token = scoped("anchors", _anchors.extend)(
            state.anchors, buffer.view, geometry, state.ring, end, terminated, priority, stamp, mask, token
        )
    change = dataclasses.replace(change, newest_stamp=largest(stamp, mask))
    rows, no_room = scoped("write", buffer.storage.write)(state.rows, slot, kept, keep, token)
    if no_room is not None:
        counts["refused_rows"] = no_room + counts.get("refused_rows", jnp.zeros((), jnp.uint32))
    return (
        dataclasses.replace(
            state,
            rows=rows,
            ring=ring,
            anchors=anchors,
            sampler=scoped("follow", buffer.sampler.change)(state.sampler, change, geometry, token),
            counters=_count_up(state, **counts) if counts else state.counters,
            token=token,
            scatter=scatter,
            transforms=transforms,
        ),
        None,
    )


def oldest(
    buffer: BufferConfig, state: BufferState, count: jax.Array, most: int, token: jax.Array
) -> tuple[jax.Array, jax.Array, Any, Change, jax.Array]:
    """What becomes of anchors when the `count` int32[E] oldest rows of each lane go, at most `most`.

    Returns:
      slot: int32[most, E], of the rows that go; C elsewhere.
      gone: bool[most, E], where there is one.
      anchors, change, token: Anchors without them, what the sampler is to be told, and the token.
    """
    geometry = buffer.geometry
    age = jnp.broadcast_to(jnp.arange(most, dtype=jnp.int32)[:, None], (most, geometry.lanes))
    gone = age < count[None, :]
    slot = jnp.where(gone, _ring.by_age(state.ring, geometry, age), jnp.int32(geometry.capacity))
    if state.anchors is None:
        change = _anchors.dense(slot[:0], gone[:0], None)
        return slot, gone, None, dataclasses.replace(change, close_slot=slot, close_mask=gone), token
    none = jnp.zeros((0, geometry.lanes), bool)
    anchors, change, token = _anchors.extend(
        state.anchors, buffer.view, geometry, state.ring, none, none, None, None, None, token, (count, most)
    )
    return slot, gone, anchors, change, token


def _retire(buffer: BufferConfig, state: BufferState, shape: tuple[int, int], mask: jax.Array | None) -> BufferState:
    """Gives up the oldest rows where the storage has no room for more, as if they had been overwritten.

    What the write will overwrite goes first; only if that is not enough, more. Each lane gives up at most twice what it
    brings. Its oldest row never comes to lie at position 0 by this, where it would look like the first row that there ever
    was (see `_may_have_lost_rows`). A writer that replaces any row keeps what it chose: then new rows are refused.
    """
    geometry = buffer.geometry
    if not isinstance(buffer.storage, Growable) or not geometry.streams:
        return state
    storage: Growable = buffer.storage
    skipped = max(shape[0] - geometry.length, 0) if mask is None else 0
    num = shape[0] - skipped
    most = min(2 * num, geometry.length)
    brought = jnp.full((geometry.lanes,), num, jnp.int32)
    if mask is not None:
        mask = mask.reshape(shape)
        brought = jnp.minimum(jnp.sum(mask, axis=0, dtype=jnp.int32), jnp.int32(geometry.length))
    crowded = storage.crowded(state.rows, jnp.sum(brought, dtype=jnp.int32))
    if crowded is None:
        return state
    overwritten = _streaming(buffer).place(state.ring, geometry, num, mask, skipped).slot

    # The newest rows stay: some of them may not be decided yet.
    rule = buffer.view.rule
    stay = jnp.int32(1 if rule.prompt else rule.rows)

    def given_up(crowded: jax.Array, ring: Ring) -> jax.Array:
        """int32[E], oldest rows of each lane that go."""
        spare = jnp.maximum(ring.size - stay, jnp.int32(0))
        count = jnp.minimum(jnp.minimum(jnp.int32(2) * brought, jnp.int32(most)), spare)
        count = jnp.where(crowded, count, jnp.int32(0))
        first = (ring.cursor - ring.size + count) % jnp.int32(geometry.length)
        return jnp.where((first == jnp.int32(0)) & (count > jnp.int32(0)), count - jnp.int32(1), count)

    def some(carry: tuple[jax.Array, BufferState]) -> tuple[jax.Array, BufferState]:
        _, state = carry
        rows, token = storage.drop(state.rows, overwritten, state.token)
        still = storage.crowded(rows, jnp.sum(brought, dtype=jnp.int32))
        assert still is not None
        count = given_up(still, state.ring)
        slot, gone, anchors, change, token = oldest(buffer, state, count, most, token)
        rows, token = storage.drop(rows, slot, token)
        sampler = buffer.sampler.change(state.sampler, change, geometry, token)
        ring = _ring.retire(state.ring, count)
        counters = _count_up(state, retired_rows=jnp.sum(gone, dtype=jnp.uint32))
        state = dataclasses.replace(
            state, rows=rows, ring=ring, anchors=anchors, sampler=sampler, counters=counters, token=token
        )
        return jnp.zeros_like(count), state

    # Once or not at all, as a loop: a branch would copy the counts of the blocks.
    start = (given_up(crowded, state.ring), state)
    return lax.while_loop(lambda carry: any_of(carry[0] > jnp.int32(0)), some, start)[1]


def _zero_masked(mask: jax.Array, data: Any) -> Any:
    """Zeros where `mask` is False; costs nothing where it is True throughout."""
    return lax.cond(
        any_of(~mask), lambda data: jax.tree.map(lambda x: zero_unless(mask, x), data), lambda data: data, data
    )


def draw(
    buffer: BufferConfig, state: BufferState, key: jax.Array, options: dict[str, jax.Array], batch_size: int
) -> tuple[Any, Draw, Window]:
    """The sampler's state after a draw, the draw, and what to read for it."""
    held = population(buffer, state)
    sampler, drawn = scoped("draw", buffer.sampler.draw)(state.sampler, key, batch_size, held, options, state.token)
    return sampler, drawn, window_of(buffer, state, key, drawn, held)


def window_of(buffer: BufferConfig, state: BufferState, key: jax.Array, drawn: Draw, held: Population) -> Window:
    """What to read for a draw with `key` from a population."""
    spec, _ = buffer.storage.spec(state.rows)
    return scoped("window", buffer.view.window)(spec, held, drawn.slot, drawn.mask, jax.random.fold_in(key, _VIEW))


def deliver(
    buffer: BufferConfig,
    state: BufferState,
    drawn: Sample,
    window: Window,
    arrays: list[jax.Array],
    ok: jax.Array | None,
    reading: _transforming.Reading | None,
    partly: bool = False,
) -> tuple[Sample, jax.Array]:
    """A batch `drawn` without data, with it, and the counters: from what was read, where `ok` says that it was there.

    `partly`: not all of it was asked for, so that to find nothing is no mistake.
    """
    spec, structure = buffer.storage.spec(state.rows)
    data = scoped("assemble", buffer.view.assemble)(spec, structure, arrays, window)
    index, probability, weight, mask = drawn.index, drawn.probability, drawn.weight, drawn.mask
    counts = {} if partly else {"empty_samples": jnp.sum(~mask[:1], dtype=jnp.uint32)}
    if ok is not None:
        why = "draws_refused" if isinstance(buffer.storage, Growable) else "expired_rows"
        counts[why] = jnp.sum(mask & ~ok, dtype=jnp.uint32)
        mask = mask & ok
        probability = jnp.where(mask, probability, jnp.float32(0))
        weight = jnp.where(mask, weight, jnp.float32(0))
        nowhere = jnp.int32(buffer.geometry.capacity)
        index = Index(jnp.where(mask, index.slot, nowhere), jnp.where(mask, index.ticket, jnp.uint32(0)))
        if buffer.storage.masks_expired:
            data = _zero_masked(mask, data)
    data, ragged = _split(buffer, state, data)
    data = _transforming.read(buffer, data, mask, reading)
    sample = Sample(data, index, probability, weight, mask, ragged)
    return sample, _count_up(state, **counts) if counts else state.counters


def _sample_core(
    buffer: BufferConfig, state: BufferState, key: jax.Array, options: dict[str, jax.Array], batch_size: int
) -> tuple[BufferState, Sample]:
    sampler, drawn, window = draw(buffer, state, key, options, batch_size)
    arrays, ok = scoped("read", buffer.storage.read)(state.rows, window.reads)
    index = index_of(buffer, state, drawn.slot)
    token, (arrays, ok, drawn, context, index) = pin(state.token, (arrays, ok, drawn, window.context, index))
    sample = Sample(None, index, drawn.probability, drawn.weight, drawn.mask)
    reading = _transforming.reading(buffer, state, key)
    batch, counters = deliver(buffer, state, sample, window._replace(context=context), arrays, ok, reading)
    return dataclasses.replace(state, sampler=sampler, token=token, counters=counters), batch


def _split(buffer: BufferConfig, state: BufferState, data: Any) -> tuple[Any, Any]:
    """What users see as data, and what `lazy` reads: None where all of a row are arrays."""
    if isinstance(buffer.storage, Recording):
        recording: Recording = buffer.storage
        return recording.split(state.rows, data)
    return data, None


def _mixture(error: jax.Array, mask: jax.Array, eta: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32[B] from float32[B, T]: `eta` times the largest magnitude, the rest the mean; and where those are finite.

    0 where none counts: a window with nothing to learn from, which would else keep the priority of a new one for ever.
    """
    finite = jnp.isfinite(error)
    magnitude = jnp.where(mask & finite, jnp.abs(error), jnp.float32(0))
    number = jnp.sum(mask, axis=1, dtype=jnp.int32)
    mean = jnp.sum(magnitude, axis=1) / jnp.maximum(number, jnp.int32(1)).astype(jnp.float32)
    share = jnp.clip(eta, jnp.float32(0), jnp.float32(1))
    mixed = share * jnp.max(magnitude, axis=1) + (jnp.float32(1) - share) * mean
    return mixed, jnp.all(finite | ~mask, axis=1) & jnp.isfinite(mixed)


def _update_priority_core(
    buffer: BufferConfig,
    state: BufferState,
    index: Index,
    td_error: jax.Array,
    mask: jax.Array | None,
    eta: jax.Array | None,
) -> tuple[BufferState, None]:
    geometry = buffer.geometry
    error = td_error.astype(jnp.float32)
    finite = jnp.isfinite(error)
    if mask is not None and eta is not None:
        error, finite = _mixture(error, mask, eta)
    token, masked, inside, fresh = _judge(buffer, state, index)
    drawable = fresh
    if state.anchors is not None:
        at = jnp.where(inside, index.slot, jnp.int32(0))
        token, (flags,) = pin(token, (state.anchors.flags.at[at].get(mode="promise_in_bounds"),))
        drawable = fresh & _anchors.has(flags, _anchors.OPEN)
    accepted = finite & drawable
    slot = jnp.where(accepted, index.slot, jnp.int32(geometry.capacity))
    error = jnp.where(accepted, error, jnp.float32(0))
    counters = _count_up(
        state,
        refused_nonfinite=jnp.sum(~masked & ~finite, dtype=jnp.uint32),
        refused_out_of_range=jnp.sum(~masked & finite & ~inside, dtype=jnp.uint32),
        refused_stale=jnp.sum(finite & inside & ~fresh, dtype=jnp.uint32),
        refused_closed=jnp.sum(finite & fresh & ~drawable, dtype=jnp.uint32),
    )
    sampler = scoped("update", buffer.sampler.update)(state.sampler, slot, error, geometry, token)
    return dataclasses.replace(state, sampler=sampler, counters=counters, token=token), None


def _judge(buffer: BufferConfig, state: BufferState, index: Index) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The token; and which indices are masked rows of a sample, in range, and still name the row they did."""
    capacity = jnp.int32(buffer.geometry.capacity)
    masked = (index.slot == capacity) & (index.ticket == jnp.uint32(0))
    inside = (index.slot >= jnp.int32(0)) & (index.slot < capacity)
    token, now = state.token, generation(buffer, state, index.slot)
    if state.scatter is not None:
        token, now = pin(token, now)
    fresh = inside & (now == index.ticket) & (now != jnp.uint32(0))
    return token, masked, inside, fresh


def _update_rows_core(
    buffer: BufferConfig, state: BufferState, index: Index, leaves: dict[str, jax.Array]
) -> tuple[BufferState, None]:
    capacity = jnp.int32(buffer.geometry.capacity)
    token, masked, inside, fresh = _judge(buffer, state, index)
    wanted = jnp.where(fresh, index.slot, capacity)
    order = jnp.arange(wanted.shape[0], dtype=jnp.int32)
    slot = jnp.where(fresh & keep_last(wanted), wanted, capacity + order)
    rows, no_room = scoped("write", buffer.storage.update)(state.rows, slot, leaves, token)
    counters = _count_up(
        state,
        refused_out_of_range=jnp.sum(~masked & ~inside, dtype=jnp.uint32),
        refused_stale=jnp.sum(inside & ~fresh, dtype=jnp.uint32),
        **({} if no_room is None else {"refused_rows": no_room}),
    )
    return dataclasses.replace(state, rows=rows, counters=counters, token=token), None


def population(buffer: BufferConfig, state: BufferState) -> Population:
    """What samplers and views may know when they draw."""
    anchors = state.anchors
    if anchors is None:
        return Population(buffer.geometry, state.ring, count(state), None)
    return Population(buffer.geometry, state.ring, anchors.count, anchors.flags, anchors.starts, anchors.before)


def _rows_core(buffer: BufferConfig, state: BufferState, slot: jax.Array) -> tuple[BufferState, Rows]:
    index = index_of(buffer, state, slot)
    mask = index.ticket != jnp.uint32(0)
    at = jnp.where(mask, slot, jnp.int32(buffer.geometry.capacity))
    spec, structure = buffer.storage.spec(state.rows)
    arrays, ok = scoped("read", buffer.storage.read)(state.rows, [Read(name, at.reshape(-1)) for name in spec])
    if ok is not None:
        mask = mask & ok.reshape(mask.shape)
        at = jnp.where(mask, at, jnp.int32(buffer.geometry.capacity))
    shaped = [a.reshape(slot.shape + a.shape[1:]) for a in arrays]
    data = structure.unflatten([zero_unless(mask, a) for a in shaped] if buffer.storage.masks_expired else shaped)
    index = Index(at, jnp.where(mask, index.ticket, jnp.uint32(0)))
    data, ragged = _split(buffer, state, data)
    return state, Rows(data, index, mask, ragged)


def _get_core(buffer: BufferConfig, state: BufferState, index: Index) -> tuple[BufferState, Rows]:
    fresh = _judge(buffer, state, index)[3]
    slot = jnp.where(fresh, index.slot, jnp.int32(buffer.geometry.capacity))
    return _rows_core(buffer, state, slot)


def _aged_rows(buffer: BufferConfig, state: BufferState, age: jax.Array) -> tuple[BufferState, Rows]:
    """Rows by age int32[A, E], 0 the oldest."""
    exists = (age >= jnp.int32(0)) & (age < state.ring.size[None, :])
    slot = jnp.where(exists, _ring.by_age(state.ring, buffer.geometry, age), jnp.int32(buffer.geometry.capacity))
    return _rows_core(buffer, state, slot[:, 0] if buffer.lanes is None else slot)


def _scattered_rows(buffer: BufferConfig, state: BufferState, number: int, newest: bool) -> tuple[BufferState, Rows]:
    """The oldest `number` rows in order of arrival, or the newest; `number` is a multiple of the lanes."""
    assert state.scatter is not None
    held, rank = _scatter.held(state.ring), jnp.arange(number, dtype=jnp.int32)
    rank = rank + held - jnp.int32(number) if newest else rank
    order = _scatter.by_age(state.scatter).at[jnp.maximum(rank, jnp.int32(0))].get(mode="promise_in_bounds")
    there = (rank >= jnp.int32(0)) & (rank < held)
    slot = jnp.where(there, order, jnp.int32(buffer.geometry.capacity))
    return _rows_core(buffer, state, slot if buffer.lanes is None else slot.reshape(-1, buffer.geometry.lanes))


def _all_rows_core(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, Rows]:
    lanes, length, streams = buffer.geometry
    if not streams:
        return _scattered_rows(buffer, state, buffer.geometry.capacity, newest=False)
    age = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], (length, lanes))
    return _aged_rows(buffer, state, age)


def _last_core(buffer: BufferConfig, state: BufferState, n: int) -> tuple[BufferState, Rows]:
    if state.scatter is not None:
        return _scattered_rows(buffer, state, n * buffer.geometry.lanes, newest=True)
    return _aged_rows(
        buffer, state, (state.ring.size - jnp.int32(n))[None, :] + jnp.arange(n, dtype=jnp.int32)[:, None]
    )


def _clear_core(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, None]:
    geometry = buffer.geometry
    anchors = None if state.anchors is None else _anchors.init(geometry, buffer.rule, buffer.sampler)
    scatter = state.scatter
    if scatter is None:
        ring = _streaming(buffer).clear(state.ring)
    else:
        ring = _ring.clear(state.ring)
        scatter = _scatter.clear(scatter, _scattering(buffer), geometry, buffer.storage.spec(state.rows)[0])
    return (
        dataclasses.replace(
            state,
            rows=buffer.storage.clear(state.rows),
            ring=ring,
            scatter=scatter,
            anchors=anchors,
            sampler=buffer.sampler.clear(state.sampler, geometry, buffer.dense),
            ahead=None if state.ahead is None else state.ahead.dropped(),
        ),
        None,
    )


def _set_core(buffer: BufferConfig, state: BufferState, numbers: dict[str, jax.Array]) -> tuple[BufferState, None]:
    return dataclasses.replace(state, sampler=buffer.sampler.set(state.sampler, **numbers)), None


def _rebuild_core(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, None]:
    assert isinstance(buffer.sampler, Rebuilding)
    sampler: Rebuilding = buffer.sampler
    return dataclasses.replace(state, sampler=sampler.rebuild(state.sampler, buffer.geometry, state.token)), None


def _convert_core(
    buffer: BufferConfig, state: BufferState, sampler: Any, other: BufferConfig
) -> tuple[BufferState, tuple[_anchors.Anchors | None, Any]]:
    """Lets the rows arrive again, oldest first, without writing them: the anchors and the sampler they make.

    `sampler` is what `fresh_sampler(other)` gave.

    Before a lane's oldest row there may have been another, long gone, unless the lane never filled up. Its episode
    is then taken to have begun earlier, out of reach; and where rows after an end are reset rows it may be one itself, so
    that it is left out, but for what it says of the row after it.
    """
    geometry = buffer.geometry
    lanes, length, _ = geometry
    age = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], (length, lanes))
    keep = age < state.ring.size[None, :]
    slot = jnp.where(keep, _ring.by_age(state.ring, geometry, age), jnp.int32(geometry.capacity))
    empty = empty_state(other, state.rows)
    names = (() if other.dense else other.ends) + (() if other.sampler.stamp is None else (other.sampler.stamp,))
    values, _ = buffer.storage.read(state.rows, [Read(name, slot.reshape(-1)) for name in names])
    leaves = dict(zip(names, values, strict=True))
    stamp = stamp_of(other, leaves, keep.shape)
    if other.dense:
        anchors, change = None, _anchors.dense(slot, keep, None, stamp)
    else:
        end, terminated = ending(other, leaves, keep.shape)
        assert empty.anchors is not None
        full = _may_have_lost_rows(buffer, state)
        first = state.ring.cursor - state.ring.size
        tail, unknown = empty.anchors.tail_flags, jnp.zeros((lanes,), jnp.uint8)
        if other.view.rule.reset_rows:
            keep = keep.at[0].set(keep[0] & ~full)
            first = first + full.astype(jnp.int32)
            unknown = (end | terminated)[0].astype(jnp.uint8) * jnp.uint8(_anchors.END)
        before = Ring(
            cursor=first % jnp.int32(length),
            size=jnp.zeros_like(state.ring.size),
            lap=state.ring.lap,
        )
        nothing = dataclasses.replace(empty.anchors, tail_flags=tail.at[-1].set(jnp.where(full, unknown, tail[-1])))
        if nothing.step is not None:
            nothing = dataclasses.replace(nothing, step=jnp.where(full, _anchors.unknown_step(nothing), nothing.step))
        anchors, change, _ = _anchors.extend(
            nothing, other.view, geometry, before, end, terminated, None, stamp, keep, state.token
        )
    change = dataclasses.replace(change, newest_stamp=largest(stamp, keep))
    sampler = empty.sampler if sampler is None else sampler
    return state, (anchors, other.sampler.change(sampler, change, geometry, state.token))


def _may_have_lost_rows(buffer: BufferConfig, state: BufferState) -> jax.Array:
    """bool[E]: lanes before whose oldest row there may have been another."""
    ring = state.ring
    return (ring.size == jnp.int32(buffer.geometry.length)) | (ring.cursor != ring.size)


def _can_sample_core(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, jax.Array]:
    anchors = jnp.sum(count(state), dtype=jnp.int32)
    return state, buffer.sampler.available(state.sampler, anchors) > jnp.int32(0)


def _stats_core(buffer: BufferConfig, state: BufferState) -> tuple[BufferState, dict[str, jax.Array]]:
    counts = {
        "size": jnp.sum(state.ring.size, dtype=jnp.int32),
        "drawable": jnp.sum(count(state), dtype=jnp.int32),
    }
    counts |= {name: state.counters[i] for i, name in enumerate(COUNTERS)}
    if isinstance(buffer.storage, Growable):
        counts |= buffer.storage.stats(state.rows, counts["size"])
    if state.scatter is not None and isinstance(buffer.writer, Reporting):
        counts |= buffer.writer.stats(state.scatter.own)
    if state.ahead is not None:
        counts["stale_draws"] = state.ahead.stale
    return state, counts | buffer.sampler.stats(state.sampler) | _transforming.stats(buffer, state)


extend = Verb(_extend_core)
sample = Verb(_sample_core)
update_priority = Verb(_update_priority_core)
update_rows = Verb(_update_rows_core)
rows_at = Verb(_rows_core)
get = Verb(_get_core)
all_rows = Verb(_all_rows_core)
last = Verb(_last_core)
clear = Verb(_clear_core)
set_numbers = Verb(_set_core)
rebuild = Verb(_rebuild_core)
convert = Verb(_convert_core)
can_sample = Verb(_can_sample_core)
stats = Verb(_stats_core)

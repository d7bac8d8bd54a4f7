"""Batches of a mixture: anchors are drawn, read and put together, exactly as many of each buffer as it gives.

Where the quotas are known while tracing, each buffer draws and reads its own, and the parts are joined: what that costs is
what the buffers' own `sample`s cost. Where they are not (annealed fractions, a source drawn for each row), a program has to
have room for B rows of each buffer: each draws B anchors at most, told how many are wanted, and reads at slot C, which is no
read, where a row is another's. A sampler that remembers what it drew counts only what is handed out (`draw_some`); of any other
the wanted anchors are a random part of B, as the first ones may be alike (flashbax's mixer takes the first of a stratified
batch, and never draws the upper half of the buffer).

What a buffer with nothing to draw leaves over is drawn from the others in a loop of no or one turn; a branch would copy what
draws change. Rejected: drawing B of each buffer always (S times the cost), and filling up with copies of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fbuf._algorithms import permutation
from fbuf._algorithms.random_bits import anew
from fbuf._buffer import read, state_ops, transforms
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.ordering import any_unbatched, order_after_reads
from fbuf._core.pytree import expand
from fbuf._core.sample import Sample
from fbuf._interfaces.sampler import Draw
from fbuf._interfaces.view import Window
from fbuf._interfaces.writer import ReadOnly
from fbuf._mixture import quota
from fbuf._mixture.checks import check_alike
from fbuf._mixture.config import MixtureConfig
from fbuf._mixture.state import COUNTERS, MixtureIndex, MixtureSample, MixtureState
from fbuf._mixture.weights import weigh

States = dict[str, BufferState]


class Part(NamedTuple):
    """Rows of a batch, before they are weighed."""

    data: Any
    source: jax.Array  # int32[B], whose turn it was, though it may have had nothing
    slot: jax.Array
    ticket: jax.Array
    chance: jax.Array  # float32[B], of the anchor in its buffer
    mask: jax.Array


def available(mixture: MixtureConfig, states: States) -> jax.Array:
    """int32[S], anchors that may be drawn."""
    out = []
    for name, buffer in mixture.members:
        count = jnp.sum(state_ops.count(states[name]), dtype=jnp.int32)
        out.append(buffer.sampler.available(states[name].sampler, count))
    return jnp.stack(out)


def sample(
    mixture: MixtureConfig,
    state: MixtureState,
    key: jax.Array,
    fractions: jax.Array | None,
    beta: jax.Array | None,
    sizes: tuple[int, ...] | None,
    batch_size: int,
) -> tuple[MixtureState, MixtureSample]:
    """A batch: of so many rows each where `sizes` are known, else by `fractions` float32[S]."""
    states: States = dict(state.buffers)
    number = available(mixture, states)
    there = number > jnp.int32(0)
    size = len(mixture.members)
    keys = jax.random.split(key, 2 * size + 2)
    moved = jnp.zeros((), jnp.uint32)
    share: jax.Array | None = None
    if sizes is not None:
        states, part = _narrow(mixture, states, keys, sizes)
        if mixture.quota == "exact" and mixture.if_empty == "share" and _may_lack(mixture, sizes):
            weights = jnp.asarray(mixture.shares, jnp.float32)
            extra = quota.shared(part.source, quota.normalized(weights), there)
            moved = jnp.sum(extra < jnp.int32(size), dtype=jnp.uint32)
            states, part = _filled_up(mixture, states, keys, part, extra)
    else:
        assert fractions is not None
        fractions = quota.normalized(fractions)
        if mixture.quota == "random":
            source = quota.at_random(keys[-1], fractions, batch_size)
        else:
            source = quota.in_order(quota.traced(fractions, jnp.int32(batch_size)), batch_size)
        if mixture.if_empty == "share":
            open_to = quota.normalized(jnp.where(there, fractions, jnp.float32(0)))
            if mixture.quota == "random":
                extra = quota.at_random(keys[-2], open_to, batch_size)
                extra = jnp.where(quota.left_over(source, there), extra, jnp.int32(size))
                fractions = open_to
            else:
                extra = quota.shared(source, fractions, there)
            moved = jnp.sum(extra < jnp.int32(size), dtype=jnp.uint32)
            source = jnp.where(extra < jnp.int32(size), extra, source)
        states, part = _wide(mixture, states, keys, source)
        share = fractions if mixture.quota == "random" else None
    if share is None:
        share = _shares(part.source, size)
    weighed = weigh(
        part.source,
        part.chance,
        part.mask,
        share,
        number,
        state.beta if beta is None else beta,
        mixture.target,
        mixture.normalize,
    )
    source = jnp.where(part.mask, part.source, jnp.int32(size))
    index = MixtureIndex(source, part.slot, part.ticket)
    batch = MixtureSample(part.data, index, weighed.probability, weighed.weight, part.mask)
    counters = count_up(state, empty_samples=(~jnp.any(there)).astype(jnp.uint32), moved_rows=moved)
    return dataclasses.replace(state, buffers=states, counters=counters), batch


def _may_lack(mixture: MixtureConfig, sizes: tuple[int, ...]) -> bool:
    """Whether a buffer may have nothing to draw, and another something: rows of data sets are always there."""
    pairs = zip(mixture.members, sizes, strict=True)
    return len(sizes) > 1 and any(size and not isinstance(buffer.writer, ReadOnly) for (_, buffer), size in pairs)


def count_up(state: MixtureState, **counts: jax.Array) -> jax.Array:
    """The counters with these added."""
    return state.counters + jnp.stack([counts.get(name, jnp.zeros((), jnp.uint32)) for name in COUNTERS])


def _shares(source: jax.Array, size: int) -> jax.Array:
    """float32[S], which part of the rows is each buffer's."""
    which = jnp.arange(size, dtype=jnp.int32)
    count = jnp.sum(source[:, None] == which[None, :], axis=0, dtype=jnp.int32)
    return count.astype(jnp.float32) / jnp.float32(source.shape[0])


def _narrow(mixture: MixtureConfig, states: States, keys: jax.Array, sizes: tuple[int, ...]) -> tuple[States, Part]:
    """So many rows of each buffer, side by side."""
    states, parts, found = dict(states), [], []
    for number, ((name, buffer), size) in enumerate(zip(mixture.members, sizes, strict=True)):
        if size == 0:
            continue
        state, key = states[name], keys[number]
        sampler, drawn, window = read.draw(buffer, state, key, {}, size)
        states[name], batch = _read(buffer, state, key, sampler, drawn, window)
        found.append((name, batch.data))
        parts.append(_part(batch, jnp.full((size,), number, jnp.int32)))
    check_alike("Mixture.sample", found)
    if len(parts) == 1:
        return _pinned(states, parts[0])
    return _pinned(states, jax.tree.map(_joined, *parts))


def _joined(*parts: jax.Array) -> jax.Array:
    """Parts of a batch one after another, each written to its place as it is read.

    A `concatenate` fused with the reads takes twice the time on CPU: it decides for each byte which part it is of.
    """
    whole = jnp.zeros((sum(part.shape[0] for part in parts), *parts[0].shape[1:]), parts[0].dtype)
    first = 0
    for part in parts:
        whole = lax.dynamic_update_slice_in_dim(whole, part, jnp.int32(first), axis=0)
        first += part.shape[0]
    return whole


def _read(
    buffer: Buffer, state: BufferState, key: jax.Array, sampler: Any, drawn: Draw, window: Window
) -> tuple[BufferState, Sample]:
    """What `Buffer.sample` does after a draw, but for the `order_after_reads`, which is left to `_pinned`."""
    arrays, ok = buffer.storage.read(state.rows, window.reads)
    index = state_ops.index_of(buffer, state, drawn.slot)
    batch = Sample(None, index, drawn.probability, drawn.weight, drawn.mask)
    reading = transforms.reading(buffer, state, key)
    batch, counters = read.deliver(buffer, state, batch, window, arrays, ok, reading, partly=True)
    return dataclasses.replace(state, sampler=sampler, counters=counters), batch


def _pinned(states: States, part: Part) -> tuple[States, Part]:
    """Orders all reads of a batch before later writes of any buffer.

    Where parts have been put together: what each buffer reads then goes to its place in the batch as it is read, while parts
    that are pinned one by one are copied there once more (twice the time, of frames).
    """
    token = jnp.max(jnp.stack([state.token for state in states.values()]))
    counters = {name: state.counters for name, state in states.items()}
    token, (part, counters) = order_after_reads(token, (part, counters))
    return {
        name: dataclasses.replace(state, token=token, counters=counters[name]) for name, state in states.items()
    }, part


def _part(batch: Sample, source: jax.Array) -> Part:
    slot = jnp.where(batch.mask, batch.index.slot, jnp.int32(0))
    return Part(batch.data, source, slot, batch.index.ticket, batch.probability, batch.mask)


def _wide(mixture: MixtureConfig, states: States, keys: jax.Array, source: jax.Array) -> tuple[States, Part]:
    """Row b from buffer `source[b]`, from none where that is S."""
    states, found = dict(states), []
    whole: Part | None = None
    for number, (name, buffer) in enumerate(mixture.members):
        chosen = source == jnp.int32(number)
        states[name], batch = _some_of(buffer, states[name], keys[number], chosen, f"Mixture.sample: '{name}'")
        found.append((name, batch.data))
        part = _part(batch, source)
        if whole is None:
            whole = part
        else:
            check_alike("Mixture.sample", found)
            whole = _where(chosen, part, whole)
    assert whole is not None
    return _pinned(states, whole)


def _where(chosen: jax.Array, new: Part, old: Part) -> Part:
    return jax.tree.map(lambda a, b: jnp.where(expand(chosen, a.ndim), a, b), new, old)


def _some_of(
    buffer: Buffer, state: BufferState, key: jax.Array, chosen: jax.Array, call: str
) -> tuple[BufferState, Sample]:
    """A batch of B of which only the rows `chosen` bool[B] are drawn and read."""
    batch_size = chosen.shape[0]
    wanted = jnp.sum(chosen, dtype=jnp.int32)
    rank = jnp.maximum(jnp.cumsum(chosen, dtype=jnp.int32) - jnp.int32(1), jnp.int32(0))
    held = state_ops.eligible_set(buffer, state)
    draw_some = getattr(buffer.sampler, "draw_some", None)
    if draw_some is not None:
        sampler, drawn = draw_some(state.sampler, key, batch_size, wanted, held, {}, state.token)
        at = rank
    else:
        sampler, drawn = buffer.sampler.draw(state.sampler, key, batch_size, held, {}, state.token)
        _check_forgets(call, buffer, state.sampler, sampler)
        at = permutation.mixed(jax.random.fold_in(key, _ORDER), batch_size)[rank]
    mask = chosen & drawn.mask[at]
    drawn = Draw(
        slot=jnp.where(mask, drawn.slot[at], jnp.int32(buffer.geometry.capacity)),
        probability=jnp.where(mask, drawn.probability[at], jnp.float32(0)),
        weight=mask.astype(jnp.float32),
        mask=mask,
    )
    window = read.window_of(buffer, state, key, drawn, held)
    return _read(buffer, state, key, sampler, drawn, window)


_ORDER = 0x6D78  # what tells the order of a part from the draw itself


def _check_forgets(call: str, buffer: Buffer, before: Any, after: Any) -> None:
    """Refuses a sampler that remembers what it drew, and cannot be told how many are wanted. By identity, while tracing."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    if any(old is not new for old, new in pairs):
        raise TypeError(
            f"{call}: {buffer.sampler!r} remembers what it drew, but cannot draw a number of anchors that is not known before; "
            f"expected a sampler with `draw_some` (fbuf.parts.Sampler). Use fractions that stay, quota='exact' and "
            f"if_empty='mask', or another sampler."
        )


def _filled_up(
    mixture: MixtureConfig, states: States, keys: jax.Array, part: Part, source: jax.Array
) -> tuple[States, Part]:
    """The batch with the rows that others left over, of the buffers that `source` names; of S none."""
    size = jnp.int32(len(mixture.members))
    before, structure = jax.tree.leaves(states), jax.tree.structure(states)
    second = keys[len(mixture.members) :]
    own = anew(second)
    changed = _changed(lambda states: _wide(mixture, states, own(), source)[0], states)

    def with_leaves(leaves: Sequence[jax.Array]) -> States:
        rest = iter(leaves)
        both = zip(changed, before, strict=True)
        return jax.tree.unflatten(structure, [next(rest) if c else leaf for c, leaf in both])

    def turn(carry: tuple[jax.Array, list[jax.Array], Part]) -> tuple[jax.Array, list[jax.Array], Part]:
        wanted, leaves, part = carry
        after, more = _wide(mixture, with_leaves(leaves), own(), source)
        new = [leaf for c, leaf in zip(changed, jax.tree.leaves(after), strict=True) if c]
        return jnp.zeros_like(wanted), new, _where(source < size, more, part)

    start = (jnp.any(source < size), [leaf for c, leaf in zip(changed, before, strict=True) if c], part)
    _, leaves, part = lax.while_loop(lambda carry: any_unbatched(carry[0]), turn, start)
    return with_leaves(leaves), part


def _changed(function: Callable[[States], States], states: States) -> list[bool]:
    """Which leaves `function` changes: known by identity, while tracing."""
    changed: list[bool] = []

    def trace(states: States) -> None:
        pairs = zip(jax.tree.leaves(states), jax.tree.leaves(function(states)), strict=True)
        changed.extend(old is not new for old, new in pairs)

    jax.eval_shape(trace, states)
    return changed

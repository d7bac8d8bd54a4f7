"""Draw, read and assemble batches of a mixture of buffers, with exact quotas.

If the quotas are known while tracing, each buffer draws and reads its part, and the parts are joined at the cost of the
buffers' own `sample`s. Otherwise (annealed fractions, a source per row) each buffer draws up to B anchors and reads slot C,
which is no read, for the rows of other buffers. Samplers with `draw_some` count only returned rows; of other samplers a
random subset is used, because the first anchors of a stratified batch are not representative.

Rows of empty buffers are drawn from the others with `update_if`; a branch would copy the state of the samplers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fbuf._algorithms import random
from fbuf._algorithms.random import fresh_key
from fbuf._buffer import read, transforms
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, anchor_count, anchor_set, count_up, index_of, zero_masked
from fbuf._core.control_flow import order_after_reads
from fbuf._core.dispatch import Operation, update_if
from fbuf._core.sample import Index, Sample
from fbuf._core.slots import expand
from fbuf._interfaces.sampler import Draw
from fbuf._interfaces.view import Window
from fbuf._members import quota, weights
from fbuf._members.mixture.checks import check_same_leaves
from fbuf.samplers._base import masked_draw

States = Mapping[str, BufferState]


@dataclasses.dataclass(frozen=True)
class MixtureConfig:
    """Hold the fields of a `Mixture`, unchecked, and values derived from them."""

    buffers: Mapping[str, Any] | tuple[tuple[str, Any], ...]
    fractions: Mapping[str, float] | tuple[float, ...] | None = None
    quota: Literal["exact", "random", "all"] = "exact"
    target: Literal["union", "source"] = "union"
    beta: float = 1.0
    normalize: Literal["batch", None] = "batch"
    if_empty: Literal["share", "mask"] = "share"

    @property
    def members(self) -> tuple[tuple[str, Any], ...]:
        """Names and buffers, in order; here all are `Buffer`s, those of one shard if the mixture is sharded."""
        assert isinstance(self.buffers, tuple)
        return self.buffers

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the buffers, in the order of `source`."""
        return tuple(name for name, _ in self.members)

    @property
    def shares(self) -> tuple[float, ...]:
        """The fractions, in order; they may have any sum."""
        return self.fractions if isinstance(self.fractions, tuple) else (1.0,) * len(self.members)


class Part(NamedTuple):
    """Hold rows of a batch without weights."""

    data: Any
    source: Array  # int32[B], assigned buffer, which may be empty
    slot: Array
    generation: Array
    chance: Array  # float32[B], probability of the anchor in its buffer
    mask: Array


class OfShard(NamedTuple):
    """What one shard of several knows of all of them (`fbuf.sharded`)."""

    shards: int
    axis: str  # of the mesh
    number: Array  # int32[S], available anchors of each buffer on all shards
    share: Array  # float32[S], of this shard in the draws of each buffer


def available(mixture: MixtureConfig, states: States) -> Array:
    """Return the available anchors of each buffer, int32[S]."""
    out = []
    for name, buffer in mixture.members:
        count = jnp.sum(anchor_count(states[name]), dtype=jnp.int32)
        out.append(buffer.sampler.available(states[name].sampler, count))
    return jnp.stack(out)


@Operation
def sample(
    mixture: MixtureConfig,
    states: States,
    key: Array,
    fractions: Array | None,
    beta: Array | None,
    sizes: tuple[int, ...] | None,
    batch_size: int,
    of_shard: OfShard | None = None,
) -> tuple[States, Sample]:
    """Draw a batch: `sizes` rows of each buffer if they are known, else by `fractions` float32[S]."""
    states = {name: states[name].open() for name in mixture.names}
    number = available(mixture, states) if of_shard is None else of_shard.number
    has_rows = number > jnp.int32(0)
    size = len(mixture.members)
    keys = jax.random.split(key, 2 * size + 2)
    share: Array | None = None
    if sizes is not None:
        states, part = _draw_sizes(mixture, states, keys, sizes)
        if mixture.quota == "exact" and mixture.if_empty == "share" and _may_lack(mixture, sizes):
            fractions = quota.normalized(jnp.asarray(mixture.shares, jnp.float32))
            extra = quota.shared(part.source, fractions, has_rows)
            states, part = _fill_up(mixture, states, keys, part, extra)
    else:
        assert fractions is not None
        fractions = quota.normalized(fractions)
        if mixture.quota == "random":
            source = quota.at_random(keys[-1], fractions, batch_size)
        else:
            source = quota.in_order(quota.traced(fractions, jnp.int32(batch_size)), batch_size)
        if mixture.if_empty == "share":
            open_to = quota.normalized(jnp.where(has_rows, fractions, jnp.float32(0)))
            if mixture.quota == "random":
                extra = quota.at_random(keys[-2], open_to, batch_size)
                extra = jnp.where(quota.left_over(source, has_rows), extra, jnp.int32(size))
                fractions = open_to
            else:
                extra = quota.shared(source, fractions, has_rows)
            source = jnp.where(extra < jnp.int32(size), extra, source)
        states, part = _draw_masked(mixture, states, keys, source)
        share = fractions if mixture.quota == "random" else None
    if share is None:
        share = _shares(part.source, size)
    beta = jnp.float32(mixture.beta) if beta is None else beta
    if of_shard is None:
        probability, weight = weigh(
            part.source, part.chance, part.mask, share, number, beta, mixture.target, mixture.normalize
        )
    else:
        part, probability, weight = _weigh_shard(mixture, of_shard, part, share, beta)
    source = jnp.where(part.mask, part.source, jnp.int32(size))
    index = Index(part.slot, part.generation, source)
    batch = Sample(part.data, index, probability, weight, part.mask)
    return {name: state.pack() for name, state in count_empty(mixture, states, has_rows, of_shard).items()}, batch


def count_empty(mixture: MixtureConfig, states: States, has_rows: Array, of_shard: OfShard | None) -> States:
    """Count a batch of which all buffers are empty: in the first buffer, on the first shard."""
    first, is_empty = mixture.names[0], ~jnp.any(has_rows)
    if of_shard is not None:
        is_empty = is_empty & (lax.axis_index(of_shard.axis) == jnp.int32(0))
    state = states[first]
    return {**states, first: state.replace(counters=count_up(state, empty_samples=is_empty))}


def _may_lack(mixture: MixtureConfig, sizes: tuple[int, ...]) -> bool:
    """Return whether a buffer may be empty while another is not: data sets never are."""
    pairs = zip(mixture.members, sizes, strict=True)
    return len(sizes) > 1 and any(size and not buffer.writer.read_only for (_, buffer), size in pairs)


def _shares(source: Array, size: int) -> Array:
    """Return the share of the rows of each buffer, float32[S]."""
    which = jnp.arange(size, dtype=jnp.int32)
    count = jnp.sum(source[:, None] == which[None, :], axis=0, dtype=jnp.int32)
    return count.astype(jnp.float32) / jnp.float32(source.shape[0])


def _draw_sizes(mixture: MixtureConfig, states: States, keys: Array, sizes: tuple[int, ...]) -> tuple[States, Part]:
    """Draw `sizes` rows of each buffer and join them."""
    states, parts, found = dict(states), [], []
    for number, ((name, buffer), size) in enumerate(zip(mixture.members, sizes, strict=True)):
        if size == 0:
            continue
        state, key = states[name], keys[number]
        sampler, drawn, window = read.draw(buffer, state, key, {}, size)
        states[name], batch = _read(buffer, state, key, sampler, drawn, window)
        found.append((name, batch.data))
        parts.append(_part(batch, jnp.full((size,), number, jnp.int32)))
    check_same_leaves("Mixture.sample", found)
    if len(parts) == 1:
        return _order_reads(states, parts[0])
    return _order_reads(states, jax.tree.map(_joined, *parts))


def _joined(*parts: Array) -> Array:
    """Join parts of a batch: each row is selected from the part that has it.

    On CPUs XLA fuses this with the reads, into one pass over the batch. A `concatenate`, or writing each part to its place,
    takes twice the time.
    """
    row = jnp.arange(sum(part.shape[0] for part in parts), dtype=jnp.int32)
    whole, first = None, 0
    for part in parts:
        last = first + part.shape[0] - 1
        padded = part.at[jnp.clip(row, first, last) - first].get(mode="promise_in_bounds")
        whole = padded if whole is None else jnp.where(expand(row < first, part.ndim), whole, padded)
        first = last + 1
    assert whole is not None
    return whole


def _read(
    buffer: Buffer, state: BufferState, key: Array, sampler: Any, drawn: Draw, window: Window
) -> tuple[BufferState, Sample]:
    """Read a drawn batch as `Buffer.sample` does, without ordering the reads; `_order_reads` follows."""
    arrays, ok = buffer.storage.read(state.rows, window.reads)
    index = index_of(buffer, state, drawn.slot)
    batch = Sample(None, index, drawn.probability, drawn.weight, drawn.mask)
    reading = None if buffer.on_read is None else transforms.reading(buffer, state, key)
    batch, counters = read.deliver(buffer, state, batch, window, arrays, ok, reading, partly=True)
    return state.replace(sampler=sampler, counters=counters), batch


def _order_reads(states: States, part: Part) -> tuple[States, Part]:
    """Order all reads of a batch before later writes of any buffer.

    It follows the join: parts that are ordered one by one would be copied again, which doubles the time for frames.
    """
    token = jnp.max(jnp.stack([state.token for state in states.values()]))
    counters = {name: state.counters for name, state in states.items()}
    token, (part, counters) = order_after_reads(token, (part, counters))
    return {name: state.replace(token=token, counters=counters[name]) for name, state in states.items()}, part


def _part(batch: Sample, source: Array) -> Part:
    slot = jnp.where(batch.mask, batch.index.slot, jnp.int32(0))
    return Part(batch.data, source, slot, batch.index.generation, batch.probability, batch.mask)


def _draw_masked(mixture: MixtureConfig, states: States, keys: Array, source: Array) -> tuple[States, Part]:
    """Draw row b from buffer `source[b]`, from none if that is S."""
    states, found = dict(states), []
    whole: Part | None = None
    for number, (name, buffer) in enumerate(mixture.members):
        chosen = source == jnp.int32(number)
        states[name], batch = _draw_chosen(buffer, states[name], keys[number], chosen, f"Mixture.sample: '{name}'")
        found.append((name, batch.data))
        part = _part(batch, source)
        if whole is None:
            whole = part
        else:
            check_same_leaves("Mixture.sample", found)
            whole = _where(chosen, part, whole)
    assert whole is not None
    return _order_reads(states, whole)


def _where(chosen: Array, new: Part, old: Part) -> Part:
    return jax.tree.map(lambda a, b: jnp.where(expand(chosen, a.ndim), a, b), new, old)


def _draw_chosen(
    buffer: Buffer, state: BufferState, key: Array, chosen: Array, call: str
) -> tuple[BufferState, Sample]:
    """Draw and read only the rows `chosen` bool[B] of a batch of B."""
    batch_size = chosen.shape[0]
    wanted = jnp.sum(chosen, dtype=jnp.int32)
    rank = jnp.maximum(jnp.cumsum(chosen, dtype=jnp.int32) - jnp.int32(1), jnp.int32(0))
    anchors = anchor_set(buffer, state)
    some = buffer.sampler.draw_some(state.sampler, key, batch_size, wanted, anchors, {}, state.token)
    if some is not None:
        sampler, drawn = some
        at = rank
    else:
        sampler, drawn = buffer.sampler.draw(state.sampler, key, batch_size, anchors, {}, state.token)
        pairs = zip(jax.tree.leaves(state.sampler), jax.tree.leaves(sampler), strict=True)
        if any(old is not new for old, new in pairs):
            raise TypeError(
                f"{call}: {buffer.sampler!r} changes its state when it draws, and has no `draw_some` (fbuf.parts.Sampler). "
                f"Use constant fractions, quota='exact' and if_empty='mask', or another sampler."
            )
        at = random.permutation(jax.random.fold_in(key, _ORDER), batch_size)[rank]
    mask = chosen & drawn.mask[at]
    drawn = masked_draw(drawn.slot[at], drawn.probability[at], mask, buffer.geometry)
    window = read.window_of(buffer, state, key, drawn, anchors)
    return _read(buffer, state, key, sampler, drawn, window)


_ORDER = 0x6D78  # separates the order of a part from the draw


def _fill_up(mixture: MixtureConfig, states: States, keys: Array, part: Part, source: Array) -> tuple[States, Part]:
    """Draw the rows of empty buffers from the buffers that `source` names; S: none."""
    size = jnp.int32(len(mixture.members))
    own_key = fresh_key(keys[len(mixture.members) :])

    def fill(wanted: Array, states: States, part: Part) -> tuple[States, Part]:
        states, more = _draw_masked(mixture, states, own_key(), source)
        return states, _where(source < size, more, part)

    return update_if(jnp.any(source < size), fill, states, part)


def _weigh_shard(
    mixture: MixtureConfig, of_shard: OfShard, part: Part, share: Array, beta: Array
) -> tuple[Part, Array, Array]:
    """Return rows of one shard, masked if it has no mass, with the probabilities and weights of the whole.

    Every shard draws as many rows of a buffer, so they have its share times the number of shards in the weight.
    """
    shares = of_shard.share[jnp.minimum(part.source, jnp.int32(len(mixture.members) - 1))]
    mask = part.mask & (shares > jnp.float32(0))
    part = part._replace(mask=mask, chance=part.chance * shares, data=zero_masked(mask, part.data))
    probability, weight = weigh(
        part.source, part.chance, mask, share, of_shard.number, beta, mixture.target, normalize=None
    )
    weight = weight * shares * jnp.float32(of_shard.shards)
    if mixture.normalize is not None:
        weight = weights.normalized(weight, lax.pmax(jnp.max(weight), of_shard.axis))
    return part, probability, weight


def weigh(
    source: Array,
    chance: Array,
    mask: Array,
    share: Array,
    number: Array,
    beta: Array,
    target: str,
    normalize: str | None,
) -> tuple[Array, Array]:
    r"""Return probabilities and importance weights, float32[B]; 0 where mask is False.

    A row of buffer s has probability :math:`q(i) = g_s P_s(i)`. For the target "union" its weight is :math:`(N
    q(i))^{-\beta}` with :math:`N = \sum_{s: g_s > 0} n_s`: with :math:`\beta = 1` the weighted mean of a batch estimates
    the mean over all anchors. For "source" it is :math:`(n_s P_s(i))^{-\beta}`, which estimates the mean of the buffers'
    means by fractions. The samplers' own weights are not used, because each is normalised within its buffer.

    Args:
      source: int32[B], buffer; S where mask is False.
      chance: float32[B], P_s of each row.
      mask: bool[B].
      share: float32[S], g.
      number: int32[S], n.
      beta: float32[].
      target: "union" or "source".
      normalize: "batch" or None.
    """
    anchors = number.astype(jnp.float32)
    mine = jnp.minimum(source, jnp.int32(share.shape[0] - 1))
    probability = jnp.where(mask, share[mine] * chance, jnp.float32(0))
    if target == "union":
        total = jnp.sum(jnp.where(share > jnp.float32(0), anchors, jnp.float32(0)))
        relative = total * probability
    else:
        relative = anchors[mine] * chance
    weight = weights.weigh(relative, mask, beta)
    if normalize is not None:
        weight = weights.normalized(weight, jnp.max(weight))
    return probability, weight


def route(index: Index, number: int, buffer: Any, invalid: Array | None = None) -> Index:
    """Return the rows of one buffer as its index; other rows are masked with slot C and generation 0, and shard D.

    Args:
      index: Of the mixture.
      number: Of the buffer.
      buffer: It, or its `Sharded`.
      invalid: bool[B], rows of no buffer, which this one is to count as out of range.
    """
    mine = index.source == jnp.int32(number)
    slot = jnp.where(mine, index.slot, jnp.int32(getattr(buffer, "shard", buffer).capacity))
    shard = None if index.shard is None else jnp.where(mine, index.shard, jnp.int32(buffer.shards))
    if invalid is not None:
        slot, mine = jnp.where(invalid, jnp.int32(-1), slot), mine | invalid
    return Index(slot, jnp.where(mine, index.generation, jnp.uint32(0)), shard=shard)


def of_no_buffer(index: Index, size: int) -> Array:
    """Return the rows with an invalid source that are not masked, bool[B]."""
    none = (index.source < jnp.int32(0)) | (index.source >= jnp.int32(size))
    return none & ~((index.source == jnp.int32(size)) & (index.generation == jnp.uint32(0)))


@Operation
def window_index(mixture: MixtureConfig, states: Any, index: Index) -> tuple[Any, Index]:
    """Call `window_index` of each buffer. Masked rows have source S, slot and generation 0, and shard D."""
    found = jax.tree.map(lambda leaf: leaf[:, None], index)
    for number, (name, buffer) in enumerate(mixture.members):
        rows = buffer.window_index(states[name], route(index, number, buffer))
        inside = rows.slot < jnp.int32(buffer.capacity) if rows.shard is None else rows.shard < jnp.int32(buffer.shards)
        source = jnp.where(inside, jnp.int32(number), jnp.int32(len(mixture.members)))
        rows = dataclasses.replace(rows, source=source, slot=jnp.where(inside, rows.slot, jnp.int32(0)))
        mine = index.source[:, None] == jnp.int32(number)
        found = jax.tree.map(lambda new, old, mine=mine: jnp.where(mine, new, old), rows, found)
    return states, found


@Operation
def update_priority(
    mixture: MixtureConfig, states: Any, index: Index, td_error: Any, mask: Any, eta: Any
) -> tuple[Any, None]:
    """Call `update_priority` of each buffer with priorities, of which the first counts rows of no buffer."""
    states = dict(states)
    invalid: Array | None = of_no_buffer(index, len(mixture.members))
    for number, (name, buffer) in enumerate(mixture.members):
        if buffer_of(buffer).sampler.prioritized:
            part = route(index, number, buffer, invalid)
            states[name], invalid = buffer.update_priority(states[name], part, td_error, mask=mask, eta=eta), None
    return states, None


@Operation
def update_rows(mixture: MixtureConfig, states: Any, index: Index, fields: Any, mask: Any) -> tuple[Any, None]:
    """Call `update_rows` of each buffer whose rows can change, of which the first counts rows of no buffer."""
    states = dict(states)
    invalid: Array | None = of_no_buffer(index, len(mixture.members))
    for number, (name, buffer) in enumerate(mixture.members):
        if not buffer_of(buffer).writer.read_only:
            part = route(index, number, buffer, invalid)
            states[name], invalid = buffer.update_rows(states[name], part, fields, mask=mask), None
    return states, None


@Operation
def can_sample(mixture: MixtureConfig, states: Any) -> tuple[Any, Array]:
    """Return whether a batch can be drawn."""
    ready = jnp.stack([buffer.can_sample(states[name]) for name, buffer in mixture.members])
    is_drawn = jnp.asarray(mixture.shares, jnp.float32) > jnp.float32(0)
    if mixture.quota == "all" or mixture.if_empty == "mask":
        return states, jnp.all(ready | ~is_drawn)
    return states, jnp.any(ready & is_drawn)


def buffer_of(member: Any) -> Buffer:
    """Return a buffer, or that of a `Sharded`."""
    return getattr(member, "buffer", member)

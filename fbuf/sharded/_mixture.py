"""`ShardedMixture`: one mixture over a mesh axis."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from fbuf._buffer import state as state_ops
from fbuf._buffer.checks import check_is_index
from fbuf._buffer.mixture import draw
from fbuf._buffer.mixture.mixture import Mixture, Shares, Sizes
from fbuf._buffer.mixture.state import COUNTERS, MixtureState
from fbuf._buffer.plan import Plan, PlanSettings
from fbuf._buffer.summary import Summary
from fbuf._core.component import component
from fbuf._core.dispatch import changes_of, with_changes
from fbuf._core.pytree import PyTree, tree_bytes
from fbuf._core.sample import Index, Sample
from fbuf._members import quota
from fbuf._members.split import check_draw_mode
from fbuf.sharded import _checks
from fbuf.sharded._draw import own_key, whole
from fbuf.sharded._operation import is_local, on_each_shard, placed
from fbuf.sharded._sharded import Sharded
from fbuf.sharded._state import ShardedState, block_of


@component
class ShardedMixture:
    r"""Split the buffers of one mixture over the devices of a mesh axis.

    Attributes:
      mixture: The whole mixture: sizes are totals over all shards, as for `Sharded`.
      mesh, axis: As for `Sharded`.

    Every device draws B / D rows, by the fractions, from its shards (draw="local"). `probability` and `weight` are those of the
    mixture, with the factor D M_s / M in the weight for the shard of a buffer. A buffer is empty if all its shards are; rows of
    a single empty shard are masked. `mixture[name]` is the `Sharded` of one buffer, and `state[name]` its state. `fbuf.save`
    and `fbuf.load` take it as they take a `Sharded`.

    Samplers: `Uniform`, `Prioritized`, `Staleness`.

    Raises:
      ValueError, TypeError: as `Sharded`; a sampler that draws without replacement.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
      >>> both = {"online": fbuf.prioritized(100 * mesh.size), "offline": fbuf.uniform(100 * mesh.size)}
      >>> mixture = fbuf.sharded.ShardedMixture(fbuf.Mixture(both), mesh)
      >>> state = mixture.init({"online": {"t": 0}, "offline": {"t": 0}})
      >>> for name in both:
      ...     state = mixture.extend(state, name, {"t": jnp.arange(5 * mesh.size)})
      >>> state, batch = mixture.sample(state, jax.random.key(0), 4 * mesh.size)
      >>> state = mixture.update_priority(state, batch.index, jnp.ones(4 * mesh.size))
      >>> batch.index.source.tolist().count(0) == 2 * mesh.size
      True
    """

    mixture: Mixture
    mesh: Mesh
    axis: str = "data"

    def __post_init__(self) -> None:
        if not isinstance(self.mixture, Mixture):
            raise TypeError(f"ShardedMixture: mixture is {type(self.mixture).__name__}; expected a Mixture.")
        for name in self.mixture.names:
            fix = "which mixtures over several shards cannot weigh. Use samplers.Uniform() or Prioritized()."
            sampler = self[name].buffer.sampler
            if self.shards > 1:
                check_draw_mode(f"ShardedMixture: '{name}'", sampler, fix)

    def __getitem__(self, name: str) -> Sharded:
        return Sharded(self.mixture[name], self.mesh, self.axis)

    @property
    def shards(self) -> int:
        """D, the devices along the axis."""
        return int(self.mesh.shape[self.axis])

    @functools.cached_property
    def shard(self) -> Mixture:
        """The mixture of one shard."""
        return dataclasses.replace(self.mixture, buffers={name: self[name].shard for name in self.mixture.names})

    def init(self, examples: Mapping[str, PyTree]) -> MixtureState:
        """Return the state of an empty mixture: by name one row, as for `Sharded.init`."""
        call = "ShardedMixture.init"
        self.mixture._check_examples(call, "init", examples, "one row")
        states: Any = {name: self[name].init(examples[name]) for name in self.mixture.names}
        self.check_same_batches(call, states)
        beta, numbers = jnp.full((), self.mixture.beta, jnp.float32), jnp.zeros((len(COUNTERS),), jnp.uint32)
        return MixtureState(states, self.mixture.first_fractions(), beta, numbers)

    def check_same_batches(self, call: str, states: Mapping[str, ShardedState]) -> None:
        """Raise unless the batches of all buffers have the same leaves."""
        parts = 1 if is_local(self.axis) else self.shards
        blocks = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype), dict(states)
        )
        own: Any = {name: jax.eval_shape(ShardedState.local, block) for name, block in blocks.items()}
        self.shard.check_same_batches(call, own)

    def check_state(self, state: MixtureState) -> None:
        """Raise ValueError if another mixture made the state, or it is on another mesh."""
        joined = self._joined(state) if isinstance(state, MixtureState) else state
        self.mixture._check("ShardedMixture", "(state, ...)", joined)
        for name, own in self._sharded(state):
            self[name].check_state(own)

    def replace(self, state: MixtureState, states: Mapping[str, ShardedState]) -> MixtureState:
        """Return the state with the states of some buffers replaced: as `Mixture.replace`."""
        for name, own in states.items():
            self[name].check_state(own)
        return self._with(state, states)

    def add(
        self, state: MixtureState, name: str, row: PyTree, *, priority: Any = None, mask: Any = None
    ) -> MixtureState:
        """Add one row a lane to buffer `name`: as `Sharded.add`."""
        own: Any = state[name]
        return self._with(state, {name: self[name].add(own, row, priority=priority, mask=mask)})

    def extend(
        self, state: MixtureState, name: str, rows: PyTree, *, priority: Any = None, mask: Any = None
    ) -> MixtureState:
        """Add rows to buffer `name`: as `Sharded.extend`."""
        own: Any = state[name]
        return self._with(state, {name: self[name].extend(own, rows, priority=priority, mask=mask)})

    def set(self, state: MixtureState, name: str | None = None, **numbers: Any) -> MixtureState:
        """Replace annealed numbers of buffer `name`, or fractions and beta: as `Mixture.set`."""
        own: Any = None if name is None else state[name]
        if name is not None:
            return self._with(state, {name: self[name].set(own, **numbers)})
        return dataclasses.replace(self.mixture.set(self._joined(state), **numbers), buffers=state.buffers)

    def sample(
        self, state: MixtureState, key: jax.Array, batch_size: Sizes, *, fractions: Shares = None, beta: Any = None
    ) -> tuple[MixtureState, Sample]:
        """Draw a batch, split over the axis: as `Mixture.sample`.

        Args:
          key: Equal on all devices.
          batch_size: B of all devices together, or rows of each buffer; multiples of D.
        Cost: that of the buffers for B / D rows on each device; one collective of 16 D bytes a buffer.
        """
        call = "ShardedMixture.sample"
        for name, size in batch_size.items() if isinstance(batch_size, Mapping) else [("batch_size", batch_size)]:
            _checks.check_multiple(call, self, name, size)
        each: Any = jax.tree.map(lambda size: size // self.shards, batch_size)
        args = self.mixture._checked_draw(call, self._joined(state), key, each, fractions, beta)
        changes, batch = _sample(self, is_local(self.axis), args[2:], state, (key, *args[:2]))
        return with_changes(state, changes), batch

    def peek(
        self, state: MixtureState, key: jax.Array, batch_size: Sizes, *, fractions: Shares = None, beta: Any = None
    ) -> Sample:
        """Return the batch of `sample` without the state."""
        return self.sample(state, key, batch_size, fractions=fractions, beta=beta)[1]

    def update_priority(
        self, state: MixtureState, index: Index, td_error: Any, *, mask: Any = None, eta: Any = 0.9
    ) -> MixtureState:
        """Set priorities of drawn rows, each in its buffer, whichever devices they are on: as `Mixture.update_priority`.

        Rows of no buffer are counted by the first buffer with priorities.
        """
        names = [name for name in self.mixture.names if self.mixture[name].sampler.prioritized]
        if not names:
            raise TypeError(
                "ShardedMixture.update_priority: no buffer has priorities. Use sampler=fbuf.samplers.Prioritized()."
            )
        states: Any = dict(state.buffers)
        for name in names:
            own = self._index(index, name, name == names[0])
            states[name] = self[name].update_priority(states[name], own, td_error, mask=mask, eta=eta)
        return self._with(state, states)

    def update_rows(self, state: MixtureState, index: Index, fields: PyTree, *, mask: Any = None) -> MixtureState:
        """Replace some leaves of drawn rows, each in its buffer: as `Mixture.update_rows`."""
        states: Any = dict(state.buffers)
        for number, name in enumerate(self.mixture.names):
            states[name] = self[name].update_rows(
                states[name], self._index(index, name, number == 0), fields, mask=mask
            )
        return self._with(state, states)

    def window_index(self, state: MixtureState, index: Index) -> Index:
        """Return the rows `[B, T]` of sampled windows: as `Mixture.window_index`."""
        nowhere = jnp.int32(self.shards)
        given = index.source, index.shard, index.slot, index.ticket
        leaves = [jnp.asarray(leaf)[:, None] for leaf in given]
        for number, (name, own) in enumerate(self._sharded(state)):
            rows = self[name].window_index(own, self.route(index, name))
            mine, there = leaves[0] == jnp.int32(number), rows.shard < nowhere
            source = jnp.where(there, jnp.int32(number), jnp.int32(len(self.mixture.names)))
            window = source, rows.shard, jnp.where(there, rows.slot, jnp.int32(0)), rows.ticket
            leaves = [jnp.where(mine, new, old) for new, old in zip(window, leaves, strict=True)]
        source, shard, slot, ticket = leaves
        return Index(slot, ticket, source, shard)

    def route(self, index: Index, name: str) -> Index:
        """Return the rows of one buffer, other rows masked, for `mixture[name]`: as `Mixture.route`."""
        return self._index(index, name, False)

    def cut(self, state: MixtureState, name: str, lanes: Any = None) -> MixtureState:
        """End the running episodes of buffer `name`: as `Sharded.cut`."""
        own: Any = state[name]
        return self._with(state, {name: self[name].cut(own, lanes)})

    def clear(self, state: MixtureState, name: str | None = None) -> MixtureState:
        """Drop every row of buffer `name`, or of all."""
        names = self.mixture.names if name is None else (name,)
        states: Any = {each: state[each] for each in names}
        return self._with(state, {each: self[each].clear(own) for each, own in states.items()})

    def can_sample(self, state: MixtureState) -> jax.Array:
        """Return bool[], whether a batch can be drawn: as `Mixture.can_sample`."""
        found = [self[name].can_sample(own) for name, own in self._sharded(state)]
        there, drawn = jnp.stack(found), self._shares(state) > jnp.float32(0)
        every = self.mixture.quota == "all" or self.mixture.if_empty == "mask"
        return jnp.all(there | ~drawn) if every else jnp.any(there & drawn)

    def size(self, state: MixtureState) -> jax.Array:
        """Return int32[], the rows held by all shards of all buffers."""
        return jnp.sum(jnp.stack([self[name].size(own) for name, own in self._sharded(state)]), dtype=jnp.int32)

    def stats(self, state: MixtureState) -> dict[str, jax.Array]:
        """Return scalars to log: those of the buffers as `online/size`, and the counters of the mixture."""
        out: dict[str, jax.Array] = {name: state.counters[i] for i, name in enumerate(COUNTERS)} | {"beta": state.beta}
        shares = quota.normalized(self._shares(state))
        for number, (name, own) in enumerate(self._sharded(state)):
            out |= {f"{name}/{key}": value for key, value in self[name].stats(own).items()}
            if self.mixture.quota != "all":
                out[f"{name}/fraction"] = shares[number]
        return out

    def summary(self, state: MixtureState, *, compare: int | None = 1 << 14) -> dict[str, Summary]:
        """Return a summary of each buffer, by name: as `Sharded.summary`. Eager."""
        return {name: self[name].summary(own, compare=compare) for name, own in self._sharded(state)}

    def nbytes(self, state: MixtureState) -> dict[str, int]:
        """Return the bytes in use on all devices together: `device`, `host`, `disk`. Eager."""
        found = [self[name].nbytes(own) for name, own in self._sharded(state)]
        total = {place: sum(sizes[place] for sizes in found) for place in found[0]}
        return total | {"device": total["device"] + tree_bytes(dataclasses.replace(state, buffers={}))}

    def plan(self, examples: Mapping[str, PyTree], **settings: Unpack[PlanSettings]) -> dict[str, Plan]:
        """Return the bytes and peaks of one device for each buffer, by name: as `Sharded.plan`."""
        self.mixture._check_examples("ShardedMixture.plan", "plan", examples, "one row")
        return {name: self[name].plan(examples[name], **settings) for name in self.mixture.names}

    def _shares(self, state: MixtureState) -> jax.Array:
        return jnp.asarray(self.mixture.shares, jnp.float32) if state.fractions is None else state.fractions

    def _index(self, index: Index, name: str, and_invalid: bool) -> Index:
        """Return the rows of one buffer, masked elsewhere; `and_invalid`: and those of none, on shard -1."""
        check_is_index("ShardedMixture", index, "source", "shard")
        number, size = self.mixture.names.index(name), len(self.mixture.names)
        mine = index.source == jnp.int32(number)
        shard = jnp.where(mine, index.shard, jnp.int32(self.shards))
        if and_invalid:
            masked = (index.source == jnp.int32(size)) & (index.ticket == jnp.uint32(0))
            invalid = ((index.source < jnp.int32(0)) | (index.source >= jnp.int32(size))) & ~masked
            shard, mine = jnp.where(invalid, jnp.int32(-1), shard), mine | invalid
        slot = jnp.where(mine, index.slot, jnp.int32(self[name].shard.capacity))
        return Index(slot, jnp.where(mine, index.ticket, jnp.uint32(0)), shard=shard)

    def _joined(self, state: MixtureState) -> MixtureState:
        """Return the state with those of all shards as if of one buffer, to check."""
        states: Any = state.buffers
        return dataclasses.replace(state, buffers={name: own.shards for name, own in states.items()})

    def _sharded(self, state: MixtureState) -> list[tuple[str, Any]]:
        return [(name, state[name]) for name in self.mixture.names]

    def _with(self, state: MixtureState, states: Mapping[str, Any]) -> MixtureState:
        return dataclasses.replace(state, buffers={**state.buffers, **states})


def _sample_on_shard(mixture: ShardedMixture, static: Any, state: MixtureState, args: Any) -> Any:
    """Draw the part of a batch that this shard provides; return the changes of its state, and the part."""
    (key, fractions, beta), (sizes, batch_size) = args, static
    members, axis = [(name, mixture[name]) for name in mixture.mixture.names], mixture.axis
    blocks: Any = state.buffers
    states = {name: blocks[name].local().open() for name, _ in members}
    shares = []
    for name, sharded in members:
        eligible = state_ops.eligible_set(sharded.shard, states[name])
        mine = lax.axis_index(axis)
        shares.append(whole(sharded, states[name], eligible).share[mine] if mixture.shards > 1 else jnp.float32(1))
    number = lax.psum(draw.available(mixture.shard, states), axis)
    of_shard = draw.OfShard(mixture.shards, axis, number, jnp.stack(shares))
    own = dataclasses.replace(state, buffers={name: blocks[name].local() for name, _ in members})
    after, batch = draw.sample(mixture.shard, own, own_key(mixture, key), fractions, beta, sizes, batch_size, of_shard)
    # Each shard counts the rows it moved; all of them count one empty batch.
    moved = jnp.arange(len(COUNTERS)) == COUNTERS.index("moved_rows")
    more = (after.counters - state.counters).astype(jnp.int32)
    more = jnp.where(moved, lax.psum(more, axis), lax.pmax(more, axis)).astype(jnp.uint32)
    buffers: Any = {name: block_of(mixture.shards, after.buffers[name]) for name, _ in members}
    after = dataclasses.replace(after, buffers=buffers, counters=state.counters + more)
    shard = jnp.where(batch.mask, lax.axis_index(axis).astype(jnp.int32), jnp.int32(mixture.shards))
    return after, dataclasses.replace(batch, index=dataclasses.replace(batch.index, shard=shard))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _sample(mixture: ShardedMixture, local: bool, static: Any, state: MixtureState, args: Any) -> Any:
    """Return the changed leaves of the state, and a batch."""
    run = functools.partial(jax.named_scope("fbuf.sharded.mixture")(_sample_on_shard), mixture, static)

    def on_shard(state: MixtureState, args: Any) -> Any:
        with on_each_shard(mixture, state, args):
            return run(state, args)

    if not local:
        split, same = PartitionSpec(mixture.axis), PartitionSpec()
        spec = MixtureState(split, same, same, same)  # type: ignore[arg-type]
        state = dataclasses.replace(state, buffers=placed(mixture.mesh, state.buffers, split))
        args = placed(mixture.mesh, args, same)
        on_shard = jax.shard_map(on_shard, mesh=mixture.mesh, in_specs=(spec, same), out_specs=(spec, split))
    after, batch = on_shard(state, args)
    return changes_of(state, after), batch

"""Base class of samplers: how anchors (slots that can be sampled) are drawn."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fbuf._core.component import state
from fbuf._core.pytree import Leaves
from fbuf._core.slot_remap import SlotJoin, SlotRemap
from fbuf._core.slots import Geometry, Ranges, Ring, lengthened


@state
class Draw:
    """The anchors that a sampler drew."""

    slot: jax.Array  # int32[B]; C where mask is False
    probability: jax.Array  # float32[B], of this anchor in one draw; 0 where mask is False
    weight: jax.Array  # float32[B], importance weight; 0 where mask is False
    mask: jax.Array  # bool[B]; False where there was no anchor to draw
    last: Any = None  # bool[], whether an epoch ends with this draw; None: there are no epochs


@state
class AnchorChange:
    """The anchors that one write closed, and then opened."""

    open_slot: jax.Array  # int32[A, E], slots in time order
    open_mask: jax.Array  # bool[A, E]
    open_episode: jax.Array | None  # uint32[A, E], number of the lane's episode; None unless `Sampler.by_episode`
    open_stamp: jax.Array | None  # int32[A, E], values of the leaf `Sampler.stamp`; None without a stamp
    newest_stamp: jax.Array | None  # int32[], largest stamp of all rows written, anchors or not; None without a stamp
    priority: jax.Array  # float32[A, E]; negative where none was given; a NumPy array if no row of this write has one
    close_slot: jax.Array  # int32[K, E]; K = 0 where every row is an anchor and a closed slot always opens again
    close_mask: jax.Array  # bool[K, E]


@state
class EpisodeStarts:
    """Where the episodes of each lane begin, oldest first, for starts that are still in the buffer."""

    position: jax.Array  # int32[C], of first rows in the lane's ring; entry n of lane e is at n * E + e
    head: jax.Array  # int32[E], entry of the oldest
    count: jax.Array  # int32[E]

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "position", self.position, 0, geometry.length - 1
        yield "head", self.head, 0, geometry.length - 1
        yield "count", self.count, 0, geometry.length


class AnchorSet(NamedTuple):
    """The anchors, as samplers see them when they draw and views when they look at neighbouring rows."""

    geometry: Geometry
    ring: Ring
    counts: jax.Array  # int32[E], anchors of each lane
    flags: jax.Array | None  # uint8[C], bits of `fbuf._indexing.anchors`; None where every row is an anchor
    starts: EpisodeStarts | None = None  # None unless `AnchorRule.spans`
    # int32[blocks], open rows before each block of flags (`fbuf._indexing.anchors`); None unless `Sampler.by_rank`
    before: jax.Array | None = None


class Inspected(NamedTuple):
    """Statistics of every slot, for `Buffer.summary`."""

    probability: jax.Array | None  # float32[C], of being drawn next; None: the same for all anchors
    draws: jax.Array | None = None  # int32[C], draws of each anchor since `Sampler.since`; None: not counted


class Mass(NamedTuple):
    """What the anchors of a shard weigh together, for draws from all shards (`fbuf.sharded`)."""

    total: jax.Array  # float32[], the sum of relative weights
    unit: jax.Array  # float32[], log2 of the unit of `total` and `least`
    least: jax.Array  # float32[], the least weight that can be drawn, infinite if there is none; 0 if it is not tracked


class Sampler(abc.ABC):
    """Choose anchors. `dense` says that every row held is an anchor.

    A sampler without priorities needs one method: derive it from `fbuf.parts.NthSampler`. Any other needs `init`, `change`, and
    `draw` or `draw_some`; what follows them here has a default. It is decorated with `fbuf.parts.component`.
    """

    prioritized: bool = False  # whether anchors have priorities, which `update` sets
    by_rank: bool = False  # whether `anchor_log.at` finds anchors; `init` is `dense` where rows never change
    covers: bool = False  # whether anchors are drawn equally often and `draw_some` limits them; needs no `mass`
    epochs: bool = False  # whether draws pass through epochs, which `position` tells and `Draw.last` ends
    stratified: bool = False  # whether a batch takes its rows from equal parts of the mass
    normalize: Literal["batch", "buffer", None] = None  # what weights are divided by the largest of
    largest: Literal["seen", "held"] = "seen"  # of which rows `max_priority` of the state is the largest
    most: Mapping[str, float] = {}  # the largest value of a number or option, by name
    since: str = ""  # the event since which `Inspected.draws` counts

    @property
    def numbers(self) -> Mapping[str, Any]:
        """Dtype of each number of `set`, float32 or int32, by name."""
        return {}

    @property
    def options(self) -> Mapping[str, Any]:
        """Dtype of each option of `draw`, by name."""
        return {}

    @property
    def once(self) -> bool:
        """Whether a batch holds each anchor at most once, so that the draws depend on one another."""
        return self.covers

    @property
    def in_order(self) -> bool:
        """Whether rows must be replaced oldest first; refused with a writer that replaces any row."""
        return False

    @property
    def by_episode(self) -> bool:
        """Whether `change` needs `AnchorChange.open_episode`."""
        return False

    @property
    def stamp(self) -> str | None:
        """Name of the integer leaf that `AnchorChange.open_stamp` holds."""
        return None

    @property
    def whole(self) -> str:
        """Why it must have all rows, and what is expected; empty if members of a whole may each draw from their own rows."""
        return "has no `mass` (fbuf.parts.Sampler), such as a sampler that ranks the rows of the whole"

    @property
    def rebuilds(self) -> str:
        """How to construct a sampler that can `rebuild`; empty if this one can."""
        return ""

    @abc.abstractmethod
    def init(self, geometry: Geometry, dense: bool) -> Any:
        """Return the state for an empty buffer; its shapes, if part of it is on the host."""

    @abc.abstractmethod
    def change(self, sampler: Any, change: AnchorChange, geometry: Geometry, token: jax.Array) -> Any:
        """Update the state after a write."""

    def draw(
        self, sampler: Any, key: jax.Array, batch_size: int, anchors: AnchorSet, options: Leaves, token: jax.Array
    ) -> tuple[Any, Draw]:
        """Draw `B` anchors; return the state and the draw.

        `options` are numbers of this call (`beta`). Add `token` to the indices of every write.
        """
        drawn = self.draw_some(sampler, key, batch_size, jnp.int32(batch_size), anchors, options, token)
        if drawn is None:
            raise NotImplementedError(f"{type(self).__name__}: write def draw, or draw_some; see fbuf.parts.Sampler.")
        return drawn

    def draw_some(
        self,
        sampler: Any,
        key: jax.Array,
        batch_size: int,
        wanted: jax.Array,
        anchors: AnchorSet,
        options: Leaves,
        token: jax.Array,
    ) -> tuple[Any, Draw] | None:
        """Draw `wanted` int32[] anchors, 0 to B, in the first entries of B; `mask` is False in the others.

        None: only `draw` can. A `Mixture` needs it of samplers whose draws change their state.
        """
        return None

    def update(self, sampler: Any, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array) -> Any:
        """Set priorities from finite errors float32[B]. Slot C is skipped; the last of duplicates wins."""
        return sampler

    def set(self, sampler: Any, **numbers: Any) -> Any:
        """Replace annealed numbers, fields of the state."""
        return dataclasses.replace(sampler, **numbers) if numbers else sampler

    def clear(self, sampler: Any, geometry: Geometry, dense: bool) -> Any:
        """Return the state without anchors; annealed numbers stay."""
        return self.set(self.init(geometry, dense), **{name: getattr(sampler, name) for name in self.numbers})

    def available(self, sampler: Any, count: jax.Array) -> jax.Array:
        """Return int32[], how many of the `count` int32[] anchors can be drawn, from scalars of the state."""
        return count

    def stats(self, sampler: Any) -> dict[str, jax.Array]:
        """Return scalars to log, from scalars of the state."""
        return {}

    def row_by_row(self, dense: bool) -> bool:
        """Return whether one `change` by many rows equals one for each row, if no anchor both opens and closes in it.

        `Replay.add` may then collect rows.
        """
        return False

    def waiting(self, sampler: Any) -> tuple[jax.Array, jax.Array] | None:
        """Return of each lane how many anchors must not be overwritten, int32[E], and the slot of the oldest, int32[E].

        They are the newest of the lane. Rows that would overwrite them are refused. None: all may be.
        """
        return None

    def rebuild(self, sampler: Any, geometry: Geometry, token: jax.Array) -> Any:
        """Return the same priorities under the current numbers (`Buffer.set(..., rebuild=True)`)."""
        raise TypeError(f"Buffer.set: {self!r} has no `rebuild`; see fbuf.parts.Sampler.")

    def priority(self, sampler: Any, slot: jax.Array) -> jax.Array | None:
        """Return |p| float32[...] of the anchors in slots int32[...], negative where unknown; other slots are ignored.

        For `Buffer.priorities`. None: there are no priorities.
        """
        return None

    def inspect(self, sampler: Any, anchors: AnchorSet) -> Inspected | None:
        """Return statistics of every slot; entries that are not anchors are ignored. None: unknown. O(C)."""
        return None

    def mass(self, sampler: Any, anchors: AnchorSet) -> Mass:
        """Return the `Mass` of all anchors, in proportion to which members of a whole are drawn from; see `whole`."""
        raise NotImplementedError(f"{type(self).__name__}: write def mass; see fbuf.parts.Sampler.")

    def position(self, sampler: Any, wanted: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return epochs begun, whether a draw of `wanted` int32[] begins one, and the anchors of this one and the next."""
        raise NotImplementedError(f"{type(self).__name__}: write def position; see fbuf.parts.Sampler.")

    # What becomes of the state in a larger buffer and in checkpoints; all eager.

    def grown(self, sampler: Any, fresh: Any, geometry: Geometry, capacity: int) -> Any:
        """Return the state, same slots, for a larger buffer, whose empty state is `fresh`; `capacity` is the one before."""
        return jax.tree.map(lengthened, sampler, fresh)

    @property
    def moves(self) -> bool:
        """Whether rows of the state can move to other slots, by `moved`, and to other shards."""
        return False

    def moved(self, sampler: Any, remap: SlotRemap) -> Any:
        """Return the state whose rows moved to other slots (`fbuf.load(resize=)`)."""
        raise NotImplementedError(f"{type(self).__name__}: write def moved; see fbuf.parts.Sampler.")

    @property
    def by_arrival(self) -> bool:
        """Whether the state depends on the order in which all rows arrived; where that changes, it is made again from rows."""
        return False

    def joined(self, parts: Sequence[Any], fresh: Any, join: SlotJoin) -> Any:
        """Return the state of a shard whose rows come from those of others; `fresh` is that of an empty one.

        None: queues, pools, and arrays by slot or by lane are joined as such, and the rest is that of the first part.
        """
        return None

    def saved(self, sampler: Any, capacity: int) -> Any:
        """Return what is saved of a state, arrays or the first rows of them (`Prefix`): all that `loaded` does not compute."""
        return sampler

    def loaded(self, saved: Any, capacity: int) -> Any:
        """Return the state of which `saved` is left."""
        return saved

    # Of a sampler that keeps part of its state on the host; `init` then returns a state without a store, for shapes.

    @property
    def on_host(self) -> bool:
        """Whether part of the state is on the host."""
        return False

    def open(self, call: str, sampler: Any, geometry: Geometry) -> Any:
        """Return the state of `init` over a new store. Eager: raise under a trace, naming `call`."""
        return sampler

    def plan_host(self, geometry: Geometry) -> int:
        """Return the largest size of the store in bytes."""
        return 0

    def host_bytes(self, sampler: Any) -> int:
        """Return the present size of the store in bytes. Eager."""
        return 0

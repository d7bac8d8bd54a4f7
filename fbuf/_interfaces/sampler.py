"""Protocol of samplers: how anchors (slots that can be sampled) are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from fbuf._core.component import state
from fbuf._core.pytree import Leaves
from fbuf._core.slots import Geometry, Ranges, Ring

# Types of class attributes that have no annotation: type checkers hold that a `ClassVar` is no property of a Protocol.
NO_NUMBERS: Mapping[str, Any] = {}


@state
class Draw:
    """The anchors that a sampler drew."""

    slot: jax.Array  # int32[B]; C where mask is False
    probability: jax.Array  # float32[B], of this anchor in one draw; 0 where mask is False
    weight: jax.Array  # float32[B], importance weight; 0 where mask is False
    mask: jax.Array  # bool[B]; False where there was no anchor to draw
    last: Any = None  # bool[], whether an epoch ends with this draw; None: there are no epochs


@state(name="fbuf.Change")
class EligibilityUpdate:
    """The anchors that one write closed, and then opened."""

    open_slot: jax.Array  # int32[A, E], slots in time order
    open_mask: jax.Array  # bool[A, E]
    open_episode: jax.Array | None  # uint32[A, E], number of the lane's episode; None unless `Sampler.by_episode`
    open_stamp: jax.Array | None  # int32[A, E], values of the leaf `Sampler.stamp`; None without a stamp
    newest_stamp: jax.Array | None  # int32[], largest stamp of all rows written, anchors or not; None without a stamp
    priority: jax.Array  # float32[A, E]; negative where none was given; a NumPy array if no row of this write has one
    close_slot: jax.Array  # int32[K, E]; K = 0 where every row is an anchor and a closed slot always opens again
    close_mask: jax.Array  # bool[K, E]


@state(name="fbuf.Starts")
class EpisodeStarts:
    """Where the episodes of each lane begin, oldest first, for starts that are still in the buffer."""

    position: jax.Array  # int32[C], of first rows in the lane's ring; entry n of lane e is at n * E + e
    head: jax.Array  # int32[E], entry of the oldest
    count: jax.Array  # int32[E]

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "position", self.position, 0, geometry.length - 1
        yield "head", self.head, 0, geometry.length - 1
        yield "count", self.count, 0, geometry.length


class EligibleSet(NamedTuple):
    """The anchors, as samplers see them when they draw and views when they look at neighbouring rows."""

    geometry: Geometry
    ring: Ring
    available: jax.Array  # int32[E], anchors of each lane
    flags: jax.Array | None  # uint8[C], bits of `fbuf._indexing.anchors`; None where every row is an anchor
    starts: EpisodeStarts | None = None  # None unless `EligibilityRule.spans`
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


@runtime_checkable
class Sampler(Protocol):
    """Choose anchors. `dense` says that every row held is an anchor.

    A sampler without priorities needs one method: derive it from `fbuf.parts.NthSampler`. Any other implements all of
    these and is decorated with `fbuf.parts.component`.

    Optional members, read with `getattr`:
      by_rank: bool, False. Whether anchors are found through `fbuf._indexing.anchor_log.at`. Where rows never change, `init`
        is then called with `dense=True`, and no log is kept.
      in_order: bool, False. Whether rows must be replaced oldest first; refused with a writer that replaces any row.
      most: Mapping[str, float], {}. The largest value of a number or option, by name.
      draw_some(sampler, key, batch_size, wanted, eligible, options, token): `draw` of `wanted` int32[] anchors, 0 to B, in
        the first entries of B; `mask` is False in the others. Needed in a `Mixture` if draws change the state.
      waiting(sampler): Of each lane, how many anchors must not be overwritten, int32[E], the newest of the lane, and the slot
        of the oldest of these; None: all may be. Rows that would overwrite them are refused.
      rebuild(sampler, geometry, token): The same priorities under the current numbers (`Buffer.rebuild`).
      rebuilds: str, "". How to construct a sampler that can `rebuild`; empty if this one can.
      priority(sampler, slot): |p| float32[...] of the anchors in slots int32[...], negative where unknown; other slots are
        ignored. For `Buffer.priorities`.
      inspect(sampler, eligible): `Inspected`, of every slot; entries that are not anchors are ignored. O(C).
      since: str, "". Describes the event since which `Inspected.draws` counts.
      mass(sampler, eligible): `Mass` of all anchors. Needed in `fbuf.sharded`, where a shard draws in proportion to it.
      covers: bool, False. Whether anchors are drawn equally often and `draw_some` limits them; needs no `mass`.
      row_by_row(dense): bool, False. Whether one `change` by many rows equals one for each row, if no anchor both opens and
        closes in it. `Replay.add` may then collect rows.
    """

    def init(self, geometry: Geometry, dense: bool) -> Any:
        """Return the state for an empty buffer."""

    def change(self, sampler: Any, change: EligibilityUpdate, geometry: Geometry, token: jax.Array) -> Any:
        """Update the state after a write."""

    def draw(
        self, sampler: Any, key: jax.Array, batch_size: int, eligible: EligibleSet, options: Leaves, token: jax.Array
    ) -> tuple[Any, Draw]:
        """Draw `B` anchors; return the state and the draw.

        `options` are numbers of this call (`beta`). Add `token` to the indices of every write.
        """

    def update(self, sampler: Any, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array) -> Any:
        """Set priorities from finite errors float32[B]. Slot C is skipped; the last of duplicates wins."""

    def set(self, sampler: Any, **numbers: Any) -> Any:
        """Replace annealed numbers."""

    def clear(self, sampler: Any, geometry: Geometry, dense: bool) -> Any:
        """Return the state without anchors; annealed numbers stay."""

    def available(self, sampler: Any, count: jax.Array) -> jax.Array:
        """Return int32[], how many of the `count` int32[] anchors can be drawn, from scalars of the state."""

    def stats(self, sampler: Any) -> dict[str, jax.Array]:
        """Return scalars to log, from scalars of the state."""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """Dtype of each number of `set`, float32 or int32, by name."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Dtype of each option of `draw`, by name."""

    @property
    def prioritized(self) -> bool:
        """Whether anchors have priorities."""

    @property
    def by_episode(self) -> bool:
        """Whether `change` needs `EligibilityUpdate.open_episode`."""

    @property
    def stamp(self) -> str | None:
        """Name of the integer leaf that `EligibilityUpdate.open_stamp` holds."""


@runtime_checkable
class HostSampler(Protocol):
    """Optional methods of a sampler that keeps part of its state on the host; used only where `on_host`.

    `init` then returns a state without a store, for shapes.
    """

    @property
    def on_host(self) -> bool:
        """Whether part of the state is on the host."""

    def open(self, call: str, sampler: Any, geometry: Geometry) -> Any:
        """Return the state of `init` over a new store. Eager: raise under a trace, naming `call`."""

    def with_capacity(self, sampler: Any, geometry: Geometry) -> Any:
        """Return the state, same slots, over a new and larger store. Eager."""

    def plan_host(self, geometry: Geometry) -> int:
        """Return the largest size of the store in bytes."""

    def host_bytes(self, sampler: Any) -> int:
        """Return the present size of the store in bytes. Eager."""


def draws_once(sampler: Any) -> bool:
    """Return whether a batch holds each anchor at most once, so that the draws depend on one another."""
    return getattr(sampler, "covers", False) or not getattr(sampler, "replace", True)


def host_sampler(sampler: Any) -> HostSampler | None:
    """Return the sampler if it keeps part of its state on the host."""
    return sampler if isinstance(sampler, HostSampler) and sampler.on_host else None

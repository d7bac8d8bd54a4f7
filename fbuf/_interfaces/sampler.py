"""Protocols of samplers: how anchors (slots that can be sampled) are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from fbuf._core.component import state
from fbuf._core.geometry import Geometry, Ring

# What a part says of itself once for all is a class attribute without annotation: pyright finds that a `ClassVar` is no
# property of a Protocol. These have types that a bare `{}` and a `None` that a subclass replaces have not.
NO_NUMBERS: Mapping[str, Any] = {}


NO_STAMP: str | None = None


@state
class Draw:
    """What a sampler hands to the buffer."""

    slot: jax.Array  # int32[B], C where mask is False
    probability: jax.Array  # float32[B], chance of this anchor in one draw; 0 where mask is False
    weight: jax.Array  # float32[B], importance weight; 0 where mask is False
    mask: jax.Array  # bool[B], False where there was nothing to draw


@state(name="fbuf.Change")
class EligibilityUpdate:
    """Which anchors one write opened and closed, in the order it happened: closings first."""

    open_slot: jax.Array  # int32[A, E], slots in time order
    open_mask: jax.Array  # bool[A, E]
    open_episode: jax.Array | None  # uint32[A, E], counts the lane's episodes; None unless the sampler asks for it
    open_stamp: jax.Array | None  # int32[A, E], what the leaf `Sampler.stamp` said; None unless the sampler asks for it
    newest_stamp: jax.Array | None  # int32[], the largest of all rows written, anchors or not; None as above
    priority: jax.Array  # float32[A, E], negative: none was given
    close_slot: jax.Array  # int32[K, E]; K = 0 where every row is an anchor and none is given up: what closes reopens
    close_mask: jax.Array  # bool[K, E]


@state(name="fbuf.Starts")
class EpisodeStarts:
    """Where the episodes of each lane begin, oldest first, as far as those rows are held."""

    position: jax.Array  # int32[C], of first rows in the lane's ring; entry n of lane e in n * E + e
    head: jax.Array  # int32[E], entry of the oldest
    count: jax.Array  # int32[E]


class EligibleSet(NamedTuple):
    """What a sampler may know of the anchors when it draws, and a view when it looks around them."""

    geometry: Geometry
    ring: Ring
    available: jax.Array  # int32[E], anchors of each lane
    flags: jax.Array | None  # uint8[C], bits of `fbuf._indexing.anchors`; None where every row held is an anchor
    starts: EpisodeStarts | None = None  # None unless the view's rule asks for them
    # int32[blocks], open rows before each block of flags (`fbuf._indexing.anchor_log`); None where samplers keep logs, or
    # need none
    before: jax.Array | None = None


@runtime_checkable
class Sampler(Protocol):
    """Chooses anchors. `dense` says that every row held is an anchor."""

    def init(self, geometry: Geometry, dense: bool) -> Any:
        """The state of a sampler of an empty buffer."""

    def change(self, sampler: Any, change: EligibilityUpdate, geometry: Geometry, token: jax.Array) -> Any:
        """Follows a write."""

    def draw(
        self,
        sampler: Any,
        key: jax.Array,
        batch_size: int,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[Any, Draw]:
        """Draws `B` anchors; also the sampler's state after it, for those that remember what they drew.

        `options` are numbers given to this call (`beta`); indices of writes add `token`.
        """

    def update(self, sampler: Any, slot: jax.Array, error: jax.Array, geometry: Geometry, token: jax.Array) -> Any:
        """Sets priorities from errors float32[B], all finite; slot C is skipped, duplicates: the last wins."""

    def set(self, sampler: Any, **numbers: Any) -> Any:
        """Replaces numbers a user anneals."""

    def clear(self, sampler: Any, geometry: Geometry, dense: bool) -> Any:
        """The state after all rows are forgotten; annealed numbers stay."""

    def available(self, sampler: Any, count: jax.Array) -> jax.Array:
        """int32[], how many of the `count` int32[] anchors may be drawn; from scalars of the state only."""

    def stats(self, sampler: Any) -> dict[str, jax.Array]:
        """Scalars worth logging, from scalars of the state only."""

    @property
    def numbers(self) -> Mapping[str, Any]:
        """Names `set` takes, and the dtype of each: float32 or int32."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Names `draw` takes, for one call, and the dtype of each."""

    @property
    def prioritized(self) -> bool:
        """Whether `update` and priorities make sense."""

    @property
    def by_episode(self) -> bool:
        """Whether it wants to know which anchors belong to one episode (`EligibilityUpdate.open_episode`)."""

    @property
    def stamp(self) -> str | None:
        """Name of an integer leaf it wants to know of each anchor (`EligibilityUpdate.open_stamp`)."""


@runtime_checkable
class Joint(Protocol):
    """A state of several buffers, which counts what it refused itself."""

    @property
    def buffers(self) -> Mapping[str, Any]:
        """Their states, by name."""

    @property
    def refused(self) -> Mapping[str, jax.Array]:
        """uint32[] each, by names of `fbuf._buffer.state.COUNTERS`."""


@runtime_checkable
class Limited(Protocol):
    """What a sampler has besides if what it draws depends on how many it draws, or is remembered: it can be told how many.

    A sampler without it draws each anchor by the same chance, however many there are.
    """

    def draw_some(
        self,
        sampler: Any,
        key: jax.Array,
        batch_size: int,
        wanted: jax.Array,
        eligible: EligibleSet,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[Any, Draw]:
        """What `draw` of `wanted` int32[] anchors is, from 0 to B: in the first places of B; the others have `mask` False."""


@runtime_checkable
class ByRank(Protocol):
    """What a sampler has besides if it finds its anchors through `fbuf._indexing.anchor_log.at`, and so without a log where
    rows stay.

    `init` is then told that every row is an anchor, where it need not keep one.
    """

    @property
    def by_rank(self) -> bool:
        """Whether it does."""


@runtime_checkable
class InOrder(Protocol):
    """What a sampler has besides if it may count on rows being replaced oldest first."""

    @property
    def in_order(self) -> bool:
        """Whether it does; it is then refused beside a writer that replaces any row."""


@runtime_checkable
class HostKept(Protocol):
    """What a sampler has besides if it may keep part of its state on the host; all but `on_host` matters only if it does.

    `init` then gives a state that names no store, for shapes.
    """

    @property
    def on_host(self) -> bool:
        """Whether it does."""

    def open(self, call: str, sampler: Any, geometry: Geometry) -> Any:
        """What `init` gave, over a store of its own. Eager; raises under a trace, naming `call`."""

    def with_capacity(self, sampler: Any, geometry: Geometry) -> Any:
        """The same in the same slots over a larger store of its own. Eager."""

    def plan_host(self, geometry: Geometry) -> int:
        """Bytes that the store may come to."""

    def host_bytes(self, sampler: Any) -> int:
        """Bytes that it has. Eager."""


def host_kept(sampler: Any) -> HostKept | None:
    """The sampler, if it keeps part of its state on the host."""
    return sampler if isinstance(sampler, HostKept) and sampler.on_host else None


@runtime_checkable
class Bounded(Protocol):
    """What a sampler has besides if some of its numbers have a largest value."""

    @property
    def most(self) -> Mapping[str, float]:
        """By name, of `numbers` and `options`."""


@runtime_checkable
class Rebuilding(Protocol):
    """What a sampler has besides if it keeps what numbers made of priorities, and can make it anew."""

    @property
    def rebuilds(self) -> str:
        """Empty if it can; else what to write so that it could."""

    def rebuild(self, sampler: Any, geometry: Geometry, token: jax.Array) -> Any:
        """The same priorities by the numbers of now."""


class Inspected(NamedTuple):
    """What a sampler says of every slot, for `Buffer.summary`."""

    probability: jax.Array | None  # float32[C], chance in the next draw; None: all anchors alike
    priority: jax.Array | None = (
        None  # float32[C], |p| of anchors, negative where it cannot be told; None: there are none
    )
    draws: jax.Array | None = (
        None  # int32[C], how often each anchor was drawn since `Inspecting.since`; None: not known
    )


@runtime_checkable
class Inspecting(Protocol):
    """What a sampler has besides if it can say how likely each anchor is. O(C); nothing changes."""

    @property
    def since(self) -> str:
        """What its `draws` are counted from, in words; empty where it counts none."""

    def to_host(self, sampler: Any) -> Any:
        """What `inspect` needs of the host: a pytree of arrays, or None. Eager."""

    def inspect(self, sampler: Any, eligible: EligibleSet, fetched: Any) -> Inspected:
        """What it says of each slot; of slots that are no anchors anything."""

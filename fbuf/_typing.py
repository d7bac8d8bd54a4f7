"""The words the parts of a buffer share: small arrays passed between them, and the Protocols they meet through.

A *slot* is a place for one row, int32 in [0, C). With E lanes (parallel environments) each lane owns a ring of L = C / E
rows, and row `position` of lane `e` lies in slot `position * E + e`; `C` stands for "no slot": a read there gives zeros, a
write there is dropped. An *anchor* is a slot that a draw may land on.

Parts never inherit and never import one another: a storage, sampler or view of your own is any frozen dataclass with the
methods named here, made static with `jax.tree_util.register_static`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from fbuf._config import component, state
from fbuf._tree import PyTree, Spec

S = TypeVar("S")

# What a part says of itself once for all is a class attribute without annotation: pyright finds that a `ClassVar` is no
# property of a Protocol. These have types that a bare `{}` and a `None` that a subclass replaces have not.
NO_NUMBERS: Mapping[str, Any] = {}
NO_STAMP: str | None = None


class Geometry(NamedTuple):
    """How slots are laid out. Static."""

    lanes: int  # E, parallel environments; 1 without lanes
    length: int  # L, rows a lane holds
    streams: bool = True  # rows replace the oldest of their lane; else any, and a lane is but a column of slots

    @property
    def capacity(self) -> int:
        """C, all slots."""
        return self.lanes * self.length


@state
class Ring:
    """Where each lane writes next. Counters of rows are kept as (cursor, lap), so nothing overflows after 2^32 rows."""

    cursor: jax.Array  # int32[E], position of the next row, in [0, L)
    size: jax.Array  # int32[E], rows held, in [0, L]
    # uint32[E], how often the lane came round (and was cleared), from 1; wraps, compared for equality only
    lap: jax.Array


class Placement(NamedTuple):
    """Where one write goes."""

    slot: jax.Array  # int32[N, E]; out of range and all different where nothing is written
    rank: jax.Array  # int32[N, E], place among the lane's rows of this write
    rows: jax.Array  # int32[E], rows of this write per lane
    ring: Ring  # the rings afterwards


@state
class Draw:
    """What a sampler hands to the buffer."""

    slot: jax.Array  # int32[B], C where mask is False
    probability: jax.Array  # float32[B], chance of this anchor in one draw; 0 where mask is False
    weight: jax.Array  # float32[B], importance weight; 0 where mask is False
    mask: jax.Array  # bool[B], False where there was nothing to draw


@component
class Rule:
    """Which rows a view can draw, as far as `fbuf._anchors` must know. Two views with one rule can share a state.

    Attributes:
      kind: What the view adds to this in `decide` or `opens`, in a word.
      back: Rows behind an anchor that must still be held, unless an episode began after them.
      ahead: Rows ahead of an anchor that decide whether it can be drawn.
      prompt: Each row that arrives opens one anchor at most, which `Prompt.opens` names; if not, `Deciding.decide` looks at the
        last `ahead` rows again with every write.
      stride: Anchors of an episode are so many rows apart.
      crosses: Windows run on across the ends of episodes.
      reset_rows: The row after an episode's end belongs to it (Gymnasium's next-step autoreset).
      cut_ends: The last row of a truncated episode can be drawn.
      window: T, rows of a batch's windows `[B, T, ...]`; 0: it has none.
      spans: The view asks where episodes begin and end (`Population.starts`).
      ends: Leaves that end an episode, and `terminated` the one that says it did so for good; the buffer fills them in.
    """

    kind: str = "row"
    back: int = 0
    ahead: int = 0
    prompt: bool = True
    stride: int = 1
    crosses: bool = False
    reset_rows: bool = False
    cut_ends: bool = True
    window: int = 0
    spans: bool = False
    ends: tuple[str, ...] = ()
    terminated: str | None = None

    @property
    def rows(self) -> int:
        """Rows of a lane that one anchor needs."""
        return 1 + self.back + self.ahead


@state
class Change:
    """Which anchors one write opened and closed, in the order it happened: closings first."""

    open_slot: jax.Array  # int32[A, E], slots in time order
    open_mask: jax.Array  # bool[A, E]
    open_episode: jax.Array | None  # uint32[A, E], counts the lane's episodes; None unless the sampler asks for it
    open_stamp: jax.Array | None  # int32[A, E], what the leaf `Sampler.stamp` said; None unless the sampler asks for it
    newest_stamp: jax.Array | None  # int32[], the largest of all rows written, anchors or not; None as above
    priority: jax.Array  # float32[A, E], negative: none was given
    close_slot: jax.Array  # int32[K, E]; K = 0 where every row is an anchor and none is given up: what closes reopens
    close_mask: jax.Array  # bool[K, E]


class Read(NamedTuple):
    """One gather a view asks for: leaf `name` at `slot`; zeros where the slot is C."""

    name: str
    slot: Any  # int32[B, ...]; None in `View.assemble` of a batch that was drawn ahead, where only names are left
    # int32[B, U], slots of overlapping reads of this leaf: slot[b] = pool[b, start[b]:][:T]
    pool: jax.Array | None = None
    start: jax.Array | None = None  # int32[B]; a storage for which rows are dear reads the pool once


@state
class Starts:
    """Where the episodes of each lane begin, oldest first, as far as those rows are held."""

    position: jax.Array  # int32[C], of first rows in the lane's ring; entry n of lane e in n * E + e
    head: jax.Array  # int32[E], entry of the oldest
    count: jax.Array  # int32[E]


class Population(NamedTuple):
    """What a sampler may know of the anchors when it draws, and a view when it looks around them."""

    geometry: Geometry
    ring: Ring
    available: jax.Array  # int32[E], anchors of each lane
    flags: jax.Array | None  # uint8[C], bits of `fbuf._anchors`; None where every row held is an anchor
    starts: Starts | None = None  # None unless the view's rule asks for them
    # int32[blocks], open rows before each block of flags (`fbuf._openrows`); None where samplers keep logs, or need none
    before: jax.Array | None = None


@runtime_checkable
class ReadOnly(Protocol):
    """What a storage and a writer have besides if rows are there from the beginning and stay: both, or neither."""

    def refuse(self, call: str) -> NoReturn:
        """Raises TypeError for a verb that would change rows."""


@runtime_checkable
class Writer(Protocol):
    """Says which slots new rows take: a `Streaming` or a `Scattering`."""

    @property
    def streams(self) -> bool:
        """Whether rows replace the oldest of their lane, so that neighbours in time are neighbours in the buffer."""


@runtime_checkable
class Streaming(Protocol):
    """What a writer has besides if it `streams`: rings, one a lane."""

    def init(self, geometry: Geometry) -> Ring:
        """The rings of an empty buffer."""

    def place(self, ring: Ring, geometry: Geometry, num: int, keep: jax.Array | None, skipped: int) -> Placement:
        """Slots for `num` rows a lane, those where `keep` bool[N, E]; `skipped` older ones are not kept at all."""

    def clear(self, ring: Ring) -> Ring:
        """Empty, and every index handed out so far is stale."""

    def generation(self, ring: Ring, geometry: Geometry, slot: jax.Array) -> jax.Array:
        """uint32, tells the rows apart that lie in a slot one after another; 0 where none does."""

    def resume(self, geometry: Geometry, count: np.ndarray) -> Ring:
        """The rings after int64[E] rows, any number of them, and no `clear`."""


@runtime_checkable
class Scattering(Protocol):
    """What a writer has besides if it does not: it names a slot for every row. What it remembers is a pytree of arrays.

    Rows come step by step, and of one step lane by lane; any of them may take any slot in [0, C). Lanes are no more than that:
    rows that come side by side.
    """

    def init(self, geometry: Geometry, spec: Spec) -> Any:
        """What it remembers of an empty buffer; raises if rows lack what it looks at."""

    def choose(
        self, own: Any, geometry: Geometry, held: jax.Array, leaves: Mapping[str, jax.Array], keep: jax.Array
    ) -> tuple[jax.Array, Any]:
        """Slots int32[N, E] for rows with leaves `[N, E, ...]`, those where `keep`; and what it remembers then.

        A row replaces the one in its slot; of several the last. It is not kept where its slot is out of range. Slots 0 to
        `held` int32[] - 1 hold rows; the others are filled in this order, and a row that would leave one before it empty is
        refused and counted.
        """


@runtime_checkable
class Reporting(Protocol):
    """What a scattering writer has besides if it remembers something worth logging."""

    def stats(self, own: Any) -> dict[str, jax.Array]:
        """Scalars, from scalars of what it remembers only."""


@runtime_checkable
class Forgetting(Protocol):
    """What a scattering writer has besides if what it remembers outlives the rows in part; else `clear` calls its `init`."""

    def clear(self, own: Any, geometry: Geometry, spec: Spec) -> Any:
        """What it remembers after all rows are forgotten."""


@runtime_checkable
class Storage(Protocol):
    """Holds rows by slot. `spec` maps each leaf's name to the shape and dtype of one row."""

    @property
    def masks_expired(self) -> bool:
        """Whether a row that was dropped is masked (zeros) rather than an error."""

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        """Names of the leaves kept on the host."""

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> Any:
        """Empty rows."""

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> Any:
        """What `init` gives, as `jax.ShapeDtypeStruct`s, for `plan`."""

    def plan_host(
        self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None, ratio: float | None
    ) -> tuple[int, str, int]:
        """Host bytes of a full buffer, how they are known, and the bytes if nothing compressed."""

    def spec(self, rows: Any) -> tuple[Spec, Any]:
        """Spec and treedef of one row."""

    def write(
        self,
        rows: Any,
        slot: jax.Array,
        leaves: Mapping[str, jax.Array],
        keep: jax.Array | None,
        token: jax.Array,
    ) -> tuple[Any, jax.Array | None]:
        """Writes leaves `[N, E, ...]` to slots int32[N, E]; nothing where `keep` is False. No slot twice.

        Also how many rows it had no room for, uint32[], or None where there is always room.
        """

    def read(self, rows: Any, reads: Sequence[Read]) -> tuple[list[jax.Array], jax.Array | None]:
        """One array a read, zeros at slot C; and, where rows can expire, bool[B]: all of this draw's rows were there."""

    def update(
        self, rows: Any, slot: jax.Array, leaves: Mapping[str, jax.Array], token: jax.Array
    ) -> tuple[Any, jax.Array | None]:
        """Replaces some leaves `[B, ...]` of rows already there; slot C is skipped, no other slot comes twice.

        Also how many rows it had no room for, as `write`; those stay as they were.
        """

    def clear(self, rows: Any) -> Any:
        """Forgets every row."""

    def nbytes(self, rows: Any) -> dict[str, int]:
        """Bytes held now: `device`, `host`, `disk`. Eager."""

    def to_arrays(self, rows: Any) -> dict[str, Any]:
        """Everything needed to build these rows again, as plain arrays: those of the state as they are. Eager."""

    def from_arrays(self, arrays: Mapping[str, Any], geometry: Geometry, spec: Spec, structure: Any) -> Any:
        """The inverse of `to_arrays`, in any process. Eager."""


@runtime_checkable
class Requesting(Protocol):
    """What a storage has besides if a read can be begun ahead (`Buffer(prefetch=1)`); one that has not reads at once.

    `collect(rows, request(rows, hold(rows, reads)))` is `read(rows, reads)`, with or without `request`, whatever was
    written to the rows after `hold`.
    """

    def hold(self, rows: Any, reads: Sequence[Read]) -> Any:
        """A pytree of arrays: what the reads depend on that later writes may change. Starts nothing."""

    def request(self, rows: Any, held: Any) -> Any:
        """The same, after asking the host to begin; only a hint. Returns at once."""

    def collect(self, rows: Any, held: Any) -> tuple[list[jax.Array], jax.Array | None]:
        """What `read` returns; waits for what was begun."""

    def held_bytes(self, rows: Any, held: Any) -> int:
        """Host bytes taken by what is begun ahead, from shapes."""


@runtime_checkable
class Growable(Protocol):
    """What a storage has besides if its room for rows can run out, and be enlarged."""

    def crowded(self, rows: Any, more: jax.Array) -> jax.Array | None:
        """bool[], whether old rows are to be given up before `more` int32[] come; None: never."""

    def drop(self, rows: Any, slot: jax.Array, token: jax.Array) -> tuple[Any, jax.Array]:
        """Lets go of the rows in slots int32[A, E], before anything is written; slot C is skipped. Only where `crowded`."""

    def stats(self, rows: Any, held: jax.Array) -> dict[str, jax.Array]:
        """Scalars worth logging, from scalars of the state only; `held` int32[] rows are in the buffer."""

    def grow(self, rows: Any, blocks: Any = None) -> tuple[Any, Any]:
        """The storage and its rows with more room: by half, or as `blocks` says. Eager."""


@runtime_checkable
class Resumable(Protocol):
    """What a storage has besides if its rows can outlive the process."""

    def resume(self, geometry: Geometry, spec: Spec, structure: Any, verify: str) -> tuple[Any, np.ndarray, np.ndarray]:
        """The rows that lie at its path; int64[E], how many each lane ever had; int64[E], how many of these are held. Eager.

        Row `count` of a lane lies at position `count % L`, as if a `Ring` had written them all. `verify`: "full" or "lazy".
        """

    def flush(self, rows: Any) -> None:
        """Waits until every row is on the disk. Eager."""

    def plan_disk(
        self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None, ratio: float | None
    ) -> int:
        """Bytes on disk of a full buffer."""


@runtime_checkable
class Recording(Protocol):
    """What a storage has besides if rows hold what no array can: text, objects, leaves of any shape."""

    def describe(self, call: str, example: PyTree) -> tuple[PyTree, Any]:
        """The arrays of a row, as the state and views see it, and what else rows hold."""

    def open(self, geometry: Geometry, spec: Spec, structure: Any, leaves: Any) -> Any:
        """Empty rows that hold `leaves` besides. Eager."""

    def parse(self, call: str, rows: Any, given: PyTree, lead: tuple[int | None, ...], axes: str) -> Any:
        """Checked rows: `leaves` `[*lead, *item]` by name, and `values` that `put` must store first, or None."""

    def put(self, rows: Any, values: Any, shape: tuple[int, int], length: int, mask: Any, after: Any) -> np.ndarray:
        """Stores values; tickets uint32[N, E, 2]. Eager."""

    def split(self, rows: Any, data: Any) -> tuple[PyTree, Any]:
        """What a view made of the leaves: the user's part, and the tickets that `Sample.lazy` reads."""

    def deepen(self, rows: Any, geometry: Geometry) -> Any:
        """The same rows in the same slots with room for more. Eager."""


class Forecast(NamedTuple):
    """What the blocks of a full buffer will make of the tables they share."""

    blocks: int | None  # distinct blocks; None: nobody knows
    places: int  # for distinct blocks
    wanted: int | None  # places that would hold all rows with some to spare
    load: float | None  # of the fullest table, if every row were held: distinct blocks over places
    rows: int  # about how many rows will be held, at most C
    gives_way: str  # what happens to the others: "", "retired" or "refused"
    known: str  # how it is known


@runtime_checkable
class Forecasting(Protocol):
    """A storage whose room depends on what its rows hold."""

    def forecast(self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None) -> Forecast:
        """How far its tables will fill, from rows `[N, E, ...]`. Eager."""


@runtime_checkable
class Sampler(Protocol):
    """Chooses anchors. `dense` says that every row held is an anchor."""

    def init(self, geometry: Geometry, dense: bool) -> Any:
        """The state of a sampler of an empty buffer."""

    def change(self, sampler: Any, change: Change, geometry: Geometry, token: jax.Array) -> Any:
        """Follows a write."""

    def draw(
        self,
        sampler: Any,
        key: jax.Array,
        batch_size: int,
        population: Population,
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
        """Whether it wants to know which anchors belong to one episode (`Change.open_episode`)."""

    @property
    def stamp(self) -> str | None:
        """Name of an integer leaf it wants to know of each anchor (`Change.open_stamp`)."""


@runtime_checkable
class Joint(Protocol):
    """A state of several buffers, which counts what it refused itself."""

    @property
    def buffers(self) -> Mapping[str, Any]:
        """Their states, by name."""

    @property
    def refused(self) -> Mapping[str, jax.Array]:
        """uint32[] each, by names of `fbuf._state.COUNTERS`."""


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
        population: Population,
        options: Mapping[str, jax.Array],
        token: jax.Array,
    ) -> tuple[Any, Draw]:
        """What `draw` of `wanted` int32[] anchors is, from 0 to B: in the first places of B; the others have `mask` False."""


@runtime_checkable
class ByRank(Protocol):
    """What a sampler has besides if it finds its anchors through `fbuf._population.at`, and so without a log where rows stay.

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

    def deepen(self, sampler: Any, geometry: Geometry) -> Any:
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

    def fetch(self, sampler: Any) -> Any:
        """What `inspect` needs of the host: a pytree of arrays, or None. Eager."""

    def inspect(self, sampler: Any, population: Population, fetched: Any) -> Inspected:
        """What it says of each slot; of slots that are no anchors anything."""


class Held(NamedTuple):
    """Bytes of one leaf, by place."""

    device: int = 0
    host: int = 0
    disk: int = 0


@runtime_checkable
class Weighing(Protocol):
    """What a storage has besides if it can say how much each leaf takes."""

    def weigh(self, rows: Any) -> dict[str, Held]:
        """Bytes by leaf, at most what `nbytes` says in all: the rest is nobody's. Eager."""


class Window(NamedTuple):
    """What a view wants read for drawn anchors, and what it needs to remember until it is."""

    reads: tuple[Read, ...]
    context: Any


@runtime_checkable
class View(Protocol):
    """Says what a drawn anchor means: which rows around it, and what they become."""

    @property
    def rule(self) -> Rule:
        """Which rows can be drawn."""

    def episode_fields(self) -> tuple[tuple[str, ...], str | None]:
        """Leaves that end an episode, and the one among them that says it terminated."""

    def check(self, spec: Spec) -> None:
        """Raises if rows lack what the view reads."""

    def window(
        self,
        spec: Spec,
        population: Population,
        slot: jax.Array,
        mask: jax.Array,
        key: jax.Array,
    ) -> Window:
        """What to read for anchors int32[B]; `key` is for views that choose."""

    def assemble(self, spec: Spec, structure: PyTree, arrays: Sequence[jax.Array], window: Window) -> PyTree:
        """The batch, leaves `[B, ...]`."""


@runtime_checkable
class Prompt(Protocol):
    """What a view has besides if its rule is `prompt`."""

    def opens(self, step: jax.Array, flags: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which anchor each new row of uint8[N, E] opens: how many rows back int32[N, E], and whether any.

        `before` uint8[N, E] are the flags of the row before each. `step` int32[N, E] counts the rows of its episode before
        it (with `crosses`, all of the lane); beyond 2^29 only its remainder by `stride` is exact. The anchor's priority is
        that of the new row.
        """


@runtime_checkable
class Deciding(Protocol):
    """What a view has besides if its rule is not `prompt`."""

    def decide(
        self, flags: jax.Array, available: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Which rows of uint8[A, E] are settled by the first `available` int32[E] of them, and which of those are anchors.

        Also which of these rows brought an anchor's priority, int32[A, E]; None: the anchor itself. `step` int32[A, E] is
        that of `Prompt.opens`, exact for rows that were not settled before; where `stride` is 1 it means nothing.
        """


class Context(NamedTuple):
    """What a transform may know of the leaves it is given, `[N, E, item]`, `[B, item]`, or in windows `[B, T, item]`."""

    lead: int  # axes of leaves before those of a row's: 2, or 1 for a batch of single rows
    time: int | None  # which of these goes along time; None: none does
    writing: bool  # rows on their way in; else a batch on its way out
    mask: jax.Array  # bool[*lead], which rows are there; what is not is zeros, in batches before and after
    key: jax.Array | None = None  # where it is `keyed`
    memory: Any = None  # where it is `Remembering`: what it knows by now
    collapsed: frozenset[str] = frozenset()  # leaves `[B, F]` with one value a window, also where F is T

    @property
    def mapped(self) -> int:
        """Axes that count rows on their way in, or elements of a batch, each a row or a window."""
        return self.lead if self.writing else 1


@runtime_checkable
class Transform(Protocol):
    """Makes other rows of rows, or other batches of batches. Pure, of a pytree of arrays."""

    def apply(self, data: PyTree, context: Context) -> PyTree:
        """What becomes of `data`: any pytree with the same leading axes; at read, of a batch, with axis B at least."""


@runtime_checkable
class Keyed(Protocol):
    """What a transform has besides if it may want random numbers: then it is for batches only."""

    @property
    def keyed(self) -> bool:
        """Whether it does."""


@runtime_checkable
class Invertible(Protocol):
    """What a transform has besides if it can be undone."""

    def inverse(self) -> Transform:
        """What undoes it; raises in words where that cannot be. It is given the memory of the transform that it undoes."""


@runtime_checkable
class Remembering(Protocol):
    """What a transform has besides if it learns from the rows that are written, before it and at read.

    Where it stands in `on_write` these are the rows as they come to it, in `on_read` those that are stored.
    """

    def watches(self, spec: Spec) -> tuple[str, ...]:
        """Leaves of such rows that it learns from; raises if they lack one."""

    def init(self, spec: Spec) -> Any:
        """What it knows before the first row: a pytree of arrays."""

    def observe(self, memory: Any, leaves: Mapping[str, jax.Array], mask: jax.Array) -> Any:
        """What it knows after rows with leaves `[N, E, ...]`, those where `mask` bool[N, E]."""

    def stats(self, memory: Any) -> dict[str, jax.Array]:
        """Scalars worth logging, from small arrays only."""

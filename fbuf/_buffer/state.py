"""`BufferConfig`: the parts and sizes of a buffer. `BufferState`: everything that changes, as one pytree of arrays.

Functions that the methods of a buffer share take both: `(buffer, state, ...)`. `Buffer` adds the methods.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fbuf import writers
from fbuf._core import slots, text_table
from fbuf._core.component import component, state
from fbuf._core.control_flow import if_any, order_after_reads
from fbuf._core.dispatch import OnHost, Operation
from fbuf._core.pytree import Spec
from fbuf._core.row_format import RowFormat
from fbuf._core.sample import Index, Sample
from fbuf._core.slots import Geometry, Ranges, Ring, zero_unless
from fbuf._indexing import anchors as _anchors
from fbuf._indexing import scatter as _scatter
from fbuf._indexing.anchors import Anchors
from fbuf._indexing.scatter import Scatter
from fbuf._interfaces.sampler import AnchorSet, Sampler
from fbuf._interfaces.storage import Storage
from fbuf._interfaces.view import AnchorRule, View
from fbuf._interfaces.writer import Scattering, Streaming, Writer
from fbuf.samplers import Uniform
from fbuf.storages import Device
from fbuf.views import Row

P = ParamSpec("P")
R = TypeVar("R")
_EVERY_ROW = AnchorRule()


@dataclasses.dataclass(frozen=True)
class BufferConfig:
    """The fields of a `Buffer`, unchecked, and properties derived from them."""

    capacity: int
    storage: Storage = Device()
    sampler: Sampler = Uniform()
    view: View = Row()
    writer: Writer = writers.Ring()
    lanes: int | None = None
    episode_end: tuple[str, ...] = ()
    prefetch: int = 0
    batch_size: int | None = None
    on_write: Any = None  # kept as a Chain, or None
    on_read: Any = None

    @functools.cached_property
    def geometry(self) -> Geometry:
        """Lanes, and rows per lane."""
        lanes = self.lanes or 1
        return Geometry(lanes, self.capacity // lanes, self.writer.streams)

    @functools.cached_property
    def ends(self) -> tuple[str, ...]:
        """Leaves that end an episode."""
        return tuple(dict.fromkeys((*self.view.episode_fields()[0], *self.episode_end)))

    @functools.cached_property
    def rule(self) -> AnchorRule:
        """Which rows can be drawn: the view's rule, with the leaves that end episodes."""
        return dataclasses.replace(self.view.rule, ends=self.ends, terminated=self.view.episode_fields()[1])

    @functools.cached_property
    def dense(self) -> bool:
        """Whether every row held is an anchor."""
        return self.view.rule == _EVERY_ROW and not self.sampler.by_episode

    @property
    def counted(self) -> bool:
        """Whether the sampler counts anchors instead of logging them: rows never change, and not all are anchors."""
        return self.writer.read_only and self.sampler.by_rank and not self.dense


COUNTERS = (
    "refused_nonfinite",
    "refused_out_of_range",
    "refused_stale",
    "refused_closed",
    "empty_samples",
    "expired_rows",
    "refused_rows",
    "retired_rows",
    "draws_refused",
)
"""What is counted instead of raised: refused priorities and indices, draws from an empty buffer, expired rows, and rows that
did not fit. Those of `BY_DESIGN` are not errors: old rows evicted for new ones, and draws of rows that did not fit."""
BY_DESIGN = ("retired_rows", "draws_refused")


class Header(NamedTuple):
    """The small arrays of a state, which share one array between methods: each argument of a call costs a microsecond."""

    ring: Ring  # where each lane writes next; with a Scattering writer, how many rows are held
    counters: Array  # uint32[9], see `COUNTERS`
    token: Array  # int32[], always 0: orders reads before writes (`fbuf._core.control_flow`)

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "token", self.token, 0, 0

    def pack(self) -> Array:
        """Return int32[10 + 3 E]: token, counters, cursors, sizes and laps."""
        ring = self.ring
        parts = (self.token[..., None], self.counters, ring.cursor, ring.size, ring.lap)
        return jnp.concatenate([_as(part, jnp.int32) for part in parts], axis=-1)


def _as(words: Array, dtype: Any) -> Array:
    return words if words.dtype == dtype else lax.bitcast_convert_type(words, dtype)


def unpack(packed: Array) -> Header:
    """Return the arrays of `Header.pack`."""
    first = 1 + len(COUNTERS)
    lanes = (packed.shape[-1] - first) // 3

    def part(start: int, size: int, dtype: Any = jnp.int32) -> Array:
        return _as(lax.slice_in_dim(packed, start, start + size, axis=-1), dtype)

    ring = Ring(part(first, lanes), part(first + lanes, lanes), part(first + 2 * lanes, lanes, jnp.uint32))
    return Header(ring, part(1, len(COUNTERS), jnp.uint32), part(0, 1).reshape(packed.shape[:-1]))


def host_ring(header: Any) -> tuple[np.ndarray[Any, Any], ...]:
    """Return cursors, sizes and laps of one state as NumPy arrays, after waiting for it."""
    cursor, size, lap = np.array(header)[1 + len(COUNTERS) :].reshape(3, -1)
    return cursor, size, lap.view(np.uint32)


def host_header(packed: Array) -> Header:
    """Return the arrays of `Header.pack` of one state as NumPy arrays."""
    words: Any = np.asarray(packed)
    parts: Any = host_ring(words)
    return Header(Ring(*parts), words[1 : 1 + len(COUNTERS)].view(np.uint32), words[0])


@component
class ReadNames:
    """The leaf of each read of a view. Static."""

    names: tuple[str, ...]


@state
class Ahead:
    """The prefetched batch, which the next `sample` returns (`Buffer(prefetch=1)`)."""

    batch: Sample  # as it was drawn, without data; `mask` is False throughout if nothing is pending
    reads: ReadNames  # of the view
    context: Any
    held: Any  # of the storage: the rows, or what it needs to read them
    stale: Array  # uint32[], draws returned after their anchor was evicted
    reading: Any = None  # `fbuf._buffer.transforms.Reading` of the draw; None unless `on_read` needs it

    def ranges(self, geometry: Geometry) -> Ranges:
        yield "batch/index/slot", self.batch.index.slot, 0, geometry.capacity
        yield "batch/weight", self.batch.weight, 0, float(np.finfo(np.float32).max)

    def dropped(self) -> Ahead:
        """Return it without a pending batch."""
        nothing = dataclasses.replace(self.batch, mask=jnp.zeros_like(self.batch.mask))
        return dataclasses.replace(self, batch=nothing)


@state
class Transforms:
    """The memory of transforms by the names of their stages, as `transforms.apply` takes it."""

    given: RowFormat | None  # format of rows before `on_write`; None without `on_write`
    write: dict[str, Any]  # of `on_write`
    read: dict[str, Any]  # of `on_read`


@state
class BufferState:
    """Hold everything in a buffer that changes: a pytree of arrays.

    Its fields are private; read it with `stats`, `rows` and `get`.
    """

    rows: Any  # of the storage: for Device the rows themselves, leaves [C, ...]
    header: Any  # int32[10 + 3 E], see `Header`, which takes its place within a method
    anchors: Anchors | None  # which rows can be drawn; None if all can
    sampler: Any  # of the sampler: logs, priorities
    scatter: Scatter | None = None  # the row in each slot; None with a Streaming writer
    ahead: Ahead | None = None  # None without prefetch
    transforms: Transforms | None = None  # None without `on_write` and without memory

    @property
    def ring(self) -> Ring:
        """Where each lane writes next, and how many rows it holds."""
        return self._opened.ring

    @property
    def counters(self) -> Array:
        """uint32[9], see `COUNTERS`."""
        return self._opened.counters

    @property
    def token(self) -> Array:
        """int32[], always 0: orders reads before writes."""
        return self._opened.token

    @property
    def _opened(self) -> Header:
        return self.header if isinstance(self.header, Header) else unpack(self.header)

    @property
    def leading(self) -> tuple[int, ...]:
        """The axes along which states are stacked; () for one state."""
        packed = not isinstance(self.header, Header)
        return self.header.shape[:-1] if packed else self.header.token.shape

    def open(self) -> BufferState:
        """Return the state with its header unpacked."""
        return dataclasses.replace(self, header=self._opened)

    def pack(self) -> BufferState:
        """Return the state with its header packed."""
        return dataclasses.replace(self, header=self._opened.pack())

    def replace(self, **fields: Any) -> BufferState:
        """Return the state with some fields replaced, those of its header included."""
        header_fields = {name: fields.pop(name) for name in Header._fields if name in fields}
        if header_fields:
            header = self._opened._replace(**header_fields)
            fields["header"] = header if isinstance(self.header, Header) else header.pack()
        return dataclasses.replace(self, **fields)

    def __repr__(self) -> str:
        return text_table.as_text(self)

    def _repr_html_(self) -> str:
        return text_table.as_html(self)


def on_open(core: Callable[..., Any]) -> Callable[..., tuple[BufferState, Any]]:
    """Return a core that takes and returns packed states. An unchanged header stays the same array."""

    @functools.wraps(core)
    def on_packed(buffer: Any, state: BufferState, *args: Any, **options: Any) -> tuple[BufferState, Any]:
        opened = state.open()
        after, result = core(buffer, opened, *args, **options)
        pairs = zip(jax.tree.leaves(after.header), jax.tree.leaves(opened.header), strict=True)
        if all(new is old for new, old in pairs):
            return dataclasses.replace(after, header=state.header), result
        return after.pack(), result

    return on_packed


def operation(core: Callable[P, R]) -> Operation[P, R]:
    """Make the core of a method, a function of an opened state, the method's one jitted dispatch."""
    return Operation(core, on_open)


def raise_failed(state: BufferState, storage: Any, result: Any = None) -> None:
    """Raise OSError or StoreCorrupted, with `result`, if the storage failed to write rows; the state is whole.

    Wait for rows in files, and where a write failed for those of the other stores; inside jit do nothing.
    """
    if isinstance(state.rows, OnHost) and not isinstance(state.header, jax.core.Tracer):
        if storage.in_files or state.rows.owner.failed:
            jax.block_until_ready(state.header)
        try:
            jax.tree.leaves(state.rows)  # raises
        except (OSError, RuntimeError) as error:
            if result is not None:
                if isinstance(error, OSError):
                    error.strerror = f"{error.strerror} It is the `result` of this error: carry it on."
                error.result = result  # type: ignore[union-attr]
            raise


def row_format_of(state: BufferState) -> RowFormat | None:
    """Return the format of rows before `on_write`."""
    return None if state.transforms is None else state.transforms.given


def anchor_count(state: BufferState) -> Array:
    """Return int32[E], the anchors of each lane."""
    return state.ring.size if state.anchors is None else state.anchors.count


def empty_state(buffer: BufferConfig, rows: Any, row_format: RowFormat | None = None) -> BufferState:
    """Return the state of an empty buffer over `rows` of the storage; `row_format` is the format of rows before `on_write`."""
    geometry, writer, spec, dense = buffer.geometry, buffer.writer, buffer.storage.spec(rows)[0], buffer.dense
    scatter = None
    if not writer.streams:
        scatter = _scatter.init(scattering(buffer), geometry, spec)
    rings = slots.init_rings(geometry) if scatter is not None else streaming(buffer).init(geometry)
    return BufferState(
        rows=rows,
        header=Header(rings, jnp.zeros((len(COUNTERS),), jnp.uint32), jnp.zeros((), jnp.int32)).pack(),
        anchors=None if dense else _anchors.init(geometry, buffer.rule, buffer.sampler, spec, buffer.counted),
        sampler=buffer.sampler.init(geometry, dense or buffer.counted),
        scatter=scatter,
        transforms=_empty_transforms(buffer, spec, row_format),
    )


def _empty_transforms(buffer: BufferConfig, spec: Spec, was: RowFormat | None) -> Transforms | None:
    """Return the memory of transforms before the first row; `spec` is of stored rows."""
    write = {} if buffer.on_write is None or was is None else buffer.on_write.opened(was.example)[0]
    read = {} if buffer.on_read is None else buffer.on_read.init(spec)
    return Transforms(was, write, read) if was is not None or jax.tree.leaves(read) else None


def open_host_state(buffer: BufferConfig, call: str, sampler: Any) -> Any:
    """Return the sampler's state over a new store, if the sampler keeps part of it on the host. Eager."""
    return buffer.sampler.open(call, sampler, buffer.geometry) if buffer.sampler.on_host else sampler


def init_host_sampler(buffer: BufferConfig, call: str) -> Any:
    """Return the state, for an empty buffer, of a sampler with a store on the host; None for others. Eager."""
    if not buffer.sampler.on_host:
        return None
    return open_host_state(buffer, call, buffer.sampler.init(buffer.geometry, buffer.dense or buffer.counted))


def streaming(buffer: BufferConfig) -> Streaming:
    """Return the writer, which streams."""
    assert isinstance(buffer.writer, Streaming)
    return buffer.writer


def scattering(buffer: BufferConfig) -> Scattering:
    """Return the writer, which scatters."""
    assert isinstance(buffer.writer, Scattering)
    return buffer.writer


def generation_of(buffer: BufferConfig, state: BufferState, slot: Array) -> Array:
    """Return uint32, the generation of the row in each slot."""
    if state.scatter is not None:
        return _scatter.generation(state.scatter, slot)
    return streaming(buffer).generation(state.ring, buffer.geometry, slot)


def index_of(buffer: BufferConfig, state: BufferState, slot: Array) -> Index:
    """Return slots with their present generations."""
    return Index(slot, generation_of(buffer, state, slot))


def arrival_order(buffer: BufferConfig, state: BufferState) -> tuple[Array, Array]:
    """Return slots int32[L, E] in order of arrival, and which of them hold a row."""
    lanes, length, _ = buffer.geometry
    if state.scatter is not None:
        rank = jnp.arange(buffer.capacity, dtype=jnp.int32)
        slot, exists = _scatter.by_age(state.scatter), rank < _scatter.size(state.ring)
        return slot.reshape(length, lanes), exists.reshape(length, lanes)
    age = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[:, None], (length, lanes))
    return slots.by_age(state.ring, buffer.geometry, age), age < state.ring.size[None, :]


def ending(buffer: BufferConfig, leaves: dict[str, Array], shape: tuple[int, ...]) -> Array:
    """Return the flags END and TERMINATED of rows, uint8."""
    flags = jnp.zeros(shape, jnp.uint8)
    for name in buffer.ends:
        bits = _anchors.END | (_anchors.TERMINATED if name == buffer.view.episode_fields()[1] else 0)
        flags = flags | _anchors.bit(leaves[name].reshape(shape), bits)
    return flags


def ids_of(buffer: BufferConfig, leaves: dict[str, Array], newest: Array | None) -> Array | None:
    """Return the episode id of each row, [N, E] or [N, E, 2] like the `newest` [E] or [E, 2]; None if the view names none."""
    name = buffer.view.rule.episode
    if name is None or newest is None:
        return None
    ids = leaves[name]
    if ids.dtype.itemsize == 8:
        ids = lax.bitcast_convert_type(ids, jnp.uint32)
    return ids.reshape(-1, *newest.shape)


def stamp_of(buffer: BufferConfig, leaves: dict[str, Array], shape: tuple[int, ...]) -> Array | None:
    """Return int32, the stamp of each row; None if the sampler needs none."""
    name = buffer.sampler.stamp
    return None if name is None else leaves[name].reshape(shape).astype(jnp.int32)


def largest(stamp: Array | None, keep: Array | None) -> Array | None:
    """Return int32[], the largest stamp of all rows written; the smallest int32 if there are none."""
    if stamp is None:
        return None
    least = -(2**31)
    return jnp.max(stamp if keep is None else jnp.where(keep, stamp, jnp.int32(least)), initial=least)


def count_up(state: BufferState, **counts: Array) -> Array:
    """Return the counters of a state with some increased, by the names of `COUNTERS`."""
    counters = state.counters
    for name, number in counts.items():
        one = np.arange(len(COUNTERS)) == COUNTERS.index(name)
        counters = counters + jnp.asarray(one, jnp.uint32) * number.astype(jnp.uint32)  # compiles faster than `stack`
    return counters


def zero_masked(mask: Array, data: Any) -> Any:
    """Return data with zeros where `mask` is False; without cost if it is True throughout."""
    return if_any(~mask, lambda: jax.tree.map(lambda x: zero_unless(mask, x), data), data)


def classify_indices(buffer: BufferConfig, state: BufferState, index: Index) -> tuple[Array, Array, Array, Array]:
    """Return the token, and which indices are masked, in range, and fresh (their row is still there)."""
    capacity = jnp.int32(buffer.capacity)
    masked = (index.slot == capacity) & (index.generation == jnp.uint32(0))
    inside = (index.slot >= jnp.int32(0)) & (index.slot < capacity)
    token, now = state.token, generation_of(buffer, state, index.slot)
    if state.scatter is not None:
        token, now = order_after_reads(token, now)
    fresh = inside & (now == index.generation) & (now != jnp.uint32(0))
    return token, masked, inside, fresh


def is_anchor(state: BufferState, slot: Array, exists: Array) -> Array:
    """Return which of the slots are anchors; `exists` are those of a row, in [0, C)."""
    if state.anchors is None:
        return exists
    at = jnp.where(exists, slot, jnp.int32(0))
    return exists & _anchors.has(state.anchors.flags.at[at].get(mode="promise_in_bounds"), _anchors.ANCHOR)


def flat_index(index: Index, mask: Array | None, capacity: int) -> Index:
    """Return the index with one axis, and masked where `mask` is False."""
    if mask is not None:
        index = Index(
            jnp.where(mask, index.slot, jnp.int32(capacity)), jnp.where(mask, index.generation, jnp.uint32(0))
        )
    return Index(index.slot.reshape(-1), index.generation.reshape(-1))


def room_left(buffer: BufferConfig, state: BufferState) -> Array | None:
    """Return int32[E], rows that each lane can take before it loses one that a waiting or a later anchor needs.

    None: the sampler lets rows be overwritten (`Sampler.waiting`).
    """
    waiting = buffer.sampler.waiting(state.sampler)
    if waiting is None or buffer.writer.read_only:
        return None
    number, oldest = waiting
    lanes, length, _ = buffer.geometry
    since = slots.modulo(state.ring.cursor - jnp.int32(1) - oldest // jnp.int32(lanes), length) + jnp.int32(1)
    later = jnp.int32(0) if state.anchors is None else _anchors.undecided(state.anchors)
    needed = jnp.where(number > jnp.int32(0), since, later) + jnp.int32(buffer.view.rule.back)
    return jnp.int32(length) - jnp.minimum(needed, state.ring.size)


def anchor_set(buffer: BufferConfig, state: BufferState) -> AnchorSet:
    """Return the anchors, for samplers and views."""
    anchors = state.anchors
    if anchors is None:
        return AnchorSet(buffer.geometry, state.ring, anchor_count(state), None)
    return AnchorSet(buffer.geometry, state.ring, anchors.count, anchors.flags, anchors.starts, anchors.before)

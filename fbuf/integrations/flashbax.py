"""flashbax's buffers on fbuf's storages: `import fbuf.integrations.flashbax as fbx` replaces `import flashbax as fbx`.

Arguments, shapes and results are those of flashbax 0.1.3, which is not imported; `storage=` is new. For the same key uniform
buffers draw flashbax's batches. `state.buffer` and `state.state` are a `Buffer` and its state. What differs:

* `indices` is an `fbuf.Index`. `set_priorities` refuses and counts overwritten rows (one test of flashbax sets
  priorities of an empty draw), NaN and infinity. New windows have the largest priority; flashbax truncates its power.
* Prioritised buffers draw with flashbax's probabilities, but other rows for the same key, in random order.
* `state.experience` reads all rows each time; `sum_tree_state` and `state.replace` are missing.
* A full queue refuses rows; one with too few rows returns zeros. Lengths are not rounded to the period. `device` has no effect.
* With storages on the host `init` cannot be jitted, nor states be vmapped or pmapped.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fbuf import views
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, room_left
from fbuf._core.sample import Index
from fbuf._core.slots import Geometry, Ring
from fbuf._interfaces.storage import Storage
from fbuf.samplers import Consume, Prioritized
from fbuf.storages import Device

__all__ = [
    "make_flat_buffer",
    "make_item_buffer",
    "make_mixer",
    "make_prioritised_flat_buffer",
    "make_prioritised_item_buffer",
    "make_prioritised_trajectory_buffer",
    "make_trajectory_buffer",
    "make_trajectory_queue",
]

__dir__ = __all__.copy  # without the imports

_DEVICE = Device()
_Part = Callable[[Any], Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrajectoryBufferState:
    """The state of a buffer: a pytree."""

    state: BufferState
    buffer: Buffer = dataclasses.field(metadata={"static": True})

    @property
    def current_index(self) -> jax.Array:
        """int32[], where the next row of each lane is written."""
        return self.state.ring.cursor[..., 0]

    @property
    def is_full(self) -> jax.Array:
        """bool[], whether the next row replaces another."""
        return self.state.ring.size[..., 0] == jnp.int32(self.buffer.geometry.length)

    @property
    def experience(self) -> Any:
        """All rows in the order of their slots: leaves `[E, L, ...]`, zeros where nothing was written. Cost: O(C)."""
        slot = jnp.arange(self.buffer.capacity, dtype=jnp.int32).reshape(-1, self.buffer.geometry.lanes)
        return self.buffer.get(self.state, slot.T).data


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrajectoryQueueState(TrajectoryBufferState):
    """The state of a queue: a pytree."""

    @property
    def unread(self) -> jax.Array:
        """int32[], rows of each lane that wait."""
        free: Any = functools.partial(room_left, self.buffer)
        for _ in self.state.leading:
            free = jax.vmap(free)
        return jnp.int32(self.buffer.geometry.length) - free(self.state)[..., 0]

    write_index = TrajectoryBufferState.current_index

    @property
    def read_index(self) -> jax.Array:
        """int32[], where the oldest row that waits is."""
        return (self.write_index - self.unread) % jnp.int32(self.buffer.geometry.length)

    @property
    def is_full(self) -> jax.Array:
        """bool[], whether every row waits."""
        return self.unread == jnp.int32(self.buffer.geometry.length)


class ExperiencePair(NamedTuple):
    """Successive rows: leaves `[B, ...]`."""

    first: Any
    second: Any


class TrajectoryBufferSample(NamedTuple):
    """A batch."""

    experience: Any


class PrioritisedTrajectoryBufferSample(NamedTuple):
    """A batch of a prioritised buffer."""

    experience: Any
    indices: Index
    probabilities: jax.Array


@dataclasses.dataclass(frozen=True)
class TrajectoryBuffer:
    """The functions of a buffer."""

    init: Callable[..., Any]
    add: Callable[..., Any]
    sample: Callable[..., Any]
    can_sample: Callable[..., jax.Array]

    def replace(self, **functions: Callable[..., Any]) -> Any:
        """Return the buffer with other functions, such as jitted ones."""
        return dataclasses.replace(self, **functions)


@dataclasses.dataclass(frozen=True)
class PrioritisedTrajectoryBuffer(TrajectoryBuffer):
    """The functions of a prioritised buffer."""

    set_priorities: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class TrajectoryQueue(TrajectoryBuffer):
    """The functions of a queue."""

    can_add: Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Mixer:
    """The functions of a mixer."""

    sample: Callable[..., Any]
    can_sample: Callable[..., jax.Array]


def make_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
    *,
    storage: Storage = _DEVICE,
) -> TrajectoryBuffer:
    """Return a buffer of windows of successive rows: `add` takes `[E, N, ...]`, `sample` returns `[B, T, ...]`.

    Args:
      add_batch_size: E, lanes.
      sample_batch_size: B, windows of a batch.
      sample_sequence_length: T, rows of a window.
      period: Rows between the starts of windows, counted from the oldest row.
      min_length_time_axis: Rows of a lane before `can_sample`; at least T.
      max_size: Rows of all lanes; or `max_length_time_axis`: L, rows of a lane.
      storage: Where rows are kept, of `fbuf.storages`.

    Example:
      >>> import fbuf.integrations.flashbax as fbx, jax, jax.numpy as jnp
      >>> buffer = fbx.make_trajectory_buffer(2, 4, 3, period=1, min_length_time_axis=3, max_length_time_axis=100)
      >>> state = buffer.add(buffer.init({"t": 0}), {"t": jnp.arange(10).reshape(2, 5)})
      >>> buffer.sample(state, jax.random.key(0)).experience["t"].shape
      (4, 3)
    """
    length = _length(max_size, max_length_time_axis, add_batch_size)
    window = (sample_batch_size, sample_sequence_length, period)
    return _make(length, add_batch_size, window, min_length_time_axis, storage, axes=2)


def make_prioritised_trajectory_buffer(
    add_batch_size: int,
    sample_batch_size: int,
    sample_sequence_length: int,
    period: int,
    min_length_time_axis: int,
    max_size: int | None = None,
    max_length_time_axis: int | None = None,
    priority_exponent: float = 0.6,
    device: str = "cpu",
    *,
    storage: Storage = _DEVICE,
) -> PrioritisedTrajectoryBuffer:
    """Return a prioritised `make_trajectory_buffer`; the period counts from the first row ever added.

    Args:
      priority_exponent: Windows are drawn in proportion to this power of their priorities. New ones have the largest so far.

    Example:
      >>> import fbuf.integrations.flashbax as fbx, jax, jax.numpy as jnp
      >>> buffer = fbx.make_prioritised_trajectory_buffer(1, 4, 2, 1, 2, max_length_time_axis=100)
      >>> state = buffer.add(buffer.init({"t": 0}), {"t": jnp.arange(5)[None]})
      >>> batch = buffer.sample(state, jax.random.key(0))
      >>> batch.probabilities.tolist()
      [0.25, 0.25, 0.25, 0.25]
      >>> state = buffer.set_priorities(state, batch.indices, jnp.ones(4))
    """
    length = _length(max_size, max_length_time_axis, add_batch_size)
    window = (sample_batch_size, sample_sequence_length, period)
    return _make(length, add_batch_size, window, min_length_time_axis, storage, axes=2, exponent=priority_exponent)


def make_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
    *,
    storage: Storage = _DEVICE,
) -> TrajectoryBuffer:
    """Return a buffer of pairs of successive rows, `experience.first` and `experience.second`.

    Args:
      max_length: Rows of all lanes.
      min_length: Rows of all lanes before `can_sample`.
      sample_batch_size: B, pairs of a batch.
      add_sequences: `add` takes several rows of a lane: `[N, ...]`, with lanes `[E, N, ...]`.
      add_batch_size: E, lanes; None: one, without an axis.
      storage: Where rows are kept, of `fbuf.storages`.

    Example:
      >>> import fbuf.integrations.flashbax as fbx, jax
      >>> buffer = fbx.make_flat_buffer(max_length=100, min_length=1, sample_batch_size=4)
      >>> state = buffer.init({"t": 0})
      >>> for t in range(3):
      ...     state = buffer.add(state, {"t": t})
      >>> pair = buffer.sample(state, jax.random.key(0)).experience
      >>> (pair.second["t"] - pair.first["t"]).tolist()
      [1, 1, 1, 1]
    """
    return _flat(max_length, min_length, sample_batch_size, add_sequences, add_batch_size, storage)


def make_prioritised_flat_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batch_size: int | None = None,
    priority_exponent: float = 0.6,
    device: str = "cpu",
    *,
    storage: Storage = _DEVICE,
) -> PrioritisedTrajectoryBuffer:
    """Return a prioritised `make_flat_buffer`; see `make_prioritised_trajectory_buffer`."""
    return _flat(
        max_length, min_length, sample_batch_size, add_sequences, add_batch_size, storage, exponent=priority_exponent
    )


def make_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
    *,
    storage: Storage = _DEVICE,
) -> TrajectoryBuffer:
    """Return a buffer of single rows.

    Args:
      max_length: Rows.
      min_length: Rows before `can_sample`.
      sample_batch_size: B, rows of a batch.
      add_sequences, add_batches: Each gives the rows of `add` one leading axis.
      storage: Where rows are kept, of `fbuf.storages`.
    """
    axes, window = add_sequences + add_batches, (sample_batch_size, 1, 1)
    return _make(max_length, None, window, min_length, storage, axes=axes, form=_item)


def make_prioritised_item_buffer(
    max_length: int,
    min_length: int,
    sample_batch_size: int,
    add_sequences: bool = False,
    add_batches: bool = False,
    priority_exponent: float = 0.6,
    device: str = "cpu",
    *,
    storage: Storage = _DEVICE,
) -> PrioritisedTrajectoryBuffer:
    """Return a prioritised `make_item_buffer`; see `make_prioritised_trajectory_buffer`."""
    axes, window = add_sequences + add_batches, (sample_batch_size, 1, 1)
    return _make(max_length, None, window, min_length, storage, axes=axes, form=_item, exponent=priority_exponent)


def make_trajectory_queue(
    max_length_time_axis: int,
    add_batch_size: int,
    add_sequence_length: int,
    sample_sequence_length: int,
    max_size: int | None = None,
    *,
    storage: Storage = _DEVICE,
) -> TrajectoryQueue:
    """Return a first-in, first-out queue of windows: `sample(state)` returns the state and `[E, T, ...]`.

    Args:
      max_length_time_axis: L, rows of a lane.
      add_batch_size: E, lanes.
      add_sequence_length: N, rows of a lane in one `add`, for `can_add`.
      sample_sequence_length: T, rows of a window.
      max_size: Rows of all lanes, in place of L.
      storage: Where rows are kept, of `fbuf.storages`.

    Example:
      >>> import fbuf.integrations.flashbax as fbx, jax.numpy as jnp
      >>> queue = fbx.make_trajectory_queue(8, 1, add_sequence_length=4, sample_sequence_length=2)
      >>> state = queue.add(queue.init({"t": 0}), {"t": jnp.arange(4)[None]})
      >>> state, batch = queue.sample(state)
      >>> batch.experience["t"].tolist(), bool(queue.can_add(state))
      ([[0, 1]], True)
    """
    lanes, window = add_batch_size, sample_sequence_length
    length = max_length_time_axis if max_size is None else max_size // lanes
    view, sampler = views.Sequence(window, stride=window, episode_end=()), Consume(order="fifo")
    core = Buffer(length * lanes, lanes=lanes, storage=storage, view=view, sampler=sampler)

    def sample(state: TrajectoryQueueState) -> tuple[TrajectoryQueueState, TrajectoryBufferSample]:
        after, batch = core.sample(state.state, jax.random.key(0), lanes)  # the key is not used
        return dataclasses.replace(state, state=after), TrajectoryBufferSample(batch.data)

    return TrajectoryQueue(
        init=lambda experience: TrajectoryQueueState(core.init(experience), core),
        add=_adder(core, 2),
        sample=sample,
        can_sample=lambda state: state.unread >= jnp.int32(window),
        can_add=lambda state: state.unread <= jnp.int32(length - add_sequence_length),
    )


def make_mixer(buffers: Sequence[TrajectoryBuffer], sample_batch_size: int, proportions: Sequence[float]) -> Mixer:
    """Return a mixer of buffers: the first rows of a batch of each, by proportions; rounded rows go to the first buffer.

    Example:
      >>> import fbuf.integrations.flashbax as fbx, jax, jax.numpy as jnp
      >>> buffer = fbx.make_item_buffer(100, 1, 4, add_sequences=True)
      >>> low = buffer.add(buffer.init(0), jnp.arange(5))
      >>> high = buffer.add(buffer.init(0), jnp.arange(100, 105))
      >>> mixer = fbx.make_mixer([buffer, buffer], 4, [0.25, 0.75])
      >>> (mixer.sample([low, high], jax.random.key(0)).experience >= 100).tolist()
      [False, True, True, True]
    """
    sizes = [int(part / sum(proportions) * sample_batch_size) for part in proportions]
    sizes[0] += sample_batch_size - sum(sizes)

    def sample(states: Sequence[Any], key: jax.Array) -> Any:
        draws = zip(buffers, states, jax.random.split(key, len(states)), sizes, strict=True)
        batches = [jax.tree.map(lambda x, n=n: x[:n], buffer.sample(state, k)) for buffer, state, k, n in draws]
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *batches)

    def can_sample(states: Sequence[Any]) -> jax.Array:
        return jnp.all(jnp.stack([buffer.can_sample(state) for buffer, state in zip(buffers, states, strict=True)]))

    return Mixer(sample, can_sample)


def _length(max_size: int | None, length: int | None, lanes: int) -> int:
    """Return the rows of a lane."""
    if max_size is None and length is not None:
        return length
    if max_size is not None and length is None:
        return max_size // lanes
    raise ValueError(
        f"make_trajectory_buffer: max_size is {max_size} and max_length_time_axis {length}; expected one of them."
    )


def _flat(
    max_length: int,
    min_length: int,
    batch_size: int,
    sequences: bool,
    lanes: int | None,
    storage: Storage,
    exponent: float | None = None,
) -> Any:
    number, axes = lanes or 1, sequences + (lanes is not None)
    least = min_length // number + 1
    return _make(
        max_length // number, lanes, (batch_size, 2, 1), least, storage, axes=axes, form=_pair, exponent=exponent
    )


def _make(
    length: int,
    lanes: int | None,
    window: tuple[int, int, int],
    least: int,
    storage: Storage,
    *,
    axes: int,
    form: Callable[[Callable[[_Part], Any]], Any] = lambda read: read(lambda windows: windows),
    exponent: float | None = None,
) -> Any:
    """Return the functions of a buffer.

    Args:
      window: B, T and the period.
      least: Rows of a lane before `can_sample`.
      axes: Leading axes of the rows of `add`.
      form: Makes the experience; its argument reads the rows in a part of windows `[B, T, ...]`.
      exponent: Of the priorities; None: uniform draws.
    """
    batch_size, rows, period = window
    least = max(least, rows)
    if least > length:
        raise ValueError(
            f"make_trajectory_buffer: a lane has {length} rows; expected at least {least}, to sample from."
        )
    view = views.Sequence(rows, stride=period, episode_end=())  # it checks them
    core = Buffer(length * (lanes or 1), lanes=lanes, storage=storage)
    if exponent is not None:
        core = dataclasses.replace(core, view=view, sampler=Prioritized(exponent, eps=0.0, normalize=None))

    def init(experience: Any) -> TrajectoryBufferState:
        return TrajectoryBufferState(core.init(experience), core)

    def can_sample(state: TrajectoryBufferState) -> jax.Array:
        return state.is_full | (state.current_index >= jnp.int32(least))

    def sample(state: TrajectoryBufferState, rng_key: jax.Array) -> TrajectoryBufferSample:
        slot = _draw(core.geometry, window, state.state.ring, rng_key)
        return TrajectoryBufferSample(form(lambda part: core.get(state.state, part(slot)).data))

    def sample_prioritised(state: TrajectoryBufferState, rng_key: jax.Array) -> PrioritisedTrajectoryBufferSample:
        batch = core.peek(state.state, rng_key, batch_size)
        return PrioritisedTrajectoryBufferSample(
            form(lambda part: jax.tree.map(part, batch.data)), batch.index, batch.probability
        )

    def set_priorities(state: TrajectoryBufferState, indices: Index, priorities: jax.Array) -> TrajectoryBufferState:
        return dataclasses.replace(state, state=core.update_priority(state.state, indices, priorities))

    if exponent is None:
        return TrajectoryBuffer(init, _adder(core, axes), sample, can_sample)
    return PrioritisedTrajectoryBuffer(init, _adder(core, axes), sample_prioritised, can_sample, set_priorities)


def _adder(core: Buffer, axes: int) -> Callable[[Any, Any], Any]:
    """Return `add` for rows with leading axes: lane or batch, then time."""

    def add(state: Any, batch: Any) -> Any:
        if axes == 2 and core.lanes is None:
            batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        elif axes == 2:
            batch = jax.tree.map(lambda x: x.swapaxes(0, 1), batch)
        write = core.extend if axes > (core.lanes is not None) else core.add
        return dataclasses.replace(state, state=write(state.state, batch))

    return add


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _draw(geometry: Geometry, window: tuple[int, int, int], ring: Ring, key: jax.Array) -> jax.Array:
    """Return the slots of windows, int32[B, T], with flashbax's random numbers."""
    batch_size, rows, period = window
    lanes, length, _ = geometry
    size, oldest = ring.size[0], ring.cursor[0] - ring.size[0]
    number = jnp.where(size < rows, 0, (size - rows) // period + 1)
    key, of_start = jax.random.split(key)
    start = jax.random.randint(of_start, (batch_size,), 0, number).astype(jnp.int32) * period
    place = (oldest + start[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]) % length
    if lanes == 1:
        return place
    lane = jax.random.randint(jax.random.split(key)[1], (batch_size,), 0, lanes).astype(jnp.int32)
    return place * lanes + lane[:, None]


def _pair(read: Callable[[_Part], Any]) -> ExperiencePair:
    return ExperiencePair(read(lambda windows: windows[:, 0]), read(lambda windows: windows[:, 1]))


def _item(read: Callable[[_Part], Any]) -> Any:
    return read(lambda windows: windows[:, 0])

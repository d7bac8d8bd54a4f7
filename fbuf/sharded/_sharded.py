"""`Sharded`: the methods of one buffer over a mesh axis."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, Unpack

import jax
from jax.sharding import Mesh, PartitionSpec

from fbuf._buffer import checks
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.plan import Plan, PlanSettings
from fbuf._buffer.state import raise_failed
from fbuf._buffer.summary.summary import Summary, checked_compare, summary_of
from fbuf._core.arguments import DrawOptions, Numbers, check_bool
from fbuf._core.component import component
from fbuf._core.control_flow import vary
from fbuf._core.pytree import PyTree
from fbuf._core.sample import Index, Rows, Sample
from fbuf._members.split import check_draw_mode, member_of
from fbuf.sharded import _checks, _draw, _inspect, _rows, _write
from fbuf.sharded._operation import is_local
from fbuf.sharded._state import ShardedState, block_of, init_each, keeps_rows_on_host


@component
class Sharded:
    r"""Split one logical buffer over the devices of a mesh axis.

    Each of the D devices holds a shard: E / D of the lanes, C / D of the slots. Probabilities, importance weights and the
    largest priority are those of the whole buffer. Methods work inside jit, in place if the state is donated.

    Attributes:
      buffer: The whole buffer. Its `capacity`, `lanes` and `batch_size` are totals over all shards, multiples of D; so are the
        `blocks` of `storages.Deduplicated`.
      mesh: A `jax.sharding.Mesh`; its other axes replicate the buffer.
      axis: The name of the axis that the buffer is split over.
      draw: "local": every shard draws B / D of its own rows, and no row is moved. Rows have the factor D M_s / M in `weight`,
        for a shard of mass M_s, so that the weighted mean of a batch estimates what it does unsharded. A learner that ignores
        weights is biased if shards are filled unequally. "global": shards draw in proportion to their mass, rows are moved by
        `all_to_all`, and the batch is that of one buffer.

    Outside `jax.shard_map` arrays span the mesh: rows with lanes are split along E, without lanes along N; leaves of a batch
    are split along B. Inside a `jax.shard_map` over the axis the same methods take and return the block of the device: `[N, E /
    D, ...]` and `[B / D, ...]`; `batch_size` stays B, and keys must be equal on all devices.

    Samplers: `Uniform`, `Prioritized` (without `uniform=`), `Staleness`, and with draw="local" `Epoch`, `Consume` and
    `Prioritized(replace=False)`. For Epoch a shard whose rows are all drawn waits, with `mask` False, until every shard has
    finished the epoch. With one shard everything equals the unsharded buffer, bit for bit.

    Storages: `Device`, `Deduplicated`, and on a mesh of this axis alone `Host` and `Compressed` in memory: each shard has a
    store in its process, which `init` opens outside jit. The mesh may span the processes of `jax.distributed`; each calls every
    method. `fbuf.save(path, sharded, state)` saves all shards, and `fbuf.load(path, sharded)` loads them on any mesh.

    Raises:
      ValueError: sizes are not multiples of D; the view reads neighbouring rows, but there are no lanes; a part keeps
        priorities on the host, or rows in files.
      TypeError: a part needs all rows in one place, such as `samplers.Ranked` and `writers.TopK`.

    Example:
      A learner's step inside `jax.shard_map`; `fbuf.sharded` shows the methods outside of it.

      >>> import fbuf, jax, jax.numpy as jnp
      >>> from jax.sharding import AxisType, PartitionSpec as P
      >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
      >>> replay = fbuf.sharded.Sharded(fbuf.Buffer(100 * mesh.size), mesh)
      >>> def step(state, rows, key):
      ...     state = replay.extend(state, rows)
      ...     state, batch = replay.sample(state, key, 4 * mesh.size)  # 4 rows here
      ...     return state, jax.lax.pmean(jnp.mean(batch.weight * batch.data["reward"]), "data")
      >>> specs = {"in_specs": (P("data"), P("data"), P()), "out_specs": (P("data"), P())}
      >>> step = jax.jit(jax.shard_map(step, mesh=mesh, **specs), donate_argnums=0)
      >>> rows = {"reward": jnp.ones(5 * mesh.size)}
      >>> state, mean = step(replay.init({"reward": 0.0}), rows, jax.random.key(0))
      >>> float(mean)
      1.0
    """

    buffer: Buffer
    mesh: Mesh
    axis: str = "data"
    draw: Literal["local", "global"] = "local"

    def __post_init__(self) -> None:
        _checks.check_parts(self.buffer, self.mesh, self.axis)
        if self.draw == "global" and self.shards > 1:
            check_draw_mode("Sharded", self.buffer.sampler, "but draw is 'global'. Use draw='local'.")

    def __getattr__(self, name: str) -> Any:
        """Raise an error that says what to do instead of calling a method that only a `Buffer` has."""
        fix = ""
        if name in ("convert", "grow", "resume"):
            fix = (
                ": it would need all rows in one place. Make a new Sharded and extend it, or save the state and load it"
            )
        raise AttributeError(f"'Sharded' has no '{name}'{fix}.", name=name, obj=self)

    @property
    def shards(self) -> int:
        """D, the devices along the axis."""
        return int(self.mesh.shape[self.axis])

    @functools.cached_property
    def shard(self) -> Buffer:
        """The buffer of one shard."""
        return member_of(self.buffer, self.shards)

    # ------------------------------------------------------------------------------------------------ making

    def init(self, example: PyTree) -> ShardedState:
        """Return the state of an empty buffer for rows like `example`. Each device makes its shard.

        Args:
          example: One row of one lane, as for `Buffer.init`.
        Raises:
          ValueError, TypeError: as `Buffer.init`.
        Cost: O(C / D) on each device.

        Example:
          >>> import fbuf, jax
          >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
          >>> replay = fbuf.sharded.Sharded(fbuf.Buffer(100 * mesh.size), mesh)
          >>> int(replay.size(replay.init({"t": 0})))
          0
        """

        def local() -> ShardedState:
            return block_of(self.shards, self.shard.init(example))

        if is_local(self.axis):
            _checks.check_axis("Sharded.init", self)
            return vary(local(), frozenset({self.axis}))
        if keeps_rows_on_host(self.buffer):
            return init_each(self, example)
        split = PartitionSpec(self.axis)
        return jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=(), out_specs=split))()

    # ----------------------------------------------------------------------------------------------- writing

    def add(self, state: ShardedState, row: PyTree, *, priority: Any = None, mask: Any = None) -> ShardedState:
        """Add one row a lane: leaves `[E, ...]`; only with lanes, or one shard.

        Arguments, errors and cost as `Buffer.add`.
        """
        if self.buffer.lanes is None and self.shards > 1:
            raise ValueError(
                f"Sharded.add: one row cannot be split over {self.shards} shards. Use lanes={self.shards}, or extend with a "
                f"multiple of {self.shards} rows."
            )
        return self._extend("Sharded.add", state, row, priority, mask)

    def extend(self, state: ShardedState, rows: PyTree, *, priority: Any = None, mask: Any = None) -> ShardedState:
        """Add rows in order of time: leaves `[N, E, ...]`; without lanes `[N, ...]`, N / D of them to each shard.

        Args:
          state: From `init` or an earlier call. Donate it in a jitted step.
          rows: In the structure of the example given to `init`.
          priority: float[N, E] or float[N], |p| of each row; only for prioritized samplers.
          mask: bool[N, E] or bool[N]: rows where it is False are skipped.
        Raises:
          ValueError, TypeError: wrong structure, dtype or shape; N is not a multiple of D without lanes.
        Cost: O(N / D) on each device if the state is donated; with priorities one collective of 4 bytes.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
          >>> replay = fbuf.sharded.Sharded(fbuf.Buffer(100 * mesh.size, lanes=2 * mesh.size), mesh)
          >>> state = replay.extend(replay.init({"t": 0}), {"t": jnp.zeros((3, 2 * mesh.size), int)})
          >>> int(replay.size(state)) == 6 * mesh.size
          True
        """
        return self._extend("Sharded.extend", state, rows, priority, mask)

    def _extend(self, call: str, state: ShardedState, rows: PyTree, priority: Any, mask: Any) -> ShardedState:
        _checks.check_state(call, self, state)
        buffer = _checks.buffer_here(self)
        leaves, _, shape, priority, mask = checks.check_rows(call, buffer, state.shards, rows, priority, mask)
        single = call.endswith("add")
        if self.buffer.lanes is None and not is_local(self.axis) and not single:
            _checks.check_multiple(call, self, "the number of rows", shape[0])
            shape = (shape[0] // self.shards, 1)
        elif self.buffer.lanes is not None:
            shape = (shape[0], self.shard.geometry.lanes)
        if shape[0] == 0:
            return state
        axes = (not single) + (buffer.lanes is not None)
        after = _write.extend(self, state, leaves, priority, mask, static=(shape, axes))[0]
        raise_failed(after.shards, buffer.storage, after)
        return after

    def update_priority(
        self, state: ShardedState, index: Index, td_error: Any, *, mask: Any = None, eta: Any = 0.9
    ) -> ShardedState:
        """Set the priorities of drawn rows, whichever devices they are on: as `Buffer.update_priority`.

        Args:
          index: `batch.index`, or any selection and order of such rows.
          td_error: float[B]; or float[B, T] with a view of windows.
          mask: bool[B, T], which errors count.
          eta: In [0, 1]; a number or float[].
        Raises:
          TypeError: the sampler has no priorities; `index` is not one of shards.
          ValueError: shapes differ, or B is not a multiple of D.
        Cost: one collective of 16 bytes a row; O(B log C / D) on each device if each has as many rows as others.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
          >>> replay = fbuf.sharded.Sharded(fbuf.prioritized(100 * mesh.size), mesh)
          >>> state = replay.extend(replay.init({"t": 0}), {"t": jnp.arange(5 * mesh.size)})
          >>> state, batch = replay.sample(state, jax.random.key(0), 4 * mesh.size)
          >>> index = jax.tree.map(lambda x: x[::-1], batch.index)  # in any order
          >>> state = replay.update_priority(state, index, jnp.full(4 * mesh.size, 3.0))
          >>> float(replay.stats(state)["max_priority"])
          3.0
        """
        call = "Sharded.update_priority"
        _checks.check_state(call, self, state)
        checks.check_prioritized(call, self.buffer.sampler)
        index = _checks.checked_index(call, self, index)
        rows = Index(index.slot, index.generation)
        arguments = checks.check_errors(call, self.buffer, rows, td_error, mask, eta)[1:]
        return _rows.update_priority(self, state, index, *arguments)[0]

    def cut(self, state: ShardedState, lanes: Any = None) -> ShardedState:
        """End the running episodes at their newest rows: as `Buffer.cut`.

        Args:
          lanes: bool[E], the lanes to cut; None: all.
        """
        _checks.check_state("Sharded.cut", self, state)
        lanes = checks.check_lanes("Sharded.cut", _checks.buffer_here(self), lanes)
        return _write.cut(self, state, lanes)[0]

    def clear(self, state: ShardedState) -> ShardedState:
        """Drop every row. Annealed numbers stay, and every index becomes stale. Cost: O(C / D) on each device."""
        _checks.check_state("Sharded.clear", self, state)
        return _write.clear(self, state)[0]

    def set(self, state: ShardedState, *, rebuild: bool = False, **numbers: Unpack[Numbers]) -> ShardedState:
        """Replace annealed numbers of the sampler on all shards: as `Buffer.set`."""
        call, sampler = "Sharded.set", self.buffer.sampler
        _checks.check_state(call, self, state)
        check_bool(call, "rebuild", rebuild)
        checked = checks.check_numbers(call, sampler, sampler.numbers, numbers)
        if rebuild:
            checks.check_rebuilds(call, sampler)
        state = _write.set_numbers(self, state, checked)[0]
        return _write.rebuild(self, state)[0] if rebuild else state

    def update_rows(self, state: ShardedState, index: Index, fields: PyTree, *, mask: Any = None) -> ShardedState:
        """Replace some leaves of existing rows, whichever devices they are on: as `Buffer.update_rows`.

        Args:
          index: `[B]` or `[B, T]`, from a sample, `window_index`, `get` or `rows`.
          fields: Leaves `[B, ...]` or `[B, T, ...]`.
          mask: bool, in the shape of the index.
        Raises:
          ValueError, TypeError: as `Buffer.update_rows`; B is not a multiple of D.
        Cost: if all rows are on the devices that have their indices one collective of 4 bytes, else the fields of all rows to
          each device.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
          >>> replay = fbuf.sharded.Sharded(fbuf.Buffer(100 * mesh.size), mesh)
          >>> state = replay.extend(replay.init({"t": 0}), {"t": jnp.arange(5 * mesh.size)})
          >>> state, batch = replay.sample(state, jax.random.key(0), 4 * mesh.size)
          >>> state = replay.update_rows(state, batch.index, {"t": jnp.full(4 * mesh.size, 9)})
          >>> set(replay.get(state, batch.index).data["t"].tolist())
          {9}
        """
        call = "Sharded.update_rows"
        _checks.check_state(call, self, state)
        index = _checks.checked_index(call, self, index)
        rows = Index(index.slot, index.generation)
        _, leaves, mask = checks.check_update(call, _checks.buffer_here(self), state.shards, rows, fields, mask)
        after = _rows.update_rows(self, state, index, leaves, mask)[0]
        raise_failed(after.shards, self.buffer.storage, after)
        return after

    # ----------------------------------------------------------------------------------------------- reading

    def sample(
        self, state: ShardedState, key: jax.Array, batch_size: int | None = None, **options: Unpack[DrawOptions]
    ) -> tuple[ShardedState, Sample]:
        """Draw a batch. Use the returned state from then on: it orders this read before later writes.

        Args:
          state: From `init` or an earlier call.
          key: PRNG key, typed or raw, equal on all devices; consumed.
          batch_size: B of all devices together, a multiple of D; None: the buffer's.
          **options: Numbers of the sampler for this call: `beta=schedule(step)`.
        Returns:
          The state, and a `Sample` with leaves `[B, ...]`, split over the axis. Rows of an empty shard have `mask`
          False; the weighted mean over all B is still unbiased.
        Raises:
          ValueError, TypeError: as `Buffer.sample`; B is not a multiple of D.
        Cost: O(B / D) on each device (`Prioritized`: O(B log C / D)) and one collective of 16 D bytes; draw="global" moves
          1.25 times the batch, and repeats that for shards with more than 1.25 / D of the mass.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
          >>> replay = fbuf.sharded.Sharded(fbuf.prioritized(100 * mesh.size), mesh, draw="global")
          >>> state = replay.extend(replay.init({"t": 0}), {"t": jnp.arange(5 * mesh.size)})
          >>> state, batch = replay.sample(state, jax.random.key(0), 4 * mesh.size)
          >>> batch.data["t"].shape == (4 * mesh.size,)
          True
        """
        call = "Sharded.sample"
        _checks.check_state(call, self, state)
        form = "sample(state, key, batch_size)"
        size, checked = checks.check_draw(call, form, self.buffer, key, batch_size, options)
        _checks.check_multiple(call, self, "batch_size", size)
        if self.draw == "global":
            _checks.check_key(call, self.axis, key)
        return _draw.sample(self, state, key, checked, static=(size,))

    def peek(
        self, state: ShardedState, key: jax.Array, batch_size: int | None = None, **options: Unpack[DrawOptions]
    ) -> Sample:
        """Return the batch that `sample` would draw, without a new state; not ordered before later writes."""
        return self.sample(state, key, batch_size, **options)[1]

    def get(self, state: ShardedState, index: Index) -> Rows:
        """Return rows by index, from whichever devices they are on: as `Buffer.get`, with the shard in `index`.

        Args:
          index: `[B]` or `[B, T]`; stale: `mask` False. Slots alone do not name rows of several shards.
        Cost: each device reads B rows and sends B / D to each other, whichever `draw`.
        """
        call = "Sharded.get"
        _checks.check_state(call, self, state)
        return _rows.get(self, state, _checks.checked_index(call, self, index))[1]

    def window_index(self, state: ShardedState, index: Index) -> Index:
        """Return the rows `[B, T]` of sampled windows, for `update_rows`: as `Buffer.window_index`. Cost: as `get`."""
        call = "Sharded.window_index"
        _checks.check_state(call, self, state)
        checks.check_windows(call, self.buffer.view)
        return _rows.window_index(self, state, _checks.checked_index(call, self, index, (1,)))[1]

    def priorities(self, state: ShardedState, index: Index | None = None) -> jax.Array:
        """Return priorities |p|, of all rows in the order of `rows`: as `Buffer.priorities`. Cost: as `get`, or `rows`."""
        call = "Sharded.priorities"
        _checks.check_state(call, self, state)
        checks.check_prioritized(call, self.buffer.sampler)
        if index is None:
            _checks.check_order(call, self)
            return _rows.all_priorities(self, state)[1]
        return _rows.read_priorities(self, state, _checks.checked_index(call, self, index))[1]

    def rows(self, state: ShardedState, *, last: int | None = None) -> Rows:
        """Return every row, oldest first, `[C / E, E, ...]`, with the shard in `index`: as `Buffer.rows`.

        Args:
          last: n, for the newest n rows of each lane alone, `[n, E, ...]`.
        Raises:
          ValueError: without lanes, as rows then have no order over several shards; `last` is not from 1 to C / E.
        Cost: O(C / D), or O(n E / D), on each device; no collective.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
          >>> replay = fbuf.sharded.Sharded(fbuf.Buffer(100 * mesh.size, lanes=mesh.size), mesh)
          >>> rows = {"t": jnp.broadcast_to(jnp.arange(5)[:, None], (5, mesh.size))}
          >>> state = replay.extend(replay.init({"t": 0}), rows)
          >>> replay.rows(state, last=2).data["t"][:, 0].tolist()
          [3, 4]
        """
        call = "Sharded.rows"
        _checks.check_state(call, self, state)
        _checks.check_order(call, self)
        if last is None:
            return _rows.all_rows(self, state)[1]
        return _rows.last(self, state, static=(checks.check_last(call, self.shard, last),))[1]

    def can_add(self, state: ShardedState, n: Any = 1) -> jax.Array:
        """Return bool[]: whether `n` more rows in each lane can be stored, as `Buffer.can_add`."""
        call = "Sharded.can_add"
        _checks.check_state(call, self, state)
        return _inspect.can_add(self, state, checks.check_rows_count(call, n))[1]

    def can_sample(self, state: ShardedState) -> jax.Array:
        """Return bool[], whether any shard has an anchor to draw."""
        _checks.check_state("Sharded.can_sample", self, state)
        return _inspect.can_sample(self, state)[1]

    def size(self, state: ShardedState) -> jax.Array:
        """Return int32[], the rows held by all shards."""
        _checks.check_state("Sharded.size", self, state)
        return _inspect.size(self, state)[1]

    def stats(self, state: ShardedState) -> dict[str, jax.Array]:
        """Return scalars to log, of the whole: as `Buffer.stats`, and `balance`.

        Counts are sums; `max_priority`, `blocks_load`, `blocks_ratio` and the like are the largest of any shard. `balance` is
        float32[], from 1 / D (one shard has all anchors) to 1 (all have equally many). With draw="local" the weighted
        batch is worth about this share of an unweighted one. `unlearnt` is missing where other processes have shards.
        """
        _checks.check_state("Sharded.stats", self, state)
        return _inspect.stats(self, state)[1] | _inspect.unlearnt(self, state)

    def summary(self, state: ShardedState, *, compare: int | None = 1 << 14) -> Summary:
        r"""Summarise the contents of all shards: as `Buffer.summary`. Eager.

        Ages count the rows of a lane; without lanes, of a shard. `stats["balance"]` is that of mass here, :math:`1 / (D \sum_s
        (M_s / M)^2)`.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
          >>> replay = fbuf.sharded.Sharded(fbuf.Buffer(100 * mesh.size), mesh)
          >>> state = replay.extend(replay.init({"t": 0}), {"t": jnp.arange(5 * mesh.size)})
          >>> replay.summary(state).size == 5 * mesh.size, replay.summary(state).stats["balance"]
          (True, 1.0)
        """
        call = "Sharded.summary"
        _checks.check_state(call, self, state)
        number = checked_compare(call, self.buffer, state, compare)
        found = summary_of(self.buffer, state.shards, _inspect.seen(self, state, number))
        return dataclasses.replace(found, buffer=repr(self))

    def nbytes(self, state: ShardedState) -> dict[str, int]:
        """Return the bytes in use on all devices together: `device`, `host`, `disk`. Eager."""
        _checks.check_state("Sharded.nbytes", self, state)
        return self.buffer.nbytes(state.shards)

    def plan(self, example: PyTree, **settings: Unpack[PlanSettings]) -> Plan:
        """Return the bytes and peaks of one device, before anything is allocated: as `Buffer.plan`.

        Args:
          example: One row of one lane.
          **settings: As for `Buffer.plan`, of the whole: `batch_size`, `rows`, and without lanes `num_rows`.

        With draw="global" the peak of `sample` includes the exchange; other collectives are small.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> mesh = jax.make_mesh((len(jax.devices()),), ("data",))
          >>> replay = fbuf.sharded.Sharded(fbuf.Buffer(1000 * mesh.size), mesh)
          >>> 4000 < replay.plan(jnp.float32(0), batch_size=mesh.size).device < 5000
          True
        """
        return _inspect.plan(self, example, **settings)

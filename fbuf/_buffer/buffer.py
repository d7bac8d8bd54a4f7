"""`Buffer`: the public methods. Storage, sampler, view and writer do the work.

    extend: rows -> on_write -> writer.place -> slots -> storage.write
                 -> anchors: which rows open or close -> sampler.change
    sample: key -> sampler.draw -> anchors -> view.window -> slots -> storage.read -> order_after_reads
                -> view.assemble -> on_read -> Sample

A buffer is a frozen dataclass of values, and its state is a pytree of arrays. Each method is one jitted operation: an eager
call is one dispatch, and a call inside jit is inlined. `fbuf._core.control_flow` orders reads before later writes.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import checks, init, prefetch, priorities, read, transforms, write
from fbuf._buffer import convert as _convert
from fbuf._buffer.state import BufferConfig, BufferState, init_host_sampler, raise_failed
from fbuf._core import pytree
from fbuf._core.arguments import DrawOptions, Numbers, check_bool
from fbuf._core.component import component
from fbuf._core.dispatch import Operation
from fbuf._core.pytree import PyTree, tree_bytes
from fbuf._core.sample import Index, Rows, Sample
from fbuf.transforms._chain import chained
from fbuf.views._fields import checked_ends

if TYPE_CHECKING:
    from fbuf._buffer.plan import Plan, PlanSettings
    from fbuf._buffer.summary.summary import Summary


@component
class Buffer(BufferConfig):
    """Store rows and sample batches with pure functions of an immutable state.

    Attributes:
      capacity: C, the largest number of rows; a multiple of `lanes`.
      storage: Where rows are kept: `storages.Device()`, `Deduplicated(...)`, `Compressed(...)`, `Host(...)`, `Memmap(...)`,
        `Ragged(...)`, `DataSet(path)`.
      sampler: How anchors (rows that can be sampled) are drawn: `samplers.Uniform()`, `Epoch()`, `Consume()`,
        `Prioritized(...)`, `Ranked(...)`, `Staleness(...)`.
      view: Which batch the drawn anchors make: `views.Row()`, `Transition(...)`, `Sequence(...)`, `Episode(...)`,
        `Hindsight(...)`.
      writer: Which slots new rows take: `writers.Ring()`, `TopK(...)`, `Reservoir()`; `Frozen()` (no writes) with
        `storages.DataSet`; or a writer of your own (`fbuf.parts.Scattering`).
      lanes: E, parallel environments that add one row each per step; None for a single stream.
      episode_end: Names of boolean leaves that end an episode, in addition to those that the view names. Names are paths:
        `("done/__all__",)` is the leaf `__all__` of a dict `done`.
      prefetch: 1: each `sample` returns the batch that the previous call drew, and draws the next; see below. 0: off.
      batch_size: Default B of `sample`; required with prefetch.
      on_write: Transforms of rows before storage: a transform (`fbuf.transforms`), a tuple or a dict of them, or a
        `transforms.Chain`. `init` and `extend` take rows before transformation; `rows`, `get`, `update_rows`, the view,
        the storage and `episode_end` see stored rows.
      on_read: Transforms of `batch.data`, in the same forms, in `sample` and `peek`, but not in `rows` and `get`.

    With `prefetch=1` a host storage reads the next batch in a thread during the step. The same keys give the same batches for
    every storage:

    * `sample(state, key)` draws the next batch with `key` from the given state, before the `update_priority` of this step and
      the `extend` of the next. `peek(state, key)` returns that batch.
    * It returns the batch that the previous `sample` drew. If there is none (first call, after `clear`, after an empty draw)
      it draws one immediately with `jax.random.fold_in(key, 1)`.
    * Rows that were overwritten, retired or changed in the meantime are returned as they were drawn. The index of an
      overwritten or retired anchor is stale: `update_priority` and `update_rows` skip it, and `stats` counts `stale_draws`.
    * `Epoch` and `Consume` count a row when it is drawn, not when it is returned.
    * `convert` and `clear` drop the prefetched batch.
    * If the thread fails, the rows are read again when the batch is returned, which may raise.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(capacity=100)
      >>> state = buffer.init({"obs": jnp.zeros(3), "reward": 0.0})
      >>> state = buffer.extend(state, {"obs": jnp.ones((5, 3)), "reward": jnp.arange(5.0)})
      >>> state, batch = buffer.sample(state, jax.random.key(0), 4)
      >>> batch.data["obs"].shape
      (4, 3)
    """

    def __post_init__(self) -> None:
        for name in ("capacity", "lanes", "prefetch", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, np.integer):
                object.__setattr__(self, name, int(value))
        checks.check_sizes(self)
        object.__setattr__(self, "episode_end", checked_ends("Buffer", self.episode_end))
        for role in ("on_write", "on_read"):
            object.__setattr__(self, role, chained(role, getattr(self, role)))
        checks.check_parts(self)
        transforms.check_parts(self)

    def __dir__(self) -> list[str]:
        """Return the fields and methods, without what `BufferConfig` derives."""
        derived = property, functools.cached_property
        return [name for name in super().__dir__() if not isinstance(getattr(BufferConfig, name, None), derived)]

    # ------------------------------------------------------------------------------------------------ making

    def init(self, example: PyTree) -> BufferState:
        """Return the state of an empty buffer for rows like `example`.

        Args:
          example: One row of one lane: a pytree of arrays, scalars or `jax.ShapeDtypeStruct`s, without leading axes. Inside
            `jax.shard_map` the state varies over the axes that it varies over.
        Raises:
          ValueError: the row has no leaves, lacks one that view, storage or `episode_end` names, or has a number out of range.
          TypeError: a leaf is not an array of numbers; or `init` with state on the host is being traced.
          MemoryError: an allocation fails; `plan` reports the size beforehand.
        Cost: O(C).

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> state = fbuf.Buffer(100).init({"obs": jax.ShapeDtypeStruct((84, 84), jnp.uint8), "reward": 0.0})
          >>> state.rows["obs"].shape
          (100, 84, 84)
        """
        return init.init(self, example)

    def resume(self, example: PyTree, *, verify: Literal["full", "lazy"] = "full", cut: bool = True) -> BufferState:
        """Return a state of the rows in the storage's files (`storages.Memmap`, `Compressed`), for instance after a crash.

        The rows are the newest of each lane in the order of their writes, with their last `update_rows`; rows that `clear`
        dropped are included. Priorities, annealed numbers, counters, draws without replacement and the memory of transforms
        start afresh, as for `convert`: only `fbuf.save` and `fbuf.load` keep them.

        Each row is compared with its checksum. If some differ (power failure, damaged files) the state has the longest run of
        valid rows of each lane, of flushed ones if there are any. A RuntimeWarning reports the rows discarded. An older copy of
        a whole folder is valid.

        Args:
          example: As for `init`: the same leaves, shapes and dtypes.
          verify: "full": read and verify every byte now. "lazy": verify rows when they are first read; StoreCorrupted is
            raised then.
          cut: `cut` all lanes, because the environments start again. False only if they continue where they were.
        Raises:
          TypeError: the storage has no files; or this is being traced.
          ValueError: the storage has no path, or `keys` leave some leaves on the device; or the files were made with another
            capacity, lanes, slack, codec or example.
          FileNotFoundError: there is no store at the path.
          BlockingIOError: another process, or another store of this one, uses the path.
          StoreCorrupted (a RuntimeError): no row is valid, or a file that all rows need is damaged or not a plain file. With
            "lazy" also: data that many rows need, or the newest rows, are damaged.
        Cost: O(C), and reading all files; "lazy": of `Compressed` every chunk's header, of other storages nothing.

        Example:
          >>> import fbuf, tempfile, jax.numpy as jnp
          >>> with tempfile.TemporaryDirectory() as path:
          ...     buffer = fbuf.Buffer(100, storage=fbuf.storages.Memmap(path))
          ...     state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          ...     del state  # or the process ends
          ...     state = buffer.resume({"t": 0})
          ...     print(buffer.rows(state, last=2).data["t"])
          ...     del state
          [3 4]
        """
        checks.check_writable("Buffer.resume", self)
        state = init.resume(self, example, verify)
        return self.cut(state) if cut else state

    # ----------------------------------------------------------------------------------------------- writing

    def add(self, state: BufferState, row: PyTree, *, priority: Any = None, mask: Any = None) -> BufferState:
        """Add one row: leaves `[...]`; with lanes one row a lane, `[E, ...]`.

        Args:
          state: From `init` or an earlier call. Donate it in a jitted step.
          row: In the structure of the example given to `init`.
          priority: float[] (with lanes `[E]`), |p| of the new row; only for prioritized samplers.
          mask: bool[] (with lanes `[E]`): False adds nothing there.
        Raises:
          ValueError, TypeError: wrong structure, dtype or shape (at trace time); or a NumPy value does not fit its leaf.
        Cost: O(1) in C if the state is donated; otherwise a copy of the buffer.

        Example:
          >>> import fbuf
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.add(buffer.init({"t": 0}), {"t": 7})
          >>> int(buffer.size(state))
          1
        """
        return self._extend("Buffer.add", state, row, priority, mask)

    def extend(self, state: BufferState, rows: PyTree, *, priority: Any = None, mask: Any = None) -> BufferState:
        """Add rows in order of time: leaves `[N, ...]`, with lanes `[N, E, ...]`. The newest C rows are kept.

        Args:
          state: From `init` or an earlier call. Donate it in a jitted step.
          rows: In the structure of the example given to `init`.
          priority: float[N] (with lanes `[N, E]`), |p| of each new row; only for prioritized samplers. Rows without one, or
            with NaN or infinity, get the largest priority before this call.
          mask: bool[N] (with lanes `[N, E]`): rows where it is False are skipped and take no space.
        Raises:
          ValueError, TypeError: wrong structure, dtype or shape (at trace time); or a NumPy value does not fit its leaf. In a
            jitted function of yours JAX narrows NumPy arguments first, and may misread another byte order, without an error.
          OSError: (eager) a storage could not write rows. The state with those that it wrote is `error.result`.
          StoreCorrupted: (eager) likewise, because a file of the storage was cut short.
        Cost: O(N) if the state is donated; otherwise a copy of the buffer.

        Example:
          >>> import fbuf, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100, lanes=2)
          >>> state = buffer.init({"t": 0})
          >>> state = buffer.extend(state, {"t": jnp.arange(6).reshape(3, 2)}, mask=jnp.array([[1, 1], [1, 0], [1, 1]], bool))
          >>> buffer.size(state)
          Array(5, dtype=int32)
        """
        return self._extend("Buffer.extend", state, rows, priority, mask)

    def _extend(self, call: str, state: BufferState, rows: PyTree, priority: Any, mask: Any) -> BufferState:
        if checks.can_trace(self, state, rows, priority, mask):
            after = extend(self, state, rows, priority, mask, static=(call,))[0]
        else:
            after = self._extend_checked(state, rows, priority, mask, call)[0]
        raise_failed(after, self.storage, after)
        return after

    def update_priority(
        self, state: BufferState, index: Index, td_error: Any, *, mask: Any = None, eta: Any = 0.9
    ) -> BufferState:
        r"""Set the priorities of drawn rows, or windows, from the magnitudes of their TD errors.

        NaN and infinite errors, and indices that are out of range, stale or no longer anchors, are skipped one by one
        and counted in `stats`. The last of several errors for one row wins.

        Args:
          index: `batch.index`, `[B]`; or `window_index`, `[B, T]`, to set the priority of each row by itself.
          td_error: float, in the shape of the index; or, with an index `[B]` and a view of windows, float[B, T], the errors of
            each window's rows (those of the burn-in may be left out). The priority of a window is
            :math:`\eta \max_t |\delta_t| + (1 - \eta) \, \mathrm{mean}_t |\delta_t|` (Kapturowski et al. 2019, section 2.3).
          mask: bool[B, T]. With an index `[B]`: which errors count, such as `batch.data["learning_mask"]`. A window without
            any gets 0; a window with a counted error that is not finite is skipped. With an index `[B, T]`: which rows to
            set. Rows that cannot be sampled are refused (`~jnp.isnan(priorities(state, index))` leaves them out). None: all.
          eta: In [0, 1]; a number or float[].
        Raises:
          TypeError: the sampler has no priorities; `index` is not an `Index`.
          ValueError: shapes differ; `mask` is given for errors `[B]`; eta is not a number from 0 to 1.
        Cost: O(B log C).

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.prioritized(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> state, batch = buffer.sample(state, jax.random.key(0), 3)
          >>> state = buffer.update_priority(state, batch.index, jnp.array([0.1, -2.0, jnp.nan]))
          >>> float(buffer.stats(state)["max_priority"]), int(buffer.stats(state)["refused_nonfinite"])
          (2.0, 1)
        """
        call = "Buffer.update_priority"
        checks.check_state(call, self, state)
        if checks.can_trace(self, state, index, td_error, mask):
            checks.check_is_index(call, index)
            checks.check_eta(call, eta)
            return update_priority(self, state, index, td_error, mask, eta)[0]
        arguments = checks.check_errors(call, self, index, td_error, mask, eta)
        return priorities.update_priority(self, state, *arguments)[0]

    def update_rows(self, state: BufferState, index: Index, fields: PyTree, *, mask: Any = None) -> BufferState:
        """Replace some leaves of existing rows. Stale indices are skipped and counted; the last of duplicates wins.

        Args:
          index: `[B]` or `[B, T]`, from a sample, `window_index`, `get` or `rows`. A row in two windows is a duplicate:
            the later window of the batch wins.
          fields: Part of the row's structure, leaves `[B, ...]` or `[B, T, ...]`: `{"reward": x}`, nested dicts, or paths as
            keys: `{"next/obs": x}`.
          mask: bool, in the shape of the index: rows where it is False keep their values, and are not counted.
        Raises:
          ValueError: a field that rows do not have, or one that ends episodes.
        Cost: O(n log n) for n rows; on the host each row is stored again, and old states keep the old one.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> state, batch = buffer.sample(state, jax.random.key(0), 3)
          >>> state = buffer.update_rows(state, batch.index, {"t": jnp.full(3, 9)})
          >>> buffer.get(state, batch.index).data["t"].tolist()
          [9, 9, 9]
        """
        call = "Buffer.update_rows"
        checks.check_writable(call, self)
        after = write.update_rows(self, state, *checks.check_update(call, self, state, index, fields, mask))[0]
        raise_failed(after, self.storage, after)
        return after

    def cut(self, state: BufferState, lanes: Any = None) -> BufferState:
        """End the running episodes at their newest rows: the next row of each lane begins an episode.

        For ends that no row marks: an environment was reset by hand, or restarted after `load` or `resume`. No window, stack
        or return continues across a cut. It counts as a truncation whose final observation is unknown, also if the view names
        one. A lane that is empty, or whose next row begins an episode anyway, is unchanged.

        Args:
          state: From `init` or an earlier call. Donate it in a jitted step.
          lanes: bool[E], the lanes to cut (without lanes bool[]); None: all.
        Raises:
          TypeError, ValueError: `lanes` is not bool, or has another shape.
        Cost: O(E); on the host one callback, which records the cut in the files.

        `convert`, `grow`, `save` and `resume` keep cuts. A buffer that draws single rows (`views.Row`) keeps no episodes:
        nothing changes there, and `convert` to another view has no cut.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100, view=fbuf.views.Sequence(3, autoreset="same_step"))
          >>> rows = {"t": jnp.arange(4), "terminated": jnp.zeros(4, bool), "truncated": jnp.zeros(4, bool)}
          >>> state = buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)
          >>> state = buffer.cut(state)  # the environment is reset
          >>> state = buffer.extend(state, rows)
          >>> windows = buffer.peek(state, jax.random.key(0), 64).data["t"]
          >>> sorted(set(map(tuple, windows.tolist())))
          [(0, 1, 2), (1, 2, 3)]
        """
        checks.check_writable("Buffer.cut", self)
        checks.check_state("Buffer.cut", self, state)
        return write.cut(self, state, checks.check_lanes("Buffer.cut", self, lanes))[0]

    def clear(self, state: BufferState) -> BufferState:
        """Drop every row. Annealed numbers are kept, and every index becomes stale. Cost: O(C).

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> int(buffer.size(buffer.clear(state)))
          0
        """
        checks.check_writable("Buffer.clear", self)
        checks.check_state("Buffer.clear", self, state)
        return write.clear(self, state)[0]

    def set(self, state: BufferState, *, rebuild: bool = False, **numbers: Unpack[Numbers]) -> BufferState:
        """Replace numbers of the sampler (`alpha`, `beta`, `eps`, ...), `set(state, alpha=0.5)`, without compiling again.

        Args:
          rebuild: Apply the numbers to the priorities of all rows, not only to those set later. `Ranked` always uses its
            current numbers, so nothing changes there.
        Raises:
          ValueError: the sampler has no such number.
          TypeError: with `rebuild`, the sampler has no priorities, or is `Prioritized` without largest="held".
        Cost: O(1); with `rebuild` O(C), in place if the state is donated.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100, sampler=fbuf.samplers.Prioritized(largest="held"))
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)}, priority=jnp.arange(1.0, 6.0))
          >>> state = buffer.set(state, alpha=0.0, rebuild=True)
          >>> round(float(buffer.peek(state, jax.random.key(0), 4).probability[0]), 1)
          0.2
        """
        call = "Buffer.set"
        checks.check_state(call, self, state)
        check_bool(call, "rebuild", rebuild)
        checked = checks.check_numbers(call, self.sampler, self.sampler.numbers, numbers)
        if rebuild:
            checks.check_rebuilds(call, self.sampler)
        state = write.set_numbers(self, state, checked)[0]
        return write.rebuild(self, state)[0] if rebuild else state

    # ----------------------------------------------------------------------------------------------- reading

    def sample(
        self, state: BufferState, key: jax.Array, batch_size: int | None = None, **options: Unpack[DrawOptions]
    ) -> tuple[BufferState, Sample]:
        """Draw a batch. Use the returned state from then on: it orders this read before later writes.

        With `prefetch=1` return the batch drawn by the previous call and draw the next: see `Buffer`.

        Args:
          state: From `init` or an earlier call.
          key: PRNG key, typed or raw; consumed.
          batch_size: B >= 1, a Python int; None: the buffer's.
          **options: Numbers of the sampler for this call: `beta=schedule(step)`. With prefetch they apply to the batch drawn
            now, which the next call returns.
        Returns:
          The state, and a `Sample` with leaves `[B, ...]`. From an empty buffer `mask` is False, and data and weights are zero.
        Raises:
          ValueError, TypeError: `batch_size` is missing, < 1, or with prefetch not the buffer's; the sampler has no such
            option (at trace time).
        Cost: O(B) (`Prioritized`: O(B log C)); on the host one callback, with prefetch two. A jitted call without
          `donate_argnums=0`, such as `jax.jit(buffer.sample, static_argnums=2)`, copies the buffer; `peek` needs no donation.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> step = jax.jit(lambda state, key: buffer.sample(state, key, 32), donate_argnums=0)
          >>> state, batch = step(state, jax.random.key(0))
          >>> batch.data["t"].shape, bool(batch.mask.all())
          ((32,), True)
        """
        state, batch = self._sample(state, key, batch_size, {**options})
        return state, self._exact("Buffer.sample", state, batch)

    def peek(
        self, state: BufferState, key: jax.Array, batch_size: int | None = None, **options: Unpack[DrawOptions]
    ) -> Sample:
        """Return the batch that `sample` would draw, without a new state: for evaluation, and for `vmap` over keys.

        It is not ordered before later writes: in a step that also writes use `sample`. A prefetched batch stays. Nothing is
        copied: `jax.jit(buffer.peek, static_argnums=2)(state, key, 32)`.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> keys = jax.random.split(jax.random.key(0), 4)
          >>> jax.vmap(lambda key: buffer.peek(state, key, 8).data["t"])(keys).shape
          (4, 8)
        """
        call, form = "Buffer.peek", "peek(state, key, batch_size)"
        checks.check_state(call, self, state)
        size, checked = checks.check_draw(call, form, self, key, batch_size, {**options})
        state, batch = read.sample(self, state, key, checked, static=(size,))
        return self._exact(call, state, batch)

    def get(self, state: BufferState, index: Any) -> Rows:
        """Return rows by index, as stored.

        Args:
          index: An `Index` of any shape (stale: `mask` False), or slots int32[...] (the rows there now).
        Returns:
          `Rows` with leaves `[..., item]`.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> buffer.get(state, jnp.array([0, 4])).data["t"].tolist()
          [0, 4]
        """
        checks.check_state("Buffer.get", self, state)
        if isinstance(index, Index):
            rows = read.get(self, state, checks.check_any_index("Buffer.get", index))[1]
        else:
            rows = read.rows_at(self, state, checks.check_slots("Buffer.get", index))[1]
        return self._exact("Buffer.get", state, rows)

    def window_index(self, state: BufferState, index: Index) -> Index:
        """Return the rows of sampled windows, to write recurrent states or latents back with `update_rows` (R2D2).

        Call it before the next `extend`: afterwards a window may have lost rows. The result keeps its meaning: rows that are
        overwritten later are stale, one by one. An index that names no window any more (stale, or no anchor) stays invalid
        in all T entries, so that `update_rows` and `update_priority` refuse and count them.

        Args:
          index: `batch.index`, `[B]`, of a view with windows (`views.Sequence`, `views.Episode`). `views.Row` and
            `views.Transition` have none: there `batch.index` names the rows themselves.
        Returns:
          An `Index` `[B, T]` of the rows in `batch.data`, masked where `batch.data["mask"]` is False.
        Raises:
          TypeError: the view makes no windows; `index` is not an `Index`.
        Cost: O(B T).

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100, view=fbuf.views.Sequence(3, episode_end=()))
          >>> state = buffer.extend(buffer.init({"t": 0, "carry": 0.0}), {"t": jnp.arange(5), "carry": jnp.zeros(5)})
          >>> state, batch = buffer.sample(state, jax.random.key(0), 8)
          >>> rows = buffer.window_index(state, batch.index)
          >>> state = buffer.update_rows(state, rows, {"carry": 10.0 * batch.data["t"]})
          >>> buffer.get(state, rows).data["carry"][0] / 10 == batch.data["t"][0]
          Array([ True,  True,  True], dtype=bool)
        """
        call = "Buffer.window_index"
        checks.check_state(call, self, state)
        checks.check_windows(call, self.view)
        return read.window_index(self, state, checks.check_index(call, index))[1]

    def priorities(self, state: BufferState, index: Index | None = None) -> jax.Array:
        """Return priorities |p| as `update_priority` and `extend(..., priority=...)` set them, not the sampler's leaves.

        It is not ordered before later writes: a jitted step that also writes may copy the priorities. `jax_debug_nans` refuses
        its NaN.

        Args:
          index: Rows, an `Index` of any shape; None: every row.
        Returns:
          float32 in the shape of the index; for every row in the order and shape of `rows`, `[C]` or `[C / E, E]`. NaN where
          nothing can be drawn: stale and masked indices, rows that are no anchors, empty slots.

        `Prioritized` stores |p| with largest="held". Otherwise it inverts the leaf by the current alpha and eps: exact to some
        1e-6 unless these changed since the row was written; NaN if alpha is 0. `Ranked` rounds down, by an eighth at most.

        Raises:
          TypeError: the sampler has no priorities; `index` is not an `Index`.
        Cost: O(rows asked for); with priorities on the host one callback.

        Example:
          >>> import fbuf, jax.numpy as jnp
          >>> buffer = fbuf.prioritized(4)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(3)}, priority=jnp.array([1.0, 2.0, 3.0]))
          >>> state = buffer.update_priority(state, buffer.rows(state, last=1).index, jnp.array([-5.0]))
          >>> buffer.priorities(state).round(1).tolist()
          [1.0, 2.0, 5.0, nan]
        """
        call = "Buffer.priorities"
        checks.check_state(call, self, state)
        checks.check_prioritized(call, self.sampler)
        if index is not None:
            index = checks.check_any_index(call, index)
        return priorities.read_priorities(self, state, index)[1]

    def rows(self, state: BufferState, *, last: int | None = None) -> Rows:
        """Return every row, oldest first: leaves `[C, ...]`, with lanes `[C / E, E, ...]`; `mask` is False past the newest.

        With a writer that replaces any row all lanes are one stream, in order of arrival along both axes.

        Args:
          last: n, for the newest n rows (of each lane) alone: leaves `[n, ...]`, with lanes `[n, E, ...]`. If fewer are held,
            the first entries have `mask` False.
        Cost: O(C), or O(n).

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> rows = buffer.rows(state)
          >>> rows.data["t"][rows.mask].tolist(), buffer.rows(state, last=2).data["t"].tolist()
          ([0, 1, 2, 3, 4], [3, 4])
        """
        call = "Buffer.rows"
        checks.check_state(call, self, state)
        if last is None:
            rows = read.all_rows(self, state)[1]
        else:
            rows = read.last(self, state, static=(checks.check_last(call, self, last),))[1]
        return self._exact(call, state, rows)

    def can_sample(self, state: BufferState) -> jax.Array:
        """Return bool[], whether there is an anchor to draw.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> bool(buffer.can_sample(state)), bool(buffer.can_sample(buffer.clear(state)))
          (True, False)
        """
        checks.check_state("Buffer.can_sample", self, state)
        return read.can_sample(self, state)[1]

    def can_add(self, state: BufferState, n: Any = 1) -> jax.Array:
        """Return bool[]: whether `n` more rows in each lane can be stored without overwriting one that was not drawn yet.

        It is False only for a full queue, `samplers.Consume(order="fifo")`, which refuses rows; other buffers overwrite the
        oldest ones.

        Args:
          n: Rows of a call of `extend`, an int or int32[].
        Raises:
          TypeError, ValueError: `n` is not one integer >= 0.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(8, sampler=fbuf.samplers.Consume(order="fifo"))
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(6)})
          >>> bool(buffer.can_add(state, 2)), bool(buffer.can_add(state, 3))
          (True, False)
          >>> state, batch = buffer.sample(state, jax.random.key(0), 4)
          >>> batch.data["t"].tolist(), bool(buffer.can_add(state, 6))
          ([0, 1, 2, 3], True)
        """
        checks.check_state("Buffer.can_add", self, state)
        return read.can_add(self, state, checks.check_rows_count("Buffer.can_add", n))[1]

    def __len__(self) -> NoReturn:
        raise TypeError("len(buffer): the rows are in the state. Write buffer.size(state), or buffer.capacity.")

    def __bool__(self) -> bool:
        return True

    def size(self, state: BufferState) -> jax.Array:
        """Return int32[], the rows held.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> int(buffer.size(state))
          5
        """
        checks.check_state("Buffer.size", self, state)
        return read.size(self, state)[1]

    def stats(self, state: BufferState) -> dict[str, jax.Array]:
        """Return scalars to log: sizes, statistics of the sampler, and counts of everything refused, by reason.

        `is_full` is bool[], whether all C slots hold rows. `cursor` is int32[], the position in [0, C / E) of each lane's next
        row; -1 if masked rows have made the lanes' positions differ; missing with a writer that replaces any row. `writes` is
        uint32[], the rows of all lanes written since `init`, overwritten ones included; it stops at 2^32 - 1. `clear`
        raises it to a multiple of C. `unlearnt` (views of windows; not under a trace) is int32[], the rows held that no window
        learns, as in `summary`. It reads the flags of all rows: 0.03 to 0.2 s for a million.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> int(buffer.stats(state)["size"])
          5
        """
        from fbuf._buffer.summary.collect import row_flags, unlearnt

        checks.check_state("Buffer.stats", self, state)
        return read.stats(self, state)[1] | unlearnt(self, state, lambda: row_flags(self, state)[1])

    def summary(self, state: BufferState, *, compare: int | None = 1 << 14) -> Summary:
        """Summarise the contents: ages, priorities, effective size, episodes, duplicates, bytes by leaf. Eager.

        It prints as a table (also in notebooks, and with rich); `to_dict()` is flat, for loggers. For scalars inside a step use
        `stats`; for pictures `fbuf.plot`.

        Args:
          compare: How many of the newest rows are read and compared, to count duplicates; 0: none, None: all.
        Raises:
          TypeError: the state is traced.
          ValueError: `compare` is not a number of rows.
          RuntimeError: the state was donated; or it is too old: rows, or priorities on the host, have expired.
        Cost: O(C), one jitted call and the transfer of about 20 bytes a row; compared host rows are decoded.

        Example:
          >>> import fbuf, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(capacity=8)
          >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(6, dtype=jnp.int32) // 2)
          >>> summary = buffer.summary(state)
          >>> summary.size, summary.distinct, summary.ages.median, summary.effective_size
          (6, 3, 2, 6.0)
        """
        from fbuf._buffer.summary.summary import summary

        checks.check_state("Buffer.summary", self, state)
        return summary(self, state, compare)

    def nbytes(self, state: BufferState) -> dict[str, int]:
        """Return the bytes in use: `device`, `host`, `disk`. Eager.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> buffer.nbytes(state)["host"]
          0
        """
        sizes = self.storage.nbytes(state.rows)
        device = sizes["device"] + tree_bytes(dataclasses.replace(state, rows=None))
        host = sizes["host"] + self.sampler.host_bytes(state.sampler)
        return {**sizes, "device": device, "host": host}

    def flush(self, state: BufferState) -> None:
        """Wait until every row is on disk, safe from a power failure (`storages.Memmap`, `Compressed`). Eager.

        Without files there is nothing to wait for.

        Raises:
          OSError: the system cannot write the files.
        Cost: the data that the system has not written yet, at the speed of the disk.

        Example:
          >>> import fbuf, tempfile
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     buffer = fbuf.Buffer(100, storage=fbuf.storages.Memmap(path=f"{folder}/rows"))
          ...     state = buffer.add(buffer.init({"t": 0}), {"t": 7})
          ...     buffer.flush(state)
          ...     del state
        """
        checks.check_state("Buffer.flush", self, state)
        if self.storage.in_files:
            jax.block_until_ready(state)
            raise_failed(state, self.storage)
            self.storage.flush(state.rows)

    def plan(self, example: PyTree, **settings: Unpack[PlanSettings]) -> Plan:
        """Return the bytes on device, host and disk, and peaks, before anything is allocated; see `fbuf.Plan`.

        Example:
          >>> import fbuf, jax.numpy as jnp
          >>> plan = fbuf.Buffer(1_000_000).plan({"obs": jnp.zeros((84, 84), jnp.uint8)})
          >>> plan.device > 7056 * 1_000_000
          True
        """
        from fbuf._buffer.plan import plan

        return plan(self, example, **settings)

    def convert(self, other: Buffer, state: BufferState) -> BufferState:
        """Return a state of `other` with the same rows: with another sampler, view, prefetch, batch_size or on_read.

        Rows are shared, not copied: donate at most one of the two states. Priorities and annealed numbers start afresh. Stages
        of `on_read` that both have under one name keep what they learned; others learn from the rows held. Rows before the
        oldest row of a full lane are unknown, so its first rows may no longer be anchors, and windows with a stride begin
        at that row.

        Raises:
          ValueError: `other` has another capacity, lanes, storage, writer or on_write, or names a leaf that rows do not have.
        Cost: O(C).

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> ranked = fbuf.prioritized(100)
          >>> int(ranked.size(buffer.convert(ranked, state)))
          5
        """
        call = "Buffer.convert"
        checks.check_state(call, self, state)
        spec = self.storage.spec(state.rows)[0]
        if not isinstance(other, Buffer):
            raise TypeError(f"{call}: other is {type(other).__name__}; expected a Buffer. Write convert(other, state).")
        checks.check_same_rows(call, self, other)
        checks.check_fields(call, other, spec)
        sampler = init_host_sampler(other, call)
        convert = _convert.index_rows if self.writer.read_only else _convert.convert
        anchors, sampler = convert(self, state, sampler, static=(other,))[1]
        if other.on_read != self.on_read:
            state = transforms.fit_transforms(other, state, since=self)
        state = dataclasses.replace(state, anchors=anchors, sampler=sampler, ahead=None)
        state = dataclasses.replace(state, ahead=prefetch.empty_prefetch(other, state))
        return init.validate_transforms(other, state)

    def grow(
        self, state: BufferState, blocks: Any = None, *, capacity: int | None = None
    ) -> tuple[Buffer, BufferState]:
        """Return a larger buffer and its state, with the same rows, indices and priorities. Eager.

        `storages.Deduplicated` gets more space for distinct blocks, `storages.Ragged` for rows (until a row has been
        overwritten). Shapes change, so jitted functions compile again. Unchanged arrays are shared with `state`: donate at
        most one of the two.

        Args:
          blocks: New size of the table, as for `Deduplicated`; None: half as many again.
          capacity: New capacity, for `Ragged`; None: twice as many rows.
        Returns:
          The buffer to use from then on, and its state.
        Raises:
          TypeError: the storage cannot grow; or the state is traced.
          ValueError: the new size is not larger, or rows have been overwritten.
        Cost: O(C + blocks); both tables exist for a moment.

        Example:
          >>> import fbuf
          >>> buffer = fbuf.Buffer(10, storage=fbuf.storages.Ragged())
          >>> state = buffer.add(buffer.init({"text": "", "n": 0}), {"text": "a", "n": 1})
          >>> buffer, state = buffer.grow(state, capacity=1000)
          >>> buffer.capacity, int(buffer.size(state))
          (1000, 1)
        """
        from fbuf._buffer.grow import grow

        checks.check_writable("Buffer.grow", self)
        checks.check_state("Buffer.grow", self, state)
        return grow(self, state, blocks, capacity)

    _check_state = checks.check_made_by  # by every operation when it is traced

    def _extend_checked(
        self,
        state: BufferState,
        rows: Any,
        priority: Any,
        mask: Any,
        call: str,
        slots: bool = False,
        inline: bool = False,
        repeats: bool = False,
    ) -> tuple[BufferState, Any]:
        """Return the state of `extend` or `add`, and with `slots` where a writer that replaces any row put each row.

        With `inline` the write is part of the operation that calls this, which has checked the state. `repeats`: see
        `write.extend`.
        """
        checks.check_writable(call, self)
        leaves, values, shape, priority, mask = checks.check_rows(call, self, state, rows, priority, mask)
        if shape[0] == 0:
            return state, jnp.zeros(shape, jnp.int32) if slots else None
        if values is not None:
            leaves = write.store_values(self, state, leaves, values, shape, mask)
        static = shape, (not call.endswith("add")) + (self.lanes is not None), slots, repeats
        if inline:
            return write.extend.inline(self, state, leaves, priority, mask, *static)
        return write.extend(self, state, leaves, priority, mask, static=static)

    def _sample(
        self, state: BufferState, key: jax.Array, batch_size: int | None, options: dict[str, Any]
    ) -> tuple[BufferState, Sample]:
        """Return what `sample` does, with 64-bit leaves as pairs (`fbuf._core.pytree`)."""
        call = "Buffer.sample"
        checks.check_state(call, self, state)
        size, checked = checks.check_draw(call, "sample(state, key, batch_size)", self, key, batch_size, options)
        if not self.prefetch:
            return read.sample(self, state, key, checked, static=(size,))
        if size != self.batch_size:
            raise ValueError(
                f"{call}: batch_size is {size}, but the state holds a batch of {self.batch_size} drawn ahead. Leave it out, or "
                f"write dataclasses.replace(buffer, batch_size={size}) and buffer.convert(other, state)."
            )
        return prefetch.sample(self, state, key, checked)

    def _exact(self, call: str, state: BufferState, batch: Any) -> Any:
        """Return a batch, or rows, with 64-bit leaves as NumPy arrays."""
        if not self.storage.exact:
            return batch
        return dataclasses.replace(batch, data=pytree.exact(call, self.storage.spec(state.rows)[0], batch.data))


_operation = functools.partial(Operation, scope=False)  # of checks and core; what it calls has a scope


@_operation
def extend(
    buffer: Buffer, state: BufferState, rows: Any, priority: Any, mask: Any, call: str
) -> tuple[BufferState, Any]:
    """Return the state of `extend` or `add`."""
    return buffer._extend_checked(state, rows, priority, mask, call, inline=True)


@_operation
def update_priority(
    buffer: Buffer, state: BufferState, index: Any, td_error: Any, mask: Any, eta: Any
) -> tuple[BufferState, None]:
    """Return the state of `update_priority`."""
    arguments = checks.check_errors("Buffer.update_priority", buffer, index, td_error, mask, eta)
    return priorities.update_priority.inline(buffer, state, *arguments)

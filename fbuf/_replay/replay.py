"""`Replay`: a buffer, its state and its key in one object, for notebooks, torch loops and threads.

The methods of `Buffer` are traced, so they count invalid values instead of raising. `Replay` runs eagerly: after each call it
reads the counters and raises. It donates the state to every write, and returns batches as JAX, numpy or torch arrays.

Threads may share it. Each method holds a `FairLock` while it dispatches, so one call at a time donates the state.
It reads counters after it releases the lock. With a limit, calls wait for each other without holding the lock.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fbuf._buffer import checks, read
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.checked import raise_for
from fbuf._buffer.state import COUNTERS, BufferState, anchor_count, room_left
from fbuf._buffer.summary.summary import Summary
from fbuf._checkpoint import replay as _replay
from fbuf._checkpoint.async_save import Saving
from fbuf._checkpoint.replay import ReplayMetadata
from fbuf._concurrency.fair_lock import Acquired, FairLock
from fbuf._concurrency.interrupts import DeferInterrupts
from fbuf._concurrency.wakeup import ReplayClosed, StopToken
from fbuf._core.arguments import DrawOptions, Numbers, check_bool, check_int
from fbuf._core.closing import Closing
from fbuf._core.progress import Bar
from fbuf._core.pytree import PyTree
from fbuf._core.sample import Index, Rows, Sample, deferring
from fbuf._core.text_table import counted
from fbuf._host.failed_writes import write_of
from fbuf._replay import arguments, programs
from fbuf._replay.arguments import Form
from fbuf._replay.batches import Batches, EpochBatches
from fbuf._replay.engine import Engine
from fbuf._replay.limiter import BlockingLimiter, Kind, start
from fbuf._replay.locked import locked, restores_lock
from fbuf._replay.outside_jit import refuse_trace
from fbuf._replay.written import newest
from fbuf.limits import Limit
from fbuf.storages import Ragged

SUMMARY_ROWS = 1 << 17
"""Largest capacity whose summary a notebook shows for the replay itself; of larger ones it is computed on request."""


class Replay(Closing):
    """Hold a buffer, its state and its key, for plain Python loops. Threads may share it.

    Args:
      buffer: The storage, sampler, view and writer.
      example: One row, as for `Buffer.init`; or the state of a data set, which is copied:
        `Replay(*fbuf.datasets.open(path))`.
      seed: Seed of the draws. Equal seeds and histories give equal batches.
      strict: Raise for values that the methods of `Buffer` only count. False leaves them to `stats()`.
      unlimited: Double the capacity when the buffer is full, instead of evicting rows (`storages.Ragged` only). Every method
        compiles again then, and `buffer` is replaced, so start with a capacity of the right order.
      limit: From `fbuf.limits`. `add` and `extend` then wait until it allows their rows; `sample` waits until it allows the
        draws and a row can be sampled. None: no call waits, unless the sampler is `Consume(order="fifo")`: then `add` and
        `extend` wait for room, and `sample` waits for a whole batch, with any limit.
      resume: Continue with the rows in the storage's files (`Buffer.resume`), after a `cut`. Their priorities are reset. A
        limit starts as if they had been drawn at its target ratio.

    If a storage cannot write (a full disk, say), the call raises OSError and the replay keeps the rows it had, with a cut; once
    there is room, write again the rows that the error says were not written. Rows that `add` collected for a store in host
    memory are kept, and written before the next rows, as the error says; until then batches and `save` are without them, and
    `state` raises. Priorities that were set for them before are lost: they get that of new rows.
    Ctrl-C is deferred until the current write is complete. Arrays may be changed once the call that took them returned.

    Plain Python loops are cheap: `add` collects NumPy rows in host memory, and one `extend` writes a block of them, at the
    latest before anything reads the state. From `Device` on a CPU, `Host`, `Compressed` or `Memmap`, with `Uniform` or
    `Epoch`, of rows, transitions or windows whose episodes end by flags, `sample(to="numpy")` and `to="torch"` draw with
    NumPy, collected rows included. From a prioritized buffer a small program sets the last priorities and draws the slots.
    Batches, counts and errors are those of writing each row and priority at once. Rows with a priority, those after it in its
    lane until the row can be drawn, JAX or CUDA arrays, and rows under a limit are written at once. So are rows of parts that
    do not say that they are `row_by_row`: in files, deduplicated or ragged, for transforms that compute or learn from rows,
    and windows of `Consume` or with `largest="held"`.

    For actors and a learner in one process, let each actor add in a thread, and let the learner use `batches`. `close`, or
    leaving the `with`, ends waiting calls with `ReplayClosed`. Rows may be overwritten between `sample` and
    `update_priority` under a limit, with `prefetch=1`, and after `batches`: indices that are stale, or no anchors any more, are
    only counted there.

    Example:
      >>> import fbuf, numpy as np
      >>> replay = fbuf.Replay(fbuf.prioritized(100), {"obs": np.zeros(3, np.float32)}, seed=0)
      >>> index = replay.extend({"obs": np.ones((5, 3), np.float32)})
      >>> batch = replay.sample(4, to="numpy")
      >>> replay.update_priority(batch.index, np.ones(4, np.float32))
      >>> len(replay), batch.data["obs"].shape
      (5, (4, 3))

      An actor in a thread, with eight draws for each row that it adds:

      >>> import threading
      >>> limit = fbuf.limits.samples_per_insert(8, min_size=100, rows=10, draws=32)
      >>> def act(replay):
      ...     try:
      ...         while True:
      ...             replay.extend({"t": np.arange(10)})
      ...     except fbuf.ReplayClosed:
      ...         pass
      >>> with fbuf.Replay(fbuf.Buffer(1000), {"t": 0}, limit=limit) as replay:
      ...     actor = threading.Thread(target=act, args=(replay,))
      ...     actor.start()
      ...     for step, batch in zip(range(100), replay.batches(32)):
      ...         pass  # learn
      >>> actor.join()
    """

    @arguments.named_options
    def __init__(
        self,
        buffer: Buffer,
        example: PyTree,
        seed: int = 0,
        *,
        strict: bool = True,
        unlimited: bool = False,
        limit: Limit | None = None,
        resume: bool = False,
    ):
        refuse_trace("__init__", example)
        if not isinstance(buffer, Buffer):
            usage = "The order is Replay(buffer, example)."
            if type(buffer).__name__ == "Mixture":
                usage = "Carry the state of a mixture yourself: state, batch = mixture.sample(state, key, 256)."
            raise TypeError(f"Replay: buffer is {type(buffer).__name__}; expected a Buffer. {usage}")
        if unlimited and not isinstance(buffer.storage, Ragged):
            raise TypeError(
                f"Replay: unlimited needs storages.Ragged, but the storage is {buffer.storage!r}. Use "
                f"Buffer(storage=fbuf.storages.Ragged()), or a larger capacity."
            )
        arguments.check_seed("Replay", seed)
        arguments.check_limit("Replay", limit, buffer, unlimited)
        if isinstance(example, BufferState):
            if not buffer.writer.read_only:
                raise TypeError(
                    "Replay: example is a BufferState; expected one row. To continue from a state, write replay = "
                    "Replay(buffer, row); replay.state = state."
                )
            checks.refuse_donated("Replay", example)
            checks.check_made_by(buffer, example, "Replay")
            state = copy.deepcopy(example)  # the caller keeps the original
        else:
            example = example if isinstance(buffer.storage, Ragged) else arguments.to_rows(example)
            state = buffer.resume(example) if resume else buffer.init(example)
        if limit is None and room_left(buffer, state) is not None:
            limit = Limit()
        pace = None if limit is None else start(limit, int(np.asarray(state.ring.size).sum()))
        self._begin(
            ReplayMetadata(
                buffer, state, jax.random.key(seed), np.array(state.counters), strict, unlimited, limit, pace
            )
        )

    def _begin(self, metadata: ReplayMetadata) -> None:
        self._engine = Engine(metadata.buffer, metadata.state, metadata.key, metadata.unlimited)
        self.strict = metadata.strict
        self._lock, self._closed = FairLock(), False
        self._limiter: BlockingLimiter | None = None
        if metadata.limit is not None and metadata.pace is not None:
            self._limiter = BlockingLimiter(
                metadata.limit, metadata.pace, shrinks=metadata.buffer.storage.grows, size=self._engine.size
            )
        self._ahead = metadata.buffer.prefetch > 0 or metadata.limit is not None

    @property
    def buffer(self) -> Buffer:
        """The buffer. `grow`, and `unlimited`, replace it."""
        return self._engine.buffer

    @property
    def state(self) -> BufferState:
        """The current state. The next write through this object donates it, so copy what you keep.

        Set it to continue from another state of `buffer`, which must fit and not be donated: after a step of your own that
        took `replay.state`, or to go back to a copy. Rows added since `state` was read are lost.

        Example:
          >>> import copy, fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100), {"t": 0})
          >>> before = copy.deepcopy(replay.state)
          >>> replay.add({"t": np.int32(7)})
          >>> replay.state = before
          >>> len(replay)
          0
        """
        refuse_trace("state")
        return self._current_state()

    @state.setter
    def state(self, state: BufferState) -> None:
        refuse_trace("state", state)
        if not isinstance(state, BufferState):
            raise TypeError(f"Replay.state: got {type(state).__name__}; expected a BufferState of {self.buffer!r}.")
        if not isinstance(state.header, Array):
            raise TypeError(
                f"Replay.state: its leaves are {type(state.header).__name__}; expected JAX arrays. Write replay.state = "
                f"jax.device_put(state)."
            )
        checks.refuse_donated("Replay.state", state)
        checks.check_made_by(self.buffer, state, "Replay.state")
        self._engine.check_rows(state)
        self._set_state(state)

    @restores_lock
    def _set_state(self, state: BufferState) -> None:
        with self._lock.acquire():
            self._engine.replace(state)
            self._lock.notify()

    @restores_lock
    def _current_state(self) -> BufferState:
        with self._lock.acquire():
            return self._engine.lend()

    @property
    def limit(self) -> Limit | None:
        """The limit, or None."""
        return None if self._limiter is None else self._limiter.limit

    def add(self, row: PyTree, *, priority: Any = None, mask: Any = None, timeout: float | None = None) -> None:
        """Add one row (one per lane); see `Buffer.add`, and `extend` for the limit.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.add({"t": 7, "done": True})
          >>> len(replay)
          1
        """
        refuse_trace("add", row, priority, mask)
        if timeout is not None or priority is not None or self._limiter is not None or not self._collect_now(row, mask):
            self._write("Replay.add", programs.add, row, priority, mask, timeout)

    def extend(self, rows: PyTree, *, priority: Any = None, mask: Any = None, timeout: float | None = None) -> Index:
        """Add rows in order of time; see `Buffer.extend`. Wait until the limit allows all of them.

        Args:
          timeout: Seconds to wait for the limit; 0 does not wait, None waits without a bound. Waiting for other threads'
            calls does not count.
        Returns:
          The `Index` of the rows, `[N]` or `[N, E]`, masked where none was written. It is computed when it is read, or before
          the next write if it is still referenced; otherwise it costs nothing.
        Raises:
          TimeoutError: the limit did not allow the rows in time.
          ReplayClosed: the replay was closed.
          ValueError: the limit will never allow the rows; or `timeout` is given without a limit.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100), {"t": 0}, limit=fbuf.limits.queue(5))
          >>> index = replay.extend({"t": np.arange(5)})
          >>> replay.get(index).data["t"].tolist()
          [0, 1, 2, 3, 4]
          >>> try:
          ...     replay.extend({"t": np.arange(5)}, timeout=0.01)
          ... except TimeoutError:
          ...     print("the queue is full")
          the queue is full
        """
        refuse_trace("extend", rows, priority, mask)
        return self._write("Replay.extend", programs.extend, rows, priority, mask, timeout)

    @restores_lock
    def _write(self, call: str, method: Any, rows: PyTree, priority: Any, mask: Any, timeout: float | None) -> Any:
        self._check_timeout(call, timeout)
        with self._acquire(notify=self._limiter is not None):
            self._refuse_closed(call)
            if method is programs.add and self._limiter is None and self._engine.collect(rows, priority, mask):
                return None
            self._engine.flush(before_rows=True)
            ragged = isinstance(self.buffer.storage, Ragged)
            rows = rows if ragged else arguments.to_rows(rows)
            priority = arguments.to_numbers(call, "priority", priority, "fi")
            mask = arguments.to_numbers(call, "mask", mask, "b")
            count = 0
            if self._limiter is not None:
                shape = checks.check_rows(call, self.buffer, self._engine.state, rows, priority, mask)[2]
                per_lane = np.full(shape[1], shape[0]) if mask is None else np.asarray(mask).reshape(shape).sum(axis=0)
                count, rows_a_lane = int(per_lane.sum()), int(per_lane.max())
                self._check_fits(call, "rows", rows_a_lane, shape[1])
                self._wait(call, "add", count, lambda: self._engine.has_room(rows_a_lane), timeout)
            if ragged:
                rows = self._engine.store_values(call, rows, priority, mask)
            elif method is programs.add:
                rows = self._engine.row_of(call, rows)
            else:
                rows = self._engine.narrowed(call, rows)
            index = None
            self._engine.may_wait |= priority is not None
            with self._counted_rows(count):
                if method is programs.extend and not self.buffer.writer.streams:
                    counts, index = self._engine.donate(programs.extend_placed, rows, priority, mask)
                else:
                    counts = self._engine.donate(method, rows, priority=priority, mask=mask)
            if method is programs.extend and index is None:
                index = self._index_written(len(jax.tree.leaves(rows)[0]), mask)
        # Reading the counters waits for the write, so read them only where rows can be refused.
        if priority is not None or self.buffer.storage.grows:
            self._raise(call, counts)
        return index

    @contextlib.contextmanager
    def _counted_rows(self, count: int) -> Iterator[None]:
        """Count rows for the limit that the `with` block writes and the storage stores."""
        if self._limiter is None:
            yield
            return
        try:
            yield
            self._engine.await_writes()
        except (OSError, RuntimeError) as error:
            failed = write_of(error)
            if failed is not None:
                self._limiter.done("add", max(count - failed.rows, 0))
            raise
        self._limiter.done("add", count)

    def _index_written(self, count: int, mask: Any) -> Index:
        """Return the index of the `count` rows just written in each lane, computed when it is read."""
        keep = np.array(mask) if type(mask) is np.ndarray else mask  # the caller may change it

        def compute(index: Index, name: str) -> jax.Array:
            # also where a function that is being traced reads it
            with jax.ensure_compile_time_eval(), self._acquire():
                if name not in vars(index):  # else another thread was first
                    found = newest(self.buffer, count, self._engine.state.header, keep)
                    vars(index).update(vars(found), _compute_deferred=None)
            return vars(index)[name]

        index: Index = deferring(Index, compute)
        self._engine.written = weakref.ref(index)
        return index

    @restores_lock
    def grow(self, blocks: Any = None, *, capacity: int | None = None) -> None:
        """Make room for distinct blocks, or for ragged rows; see `Buffer.grow`. Replace `self.buffer`.

        Example:
          >>> import fbuf
          >>> replay = fbuf.Replay(fbuf.Buffer(10, storage=fbuf.storages.Ragged()), {"text": "", "n": 0})
          >>> replay.grow(capacity=1000)
          >>> replay.buffer.capacity
          1000
        """
        with self._acquire(notify=True):
            self._engine.flush()
            self._engine.grow(blocks, capacity)

    def sample(
        self,
        batch_size: int | None = None,
        *,
        to: Form = "jax",
        timeout: float | None = None,
        **options: Unpack[DrawOptions],
    ) -> Sample:
        """Draw a batch; see `Buffer.sample`. Wait until the limit allows it and a row can be sampled.

        Warns once if B is larger than the number of rows that can be sampled, where the sampler draws each at most once.

        Args:
          batch_size: B; None uses the buffer's.
          to: Arrays in the `Sample`: "jax", "numpy" or "torch".
          timeout: As for `extend`.
          **options: As for `Buffer.sample`: `beta=0.6`.
        Raises:
          TimeoutError: the limit did not allow the batch in time.
          ReplayClosed: the replay was closed.
          ValueError: no row can be sampled and there is no limit to wait for; the limit will never allow the batch;
            `timeout` is given without a limit; or `to` is invalid.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> batch = replay.sample(4, to="numpy", beta=0.6)
          >>> type(batch.data["t"]).__name__, batch.weight.shape
          ('ndarray', (4,))
        """
        refuse_trace("sample", batch_size, options)
        if to not in arguments.FORMS or timeout is not None:  # the checks take 3 us
            arguments.check_form("Replay.sample", to)
            self._check_timeout("Replay.sample", timeout)
        return self._sample("Replay.sample", batch_size, options, timeout, to=to)

    @restores_lock
    def _sample(
        self,
        call: str,
        batch_size: int | None,
        options: Mapping[str, Any],
        timeout: float | None,
        stop: StopToken | None = None,
        to: Form = "jax",
    ) -> Any:
        with self._acquire(notify=self._limiter is not None, stop=stop):
            self._refuse_closed(call)
            size, numbers = self._engine.check_draw(call, batch_size, options)
            if self._limiter is not None:
                self._check_fits(call, "draws", size)
                self._wait(call, "sample", size, lambda: self._engine.ready(size), timeout, stop)
            if self._engine.warns_short and size > self._engine.most_drawn:
                self._engine.warn_short(call, size)
            packed = to != "jax" and self._engine.packs
            batch, counts = self._engine.draw(f"{call}({size})", size, numbers, packed)
            if self._limiter is not None:
                self._limiter.done("sample", size)
        self._raise(call, counts)
        return arguments.convert(self._engine.exact(call, batch), to)

    def _expect_stale(self) -> None:
        """Only count indices of rows that are gone from now on: they may be before a prefetched batch is used."""
        self._ahead = True

    @locked
    def compile(self, batch_size: int | None = None, *, to: Form = "jax", progress: Any = True) -> None:
        """Compile `add` (not of ragged rows), `sample(batch_size, to=to)` and `update_priority` of such batches ahead.

        Args:
          batch_size: B; None uses the buffer's.
          to: As for `sample`.
          progress: True shows a progress line; a callable gets the programs compiled and their number.

        Example:
          >>> import fbuf
          >>> replay = fbuf.Replay(fbuf.Buffer(100), {"t": 0})
          >>> replay.compile(4, progress=False)
        """
        arguments.check_form("Replay.compile", to)
        jobs = self._engine.compilations(batch_size, to != "jax" and self._engine.packs, collects=self._limiter is None)
        bar = Bar(progress, "Replay.compile", len(jobs), " programs")
        for job in jobs:
            job().compile()
            bar(1)
        bar.close()

    def batches(
        self,
        batch_size: int | None = None,
        *,
        prefetch: int = 2,
        to: Form = "jax",
        device: Any = None,
        timeout: float | None = None,
        **options: Unpack[DrawOptions],
    ) -> Batches:
        """Return an iterator over batches that a thread prefetches. It ends when the replay is closed.

        The batches equal those of repeated `sample` calls on the state at each draw. Later priority updates do not affect
        prefetched batches. Those count as drawn for the limit, `samplers.Consume` and checkpoints. `next` raises the
        thread's error, after the batches drawn before it.

        End it with `close`, or a `with`; both wait for the current draw. The thread of a garbage-collected iterator ends
        soon after. The thread sees `jax.config`, but no context such as `with jax.default_device(...)`. Without a limit the
        first draw from an empty buffer fails; use `limit=fbuf.limits.min_size(1000)`.

        Args:
          batch_size: B; None uses the buffer's.
          prefetch: Batches drawn ahead, at most; >= 1.
          to: Arrays in the `Sample`: "jax", "numpy" or "torch".
          device: A `jax.Device` or `Sharding`; for torch any argument of `tensor.to`. None keeps the state's device.
          timeout: Seconds that `next` waits for a batch; None waits without a bound.
          **options: For every draw, as for `sample`.
        Raises:
          TypeError, ValueError: `sample` would raise for these arguments.
          RuntimeError: the system cannot start another thread.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100), {"t": 0})
          >>> index = replay.extend({"t": np.arange(5)})
          >>> with replay.batches(4, to="numpy") as batches:
          ...     print(next(batches).data["t"].shape)
          (4,)
        """
        refuse_trace("batches", batch_size, options)
        call = "Replay.batches"
        arguments.check_form(call, to, device)
        check_int(call, "prefetch", prefetch, hint=". Without prefetch use replay.sample")
        arguments.check_seconds(call, timeout)
        size, _ = self._engine.check_draw(call, batch_size, options)
        self._refuse_closed(call)
        self._expect_stale()

        def draw(stop: StopToken) -> Any:
            return arguments.place(self._sample(call, batch_size, options, None, stop, to), to, device)

        return Batches(draw, int(prefetch), timeout, partial(self._explain, size))

    @restores_lock
    def _explain(self, size: int) -> str:
        with self._lock.acquire():
            if self._limiter is None or self._engine.state.header.is_deleted():
                return "one is being drawn"
            if self._limiter.allows("sample", size) and self._engine.ready(size):
                return "one is being drawn"
            return self._limiter.explain("sample", size)

    @restores_lock
    def update_priority(self, index: Index, td_error: Any, *, mask: Any = None, eta: float = 0.9) -> None:
        """Set priorities from TD errors; see `Buffer.update_priority`. Arrays may be JAX, numpy or torch.

        Raises:
          ValueError: some were refused (not finite, out of range, stale, no anchors); the others are set. The last two kinds
            are only counted with `prefetch=1`, under a limit, and after `batches`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> batch = replay.sample(4)
          >>> replay.update_priority(batch.index, np.array([0.5, 1.0, 2.0, 0.1]))
        """
        call = "Replay.update_priority"
        checks.check_eta(call, eta)
        index, error = arguments.to_index(call, index), arguments.to_numbers(call, "td_error", td_error, "fi")
        mask = arguments.to_numbers(call, "mask", mask, "b")
        with self._acquire():
            counts = self._engine.update_priority(index, error, mask, eta)
        self._raise(call, counts)

    @restores_lock
    def update_rows(self, index: Index, fields: PyTree, *, mask: Any = None) -> None:
        """Replace some leaves of rows; see `Buffer.update_rows`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.update_rows(replay.rows(last=1).index, {"done": np.array([True])})
          >>> bool(replay.rows(last=1).data["done"][0])
          True
        """
        call = "Replay.update_rows"
        index, fields = arguments.to_index(call, index), arguments.to_rows(fields)
        mask = arguments.to_numbers(call, "mask", mask, "b")
        with self._acquire():
            self._engine.flush()
            moved = self._engine.on_device((index, self._engine.narrowed(call, fields), mask))
            counts = self._engine.donate(programs.update_rows, *moved[:2], mask=moved[2])
        self._raise(call, counts)

    @locked
    def get(self, index: Any) -> Rows:
        """Return rows by index; see `Buffer.get`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> batch = replay.sample(4)
          >>> bool((replay.get(batch.index).data["t"] == batch.data["t"]).all())
          True
        """
        index = (
            arguments.to_index("Replay.get", index) if isinstance(index, Index) else arguments.to_array(index, "index")
        )
        with DeferInterrupts():  # one inside a callback would become another error
            return self.buffer.get(self._engine.state, arguments.unshared(index))

    @locked
    def window_index(self, index: Index) -> Index:
        """Return the rows `[B, T]` of sampled windows; see `Buffer.window_index`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100, view=fbuf.views.Sequence(3, episode_end=())), {"carry": 0.0})
          >>> index = replay.extend({"carry": np.zeros(5, np.float32)})
          >>> rows = replay.window_index(replay.sample(4).index)
          >>> replay.update_rows(rows, {"carry": np.ones((4, 3), np.float32)})
          >>> float(replay.get(rows).data["carry"].min())
          1.0
        """
        index = arguments.unshared(arguments.to_index("Replay.window_index", index))
        return self.buffer.window_index(self._engine.state, index)

    @locked
    def priorities(self, index: Index | None = None) -> jax.Array:
        """Return priorities |p| of some or all rows; see `Buffer.priorities`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(4), {"t": 0})
          >>> index = replay.extend({"t": np.arange(3)}, priority=np.array([1.0, 2.0, 3.0]))
          >>> replay.priorities().round(1).tolist()
          [1.0, 2.0, 3.0, nan]
        """
        if index is not None:
            index = arguments.unshared(arguments.to_index("Replay.priorities", index))
        return self.buffer.priorities(self._engine.state, index)

    @locked
    def __getitem__(self, position: int | slice) -> Rows:
        """Return rows by position, 0 the oldest, -1 the newest; of several lanes step by step, lane by lane.

        An int gives one row, leaves `[item]`; a slice leaves `[n, item]`. Each length compiles once. Iteration reads the rows
        in blocks, as NumPy arrays; writes in between shift positions.

        Raises:
          IndexError: there is no such row.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100), {"t": 0})
          >>> index = replay.extend({"t": np.arange(5)})
          >>> int(replay[-1].data["t"]), replay[2:4].data["t"].tolist(), [int(row.data["t"]) for row in replay]
          (4, [2, 3], [0, 1, 2, 3, 4])
        """
        if not isinstance(position, (slice, int, np.integer)) or isinstance(position, bool):
            fix = "For an Index or slots use replay.get(index)"
            raise TypeError(f"Replay: position is {type(position).__name__}; expected an int or a slice. {fix}.")
        stored = range(self._engine.size())
        if not isinstance(position, slice) and not -len(stored) <= position < len(stored):
            raise IndexError(f"Replay: position is {position}, but it holds {counted(len(stored), 'row')}.")
        chosen = stored[position]
        positions = np.arange(chosen.start, chosen.stop, chosen.step) if isinstance(chosen, range) else np.int64(chosen)
        with DeferInterrupts():
            return self.buffer.get(self._engine.state, jnp.asarray(self._engine.slots(positions)))

    def __iter__(self) -> Iterator[Rows]:
        refuse_trace("__iter__")
        for first in range(0, len(self), 256):
            block = jax.device_get(self[first : first + 256])
            for i in range(len(block.mask)):
                yield jax.tree.map(lambda leaf, i=i: leaf[i], block)

    @locked
    def rows(self, *, last: int | None = None) -> Rows:
        """Return every row, or the newest, oldest first; see `Buffer.rows`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> rows = replay.rows()
          >>> rows.data["t"][rows.mask].tolist(), replay.rows(last=2).data["t"].tolist()
          ([0, 1, 2, 3, 4], [3, 4])
        """
        with DeferInterrupts():
            return self.buffer.rows(self._engine.state, last=last)

    def epoch(
        self, batch_size: int | None = None, *, shuffle: bool = True, drop_last: bool = False, to: Form = "jax"
    ) -> EpochBatches:
        """Return the batches of one epoch: every row (window) that can be sampled now, once. `len` counts them.

        It is independent of the sampler and the limit: `Consume` loses no row, priorities have no effect, and no draw is
        counted. Rows added later are not part of it. Rows that are overwritten before their batch have `mask` False there. Each
        iteration takes one key of the replay, and draws the same rows in a new order. A checkpoint does not keep its
        position; `samplers.Epoch` does, and runs in jit.

        Args:
          batch_size: B; None uses the buffer's.
          shuffle: Draw in random order; False: in order of arrival.
          drop_last: Leave out a last batch of fewer than B rows. False: the last batch is shorter than B, without padding.
          to: As for `sample`.
        Cost: O(C) once and 16 bytes a row on the host; O(B) a batch. A short last batch compiles once for its size.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100), {"t": 0})
          >>> index = replay.extend({"t": np.arange(10)})
          >>> epoch = replay.epoch(4, shuffle=False, to="numpy")
          >>> len(epoch), [batch.data["t"].tolist() for batch in epoch]
          (3, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]])
        """
        refuse_trace("epoch", batch_size)
        call = "Replay.epoch"
        arguments.check_form(call, to)
        check_bool(call, "shuffle", shuffle)
        check_bool(call, "drop_last", drop_last)
        size, _ = self._engine.check_draw(call, batch_size, {})

        def read(*args: Any) -> Sample:
            return arguments.convert(self._read_epoch(*args), to)

        return EpochBatches(self._anchors(), size, shuffle, drop_last, self._next_key, read)

    @locked
    def _anchors(self) -> Index:
        """Return the index of every anchor, in order of arrival, as NumPy arrays."""
        index, mask = jax.device_get(read.all_anchors(self.buffer, self._engine.state)[1])
        return Index(index.slot[mask], index.generation[mask])

    @locked
    def _next_key(self) -> jax.Array:
        return self._engine.next_key()

    @locked
    def _read_epoch(self, *args: Any) -> Sample:
        return self._engine.read_epoch(*args)

    @locked
    def set(self, *, rebuild: bool = False, **numbers: Unpack[Numbers]) -> None:
        """Set annealed numbers, `set(alpha=0.5)`, with `rebuild` for all rows; see `Buffer.set`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.set(alpha=0.5, beta=0.7)
        """
        self._engine.state = self.buffer.set(self._engine.state, rebuild=rebuild, **numbers)

    @locked
    def summary(self, *, compare: int | None = 1 << 14) -> Summary:
        """Return a table of the rows and the next draws; see `Buffer.summary`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.summary().to_dict()["size"]
          5
        """
        return self.buffer.summary(self._engine.state, compare=compare)

    @restores_lock
    def __len__(self) -> int:
        with self._acquire():
            return self._engine.size()

    @restores_lock
    def cut(self, lanes: Any = None) -> None:
        """End the running episodes of the `lanes` bool[E], or of all, at their newest rows; see `Buffer.cut`.

        Call it when environments restart and no row records the end. `load` and `resume=True` call it.

        Example:
          >>> import fbuf, numpy as np
          >>> buffer = fbuf.Buffer(100, view=fbuf.views.Sequence(2, episode_end=()), lanes=2)
          >>> replay = fbuf.Replay(buffer, {"t": 0})
          >>> replay.add({"t": np.array([1, 1])})
          >>> replay.cut(np.array([True, False]))  # environment 0 was reset
          >>> replay.add({"t": np.array([2, 2])})
          >>> replay.stats()["anchors"]
          1
        """
        with self._acquire(notify=self._limiter is not None):
            self._engine.cut(checks.check_lanes("Replay.cut", self.buffer, arguments.to_array(lanes, "lanes")))

    @restores_lock
    def clear(self) -> None:
        """Remove every row. A limit keeps its counts, and allows `min_size` rows to be added at once.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.clear()
          >>> len(replay)
          0
        """
        with self._acquire(notify=True):
            self._engine.clear()
            if self._limiter is not None:
                self._limiter.cleared()

    @locked
    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether `sample` would return a batch without waiting. None uses the buffer's `batch_size`, or one row.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.can_sample()
          False
        """
        size = batch_size or self.buffer.batch_size or 1
        allowed = self._limiter is None or self._limiter.allows("sample", size)
        return allowed and self._engine.size() > 0 and self._engine.ready(size)

    @locked
    def can_add(self, rows: int = 1) -> bool:
        """Return whether `rows` rows can be added without waiting.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100), {"t": 0}, limit=fbuf.limits.queue(5))
          >>> replay.can_add(5), replay.can_add(6)
          (True, False)
        """
        free = self._engine.has_room(-(-rows // self.buffer.geometry.lanes))
        return free and (self._limiter is None or self._limiter.allows("add", rows))

    @locked
    def stats(self) -> dict[str, float]:
        """Return `Buffer.stats` as Python numbers, and the bytes in use: `device_bytes`, `host_bytes`, `disk_bytes`.

        Under a limit also its counts, `limit_added`, `limit_drawn` and `limit_surplus`. With a view of windows it counts
        `unlearnt` rows, O(C), while other threads wait.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> stats = replay.stats()
          >>> stats["size"], stats["host_bytes"]
          (5, 0)
        """
        stats = {name: np.asarray(value).item() for name, value in self.buffer.stats(self._engine.state).items()}
        used = {f"{where}_bytes": number for where, number in self.buffer.nbytes(self._engine.state).items()}
        paced = {} if self._limiter is None else self._limiter.limit.stats(self._limiter.pace)
        return stats | used | {f"limit_{name}": value for name, value in paced.items()}

    def close(self) -> None:
        """End waiting and later calls of `add`, `extend` and `sample` with `ReplayClosed`, and end `batches`.

        Iterators first return their prefetched batches. Rows can still be read and saved. Wait until the current call is
        dispatched. Closing twice is harmless; leaving a `with` closes too. In a forked child nothing is closed.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.close()
          >>> replay
          Replay(Buffer(capacity=100, sampler=Prioritized()), 5 rows, closed)
        """
        refuse_trace("close")
        if not self._lock.forked:
            self._close()

    @restores_lock
    def _close(self) -> None:
        self._closed = True
        self._lock.notify()
        with self._lock.acquire():
            self._lock.notify()
            self._engine.warn_unstored("Replay.close", stacklevel=5)

    @locked
    def save(
        self, path: Any, *, keep: int = 2, extra: Any = None, wait: bool = True, sync: bool = True, progress: Any = None
    ) -> Saving:
        """Save the buffer, its state, its key and its limit; see `fbuf.save`. `load(path, cut=False)` continues exactly.

        Other threads wait until the files are written, or with `wait=False` until changed data is copied.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> index = replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> import tempfile
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     saving = replay.save(folder, extra={"step": np.int32(7)})
          ...     again, extra = fbuf.Replay.load(folder, extra=True)
          >>> len(again), int(extra["step"])
          (5, 7)
        """
        state, key = self._engine.state, jax.random.wrap_key_data(self._engine.key, impl=self._engine.impl)
        counters = np.array(state.counters)
        pace = None if self._limiter is None else self._limiter.pace
        settings = self.strict, self._engine.unlimited, self.limit
        metadata = ReplayMetadata(self.buffer, state, key, counters, *settings, pace)
        self._engine.warn_unstored("Replay.save")
        return _replay.save(path, metadata, keep, extra, wait, sync, progress)

    @classmethod
    def load(
        cls,
        path: Any,
        buffer: Buffer | None = None,
        *,
        example: Any = None,
        verify: Literal["full", "lazy"] = "full",
        resize: Any = None,
        extra: Any = None,
        progress: Any = None,
        cut: bool = True,
        limit: Limit | None = None,
    ) -> Any:
        """Return the saved `Replay`, or with `extra` the pair of it and the extra data. See `fbuf.load`.

        Args:
          cut: `cut` all lanes, because the environments start again. False only if they continue where they were; batches then
            continue exactly.
          limit: Replaces the saved limit, and starts as if the rows held had been drawn at its target ratio. None keeps the
            saved limit and its counts.
        Raises:
          SchemaError: the checkpoint was written by `fbuf.save`, without a key.

        Example:
          >>> import fbuf, tempfile, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100), {"t": 0})
          >>> index = replay.extend({"t": np.arange(5)})
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     saving = replay.save(folder)
          ...     again = fbuf.Replay.load(folder)
          >>> bool((again.sample(4).data["t"] == replay.sample(4).data["t"]).all())
          True
        """
        refuse_trace("load")
        metadata, saved = _replay.load(path, buffer, example, verify, resize, extra, progress)
        if limit is not None and limit != metadata.limit:
            arguments.check_limit("Replay.load", limit, metadata.buffer, metadata.unlimited)
            metadata = metadata._replace(
                limit=limit, pace=start(limit, int(np.asarray(metadata.state.ring.size).sum()))
            )
        replay = cls.__new__(cls)
        replay._begin(metadata)
        if cut and not metadata.buffer.writer.read_only:
            replay.cut()
        return replay if extra is None else (replay, saved)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "Replay: it has threads and cannot be pickled or copied. Write replay.save(path), and Replay.load(path) where it "
            "is needed."
        )

    @restores_lock
    def __repr__(self) -> str:
        # Without the lock a write may hold the state; and debuggers print in functions that are traced.
        with jax.ensure_compile_time_eval(), self._lock.acquire():
            rows = "its state was donated" if self._engine.state.header.is_deleted() else counted(len(self), "row")
        limit = "" if self._limiter is None else f", limit={self._limiter.limit!r}"
        return f"Replay({self.buffer!r}, {rows}{limit}{', closed' if self._closed else ''})"

    def _repr_html_(self) -> str:
        from html import escape

        with jax.ensure_compile_time_eval(), self._lock.acquire():
            if self._engine.state.header.is_deleted():
                return f"<code>{escape(repr(self))}</code>"
            self._engine.flush()
            if self.buffer.capacity > SUMMARY_ROWS:
                return f"<div><code>{escape(repr(self))}</code>{self._engine.state._repr_html_()}</div>"
            return self.summary(compare=0)._repr_html_()

    def _refuse_closed(self, call: str) -> None:
        if self._closed:
            raise ReplayClosed(
                f"{call}: the replay was closed; its rows can still be read and saved. To continue, make a new one, or use "
                f"Replay.load(path)."
            )

    def _check_timeout(self, call: str, timeout: float | None) -> None:
        arguments.check_seconds(call, timeout)
        if timeout is not None and self._limiter is None:
            raise ValueError(
                f"{call}: timeout is {timeout}, but without a limit no call waits. Leave it out, or use Replay(buffer, "
                f"example, limit=fbuf.limits.min_size(1000))."
            )

    def _check_fits(self, call: str, what: str, count: int, lanes: int = 1) -> None:
        """Raise if a queue can never take, or return, `count` rows at once."""
        most = self.buffer.capacity // lanes
        if self._engine.is_queue and count > most:
            raise ValueError(f"{call}: {count} {what} at once; expected at most {most}, or a larger capacity.")

    def _wait(
        self,
        call: str,
        kind: Kind,
        count: int,
        ready: Callable[[], bool],
        timeout: float | None,
        stop: StopToken | None = None,
    ) -> None:
        """Wait for the limit, and for room or rows that can be sampled."""
        if self._limiter is None or count == 0:
            return

        def check() -> None:
            self._check_state()
            self._refuse_closed(call)

        self._limiter.wait(self._lock, call, kind, count, ready, check, timeout, stop)

    def _acquire(self, *, notify: bool = False, stop: StopToken | None = None) -> Acquired:
        """Hold the lock; with `notify`, wake the waiting calls on release."""
        return self._lock.acquire(stop, check=self._check_state, notify=notify)

    def _collect_now(self, row: PyTree, mask: Any) -> bool:
        """Keep one row for a later write if the lock is free; return whether it was kept."""
        with self._lock.mutex:
            block = self._engine.block
            free = self._lock.is_free() and not self._closed and not self._engine.may_wait
            free = free and not self._engine.state.header.is_deleted()
            return free and block is not None and block.count + 1 < block.length and block.append(row, mask)

    def _check_state(self) -> None:
        if self._engine.state.header.is_deleted():
            self._lock.notify()  # waiting calls must raise too
            raise RuntimeError(
                "Replay: its state was donated. Assign the state that your step returns, `replay.state = step(replay.state)`; "
                "after a step that failed `del replay`, and use Replay.load(path), or Replay(buffer, example, resume=True) for "
                "rows in files."
            )

    def _explain_empty(self, call: str) -> None:
        """Raise for a draw from rows that all need later ones. Return if there are no rows, or some only were drawn already."""
        ahead = self.buffer.view.rule.ahead
        with self._acquire():
            size, count = self._engine.size(), int(np.asarray(anchor_count(self._engine.state)).sum())
        if size and ahead and not count:
            raise ValueError(
                f"{call}: none of the {counted(size, 'row')} held can be sampled yet; {self.buffer.view!r} needs up to {ahead} "
                f"more of its episode and lane after a row. Add rows, or ask can_sample first."
            )

    def _raise(self, call: str, counts: jax.Array | None) -> None:
        """Raise for what a call only counted. Wait for it without the lock."""
        if self.strict and counts is not None and (new := np.asarray(counts)).any():
            if new[COUNTERS.index("empty_samples")]:
                self._explain_empty(call)
            hint = "Replay(..., strict=False) counts them in stats() instead."
            raise_for(call, np.zeros_like(new), new, hint, ahead=self._ahead)

"""`Replay`: a buffer, its state and its key in one object, for notebooks, torch loops, and threads.

The verbs of `Buffer` cannot raise for values (they are traced): they mask and count. `Replay` runs eagerly, so it looks
at the counters after each call and raises what they say. It donates the state to every write, so writes are in place, and
hands out batches as JAX, numpy or torch arrays. Inside jit use the `Buffer` itself.

Threads may share it: each verb has its turn while it is dispatched, in order of arrival, so a state is donated by one call at
a time. What was dispatched goes on without it, and what it counted is looked at outside. With a limit, calls wait for one
another, outside their turn.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.checked import raise_for
from fbuf._buffer.checks import check_draw, check_eta
from fbuf._buffer.state import BufferState, refuse_donated
from fbuf._buffer.summary import Summary
from fbuf._checkpoint import replay as _replay
from fbuf._checkpoint.async_save import Saving
from fbuf._checkpoint.replay import ReplayMetadata
from fbuf._concurrency.wakeup import ReplayClosed, StopToken
from fbuf._core import arguments
from fbuf._core.pytree import PyTree
from fbuf._core.sample import Index, Rows, Sample
from fbuf._interfaces.storage import Growable
from fbuf._interfaces.writer import ReadOnly
from fbuf._replay.batches import Batches
from fbuf._replay.checks import check_form, check_limit, check_seconds, check_seed
from fbuf._replay.conversion import array, beside, convert, index_of, place, rows_of
from fbuf._replay.defer_interrupt import Uninterrupted
from fbuf._replay.fair_lock import Turn, Turns
from fbuf._replay.limiter import Kind, Pacing, start
from fbuf.limits import Limit, LimitState
from fbuf.samplers import Prioritized, Ranked, Uniform
from fbuf.storages import Ragged

F = TypeVar("F", bound=Callable[..., Any])
Counts = tuple[Any, Any] | None

_in_place = partial(jax.jit, static_argnums=0, donate_argnums=1)
_add = _in_place(Buffer.add)
_extend = _in_place(Buffer.extend)
_update_priority = _in_place(Buffer.update_priority)
_update_rows = _in_place(Buffer.update_rows)
_copied = jax.jit(jnp.copy)


def _unharmed(method: F) -> F:
    """A verb that leaves the thread with what it had of the turn, even if an interrupt comes while it gives that up."""

    @functools.wraps(method)
    def call(self: Replay, *args: Any, **kwargs: Any) -> Any:
        depth = self._turns.depth()
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            if self._turns.depth() > depth:
                self._turns.changed()  # what it was about to say
            self._turns.restore(depth)
            raise

    return cast(F, call)


def _in_turn(method: F) -> F:
    """A verb that waits for the others."""

    @_unharmed
    @functools.wraps(method)
    def call(self: Replay, *args: Any, **kwargs: Any) -> Any:
        with self._turn():
            return method(self, *args, **kwargs)

    return cast(F, call)


class Replay:
    """A stateful shell around a `Buffer`. Threads may share one: its verbs take turns, in order of arrival.

    Args:
      buffer: What to hold and how to draw.
      example: One row, as for `Buffer.init`; or, of a data set, its state, which stays usable:
        `Replay(*fbuf.datasets.open(path))`.
      seed: Of the draws; two of them with one seed and one history give the same batches.
      strict: Raise for values that the verbs would only count. False leaves them to `stats()`.
      unlimited: Twice the capacity whenever it is full, instead of overwriting the oldest rows (`storages.Ragged` only). Every
        verb compiles again then, so begin with a capacity of the right order; `buffer` is another after it.
      limit: From `fbuf.limits`: `add` and `extend` then wait while it does not let so many rows be added, `sample` while it
        does not let so many be drawn, or there is nothing to draw. None: neither ever waits.
      resume: Go on with the rows that lie at the storage's path (`Buffer.resume`), instead of none; their priorities start
        anew, and under a limit they count as drawn as often as was due.

    A write that fails takes the state with it, because it was donated: later calls say so. Rows in files are still there.
    Ctrl-C does no harm: a write that has begun ends first.

    Actors and a learner in one process: each actor a thread that adds, the learner takes `batches`; `close`, or leaving the
    `with`, ends whoever waits by `ReplayClosed`. Where several threads write, or batches are drawn ahead, rows may be
    overwritten between `sample` and `update_priority`: under a limit, with `prefetch=1`, and once `batches` was called, stale
    indices are only counted.

    Example:
      >>> import fbuf, numpy as np
      >>> replay = fbuf.Replay(fbuf.prioritized(100), {"obs": np.zeros(3, np.float32)}, seed=0)
      >>> replay.extend({"obs": np.ones((5, 3), np.float32)})
      >>> batch = replay.sample(4, to="numpy")
      >>> replay.update_priority(batch.index, np.ones(4, np.float32))
      >>> len(replay), batch.data["obs"].shape
      (5, (4, 3))

      An actor in a thread, eight rows drawn for each that it adds:

      >>> import threading
      >>> limit = fbuf.limits.samples_per_insert(8, min_size=100, rows=10, draws=32)
      >>> def act(replay):
      ...     try:
      ...         while True:
      ...             replay.extend({"t": np.arange(10)})
      ...     except fbuf.ReplayClosed:
      ...         pass
      >>> with fbuf.Replay(fbuf.uniform(1000), {"t": 0}, limit=limit) as replay:
      ...     actor = threading.Thread(target=act, args=(replay,))
      ...     actor.start()
      ...     for step, batch in zip(range(100), replay.batches(32)):
      ...         pass  # learn
      >>> actor.join()
    """

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
        if not isinstance(buffer, Buffer):
            usage = "The order is Replay(buffer, example)."
            if type(buffer).__name__ == "Mixture":
                usage = "Carry the state of a mixture yourself: state, batch = mixture.sample(state, key, 256)."
            raise TypeError(f"Replay: buffer is {type(buffer).__name__}; expected a Buffer. {usage}")
        if unlimited and not isinstance(buffer.storage, Ragged):
            raise TypeError(
                f"Replay: unlimited is for rows on the host, but {buffer.storage!r} keeps arrays of the full capacity. Use "
                f"Buffer(storage=fbuf.storages.Ragged()), or a larger capacity."
            )
        check_seed("Replay", seed)
        check_limit("Replay", limit, buffer, unlimited)
        if isinstance(example, BufferState):
            if not isinstance(buffer.writer, ReadOnly):
                raise TypeError(
                    "Replay: example is a BufferState; expected one row. To go on with rows in files write "
                    "Replay(buffer, example, resume=True)."
                )
            refuse_donated("Replay", example)
            buffer.check_state(example)
            state = copy.deepcopy(example)  # what is donated here is not the caller's
        else:
            example = example if isinstance(buffer.storage, Ragged) else rows_of(example)
            state = buffer.resume(example) if resume else buffer.init(example)
        pace = None if limit is None else start(limit, int(np.asarray(state.ring.size).sum()))
        counters = np.array(state.counters)
        self._begin(ReplayMetadata(buffer, state, jax.random.key(seed), counters, strict, unlimited, limit, pace))

    def _begin(self, shell: ReplayMetadata) -> None:
        self.buffer, self.strict, self.unlimited = shell.buffer, shell.strict, shell.unlimited
        self._state, self._key, self._counters = shell.state, shell.key, cast(Any, shell.counters)
        self._turns, self._closed = Turns(), False
        self._pacing: Pacing | None = None
        if shell.limit is not None and shell.pace is not None:
            self._pacing = Pacing(shell.limit, shell.pace, shrinks=isinstance(shell.buffer.storage, Growable))
        self._ahead = shell.buffer.prefetch > 0 or shell.limit is not None

    @property
    def state(self) -> BufferState:
        """The state now. The next write through this object donates it; copy what must outlive that."""
        return self._state

    @property
    def limit(self) -> Limit | None:
        """Who waits for whom."""
        return None if self._pacing is None else self._pacing.limit

    @property
    def pace(self) -> LimitState | None:
        """How far the limit is: rows added and drawn, and the surplus, as Python ints."""
        return None if self._pacing is None else self._pacing.pace

    def add(self, row: PyTree, *, priority: Any = None, mask: Any = None, timeout: float | None = None) -> None:
        """Adds one row (one a lane); see `Buffer.add`, and `extend` for the limit.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.add({"t": 7, "done": True})
          >>> len(replay)
          1
        """
        self._write("Replay.add", _add, row, priority, mask, timeout)

    def extend(self, rows: PyTree, *, priority: Any = None, mask: Any = None, timeout: float | None = None) -> None:
        """Adds rows in order of time; see `Buffer.extend`. Waits until the limit allows all of them.

        Args:
          timeout: Seconds to wait for the limit (not for other calls, whose turn it is); 0: not at all. None: as long as it
            takes.
        Raises:
          TimeoutError: the limit does not allow them by then.
          ReplayClosed: it was closed.
          ValueError: the limit will never allow them; or a timeout without a limit.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.uniform(100), {"t": 0}, limit=fbuf.limits.queue(5))
          >>> replay.extend({"t": np.arange(5)})
          >>> try:
          ...     replay.extend({"t": np.arange(5)}, timeout=0.01)
          ... except TimeoutError:
          ...     print("nobody has drawn anything yet")
          nobody has drawn anything yet
        """
        self._write("Replay.extend", _extend, rows, priority, mask, timeout)

    @_unharmed
    def _write(self, call: str, verb: Any, rows: PyTree, priority: Any, mask: Any, timeout: float | None) -> None:
        self._check_timeout(call, timeout)
        ragged = isinstance(self.buffer.storage, Ragged)
        rows = rows if ragged else rows_of(rows)
        priority, mask = array(priority, "priority"), array(mask, "mask")
        with self._turn(changes=True):
            self._refuse_closed(call)
            count = 0
            if self._pacing is not None:
                shape = self.buffer.parsed(call, self._state, rows, priority, mask)[2]
                count = shape[0] * shape[1] if mask is None else int(np.asarray(mask).sum())
                self._wait(call, "add", count, timeout)
            if ragged:
                rows = self._stored(call, rows, priority, mask)
            elif verb is _add:
                rows = self._row(call, rows)
            self._donate(verb, rows, priority=priority, mask=mask)
            if self._pacing is not None:
                self._pacing.done("add", count)
            # Looking waits for the write, so only where it can refuse something.
            counts = self._count() if priority is not None or isinstance(self.buffer.storage, Growable) else None
        self._raise(call, counts)

    def _donate(self, verb: Any, *args: Any, **options: Any) -> None:
        """Writes in place: the state is nobody's from the call to the assignment."""
        with Uninterrupted():
            self._state = verb(self.buffer, self._state, *args, **options)

    def _row(self, call: str, row: PyTree) -> PyTree:
        """One row whose Python numbers have become arrays."""
        spec, structure = self.buffer.given_spec(self._state)
        lead, axes = ((), "") if self.buffer.lanes is None else ((self.buffer.lanes,), "E")
        return structure.unflatten(arguments.check_rows(call, row, spec, structure, lead, axes).values())

    def _stored(self, call: str, rows: PyTree, priority: Any, mask: Any) -> PyTree:
        """What is no array is stored first, so that the rest can be written as ever, in place."""
        leaves, values, shape = self.buffer.parsed(call, self._state, rows, priority, mask)
        if self.unlimited:
            self._make_room(shape, mask)
        return self.buffer.stored(self._state, leaves, values, shape, mask)

    def _make_room(self, shape: tuple[int, int], mask: Any) -> None:
        more = shape[0] if mask is None else np.asarray(mask).reshape(shape).sum(axis=0)
        needed = int((np.asarray(self._state.ring.size) + more).max())
        capacity, length = self.buffer.capacity, self.buffer.geometry.length
        while length < needed:
            capacity, length = 2 * capacity, 2 * length
        if capacity != self.buffer.capacity:
            self.buffer, self._state = self.buffer.grow(self._state, capacity=capacity)

    @_unharmed
    def grow(self, blocks: Any = None, *, capacity: int | None = None) -> None:
        """More room for distinct blocks, or for ragged rows; see `Buffer.grow`. `self.buffer` is another then.

        Example:
          >>> import fbuf
          >>> replay = fbuf.Replay(fbuf.Buffer(10, storage=fbuf.storages.Ragged()), {"text": "", "n": 0})
          >>> replay.grow(capacity=1000)
          >>> replay.buffer.capacity
          1000
        """
        with self._turn(changes=True):
            self.buffer, self._state = self.buffer.grow(self._state, blocks, capacity=capacity)

    def sample(
        self, batch_size: int | None = None, *, to: str = "jax", timeout: float | None = None, **options: Any
    ) -> Sample:
        """Draws a batch; see `Buffer.sample`. Waits until the limit allows all of it, and there is something to draw.

        Args:
          batch_size: B; None: the buffer's.
          to: "jax", "numpy" or "torch": the arrays in the `Sample`.
          timeout: Seconds to wait for the limit (not for other calls, whose turn it is); 0: not at all. None: as long as it
            takes.
        Raises:
          TimeoutError: the limit does not allow it by then.
          ReplayClosed: it was closed.
          ValueError: there is nothing to draw, and no limit to wait for; the limit will never allow so many; a timeout
            without a limit; or `to` is something else.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> batch = replay.sample(4, to="numpy", beta=0.6)
          >>> type(batch.data["t"]).__name__, batch.weight.shape
          ('ndarray', (4,))
        """
        check_form("Replay.sample", to)
        self._check_timeout("Replay.sample", timeout)
        return convert(self._sample("Replay.sample", batch_size, options, timeout, None), to)

    @_unharmed
    def _sample(
        self, call: str, batch_size: int | None, options: dict[str, Any], timeout: float | None, stop: StopToken | None
    ) -> Sample:
        with self._turn(changes=True, stop=stop):
            self._refuse_closed(call)
            size = 0
            if self._pacing is not None:
                size = self._check_draw(batch_size, options)
                self._wait(call, "sample", size, timeout, stop)
            with Uninterrupted():  # a callback makes another error of it
                self._key, key = jax.random.split(self._key)
                self._state, batch = self.buffer.sample(self._state, key, batch_size, **options)
            if self._pacing is not None:
                self._pacing.done("sample", size)
            counts = self._count()
        self._raise(call, counts)
        return batch

    def expect_stale(self) -> None:
        """From now on stale indices are only counted in `stats`: for who draws ahead, as `batches` and torch's `Loader` do.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.expect_stale()
        """
        self._ahead = True

    def _check_draw(self, batch_size: int | None, options: dict[str, Any]) -> int:
        form = "sample(batch_size)"
        return check_draw("Replay.sample", form, self.buffer, self._key, batch_size, options)[0]

    def batches(
        self,
        batch_size: int | None = None,
        *,
        prefetch: int = 2,
        to: str = "jax",
        device: Any = None,
        timeout: float | None = None,
        **options: Any,
    ) -> Batches:
        """An iterator over batches, which a thread draws ahead and puts on a device; it ends when the replay is closed.

        The batches are those that `sample` would give, one after another, as the state is when each is drawn: priorities
        that were updated since do not count in the `prefetch` batches that lie ready. Those are drawn for the limit, for
        `samplers.Consume` and in a checkpoint, although nobody has had them yet. What goes wrong in the thread is raised by
        `next`, after the batches drawn before it.

        Leave it by `close`, or a `with`, which wait for the draw under way; if it is merely forgotten, as after a `break`, the
        thread ends by itself, a moment later.

        Args:
          batch_size: B; None: the buffer's.
          prefetch: Batches ahead, at most; >= 1.
          to: "jax", "numpy" or "torch": the arrays in the `Sample`.
          device: Where they go: a `jax.Device` or `Sharding`; of torch what `tensor.to` takes. None: where the state lies.
            `update_priority` takes indices and errors from any.
          timeout: Seconds that `next` waits for a batch. None: as long as it takes.
          **options: For every draw, as for `sample`.
        Raises:
          TypeError, ValueError: what `sample` would raise for these arguments.
          RuntimeError: there is no room for another thread.

        The thread sees what `jax.config` says, not contexts like `with jax.default_device(...)` around this call. Without a
        limit the first draw of an empty buffer fails: use `limit=fbuf.limits.min_size(1000)`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.uniform(100), {"t": 0})
          >>> replay.extend({"t": np.arange(5)})
          >>> with replay.batches(4, to="numpy") as batches:
          ...     print(next(batches).data["t"].shape)
          (4,)
        """
        call = "Replay.batches"
        check_form(call, to, device)
        if not isinstance(prefetch, (int, np.integer)) or isinstance(prefetch, bool) or prefetch < 1:
            raise ValueError(f"{call}: prefetch is {prefetch!r}; expected an int >= 1. For none use replay.sample.")
        check_seconds(call, timeout)
        size = self._check_draw(batch_size, options)
        self._refuse_closed(call)
        self.expect_stale()

        def draw(stop: StopToken) -> Any:
            return place(self._sample(call, batch_size, options, None, stop), to, device)

        return Batches(draw, int(prefetch), timeout, partial(self._explain, size))

    @_unharmed
    def _explain(self, size: int) -> str:
        with self._turns.turn():
            if self._pacing is None or self._state.token.is_deleted():
                return "one is being drawn"
            if self._pacing.allows("sample", size, self._held) and self._ready():
                return "one is being drawn"
            return self._pacing.explain("sample", size, self._held)

    @_unharmed
    def update_priority(self, index: Index, td_error: Any, *, mask: Any = None, eta: float = 0.9) -> None:
        """Sets priorities from TD errors; see `Buffer.update_priority`. Arrays may be JAX, numpy or torch.

        Raises:
          ValueError: some were refused (not finite, out of range, stale, not drawable); the others are set. Stale ones are
            only counted with `prefetch=1`, under a limit, and once `batches` was called.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> batch = replay.sample(4)
          >>> replay.update_priority(batch.index, np.array([0.5, 1.0, 2.0, 0.1]))
        """
        call = "Replay.update_priority"
        check_eta(call, eta)
        index, td_error, mask = index_of(call, index), array(td_error, "td_error"), array(mask, "mask")
        with self._turn():
            index, td_error, mask = jax.tree.map(lambda x: beside(x, self._state.token), (index, td_error, mask))
            self._donate(_update_priority, index, td_error, mask=mask, eta=eta)
            counts = self._count()
        self._raise(call, counts)

    @_unharmed
    def update_rows(self, index: Index, fields: PyTree) -> None:
        """Replaces some leaves of rows; see `Buffer.update_rows`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.update_rows(replay.last(1).index, {"done": np.array([True])})
          >>> bool(replay.last(1).data["done"][0])
          True
        """
        index, fields = index_of("Replay.update_rows", index), rows_of(fields)
        with self._turn():
            index, fields = jax.tree.map(lambda x: beside(x, self._state.token), (index, fields))
            self._donate(_update_rows, index, fields)
            counts = self._count()
        self._raise("Replay.update_rows", counts)

    @_in_turn
    def get(self, index: Any) -> Rows:
        """Rows by index; see `Buffer.get`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> batch = replay.sample(4)
          >>> bool((replay.get(batch.index).data["t"] == batch.data["t"]).all())
          True
        """
        index = index_of("Replay.get", index) if isinstance(index, Index) else array(index, "index")
        return self.buffer.get(self._state, index)

    @_in_turn
    def rows(self) -> Rows:
        """Every row, oldest first; see `Buffer.rows`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> rows = replay.rows()
          >>> rows.data["t"][rows.mask].tolist()
          [0, 1, 2, 3, 4]
        """
        return self.buffer.rows(self._state)

    @_in_turn
    def last(self, n: int) -> Rows:
        """The newest rows; see `Buffer.last`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.last(2).data["t"].tolist()
          [3, 4]
        """
        return self.buffer.last(self._state, n)

    @_unharmed
    def clear(self) -> None:
        """Forgets every row. Under a limit, what was added and drawn still counts, and `min_size` rows can be added at once.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.clear()
          >>> len(replay)
          0
        """
        with self._turn(changes=True):
            self._state = self.buffer.clear(self._state)
            if self._pacing is not None:
                self._pacing.cleared()

    @_in_turn
    def set(self, **numbers: float) -> None:
        """Replaces annealed numbers, `set(alpha=0.5)`; see `Buffer.set`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.set(alpha=0.5, beta=0.7)
        """
        self._state = self.buffer.set(self._state, **numbers)

    @_in_turn
    def rebuild(self) -> None:
        """Applies annealed numbers to all rows; see `Buffer.rebuild`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.Buffer(100, sampler=fbuf.samplers.Prioritized(largest="held")), {"t": 0})
          >>> replay.extend({"t": np.arange(5)}, priority=np.arange(1.0, 6.0))
          >>> replay.set(alpha=1.0)
          >>> replay.rebuild()
        """
        self._state = self.buffer.rebuild(self._state)

    @_in_turn
    def can_sample(self, batch_size: int | None = None) -> bool:
        """Whether `sample` would neither wait nor find nothing to draw; None: the buffer's `batch_size`, or a single row.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.can_sample()
          False
        """
        size = batch_size or self.buffer.batch_size or 1
        allowed = self._pacing is None or self._pacing.allows("sample", size, self._held)
        return allowed and bool(self.buffer.can_sample(self._state))

    @_in_turn
    def can_add(self, rows: int = 1) -> bool:
        """Whether so many rows could be added now without waiting.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.uniform(100), {"t": 0}, limit=fbuf.limits.queue(5))
          >>> replay.can_add(5), replay.can_add(6)
          (True, False)
        """
        return self._pacing is None or self._pacing.allows("add", rows, self._held)

    @_in_turn
    def stats(self) -> dict[str, float]:
        """`Buffer.stats` as Python numbers; under a limit with its `limit_added`, `limit_drawn` and `limit_surplus`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.stats()["size"]
          5
        """
        paced = {} if self._pacing is None else self._pacing.limit.stats(self._pacing.pace)
        stats = {name: np.asarray(value).item() for name, value in self.buffer.stats(self._state).items()}
        return stats | {f"limit_{name}": value for name, value in paced.items()}

    @_in_turn
    def summary(self, *, compare: int | None = 1 << 14) -> Summary:
        """What the buffer holds and would draw, as a table; see `Buffer.summary`.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.summary().to_dict()["size"]
          5
        """
        return self.buffer.summary(self._state, compare=compare)

    @_in_turn
    def nbytes(self) -> dict[str, int]:
        """Bytes held now, by place.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> sorted(replay.nbytes())
          ['device', 'disk', 'host']
        """
        return self.buffer.nbytes(self._state)

    @_unharmed
    def close(self) -> None:
        """Ends whoever waits in `add`, `extend` or `sample`, and whoever calls them, by `ReplayClosed`; and `batches`.

        Iterators first hand out what they have drawn. Rows stay, and can be read and saved. Waits until the verb under way is
        dispatched. Closing twice is fine; leaving a `with` closes too.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> replay.close()
          >>> replay
          Replay(Buffer(capacity=100, sampler=Prioritized()), 5 rows, closed)
        """
        self._closed = True
        self._turns.changed()
        with self._turns.turn():
            self._turns.changed()

    def __enter__(self) -> Replay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @_in_turn
    def save(
        self,
        path: Any,
        *,
        keep: int = 2,
        extra: Any = None,
        wait: bool = True,
        sync: bool = True,
        progress: Any = None,
    ) -> Saving:
        """Saves everything, the key of the draws and the limit too; see `fbuf.save`. What `load` gives goes on with the same
        batches.

        Other threads wait as long as this takes; with `wait=False` only until what changed is copied.

        Example:
          >>> import fbuf, numpy as np
          >>> replay = fbuf.Replay(fbuf.prioritized(100), {"t": 0, "done": False})
          >>> replay.extend({"t": np.arange(5), "done": np.zeros(5, bool)})
          >>> import tempfile
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     saving = replay.save(folder, extra={"step": np.int32(7)})
          ...     again, extra = fbuf.Replay.load(folder, extra=True)
          >>> len(again), int(extra["step"])
          (5, 7)
        """
        limit, pace, counters = self.limit, self.pace, np.asarray(self._counters)
        shell = ReplayMetadata(self.buffer, self._state, self._key, counters, self.strict, self.unlimited, limit, pace)
        return _replay.save(path, shell, keep, extra, wait, sync, progress)

    @classmethod
    def load(
        cls,
        path: Any,
        buffer: Buffer | None = None,
        *,
        example: Any = None,
        verify: Any = "full",
        resize: Any = None,
        extra: Any = None,
        progress: Any = None,
        limit: Limit | None = None,
    ) -> Any:
        """What `save` saved, as a `Replay`; with `extra` a pair of it and that. See `fbuf.load`.

        Args:
          limit: Another limit than the one that was saved: the rows held then count as drawn as often as was due. None: that
            one, and its counts.
        Raises:
          SchemaError: it was saved by `fbuf.save`, without a key.

        Example:
          >>> import fbuf, tempfile, numpy as np
          >>> replay = fbuf.Replay(fbuf.uniform(100), {"t": 0})
          >>> replay.extend({"t": np.arange(5)})
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     saving = replay.save(folder)
          ...     again = fbuf.Replay.load(folder)
          >>> bool((again.sample(4).data["t"] == replay.sample(4).data["t"]).all())
          True
        """
        shell, saved = _replay.load(path, buffer, example, verify, resize, extra, progress)
        if limit is not None and limit != shell.limit:
            check_limit("Replay.load", limit, shell.buffer, shell.unlimited)
            shell = shell._replace(limit=limit, pace=start(limit, int(np.asarray(shell.state.ring.size).sum())))
        replay = cls.__new__(cls)
        replay._begin(shell)
        return replay if extra is None else (replay, saved)

    @_in_turn
    def __len__(self) -> int:
        return int(self.buffer.size(self._state))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "Replay: it has threads and a state that writes donate; expected that nobody pickles or copies it. Write "
            "replay.save(path), and Replay.load(path) where it is wanted."
        )

    @_unharmed
    def __repr__(self) -> str:
        with self._turns.turn():  # else it may be seen while a write has it
            rows = "its state is gone" if self._state.token.is_deleted() else f"{len(self)} rows"
        limit = "" if self._pacing is None else f", limit={self._pacing.limit!r}"
        return f"Replay({self.buffer!r}, {rows}{limit}{', closed' if self._closed else ''})"

    def _turn(self, *, changes: bool = False, stop: StopToken | None = None) -> Turn:
        """The turn of a call; if it `changes` what others wait for, they look again after it."""
        return self._turns.turn(stop, check=self._check_state, changes=changes)

    def _check_state(self) -> None:
        if self._state.token.is_deleted():
            self._turns.changed()  # who waits must hear of it
            raise RuntimeError(
                "Replay: its state was donated, to a write that failed or to a step that was given `replay.state`, and went "
                "with it; expected a state. Load the last checkpoint, Replay.load(path), or make a new Replay; rows that "
                "lie in files are there still: Replay(buffer, example, resume=True)."
            )

    def _refuse_closed(self, call: str) -> None:
        if self._closed:
            raise ReplayClosed(
                f"{call}: the replay was closed; expected an open one. What it holds can still be read and saved, "
                f"replay.save(path); to go on make a new one, or Replay.load(path)."
            )

    def _check_timeout(self, call: str, timeout: float | None) -> None:
        check_seconds(call, timeout)
        if timeout is not None and self._pacing is None:
            raise ValueError(
                f"{call}: timeout is {timeout}, but without a limit nothing waits. Leave it out, or write Replay(buffer, "
                f"example, limit=fbuf.limits.min_size(1000))."
            )

    def _wait(self, call: str, kind: Kind, count: int, timeout: float | None, stop: StopToken | None = None) -> None:
        """Waits for the limit; and, to sample, for something to draw."""
        if self._pacing is None or count == 0:
            return

        def ready() -> bool:
            return kind == "add" or self._ready()

        def check() -> None:
            self._check_state()
            self._refuse_closed(call)

        self._pacing.wait(self._turns, call, kind, count, self._held, ready, check, timeout, stop)

    def _held(self) -> int:
        return int(np.asarray(self._state.ring.size).sum())

    def _ready(self) -> bool:
        """Whether something can be drawn of rows that are held. Asking waits for writes, so not where it is known."""
        always = self.buffer.dense and isinstance(self.buffer.sampler, (Uniform, Prioritized, Ranked))
        return always or bool(self.buffer.can_sample(self._state))

    def _count(self) -> Counts:
        """The counters before and after a verb: copies, since the next write donates the state."""
        if not self.strict:
            return None
        before, self._counters = self._counters, _copied(self._state.counters)
        return before, self._counters

    def _raise(self, call: str, counts: Counts) -> None:
        """Raises what a call only counted. Waits for it, but keeps nobody else waiting."""
        if counts is not None:
            hint = "Replay(..., strict=False) counts them in stats() instead."
            raise_for(call, np.asarray(counts[0]), np.asarray(counts[1]), hint, ahead=self._ahead)

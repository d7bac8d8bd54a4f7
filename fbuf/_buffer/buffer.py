"""`Buffer`: the verbs. Glue only: storage, sampler, view and writer do the work and meet here.

    extend: rows -> on_write -> writer.place -> slots -> storage.write
                 -> anchors: which rows open or close -> sampler.change
    sample: key -> sampler.draw -> anchors -> view.window -> slots -> storage.read -> pin -> view.assemble
                 -> on_read -> Sample

Verbs are methods of a frozen dataclass of values, over a state that is a pytree of arrays; each is one jitted core, so an
eager call is one dispatch and a call inside jit is inlined. What ties reads to later writes is `fbuf._core.ordering`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import checks, fit_transforms, operations, prefetch, state_ops, transforms
from fbuf._buffer import convert as _convert
from fbuf._buffer.config import BufferConfig
from fbuf._buffer.state import BufferState, refuse_donated
from fbuf._core import arguments
from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec, name_of, named_leaves, nested, spec_of, tree_bytes
from fbuf._core.row_format import RowFormat
from fbuf._core.sample import TICKET, Index, Rows, Sample
from fbuf._interfaces.sampler import host_sampler
from fbuf._interfaces.storage import Growable, RaggedStorage, Resumable
from fbuf._interfaces.writer import ReadOnly, Streaming
from fbuf.transforms._chain import chained

if TYPE_CHECKING:
    from fbuf._buffer.plan import Plan
    from fbuf._buffer.summary import Summary


_INTERNAL = {
    "check_state",
    "checked_spec",
    "counted",
    "dense",
    "ends",
    "geometry",
    "given_spec",
    "parsed",
    "peeked",
    "rule",
    "stored",
}


@component
class Buffer(BufferConfig):
    """Experience replay as pure functions.

    Attributes:
      capacity: C, rows held; with lanes a multiple of E.
      storage: Where rows live: `storages.Device()`, `Deduplicated(...)`, `Compressed(...)`, `Host(...)`, `Memmap(...)`,
        `Ragged(...)`, `DataSet(path)`.
      sampler: How anchors are drawn: `samplers.Uniform()`, `Epoch()`, `Consume()`, `Prioritized(...)`,
        `Ranked(...)`, `Staleness(...)`.
      view: What a drawn anchor means: `views.Row()`, `Transition(...)`, `Sequence(...)`, `Episode(...)`,
        `Hindsight(...)`.
      writer: Which slots new rows take: `writers.Ring()`, `TopK(...)`, `Reservoir()`; `Frozen()`, none, with
        `storages.DataSet`; or one of your own that replaces any row it likes (`fbuf.parts.Scattering`).
      lanes: E, parallel environments whose rows come side by side; None for a single stream.
      episode_end: Names of boolean leaves that end an episode, besides those the view names.
      prefetch: 1: each `sample` hands out the batch that the one before drew, and draws the next; see below. 0: it draws
        what it hands out.
      batch_size: B of `sample` where none is given; with prefetch it must be given here.
      on_write: What becomes of rows before they are stored: a transform (`fbuf.transforms`), a tuple or a dict of them, or a
        `transforms.Chain`, which it is kept as. `init` and `extend` take rows as they were before; all else (view, storage,
        `episode_end`, `rows`, `get`, `last`, `update_rows`) speaks of rows as they are stored.
      on_read: What becomes of the view's batches, likewise: of `batch.data` of `sample` and `peek`, not of `rows`, `get` and
        `last`.

    With `prefetch=1` a storage on the host reads the next batch in a thread while the step goes on; on the device it only costs
    memory for one more batch. Same keys, same batches, whatever the storage:

    * `sample(state, key)` draws the next batch with `key` from the state it is given: rows, priorities and numbers (`beta`
      too) are those of this moment, before the `update_priority` of this step and the `extend` of the next. It is what
      `peek(state, key)` gives.
    * It hands out the batch drawn by the `sample` before. If there is none (the first; after `clear`; after there was nothing
      to draw) it draws one on the spot, with `jax.random.fold_in(key, 1)`.
    * A row that was overwritten, retired or changed since is handed out as it was drawn. If overwritten or retired, the index
      of its anchor is stale: `update_priority` and `update_rows` skip it, and `stats` counts it as `stale_draws`. No row is
      ever handed out under the index of another.
    * Samplers that remember what they drew (`Epoch`, `Consume`) count a row as drawn when it is drawn, not when it is
      handed out. `peek`, `get` and `rows` look at the state as it is.
    * `convert` and `clear` drop what was drawn ahead.
    * What goes wrong in the thread is no error: the rows are read when they are handed out, and raise then what they would
      have raised without prefetch.

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
        if not isinstance(self.capacity, (int, np.integer)) or isinstance(self.capacity, bool) or self.capacity < 1:
            raise ValueError(f"Buffer: capacity is {self.capacity!r}; expected an int >= 1.")
        object.__setattr__(self, "capacity", int(self.capacity))
        if self.capacity >= 2**31 - 2**24:
            raise ValueError(f"Buffer: capacity is {self.capacity}; expected less than 2^31 - 2^24 (slots are int32).")
        if self.lanes is not None:
            if not isinstance(self.lanes, (int, np.integer)) or isinstance(self.lanes, bool) or self.lanes < 1:
                raise ValueError(f"Buffer: lanes is {self.lanes!r}; expected an int >= 1, or None for one stream.")
            object.__setattr__(self, "lanes", int(self.lanes))
            if self.capacity % self.lanes:
                low = self.capacity - self.capacity % self.lanes
                near = f"{low} or {low + self.lanes}" if low else f"{self.lanes}"
                raise ValueError(
                    f"Buffer: capacity is {self.capacity}, not a multiple of lanes={self.lanes}. Use capacity={near}."
                )
        if isinstance(self.prefetch, bool) or self.prefetch not in (0, 1):
            raise ValueError(
                f"Buffer: prefetch is {self.prefetch!r}; expected 0, or 1 to draw each batch one `sample` ahead."
            )
        object.__setattr__(self, "prefetch", int(self.prefetch))
        if self.batch_size is not None:
            checks.check_batch_size("Buffer", self.batch_size)
            object.__setattr__(self, "batch_size", int(self.batch_size))
        elif self.prefetch:
            raise ValueError(
                "Buffer: prefetch is 1, but batch_size is None; expected an int, as the state holds the batch drawn ahead. "
                "Write Buffer(..., prefetch=1, batch_size=256)."
            )
        if isinstance(self.episode_end, str):
            raise TypeError(
                f"Buffer: episode_end is {self.episode_end!r}; expected a tuple. "
                f"Write episode_end=({self.episode_end!r},)."
            )
        object.__setattr__(self, "episode_end", tuple(name_of(n) for n in self.episode_end))
        for role in ("on_write", "on_read"):
            object.__setattr__(self, role, chained(role, getattr(self, role)))
        checks.check_parts(self)
        transforms.check_parts(self)

    def __dir__(self) -> list[str]:
        """What a user calls; not what the package's own modules ask a buffer."""
        return sorted(set(super().__dir__()) - _INTERNAL)

    # ------------------------------------------------------------------------------------------------ making

    def init(self, example: PyTree) -> BufferState:
        """An empty buffer for rows like `example`.

        Args:
          example: One row of one lane: a pytree of arrays, scalars or `jax.ShapeDtypeStruct`s, without leading axes.
        Raises:
          ValueError: the row lacks a leaf that view, storage or `episode_end` names, or has none.
          TypeError: a leaf is no array of numbers; or `init` of a host storage, or of priorities on the host, is being traced.
          MemoryError: there is no room; `plan` says beforehand how much it takes.
        Cost: O(C), the allocation.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> state = fbuf.uniform(100).init({"obs": jax.ShapeDtypeStruct((84, 84), jnp.uint8), "reward": 0.0})
          >>> state.rows["obs"].shape
          (100, 84, 84)
        """
        example, given = transforms.stored("Buffer.init", self, example)
        with self._enough_memory(example):
            state = self._init(example, given)
        return self._validate_transforms(
            "Buffer.init", fit_transforms.fit_transforms(self, state) if self._is_read_only else state
        )

    @property
    def _is_read_only(self) -> bool:
        return isinstance(self.writer, ReadOnly)

    def _validate_transforms(self, call: str, state: BufferState) -> BufferState:
        """The state, once a batch of it went through `on_read`, as shapes: so that an error comes now."""
        if self.on_read is not None:
            sample = functools.partial(operations.sample.core, self, options={}, batch_size=self.batch_size or 2)
            jax.eval_shape(sample, state, jax.eval_shape(lambda: jax.random.key(0)))
        return state

    @property
    def _ragged(self) -> RaggedStorage | None:
        """The storage, if its rows may have any shape."""
        return self.storage if isinstance(self.storage, RaggedStorage) else None

    def _init(self, example: PyTree, given: RowFormat | None) -> BufferState:
        if ragged := self._ragged:
            arrays, leaves = ragged.describe("Buffer.init", example)
            spec = self._checked_spec_beside("Buffer.init", arrays, [leaf.name for leaf in leaves])
            rows = ragged.open(self.geometry, spec, jax.tree.structure(arrays), leaves)
        else:
            spec = self.checked_spec("Buffer.init", example)
            rows = self.storage.init(self.geometry, spec, jax.tree.structure(example))
        state = prefetch.empty_state(self, rows, given)
        if isinstance(self.writer, ReadOnly):
            return _convert.with_existing_rows(self, "Buffer.init", state)
        return dataclasses.replace(state, sampler=state_ops.open_host_state(self, "Buffer.init", state.sampler))

    @contextlib.contextmanager
    def _enough_memory(self, example: PyTree) -> Iterator[None]:
        """Says how much is needed where an allocation fails."""
        try:
            yield
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            rows = {}
            if self._ragged is None:
                spec = spec_of(example)
                rows["device"] = tree_bytes(self.storage.abstract(self.geometry, spec, jax.tree.structure(example)))
                rows["host"] = self.storage.plan_host(self.geometry, spec, None, None)[2]
            needed = ", ".join(f"{size} bytes on the {place}" for place, size in rows.items() if size)
            raise MemoryError(
                f"Buffer.init: there is no room for {needed or 'the state'}, which rows of {self!r} take. Use a smaller "
                f'capacity, or storages.Compressed() or Memmap(path="/data/replay"); buffer.plan(example) says what it takes.'
            ) from error

    def resume(self, example: PyTree, *, verify: str = "full") -> BufferState:
        """The rows that lie at the storage's path, as a state that goes on from there (`storages.Memmap`, `Compressed`).

        They are the newest of each lane in the order the store took them, whichever states they were written through, with
        their last changes (`update_rows`); rows that `clear` forgot are there again. Priorities, numbers given by `set` and
        counters start anew, as for `convert`, and so do draws without replacement: only `fbuf.save` and `fbuf.load` keep them.
        What transforms know starts anew too, at read from these rows.

        Each row is compared with its checksum. Where some are not what was written (a failure of power, damaged files, a
        folder put together from two moments) the state goes on with the longest run of whole rows of each lane, and a
        RuntimeWarning says how many were given up. What the checksums cannot tell is a folder that is older as a whole: a
        copy made while nobody wrote is a store like any other.

        Args:
          example: As for `init`: of the same leaves, shapes and dtypes.
          verify: "full": every byte is read and compared now. "lazy": rows are compared when they are read first, and one
            that is damaged raises StoreCorrupted then.
        Raises:
          TypeError: the storage has no files; or this is being traced.
          ValueError: no path is given, or `keys` leave some leaves on the device; what lies there was made with another
            capacity, number of lanes, slack, codec or example, or is damaged.
          FileNotFoundError: there is no store at the path.
          BlockingIOError: another process, or another store of this one, holds the path.
          StoreCorrupted (a RuntimeError): no row is whole, or what all of them need is damaged or missing. With "lazy" also:
            what many rows need is, or the newest rows are.
        Cost: O(C), and reading all files once; "lazy": of `Compressed` one look at every chunk's header, of rows as they are
          nothing.

        Example:
          >>> import fbuf, tempfile, jax.numpy as jnp
          >>> with tempfile.TemporaryDirectory() as path:
          ...     buffer = fbuf.Buffer(100, storage=fbuf.storages.Memmap(path))
          ...     state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          ...     del state  # or the process ends
          ...     state = buffer.resume({"t": 0})
          ...     print(buffer.last(state, 2).data["t"])
          ...     del state
          [3 4]
        """
        self._refuse_change("Buffer.resume")
        example, given = transforms.stored("Buffer.resume", self, example)
        spec = self.checked_spec("Buffer.resume", example)
        if not isinstance(self.storage, Resumable):
            raise TypeError(
                f"Buffer.resume: {self.storage!r} keeps no files; expected a storage with a path. "
                f'Use storage=fbuf.storages.Memmap(path="/data/replay").'
            )
        if not isinstance(self.writer, Streaming):
            raise TypeError(
                f"Buffer.resume: {self.writer!r} says itself where rows go, which no file knows; expected writers.Ring(). "
                f"Use fbuf.save and fbuf.load."
            )
        if verify not in ("full", "lazy"):
            raise ValueError(f'Buffer.resume: verify is {verify!r}; expected "full" or "lazy".')
        rows, count, held = self.storage.resume(self.geometry, spec, jax.tree.structure(example), verify)
        ring = self.writer.resume(self.geometry, np.asarray(count))
        ring = dataclasses.replace(ring, size=jnp.asarray(held, jnp.int32))
        state = dataclasses.replace(prefetch.empty_state(self, rows, given), ring=ring)
        fresh = state_ops.init_host_sampler(self, "Buffer.resume")
        anchors, sampler = operations.convert(self, state, fresh, static=(self,))[1]
        state = dataclasses.replace(state, anchors=anchors, sampler=sampler)
        return self._validate_transforms("Buffer.resume", fit_transforms.fit_transforms(self, state))

    def checked_spec(self, call: str, example: PyTree) -> Spec:
        """Spec of a row that this buffer can hold; raises what `init` raises."""
        spec = spec_of(example)
        arguments.check_spec(call, spec)
        checks.check_fields(call, self, spec)
        self.storage.host_keys(spec)
        return spec

    def _checked_spec_beside(self, call: str, arrays: PyTree, ragged: list[str]) -> Spec:
        """`checked_spec` of the arrays beside ragged leaves, which a message about a leaf that is missing must name."""
        try:
            return self.checked_spec(call, arrays)
        except (TypeError, ValueError) as error:
            hidden = [n for n in ragged if n not in named_leaves(arrays) and f"'{n}'" in str(error)]
            if not hidden:
                raise
            raise type(error)(
                f"{error} '{hidden[0]}' is ragged; views read arrays that have one shape (keys= names the others) or a largest "
                f"one: storages.Ragged(maximum={{'{hidden[0]}': (...)}})."
            ) from None

    # ----------------------------------------------------------------------------------------------- writing

    def add(self, state: BufferState, row: PyTree, *, priority: Any = None, mask: Any = None) -> BufferState:
        """Adds one row: leaves `[...]`, or one a lane: `[E, ...]`.

        Args:
          state: From `init` or an earlier call. Donate it in a jitted step.
          row: In the structure of the example given to `init`.
          priority: float[] (with lanes `[E]`), |p| of the new row; only for prioritized samplers.
          mask: bool[] (with lanes `[E]`): False adds nothing there.
        Raises:
          ValueError, TypeError: wrong structure, dtype or shape (at trace time).
        Cost: O(1) in C where the state is donated; a copy of the buffer where it is not.

        Example:
          >>> import fbuf
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.add(buffer.init({"t": 0}), {"t": 7})
          >>> int(buffer.size(state))
          1
        """
        return self._extend("Buffer.add", state, row, priority, mask)

    def extend(self, state: BufferState, rows: PyTree, *, priority: Any = None, mask: Any = None) -> BufferState:
        """Adds rows in order of time: leaves `[N, ...]`, with lanes `[N, E, ...]`.

        Of more rows than fit the newest stay.

        Args:
          state: From `init` or an earlier call. Donate it in a jitted step.
          rows: In the structure of the example given to `init`.
          priority: float[N] (with lanes `[N, E]`), |p| of each new row (NaN and infinite: as if none was given); only for
            prioritized samplers. Rows without one get the largest seen before this call.
          mask: bool[N] (with lanes `[N, E]`): rows that are False are skipped and take no room.
        Raises:
          ValueError, TypeError: wrong structure, dtype or shape (at trace time).
        Cost: O(N) where the state is donated; a copy of the buffer where it is not.

        Example:
          >>> import fbuf, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100, lanes=2)
          >>> state = buffer.init({"t": 0})
          >>> state = buffer.extend(state, {"t": jnp.arange(6).reshape(3, 2)}, mask=jnp.array([[1, 1], [1, 0], [1, 1]], bool))
          >>> buffer.size(state)
          Array(5, dtype=int32)
        """
        return self._extend("Buffer.extend", state, rows, priority, mask)

    def _extend(self, call: str, state: BufferState, rows: PyTree, priority: Any, mask: Any) -> BufferState:
        self._refuse_change(call)
        leaves, values, shape, priority, mask = self._checked_rows(call, state, rows, priority, mask)
        if shape[0] == 0:
            return state
        if values is not None:
            leaves = self._put(state, leaves, values, shape, mask)
        leading = (not call.endswith("add")) + (self.lanes is not None)
        return operations.extend(self, state, leaves, priority, mask, static=(shape, leading))[0]

    def _checked_rows(
        self, call: str, state: BufferState, rows: PyTree, priority: Any, mask: Any
    ) -> tuple[dict[str, Any], Any, tuple[int, int], jax.Array | None, jax.Array | None]:
        """Arrays by name, what is none (`storages.Ragged`), [N, E], priority and mask; raises what `add` and `extend` do."""
        single = call.endswith("add")
        self._state_spec(call, "add(state, row)" if single else "extend(state, rows)", state)
        spec, structure = self.given_spec(state)
        lead: tuple[int | None, ...] = (() if single else (None,)) + (() if self.lanes is None else (self.lanes,))
        axes = ", ".join((() if single else ("N",)) + (() if self.lanes is None else ("E",)))
        values = None
        if ragged := self._ragged:
            leaves, values = ragged.parse(call, state.rows, rows, lead, axes)
        else:
            leaves = arguments.check_rows(call, rows, spec, structure, lead, axes)
        shape = next(iter(leaves.values())).shape[: len(lead)]
        priority, mask = checks.check_fitting(call, self.sampler, shape, priority, mask)
        return leaves, values, (1 if single else shape[0], self.lanes or 1), priority, mask

    def given_spec(self, state: BufferState) -> tuple[Spec, Any]:
        """Spec and structure of a row as `add` and `extend` take it."""
        given = transforms.given_of(state)
        return self.storage.spec(state.rows) if given is None else (given.spec, given.structure)

    def _put(self, state: BufferState, leaves: dict[str, Any], values: Any, shape: tuple[int, int], mask: Any) -> Any:
        """Stores what is no array, and puts the tickets in its place."""
        assert self._ragged is not None
        tickets = self._ragged.put(state.rows, values, shape, self.geometry.length, mask, state.token)
        return {**leaves, TICKET: jnp.asarray(tickets.reshape(leaves[TICKET].shape))}

    def parsed(
        self, call: str, state: BufferState, rows: PyTree, priority: Any, mask: Any
    ) -> tuple[dict[str, Any], Any, tuple[int, int]]:
        """Checked rows of `storages.Ragged`, nothing stored: arrays by name, what is none, and [N, E]. Eager."""
        return self._checked_rows(call, state, rows, priority, mask)[:3]

    def stored(
        self, state: BufferState, leaves: dict[str, Any], values: Any, shape: tuple[int, int], mask: Any
    ) -> PyTree:
        """What `parsed` gave as rows whose tickets are drawn, so that `extend` of them, with the same mask, can be jitted."""
        return nested(self._put(state, leaves, values, shape, mask) if values is not None and shape[0] else leaves)

    def update_priority(
        self, state: BufferState, index: Index, td_error: Any, *, mask: Any = None, eta: Any = 0.9
    ) -> BufferState:
        r"""Sets the priorities of drawn rows, or windows, from their TD errors (magnitudes are used).

        NaN and infinite errors, and indices that are out of range, stale or no longer drawable, are skipped one by one
        and counted in `stats`. Of several errors for one row the last counts.

        Args:
          index: `batch.index`, `[B]`.
          td_error: float[B]; or, where the view makes windows, float[B, T], the errors of each one's rows (those of the
            burn-in may be missing), of which it gets
            :math:`\eta \max_t |\delta_t| + (1 - \eta) \, \mathrm{mean}_t |\delta_t|` (Kapturowski et al. 2019, section 2.3).
          mask: bool[B, T], which errors count: `batch.data["learning_mask"]` (cut like the errors, where those of the
            burn-in are missing). A window of which none does gets 0; one of which an error that counts is not finite is
            skipped. None: all do, those of rows that are not there included.
          eta: In [0, 1]; a number or float[].
        Raises:
          TypeError: the sampler has no priorities; `index` is no `Index`.
          ValueError: shapes differ; `mask` is given for errors `[B]`; eta is no number from 0 to 1.
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
        self._state_spec(call, "update_priority(state, index, td_error)", state)
        if not self.sampler.prioritized:
            raise TypeError(f"{call}: {self.sampler!r} has no priorities. Use sampler=fbuf.samplers.Prioritized().")
        index = checks.check_index(call, index)
        checks.check_eta(call, eta)
        window = self.view.rule.window
        if np.ndim(td_error) != 2 or not 1 <= np.shape(td_error)[1] <= window:
            if mask is not None or (window and np.ndim(td_error) == 2):
                most = f"[B] without mask, or [B, T] with T up to {window}" if window else "[B] without mask"
                raise ValueError(
                    f"{call}: td_error has shape {list(np.shape(td_error))}; expected {most}: {self.view!r} makes "
                    f"{f'windows of {window} rows' if window else 'no windows'}."
                )
            td_error = arguments.check_array(call, "td_error", td_error, index.slot.shape, "fi")
            return operations.update_priority(self, state, index, td_error, None, None)[0]
        shape = (index.slot.shape[0], np.shape(td_error)[1])
        td_error = arguments.check_array(call, "td_error", td_error, shape, "fi")
        mask = jnp.ones(shape, bool) if mask is None else arguments.check_array(call, "mask", mask, shape, "b")
        return operations.update_priority(self, state, index, td_error, mask, jnp.asarray(eta, jnp.float32))[0]

    def update_rows(self, state: BufferState, index: Index, fields: PyTree) -> BufferState:
        """Replaces some leaves of rows already there (stale indices are skipped and counted; the last of several wins).

        Args:
          index: `[B]`, from a sample, `get`, `rows` or `last`.
          fields: Part of the row's structure: `{"reward": x}` with leaves `[B, ...]`; nested dicts, or paths as keys:
            `{"next/obs": x}`.
        Raises:
          ValueError: a field the rows do not have, or one that says where episodes end.
        Cost: O(B log B); on the host each row is stored again (old states keep the old one).

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> state, batch = buffer.sample(state, jax.random.key(0), 3)
          >>> state = buffer.update_rows(state, batch.index, {"t": jnp.full(3, 9)})
          >>> buffer.get(state, batch.index).data["t"].tolist()
          [9, 9, 9]
        """
        call = "Buffer.update_rows"
        self._refuse_change(call)
        spec, _ = self._state_spec(call, "update_rows(state, index, fields)", state)
        index = checks.check_index(call, index)
        given = named_leaves(fields)
        if ragged := self._ragged:
            spec = ragged.changeable(call, state.rows, list(given))
        unknown = [n for n in given if n not in spec]
        if unknown or not given:
            what = f"leaf '{unknown[0]}' is not in this buffer" if unknown else "no fields are given"
            raise ValueError(f"{call}: {what} (it has: {', '.join(spec)}). Write {{'{next(iter(spec), 'x')}': x}}.")
        for name in (*self.ends, self.sampler.stamp):
            if name in given:
                what = "says where episodes end" if name in self.ends else f"is what {self.sampler!r} goes by"
                raise ValueError(f"{call}: leaf '{name}' {what}, and cannot change afterwards. Leave it out.")
        part = {n: spec[n] for n in given}
        leaves = arguments.check_rows(call, given, part, jax.tree.structure(given), (index.slot.shape[0],), "B")
        return operations.update_rows(self, state, index, leaves)[0]

    def clear(self, state: BufferState) -> BufferState:
        """Forgets every row. Annealed numbers stay; every index handed out is stale. Cost: O(C).

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> int(buffer.size(buffer.clear(state)))
          0
        """
        self._refuse_change("Buffer.clear")
        self._state_spec("Buffer.clear", "clear(state)", state)
        return operations.clear(self, state)[0]

    def set(self, state: BufferState, **numbers: Any) -> BufferState:
        """Replaces numbers of the sampler that a user anneals, `set(state, alpha=0.5)`, without compiling again.

        Raises:
          ValueError: the sampler has no such number.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.prioritized(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> state = buffer.set(state, beta=1.0)
          >>> float(buffer.peek(state, jax.random.key(0), 4).weight[0])
          1.0
        """
        self._state_spec("Buffer.set", "set(state, alpha=...)", state)
        return operations.set_numbers(
            self, state, checks.check_numbers("Buffer.set", self.sampler, self.sampler.numbers, numbers)
        )[0]

    def rebuild(self, state: BufferState) -> BufferState:
        """Applies the sampler's numbers of now to all rows: after `set(state, alpha=...)` to those written before it too.

        Priorities stay as they are. `Ranked` always goes by its numbers of now: nothing changes.

        Raises:
          TypeError: the sampler has no priorities, or does not keep them: `Prioritized` does with largest="held".
        Cost: O(C), in place where the state is donated.

        Example:
          >>> import fbuf, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(100, sampler=fbuf.samplers.Prioritized(largest="held"))
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)}, priority=jnp.arange(1.0, 6.0))
          >>> state = buffer.rebuild(buffer.set(state, alpha=1.0))
        """
        call = "Buffer.rebuild"
        self._state_spec(call, "rebuild(state)", state)
        if not hasattr(self.sampler, "rebuild"):
            raise TypeError(f"{call}: {self.sampler!r} has no priorities. Use sampler=fbuf.samplers.Prioritized().")
        if fix := getattr(self.sampler, "rebuilds", ""):
            raise TypeError(
                f"{call}: {self.sampler!r} keeps what the numbers of then made of priorities, not these themselves. "
                f"Use {fix}."
            )
        return operations.rebuild(self, state)[0]

    # ----------------------------------------------------------------------------------------------- reading

    def sample(
        self, state: BufferState, key: jax.Array, batch_size: int | None = None, **options: Any
    ) -> tuple[BufferState, Sample]:
        """Draws a batch. Carry the returned state: it orders this read before later writes.

        With `prefetch=1` it hands out the batch drawn before and draws the next, as `Buffer` says.

        Args:
          state: From `init` or an earlier call.
          key: PRNG key, typed or raw; consumed.
          batch_size: B >= 1, a Python int; None: the buffer's.
          **options: Numbers for this call alone: `beta=schedule(step)` for prioritized samplers. With prefetch they are those
            of the batch drawn now, which the next call hands out.
        Returns:
          The state, and a `Sample` with leaves `[B, ...]`. From an empty buffer `mask` is False and all else zero.
        Raises:
          ValueError: `batch_size` < 1, given nowhere, or with prefetch another than the buffer's; an option the sampler does
            not know (at trace time).
        Cost: O(B) (`Prioritized`: O(B log C)); on the host one callback, with prefetch two.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> step = jax.jit(lambda state, key: buffer.sample(state, key, 32), donate_argnums=0)
          >>> state, batch = step(state, jax.random.key(0))
          >>> batch.data["t"].shape, bool(batch.mask.all())
          ((32,), True)
        """
        call, form = "Buffer.sample", "sample(state, key, batch_size)"
        self._state_spec(call, form, state)
        size, given = checks.check_draw(call, form, self, key, batch_size, options)
        if not self.prefetch:
            return operations.sample(self, state, key, given, static=(size,))
        if size != self.batch_size:
            raise ValueError(
                f"{call}: batch_size is {size}, but the state holds a batch of {self.batch_size} drawn ahead. Leave it out, or "
                f"write dataclasses.replace(buffer, batch_size={size}) and buffer.convert(other, state)."
            )
        return prefetch.sample(self, state, key, given)

    def peek(self, state: BufferState, key: jax.Array, batch_size: int | None = None, **options: Any) -> Sample:
        """The batch `sample` would draw, without the state: for evaluation, and for `vmap` over keys.

        Nothing orders it before later writes, so in a step that also writes use `sample`. What was drawn ahead stays.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> keys = jax.random.split(jax.random.key(0), 4)
          >>> jax.vmap(lambda key: buffer.peek(state, key, 8).data["t"])(keys).shape
          (4, 8)
        """
        return self.peeked(state, key, batch_size, **options)[1]

    def peeked(
        self, state: BufferState, key: jax.Array, batch_size: int | None = None, **options: Any
    ) -> tuple[BufferState, Sample]:
        """`peek`, and the state of one that drew without prefetch, whose counters say what was masked."""
        call, form = "Buffer.peek", "peek(state, key, batch_size)"
        self._state_spec(call, form, state)
        size, given = checks.check_draw(call, form, self, key, batch_size, options)
        return operations.sample(self, state, key, given, static=(size,))

    def get(self, state: BufferState, index: Any) -> Rows:
        """Rows by index, as they were added.

        Args:
          index: An `Index` of any shape (stale: `mask` False), or slots int32[...] (whatever lies there now).
        Returns:
          `Rows` with leaves `[..., item]`.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> buffer.get(state, jnp.array([0, 4])).data["t"].tolist()
          [0, 4]
        """
        call = "Buffer.get"
        self._state_spec(call, "get(state, index)", state)
        if not isinstance(index, Index):
            if isinstance(index, slice):
                raise TypeError(
                    f"{call}: index is {index}; expected an Index or int32 slots. Write jnp.arange(start, stop), or "
                    f"last(state, n) for the newest rows and rows(state) for all."
                )
            checks.check_own(call, index)
            slots = jnp.asarray(index)
            if not jnp.issubdtype(slots.dtype, jnp.integer):
                raise TypeError(f"{call}: index is {slots.dtype}; expected an Index or int32 slots. Use batch.index.")
            return operations.rows_at(self, state, slots.astype(jnp.int32))[1]
        return operations.get(self, state, index)[1]

    def rows(self, state: BufferState) -> Rows:
        """Every row, oldest first: leaves `[C, ...]`, with lanes `[C / E, E, ...]`; `mask` False past the newest.

        With a writer that replaces any row all lanes are one stream: in order of arrival along both axes.

        Cost: O(C).

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> rows = buffer.rows(state)
          >>> rows.data["t"][rows.mask].tolist()
          [0, 1, 2, 3, 4]
        """
        self._state_spec("Buffer.rows", "rows(state)", state)
        return operations.all_rows(self, state)[1]

    def last(self, state: BufferState, n: int) -> Rows:
        """The newest `n` rows (a lane), newest last: leaves `[n, ...]`, with lanes `[n, E, ...]`.

        Where fewer are held, the first entries have `mask` False.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> buffer.last(state, 2).data["t"].tolist()
          [3, 4]
        """
        self._state_spec("Buffer.last", "last(state, n)", state)
        if not isinstance(n, (int, np.integer)) or not 1 <= n <= self.geometry.length:
            raise ValueError(f"Buffer.last: n is {n!r}; expected an int from 1 to {self.geometry.length}.")
        return operations.last(self, state, static=(int(n),))[1]

    def can_sample(self, state: BufferState) -> jax.Array:
        """bool[]: there is something to draw.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> bool(buffer.can_sample(state)), bool(buffer.can_sample(buffer.clear(state)))
          (True, False)
        """
        self._state_spec("Buffer.can_sample", "can_sample(state)", state)
        return operations.can_sample(self, state)[1]

    def size(self, state: BufferState) -> jax.Array:
        """int32[]: rows held.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> int(buffer.size(state))
          5
        """
        self._state_spec("Buffer.size", "size(state)", state)
        return jnp.sum(state.ring.size, dtype=jnp.int32)

    def stats(self, state: BufferState) -> dict[str, jax.Array]:
        """Scalars worth logging: sizes, the sampler's own, and everything that was refused, by reason.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> int(buffer.stats(state)["size"])
          5
        """
        self._state_spec("Buffer.stats", "stats(state)", state)
        return operations.stats(self, state)[1]

    def summary(self, state: BufferState, *, compare: int | None = 1 << 14) -> Summary:
        """What the buffer holds and would draw: ages, priorities, effective size, episodes, duplicates, bytes by leaf. Eager.

        It prints as a table (also in notebooks, and with rich); `to_dict()` is flat, for loggers. For scalars inside a step use
        `stats`; for pictures `fbuf.plot`.

        Args:
          compare: How many of the newest rows are read and compared, to count duplicates; 0: none, None: all.
        Raises:
          TypeError: the state is traced.
          ValueError: `compare` is no number of rows.
          RuntimeError: the state was donated; or it is too old: rows, or priorities on the host, have expired.
        Cost: O(C), one jitted call and the transfer of some 20 bytes a row; on the host rows that are compared are decoded.

        Example:
          >>> import fbuf, jax.numpy as jnp
          >>> buffer = fbuf.Buffer(capacity=8)
          >>> state = buffer.extend(buffer.init(jnp.int32(0)), jnp.arange(6, dtype=jnp.int32) // 2)
          >>> summary = buffer.summary(state)
          >>> summary.size, summary.distinct, summary.ages.median, summary.effective_size
          (6, 3, 2, 6.0)
        """
        from fbuf._buffer.summary import summary

        self._state_spec("Buffer.summary", "summary(state)", state)
        return summary(self, state, compare)

    def nbytes(self, state: BufferState) -> dict[str, int]:
        """Bytes held now: `device`, `host`, `disk`. Eager.

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> buffer.nbytes(state)["host"]
          0
        """
        sizes = self.storage.nbytes(state.rows)
        device = sizes["device"] + tree_bytes(dataclasses.replace(state, rows=None))
        kept = host_sampler(self.sampler)
        own = 0 if kept is None else kept.host_bytes(state.sampler)
        return {**sizes, "device": device, "host": sizes["host"] + own}

    def flush(self, state: BufferState) -> None:
        """Waits until every row of `state` is on the disk, safe from a failure of power (`storages.Memmap`, `Compressed`).

        A storage without files has nothing to wait for. Eager.

        Raises:
          OSError: the disk refuses.
        Cost: what the system has not written yet, at the speed of the disk.

        Example:
          >>> import fbuf, tempfile
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     buffer = fbuf.Buffer(100, storage=fbuf.storages.Memmap(path=f"{folder}/rows"))
          ...     state = buffer.add(buffer.init({"t": 0}), {"t": 7})
          ...     buffer.flush(state)
          ...     del state
        """
        self._state_spec("Buffer.flush", "flush(state)", state)
        if isinstance(self.storage, Resumable):
            jax.block_until_ready(state)
            self.storage.flush(state.rows)

    def plan(self, example: PyTree, **settings: Any) -> Plan:
        """Bytes on device, host and disk, and peaks, before anything is allocated; see `fbuf.Plan`.

        Example:
          >>> import fbuf, jax.numpy as jnp
          >>> plan = fbuf.uniform(1_000_000).plan({"obs": jnp.zeros((84, 84), jnp.uint8)})
          >>> plan.device > 7056 * 1_000_000
          True
        """
        from fbuf._buffer.plan import plan

        return plan(self, example, **settings)

    def convert(self, other: Buffer, state: BufferState) -> BufferState:
        """The same rows as a state of `other`: with another sampler, view, prefetch, batch_size or on_read.

        Rows are shared, not copied: donate at most one of the two states. Priorities, and numbers given by `set`, start
        anew. Stages of `on_read` that both have under one name go on with what they know; others learn from the rows that are
        held. What came before the oldest row of a full lane is unknown, so its first rows may not be drawable where they were
        before, and windows with a stride begin at that row.

        Raises:
          ValueError: `other` has another capacity, lanes, storage, writer or on_write, or names a leaf that rows do not have.
        Cost: O(C).

        Example:
          >>> import fbuf, jax, jax.numpy as jnp
          >>> buffer = fbuf.uniform(100)
          >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
          >>> ranked = fbuf.prioritized(100)
          >>> int(ranked.size(buffer.convert(ranked, state)))
          5
        """
        spec, _ = self._state_spec("Buffer.convert", "convert(other, state)", state)
        if not isinstance(other, Buffer):
            raise TypeError(
                f"Buffer.convert: other is {type(other).__name__}; expected a Buffer. The order is convert(other, state)."
            )
        for field in ("capacity", "lanes", "storage", "writer", "on_write"):
            if getattr(self, field) != getattr(other, field):
                fix = f"For another {field} add the rows anew: other.extend(other.init(example), rows)."
                if isinstance(other.writer, ReadOnly):  # which takes no rows
                    fix = f"A data set is opened where it lies: fbuf.datasets.open({getattr(other.storage, 'path', '')!r})."
                raise ValueError(
                    f"Buffer.convert: other.{field} is {getattr(other, field)!r}; expected {getattr(self, field)!r}. {fix}"
                )
        checks.check_fields("Buffer.convert", other, spec)
        fresh = state_ops.init_host_sampler(other, "Buffer.convert")
        convert = _convert.index_rows if isinstance(self.writer, ReadOnly) else operations.convert
        anchors, sampler = convert(self, state, fresh, static=(other,))[1]
        if other.on_read != self.on_read:
            state = fit_transforms.fit_transforms(other, state, since=self)
        state = dataclasses.replace(state, anchors=anchors, sampler=sampler, ahead=None)
        state = dataclasses.replace(state, ahead=prefetch.empty_prefetch(other, state))
        return other._validate_transforms("Buffer.convert", state)

    def grow(
        self, state: BufferState, blocks: Any = None, *, capacity: int | None = None
    ) -> tuple[Buffer, BufferState]:
        """The same rows, indices and priorities with more room: for distinct blocks (`storages.Deduplicated`), or for rows
        (`storages.Ragged`, as long as no row has been overwritten).

        Eager: shapes change, so what was jitted compiles again for the new buffer. What does not change is shared
        with `state`: donate at most one of the two.

        Args:
          blocks: Places of the table then, as for `Deduplicated`; None: half as many again.
          capacity: Rows then, for `Ragged`; None: twice as many.
        Returns:
          The buffer to use from now on, and its state.
        Raises:
          TypeError: the storage does not grow; or the state is traced.
          ValueError: no more room than there is, or rows have been overwritten.
        Cost: O(C + places); both tables exist for a moment.

        Example:
          >>> import fbuf
          >>> buffer = fbuf.Buffer(10, storage=fbuf.storages.Ragged())
          >>> state = buffer.add(buffer.init({"text": "", "n": 0}), {"text": "a", "n": 1})
          >>> buffer, state = buffer.grow(state, capacity=1000)
          >>> buffer.capacity, int(buffer.size(state))
          (1000, 1)
        """
        self._refuse_change("Buffer.grow")
        self._state_spec("Buffer.grow", "grow(state, blocks)", state)
        if self._ragged is not None:
            if blocks is not None:
                raise TypeError(
                    f"Buffer.grow: blocks is {blocks!r}, but {self.storage!r} has none; expected capacity. Write "
                    f"grow(state, capacity={blocks!r})."
                )
            from fbuf._buffer.grow import grow

            return grow(self, state, capacity)
        if capacity is not None or not isinstance(self.storage, Growable):
            raise TypeError(
                f"Buffer.grow: {self.storage!r} has nothing to grow. Make a buffer of a larger capacity and add the rows: "
                f"other.extend(other.init(example), rows)."
            )
        storage, rows = self.storage.grow(state.rows, blocks)
        return dataclasses.replace(self, storage=storage), dataclasses.replace(state, rows=rows)

    # ------------------------------------------------------------------------------------------------ inside

    def _refuse_change(self, call: str) -> None:
        """Raises if rows stay as they are."""
        if isinstance(self.writer, ReadOnly):
            self.writer.refuse(call)

    def _state_spec(self, call: str, form: str, state: Any) -> tuple[Spec, Any]:
        """Spec and structure of a row; refuses what is no state, and one that was donated."""
        if not isinstance(state, BufferState):
            raise TypeError(
                f"{call}: first argument is {type(state).__name__}, expected BufferState. The order is {form}."
            )
        refuse_donated(call, state)
        return self.storage.spec(state.rows)

    def check_state(self, state: BufferState) -> None:
        """Refuses a state that another buffer made: other capacity, lanes, sampler, view or prefetch. At trace time only."""
        spec, structure = self.storage.spec(state.rows)
        given = transforms.given_of(state)
        items = tuple((name, tuple(leaf.shape), leaf.dtype) for name, leaf in spec.items())
        found = tuple((tuple(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(state))
        made = None if state.anchors is None else state.anchors.rule
        also = jax.tree.structure((state.ahead, state.transforms))
        fits = (given is None) == (self.on_write is None)
        if not fits or (found, made, also) != _expected_state(self, items, structure, given):
            raise ValueError(
                f"Buffer: this state was made by another buffer than {self!r} (of another capacity, number of lanes, "
                f"storage, sampler, view, prefetch or batch_size, or other transforms). Use the buffer that made it (buffer, "
                f"state = buffer.grow(state) gives another); for another sampler, view, prefetch or on_read of the same rows "
                f"buffer.convert(other, state)."
            )


@functools.lru_cache(maxsize=256)
def _expected_state(buffer: Buffer, items: tuple[Any, ...], structure: Any, given: RowFormat | None) -> Any:
    """Shapes and dtypes of the leaves of `buffer`'s states, the rule of their anchors, what is drawn ahead, what is known."""
    spec = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in items}
    rows = buffer.storage.abstract(buffer.geometry, spec, structure)
    state = jax.eval_shape(functools.partial(prefetch.empty_state, buffer, given=given), rows)
    leaves = tuple((tuple(leaf.shape), leaf.dtype) for leaf in jax.tree.leaves(state))
    return (
        leaves,
        None if state.anchors is None else state.anchors.rule,
        jax.tree.structure((state.ahead, state.transforms)),
    )

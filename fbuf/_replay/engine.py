"""`Engine`: what a `Replay` does with its buffer, state and key, without its lock and limit.

It calls jitted programs. Where rows are in CPU memory or a store, it collects rows, and draws in NumPy (`fbuf._host_draws`) for
NumPy and torch: chosen once for a buffer and the devices of its state, with equal batches for equal keys. Its methods are
called with the lock held.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from fbuf._buffer import checks, write
from fbuf._buffer import read as _read
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, anchor_count, host_ring, raise_failed, room_left
from fbuf._concurrency.interrupts import DeferInterrupts
from fbuf._core import arguments
from fbuf._core.dispatch import OnHost, with_changes
from fbuf._core.pytree import PyTree, exact, needs_x64, nested
from fbuf._core.sample import Index, Sample
from fbuf._core.text_table import counted
from fbuf._host.failed_writes import write_of
from fbuf._host_draws import choose, reads, row_block
from fbuf._host_draws.deferred import Deferred
from fbuf._host_draws.draws import HostDraws, random_draws
from fbuf._host_draws.priority_update import PriorityUpdate
from fbuf._host_draws.row_block import RowBlock
from fbuf._indexing import scatter
from fbuf._replay import programs
from fbuf._replay.arguments import to_device_of, unshared
from fbuf.samplers import Prioritized, Ranked, Uniform
from fbuf.storages import Deduplicated, Device, Ragged


class Engine:
    """Write, draw and count for a `Replay`.

    Attributes:
      buffer, state, key: Until `flush` the state lacks the rows of `block`, and what is `deferred`. Of the key, the data.
      block: Collected rows; None if each row is written at once. Where a store on the host takes them, a block is kept until
        it is known to be stored. If that fails, it is written again before the next rows.
      host: Draws in NumPy; None if programs draw.
      deferred: What is done with the next draw, or before the state is read: of `host`, or an update for programs.
      packs: Whether programs draw packed batches for NumPy and torch.
      is_queue: Whether the buffer refuses rows rather than overwriting one that waits.
    """

    def __init__(self, buffer: Buffer, state: BufferState, key: jax.Array, unlimited: bool) -> None:
        self.buffer, self.unlimited = buffer, unlimited
        self.state, self.key = state, jax.random.key_data(key)
        self.impl = str(jax.random.key_impl(key))
        self._sizes: np.ndarray[Any, Any] | None = None  # rows held per lane, where known
        self.is_queue = room_left(buffer, state) is not None  # `Consume(order="fifo")`: it refuses rows
        self.written: weakref.ref[Index] | None = None  # of the last write, until the next
        self._draws: dict[int | None, Any] = {}  # checked sizes and numbers by batch size, without options
        self._programs: dict[tuple[int, programs.Form, bool], Any] = {}
        self.most_drawn = 0  # the largest batch size for which there were enough rows, where each is drawn once
        self.warns_short = buffer.sampler.once
        self._sent: np.ndarray[Any, Any] | None = None  # the block written last, until it is known to be stored
        self.block_failed = False  # it could not be
        self.may_wait = True  # a row for later ones of its lane, as of `waits`
        self._on_device = isinstance(buffer.storage, (Device, Deduplicated)) and not buffer.sampler.on_host
        self._spec = buffer.storage.spec(state.rows)[0]
        self._has_pairs = any(needs_x64(leaf.dtype) for leaf in self._spec.values())
        self._choose_paths()

    def _choose_paths(self) -> None:
        """Choose how to draw batches and collect rows, by the buffer and the devices of the state."""
        self.arrays = reads.HeldArrays(self.buffer.storage)
        devices: set[Any] = self.state.header.sharding.device_set
        packs = not self._has_pairs and not isinstance(self.buffer.storage, Ragged)
        self.packs = packs and {d.platform for d in devices} == {"cpu"} and len(devices) == 1
        self._view = choose.host_view(self.buffer, self.state) if self.packs else None
        self.host: HostDraws | None = choose.host_draws(self.buffer, self.impl, self._view, list(self._spec))
        # Each draw but those of `HostDraws` writes the rows first, so there are few.
        self.block: RowBlock | None = row_block.block_of(self.buffer, self.state, 64 if self.host is None else 512)
        updates = self.packs and self._on_device and self.buffer.dense and self.buffer.sampler.prioritized
        self.deferred: Deferred = self.host or (PriorityUpdate(self.buffer) if updates else Deferred())

    def replace(self, state: BufferState) -> None:
        """Go on with another state, without the rows collected for this one."""
        if not self.state.header.is_deleted():
            self.keep_written()
        self.arrays.release()
        moved = state.header.sharding != self.state.header.sharding
        self.state = state
        if moved:
            self._choose_paths()
        self._forget()

    def _forget(self) -> None:
        """Drop what waits, and the rows collected, for a state that was replaced."""
        self._sizes, self._sent, self.block_failed = None, None, False
        self.may_wait = True
        if self.block is not None:
            self.block.clear()
        self.deferred.drop()

    def lend(self) -> BufferState:
        """Return the whole state, which the caller may donate: with every row, or raise."""
        if not self.state.header.is_deleted():
            self.flush(before_rows=True)
            self.keep_written()
        self.arrays.lent = self.state.header
        return self.state

    def collect(self, row: PyTree, priority: Any, mask: Any) -> bool:
        """Keep one row for a later write; False where it must be written now."""
        block = self.block
        if block is None or priority is not None or self.waits(mask):
            return False
        if block.count == block.length:  # the last write of it was interrupted, or raised
            self._write_block()
        if not block.append(row, mask):
            return False
        if block.count == block.length:
            try:
                self._write_block()
            except Exception:
                block.count -= block.count == block.length  # this row is for the caller to add again
                raise
        return True

    def waits(self, mask: Any = None) -> bool:
        """Return whether a row whose priority was given waits for the one that is added, which is written at once then.

        Once it is an anchor, it may be the largest priority, which later rows get; those of one write get the largest before
        it. Rows of other lanes, as `mask` says, do not make it an anchor.
        """
        if self.may_wait:
            given = None if self.state.anchors is None else self.state.anchors.tail_priority
            lanes = np.zeros(1, bool) if given is None else (np.asarray(given) >= 0).any(axis=0)
            self.may_wait = bool(lanes.any())
            chosen = np.ravel(mask) if isinstance(mask, (bool, np.bool_, np.ndarray)) else lanes
            if chosen.dtype == bool and chosen.size == lanes.size:
                return bool((lanes & chosen).any())
        return self.may_wait

    def update_priority(self, index: Index, error: Any, mask: Any, eta: float) -> Any:
        """Call `Buffer.update_priority`, or let the update wait for the next draw. Return what was counted, or None."""
        if not self.block_failed:
            block = self._readable()
            with DeferInterrupts():  # what is kept of the block and the tree changes as one
                if self.deferred.keep(self, block, index, error, mask):
                    return None
        self.flush()
        index, error, mask = self.on_device((index, error, mask))
        return self.set_priorities(index, error, mask, eta)

    def set_priorities(self, index: Index, error: Any, mask: Any, eta: float) -> Any:
        """Call `Buffer.update_priority`. Return what was counted."""
        sizes = self._sizes
        counts = self.donate(programs.update_priority, index, error, mask=mask, eta=eta)
        self._sizes = sizes
        return counts

    def on_device(self, tree: Any) -> Any:
        """Return arguments with JAX arrays on the device of the state."""
        return jax.tree.map(lambda x: to_device_of(x, self.state.header), tree)

    def cut(self, lanes: Any) -> None:
        """Call `Buffer.cut`."""
        self.flush(before_rows=True)
        sizes = self._sizes
        self.donate(programs.cut, lanes)
        self._sizes = sizes

    def clear(self) -> None:
        """Call `Buffer.clear`."""
        self.flush()
        self.keep_written()
        self.state = self.buffer.clear(self.state)
        self._forget()

    def next_key(self) -> jax.Array:
        """Return a key that is used for nothing else."""
        after, key = jax.random.split(jax.random.wrap_key_data(self.key, impl=self.impl))
        self.key = jax.random.key_data(after)
        return key

    def read_epoch(self, key: jax.Array, number: int, index: Index, chance: float) -> Sample:
        """Return batch `number` of an epoch of anchors; see `Replay.epoch`."""
        with DeferInterrupts():  # an interrupt inside a callback would become another error
            self.state, batch = _read.sample_at(self.buffer, self.state, key, number, index, chance)
        return self.exact("Replay.epoch", batch)

    def flush(self, before_rows: bool = False) -> None:
        """Set the deferred priorities and write the collected rows.

        A block that could not be stored, of which an error told, is written again first. If that fails again, it and later
        rows wait. It is an error only `before_rows`, which follow them.
        """
        self._set_deferred()
        if self.block_failed:
            self.await_writes()
            try:
                self._rewrite_block()
            except (OSError, RuntimeError):
                if before_rows:
                    raise
                return
        self._write_block()
        if self._sent is not None:
            self.await_writes()

    def _set_deferred(self) -> None:
        """Set the priorities that wait for a draw, and the position in an epoch."""
        with DeferInterrupts():  # no update is lost
            self.deferred.settle(self)

    def _write_block(self) -> None:
        """Write the collected rows, if there are any, after a block that could not be stored."""
        block = self.block
        if block is None or not block.count:
            return
        self._set_deferred()
        self.await_writes()  # those of other calls raise here
        if self.block_failed:
            self._rewrite_block()
        sizes = self._sizes_after()
        self.keep_written()
        with DeferInterrupts():
            rows = block.packed()
            self.state = self.deferred.write(self.buffer, self.state, block, rows)
            block.clear()
            self._sent, self._sizes = rows if isinstance(self.state.rows, OnHost) else None, sizes

    def _rewrite_block(self) -> None:
        """Write the block that could not be stored; raise if it cannot be."""
        self.keep_written()
        with DeferInterrupts():
            self.state = row_block.write(self.buffer, self.state, self._sent)
            self.block_failed, self._sizes = False, None
        self.await_writes()

    def await_writes(self) -> None:
        """Wait for every write to a store, and raise if one failed. The block that was written last is kept in that case."""
        if not isinstance(self.state.rows, OnHost):
            return
        jax.block_until_ready(self.state.header)
        is_block = self._sent is not None and not self.block_failed
        with DeferInterrupts():
            try:
                self._raise_failed()
            except (OSError, RuntimeError) as error:
                failed = write_of(error)
                if not is_block or failed is None:
                    raise
                self.block_failed = True
                raise failed.to_error("they are kept, and written before the next rows") from None
            if is_block:
                self._sent = None

    def warn_unstored(self, call: str, stacklevel: int = 4) -> None:
        """Warn of added rows that could not be stored and wait."""
        if self.block_failed and self.block is not None and self._sent is not None:
            number = self.block.rows_in(self._sent) + self.block.rows_in(self.block.packed(self.block.length))
            warnings.warn(
                f"{call}: {counted(number, 'row')} that were added could not be stored yet. Make room and read `replay.state`, "
                f"which writes them.",
                RuntimeWarning,
                stacklevel=stacklevel,
            )

    def _raise_failed(self) -> None:
        """Raise OSError or StoreCorrupted if the last write failed. The state is whole."""
        try:
            raise_failed(self.state, self.buffer.storage)
        except (OSError, RuntimeError):
            self._sizes = None
            raise

    def _sizes_after(self) -> np.ndarray[Any, Any] | None:
        """Return the rows held per lane once the collected rows are written, where known."""
        if self.block is None or self._sizes is None or self.block.masked:
            return None
        if self.block_failed:
            return self._sizes
        sizes: np.ndarray[Any, Any] = np.minimum(self._sizes + self.block.count, self.buffer.geometry.length)
        return sizes

    def donate(self, method: Any, *args: Any, **options: Any) -> Any:
        """Write in place, without an interrupt between the donation and the assignment. Return what was counted."""
        self.keep_written()
        args, options = unshared((args, options))
        with DeferInterrupts():
            self._sizes = None
            self.state, counts = method(self.buffer, self.state, *args, **options)
        self._raise_failed()
        return counts

    def keep_written(self) -> None:
        """Compute the index of the last write before the state changes, if the caller holds it; release views of its arrays."""
        self.arrays.release()
        index = None if self.written is None else self.written()
        if index is not None:
            _ = index.slot
        self.written = None

    def row_of(self, call: str, row: PyTree) -> PyTree:
        """Return one row with Python numbers as arrays."""
        spec, structure = checks.given_spec(self.buffer, self.state)
        lead, axes = ((), "") if self.buffer.lanes is None else ((self.buffer.lanes,), "E")
        return structure.unflatten(arguments.check_rows(call, unshared(row), spec, structure, lead, axes).values())

    def narrowed(self, call: str, rows: PyTree) -> PyTree:
        """Return rows without NumPy leaves that jit would narrow unchecked, or not take."""
        if not self._has_pairs and checks.jit_takes(rows):
            return rows
        return arguments.narrowed(call, rows, checks.given_spec(self.buffer, self.state)[0])

    def store_values(self, call: str, rows: PyTree, priority: Any, mask: Any) -> PyTree:
        """Store ragged leaves first, so that the rest can be written in place."""
        leaves, values, shape, *_ = checks.check_rows(call, self.buffer, self.state, unshared(rows), priority, mask)
        if self.unlimited:
            self._make_room(shape, mask)
        if values is not None and shape[0]:
            leaves = write.store_values(self.buffer, self.state, leaves, values, shape, mask)
        return nested(leaves)

    def _make_room(self, shape: tuple[int, int], mask: Any) -> None:
        more = shape[0] if mask is None else np.asarray(mask).reshape(shape).sum(axis=0)
        needed = int((host_ring(self.state.header)[1] + more).max())
        capacity, length = self.buffer.capacity, self.buffer.geometry.length
        while length < needed:
            capacity, length = 2 * capacity, 2 * length
        if capacity != self.buffer.capacity:
            self.grow(None, capacity)

    def grow(self, blocks: Any, capacity: int | None) -> None:
        """Call `Buffer.grow`, with every row written."""
        self.keep_written()
        self.buffer, self.state = self.buffer.grow(self.state, blocks, capacity=capacity)
        self._sizes, self._draws, self._programs = None, {}, {}
        self._choose_paths()

    def draw(self, call: str, size: int, numbers: dict[str, jax.Array], packed: bool) -> tuple[Any, jax.Array | None]:
        """Draw a batch: in NumPy, or with the write of the collected rows in one program where no callback is involved."""
        if packed and self.host is not None and not self.block_failed:
            block = self._readable()
            with DeferInterrupts():  # what is kept of the block and the tree changes as one
                drawn = self.host.draw(self, block, self.key, size, numbers)
                if drawn is not None:
                    self.key = drawn[0]
                    return drawn[1], None
        if self.host is not None:
            self._set_deferred()
        if isinstance(self.key, np.ndarray):  # from `HostDraws`
            self.key = jax.device_put(self.key)
        form: programs.Form = "packed" if packed else "whole"
        block, sizes = self.block, None
        rows: tuple[Any, ...] = ()
        if self._on_device and self.deferred.fuses and block is not None and block.count:
            update = () if self.deferred.update is None else (self.deferred.update.packed(),)
            rows, sizes = (block.packed(), *update), self._sizes_after()
            self.keep_written()
        else:
            self.flush()
        kind = size, form, bool(rows)
        draw = self._programs.get(kind)
        first = draw is None
        if draw is None:
            draw = programs.sampler(self.buffer, size, self.impl, form, bool(rows))
        # An interrupt inside a callback would become another error; one after a donation would lose the state.
        guard = contextlib.nullcontext() if self._on_device and not rows else DeferInterrupts()
        with guard, programs.announce(call) if first else contextlib.nullcontext():
            state, key, batch, counts = draw(self.state, self.key, numbers, *rows)
            self.state, self.key = state if rows else with_changes(self.state, state), key
            if rows and block is not None:
                block.clear()
                self._sizes = sizes
                self.deferred.drop()
        self._programs[kind] = draw
        return batch, counts

    def _readable(self) -> RowBlock | None:
        """Return the block whose rows are those that will be written, or write the collected rows."""
        block = self.block if self.buffer.on_write is None else None
        if block is None or block.masked or block.count >= block.most_read:
            self.flush()
        return block

    def check_draw(
        self, call: str, batch_size: int | None, options: Mapping[str, Any]
    ) -> tuple[int, dict[str, jax.Array]]:
        """Return the batch size and the sampler's numbers of a draw; raise for invalid ones."""
        plain = not options and (batch_size is None or type(batch_size) is int)  # True and 4.0 equal ints
        known = self._draws.get(batch_size) if plain else None
        if known is None:
            key = jax.random.wrap_key_data(self.key, impl=self.impl)
            known = checks.check_draw(
                call, f"{call.rpartition('.')[2]}(batch_size)", self.buffer, key, batch_size, options
            )
            if plain:
                self._draws[batch_size] = known
        return known

    def warn_short(self, call: str, size: int) -> None:
        """Warn, once for a replay, of a batch larger than the number of rows, each of which is drawn at most once."""
        self.flush()
        count = int(np.asarray(anchor_count(self.state)).sum())
        if count >= size:
            self.most_drawn = size
        elif count:
            self.warns_short = False
            warnings.warn(
                f"{call}: batch_size is {size}, but only {counted(count, 'row')} can be sampled, and a batch of "
                f"{self.buffer.sampler!r} has each at most once; `mask` is False in the rest. Draw fewer, or add rows first.",
                RuntimeWarning,
                stacklevel=5,
            )

    def check_rows(self, state: BufferState) -> None:
        """Raise unless a state of this buffer holds rows like the present one."""
        (spec, structure), known = checks.given_spec(self.buffer, state), checks.given_spec(self.buffer, self.state)
        if (spec, structure) != known:
            got, expected = (
                ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in of.items())
                for of in (spec, known[0])
            )
            raise ValueError(
                f"Replay.state: its rows are {structure} of {got}; expected {known[1]} of {expected}. For other rows make "
                f"another Replay(buffer, example)."
            )

    def exact(self, call: str, batch: Sample) -> Sample:
        """Return a batch with 64-bit leaves as NumPy arrays."""
        return dataclasses.replace(batch, data=exact(call, self._spec, batch.data)) if self._has_pairs else batch

    def compilations(self, batch_size: int | None, packed: bool, collects: bool) -> list[Any]:
        """Return functions that lower the programs of `add`, of such draws, and of their `update_priority`."""
        size, numbers = self.check_draw("Replay.compile", batch_size, {})

        form: programs.Form = "packed" if packed else "whole"
        host = self.host if packed else None

        def draw(*rows: Any) -> Any:
            program = programs.sampler(self.buffer, size, self.impl, form, bool(rows))
            return program.lower(self.state, self.key, numbers, *rows)

        jobs: list[Any] = [draw]
        if host is not None:
            jobs = [partial(random_draws(size, self.impl, host.bits).lower, self.key)]
            jobs += host.compilations(self.state, size, numbers, self.block if collects else None)
        block = self.block if collects else None
        if block is not None:
            for rows in map(block.packed, block.lengths):
                jobs += self.deferred.lower_writes(self.buffer, self.state, block, rows)
                if self._on_device and self.deferred.fuses and host is None:
                    jobs.append(partial(draw, rows))
                    if isinstance(self.deferred, PriorityUpdate):
                        jobs.append(partial(draw, rows, jax.ShapeDtypeStruct((3, size), np.int32)))
        writable = not self.buffer.writer.read_only
        if writable and block is None and not isinstance(self.buffer.storage, Ragged):
            spec, structure = checks.given_spec(self.buffer, self.state)
            lanes = () if self.buffer.lanes is None else (self.buffer.lanes,)
            zeros = [np.zeros((*lanes, *leaf.shape), leaf.dtype) for leaf in spec.values()]
            row = self.row_of("Replay.compile", structure.unflatten(zeros))
            jobs.append(partial(programs.add.lower, self.buffer, self.state, row, priority=None, mask=None))
        if self.buffer.sampler.prioritized:
            words: list[Any] = [jax.ShapeDtypeStruct((size,), dtype) for dtype in (np.int32, np.uint32, np.float32)]
            update: Any = partial(programs.update_priority.lower, self.buffer, self.state, Index(*words[:2]), words[2])
            jobs.append(partial(update, mask=None, eta=0.9))
        return jobs

    def size(self) -> int:
        """Return the number of rows held, collected rows included."""
        if self.block is not None and self.block.masked:
            self.flush()
        if self._sizes is None:
            self._sizes = host_ring(self.state.header)[1]
        sizes = self._sizes_after()
        return int((self._sizes if sizes is None else sizes).sum())

    def slots(self, position: Any) -> Any:
        """Return the slots of rows by position, integers of any shape, 0 the oldest; of several lanes step by step."""
        geometry, state = self.buffer.geometry, self.state
        if state.scatter is not None:
            return np.asarray(scatter.by_age(state.scatter))[position]
        cursor, size, _ = host_ring(state.header)
        age, lane = position // geometry.lanes, position % geometry.lanes
        if (size != size[0]).any():
            age, lane = np.argwhere(np.arange(size.max())[:, None] < size)[position].T
        slots = (cursor - size)[lane] + age
        return (slots % geometry.length * geometry.lanes + lane).astype(np.int32)

    def has_room(self, rows: int) -> bool:
        """Return whether `rows` rows a lane can be added without refusing any. Only a queue waits for writes to know."""
        return not self.is_queue or bool(self.buffer.can_add(self.state, rows))

    def ready(self, size: int) -> bool:
        """Return whether a row, from a queue a whole batch, can be sampled.

        Asking waits for writes, so avoid it where every row can be.
        """
        if self.is_queue:
            count = anchor_count(self.state)
            return int(self.buffer.sampler.available(self.state.sampler, count)) >= size
        always = self.buffer.dense and isinstance(self.buffer.sampler, (Uniform, Prioritized, Ranked))
        return always or bool(self.buffer.can_sample(self.state))

"""`ReplayState`: the buffer, state, key and collected rows of a `Replay`, without its lock and limit.

Its methods are called with the lock held.
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
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, anchor_count, host_ring, raise_failed, room_left
from fbuf._core import arguments
from fbuf._core.dispatch import with_changes
from fbuf._core.pytree import PyTree, exact, has_64_bits, needs_x64, nested
from fbuf._core.sample import Index, Sample
from fbuf._core.text_table import counted
from fbuf._indexing import scatter
from fbuf._replay import host_reads, programs
from fbuf._replay.host_draws import HostDraws, random_draws
from fbuf._replay.interrupts import DeferInterrupts
from fbuf._replay.priority_draws import PriorityDraws, host_draws
from fbuf._replay.row_block import RowBlock, row_block
from fbuf._replay.written import WrittenIndex
from fbuf.samplers import Prioritized, Ranked, Uniform
from fbuf.storages import Deduplicated, Device, Ragged


class ReplayState:
    """A buffer with its state and key."""

    def _begin_state(self, buffer: Buffer, state: BufferState, key: jax.Array, unlimited: bool) -> None:
        self.buffer, self.unlimited = buffer, unlimited
        self._state, self._key = state, jax.random.key_data(key)
        self._impl = str(jax.random.key_impl(key))
        self._sizes: np.ndarray[Any, Any] | None = None  # rows held per lane, where known
        self._queue = room_left(buffer, state) is not None  # `Consume(order="fifo")`: it refuses rows
        self._written: weakref.ref[WrittenIndex] | None = None  # of the last write, until the next
        self._arrays = host_reads.HeldArrays()
        self._draws: dict[int | None, Any] = {}  # checked sizes and numbers by batch size, without options
        self._programs: dict[tuple[int, programs.Form, bool], Any] = {}
        self._most_drawn = 0  # the largest batch size for which there were enough rows, where each is drawn once
        self._warns_short = buffer.sampler.once
        self._on_device = isinstance(buffer.storage, (Device, Deduplicated)) and not buffer.sampler.on_host
        self._spec = buffer.storage.spec(state.rows)[0]
        self._has_pairs = any(needs_x64(leaf.dtype) for leaf in self._spec.values())
        self._choose_paths()

    def _choose_paths(self) -> None:
        """Choose how to draw batches and collect rows, by the buffer and the devices of the state."""
        devices: set[Any] = self._state.header.sharding.device_set
        packs = not self._has_pairs and not isinstance(self.buffer.storage, Ragged)
        self._packs = packs and {d.platform for d in devices} == {"cpu"} and len(devices) == 1
        self._view = host_reads.host_view(self.buffer, self._state) if self._packs else None
        self._host_draws: HostDraws | None = host_draws(self.buffer, self._impl, self._view, list(self._spec))
        # Each draw but those of `HostDraws` writes the rows first, so there are few.
        self._block: RowBlock | None = row_block(self.buffer, self._state, 64 if self._host_draws is None else 256)
        self._updates = self._host_draws if isinstance(self._host_draws, PriorityDraws) else None

    def _collect(self, row: PyTree, priority: Any, mask: Any) -> bool:
        """Keep one row for a later write; False where it must be written now."""
        block = self._block
        if block is None or priority is not None or not block.append(row, mask):
            return False
        if block.count == block.length:
            self._flush()
        return True

    def _set_priorities(self, *args: Any, **options: Any) -> Any:
        """Call `Buffer.update_priority`. Return what was counted."""
        sizes = self._sizes
        counts = self._donate(programs.update_priority, *args, **options)
        self._sizes = sizes
        return counts

    def _flush(self) -> None:
        """Set the deferred priorities and write the collected rows."""
        updates, block = self._updates, self._block
        if updates is not None:
            updates.settle(self)
        if block is not None and block.count:
            sizes = self._sizes_after()
            self._keep_written()
            write = programs.write_block if updates is None else updates.write
            with DeferInterrupts():
                self._state = write(self.buffer, self._state, block)
                block.clear()
                self._sizes = sizes
            self._raise_failed()

    def _raise_failed(self) -> None:
        """Raise OSError if the last write failed. The state is whole."""
        try:
            raise_failed(self._state, self.buffer.storage)
        except OSError:
            self._sizes = None
            raise

    def _sizes_after(self) -> np.ndarray[Any, Any] | None:
        """Return the rows held per lane once the collected rows are written, where known."""
        if self._block is None or self._sizes is None or self._block.masked:
            return None
        sizes: np.ndarray[Any, Any] = np.minimum(self._sizes + self._block.count, self.buffer.geometry.length)
        return sizes

    def _donate(self, method: Any, *args: Any, **options: Any) -> Any:
        """Write in place, without an interrupt between the donation and the assignment. Return what was counted."""
        self._keep_written()
        with DeferInterrupts():
            self._sizes = None
            self._state, counts = method(self.buffer, self._state, *args, **options)
        self._raise_failed()
        return counts

    def _keep_written(self) -> None:
        """Compute the index of the last write before the state changes, if the caller holds it; release views of its arrays."""
        self._arrays.release()
        index = None if self._written is None else self._written()
        if index is not None:
            index.read()
        self._written = None

    def _row(self, call: str, row: PyTree) -> PyTree:
        """Return one row with Python numbers as arrays."""
        spec, structure = checks.given_spec(self.buffer, self._state)
        lead, axes = ((), "") if self.buffer.lanes is None else ((self.buffer.lanes,), "E")
        return structure.unflatten(arguments.check_rows(call, row, spec, structure, lead, axes).values())

    def _narrowed(self, call: str, rows: PyTree) -> PyTree:
        """Return rows without NumPy leaves of 64 bits, which jit would narrow unchecked."""
        if not self._has_pairs and not has_64_bits(rows):
            return rows
        return arguments.narrowed(call, rows, checks.given_spec(self.buffer, self._state)[0])

    def _stored(self, call: str, rows: PyTree, priority: Any, mask: Any) -> PyTree:
        """Store ragged leaves first, so that the rest can be written in place."""
        leaves, values, shape, *_ = checks.check_rows(call, self.buffer, self._state, rows, priority, mask)
        if self.unlimited:
            self._make_room(shape, mask)
        if values is not None and shape[0]:
            leaves = write.store_values(self.buffer, self._state, leaves, values, shape, mask)
        return nested(leaves)

    def _make_room(self, shape: tuple[int, int], mask: Any) -> None:
        more = shape[0] if mask is None else np.asarray(mask).reshape(shape).sum(axis=0)
        needed = int((host_ring(self._state.header)[1] + more).max())
        capacity, length = self.buffer.capacity, self.buffer.geometry.length
        while length < needed:
            capacity, length = 2 * capacity, 2 * length
        if capacity != self.buffer.capacity:
            self._grow(None, capacity)

    def _grow(self, blocks: Any, capacity: int | None) -> None:
        self._keep_written()
        self.buffer, self._state = self.buffer.grow(self._state, blocks, capacity=capacity)
        self._sizes, self._draws, self._programs = None, {}, {}
        self._choose_paths()

    def _draw(self, call: str, size: int, numbers: dict[str, jax.Array], packed: bool) -> tuple[Any, jax.Array | None]:
        """Draw a batch: in NumPy, or with the write of the collected rows in one program where no callback is involved."""
        if packed and self._host_draws is not None:
            block = self._block if self.buffer.on_write is None else None  # else its rows are not those of the state
            if block is None or block.masked:
                self._flush()
            drawn = self._host_draws.draw(self, block, self._key, size, numbers)
            if drawn is not None:
                self._key = drawn[0]
                return drawn[1], None
        if isinstance(self._key, np.ndarray):  # from `HostDraws`
            self._key = jax.device_put(self._key)
        form: programs.Form = "packed" if packed else "whole"
        block, sizes = self._block, None
        rows: tuple[Any, ...] = ()
        if self._on_device and self._updates is None and block is not None and block.count:
            rows, sizes = (block.packed(),), self._sizes_after()
            self._keep_written()
        else:
            self._flush()
        kind = size, form, bool(rows)
        draw = self._programs.get(kind)
        first = draw is None
        if draw is None:
            draw = programs.sampler(self.buffer, size, self._impl, form, bool(rows))
        # An interrupt inside a callback would become another error; one after a donation would lose the state.
        guard = contextlib.nullcontext() if self._on_device and not rows else DeferInterrupts()
        with guard, programs.announce(call) if first else contextlib.nullcontext():
            state, key, batch, counts = draw(self._state, self._key, numbers, *rows)
            self._state, self._key = state if rows else with_changes(self._state, state), key
            if rows and block is not None:
                block.clear()
                self._sizes = sizes
        self._programs[kind] = draw
        return batch, counts

    def _check_draw(
        self, call: str, batch_size: int | None, options: Mapping[str, Any]
    ) -> tuple[int, dict[str, jax.Array]]:
        plain = not options and (batch_size is None or type(batch_size) is int)  # True and 4.0 equal ints
        known = self._draws.get(batch_size) if plain else None
        if known is None:
            key = jax.random.wrap_key_data(self._key, impl=self._impl)
            known = checks.check_draw(
                call, f"{call.rpartition('.')[2]}(batch_size)", self.buffer, key, batch_size, options
            )
            if plain:
                self._draws[batch_size] = known
        return known

    def _warn_short(self, call: str, size: int) -> None:
        """Warn, once for a replay, of a batch larger than the number of rows, each of which is drawn at most once."""
        self._flush()
        count = int(np.asarray(anchor_count(self._state)).sum())
        if count >= size:
            self._most_drawn = size
        elif count:
            self._warns_short = False
            warnings.warn(
                f"{call}: batch_size is {size}, but only {counted(count, 'row')} can be sampled, and a batch of "
                f"{self.buffer.sampler!r} has each at most once; `mask` is False in the rest. Draw fewer, or add rows first.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _check_rows(self, state: BufferState) -> None:
        """Raise unless a state of this buffer holds rows like the present one."""
        (spec, structure), known = checks.given_spec(self.buffer, state), checks.given_spec(self.buffer, self._state)
        if (spec, structure) != known:
            got, expected = (
                ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in of.items())
                for of in (spec, known[0])
            )
            raise ValueError(
                f"Replay.state: its rows are {structure} of {got}; expected {known[1]} of {expected}. For other rows make "
                f"another Replay(buffer, example)."
            )

    def _exact(self, call: str, batch: Sample) -> Sample:
        """Return a batch with 64-bit leaves as NumPy arrays."""
        return dataclasses.replace(batch, data=exact(call, self._spec, batch.data)) if self._has_pairs else batch

    def _compilations(self, batch_size: int | None, packed: bool, collects: bool) -> list[Any]:
        """Return functions that lower the programs of `add`, of such draws, and of their `update_priority`."""
        size, numbers = self._check_draw("Replay.compile", batch_size, {})

        form: programs.Form = "packed" if packed else "whole"
        host = self._host_draws if packed else None

        def draw(*rows: Any) -> Any:
            program = programs.sampler(self.buffer, size, self._impl, form, bool(rows))
            return program.lower(self._state, self._key, numbers, *rows)

        jobs: list[Any] = [draw]
        if host is not None:
            jobs = [partial(random_draws(size, self._impl, host.bits).lower, self._key)]
            jobs += host.compilations(self._state, size, numbers, collects)
        block = self._block
        if block is not None:
            for length in block.lengths:
                rows = block.packed(length)
                if collects:
                    jobs.append(partial(programs.extend_packed.lower, self.buffer, self._state, rows))
                    if self._on_device and host is None:
                        jobs.append(partial(draw, rows))
        writable = not self.buffer.writer.read_only
        if writable and not (collects and block is not None) and not isinstance(self.buffer.storage, Ragged):
            spec, structure = checks.given_spec(self.buffer, self._state)
            lanes = () if self.buffer.lanes is None else (self.buffer.lanes,)
            zeros = [np.zeros((*lanes, *leaf.shape), leaf.dtype) for leaf in spec.values()]
            row = self._row("Replay.compile", structure.unflatten(zeros))
            jobs.append(partial(programs.add.lower, self.buffer, self._state, row, priority=None, mask=None))
        if self.buffer.sampler.prioritized:
            words: list[Any] = [jax.ShapeDtypeStruct((size,), dtype) for dtype in (np.int32, np.uint32, np.float32)]
            update: Any = partial(programs.update_priority.lower, self.buffer, self._state, Index(*words[:2]), words[2])
            jobs.append(partial(update, mask=None, eta=0.9))
        return jobs

    def _held(self) -> int:
        """Return the number of rows held, collected rows included."""
        if self._block is not None and self._block.masked:
            self._flush()
        if self._sizes is None:
            self._sizes = host_ring(self._state.header)[1]
        sizes = self._sizes_after()
        return int((self._sizes if sizes is None else sizes).sum())

    def _slots(self, position: Any) -> Any:
        """Return the slots of rows by position, integers of any shape, 0 the oldest; of several lanes step by step."""
        geometry, state = self.buffer.geometry, self._state
        if state.scatter is not None:
            return np.asarray(scatter.by_age(state.scatter))[position]
        cursor, size, _ = host_ring(state.header)
        age, lane = position // geometry.lanes, position % geometry.lanes
        if (size != size[0]).any():
            age, lane = np.argwhere(np.arange(size.max())[:, None] < size)[position].T
        slots = (cursor - size)[lane] + age
        return (slots % geometry.length * geometry.lanes + lane).astype(np.int32)

    def _has_room(self, rows: int) -> bool:
        """Return whether `rows` rows a lane can be added without refusing any. Only a queue waits for writes to know."""
        return not self._queue or bool(self.buffer.can_add(self._state, rows))

    def _ready(self, size: int) -> bool:
        """Return whether a row, from a queue a whole batch, can be sampled.

        Asking waits for writes, so avoid it where every row can be.
        """
        if self._queue:
            count = anchor_count(self._state)
            return int(self.buffer.sampler.available(self._state.sampler, count)) >= size
        always = self.buffer.dense and isinstance(self.buffer.sampler, (Uniform, Prioritized, Ranked))
        return always or bool(self.buffer.can_sample(self._state))

"""`PriorityDraws`: prioritized draws of a `Replay` by one program of the sampler's state alone; the rest is NumPy's.

The program sets the priorities of the last batch, opens and closes the anchors of the collected rows, and draws. It takes the
sum tree and one array of words. Its random bits, counts, indices and rows are those of `HostDraws`. The leaves of rows that
are collected are then in the tree before the rows are in the state: `extend_keeping` keeps them, unless a store cannot take the
rows.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import COUNTERS, BufferState
from fbuf._core.control_flow import order_after_reads
from fbuf._core.dispatch import with_fields
from fbuf._core.sample import Index
from fbuf._host_draws.deferred import ReplayEngine, Update
from fbuf._host_draws.draws import Drawn, HostDraws
from fbuf._host_draws.priority_update import PriorityUpdate, copied_update
from fbuf._host_draws.row_block import RowBlock, unpack
from fbuf._indexing.anchors import ANCHOR
from fbuf.samplers import Prioritized
from fbuf.samplers import _chunked_priorities as chunked_priorities
from fbuf.samplers._chunked_priorities import EARLIER, chunked
from fbuf.samplers._prioritized import PrioritizedState

_FIRST = 2  # words before the slots
_FLOAT = np.dtype(np.float32)
_REFUSED = COUNTERS.index("refused_rows")


def _length(size: int, changed: int, updated: int) -> int:
    """Return the number of words of a `program`."""
    return _FIRST + 2 * (updated + changed + chunked(size))


@functools.cache
def sequential_options() -> dict[str, str] | None:
    """Return compiler options for programs of short kernels on CPUs; None where jaxlib does not know them.

    In XLA's default order many kernels are ready at once. XLA hands some of them to other threads, which costs more than the
    kernels.
    """
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            jax.jit(lambda: jnp.int32(0), compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:  # jaxlib 0.7.0 and 0.9.0, for instance
        return None
    return options


def arrays_of(sampler: PrioritizedState) -> dict[str, Any]:
    """Return the arrays that a draw reads, and may change, by the names of their fields."""
    return {"tree": sampler.tree, "low": sampler.low, "top": sampler.top, "numbers": sampler.numbers}


@functools.lru_cache(maxsize=256)
def program(buffer: Buffer, size: int, changed: int, updated: int) -> Any:
    """Return the jitted draw of `size` rows, or of none, from `arrays_of` a sampler's state, words and options.

    Words int32[...] are the bits of the number of anchors, then as for `chunked_priorities.write` and `draw`. It returns the
    arrays, donated if something is `changed` or `updated`, and what `draw` returns. JAX takes a dict apart faster than a state.
    """
    config: Any = buffer.sampler
    numbers = _FIRST + 2 * (updated + changed)

    def draw(arrays: dict[str, Any], words: jax.Array, options: dict[str, jax.Array]) -> tuple[Any, Any]:
        sampler = PrioritizedState(log=None, **arrays)
        if changed or updated:
            sampler = chunked_priorities.write(config, sampler, words, _FIRST, updated, changed, buffer.geometry)
        if not size:
            return arrays_of(sampler), None
        number, beta = lax.bitcast_convert_type(words[0], jnp.float32), options.get("beta", sampler.beta)
        drawn = chunked_priorities.draw(sampler, words, numbers, size, buffer.capacity, number, beta, config.normalize)
        return (arrays_of(sampler) if changed or updated else None), drawn

    return jax.jit(draw, donate_argnums=0 if changed or updated else (), compiler_options=sequential_options())


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def extend_keeping(
    buffer: Buffer, state: BufferState, packed: jax.Array, slot: jax.Array, before: Any = None
) -> BufferState:
    """Write the rows of a `RowBlock`, and keep the priorities in slots int32[K], C for none.

    `before`: slots int32[M], and what `leaves_in` returned of them before the rows were collected. If they cannot be stored,
    the priorities are these.
    """
    rows, mask = unpack(buffer, state, packed)
    sampler: Any = buffer.sampler
    token, kept = order_after_reads(state.token, sampler.leaves_in(state.sampler, slot))
    refused, nowhere = state.counters[_REFUSED], jnp.int32(buffer.capacity)

    def restored(state: BufferState, slot: jax.Array) -> BufferState:
        return state.replace(sampler=sampler.with_leaves(state.sampler, slot, before[1], buffer.geometry, token))

    # New rows get the largest priority held, of which these may be one. Otherwise a cut may open anchors in these slots.
    after_write = sampler.largest == "held"
    if before is not None and not after_write:
        state = restored(state, before[0])
    after = buffer.extend(state, rows, mask=mask & (token == jnp.int32(0)))
    if before is not None:
        is_stored = after.counters[_REFUSED] == refused
        slot = jnp.where(is_stored, slot, nowhere)
        after = restored(after, jnp.where(is_stored, nowhere, before[0])) if after_write else after
    return after.replace(sampler=sampler.with_leaves(after.sampler, slot, kept, buffer.geometry, token))


class PriorityDraws(HostDraws, PriorityUpdate):
    """Prioritized draws, and at most one update of priorities that waits for the next: of rows held, that refuses nothing."""

    word: Any = np.int32
    fuses = False  # collected rows are in the tree before they are written

    def __init__(self, buffer: Buffer, impl: str, view: Any, names: list[str]):
        HostDraws.__init__(self, buffer, impl, view, names)
        assert isinstance(buffer.sampler, Prioritized)
        self.bits = functools.partial(chunked_priorities.random_numbers, stratified=buffer.sampler.stratified)
        self._most = chunked(8 + 4 * buffer.geometry.lanes)  # anchors that one draw opens and closes
        self._programs: dict[tuple[int, int, int], Any] = {}
        self.drop()

    def drop(self) -> None:
        """Forget the update, and what the tree has of collected rows."""
        super().drop()
        self._noted: tuple[Any, Any, Any] = None, None, None  # of the last batch what `_version` returned, and its rows
        # Slots that collected rows opened in the tree, and how many they closed.
        self._opened, self._closed = list[int](), 0
        # What slots had before these changes, where a store may not take the rows.
        self._before = dict[int, tuple[float, float]]()
        self._new: tuple[Any, Any] = (), ()  # slots that the next draw closes, and opens
        self._early: tuple[Any, Any] = (), ()  # those of rows that were collected before the update

    def draw(self, engine: ReplayEngine, block: RowBlock | None, key: Any, size: int, numbers: Any) -> Any:
        """Draw as `HostDraws`, and note the rows."""
        drawn = super().draw(engine, block, key, size, numbers)
        if drawn is not None:
            self._noted = *self._version(engine, block), drawn[1].rows
        return drawn

    @property
    def _tree_leads(self) -> bool:
        """Whether the tree has what collected rows open and close."""
        return bool(self._opened or self._closed)

    def _count(self, engine: ReplayEngine, block: RowBlock | None, size: int) -> int:
        """Return the number of anchors; 0 also while a row waits for later ones whose priority was given."""
        if engine.waits():
            return 0
        self._new = ((), ()) if block is None else self._changes(engine, block)
        number = sum(map(len, self._new))
        if self._buffer.storage.sends and 0 < number <= self._most:
            if self.update is not None and not self._apart(self.update, self._new):
                self.settle(engine)
                assert block is not None
                self._new = self._changes(engine, block)
            self._note_leaves(engine, self._new)
        if number <= self._most and block is not None and self._anchors is not None:
            return self._anchors.total
        if number > self._most:
            engine.flush()
            self._new = (), ()
        return super()._count(engine, block, size)

    def _note_leaves(self, engine: ReplayEngine, changes: tuple[Any, Any]) -> None:
        """Note what slots have, before a program closes and opens them."""
        slots = [*itertools.chain(*changes)]
        trees = engine.state.sampler.tree, engine.state.sampler.top
        leaves, tops = (len(slots) * [0.0] if x is None else np.asarray(memoryview(x))[slots].tolist() for x in trees)
        for slot, *found in zip(slots, leaves, tops, strict=True):
            self._before.setdefault(slot, tuple(found))

    def _drawn(self, engine: ReplayEngine, more: int, total: int, bits: Any, size: int, numbers: Any) -> Drawn | None:
        draw, words, floats = self._words(size, self._new)
        floats[0] = total
        words[words.size - bits.size :] = bits.reshape(-1)
        # The program may read `words` itself, until its result is read.
        drawn = np.asarray(memoryview(self._call(engine, draw, words, self._new, numbers)))
        if math.isnan(drawn.item(0)):  # every leaf is 0
            return None

        def each(which: int) -> np.ndarray[Any, Any]:
            return drawn[:, which].flatten()[:size]

        return Drawn(each(1).view(np.int32).astype(np.int64), lambda name: each(0 if name == "probability" else 2))

    def _words(self, size: int, changes: tuple[Any, Any]) -> tuple[Any, Any, Any]:
        """Return a program and its words, as integers and floats, with the update and slots to close and to open."""
        (closed, opened), update = changes, self.update
        slots = [*closed, *opened]  # a row may open the slot of one that it closes
        changed = self._most if slots or update is not None else 0
        count = 0 if update is None else update.slot.size
        updated = chunked(count)
        kind = size, changed, updated
        known = self._programs.get(kind)
        if known is None:
            words = np.zeros(_length(*kind), np.int32)
            known = self._programs[kind] = program(self._buffer, *kind), words, words.view(_FLOAT)
        _, words, floats = known
        if update is not None:
            words[_FIRST : _FIRST + count] = update.slot
            words[_FIRST + count : _FIRST + updated] = self._geometry.capacity
            first = _FIRST + updated + changed
            words[first : first + count] = update.error
            words[1] = update.largest
        if changed:
            end, early = _FIRST + updated + changed, len(self._early[1])
            words[end - changed : end] = slots + [self._geometry.capacity] * (changed - len(slots))
            added = len(closed) * [-np.inf] + early * [EARLIER] + (len(opened) - early) * [0.0]
            floats[end + updated : end + updated + len(slots)] = added
        return known

    def _call(
        self, engine: ReplayEngine, draw: Any, words: np.ndarray[Any, Any], changes: tuple[Any, Any], numbers: Any
    ) -> Any:
        """Call a program on the sampler's state, which it may donate; return what it drew."""
        state = engine.state
        arrays, drawn = draw(arrays_of(state.sampler), words, numbers)
        if arrays is not None:
            engine.state = with_fields(state, {"sampler": with_fields(state.sampler, arrays)})
            self.update, self._early = None, ((), ())
            self._noted = None, None, None  # whose rows these changes may have closed
        self._closed += len(changes[0])  # before the others: to open again does no harm
        self._opened.extend(changes[1])
        return drawn

    def _changes(self, engine: ReplayEngine, block: RowBlock) -> tuple[Any, Any]:
        """Return the slots that the collected rows close, and those that they open, without those in the tree."""
        header, known = engine.state.header, len(self._opened)
        if self._anchors is not None:
            self._anchors.follow(engine.state, engine.arrays, self._rings.read(header), block)
            return self._anchors.closed[self._closed :], self._anchors.opened[known:]
        (lanes, length, _), rings = self._geometry, self._rings.read(header)
        if known == block.count * lanes:
            return (), ()
        if rings.next_slot is not None:
            slots = range(rings.next_slot + known, rings.next_slot + block.count * lanes)
            return (), [slot % (lanes * length) for slot in slots]
        steps = np.arange(known // lanes, block.count)[:, None]
        return (), ((rings.cursor + steps) % length * lanes + np.arange(lanes)).reshape(-1).tolist()

    def _version(self, engine: ReplayEngine, block: RowBlock | None) -> tuple[Any, int]:
        return engine.state.header, 0 if block is None else block.cleared

    def keep(self, engine: ReplayEngine, block: RowBlock | None, index: Index, error: Any, mask: Any) -> bool:
        """Copy the arguments. Return False, and keep nothing, unless they are NumPy arrays [B] and every row can be set."""
        update = copied_update(index, error, mask)
        if update is None:
            return False
        if self.update is not None:
            self.settle(engine)
        changes: tuple[Any, Any] = ((), ()) if block is None else self._changes(engine, block)
        apart = True
        if any(changes):
            apart = self._apart(update, changes)
            if not (apart and self._can_be_early(engine, changes)):
                engine.flush()
                changes = (), ()
        noted, before, rows = self._noted
        header, cleared = self._version(engine, block)
        # Of rows collected since that batch `changes` says what they close.
        current = header is noted and cleared == before and apart and update.is_of(rows)
        if not current and not self._can_be_set(engine, block, update):
            return False
        self.update, self._early = update, changes
        return True

    def _apart(self, update: Update, changes: tuple[Any, Any]) -> bool:
        """Return whether no row of an update is in a slot that closes or opens."""
        return {*itertools.chain(*changes)}.isdisjoint(update.slot.tolist())

    def _can_be_early(self, engine: ReplayEngine, changes: tuple[Any, Any]) -> bool:
        """Return whether a program may make these changes as those of rows that came before the update."""
        return sum(map(len, changes)) <= self._most and engine.state.sampler.top is None and not engine.waits()

    def _can_be_set(self, engine: ReplayEngine, block: RowBlock | None, update: Update) -> bool:
        """Return whether every row is an anchor."""
        if not self._rings.holds(engine.state.header, update.index, 0 if block is None else block.count):
            return False
        if self._anchors is None:
            return True
        slot, flags = update.index.slot, engine.arrays.read(engine.state)[1]
        anchors = flags.take(slot) & ANCHOR != 0
        if block is not None and block.count:  # none of these rows opens and closes an anchor
            anchors &= ~np.isin(slot, self._anchors.closed)
            anchors |= np.isin(slot, self._opened)
        return bool(anchors.all())

    def settle(self, engine: ReplayEngine) -> None:
        """Set the priorities that wait: with collected rows in the tree, which the state lacks, in the tree alone."""
        if self.update is not None and (self._tree_leads or any(self._early)):
            if self._buffer.storage.sends:
                self._note_leaves(engine, self._early)
            draw, words, _ = self._words(0, self._early)
            self._call(engine, draw, words.copy(), self._early, {})
        else:
            super().settle(engine)

    def compilations(self, state: BufferState, size: int, numbers: Any, block: RowBlock | None) -> list[Any]:
        """Return those of a draw alone, after an update, and after collected rows."""
        updated, kinds = chunked(size), [(size, 0, 0), (size, self._most, chunked(size))]
        if block is not None:
            kinds += [(size, self._most, 0), (0, self._most, updated)]
        return [
            functools.partial(
                program(self._buffer, *kind).lower,
                arrays_of(state.sampler),
                jax.ShapeDtypeStruct((_length(*kind),), np.int32),
                numbers if kind[0] else {},
            )
            for kind in kinds
        ]

    def write(self, buffer: Buffer, state: BufferState, block: RowBlock, packed: Any) -> BufferState:
        """Write the collected rows. Priorities of those that are in the tree stay."""
        if not self._tree_leads:  # 5 to 30 % faster
            self._before.clear()
            return super().write(buffer, state, block, packed)
        slots = self._nowhere(state, block)
        slots[: len(self._opened)] = self._opened
        before = self._former(block, slots.size)
        after, self._opened, self._closed = extend_keeping(buffer, state, packed, slots, before), [], 0
        self._before.clear()
        return after

    def lower_writes(self, buffer: Buffer, state: BufferState, block: RowBlock, packed: Any) -> list[Any]:
        """Return functions that lower the programs of `write`, before and after a draw."""
        slots = self._nowhere(state, block)
        keeping = functools.partial(extend_keeping.lower, buffer, state, packed, slots, self._former(block, slots.size))
        return [*super().lower_writes(buffer, state, block, packed), keeping]

    def _former(self, block: RowBlock, opened: int) -> Any:
        """Return `before` of `extend_keeping`, of up to so many slots that opened; None where storing rows cannot fail."""
        if not self._buffer.storage.sends:
            return None
        size = opened + (block.length + self._buffer.rule.back) * self._geometry.lanes
        slots, leaves = np.full(size, self._geometry.capacity, np.int32), np.zeros((2, size), _FLOAT)
        count = len(self._before)
        slots[:count] = list(self._before)
        leaves[:, :count] = np.array(list(self._before.values())).reshape(count, 2).T
        return slots, tuple(leaves)

    def _nowhere(self, state: BufferState, block: RowBlock) -> np.ndarray[Any, Any]:
        """Return C for each row that a block opens at most: its own, and those before it that waited for later ones."""
        waiting = 0 if state.anchors is None else len(state.anchors.tail_flags)
        return np.full((block.length + waiting) * self._geometry.lanes, self._geometry.capacity, np.int32)

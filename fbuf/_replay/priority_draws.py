"""`PriorityDraws`: prioritized draws of a `Replay` by one program of the sampler's state alone; the rest is NumPy's.

The program sets the priorities of the last batch, opens and closes the anchors of the collected rows, and draws. It takes the
sum tree and one array of words. Its random bits, counts, indices and rows are those of `HostDraws`. The leaves of rows that
are collected are then in the tree before the rows are in the state: `extend_keeping` keeps them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.component import with_fields
from fbuf._core.control_flow import order_after_reads
from fbuf._core.sample import Index
from fbuf._interfaces.sampler import AnchorChange
from fbuf._replay.host_draws import Drawn, HostDraws
from fbuf._replay.host_rings import Rings
from fbuf._replay.priority_update import PriorityUpdate, packed_update
from fbuf._replay.programs import sequential_options
from fbuf._replay.row_block import RowBlock, unpack
from fbuf.samplers import Prioritized, Uniform
from fbuf.samplers._prioritized import Queries, queries

_ZERO = np.zeros(1, np.int32)
_UINT, _FLOAT = map(np.dtype, (np.uint32, np.float32))
_LANES = 64  # beyond, a program is faster than a loop over the lanes of each row


def _words(key: jax.Array, size: int, stratified: bool) -> jax.Array:
    """Return the random numbers of a draw as uint32[...]; `program` takes them apart."""
    top, bottom, order = queries(key, size, stratified)
    parts = [lax.bitcast_convert_type(x, jnp.uint32) for x in (top, bottom)]
    return jnp.concatenate([*parts, *([] if order is None else [order.astype(jnp.uint32)])])


def _float(words: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(words, jnp.float32)


def _settled(buffer: Buffer, sampler: Any, words: jax.Array, changed: int, updated: int) -> tuple[Any, jax.Array]:
    """Return the sampler's state after an update and then a change, and the other words. Traced.

    `words` int32[...] begins with 0, the slots and the errors of the update, and the slots of the change; -1 - slot closes.
    """
    token, words = words[0], words[1:]
    if updated:
        slot, error, words = words[:updated], _float(words[updated : 2 * updated]), words[2 * updated :]
        sampler = buffer.sampler.update(sampler, slot, error, buffer.geometry, token)
    if changed:
        word, words = words[:changed, None], words[changed:]
        closes, nowhere = word < 0, jnp.int32(buffer.capacity)
        none = np.full((changed, 1), -1, np.float32)
        slot, closed = jnp.where(closes, nowhere, word), jnp.where(closes, jnp.int32(-1) - word, nowhere)
        change = AnchorChange(slot, slot < nowhere, None, None, None, none, closed, closes)  # type: ignore[arg-type]
        sampler = buffer.sampler.change(sampler, change, buffer.geometry, token)
    return sampler, words


@functools.lru_cache(maxsize=256)
def program(buffer: Buffer, size: int, changed: int, updated: int) -> Any:
    """Return the jitted draw of `size` rows, or of none, from a sampler's state, words and options.

    It returns the state, donated if something is `changed` or `updated`, and slots, probabilities and weights int32[3, B].
    """

    own: Any = buffer.sampler
    stratified = own.stratified

    def draw(sampler: Any, words: jax.Array, options: dict[str, jax.Array]) -> tuple[Any, Any]:
        sampler, words = _settled(buffer, sampler, words, changed, updated)
        if not size:
            return sampler, None
        number, words = _float(words[0]), words[1:]
        most = (words.size - size * stratified) // 2
        top, bottom, order = jnp.split(words, (most, 2 * most))
        numbers = Queries(_float(top), _float(bottom), order if stratified else None)
        drawn = own.draw_queries(sampler, numbers, size, buffer.capacity, number, options.get("beta"))
        packed = jnp.stack([lax.bitcast_convert_type(x, jnp.int32) for x in drawn])
        return (sampler if changed or updated else None), packed

    return jax.jit(draw, donate_argnums=0 if changed or updated else (), compiler_options=sequential_options())


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def extend_keeping(buffer: Buffer, state: BufferState, packed: jax.Array, slot: jax.Array) -> BufferState:
    """Write the rows of a `RowBlock`, and keep the priorities in slots int32[K], C for none."""
    rows, mask = unpack(buffer, state, packed)
    sampler: Any = buffer.sampler
    token, kept = order_after_reads(state.token, sampler.leaves_in(state.sampler, slot))
    after = buffer.extend(state, rows, mask=mask & (token == jnp.int32(0)))
    return after.replace(sampler=sampler.with_leaves(after.sampler, slot, kept, buffer.geometry, token))


class PriorityDraws(HostDraws, PriorityUpdate):
    """Prioritized draws, and at most one update of priorities that waits for the next: of rows held, that refuses nothing."""

    word: Any = np.int32

    def __init__(self, buffer: Buffer, impl: str, view: Any, names: list[str]):
        HostDraws.__init__(self, buffer, impl, view, names)
        assert isinstance(buffer.sampler, Prioritized)
        self.bits = functools.partial(_words, stratified=buffer.sampler.stratified)
        self._most = 8 + 4 * buffer.geometry.lanes  # anchors that one draw opens and closes
        self._programs: dict[tuple[int, int, int], tuple[Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
        self._waits: tuple[Any, bool] = None, False  # priorities of undecided rows, and whether one was given
        self.drop()

    def drop(self) -> None:
        """Forget the update, and what the tree has of collected rows."""
        super().drop()
        # Of the last batch: what was held, and the bytes of slots and generations.
        self._noted: tuple[Any, ...] = None, 0, 0, b""
        self._opened = list[int]()  # changes of collected rows that are in the tree
        self._new: Any = ()  # those that the next draw makes

    def draw(self, engine: Any, block: RowBlock | None, key: Any, size: int, numbers: Any) -> Any:
        """Draw as `HostDraws`. None also while a row waits for later ones whose priority was given."""
        anchors = engine.state.anchors
        if anchors is not None:
            if anchors.tail_priority is not self._waits[0]:
                given = bool((np.asarray(memoryview(anchors.tail_priority)) >= 0).any())
                self._waits = anchors.tail_priority, given
            if self._waits[1]:
                return None
        self._new = () if block is None else self._changes(engine, block)
        if len(self._new) > self._most:
            engine.flush()
            self._new = ()
        return super().draw(engine, block, key, size, numbers)

    def _drawn(
        self, engine: Any, block: RowBlock | None, rings: Rings, total: int, bits: Any, size: int, numbers: Any
    ) -> Drawn | None:
        new, update = self._new, self.update
        count = 0 if update is None else update.shape[1]
        changed = self._most if len(new) or count else 0
        kind = size, changed, count
        known = self._programs.get(kind)
        if known is None:
            words = np.zeros(2 + 2 * count + changed + bits.size, np.int32)
            known = self._programs[kind] = program(self._buffer, *kind), words, words.view(_FLOAT)
        draw, words, floats = known
        at = 1 + 2 * count
        if update is not None:
            words[1:at] = update[:2].reshape(-1)
        words[at : at + len(new)] = new
        words[at + len(new) : at + changed] = self._geometry.capacity
        floats[at + changed] = total
        words[at + changed + 1 :] = bits
        # The program may read `words` itself, until its result is read.
        drawn = np.array(memoryview(self._call(engine, draw, words, numbers)))
        self._opened.extend(new)
        slot, (chance, weight) = drawn[0].astype(np.int64), drawn[1:].view(_FLOAT)
        if chance[0] != chance[0]:  # NaN: every leaf is 0
            return None
        return Drawn(slot, slot % self._geometry.lanes if self._geometry.lanes > 1 else 0, chance, weight)

    def _call(self, engine: Any, draw: Any, words: np.ndarray[Any, Any], numbers: Any) -> Any:
        """Call a program on the sampler's state, which it may donate; return what it drew."""
        sampler, packed = draw(engine.state.sampler, words, numbers)
        if sampler is not None:
            engine.state = with_fields(engine.state, {"sampler": sampler})
            self.update = None
        return packed

    def _changes(self, engine: Any, block: RowBlock) -> Any:
        """Return the slots that the collected rows open, and -1 less those that they close, without those in the tree."""
        header, known = engine.state.header, len(self._opened)
        if self._anchors is not None:
            self._anchors.follow(engine.state, engine.arrays, self._rings.read(header), block)
            return self._anchors.changes[known:]
        lanes, length, _ = self._geometry
        steps = np.arange(known // lanes, block.count)
        if not steps.size:
            return ()
        slots = (self._rings.read(header).cursor + steps[:, None]) % length * lanes + np.arange(lanes)
        return slots.reshape(-1).tolist()

    def _note(
        self, engine: Any, block: RowBlock | None, slot: np.ndarray[Any, Any], generation: np.ndarray[Any, Any]
    ) -> None:
        self._noted = *self._held(engine, block), slot.tobytes() + generation.tobytes()

    def _held(self, engine: Any, block: RowBlock | None) -> tuple[Any, int, int]:
        return engine.state.header, *((0, 0) if block is None else (block.cleared, block.count))

    def keep(self, engine: Any, block: RowBlock | None, index: Index, error: Any, mask: Any) -> bool:
        """Copy the arguments. Return False, and keep nothing, unless they are NumPy arrays [B] and every row can be set."""
        packed = packed_update(index, error, mask)
        if packed is None:
            return False
        if block is not None and len(self._changes(engine, block)):
            engine.flush()
        header, *counts, drawn = self._noted
        now, *same = self._held(engine, block)
        slot, _, generation = packed
        held = header is now and counts == same and slot.tobytes() + generation.tobytes() == drawn
        if not held and not (self._buffer.dense and self._rings.holds(now, slot, generation.view(_UINT), same[1])):
            return False
        self.settle(engine)
        self.update = packed
        return True

    def settle(self, engine: Any) -> None:
        """Set the priorities that wait: with collected rows in the tree, which the state lacks, in the tree alone."""
        if self.update is not None and self._opened:
            words = np.concatenate([_ZERO, *self.update[:2]])
            self._call(engine, program(self._buffer, 0, 0, self.update.shape[1]), words, {})
        else:
            super().settle(engine)

    def compilations(self, state: BufferState, size: int, numbers: Any, block: RowBlock | None) -> list[Any]:
        """Return those of a draw alone, after an update, and after collected rows."""
        key = jax.ShapeDtypeStruct((2,), np.uint32)
        bits = 1 + jax.eval_shape(lambda key: self.bits(key, size), key).size
        jobs, kinds = list[Any](), [(0, 0), (self._most, size)]
        for changed, updated in kinds if block is None else [*kinds, (self._most, 0)]:
            words = jax.ShapeDtypeStruct((1 + 2 * updated + changed + bits,), np.int32)
            draw = program(self._buffer, size, changed, updated)
            jobs.append(functools.partial(draw.lower, state.sampler, words, numbers))
        if block is not None:
            words = jax.ShapeDtypeStruct((1 + 2 * size,), np.int32)
            jobs.append(functools.partial(program(self._buffer, 0, 0, size).lower, state.sampler, words, {}))
        return jobs

    def write(self, buffer: Buffer, state: BufferState, block: RowBlock) -> BufferState:
        """Write the collected rows. Priorities of those that are in the tree stay."""
        if not self._opened:  # 5 to 30 % faster
            return super().write(buffer, state, block)
        slots, opened = self._nowhere(state, block), [slot for slot in self._opened if slot >= 0]
        slots[: len(opened)] = opened
        after, self._opened = extend_keeping(buffer, state, block.packed(), slots), []
        return after

    def lower_write(self, state: BufferState, block: Any, rows: Any) -> Any:
        """Return a function that lowers the program of `write`."""
        return functools.partial(extend_keeping.lower, self._buffer, state, rows, self._nowhere(state, block))

    def _nowhere(self, state: BufferState, block: RowBlock) -> np.ndarray[Any, Any]:
        """Return C for each row that a block opens at most: its own, and those before it that waited for later ones."""
        waiting = 0 if state.anchors is None else len(state.anchors.tail_flags)
        return np.full((block.length + waiting) * self._geometry.lanes, self._geometry.capacity, np.int32)


def host_draws(buffer: Buffer, impl: str, view: Any, names: list[str]) -> HostDraws | None:
    """Return the draws of a buffer whose rows, of leaves `names`, a view reads in NumPy; None for other samplers."""
    if view is None or (not buffer.dense and buffer.geometry.lanes > _LANES):
        return None
    sampler = buffer.sampler
    if type(sampler) is Prioritized and sampler.replace and sampler.uniform is None and not sampler.on_host:
        return PriorityDraws(buffer, impl, view, names)
    if type(sampler) is Uniform and not sampler.by_episode:
        return HostDraws(buffer, impl, view, names)
    return None

"""Jitted programs of `Replay`: one dispatch per call, shared by replays of equal buffers.

Writes donate the state. A draw alone does not: it returns the leaves that changed, and the caller keeps the others. Each
program also returns how much it added to the counters.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, index_of
from fbuf._core.dispatch import changes_of
from fbuf._core.sample import Index, Sample
from fbuf._host_draws import row_block
from fbuf._replay.packed import pack


def _update_packed(buffer: Buffer, state: BufferState, packed: jax.Array) -> BufferState:
    """Set the priorities of a `PriorityUpdate`."""
    error, generation = (jax.lax.bitcast_convert_type(packed[i], of) for i, of in ((1, jnp.float32), (2, jnp.uint32)))
    return buffer.update_priority(state, Index(packed[0], generation), error)


def _extend_placed(
    buffer: Buffer, state: BufferState, rows: Any, priority: Any, mask: Any
) -> tuple[BufferState, tuple[jax.Array, Index]]:
    after, slot = buffer._extend_checked(state, rows, priority, mask, "Buffer.extend", slots=True)
    slot = jnp.minimum(slot if buffer.lanes else slot[:, 0], jnp.int32(buffer.capacity))
    return after, (after.counters - state.counters, index_of(buffer, after, slot))


def _in_place(method: Callable[..., BufferState]) -> Any:
    def write(buffer: Buffer, state: BufferState, *args: Any, **options: Any) -> tuple[BufferState, jax.Array]:
        after = method(buffer, state, *args, **options)
        return after, after.counters - state.counters

    return jax.jit(write, static_argnums=0, donate_argnums=1)


add = _in_place(Buffer.add)
extend = _in_place(Buffer.extend)
cut = _in_place(Buffer.cut)
extend_placed = jax.jit(_extend_placed, static_argnums=0, donate_argnums=1)
update_priority = _in_place(Buffer.update_priority)
update_rows = _in_place(Buffer.update_rows)


Form = Literal["whole", "packed"]
FORMS: dict[Form, Callable[[Sample], Any]] = {"whole": lambda batch: batch, "packed": pack}
"""Forms of a drawn batch: a `Sample` or a `PackedBatch`."""


@functools.lru_cache(maxsize=256)
def sampler(buffer: Buffer, size: int, impl: str, form: Form, writes: bool) -> Any:
    """Return the jitted draw of one batch. (As static arguments, these five would cost 15 us a call.)

    It takes the state, the key's data and the sampler's numbers. With `writes` it also takes the rows of a `RowBlock` and
    perhaps the update of a `PriorityUpdate`, which it sets before it writes them, and donates the state. It returns the state
    (else its `changes_of`), the next key, the batch in a form of `FORMS`, and what was counted.
    """

    def draw(
        state: BufferState, key_data: jax.Array, numbers: dict[str, jax.Array], rows: Any = None, update: Any = None
    ) -> tuple[Any, jax.Array, Any, jax.Array]:
        original, before = state, state.counters
        if update is not None:
            state = _update_packed(buffer, state, update)
        if writes:
            state = row_block.extend(buffer, state, rows)
        key, now = jax.random.split(jax.random.wrap_key_data(key_data, impl=impl))
        state, batch = buffer._sample(state, now, size, numbers)
        counts = state.counters - before
        return state if writes else changes_of(original, state), jax.random.key_data(key), FORMS[form](batch), counts

    return jax.jit(draw, donate_argnums=0 if writes else ())


@contextlib.contextmanager
def announce(what: str) -> Iterator[None]:
    """Print what is compiled if the block takes more than two seconds in an interactive session."""
    if not hasattr(sys, "ps1"):
        yield
        return
    text = f"fbuf: compiling {what}, once for these shapes. Replay.compile(batch_size) does this ahead."
    timer = threading.Timer(2.0, print, (text,), {"file": sys.stderr})
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

"""Run the cases of flashbax's vault, which stores the rows of a buffer in files."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.defects import Outcome


@contextlib.contextmanager
def folder() -> Iterator[str]:
    """Work in a temporary folder: a vault is written below the working directory."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as path, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(path)
        try:
            yield path
        finally:
            os.chdir(before)


def trajectories(length: int = 16) -> tuple[Any, Any]:
    import flashbax

    buffer = flashbax.make_trajectory_buffer(
        max_length_time_axis=length,
        min_length_time_axis=1,
        sample_batch_size=1,
        add_batch_size=1,
        sample_sequence_length=1,
        period=1,
    )
    return buffer, buffer.init({"t": jnp.int32(0)})


def vault(state: Any, uid: str) -> Any:
    from flashbax.vault import Vault

    return Vault("defects", state.experience, vault_uid=uid)


def added(buffer: Any, state: Any, first: int, number: int) -> Any:
    """Add rows, at most eight at a time."""
    for start in range(first, first + number, 8):
        rows = np.arange(start, min(start + 8, first + number), dtype=np.int32)
        state = buffer.add(state, {"t": jnp.asarray(rows)[None]})
    return state


def read(one: Any) -> list[int]:
    return np.asarray(one.read().experience["t"]).ravel().tolist()


def a_ring_at_once() -> Outcome:
    with folder():
        buffer, state = trajectories()
        one = vault(state, "full")
        written = one.write(added(buffer, state, 0, 16))
        other = vault(state, "more")
        state = added(buffer, state, 0, 11)
        other.write(state)
        other.write(added(buffer, state, 11, 21))
        rows = read(other)
    gaps = [(a, b) for a, b in zip(rows[:-1], rows[1:], strict=True) if b != a + 1]
    side = f"{gaps[0][1]} follows {gaps[0][0]}" if gaps else "no gap"
    text = f"16 rows at once: {written} written; 11, then 21 more: {len(rows)} rows, {side}"
    return Outcome(text, written == 16 and not gaps)


def reopened() -> Outcome:
    with folder():
        buffer, state = trajectories()
        state = added(buffer, state, 0, 10)
        vault(state, "one").write(state)
        state = added(buffer, state, 10, 10)
        vault(state, "one").write(state)  # opened again, as after a restart
        rows = read(vault(state, "one"))
    return Outcome(f"rows {rows}", rows == list(range(20)))


def in_a_running_loop() -> Outcome:
    import asyncio

    async def notebook() -> int:
        buffer, state = trajectories()
        return vault(state, "one").write(added(buffer, state, 0, 5))

    with folder():
        try:
            return Outcome(f"{asyncio.run(notebook())} rows written", True)
        except RuntimeError as error:
            return Outcome(f"RuntimeError: {error}", False)


def priorities_saved() -> Outcome:
    import flashbax

    with folder():
        buffer = flashbax.make_prioritised_flat_buffer(16, 2, 2, add_sequences=True)
        state = buffer.init({"t": jnp.int32(0)})
        state = buffer.add(state, {"t": jnp.arange(8, dtype=jnp.int32)})
        one = vault(state, "one")
        one.write(state)
        loaded = one.read()
    has = hasattr(loaded, "sum_tree_state")
    return Outcome(f"read returns a {type(loaded).__name__} {'with' if has else 'without'} priorities", has)

"""Count the kernels that an accelerator starts in one call, as JAX's profiler records them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

CALLS = 5


def launches(step: Callable[..., Any], state: Any) -> float | None:
    """Return the kernels and copies a call of `step(state, key) -> (state, ...)`; None where the backend records none."""
    keys = jax.block_until_ready(list(jax.random.split(jax.random.key(0), CALLS + 1)))
    state, *_ = jax.block_until_ready(step(state, keys[-1]))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for key in keys[:CALLS]:
                state, *_ = step(state, key)
            jax.block_until_ready(state)
        planes = [plane for path in Path(folder).rglob("*.xplane.pb") for plane in _planes(path)]
    number = on_streams(planes)
    return number / CALLS if number else None


def _planes(path: Path) -> list[Any]:
    return list(jax.profiler.ProfileData.from_file(str(path)).planes)


def on_streams(planes: Iterable[Any]) -> int:
    """Return the events on the streams of all devices; other lines (steps, modules) group the same events."""
    return sum(
        len(list(line.events))
        for plane in planes
        if plane.name.startswith("/device:")
        for line in plane.lines
        if line.name.startswith("Stream")
    )

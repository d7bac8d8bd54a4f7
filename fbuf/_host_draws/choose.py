"""Whether NumPy can draw from a buffer's states: which view reads their rows, and which class draws."""

from __future__ import annotations

from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._host_draws.draws import HostDraws
from fbuf._host_draws.epoch import EpochDraws
from fbuf._host_draws.prioritized import PriorityDraws
from fbuf.samplers import Epoch, Prioritized, Uniform
from fbuf.writers import Ring

_STORAGE = "read", "prepare_read", "finish_read"
_VIEW = "rule", "opens", "decide", "window", "assemble"
"""Methods of parts for what `on_host` does in NumPy."""
_LANES = 64  # beyond, a program is faster than a loop over the lanes of each row


def host_view(buffer: Buffer, state: BufferState) -> Any:
    """Return the view in NumPy; None if it or the storage cannot read such rows, or something maps them afterwards."""
    if type(buffer.writer) is not Ring or buffer.prefetch or buffer.on_read is not None:
        return None
    if not (_overrides_all(buffer.storage, _STORAGE) and _overrides_all(buffer.view, _VIEW)):
        return None
    spec, structure = buffer.storage.spec(state.rows)
    # Python's buffers have no bfloat16 or float8.
    if any(np.dtype(leaf.dtype).isbuiltin == 2 for leaf in spec.values()) or buffer.storage.on_host(state.rows) is None:
        return None
    return buffer.view.on_host(spec, structure)


def _overrides_all(part: Any, methods: tuple[str, ...]) -> bool:
    """Return whether the class with the part's `on_host` has its other methods too, or inherits them."""
    first = {name: next(cls for cls in type(part).__mro__ if name in vars(cls)) for name in ("on_host", *methods)}
    return all(issubclass(first["on_host"], cls) for cls in first.values())


def host_draws(buffer: Buffer, impl: str, view: Any, names: list[str]) -> HostDraws | None:
    """Return the draws of a buffer whose rows, of leaves `names`, a view reads in NumPy; None for other samplers."""
    if view is None or (not buffer.dense and buffer.geometry.lanes > _LANES):
        return None
    sampler = buffer.sampler
    if type(sampler) is Prioritized and sampler.replace and sampler.uniform is None and not sampler.on_host:
        return PriorityDraws(buffer, impl, view, names)
    if type(sampler) is Uniform and not sampler.by_episode:
        return HostDraws(buffer, impl, view, names)
    if type(sampler) is Epoch:
        return EpochDraws(buffer, impl, view, names)
    return None

"""`refuse_trace`: raise where a method of a `Replay` is traced, before anything changes.

A trace would leave tracers in the replay's state, and every later call would fail.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax

from fbuf._bridge import lifetime

_BUFFER = {
    "__init__": "buffer.init(example)",
    "__getitem__": "buffer.get(state, index)",
    "__iter__": "buffer.rows(state)",
    "__len__": "buffer.size(state)",
    "add": "buffer.add(state, row)",
    "batches": "buffer.sample(state, key, B)",
    "can_add": "buffer.can_add(state, rows)",
    "can_sample": "buffer.can_sample(state)",
    "clear": "buffer.clear(state)",
    "cut": "buffer.cut(state, lanes)",
    "epoch": "buffer.sample(state, key, B)",
    "extend": "buffer.extend(state, rows)",
    "get": "buffer.get(state, index)",
    "priorities": "buffer.priorities(state)",
    "rows": "buffer.rows(state)",
    "sample": "buffer.sample(state, key, B)",
    "set": "buffer.set(state, beta=0.6)",
    "state": "the state that the function takes as an argument",
    "stats": "buffer.stats(state)",
    "update_priority": "buffer.update_priority(state, index, td_error)",
    "update_rows": "buffer.update_rows(state, index, fields)",
    "window_index": "buffer.window_index(state, index)",
}
"""What to use inside jit, by the name of a method."""
_SPECIAL = {"__init__": "Replay", "__getitem__": "replay[...]", "__iter__": "iter(replay)", "__len__": "len(replay)"}


def _never() -> bool:
    return False


# Whether nothing is traced, in 0.1 us. Without it every call asks `lifetime.traced`, which takes a few.
_context: Any = getattr(importlib.import_module("jax._src.core"), "trace_ctx", None)
_nothing_traced = getattr(_context, "is_top_level", _never)


def refuse_trace(name: str, *args: Any, owner: str = "Replay") -> None:
    """Raise if the method `name` of `owner` runs inside jit, scan or vmap, or has tracers among its arguments."""
    if _nothing_traced():
        return
    if lifetime.traced() or any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
        call, use = _SPECIAL.get(name, f"{owner}.{name}"), _BUFFER.get(name)
        instead = "Call it outside." if use is None else f"Use {use} there."
        raise RuntimeError(f"{call}: called inside jit. {instead}")

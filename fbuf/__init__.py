"""Functional experience replay for JAX.

A `Buffer` is a value; its state is a pytree of arrays; `add`, `extend`, `sample` and `update_priority` are pure functions
that run inside a jitted training step. Large leaves may be kept zstd-compressed on the host; samples go to torch without
copying. Start with the README, or with `python -m fbuf demo`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from fbuf import samplers, storages, transforms, views, writers
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.prioritized import prioritized
from fbuf._buffer.state import BufferState
from fbuf._core.lazy_import import later
from fbuf._core.sample import Index, Rows, Sample

if TYPE_CHECKING:
    from fbuf import datasets, interop, limits, parts, plot, sharded, testing
    from fbuf import gymnasium as gymnasium  # not in __all__: a star import must not hide the libraries themselves
    from fbuf import ray as ray
    from fbuf import torch as torch
    from fbuf._bridge.lazy_rows import Lazy
    from fbuf._bridge.lifetime import stores
    from fbuf._buffer.checked import checked
    from fbuf._buffer.plan import Plan
    from fbuf._checkpoint.async_save import Saving
    from fbuf._checkpoint.load import load
    from fbuf._checkpoint.save import save
    from fbuf._formats.checkpoint import CheckpointNotFound, SchemaError, StoreCorrupted, VersionError
    from fbuf._members.mixture import Mixture
    from fbuf._replay import Replay, ReplayClosed

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "BufferState",
    "CheckpointNotFound",
    "Index",
    "Lazy",
    "Mixture",
    "Plan",
    "Replay",
    "ReplayClosed",
    "Rows",
    "Sample",
    "Saving",
    "SchemaError",
    "StoreCorrupted",
    "VersionError",
    "checked",
    "datasets",
    "interop",
    "limits",
    "load",
    "parts",
    "plot",
    "prioritized",
    "samplers",
    "save",
    "sharded",
    "storages",
    "stores",
    "testing",
    "transforms",
    "views",
    "writers",
]

_MODULES = "datasets gymnasium interop limits orbax parts plot ray sharded testing torch".split()
_name, __dir__ = later(
    __name__,
    {
        "fbuf._buffer.checked": ["checked"],
        "fbuf._checkpoint.async_save": ["Saving"],
        "fbuf._checkpoint.load": ["load"],
        "fbuf._checkpoint.save": ["save"],
        "fbuf._formats.checkpoint": ["CheckpointNotFound", "SchemaError", "StoreCorrupted", "VersionError"],
        "fbuf._bridge.lifetime": ["stores"],
        "fbuf._bridge.lazy_rows": ["Lazy"],
        "fbuf._members.mixture": ["Mixture"],
        "fbuf._buffer.plan": ["Plan"],
        "fbuf._replay": ["Replay", "ReplayClosed"],
    },
    [*__all__, "gymnasium", "ray", "torch"],
)


def __getattr__(name: str) -> Any:
    """Import names that a training step does not need when they are first read."""
    if name in _MODULES:
        return importlib.import_module(f"fbuf.{name}")
    try:
        return _name(name)
    except AttributeError as error:
        parts = (samplers, storages, views, writers, transforms)
        home = next((part.__name__ for part in parts if not name.startswith("_") and name in part.__all__), None)
        fix = "" if home is None else f". Write {home}.{name}"
        raise AttributeError(f"{error}{fix}", name=name) from None

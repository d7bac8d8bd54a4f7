"""Functional experience replay for JAX.

A `Buffer` is a value; its state is a pytree of arrays; `add`, `extend`, `sample` and `update_priority` are pure functions
that run inside a jitted training step. Large leaves may live zstd-compressed on the host; samples go to torch without a
copy. Start with the README, or with `python -m fbuf demo`.
"""

from fbuf import datasets, interop, limits, samplers, storages, testing, views, writers
from fbuf import torch as torch  # not in __all__: a star import must not hide torch itself
from fbuf._buffer import Buffer
from fbuf._checkedbuffer import checked
from fbuf._checkpoint import Saving, load, save
from fbuf._files import CheckpointNotFound, SchemaError, StoreCorrupted, VersionError
from fbuf._host.owner import StoreHandle, stores
from fbuf._lazy import Lazy
from fbuf._plan import Plan
from fbuf._presets import prioritized, trajectory, uniform
from fbuf._replay import Replay
from fbuf._sample import Index, Rows, Sample
from fbuf._state import BufferState

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "BufferState",
    "CheckpointNotFound",
    "Index",
    "Lazy",
    "Plan",
    "Replay",
    "Rows",
    "Sample",
    "Saving",
    "SchemaError",
    "StoreCorrupted",
    "StoreHandle",
    "VersionError",
    "checked",
    "datasets",
    "interop",
    "limits",
    "load",
    "prioritized",
    "samplers",
    "save",
    "storages",
    "stores",
    "testing",
    "trajectory",
    "uniform",
    "views",
    "writers",
]

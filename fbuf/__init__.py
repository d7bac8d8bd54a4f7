"""Functional experience replay for JAX.

A `Buffer` is a value; its state is a pytree of arrays; `add`, `extend`, `sample` and `update_priority` are pure functions
that run inside a jitted training step. Large leaves may live zstd-compressed on the host. See the README.
"""

from fbuf import samplers, storages, views, writers
from fbuf._host.owner import StoreHandle, stores
from fbuf._buffer import Buffer
from fbuf._sample import Index, Rows, Sample
from fbuf._state import BufferState

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "BufferState",
    "Index",
    "Rows",
    "Sample",
    "StoreHandle",
    "samplers",
    "storages",
    "stores",
    "views",
    "writers",
]

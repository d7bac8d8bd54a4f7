"""A plugin for pytest, `-p tests.support.torchrl_swapped`: torchrl with compressed storages in place of `LazyTensorStorage`.

Every leaf is compressed, however small. Options that only torchrl's class has (`compilable`, `consolidated`, `shared_init`)
make an ordinary storage.
"""

from typing import Any

import torchrl.data
from torchrl.data import replay_buffers
from torchrl.data.replay_buffers import storages

from fbuf.integrations.torchrl import CompressedStorage

THEIRS = torchrl.data.LazyTensorStorage


class LazyTensorStorage(CompressedStorage):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        only_theirs = any(kwargs.get(name) for name in ("compilable", "consolidated", "shared_init"))
        return THEIRS(*args, **kwargs) if only_theirs else super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ours = {name: value for name, value in kwargs.items() if name in ("max_size", "device", "ndim")}
        super().__init__(*args, min_bytes=1, **ours)


THEIRS.__module__ = "torchrl.data.replay_buffers.storages.tensor"  # where pickle finds it
for module in (torchrl.data, replay_buffers, storages):
    module.LazyTensorStorage = LazyTensorStorage

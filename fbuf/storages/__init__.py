"""Storages: where rows are kept. `Device` (arrays), `Deduplicated` (distinct blocks, on the device), `Compressed` (zstd on the
host, optionally in files), `Host` (numpy on the host), `Memmap` (files), `Ragged` (rows of any shape, text and objects, on
the host), `DataSet` (a data set on the disk, read-only).

For one key every storage returns the same batch, bit for bit; rows that a full `Deduplicated` dropped are masked and counted.
Leaves that a storage does not name are arrays on the device.
"""

from typing import TYPE_CHECKING

from fbuf._core.lazy_import import later
from fbuf.storages._deduplicated import Deduplicated
from fbuf.storages._device import Device

if TYPE_CHECKING:
    from fbuf.storages._compressed import BitPack, Codec, Compressed, Raw, Zstd
    from fbuf.storages._dataset import DataSet
    from fbuf.storages._host_storage import Host, Memmap
    from fbuf.storages._ragged.storage import Ragged

__all__ = [
    "BitPack",
    "Codec",
    "Compressed",
    "DataSet",
    "Deduplicated",
    "Device",
    "Host",
    "Memmap",
    "Ragged",
    "Raw",
    "Zstd",
]

__getattr__, __dir__ = later(
    __name__,
    {
        "fbuf.storages._compressed": ["BitPack", "Codec", "Compressed", "Raw", "Zstd"],
        "fbuf.storages._dataset": ["DataSet"],
        "fbuf.storages._host_storage": ["Host", "Memmap"],
        "fbuf.storages._ragged.storage": ["Ragged"],
    },
    __all__,
)

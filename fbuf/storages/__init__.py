"""Where rows live: `Device` (arrays), `Deduplicated` (distinct blocks, on the device), `Compressed` (zstd on the host),
`Host` (numpy on the host), `Memmap` (files), `Ragged` (rows of any shape, text and objects, on the host), `DataSet` (a
data set on the disk, read-only). `Compressed` takes a path too, and then keeps its chunks in files.

Every storage holds the same rows and, for one key, gives the same batch, bit for bit; what a full table of `Deduplicated` had
no place for is masked and counted. Leaves that a storage does not name are arrays on the device.
"""

from typing import TYPE_CHECKING

from fbuf._core.lazy_import import later
from fbuf.storages._deduplicated import Deduplicated
from fbuf.storages._device import Device

if TYPE_CHECKING:
    from fbuf.storages._compressed import BitPack, Codec, Compressed, Raw, Zstd
    from fbuf.storages._dataset import DataSet
    from fbuf.storages._host_storage import Host
    from fbuf.storages._memmap import Memmap
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
        "fbuf.storages._host_storage": ["Host"],
        "fbuf.storages._memmap": ["Memmap"],
        "fbuf.storages._ragged.storage": ["Ragged"],
    },
    __all__,
)

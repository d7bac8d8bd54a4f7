"""Where rows live: `Device` (arrays), `Compressed` (zstd on the host), `Host` (numpy on the host).

Every storage holds the same rows and, for one key, gives the same batch, bit for bit. Leaves a host storage does not
name stay on the device.
"""

from fbuf._host.codec import Codec, Zstd
from fbuf.storages._compressed import Compressed
from fbuf.storages._device import Device
from fbuf.storages._host import Host

__all__ = ["Codec", "Compressed", "Device", "Host", "Zstd"]

"""Codecs under the names that users write and files hold: `storages.Zstd(3)`."""

from fbuf._core.component import allow
from fbuf._host.codecs.base import BitPack, Codec, Raw, Zstd

__all__ = ["BitPack", "Codec", "Raw", "Zstd"]

for _codec in (BitPack, Raw, Zstd):
    allow(_codec, f"fbuf.storages.{_codec.__name__}")

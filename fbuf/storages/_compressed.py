"""`Compressed`: chosen leaves are stored in host memory, compressed with zstd, and read inside jit.

Chunks of consecutive rows of a lane are compressed together, against a dictionary of past rows. Frames are stored once;
stacks, next observations and n-step windows are views of them. Stacked rows are recognised and stored as single frames. Other
leaves stay on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, cast

import jax

from fbuf._core.arguments import check_int
from fbuf._core.component import allow, component
from fbuf._core.pytree import Spec, item_bytes, name_of
from fbuf._host.codecs import BitPack, Codec, Raw, Zstd
from fbuf._host.columns.spec import Column
from fbuf.storages._host_storage import HostStorage

__all__ = ["BitPack", "Codec", "Raw", "Zstd"]

for _codec in (BitPack, Raw, Zstd):
    allow(_codec, f"fbuf.storages.{_codec.__name__}")


_MIN_BYTES = 1024  # bytes a row


@component
class Compressed(HostStorage):
    """Store large leaves compressed in host memory, or in files.

    Attributes:
      keys: Leaves (or subtrees) on the host, by their paths, `("obs/image",)`; None: every leaf of 1 KiB a row or more. Leaves
        named here may have 64 bits, as in `Host`. With a `path` None stores all leaves in files, those of 1 KiB or more
        compressed, so that `Buffer.resume` finds complete rows.
      codec: `Zstd(level, chunk, dictionary)`; `BitPack()` for zeros and ones; `Raw()` for incompressible leaves; or any value
        with `chunk`, `encode`, `decode` (`Codec`). Or a codec by leaf, `Zstd()` for the others: `{"obs": Zstd(chunk=16),
        "mask": BitPack()}`. With a writer that replaces any row, rows are encoded one by one (about 35 bytes a row more), and
        a custom codec must have `chunk` 1.
      slack: Rows kept beyond the capacity, so that a slightly old state still reads its own rows; None: a sixteenth of the
        capacity, at most 4096 a lane.
      cache: Bytes of decoded chunks kept per leaf, for draws that repeat rows: skewed priorities, overlapping windows. 0:
        none, best for uniform draws over many rows.
      on_expired: A read of a row evicted since raises ("raise"), or returns zeros with `mask` False ("mask").
      stacks: Whether leaves that are stacks of 2 to 16 frames of their lane, on the first or last axis with the newest last,
        are recognised by their first rows and stored as single frames. Reads return what was written. With `Zstd` and without
        a `path` only. Next stacks are recognised too: single frames and `Transition(stack=4)` store each frame once for both.
      path: A folder for the chunks, for buffers larger than memory; see `Memmap`. Memory then holds 18 bytes a chunk, and
        chunks are not recompressed. None: everything is in memory.
      sync: With a path: seconds after which a write waits for the disk; see `Memmap`.
    Raises:
      ValueError: a setting is out of range.

    Cost: a write compresses its rows (about 3 to 8 us a frame of 84x84, about 5 us to compare a stack of four); a read is one
      callback and one decompression per distinct chunk; `Replay.sample` for NumPy or torch needs no callback.

    Example:
      >>> import fbuf
      >>> fbuf.storages.Compressed(keys=("obs",)).keys
      ('obs',)
    """

    keys: tuple[str, ...] | None = None
    codec: Codec | Mapping[str, Codec] = Zstd()
    slack: int | None = None
    on_expired: Literal["raise", "mask"] = "raise"
    cache: int = 0
    stacks: bool = True
    path: str | None = None
    sync: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("Compressed", "cache", self.cache, 0, " of bytes")
        if not isinstance(self.stacks, bool):
            raise TypeError(f"Compressed: stacks is {self.stacks!r}; expected True or False. Write stacks=False.")
        if isinstance(self.codec, (Mapping, tuple)):  # a mapping does not hash; its items do
            items = self.codec.items() if isinstance(self.codec, Mapping) else self.codec
            object.__setattr__(self, "codec", tuple(sorted((name_of(name), codec) for name, codec in items)))
        for codec in self._codecs_by_leaf().values() if isinstance(self.codec, tuple) else (self.codec,):
            if isinstance(codec, type):
                name = codec.__name__
                raise TypeError(f"Compressed: codec is the class {name}; expected a value. Write {name}().")

    def _codecs_by_leaf(self) -> dict[str, Codec]:
        return dict(self.codec) if isinstance(self.codec, tuple) else {}

    def _columns(self, spec: Spec) -> tuple[Column, ...]:
        return tuple(dataclasses.replace(c, stacks=self.stacks) for c in super()._columns(spec))

    @property
    def _least(self) -> int:
        return 0 if self.in_files else _MIN_BYTES

    def _codec(self, name: str, leaf: jax.ShapeDtypeStruct) -> Codec | None:
        if isinstance(self.codec, tuple) and name in self._codecs_by_leaf():
            return self._codecs_by_leaf()[name]
        if self.in_files and self.keys is None and item_bytes(leaf) < _MIN_BYTES:
            return None
        return Zstd() if isinstance(self.codec, tuple) else cast(Codec, self.codec)

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        keys = super().host_keys(spec)
        for name in self._codecs_by_leaf():
            if name not in keys:
                raise ValueError(f"Compressed: codec names '{name}', but the host has {', '.join(keys)}. Extend keys.")
        return keys

"""`Compressed`: chosen leaves are stored in host memory, compressed with zstd, and read inside jit.

Chunks of consecutive rows of a lane are compressed together, against a dictionary of past rows. Frames are stored once;
stacks, next observations and n-step windows are views of them. Stacked rows are recognised and stored as single frames. Other
leaves stay on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import jax

from fbuf._core.component import allow, component
from fbuf._core.pytree import Spec, item_bytes, name_of
from fbuf._host.codecs.base import Codec, Raw, Zstd
from fbuf._host.codecs.bitpack import BitPack
from fbuf._host.columns.spec import Column
from fbuf.storages._host_storage import Hosted

__all__ = ["BitPack", "Codec", "Raw", "Zstd"]

for _codec in (BitPack, Raw, Zstd):
    allow(_codec, f"fbuf.storages.{_codec.__name__}")


_LARGE = 1024  # bytes a row


@component
class Compressed(Hosted):
    """Rows whose large leaves are compressed on the host.

    Attributes:
      keys: Leaves (or subtrees) that go to the host; None: every leaf of 1 KiB a row or more. With a `path` None puts all
        into files, those of 1 KiB or more compressed and the others as they are, so that `Buffer.resume` finds whole rows.
      codec: How rows become bytes: `Zstd(level, chunk, dictionary)`; `BitPack()` for zeros and ones; `Raw()` for what
        does not compress; or any value with `chunk`, `encode`, `decode` (`Codec`). Or one for each leaf that is to have another
        than `Zstd()`: `{"obs": Zstd(chunk=16), "mask": BitPack()}`. With a writer that replaces any row, rows are encoded one
        by one (some 35 bytes a row beside what they compress to), and a codec of your own must have `chunk` 1.
      slack: Rows kept beyond the capacity, so that a state a little old reads its own rows; None: a sixteenth of the
        capacity, at most 4096 a lane.
      cache: Bytes of decoded chunks kept for each leaf, for draws that come back to the same rows: priorities that a few rows
        dominate, windows that overlap. 0: none, the best for uniform draws over many rows.
      on_expired: What a read of a row dropped since does: "raise", or "mask" (zeros, and `mask` False).
      stacks: Whether a leaf whose rows are stacks of 2 to 16 frames of their lane, on the first or the last axis and the newest
        last, is recognised by its first rows and stored as single frames, each once. Reads give what was written, whatever
        comes. With `Zstd` and without a `path` only. Next stacks beside stacks are recognised as well, as frames of their
        own: single frames and `Transition(stack=4)` store each frame once for both.
      path: A folder that the chunks are kept in, for data sets larger than memory; see `Memmap` for what holds of it.
        Memory then holds 18 bytes a chunk. Chunks in files are not compressed again. None: everything is in memory.
      sync: With a path: seconds after which a write waits for the disk; see `Memmap`.
    Raises:
      ValueError: a setting is out of range.

    Cost: a write compresses its rows (about 3 to 8 us a frame of 84x84, and for a stack of four some 5 us to compare it); a
    read is one callback and one decompression for each distinct chunk.

    Example:
      >>> import fbuf
      >>> fbuf.storages.Compressed(keys=("obs",)).keys
      ('obs',)
    """

    keys: tuple[str, ...] | None = None
    codec: Codec | Mapping[str, Codec] = Zstd()
    slack: int | None = None
    on_expired: str = "raise"
    cache: int = 0
    stacks: bool = True
    path: str | None = None
    sync: float | None = None

    def __post_init__(self) -> None:
        self._check()
        if isinstance(self.cache, bool) or not isinstance(self.cache, int) or self.cache < 0:
            raise ValueError(
                f"Compressed: cache is {self.cache!r}; expected bytes, an int >= 0. 64 MiB are cache=1 << 26."
            )
        if not isinstance(self.stacks, bool):
            raise TypeError(f"Compressed: stacks is {self.stacks!r}; expected True or False. Write stacks=False.")
        if isinstance(self.codec, (Mapping, tuple)):  # a mapping does not hash; its items do
            items = self.codec.items() if isinstance(self.codec, Mapping) else self.codec
            object.__setattr__(self, "codec", tuple(sorted((name_of(name), codec) for name, codec in items)))
        for codec in self._by_leaf().values() if isinstance(self.codec, tuple) else (self.codec,):
            if isinstance(codec, type):
                name = codec.__name__
                raise TypeError(f"Compressed: codec is the class {name}; expected a value. Write {name}().")

    def _cache(self) -> int:
        return self.cache

    def _by_leaf(self) -> dict[str, Codec]:
        return dict(self.codec) if isinstance(self.codec, tuple) else {}

    def _columns(self, spec: Spec) -> tuple[Column, ...]:
        return tuple(dataclasses.replace(c, stacks=self.stacks) for c in super()._columns(spec))

    @property
    def _least(self) -> int:
        return 0 if self.in_files else _LARGE

    def _codec(self, name: str, leaf: jax.ShapeDtypeStruct) -> Codec | None:
        if isinstance(self.codec, tuple) and name in self._by_leaf():
            return self._by_leaf()[name]
        if self.in_files and self.keys is None and item_bytes(leaf) < _LARGE:
            return None
        return Zstd() if isinstance(self.codec, tuple) else cast(Codec, self.codec)

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        keys = super().host_keys(spec)
        for name in self._by_leaf():
            if name not in keys:
                raise ValueError(
                    f"Compressed: codec names '{name}', but the leaves on the host are {', '.join(keys)}. "
                    f"Use one of those, or name it in keys=(...) too."
                )
        return keys

"""`Compressed`: chosen leaves live in host memory, zstd-compressed, and are read inside jit.

A stream of frames repeats itself: chunks of consecutive rows of a lane, compressed against a few past rows, take a few
hundredths of what stacks would (the ratio on real frames: `python -m benchmarks --only compression`). Frames are stored
once; stacks, next observations and n-step windows are views of them. The rest of the row stays on the device.
"""

from __future__ import annotations

import jax

from fbuf._config import allow, component
from fbuf._host.blocks import Blocks
from fbuf._host.codec import Codec, Zstd
from fbuf._tree import item_bytes
from fbuf.storages._hosted import Hosted

_LARGE = 1024  # bytes a row
allow(Zstd, "fbuf.storages.Zstd")
allow(Blocks, "fbuf.storages.Blocks")


@component
class Compressed(Hosted):
    """Rows whose large leaves are compressed on the host.

    Attributes:
      keys: Leaves (or subtrees) that go to the host; None: every leaf of 1 KiB a row or more. With a `path` None puts all
        into files, those of 1 KiB or more compressed and the others as they are, so that `Buffer.resume` finds whole rows.
      codec: How rows become bytes: `Zstd(level, chunk, dictionary)`; `Blocks(block, chunk)`, larger and read faster; or any
        value with `chunk`, `encode`, `decode`.
      slack: Rows kept beyond the capacity, so that a state a little old reads its own rows; None: a sixteenth of the
        capacity, at most 4096 a lane.
      on_expired: What a read of a row dropped since does: "raise", or "mask" (zeros, and `mask` False).
      path: A folder that the chunks are kept in, for data sets larger than memory; see `Memmap` for what holds of it.
        Memory then holds 18 bytes a chunk. None: everything is in memory.
    Raises:
      ValueError: a setting is out of range, or `path` is given with a codec that keeps a table in memory (`Blocks`).

    Cost: a write compresses its rows (about 3 to 8 us a frame of 84x84); a read is one callback and one decompression
    for each distinct chunk.

    Example:
      >>> import fbuf
      >>> fbuf.storages.Compressed(keys=("obs",)).keys
      ('obs',)
    """

    keys: tuple[str, ...] | None = None
    codec: Codec = Zstd()
    slack: int | None = None
    on_expired: str = "raise"
    path: str | None = None

    def __post_init__(self) -> None:
        self._check()
        if isinstance(self.codec, type):
            name = self.codec.__name__
            raise TypeError(f"Compressed: codec is the class {name}; expected a value. Write {name}().")

        if self.path is not None and isinstance(self.codec, Blocks):
            raise ValueError(
                f"Compressed: path is {self.path!r}, but the table of {self.codec!r} lies in memory; expected chunks. "
                f"Write Compressed(codec=Zstd(), path=...)."
            )

    @property
    def _least(self) -> int:
        return 0 if self.in_files else _LARGE

    def _codec(self, leaf: jax.ShapeDtypeStruct) -> Codec | None:
        small = self.in_files and self.keys is None and item_bytes(leaf) < _LARGE
        return None if small else self.codec

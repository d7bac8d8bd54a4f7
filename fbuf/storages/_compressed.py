"""`Compressed`: chosen leaves live in host memory, zstd-compressed, and are read inside jit.

A stream of frames repeats itself: chunks of consecutive rows of a lane, compressed against a few past rows, take a few
hundredths of what stacks would (the ratio on real frames: `python -m benchmarks --only compression`). Frames are stored
once; stacks, next observations and n-step windows are views of them. The rest of the row stays on the device.
"""

from __future__ import annotations

from typing import ClassVar

from fbuf._config import allow, component
from fbuf._host.blocks import Blocks
from fbuf._host.codec import Codec, Zstd
from fbuf.storages._hosted import Hosted

allow(Zstd, "fbuf.storages.Zstd")
allow(Blocks, "fbuf.storages.Blocks")


@component
class Compressed(Hosted):
    """Rows whose large leaves are compressed on the host.

    Attributes:
      keys: Leaves (or subtrees) that go to the host; None: every leaf of 1 KiB a row or more.
      codec: How rows become bytes: `Zstd(level, chunk, dictionary)`; `Blocks(block, chunk)`, larger and read faster; or any
        value with `chunk`, `encode`, `decode`. With a writer that replaces any row, rows are encoded one by one (some 35
        bytes a row beside what they compress to), and a codec of your own must have `chunk` 1.
      slack: Rows kept beyond the capacity, so that a state a little old reads its own rows; None: a sixteenth of the
        capacity, at most 4096 a lane.
      on_expired: What a read of a row dropped since does: "raise", or "mask" (zeros, and `mask` False).

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

    _least: ClassVar[int] = 1024

    def __post_init__(self) -> None:
        self._check()
        if isinstance(self.codec, type):
            name = self.codec.__name__
            raise TypeError(f"Compressed: codec is the class {name}; expected a value. Write {name}().")

    def _codec(self, name: str) -> Codec:
        return self.codec

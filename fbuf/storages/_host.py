"""`Host`: chosen leaves live in host memory as they are, and are read inside jit.

The same path as `Compressed` without a codec: for leaves that do not compress but are too many for the device.
"""

from __future__ import annotations

from fbuf._core.component import component
from fbuf.storages._host_storage import Hosted


@component
class Host(Hosted):
    """Rows whose leaves are numpy arrays on the host.

    Attributes:
      keys: Leaves (or subtrees) that go to the host; None: all of them.
      slack: Rows kept beyond the capacity, so that a state a little old reads its own rows; None: a sixteenth of the
        capacity, at most 4096 a lane.
      on_expired: What a read of a row dropped since does: "raise", or "mask" (zeros, and `mask` False).

    Cost: a write or read is one callback and one copy of its rows.

    Example:
      >>> import fbuf
      >>> fbuf.storages.Host(keys=("obs",)).keys
      ('obs',)
    """

    keys: tuple[str, ...] | None = None
    slack: int | None = None
    on_expired: str = "raise"

    def __post_init__(self) -> None:
        self._check()

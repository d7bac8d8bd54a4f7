"""`Host`: chosen leaves live in host memory as they are, and are read inside jit.

The same path as `Compressed` without a codec: for leaves that do not compress but are too many for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fbuf._config import component
from fbuf._tree import Spec, name_of
from fbuf._typing import Geometry, Read
from fbuf.storages import _arrays, _side
from fbuf.storages._side import SideRows


@component
class Host:
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
        if isinstance(self.keys, str):
            raise TypeError(f"Host: keys is {self.keys!r}; expected a tuple of names. Write keys=({self.keys!r},).")
        if self.keys is not None:
            object.__setattr__(self, "keys", tuple(name_of(key) for key in self.keys))
        _side.check("Host", self.slack, self.on_expired)

    @property
    def masks_expired(self) -> bool:
        return self.on_expired == "mask"

    def host_keys(self, spec: Spec) -> tuple[str, ...]:
        return _arrays.choose("Host", self.keys, spec, 0)

    def init(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        slack = _side.default_slack(geometry, self.slack)
        return _side.init("Host", geometry, spec, structure, self.host_keys(spec), None, slack)

    def abstract(self, geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        return _side.abstract(geometry, spec, structure, self.host_keys(spec))

    def plan_host(
        self, geometry: Geometry, spec: Spec, trial: Mapping[str, jax.Array] | None, ratio: float | None
    ) -> tuple[int, str, int]:
        slack = _side.default_slack(geometry, self.slack)
        return _side.plan_host(geometry, spec, self.host_keys(spec), None, slack, trial, ratio)

    def spec(self, rows: SideRows) -> tuple[Spec, Any]:
        if not isinstance(rows, SideRows):
            raise TypeError("Host: this state keeps its rows on the device. Use the buffer that made it.")
        return rows.layout.spec, rows.layout.structure

    def write(
        self,
        rows: SideRows,
        slot: jax.Array,
        leaves: Mapping[str, jax.Array],
        keep: jax.Array | None,
        token: jax.Array,
    ) -> tuple[SideRows, None]:
        return _side.write(rows, slot, leaves, keep, token), None

    def read(self, rows: SideRows, reads: Sequence[Read]) -> tuple[list[jax.Array], jax.Array | None]:
        return _side.read(rows, reads, strict=not self.masks_expired)

    def update(
        self, rows: SideRows, slot: jax.Array, leaves: Mapping[str, jax.Array], token: jax.Array
    ) -> tuple[SideRows, None]:
        return _side.update(rows, slot, leaves, token), None

    def clear(self, rows: SideRows) -> SideRows:
        return _side.clear(rows)

    def nbytes(self, rows: SideRows) -> dict[str, int]:
        return _side.nbytes(rows)

    def to_arrays(self, rows: SideRows) -> dict[str, np.ndarray]:
        return _side.to_arrays(rows)

    def from_arrays(self, arrays: Mapping[str, np.ndarray], geometry: Geometry, spec: Spec, structure: Any) -> SideRows:
        slack = _side.default_slack(geometry, self.slack)
        columns = self.host_keys(spec)
        return _side.from_arrays(arrays, geometry, spec, structure, columns, None, slack)

"""What jitted code and the registry of open stores ask of a store, whatever its rows are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fbuf._host.arrays import Array


class Kept(Protocol):
    """What the registry asks of anything that callbacks reach by its id: rows (`Served`) or `Priorities`."""

    last_error: Exception | None
    """What a call raised last: JAX turns exceptions of callbacks into text."""

    def stats(self) -> dict[str, int]:
        """Counts."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""

    @property
    def disk(self) -> int:
        """Bytes of files."""
        return 0

    def repack(self) -> None:
        """Compress again what is worth it; by default nothing."""
        return None

    def close(self) -> None:
        """Frees everything."""


class Served(Kept, Protocol):
    """A store of rows: `Store` (of arrays) or `Records` (ragged)."""

    def write(self, rows: Sequence[Array], keep: Array | None) -> Array:
        """Takes `[N, E, ...]` a column in; tickets uint64[N, E], 0 where `keep` is False."""

    def read(self, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """Fills the `out` of each (column, tickets, out); bool[M]: the row was there, or its ticket is 0."""

    def request(self, requests: Sequence[tuple[int, Array]]) -> int:
        """Begins a read of (column, tickets), or does not: a number for `collect`, 0 for none."""

    def collect(self, number: int, requests: Sequence[tuple[int, Array, Array]]) -> Array:
        """What `read` does, out of a request if there is one."""

    def patch(self, tickets: Array, keep: Array, fields: Mapping[int, Array]) -> Array:
        """Stores rows again with some columns replaced; their new tickets."""

    def to_arrays(self) -> dict[str, Any]:
        """Everything as flat arrays."""

"""Objects that a `with` statement closes."""

from __future__ import annotations

from typing import Self


class Closing:
    """An object with `close()`, which a `with` statement calls at its end."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what the object holds."""
        raise NotImplementedError

"""How far an import or export is, in rows or leaves: a bar, or a call of the user's own."""

from __future__ import annotations

from collections.abc import Callable

from fbuf._files import Bar

Progress = bool | Callable[[int, int], None] | None


def reporter(progress: Progress, total: int, what: str, unit: str = " rows") -> Callable[[int], None]:
    """A function to call with how much of `total` is done, at last with `total`."""
    bar = Bar(progress, what, total, unit)

    def advance(done: int) -> None:
        bar(done - bar.done)
        if done >= total:
            bar.close()

    return advance

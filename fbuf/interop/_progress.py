"""A progress bar for long work, or a call of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = bool | Callable[[int, int], None] | None


def reporter(progress: Progress, total: int, what: str) -> Callable[[int], None]:
    """A function to call with how much of `total` is done, at last with `total`.

    With `progress=True` it draws a bar (tqdm where it is installed, else a line on standard error); a callable gets
    `(done, total)`; None and False do nothing.
    """
    if callable(progress):
        return lambda done: progress(done, total)
    if not progress:
        return lambda done: None
    try:
        from tqdm.auto import tqdm
    except ImportError:

        def line(done: int) -> None:
            end = "\n" if done >= total else ""
            print(f"\r{what}: {done} of {total}", end=end, file=sys.stderr, flush=True)

        return line
    bar = tqdm(total=total, desc=what)

    def advance(done: int) -> None:
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return advance

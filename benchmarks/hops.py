"""Count the files of `fbuf` that one call goes through: `python -m benchmarks.hops`.

A move is a call of a function in another file than the function called before it. Counted are the first call, which JAX
traces, and a second one, which only runs: `sample` of a compressed buffer (`Transition`, `Prioritized`), and `extend` of a
device buffer. Functions that callbacks run count as well, in whichever thread.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fbuf
from fbuf._bridge import callbacks

_ROOT = str(Path(fbuf.__file__).parent)
_OF_JAX = ("_register_state", "register_node", "_flatten", "_cached_hash", "_equal")


class Hops(NamedTuple):
    """What one call went through."""

    files: tuple[str, ...]
    moves: int


def _is_of_jax(frame: Any) -> bool:
    """Return whether JAX calls this to flatten a state or to look up a program, or what calls this: no part of a method."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_ROOT) and frame.f_code.co_qualname.partition(".")[0] in _OF_JAX:
            return True
        frame = frame.f_back
    return False


class Counter:
    """Counts files and moves while `count` runs."""

    def __init__(self) -> None:
        self._files = set[str]()
        self._moves = 0
        self._last = ""
        self._on = False

    def _profile(self, frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(_ROOT) and not _is_of_jax(frame):
            self._files.add(file)
            self._moves += file != self._last
            self._last = file

    def in_callbacks(self) -> contextlib.AbstractContextManager[None]:
        """Count what callbacks run, of programs that are traced inside the `with` block: XLA calls them in its own threads."""
        return _patched_call(self)

    def count(self, call: Callable[[], Any]) -> Hops:
        """Run `call` and count, without what collections call."""
        gc.disable()
        self._files, self._moves, self._last, self._on = set(), 0, "", True
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            jax.block_until_ready(call())
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            self._on = False
            gc.enable()
        return Hops(tuple(sorted(file.removeprefix(_ROOT)[1:] for file in self._files)), self._moves)

    def run(self, function: Callable[..., None], *operands: Any) -> None:
        """Run a callback; count what it runs while `count` does."""
        before = sys.getprofile()
        sys.setprofile(self._profile if self._on else before)
        try:
            function(*operands)
        finally:
            sys.setprofile(before)


@contextlib.contextmanager
def _patched_call(counter: Counter) -> Iterator[None]:
    uninterrupted = callbacks.uninterrupted
    callbacks.uninterrupted = functools.partial(counter.run, uninterrupted)
    try:
        yield
    finally:
        callbacks.uninterrupted = uninterrupted


def rows(number: int) -> dict[str, np.ndarray]:
    """Steps with a compressible observation."""
    frames = np.random.default_rng(0).integers(0, 255, (number, 84, 6), np.uint8)
    return {
        "obs": np.repeat(frames, 14, axis=2),
        "action": np.zeros(number, np.int32),
        "reward": np.zeros(number, np.float32),
        "terminated": np.zeros(number, bool),
        "truncated": np.zeros(number, bool),
    }


def compressed_sample(counter: Counter) -> tuple[Hops, Hops]:
    """Count a `sample` that is traced, and one that only runs."""
    storage = fbuf.storages.Compressed(keys=("obs",))
    buffer = fbuf.Buffer(
        512, storage=storage, sampler=fbuf.samplers.Prioritized(), view=fbuf.views.Transition(autoreset="same_step")
    )
    steps = rows(300)
    state = buffer.extend(buffer.init({name: array[0] for name, array in steps.items()}), steps)

    def sample() -> Any:
        return buffer.sample(state, jax.random.key(0), 32)

    with counter.in_callbacks():
        return counter.count(sample), counter.count(sample)


def device_extend(counter: Counter) -> tuple[Hops, Hops]:
    """Count an `extend` that is traced, and one that only runs."""
    buffer = fbuf.Buffer(512, storage=fbuf.storages.Device())
    steps = rows(32)
    state = buffer.init({name: array[0] for name, array in steps.items()})
    return counter.count(lambda: buffer.extend(state, steps)), counter.count(lambda: buffer.extend(state, steps))


def main() -> None:
    """Print files and moves of each call; with `-v`, the files."""
    counter = Counter()
    for name, call in (("sample, compressed", compressed_sample), ("extend, device", device_extend)):
        for kind, hops in zip(("traced", "warm"), call(counter), strict=True):
            print(f"{name:20} {kind:7} {len(hops.files):3} files {hops.moves:4} moves")
            if "-v" in sys.argv:
                print("   ", *hops.files, sep="\n    ")


if __name__ == "__main__":
    main()

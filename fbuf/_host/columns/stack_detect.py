"""How a row is a stack of frames, and what two stacks of a lane have in common.

A row is looked at as bytes `[outer, frames, inner]`: a stack on the first axis has one outer and a frame's bytes inner; on
the last axis every pixel holds its `frames` values, of `inner` bytes, side by side. Only bytes are compared, so that NaN
and -0.0 are what they are. The newest frame is the last; stacks with the newest first are stored as plain rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fbuf._host.types import Array

_DEEPEST = 16  # frames of a stack
_CHANNELS = (1, 2, 3, 4)  # of a frame, side by side with those of its neighbours on the axis of the stack
_SMALLEST = 256  # bytes of a row; below, what is known of a row would weigh more than what is saved


@dataclass(frozen=True)
class Stacking:
    """A row as a stack: bytes `[outer, frames, inner]`."""

    outer: int
    frames: int
    inner: int

    @property
    def frame(self) -> int:
        """Bytes of a frame."""
        return self.outer * self.inner

    @property
    def at_once(self) -> int:
        """Stacks to compare together: what a processor's cache holds."""
        return max((1 << (19 if self.outer > 1 else 21)) // (self.frame * self.frames), 1)

    @property
    def word(self) -> np.dtype[Any]:
        """What a pixel of a frame is, to move."""
        return np.dtype(f"u{self.inner}" if self.inner in (1, 2, 4, 8) else f"V{self.inner}")

    def split(self, rows: Array) -> Array:
        """uint8[N, E, outer, frames, inner] of rows `[N, E, *shape]`; a view if they are C-contiguous."""
        return as_bytes(rows).reshape(*rows.shape[:2], self.outer, self.frames, self.inner)

    def follows(self, before: Array, after: Array, shared: int, scratch: Array | None = None) -> Array:
        """bool[...]: whether the last `shared` frames of stacks `before` are the first of stacks `after`.

        Args:
          before: uint8[..., outer, frames, inner], as is `after`.
          scratch: bool[of a byte a byte of `after`, or more], to work in; new memory costs as much as the comparison.
        """
        lead, size = after.shape[:-3], self.frames * self.inner
        at = (self.frames - shared) * self.inner
        # Of four bytes numpy compares words fastest; on the last axis shifted frames are a byte or so off.
        word = next(w for w in (4, 2, 1) if self.inner % w == 0) if self.outer == 1 else 1
        new, old = (a.reshape(*lead, self.outer * size) for a in (after, before))
        new, old = new[..., : new.shape[-1] - at].view(f"u{word}"), old[..., at:].view(f"u{word}")
        shape = (*lead, self.outer * size // word)
        number = math.prod(shape)
        differ = (np.empty(number, bool) if scratch is None else scratch[:number]).reshape(shape)
        skipped = at // word
        np.not_equal(new, old, out=differ[..., skipped:])
        if self.outer == 1:
            return np.asarray(~differ[..., skipped:].any(axis=-1))
        differ[..., :skipped] = False
        # What a pixel's neighbour gave is not looked at: the lower bytes of a word, or the first of `size`.
        if size in (2, 4, 8):
            return np.asarray(differ.view(f"<u{size}").max(axis=-1) < 1 << 8 * at)
        return np.asarray(~differ.reshape(*lead, self.outer, size)[..., at:].any(axis=(-2, -1)))

    def fresh(self, before: Array, after: Array) -> Array:
        """uint8[M], frames that each stack of `after` has and the one of `before` does not end with; 0 if they are alike."""
        added = np.full(len(after), self.frames, np.uint8)
        for shared in range(self.frames, 0, -1):
            first = (after[:, :, 0] == before[:, :, self.frames - shared]).all(axis=(1, 2))
            maybe = np.flatnonzero(first & (added == self.frames))
            if len(maybe):
                found = maybe[self.follows(before[maybe], after[maybe], shared)]
                added[found] = self.frames - shared
        return added


def as_bytes(rows: Array) -> Array:
    """uint8[N, E, row] of rows `[N, E, *shape]`; a view if they are C-contiguous."""
    size = math.prod(rows.shape[2:]) * rows.dtype.itemsize
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).reshape(*rows.shape[:2], size)


def stackings(shape: tuple[int, ...], itemsize: int) -> tuple[Stacking, ...]:
    """All that rows of this shape could be."""
    total = math.prod(shape) * itemsize
    found = []
    if len(shape) < 2 or total < _SMALLEST:
        return ()
    axes = (1, shape[0]), (total // (shape[-1] * itemsize), shape[-1])
    for channels in _CHANNELS:
        for outer, length in axes:
            frames, rest = divmod(length, channels)
            if not rest and 2 <= frames <= _DEEPEST:
                found.append(Stacking(outer, frames, total // outer // frames))
    return tuple(dict.fromkeys(found))

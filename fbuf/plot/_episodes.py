"""The episodes of a buffer: where they begin and end, their returns, and what a player needs of one."""

from __future__ import annotations

import base64
import math
import zlib
from typing import Any, NamedTuple

import numpy as np

from fbuf._core.frames import is_picture, shrunk, to_images
from fbuf._core.pytree import under
from fbuf._indexing import anchors
from fbuf._rows.row_reader import Reader
from fbuf.writers import Frozen

ENDS = ("terminated", "truncated", "done", "terminal", "timeout")  # usual names, for views that name none
STEPS = 2000  # of an episode that a player shows
SIDE = 256  # pixels of a frame's longer side
CURVES = 12  # components of a vector


class Episode(NamedTuple):
    """Rows `first` to before `stop` of a lane, by age, 0 the oldest."""

    lane: int
    first: int
    stop: int
    end: str  # "terminated", "truncated", "cut", "ended", "running"
    is_whole: bool  # its first row is held
    reward: float | None  # the sum

    @property
    def length(self) -> int:
        """Return the number of rows."""
        return self.stop - self.first


class Episodes:
    """The episodes of a buffer in order of their ends, the oldest first.

    Raises:
      TypeError: rows are ragged, or in no order. ValueError: nothing says where episodes end.
    """

    def __init__(self, call: str, buffer: Any, state: Any) -> None:
        self.reader = reader = Reader(call, buffer, state)
        if not buffer.geometry.streams:
            raise TypeError(
                f"{call}: {buffer.writer!r} keeps rows in no order, so there are no episodes. Plot overview."
            )
        self.buffer, self.state, self.spec = buffer, state, reader.spec
        roles = ("observation", "action", "reward", "final_observation")
        self.roles: dict[str, str | None] = {role: getattr(buffer.view, role, None) for role in roles}
        self.observation = self._named(self.roles["observation"], "obs", "observation", "state", "")
        self.reward = self._named(self.roles["reward"], "reward", "rewards")
        self.ends = [name for name in buffer.ends or ENDS if name in self.spec and self.spec[name].dtype == bool]
        if not self.ends and state.anchors is None:
            known = ", ".join(self.spec)
            raise ValueError(
                f"{call}: nothing says where episodes end (rows have {known}). Use Buffer(..., episode_end=(name,))."
            )
        self.all = self._found()

    def _named(self, *names: str | None) -> list[str]:
        """Return the leaves under the first name that rows have."""
        return next((found for name in names if name is not None and (found := under(name, self.spec))), [])

    def _found(self) -> list[Episode]:
        reader, held = self.reader, self.reader.mask(0, self.reader.steps)
        flags = {name: reader.flag(name) for name in self.ends}
        cut, reset = reader.cuts(), np.zeros_like(held)
        end = cut.copy()
        for flag in flags.values():
            end |= flag
        lost = (reader.sizes == self.buffer.geometry.length) & (not isinstance(self.buffer.writer, Frozen))
        if self.state.anchors is not None:
            bits = np.where(held, np.asarray(self.state.anchors.flags)[reader.slots(*np.indices(held.shape))], 0)
            reset, end = bits & anchors.RESET > 0, end & (bits & anchors.RESET == 0) | (bits & anchors.END > 0)
            lost &= bits[0] & anchors.START == 0 if len(bits) else False
        sums = self._sums(held)
        found = []
        for lane, size in enumerate(reader.sizes.tolist()):
            stops = (np.flatnonzero(end[:size, lane]) + 1).tolist()
            for at, stop in enumerate([*stops, size] if not stops or stops[-1] < size else stops):
                first = stops[at - 1] if at else 0
                while first < stop and reset[first, lane]:
                    first += 1
                if first < stop:
                    why = [name for name in self.ends if flags[name][stop - 1, lane]]
                    last = (
                        why[0]
                        if why and why[0] in ENDS[:2]
                        else "ended"
                        if why
                        else "cut"
                        if cut[stop - 1, lane]
                        else "running"
                    )
                    total = None if sums is None else float(sums[stop, lane] - sums[first, lane])
                    found.append(Episode(lane, first, stop, last, bool(at or not lost[lane]), total))
        return sorted(found, key=lambda episode: (episode.stop, episode.lane))

    def _sums(self, held: np.ndarray) -> np.ndarray | None:
        """Return float64[T + 1, E], the rewards before each row."""
        if len(self.reward) != 1:
            return None
        blocks = [block.reshape(len(block), held.shape[1], -1) for block in self.reader.steps_of(self.reward[0])]
        rewards = (
            np.nan_to_num(np.concatenate(blocks).astype(np.float64).sum(axis=2)) if blocks else np.zeros(held.shape)
        )
        return np.concatenate([np.zeros((1, held.shape[1])), np.cumsum(np.where(held, rewards, 0), axis=0)])

    def rows(self, name: str, ages: np.ndarray, lane: int) -> np.ndarray:
        """Return a leaf of rows of one lane, in blocks that bound the memory."""
        slots, block = self.reader.slots(ages, np.full(len(ages), lane)), min(self.reader.block(name), 256)
        parts = [self.reader.leaf(name, slots[i : i + block], block) for i in range(0, len(slots), block)]
        return np.concatenate(parts)

    def track(self, number: int, episode: Episode, budget: float = math.inf) -> dict[str, Any]:
        """Return what the player shows of an episode, as JSON; in at most `budget` bytes of frames, by leaving out steps."""
        every = max(1, -(-episode.length // STEPS))
        ages = np.arange(episode.first, episode.stop, every)
        names = dict.fromkeys(self.observation + list(self.spec))
        pictures = [n for n in names if is_picture(tuple(self.spec[n].shape), self.spec[n].dtype)]
        frames = None
        if pictures:
            images = _pixels(self.rows(pictures[0], ages, episode.lane))
            frames = _encoded(images)
            while len(frames["data"]) > budget and len(ages) > 10:
                every, ages, images = 2 * every, ages[::2], images[::2]
                frames = _encoded(images)
        return {
            "number": number,
            "lane": episode.lane,
            "length": episode.length,
            "every": every,
            "end": episode.end,
            "whole": episode.is_whole,
            "return": _number(episode.reward),
            "frames": None if frames is None else frames | {"leaf": pictures[0]},
            "curves": self._curves(ages, every, episode),
        }

    def _curves(self, ages: np.ndarray, every: int, episode: Episode) -> list[dict[str, Any]]:
        """Return reward, action, vectors, other numbers and the priority of each step shown; rewards between them are added."""
        curves: list[dict[str, Any]] = []
        action = self._named(self.roles["action"], "action", "actions")
        hides = ("next_obs", "final_obs", self.roles["final_observation"])
        first = [*self.reward, *action, *self.observation]
        for name in dict.fromkeys([*first, *self.spec]):
            leaf, hidden = self.spec[name], name.split("/")[0] in hides
            size = math.prod(leaf.shape)
            if hidden or name in self.ends or is_picture(tuple(leaf.shape), leaf.dtype) or not size or size > 4096:
                continue
            where = np.arange(episode.first, episode.stop) if name in self.reward else ages
            values = self.rows(name, where, episode.lane).reshape(len(where), -1)
            if values.dtype.kind not in "biuf":
                values = values.astype(np.float32)
            if name in self.reward and every > 1:
                values = np.add.reduceat(values.astype(np.float64), np.arange(0, len(values), every), axis=0)
            shown = values[:, :CURVES]
            kind = "bars" if name in self.reward else "steps" if values.dtype.kind in "biu" else "line"
            note = f", {CURVES} of {size}" if size > CURVES else ""
            numbers = [[_number(x) for x in column.tolist()] for column in shown.T]
            curves.append({"name": (name or "row") + note, "kind": kind, "values": numbers})
        if self.buffer.sampler.prioritized:
            every_row = np.asarray(self.buffer.priorities(self.state)).reshape(-1, len(self.reader.sizes))
            values = every_row[ages, episode.lane]
            curves.append({"name": "priority", "kind": "line", "values": [[_number(x) for x in values.tolist()]]})
        return curves


def _number(value: Any) -> Any:
    """Return a number with four digits, or None if JSON has no such number."""
    if isinstance(value, (bool, int)):
        return int(value)
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _pixels(rows: np.ndarray) -> np.ndarray:
    """Return uint8[N, H, W, 1 or 3]: the newest frame of each stack."""
    item = rows.shape[1:]
    if rows.dtype == np.uint8 and len(item) == 2:
        frames = rows[..., None]
    elif rows.dtype == np.uint8 and len(item) == 3 and item[2] in (1, 3):
        frames = rows
    elif rows.dtype == np.uint8 and len(item) == 3:
        frames = rows[..., -1:] if item[2] == 4 else rows[:, -1, :, :, None]
    else:
        frames = (to_images(rows)[:, -1] * 255 + 0.5).astype(np.uint8)
    if max(frames.shape[1:3]) > SIDE:
        frames = np.concatenate(
            [
                (shrunk(np.broadcast_to(f, (*f.shape[:2], 3)) / 255, SIDE)[None] * 255 + 0.5).astype(np.uint8)
                for f in frames
            ]
        )
    if frames.shape[-1] == 3 and bool((frames == frames[..., :1]).all()):
        frames = frames[..., :1]
    return np.ascontiguousarray(frames)


def _encoded(frames: np.ndarray) -> dict[str, Any]:
    """Return frames as the deflated differences of successive frames, which a browser inflates."""
    changes = frames.copy()
    changes[1:] ^= frames[:-1]
    high, wide, channels = frames.shape[1:]
    data = base64.b64encode(zlib.compress(changes.tobytes(), 9)).decode()
    return {"count": len(frames), "height": high, "width": wide, "channels": channels, "data": data}

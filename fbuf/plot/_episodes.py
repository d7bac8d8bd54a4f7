"""The episodes of a buffer: where they begin and end, their returns, and what a player needs of one."""

from __future__ import annotations

import base64
import json
import math
import zlib
from typing import Any, NamedTuple

import numpy as np

from fbuf._core.frames import as_stacks, is_picture, shrunk, to_images
from fbuf._core.pytree import under
from fbuf._core.text_table import WHOLE
from fbuf._indexing import anchors
from fbuf._rows.row_reader import Reader
from fbuf.storages import Ragged
from fbuf.writers import Frozen

ENDS = {
    "terminated": "terminated",
    "terminal": "terminated",
    "truncated": "truncated",
    "timeout": "truncated",
    "done": "ended",
}
"""What usual names of flags say, for views that name none."""
STEPS = 2000  # of an episode that a player shows
SIDE = 256  # pixels of a frame's longer side
CURVES = 12  # components of a vector


class Episode(NamedTuple):
    """Rows `first` to before `stop` of a lane, by age, 0 the oldest."""

    lane: int
    first: int
    stop: int
    end: str  # "terminated", "truncated", "ended", "cut", "running"
    is_whole: bool  # its first row is held
    reward: float | None  # the sum; None: unknown, or not finite

    @property
    def length(self) -> int:
        """Return the number of rows."""
        return self.stop - self.first


class Episodes:
    """The episodes of a buffer in order of their ends, the oldest first; each lane is one if nothing says where they end.

    Attributes:
      has_ends: Whether something says so.
      all: Nothing if rows are in no order.
    Raises:
      TypeError: rows are ragged.
    """

    def __init__(self, call: str, buffer: Any, state: Any) -> None:
        if isinstance(buffer.storage, Ragged):
            raise TypeError(
                f"{call}: {buffer.storage!r} has rows of several shapes. Use plot.overview, or fbuf inspect."
            )
        self.reader = reader = Reader(call, buffer, state)
        self.buffer, self.state, self.spec = buffer, state, reader.spec
        roles = {
            role: getattr(buffer.view, role, None)
            for role in ("observation", "action", "reward", "final_observation", *ENDS)
        }
        self.observation = self._named(roles["observation"], "obs", "observation", "state", "")
        self.action = self._named(roles["action"], "action", "actions")
        self.reward = self._named(roles["reward"], "reward", "rewards")
        self.hidden = ("next_obs", "final_obs", roles["final_observation"])
        self.kinds = ENDS | {str(name): ENDS[role] for role, name in roles.items() if role in ENDS}
        self.ends = [name for name in buffer.ends or ENDS if name in self.spec and self.spec[name].dtype == bool]
        self.has_ends = bool(self.ends) or state.anchors is not None
        self.all = self._found() if buffer.geometry.streams else []

    def _named(self, *names: str | None) -> list[str]:
        """Return the leaves under the first name that rows have."""
        return next((found for name in names if name is not None and (found := under(name, self.spec))), [])

    @np.errstate(invalid="ignore")  # of infinite rewards
    def _found(self) -> list[Episode]:
        reader, exists = self.reader, self.reader.mask(0, self.reader.steps)
        flags = {name: reader.flag(name) for name in self.ends}
        cut, reset = reader.cuts(), np.zeros_like(exists)
        end = cut.copy()
        for flag in flags.values():
            end |= flag
        lost = (reader.sizes == self.buffer.geometry.length) & (not isinstance(self.buffer.writer, Frozen))
        if self.state.anchors is not None:
            bits = np.where(exists, np.asarray(self.state.anchors.flags)[reader.slots(*np.indices(exists.shape))], 0)
            reset, end = bits & anchors.RESET > 0, end & (bits & anchors.RESET == 0) | (bits & anchors.END > 0)
            lost &= bits[0] & anchors.START == 0 if len(bits) else False
        rewards, found = self._rewards(), []
        for lane, size in enumerate(reader.sizes.tolist()):
            stops = (np.flatnonzero(end[:size, lane]) + 1).tolist()
            for at, stop in enumerate([*stops, size] if not stops or stops[-1] < size else stops):
                first = stops[at - 1] if at else 0
                while first < stop and reset[first, lane]:
                    first += 1
                if first < stop:
                    kind = "cut" if cut[stop - 1, lane] else "running"
                    kind = next((self.kinds.get(n, "ended") for n in self.ends if flags[n][stop - 1, lane]), kind)
                    total = None if rewards is None else finite(rewards[first:stop, lane].sum())
                    found.append(Episode(lane, first, stop, kind, bool(at or not lost[lane]), total))
        return sorted(found, key=lambda episode: (episode.stop, episode.lane))

    def _rewards(self) -> np.ndarray | None:
        """Return the reward of each row, float64[T, E]."""
        if len(self.reward) != 1:
            return None
        blocks = [
            block.reshape(len(block), len(self.reader.sizes), -1) for block in self.reader.steps_of(self.reward[0])
        ]
        return np.concatenate(blocks).astype(np.float64).sum(axis=2) if blocks else None

    def rows(self, name: str, ages: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """Return a leaf of rows."""
        return self.reader.rows(name, self.reader.slots(ages, lanes), 4096)

    def track(self, number: int, budget: float = math.inf) -> dict[str, Any]:
        """Return what the player shows of an episode, as JSON of at most `budget` bytes: steps are left out, but for ten."""
        episode = self.all[number]
        every = max(1, -(-episode.length // STEPS))
        while True:
            ages = np.arange(episode.first, episode.stop, every)
            track: dict[str, Any] = {"number": number, "lane": episode.lane, "length": episode.length, "every": every}
            track |= {"end": episode.end, "whole": episode.is_whole, "return": rounded(episode.reward)}
            track |= {"frames": self._frames(ages, episode.lane), "curves": self._curves(ages, every, episode)}
            if len(ages) <= 10 or len(json.dumps(track)) <= budget:
                return track
            every *= 2

    def _frames(self, ages: np.ndarray, lane: int) -> dict[str, Any] | None:
        """Return the deflated differences of successive frames, which a browser inflates; None: rows have no frames."""
        names = dict.fromkeys(self.observation + list(self.spec))
        name = next((n for n in names if is_picture(tuple(self.spec[n].shape), self.spec[n].dtype)), None)
        if name is None:
            return None
        frames = _pixels(self.rows(name, ages, np.full(len(ages), lane)))
        changes = frames.copy()
        changes[1:] ^= frames[:-1]
        count, height, width, channels = frames.shape
        data = base64.b64encode(zlib.compress(changes.data, 9)).decode()
        return {"leaf": name, "count": count, "height": height, "width": width, "channels": channels, "data": data}

    def _curves(self, ages: np.ndarray, every: int, episode: Episode) -> list[dict[str, Any]]:
        """Return reward, action, vectors, other numbers and the priority of each step shown; rewards between them are added."""
        curves: list[dict[str, Any]] = []
        for name in dict.fromkeys([*self.reward, *self.action, *self.observation, *self.spec]):
            leaf, size = self.spec[name], math.prod(self.spec[name].shape)
            if name.split("/")[0] in self.hidden or name in self.ends or not 0 < size <= 4096:
                continue
            if is_picture(tuple(leaf.shape), leaf.dtype):
                continue
            shown = np.arange(episode.first, episode.stop) if name in self.reward else ages
            values = self.rows(name, shown, np.full(len(shown), episode.lane)).reshape(len(shown), -1)
            if values.dtype.kind == "c":
                values = values.view(values.real.dtype)
            whole = values.dtype.kind in "biu"
            if name in self.reward:
                values = np.add.reduceat(values.astype(np.float64), np.arange(0, len(values), every), axis=0)
            kind = "bars" if name in self.reward else "steps" if whole else "line"
            note = f", {CURVES} of {size}" if size > CURVES else ""
            curves.append(_curve((name or WHOLE) + note, kind, values[:, :CURVES]))
        if self.buffer.sampler.prioritized:
            every_row = np.asarray(self.buffer.priorities(self.state)).reshape(-1, len(self.reader.sizes))
            curves.append(_curve("priority", "line", every_row[ages, episode.lane][:, None]))
        return curves


def _curve(name: str, kind: str, values: np.ndarray) -> dict[str, Any]:
    values = values if values.dtype.kind in "biuf" else values.astype(np.float32)
    return {"name": name, "kind": kind, "values": [list(map(rounded, column)) for column in values.T.tolist()]}


def finite(value: float) -> float | None:
    """Return a value as a Python number; None if it is NaN or infinite."""
    return float(value) if math.isfinite(value) else None


def rounded(value: float | None) -> float | None:
    """Return a number with four digits, or None if JSON has no such number."""
    if isinstance(value, int):
        return int(value)
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")


def _pixels(rows: np.ndarray) -> np.ndarray:
    """Return uint8[N, H, W, 1 or 3]: the newest frame of each stack."""
    frames = as_stacks(rows)[:, -1] if rows.dtype == np.uint8 else (to_images(rows)[:, -1] * 255 + 0.5).astype(np.uint8)
    if max(frames.shape[1:3]) > SIDE:
        frames = np.stack([(shrunk(frame, SIDE) + 0.5).astype(np.uint8) for frame in frames])
    if frames.shape[-1] == 3 and bool((frames == frames[..., :1]).all()):
        frames = frames[..., :1]
    return np.ascontiguousarray(frames)

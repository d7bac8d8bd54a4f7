"""`BufferConfig`: the parts and sizes of a buffer, for the functions that work on its state; `Buffer` adds the methods."""

from __future__ import annotations

import dataclasses
from typing import Any

from fbuf._core.geometry import Geometry
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.storage import Storage
from fbuf._interfaces.view import EligibilityRule, View
from fbuf._interfaces.writer import ReadOnly, Writer
from fbuf.samplers import Uniform
from fbuf.storages import Device
from fbuf.views import Row
from fbuf.writers import Ring


@dataclasses.dataclass(frozen=True)
class BufferConfig:
    """The fields of a `Buffer`, unchecked, and what follows from them."""

    capacity: int
    storage: Storage = Device()
    sampler: Sampler = Uniform()
    view: View = Row()
    writer: Writer = Ring()
    lanes: int | None = None
    episode_end: tuple[str, ...] = ()
    prefetch: int = 0
    batch_size: int | None = None
    on_write: Any = None  # kept as a Chain, or None
    on_read: Any = None

    @property
    def geometry(self) -> Geometry:
        """Lanes and rows a lane."""
        lanes = self.lanes or 1
        return Geometry(lanes, self.capacity // lanes, self.writer.streams)

    @property
    def ends(self) -> tuple[str, ...]:
        """Leaves that end an episode."""
        return tuple(dict.fromkeys((*self.view.episode_fields()[0], *self.episode_end)))

    @property
    def rule(self) -> EligibilityRule:
        """Which rows can be drawn: the view's rule, with the leaves that end episodes."""
        return dataclasses.replace(self.view.rule, ends=self.ends, terminated=self.view.episode_fields()[1])

    @property
    def dense(self) -> bool:
        """Whether every row held is an anchor."""
        return self.view.rule == EligibilityRule() and not self.sampler.by_episode

    @property
    def counted(self) -> bool:
        """Whether the sampler finds anchors by counting, and keeps no log of them: where rows stay, and not all are anchors."""
        by_rank = getattr(self.sampler, "by_rank", False)
        return isinstance(self.writer, ReadOnly) and by_rank and not self.dense

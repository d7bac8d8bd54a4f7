"""A replay buffer in plain Python: what every verb of `fbuf.Buffer` must do, said as slowly as possible.

Lanes are lists of all rows that ever arrived; which rows can be drawn, what a transition is and how likely it is are
worked out anew from those lists each time it is asked, in float64. Nothing is kept up to date, so nothing can get out of
step: that is the difference from the code under test, and why a mirror of its incremental bookkeeping was rejected.

Source: the documentation of `Buffer`, of the views and of the samplers.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

COUNTERS = (
    "refused_nonfinite",
    "refused_out_of_range",
    "refused_stale",
    "refused_closed",
    "empty_samples",
    "expired_rows",
)
Fields = dict[str, np.ndarray]


@dataclasses.dataclass
class Row:
    """One row that arrived, and what it was told on the way in."""

    name: int  # no two rows of a model and its copies share it
    lane: int
    number: int  # place in the lane's history
    slot: int
    fields: Fields
    given: float | None  # priority given to `extend`
    end: bool = False
    terminated: bool = False
    start: bool = False
    reset: bool = False  # next-step autoreset: holds the final observation only
    step: int = (
        0  # rows of its episode before it (of its lane, where windows cross ends); after a conversion those known
    )
    unknown: bool = False  # may be a row after an end, or not


class Model:
    """The rows of a buffer, its priorities and its counters.

    Args:
      buffer: The `fbuf.Buffer` whose settings (not code) this follows.
      fields: Shape and dtype of each leaf of a row, by name.
    """

    def __init__(self, buffer: Any, fields: Mapping[str, tuple[tuple[int, ...], Any]]):
        self.buffer, self.fields = buffer, dict(fields)
        self.capacity, self.lane_count = buffer.capacity, buffer.lanes or 1
        self.length = self.capacity // self.lane_count
        self.view, self.sampler = buffer.view, buffer.sampler
        self.kind = type(self.view).__name__
        self.transitions = self.kind == "Transition"
        self.windows = self.kind in ("Sequence", "Episode")
        self.ranked = type(self.sampler).__name__ == "Ranked"
        self.prioritized = self.ranked or type(self.sampler).__name__ == "Prioritized"
        self.ages = type(self.sampler).__name__ == "Staleness"
        self.run: dict[
            int, tuple[int, int]
        ] = {}  # of the anchor with this name: number of its run in the lane, and its stamp
        self.latest: dict[int, tuple[int, int]] = {}  # of the lane's newest anchor
        self.came: dict[int, int] = {}  # anchors that opened in the lane, ever
        self.version = 0
        self.next_step = self.kind != "Row" and self.view.autoreset == "next_step"
        ends = tuple(buffer.episode_end)
        if self.transitions:
            ends += tuple(n for n in (self.view.terminated, self.view.truncated) if n is not None)
        if self.windows:
            ends += self.view.episode_end
        self.ends = ends
        self.history: list[list[Row]] = [[] for _ in range(self.lane_count)]
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.leaf: dict[int, float] = {}  # by name of the row, like all that follow; of `Ranked` the bucket
        self.magnitude: dict[int, float] = {}  # |p|
        numbers = tuple(self.sampler.numbers) if self.prioritized else ()
        self.numbers = {n: float(getattr(self.sampler, n)) for n in numbers}
        self.max_priority = 1.0
        self.names = itertools.count()
        self.by_index: dict[tuple[int, int], int] = {}
        self.ticket: dict[int, int] = {}

    def copy(self) -> Model:
        """As it is now, on its own (what indices mean is shared: that never changes)."""
        other = copy.copy(self)
        other.history = [[dataclasses.replace(r) for r in rows] for rows in self.history]
        other.counters, other.leaf = dict(self.counters), dict(self.leaf)
        other.numbers, other.magnitude = dict(self.numbers), dict(self.magnitude)
        other.run, other.latest, other.came = dict(self.run), dict(self.latest), dict(self.came)
        return other

    # ------------------------------------------------------------------------------------------- writing

    def extend(self, rows: Fields, priority: np.ndarray | None = None, mask: np.ndarray | None = None) -> None:
        """Adds leaves `[N, E, ...]`, one row after the other."""
        drawable = {row.name for row in self.anchors()}
        self._see_versions(rows, mask)
        for n in range(next(iter(rows.values())).shape[0]):
            for e in range(self.lane_count):
                if mask is None or mask[n, e]:
                    given = None
                    if priority is not None:
                        given = abs(float(priority[n, e]))
                        if not np.isfinite(given):
                            self.counters["refused_nonfinite"] += 1
                            given = None
                    self._arrive(e, {k: np.array(x[n, e]) for k, x in rows.items()}, given)
        self._follow(drawable)

    def _arrive(self, lane: int, fields: Fields, given: float | None) -> None:
        past = self.history[lane]
        number = past[-1].number + 1 if past else 0
        slot = number % self.length * self.lane_count + lane
        row = Row(next(self.names), lane, number, slot, fields, given)
        self._place_in_episode(row, past[-1] if past else None)
        past.append(row)

    def _place_in_episode(self, row: Row, before: Row | None) -> None:
        row.end = any(bool(row.fields[name]) for name in self.ends)
        row.terminated = self.transitions and bool(row.fields[self.view.terminated])
        if self.next_step:
            row.reset = before is not None and before.end
            row.start = not row.reset and (before is None or before.reset)
        else:
            row.start = before is None or before.end
        if before is not None:
            crosses = self.kind == "Sequence" and self.view.boundary == "cross"
            row.step = 0 if row.start and not crosses else before.step + 1

    def _follow(self, before: set[int]) -> None:
        """Rows that are drawable now and were not `before` get their first priority."""
        now = self.anchors()
        if self.ages:
            for row in now:
                if row.name not in before:
                    self._stamp(row)
        if not self.prioritized:
            return
        largest, first = self.max_priority, max(self.leaf.values(), default=self._leaf(1.0))
        for name in before - {row.name for row in now}:
            del self.leaf[name], self.magnitude[name]
        for row in now:
            if row.name not in before:
                told = self._completed_by(row).given
                given = largest if told is None else told
                self.leaf[row.name], self.magnitude[row.name] = self._leaf(given), given
                if told is None and self.ranked and self.sampler.largest == "held":
                    self.leaf[row.name] = first
                self.max_priority = max(self.max_priority, given)
        self._hold()

    def _hold(self) -> None:
        """The largest priority, where it is that of the rows there are."""
        if self.prioritized and not self.ranked and self.sampler.largest == "held":
            self.max_priority = max(self.magnitude.values(), default=1.0)

    def _see_versions(self, rows: Fields, mask: np.ndarray | None = None) -> None:
        if self.ages and self.sampler.version is not None:
            said = rows[self.sampler.version]
            self.version = max([self.version, *(said if mask is None else said[mask]).reshape(-1).tolist()])

    def _stamp(self, row: Row) -> None:
        """The run that a new anchor belongs to."""
        run, stamp = self.latest.get(row.lane, (0, 0))
        came = self.came[row.lane] = self.came.get(row.lane, 0) + 1
        if self.sampler.version is None:
            run = stamp = (came - 1) // self.sampler.unit
        else:
            said = int(self._completed_by(row).fields[self.sampler.version])
            run, stamp = run + (said != stamp), said
        self.run[row.name] = self.latest[row.lane] = (run, stamp)

    def staleness_weight(self, row: Row) -> float:
        """What an anchor counts for; 0 where it is too stale, or of a run long forgotten."""
        sampler, (run, stamp), (newest, now) = self.sampler, self.run[row.name], self.latest[row.lane]
        staleness = max((now if sampler.version is None else self.version) - stamp, 0)
        remembered = sampler.runs or (sampler.maximum + 1 if sampler.version is None else max(64, sampler.maximum + 1))
        if staleness > sampler.maximum or newest - run >= remembered:
            return 0.0
        if sampler.decay == "inverse":
            return 1 / (1 + staleness)
        return 2 ** -(staleness / sampler.half_life) if sampler.decay == "exponential" else 1.0

    def chosen_from(self) -> list[Row]:
        """Anchors that the sampler would draw."""
        anchors = self.anchors()
        return [row for row in anchors if self.staleness_weight(row) > 0] if self.ages else anchors

    def _leaf(self, priority: float) -> float:
        if self.ranked:  # eight buckets an octave, those beyond 2^-32 and 2^32 thrown together
            octave = int(np.floor(np.log2(priority))) if priority > 0 else -99
            return float(np.clip((octave + 32) * 8 + int((priority / 2.0**octave - 1) * 8), 0, 511) + 1)
        leaf = (np.float64(priority) + self.numbers["eps"]) ** self.numbers["alpha"]
        return float(min(leaf, 2.0**100))

    def update_priority(self, indices: Iterable[tuple[int, int]], errors: np.ndarray) -> None:
        """Indices are (slot, ticket)."""
        drawable = {row.name for row in self.anchors()}
        for (slot, ticket), error in zip(indices, errors, strict=True):
            row = self.row_at(slot, ticket)
            if (slot, ticket) == (self.capacity, 0):
                continue
            if not np.isfinite(error):
                self.counters["refused_nonfinite"] += 1
            elif not 0 <= slot < self.capacity:
                self.counters["refused_out_of_range"] += 1
            elif row is None:
                self.counters["refused_stale"] += 1
            elif row.name not in drawable:
                self.counters["refused_closed"] += 1
            else:
                self.leaf[row.name] = self._leaf(abs(float(error)))
                self.magnitude[row.name] = abs(float(error))
                self.max_priority = max(self.max_priority, abs(float(error)))
        self._hold()

    def rebuild(self) -> None:
        """Leaves of all priorities by the numbers of now."""
        if not self.ranked:
            self.leaf = {name: self._leaf(p) for name, p in self.magnitude.items()}

    def update_rows(self, indices: Iterable[tuple[int, int]], fields: Fields) -> None:
        """Replaces leaves `[B, ...]` by name."""
        for i, (slot, ticket) in enumerate(indices):
            row = self.row_at(slot, ticket)
            if (slot, ticket) == (self.capacity, 0):
                continue
            if not 0 <= slot < self.capacity:
                self.counters["refused_out_of_range"] += 1
            elif row is None:
                self.counters["refused_stale"] += 1
            else:
                row.fields = row.fields | {k: np.array(x[i]) for k, x in fields.items()}

    def clear(self) -> None:
        """No rows; annealed numbers and counters stay."""
        self.history = [[] for _ in range(self.lane_count)]
        self.leaf, self.magnitude, self.max_priority = {}, {}, 1.0
        self.run, self.latest, self.came = {}, {}, {}

    def set(self, **numbers: float) -> None:
        """For leaves written from now on."""
        if self.ages:
            self.version = int(numbers["version"])
            return
        self.numbers.update({n: float(np.float32(x)) for n, x in numbers.items()})

    def convert(self, other: Any) -> Model:
        """The rows under another sampler or view; what came before a full lane's oldest row is not known any more."""
        model = Model(other, self.fields)
        model.counters = dict(self.counters)
        model.names, model.by_index, model.ticket = self.names, self.by_index, self.ticket
        for lane in range(self.lane_count):
            held = [dataclasses.replace(row, given=None) for row in self.held(lane)]
            full = len(held) == self.length
            for before, row in zip([None, *held], held, strict=False):
                model._place_in_episode(row, before)
                if before is None and full:
                    row.start = False
                    row.step = -1 if model.next_step else 0
            if full:
                held[0].reset = held[0].unknown = model.next_step  # it may be one
            model.history[lane] = held
        if model.ages and other.sampler.version is not None:
            kept = [row for rows in model.history for row in rows if not row.unknown]
            model.version = max([0, *(int(row.fields[other.sampler.version]) for row in kept)])
        model._follow(set())
        return model

    # ------------------------------------------------------------------------------------------- reading

    def held(self, lane: int) -> list[Row]:
        """The newest rows of a lane, oldest first."""
        return self.history[lane][-self.length :]

    @property
    def size(self) -> int:
        return sum(len(self.held(lane)) for lane in range(self.lane_count))

    def meet(self, slot: int, ticket: int, row: Row) -> None:
        """A verb named `row` so: it has no other index, and no other row has this one, ever."""
        assert slot == row.slot and ticket != 0
        assert self.ticket.setdefault(row.name, ticket) == ticket, "one row with two indices"
        assert self.by_index.setdefault((slot, ticket), row.name) == row.name, "two rows, one index"

    def row_at(self, slot: int, ticket: int) -> Row | None:
        """The row of an index, if it is still held."""
        row = self.in_slot(slot)
        return row if row is not None and self.by_index.get((slot, ticket)) == row.name else None

    def in_slot(self, slot: int) -> Row | None:
        """What lies in a slot now."""
        if not 0 <= slot < self.capacity:
            return None
        return next((r for r in self.held(slot % self.lane_count) if r.slot == slot), None)

    def by_age(self) -> list[list[Row | None]]:
        """`[L][E]`, oldest first, None past the newest."""
        lanes = [self.held(e) for e in range(self.lane_count)]
        return [[rows[i] if i < len(rows) else None for rows in lanes] for i in range(self.length)]

    def newest(self, n: int) -> list[list[Row | None]]:
        """`[n][E]`, newest last, None where there are fewer."""
        lanes = [self.held(e) for e in range(self.lane_count)]
        return [[rows[i] if -i <= len(rows) else None for rows in lanes] for i in range(-n, 0)]

    # ------------------------------------------------------------------------------------------- drawing

    def anchors(self) -> list[Row]:
        """Rows a draw may land on."""
        rows = [row for lane in range(self.lane_count) for row in self.held(lane)]
        if self.kind == "Row":
            return rows
        return [row for row in rows if (self._drawable(row) if self.transitions else self._window(row) is not None)]

    def _after(self, row: Row, steps: int) -> Row | None:
        """The row `steps` later in the lane, if it has come."""
        past = self.history[row.lane]
        i = row.number + steps - past[0].number
        return past[i] if 0 <= i < len(past) else None

    def _drawable(self, row: Row) -> bool:
        view = self.view
        if row.reset:
            return False
        oldest, frame = self.held(row.lane)[0].number, row
        for _ in range((view.stack or 1) - 1):
            if frame.start:
                break
            behind = self._after(frame, -1)
            if behind is None or behind.number < oldest or behind.reset:
                return False
            frame = behind
        for step in range(view.n_step):
            here = self._after(row, step)
            if here is None:
                return False
            if here.end:
                if here.terminated or view.final_observation is not None:
                    return True
                if self.next_step:
                    return self._after(here, 1) is not None
                return step > 0
        return self._after(row, view.n_step) is not None

    def _window(self, row: Row) -> list[Row | None] | None:
        """The rows of the window or episode that a row stands for, None past its ends; None: it cannot be drawn."""
        view = self.view
        if row.unknown:
            return None
        if self.kind == "Episode":
            return self._whole(row) if row.start else None
        offsets = [(k - view.at) * view.dilation for k in range(view.length)]
        if row.step % view.stride:
            return None
        if view.boundary == "mask":
            if row.reset:
                return None
            rows = {0: row}
            for direction in (-1, 1):
                offset = 0
                while offset != (offsets[0] if direction < 0 else offsets[-1]):
                    if rows[offset].start if direction < 0 else self._is_last(rows[offset]):
                        break
                    here = self._after(row, offset + direction)
                    if here is None or here.unknown or here.number < self.held(row.lane)[0].number:
                        return None
                    offset += direction
                    rows[offset] = here
            return [rows.get(offset) for offset in offsets]
        rows = {0: row}
        for offset in range(1, offsets[-1] + 1):
            here = self._after(row, offset)
            if here is None or (here.start and view.boundary == "stop"):
                return None
            rows[offset] = here
        if view.boundary == "stop" and any(r.reset for offset, r in rows.items() if offset in (0, *range(offsets[-1]))):
            return None  # nothing comes after a reset row, nor is it a window of its own
        return [rows[offset] for offset in offsets]

    def _is_last(self, row: Row) -> bool:
        """Whether its episode has no row after it."""
        return row.reset if self.next_step else row.end

    def _whole(self, row: Row) -> list[Row | None] | None:
        """An episode from its first row on."""
        rows: list[Row | None] = []
        here: Row | None = row
        while here is not None and len(rows) < self.view.max_length:
            rows.append(here)
            if self._is_last(here):
                return rows + [None] * (self.view.max_length - len(rows))
            here = self._after(here, 1)
        return rows if self.view.longer == "cut" and len(rows) == self.view.max_length else None

    def _completed_by(self, row: Row) -> Row:
        """The row that brought an anchor's priority."""
        if not self.windows:
            return row
        window = self._window(row)
        assert window is not None
        if self.kind == "Sequence" and self.view.boundary == "mask":  # its last row may lie between two of the window
            here = row
            for _ in range((self.view.length - 1 - self.view.at) * self.view.dilation):
                if self._is_last(here):
                    break
                here = self._row_after(here, 1)
            return here
        return [r for r in window if r is not None][-1]

    def _in_window(self, row: Row) -> Fields:
        """What a sample holds for a window."""
        view, window = self.view, self._window(row)
        assert window is not None
        there = np.array([r is not None for r in window])
        first, learn = np.zeros(len(window), bool), np.zeros(len(window), bool)
        apart = view.dilation if self.kind == "Sequence" else 1
        burn_in, bootstrap = (view.burn_in, view.bootstrap) if self.kind == "Sequence" else (0, 0)
        for k, here in enumerate(window):
            if here is None:
                continue
            since = [self._after(here, -i) for i in range(apart if k else 1)]
            first[k] = any(r is not None and r.start for r in since)
            learn[k] = burn_in <= k < len(window) - bootstrap and not here.reset
        blank = {n: np.zeros(shape, dtype) for n, (shape, dtype) in self.fields.items()}
        leaves = {n: np.stack([blank[n] if r is None else r.fields[n] for r in window]) for n in self.fields}
        return leaves | {"mask": there, "is_first": first, "learning_mask": learn}

    def episode_of(self, row: Row) -> int:
        """A name for a row's episode: the oldest number known of it."""
        here = row
        while not here.start and (behind := self._after(here, -1)) is not None:
            here = behind
        return here.number

    def probability(self, row: Row) -> float:
        """Chance of a drawable row in one draw."""
        if getattr(self.sampler, "over", "") == "episodes":
            episodes = [(r.lane, self.episode_of(r)) for r in self.anchors()]
            return 1 / len(set(episodes)) / episodes.count((row.lane, self.episode_of(row)))
        if self.ages:
            return self.staleness_weight(row) / sum(map(self.staleness_weight, self.anchors()))
        if not self.prioritized:
            return 1 / len(self.anchors())
        number, share = len(self.leaf), self.numbers.get("uniform", 0.0)
        mass = sum(self.leaf.values())
        chance = self.leaf[row.name] / mass if mass > 0 else 1 / number
        if self.ranked:
            terms = np.arange(1, number + 1, dtype=np.float64) ** -self.numbers["alpha"]
            buckets = list(self.leaf.values())
            above = sum(b > self.leaf[row.name] for b in buckets)
            tied = buckets.count(self.leaf[row.name])
            chance = terms[above : above + tied].mean() / terms.sum()
        return float((1 - share) * chance + share / number)

    def weights(self, rows: list[Row], beta: float | None = None) -> list[float]:
        """Importance weights of a batch."""
        if not self.prioritized:
            return [1.0] * len(rows)
        beta = self.numbers["beta"] if beta is None else beta
        number = len(self.anchors())
        raw = [(number * self.probability(row)) ** -beta for row in rows]
        top = 1.0
        if self.sampler.normalize == "batch":
            top = max(raw)
        elif self.sampler.normalize == "buffer":
            chances = [self.probability(row) for row in self.anchors()]
            top = (number * min(p for p in chances if p > 0)) ** -beta
        return [w / top for w in raw]

    def content(self, row: Row) -> Fields:
        """What a sample holds for this anchor, by name; rewards in float64."""
        if self.windows:
            return self._in_window(row)
        return self.transition(row) if self.transitions else dict(row.fields)

    def transition(self, row: Row) -> Fields:
        """The n-step transition with stacks that begins at `row`."""
        view = self.view
        has_final = self.next_step or view.final_observation is not None
        counted: list[Row] = []  # whose rewards make the return
        for step in range(view.n_step):
            here = self._row_after(row, step)
            if not here.end or here.terminated or has_final:
                counted.append(here)
            if here.end:
                break
        last, final = here, None  # the newest frame of the next observation
        if not here.end:
            last = self._row_after(here, 1)
        elif view.final_observation is not None:
            final = here.fields[view.final_observation]
        elif self.next_step and not here.terminated:
            last = self._row_after(here, 1)
        gamma = np.float64(view.gamma)
        rewards = [gamma**i * r.fields[view.reward].astype(np.float64) for i, r in enumerate(counted)]
        others = (view.observation, view.action, view.reward, view.final_observation)
        return {
            "obs": self._stack(row, None),
            "action": row.fields[view.action],
            "reward": np.sum(rewards, axis=0),
            "discount": np.float64(0) if counted[-1].terminated else gamma ** len(counted),
            "next_obs": self._stack(last, final),
            **{k: x for k, x in row.fields.items() if k not in others},
        }

    def _row_after(self, row: Row, steps: int) -> Row:
        found = self._after(row, steps)
        assert found is not None, "not drawable"
        return found

    def _stack(self, row: Row, final: np.ndarray | None) -> np.ndarray:
        """The newest frames of the episode up to `row`, and `final` after it."""
        view = self.view
        frames, here = [row.fields[view.observation]], row
        while not here.start and len(frames) < (view.stack or 1):
            here = self._row_after(here, -1)
            frames.insert(0, here.fields[view.observation])
        if final is not None:
            frames.append(final)
        if view.stack is None:
            return frames[-1]
        first = frames[0] if view.pad == "repeat" else np.zeros_like(frames[0])
        return np.stack(([first] * view.stack + frames)[-view.stack :])

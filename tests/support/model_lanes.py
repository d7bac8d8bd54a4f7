"""Transitions, windows and episodes in plain Python, computed from the lists of all rows that ever arrived."""

import dataclasses

import numpy as np

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
    cut: bool = False  # its episode ends with it, and its final observation is unknown
    start: bool = False
    reset: bool = False  # next-step autoreset: holds the final observation only
    # rows of its episode before it (of its lane, where windows cross ends); after a conversion those known
    step: int = 0
    unknown: bool = False  # may be a row after an end, or not


class Lanes:
    """All rows of a buffer's lanes; `fields` are the shape and dtype of each leaf by name."""

    def __init__(self, buffer, fields):
        self.buffer, self.fields, self.view = buffer, dict(fields), buffer.view
        self.capacity, self.lane_count = buffer.capacity, buffer.lanes or 1
        self.length = self.capacity // self.lane_count
        self.kind = type(self.view).__name__
        self.transitions, self.windows = self.kind == "Transition", self.kind in ("Sequence", "Episode")
        self.next_step = self.kind != "Row" and self.view.autoreset == "next_step"
        self.ends = tuple(buffer.episode_end)
        if self.transitions:
            self.ends += tuple(n for n in (self.view.terminated, self.view.truncated) if n is not None)
        if self.windows:
            self.ends += self.view.episode_end
        self.episode = getattr(self.view, "episode", None)
        self.history = [[] for _ in range(self.lane_count)]

    def cut_after(self, row):
        """The next row begins an episode, if it does not do so anyway."""
        if not (row.reset and not row.end if self.next_step else row.end):
            row.end = row.cut = True

    def _place_in_episode(self, row, before):
        if self.episode and before is not None and before.fields[self.episode] != row.fields[self.episode]:
            self.cut_after(before)
        row.end = row.cut or any(bool(row.fields[name]) for name in self.ends)
        ends = self.transitions and self.view.terminated
        if self.kind == "Sequence" and self.view.terminated in self.view.episode_end:
            ends = self.view.terminated
        row.terminated = bool(ends and row.fields[ends])
        if self.next_step:
            row.reset = before is not None and before.end and not before.cut
            row.start = not row.reset and (before is None or before.reset or before.cut)
        else:
            row.start = before is None or before.end
        if before is not None:
            crosses = self.kind == "Sequence" and self.view.boundary == "cross"
            row.step = 0 if row.start and not crosses else before.step + 1

    def held(self, lane):
        return self.history[lane][-self.length :]

    def anchors(self):
        rows = [row for lane in range(self.lane_count) for row in self.held(lane)]
        if self.kind == "Row":
            return rows
        return [row for row in rows if (self._drawable(row) if self.transitions else self._window(row) is not None)]

    def _after(self, row, steps):
        past = self.history[row.lane]
        i = row.number + steps - past[0].number
        return past[i] if 0 <= i < len(past) else None

    def _drawable(self, row):
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
                if self.next_step and not here.cut:
                    return self._after(here, 1) is not None
                if here.terminated:
                    return True
                return step > 0 or (view.final_observation is not None and not here.cut)
        return self._after(row, view.n_step) is not None

    def _window(self, row):
        """The rows of the window or episode that a row stands for, None past its ends; None: it cannot be drawn."""
        view = self.view
        if row.unknown:
            return None
        if self.kind == "Episode":
            return self._whole(row) if row.start else None
        window = self._all_windows(row)
        regular = view.length - view.burn_in - view.bootstrap
        # With "cross" all rows of a longer window may be reset rows, if reset rows end episodes, which no environment does.
        exact = view.boundary != "cross" or (self.next_step and regular == 1)
        return None if window is None or (exact and not any(self._learnt(window)[1])) else window

    def _all_windows(self, row):
        """Also those that learn nothing."""
        view = self.view
        offsets = [(k - view.at) * view.dilation for k in range(view.length)]
        last = self._after(row, offsets[-1])
        closes = (
            (view.episode_end or view.episode) and view.boundary != "cross" and (view.boundary == "stop" or view.at)
        )
        if row.step % view.stride and not (closes and last is not None and self._is_last(last)):
            return None
        if view.boundary == "mask":
            before = self._after(row, -1)
            if row.reset and before is not None and before.reset:
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

    def _is_last(self, row):
        return row.reset or row.cut if self.next_step else row.end

    def _whole(self, row):
        rows = []
        here = row
        while here is not None and len(rows) < self.view.max_length:
            rows.append(here)
            if self._is_last(here):
                return rows + [None] * (self.view.max_length - len(rows))
            here = self._after(here, 1)
        return rows if self.view.longer == "cut" and len(rows) == self.view.max_length else None

    def _completed_by(self, row):
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

    def _in_window(self, row):
        window = self._window(row)
        assert window is not None
        there = np.array([r is not None for r in window])
        first, learn = self._learnt(window)
        blank = {n: np.zeros(shape, dtype) for n, (shape, dtype) in self.fields.items()}
        leaves = {n: np.stack([blank[n] if r is None else r.fields[n] for r in window]) for n in self.fields}
        return leaves | {"mask": there, "is_first": first, "learning_mask": learn}

    def _learnt(self, window):
        """Which rows begin an episode, and which are learnt."""
        view = self.view
        first, learn = np.zeros(len(window), bool), np.zeros(len(window), bool)
        apart = view.dilation if self.kind == "Sequence" else 1
        burn_in, bootstrap = (view.burn_in, view.bootstrap) if self.kind == "Sequence" else (0, 0)
        for k, here in enumerate(window):
            if here is None:
                continue
            since = [self._after(here, -i) for i in range(apart if k else 1)]
            first[k] = any(r is not None and r.start for r in since)
            warm = k >= burn_in or first[: k + 1].any()
            followed = k + bootstrap < len(window) and window[k + bootstrap] is not None
            ended = any(r is not None and r.terminated for r in window[k:])
            learn[k] = warm and (followed or ended) and not here.reset
        return first, learn

    def episode_of(self, row):
        """A name for a row's episode: the oldest number known of it."""
        here = row
        while not here.start and (behind := self._after(here, -1)) is not None:
            here = behind
        return here.number

    def content(self, row):
        if self.windows:
            return self._in_window(row)
        return self.transition(row) if self.transitions else dict(row.fields)

    def transition(self, row):
        view = self.view
        has_final = self.next_step or view.final_observation is not None
        counted = []  # whose rewards make the return
        for step in range(view.n_step):
            here = self._row_after(row, step)
            if not here.end or here.terminated or (has_final and not here.cut):
                counted.append(here)
            if here.end:
                break
        last, final = here, None  # the newest frame of the next observation
        if not here.end:
            last = self._row_after(here, 1)
        elif here.cut:
            pass
        elif view.final_observation is not None:
            final = here.fields[view.final_observation]
        elif self.next_step:
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

    def _row_after(self, row, steps):
        found = self._after(row, steps)
        assert found is not None, "not drawable"
        return found

    def _stack(self, row, final):
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

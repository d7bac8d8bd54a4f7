"""`Consume(order="fifo")`: windows in order of arrival, none lost, and new rows refused where there is no room."""

import functools
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume
from fbuf.views import Row, Sequence
from tests.support.refusals import raises

EXAMPLE = {"t": np.int32(0), "terminated": np.bool_(False)}
ROWS, BATCH = 5, 4


class Queue:
    """Windows of `window` rows, one for every `stride` rows of an episode and one at its end, in order of their last rows."""

    def __init__(self, length, lanes, times, window, stride):
        self.length, self.times, self.window, self.stride = length, times, window, stride
        self.rows = [[] for _ in range(lanes)]  # all that were accepted
        self.begun = [0] * lanes  # where the running episode begins
        self.waiting = deque()  # lane, first row, draws left
        self.refused = 0

    def room(self, lane):
        """Rows of the lane before the first one that a window needs, or will need, may be overwritten."""
        count, begun = len(self.rows[lane]), self.begun[lane]
        unfinished = [max(begun, count - self.window + 1)]  # the next row may end the episode
        first = min([w[1] for w in self.waiting if w[0] == lane] + unfinished, default=count)
        return self.length - (count - first)

    def extend(self, t, end, mask):
        if self.window > 1:  # windows of one call are ordered by their rows without the masked ones
            order = np.argsort(~mask, axis=0, stable=True)
            t, end, mask = (np.take_along_axis(x, order, axis=0) for x in (t, end, mask))
        room, lanes = [self.room(lane) for lane in range(len(self.rows))], len(self.rows)
        refused = [0] * lanes
        for n in range(len(t)):
            for lane in range(lanes):
                if mask[n, lane] and room[lane] == 0:
                    refused[lane] += 1
                elif mask[n, lane]:
                    room[lane] -= 1
                    self._add(lane, int(t[n, lane]), bool(end[n, lane]))
        for lane in range(lanes):
            if refused[lane]:  # no window spans the gap
                if (len(self.rows[lane]) - self.window - self.begun[lane]) % self.stride:
                    self._close(lane)
                self.begun[lane] = len(self.rows[lane])
        self.refused += sum(refused)

    def _add(self, lane, t, end):
        self.rows[lane].append(t)
        count = len(self.rows[lane])
        first = count - self.window
        if (first - self.begun[lane]) % self.stride == 0 or (end and self.window > 1):
            self._close(lane)
        if end and self.window > 1:
            self.begun[lane] = count

    def _close(self, lane):
        """Add the window that ends with the newest row, if it is of one episode."""
        first = len(self.rows[lane]) - self.window
        if first >= self.begun[lane]:
            self.waiting.append([lane, first, self.times])

    def sample(self, number):
        drawn = list(self.waiting)[:number]
        for one in drawn:
            one[2] -= 1
        while self.waiting and not self.waiting[0][2]:
            self.waiting.popleft()
        return [self.rows[lane][first : first + self.window] for lane, first, _ in drawn]

    def clear(self):
        self.rows, self.begun = [[] for _ in self.rows], [0] * len(self.rows)
        self.waiting.clear()


def buffer_of(length, lanes, times=1, window=1, stride=1, **own):
    ends = ("terminated",)
    view = Row() if window == 1 else Sequence(window, stride=stride, episode_end=ends, autoreset="same_step")
    return fbuf.Buffer(length * (lanes or 1), lanes=lanes, view=view, sampler=Consume(times, "fifo"), **own)


@functools.cache
def methods(buffer):
    """Return `extend`, `sample`, both in one step, all with donated states, and `can_add`."""

    def extend(state, rows, mask):
        return buffer.extend(state, rows, mask=mask)

    def sample(state):
        return buffer.sample(state, jax.random.key(0), BATCH)

    def can_add(state):
        return jax.vmap(lambda n: buffer.can_add(state, n))(jnp.arange(buffer.geometry.length + 2))

    calls = extend, sample, lambda state, rows, mask: sample(extend(state, rows, mask))
    return *(jax.jit(call, donate_argnums=0) for call in calls), jax.jit(can_add)


class Trial:
    """A buffer and the queue, in step."""

    def __init__(self, buffer, seed):
        length, lanes, view = buffer.geometry.length, buffer.geometry.lanes, buffer.view
        window, stride = (view.length, view.stride) if isinstance(view, Sequence) else (1, 1)
        assert isinstance(buffer.sampler, Consume)
        self.buffer, self.queue = buffer, Queue(length, lanes, buffer.sampler.times, window, stride)
        self.state, self.rng, self.next = buffer.init(EXAMPLE), np.random.default_rng(seed), 0
        self.extend, self.sample, self.step, self.can_add = methods(buffer)

    def rows(self):
        shape = (ROWS, len(self.queue.rows))
        t = np.arange(self.next, self.next + shape[0] * shape[1], dtype=np.int32).reshape(shape)
        self.next += t.size
        kept = (np.arange(ROWS) < self.rng.integers(ROWS + 1))[:, None] & (
            self.rng.random(shape) < self.rng.choice([0.6, 1])
        )
        return {"t": t, "terminated": self.rng.random(shape) < 0.15}, kept

    def given(self, tree):
        return tree if self.buffer.lanes else jax.tree.map(lambda x: x[:, 0], tree)

    def drawn(self, batch):
        waiting = len(self.queue.waiting)
        expected = self.queue.sample(BATCH)
        mask, data = np.asarray(batch.mask), np.asarray(batch.data["t"]).reshape(BATCH, -1)
        assert mask.tolist() == [i < len(expected) for i in range(BATCH)]
        assert data[mask].tolist() == expected and not data[~mask].any()
        assert (np.asarray(batch.probability)[mask] == np.float32(1) / np.float32(max(waiting, 1))).all()

    def check(self):
        stats = self.buffer.stats(self.state)
        assert int(stats["anchors_left"]) == len(self.queue.waiting)
        assert int(stats["refused_rows"]) == self.queue.refused
        room = min(self.queue.room(lane) for lane in range(len(self.queue.rows)))
        assert self.can_add(self.state).tolist() == [n <= room for n in range(self.queue.length + 2)]
        assert bool(self.buffer.can_sample(self.state)) == bool(self.queue.waiting)

    def run(self, steps):
        for _ in range(steps):
            kind = self.rng.choice(["extend", "sample", "step", "clear"], p=[0.5, 0.2, 0.27, 0.03])
            if kind == "clear":
                self.state = self.buffer.clear(self.state)
                self.queue.clear()
            elif kind == "sample":
                self.state, batch = self.sample(self.state)
                self.drawn(batch)
            else:
                rows, mask = self.rows()
                given = self.given(rows), self.given(mask)
                self.queue.extend(rows["t"], rows["terminated"], mask)
                if kind == "extend":
                    self.state = self.extend(self.state, *given)
                else:
                    self.state, batch = self.step(self.state, *given)
                    self.drawn(batch)
            self.check()


@pytest.mark.parametrize("settings", [(7, 3, 1), (12, 2, 2, 3, 3)], ids=["rows", "trajectories"])
def test_programs(settings):
    buffer = buffer_of(*settings)
    for seed in range(2):
        Trial(buffer, seed).run(100)


def test_what_it_refuses():
    raises(ValueError, 'Consume: order is \'lifo\'; expected "random" or "fifo"', Consume, order="lifo")
    parts = {"sampler": Consume(order="fifo"), "writer": fbuf.writers.Reservoir()}
    raises(ValueError, "needs rows to be replaced oldest first", fbuf.Buffer, 8, **parts)
    full = fbuf.Buffer(2, sampler=Consume(order="fifo"))
    state, said = full.init(np.int32(0)), "1 rows were not stored: they found no room.*can_add"
    raises(ValueError, said, fbuf.checked(full.extend), state, np.arange(3, dtype=np.int32))
    assert bool(fbuf.Buffer(2).can_add(fbuf.Buffer(2).init(np.int32(0)), 5))

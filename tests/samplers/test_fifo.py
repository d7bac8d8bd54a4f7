"""`Consume(order="fifo")`: windows in order of arrival, none lost, and new rows refused where there is no room."""

import collections
import functools
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume
from fbuf.views import Episode, Row, Sequence, Transition
from tests.support import datasets_oracle as oracle
from tests.support.epoch import FIELDS, rows_of
from tests.support.inplace import assert_draw_write_draw
from tests.support.refusals import raises
from tests.support.tables import by_tier

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


@pytest.mark.parametrize("settings", by_tier(((7, 3, 1),), more=[((12, 2, 2, 3, 3),)]))
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


FIFO = Consume(order="fifo")


@pytest.mark.more
@pytest.mark.parametrize(
    "settings", [(6, None, 3), (12, 2, 1, 4, 2), (12, None, 1, 3, 1), (9, 3, 1, 2, 5), (5, 2, 1, 5, 5)], ids=str
)
def test_programs_of_overlapping_and_distant_windows(settings):
    """Overlapping windows, windows with gaps between them, and one that fills a lane."""
    buffer = buffer_of(*settings)
    for seed in range(3):
        Trial(buffer, seed).run(60)


@pytest.mark.more
def test_text_that_is_refused_takes_no_room():
    """Prompts in a queue: those without room are not stored, and evict none of those that wait."""
    replay = fbuf.Replay(fbuf.Buffer(4, storage=fbuf.storages.Ragged(), sampler=FIFO), {"text": ""})
    buffer, state = replay.buffer, replay.state
    waiting = []
    for step in range(40):
        texts = [f"{step}/{i}" for i in range(3)]
        state = buffer.extend(state, {"text": texts})
        waiting += texts[: 4 - len(waiting)]
        state, batch = buffer.sample(state, jax.random.key(0), 2)
        assert batch.lazy["text"][:2] == waiting[:2]
        waiting = waiting[2:]
    assert int(buffer.stats(state)["expired_rows"]) == 0 < int(buffer.stats(state)["refused_rows"])


@pytest.mark.more
def test_blocks_of_consumed_rows_make_room():
    """A table of blocks with room for fewer rows than the capacity: what waits is kept, what is consumed is dropped."""
    example = {"obs": np.zeros((24, 12), np.uint8)}
    storage = fbuf.storages.Deduplicated(keys=("obs",), blocks=64)
    buffer = fbuf.Buffer(64, storage=storage, sampler=FIFO)
    state, rng, waiting = buffer.init(example), np.random.default_rng(0), collections.deque[np.ndarray]()
    for _ in range(30):
        rows = rng.integers(0, 256, (2, 24, 12)).astype(np.uint8)
        waiting.extend(rows)
        state = buffer.extend(state, {"obs": rows})
        state, batch = buffer.sample(state, jax.random.key(0), 2)
        assert (np.asarray(batch.data["obs"]) == [waiting.popleft(), waiting.popleft()]).all()
    stats = buffer.stats(state)
    assert int(stats["retired_rows"]) > 0 and int(stats["refused_rows"]) == int(stats["draws_refused"]) == 0


VIEWS = {
    "steps": Transition(n_step=3, stack=2, autoreset="same_step"),
    "resets": Transition(n_step=2, autoreset="next_step"),
    "mask": Sequence(3, boundary="mask", autoreset="same_step"),
    "episodes": Episode(6, longer="cut", autoreset="same_step"),
    "next_step": Sequence(3, stride=3, autoreset="next_step"),
}


@pytest.mark.more
@pytest.mark.parametrize("view", VIEWS)
def test_nothing_is_lost_through_any_view(view):
    """Rows are added where there is room: each anchor of the whole stream is drawn once, those of a lane in order."""
    small = fbuf.Buffer(2 * 12, lanes=2, view=VIEWS[view], sampler=FIFO)
    whole = fbuf.Buffer(2 * 1200, lanes=2, view=VIEWS[view])
    example = {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()}
    state, every, rng = small.init(example), whole.init(example), np.random.default_rng(0)
    extend, sample = jax.jit(small.extend, donate_argnums=0), jax.jit(small.sample, static_argnums=2, donate_argnums=0)
    extend_whole = jax.jit(whole.extend, donate_argnums=0)
    drawn, idle = [], 0
    for step in range(300):
        rows = rows_of(rng, 3, 2)
        rows["action"] = np.arange(6, dtype=np.int32).reshape(3, 2) + 6 * step
        if bool(small.can_add(state, 3)):
            state, every, idle = extend(state, rows), extend_whole(every, rows), 0
        else:
            idle += 1
        state, batch = sample(state, jax.random.key(0), 2)
        drawn += np.asarray(batch.data["action"])[np.asarray(batch.mask)].tolist()
        assert idle < 12  # it never gets stuck
    while bool(small.can_sample(state)):
        state, batch = sample(state, jax.random.key(0), 2)
        drawn += np.asarray(batch.data["action"])[np.asarray(batch.mask)].tolist()
    replay = fbuf.Replay(whole, example)
    replay._engine.state = every
    expected = [b for batch in replay.epoch(64, shuffle=False) for b in np.asarray(batch.data["action"]).tolist()]
    first = [one if isinstance(one, int) else one[0] for one in drawn]
    for lane in (0, 1):
        of_lane = [i for i, t in enumerate(first) if t % 2 == lane]
        assert [first[i] for i in of_lane] == sorted(first[i] for i in of_lane)
        assert [drawn[i] for i in of_lane] == [e for e in expected if (e if isinstance(e, int) else e[0]) % 2 == lane]
    assert int(small.stats(state)["refused_rows"]) == 0 and len(drawn) > 100


@pytest.mark.more
def test_a_saved_queue_goes_on(tmp_path):
    trial = Trial(buffer_of(12, 2, 2, 3, 3), 0)
    trial.run(20)
    fbuf.save(tmp_path / "queue", trial.buffer, trial.state)
    _, trial.state = fbuf.load(tmp_path / "queue", trial.buffer)
    trial.run(20)
    with pytest.raises(ValueError, match=r"the state of Consume\(.*order='fifo'\) cannot be resized"):
        fbuf.load(tmp_path / "queue", buffer_of(13, 2, 2, 3, 3), resize=True)


@pytest.mark.more
def test_converted_rows_and_data_sets_are_read_once_in_order(tmp_path):
    uniform, queue = fbuf.Buffer(8), fbuf.Buffer(8, sampler=FIFO)
    state = uniform.extend(uniform.init(np.int32(0)), np.arange(11, dtype=np.int32))
    state = uniform.convert(queue, state)
    assert queue.sample(state, jax.random.key(0), 8)[1].data.tolist() == list(range(3, 11))
    rows = {"t": np.arange(6, dtype=np.int32)}
    buffer, state = oracle.from_arrays(rows, path=tmp_path / "six", episode_end=(), view=Row(), sampler=FIFO)
    replay = fbuf.Replay(buffer, state)
    assert replay.limit is None  # it is read-only, so no call waits
    assert [replay.sample(4).data["t"].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 0, 0]]
    mixture = fbuf.Mixture({"fresh": queue, "old": uniform}, fractions={"fresh": 0.5, "old": 0.5})
    eight, got = {"t": np.arange(8, dtype=np.int32)}, []
    state = {name: buffer.extend(buffer.init({"t": np.int32(0)}), eight) for name, buffer in mixture.members}
    for _ in range(2):
        state, batch = mixture.sample(state, jax.random.key(0), 8)
        got += np.asarray(batch.data["t"])[np.asarray(batch.index.source) == 0].tolist()
    assert got == list(range(8))


@pytest.mark.more
@pytest.mark.in_place
def test_steps_are_in_place():
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=Consume(2, "fifo"), view=Sequence(3, stride=3, episode_end=()))
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()}, jit=False)

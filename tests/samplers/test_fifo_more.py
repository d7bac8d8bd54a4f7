"""More of `Consume(order="fifo")`: other windows, views, storages, saved and converted states, in place."""

import collections

import jax
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume
from fbuf.views import Episode, Row, Sequence, Transition
from tests.samplers.test_fifo import Trial, buffer_of
from tests.support import datasets_oracle as oracle
from tests.support.epoch import FIELDS, rows_of
from tests.support.inplace import assert_draw_write_draw

pytestmark = pytest.mark.more

FIFO = Consume(order="fifo")


@pytest.mark.parametrize(
    "settings", [(6, None, 3), (12, 2, 1, 4, 2), (12, None, 1, 3, 1), (9, 3, 1, 2, 5), (5, 2, 1, 5, 5)], ids=str
)
def test_programs(settings):
    """Overlapping windows, windows with gaps between them, and one that fills a lane."""
    buffer = buffer_of(*settings)
    for seed in range(3):
        Trial(buffer, seed).run(60)


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
    replay._state = every
    expected = [b for batch in replay.epoch(64, shuffle=False) for b in np.asarray(batch.data["action"]).tolist()]
    first = [one if isinstance(one, int) else one[0] for one in drawn]
    for lane in (0, 1):
        of_lane = [i for i, t in enumerate(first) if t % 2 == lane]
        assert [first[i] for i in of_lane] == sorted(first[i] for i in of_lane)
        assert [drawn[i] for i in of_lane] == [e for e in expected if (e if isinstance(e, int) else e[0]) % 2 == lane]
    assert int(small.stats(state)["refused_rows"]) == 0 and len(drawn) > 100


def test_a_saved_queue_goes_on(tmp_path):
    trial = Trial(buffer_of(12, 2, 2, 3, 3), 0)
    trial.run(20)
    fbuf.save(tmp_path / "queue", trial.buffer, trial.state)
    _, trial.state = fbuf.load(tmp_path / "queue", trial.buffer)
    trial.run(20)
    with pytest.raises(ValueError, match=r"the state of Consume\(.*order='fifo'\) cannot be resized"):
        fbuf.load(tmp_path / "queue", buffer_of(13, 2, 2, 3, 3), resize=True)


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


@pytest.mark.in_place
def test_steps_are_in_place():
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=Consume(2, "fifo"), view=Sequence(3, stride=3, episode_end=()))
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()}, jit=False)

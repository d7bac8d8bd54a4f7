"""`storages.Ragged`: any history of lanes and sizes, growth with every sampler and view, and unlimited replays."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Ragged, Zstd
from fbuf.views import Episode, Row, Sequence, Transition
from tests.more.storages.test_ragged import (  # noqa: F401
    MAXIMUM,
    PADDED,
    test_a_donated_step_copies_nothing,
    test_batches_are_those_of_device,
)
from tests.support.fixtures import fixed
from tests.support.ragged import check_growth, check_history, same

view = fixed(Row())
case = fixed((Epoch(), 2), (Prioritized(), None))


@given(
    seed=st.integers(0, 2**32 - 1),
    lanes=st.sampled_from([None, 1, 3]),
    codec=st.sampled_from([None, Zstd(3)]),
    sizes=st.lists(st.sampled_from([0, 1, 2, 5, 9]), min_size=1, max_size=6),
    columns=st.booleans(),
)
def test_rows_are_those_of_a_plain_list(seed: int, lanes: int | None, codec: Any, sizes: Any, columns: bool) -> None:
    check_history(seed, lanes, codec, sizes, columns, masked=False)


SAMPLERS = [
    Uniform(),
    Uniform(over="episodes"),
    Prioritized(),
    Prioritized(largest="held", uniform=0.2, normalize="buffer"),
    Epoch(),
    Consume(2),
    Staleness(4, unit=3),
    Ranked(uniform=0.2),
]
VIEWS = [
    Row(),
    Transition(observation="id", n_step=2, autoreset="same_step"),
    Sequence(3, autoreset="same_step"),
    Sequence(3, boundary="mask", autoreset="same_step"),
    Episode(4, autoreset="same_step"),
]


@pytest.mark.parametrize(("sampler", "view"), list(itertools.product(SAMPLERS, VIEWS)))
def test_a_grown_buffer_is_one_that_was_larger_from_the_start(sampler: Any, view: Any) -> None:
    check_growth(sampler, view)


def test_unlimited_replay() -> None:
    replay = fbuf.Replay(
        fbuf.Buffer(capacity=4, storage=Ragged(), sampler=Prioritized()), {"text": "", "x": 0.0}, unlimited=True
    )
    index = None
    for i in range(0, 21, 3):
        replay.extend([{"text": str(i + j), "x": float(i + j)} for j in range(3)], mask=np.array([True, i != 9, True]))
        index = index or replay.last(1).index
        replay.sample(2)
    replay.extend([{"text": f"+{j}", "x": 0.0} for j in range(70)])
    want = [str(i) for i in range(21) if i != 10] + [f"+{j}" for j in range(70)]
    assert len(replay) == 90 and replay.buffer.capacity == 128
    assert [t for t in replay.rows().lazy["text"] if t is not None] == want
    assert replay.get(index).lazy["text"] == ["2"]
    replay.update_priority(index, np.array([50.0], np.float32))
    replay.grow(capacity=200)
    assert replay.sample(64).lazy["text"].count("2") > 2
    replay.clear()
    replay.add({"text": "new", "x": 1})
    assert replay.rows().lazy["text"][0] == "new"


def test_windows_hold_ragged_rows() -> None:
    storage = Ragged(keys=("obs",))
    example = {"obs": np.zeros(0, np.int32), "text": "", "terminated": False, "truncated": False}
    for view, lead in (
        (Sequence(3, autoreset="same_step"), (5, 3)),
        (Sequence(3, boundary="mask", autoreset="same_step"), (5, 3)),
        (Episode(4, autoreset="same_step"), (5, 4)),
    ):
        buffer = fbuf.Buffer(capacity=24, lanes=2, storage=storage, view=view)
        rows = [
            [
                {"obs": np.arange(t, dtype=np.int32), "text": f"{e}.{t}", "terminated": t % 4 == 3, "truncated": False}
                for e in range(2)
            ]
            for t in range(8)
        ]
        state = buffer.extend(buffer.init(example), rows)
        state, batch = buffer.sample(state, jax.random.key(0), 5)
        assert batch.lazy.shape == lead
        there = np.asarray(batch.data["mask"])
        assert (batch.lazy.present == there).all()
        for text, obs, mask, first in zip(
            batch.lazy["text"], batch.lazy["obs"], there, batch.data["is_first"], strict=True
        ):
            steps = [int(t.split(".")[1]) for t in text if t is not None]
            assert steps == list(range(steps[0], steps[0] + mask.sum()))
            assert [len(o) for o in obs if o is not None] == steps
            assert all(steps[i] % 4 == 0 for i in np.flatnonzero(first[mask]))
        assert "text" not in batch.data and "_ticket" not in batch.data
    transition = fbuf.Buffer(capacity=9, storage=Ragged(), view=Transition(observation="x", autoreset="same_step"))
    state = transition.init({"x": 0, "text": "", "action": 0, "reward": 0.0, "terminated": False, "truncated": False})
    row = {"action": 0, "reward": 1.0, "terminated": False, "truncated": False}
    state = transition.extend(state, [{"x": i, "text": str(i), **row} for i in range(5)])
    state, batch = transition.sample(state, jax.random.key(0), 6)
    assert batch.lazy["text"] == [str(int(x)) for x in batch.data["obs"]]
    assert (batch.data["next_obs"] == batch.data["obs"] + 1).all()


def padded_rows(rng: np.random.Generator, count: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Columns padded with random values, and their contents."""
    lengths = np.stack([rng.integers(0, 4, count), rng.integers(0, 5, count)], 1).astype(np.int32)
    obs = rng.integers(1, 99, (count, 3, 4)).astype(np.int16)
    rows = {"obs": obs, "obs_length": lengths, "reward": np.arange(count, dtype=np.float32)}
    return rows, [x[: n[0], : n[1]] for x, n in zip(obs, lengths, strict=True)]


def test_padded_leaves_in_a_scan() -> None:
    buffer = fbuf.Buffer(capacity=7, storage=Ragged(maximum=MAXIMUM))
    rng = np.random.default_rng(0)
    batches = [padded_rows(rng, 3) for _ in range(5)]
    keys = jax.random.split(jax.random.key(1), 5)
    stacked = jax.tree.map(lambda *x: np.stack(x), *(rows for rows, _ in batches))

    def step(state: Any, given: Any) -> Any:
        return buffer.sample(buffer.extend(state, given[0]), given[1], 6)

    run = jax.jit(lambda state, given: jax.lax.scan(step, state, given), donate_argnums=0)
    state, every = run(buffer.init(PADDED), (stacked, keys))
    out = [jax.tree.map(lambda x, i=i: x[i], every) for i in range(5)]
    held: list[np.ndarray] = []
    for _, values in batches:
        held = [*held, *values][-7:]
    # What the buffer holds at the end, and what each batch showed.
    rows_now = buffer.rows(state)
    assert all(same(a, b) for a, b in zip(rows_now.lazy["obs"], held, strict=True))
    seen: list[np.ndarray] = []
    for (_, values), batch in zip(batches, out, strict=True):
        seen += values
        for obs, length, slot in zip(batch.data["obs"], batch.data["obs_length"], batch.index.slot, strict=True):
            newest = max(i for i in range(len(seen)) if i % 7 == int(slot))
            assert length.tolist() == list(seen[newest].shape)
            want = np.zeros((3, 4), np.int16)
            want[: length[0], : length[1]] = seen[newest]
            assert (np.asarray(obs) == want).all() and obs.dtype == jnp.int16
    last = out[-1]
    assert last.lazy.missing == {"text": list(range(6))}
    assert all(
        same(np.asarray(o)[: n[0], : n[1]], x)
        for o, n, x in zip(last.data["obs"], last.data["obs_length"], last.lazy["obs"], strict=True)
    )

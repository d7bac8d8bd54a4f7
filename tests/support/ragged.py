"""Ragged rows of any kind, plain lists of them as the oracle, and buffers that grow."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import fbuf
from fbuf.samplers import Consume, Epoch, Uniform
from fbuf.storages import Ragged
from tests.support import trees

EXAMPLE = {"obs": np.zeros(0, np.float32), "text": "", "info": {"any": None}, "reward": 0.0}
DTYPES = [
    *map(np.dtype, ("?", "i1", "<u8", ">i4", "f2", "f8", "c16", "M8[s]", "<U3", "S2")),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)),
]


class Thing:
    """An object without a form in bytes."""


def random_array(rng: np.random.Generator) -> np.ndarray:
    dtype = DTYPES[rng.integers(len(DTYPES))]
    shape = tuple(rng.integers(0, 4, rng.integers(0, 4)).tolist())
    if dtype.kind in "US":
        return rng.integers(0, 99, shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def random_value(rng: np.random.Generator) -> Any:
    plain = ["é\ud800" * 2, b"\0\1", None, True, -(2**200), 1.5, 2j, [1, "a"], (), np.int8(3)]
    kinds = [random_array(rng), Thing(), *plain]
    return kinds[rng.integers(len(kinds))]


def random_row(rng: np.random.Generator, number: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "obs": rng.normal(size=rng.integers(0, 9)).astype(np.float32),
        "text": "x" * int(rng.integers(0, 5)) + str(number),
        "info": {"any": random_value(rng)},
        "reward": float(number),
    }
    for name in ("obs", "text", "info"):
        if rng.random() < 0.2:
            del row[name]
    return row


def same(one: Any, two: Any) -> bool:
    if isinstance(two, np.ndarray) and isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(two, dict):
        return isinstance(one, dict) and one.keys() == two.keys() and all(same(one[k], two[k]) for k in two)
    if isinstance(two, Thing):
        return one is two
    return bool(one == two) and (isinstance(two, (float, np.generic)) or type(one) is type(two))


def check_history(seed: int, lanes: int | None, codec: Any, sizes: list[int], columns: bool) -> None:
    """Rows written in portions of these sizes are those of plain lists."""
    rng = np.random.default_rng(seed)
    number, length = lanes or 1, 4
    buffer = fbuf.Buffer(capacity=length * number, lanes=lanes, storage=Ragged(codec=codec, slack=0))
    newest = [collections.deque[Any](maxlen=length) for _ in range(number)]
    state, count = buffer.init(EXAMPLE), 0
    for size in sizes:
        rows = [[random_row(rng, count + number * i + e) for e in range(number)] for i in range(size)]
        count += size * number
        keep = rng.random((size, number)) < (1.0 if rng.random() < 0.5 else 0.6)
        if columns:
            rows = [
                [{**r, "text": str(count), "obs": np.ones(2, np.float32), "info": {"any": 1}} for r in s] for s in rows
            ]
        given: Any = rows if lanes else [several[0] for several in rows]
        if columns and size:
            lead = (size, number) if lanes else (size,)
            given = {
                "obs": np.ones((*lead, 2), np.float32),
                "text": [[str(count)] * number] * size if lanes else [str(count)] * size,
                "info": {"any": np.ones(lead, int).astype(object)},
                "reward": np.array([[r["reward"] for r in s] for s in rows], np.float32).reshape(lead),
            }
        state = buffer.extend(state, given, mask=keep if lanes else keep[:, 0])
        for step, lane in np.argwhere(keep).tolist():
            newest[lane].append(rows[step][lane])
    got = buffer.rows(state)
    held = got.lazy.rows()
    held = held if lanes else [[row] for row in held]
    for lane, want in enumerate(newest):
        mine = [row[lane] for row in held if row[lane] is not None]
        assert len(mine) == len(want) and all(same(a, b) for a, b in zip(mine, want, strict=True))
    if any(newest):
        by_reward = {row["reward"]: row for lane in newest for row in lane}
        state, batch = buffer.sample(state, jax.random.key(seed), 7)
        for row, reward in zip(batch.lazy.rows(), batch.data["reward"].tolist(), strict=True):
            assert same(row, by_reward[reward])


def stream(rng: np.random.Generator, count: int, lanes: int) -> list[list[dict[str, Any]]]:
    def row() -> dict[str, Any]:
        own = {"id": int(rng.integers(99)), "text": str(rng.integers(999)), "reward": float(rng.random())}
        return own | {"action": 0, "terminated": bool(rng.random() < 0.3), "truncated": False}

    return [[row() for _ in range(lanes)] for _ in range(count)]


def check_growth(sampler: Any, view: Any) -> None:
    ends = ("terminated",)
    small = fbuf.Buffer(capacity=12, lanes=2, storage=Ragged(), sampler=sampler, view=view, episode_end=ends)
    large = fbuf.Buffer(capacity=24, lanes=2, storage=Ragged(), sampler=sampler, view=view, episode_end=ends)
    rng = np.random.default_rng(3)
    first, second = stream(rng, 6, 2), stream(rng, 5, 2)
    example = first[0][0] | {"text": ""}
    one, two = small.init(example), large.init(example)
    for part in (first[:4], first[4:]):
        one, two = small.extend(one, part), large.extend(two, part)
        if sampler.prioritized:
            index = large.rows(two, last=3).index
            index = fbuf.Index(index.slot.reshape(-1), index.generation.reshape(-1))
            error = jnp.arange(1.0, 7.0)
            one, two = small.update_priority(one, index, error), large.update_priority(two, index, error)
    if isinstance(sampler, Consume):
        one, two = (b.sample(s, jax.random.key(0), 2)[0] for b, s in ((small, one), (large, two)))
    index = small.rows(one, last=2).index
    grown, one = small.grow(one)
    assert grown == large
    assert grown.get(one, index).lazy["text"] == [[r["text"] for r in several] for several in first[-2:]]
    for i, part in enumerate((first[:0], second)):
        one, two = grown.extend(one, part), large.extend(two, part)
        trees.same(*((s.ring, s.anchors, s.counters) for s in (one, two)))
        if not isinstance(sampler, (Epoch, Uniform)):
            trees.same(one.sampler, two.sampler)
        one, batch = grown.sample(one, jax.random.key(i), 5)
        two, other = large.sample(two, jax.random.key(i), 5)
        drawn = [jax.tree_util.tree_flatten_with_path(b)[0] for b in (batch, other)]
        for (path, x), (_, y) in zip(*drawn, strict=True):
            assert path[0].name == "ragged" or np.array_equal(x, y)  # each store has tickets of its own
        assert batch.lazy.get("text") == other.lazy.get("text")
    assert grown.rows(one).lazy["text"] == large.rows(two).lazy["text"]


def empty_replay():
    storage = fbuf.storages.Ragged(maximum={"padded": (6,), "grid": (4, 3)})
    numbers = np.zeros(0, np.int32)
    row = {"tokens": numbers, "padded": numbers, "grid": np.zeros((0, 3), np.float32), "text": ""}
    return fbuf.Replay(fbuf.Buffer(16, storage=storage), row)

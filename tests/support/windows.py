"""Episodes of known length, and who should be drawn of windows over them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax

import fbuf
from fbuf import _anchors
from fbuf.samplers import Prioritized, Uniform
from fbuf.testing import assert_inplace
from fbuf.views import Episode, Sequence
from tests.support.uniformity import DRAWS, chi_square_z

ENDS = ("terminated", "truncated")
WINDOWS = [
    Sequence(5),
    Sequence(4, stride=3),
    Sequence(6, boundary="mask"),
    Sequence(6, boundary="mask", at=5),
    Sequence(9, boundary="cross"),
    Episode(20),
]


def rows_of(lengths: list[int], first: int = 0) -> dict[str, np.ndarray]:
    """One lane of whole episodes; `id` counts rows, `episode` episodes."""
    count = sum(lengths)
    end = np.zeros(count, bool)
    end[np.cumsum(lengths) - 1] = True
    return {
        "id": np.arange(first, first + count, dtype=np.int32),
        "episode": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        "terminated": end,
        "truncated": np.zeros(count, bool),
    }


EXAMPLE = jax.tree.map(lambda x: x[0], rows_of([1]))


def filled(view: Any, lengths: list[int], capacity: int, sampler: Any = None) -> tuple[fbuf.Buffer, Any]:
    buffer = fbuf.Buffer(capacity, view=view, sampler=sampler or Uniform())
    return buffer, buffer.extend(buffer.init(EXAMPLE), rows_of(lengths))


def check_windows(data: Any, apart: int = 1) -> None:
    """Rows of a window follow one another within one episode, and an end is its last row."""
    there, ids = np.asarray(data["mask"]), np.asarray(data["id"])
    last = np.asarray(data["terminated"]) | np.asarray(data["truncated"])
    for b in range(len(ids)):
        at = np.flatnonzero(there[b])
        assert (np.diff(at) == 1).all()
        assert (np.diff(ids[b, at]) == apart).all()
        assert not last[b, at[:-1]].any()


def check_chances(view: Any, sampler: Uniform) -> None:
    """Draw from three lanes: one fills a fifth of its ring, one half, one goes round several times."""
    rng = np.random.default_rng(3)
    buffer = fbuf.Buffer(3 * 301, lanes=3, view=view, sampler=sampler)
    mask = rng.random((8, 100, 3)) < np.array([0.08, 0.2, 0.9])
    end = rng.random((8, 100, 3)) < 0.08
    ended = np.cumsum((end & mask).reshape(800, 3), axis=0).reshape(8, 100, 3)
    rows = {
        "id": np.zeros((8, 100, 3), np.int32),
        "episode": (ended - (end & mask)).astype(np.int32),
        "terminated": end,
        "truncated": np.zeros_like(end),
    }

    @jax.jit
    def run(rows: Any, mask: Any, key: Any) -> Any:
        state, _ = lax.scan(lambda s, x: (buffer.extend(s, x[0], mask=x[1]), None), buffer.init(EXAMPLE), (rows, mask))
        batch = buffer.peek(state, key, DRAWS)
        return state.anchors.flags, state.rows["episode"], batch.index.slot, batch.probability, batch.mask

    flags, episode, slots, probability, drawn = map(np.asarray, run(rows, mask, jax.random.key(0)))
    anchors = (flags & _anchors.OPEN) != 0
    by_lane = anchors.reshape(-1, 3).sum(axis=0)
    assert 0 < by_lane[0] < by_lane[1] < by_lane[2] and drawn.all()
    chances = anchors / anchors.sum()
    if sampler.over == "episodes":
        names, which, sizes = np.unique(
            (episode * 3 + np.arange(len(anchors)) % 3)[anchors], return_inverse=True, return_counts=True
        )
        chances = np.zeros(len(anchors))
        chances[anchors] = 1 / len(names) / sizes[which]
        assert len(names) > 20 and (sizes.max() > 3 or isinstance(view, Episode))
    assert abs(chi_square_z(np.bincount(slots, minlength=len(anchors)), chances)) < 4
    np.testing.assert_allclose(probability, chances[slots], rtol=1e-6)


def check_late_priorities(view: Any) -> None:
    """Change priorities of windows that have been overwritten since (flashbax: 240 of 1,280 windows were broken)."""
    buffer = fbuf.Buffer(64, view=view, sampler=Prioritized(alpha=1.0))
    rng = np.random.default_rng(0)
    state, first, batches = buffer.init(EXAMPLE), 0, []
    for i in range(30):
        lengths = rng.integers(1, 12, 2).tolist()
        rows = jax.tree.map(lambda x: np.resize(x, 24), rows_of(lengths, first))
        first += sum(lengths)
        state = buffer.extend(state, rows, mask=np.arange(24) < sum(lengths))
        if i < 6:
            continue
        state, batch = buffer.sample(state, jax.random.key(i), 64)
        check_windows(batch.data)
        batches.append(batch)
        state = buffer.update_priority(state, batches[max(0, len(batches) - 4)].index, np.full(64, 1e4, np.float32))
    assert int(buffer.stats(state)["refused_stale"]) + int(buffer.stats(state)["refused_closed"]) > 100


def check_cuts(at: int) -> None:
    """Cut windows at ends: never shorter than `at` says (torchrl's right spans can be empty, and crash)."""
    buffer, state = filled(Sequence(5, boundary="mask", at=at), [30, 40], 70)
    data = jax.device_get(buffer.peek(state, jax.random.key(0), 2000).data)
    check_windows(data)
    there = data["mask"]
    cut_right, cut_left = there[~there[:, -1]].sum(axis=1), there[~there[:, 0]].sum(axis=1)
    assert cut_right.min(initial=9) == (at + 1 if at < 4 else 9)
    assert cut_left.min(initial=9) == (5 - at if at else 9)
    assert there[:, at].all()


ROW = {
    "obs": jax.ShapeDtypeStruct((4, 3), np.uint8),
    "terminated": jax.ShapeDtypeStruct((), np.bool_),
    "truncated": jax.ShapeDtypeStruct((), np.bool_),
}


def check_inplace(view: Any, sampler: Any, first: str) -> None:
    """Extend (or sample) first, then the other, and update priorities: alone and in a scan."""
    buffer = fbuf.Buffer(400_000, lanes=2, view=view, sampler=sampler, episode_end=ENDS)

    def step(state: Any, given: Any) -> Any:
        key, rows, error = given
        if first == "extend":
            state = buffer.extend(state, rows)
        state, batch = buffer.sample(state, key, 8)
        if sampler.prioritized:
            state = buffer.update_priority(state, batch.index, error)
        if first == "sample":
            state = buffer.extend(state, rows)
        return state, batch

    def shaped(*axes: int) -> Any:
        rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, 3, 2, *x.shape), x.dtype), ROW)
        return jax.ShapeDtypeStruct((*axes, 2), np.uint32), rows, jax.ShapeDtypeStruct((*axes, 8), np.float32)

    state = jax.eval_shape(buffer.init, ROW)
    assert_inplace(step, state, shaped())
    assert_inplace(lambda state, given: lax.scan(step, state, given), state, shaped(4))

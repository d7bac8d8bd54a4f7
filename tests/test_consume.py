"""`samplers.Consume`: at most so many times each, whoever comes and goes meanwhile."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf import _roster
from fbuf.samplers import Consume
from fbuf.views import Row, Sequence, Transition
from tests.inplace import assert_draw_write_draw
from tests.model import Model
from tests.test_uniformity import chi_square_z

FIELDS = {
    "action": ((), np.int32),
    "obs": ((2,), np.uint8),
    "reward": ((), np.float32),
    "terminated": ((), np.bool_),
    "truncated": ((), np.bool_),
}
EXAMPLE = {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()}


def rows_of(rng: np.random.Generator, *shape: int) -> dict[str, np.ndarray]:
    values = {
        "action": rng.integers(0, 9, shape),
        "obs": rng.integers(0, 256, (*shape, 2)),
        "reward": rng.normal(size=shape),
        "terminated": rng.random(shape) < 0.1,
        "truncated": rng.random(shape) < 0.1,
    }
    return {n: x.astype(FIELDS[n][1]) for n, x in values.items()}


@functools.cache
def verbs(buffer: fbuf.Buffer, donated: bool) -> tuple[Any, Any, Any]:
    """`extend`, `sample` and a scan of both, three steps long."""
    donate = 0 if donated else ()

    def step(state: Any, given: Any) -> Any:
        return buffer.sample(buffer.extend(state, given[0], mask=given[1]), given[2], 4)

    return (
        jax.jit(lambda state, rows, mask: buffer.extend(state, rows, mask=mask), donate_argnums=donate),
        jax.jit(lambda state, key, size: buffer.sample(state, key, size), static_argnums=2, donate_argnums=donate),
        jax.jit(lambda state, given: lax.scan(step, state, given), donate_argnums=donate),
    )


class Trial:
    """A buffer, its model, and how often each row may still be drawn."""

    def __init__(self, buffer: fbuf.Buffer, seed: int, donated: bool):
        self.buffer, self.model = buffer, Model(buffer, FIELDS)  # type: ignore[arg-type]
        self.state, self.rng = buffer.init(EXAMPLE), np.random.default_rng(seed)
        self.left: dict[int, int] = {}  # by name of the row
        self.extend_, self.sample_, self.scan_ = verbs(buffer, donated)
        self.share = 1.0

    def arrived(self, rows: Any, mask: np.ndarray) -> None:
        self.model.extend(rows, None, mask)
        live = {row.name for row in self.model.anchors()}
        times = self.buffer.sampler.times  # type: ignore[attr-defined]
        self.left = {name: self.left.get(name, times) for name in live}

    def drawn(self, batch: Any) -> None:
        mask, slots = np.asarray(batch.mask), np.asarray(batch.index.slot)
        may = {name for name, left in self.left.items() if left}
        number = min(len(mask), len(may))
        assert mask.tolist() == [True] * number + [False] * (len(mask) - number)
        names = []
        for slot in slots[:number]:
            row = self.model.in_slot(int(slot))
            assert row is not None
            names.append(row.name)
        assert len(set(names)) == number and set(names) <= may
        np.testing.assert_allclose(batch.probability[:number], np.float32(1 / max(len(may), 1)), rtol=1e-6)
        assert not np.asarray(batch.probability)[number:].any()
        for name in names:
            self.left[name] -= 1

    def check(self) -> None:
        left = sum(1 for n in self.left.values() if n)
        assert int(self.buffer.stats(self.state)["anchors_left"]) == left
        assert bool(self.buffer.can_sample(self.state)) == bool(left)
        roster, slots = self.state.sampler.roster, np.asarray(self.state.sampler.roster.slot)[:left]
        place = np.asarray(roster.place)
        assert sorted(np.flatnonzero(place >= 0).tolist()) == sorted(slots.tolist())
        assert (place[slots] == np.arange(left)).all()

    def extend(self, count: int) -> None:
        rows, mask = self.made(count)
        self.state = self.extend_(self.state, self.given(rows), self.given(mask))
        self.arrived(rows, mask)

    def made(self, count: int) -> Any:
        shape = (count, self.model.lane_count)
        return rows_of(self.rng, *shape), self.rng.random(shape) < self.rng.choice([0.3, 1.0])

    def given(self, tree: Any) -> Any:
        return tree if self.buffer.lanes else jax.tree.map(lambda x: x[:, 0], tree)

    def sample(self, size: int) -> None:
        self.state, batch = self.sample_(self.state, jax.random.key(int(self.rng.integers(2**31))), size)
        self.drawn(batch)

    def scan(self) -> None:
        made = [self.made(2) for _ in range(3)]
        keys = jax.random.split(jax.random.key(int(self.rng.integers(2**31))), 3)
        rows, masks = jax.tree.map(lambda *x: np.stack(x), *[(self.given(r), self.given(m)) for r, m in made])
        self.state, batches = self.scan_(self.state, (rows, masks, keys))
        for i, (one, mask) in enumerate(made):
            self.arrived(one, mask)
            self.drawn(jax.tree.map(lambda x, i=i: x[i], batches))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            step = self.rng.choice(
                ["few", "many", "sample", "sample", "large", "scan", "clear"], p=[0.3, 0.1, 0.1, 0.1, 0.1, 0.25, 0.05]
            )
            if step == "few":
                self.extend(3)
            elif step == "many":
                self.extend(self.model.length + 2)
            elif step == "clear":
                self.state, self.left = self.buffer.clear(self.state), {}
                self.model.clear()
            elif step == "scan":
                self.scan()
            else:
                self.sample(4 if step == "sample" else 30)
            self.check()


@pytest.mark.parametrize(
    ("sampler", "view", "lanes", "donated"),
    [
        (Consume(), Row(), None, True),
        (Consume(2), Row(), 3, False),
        (Consume(3), Transition(n_step=2), 2, True),
        pytest.param(Consume(), Transition(n_step=2, stack=3), None, False, marks=pytest.mark.slow),
        pytest.param(Consume(), Sequence(3, boundary="mask"), 3, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_nobody_is_drawn_too_often(sampler: Any, view: Any, lanes: int | None, donated: bool, seed: int) -> None:
    buffer = fbuf.Buffer(11 * (lanes or 1), sampler=sampler, view=view, lanes=lanes)
    Trial(buffer, seed, donated).run(40)


@pytest.mark.parametrize("number", [20, 3000])
def test_every_part_is_as_likely_as_every_other(number: int) -> None:
    """Who is in a batch, and in which place."""
    buffer = fbuf.Buffer(number, sampler=Consume())
    state = buffer.extend(buffer.init(jnp.float32(0)), jnp.zeros(number))
    batches = jax.vmap(lambda key: buffer.peek(state, key, 8))(jax.random.split(jax.random.key(0), 20_000))
    slots = np.asarray(batches.index.slot)
    assert (np.diff(np.sort(slots, axis=1), axis=1) > 0).all()
    for place in (0, 7):
        counts = np.bincount(slots[:, place], minlength=number)
        assert abs(chi_square_z(counts, np.full(number, 1 / number))) < 4
    pairs = np.abs(slots[:, 0] - slots[:, 1])
    expected = 2 * (number - np.arange(1, number)) / (number * (number - 1))
    several = np.bincount(pairs, minlength=number)[1:]
    if number > 100:  # so that each has enough
        several, expected = several[:2990].reshape(-1, 10).sum(1), expected[:2990].reshape(-1, 10).sum(1)
        expected = expected / expected.sum()
    assert abs(chi_square_z(several, expected)) < 4


@pytest.mark.parametrize(
    ("sampler", "view"),
    [
        (Consume(), Row()),
        (Consume(4), Transition(n_step=3, stack=4)),
        pytest.param(Consume(4), Row(), marks=pytest.mark.slow),
    ],
)
def test_steps_are_in_place(sampler: Any, view: Any) -> None:
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=sampler, view=view)
    assert_draw_write_draw(buffer, EXAMPLE)


def test_many_at_once_are_as_each_alone() -> None:
    buffer = fbuf.Buffer(12, sampler=Consume(2), view=Transition())
    every = [rows_of(np.random.default_rng(i), 9) for i in range(3)]
    states = [buffer.extend(buffer.init(EXAMPLE), rows) for rows in every]
    together = jax.tree.map(lambda *x: jnp.stack(x), *states)
    keys = jax.random.split(jax.random.key(0), 3)
    for _ in range(3):
        together, batches = jax.vmap(lambda s, k: buffer.sample(s, k, 5))(together, keys)
        for i in range(3):
            states[i], one = buffer.sample(states[i], keys[i], 5)
            assert all(jax.tree.leaves(jax.tree.map(lambda a, b, i=i: np.array_equal(a[i], b), batches, one)))


def test_rows_given_up_are_off_the_list() -> None:
    storage = fbuf.storages.Deduplicated(keys=("obs",), block=(8, 8), blocks=128)
    buffer = fbuf.Buffer(100, sampler=Consume(), storage=storage)
    example = {"obs": jax.ShapeDtypeStruct((16, 16), np.uint8)}
    state, rng = buffer.init(example), np.random.default_rng(0)
    extend = jax.jit(buffer.extend)
    for _ in range(30):
        state = extend(state, {"obs": rng.integers(0, 256, (4, 16, 16), np.uint8)})
    stats = buffer.stats(state)
    assert int(stats["retired_rows"]) > 0 and int(stats["anchors_left"]) == int(stats["size"])
    state, batch = buffer.sample(state, jax.random.key(0), 100)
    assert int(batch.mask.sum()) == int(stats["size"]) and int(buffer.stats(state)["draws_refused"]) == 0


def test_a_list_too_long_to_shuffle() -> None:
    """Of more than 1024: all different, in range, and every one in the end."""
    roster = _roster.add(_roster.init(5000), jnp.arange(5000), jnp.arange(5000) % 3 != 0, jnp.int32(0))
    seen: list[int] = []
    step = jax.jit(lambda r, key: (_roster.draw(r, key, 400), r))
    for i in range(9):
        place, _ = step(roster, jax.random.key(i))
        mask = jnp.arange(400) < roster.number
        seen += np.asarray(roster.slot[place])[np.asarray(mask)].tolist()
        roster = _roster.strike(roster, place, mask, jnp.int32(0))
    assert int(roster.number) == 0 and sorted(seen) == [i for i in range(5000) if i % 3]


@pytest.mark.parametrize("times", [0, 1.0, True, 2**31])
def test_times_must_be_a_number(times: Any) -> None:
    with pytest.raises(ValueError, match=r"Consume: times is .*; expected an int >= 1"):
        Consume(times)

"""`samplers.Consume`: every row at most so many times, whatever is written meanwhile."""

import functools

import jax
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf.samplers import Consume
from tests.support.epoch import FIELDS, empty, rows_of
from tests.support.inplace import assert_draw_write_draw
from tests.support.model import Model
from tests.support.refusals import raises
from tests.support.uniformity import chi_square_z


@functools.cache
def verbs(buffer, donated):
    """`extend`, `sample` and a scan of both, three steps long."""
    donate = 0 if donated else ()

    def step(state, given):
        return buffer.sample(buffer.extend(state, given[0], mask=given[1]), given[2], 4)

    return (
        jax.jit(lambda state, rows, mask: buffer.extend(state, rows, mask=mask), donate_argnums=donate),
        jax.jit(lambda state, key: buffer.sample(state, key, 30), donate_argnums=donate),
        jax.jit(lambda state, given: lax.scan(step, state, given), donate_argnums=donate),
    )


class Trial:
    """A buffer, its model, and how often each row may still be drawn."""

    def __init__(self, buffer, seed, donated):
        self.buffer, self.model = buffer, Model(buffer, FIELDS)
        self.state, self.rng = empty(buffer), np.random.default_rng(seed)
        self.left = {}  # by name of the row
        self.verbs = verbs(buffer, donated)

    def made(self, count, most):
        """Rows in a call of `most` a lane, those after `count` masked."""
        shape = (most, self.model.lane_count)
        mask = self.rng.random(shape) < self.rng.choice([0.3, 1.0])
        return rows_of(self.rng, *shape), mask & (np.arange(most) < count)[:, None]

    def given(self, tree):
        return tree if self.buffer.lanes else jax.tree.map(lambda x: x[:, 0], tree)

    def arrived(self, rows, mask):
        self.model.extend(rows, None, mask)
        live = {row.name for row in self.model.anchors()}
        self.left = {name: self.left.get(name, self.buffer.sampler.times) for name in live}

    def drawn(self, batch):
        mask, slots = np.asarray(batch.mask), np.asarray(batch.index.slot)
        may = {name for name, left in self.left.items() if left}
        number = min(len(mask), len(may))
        assert mask.tolist() == [True] * number + [False] * (len(mask) - number)
        rows = [self.model.in_slot(int(slot)) for slot in slots[:number]]
        names = [row.name for row in rows if row is not None]
        assert len(set(names)) == number and set(names) <= may
        np.testing.assert_allclose(batch.probability[:number], np.float32(1 / max(len(may), 1)), rtol=1e-6)
        assert not np.asarray(batch.probability)[number:].any()
        for name in names:
            self.left[name] -= 1

    def check(self):
        left = sum(1 for n in self.left.values() if n)
        assert int(self.buffer.stats(self.state)["anchors_left"]) == left
        assert bool(self.buffer.can_sample(self.state)) == bool(left)
        roster, slots = self.state.sampler.roster, np.asarray(self.state.sampler.roster.slot)[:left]
        place = np.asarray(roster.place)
        assert sorted(np.flatnonzero(place >= 0).tolist()) == sorted(slots.tolist())
        assert (place[slots] == np.arange(left)).all()

    def key(self):
        return jax.random.key(int(self.rng.integers(2**31)))

    def scan(self):
        made = [self.made(2, 2) for _ in range(3)]
        keys = jax.random.split(self.key(), 3)
        rows, masks = jax.tree.map(lambda *x: np.stack(x), *[(self.given(r), self.given(m)) for r, m in made])
        self.state, batches = self.verbs[2](self.state, (rows, masks, keys))
        for i, (one, mask) in enumerate(made):
            self.arrived(one, mask)
            self.drawn(jax.tree.map(lambda x, i=i: x[i], batches))

    def run(self, steps):
        names = ["few", "many", "sample", "scan", "clear"]
        most = self.model.length + 2
        for _ in range(steps):
            step = self.rng.choice(names, p=[0.3, 0.1, 0.2, 0.35, 0.05])
            if step in ("few", "many"):
                rows, mask = self.made(3 if step == "few" else most, most)
                self.state = self.verbs[0](self.state, self.given(rows), self.given(mask))
                self.arrived(rows, mask)
            elif step == "clear":
                self.state, self.left = self.buffer.clear(self.state), {}
                self.model.clear()
            elif step == "scan":
                self.scan()
            else:
                self.state, batch = self.verbs[1](self.state, self.key())
                self.drawn(batch)
            self.check()


def check_places(number):
    """Draw every row as often as any other: in a batch, and in each place of one."""
    buffer = fbuf.Buffer(number, sampler=fbuf.samplers.Consume())
    state = buffer.extend(buffer.init(np.float32(0)), np.zeros(number, np.float32))
    peek = jax.jit(jax.vmap(lambda key: buffer.peek(state, key, 8).index.slot))
    slots = np.asarray(peek(jax.random.split(jax.random.key(0), 20_000)))
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


def test_no_row_is_drawn_too_often():
    buffer = fbuf.Buffer(33, sampler=Consume(2), lanes=3)
    for seed in range(2):
        Trial(buffer, seed, donated=True).run(40)


def test_every_row_is_as_likely_as_every_other():
    check_places(20)


@pytest.mark.optimized
def test_steps_are_in_place():
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=Consume(4))
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()}, jit=False)


@pytest.mark.parametrize("times", [0, 1.0, True, 2**31])
def test_times_must_be_a_number(times):
    raises(ValueError, r"Consume: times is .*; expected an int >= 1", Consume, times)

"""`samplers.Consume`: every row at most so many times, whatever is written meanwhile."""

import functools

import jax
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume
from tests.support.epoch import FIELDS, empty, is_draw, rows_of
from tests.support.inplace import assert_draw_write_draw
from tests.support.model import Model
from tests.support.refusals import raises
from tests.support.uniformity import chi_square_z


@functools.cache
def methods(buffer):
    """Return `extend`, `sample` and both in one step, with donated states."""

    def extend(state, rows, mask):
        return buffer.extend(state, rows, mask=mask)

    calls = (extend, lambda state, key: buffer.sample(state, key, 30))
    step = lambda state, rows, mask, key: buffer.sample(extend(state, rows, mask), key, 4)  # noqa: E731
    return [jax.jit(call, donate_argnums=0) for call in (*calls, step)]


class Trial:
    """A buffer, its model, and how often each row may still be drawn."""

    def __init__(self, buffer, seed):
        self.buffer, self.model = buffer, Model(buffer, FIELDS)
        self.state, self.rng = empty(buffer), np.random.default_rng(seed)
        self.left = {}  # by name of the row
        self.extend, self.sample, self.step = methods(buffer)

    def arrive(self, count):
        """Return the arguments of a call that brings at most `count` rows a lane."""
        shape = (self.model.length + 2, self.model.lane_count)
        rows, mask = rows_of(self.rng, *shape), self.rng.random(shape) < self.rng.choice([0.3, 1.0])
        mask &= (np.arange(len(mask)) < count)[:, None]
        self.model.extend(rows, None, mask)
        live = {row.name for row in self.model.anchors()}
        self.left = {name: self.left.get(name, self.buffer.sampler.times) for name in live}
        return (rows, mask) if self.buffer.lanes else jax.tree.map(lambda x: x[:, 0], (rows, mask))

    def compare(self, batch):
        may = {name for name, left in self.left.items() if left}
        number = min(len(batch.mask), len(may))
        is_draw(batch, number, len(may))
        names = {self.model.in_slot(int(slot)).name for slot in np.asarray(batch.index.slot)[:number]}
        assert len(names) == number and names <= may
        self.left |= {name: self.left[name] - 1 for name in names}

    def run(self, steps):
        for kind in self.rng.choice(["extend", "sample", "step", "clear"], steps, p=[0.3, 0.25, 0.4, 0.05]):
            key, batch = jax.random.key(int(self.rng.integers(2**31))), None
            if kind == "extend":
                self.state = self.extend(self.state, *self.arrive(self.rng.choice([3, 99])))
            elif kind == "sample":
                self.state, batch = self.sample(self.state, key)
            elif kind == "step":
                self.state, batch = self.step(self.state, *self.arrive(2), key)
            else:
                self.state, self.left = self.buffer.clear(self.state), {}
                self.model.clear()
            if batch is not None:
                self.compare(batch)
            left = sum(1 for n in self.left.values() if n)
            assert int(self.buffer.stats(self.state)["anchors_left"]) == left
            assert bool(self.buffer.can_sample(self.state)) == bool(left)


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
    view = fbuf.views.Transition(n_step=2, autoreset="same_step")
    buffer = fbuf.Buffer(33, sampler=Consume(2), view=view, lanes=3)
    for seed in range(2):
        Trial(buffer, seed).run(60)


def test_every_row_is_as_likely_as_every_other():
    check_places(20)


@pytest.mark.optimized
def test_steps_are_in_place():
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=Consume(4))
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()}, jit=False)


@pytest.mark.parametrize("times", [0, 1.0, True, 2**31])
def test_times_must_be_a_number(times):
    raises(ValueError, r"Consume: times is .*; expected an int >= 1", Consume, times)

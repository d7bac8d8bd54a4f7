"""Epochs and pools as sets: who was there when the epoch began, who of them was drawn, who is there now.

The oracles follow what is drawn without knowing any order (but for `shuffle=False`), and say how long each batch must be and
from whom it may be.
"""

import jax
import numpy as np

import fbuf
from fbuf.samplers import Epoch
from fbuf.views import Row, Transition
from tests.support.inplace import assert_order
from tests.support.model import Model
from tests.support.trees import row_with
from tests.support.uniformity import chi_square_z

FIELDS = {name: (leaf.shape, leaf.dtype) for name, leaf in row_with(np.zeros(2, np.uint8)).items()}
VIEWS = {"row": Row(), "steps": Transition(n_step=3, autoreset="same_step")}
sample = jax.jit(fbuf.Buffer.sample, static_argnums=(0, 3))
extend = jax.jit(fbuf.Buffer.extend, static_argnums=0)
SMALL, LARGE = (fbuf.Buffer(capacity=n, sampler=Epoch()) for n in (10, 3000))  # few, so that little is compiled


class Oracle:
    """Epochs of any things with names."""

    def __init__(self, sampler):
        self.sampler = sampler
        self.members = []  # of the epoch, lane after lane in order of arrival
        self.drawn = set()
        self.begun = 0

    def clear(self):
        self.members, self.drawn = [], set()

    def left(self, live):
        here = set(live)
        return [m for m in self.members if m in here and m not in self.drawn]

    def ends(self, live, batch_size):
        return len(self.left(live)) < (batch_size if self.sampler.drop_last else 1)

    def sample(self, live, batch_size, got):
        """`got` was drawn while `live` could be; return of how many."""
        least = batch_size if self.sampler.drop_last else 1
        if len(live) < least:
            assert not got
            return 0
        left = self.left(live)
        if len(left) < least:
            self.members, self.drawn = list(live), set()
            self.begun += 1
            left = list(live)
        assert len(got) == len(set(got)) == min(batch_size, len(left))
        assert set(got) <= set(left)
        if not self.sampler.shuffle:
            assert list(got) == left[: len(got)]
        self.drawn |= set(got)
        return len(self.members)

    def check(self, live, buffer, state):
        """What is left may include those who left unnoticed."""
        stats = buffer.stats(state)
        assert int(stats["epoch"]) == self.begun
        left = len(self.left(live))
        if left:
            assert left <= int(stats["epoch_left"]) <= len(self.members) - len(self.drawn)
        assert 0 <= int(stats["epoch_left"]) <= len(self.members)


class Pool:
    """What `Consume` may draw: everyone at most `times` times."""

    def __init__(self, sampler):
        self.times, self.left, self.begun = sampler.times, {}, 0

    def clear(self):
        self.left = {}

    def may(self, live):
        self.left = {name: self.left.get(name, self.times) for name in live}
        return {name for name, left in self.left.items() if left}

    def ends(self, live, batch_size):
        return False

    def sample(self, live, batch_size, got):
        may = self.may(live)
        assert len(got) == len(set(got)) == min(batch_size, len(may)) and set(got) <= may
        self.left |= {name: self.left[name] - 1 for name in got}
        self.begun += 0 < len(got) < batch_size
        return len(may)

    def check(self, live, buffer, state):
        left = len(self.may(live))
        assert int(buffer.stats(state)["anchors_left"]) == left and bool(buffer.can_sample(state)) == bool(left)


def is_draw(batch, number, begun_with):
    """Draws first, the rest masked; the same chance for all."""
    mask = np.asarray(batch.mask)
    assert mask.tolist() == [True] * number + [False] * (len(mask) - number)
    chance = np.float32(1) / np.float32(max(begun_with, 1))
    np.testing.assert_array_equal(batch.probability, np.where(mask, chance, np.float32(0)))
    np.testing.assert_array_equal(batch.weight, mask.astype(np.float32))


def buffer_of(sampler, view="row", lanes=None, length=11):
    return fbuf.Buffer(capacity=length * (lanes or 1), sampler=sampler, view=VIEWS[view], lanes=lanes)


def empty(buffer):
    return buffer.init({n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()})


def rows_of(rng, *shape):
    values = {
        "action": rng.integers(0, 1000, shape),
        "obs": rng.integers(0, 256, (*shape, 2)),
        "reward": rng.normal(size=shape),
        "terminated": rng.random(shape) < 0.1,
        "truncated": rng.random(shape) < 0.1,
    }
    return {n: x.astype(FIELDS[n][1]) for n, x in values.items()}


class Trial:
    """A buffer, its model and the oracle, in step."""

    def __init__(self, buffer, seed, oracle=Oracle):
        self.buffer, self.model, self.oracle = buffer, Model(buffer, FIELDS), oracle(buffer.sampler)
        self.state, self.rng, self.arrived = empty(buffer), np.random.default_rng(seed), 0
        self.share = np.ones(self.model.lane_count)
        self.most = 2 * self.model.length + 3

    def extend(self, count):
        """At most `count` rows a lane, in a call of one shape; lanes fall out of step."""
        shape = (self.most, self.model.lane_count)
        if self.rng.random() < 0.2:
            self.share = self.rng.uniform(0.1, 1.0, shape[1])
        rows = rows_of(self.rng, *shape)
        rows["action"] = (np.arange(shape[0] * shape[1]).reshape(shape) + self.arrived).astype(np.int32)
        self.arrived += shape[0] * shape[1]
        mask = (self.rng.random(shape) < self.share) & (np.arange(shape[0]) < count)[:, None]
        self.model.extend(rows, None, mask)
        one = slice(None) if self.buffer.lanes else 0
        self.state = extend(self.buffer, self.state, {n: x[:, one] for n, x in rows.items()}, mask=mask[:, one])

    def sample(self, batch_size):
        self.state, batch = sample(self.buffer, self.state, jax.random.key(int(self.rng.integers(2**31))), batch_size)
        live = sorted(self.model.anchors(), key=lambda row: (row.lane, row.number))
        by_action = {int(row.fields["action"]): row for row in live}
        data = jax.device_get(batch.data)
        got = [by_action[int(a)] for a in data["action"][np.asarray(batch.mask)]]  # fails for rows that are not live
        assert np.asarray(batch.index.slot)[: len(got)].tolist() == [row.slot for row in got]
        assert (np.asarray(batch.index.slot)[len(got) :] == self.buffer.capacity).all()
        for name, leaf in data.items():
            assert not leaf[len(got) :].any(), name
        names = [row.name for row in live]
        is_draw(batch, len(got), self.oracle.sample(names, batch_size, [row.name for row in got]))
        assert bool(batch.last) == self.oracle.ends(names, batch_size)

    def clear(self):
        self.model.clear()
        self.oracle.clear()
        self.state = self.buffer.clear(self.state)

    def run(self, steps, sizes):
        for _ in range(steps):
            kind = self.rng.choice(["some", "some", "some", "flood", "clear", *["sample"] * 9])
            if kind == "sample":
                self.sample(int(self.rng.choice(sizes)))
            elif kind != "clear":
                self.extend({"some": 3, "flood": self.most}[kind])
            elif self.rng.random() < 0.3:
                self.clear()
            self.oracle.check([row.name for row in self.model.anchors()], self.buffer, self.state)
        assert self.oracle.begun >= 3


def arrive(buffer, state, first, count):
    """Rows `first`, `first + 1`, ...; of one shape however many, so that it compiles once."""
    number = np.arange(buffer.capacity, dtype=np.int32)
    shape = (-1,) if buffer.lanes is None else (-1, buffer.lanes)
    return extend(buffer, state, (first + number).reshape(shape), mask=(number < count).reshape(shape))


def filled(buffer, count):
    return arrive(buffer, buffer.init(np.int32(0)), 0, count)


def check_places(sampler, held, number=20_000):
    """Draw everyone as often at each place of a batch, and every pair at each pair of places."""
    buffer = fbuf.Buffer(capacity=held, sampler=sampler)
    state, keys = filled(buffer, held), jax.random.split(jax.random.key(held), number)
    got = np.asarray(jax.jit(jax.vmap(lambda key: buffer.peek(state, key, 7).data))(keys))
    for column in got.T:
        assert abs(chi_square_z(np.bincount(column, minlength=held), np.full(held, 1 / held))) < 4
    for i, j in ((0, 1), (2, 6), (5, 3)):
        pair = (got[:, j] - got[:, i]) % held
        if held < 100:  # else each is too rare: how far apart they are
            pair += got[:, i] * held
        different = np.resize(np.arange(held) > 0, held**2 if held < 100 else held)
        assert abs(chi_square_z(np.bincount(pair, minlength=len(different)), different / different.sum())) < 4


def check_inplace(view, order):
    """Run a donated scan with next to no memory of its own: a byte a row would be 400,000."""
    buffer = buffer_of(Epoch(), view, lanes=2, length=200_000)

    row = {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()}
    memory = assert_order(buffer, order, row, jax.eval_shape(lambda: empty(buffer)), steps=5)
    assert memory.temporary < 40_000

"""`writers.Reservoir`: each set of C of the rows that came is equally likely to be held, whatever calls they came in."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fbuf
from fbuf._algorithms import random, uint64
from fbuf._algorithms.uint64 import Wide
from fbuf.writers import Reservoir
from tests.support import refusals
from tests.support.refusals import raises
from tests.support.tables import checks
from tests.support.uniformity import chi_square_z

CAPACITY, AT_ONCE = 12, 40
EXAMPLE = {"id": jax.ShapeDtypeStruct((), np.int32)}


def buffer_of(seed=0, capacity=CAPACITY, **parts):
    return fbuf.Buffer(capacity, writer=Reservoir(seed), **parts)


def put(buffer, state, first, number, mask=None):
    mask = np.ones(number, bool) if mask is None else mask
    rows = {"id": first + np.arange(AT_ONCE, dtype=np.int32)}
    return buffer.extend(state, rows, mask=np.pad(mask, (0, AT_ONCE - number)))


def by_slot(buffer, state):
    got = jax.device_get(buffer.get(state, jnp.arange(buffer.capacity, dtype=jnp.int32)))
    return np.where(got.mask, got.data["id"], -1).tolist()


words_at = jax.jit(random.at)


class Model:
    def __init__(self, key, capacity, seen=0):
        self.key, self.capacity, self.seen = jnp.asarray(key), capacity, seen
        self.slots = [-1] * capacity

    def add(self, row):
        self.seen += 1
        high, low = divmod(self.seen, 2**32)
        one, other = words_at(self.key, np.uint32([high]), np.uint32([low]))
        random = (int(one[0]) << 32) + int(other[0])
        slot = self.seen - 1 if self.seen <= self.capacity else random * self.seen >> 64
        if slot < self.capacity:
            self.slots[slot] = row


def check_inplace(number):
    buffer = buffer_of(capacity=200_000)

    def step(state, rows, key):
        state, batch = buffer.sample(state, key, 8)
        return buffer.extend(state, rows), batch

    rows = {"id": jax.ShapeDtypeStruct((number,), np.int32)}
    fbuf.testing.assert_inplace(step, jax.eval_shape(buffer.init, EXAMPLE), rows, jax.random.key(0))


WORD = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1]))
LONG = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 99), st.sampled_from([2**32 - 1, 2**32, 2**63, 2**64 - 1]))


@settings(max_examples=max(settings.default.max_examples // 3, 1))
@given(program=st.lists(st.tuples(st.integers(1, AT_ONCE), st.integers(0, 2**16), st.booleans()), max_size=4))
def test_rows_are_where_algorithm_r_puts_them(program):
    buffer = buffer_of()
    state, came = buffer.init(EXAMPLE), 0
    model = Model(state.scatter.own.key, CAPACITY)
    for number, seed, masked in program:
        mask = np.random.default_rng(seed).random(number) < 0.6 if masked else np.ones(number, bool)
        state = put(buffer, state, came, number, mask)
        for i in np.flatnonzero(mask):
            model.add(came + int(i))
        came += number
        assert by_slot(buffer, state) == model.slots
        stats = buffer.stats(state)
        assert float(stats["seen"]) == model.seen and int(stats["refused_rows"]) == 0


@pytest.mark.parametrize("seen", [2**32 - 7, 2**40 - 7])
def test_beyond_2_to_32_rows(seen):
    buffer = buffer_of()
    state = put(buffer, buffer.init(EXAMPLE), 0, 12)
    own = dataclasses.replace(state.scatter.own, seen=jnp.array(divmod(seen, 2**32), jnp.uint32))
    state = dataclasses.replace(state, scatter=dataclasses.replace(state.scatter, own=own))
    model = Model(own.key, CAPACITY, seen)
    model.slots = list(range(12))
    for turn in range(2):
        state = put(buffer, state, 100 + 40 * turn, 40)
        for i in range(40):
            model.add(100 + 40 * turn + i)
    high, low = np.asarray(state.scatter.own.seen).tolist()
    assert (high << 32) + low == seen + 80 and by_slot(buffer, state) == model.slots
    assert float(buffer.stats(state)["seen"]) == pytest.approx(seen + 80, rel=1e-6)


@jax.jit
def numbers(a, b, c, d):
    return uint64.add(a, b), uint64.negative(a), uint64.multiply(c, d), uint64.product_high(a, b), uint64.at_most(a, b)


def pair(number):
    return Wide(np.uint32(number >> 32), np.uint32(number & 0xFFFFFFFF))


def whole(number):
    return (int(number.high) << 32) + int(number.low)


@given(a=LONG, b=LONG, c=WORD, d=WORD)
def test_numbers_of_64_bits(a, b, c, d):
    modulus = 2**64

    def signed(x):
        return x - modulus if x >= 2**63 else x

    total, negative, product, high, at_most = numbers(pair(a), pair(b), np.uint32(c), np.uint32(d))
    assert whole(total) == (a + b) % modulus
    assert whole(negative) == -a % modulus == whole(uint64.of(-a))
    assert whole(product) == c * d and whole(high) == a * b >> 64
    assert bool(at_most) == (signed(a) <= signed(b))


def check_sets(calls):
    """Hold each set of three of eight rows equally often."""
    buffer, runs = buffer_of(capacity=3), 40_000

    def one(key):
        state = buffer.writer.rekeyed(buffer.init(EXAMPLE), key)
        for ids in np.array_split(np.arange(8, dtype=np.int32), calls):
            state = buffer.extend(state, {"id": ids})
        held = buffer.get(state, jnp.arange(3, dtype=jnp.int32)).data["id"]
        return jnp.zeros(8, bool).at[held].set(True)

    held = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(7), runs)))
    assert (held.sum(axis=1) == 3).all()
    sets = list(itertools.combinations(range(8), 3))
    counts = np.array([held[:, list(s)].all(axis=1).sum() for s in sets])
    assert counts.sum() == runs and abs(chi_square_z(counts, np.full(len(sets), 1 / len(sets)))) < 4


def test_every_set_of_rows_is_equally_likely():
    check_sets(1)


def test_seeds_keys_and_clear():
    def filled(seed, key=None):
        buffer = buffer_of(seed)
        state = buffer.init(EXAMPLE)
        if key is not None:
            state = buffer.writer.rekeyed(state, jax.random.key(key))
        return buffer, put(buffer, put(buffer, state, 0, 40), 40, 40)

    (buffer, state), (_, again), (other, another) = filled(0), filled(0), filled(1)
    _, keyed = filled(0, 5)
    assert by_slot(buffer, state) == by_slot(buffer, again) != by_slot(other, another)
    assert by_slot(buffer, keyed) not in (by_slot(buffer, state), by_slot(other, another))
    cleared = buffer.clear(state)
    assert float(buffer.stats(cleared)["seen"]) == 0 and not buffer.can_sample(cleared)
    cleared = put(buffer, put(buffer, cleared, 0, 40), 40, 40)
    assert by_slot(buffer, cleared) != by_slot(buffer, state)  # other draws


def test_it_is_saved_and_goes_on(tmp_path):
    buffer = buffer_of()
    state = put(buffer, buffer.init(EXAMPLE), 0, 40)
    fbuf.save(tmp_path, buffer, state)
    again, loaded = fbuf.load(tmp_path)
    assert again == buffer
    assert by_slot(again, put(again, loaded, 40, 40)) == by_slot(buffer, put(buffer, state, 40, 40))
    raises(fbuf.SchemaError, r"writer\.seed: found 0, expected 1", lambda: fbuf.load(tmp_path, buffer_of(1)))


REFUSED = """
Reservoir(-1) => ValueError Reservoir: seed is -1; expected an int from 0 to 2^32 - 1
Reservoir(2**32) => ValueError expected an int from 0 to 2^32 - 1
Reservoir(1.0) => ValueError Reservoir: seed is 1.0; expected an int
Reservoir(True) => ValueError Reservoir: seed is True; expected an int
rekeyed(fbuf.Buffer(4).init(EXAMPLE), KEY) => TypeError rekeyed: state is of a buffer with another writer
rekeyed(None, KEY) => TypeError rekeyed: state is NoneType; expected a state of Reservoir()
rekeyed(buffer, KEY) => TypeError rekeyed: state is Buffer; expected a state of Reservoir()
rekeyed(state, 3) => TypeError Reservoir.rekeyed: key is int; expected a PRNG key. Use jax.random.key
rekeyed(state, jax.random.split(KEY)) => TypeError Reservoir.rekeyed: key is key<fry>[2]; | for many states vmap it
"""


def test_what_it_refuses():
    buffer, rekeyed = buffer_of(), Reservoir().rekeyed
    names = {"buffer": buffer, "rekeyed": rekeyed, "state": buffer.init(EXAMPLE), "KEY": jax.random.key(0)}
    refusals.check_all(REFUSED, globals() | names)


@pytest.mark.in_place
def test_a_step_copies_nothing():
    check_inplace(1)


test_sets = checks(exhaustive=[(check_sets, [3])])
test_reservoir_in_place = pytest.mark.in_place(checks(exhaustive=[(check_inplace, [100])]))

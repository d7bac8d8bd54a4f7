"""`writers.Reservoir`: each set of C of the rows that came is equally likely to be held, whatever calls they came in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fbuf
from fbuf import _wide
from fbuf._wide import Wide
from fbuf.views import Sequence, Transition
from fbuf.writers import Reservoir
from tests.support.reservoir import (
    AT_ONCE,
    CAPACITY,
    EXAMPLE,
    Model,
    buffer_of,
    by_slot,
    check_beyond,
    check_inplace,
    check_sets,
    put,
)

WORD = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1]))
LONG = st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 99), st.sampled_from([2**32 - 1, 2**32, 2**63, 2**64 - 1]))


@settings(max_examples=max(settings.default.max_examples // 3, 1))
@given(program=st.lists(st.tuples(st.integers(1, AT_ONCE), st.integers(0, 2**16), st.booleans()), max_size=4))
def test_rows_are_where_algorithm_r_puts_them(program: list[tuple[int, int, bool]]) -> None:
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


def test_beyond_2_to_32_rows() -> None:
    check_beyond(2**32 - 7)


@jax.jit
def numbers(a: Wide, b: Wide, c: jax.Array, d: jax.Array) -> tuple[Wide, ...]:
    return _wide.add(a, b), _wide.negative(a), _wide.multiply(c, d), _wide.product_high(a, b), _wide.at_most(a, b)


def pair(number: int) -> Wide:
    return Wide(np.uint32(number >> 32), np.uint32(number & 0xFFFFFFFF))


def whole(number: Wide) -> int:
    return (int(number.high) << 32) + int(number.low)


@given(a=LONG, b=LONG, c=WORD, d=WORD)
def test_numbers_of_64_bits(a: int, b: int, c: int, d: int) -> None:
    modulus = 2**64

    def signed(x: int) -> int:
        return x - modulus if x >= 2**63 else x

    total, negative, product, high, at_most = numbers(pair(a), pair(b), np.uint32(c), np.uint32(d))
    assert whole(total) == (a + b) % modulus
    assert whole(negative) == -a % modulus == whole(_wide.of(-a))
    assert whole(product) == c * d and whole(high) == a * b >> 64
    assert bool(at_most) == (signed(a) <= signed(b))


def test_every_set_of_rows_is_equally_likely() -> None:
    check_sets(calls=1)


def test_seeds_keys_and_clear() -> None:
    def filled(seed: int, key: int | None = None) -> Any:
        buffer = buffer_of(seed)
        state = buffer.init(EXAMPLE)
        if key is not None:
            state = buffer.writer.rekeyed(state, jax.random.key(key))  # type: ignore[attr-defined]
        return buffer, put(buffer, put(buffer, state, 0, 40), 40, 40)

    (buffer, state), (_, again), (other, another) = filled(0), filled(0), filled(1)
    _, keyed = filled(0, 5)
    assert by_slot(buffer, state) == by_slot(buffer, again) != by_slot(other, another)
    assert by_slot(buffer, keyed) not in (by_slot(buffer, state), by_slot(other, another))
    cleared = buffer.clear(state)
    assert float(buffer.stats(cleared)["seen"]) == 0 and not buffer.can_sample(cleared)
    cleared = put(buffer, put(buffer, cleared, 0, 40), 40, 40)
    assert by_slot(buffer, cleared) != by_slot(buffer, state)  # other draws


def test_it_is_saved_and_goes_on(tmp_path: Path) -> None:
    buffer = buffer_of()
    state = put(buffer, buffer.init(EXAMPLE), 0, 40)
    fbuf.save(tmp_path, buffer, state)
    again, loaded = fbuf.load(tmp_path)
    assert again == buffer
    assert by_slot(again, put(again, loaded, 40, 40)) == by_slot(buffer, put(buffer, state, 40, 40))
    with pytest.raises(fbuf.SchemaError, match=r"writer\.seed: found 0, expected 1"):
        fbuf.load(tmp_path, buffer_of(1))


def test_what_it_refuses() -> None:
    for view in (Transition(), Sequence(4)):
        with pytest.raises(ValueError, match=r"looks at neighbouring rows, but Reservoir\(\) may replace any"):
            buffer_of(view=view)
    for seed in (-1, 2**32, 1.0, True):
        with pytest.raises(ValueError, match=r"Reservoir: seed is .*; expected an int from 0 to 2\^32 - 1"):
            Reservoir(seed)  # type: ignore[arg-type]
    ring = fbuf.Buffer(4)
    with pytest.raises(TypeError, match=r"rekeyed: the state is of a buffer with another writer"):
        Reservoir().rekeyed(ring.init(EXAMPLE), jax.random.key(0))
    buffer = buffer_of()
    state = buffer.init(EXAMPLE)
    for wrong in (None, buffer):
        with pytest.raises(
            TypeError, match=r"rekeyed: the state is (NoneType|Buffer); expected one with Reservoir\(\)"
        ):
            buffer.writer.rekeyed(wrong, jax.random.key(0))
    with pytest.raises(TypeError, match=r"Reservoir\.rekeyed: key is int; expected a PRNG key\. Use jax\.random\.key"):
        buffer.writer.rekeyed(state, 3)
    with pytest.raises(TypeError, match=r"Reservoir\.rekeyed: key is key<fry>\[2\]; .*for many states vmap it"):
        buffer.writer.rekeyed(state, jax.random.split(jax.random.key(0)))


@pytest.mark.optimized
def test_a_step_copies_nothing() -> None:
    check_inplace(1)

"""`samplers.Consume`: every row at most so many times, whatever is written meanwhile."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import _roster
from fbuf.samplers import Consume
from fbuf.views import Transition
from tests.inplace import assert_draw_write_draw
from tests.support.consume import Trial, check_places
from tests.support.epoch import FIELDS


def test_no_row_is_drawn_too_often() -> None:
    buffer = fbuf.Buffer(22, sampler=Consume(3), view=Transition(n_step=2), lanes=2)
    for seed in range(2):
        Trial(buffer, seed, donated=True).run(40)


def test_every_row_is_as_likely_as_every_other() -> None:
    check_places(20)


@pytest.mark.optimized
def test_steps_are_in_place() -> None:
    buffer = fbuf.Buffer(400_000, lanes=2, sampler=Consume(4), view=Transition(n_step=3, stack=4))
    assert_draw_write_draw(buffer, {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items()}, jit=False)


def test_a_list_too_long_to_shuffle() -> None:
    """Of more than 1024: all different, in range, and every one in the end."""
    add, strike = jax.jit(_roster.add), jax.jit(_roster.strike)
    there = np.arange(5000) % 3 != 0
    roster = add(_roster.init(5000), np.arange(5000, dtype=np.int32), there, np.int32(0))
    draw = jax.jit(lambda r, key: (_roster.draw(r, key, 400), jnp.arange(400) < r.number))
    seen: list[int] = []
    for i in range(9):
        place, mask = draw(roster, jax.random.key(i))
        seen += np.asarray(roster.slot)[np.asarray(place)[np.asarray(mask)]].tolist()
        roster = strike(roster, place, mask, np.int32(0))
    assert int(roster.number) == 0 and sorted(seen) == [i for i in range(5000) if i % 3]


@pytest.mark.parametrize("times", [0, 1.0, True, 2**31])
def test_times_must_be_a_number(times: object) -> None:
    with pytest.raises(ValueError, match=r"Consume: times is .*; expected an int >= 1"):
        Consume(times)

"""More of `writers.Reservoir`: calls of other sizes, long streams, strict modes."""

import jax
import numpy as np
from jax import lax

from tests.writers.test_reservoir import EXAMPLE, buffer_of, by_slot, check_beyond, check_sets, put


def test_it_makes_no_difference_which_rows_come_in_one_call():
    buffer, laned = buffer_of(seed=3), buffer_of(seed=3, lanes=4)
    rows = {"id": np.arange(96, dtype=np.int32)}
    one = buffer.init(EXAMPLE)
    for i in range(0, 96, 8):
        one = put(buffer, one, i, 8)
    run = jax.jit(lambda state: lax.scan(lambda s, row: (buffer.add(s, row), None), state, rows)[0], donate_argnums=0)
    scanned = run(buffer.init(EXAMPLE))
    many = laned.extend(laned.init(EXAMPLE), {"id": rows["id"].reshape(24, 4)})
    assert by_slot(buffer, one) == by_slot(buffer, scanned) == by_slot(laned, many)
    assert np.asarray(buffer.rows(one).data["id"]).tolist() == sorted(by_slot(buffer, one))


def test_beyond_2_to_40_rows():
    check_beyond(2**40 - 7)


def test_every_set_of_rows_of_several_calls_is_equally_likely():
    check_sets(calls=3)

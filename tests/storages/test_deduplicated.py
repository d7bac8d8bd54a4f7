"""`storages.Deduplicated`: every row is what was given, or is counted as gone (`tests/support/deduplicated.py`)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.storages import Deduplicated, Device
from fbuf.views import Transition
from tests.support import refusals
from tests.support.deduplicated import SMALL, check_programs
from tests.support.refusals import raises
from tests.support.trees import row_with, same


def test_rows_and_references_are_right_after_any_calls() -> None:
    check_programs("retire", 63, 39)  # three steps of all lanes at once


def test_stacks_are_those_of_the_device() -> None:
    random, batches = np.random.default_rng(0), []
    ends = {"terminated": random.random(40) < 0.2, "truncated": np.zeros(40, bool)}
    rows = row_with(random.integers(0, 256, (40, 8, 8), np.uint8), 40, **ends)
    view = Transition(n_step=2, stack=3, autoreset="same_step")
    for storage in (Device(), Deduplicated(keys=("obs",), block=(4, 4), blocks=512)):
        buffer = fbuf.Buffer(32, storage=storage, view=view)
        state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: leaf[0], rows)), rows)
        batches.append(buffer.peek(state, jax.random.key(0), 64))
    same(*batches)


def test_changes_that_find_no_room_are_counted() -> None:
    rows = {"obs": np.random.default_rng(0).integers(0, 256, (6, 16, 16), np.uint8)}
    buffer = fbuf.Buffer(8, storage=Deduplicated(keys=("obs",), block=(4, 4), blocks=64, on_full="refuse"))
    state = buffer.extend(buffer.init({"obs": rows["obs"][0]}), {"obs": rows["obs"][:3]})
    state = buffer.update_rows(state, buffer.last(state, 3).index, {"obs": rows["obs"][3:]})
    assert buffer.stats(state)["refused_rows"] == 3
    np.testing.assert_array_equal(buffer.last(state, 3).data["obs"], rows["obs"][:3])


PICTURE = {"obs": np.zeros((84, 84), np.uint8), "small": np.zeros((3,), np.uint8)}
INVALID = """
init(keys="obs") => TypeError keys is 'obs'; | Write keys=('obs',)
init(keys=("pixels",)) => ValueError keys names 'pixels', but rows have obs, small
init(keys=()) => ValueError keys is empty; expected names of leaves (obs, small)
init(block=(12, 3)) => ValueError has 3 bytes; | Write block=(12, 4)
init(block=12) => ValueError block is 12; expected (rows, pixels)
init(block=(0, 4)) => ValueError expected (rows, pixels), two ints >= 1
init(blocks=100) => ValueError blocks is 100; expected a multiple of 32 below 2^30. Use 128.
init(blocks=0) => ValueError blocks is 0; expected an int >= 64
init(blocks=2**30) => ValueError below 2^30
init(blocks="many") => ValueError blocks is 'many'; expected an int
init(blocks={"small": 64}) => ValueError blocks names 'small', but leaves are obs.
init(block={"small": (1, 4)}) => ValueError block names 'small', but leaves are obs.
init(on_full="drop") => ValueError on_full is 'drop'; expected "retire" or "refuse"
init({"x": np.zeros(9, np.complex64)}, keys=("x",)) => TypeError leaf 'x' is complex64 | expected one or more integers
init({"x": np.zeros((0, 4), np.uint8)}, keys=("x",)) => TypeError leaf 'x' is uint8[0, 4]
init({"x": np.zeros(9, np.uint8)}) => ValueError no leaf of x has 1024 bytes a row. Name some: keys=(...).
"""


def init(example: Any = PICTURE, **settings: Any) -> Any:
    return fbuf.Buffer(100, storage=Deduplicated(**settings)).init(example)


def test_invalid_settings_are_refused_with_the_fix() -> None:
    refusals.check_all(INVALID, globals())
    one = Deduplicated(keys=("obs",), block={"obs": (12, 12)}, blocks={"obs": 64})
    assert one == Deduplicated(keys=["obs"], block={"obs": [12, 12]}, blocks={"obs": np.int64(64)})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"references; expected less than 2\^32. Use larger blocks"):
        jax.eval_shape(fbuf.Buffer(10**9, storage=Deduplicated(keys=("obs",))).init, PICTURE)


def test_growing_asks_for_more_places_and_a_concrete_state() -> None:
    both = fbuf.Buffer(36, lanes=3, storage=Deduplicated(keys=("a", "b"), block=(4, 4), blocks=96))
    example = {n: np.zeros(*x) for n, x in SMALL.items()}
    empty = both.init(example)
    other = dataclasses.replace(both, storage=Deduplicated(keys=("a", "b"), blocks=4096))
    pytest.raises(ValueError, lambda: both.convert(other, empty)).match("other.storage")
    pytest.raises(ValueError, both.grow, empty, 64).match(r"blocks is 64; expected at least the present 96")
    pytest.raises(ValueError, both.grow, empty, 100).match("expected a multiple of 32")
    raises(TypeError, r"the state is traced.*outside jit", lambda: jax.jit(lambda s: both.grow(s)[1])(empty))
    with pytest.raises(TypeError, match="cannot grow"):
        device = fbuf.Buffer(4)
        device.grow(device.init(jnp.float32(0)))
    raises(ValueError, r"without 'b'.*Give one number, or one for each of: a, b", both.grow, empty, {"a": 960})


def test_retired_rows_are_not_drawn_when_every_priority_is_zero():
    storage = Deduplicated(keys=("obs",), block=(4, 4), blocks=64, on_full="retire")
    view = fbuf.views.Transition(autoreset="same_step")
    buffer = fbuf.Buffer(64, storage=storage, sampler=fbuf.samplers.Prioritized(eps=0.0), view=view)
    obs = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    rows = row_with(obs, 40, reward=np.arange(40, dtype=np.float32))
    state = buffer.init(jax.tree.map(lambda x: x[0], rows))
    extend = jax.jit(lambda s, part: buffer.extend(s, part, priority=jnp.zeros(4)))
    for at in range(0, 40, 4):
        state = extend(state, jax.tree.map(lambda x, at=at: x[at : at + 4], rows))
    size, retired = (int(buffer.stats(state)[name]) for name in ("size", "retired_rows"))
    assert retired and size + retired == 40
    batch = buffer.peek(state, jax.random.key(0), 256)
    assert batch.mask.all()
    assert set(np.asarray(batch.data["reward"]).astype(int)) == set(range(retired, 39))

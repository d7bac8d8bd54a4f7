"""`storages.Deduplicated`: every row is what was given, or is counted as gone (`tests/support/deduplicated.py`)."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._core.component import from_config, to_config
from fbuf.storages import Deduplicated
from tests.support.deduplicated import KEY, SMALL, check_programs


def test_rows_and_references_are_right_after_any_calls() -> None:
    check_programs("retire", 63, 39)  # three steps of all lanes at once


PICTURE = {"obs": np.zeros((84, 84), np.uint8), "small": np.zeros((3,), np.uint8)}
SETTINGS = [
    (lambda: Deduplicated(keys="obs"), TypeError, r"keys is 'obs'; .* Write keys=\('obs',\)"),
    (lambda: Deduplicated(keys=("pixels",)), ValueError, r"keys names 'pixels', but rows have obs, small"),
    (lambda: Deduplicated(keys=()), ValueError, r"keys is empty; expected names of leaves \(obs, small\)"),
    (lambda: Deduplicated(block=(12, 3)), ValueError, r"has 3 bytes; .*Write block=\(12, 4\)"),
    (lambda: Deduplicated(block=12), ValueError, r"block is 12; expected \(rows, pixels\)"),
    (lambda: Deduplicated(block=(0, 4)), ValueError, r"expected \(rows, pixels\), two ints >= 1"),
    (lambda: Deduplicated(blocks=100), ValueError, r"blocks is 100; expected a multiple of 32 below 2\^30\. Use 128\."),
    (lambda: Deduplicated(blocks=0), ValueError, r"blocks is 0; expected an int >= 64"),
    (lambda: Deduplicated(blocks=2**30), ValueError, r"below 2\^30"),
    (lambda: Deduplicated(blocks="many"), ValueError, r"blocks is 'many'; expected an int"),
    (lambda: Deduplicated(blocks={"small": 64}), ValueError, r"blocks names 'small', but leaves are obs\."),
    (lambda: Deduplicated(block={"small": (1, 4)}), ValueError, r"block names 'small', but leaves are obs\."),
    (lambda: Deduplicated(on_full="drop"), ValueError, r'on_full is \'drop\'; expected "retire" or "refuse"'),
]
ROWS = [
    (np.complex64, (9,), ("x",), TypeError, "leaf 'x' is complex64.*expected one or more integers"),
    (np.uint8, (0, 4), ("x",), TypeError, r"leaf 'x' is uint8\[0, 4\]"),
    (np.uint8, (9,), None, ValueError, r"no leaf of x has 1024 bytes a row\. Name some: keys=\(\.\.\.\)\."),
]


def test_invalid_settings_are_refused_with_the_fix() -> None:
    for make, kind, message in SETTINGS:
        with pytest.raises(kind, match=message):
            fbuf.Buffer(100, storage=make()).init(PICTURE)
    for dtype, shape, keys, kind, message in ROWS:
        with pytest.raises(kind, match=message):
            fbuf.Buffer(100, storage=Deduplicated(keys=keys)).init({"x": np.zeros(shape, dtype)})
    with pytest.raises(ValueError, match=r"references; expected less than 2\^32. Use larger blocks"):
        jax.eval_shape(fbuf.Buffer(10**9, storage=Deduplicated(keys=("obs",))).init, PICTURE)


def test_states_of_other_storages_and_settings_are_refused() -> None:
    ours, device = fbuf.Buffer(64, storage=Deduplicated()), fbuf.Buffer(64)
    with pytest.raises(TypeError, match="Deduplicated: another storage made this state"):
        ours.peek(device.init(PICTURE), KEY, 4)
    pytest.raises((TypeError, ValueError), lambda: device.peek(ours.init(PICTURE), KEY, 4)).match("this state")
    other = dataclasses.replace(ours, storage=Deduplicated(blocks=4096))
    pytest.raises(ValueError, lambda: other.peek(ours.init(PICTURE), KEY, 4)).match("made by another buffer")
    pytest.raises(ValueError, lambda: ours.convert(other, ours.init(PICTURE))).match("other.storage")


def test_growing_asks_for_more_places_and_a_concrete_state() -> None:
    both = fbuf.Buffer(36, lanes=3, storage=Deduplicated(keys=("a", "b"), block=(4, 4), blocks=96))
    example = {n: np.zeros(*x) for n, x in SMALL.items()}
    empty = both.init(example)
    pytest.raises(ValueError, both.grow, empty, 64).match(r"blocks is 64; expected at least the present 96")
    pytest.raises(ValueError, both.grow, empty, 100).match("expected a multiple of 32")
    with pytest.raises(TypeError, match=r"the state is traced.*outside jit"):
        jax.jit(lambda s: both.grow(s)[1])(empty)
    with pytest.raises(TypeError, match="cannot grow"):
        device = fbuf.Buffer(4)
        device.grow(device.init(jnp.float32(0)))
    with pytest.raises(ValueError, match=r"without 'b'.*Give one number, or one for each of: a, b"):
        both.grow(empty, {"a": 960})


def test_settings_are_values() -> None:
    one = Deduplicated(keys=("obs",), block={"obs": (12, 12)}, blocks={"obs": 64})
    assert one == Deduplicated(keys=["obs"], block={"obs": [12, 12]}, blocks={"obs": np.int64(64)})  # type: ignore[arg-type]
    assert hash(one) == hash(pickle.loads(pickle.dumps(one))) and eval(repr(one)) == one
    assert from_config(to_config(one)) == one

"""Training to the end, and with every storage: see `tests/more/demo/test_catch.py`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from fbuf.demo import catch

SHORT = catch.Config(iterations=120, points=4)


@pytest.mark.optimized
@pytest.mark.parametrize("storage", [name for name in catch.STORAGES if name != "device"])
def test_training_is_bit_exact_whichever_storage(storage: str) -> None:
    one, other = (
        catch.train(catch.make_buffer(catch.STORAGES[name](), SHORT, 512), 3, SHORT) for name in ("device", storage)
    )
    np.testing.assert_array_equal(one.curve, other.curve)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(one.curve) == 4 and -1 <= one.final <= 1


@pytest.mark.parametrize("learner", [catch.train, catch.train_torch], ids=["jax", "torch"])
def test_it_learns_to_catch(learner: Callable[..., catch.Result]) -> None:
    result = learner(catch.make_buffer())
    assert result.curve[0] < -0.5 and result.curve[-1] > 0.6  # a step in twenty is at random to the end
    assert result.final > 0.9

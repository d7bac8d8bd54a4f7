"""Training to the end, and with every storage: see `tests/more/demo/test_catch.py`."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

import fbuf
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


def test_the_network_learns_from_the_stacks_it_acted_on() -> None:
    buffer = fbuf.Buffer(64, view=fbuf.views.Transition(stack=catch.STACK, autoreset="same_step"), lanes=2)
    replay, actors, seen = buffer.init(catch.EXAMPLE), catch.first_actors(jax.random.key(0), 2), []
    play, add = jax.jit(catch.play), jax.jit(buffer.add)
    for number in range(20):
        seen.append(np.asarray(actors.stacks))
        actors, rows = play(actors, np.full(2, number % 3, np.int32), jax.random.key(number))
        replay = add(replay, rows)
    batch = jax.device_get(buffer.peek(replay, jax.random.key(1), 64))
    for slot, stack in zip(batch.index.slot, batch.data["obs"], strict=True):
        np.testing.assert_array_equal(stack, seen[slot // 2][slot % 2])

"""Buffers that refuse transforms, or take them with names of subtrees and other writers."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.storages import Ragged
from fbuf.transforms import Augment, Drop, Map, NormalizeReward, Rename, RewardToGo, Scale, Select
from tests.support import same_step
from tests.support.refusals import raises

EXAMPLES = [
    ({"on_write": Scale("y")}, {"x": 0.0}, "Scale: leaf 'y' is missing"),
    ({"on_read": Scale("y")}, {"x": 0.0}, "Scale: leaf 'y' is missing"),
    ({"on_read": NormalizeReward()}, {"x": 0.0}, r"of is 'reward', but rows have x\. Use of='x'\."),
    ({"on_read": RewardToGo()}, {"reward": 0.0}, "data are single rows; expected windows, of views.Sequence"),
    ({"on_write": Map(lambda row: row["x"].sum())}, {"x": np.zeros(3)}, None),
    ({"on_read": Map(lambda row: {"y": row["x"].sum()})}, {"x": np.zeros(3)}, None),
    ({"on_write": Drop("x"), "episode_end": ("x",)}, {"x": False, "y": 0}, "no leaf named 'x'; rows have y"),
    ({"on_write": Drop("x")}, {}, "the example has no leaves"),
    ({"on_write": Drop("x"), "view": same_step.Sequence(2)}, {"x": False, "y": 0}, "no leaf named 'terminated'"),
]


def test_init_checks_transforms_on_the_example():
    for settings, example, message in EXAMPLES:
        buffer = fbuf.Buffer(8, **settings)
        if message is None:
            assert buffer.plan(example).device == buffer.nbytes(buffer.init(example))["device"]
            continue
        for call in (buffer.init, buffer.plan) if "on_read" not in settings else (buffer.init,):
            raises((ValueError, TypeError), message, call, example)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Loses:
    def apply(self, data, context):
        return {"x": data["x"].sum()}


LEARNT = NormalizeReward()
BUFFERS = [
    (
        lambda: fbuf.Buffer(8, on_write=Augment("x")),
        r"stage 'augment' of on_write, Augment\(keys=\('x',\)\), needs a key\. Use on_read\.",
    ),
    (lambda: fbuf.Buffer(8, on_read=lambda x: x), r"on_read is <function.*Write Map\("),
    (lambda: fbuf.Buffer(8, on_write=3), "on_write is 3. Chain: stage is 3, without `apply`"),
    (lambda: fbuf.Buffer(8, on_read=Scale), "stage is the class Scale"),
    (
        lambda: fbuf.Buffer(8, storage=Ragged(), on_write=Scale("x")),
        r"on_write is Chain\(\(Scale\(keys=\('x',\)\),\)\), but Ragged\(\) holds objects\. Use on_read\.",
    ),
    (lambda: fbuf.Buffer(8, on_write=LEARNT, on_read=LEARNT), "both have a stage 'normalize_reward' with memory"),
    (lambda: fbuf.Buffer(8, on_write=Loses()).init({"x": 0.0}), r"'loses' of on_write.* leaf 'x' of shape \[\]"),
    (lambda: fbuf.Buffer(8, on_read=Loses()).init({"x": 0.0}), r"on_read, .* leaf 'x' of shape \[\] for a batch of 2"),
]
SEEN = [
    (fbuf.views.Row(), r"one row .* {'x': \[3\]}"),
    (fbuf.views.Sequence(2, episode_end=()), r"one window .* \[2, 3\]"),
]


def test_invalid_transforms_are_refused():
    for make, message in BUFFERS:
        raises((ValueError, TypeError), message, make)


def test_top_k_ranks_the_stored_values():
    buffer = fbuf.Buffer(2, writer=fbuf.writers.TopK("score"), on_write=Scale("score", -1.0))
    state = buffer.extend(buffer.init({"score": 0.0}), {"score": jnp.array([3.0, 1.0, 2.0])})
    assert buffer.rows(state).data["score"].tolist() == [-1.0, -2.0]


def test_names_of_subtrees_and_of_tuples():
    buffer = fbuf.Buffer(8, on_write=Select(("next/obs", "r")), on_read=Rename({("next", "obs"): "obs"}))
    state = buffer.init({"next": {"obs": 0.0, "t": 0}, "r": 0.0})
    assert buffer.peek(state, jax.random.key(0), 2).data.keys() == {"obs", "r"}


@pytest.mark.parametrize(("view", "what"), SEEN)
def test_a_function_of_a_whole_batch_is_told_what_it_gets(view, what):
    buffer = fbuf.Buffer(8, view=view, on_read=Map(lambda batch: {"x": batch["x"].mean(axis=2)}))
    with pytest.raises(IndexError) as caught:
        buffer.init({"x": np.zeros(3, np.float32)})
    assert re.search(f"Map.fn, <function .*, gets {what}", "".join(caught.value.__notes__))

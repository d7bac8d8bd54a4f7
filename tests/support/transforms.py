"""Buffers with transforms of every kind on both sides, and windows that hold values of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.transforms import Augment, Cast, Chain, Drop, Normalize, NormalizeReward, Rename, RewardToGo, Scale
from fbuf.views import Sequence, Transition
from tests.support import trees

RENAME, CAST = Rename({"observation": "obs"}), Cast("action", "int16", source="int32")
ON_WRITE = Chain((RENAME, CAST, RewardToGo(0.9), ("at_write", Normalize("speed")), Drop("nothing")))
ON_READ = Chain((NormalizeReward(), Augment("obs", 1), Scale("obs", offset=0.5), Rename({"action": "act"})))
BATCH, LANES = 6, 2


def given_rows(rng, count):
    shape = (count, LANES)
    return {
        "observation": rng.integers(1, 5, (*shape, 1, 1), np.uint8) * np.ones((8, 8), np.uint8),
        "action": rng.integers(0, 9, shape).astype(np.int32),
        "reward": rng.normal(size=shape).astype(np.float32),
        "terminated": rng.random(shape) < 0.15,
        "truncated": rng.random(shape) < 0.1,
        "speed": rng.normal(3, 2, shape).astype(np.float32),
        "nothing": np.zeros(shape, np.int8),
    }


EXAMPLE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), given_rows(np.random.default_rng(0), 1))


def make(storage, view, on_read=ON_READ, **settings):
    return fbuf.Buffer(40, lanes=LANES, storage=storage, view=view, on_write=ON_WRITE, on_read=on_read, **settings)


close = functools.partial(trees.close, rtol=2e-5, atol=2e-5)
VIEWS = {
    "Row": fbuf.views.Row(),
    "Transition": Transition(2, stack=3, autoreset="same_step"),
    "Sequence": Sequence(4, boundary="mask", at=1, autoreset="same_step"),
}


def apart(window):
    x, reward = window["x"], window["reward"]
    one = {"sum": x.sum(0), "first": x[0], "least": reward.min(), "most": reward.max()}
    return {**window, **one, "image": jnp.tile(reward.sum(), (5, 5))}


def laned_windows(width, on_read=None):
    view = Sequence(4, boundary="mask", episode_end=("done",), autoreset="same_step")
    buffer = fbuf.Buffer(20, view=view, on_read=on_read)
    x = np.random.default_rng(width).normal(size=(9, width)).astype(np.float32)
    rows = {"x": x, "reward": np.arange(1.0, 10.0, dtype=np.float32), "done": np.arange(9) % 3 == 2}
    return buffer, buffer.extend(buffer.init(jax.tree.map(lambda x: x[0], rows)), rows)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Largest(fbuf.parts.StatefulTransform):
    name: str = "reward"

    def watches(self, spec):
        return (self.name,)

    def init(self, spec):
        return jnp.float32(0)

    def observe(self, memory, leaves, mask):
        return jnp.maximum(memory, jnp.max(jnp.where(mask, jnp.abs(leaves[self.name]), jnp.float32(0))))

    def stats(self, memory):
        return {"is": memory}

    def apply(self, data, context):
        return data | {self.name: data[self.name] / context.memory}

"""mypy understands the programs of users: see `tests/project/test_public.py`."""

import importlib
import os
import re
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.more

PROGRAM = """
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.transforms import Cast, Rename, Scale

buffer = fbuf.Buffer(
    capacity=1000,
    storage=fbuf.storages.Compressed(keys=("obs",), codec={"obs": fbuf.storages.Zstd(chunk=4)}),
    sampler=fbuf.samplers.Prioritized(alpha=0.6, beta=0.4),
    view=fbuf.views.Transition(n_step=3, gamma=0.99, stack=4, autoreset="same_step"),
    lanes=8,
    on_write=(Rename({"observation": "obs"}), Cast("action", "int16")),
    on_read={"frames": Scale(("obs", "next_obs"))},
)
state: fbuf.BufferState = buffer.init({"observation": np.zeros((8, 8), np.uint8), "action": 0})


@partial(jax.jit, donate_argnums=0)
def step(state: fbuf.BufferState, rows: dict[str, jax.Array], key: jax.Array) -> tuple[fbuf.BufferState, jax.Array]:
    state = buffer.extend(state, rows)
    state, batch = buffer.sample(state, key, 32, beta=0.5)
    state = buffer.update_priority(state, batch.index, jnp.abs(batch.data["reward"]))
    return state, batch.weight


size: jax.Array = buffer.size(state)
stats: dict[str, jax.Array] = buffer.stats(state)
replay = fbuf.Replay(fbuf.prioritized(100), {"t": np.int32(0)}, seed=1, limit=fbuf.limits.samples_per_insert(8, 10))
with replay:
    batch: fbuf.Sample = replay.sample(8, to="numpy")
    index: fbuf.Index = batch.index
saving: fbuf.Saving = fbuf.save("here", buffer, state, wait=False)
mixture = fbuf.Mixture({"a": buffer, "b": fbuf.Buffer(10)}, fractions={"a": 0.5, "b": 0.5})
mixed, drawn = mixture.sample({"a": state, "b": fbuf.Buffer(10).init({"t": 0})}, jax.random.key(0), {"a": 4, "b": 4})
of_both: fbuf.Sample = drawn
with_text = fbuf.storages.Ragged(keys=("text",), maximum={"obs": (12,)})
sampler: fbuf.parts.Sampler = fbuf.samplers.Epoch()
transitions = fbuf.views.Transition(autoreset="same_step")
view: fbuf.parts.View = fbuf.views.Hindsight(transitions, lambda achieved, goal: jnp.float32(0))


@fbuf.parts.component
class Lately(fbuf.parts.NthSampler):
    share: float = 0.5

    def pick(self, key: jax.Array, batch_size: int, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((batch_size,), jnp.int32), jnp.ones((batch_size,))


@fbuf.parts.component
class Pairs(fbuf.parts.FieldsView):
    rule = fbuf.parts.EligibilityRule("pairs", back=1)

    def fields(self, spec: Any, eligible: fbuf.parts.EligibleSet, slot: jax.Array) -> dict[str, Any]:
        return {"t": ("t", fbuf.parts.earlier(eligible, slot, 1))}


@fbuf.parts.component
class Own(fbuf.parts.ArrayStorage):
    pass


@fbuf.parts.component
class Clip(fbuf.parts.Transform):
    largest: float

    def apply(self, data: Any, context: fbuf.parts.Context) -> Any:
        return data


own = fbuf.Buffer(10, storage=Own(), sampler=Lately(share=0.1), view=Pairs(), on_read=Clip(1.0))
"""
WRONG = """
import fbuf

buffer = fbuf.Buffer("many")
fbuf.samplers.Prioritized(alpha="much")
fbuf.Buffer(10, sampler=fbuf.views.Row())
buffer.sampel
state, index = buffer.extend(buffer.init({"t": 0}), {"t": 0})
replay = fbuf.Replay(fbuf.prioritized(10), {"t": 0})
replay.sample(2, bta=0.4)
replay.sample(2, to="numpi")
replay.set(alfa=0.4)
fbuf.views.Transition(autoreset="nextstep")
fbuf.prioritized(10, lane=2)
fbuf.views.Sequence(2, boundary="stay")
fbuf.samplers.Prioritized(normalize="bach")
buffer.sample(state, index, 2, bta=0.4)
fbuf.Mixture({"a": buffer}, quota="exactly")
"""


def marked(output, path):
    return {int(n) for n in re.findall(rf"{re.escape(path.name)}:(\d+)(?::\d+)?:? (?:- )?error", output)}


MYPY = (sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", "good.py", "wrong.py")


def test_mypy_understands_a_users_program(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "fbuf").symlink_to(ROOT / "fbuf")  # as an installed package
    for name, text in (("good.py", PROGRAM), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(text)
    site = str(tmp_path / "site")
    environment = os.environ | {"MYPYPATH": site, "PYTHONPATH": site}
    done = subprocess.run(MYPY, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not marked(done.stdout, tmp_path / "good.py"), done.stdout
    assert marked(done.stdout, tmp_path / "wrong.py") == {*range(4, 9), *range(10, 19)}, done.stdout


@pytest.mark.parametrize(
    "name", ["gymnasium", "orbax", "integrations.flashbax", "integrations.sb3", "integrations.torchrl"]
)
def test_completion_of_an_optional_module_offers_what_is_public(name):
    module = importlib.import_module(f"fbuf.{name}")
    assert [each for each in dir(module) if each[0] != "_"] == sorted(module.__all__)

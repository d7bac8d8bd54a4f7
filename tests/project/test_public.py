"""What a user sees: names, what completion offers, signatures, and what mypy says of a user's program."""

import dataclasses
import importlib
import inspect
import os
import re
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

import fbuf
from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.refusals import raises

MODULES = {
    name: value for name in (*fbuf.__all__, "ray", "torch") if isinstance(value := getattr(fbuf, name), ModuleType)
}
BUFFER = fbuf.Buffer(8)


def public(value: Any) -> list[str]:
    return [name for name in dir(value) if not name.startswith("_")]


def test_completion_offers_what_is_public() -> None:
    submodules = {"demo", "orbax"}  # there once imported
    assert set(public(fbuf)) - submodules == {*fbuf.__all__, "gymnasium", "ray", "torch"}
    assert len(set(fbuf.__all__)) == len(fbuf.__all__) and all(inspect.getdoc(getattr(fbuf, n)) for n in fbuf.__all__)
    for name, module in MODULES.items():
        assert sorted(module.__all__) == sorted(set(module.__all__)), name
        assert set(public(module)) == set(module.__all__), f"fbuf.{name}"


def test_completion_of_a_buffer_offers_fields_and_methods() -> None:
    fields = {field.name for field in dataclasses.fields(BUFFER)}
    line = re.search(r"^Methods of a buffer: (.*)$", (ROOT / "fbuf" / "GUIDE.md").read_text(), re.M)
    methods = set(re.findall(r"`(\w+)`", line[1])) if line else set()
    assert set(public(BUFFER)) == fields | methods
    assert all(callable(getattr(BUFFER, name)) for name in methods)


def callables() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in (*fbuf.__all__, "ray", "torch"):
        value = getattr(fbuf, name)
        members = {f"{name}.{n}": getattr(value, n) for n in value.__all__} if name in MODULES else {name: value}
        for called, member in members.items():
            if inspect.isclass(member):
                shown = public(BUFFER) if member is fbuf.Buffer else public(member)
                methods = ((n, vars(member)[n]) for n in shown if n in vars(member))
                found |= {f"{called}.{n}": m for n, m in methods if inspect.isfunction(m)}
            if callable(member) and not (inspect.isclass(member) and issubclass(member, Exception)):
                found[called] = member
    return found


def test_signatures_can_be_read_and_arguments_come_in_one_order() -> None:
    for name, value in callables().items():
        if getattr(value, "_is_protocol", False):
            continue
        signature = inspect.signature(value)
        assert "0x" not in str(signature) and "_<" not in str(signature), f"{name}{signature}"
        if name not in ("testing.assert_inplace", "testing.measure"):
            assert "*args" not in str(signature), f"{name}{signature}"
        names = [p for p in signature.parameters if p != "self"]
        if name.startswith(("Buffer.", "Mixture.")) and "state" in names and name != "Buffer.convert":
            assert names[0] == "state", name
        if name.startswith("plot.") and {"buffer", "state"} <= set(names):
            assert names[:2] == ["buffer", "state"], name
        if name.startswith("interop.to_") or name == "save":
            assert names[:3] == ["path", "buffer", "state"], name


@pytest.mark.more
def test_what_a_step_on_the_device_does_not_need_is_imported_when_it_is_asked_for() -> None:
    program = """
import sys
import jax, jax.numpy as jnp
import fbuf
from fbuf._core.component import from_config, to_config

buffer = fbuf.prioritized(10)
state = buffer.extend(buffer.init(jnp.float32(0)), jnp.ones(5))
buffer.sample(state, jax.random.key(0), 2)
late = ("fbuf._host.", "fbuf._formats.", "fbuf.transforms._scale", "jax._src.pallas", "torch")
early = [name for name in sys.modules if name.startswith(late)]
assert not early, early
import fbuf.datasets, fbuf.interop
assert not {"h5py", "minari", "PIL", "pyarrow", "torch", "tqdm"} & sys.modules.keys()

host = from_config({"type": "fbuf.storages.Ragged", "codec": {"type": "fbuf.storages.Zstd", "level": 5}})
assert host == fbuf.storages.Ragged(codec=fbuf.storages.Zstd(5)) and from_config(to_config(host)) == host
scale = from_config({"type": "fbuf.transforms.RewardToGo"})
assert scale == fbuf.transforms.RewardToGo()
assert fbuf.Lazy and "fbuf._host.store.store" in sys.modules
"""
    run_python(program)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    for package in (fbuf, fbuf.storages, fbuf.transforms):
        said = f"module '{package.__name__}' has no attribute 'Compresed'"
        raises(AttributeError, said, getattr, package, "Compresed")


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
    rule = fbuf.parts.AnchorRule("pairs", back=1)

    def fields(self, spec: Any, anchors: fbuf.parts.AnchorSet, slot: jax.Array) -> dict[str, Any]:
        return {"t": ("t", fbuf.parts.earlier(anchors, slot, 1))}


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
replay.sample(2).indices
index.slots
"""


def marked(output, path):
    return {int(n) for n in re.findall(rf"{re.escape(path.name)}:(\d+)(?::\d+)?:? (?:- )?error", output)}


MYPY = (sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", "good.py", "wrong.py")


@pytest.mark.more
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
    assert marked(done.stdout, tmp_path / "wrong.py") == {*range(4, 9), *range(10, 21)}, done.stdout


@pytest.mark.more
@pytest.mark.parametrize(
    "name", ["gymnasium", "orbax", "integrations.flashbax", "integrations.sb3", "integrations.torchrl"]
)
def test_completion_of_an_optional_module_offers_what_is_public(name):
    module = importlib.import_module(f"fbuf.{name}")
    assert [each for each in dir(module) if each[0] != "_"] == sorted(module.__all__)

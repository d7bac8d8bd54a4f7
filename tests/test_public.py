"""What a user sees: names, what completion offers, signatures, and what mypy and pyright say of a user's program."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fbuf

ROOT = Path(__file__).parent.parent
MODULES = {name: value for name in (*fbuf.__all__, "torch") if isinstance(value := getattr(fbuf, name), ModuleType)}
BUFFER = fbuf.Buffer(8)


def public(value: Any) -> list[str]:
    return [name for name in dir(value) if not name.startswith("_")]


def test_completion_offers_what_is_public() -> None:
    submodules = {"demo", "orbax"}  # there once imported
    assert set(public(fbuf)) - submodules == {*fbuf.__all__, "torch"}
    for name, module in MODULES.items():
        assert sorted(module.__all__) == sorted(set(module.__all__)), name
        assert set(public(module)) == set(module.__all__), f"fbuf.{name}"


def test_completion_of_a_buffer_offers_fields_and_verbs() -> None:
    fields = {field.name for field in dataclasses.fields(BUFFER)}
    verbs = set(re.findall(r"`(\w+)`", re.search(r"^\| verbs \|(.*)\|$", (ROOT / "README.md").read_text(), re.M)[1]))  # type: ignore[index]
    assert set(public(BUFFER)) == fields | verbs
    assert verbs == {name for name in verbs if callable(getattr(BUFFER, name))}


def callables() -> dict[str, Any]:
    """Everything public that is called, by name."""
    found: dict[str, Any] = {}
    for name in (*fbuf.__all__, "torch"):
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


def test_every_signature_can_be_read() -> None:
    """Arguments have names, types, and defaults without addresses; nothing hides behind *args but options by name."""
    for name, value in callables().items():
        if getattr(value, "_is_protocol", False):
            continue
        signature = str(inspect.signature(value))
        assert "0x" not in signature and "_<" not in signature, f"{name}{signature}"
        if name not in ("testing.assert_inplace", "testing.measure"):
            assert "*args" not in signature, f"{name}{signature}"


def test_arguments_come_in_one_order() -> None:
    """A verb takes the state first, then what it is about; files come first where there are any."""
    for name, verb in callables().items():
        names = [p for p in inspect.signature(verb).parameters if p != "self"]
        if name.startswith(("Buffer.", "Mixture.")) and "state" in names and name != "Buffer.convert":
            assert names[0] == "state", name
        if name.startswith("plot.") and {"buffer", "state"} <= set(names):
            assert names[:2] == ["buffer", "state"], name
        if name.startswith("interop.to_") or name == "save":
            assert names[:3] == ["path", "buffer", "state"], name


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
    view=fbuf.views.Transition(n_step=3, gamma=0.99, stack=4),
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
mixture = fbuf.Mixture({"a": buffer, "b": fbuf.uniform(10)}, fractions={"a": 0.5, "b": 0.5})
drawn: tuple[fbuf.MixtureState, fbuf.MixtureSample] = mixture.sample(
    mixture.init({"a": state, "b": {"t": 0}}), jax.random.key(0), {"a": 4, "b": 4}
)
with_text = fbuf.storages.Ragged(keys=("text",), maximum={"obs": (12,)})
sampler: fbuf.parts.Sampler = fbuf.samplers.Epoch()
view: fbuf.parts.View = fbuf.views.Hindsight(fbuf.views.Transition(), lambda achieved, goal: jnp.float32(0))


@fbuf.parts.component
class Lately(fbuf.parts.NthSampler):
    share: float = 0.5

    def pick(self, key: jax.Array, batch_size: int, total: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((batch_size,), jnp.int32), jnp.ones((batch_size,))


@fbuf.parts.component
class Pairs(fbuf.parts.FieldsView):
    rule = fbuf.parts.Rule("pairs", back=1)

    def fields(self, spec: Any, population: fbuf.parts.Population, slot: jax.Array) -> dict[str, Any]:
        return {"t": ("t", fbuf.parts.earlier(population, slot, 1))}


@fbuf.parts.component
class Own(fbuf.parts.ArrayStorage):
    pass


@fbuf.parts.component
class Clip:
    largest: float

    def apply(self, data: Any, context: fbuf.parts.Context) -> Any:
        return data


own = fbuf.Buffer(10, storage=Own(), sampler=Lately(share=0.1), view=Pairs(), on_read=Clip(1.0))
"""
WRONG = """
import fbuf

buffer = fbuf.uniform("many")
fbuf.samplers.Prioritized(alpha="much")
fbuf.Buffer(10, sampler=fbuf.views.Row())
buffer.sampel
state, index = buffer.extend(buffer.init({"t": 0}), {"t": 0})
"""


def marked(output: str, path: Path) -> set[int]:
    """Lines of a program that a checker found wrong."""
    return {int(n) for n in re.findall(rf"{re.escape(path.name)}:(\d+)(?::\d+)?:? (?:- )?error", output)}


@pytest.fixture
def installed(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder beside which fbuf lies as an installed package does."""
    import os

    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "fbuf").symlink_to(ROOT / "fbuf")
    return tmp_path, os.environ | {"MYPYPATH": str(tmp_path / "site"), "PYTHONPATH": str(tmp_path / "site")}


@pytest.mark.slow
def test_mypy_understands_a_users_program(installed: tuple[Path, dict[str, str]]) -> None:
    pytest.importorskip("mypy")
    folder, environment = installed
    for name, text in (("good.py", PROGRAM), ("wrong.py", WRONG)):
        (folder / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", "good.py", "wrong.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert not marked(done.stdout, folder / "good.py"), done.stdout
    assert marked(done.stdout, folder / "wrong.py") == {4, 5, 6, 7, 8}, done.stdout


@pytest.mark.slow
def test_pyright_understands_a_users_program(installed: tuple[Path, dict[str, str]]) -> None:
    if shutil.which("pyright") is None:
        pytest.skip("pyright is not installed: pip install pyright, which brings its own node or fetches one")
    folder, environment = installed
    for name, text in (("good.py", PROGRAM), ("wrong.py", WRONG)):
        (folder / name).write_text(text)
    (folder / "pyrightconfig.json").write_text('{"extraPaths": ["site"], "typeCheckingMode": "standard"}')
    done = subprocess.run(
        ["pyright", "--pythonpath", sys.executable, "good.py", "wrong.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if "error" not in done.stdout:
        pytest.skip(f"pyright did not run: {done.stdout[-300:]}{done.stderr[-300:]}")
    assert not marked(done.stdout, folder / "good.py"), done.stdout
    assert marked(done.stdout, folder / "wrong.py") == {4, 5, 6, 7, 8}, done.stdout


def test_what_a_step_on_the_device_does_not_need_is_imported_when_it_is_asked_for() -> None:
    program = """
import sys
import jax, jax.numpy as jnp
import fbuf
from fbuf._config import from_config, to_config

buffer = fbuf.prioritized(10)
state = buffer.extend(buffer.init(jnp.float32(0)), jnp.ones(5))
buffer.sample(state, jax.random.key(0), 2)
late = ("fbuf._host.", "fbuf._files", "fbuf._pieces", "fbuf.transforms._scale", "jax._src.pallas", "torch")
early = [name for name in sys.modules if name.startswith(late)]
assert not early, early

host = from_config({"type": "fbuf.storages.Ragged", "codec": {"type": "fbuf.storages.Zstd", "level": 5}})
assert host == fbuf.storages.Ragged(codec=fbuf.storages.Zstd(5)) and from_config(to_config(host)) == host
scale = from_config({"type": "fbuf.transforms.RewardToGo"})
assert scale == fbuf.transforms.RewardToGo()
assert fbuf.Lazy and "fbuf._host.store" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", [fbuf, fbuf.storages, fbuf.transforms], ids=["fbuf", "storages", "transforms"])
def test_a_name_that_is_not_there_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'Compresed'"):
        package.Compresed  # noqa: B018

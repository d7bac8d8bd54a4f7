"""What a user sees: names, what completion offers, signatures, and what mypy says of a user's program."""

import dataclasses
import inspect
import re
from types import ModuleType
from typing import Any

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


def test_an_import_starts_no_full_collection_and_leaves_the_collector_on() -> None:
    program = """
import gc, jax
before = gc.get_stats()[2]["collections"]
import fbuf
assert gc.isenabled() and gc.get_stats()[2]["collections"] == before
"""
    run_python(program)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    for package in (fbuf, fbuf.storages, fbuf.transforms):
        said = f"module '{package.__name__}' has no attribute 'Compresed'"
        raises(AttributeError, said, getattr, package, "Compresed")

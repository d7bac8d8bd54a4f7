"""The house's walls: who may import whom, what never appears at all, and that everything public is documented and runs.

The table below is the layout of the package, lowest first. A module imports only from layers below its own (inside
functions too; imports under TYPE_CHECKING are free), so a part can be read, tested and replaced knowing only what lies
under it. A new module needs a line here.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fbuf"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("_core", "_config", "_tree", "_pin", "_dispatch", "_duplicates", "_words", "_tables"),  # words and mechanisms
    ("_host", "_later", "_stop", "_closed"),
    ("_typing", "_errors", "_sample", "_host.owner", "_files", "_outline"),
    ("_openrows", "_wide", "_given", "_prefetch"),
    ("_ring", "_sumtree", "_permutation", "_blocks", "_blockprobe", "_blocktable"),  # on arrays
    ("_pieces",),
    ("_host.callback", "_lazy", "_descent"),  # on the host's, and on trees
    ("_host.treecall",),
    ("_anchors", "_population", "_roster", "_scatter", "_race", "_sweep", "_tournament"),
    ("_ranks", "_neighbours", "_weights"),
    ("_state",),
    ("storages", "samplers", "views", "writers", "transforms"),  # the parts, which never import one another
    ("_transforming", "parts"),
    ("_verbs", "_checked", "testing", "torch", "limits"),
    ("_ahead", "_filled", "_observing"),
    ("_plan", "_growth", "_checks", "_summary"),
    ("_buffer",),  # glue
    ("_mixture",),
    ("_presets", "_checkpoint", "_checkedbuffer"),
    ("_replay",),
    ("interop", "orbax", "plot"),
    ("datasets",),
    ("demo",),
    ("__main__", "__init__"),
)
PARTS = ("storages", "samplers", "views", "writers", "transforms")
WITH_JAX = ("_host.owner", "_host.callback", "_host.treecall")  # of the host's modules; the others know numpy alone
DEPENDENCIES = {"jax", "jaxlib", "numpy", "zstandard"}  # the core's; the rest is imported where it is used

MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def unit(module: str) -> str:
    """The name of a module in the table: a package goes by its own, but for the two of `_host` that know JAX."""
    return module if module in WITH_JAX else module.split(".")[0]


def layer(module: str) -> int:
    for number, names in enumerate(LAYERS):
        if unit(module) in names:
            return number
    raise AssertionError(f"fbuf.{module} has no layer: add it to LAYERS in tests/test_layering.py.")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, functions: bool = True) -> Iterator[ast.AST]:
    """All nodes that run; not those inside functions unless asked for."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if not functions and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield child
        yield from walk(child, functions)


def imports(module: str, functions: bool = True) -> Iterator[str]:
    """Dotted names a module imports: `fbuf._ring`, `jax.numpy`."""
    for node in walk(TREES[module], functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"fbuf.{module} line {node.lineno}: relative import; write it in full"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (
                    inner
                    if inner.removeprefix("fbuf.") in {m.removesuffix(".__init__") for m in MODULES}
                    else (node.module or "")
                )


def ours(module: str) -> list[str]:
    """Modules of the package it imports, without the prefix."""
    return [name.removeprefix("fbuf.") for name in imports(module) if name.startswith("fbuf.")]


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__"])
def test_imports_go_downwards(module: str) -> None:
    here = layer(module)
    for other in ours(module):
        same_unit = unit(other) == unit(module)
        assert same_unit or layer(other) < here, f"fbuf.{module} imports fbuf.{other}, which is no layer below it"
    if unit(module) not in ("demo", "__main__"):
        assert "fbuf" not in list(imports(module)), f"fbuf.{module} imports the package itself"


@pytest.mark.parametrize("module", [m for m in MODULES if unit(m) in PARTS])
def test_parts_never_import_one_another(module: str) -> None:
    assert {unit(other) for other in ours(module)} & set(PARTS) <= {unit(module)}


def test_no_module_imports_itself_by_way_of_others() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a cycle: {' -> '.join((*path, module))}"
        if module in done:
            return
        for other in ours(module):
            other = other if other in MODULES else f"{other}.__init__"
            if other in MODULES:
                visit(other, (*path, module))
        done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("module", [m for m in MODULES if m.startswith("_host.") and m not in WITH_JAX])
def test_what_runs_in_a_callback_knows_numpy_only(module: str) -> None:
    """JAX must not be called inside a callback."""
    assert not [name for name in imports(module) if name.split(".")[0] == "jax"]


@pytest.mark.parametrize("module", [m for m in MODULES if unit(m) not in ("demo", "orbax")])
def test_only_the_core_dependencies_are_imported_at_the_top(module: str) -> None:
    """All but the demo and the orbax handler, which need their extras and are imported by name."""
    names = {name.split(".")[0] for name in imports(module, functions=False)}
    assert names <= set(sys.stdlib_module_names) | DEPENDENCIES | {"fbuf", "__future__"}


FORBIDDEN_CALLS = {"eval", "exec", "__import__"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


@pytest.mark.parametrize("module", MODULES)
def test_no_pickle_and_no_eval(module: str) -> None:
    assert not {name.split(".")[0] for name in imports(module)} & FORBIDDEN_MODULES
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in FORBIDDEN_CALLS, f"fbuf.{module} line {node.lineno}: {called}"
            assert called not in ("jnp.load", "jax.numpy.load")
            for keyword in node.keywords:
                assert not (keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False"), node.lineno


CALLBACKS = {"buffer_callback", "io_callback", "pure_callback", "host_callback"}


@pytest.mark.parametrize("module", [m for m in MODULES if m != "_host.callback"])
def test_callbacks_live_in_one_module(module: str) -> None:
    names = {node.id for node in ast.walk(TREES[module]) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(TREES[module]) if isinstance(node, ast.Attribute)}
    names |= {
        alias.name for node in ast.walk(TREES[module]) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert not names & CALLBACKS


def test_no_ordered_effects() -> None:
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "ordered":
                assert ast.unparse(node.value) == "False", f"fbuf.{module} line {node.value.lineno}"


@pytest.mark.parametrize("module", [m for m in MODULES if m.split(".")[0] not in ("demo", "_host")])
def test_only_the_host_knows_threads_and_zstd(module: str) -> None:
    # Threads that share a replay; one that draws ahead, and how it is ended; one that saves; a loader's lock.
    threads = unit(module) in ("_replay", "_prefetch", "_stop") or module in ("_checkpoint._saving", "torch._loader")
    never = {"threading", "zstandard", "concurrent", "queue"} - ({"threading"} if threads else set())
    assert not {name.split(".")[0] for name in imports(module)} & never


# --------------------------------------------------------------------------------------------------- documentation


def documented(*modules: str, only: str = "") -> set[str]:
    """Methods with a docstring in classes of `modules` that have a base whose name contains `only`."""
    return {
        method.name
        for module in modules
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.ClassDef) and (not only or any(only in ast.unparse(base) for base in node.bases))
        for method in node.body
        if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
    }


def test_everything_public_is_documented() -> None:
    """A method may leave it to the Protocol of its part, or to a base class beside it."""
    protocols = documented("_typing", only="Protocol")
    bare = []
    for module, tree in TREES.items():
        inherited = documented(module) | (protocols if unit(module) in (*PARTS, "parts") else set())
        for node in tree.body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                bare.append(f"{module}.{node.name}")
            if isinstance(node, ast.ClassDef) and unit(module) != "demo":
                methods = [m.name for m in node.body if isinstance(m, ast.FunctionDef) and not ast.get_docstring(m)]
                bare += [f"{module}.{node.name}.{m}" for m in methods if m[0] != "_" and m not in inherited]
    assert not bare, f"without a docstring: {', '.join(bare)}"


def test_protocols_say_what_each_method_does() -> None:
    for node in ast.walk(TREES["_typing"]):
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
            assert ast.get_docstring(node)
            assert all(ast.get_docstring(m) for m in node.body if isinstance(m, ast.FunctionDef)), node.name


def test_module_docstrings_say_more_than_a_name() -> None:
    for module, tree in TREES.items():
        text = ast.get_docstring(tree) or ""
        assert len(text.split()) >= 5, f"fbuf.{module}: {text!r}"


def test_what_the_package_exports_is_there() -> None:
    import fbuf

    assert sorted(fbuf.__all__) == sorted(set(fbuf.__all__))
    for name in fbuf.__all__:
        value = getattr(fbuf, name)
        assert inspect.getdoc(value), name


def with_doctests() -> list[str]:
    return [m for m, path in MODULES.items() if ">>>" in path.read_text() and unit(m) not in ("demo", "__main__")]


@pytest.mark.parametrize("module", with_doctests())
def test_doctests(module: str) -> None:
    for of, needed in {"torch": "torch", "torch._tensordict": "tensordict", "orbax": "orbax.checkpoint"}.items():
        if of in (module, unit(module)):
            pytest.importorskip(needed)
    name = f"fbuf.{module}".removesuffix(".__init__")
    failed, tried = doctest.testmod(importlib.import_module(name), verbose=False)
    assert tried and not failed


def test_slow_tests_are_tests() -> None:
    for line in (ROOT / "tests" / "slow.txt").read_text().splitlines():
        if not line.startswith("#"):
            path, name = line.split("::", 1)
            assert f"\ndef {name.split('[')[0]}(" in (ROOT / path).read_text(), line

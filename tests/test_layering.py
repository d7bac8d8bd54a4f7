"""Which modules may import which, what the package never contains, and that everything public is documented.

The table below is the layout of the package, lowest first. A module imports only from layers below its own (inside
functions and under TYPE_CHECKING too), so a part can be read, tested and replaced knowing only what lies
under it. A new module needs a line here.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator

from tests.support.paths import ROOT

PACKAGE = ROOT / "fbuf"

LAYERS: tuple[tuple[str, ...], ...] = (
    ("_core", "_config", "_tree", "_pin", "_dispatch", "_duplicates", "_wide", "_tables"),  # words and mechanisms
    ("_host", "_later", "_stop", "_closed"),
    ("_typing", "_errors", "_sample", "_host.owner", "_files", "_outline"),
    ("_openrows", "_words", "_given", "_prefetch"),
    ("_ring", "_sumtree", "_permutation", "_blocks", "_blocktable"),  # on arrays
    ("_pieces", "_blockprobe"),
    ("_host.callback", "_lazy", "_descent"),  # on the host's, and on trees
    ("_host.treecall",),
    ("_anchors", "_population", "_roster", "_scatter", "_race", "_tournament"),
    ("_ranks", "_weights"),
    ("_state",),
    ("storages", "samplers", "views", "writers", "transforms"),  # the parts, which never import one another
    ("_bufferconfig",),
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


def walk(node: ast.AST, functions: bool = True, typing: bool = False) -> Iterator[ast.AST]:
    """Yield all nodes; on request without those inside functions, or with those under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if not typing and is_type_checking(child):
            continue
        if not functions and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield child
        yield from walk(child, functions, typing)


@functools.cache
def imports(module: str, functions: bool = True, typing: bool = False) -> list[str]:
    """Dotted names a module imports: `fbuf._ring`, `jax.numpy`."""
    return list(_imports(module, functions, typing))


def _imports(module: str, functions: bool, typing: bool) -> Iterator[str]:
    names = {m.removesuffix(".__init__") for m in MODULES}
    for node in walk(TREES[module], functions, typing):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"fbuf.{module} line {node.lineno}: relative import; write it in full"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner if inner.removeprefix("fbuf.") in names else (node.module or ""))


def ours(module: str) -> list[str]:
    """Modules of the package it imports, under TYPE_CHECKING too, without the prefix."""
    return [name.removeprefix("fbuf.") for name in imports(module, typing=True) if name.startswith("fbuf.")]


def test_imports_go_downwards() -> None:
    upward = [
        f"fbuf.{module} imports fbuf.{other}, which is not below it"
        for module in MODULES
        if module != "__init__"
        for other in ours(module)
        if unit(other) != unit(module) and layer(other) >= layer(module)
    ]
    assert not upward, "\n".join(upward)
    of_itself = [m for m in MODULES if unit(m) not in ("demo", "__main__", "__init__") and "fbuf" in imports(m)]
    assert not of_itself, f"import the package itself: {of_itself}"


def test_parts_never_import_one_another() -> None:
    found = [(m, other) for m in MODULES if unit(m) in PARTS for other in ours(m) if unit(other) in PARTS]
    assert not [pair for pair in found if unit(pair[0]) != unit(pair[1])]


def test_no_import_cycles() -> None:
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


def top_level(module: str, functions: bool = True) -> set[str]:
    return {name.split(".")[0] for name in imports(module, functions)}


def test_callbacks_use_numpy_only() -> None:
    """JAX must not be called inside a callback."""
    host = [m for m in MODULES if m.startswith("_host.") and m not in WITH_JAX]
    assert host and not [m for m in host if "jax" in top_level(m)]


def test_only_the_core_dependencies_are_imported_at_the_top() -> None:
    """All but the demo and the orbax handler, which need their extras and are imported by name."""
    allowed = set(sys.stdlib_module_names) | DEPENDENCIES | {"fbuf", "__future__"}
    extra = {m: top_level(m, functions=False) - allowed for m in MODULES if unit(m) not in ("demo", "orbax")}
    assert not {m: names for m, names in extra.items() if names}


FORBIDDEN_CALLS = {"eval", "exec", "__import__", "jnp.load", "jax.numpy.load"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_no_pickle_and_no_eval() -> None:
    assert not [m for m in MODULES if top_level(m) & FORBIDDEN_MODULES]
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in FORBIDDEN_CALLS, f"fbuf.{module} line {node.lineno}"
                pickled = [k for k in node.keywords if k.arg == "allow_pickle" and ast.unparse(k.value) != "False"]
                assert not pickled, f"fbuf.{module} line {node.lineno}"


CALLBACKS = {"buffer_callback", "io_callback", "pure_callback", "host_callback"}


def names_in(tree: ast.AST) -> set[str]:
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}


def test_callbacks_are_in_one_module() -> None:
    assert [m for m, tree in TREES.items() if names_in(tree) & CALLBACKS] == ["_host.callback"]


def test_no_ordered_effects() -> None:
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "ordered":
                assert ast.unparse(node.value) == "False", f"fbuf.{module} line {node.value.lineno}"


def test_only_the_host_uses_threads_and_zstd() -> None:
    # A replay shared by threads, prefetching, its end, saving in the background, a loader's locks; workers are processes.
    threads = (
        "_replay",
        "_prefetch",
        "_stop",
        "_checkpoint._saving",
        "torch._loader",
        "torch._batches",
        "datasets._atari_workers",
    )
    for module in MODULES:
        if module.split(".")[0] not in ("demo", "_host"):
            own = {"threading"} if unit(module) in threads or module in threads else set()
            own |= {"concurrent"} if module == "datasets._atari_workers" else set()
            assert not top_level(module) & ({"threading", "zstandard", "concurrent", "queue"} - own), module


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


def test_methods_of_protocols_are_documented() -> None:
    for node in ast.walk(TREES["_typing"]):
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
            assert ast.get_docstring(node)
            assert all(ast.get_docstring(m) for m in node.body if isinstance(m, ast.FunctionDef)), node.name


def test_exports_exist_and_are_documented() -> None:
    import fbuf

    assert sorted(fbuf.__all__) == sorted(set(fbuf.__all__))
    for name in fbuf.__all__:
        value = getattr(fbuf, name)
        assert inspect.getdoc(value), name

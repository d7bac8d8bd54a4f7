"""Check which folders may import which, what the package never contains, and that everything public is documented."""

import ast
import functools
import graphlib
import sys
from collections.abc import Iterator

from tests.support.paths import ROOT

PACKAGE = ROOT / "fbuf"

FLOORS: tuple[tuple[str, ...], ...] = (
    ("_core", "_concurrency", "_host"),
    ("_algorithms", "_interfaces", "_formats.__init__", "_formats.checkpoint"),
    ("_members.__init__", "_members.quota", "_members.weights"),
    ("_indexing", "_bridge", "_formats.dataset", "limits", "testing"),
    ("storages", "samplers", "views", "writers", "transforms"),  # never import one another
    ("_buffer", "parts"),
    ("_members.split",),
    ("sharded", "torch"),
    ("_members.mixture",),
    ("_checkpoint", "_rows", "_host_draws"),
    ("_replay", "orbax", "datasets", "integrations"),
    ("interop",),
    ("plot",),
    ("_cli", "demo", "gymnasium", "ray", "__main__", "__init__"),
)
PARTS = ("storages", "samplers", "views", "writers", "transforms")
HOST = ("types __init__", "failed_writes io", "memory", "codecs", "columns", "store ragged priorities", "pairs")
DEPENDENCIES = {"jax", "jaxlib", "numpy", "zstandard"}  # the core's; the rest is imported where it is used

MODULES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))}
INTERFACES = [name for name in MODULES if name.startswith("_interfaces.")]


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def folder(module: str) -> str:
    """Return the name of a module's row in the table: that of its folder, or its own."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] in ("_formats", "_members") else parts[0]


def floor(module: str) -> int:
    found = [number for number, names in enumerate(FLOORS) if folder(module) in names]
    assert found, f"fbuf.{module} is on no floor: add its folder to FLOORS in tests/project/test_layering.py."
    return found[0]


def statements(node: ast.AST, functions: bool = True, typing: bool = False) -> Iterator[ast.AST]:
    """Yield all statements; on request without those inside functions, or with those under TYPE_CHECKING."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            continue
        if not typing and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if not functions and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        yield child
        yield from statements(child, functions, typing)


@functools.cache
def imports(module: str, functions: bool = True, typing: bool = False) -> list[str]:
    """Dotted names a module imports: `fbuf._core.slots`, `jax.numpy`."""
    names, found = {m.removesuffix(".__init__") for m in MODULES}, []
    for node in statements(trees()[module], functions, typing):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"fbuf.{module} line {node.lineno}: relative import; write it in full"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name if name.removeprefix("fbuf.") in names else (node.module or "") for name in inner]
    return found


def ours(module: str) -> list[str]:
    """Modules of the package it imports, under TYPE_CHECKING too, without the prefix."""
    return [name.removeprefix("fbuf.") for name in imports(module, typing=True) if name.startswith("fbuf.")]


def test_imports_go_downwards() -> None:
    assert {m for m in MODULES if "." not in m and m.startswith("_")} == {"__init__", "__main__"}
    upward = [
        f"fbuf.{module} imports fbuf.{other}, which is not below it"
        for module in MODULES
        if module not in ("__init__", "__main__")
        for other in ours(module)
        if folder(other) != folder(module) and floor(other) >= floor(module)
    ]
    assert not upward, "\n".join(upward)
    users = ("demo", "_cli", "__main__", "__init__")
    of_itself = [m for m in MODULES if folder(m) not in users and "fbuf" in imports(m)]
    assert not of_itself, f"import the package itself: {of_itself}"


def test_imports_within_the_host_store_go_downwards() -> None:
    row = {name: number for number, names in enumerate(HOST) for name in names.split()}
    for module in MODULES:
        if module.startswith("_host."):
            own = module.split(".")[1]
            for other in (name.split(".")[1] for name in ours(module) if name.startswith("_host.")):
                below = row[other] < row[own] or row[own] == row[other] == 0
                assert other == own or below, f"fbuf.{module} imports _host.{other}"


def test_no_import_cycles() -> None:
    graph = {m: {o if o in MODULES else f"{o}.__init__" for o in ours(m)} for m in MODULES}
    graphlib.TopologicalSorter(graph).prepare()  # raises an error that names the modules of a cycle


def top_level(module: str, functions: bool = True) -> set[str]:
    return {name.split(".")[0] for name in imports(module, functions)}


def test_callbacks_use_numpy_only() -> None:
    host = [m for m in MODULES if m.startswith("_host.")]
    assert host and not [m for m in host if "jax" in top_level(m)]


def test_only_the_core_dependencies_are_imported_at_the_top() -> None:
    allowed = set(sys.stdlib_module_names) | DEPENDENCIES | {"fbuf", "__future__"}
    core = [m for m in MODULES if folder(m) not in ("demo", "orbax", "integrations")]
    assert not [m for m in core if top_level(m, functions=False) - allowed]


FORBIDDEN_CALLS = {"eval", "exec", "__import__", "jnp.load", "jax.numpy.load"}
LAST_NAMES = {name.rsplit(".")[-1] for name in FORBIDDEN_CALLS}
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def test_no_pickle_no_eval_and_no_ordered_effects() -> None:
    assert not [m for m in MODULES if top_level(m) & FORBIDDEN_MODULES]
    for module, tree in trees().items():
        for node in ast.walk(tree):
            where = f"fbuf.{module} line {getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and names_in(node.func) & LAST_NAMES:
                assert ast.unparse(node.func) not in FORBIDDEN_CALLS, where
            if isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "ordered"):
                assert ast.unparse(node.value) == "False", where


CALLBACKS = {"buffer_callback", "io_callback", "pure_callback", "host_callback"}


def names_in(tree: ast.AST) -> set[str]:
    fields = {ast.Name: "id", ast.Attribute: "attr", ast.alias: "name"}
    return {getattr(node, fields[type(node)]) for node in ast.walk(tree) if type(node) in fields}


def test_callbacks_are_in_one_module() -> None:
    assert [m for m, tree in trees().items() if names_in(tree) & CALLBACKS] == ["_bridge.callbacks"]


def test_only_the_host_uses_threads_and_zstd() -> None:
    # A replay shared by threads, prefetching, its end, saving in the background, a loader's locks; workers are processes.
    threads = "_replay _bridge.lifetime _checkpoint.async_save torch._loader datasets._atari.workers".split()
    for module in MODULES:
        if module.split(".")[0] not in ("demo", "_host", "_concurrency"):
            own = {"threading"} if folder(module) in threads or module in threads else set()
            own |= {"concurrent"} if module == "datasets._atari.workers" else set()
            assert not top_level(module) & ({"threading", "zstandard", "concurrent", "queue"} - own), module


def documented(*modules: str) -> set[str]:
    """Methods with a docstring in classes of `modules`."""
    return {
        method.name
        for module in modules
        for node in ast.walk(trees()[module])
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
    }


def test_everything_public_is_documented() -> None:
    """A method may leave it to the base class of its part, to one beside it, or to the decorator `state`."""
    interfaces, bare = documented(*INTERFACES), []
    for module, tree in trees().items():
        inherited = documented(module) | {"ranges"} | (interfaces if folder(module) in (*PARTS, "parts") else set())
        for node in tree.body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name.startswith("_"):
                continue
            if any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list):
                continue
            if not ast.get_docstring(node):
                bare.append(f"{module}.{node.name}")
            if isinstance(node, ast.ClassDef) and folder(module) != "demo":
                functions = [m for m in node.body if isinstance(m, ast.FunctionDef) and not ast.get_docstring(m)]
                methods = [m.name for m in functions if not any("wraps(" in ast.unparse(d) for d in m.decorator_list)]
                bare += [f"{module}.{node.name}.{m}" for m in methods if m[0] != "_" and m not in inherited]
    assert not bare, f"without a docstring: {', '.join(bare)}"

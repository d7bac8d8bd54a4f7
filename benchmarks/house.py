"""Count what makes the package easy or hard to read: `python -m benchmarks.house`; exits with 1 above a limit.

A limit is what the code reaches today, so that a change that makes it worse must say so by raising it. A change that lowers a
count lowers its limit.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import fbuf
from benchmarks import hops

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {
    "public methods of all facades": 90,
    "public names": 150,
    "code lines of fbuf/": 39_632,
    "probes of parts": 23,
    "reads of module._name": 0,
    "functions above 60 lines": 0,
    "lines of tests/": 50_947,
    "lines of tests/support/": 11_207,
    "test files that import tests": 0,
    "texts -k that choose tests": 0,
    "files of a traced device extend": 14,
    "moves of a traced device extend": 61,
    "files of a traced compressed sample": 28,
    "moves of a traced compressed sample": 99,
}

_FACADES = {
    "_buffer/buffer.py": ("Buffer",),
    "_members/mixture/mixture.py": ("Mixture",),
    "sharded/_sharded.py": ("Sharded",),
    "_replay/replay.py": ("Replay",),
    "ray/_client.py": ("Client",),
    "ray/_service.py": ("RayReplay",),
}
_PARTS = re.compile(r"storage|sampler|view|writer|transform|codec|part$|component|rule$", re.I)


def trees(folder: str) -> Iterator[tuple[Path, ast.Module]]:
    """Yield the modules below a folder of the repository, parsed."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path, ast.parse(path.read_text())


def public_methods() -> int:
    """Return the methods and properties without an underscore that the facades define; a property and its setter are one."""
    total = 0
    for name, classes in _FACADES.items():
        path = ROOT / "fbuf" / name
        for node in ast.parse(path.read_text()).body if path.exists() else []:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                total += len({m.name for m in node.body if isinstance(m, ast.FunctionDef) and m.name[0] != "_"})
    return total


def public_names() -> int:
    """Return the names of `fbuf` and its public modules."""
    names = [*fbuf.__all__, "ray", "torch"]
    modules = [value for value in (getattr(fbuf, name) for name in names) if hasattr(value, "__path__")]
    modules += [value for value in (getattr(fbuf, name) for name in fbuf.__all__) if hasattr(value, "__spec__")]
    every = {id(module): module for module in modules}.values()
    return len(names) + sum(len(module.__all__) for module in every)


def code_lines(folder: str) -> int:
    """Return the lines that are not blank, a comment or part of a docstring, of attributes too."""
    total = 0
    for path, tree in trees(folder):
        docs = set[int]()
        for node in ast.walk(tree):
            match node:
                case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=last):
                    docs |= set(range(first, (last or first) + 1))
        lines = enumerate(path.read_text().splitlines(), 1)
        total += sum(bool(line.strip()) and line.strip()[0] != "#" and at not in docs for at, line in lines)
    return total


def probes() -> int:
    """Return the calls that ask a part what it can do: `getattr` with a default, `hasattr`, `isinstance` of an interface."""
    interfaces = {
        node.name
        for _, tree in trees("fbuf/_interfaces")
        for node in tree.body
        if isinstance(node, ast.ClassDef) and any(isinstance(inner, ast.FunctionDef) for inner in node.body)
    }
    return sum(_is_probe(node, interfaces) for _, tree in trees("fbuf") for node in ast.walk(tree))


def _is_probe(node: ast.AST, interfaces: set[str]) -> bool:
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
        return False
    of = ast.unparse(node.args[0])
    if node.func.id == "isinstance":
        return bool(interfaces & {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)})
    named = len(node.args) > 1 and isinstance(node.args[1], ast.Constant)
    wanted = {"getattr": 3, "hasattr": 2}.get(node.func.id, 0)
    return named and len(node.args) == wanted and bool(_PARTS.search(of.rsplit(".", 1)[-1]))


def reads_of_private_names() -> int:
    """Return the reads of `module._name` of another module of the package."""
    total = 0
    for _, tree in trees("fbuf"):
        modules = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fbuf")
            for alias in node.names
            if (ROOT / (node.module or "").replace(".", "/") / f"{alias.name}.py").exists()
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                total += node.attr.startswith("_") and not node.attr.startswith("__")
    return total


def long_functions() -> list[str]:
    """Return the functions of more than 60 lines without their docstrings."""
    found = []
    for path, tree in trees("fbuf"):
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = node.body[1 if ast.get_docstring(node) is not None and len(node.body) > 1 else 0].lineno
                if (node.end_lineno or first) - first + 1 + node.body[0].lineno - node.lineno > 60:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    return found


def lines(folder: str) -> int:
    """Return the lines of all modules below a folder."""
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def tests_that_import_tests() -> int:
    """Return the files below tests/ that import a test file, other than their folder's scripts and data."""
    pattern = re.compile(r"^\s*(?:from|import) tests\.(?!support)[\w.]+(?: import)?.*\btest_", re.M)
    return sum(bool(pattern.search(path.read_text())) for path in (ROOT / "tests").rglob("*.py"))


def texts_that_choose_tests() -> int:
    """Return the options `-k` below tests/: a test that is renamed silently leaves what such a text chooses."""
    return sum(len(re.findall(r"""["']-k\b""", path.read_text())) for path in (ROOT / "tests").rglob("*.py"))


def counts() -> dict[str, int]:
    """Return every count, by name."""
    counter = hops.Counter()
    extend, sample = hops.device_extend(counter)[0], hops.compressed_sample(counter)[0]
    return {
        "public methods of all facades": public_methods(),
        "public names": public_names(),
        "code lines of fbuf/": code_lines("fbuf"),
        "probes of parts": probes(),
        "reads of module._name": reads_of_private_names(),
        "functions above 60 lines": len(long_functions()),
        "lines of tests/": lines("tests"),
        "lines of tests/support/": lines("tests/support"),
        "test files that import tests": tests_that_import_tests(),
        "texts -k that choose tests": texts_that_choose_tests(),
        "files of a traced device extend": len(extend.files),
        "moves of a traced device extend": extend.moves,
        "files of a traced compressed sample": len(sample.files),
        "moves of a traced compressed sample": sample.moves,
    }


def main() -> int:
    """Print the counts with their limits; return 1 if one is exceeded."""
    above = 0
    for name, count in counts().items():
        above += count > LIMITS[name]
        print(f"{name:40} {count:8,} {'of' if count <= LIMITS[name] else 'ABOVE':>6} {LIMITS[name]:,}")
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())

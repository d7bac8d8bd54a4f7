"""The catalogue: what a mutant is, how its file is read, and where in a package it is found.

A file of the catalogue reads

    [ring] transition staleness
    R1 place: masked rows take the next slot
    - rank = jnp.cumsum(keep, axis=0) - jnp.int32(1)
    + rank = jnp.cumsum(keep, axis=0)

A group and the topics of its likely tests; an id, a definition and what breaks; the snippet and its replacement. Marks:
`~ tests: a b` (in place of the group's) and `~ equivalent: why`. Spaces and line breaks in snippets are ignored.
"""

from __future__ import annotations

import ast
import collections
import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CATALOGUE = Path(__file__).parent / "catalogue"
_MARKS = ("tests", "equivalent")


@dataclass
class Mutant:
    """One defect: `old` in the definition `name` becomes `new`."""

    id: str
    group: str
    name: str
    breaks: str
    tests: tuple[str, ...]
    old: str = ""
    new: str = ""
    equivalent: str = ""


@dataclass(frozen=True)
class Site:
    """Where a mutant is: characters `start` to `stop` of a file."""

    path: Path
    start: int
    stop: int


class CatalogueError(ValueError):
    """A mutant that cannot be planted."""


def read(folder: Path = CATALOGUE) -> list[Mutant]:
    """Return the mutants of all files in a folder."""
    mutants = [mutant for path in sorted(folder.glob("*.txt")) for mutant in parse(path.read_text(), path.name)]
    ids = [mutant.id for mutant in mutants]
    twice = sorted({id for id in ids if ids.count(id) > 1})
    if twice:
        raise CatalogueError(f"two mutants have the id {', '.join(twice)}")
    return mutants


def parse(text: str, where: str = "") -> list[Mutant]:
    """Return the mutants of one file."""
    mutants: list[Mutant] = []
    group, topics = "", ()
    for number, line in enumerate(text.splitlines(), 1):
        kind, rest = line[:1], line[2:]
        if not line.strip() or kind == "#":
            continue
        if heading := re.fullmatch(r"\[(\w+)\] (.+)", line):
            group, topics = heading[1], tuple(heading[2].split())
        elif kind in "-+" and mutants:
            field = "old" if kind == "-" else "new"
            setattr(mutants[-1], field, "\n".join(filter(None, (getattr(mutants[-1], field), rest))))
        elif kind == "~" and mutants and (mark := re.fullmatch(rf"({'|'.join(_MARKS)}): (.+)", rest)):
            setattr(mutants[-1], mark[1], tuple(mark[2].split()) if mark[1] == "tests" else mark[2])
        elif group and (title := re.fullmatch(r"(\w+) ([\w.]+): (.+)", line)):
            mutants.append(Mutant(title[1], group, title[2], title[3], topics))
        else:
            raise CatalogueError(f"{where}:{number}: {line!r} is not a line of a catalogue")
    return mutants


class Package:
    """The sources of a package, and the definitions in them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.texts = {path: path.read_text() for path in sorted(folder.rglob("*.py"))}
        self._definitions = [
            (name, path, span)
            for path, text in self.texts.items()
            for name, span in _definitions(ast.parse(text).body, _starts(text), "")
        ]
        self._named = collections.defaultdict(list)
        for definition in self._definitions:
            self._named[definition[0].split(".")[-1]].append(definition)

    def find(self, mutant: Mutant) -> Site:
        """Return where a mutant is, if at exactly one place."""
        pattern = _pattern(mutant.old)
        named = [d for d in self._named[mutant.name.split(".")[-1]] if f".{d[0]}".endswith(f".{mutant.name}")]
        sites = {
            Site(path, found.start(), found.end())
            for _, path, (start, stop) in named
            for found in pattern.finditer(self.texts[path], start, stop)
        }
        if len(sites) == 1:
            return next(iter(sites))
        elsewhere = sorted({n for n, p, span in self._definitions if pattern.search(self.texts[p], *span)})
        hint = f"; the snippet is in {', '.join(elsewhere)}" if elsewhere else "; the snippet is nowhere"
        raise CatalogueError(
            f"{mutant.id}: {len(named)} definitions are called {mutant.name}, and the snippet is {len(sites)} times in them"
            f"{hint}"
        )

    def digest(self, mutant: Mutant) -> str:
        """Return what a mutant and the definition that it is in read, as a hash."""
        site = self.find(mutant)
        spans = [span for _, path, span in self._definitions if path == site.path]
        start, stop = max(
            (span for span in spans if span[0] <= site.start and site.stop <= span[1]), key=lambda s: s[0]
        )
        text = self.texts[site.path][start:stop]
        return hashlib.sha256("\0".join((text, mutant.old, mutant.new)).encode()).hexdigest()[:12]

    def mutated(self, mutant: Mutant) -> tuple[Path, str]:
        """Return the file of a mutant, relative to the package, and its text with the defect."""
        site = self.find(mutant)
        text = self.texts[site.path]
        line = text[text.rfind("\n", 0, site.start) + 1 : site.start]
        indent = line[: len(line) - len(line.lstrip())]
        new = text[: site.start] + mutant.new.replace("\n", "\n" + indent) + text[site.stop :]
        try:
            ast.parse(new)
        except SyntaxError as error:
            raise CatalogueError(f"{mutant.id}: the mutant is not Python: {error}") from None
        if mutant.old.split() == mutant.new.split():
            raise CatalogueError(f"{mutant.id}: the mutant changes nothing")
        return site.path.relative_to(self.folder), new


def check(mutants: list[Mutant], package: Package, topics: set[str]) -> list[str]:
    """Return what is wrong with a catalogue: mutants that cannot be planted, topics without tests."""
    wrong = []
    for mutant in mutants:
        try:
            package.mutated(mutant)
        except CatalogueError as error:
            wrong.append(str(error))
        wrong += [f"{mutant.id}: there is no tests/**/test_{t}*.py" for t in mutant.tests if not _has(t, topics)]
    return wrong


def _has(topic: str, topics: set[str]) -> bool:
    return any(there.startswith(topic) for there in topics)


def _pattern(snippet: str) -> re.Pattern[str]:
    """Match a snippet whatever the spaces and line breaks between its characters."""
    letters = [c for c in snippet if not c.isspace()]
    if not letters:
        raise CatalogueError("a mutant without a snippet")
    body = r"\s*".join(map(re.escape, letters))
    before, after = (r"\b" if c.isalnum() or c == "_" else "" for c in (letters[0], letters[-1]))
    return re.compile(before + body + after)


def _starts(text: str) -> list[int]:
    """Return where each line begins, and the end."""
    return [0, *itertools.accumulate(len(line) + 1 for line in text.split("\n"))]


def _definitions(body: list[ast.stmt], starts: list[int], prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
    """Return the functions, classes and constants of a module with their qualified names, inner ones too."""
    for node in body:
        span = starts[node.lineno - 1], starts[node.end_lineno or node.lineno]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield prefix + node.name, span
            yield from _definitions(node.body, starts, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((prefix + t.id, span) for t in targets if isinstance(t, ast.Name))
        else:
            for field in ("body", "orelse", "finalbody"):
                yield from _definitions(getattr(node, field, []), starts, prefix)

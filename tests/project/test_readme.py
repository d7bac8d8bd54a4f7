"""What users read runs: blocks of pages, both sides of MIGRATING.md, docstrings and `tests/programs`."""

import contextlib
import doctest
import importlib
import re
import runpy
import warnings
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

import fbuf
from benchmarks.peers import _torchrl_tree
from tests.support.paths import ROOT
from tests.support.processes import devices, run_python

pytestmark = pytest.mark.more

FOLDERS = "storages", "datasets", "parts"
PAGES = ["README.md", "fbuf/GUIDE.md", "fbuf/TORCH.md", *(f"fbuf/{folder}/README.md" for folder in FOLDERS)]


@contextlib.contextmanager
def as_users_have_it():
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs(page):
    found = [block for block in blocks((ROOT / page).read_text()) if "ray" not in block.words]  # tests/ray
    assert found
    scope = {}
    warns = page == "fbuf/TORCH.md"  # torch, of its prototypes
    with as_users_have_it() if warns else jax.numpy_rank_promotion("allow"):
        for number, block in enumerate(found):
            exec(compile(block.code, f"{page}, block {number}", "exec"), scope)


PACKAGE = ROOT / "fbuf"
NEEDED = {
    "fbuf.gymnasium": "gymnasium",
    "fbuf.integrations.sb3": "stable_baselines3",
    "fbuf.integrations.torchrl": "torchrl",
    "fbuf.torch": "torch",
    "fbuf.torch._tensordict": "tensordict",
    "fbuf.orbax": "orbax.checkpoint",
}
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in path.read_text() and not {"demo", "ray"} & set(path.relative_to(PACKAGE).parts)  # tests/ray
]


@pytest.mark.parametrize("module", [m for m in MODULES if m != "fbuf.__main__"])
def test_doctests(module):
    for package, needed in NEEDED.items():
        if f"{module}.".startswith(f"{package}."):
            pytest.importorskip(needed)
    failed, tried = doctest.testmod(importlib.import_module(module), verbose=False)
    assert tried and not failed


FOLDER = Path(fbuf.__file__).parent
PEERS = {"From torchrl": "torchrl", "From flashbax": "flashbax"}
FENCE = re.compile(r"^```python([^\n]*)\n(.*?)^```$", re.S | re.M)


class Block(NamedTuple):
    """A block of code, and what its first line says after `python`."""

    words: tuple[str, ...]
    code: str


class Section(NamedTuple):
    """A heading, the blocks that all under its peer share, and its own."""

    peer: str
    title: str
    shared: list[Block]
    own: list[Block]


def blocks(text):
    return [Block(tuple(words.split()), code) for words, code in FENCE.findall(text)]


def sections():
    page, out = (FOLDER / "MIGRATING.md").read_text(), []
    for part in page.split("\n## ")[1:]:
        first, *rest = part.split("\n### ")
        name = first.split("\n")[0]
        out += [Section(PEERS[name], text.split("\n")[0], blocks(first), blocks(text)) for text in rest]
    return out


SECTIONS = sections()


def run(section, side):
    """What a side of a section leaves as `content`. The peer's blocks come first where ours go on from them."""
    scope = {}
    chosen = [b for b in section.shared if side in b.words or (side == "fbuf" and "tensordict" in b.words)]
    chosen += [b for b in section.own if side in b.words or (side == "fbuf" and _goes_on(section))]
    for number, block in enumerate(chosen):
        exec(compile(block.code, f"MIGRATING.md, {section.title}, {side} {number}", "exec"), scope)
    return scope["content"]


def _goes_on(section):
    return any({section.peer, "fbuf"} <= set(block.words) for block in section.own)


def plain(content):
    if isinstance(content, tuple):
        return tuple(plain(part) for part in content)
    return np.asarray(content).tolist()


NAMES = [f"{section.peer}: {section.title}" for section in SECTIONS]


@pytest.mark.parametrize("section", SECTIONS, ids=NAMES)
def test_both_sides_give_the_same(section):
    needs_trees = any("trees" in block.words for block in section.own)
    with as_users_have_it():
        there, ours = section.peer != "torchrl" or find_trees(), run(section, "fbuf")
        try:
            theirs = run(section, section.peer)
        except RuntimeError as error:
            if needs_trees and (not there or "is not available" in str(error)):  # torchrl was imported before them
                pytest.skip(f"torchrl's trees are not there: {error}")
            raise
        assert plain(theirs) == plain(ours)


def find_trees():
    """Load torchrl's trees, of an earlier build where the wheel's own do not load."""
    try:
        _torchrl_tree.ensure(build=False)
    except ImportError:
        return False
    return True


def test_names_in_the_tables_exist():
    text = (FOLDER / "MIGRATING.md").read_text()
    ours = r"(?:fbuf\.)?(storages|samplers|views|writers|interop|limits)|fbuf\.(torch|datasets)"
    names = {(a or b, name) for a, b, name in re.findall(rf"(?<![\w.\"'])(?:{ours})\.([A-Za-z_]\w*)", text)}
    for module, name in names:
        assert hasattr(getattr(fbuf, module), name), f"{module}.{name}"
    assert len(names) >= 20


# tests/ray runs those that need Ray.
PROGRAMS = sorted(p for p in (ROOT / "tests" / "programs").glob("*.py") if not p.stem.endswith("_ray"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_runs(path):
    if path.stem == "sharded_dqn":
        run_python(f"import runpy; runpy.run_path({str(path)!r})['main'](50)", **devices(8))
        return
    with jax.numpy_rank_promotion("allow"):
        runpy.run_path(str(path))["main"]()

"""The pages for those who come from elsewhere: every block runs, and both sides of a section give the same content."""

import contextlib
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import fbuf
from benchmarks.peers import _torchrl_tree

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


def blocks(text: str) -> list[Block]:
    return [Block(tuple(words.split()), code) for words, code in FENCE.findall(text)]


def sections() -> list[Section]:
    page, out = (FOLDER / "MIGRATING.md").read_text(), []
    for part in page.split("\n## ")[1:]:
        first, *rest = part.split("\n### ")
        name = first.split("\n")[0]
        out += [Section(PEERS[name], text.split("\n")[0], blocks(first), blocks(text)) for text in rest]
    return out


SECTIONS = sections()


def run(section: Section, side: str) -> Any:
    """What a side of a section leaves as `content`. The peer's blocks come first where ours go on from them."""
    scope: dict[str, Any] = {}
    chosen = [b for b in section.shared if side in b.words or (side == "fbuf" and "tensordict" in b.words)]
    chosen += [b for b in section.own if side in b.words or (side == "fbuf" and _goes_on(section))]
    for number, block in enumerate(chosen):
        exec(compile(block.code, f"MIGRATING.md, {section.title}, {side} {number}", "exec"), scope)
    return scope["content"]


def _goes_on(section: Section) -> bool:
    return any({section.peer, "fbuf"} <= set(block.words) for block in section.own)


def plain(content: Any) -> Any:
    if isinstance(content, tuple):
        return tuple(plain(part) for part in content)
    return np.asarray(content).tolist()


@contextlib.contextmanager
def as_users_have_it() -> Any:
    with warnings.catch_warnings(), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        yield


NAMES = [f"{section.peer}: {section.title}" for section in SECTIONS]


@pytest.mark.parametrize("section", SECTIONS, ids=NAMES)
def test_both_sides_give_the_same(section: Section) -> None:
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


def find_trees() -> bool:
    """Load torchrl's trees, of an earlier build where the wheel's own do not load."""
    try:
        _torchrl_tree.ensure(build=False)
    except ImportError:
        return False
    return True


def test_names_in_the_tables_exist() -> None:
    text = (FOLDER / "MIGRATING.md").read_text()
    ours = r"(?:fbuf\.)?(storages|samplers|views|writers|interop|limits)|fbuf\.(torch|datasets)"
    names = {(a or b, name) for a, b, name in re.findall(rf"(?<![\w.\"'])(?:{ours})\.([A-Za-z_]\w*)", text)}
    for module, name in names:
        assert hasattr(getattr(fbuf, module), name), f"{module}.{name}"
    assert len(names) >= 20

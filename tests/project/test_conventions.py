"""What users of JAX, optax, numpy and torch expect, one test a line of the table in DESIGN.md."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from tests.environments.install import LIBRARIES
from tests.support.paths import ROOT

FOLDER = "DESIGN GUIDE ENVIRONMENTS storages/README datasets/README parts/README MIGRATING TORCH FORMAT".split()
PAGES = (
    "README.md",
    "benchmarks/README.md",
    "benchmarks/ACCELERATORS.md",
    "findings/README.md",
    *(f"fbuf/{name}.md" for name in FOLDER),
)
ROW = {"obs": np.zeros((4, 4), np.uint8), "reward": np.float32(0)}


def filled(buffer: fbuf.Buffer) -> fbuf.BufferState:
    rows = {"obs": jnp.ones((30, 4, 4), jnp.uint8), "reward": jnp.arange(30.0)}
    return buffer.extend(buffer.init(ROW), rows)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for path, anchor in re.findall(r"\]\(([^#):\s]*)#?([^):]*)\)", page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors_of(target), f"{path}#{anchor}"


def test_leaves_have_key_paths() -> None:
    buffer = fbuf.prioritized(40)
    state, batch = buffer.sample(filled(buffer), jax.random.key(0), 4)
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path((state, batch))}
    assert {"[0].sampler.tree", "[0].rows['obs']", "[1].index.slot", "[1].data['reward']", "[1].weight"} <= paths
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((state, batch)))
    assert not jax.tree.leaves(buffer)


def test_keys_of_either_kind_draw_alike() -> None:
    buffer = fbuf.prioritized(40)
    state = filled(buffer)
    typed, raw = jax.random.key(5), jax.random.key_data(jax.random.key(5))
    one, other = (buffer.peek(state, key, 16).index.slot for key in (typed, raw))
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one, buffer.peek(state, jax.random.key(6), 16).index.slot)


def test_numpy_takes_batches() -> None:
    buffer = fbuf.Buffer(40)
    data = buffer.peek(filled(buffer), jax.random.key(0), 8).data
    assert np.asarray(data["obs"]).dtype == np.uint8
    borrowed = np.from_dlpack(data["obs"])
    assert borrowed.__array_interface__["data"][0] == data["obs"].unsafe_buffer_pointer()
    replay = fbuf.Replay(buffer, ROW)
    replay.extend({"obs": np.ones((9, 4, 4), np.uint8), "reward": np.arange(9, dtype=np.float32)})
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(replay.sample(4, to="numpy").data))


def test_the_versions_of_environments_are_those_that_are_tested() -> None:
    table = [line.split("|")[1] for line in (ROOT / "fbuf/ENVIRONMENTS.md").read_text().splitlines() if line[:1] == "|"]
    named = set(re.findall(r"([\w-]+) (\d+\.\d+\.\d+)(?!.*by its source)", "\n".join(table)))
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "tests/environments/requirements.txt").read_text(), flags=re.M))
    assert len(named) >= len(LIBRARIES) + 1 and named == {(name, pinned[name]) for name, _ in named}
    assert {name.replace("-", "_") for name, _ in named} == {*LIBRARIES, "gymnasium"}


def test_tests_that_pages_name_exist() -> None:
    named = {name for page in PAGES for name in re.findall(r"\btest_[a-z0-9_]+", (ROOT / page).read_text())}
    assert len(named) > 20 and named <= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}

"""What a checkpoint says of its buffer is data: whatever it says, nothing is imported or run, and errors have names."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fbuf
from fbuf import _files
from fbuf._checkpoint import _room
from tests.checkpointing import same
from tests.golden import buffers

GOLDEN = Path(__file__).parent / "golden" / "buffers-v1"
ERRORS = (ValueError, TypeError, fbuf.StoreCorrupted, OSError, RuntimeError)
VALUES = (None, True, 0, -1, 3, 17, 0.5, "", "uint8", "int64", "object", "os:system", [], {}, [[]], {"tuple": [1]})


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a tree of JSON."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(found for key, child in children for found in places(child, (*path, key)))][not path :]


def mangled(meta: Any, rng: random.Random) -> Any:
    """With a place or two gone, or something else there."""
    meta = copy.deepcopy(meta)
    for _ in range(rng.randint(1, 2)):
        *path, last = rng.choice(places(meta))
        at = meta
        for key in path:
            at = at[key]
        if rng.random() < 0.3:
            del at[last]
        else:
            at[last] = copy.deepcopy(rng.choice(VALUES))
    return meta


@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, 20))])
@pytest.mark.parametrize("name", ["device", pytest.param("compressed", marks=pytest.mark.slow)])
def test_meta_that_makes_no_sense(name: str, seed: int, tmp_path: Path) -> None:
    with _files.read(str(GOLDEN / name)) as saved:
        arrays, meta = {n: np.asarray(a) for n, a in saved.arrays.items()}, saved.meta
    rng, refused = random.Random(f"{name}{seed}"), 0
    for i in range(40):
        path = str(tmp_path / str(i))
        _files.write(path, arrays, mangled(meta, rng), sync=False)
        try:
            fbuf.load(path, extra=True)
        except ERRORS as error:
            refused += 1
            assert str(error)
    assert refused > 10


_WATCHED = """
import sys
import jax
import fbuf
from tests.golden import buffers
buffer = buffers.BUFFERS["device"]
fbuf.load(sys.argv[1], buffer, extra=True)  # what JAX loads when it is first used
seen, EVENTS = [], ("import", "exec", "compile", "pickle.find_class", "os.system", "subprocess.Popen", "marshal.loads")
def hook(event, args):
    if watching and event in EVENTS:
        seen.append((event, str(args[0])[:80]))
watching = False
sys.addaudithook(hook)
watching = True
loaded, state, extra = fbuf.load(sys.argv[1], buffer, extra=True)
try:
    fbuf.load(sys.argv[1])
except fbuf.SchemaError as error:
    text = str(error)
watching = False
print(seen)
assert not seen, seen
assert "the function trap:spring" in text and "trap" not in sys.modules
"""


def test_nothing_is_imported_unpickled_or_evaluated(tmp_path: Path) -> None:
    """A module of that name lies where it would be found."""
    (tmp_path / "trap.py").write_text("raise SystemExit('sprung')\n\ndef spring(): ...\n")
    with _files.read(str(GOLDEN / "device")) as saved:
        arrays, meta = {n: np.asarray(a) for n, a in saved.arrays.items()}, saved.meta
    meta["buffer"]["view"]["pad"] = {"function": "trap:spring"}
    _files.write(str(tmp_path / "saved"), arrays, meta)
    root = Path(fbuf.__file__).parent.parent
    code = f"import sys; sys.path.insert(1, {str(tmp_path)!r})\n{_WATCHED}"
    command = [sys.executable, "-c", code, str(tmp_path / "saved")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout


def test_a_later_release_s_component_is_named(tmp_path: Path) -> None:
    with _files.read(str(GOLDEN / "device")) as saved:
        arrays, meta = {n: np.asarray(a) for n, a in saved.arrays.items()}, saved.meta
    later = copy.deepcopy(meta)
    later["buffer"]["sampler"]["type"] = "fbuf.samplers.Oracle"
    _files.write(str(tmp_path / "one"), arrays, later)
    with pytest.raises(fbuf.VersionError, match="'fbuf.samplers.Oracle' is not a component of this version of fbuf"):
        fbuf.load(tmp_path / "one")
    later = copy.deepcopy(meta)
    later["buffer"]["sampler"]["foresight"] = 3
    _files.write(str(tmp_path / "two"), arrays, later)
    with pytest.raises(fbuf.VersionError, match="foresight=3.*which this release of fbuf does not know"):
        fbuf.load(tmp_path / "two")
    buffer, state = fbuf.load(GOLDEN / "device")
    assert buffer == buffers.BUFFERS["device"]
    same(buffer.size(state), np.int32(16))


def test_a_checkpoint_with_a_removed_codec_is_refused(tmp_path: Path) -> None:
    with _files.read(str(GOLDEN / "compressed")) as saved:
        arrays, meta = {n: np.asarray(a) for n, a in saved.arrays.items()}, copy.deepcopy(saved.meta)
    meta["buffer"]["storage"]["codec"] = {"type": "fbuf.storages.Blocks", "block": None, "chunk": 1}
    _files.write(str(tmp_path / "saved"), arrays, meta)
    for given in ((), (buffers.BUFFERS["compressed"],)):
        with pytest.raises(fbuf.VersionError, match=r"codec=Blocks\(.*'fbuf.storages.Blocks' is not a component"):
            fbuf.load(tmp_path / "saved", *given)


@pytest.mark.parametrize("storage", [fbuf.storages.Device(), fbuf.storages.Compressed()])
def test_a_capacity_that_lies_allocates_nothing(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were never written are not stored: 3 kB may say that they stand for 700 GB."""
    buffer = fbuf.Buffer(16, storage=storage, sampler=fbuf.samplers.Prioritized())
    row = {"obs": np.zeros((84, 84), np.uint8)}
    state = buffer.extend(buffer.init(row), {"obs": np.ones((5, 84, 84), np.uint8)})
    fbuf.save(tmp_path / "saved", buffer, state)
    with _files.read(str(tmp_path / "saved")) as saved:
        arrays, meta = {n: np.asarray(a) for n, a in saved.arrays.items()}, saved.meta
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\nSwapFree: 1000 kB\n")
    monkeypatch.setattr(_room, "_MEMORY", tmp_path / "meminfo")
    large = copy.deepcopy(meta)
    large["buffer"]["capacity"] = 1_000_000_000
    for shape, _ in large["placed"].values():
        shape[:1] = [1_000_000_000] if shape[:1] == [16] else shape[:1]
    _files.write(str(tmp_path / "large"), arrays, large)
    with pytest.raises(MemoryError, match=r"takes [\d,]{13,} bytes, of which [\d,]{3,7} are stored"):
        fbuf.load(tmp_path / "large")
    wide = copy.deepcopy(meta)  # rows of the right number, and another shape
    name = next(n for n in wide["placed"] if n.startswith("rows/"))
    wide["placed"][name][0][:1] = [1 << 46]
    _files.write(str(tmp_path / "wide"), arrays, wide)
    for settings in ({}, {"buffer": buffer, "example": row}):
        with pytest.raises(fbuf.SchemaError, match="rows are said to take .* bytes; expected"):
            fbuf.load(tmp_path / "wide", **settings)
    large["buffer"]["capacity"] = 16  # leaves of the state that are not the buffer's
    _files.write(str(tmp_path / "leaves"), arrays, large)
    with pytest.raises(fbuf.SchemaError, match="is not one of this buffer|rows are said to take"):
        fbuf.load(tmp_path / "leaves", buffer)
    assert fbuf.load(tmp_path / "saved", buffer)[0] == buffer

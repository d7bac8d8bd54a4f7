"""Metadata of a checkpoint is data: nothing is imported or run, and errors name what is invalid."""

import copy

import numpy as np
import pytest

import fbuf
from fbuf._checkpoint import load
from fbuf._formats import checkpoint
from tests.golden import buffers
from tests.support.checkpoint_saving import check_mangled_meta, golden_parts
from tests.support.processes import run_python
from tests.support.refusals import raises


def test_mangled_metadata_is_refused(tmp_path):
    check_mangled_meta("device", 0, tmp_path)


_WATCHED = """
import sys
import jax
import fbuf
from fbuf._formats import checkpoint
from tests.golden import buffers
buffer = buffers.BUFFERS["device"]
fbuf.load(sys.argv[1], buffer, extra=True)  # JAX imports on first use
EVENTS = ("import", "exec", "compile", "pickle.find_class", "os.system", "subprocess.Popen", "marshal.loads", "ctypes.dlopen")
seen = []
def hook(event, args):
    if watching and (event in EVENTS or event.startswith("socket") or event == "open" and args[2] & 3):
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
sys.modules["kept"] = checkpoint.read(sys.argv[1])
"""


def test_nothing_is_imported_unpickled_or_evaluated(tmp_path):
    """A reader that is open at exit prints nothing."""
    (tmp_path / "trap.py").write_text("raise SystemExit('sprung')\n\ndef spring(): ...\n")
    arrays, meta = golden_parts("device")
    meta["buffer"]["view"]["pad"] = {"function": "trap:spring"}
    checkpoint.write(str(tmp_path / "saved"), arrays, meta)
    code = f"import sys; sys.path.insert(1, {str(tmp_path)!r})\n{_WATCHED}"
    assert run_python(code, tmp_path / "saved").stderr == ""


BLOCKS = {"type": "fbuf.storages.Blocks", "block": None, "chunk": 1}
TOKEN, UNKNOWN = {"state/token": np.zeros((), np.int32)}, r"another release of fbuf \(from_config: 'fbuf\.storages\.Blo"
RELEASES = [  # arrays that a checkpoint also has, a part of the buffer and its other options, and what is said
    ("device", {}, "sampler", {"type": "fbuf.samplers.Oracle"}, "is not a component of this"),
    ("device", {}, "sampler", {"foresight": 3}, "another release of fbuf .*no option 'foresight'"),
    ("device", TOKEN, "sampler", {}, r"was saved by a development version of fbuf\."),
    ("compressed", {}, "storage", {"codec": BLOCKS}, UNKNOWN),
]


def test_checkpoints_of_other_releases_are_named(tmp_path):
    for number, (name, more, part, options, words) in enumerate(RELEASES):
        arrays, meta = golden_parts(name)
        arrays |= more
        meta["buffer"][part] |= options
        path = tmp_path / str(number)
        checkpoint.write(str(path), arrays, meta)
        for given in ((), (buffers.BUFFERS[name],))[: 1 + (name == "compressed")]:
            pytest.raises(fbuf.VersionError, fbuf.load, path, *given).match(words)


@pytest.mark.parametrize("storage", [fbuf.storages.Device(), fbuf.storages.Compressed()])
def test_a_false_capacity_allocates_nothing(storage, tmp_path, monkeypatch):
    """Unwritten rows are not stored: 3 kB may claim 700 GB of them."""
    buffer = fbuf.Buffer(16, storage=storage, sampler=fbuf.samplers.Prioritized())
    row = {"obs": np.zeros((84, 84), np.uint8)}
    state = buffer.extend(buffer.init(row), {"obs": np.ones((5, 84, 84), np.uint8)})
    fbuf.save(tmp_path / "saved", buffer, state)
    with checkpoint.read(str(tmp_path / "saved")) as saved:
        arrays, meta = {n: np.asarray(a) for n, a in saved.arrays.items()}, saved.meta
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\nSwapFree: 1000 kB\n")
    monkeypatch.setattr(load, "_MEMORY", tmp_path / "meminfo")
    large = copy.deepcopy(meta)
    large["buffer"]["capacity"] = 1_000_000_000
    for shape, _ in large["placed"].values():
        shape[:1] = [1_000_000_000] if shape[:1] == [16] else shape[:1]
    checkpoint.write(str(tmp_path / "large"), arrays, large)
    raises(MemoryError, r"takes [\d,]{13,} bytes, of which [\d,]{3,7} are stored", fbuf.load, tmp_path / "large")
    wide = copy.deepcopy(meta)  # the right number of rows, another shape
    name = next(n for n in wide["placed"] if n.startswith("rows/"))
    wide["placed"][name][0][:1] = [1 << 46]
    checkpoint.write(str(tmp_path / "wide"), arrays, wide)
    for settings in ({}, {"buffer": buffer, "example": row}):
        raises(fbuf.SchemaError, "rows take .* bytes; expected", fbuf.load, tmp_path / "wide", **settings)
    large["buffer"]["capacity"] = 16  # leaves that the buffer does not have
    checkpoint.write(str(tmp_path / "leaves"), arrays, large)
    raises(fbuf.SchemaError, "is not one of this buffer|rows take", fbuf.load, tmp_path / "leaves", buffer)
    assert fbuf.load(tmp_path / "saved", buffer)[0] == buffer


HEADER = "state/header"
RANGES = [
    ("Uniform", HEADER, 10, 2**30, "the cursor of a lane .* is 1073741824; expected 0 to 24"),
    ("Uniform", HEADER, 10, -1, "the cursor of a lane .* is -1; expected 0 to 24"),
    ("Uniform", HEADER, 12, 2**30, "the size of a lane .* is 1073741824; expected 0 to 25"),
    ("Epoch", HEADER, 13, -5, "the size of a lane .* is -5; expected 0 to 25"),
    ("Prioritized", "tree", 3, np.nan, "tree' .* is nan; expected finite numbers, 0 or more"),
    ("Prioritized", "tree", 3, np.inf, "tree' .* is inf; expected finite"),
    ("Prioritized", "tree", 3, -1.0, "tree' .* is -1.0; expected finite"),
    ("Prioritized", "low", 3, -1.0, "low' .* is -1.0; expected 0 or more"),
    ("Prioritized", "low", 3, np.nan, "low' .* is nan"),
    ("Prioritized", "top", 3, np.inf, "top' .* is inf"),
    ("Prioritized", "numbers", 0, np.inf, "the largest priority .* is inf"),
    ("Prioritized", "numbers", 2, np.nan, "numbers' .* is nan"),
    ("Ranked", "numbers", 1, np.nan, "numbers' .* is nan"),
]


def test_numbers_that_no_buffer_writes_are_refused(tmp_path):
    samplers = {
        "Uniform": fbuf.samplers.Uniform(),
        "Epoch": fbuf.samplers.Epoch(),
        "Prioritized": fbuf.samplers.Prioritized(normalize="buffer", largest="held"),
        "Ranked": fbuf.samplers.Ranked(),
    }
    saved = {}
    for name, sampler in samplers.items():
        buffer = fbuf.Buffer(50, lanes=2, sampler=sampler)
        rows, priority = {"t": np.arange(60, dtype=np.int32).reshape(30, 2)}, np.linspace(1, 2, 60).reshape(30, 2)
        more = {"priority": priority.astype(np.float32)} if buffer.sampler.prioritized else {}
        state = buffer.extend(buffer.init({"t": 0}), rows, **more)
        fbuf.save(tmp_path / name, buffer, state)
        with checkpoint.read(tmp_path / name) as found:
            saved[name] = {n: np.asarray(a) for n, a in found.arrays.items()}, found.meta
    for i, (name, leaf, place, number, match) in enumerate(RANGES):
        arrays, meta = saved[name]
        (leaf,) = [n for n in arrays if n.rpartition("/")[2] == leaf or n == leaf]
        changed = arrays[leaf].copy()
        changed.reshape(-1)[place] = number
        checkpoint.write(str(tmp_path / f"changed{i}"), arrays | {leaf: changed}, meta)
        with pytest.raises(fbuf.SchemaError, match=match) as caught:
            fbuf.load(tmp_path / f"changed{i}")
        assert f"{tmp_path}/changed{i}" in str(caught.value)
        raises(fbuf.SchemaError, match, fbuf.load, tmp_path / f"changed{i}", verify="lazy")


def test_text_of_another_kind_is_an_error_with_the_path(tmp_path):
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Ragged())
    state = buffer.extend(buffer.init({"text": "", "n": 0}), [{"text": "a", "n": 1}, {"text": "bc", "n": 2}])
    fbuf.save(tmp_path / "saved", buffer, state)
    with checkpoint.read(tmp_path / "saved") as found:
        arrays, meta = {n: np.asarray(a) for n, a in found.arrays.items()}, found.meta
    (name,) = [n for n in arrays if n.endswith("leaves")]
    for i, text in enumerate((b"\xff\xfe", b"{", b"3", b"[[1, 2]]", b'[["text", 3, 4, 5]]')):
        checkpoint.write(str(tmp_path / f"c{i}"), arrays | {name: np.frombuffer(text, np.uint8)}, meta)
        with pytest.raises((fbuf.SchemaError, fbuf.StoreCorrupted), match=f"{tmp_path}/c{i}"):
            fbuf.load(tmp_path / f"c{i}")

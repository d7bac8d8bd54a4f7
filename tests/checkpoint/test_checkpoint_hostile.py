"""Metadata of a checkpoint is data: nothing is imported or run, and errors name what is invalid."""

import copy
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
import fbuf.sharded
from fbuf._checkpoint import plain
from fbuf._checkpoint.parts import device_array
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
    monkeypatch.setattr(plain, "_MEMORY", tmp_path / "meminfo")
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


HEADER, LARGE = "state/header", 2**30
ROW = {"t": np.int32(0), "terminated": False, "truncated": False, "frame": np.zeros((8, 8), np.uint8)}
ROW |= {"obs": np.float32(0), "goal": np.float32(0), "action": np.int32(0), "reward": np.float32(0)}


def _reward(achieved: Any, goal: Any) -> Any:
    return -(achieved != goal).astype(np.float32)


STEPS = fbuf.views.Transition(autoreset="same_step")
EPISODES = {"view": fbuf.views.Sequence(3, autoreset="same_step"), "lanes": 2}
PARTS: dict[str, dict[str, Any]] = {
    "uniform": {"lanes": 2},
    "windows": {**EPISODES, "sampler": fbuf.samplers.Epoch()},
    "episodes": {**EPISODES, "sampler": fbuf.samplers.Uniform(over="episodes")},
    "hindsight": {"view": fbuf.views.Hindsight(STEPS, _reward, goal="goal", achieved="obs")},
    "epoch": {"sampler": fbuf.samplers.Epoch()},
    "consume": {"sampler": fbuf.samplers.Consume(times=2)},
    "fifo": {"sampler": fbuf.samplers.Consume(times=2, order="fifo"), "lanes": 2},
    "staleness": {"sampler": fbuf.samplers.Staleness(maximum=3)},
    "prioritized": {"sampler": fbuf.samplers.Prioritized(normalize="buffer", largest="held")},
    "host": {"sampler": fbuf.samplers.Prioritized(on="host")},
    "ranked": {"sampler": fbuf.samplers.Ranked()},
    "topk": {"writer": fbuf.writers.TopK("t")},
    "blocks": {"storage": fbuf.storages.Deduplicated(keys=("frame",), block=(4, 4))},
    "ahead": {"prefetch": 1, "batch_size": 4},
    "moments": {"on_read": fbuf.transforms.Normalize("obs")},
}
RANGES = [
    ("uniform", HEADER, 0, 5, "'header/token' .* is 5; expected 0 to 0"),
    ("uniform", HEADER, 10, LARGE, "'header/ring/cursor' .* is 1073741824 at .0.; expected 0 to 24"),
    ("uniform", HEADER, 10, -1, "'header/ring/cursor' .* is -1 .* expected 0 to 24"),
    ("uniform", HEADER, 12, LARGE, "'header/ring/size' .* is 1073741824 .* expected 0 to 25"),
    ("uniform", HEADER, 14, 0, "'header/ring/lap' .* is 0 .* expected 1 to 4294967295"),
    ("uniform", HEADER, 13, -5, "'header/ring/size' .* is -5 at .1.; expected 0 to 25"),
    ("windows", "anchors/flags", 3, 64, "'anchors/flags' .* is 64 .* expected 0 to 63"),
    ("windows", "anchors/tail_flags", 0, 255, "'anchors/tail_flags' .* is 255"),
    ("windows", "anchors/count", 1, -1, "'anchors/count' .* expected 0 to 25"),
    ("windows", "anchors/step", 0, -1, "'anchors/step' .* is -1"),
    ("windows", "sampler/log/slot", 7, 50, "'sampler/log/slot' .* is 50 .* expected 0 to 49"),
    ("windows", "sampler/log/head", 0, 25, "'sampler/log/head' .* expected 0 to 24"),
    ("windows", "sampler/log/count", 0, 26, "'sampler/log/count' .* expected 0 to 25"),
    ("episodes", "sampler/log/slot", 7, -1, "'sampler/log/slot' .* is -1"),
    ("episodes", "sampler/number", 3, LARGE, "'sampler/number' .* expected 0 to 24"),
    ("episodes", "sampler/begin", 3, -1, "'sampler/begin' .* expected 0 to 24"),
    ("episodes", "sampler/last", 0, 25, "'sampler/last' .* expected 0 to 24"),
    ("hindsight", "anchors/starts/position", 0, 50, "'anchors/starts/position' .* expected 0 to 49"),
    ("hindsight", "anchors/starts/head", 0, -1, "'anchors/starts/head' .* expected 0 to 49"),
    ("hindsight", "anchors/starts/count", 0, LARGE, "'anchors/starts/count' .* expected 0 to 50"),
    ("epoch", "sampler/held", 0, -1, "'sampler/held' .* expected 0 to 50"),
    ("epoch", "sampler/turn/start", 0, LARGE, "'sampler/turn/start' .* expected 0 to 50"),
    ("epoch", "sampler/turn/closed", 0, 51, "'sampler/turn/closed' .* is 51 .* expected 0 to 50"),
    ("epoch", "sampler/turn/taken", 0, -1, "'sampler/turn/taken' .* expected 0 to 50"),
    ("epoch", "sampler/turn/order", 9, LARGE, "'sampler/turn/order' .* expected 0 to 49"),
    ("consume", "sampler/roster/number", 0, 51, "'sampler/roster/number' .* expected 0 to 50"),
    ("consume", "sampler/roster/slot", 0, 50, "'sampler/roster/slot' .* expected 0 to 49"),
    ("consume", "sampler/roster/place", 5, -2, "'sampler/roster/place' .* is -2"),
    ("consume", "sampler/roster/place", 5, 6, "'sampler/roster/place' .* is 6 at .5.; expected"),
    ("consume", "sampler/left", 0, -1, "'sampler/left' .* is -1"),
    ("fifo", "sampler/used", 0, 26, "'sampler/used' .* is 26 .* expected 0 to 25"),
    ("fifo", "sampler/held", 1, LARGE, "'sampler/held' .* expected 0 to 25"),
    ("fifo", "sampler/oldest", 0, -1, "'sampler/oldest' .* expected 0 to 49"),
    ("fifo", "sampler/slot", 0, LARGE, "'sampler/slot' .* expected 0 to 49"),
    ("fifo", "sampler/first", 0, 50, "'sampler/first' .* expected 0 to 49"),
    ("fifo", "sampler/left", 0, -1, "'sampler/left' .* is -1"),
    ("staleness", "sampler/held", 0, 51, "'sampler/held' .* expected 0 to 50"),
    ("staleness", "sampler/count", 2, -1, "'sampler/count' .* expected 0 to 50"),
    ("staleness", "sampler/lot", 0, -1, "'sampler/lot' .* is -1"),
    ("prioritized", "sampler/tree", 3, np.nan, "'sampler/tree' .* is nan .* expected 0 to 3.4.*e.38"),
    ("prioritized", "sampler/tree", 3, np.inf, "'sampler/tree' .* is inf"),
    ("prioritized", "sampler/tree", slice(0, 2), 3e38, "'sampler/tree' .* is inf"),
    ("prioritized", "sampler/tree", 3, -1.0, "'sampler/tree' .* is -1.0"),
    ("prioritized", "sampler/low", 3, -1.0, "'sampler/low' .* is -1.0 .* expected 0 to inf"),
    ("prioritized", "sampler/low", 3, np.nan, "'sampler/low' .* is nan"),
    ("prioritized", "sampler/top", 3, np.inf, "'sampler/top' .* is inf .* expected -inf to 3.4.*e.38"),
    ("prioritized", "sampler/numbers", 0, np.inf, "'sampler/max_priority' .* is inf"),
    ("host", "sampler/tree", 3, np.nan, "'sampler/tree' .* is nan"),
    ("host", "sampler/tree", 3, 3e38, "'sampler/tree' .* is 3.*e.38"),
    ("ranked", "sampler/numbers", 0, np.nan, "'sampler/max_priority' .* is nan"),
    ("ranked", "sampler/ranks", 3, 513, "'sampler/ranks/bucket' .* is 513 .* expected 0 to 512"),
    ("topk", "scatter/own/tree", (0, -1), 50, "'scatter/own/tree' .* is 50 .* expected 0 to 49"),
    ("blocks", "rows/rows:frame", 0, 255, "'rows/frame' .* is 255"),
    ("blocks", "rows/last:frame", 0, 255, "'rows/last/frame' .* is 255"),
    ("blocks", "rows/table0:tally", 0, 9, "'rows/tables/0/tally' .* is 9 at .0."),
    ("blocks", "rows/table0:tally", 1, LARGE, "'rows/tables/0/tally' .* is 1073741824 at .1."),
    ("blocks", "rows/table0:count", 0, 0, "'rows/tables/0/count' .* is 0 .* expected 1 to 1"),
    ("blocks", "rows/table0:count", 1, 7, "'rows/tables/0/count' .* is 7 at .1.; expected 4 to 4"),
    ("blocks", "rows/rows:frame", 0, 3, "'rows/tables/0/count' .* expected"),  # another block than its row had
    ("blocks", "rows/cuts", 0, 0, "is invalid .*Deduplicated: blocks differ"),
    ("blocks", "rows/table0:home", 1, LARGE, "'rows/tables/0/home' .* is 1073741824"),
    ("blocks", "rows/table0:names", 1, LARGE, "'rows/tables/0/names' .* is 1073741824"),
    ("ahead", "ahead/batch/index/slot", 1, 51, "'ahead/batch/index/slot' .* is 51 .* expected 0 to 50"),
    ("ahead", "ahead/batch/weight", 1, np.nan, "'ahead/batch/weight' .* is nan"),
    ("moments", "transforms/read/normalize/obs/mean", 0, np.nan, "obs/mean' .* is nan"),
]


def _saved_parts(name: str, folder: Any) -> tuple[Any, Any]:
    """Return the arrays and the description of a saved buffer with 60 rows of 50, of which some were drawn."""
    buffer = fbuf.Buffer(50, **PARTS[name])
    lead = (60 // (buffer.lanes or 1), *((buffer.lanes,) if buffer.lanes else ()))
    rows = {n: np.zeros((*lead, *np.shape(x)), np.asarray(x).dtype) for n, x in ROW.items()}
    rows["t"][...] = np.arange(60).reshape(lead)
    rows["frame"][...] = rows["t"].reshape(*lead, 1, 1)
    rows["terminated"][...] = rows["t"] % 20 == 19
    more = {"priority": np.linspace(1, 2, 60, dtype=np.float32).reshape(lead)} if buffer.sampler.prioritized else {}
    state = buffer.extend(buffer.init(ROW), rows, **more)
    state, _ = buffer.sample(state, jax.random.key(0), 4)
    fbuf.save(folder / name, buffer, state)
    with checkpoint.read(folder / name) as found:
        placed = found.meta["placed"]  # without the rows at their ends that repeat
        whole = {n: np.atleast_1d(device_array(found, n) if n in placed else a) for n, a in found.arrays.items()}
        return whole, found.meta


@pytest.mark.more
def test_numbers_that_no_buffer_writes_are_refused(tmp_path):
    saved = {name: _saved_parts(name, tmp_path) for name in PARTS}
    for i, (name, leaf, place, number, match) in enumerate(RANGES):
        arrays, meta = saved[name]
        leaf = leaf if leaf in arrays else f"state/{leaf}"
        changed = arrays[leaf].copy()
        (changed if isinstance(place, tuple) else changed.reshape(-1))[place] = number
        checkpoint.write(str(tmp_path / f"changed{i}"), arrays | {leaf: changed}, meta)
        given = (fbuf.Buffer(50, **PARTS[name]),)
        with pytest.raises(fbuf.SchemaError, match=match) as caught:
            fbuf.load(tmp_path / f"changed{i}", *given, verify="lazy" if i % 2 else "full")
        assert f"{tmp_path}/changed{i}" in str(caught.value)


@pytest.mark.more
def test_annealed_numbers_that_are_not_finite_load(tmp_path):
    """A schedule in a jitted step may set NaN: the rows that were saved with it are not lost."""
    for sampler in (fbuf.samplers.Prioritized(), fbuf.samplers.Ranked()):
        buffer = fbuf.Buffer(8, sampler=sampler)
        state = buffer.extend(buffer.init({"t": 0}), {"t": np.arange(5)})
        state = jax.jit(buffer.set)(state, beta=np.float32(np.nan))
        path = tmp_path / type(sampler).__name__
        fbuf.save(path, buffer, state)
        buffer, state = fbuf.load(path)
        state = buffer.set(state, beta=0.5)
        assert np.isfinite(buffer.sample(state, jax.random.key(0), 4)[1].weight).all()


def test_text_of_another_kind_is_an_error_with_the_path(tmp_path):
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Ragged())
    state = buffer.extend(buffer.init({"text": "", "n": 0}), [{"text": "a", "n": 1}, {"text": "bc", "n": 2}])
    fbuf.save(tmp_path / "saved", buffer, state)
    with checkpoint.read(tmp_path / "saved") as found:
        arrays, meta = {n: np.asarray(a) for n, a in found.arrays.items()}, found.meta
    (name,) = [n for n in arrays if n.endswith("leaves")]
    kinds = b'[["text", "array", "lu1", null]]', b'[["text", "odd", "", null]]', b'[["text", "array", "<f4", [-1]]]'
    for i, text in enumerate((b"\xff\xfe", b"{", b"3", b"[[1, 2]]", b'[["text", 3, 4, 5]]', *kinds)):
        checkpoint.write(str(tmp_path / f"c{i}"), arrays | {name: np.frombuffer(text, np.uint8)}, meta)
        with pytest.raises((fbuf.SchemaError, fbuf.StoreCorrupted), match=f"{tmp_path}/c{i}"):
            fbuf.load(tmp_path / f"c{i}")
    (ticket,) = [n for n in arrays if n.endswith("ticket")]
    longer = meta["placed"] | {ticket: [[9, 2], "00000000"]}
    checkpoint.write(str(tmp_path / "longer"), arrays, meta | {"placed": longer})
    with pytest.raises(fbuf.SchemaError, match=f"{tmp_path}/longer has leaves of other shapes"):
        fbuf.load(tmp_path / "longer")
    checkpoint.write(
        str(tmp_path / "renamed"), arrays | {name: np.frombuffer(b'[["xt", "text", "", null]]', np.uint8)}, meta
    )
    assert fbuf.load(tmp_path / "renamed")[1].rows.layout.leaves[0].name == "xt"
    with pytest.raises(
        fbuf.SchemaError, match=r"not like the example:\n  xt: found text, expected nothing\n  text: found nothing"
    ):
        fbuf.load(tmp_path / "renamed", example={"text": "", "n": 0})


def test_no_shards_are_an_error_with_the_path(tmp_path):
    sharded = fbuf.sharded.Sharded(fbuf.Buffer(8), jax.make_mesh((1,), ("data",)))
    fbuf.save(tmp_path / "saved", sharded, sharded.init({"t": 0}))
    with checkpoint.read(tmp_path / "saved") as found:
        arrays, meta = {n: np.asarray(a) for n, a in found.arrays.items()}, found.meta
    for i, number in enumerate((0, -1, 3, "x", None)):
        checkpoint.write(str(tmp_path / f"c{i}"), arrays, meta | {"shards": meta["shards"] | {"number": number}})
        for target in (None, sharded):
            with pytest.raises(fbuf.SchemaError, match=f"{tmp_path}/c{i}"):
                fbuf.load(tmp_path / f"c{i}", target)


def test_a_storage_that_cannot_hold_its_rows_is_an_error_with_the_path(tmp_path):
    """The saved options lost the names of the compressed leaves, and none is large enough to be one by default."""
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Compressed(keys=("obs",)))
    fbuf.save(tmp_path / "saved", buffer, buffer.init({"obs": np.zeros(8, np.uint8)}))
    with checkpoint.read(tmp_path / "saved") as found:
        arrays, meta = {n: np.asarray(a) for n, a in found.arrays.items()}, found.meta
    del meta["buffer"]["storage"]["keys"]
    checkpoint.write(str(tmp_path / "changed"), arrays, meta)
    with pytest.raises(fbuf.SchemaError, match=r"changed cannot hold .* no leaf of obs has 1024 bytes"):
        fbuf.load(tmp_path / "changed", buffer)

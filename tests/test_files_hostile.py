"""Checkpoints that someone made to do harm: nothing is executed, nothing outside the folder is touched, memory stays bounded.

Every checksum in them is right: what is tested is what comes after. Only fbuf's own errors may come of any bytes at all.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fbuf import _files
from fbuf._files import _manifest
from fbuf._files._text import check_text
from tests.checkpoints import PATH, Memory, load, save

ROOT = Path(__file__).resolve().parent.parent
EXHAUSTIVE = os.environ.get("FBUF_EXHAUSTIVE", "") not in ("", "0")
NAME = "manifest-000000000002.json"


def signed(body: bytes, version: int = 1) -> bytes:
    """A manifest with the right first line."""
    head = b'{"format":"fbuf checkpoint","version":%d,"bytes":%d,"crc32":%d}' % (version, len(body), zlib.crc32(body))
    return head + b"\n" + body + b"\n"


def dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.fixture(scope="module")
def base() -> Memory:
    """One whole generation, the second, of all kinds of arrays; the first is gone."""
    disk = Memory()
    save(PATH, 3, disk)
    save(PATH, 4, disk, keep=1)
    return disk


def body_of(disk: Memory) -> dict[str, Any]:
    return json.loads(disk.contents()[NAME].split(b"\n")[1])


def attempt(disk: Memory, manifest: bytes) -> str:
    """Reads all there is; says how that ended. Any other error than fbuf's is the test's."""
    disk.put(NAME, manifest)
    try:
        with _files.read(PATH, disk=disk) as saved:
            total = sum(np.asarray(array).nbytes for array in saved.arrays.values())
            for array in saved.arrays.values():
                assert sum(part.nbytes for _, part in array.blocks()) == array.nbytes
        assert total <= sum(map(len, disk.contents().values())), "more bytes than there are"
        return "read"
    except (_files.StoreCorrupted, _files.VersionError, _files.CheckpointNotFound) as error:
        return str(error)


@contextmanager
def memory(extra: int) -> Iterator[None]:
    """A limit of so many bytes more than the process has now."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def put(value: Any, path: list[Any], new: Any) -> Any:
    value = copy.deepcopy(value)
    at = value
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return value


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        (["files", 0, "name"], "/etc/passwd", "a file has the name"),
        (["files", 0, "name"], "../data-000000000001.safetensors", "a file has the name"),
        (["files", 0, "name"], "data-000000000001.safetensors/../x", "a file has the name"),
        (["files", 0, "name"], "lock", "a file has the name"),
        (["files", 0, "name"], "data-000000000001.safetensors\n", "a file has the name"),
        (["files", 0, "name"], "data-00000000000\u0661.safetensors", "a file has the name"),
        (["files", 0, "name"], ["data-000000000001.safetensors"], "a file has the name"),
        (["files", 0, "bytes"], -1, "in place of a whole number"),
        (["files", 0, "bytes"], 10**30, "in place of a whole number"),
        (["files", 0, "bytes"], 100.0, "in place of a whole number"),
        (["files", 0, "bytes"], True, "in place of a whole number"),
        (["files", 0, "header"], 1 << 40, "a header of"),
        (["files", 0, "save"], "os.system('x')", "32 hexadecimal digits"),
        (["arrays", "table", "dtype"], "object", "KeyError"),
        (["arrays", "table", "dtype"], "O", "KeyError"),
        (["arrays", "table", "dtype"], "__import__('os').system('x')", "KeyError"),
        (["arrays", "table", "dtype"], "finfo", "KeyError"),
        (["arrays", "table", "dtype"], ["float32"], "list in place of text"),
        (["arrays", "table", "shape"], [1 << 40, 5], "blocks has places or checksums for another number"),
        (["arrays", "table", "shape"], [1 << 62], "whole number"),
        (["arrays", "table", "shape"], [1 << 30, 1 << 30], "a shape is"),
        (["arrays", "table", "shape"], [1] * 33, "a shape is"),
        (["arrays", "table", "shape"], [-1, 5], "whole number"),
        (["arrays", "table", "shape"], 40, "int in place of a list"),
        (["arrays", "table", "shape"], [40, 1 << 20], "outside its file"),
        (["arrays", "table", "block"], 1 << 47, "for another number"),
        (["arrays", "table", "block"], 0, "for another number"),
        (["arrays", "table", "file"], [5] * 10, "lies in file 5 of"),
        (["arrays", "table", "file"], [-1] * 10, "out of range"),
        (["arrays", "table", "file"], [0.0] * 10, "something else than whole numbers"),
        (["arrays", "table", "offset"], [0] * 10, "outside its file"),
        (["arrays", "table", "offset"], [2**70] * 10, "OverflowError"),
        (["arrays", "table", "mark"], [], "for another number"),
        (["arrays", "table", "mark"], [[]] * 10, "a mark is no text"),
        (["arrays", "log", "cuts"], [0, 250], "cuts do not rise"),
        (["arrays", "log", "keys"], ["piece-0"] * 5, "keys repeat"),
        (["arrays", "log", "keys"], [[]] * 5, "in place of text"),
        (["arrays", "log", "keys"], ["\x1b[2J", "b", "c", "d", "e"], "in place of a name"),
        (["arrays", "\x1b[2J"], {}, "in place of a name"),
        (["arrays"], [], "list in place of an object"),
        (["files"], {}, "dict in place of a list"),
        (["generation"], 3, "has the name of 2"),
        (["version"], 2, "version 1 in the first line, 2 in the second"),
        (["meta"], [], "in place of an object"),
    ],
)
def test_manifests_that_ask_for_what_they_must_not_have(base: Memory, path: list, new: Any, message: str) -> None:
    """Rows 17, 20, 21 and others: each value is refused by name, before any file is opened."""
    assert message in attempt(base.copy(), signed(dumps(put(body_of(base), path, new))))


def test_every_value_may_be_missing(base: Memory) -> None:
    body = body_of(base)
    for path in (["files", 0], ["arrays", "table"], ["arrays", "log"], []):
        at = body
        for key in path:
            at = at[key]
        for name in at:
            changed = copy.deepcopy(body)
            inner = changed
            for key in path:
                inner = inner[key]
            del inner[name]
            assert (attempt(base.copy(), signed(dumps(changed))) == "read") == (name == "mark"), name


def test_blocks_that_share_bytes(base: Memory) -> None:
    """A million arrays may not be made of one block."""
    body = body_of(base)
    body["arrays"] |= {f"copy {i}": body["arrays"]["table"] for i in range(1000)}
    assert "two blocks overlap" in attempt(base.copy(), signed(dumps(body)))
    body = body_of(base)
    for column in ("file", "offset"):
        body["arrays"]["table"][column] = body["arrays"]["table"][column][:1] * 10
    assert "two blocks overlap" in attempt(base.copy(), signed(dumps(body)))


TEXTS = {
    "deep": (b"[" * 100_000, "nested more than 64 deep"),
    "deeper": (b"[" * 16_000_000, "nested more than 64 deep"),
    "deep objects": (b'{"a":' * 1_000_000, "nested more than 64 deep"),
    "65 deep": (b'{"version":1,"x":' + b"[" * 64 + b"]" * 64 + b"}", "nested more than 64 deep"),
    "64 deep": (b'{"version":1,"x":' + b"[" * 63 + b"]" * 63 + b"}", "KeyError"),
    "many objects": (b"[" + b"{}," * 10_000_000 + b"0]", "10000000 values; expected at most"),
    "many numbers": (b"[" + b"1," * 30_000_000 + b"0]", "30000000 values; expected at most"),
    "backslashes": (b'"' + b"\\" * 16_000_001, "JSONDecodeError"),
    "a long number": (b"1" * 16_000_000, "digits"),
    "a number of 5000 digits": (b'{"version":1,"generation":2,"x":' + b"9" * 5000 + b"}", "digits"),
    "NaN": (b'{"version":1,"x":NaN}', "NaN is no number"),
    "infinity": (b'{"version":1,"x":1e999,"y":Infinity}', "Infinity is no number"),
    "no ASCII": (b'{"version":1,"x":"\xc3\xa4"}', "UnicodeDecodeError"),
    "UTF-16": (
        ("\u2200" + "[" * 100).encode("utf-16"),
        "UnicodeDecodeError",
    ),  # to the parser, not to the check of depth
    "nothing": (b"", "JSONDecodeError"),
    "a key twice": (b'{"version":1,"version":1}', "KeyError"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_large_or_deep(base: Memory, name: str) -> None:
    """Row 22, in half a gigabyte and ten seconds of the process."""
    text, says = TEXTS[name]
    disk, began = base.copy(), time.process_time()
    manifest = signed(text)
    with memory(1 << 29):
        ended = attempt(disk, manifest)
    assert "does not describe a checkpoint" in ended and says in ended
    assert time.process_time() - began < 10


def test_a_manifest_larger_than_any_is_not_read(base: Memory, tmp_path: Path) -> None:
    save(str(tmp_path), 1)
    with open(tmp_path / "manifest-000000000009.json", "wb") as file:
        file.truncate(1 << 40)
    with (
        memory(1 << 28),
        pytest.warns(RuntimeWarning, match=f"has {1 << 40} bytes; expected at most {_manifest.MOST_BYTES}"),
    ):
        assert load(str(tmp_path)) == 1


def test_sizes_are_checked_before_memory_is_taken(base: Memory) -> None:
    """Row 18's kin: an array of 200 TiB in a file of as many, which is not there."""
    body = body_of(base)
    body["arrays"]["huge"] = {
        "dtype": "uint8",
        "shape": [1 << 47],
        "block": 1 << 47,
        "file": [0],
        "offset": [1 << 20],
        "crc32": [0],
    }
    body["files"][0]["bytes"] = (1 << 47) + (1 << 20)
    with memory(1 << 28):
        assert "bytes; expected 1407" in attempt(base.copy(), signed(dumps(body)))


@given(st.binary(max_size=300), st.integers(1, 300))
def test_the_depth_of_any_text_is_found(text: bytes, piece: int) -> None:
    """Against a plain loop; in pieces of any size."""
    depth = deepest = 0
    quoted = escaped = False
    for byte in text:
        if escaped:
            escaped = False
        elif byte == 92:
            escaped = True
        elif byte == 34:
            quoted = not quoted
        elif not quoted:
            depth += (byte in b"[{") - (byte in b"]}")
            deepest = max(deepest, depth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fbuf._files._text._PIECE", piece)
        for most in range(max(deepest - 1, 0), deepest + 1):
            patch.setattr("fbuf._files._text.MOST_DEPTH", most)
            if deepest > most and text:
                with pytest.raises(ValueError, match="nested"):
                    check_text(text)
            else:
                check_text(text)


# --------------------------------------------------------------------------------------------------------------- fuzzing

NASTY = [
    None,
    True,
    -1,
    0,
    1,
    7,
    2**31,
    2**48,
    2**63,
    2**64,
    10**30,
    0.5,
    -0.0,
    "",
    "\0",
    "..",
    "/",
    "O",
    "float32",
    "int4",
    "x" * 999,
]
NASTY += [[], {}, [[]], [0] * 10, ["a"] * 5, {"a": 1}, "data-000000000001.safetensors", "data-999999999999.safetensors"]


def nodes(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths of all values in JSON."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes(inner, (*path, key))


@given(st.data())
@settings(max_examples=3000 if EXHAUSTIVE else 150)
def test_any_values_in_any_place(base: Memory, data: st.DataObject) -> None:
    """hypothesis, 150 cases by default, 3,000 with FBUF_EXHAUSTIVE=1."""
    body = body_of(base)
    json_values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.text(max_size=5)
        | st.sampled_from(NASTY),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    )
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(nodes(body))))
        body = put(body, list(path), data.draw(json_values))
    try:
        text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return
    attempt(base.copy(), signed(text))


def test_mutated_manifests(base: Memory) -> None:
    """A fuzzer of our own: 2,000 manifests by default, 100,000 with FBUF_EXHAUSTIVE=1; every checksum is right."""
    chance, body = random.Random(0), body_of(base)
    text = dumps(body)
    disk, read, refused = base.copy(), 0, set()
    for trial in range(100_000 if EXHAUSTIVE else 2_000):
        if trial % 2:
            changed = copy.deepcopy(body)
            for _ in range(chance.randint(1, 3)):
                paths = list(nodes(changed))
                path = chance.choice(paths)
                at = changed
                for key in path[:-1]:
                    at = at[key]
                other = chance.choice(paths)
                kind = chance.randrange(4)
                if kind == 0:
                    at[path[-1]] = copy.deepcopy(chance.choice(NASTY))
                elif kind == 1 and isinstance(at[path[-1]], int):
                    at[path[-1]] += chance.choice([-1, 1, 8, -(2**16), 2**16, 2**40])
                elif kind == 2 and isinstance(at, list):
                    at.append(at[path[-1]])
                elif other[: len(path)] != path[: len(other)]:
                    taken = changed
                    for key in other:
                        taken = taken[key]
                    at[path[-1]] = copy.deepcopy(taken)
            mutated = dumps(changed)
        else:
            raw = bytearray(text)
            for _ in range(chance.randint(1, 4)):
                i = chance.randrange(len(raw))
                kind = chance.randrange(3)
                if kind == 0:
                    raw[i] = chance.randrange(256)
                elif kind == 1:
                    del raw[i : i + chance.randint(1, 20)]
                else:
                    raw[i:i] = chance.choice([b"[", b"{", b'"', b",", b"-", b"1e9", b"null", b"\\u0000", b"NaN"])
            mutated = bytes(raw)
        ended = attempt(disk, signed(mutated))
        read += ended == "read"
        refused.add(ended)
    assert 0 < read < trial and len(refused) > 50


def test_random_bytes_in_place_of_any_file(base: Memory) -> None:
    chance = random.Random(0)
    for name in base.contents():
        for size in (0, 1, 7, 8, 60, 300, 5000):
            disk = base.copy()
            disk.put(name, chance.randbytes(size))
            with pytest.raises(_files.StoreCorrupted):
                _files.read(PATH, disk=disk)


# -------------------------------------------------------------------------------------------------- outside the folder


def test_links_lead_nowhere(tmp_path: Path) -> None:
    """Row 21: a data file, a manifest or a new file's name that is a link is neither read nor written through."""
    save(str(tmp_path / "c"), 1)
    victim = tmp_path / "victim"
    for name in ("data-000000000001.safetensors", "manifest-000000000001.json"):
        path = tmp_path / "c" / name
        held = path.read_bytes()
        path.unlink()
        victim.write_bytes(held)
        path.symlink_to(victim)
        with pytest.raises(_files.StoreCorrupted, match="is a link; expected a plain file"):
            _files.read(str(tmp_path / "c"))
        path.unlink()
        path.write_bytes(held)
    victim.write_text("mine")
    for name in ("lock", "manifest-000000000002.json.new", "data-000000000002.safetensors"):
        path = tmp_path / "c" / name
        path.unlink(missing_ok=True)
        path.symlink_to(victim)
        try:
            save(str(tmp_path / "c"), 2)
        except OSError:
            path.unlink()
        assert victim.read_text() == "mine" and load(str(tmp_path / "c")) in (1, 2)


AUDIT = """
import sys, warnings
import numpy as np
import fbuf
from fbuf import _files
from tests.checkpoints import load
warnings.simplefilter("ignore")
watching, seen = False, []
def hook(event, arguments):
    if watching and (event in ("exec", "compile", "import", "os.system", "marshal.loads", "ctypes.dlopen", "code.__new__")
                     or event.startswith(("pickle", "subprocess", "os.exec", "os.posix_spawn", "socket"))
                     or event == "open" and arguments[2] & 3):
        seen.append((event, str(arguments)[:200]))
sys.addaudithook(hook)
watching = True
for path in sys.argv[1:]:
    for verify in ("full", "lazy"):
        try:
            with _files.read(path, verify=verify) as saved:
                for array in saved.arrays.values():
                    np.asarray(array)
        except (_files.StoreCorrupted, _files.VersionError, _files.CheckpointNotFound):
            pass
watching = False
print(seen)
"""


def test_a_load_executes_imports_and_writes_nothing(tmp_path: Path, base: Memory) -> None:
    """Rows 16 and 17: an audit hook sees no unpickling, compiling, importing, process or file opened to be written."""
    import ml_dtypes

    _files.write(str(tmp_path / "a"), {"x": np.zeros(3, ml_dtypes.bfloat16), "y": np.arange(9)}, {"dtype": "eval('1')"})
    save(str(tmp_path / "b"), 3)
    (tmp_path / "b" / "manifest-000000000002.json").write_bytes(
        signed(dumps(put(body_of(base), ["arrays", "table", "dtype"], "__import__('os').system('x')")))
    )
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "manifest-000000000002.json").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    done = subprocess.run(
        [sys.executable, "-c", AUDIT, *(str(tmp_path / name) for name in "abc")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_booleans_that_are_neither() -> None:
    disk = Memory()
    _files.write(PATH, {"a": np.array([True, False])}, {}, disk=disk)
    name = "manifest-000000000001.json"
    disk.names["data-000000000001.safetensors"].data[-1] = 2
    body = json.loads(disk.contents()[name].split(b"\n")[1])
    body["arrays"]["a"]["crc32"] = [zlib.crc32(b"\1\2")]
    disk.put(name, signed(dumps(body)))
    with pytest.raises(_files.StoreCorrupted, match="array 'a' is bool and holds other bytes than 0 and 1"):
        np.asarray(_files.read(PATH, disk=disk).arrays["a"])


@pytest.mark.slow
def test_fuzzing_guided_by_coverage() -> None:
    """atheris, where it is installed: 20,000 inputs, 1,000,000 with FBUF_EXHAUSTIVE=1."""
    pytest.importorskip("atheris")
    runs = 1_000_000 if EXHAUSTIVE else 20_000
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz_files", f"-runs={runs}"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and f"Done {runs} runs" in done.stderr, done.stderr[-3000:]

"""Hostile checkpoints: nothing is executed, nothing outside the folder is touched, memory is bounded."""

import copy
import resource
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fbuf._formats import checkpoint
from fbuf._formats.checkpoint import manifest as _manifest
from fbuf._formats.checkpoint.manifest import check_json
from tests.support.hostile_manifests import at_path, attempt, base, body_of, dumps, mutated_manifests, put, signed
from tests.support.memory_disk import PATH, Memory, load, save
from tests.support.tables import by_tier


@contextmanager
def memory(extra):
    """Limit the process to `extra` more bytes than it has."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


DATA, TABLE, LOG = "data-000000000001.safetensors", ("arrays", "table"), ("arrays", "log")
FAR = "data-00000000000\u0661.safetensors"
INVALID = [  # where in a manifest, what is said, and values of which each is invalid
    (("files", 0, "name"), "has the name", ["/etc/passwd", f"../{DATA}", f"{DATA}/../x", "lock", f"{DATA}\n", FAR]),
    (("files", 0, "name"), "list in place of text", [[DATA]]),
    (("files", 0, "bytes"), "in place of a whole number", [-1, 10**30, 100.0, True]),
    (("files", 0, "header"), "a header of", [1 << 40]),
    (("files", 0, "save"), "32 hexadecimal digits", ["os.system('x')"]),
    ((*TABLE, "dtype"), "KeyError", ["object", "O", "__import__('os').system('x')", "finfo"]),
    ((*TABLE, "dtype"), "list in place of text", [["float32"]]),
    ((*TABLE, "shape"), "blocks has another number of places or checksums", [[1 << 40, 5]]),
    ((*TABLE, "shape"), "whole number", [[1 << 62], [-1, 5]]),
    ((*TABLE, "shape"), "a shape is", [[1 << 30, 1 << 30], [1] * 33]),
    ((*TABLE, "shape"), "int in place of a list", [40]),
    ((*TABLE, "shape"), "outside its file", [[40, 1 << 20]]),
    ((*TABLE, "block"), "another number of places", [1 << 47, 0]),
    ((*TABLE, "file"), "is in file 5 of", [[5] * 10]),
    ((*TABLE, "file"), "out of range", [[-1] * 10]),
    ((*TABLE, "file"), "holds something else", [[0.0] * 10]),
    ((*TABLE, "offset"), "outside its file", [[0] * 10]),
    ((*TABLE, "offset"), "OverflowError", [[2**70] * 10]),
    ((*TABLE, "mark"), "another number of places", [[]]),
    ((*TABLE, "mark"), "a mark is not text", [[[]] * 10]),
    ((*LOG, "cuts"), "cuts do not rise", [[0, 250]]),
    ((*LOG, "keys"), "keys repeat", [["piece-0"] * 5]),
    ((*LOG, "keys"), "in place of text", [[[]] * 5]),
    ((*LOG, "keys"), "in place of a name", [["\x1b[2J", "b", "c", "d", "e"]]),
    (("arrays", "\x1b[2J"), "in place of a name", [{}]),
    (("arrays",), "list in place of an object", [[]]),
    (("files",), "dict in place of a list", [{}]),
    (("generation",), "has the name of 2", [3]),
    (("version",), "version 1 in the first line, 2 in the second", [2]),
    (("meta",), "in place of an object", [[]]),
]


def test_invalid_values_are_refused_by_name():
    for path, message, values in INVALID:
        for new in values:
            assert message in attempt(base(), signed(dumps(put(body_of(base()), path, new)))), (path, new)


def test_a_missing_value_is_refused():
    body = body_of(base())
    for path in (["files", 0], ["arrays", "table"], ["arrays", "log"], []):
        for name in at_path(body, path):
            changed = copy.deepcopy(body)
            del at_path(changed, path)[name]
            assert (attempt(base(), signed(dumps(changed))) == "read") == (name == "mark"), name


def test_blocks_that_share_bytes_are_refused():
    body = body_of(base())
    body["arrays"] |= {f"copy {i}": body["arrays"]["table"] for i in range(1000)}
    assert "two blocks overlap" in attempt(base(), signed(dumps(body)))
    body = body_of(base())
    for column in ("file", "offset"):
        body["arrays"]["table"][column] = body["arrays"]["table"][column][:1] * 10
    assert "two blocks overlap" in attempt(base(), signed(dumps(body)))


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
    "NaN": (b'{"version":1,"x":NaN}', "NaN is not a number"),
    "infinity": (b'{"version":1,"x":1e999,"y":Infinity}', "Infinity is not a number"),
    "no ASCII": (b'{"version":1,"x":"\xc3\xa4"}', "UnicodeDecodeError"),
    "UTF-16": (("\u2200" + "[" * 100).encode("utf-16"), "UnicodeDecodeError"),  # from the parser
    "nothing": (b"", "JSONDecodeError"),
    "a key twice": (b'{"version":1,"version":1}', "KeyError"),
}


@pytest.mark.parametrize("name", by_tier(*list(TEXTS)[::4], more=TEXTS))
def test_large_or_deep_text_takes_bounded_memory(name):
    text, says = TEXTS[name]
    disk = base()
    manifest = signed(text)
    with memory(1 << 29):
        ended = attempt(disk, manifest)
    assert ".json is damaged (" in ended and "crc32" not in ended and says in ended


def test_a_manifest_of_a_terabyte_is_not_read(tmp_path):
    save(str(tmp_path), 1)
    with open(tmp_path / "manifest-000000000009.json", "wb") as file:
        file.truncate(1 << 40)
    words = f"has {1 << 40} bytes; expected at most {_manifest.MAX_BYTES}"
    with memory(1 << 28), pytest.warns(RuntimeWarning, match=words):
        assert load(str(tmp_path)) == 1


def test_sizes_are_checked_before_memory_is_allocated():
    body = body_of(base())
    column = {"file": [0], "offset": [1 << 20], "crc32": [0]}
    body["arrays"]["huge"] = {"dtype": "uint8", "shape": [1 << 47], "block": 1 << 47, **column}
    body["files"][0]["bytes"] = (1 << 47) + (1 << 20)
    with memory(1 << 28):
        assert "bytes; expected 1407" in attempt(base(), signed(dumps(body)))


@given(st.binary(max_size=300), st.integers(1, 300))
def test_the_depth_of_any_text_is_that_of_a_plain_loop(text, piece):
    depth, deepest, quoted, escaped = 0, 0, False, False
    for byte in text:
        if not escaped and byte == 34:
            quoted = not quoted
        elif not (escaped or quoted):
            depth += (byte in b"[{") - (byte in b"]}")
            deepest = max(deepest, depth)
        escaped = not escaped and byte == 92
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fbuf._formats.checkpoint.manifest._STEP_BYTES", piece)
        for most in range(max(deepest - 1, 0), deepest + 1):
            patch.setattr("fbuf._formats.checkpoint.manifest.MAX_DEPTH", most)
            if deepest > most and text:
                pytest.raises(ValueError, check_json, text).match("nested")
            else:
                check_json(text)


@pytest.mark.more
def test_mutated_manifests():
    mutated_manifests(2_000, seed=0)


def test_links_are_not_written_through(tmp_path):
    save(str(tmp_path / "c"), 1)
    victim = tmp_path / "victim"
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


def test_booleans_other_than_0_and_1_are_damage():
    disk = Memory()
    checkpoint.write(PATH, {"a": np.array([True, False])}, {}, disk=disk)
    name = "manifest-000000000001.json"
    disk.names["data-000000000001.safetensors"].data[-1] = 2
    body = body_of(disk, name)
    body["arrays"]["a"]["crc32"] = [zlib.crc32(b"\1\2")]
    disk.put(name, signed(dumps(body)))
    with pytest.raises(checkpoint.StoreCorrupted, match="array 'a' is bool and holds other bytes than 0 and 1"):
        np.asarray(checkpoint.read(PATH, disk=disk).arrays["a"])

"""Hostile manifests with valid checksums: whatever they say, only fbuf's own errors may follow."""

import copy
import functools
import json
import random
import zlib

import numpy as np

from fbuf._formats import checkpoint
from tests.support.memory_disk import PATH, disk_of, save

NAME = "manifest-000000000002.json"


def signed(body, version=1, kind=b"checkpoint"):
    line = b'{"format":"fbuf %s","version":%d,"bytes":%d,"crc32":%d}\n%s\n'
    return line % (kind, version, len(body), zlib.crc32(body), body)


def dumps(value):
    return json.dumps(value, separators=(",", ":")).encode()


@functools.cache
def _saved():
    disk = disk_of(3)
    save(PATH, 4, disk, keep=1)
    return disk


def base():
    return _saved().copy()


def body_of(disk, name=NAME):
    return json.loads(disk.contents()[name].split(b"\n")[1])


def attempt(disk, manifest):
    """Read everything; return "read" or the message of fbuf's error. Any other error fails the test."""
    disk.put(NAME, manifest)
    try:
        with checkpoint.read(PATH, disk=disk) as saved:
            total = sum(np.asarray(array).nbytes for array in saved.arrays.values())
            for array in saved.arrays.values():
                assert int(array.block_places()[3].sum()) == array.nbytes
        assert total <= sum(map(len, disk.contents().values())), "more bytes than the files have"
        return "read"
    except (checkpoint.StoreCorrupted, checkpoint.VersionError, checkpoint.CheckpointNotFound) as error:
        return str(error)


def at_path(value, path):
    return functools.reduce(lambda inner, key: inner[key], path, value)


def put(value, path, new):
    value = copy.deepcopy(value)
    at_path(value, path[:-1])[path[-1]] = new
    return value


def nodes(value, path=()):
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from nodes(inner, (*path, key))


# fmt: off
NASTY = [
    None, True, -1, 0, 1, 7, 2**31, 2**48, 2**63, 2**64, 10**30, 0.5, -0.0, "", "\0", "..", "/", "O", "float32", "int4",
    "x" * 999, [], {}, [[]], [0] * 10, ["a"] * 5, {"a": 1}, "data-000000000001.safetensors", "data-999999999999.safetensors",
]
# fmt: on


def _changed_values(body, chance):
    body = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        paths = list(nodes(body))
        path, other, kind = chance.choice(paths), chance.choice(paths), chance.randrange(4)
        at, last = at_path(body, path[:-1]), path[-1]
        if kind == 0:
            at[last] = copy.deepcopy(chance.choice(NASTY))
        elif kind == 1 and isinstance(at[last], int):
            at[last] += chance.choice([-1, 1, 8, -(2**16), 2**16, 2**40])
        elif kind == 2 and isinstance(at, list):
            at.append(at[last])
        elif other[: len(path)] != path[: len(other)]:
            at[last] = copy.deepcopy(at_path(body, other))
    return dumps(body)


def _changed_bytes(text, chance):
    raw = bytearray(text)
    for _ in range(chance.randint(1, 4)):
        i, kind = chance.randrange(len(raw)), chance.randrange(3)
        if kind == 0:
            raw[i] = chance.randrange(256)
        elif kind == 1:
            del raw[i : i + chance.randint(1, 20)]
        else:
            raw[i:i] = chance.choice([b"[", b"{", b'"', b",", b"-", b"1e9", b"null", b"\\u0000", b"NaN"])
    return bytes(raw)


def mutated_manifests(count, seed):
    chance, disk, read, refused = random.Random(seed), base(), 0, set()
    body = body_of(disk)
    text = dumps(body)
    for trial in range(count):
        ended = attempt(disk, signed((_changed_values(body, chance), _changed_bytes(text, chance))[trial % 2 == 0]))
        read += ended == "read"
        refused.add(ended)
    assert 0 < read < count and len(refused) > 50, f"seed {seed}"

"""Checks of `fbuf.save`, and of metadata with removed and replaced values, shared by tiers."""

import copy
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf._checkpoint import device_arrays
from fbuf._formats import checkpoint
from fbuf.samplers import Prioritized
from tests.support.checkpoint import GOLDEN
from tests.support.hostile_manifests import at_path, nodes
from tests.support.threads import PATIENCE
from tests.support.trees import same

EXAMPLE = {"obs": jax.ShapeDtypeStruct((16, 16), np.uint8), "t": jax.ShapeDtypeStruct((), np.float32)}
BUFFER = fbuf.Buffer(20_000, sampler=Prioritized())


def rows_of(first, count):
    rng = np.random.default_rng(first)
    return {
        "obs": rng.integers(0, 256, (count, 16, 16), np.uint8),
        "t": np.arange(first, first + count, dtype=np.float32),
    }


def filled(buffer, count):
    return buffer.extend(buffer.init(EXAMPLE), rows_of(0, count))


def held_up(monkeypatch):
    """Let saves in the background wait for the event before they write."""
    go, write = threading.Event(), checkpoint.write

    def late(*args, **settings):
        assert go.wait(PATIENCE)
        return write(*args, **settings)

    monkeypatch.setattr(checkpoint, "write", late)
    return go


def check_second_save(storage, wait, tmp_path):
    buffer = BUFFER if storage is None else fbuf.Buffer(20_000, sampler=Prioritized(), storage=storage)
    state = filled(buffer, 10_000)
    first = fbuf.save(tmp_path / "saved", buffer, state, wait=wait).result()
    raw = 10_000 * (256 + 8)
    assert 0.9 * raw < first.bytes_written < 1.3 * raw
    state = buffer.extend(state, rows_of(10_000, 100))
    second = fbuf.save(tmp_path / "saved", buffer, state, wait=wait).result()
    # One block of a leaf is 256 KiB: of obs the last two at most; tree and t have one or two blocks each.
    assert second.bytes_written < 0.35 * raw
    again = fbuf.load(tmp_path / "saved")[1]
    same(buffer.rows(again), buffer.rows(state))
    same(again.sampler, state.sampler)


def check_store_in_use(storage, tmp_path, monkeypatch):
    buffer = fbuf.Buffer(500, storage=storage)
    state = filled(buffer, 700)
    want = jax.device_get(buffer.rows(state))
    go = held_up(monkeypatch)
    saving = fbuf.save(tmp_path / "saved", buffer, state, wait=False)
    for i in range(10):
        state = buffer.extend(state, rows_of(1000 + 200 * i, 200))
    go.set()
    saving.result()
    loaded, again = fbuf.load(tmp_path / "saved")
    same(jax.device_get(loaded.rows(again)), want)


def check_marks(dtype, monkeypatch):
    """A changed bit changes the mark of its block alone; trailing zero rows have none."""
    monkeypatch.setattr(device_arrays, "SMALL_BYTES", 0)
    monkeypatch.setattr(device_arrays, "_platform", lambda array: "gpu")
    rng = np.random.default_rng(0)
    kind = jnp.dtype(getattr(jnp, "bool_" if dtype == "bool" else dtype))
    values = rng.integers(0, 2, (40, 3, 5)).astype(kind)
    values[33:] = np.zeros((), kind)

    def leaf(values):
        made = device_arrays.DeviceLeaf(jnp.asarray(values))
        made.block = 8
        return made

    plain = leaf(values)
    assert not plain.slices_are_views and plain.shape[0] == 33 and len(plain.marks) == 5
    same(np.concatenate([plain[a : min(a + 8, 33)] for a in range(0, 33, 8)]), values[:33])
    for row in (0, 7, 8, 20, 32):
        other = values.copy()
        other[row, 1, 2] = np.array(float(np.real(values[row, 1, 2])) == 0).astype(kind)
        marks = leaf(other).marks
        assert [i for i, (a, b) in enumerate(zip(marks, plain.marks, strict=True)) if a != b] == [row // 8]


ERRORS = (ValueError, TypeError, fbuf.StoreCorrupted, OSError, RuntimeError)
VALUES = (None, True, 0, -1, 3, 17, 0.5, "", "uint8", "int64", "object", "os:system", [], {}, [[]], {"tuple": [1]})


def golden_parts(name):
    with checkpoint.read(str(GOLDEN / name)) as saved:
        return {n: np.asarray(a) for n, a in saved.arrays.items()}, saved.meta


def mangled(meta, rng):
    meta = copy.deepcopy(meta)
    for _ in range(rng.randint(1, 2)):
        *path, last = rng.choice(list(nodes(meta)))
        at = at_path(meta, path)
        if rng.random() < 0.3:
            del at[last]
        else:
            at[last] = copy.deepcopy(rng.choice(VALUES))
    return meta


def check_mangled_meta(name, seed, tmp_path):
    arrays, meta = golden_parts(name)
    rng, refused = random.Random(f"{name}{seed}"), 0
    for i in range(40):
        path = str(tmp_path / str(i))
        checkpoint.write(path, arrays, mangled(meta, rng), sync=False)
        try:
            fbuf.load(path, extra=True)
        except ERRORS as error:
            refused += 1
            assert str(error)
    assert refused > 10

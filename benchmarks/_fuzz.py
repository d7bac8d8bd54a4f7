"""Change files at random, make their checksums right again, and look for crashes, hangs and states that fail later.

Each kind of file runs in a process of its own, for an equal part of the time, which starts once an intact input was used: by
then everything is compiled. An input is refused by one of fbuf's errors, or what is read from it works: batches have slots of
the buffer and finite weights, and every method goes on. It takes at most 20 times the bytes of the file and 200 MB, and 60
seconds.
"""

from __future__ import annotations

import faulthandler
import functools
import gzip
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fbuf
import fbuf.sharded
from fbuf._formats import checkpoint, dataset
from fbuf._formats.checkpoint.manifest import encode_lines
from fbuf._formats.dataset.directory import VERSION
from fbuf._host.codecs import Zstd
from fbuf._host.io.directory import Folder

HANG, RATIO, CONSTANT = 60, 20, 200 << 20
EACH = 12  # seconds for each kind of buffer
ROW = {"t": np.int32(0), "terminated": False, "truncated": False, "obs": np.zeros((8, 8), np.uint8)}
WINDOWS = {"view": fbuf.views.Sequence(3, autoreset="same_step"), "lanes": 2}
FILES: Any = (ValueError, OSError, fbuf.StoreCorrupted, EOFError, MemoryError)
LOADS: Any = (fbuf.SchemaError, fbuf.VersionError, fbuf.StoreCorrupted, OSError, MemoryError)
"""What `fbuf.load` raises; other readers any of `FILES`."""
BUFFERS: dict[str, dict[str, Any]] = {
    "uniform": {"lanes": 2},
    "windows": {**WINDOWS, "sampler": fbuf.samplers.Epoch()},
    "episodes": {**WINDOWS, "sampler": fbuf.samplers.Uniform(over="episodes")},
    "consume": {"sampler": fbuf.samplers.Consume(times=2)},
    "fifo": {"sampler": fbuf.samplers.Consume(times=2, order="fifo"), "lanes": 2},
    "staleness": {"sampler": fbuf.samplers.Staleness(maximum=3)},
    "prioritized": {**WINDOWS, "sampler": fbuf.samplers.Prioritized(normalize="buffer", largest="held")},
    "host priorities": {"sampler": fbuf.samplers.Prioritized(on="host")},
    "ranked": {"sampler": fbuf.samplers.Ranked(uniform=0.1)},
    "top-k": {"writer": fbuf.writers.TopK("t")},
    "reservoir": {"writer": fbuf.writers.Reservoir()},
    "deduplicated": {"storage": fbuf.storages.Deduplicated(keys=("obs",), block=(4, 4))},
    "compressed": {"storage": fbuf.storages.Compressed(keys=("obs",)), "prefetch": 1, "batch_size": 8},
    "ragged": {"storage": fbuf.storages.Ragged()},
    "normalized": {"on_read": fbuf.transforms.Normalize("obs")},
}


def rows(first: int, count: int, lanes: int | None) -> dict[str, np.ndarray]:
    """Return rows of `ROW`, `count` for each lane."""
    t = np.arange(first, first + count * (lanes or 1), dtype=np.int32).reshape((count, lanes) if lanes else (count,))
    obs = (t[..., None, None] * np.ones((8, 8), np.int32) % 251).astype(np.uint8)
    return {"t": t, "terminated": t % 20 == 19, "truncated": np.zeros(t.shape, bool), "obs": obs}


def exercise(buffer: Any, state: Any) -> None:
    """Call the methods of a buffer with a state that was loaded."""
    own = getattr(buffer, "buffer", buffer)
    for number in range(3):
        state, batch = buffer.sample(state, jax.random.key(number), 8)
        mask, slot, weight = (np.asarray(x) for x in (batch.mask, batch.index.slot, batch.weight))
        assert ((slot >= 0) & (slot <= own.capacity)).all(), "a slot beyond the buffer"
        assert np.isfinite(weight[mask]).all() and (weight >= 0).all(), "weights"
        if own.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, np.linspace(0, 2, 8, dtype=np.float32))
        state = buffer.extend(state, rows(100 + 10 * number, 5, own.lanes))
    jax.block_until_ready((buffer.rows(state).data, buffer.stats(state), buffer.size(state)))
    with tempfile.TemporaryDirectory() as folder:
        fbuf.save(folder, buffer, buffer.clear(state), sync=False)


def changed_array(array: np.ndarray, rng: random.Random) -> np.ndarray:
    """Return an array with other elements, or of another shape or dtype."""
    array = array.copy()
    flat, how = array.reshape(-1), rng.random()
    if how < 0.05 or not flat.size:
        return array[: rng.randrange(len(array) + 1)] if array.ndim else array
    if how < 0.08:
        return array.astype(rng.choice(["int8", "uint32", "float32", "int64"]))
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(flat.size)
        if how < 0.6:
            info: Any = None
            if flat.dtype.kind in "iu":
                info = np.iinfo(flat.dtype)
                near = int(flat[at]) + rng.choice((-1, 1, 2, 7))
                value = rng.choice((info.min, info.max, 0, 1, info.max // 2, near))
                flat[at] = min(max(value, info.min), info.max)
            elif flat.dtype.kind == "f":
                flat[at] = rng.choice((np.nan, np.inf, -np.inf, -1.0, 0.0, 3e38, 1e-45))
            else:
                flat[at] = not flat[at]
        else:
            flat[at : at + 1].view(np.uint8)[...] = [rng.randrange(256) for _ in range(flat.dtype.itemsize)]
    return array


def changed_json(value: Any, rng: random.Random) -> Any:
    """Return JSON with one entry changed, removed or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        rest = {k: v for k, v in value.items() if k != key}
        return rest if rng.random() < 0.1 else {**value, key: changed_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], changed_json(value[at], rng), *value[at + 1 :]]
    number = int(value) if isinstance(value, int | float) and abs(value) < 1e18 else 1
    return rng.choice((None, True, -1, 0, 1, 2**31, 2**63, 1e308, "", "x", [], {}, number + 1, number * 2, number - 1))


def changed_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with some changed, removed or repeated."""
    out, how = bytearray(data), rng.random()
    if how < 0.1:
        del out[rng.randrange(len(out) + 1) :]
    elif how < 0.15:
        out += out[: rng.randrange(len(out) + 1)]
    else:
        for _ in range(rng.choice((1, 1, 3, 20))):
            if out:
                out[rng.randrange(min(len(out), rng.choice((64, 1 << 30))))] = rng.randrange(256)
    return bytes(out)


class Input(NamedTuple):
    """A file or folder: its bytes, and what reads it and then uses what was read."""

    size: int
    read: Callable[[], Any]
    use: Callable[[Any], Any]
    refusals: Any = FILES


Case = Callable[[random.Random | None], Input]
"""Makes an input, intact for None, else damaged."""
EITHER = "full", "lazy"


def checkpoints(folder: Path, seconds: float, seed: int) -> Iterator[Case]:
    """Yield cases of checkpoints of some kinds of buffers."""
    names = sorted({*BUFFERS} - {"compressed", "deduplicated", "ragged"})
    for name in random.Random(seed).sample(names, min(len(names), max(1, int(seconds / EACH)))):
        yield _saved(folder, fbuf.Buffer(50, **BUFFERS[name]))


def compressed(folder: Path) -> Iterator[Case]:
    """Yield cases of checkpoints of compressed blocks."""
    yield _saved(folder, fbuf.Buffer(50, **BUFFERS["compressed"]), "rows/")


def deduplicated(folder: Path) -> Iterator[Case]:
    """Yield cases of checkpoints of tables of distinct blocks."""
    yield _saved(folder, fbuf.Buffer(50, **BUFFERS["deduplicated"]), "rows/")


def ragged(folder: Path) -> Iterator[Case]:
    """Yield cases of checkpoints of ragged rows."""
    yield _saved(folder, fbuf.Buffer(50, **BUFFERS["ragged"]), "rows/")


def sharded(folder: Path) -> Iterator[Case]:
    """Yield cases of checkpoints of a buffer over two devices."""
    mesh = jax.make_mesh((2,), ("data",))
    yield _saved(folder, fbuf.sharded.Sharded(fbuf.Buffer(48, lanes=2, sampler=fbuf.samplers.Prioritized()), mesh))


def _saved(folder: Path, whole: Any, often: str = "state/") -> Case:
    """Return the cases of a checkpoint in which arrays whose names begin with `often` are changed most often."""
    buffer = getattr(whole, "buffer", whole)
    state = whole.extend(whole.init(ROW), rows(0, 60 // (buffer.lanes or 1), buffer.lanes))
    state, _ = whole.sample(state, jax.random.key(0), buffer.batch_size or 4)
    base, path = folder / str(len(list(folder.iterdir()))), folder / "changed"
    fbuf.save(base, whole, state)
    with checkpoint.read(base) as saved:
        arrays, meta = {n: np.asarray(a) for n, a in saved.arrays.items()}, saved.meta

    def case(rng: random.Random | None) -> Any:
        new, about = dict(arrays), meta
        if rng is not None:
            for _ in range(rng.choice((1, 1, 2))):
                leaf = rng.choice([n for n in sorted(arrays) if rng.random() < 0.3 or often in n] or [*arrays])
                new[leaf] = changed_array(arrays[leaf], rng)
            if rng.random() < 0.2:
                about = changed_json(meta, rng)
        shutil.rmtree(path, ignore_errors=True)
        if not isinstance(about, dict):
            about = {"other": about}
        checkpoint.write(str(path), new, about, sync=False)

        verify: Any = "full" if rng is None else rng.choice(EITHER)

        def read() -> Any:
            return fbuf.load(path, whole, example=ROW, verify=verify)

        return Input(_size(path), read, lambda loaded: exercise(*loaded), LOADS)

    return case


def stores(folder: Path) -> Iterator[Case]:
    """Yield cases of a live store whose files are changed; the checksum of its counts is made right."""
    kinds: dict[str, Any] = {
        "memmap": fbuf.storages.Memmap,
        "compressed": lambda path: fbuf.storages.Compressed(path=path),
    }
    path = folder / "live"
    for kind, storage in kinds.items():
        base = folder / f"{kind}-base"
        buffer = fbuf.Buffer(50, storage=storage(str(path)))
        state = buffer.extend(buffer.init(ROW), rows(0, 60, None))
        state = buffer.update_rows(state, buffer.rows(state, last=3).index, {"t": np.arange(3, dtype=np.int32)})
        buffer.flush(state)
        shutil.copytree(path, base)
        fbuf.stores()[-1].close()
        shutil.rmtree(path)

        def case(rng: random.Random | None, buffer: Any = buffer, base: Path = base) -> Any:
            for handle in fbuf.stores():
                handle.close()
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(base, path)
            if rng is not None:
                _change_store(path, rng)

            verify: Any = "full" if rng is None else rng.choice(EITHER)

            def read() -> Any:
                return buffer.resume(ROW, verify=verify)

            return Input(_size(path), read, functools.partial(exercise, buffer))

        yield case


def _change_store(path: Path, rng: random.Random) -> None:
    """Change one of a live store's files."""
    file = rng.choice(sorted(p for p in path.iterdir() if p.name != "lock"))
    if file.name == "manifest.json":
        file.write_text(json.dumps(changed_json(json.loads(file.read_text()), rng)))
    elif file.name == "head":
        _change_head(file, json.loads((path / "manifest.json").read_text()), rng)
    else:
        file.write_bytes(changed_bytes(file.read_bytes(), rng))


def _change_head(file: Path, manifest: dict[str, Any], rng: random.Random) -> None:
    """Change a number in both places of a live store's head, and make their checksums right."""
    data, seed = bytearray(file.read_bytes()), int(manifest["id"], 16)
    columns, lanes = len(manifest["columns"]), manifest["lanes"]
    size, signer = 16 + columns + 24 * lanes, Folder.__new__(Folder)
    signer.seed = seed
    at = rng.choice((0, 8, *range(16, 16 + columns), *range(16 + columns, size, 8)))
    for start in (0, len(data) // 2):
        body = bytearray(data[start : start + size])
        width = 1 if 16 <= at < 16 + columns else 8
        value = rng.choice((0, 1, 49, 50, 51, 61, 2**31, 2**62, 2**63 - 1))
        body[at : at + width] = (value % 256**width).to_bytes(width, "little")
        data[start : start + size + 4] = bytes(body) + struct.pack("<I", signer.crc(bytes(body)))
    file.write_bytes(bytes(data))


def frames(folder: Path) -> Iterator[Case]:
    """Yield cases of zstd chunks that are changed, or whose header claims another size."""
    codec = Zstd(chunk=4)
    block = np.arange(4 * 64, dtype=np.uint8).reshape(4, 64)
    whole = bytes(codec.encode(block))

    def case(rng: random.Random | None) -> Any:
        data = whole if rng is None else changed_bytes(whole, rng)
        at = data.find(b"\x28\xb5\x2f\xfd")
        if rng is not None and rng.random() < 0.5 and at >= 0:  # a single segment, with a size of eight bytes
            size = rng.choice((0, 1, 255, 2**20, 2**32, 2**40, 2**63)).to_bytes(8, "little")
            data = data[: at + 4] + b"\xe0" + size + data[at + 6 :]

        return Input(len(data), lambda: codec.decode(data, np.empty_like(block)), lambda _: None)

    yield case


def atari(folder: Path) -> Iterator[Case]:
    """Yield cases of the DQN replay data set, whose .gz files are compressed again."""
    rng, n = np.random.default_rng(0), 250
    steps = {
        "$store$_observation": rng.integers(0, 255, (n, 84, 84), np.uint8),
        "$store$_action": rng.integers(0, 6, n, np.int32),
        "$store$_reward": np.zeros(n, np.float32),
        "$store$_terminal": (np.arange(n) % 40 == 39).astype(np.uint8),
        "add_count": np.array(n - 1),
        "invalid_range": (n - 2 + np.arange(5)) % n,
    }
    packed = {}
    for name, array in steps.items():
        file = folder / "array.npy"
        np.save(file, array)
        packed[name] = file.read_bytes()

    def case(rng: random.Random | None) -> Any:
        logs = folder / "files" / "dqn" / "Pong" / "1" / "replay_logs"
        for old in ("files", "made"):
            shutil.rmtree(folder / old, ignore_errors=True)
        logs.mkdir(parents=True)
        wrong, outer = (None, False) if rng is None else (rng.choice(sorted(packed)), rng.random() < 0.3)
        for name, data in packed.items():
            hit = rng if name == wrong else None
            inner = data if hit is None or outer else changed_bytes(data, hit)
            text = gzip.compress(inner, 1, mtime=0)
            (logs / f"{name}_ckpt.0.gz").write_bytes(changed_bytes(text, hit) if hit is not None and outer else text)

        def read() -> Any:
            return fbuf.datasets.atari_dqn("Pong/1", root=folder / "made", source=folder / "files", workers=0)

        return Input(sum(map(len, packed.values())), read, _draw)

    yield case


def torchrl(folder: Path) -> Iterator[Case]:
    """Yield cases of a memory-mapped storage of torchrl."""
    base, n = folder / "base", 8
    (base / "storage").mkdir(parents=True)
    t = np.arange(n)
    leaves: dict[str, np.ndarray] = {
        "action": t,
        "observation": np.repeat(t[:, None], 3, 1).astype(np.float32),
        "index": t,
    }
    about: dict[str, Any] = {"shape": [n], "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
    for name, leaf in leaves.items():
        (base / "storage" / f"{name}.memmap").write_bytes(leaf.tobytes())
        about[name] = {
            "dtype": f"torch.{leaf.dtype.name}",
            "shape": list(leaf.shape),
            "device": "cpu",
            "is_nested": False,
        }
    (base / "storage" / "meta.json").write_text(json.dumps(about))
    (base / "storage" / "storage_metadata.json").write_text(json.dumps({"metadata": {}, "is_pytree": False, "len": n}))
    (base / "writer").mkdir()
    (base / "writer" / "metadata.json").write_text(json.dumps({"cursor": 5, "write_count": 13}))
    yield _foreign(base, folder / "changed", lambda path: fbuf.interop.from_torchrl(path).into())


def vault(folder: Path) -> Iterator[Case]:
    """Yield cases of a Vault of flashbax, if it is installed."""
    try:
        import flashbax as fbx
        from flashbax.vault import Vault
    except ImportError:
        return
    made = fbx.make_item_buffer(max_length=64, min_length=1, sample_batch_size=1, add_batches=False)
    state = made.init({"t": np.int32(0), "obs": np.zeros(3, np.float32)})
    store = Vault("v", state.experience, rel_dir=str(folder), vault_uid="u")
    for i in range(12):
        state = made.add(state, {"t": np.int32(i), "obs": np.full(3, i, np.float32)})
    store.write(state)
    yield _foreign(folder / "v" / "u", folder / "changed", lambda path: fbuf.interop.from_vault(path).into())


def data_set(folder: Path) -> Iterator[Case]:
    """Yield cases of a data set of two segments."""
    base, path = folder / "base", folder / "changed"
    fbuf.interop.from_arrays(rows(0, 60, None)).save(base, segment_rows=32)
    made, segments = dataset.load(base), []
    whole = {
        "version": VERSION,
        "schema": made.schema.to_json(),
        "pieces": made.segment_lists(),
        "meta": made.meta,
    }
    for number in range(2):
        with checkpoint.read(base / "pieces" / str(number)) as saved:
            segments.append(({n: np.asarray(a) for n, a in saved.arrays.items()}, saved.meta))

    def case(rng: random.Random | None) -> Any:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(base, path)
        about = whole
        if rng is not None and rng.random() < 0.3:
            about = changed_json(whole, rng)
        elif rng is not None:
            number = rng.randrange(2)
            arrays, meta = segments[number]
            leaf, where = rng.choice(sorted(arrays)), path / "pieces" / str(number)
            shutil.rmtree(where)
            meta = changed_json(meta, rng) if rng.random() < 0.3 else meta
            new = {**arrays, leaf: changed_array(arrays[leaf], rng)}
            checkpoint.write(str(where), new, meta if isinstance(meta, dict) else {"other": meta}, sync=False)
            with checkpoint.read(where, verify="lazy") as saved:
                pieces = [list(piece) for piece in made.segment_lists()]
                pieces[number][1] = saved.manifest.save
                about = {**whole, "pieces": pieces}
        (path / "dataset.json").write_bytes(encode_lines("finish", "data set", VERSION, about))

        verify: Any = "full" if rng is None else rng.choice(EITHER)

        def read() -> Any:
            return fbuf.datasets.open(path, verify=verify)

        return Input(_size(path), read, _draw)

    yield case


def _draw(made: Any) -> None:
    """Read all rows, and draw some."""
    buffer, state = made
    jax.block_until_ready((buffer.rows(state).data, buffer.sample(state, jax.random.key(0), 8)[1].data))


def _size(path: Path) -> int:
    """Return the bytes of files in a folder."""
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def _change_file(file: Path, rng: random.Random) -> None:
    """Change the JSON of a file, or its bytes."""
    try:
        about = json.loads(file.read_text())
    except ValueError:
        about = None
    if about is not None and rng.random() < 0.7:
        file.write_text(json.dumps(changed_json(about, rng)))
    else:
        file.write_bytes(changed_bytes(file.read_bytes(), rng))


def _foreign(base: Path, path: Path, read: Callable[[Path], Any]) -> Case:
    files = sorted(p.relative_to(base) for p in base.rglob("*") if p.is_file())

    def case(rng: random.Random | None) -> Any:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(base, path)
        if rng is not None:
            _change_file(path / rng.choice(files), rng)

        return Input(_size(path), lambda: read(path), _draw)

    return case


KINDS: dict[str, Callable[..., Iterator[Case]]] = {
    "checkpoints": checkpoints,
    "sharded": sharded,
    "compressed": compressed,
    "deduplicated": deduplicated,
    "ragged": ragged,
    "stores": stores,
    "data set": data_set,
    "frames": frames,
    "atari": atari,
    "torchrl": torchrl,
    "vault": vault,
}
"""Kinds of files, which get equal parts of the time."""


def _short(error: Exception) -> str:
    """Return the ends of an error's message: that of a callback holds a traceback."""
    text = str(error)
    return text if len(text) < 600 else f"{text[:200]} ... {text[-400:]}"


def _is_late(error: Exception) -> bool:
    """Return whether rows of a store said so when they were read: their bytes are damaged, or the store has not got them."""
    return type(error) is fbuf.StoreCorrupted or (type(error) is RuntimeError and "have expired" in str(error))


def _memory(name: str) -> int:
    """Return the bytes of this process: `VmRSS`, or `VmHWM`, the most since it was reset."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) * 1024


def run(kind: str, seconds: float, seed: int, last: str) -> int:
    """Fuzz one kind of file, print what was found, and return how much was wrong. The file `last` gets each seed."""
    warnings.simplefilter("ignore")
    faulthandler.enable()
    found: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fbuf-fuzz-") as folder:
        limits = {"seconds": seconds, "seed": seed} if kind == "checkpoints" else {}
        cases = list(KINDS[kind](Path(folder), **limits))
        for case in cases:
            intact = case(None)
            intact.use(intact.read())
        until = time.monotonic() + seconds
        while cases and time.monotonic() < until and len(wrong) < 20:
            seed += 1
            Path(last).write_text(str(seed))
            number, rng = seed % len(cases), random.Random(seed)
            faulthandler.dump_traceback_later(HANG, exit=True)
            made = cases[number](rng)
            Path("/proc/self/clear_refs").write_text("5")
            before = _memory("VmRSS")
            read = None
            try:
                read = made.read()
                made.use(read)
                found["accepted"] += 1
            except Exception as error:
                if isinstance(error, made.refusals) if read is None else _is_late(error):
                    found[("" if read is None else "later ") + type(error).__name__] += 1
                else:
                    when = "" if read is None else "later "
                    wrong.append(f"seed {seed} (buffer {number}): {when}{type(error).__name__}: {_short(error)}")
            read = None
            more = _memory("VmHWM") - before
            if more > RATIO * made.size + CONSTANT:
                wrong.append(f"seed {seed} (buffer {number}): {more >> 20} MB for {made.size} bytes")
            faulthandler.cancel_dump_traceback_later()
    each = ", ".join(f"{number} {name}" for name, number in found.most_common())
    print(f"{kind}: {sum(found.values())} inputs: {each or 'not installed'}", *wrong, sep="\n  ", flush=True)
    return len(wrong)


def main(seconds: float, seed: int, only: str | None = None) -> int:
    """Fuzz each kind of file in a process of its own, for equal parts of the time; return 1 if something was wrong."""
    if only is not None and only not in KINDS:
        raise ValueError(f"fuzz: kind is {only!r}; expected one of {', '.join(KINDS)}.")
    ended, kinds = list[int](), [*KINDS] if only is None else [only]
    devices = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    env = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": devices}
    with tempfile.TemporaryDirectory(prefix="fbuf-fuzz-") as folder:
        last = Path(folder) / "last"
        for kind in kinds:
            last.write_text("none")
            call = f"_fuzz.run({kind!r}, {seconds / len(kinds)}, {seed}, {str(last)!r})"
            code = f"import sys; from benchmarks import _fuzz; sys.exit(min({call}, 1))"
            ended.append(subprocess.run([sys.executable, "-c", code], env=env).returncode)
            if ended[-1] not in (0, 1):
                print(f"{kind}: the process ended with {ended[-1]} at seed {last.read_text()}")
    return int(any(ended))

"""Change files at random, make their checksums right again, and look for crashes, hangs and states that fail later.

Each kind of file runs in a process of its own. An input is refused by one of fbuf's errors, or what is read from it works:
batches have slots of the buffer and finite weights, and every method goes on. It takes at most 20 times the bytes of the
file and 200 MB, and 60 seconds.
"""

from __future__ import annotations

import faulthandler
import gzip
import json
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
from typing import Any

import jax
import numpy as np

import fbuf
from fbuf._formats import checkpoint
from fbuf._host.codecs import Zstd
from fbuf._host.io.directory import Folder

HANG, RATIO, CONSTANT = 60, 20, 200 << 20
EACH = 12  # seconds for each kind of buffer, most of which its programs take to compile
ROW = {"t": np.int32(0), "terminated": False, "truncated": False, "obs": np.zeros((8, 8), np.uint8)}
WINDOWS = {"view": fbuf.views.Sequence(3, autoreset="same_step"), "lanes": 2}
FILES: Any = (ValueError, OSError, fbuf.StoreCorrupted, EOFError, MemoryError)
"""What readers of files raise: SchemaError and VersionError are ValueErrors."""
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
    "compressed": {"storage": fbuf.storages.Compressed(keys=("obs",)), "prefetch": 1, "batch_size": 4},
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
    for number in range(3):
        state, batch = buffer.sample(state, jax.random.key(number), 8)
        mask, slot, weight = (np.asarray(x) for x in (batch.mask, batch.index.slot, batch.weight))
        assert ((slot >= 0) & (slot <= buffer.capacity)).all(), "a slot beyond the buffer"
        assert np.isfinite(weight[mask]).all() and (weight >= 0).all(), "weights"
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, np.linspace(0, 2, 8, dtype=np.float32))
        state = buffer.extend(state, rows(100 + 10 * number, 5, buffer.lanes))
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


Case = Callable[[random.Random], tuple[int, Callable[[], None], Any]]
"""Makes a damaged input: its bytes, a function that reads and uses it, and the errors by which it may be refused."""


def checkpoints(folder: Path, seconds: float, seed: int) -> Iterator[Case]:
    """Yield cases of checkpoints of some kinds of buffers, also of compressed blocks and tables of distinct blocks."""
    names = random.Random(seed).sample(sorted(BUFFERS), min(len(BUFFERS), max(2, int(seconds / EACH))))
    for name in names:
        buffer = fbuf.Buffer(50, **BUFFERS[name])
        first = rows(0, 60 // (buffer.lanes or 1), buffer.lanes)
        state = buffer.extend(buffer.init(ROW), first)
        state, _ = buffer.sample(state, jax.random.key(0), 4)
        fbuf.save(folder / name, buffer, state)
        with checkpoint.read(folder / name) as saved:
            arrays, meta = {n: np.asarray(a) for n, a in saved.arrays.items()}, saved.meta

        def case(rng: random.Random, buffer: Any = buffer, arrays: Any = arrays, meta: Any = meta) -> Any:
            new, about = dict(arrays), meta
            for _ in range(rng.choice((1, 1, 2))):
                leaf = rng.choice(
                    [n for n in sorted(arrays) if rng.random() < 0.3 or n.startswith("state/")] or [*arrays]
                )
                new[leaf] = changed_array(arrays[leaf], rng)
            if rng.random() < 0.2:
                about = changed_json(meta, rng)
            path = folder / "changed"
            shutil.rmtree(path, ignore_errors=True)
            if not isinstance(about, dict):
                about = {"other": about}
            checkpoint.write(str(path), new, about, sync=False)

            def use() -> None:
                loaded, state = fbuf.load(path, buffer, example=ROW, verify=rng.choice(("full", "lazy")))
                exercise(loaded, state)

            return sum(f.stat().st_size for f in path.iterdir()), use, FILES

        yield case


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
        state = buffer.update_rows(state, buffer.last(state, 3).index, {"t": np.arange(3, dtype=np.int32)})
        buffer.flush(state)
        shutil.copytree(path, base)
        fbuf.stores()[-1].close()
        shutil.rmtree(path)

        def case(rng: random.Random, buffer: Any = buffer, base: Path = base) -> Any:
            for handle in fbuf.stores():
                handle.close()
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(base, path)
            file = rng.choice(sorted(p for p in path.iterdir() if p.name != "lock"))
            if file.name == "manifest.json":
                file.write_text(json.dumps(changed_json(json.loads(file.read_text()), rng)))
            elif file.name == "head":
                _change_head(file, json.loads((path / "manifest.json").read_text()), rng)
            else:
                file.write_bytes(changed_bytes(file.read_bytes(), rng))

            def use() -> None:
                state = buffer.resume(ROW, verify=rng.choice(("full", "lazy")))
                jax.block_until_ready(buffer.rows(state).data)
                exercise(buffer, state)

            return sum(f.stat().st_size for f in path.iterdir()), use, (*FILES, jax.errors.JaxRuntimeError)

        yield case


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

    def case(rng: random.Random) -> Any:
        data = changed_bytes(whole, rng)
        at = data.find(b"\x28\xb5\x2f\xfd")
        if rng.random() < 0.5 and at >= 0:  # a single segment, with a size of eight bytes
            size = rng.choice((0, 1, 255, 2**20, 2**32, 2**40, 2**63)).to_bytes(8, "little")
            data = data[: at + 4] + b"\xe0" + size + data[at + 6 :]

        def use() -> None:
            codec.decode(data, np.empty_like(block))

        return len(data), use, (*FILES, RuntimeError)

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

    def case(rng: random.Random) -> Any:
        logs = folder / "files" / "dqn" / "Pong" / "1" / "replay_logs"
        for old in ("files", "made"):
            shutil.rmtree(folder / old, ignore_errors=True)
        logs.mkdir(parents=True)
        wrong, outer = rng.choice(sorted(packed)), rng.random() < 0.3
        for name, data in packed.items():
            inner = changed_bytes(data, rng) if name == wrong and not outer else data
            text = gzip.compress(inner, 1, mtime=0)
            (logs / f"{name}_ckpt.0.gz").write_bytes(changed_bytes(text, rng) if name == wrong and outer else text)

        def use() -> None:
            made = fbuf.datasets.atari_dqn("Pong/1", root=folder / "made", source=folder / "files", workers=0)
            jax.block_until_ready(made[0].sample(made[1], jax.random.key(0), 8)[1].data)

        return sum(map(len, packed.values())), use, FILES

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
    yield _foreign(base, folder / "changed", fbuf.interop.from_torchrl)


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
    yield _foreign(folder / "v" / "u", folder / "changed", fbuf.interop.from_vault)


def _foreign(base: Path, path: Path, read: Callable[[Path], Any]) -> Case:
    files = sorted(p.relative_to(base) for p in base.rglob("*") if p.is_file())

    def case(rng: random.Random) -> Any:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(base, path)
        file = path / rng.choice(files)
        try:
            about = json.loads(file.read_text())
        except ValueError:
            about = None
        if about is not None and rng.random() < 0.7:
            file.write_text(json.dumps(changed_json(about, rng)))
        else:
            file.write_bytes(changed_bytes(file.read_bytes(), rng))

        def use() -> None:
            buffer, state = read(path).into()
            jax.block_until_ready(buffer.rows(state).data)

        return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()), use, FILES

    return case


KINDS: dict[str, tuple[Callable[..., Iterator[Case]], float]] = {
    "checkpoints": (checkpoints, 0.55),
    "stores": (stores, 0.2),
    "frames": (frames, 0.05),
    "atari": (atari, 0.1),
    "torchrl": (torchrl, 0.05),
    "vault": (vault, 0.05),
}
"""Kinds of files, and their parts of the time: the programs of each buffer take seconds to compile."""


def _memory(name: str) -> int:
    """Return the bytes of this process: `VmRSS`, or `VmHWM`, the most since it was reset."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) * 1024


def run(kind: str, seconds: float, seed: int) -> int:
    """Fuzz one kind of file, print what was found, and return how much was wrong."""
    warnings.simplefilter("ignore")
    found: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="fbuf-fuzz-") as folder:
        limits = {"seconds": seconds, "seed": seed} if kind == "checkpoints" else {}
        cases = list(KINDS[kind][0](Path(folder), **limits))
        until = time.monotonic() + seconds
        while cases and time.monotonic() < until and len(wrong) < 20:
            seed += 1
            number, rng = seed % len(cases), random.Random(seed)
            faulthandler.dump_traceback_later(HANG, exit=True)
            size, use, refusals = cases[number](rng)
            Path("/proc/self/clear_refs").write_text("5")
            before = _memory("VmRSS")
            try:
                use()
                found["accepted"] += 1
            except refusals as error:
                found[type(error).__name__] += 1
            except Exception as error:
                wrong.append(f"seed {seed} (buffer {number}): {type(error).__name__}: {error!s:.300}")
            more = _memory("VmHWM") - before
            if more > RATIO * size + CONSTANT:
                wrong.append(f"seed {seed} (buffer {number}): {more >> 20} MB for {size} bytes")
            faulthandler.cancel_dump_traceback_later()
    said = ", ".join(f"{number} {name}" for name, number in found.most_common())
    print(f"{kind}: {sum(found.values())} inputs: {said or 'not installed'}", *wrong, sep="\n  ", flush=True)
    return len(wrong)


def main(seconds: float, seed: int) -> int:
    """Fuzz each kind of file in a process of its own, for equal parts of the time; return 1 if something was wrong."""
    ended = []
    for kind, (_, share) in KINDS.items():
        call = f"_fuzz.run({kind!r}, {seconds * share}, {seed})"
        code = f"import sys; from benchmarks import _fuzz; sys.exit(min({call}, 1))"
        ended.append(subprocess.run([sys.executable, "-c", code]).returncode)
        if ended[-1] not in (0, 1):
            print(f"{kind}: the process ended with {ended[-1]}")
    return int(any(ended))

"""The benchmarks count what they say and notice wrong results; peers that are missing have their row. No time is judged."""

import dataclasses
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from benchmarks import (
    bench_compression,
    bench_deduplicated,
    bench_dispatch,
    bench_epoch,
    bench_gpu,
    bench_sample,
    hops,
    peers,
)
from benchmarks._compare import Field
from benchmarks._harness import Absent
from benchmarks.peers import EXAMPLE, FBUF, PEERS, Library
from benchmarks.peers._versions import versions
from fbuf._bridge import callbacks
from fbuf._core import pytree
from tests.support.fixtures import fixed


def moving_square(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return frames with a moving square, and where episodes of 1 to 40 frames start."""
    random = np.random.default_rng(seed)
    frames = np.zeros((count, 84, 84), np.uint8)
    for t in range(count):
        frames[t, 3 * t % 70 : 3 * t % 70 + 9, t % 60 : t % 60 + 9] = 1 + t % 200
    starts = np.zeros(count, np.bool_)
    starts[np.minimum(np.cumsum(random.integers(1, 40, count)), count - 1)] = True
    starts[0] = True
    return frames, starts


def deduplicated(**settings: Any) -> fbuf.storages.Deduplicated:
    return fbuf.storages.Deduplicated(keys=("obs",), **settings)


def noise(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (count, 84, 84), np.uint8)


def written(storage: Any, frames: np.ndarray, **options: Any) -> Any:
    buffer = fbuf.uniform(len(frames), storage=storage)
    parts = bench_deduplicated.lots({"obs": frames}, 2)
    return bench_deduplicated.write_all(buffer, buffer.init({"obs": frames[0]}), parts, **options)


def misread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the control of reads return the rows of the next slots."""
    real = bench_sample.bare
    monkeypatch.setattr(bench_sample, "bare", lambda a, b, slots: real(a, b, [(s + 1) % a.shape[0] for s in slots]))


def test_sample_notices_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    misread(monkeypatch)
    with pytest.raises(AssertionError, match="reads other rows"):
        bench_sample.measure(bench_sample.ROW, capacity=500, batch_size=8, rounds=2)


def test_compression_notices_other_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    games = types.SimpleNamespace(frames=lambda game, count, seed=0: moving_square(count, len(game)), GAMES=("Pong",))
    monkeypatch.setattr(bench_compression, "_atari", games)
    real = bench_compression.Run.pairs
    monkeypatch.setattr(bench_compression.Run, "pairs", lambda run, at: real(run, (at + 1) % len(run.frames)))
    with pytest.raises(AssertionError, match="ours gives other stacks"):
        bench_compression.compare(("Pong",), 900, 2, Absent("peer", "left out by the test"), judged=False)


@pytest.mark.parametrize(
    ("on_full", "message"), [("refuse", r"[1-9]\d* rows refused"), ("retire", r"[1-9]\d* retired")]
)
def test_deduplicated_notices_lost_rows(on_full: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        written(deduplicated(blocks=1024, on_full=on_full), noise(64), crowded=2)


def test_deduplicated_grows_until_all_rows_fit_and_notices_other_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, state, grown = written(deduplicated(blocks=2048), noise(64))
    assert grown > 0 and buffer.storage.blocks == 2048 * 3**grown // 2**grown
    assert int(buffer.stats(state)["blocks"]) == 64 * 84  # blocks of 7 x 12, no two alike
    bench_deduplicated.check_frames(buffer, state, noise(64))
    with pytest.raises(AssertionError, match="rows 0 to 63 are not those"):
        bench_deduplicated.check_frames(buffer, state, noise(64)[::-1])
    misread(monkeypatch)
    parts = [moving_square(250, seed)[0] for seed in range(2)]
    with pytest.raises(AssertionError, match="reads other frames"):
        bench_deduplicated.measure_read("two", parts, deduplicated(), rounds=2, batch_size=8)


def test_load_is_that_of_the_first_refused_row() -> None:
    size = bench_deduplicated.Size(deduplicated(block=(12, 12)), 1, 1, blocks=64 * 49, load=0.5, grown=0)
    for share, load, first in ((1, 1, None), (0.5, 1, 32), (2, 0.5, None)):
        sized = dataclasses.replace(size, blocks=int(share * size.blocks))
        found = bench_deduplicated.load_when_refused(noise(64), sized, lot=4)
        assert found == (pytest.approx(load, abs=0.02), first)


def test_programs_are_counted() -> None:
    if (unable := bench_dispatch.can_count()) is not None:
        pytest.skip(unable.reason)
    one, x = jax.jit(lambda x: x * jnp.float32(2)), jnp.zeros(3, jnp.float32)
    assert bench_dispatch.programs(lambda: x) == 0
    assert bench_dispatch.programs(lambda: one(one(x))) == 2
    assert bench_dispatch.programs(lambda: (x + x, x.reshape(1, 3))) == 2


def test_copies_are_counted_and_need_a_control(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, state = bench_dispatch.filled(256, **bench_dispatch.KINDS["Device, Prioritized/Transition"])
    assert set(bench_dispatch.moved(buffer, state).values()) == {0}
    monkeypatch.setattr(fbuf.Buffer, "extend", lambda self, state, rows: state)
    pytest.raises(AssertionError, bench_dispatch.find_copies, 256).match("the pointers prove nothing")


def test_epoch_notices_rows_drawn_twice() -> None:
    pytest.raises(AssertionError, lambda: bench_epoch.check(np.array([0, 1, 1, 3]), 4)).match("not every slot once")


@pytest.mark.parametrize("section", ["torch", "deduplicated"])
def test_accelerator_sections_run_on_a_cpu(section: str) -> None:
    rows = bench_gpu.SECTIONS[section](True)
    assert rows and all(row["ratio"] is not None and row["met"] is not False for row in rows)


def test_counts_files_and_moves() -> None:
    spec = {"a": {"b": jax.ShapeDtypeStruct((), jnp.float32)}}
    one = hops.Counter().count(lambda: pytree.named_leaves(spec))
    assert one == hops.Hops(("_core/pytree.py",), 1)
    assert hops.Counter().count(lambda: None) == hops.Hops((), 0)


def test_compressed_sample_goes_through_few_files() -> None:
    real = callbacks.call
    traced, warm = hops.compressed_sample(hops.Counter())
    assert callbacks.call is real
    for counted in (traced, warm):
        assert "_host/codecs/encoder.py" in counted.files, "what callbacks run is not counted"
    assert len(warm.files) <= 25
    assert warm.moves <= 60


def test_device_extend_goes_through_few_files() -> None:
    traced, warm = hops.device_extend(hops.Counter())
    assert "storages/_device.py" in traced.files
    assert len(warm.files) <= 16
    assert fbuf.stores() == []


LIST = next(library for library in PEERS if library.name == "NumPy list")
NOWHERE = Library("nowhere", "_nowhere", ("no-such-library",), "nothing", 1)


def rewards(batch: Any) -> np.ndarray:
    """Return `reward` of a batch of any library."""
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        batch = batch[0]
    if hasattr(batch, "reward"):
        return np.ravel(batch.reward)
    if not isinstance(batch, dict):  # torchrl's TensorDict has `data` too, which is itself
        batch = next((getattr(batch, name) for name in ("experience", "data") if hasattr(batch, name)), batch)
    return np.ravel(np.asarray(batch["reward"]))


library = fixed(FBUF, LIST)


@pytest.mark.parametrize("kind", ["Uniform", "Prioritized"])
def test_a_driver_returns_what_was_written(library: Library, kind: str) -> None:
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of imports
        module = peers.load(library)
        if isinstance(module, Absent):
            pytest.skip(module.reason)
        if not hasattr(module, kind):
            pytest.skip("has no priorities")
        driver = getattr(module, kind)(64, EXAMPLE)
        peers.fill(driver, 64)
        new = peers.rows(32, seed=5)
        for _ in range(3):  # over all rows there were
            driver.writer(new)()
        driver.writer({name: leaf[:1] for name, leaf in new.items()})()
        got = rewards((driver.sampler if kind == "Uniform" else driver.stepper)(16)())
        assert got.shape == (16,) and set(got.astype(np.float32)) <= set(new["reward"])


def test_absent_library_is_reported() -> None:
    assert isinstance(peers.load(NOWHERE), Absent)
    field = Field("Uniform", (16, 32), (LIST, NOWHERE))
    report = field.ask("A question", lambda d: d.sampler(4), rounds=2, targets={("nowhere", 16): ">= 2"}, flat="<= 9")
    by = {(r["question"], r["case"]): r for r in report}
    row = by["A question: time of the peer's over ours", "nowhere, 16 rows"]
    assert row["peer"] == "absent" and "No module named" in row["note"] and row["target"] == ">= 2"
    assert by["A question: time of the peer's over ours", "NumPy list, 32 rows"]["ratio"]["median"] > 0
    growth = [r for r in report if "growth exponent" in r["question"]]
    assert [r["case"] for r in growth] == ["fbuf", "NumPy list"] and growth[0]["target"] == "<= 9"
    assert all(r["tags"]["library"] in ("fbuf", "NumPy list", "nowhere") for r in report)


def test_a_library_too_large_to_run_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peers.too_large(LIST, 10**6) is None
    assert peers.too_large(LIST, 10**7) == "not run: a Python object a row"
    monkeypatch.setattr(peers, "free_bytes", lambda on_device: 10**9)
    assert "about 35.0 GB, and 1.0 GB of the device are free" in peers.too_large(
        dataclasses.replace(FBUF, largest=10**10), 10**9
    )
    small = Library("NumPy list", "_list", ("numpy",), "", 500, 16, "it is a test")
    report = Field("Uniform", (16, 32), (small,)).ask("q", lambda d: d.sampler(4), rounds=2)
    assert [r["note"] for r in report if r["ratio"] is None] == ["not run: it is a test"]


def test_a_library_that_fails_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    module = peers.load(LIST)
    monkeypatch.setattr(module, "Uniform", lambda capacity, example: 1 / 0)
    report = Field("Uniform", (16,), (LIST,)).ask("q", lambda d: d.sampler(4), rounds=2)
    assert report[0]["note"].startswith("failed: ZeroDivisionError") and report[0]["ratio"] is None


def test_versions_are_recorded() -> None:
    assert versions(LIST) == {"numpy": np.__version__}
    assert versions(NOWHERE) == {"no-such-library": None}

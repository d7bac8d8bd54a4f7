"""The benchmarks count what they say and notice wrong results. CI runs all of them, at small sizes; no time is judged here."""

import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from benchmarks import bench_compression, bench_deduplicated, bench_dispatch, bench_epoch, bench_gpu, bench_sample, hops
from benchmarks._harness import Absent
from fbuf._bridge import callbacks
from fbuf._core import pytree


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

"""Benchmarks against their peers, and those that CI cannot check by running them."""

from __future__ import annotations

import dataclasses
import types
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fbuf
from benchmarks import (
    bench_checkpoint,
    bench_compression,
    bench_datasets,
    bench_deduplicated,
    bench_host_store,
    bench_sample,
    bench_topk,
)
from benchmarks._harness import Absent, load_peer
from tests.support.benchmarks import deduplicated, made_up, noise, written

ABSENT = Absent("peer", "left out by the test")


def peer_of(name: str) -> Any:
    """The peer, without the warnings of its import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = load_peer(name)
    if isinstance(peer, Absent):
        pytest.skip(peer.reason)
    return peer


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Synthetic frames in place of games."""

    def blocks(game: str, count: int, seed: int = 0) -> Any:
        for first in range(0, count, 256):
            yield made_up(min(256, count - first), seed=first)

    def frames(game: str, count: int, seed: int = 0) -> Any:
        return made_up(count, seed=len(game))

    games = types.SimpleNamespace(frames=frames, blocks=blocks, BLOCK=256, GAMES=("Pong", "Qbert"))
    for module in (bench_compression, bench_deduplicated, bench_host_store, bench_checkpoint):
        monkeypatch.setattr(module, "_atari", games)


def test_datasets_makes_files_that_both_sides_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    frames, starts = made_up(240)
    monkeypatch.setattr(bench_datasets._atari, "frames", lambda game, count: (frames[:count], starts[:count]))
    report = bench_datasets._game("Pong", 120, 2, 1, tmp_path, ABSENT)
    assert [r["case"] for r in report] == ["Pong", "Pong"] and report[0]["peer"] == "absent"
    assert report[1]["ratio"] > 1 and "GB" in report[1]["note"]
    buffer, state = fbuf.datasets.open(tmp_path / "Pong-fbuf" / "Pong" / "1")
    rows = buffer.rows(state).data  # but for the last place of the last piece's ring
    assert np.array_equal(rows["obs"], frames[: len(rows["obs"])]) and len(rows["obs"]) == 239
    assert np.array_equal(rows["terminated"], np.append(starts[1:], False)[:239])


@pytest.mark.usefixtures("played")
@pytest.mark.filterwarnings("ignore")
def test_compression_against_torchrl() -> None:
    peer = peer_of("torchrl.data")
    report = bench_compression.compare(("Pong",), 900, 2, peer, judged=False)
    by_case = {(r["question"], r["case"]): r for r in report}
    for codec, kind in bench_compression.CODECS.items():
        default = kind == "default"
        for question, target in (
            (bench_compression.WRITE, ">= 30"),
            (bench_compression.STACKS, ">= 15"),
            (bench_compression.READ, ">= 8"),
        ):
            assert by_case[question, f"geometric mean, {codec}"]["target"] == (target if default else None)
    assert not any(r["target"] for r in report if "Bytes" in r["question"])


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("again", [False, True])
def test_memory_generator_ends_with_the_true_size(again: bool) -> None:
    generator = bench_host_store.fill("Pong", 512, again)
    next(generator)
    size = next(generator)
    assert size["host"] == size["nbytes"] > size["payload_bytes"] > 0 and size["rows_live"] == 512


@pytest.mark.usefixtures("played")
def test_checkpoints_are_timed_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = bench_checkpoint.times(2048, ("Pong", "Qbert"), 2, tmp_path, judged=True)
    found = {(r["question"].split(" ")[0], r["case"]): r for r in report}
    assert [r["target"] for r in report] == ["<= 1.3", "<= 0.05", "<= 0.05", "<= 2", "<= 2"]
    first = bench_checkpoint.folder_bytes(tmp_path / "ours")
    again = found["Second", "bytes written"]
    assert 0 < again["ours"]["median"] < again["peer"] < first
    monkeypatch.setattr(bench_checkpoint, "load_peer", lambda name: ABSENT)
    report = bench_checkpoint.peers(512, "Pong", 1, tmp_path)
    assert sum(r["peer"] == "absent" for r in report) == 4
    device = next(r for r in report if r["case"] == "fbuf Device" and r["question"].startswith("Bytes"))
    assert device["peer"] > 512 * 7056 > device["ours"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["tensor", "memmap", "compressed list", "vault"])
def test_peers_save_and_load_all_rows(kind: str, tmp_path: Path) -> None:
    peer_of("flashbax.vault" if kind == "vault" else "torchrl")
    frames, starts = made_up(64)
    rows = {"obs": frames, "action": np.arange(64, dtype=np.int32), "terminated": starts}
    with jax.numpy_rank_promotion("allow"):
        make = bench_checkpoint.flashbax_vault if kind == "vault" else bench_checkpoint.torchrl_dumps
        save, load = make(rows, tmp_path / "x") if kind == "vault" else make(kind, rows, tmp_path / "x")
        save()
        assert bench_checkpoint.folder_bytes(tmp_path / "x") > 0 and load() is not None


@pytest.mark.usefixtures("played")
def test_deduplicated_memory_generator_ends_with_the_true_size() -> None:
    generator = bench_deduplicated.fill("Pong", 512)
    next(generator)
    assert 512 * 49 < next(generator) < 512 * 7056


def test_deduplicated_growth() -> None:
    frames = made_up(256)[0]
    report = bench_deduplicated.measure_growth(frames, (256, 512), (2**11, 2**12), rounds=2, number=32)
    assert [r["case"] for r in report] == 2 * ["in a scan", "one jitted call each"]
    assert all(r["target"] == "<= 0.05" and r["ratio"] >= 0 for r in report)
    with pytest.raises(ValueError, match="256 frames, a ring of 128"):
        bench_deduplicated.measure_growth(frames, (128, 512), (2**11, 2**12), rounds=2, number=32)


def test_topk_holds_what_torchrl_holds() -> None:
    peer_of("torchrl")
    report = bench_topk.compare(1500, 2) + bench_topk.growth((1000, 2000), 2)  # raises where the ranks differ
    assert len(report) == len(bench_topk.CASES) + 1 and all(r["ratio"] is not None for r in report)


def test_deduplicated_grows_until_all_rows_fit() -> None:
    buffer, state, grown = written(deduplicated(blocks=2048), noise(64))
    assert grown > 0 and buffer.storage.blocks == 2048 * 3**grown // 2**grown
    assert int(buffer.stats(state)["blocks"]) == 64 * 84  # blocks of 7 x 12, no two alike
    bench_deduplicated.check_frames(buffer, state, noise(64))
    with pytest.raises(AssertionError, match="rows 0 to 63 are not those"):
        bench_deduplicated.check_frames(buffer, state, noise(64)[::-1])


def test_load_when_the_first_row_is_refused() -> None:
    frames = noise(64)
    size = bench_deduplicated.Size(deduplicated(block=(12, 12)), 1, 1, blocks=64 * 49, load=0.5, grown=0)
    assert bench_deduplicated.load_when_refused(frames, size, lot=4) == (pytest.approx(1, abs=0.02), None)
    half = dataclasses.replace(size, blocks=size.blocks // 2)
    load, first = bench_deduplicated.load_when_refused(frames, half, lot=4)
    assert first == 32 and load == pytest.approx(1, abs=0.02)
    double = dataclasses.replace(size, blocks=2 * size.blocks)
    assert bench_deduplicated.load_when_refused(frames, double, lot=4) == (pytest.approx(0.5, abs=0.01), None)


def test_deduplicated_notices_other_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [made_up(250, seed=seed)[0] for seed in range(2)]
    real = bench_sample.bare
    monkeypatch.setattr(bench_sample, "bare", lambda a, b, slots: real(a, b, [(s + 1) % a.shape[0] for s in slots]))
    with pytest.raises(AssertionError, match="reads other frames"):
        bench_deduplicated.measure_read("two", parts, deduplicated(), rounds=2, batch_size=8)

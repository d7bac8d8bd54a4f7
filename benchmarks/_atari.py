"""Real Atari frames, made once and kept compressed in the temporary folder.

Policy: odd episodes act uniformly at random; even ones keep the last action with probability 0.8,
which gets further into a game. One lane, DQN's preprocessing (`fbuf.demo`). Random policies see the
start of each game only, so figures from these frames are kinder than late training is.

The cache holds blocks of 2,000 frames, a zstd frame each: 200,000 frames are 1.4 GB raw and some
megabytes so, and a reader that must be small takes them block by block (`blocks`). The emulator is
deterministic, so a missing block is made by playing again from the start, and a shorter run is the
beginning of a longer one.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zstandard

GAMES = ("Pong", "Breakout", "Seaquest", "MsPacman", "SpaceInvaders", "Qbert")
MORE_GAMES = ("Freeway", "Enduro", "Asterix", "Krull")  # of other kinds: Enduro's picture moves as a whole
BLOCK = 2_000  # frames
_SHAPE = (84, 84)
_FORMAT = 1  # counted up when policy, preprocessing or layout change

Frames = npt.NDArray[np.uint8]
Starts = npt.NDArray[np.bool_]


def frames(game: str, count: int, seed: int = 0) -> tuple[Frames, Starts]:
    """The first `count` frames of a run.

    Args:
      game: As `"MsPacman"`; the six of the README are `GAMES`.
      count: Frames.
      seed: Of game and policy.
    Returns:
      frames: uint8[count, 84, 84].
      episode_start: bool[count], True where a frame is the first of its episode.
    Cost: about 3,000 frames/s the first time, then about 1 GB/s; holds count * 7,056 bytes.
    """
    seen, starts = np.empty((count, *_SHAPE), np.uint8), np.empty(count, np.bool_)
    done = 0
    for block, start in blocks(game, count, seed):
        seen[done : done + len(block)], starts[done : done + len(block)] = block, start
        done += len(block)
    return seen, starts


def blocks(game: str, count: int, seed: int = 0) -> Iterator[tuple[Frames, Starts]]:
    """`frames` in read-only pieces of at most `BLOCK`, for a reader that must stay small."""
    folder = _folder(game, seed)
    needed = [folder / f"{first:08d}.zst" for first in range(0, count, BLOCK)]
    if not all(path.exists() for path in needed):
        _fill(game, seed, needed)
    for i, path in enumerate(needed):
        block, starts = _load(path)
        size = min(BLOCK, count - i * BLOCK)
        yield block[:size], starts[:size]


def _folder(game: str, seed: int) -> Path:
    # Another emulator may draw other screens.
    emulator = importlib.metadata.version("ale-py")
    user = os.getuid() if hasattr(os, "getuid") else 0
    root = Path(tempfile.gettempdir()) / f"fbuf-atari-{_FORMAT}-{emulator}-{user}"
    return root / f"{game}-{seed}"


def _fill(game: str, seed: int, needed: list[Path]) -> None:
    """Plays from the start through the last block needed and stores those that are missing."""
    needed[0].parent.mkdir(parents=True, exist_ok=True)
    run = play(game, seed)
    for path in needed:
        pairs = [next(run) for _ in range(BLOCK)]
        if not path.exists():
            _store(path, np.stack([p[0] for p in pairs]), np.array([p[1] for p in pairs], np.bool_))


def play(game: str, seed: int) -> Iterator[tuple[Frames, bool]]:
    """The run itself, without end: frame and whether an episode starts with it."""
    from fbuf.demo._atari import VectorAtari

    env = VectorAtari(game, 1, seed, threads=1)
    rng = np.random.default_rng(seed)
    obs, start, episode, action = env.reset(), True, 1, 0
    while True:
        yield obs[0], start
        if start or episode % 2 == 1 or rng.random() >= 0.8:
            action = int(rng.integers(env.num_actions))
        obs, _, terminated, truncated = env.step(np.array([action], np.int32))
        start = bool(terminated[0] | truncated[0])
        episode += start


def _store(path: Path, block: Frames, starts: Starts) -> None:
    data = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(starts.tobytes() + block.tobytes())
    # Renamed when whole: processes that make the same block at once write the same bytes.
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


def _load(path: Path) -> tuple[Frames, Starts]:
    size = BLOCK * (1 + _SHAPE[0] * _SHAPE[1])
    raw = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=size)
    starts = np.frombuffer(raw, np.bool_, BLOCK)
    return np.frombuffer(raw, np.uint8, offset=BLOCK).reshape(BLOCK, *_SHAPE), starts

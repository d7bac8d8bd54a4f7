"""`atari_dqn`: fifty million Atari frames of a DQN agent's life, as a frozen buffer.

A run is what one agent collected while it learned: 50 dumps of its replay buffer, a million steps each. They are downloaded
and converted to compressed pieces in parallel, in bounded memory; finished pieces stay after any interruption. What
torchrl's loader gives back instead is told in `tests/datasets/test_atari.py`.

`_atari_download` brings what is missing (`_atari_workers` in processes), `_atari_plan` says what all pieces make together
(`_seams`: which follow one another), `_atari_ring` what a dump's counters mean, `_atari_piece` makes rows of it.

Source: Agarwal et al. 2020; the layout of https://github.com/google-research/batch_rl.
"""

from __future__ import annotations

import difflib
import os
from typing import Any

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Progress
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf.datasets import _open
from fbuf.datasets._atari import plan as plan
from fbuf.datasets._atari.download import Request, get
from fbuf.datasets._atari.segment import schema
from fbuf.datasets._open import root_of
from fbuf.views import Transition

_CALL = "fbuf.datasets.atari_dqn"


def atari_dqn(
    id: str,
    *,
    root: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    pieces: plan.Selection = None,
    download: bool | str = True,
    workers: int | None = None,
    progress: Progress = False,
    codec: Any = None,
    view: View | None = None,
    sampler: Sampler | None = None,
    on_corrupt: str = "raise",
    partial: str = "keep",
    verify: str = "lazy",
    prefetch: int = 0,
    batch_size: int | None = None,
) -> tuple[Buffer, BufferState]:
    """One run of the DQN replay data set.

    Rows are the steps of the agent in the order in which they were logged, and index order is row order: `obs` uint8[84, 84]
    (one frame: views stack), `action` int32, `reward` float32 (not clipped), `terminated` bool, `truncated` bool. What is no
    step is left out: the three rows of zeros that the agent put before each episode, and rows of its ring that it had not
    written (`_atari_ring.py` says how that is known).

    `truncated` is True where data end and an episode does not: at the last row of all, and where the next piece was not
    taken, is missing, or cannot be shown to follow (`_seams.py`). Such a row has no next observation, and views that need
    one do not draw it; the rows after it have fewer frames behind them than the agent saw, and stacks are filled up as at
    an episode's beginning. Elsewhere windows cross from piece to piece. Episodes that the agent stopped after 27,000 steps
    are terminated in the files, and so they are here.

    The run lies at `<root>/<Game>/<run>`. After any interruption, kill -9 included, the next call goes on with the pieces
    that are missing. Pieces that are there are never asked for again: with all of them there, no network is needed.

    Args:
      id: `"Pong/1"`: a game and a run from 1 to 5. `fbuf.datasets.available()` lists all.
      root: Folder of data sets. Default: `$FBUF_DATASETS`, else `~/.cache/fbuf/datasets`.
      source: Where files come from: None, the public bucket; `"https://..."`, a mirror; `"file://..."` or a path, a folder
        in which `dqn/<Game>/<run>/replay_logs/` lies, or some part of that path; any URL of fsspec (`"gs://..."`, with gcsfs).
      pieces: Numbers of pieces, `range(10)` or `[0, 25, 49]`; None: all that are listed. The buffer has just these; others that
        are there stay there.
      download: True: what is missing. False: nothing; raises if something is missing. `"force"`: everything anew.
      workers: Processes, which are spawned; each converts one piece at a time in at most 600 MB. 0: this process. Default: one
        a core, two a core where files come over a network, up to 8.
      progress: True: a bar of bytes; a callable: called with bytes done and bytes in all (0: unknown).
      codec: For frames, in place of `fbuf.storages.Zstd(repack=False)`. `fbuf.storages.Zstd()` takes fewer bytes, and
        more than twice as long.
      view: Default: `fbuf.views.Transition(stack=4)`. Another one later: `buffer.convert(dataclasses.replace(...), state)`.
      sampler: Default: uniform.
      on_corrupt: `"raise"`, or `"skip"`: leave a damaged piece out, with a warning; it is tried again by the next call.
      partial: What becomes of an episode of which the beginning is missing, after a gap: `"keep"`, or `"drop"`, so that each
        stack is what the agent saw.
      verify: `"lazy"`: frames are checked as they are read; `"full"`: all now.
      prefetch, batch_size: Of the `Buffer`.
    Returns:
      A `Buffer` with a `Frozen` writer, and its state.
    Raises:
      ValueError: there is no such data set (the text names near ones), or files there are not those listed now.
      FileNotFoundError: download=False, and pieces are missing.
      SourceError (an OSError): the listing or a file cannot be had; call again to go on.
      FileCorrupted (a ValueError): a piece is damaged; the text names it.
      SpaceError (an OSError): the disk has no room for it; nothing was begun. Another OSError, of errno ENOSPC: it filled up
        meanwhile; what is whole is kept.
      BlockingIOError: another process is making this data set. (Any number may open one that is as it was asked for, also where
        nobody can write.)
    Cost: `python -m benchmarks --only datasets` prints it: some 10 us of a core a frame (with isal, which the extra `datasets`
      brings), 40 to 150 bytes a frame on the disk in six games.
    Example:
      >>> import fbuf.datasets
      >>> try:
      ...     fbuf.datasets.atari_dqn("Breakuot/1")
      ... except ValueError as error:
      ...     print(str(error).partition("Near: ")[2])
      Breakout/1. All: fbuf.datasets.available().
    """
    game, run = split(_CALL, id)
    if not isinstance(download, bool) and download != "force":  # 0 == False, and is not it
        raise ValueError(f"{_CALL}: download is {download!r}; expected True, False or 'force'.")
    choices = {"on_corrupt": (on_corrupt, ("raise", "skip")), "partial": (partial, ("keep", "drop"))}
    for name, (value, expected) in {**choices, "verify": (verify, ("lazy", "full"))}.items():
        if value not in expected:
            raise ValueError(f"{_CALL}: {name} is {value!r}; expected {expected[0]!r} or {expected[1]!r}.")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise ValueError(f"{_CALL}: workers is {workers!r}; expected a number of processes, 0 for none, or None.")
    numbers = plan.selected(_CALL, pieces)
    path = root_of(_CALL, root) / game / str(run)
    given: dict[str, Any] = {"view": Transition(stack=4) if view is None else view, "sampler": sampler}
    given |= {"prefetch": prefetch, "batch_size": batch_size}
    _open.check(path, schema=schema(codec), **given)
    ask = Request(_CALL, id, path, source, numbers, download, workers, progress, codec, on_corrupt, partial)
    made: tuple[Buffer, BufferState] = get(ask, lambda: _open.open(path, verify=verify, **given))
    return made


RUNS = 5
GAMES: tuple[str, ...] = tuple(
    (
        "AirRaid Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk Bowling Boxing "
        "Breakout Carnival Centipede ChopperCommand CrazyClimber DemonAttack DoubleDunk ElevatorAction Enduro "
        "FishingDerby Freeway Frostbite Gopher Gravitar Hero IceHockey Jamesbond JourneyEscape Kangaroo Krull "
        "KungFuMaster MontezumaRevenge MsPacman NameThisGame Phoenix Pitfall Pong Pooyan PrivateEye Qbert Riverraid "
        "RoadRunner Robotank Seaquest Skiing Solaris SpaceInvaders StarGunner Tennis TimePilot Tutankham UpNDown "
        "Venture VideoPinball WizardOfWor YarsRevenge Zaxxon"
    ).split()
)


def available() -> tuple[str, ...]:
    """Ids of the Atari DQN replay data set: 60 games, runs 1 to 5. Nothing is asked of a network.

    Which pieces a run has is listed where they lie: `fbuf.datasets.atari_dqn` does that.

    Example:
      >>> import fbuf.datasets
      >>> ids = fbuf.datasets.available()
      >>> len(ids), ids[0], ids[-1]
      (300, 'AirRaid/1', 'Zaxxon/5')
    """
    return tuple(f"{game}/{run}" for game in GAMES for run in range(1, RUNS + 1))


def split(call: str, dataset_id: str) -> tuple[str, int]:
    """Game and run of an id.

    Raises:
      ValueError: there is no such data set; the text names near ones.
    """
    ids = available()
    if dataset_id in ids:
        game, _, run = dataset_id.partition("/")
        return game, int(run)
    game, _, run = str(dataset_id).partition("/")
    folded = {"".join(c for c in name.lower() if c.isalnum()): name for name in GAMES}
    wanted = "".join(c for c in game.lower() if c.isalnum())
    near = difflib.get_close_matches(wanted, folded, n=3, cutoff=0.6)
    number = run if run in {str(n) for n in range(1, RUNS + 1)} else "1"
    hints = [f"{folded[name]}/{number}" for name in near] or ["Pong/1", "Breakout/1"]
    raise ValueError(
        f"{call}: id is {dataset_id!r}; expected '<Game>/<run>' with a run from 1 to {RUNS}. Near: {', '.join(hints)}. "
        f"All: fbuf.datasets.available()."
    )

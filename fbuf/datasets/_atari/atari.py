"""`atari_dqn`: fifty million Atari frames of a DQN agent's training, as a frozen buffer; `available`: the runs there are.

A run is 50 dumps of one agent's replay buffer, a million steps each. They are downloaded and converted to compressed segments
in parallel, in bounded memory, and finished segments survive an interruption. `download.py` fetches missing dumps
(`workers.py` in processes), `segment.py` interprets and converts one, `continuity.py` decides
which dumps follow one another, and `plan.py` assembles the data set.

Source: Agarwal et al. 2020, "An Optimistic Perspective on Offline Reinforcement Learning";
https://github.com/google-research/batch_rl.
"""

from __future__ import annotations

import difflib
import os
from typing import Any, Literal

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.arguments import check_choice, check_int
from fbuf._core.progress import Progress
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf.datasets import _open
from fbuf.datasets._atari import plan
from fbuf.datasets._atari.download import get
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
    on_corrupt: Literal["raise", "skip"] = "raise",
    partial: Literal["keep", "drop"] = "keep",
    verify: Literal["full", "lazy"] = "lazy",
    prefetch: int = 0,
    batch_size: int | None = None,
) -> tuple[Buffer, BufferState]:
    """Open one run of the DQN replay data set; the first call downloads and converts it.

    Rows are the agent's steps in logged order: `obs` uint8[84, 84] (one frame: views stack), `action` int32, `reward` float32
    (not clipped), `terminated` bool, `truncated` bool. Rows that are not steps are left out: the three rows of zeros
    before each
    episode, and rows of the ring that the agent had not written.

    `truncated` is True where data end and an episode does not: at the last row, and where the next dump was not selected, is
    missing, or cannot be shown to follow. Such a row has no next observation, so views that need one do not sample it, and
    stacks after it are padded as at an episode's beginning. Elsewhere windows cross from dump to dump. Episodes that the
    agent
    stopped after 27,000 steps are terminated, as in the files.

    The run is stored at `<root>/<Game>/<run>`. After any interruption the next call fetches the missing dumps only. Without
    missing dumps no network is needed.

    Args:
      id: `"Pong/1"`: a game and a run from 1 to 5. `fbuf.datasets.available()` lists all.
      root: Folder of data sets. Default: `$FBUF_DATASETS`, else `~/.cache/fbuf/datasets`.
      source: Where to fetch files: None, the public bucket; `"https://..."`, a mirror; `"file://..."` or a path, a folder
        that
        contains `dqn/<Game>/<run>/replay_logs/`, or part of that path; any URL of fsspec (`"gs://..."`, with gcsfs).
      pieces: Numbers of dumps, `range(10)` or `[0, 25, 49]`; None: all that are listed. The buffer has exactly these;
        others stay
        on disk.
      download: True: fetch what is missing. False: raise if something is missing. `"force"`: fetch everything again.
      workers: Spawned processes; each converts one dump at a time in at most 600 MB. 0: this process. Default: one per
        core, two
        per core over a network, up to 8.
      progress: True: a bar of bytes; a callable: called with bytes done and bytes in all (0: unknown).
      codec: For frames, in place of `fbuf.storages.Zstd(repack=False)`. `fbuf.storages.Zstd()` takes fewer bytes, and more
        than
        twice the time.
      view: Default: `fbuf.views.Transition(stack=4, autoreset="same_step")`. Change it later by `buffer.convert(other, state)`.
      sampler: Default: uniform.
      on_corrupt: `"raise"`, or `"skip"`: leave a damaged dump out, with a warning; the next call tries it again.
      partial: Whether to `"keep"` or `"drop"` an episode whose beginning is missing after a gap. With `"drop"` each stack
        is what
        the agent saw.
      verify: `"lazy"`: check frames when they are read; `"full"`: check all now.
      prefetch, batch_size: Of the `Buffer`.
    Returns:
      A `Buffer` with a `Frozen` writer, and its state.
    Raises:
      ValueError: there is no such data set (the text names similar ones), or local files are not those listed now.
      FileNotFoundError: download=False, and dumps are missing.
      SourceError (an OSError): the listing or a file is not available; call again to continue.
      FileCorrupted (a ValueError): a dump is damaged; the text names it.
      SpaceError (an OSError): the disk has too little room; nothing was downloaded. Another OSError, of errno ENOSPC: the
      disk
        filled up; finished segments are kept.
      BlockingIOError: another process is making this data set. (Any number may open a finished one, read-only too.)
    Cost: about 10 us of a core per frame (with isal, which the extra `datasets` brings), 40 to 150 bytes per frame on disk;
      `python -m benchmarks --only datasets` prints it.

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
    check_choice(_CALL, "on_corrupt", on_corrupt, ("raise", "skip"))
    check_choice(_CALL, "partial", partial, ("keep", "drop"))
    check_choice(_CALL, "verify", verify, ("lazy", "full"))
    if workers is not None:
        check_int(_CALL, "workers", workers, 0, ", or None")
    numbers = plan.selected(_CALL, pieces)
    path = root_of(_CALL, root) / game / str(run)
    given: dict[str, Any] = {
        "view": Transition(stack=4, autoreset="same_step") if view is None else view,
        "sampler": sampler,
    }
    given |= {"prefetch": prefetch, "batch_size": batch_size}
    _open.check(path, schema=schema(codec), **given)
    ask = plan.Request(_CALL, id, path, source, numbers, download, workers, progress, codec, on_corrupt, partial)
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
    """Return the ids of the Atari DQN replay data set: 60 games, runs 1 to 5. Uses no network.

    Example:
      >>> import fbuf.datasets
      >>> ids = fbuf.datasets.available()
      >>> len(ids), ids[0], ids[-1]
      (300, 'AirRaid/1', 'Zaxxon/5')
    """
    return tuple(f"{game}/{run}" for game in GAMES for run in range(1, RUNS + 1))


def split(call: str, dataset_id: str) -> tuple[str, int]:
    """Return the game and run of an id.

    Raises:
      ValueError: there is no such data set; the text names similar ones.
    """
    game, _, run = str(dataset_id).partition("/")
    if dataset_id in available():
        return game, int(run)
    folded = {name.lower(): name for name in GAMES}
    near = difflib.get_close_matches(game.lower(), folded, n=3) or ["pong", "breakout"]
    hints = [f"{folded[name]}/{run if run in '12345' and run else 1}" for name in near]
    raise ValueError(
        f"{call}: id is {dataset_id!r}; expected one of available(), '<Game>/<1 to {RUNS}>'. Near: {', '.join(hints)}."
    )

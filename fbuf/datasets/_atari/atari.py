"""`atari_dqn`: fifty million Atari frames of a DQN agent's training, as a frozen buffer; `available`: the runs there are.

A run is 50 dumps of one agent's replay buffer, a million steps each. Missing ones are downloaded and converted to compressed
segments in parallel, in bounded memory, and finished segments survive an interruption. `workers.py` does so in processes,
`segment.py` interprets and converts one, `continuity.py` decides which follow one another, and `plan.py` states which rows
make up the data set.

Source: Agarwal et al. 2020, "An Optimistic Perspective on Offline Reinforcement Learning";
https://github.com/google-research/batch_rl.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.arguments import check_choice, check_int
from fbuf._core.progress import Bar, Progress
from fbuf._formats import dataset
from fbuf._host.types import StoreCorrupted
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf.datasets import _open
from fbuf.datasets._atari import plan
from fbuf.datasets._atari.segment import KINDS, schema
from fbuf.datasets._atari.workers import DOWNLOADS, Job, WorkerEnded, run_jobs
from fbuf.datasets._lock import exclusive
from fbuf.datasets._open import root_of
from fbuf.datasets._remote import File, FileCorrupted, SourceError, SpaceError, address_of, is_local, list_files
from fbuf.views import Transition

_CALL = "fbuf.datasets.atari_dqn"


def atari_dqn(
    id: str,
    *,
    root: str | os.PathLike[str] | None = None,
    source: str | os.PathLike[str] | None = None,
    dumps: plan.Selection = None,
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
      dumps: Numbers of dumps, `range(10)` or `[0, 25, 49]`; None: all that are listed. The buffer has exactly these;
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
        disk filled up; finished segments are kept.
      BlockingIOError: another process is making this data set. (Any number may open a finished one, read-only too.)
    Cost: about 10 us of a core per frame (with isal, which the extra `datasets` brings), 40 to 150 bytes per frame on disk;
      `python -m benchmarks --only datasets` prints it.

    Example:
      >>> import fbuf.datasets
      >>> try:
      ...     fbuf.datasets.atari_dqn("Breakuot/1")
      ... except ValueError as error:
      ...     print(str(error).partition("Near: ")[2])
      Breakout/1.
    """
    game, run = split(_CALL, id)
    if not isinstance(download, bool) and download != "force":  # 0 == False, and is not it
        raise ValueError(f"{_CALL}: download is {download!r}; expected True, False or 'force'.")
    check_choice(_CALL, "on_corrupt", on_corrupt, ("raise", "skip"))
    check_choice(_CALL, "partial", partial, ("keep", "drop"))
    check_choice(_CALL, "verify", verify, ("lazy", "full"))
    if workers is not None:
        check_int(_CALL, "workers", workers, 0, ", or None")
    numbers = plan.selected(_CALL, dumps)
    path = root_of(_CALL, root) / game / str(run)
    options: dict[str, Any] = {
        "view": Transition(stack=4, autoreset="same_step") if view is None else view,
        "sampler": sampler,
    }
    options |= {"prefetch": prefetch, "batch_size": batch_size}
    _open.check(path, schema=schema(codec), **options)
    ask = plan.Request(_CALL, id, path, source, numbers, download, workers, progress, codec, on_corrupt, partial)
    return get(ask, lambda: _open.open(path, verify=verify, **options))


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


FOLDERS = ("dqn/{id}/replay_logs/", "{id}/replay_logs/")
MOST_WORKERS = 8
SHARE = 1.25
"""Bytes of a finished dump for each byte of its packed files, at most: 0.8 to 1.1 in the games tried."""
_NAME = re.compile("(" + "|".join(map(re.escape, KINDS)) + r")_ckpt\.(0|[1-9][0-9]{0,3})\.gz")
_Listing = dict[int, dict[str, File]]


def get(ask: plan.Request, then: Callable[[], Any]) -> Any:
    """Make the data set at `ask.path` what was asked for. Return the result of `then`.

    A complete data set is opened without a lock, so any number of processes may open it, read-only too. Otherwise no other
    process can change it before `then` returns.
    """
    here = ask.download != "force" and ask.path.is_dir()
    if ask.download is False and not here:
        raise FileNotFoundError(errno.ENOENT, _not_there(ask, ask.dumps or []))
    if here:
        whole = _complete(ask, plan.find_existing(ask.call, ask.path))
        if whole is not None and plan.is_finished(ask.path, whole):
            with contextlib.suppress(FileNotFoundError, StoreCorrupted):  # another process may be making it again
                made = then()
                if plan.is_finished(ask.path, whole):
                    return made
    with exclusive(ask.call, ask.path):
        whole = None if ask.download == "force" else _complete(ask, plan.find_existing(ask.call, ask.path))
        if whole is None:
            whole = _bring(ask)
        if not plan.is_finished(ask.path, whole):
            dataset.finish(ask.path, whole.used, whole.meta)
        return then()


def _complete(ask: plan.Request, now: plan.Existing) -> plan.Whole | None:
    """Return the data set that was asked for if all of its dumps are stored; None if some must be downloaded.

    Raises:
      FileNotFoundError: some are missing, and download=False.
    """
    about = now.about or {}
    known = about.get("listed", [])
    wanted = known if ask.dumps is None else ask.dumps
    if ask.download is False and ask.dumps is None:
        wanted = [number for number in known or now.dumps if number in now.dumps]
    missing = [number for number in wanted if number not in now.dumps]
    if ask.download is not False and (missing or not wanted):
        return None
    _check_codec(ask, now.schema)
    if missing or not wanted:
        raise FileNotFoundError(errno.ENOENT, _not_there(ask, missing))
    skipped = {int(number): why for number, why in about.get("skipped", {}).items()}
    return plan.whole(ask, now, wanted, about.get("source", ""), known, skipped)


def _not_there(ask: plan.Request, numbers: list[int]) -> str:
    what = f"dumps {numbers} of {ask.id} are" if numbers else f"{ask.id} is"
    return f"{ask.call}: {what} not at {ask.path}, and download=False. Pass download=True"


def _check_codec(ask: plan.Request, existing: dataset.Schema | None) -> dataset.Schema:
    """Return the schema of new segments. Raises ValueError: stored ones have another codec."""
    asked = schema(ask.codec)
    if existing is None or (ask.codec is not None and existing["obs"].codec == asked["obs"].codec):
        return asked
    if ask.codec is None:
        return existing
    raise ValueError(
        f"{ask.call}: {ask.path} has codec {existing['obs'].codec!r}, not {ask.codec!r}. Pass download='force'."
    )


def _bring(ask: plan.Request) -> plan.Whole:
    """Download and convert the missing dumps."""
    now = plan.find_existing(ask.call, ask.path) if ask.download is True else plan.Existing({}, None, None)
    rows = _check_codec(ask, now.schema)
    address = address_of(ask.call, ask.source)
    listing = _list(ask, address)
    wanted = sorted(listing) if ask.dumps is None else ask.dumps
    if unlisted := [number for number in wanted if number not in listing]:
        raise SourceError(f"{ask.call}: {ask.id} at {address} has no dump {unlisted[0]}; it has {sorted(listing)}.")
    for number in wanted:
        if number in now.dumps:
            _check_same(ask, number, now.dumps[number], listing[number])
    missing = {number: listing[number] for number in wanted if number not in now.dumps}
    local, workers = is_local(address), ask.workers
    if workers is None:  # over a network some wait while others work
        workers = min(MOST_WORKERS, (os.cpu_count() or 1) * (1 if local else 2))
    _check_disk(ask, missing, 0 if local else max(1, workers))
    skipped = _convert(ask, missing, rows, workers)
    return plan.whole(ask, plan.find_existing(ask.call, ask.path), wanted, address, sorted(listing), skipped)


def _convert(ask: plan.Request, missing: _Listing, rows: dataset.Schema, workers: int) -> dict[int, str]:
    """Convert dumps. Return those that were skipped, and why; nothing of them and of unfinished ones stays."""
    unfinished = set(missing)

    def clean() -> None:
        shutil.rmtree(ask.path / DOWNLOADS, ignore_errors=True)
        for number in unfinished:
            plan.discard(ask.path, number)

    clean()  # what a killed process left, or what is to be made again
    jobs = [Job(ask.path, number, files, rows) for number, files in missing.items()]
    bar = Bar(ask.progress, ask.id, sum(file.size or 0 for files in missing.values() for file in files.values()))
    skipped: dict[int, str] = {}
    outcomes = run_jobs(jobs, workers, bar)
    try:
        for job, error in outcomes:
            if error is None:
                unfinished.discard(job.number)
            elif isinstance(error, FileCorrupted) and ask.on_corrupt == "skip":
                skipped[job.number] = str(error)
                warnings.warn(f"{ask.call}: dump {job.number} of {ask.id} is left out: {error}", stacklevel=5)
            else:
                raise _explained(ask, job.number, error) from error
    finally:
        outcomes.close()
        bar.close()
        clean()
    return skipped


def _list(ask: plan.Request, address: str) -> _Listing:
    """Return the files of each dump by kind. Raises SourceError: there are none, or the source cannot be listed."""
    try:
        for folder in _folders(ask.id, address):
            found: _Listing = {}
            for file in list_files(address, folder):
                if match := _NAME.fullmatch(file.name.removeprefix(folder)):
                    found.setdefault(int(match[2]), {})[match[1]] = file
            if found:
                return dict(sorted(found.items()))
    except SourceError as error:
        raise SourceError(f"{ask.call}: files of {ask.id} cannot be listed: {error} Name a copy: source=.") from error
    here, inner = (form.format(id=ask.id) for form in FOLDERS)
    hint = "" if is_local(address) else " A web server must list its folders, or have an index.json."
    raise SourceError(
        f"{ask.call}: no file of {ask.id} is at {address}; expected add_count_ckpt.0.gz and others. Pass as source= the folder "
        f"or address that has {here} or {inner}.{hint}"
    )


def _folders(dataset_id: str, address: str) -> Iterator[str]:
    """Yield where a run's files may be: the bucket's folders, or the part of them that the address does not name."""
    yield from (form.format(id=dataset_id) for form in FOLDERS)
    named, parts = address.split("/"), FOLDERS[1].format(id=dataset_id).split("/")
    for number in range(1, len(parts)):
        if named[-number:] == parts[:number]:
            yield "/".join(parts[number:])


def _check_same(ask: plan.Request, number: int, meta: Mapping[str, Any], listed: Mapping[str, File]) -> None:
    """Raise ValueError if a stored dump was made from other files than are listed now."""
    for kind, file in listed.items():
        md5 = meta["files"].get(kind, {}).get("md5")
        if md5 is not None and file.md5 is not None and md5 != file.md5:
            raise ValueError(
                f"{ask.call}: dump {number} at {ask.path} was made from other files than {file.url} (md5 was {md5}, is "
                f"{file.md5}). Pass download='force', or another root=."
            )


def _check_disk(ask: plan.Request, missing: _Listing, arriving: int) -> None:
    """Raise SpaceError if the disk has too little room for the segments and for the files that arrive at the same time."""
    sizes = sorted((sum(file.size or 0 for file in files.values()) for files in missing.values()), reverse=True)
    needed = int(SHARE * sum(sizes)) + sum(sizes[:arriving])
    folder = next(path for path in (ask.path, *ask.path.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if needed > free:
        text = (
            f"{ask.call}: {ask.id} needs {needed / 1e9:.1f} GB on the disk of {folder}, which has {free / 1e9:.1f} GB free; "
            f"nothing was downloaded. Pass fewer dumps= or another root="
        )
        raise SpaceError(errno.ENOSPC, text)


def _explained(ask: plan.Request, number: int, error: BaseException) -> Exception:
    """Return the error of a dump, with its number and the remedy."""
    what = f"{ask.call}: dump {number} of {ask.id}"
    kept = f"Finished dumps stay at {ask.path}; call again to go on."
    if isinstance(error, FileCorrupted):
        return FileCorrupted(
            f"{what} is damaged: {error} Leave it out with on_corrupt='skip', or try another source=. {kept}"
        )
    if isinstance(error, SourceError):
        return SourceError(f"{what}: {error} {kept}")
    if isinstance(error, OSError):
        return OSError(error.errno, f"{what}: {error.strerror or error}. {kept}", error.filename)
    if isinstance(error, WorkerEnded):
        return RuntimeError(
            f"{ask.call}: a worker process of {ask.id} ended; memory may have run out (fewer workers= need less). {kept}"
        )
    return RuntimeError(f"{what}: {type(error).__name__}: {error}. {kept}")

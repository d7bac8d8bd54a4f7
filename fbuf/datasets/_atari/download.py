"""Make the data set of a run: download and convert the missing dumps, and state which rows make it up."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fbuf._core.progress import Bar
from fbuf._formats import dataset
from fbuf._host.types import StoreCorrupted
from fbuf.datasets._atari import plan
from fbuf.datasets._atari.segment import KINDS, schema
from fbuf.datasets._atari.workers import DOWNLOADS, Job, WorkerEnded, run_jobs
from fbuf.datasets._lock import exclusive
from fbuf.datasets._remote import File, FileCorrupted, SourceError, SpaceError, address_of, is_local, list_files

FOLDERS = ("dqn/{id}/replay_logs/", "{id}/replay_logs/")
MOST_WORKERS = 8
SHARE = 1.25
"""Bytes of a finished piece for each byte of its packed files, at most: 0.8 to 1.1 in the games tried."""
_NAME = re.compile("(" + "|".join(map(re.escape, KINDS)) + r")_ckpt\.(0|[1-9][0-9]{0,3})\.gz")
_Listing = dict[int, dict[str, File]]


def get(ask: plan.Request, then: Callable[[], Any]) -> Any:
    """Make the data set at `ask.path` what was asked for. Return the result of `then`.

    A complete data set is opened without a lock, so any number of processes may open it, read-only too. Otherwise no other
    process can change it before `then` returns.
    """
    here = ask.download != "force" and ask.path.is_dir()
    if ask.download is False and not here:
        raise FileNotFoundError(errno.ENOENT, _not_there(ask, ask.pieces or []))
    if here:
        whole = _complete(ask, plan.there(ask.call, ask.path))
        if whole is not None and plan.is_finished(ask.path, whole):
            with contextlib.suppress(FileNotFoundError, StoreCorrupted):  # another process may be making it again
                made = then()
                if plan.is_finished(ask.path, whole):
                    return made
    with exclusive(ask.call, ask.path):
        whole = None if ask.download == "force" else _complete(ask, plan.there(ask.call, ask.path))
        if whole is None:
            whole = _bring(ask)
        if not plan.is_finished(ask.path, whole):
            dataset.finish(ask.path, whole.used, whole.meta)
        return then()


def _complete(ask: plan.Request, now: plan.There) -> plan.Whole | None:
    """Return the data set that was asked for if all of its dumps are stored; None if some must be downloaded.

    Raises:
      FileNotFoundError: some are missing, and download=False.
    """
    about = now.about or {}
    known = about.get("listed", [])
    wanted = known if ask.pieces is None else ask.pieces
    if ask.download is False and ask.pieces is None:
        wanted = [number for number in known or now.pieces if number in now.pieces]
    missing = [number for number in wanted if number not in now.pieces]
    if ask.download is not False and (missing or not wanted):
        return None
    _check_codec(ask, now.schema)
    if missing or not wanted:
        raise FileNotFoundError(errno.ENOENT, _not_there(ask, missing))
    skipped = {int(number): why for number, why in about.get("skipped", {}).items()}
    return plan.whole(ask, now, wanted, about.get("source", ""), known, skipped)


def _not_there(ask: plan.Request, numbers: list[int]) -> str:
    what = f"pieces {numbers} of {ask.id} are" if numbers else f"{ask.id} is"
    return f"{ask.call}: {what} not at {ask.path}, and download=False. Pass download=True"


def _check_codec(ask: plan.Request, there: dataset.Schema | None) -> dataset.Schema:
    """Return the schema of new segments. Raises ValueError: stored ones have another codec."""
    asked = schema(ask.codec)
    if there is None or (ask.codec is not None and there["obs"].codec == asked["obs"].codec):
        return asked
    if ask.codec is None:
        return there
    raise ValueError(
        f"{ask.call}: {ask.path} has codec {there['obs'].codec!r}, not {ask.codec!r}. Pass download='force'."
    )


def _bring(ask: plan.Request) -> plan.Whole:
    """Download and convert the missing dumps."""
    now = plan.there(ask.call, ask.path) if ask.download is True else plan.There({}, None, None)
    rows = _check_codec(ask, now.schema)
    address = address_of(ask.call, ask.source)
    listing = _list(ask, address)
    wanted = sorted(listing) if ask.pieces is None else ask.pieces
    if unlisted := [number for number in wanted if number not in listing]:
        raise SourceError(f"{ask.call}: {ask.id} at {address} has no piece {unlisted[0]}; it has {sorted(listing)}.")
    for number in wanted:
        if number in now.pieces:
            _check_same(ask, number, now.pieces[number], listing[number])
    missing = {number: listing[number] for number in wanted if number not in now.pieces}
    local, workers = is_local(address), ask.workers
    if workers is None:  # over a network some wait while others work
        workers = min(MOST_WORKERS, (os.cpu_count() or 1) * (1 if local else 2))
    _check_disk(ask, missing, 0 if local else max(1, workers))
    skipped = _convert(ask, missing, rows, workers)
    return plan.whole(ask, plan.there(ask.call, ask.path), wanted, address, sorted(listing), skipped)


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
                warnings.warn(f"{ask.call}: piece {job.number} of {ask.id} is left out: {error}", stacklevel=5)
            else:
                raise _explained(ask, job.number, error) from error
    finally:
        outcomes.close()
        bar.close()
        clean()
    return skipped


def _list(ask: plan.Request, address: str) -> _Listing:
    """Return the files of each piece by kind. Raises SourceError: there are none, or the source cannot be listed."""
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
                f"{ask.call}: piece {number} at {ask.path} was made from other files than {file.url} (md5 was {md5}, is "
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
            f"nothing was downloaded. Pass fewer pieces= or another root="
        )
        raise SpaceError(errno.ENOSPC, text)


def _explained(ask: plan.Request, number: int, error: BaseException) -> Exception:
    """Return the error of a dump, with its number and the remedy."""
    what = f"{ask.call}: piece {number} of {ask.id}"
    kept = f"Finished pieces stay at {ask.path}; call again to go on."
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

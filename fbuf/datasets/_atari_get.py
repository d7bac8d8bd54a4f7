"""Brings the pieces of a run that are missing, and finishes the data set."""

from __future__ import annotations

import contextlib
import errno
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fbuf import _pieces
from fbuf._core.progress import Bar, Progress
from fbuf._host.arrays import StoreCorrupted
from fbuf.datasets import _atari_plan as plan
from fbuf.datasets._atari_job import by_piece, job_of
from fbuf.datasets._atari_piece import Damaged, schema
from fbuf.datasets._atari_told import spans, told
from fbuf.datasets._lock import held
from fbuf.datasets._source import Entry, FileCorrupted, Folder, Source, SourceError, connect
from fbuf.datasets._workers import work

FOLDERS = ("dqn/{id}/replay_logs/", "{id}/replay_logs/")
MOST_WORKERS = 8


def get(
    call: str,
    dataset_id: str,
    path: Path,
    *,
    source: str | os.PathLike[str] | Source | None,
    pieces: list[int] | None,
    download: bool | str,
    workers: int | None,
    progress: Progress,
    codec: Any,
    on_corrupt: str,
    partial: str = "keep",
    then: Callable[[], Any],
) -> Any:
    """Makes the data set at `path` be what was asked for, and gives what `then` gives of it.

    Where it is that already nothing is written, not even a lock: any number of processes may open it at the same time, and it
    may lie where nobody can write. Else no other process may change it before `then` is done.
    """
    here = download != "force" and path.is_dir()
    if download is False and not here:
        raise FileNotFoundError(errno.ENOENT, _not_there(call, dataset_id, path, pieces or []))
    if here:
        said = _said(call, dataset_id, path, plan.there(call, path), pieces, download, codec, partial)
        if said is not None and plan.is_finished(path, said):
            with contextlib.suppress(FileNotFoundError, StoreCorrupted):  # perhaps as another process is making it anew
                made = then()
                if plan.is_finished(path, said):
                    return made
    with held(call, path) as lock:
        now = plan.there(call, path)
        if download != "force":
            said = _said(call, dataset_id, path, now, pieces, download, codec, partial)
        if download == "force" or said is None:
            known, wanted, skipped, where = _bring(
                call,
                dataset_id,
                path,
                now if download is True else plan.There({}, None, None),
                lock,
                source,
                pieces,
                workers,
                progress,
                codec,
                on_corrupt,
            )
            metas = {number: meta for number, meta in plan.there(call, path).pieces.items() if number in wanted}
            said = plan.whole(
                call,
                path,
                metas,
                dataset_id=dataset_id,
                source=where,
                selection=pieces,
                listed=known,
                skipped={number: why for number, why in skipped.items() if number not in metas},
                partial=partial,
            )
        if not plan.is_finished(path, said):
            _pieces.finish(path, said.used, said.meta)
        return then()


def _said(
    call: str,
    dataset_id: str,
    path: Path,
    now: plan.There,
    pieces: list[int] | None,
    download: bool | str,
    codec: Any,
    partial: str,
) -> plan.Whole | None:
    """What the data set is to say of itself where all that was asked for is there; None: something is to be fetched.

    Raises:
      FileNotFoundError: that, and download=False.
    """
    about = now.about or {}
    known = about.get("listed", [])
    wanted = known if pieces is None else pieces
    if download is False and pieces is None:
        wanted = [number for number in known or now.pieces if number in now.pieces]
    lacking = [number for number in wanted if number not in now.pieces]
    if download is not False and (lacking or not wanted):
        return None
    _check_codec(call, path, now.schema, codec)
    if lacking or not wanted:
        raise FileNotFoundError(errno.ENOENT, _not_there(call, dataset_id, path, lacking))
    metas = {number: meta for number, meta in now.pieces.items() if number in wanted}
    skipped = {int(number): why for number, why in about.get("skipped", {}).items()}
    return plan.whole(
        call,
        path,
        metas,
        dataset_id=dataset_id,
        source=about.get("source", ""),
        selection=pieces,
        listed=known,
        skipped={number: why for number, why in skipped.items() if number not in now.pieces},
        partial=partial,
    )


def _not_there(call: str, dataset_id: str, path: Path, numbers: list[int]) -> str:
    what = f"pieces {numbers} of {dataset_id} are" if numbers else f"{dataset_id} is"
    return f"{call}: {what} not at {path}, and download=False. Pass download=True"


def _check_codec(call: str, path: Path, there: _pieces.Schema | None, codec: Any) -> _pieces.Schema:
    """The schema of pieces to come. Raises ValueError: those that are there have another codec."""
    asked = schema(codec)
    if there is None or (codec is not None and there["obs"].codec == asked["obs"].codec):
        return asked
    if codec is None:
        return there
    raise ValueError(
        f"{call}: codec is {codec!r}, but the pieces at {path} were made with {there['obs'].codec!r}. Leave codec= out, "
        f"or make all anew with download='force'."
    )


def _listing(call: str, dataset_id: str, source: Source) -> dict[int, dict[str, Entry]]:
    """The run's pieces. Raises SourceError: there are none, or nobody says which there are."""
    try:
        for folder in _folders(dataset_id, source):
            if found := by_piece(source.files(folder), folder):
                return found
    except SourceError as error:
        raise SourceError(
            f"{call}: the files of {dataset_id} cannot be listed: {error} If you have a copy, name it: "
            f"source='https://host/...' or source='folder', where {FOLDERS[0].format(id=dataset_id)} lies."
        ) from error
    here, inner = (form.format(id=dataset_id) for form in FOLDERS)
    raise SourceError(
        f"{call}: no file of {dataset_id} is at {_named(source)}; expected add_count_ckpt.0.gz and others. Name as source= "
        f"the folder or address that holds {here} or {inner}"
    )


def _folders(dataset_id: str, source: Source) -> Iterator[str]:
    """Where a run's files may lie: in the bucket's folders, or what of them the source's address does not name already."""
    yield from (form.format(id=dataset_id) for form in FOLDERS)
    address = os.path.abspath(source.root) if isinstance(source, Folder) else _named(source)
    named, parts = address.rstrip("/").split("/"), FOLDERS[1].format(id=dataset_id).split("/")
    for number in range(1, len(parts)):
        if named[-number:] == parts[:number]:
            yield "/".join(parts[number:])


def _bring(
    call: str,
    dataset_id: str,
    path: Path,
    now: plan.There,
    lock: int,
    source: str | os.PathLike[str] | Source | None,
    pieces: list[int] | None,
    workers: int | None,
    progress: Progress,
    codec: Any,
    on_corrupt: str,
) -> tuple[list[int], list[int], dict[int, str], str]:
    """Fetches what is missing. Returns the pieces listed, those wanted, those left out and why, and the source's name."""
    origin = connect(source)
    rows = _check_codec(call, path, now.schema, codec)
    listing = _listing(call, dataset_id, origin)
    wanted = sorted(listing) if pieces is None else pieces
    if unlisted := [number for number in wanted if number not in listing]:
        raise SourceError(
            f"{call}: {dataset_id} has no piece {unlisted[0]} at {_named(origin)}; it has {spans(sorted(listing))}. Ask for "
            f"these: pieces=..."
        )
    for number in wanted:
        if number in now.pieces:
            plan.check_same(call, path, number, now.pieces[number], listing[number])
    missing = {number: listing[number] for number in wanted if number not in now.pieces}
    local = isinstance(origin, Folder)
    if workers is None:  # over a network some wait while others work
        workers = min(MOST_WORKERS, (os.cpu_count() or 1) * (1 if local else 2))
    plan.check_disk(dataset_id, path, missing, local, workers)
    for number in missing:
        plan.discard(path, number)  # what a killed process left of it, or what is to be made anew
    jobs = [_job(origin, path, number, files, rows, workers) for number, files in missing.items()]
    bar = Bar(progress, dataset_id, sum(e.size or 0 for files in missing.values() for e in files.values()))
    skipped: dict[int, str] = {}
    outcomes = work(jobs, workers, lambda report: bar(report.get("bytes", 0)), [lock])
    try:
        for job, error, _ in outcomes:
            if error is None:
                continue
            number = job["number"]
            if isinstance(error, (FileCorrupted, Damaged)) and on_corrupt == "skip":
                skipped[number] = str(error)
                warnings.warn(f"{call}: piece {number} of {dataset_id} is left out: {error}", stacklevel=4)
                continue
            raise told(call, dataset_id, path, number, error)
    finally:
        outcomes.close()  # type: ignore[attr-defined]
        bar.close()
    return sorted(listing), wanted, skipped, _named(origin)


def _named(origin: Source) -> str:
    """Where a source is."""
    return str(getattr(origin, "root", None) or getattr(origin, "base", None) or origin)


def _job(
    origin: Source, path: Path, number: int, files: dict[str, Entry], rows: _pieces.Schema, workers: int
) -> dict[str, Any]:
    if workers:
        return job_of(origin, str(path), number, files, rows)
    return {**job_of(Folder(""), str(path), number, files, rows), "source": origin}

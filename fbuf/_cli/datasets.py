"""`python -m fbuf datasets`: list, download, convert, describe, verify and delete data sets."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fbuf import datasets, interop
from fbuf._cli.inspect import ERRORS, CommandError, _table, guarded, text_of
from fbuf._core.text_table import counted
from fbuf._formats.dataset.manifest import NAME
from fbuf.datasets._open import root_of
from fbuf.storages import DataSet

MINARI = "minari:"
_DEPTH = 8  # depth of folders below the root that are searched


def add_commands(commands: Any) -> None:
    """Add the subcommand `datasets` to a parser."""
    parser = commands.add_parser(
        "datasets",
        help="list, download, convert, look at, check and delete data sets",
        description="Data sets as frozen buffers: runs of the DQN replay data set (`Pong/1`), and Minari's "
        "(`minari:D4RL/door/human-v2`).",
    )
    parser.set_defaults(run=lambda options: parser.print_help() or 0)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    for name, run, text in (
        ("list", _list, "print what is on this machine, or what can be downloaded"),
        ("download", _download, "download and convert; what an interruption leaves is used by the next call"),
        ("info", _info, "print what a data set is"),
        ("verify", _verify, "read every byte of a data set; exit status 1 if any is damaged"),
        ("delete", _delete, "remove a data set from this machine"),
    ):
        action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        action.add_argument(
            "--root", type=Path, help="folder of data sets (default: $FBUF_DATASETS, ~/.cache/fbuf/datasets)"
        )
        action.set_defaults(run=functools.partial(guarded, run))
        if name == "list":
            action.add_argument("--available", action="store_true", help="ids that can be downloaded")
        else:
            several: dict[str, Any] = {"nargs": "+"} if name == "download" else {}
            action.add_argument("id", metavar="ID", help="such as Pong/1 or minari:NAME; or a folder", **several)
        if name in ("list", "info"):
            action.add_argument("--json", action="store_true", help="print JSON")
        if name == "delete":
            action.add_argument("--yes", action="store_true", help="do not ask")
        if name == "download":
            _add_download(action)
    _add_convert(actions)


def _add_download(action: argparse.ArgumentParser) -> None:
    action.add_argument("--source", help="a mirror: https://..., file://..., a folder (Minari: where it keeps its own)")
    action.add_argument("--workers", type=int, help="dumps converted at a time (default: one a core, up to 8)")
    action.add_argument("--dumps", type=_dumps, help="of a run, only these: 0-4,9 (default: all)")
    action.add_argument("--on-corrupt", choices=("raise", "skip"), help="of a run: leave damaged dumps out (skip)")
    action.add_argument("--force", action="store_true", help="again, even if it is there")
    action.add_argument(
        "--skip", action="append", default=[], metavar="LEAF", help="of a Minari data set: a leaf to leave out"
    )
    action.add_argument("--quiet", action="store_true", help="no progress bars")


def _add_convert(actions: Any) -> None:
    text = "make a data set of a file of another library, recognised by its contents"
    action = actions.add_parser("convert", help=text, description=f"{text[0].upper()}{text[1:]}.")
    action.add_argument(
        "source", type=Path, metavar="SOURCE", help="an .npz or .h5, or the folder of a LeRobot data set"
    )
    action.add_argument("path", type=Path, metavar="PATH", help="the folder to write, which must not exist")
    action.add_argument("--dry-run", action="store_true", help="print what was recognised, and write nothing")
    action.add_argument("--ogbench", action="store_true", help="SOURCE is of OGBench, whose terminals end trajectories")
    action.add_argument("--ends", choices=("terminated", "trajectory"), help="what terminals, dones or next.done mean")
    action.add_argument("--mask", help="of robomimic: a filter key, such as train")
    action.add_argument("--lanes", type=int, help="E, for arrays [N, E, ...]")
    action.add_argument("--rows", type=int, help="take the first rows only")
    action.add_argument("--field", action="append", metavar="THERE[=HERE]", help="a leaf to take (default: all)")
    action.add_argument("--workers", type=int, default=0, help="segments written at a time (default: one)")
    action.add_argument("--quiet", action="store_true", help="no progress bar")
    action.set_defaults(run=functools.partial(guarded, _convert))


def _convert(options: argparse.Namespace) -> int:
    fields: Any = options.field  # names alone declare nothing: ambiguous leaves are still refused
    if fields and any("=" in text for text in fields):
        fields = {old: here or old for old, _, here in (text.partition("=") for text in fields)}
    asked = {name: getattr(options, name) for name in ("ends", "mask", "lanes", "rows")}
    if options.ogbench:
        if unused := [name for name, value in asked.items() if value is not None]:
            raise ValueError(f"convert: --{unused[0]} is given with --ogbench, which has no use for it. Leave it out.")
        source = interop.from_ogbench(options.source, fields=fields)
    else:
        source = interop.from_file(options.source, fields=fields, **asked)
    found, leaves = source.count(), source.stored()[0]
    lanes = "" if source.lanes is None else f" in {counted(source.lanes, 'lane')}"
    print(f"{options.source}: {source.format}, {counted(found['rows'], 'row')}{lanes}")
    if "episodes" in found:
        number = counted(found["episodes"], "episode")
        print(f"  ends        {number}: {found['terminated']:,} terminated, {found['truncated']:,} truncated")
    shown = ", ".join(f"{name} {leaf.dtype.name}{list(leaf.shape)}" for name, leaf in leaves.items())
    print(f"  leaves      {shown}", flush=True)
    if options.dry_run:
        return 0
    source.save(options.path, workers=options.workers, progress=not options.quiet)
    print(datasets.info(options.path))
    return 0


def _dumps(text: str) -> list[int]:
    """Return the numbers of `"0-4,9"`."""
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or not 0 <= int(last or first) - int(first) <= 1000:
            raise argparse.ArgumentTypeError(f"{text!r} names no dumps; expected numbers such as 0-4,9")
        numbers |= set(range(int(first), int(last or first) + 1))
    return sorted(numbers)


def _list(options: argparse.Namespace) -> int:
    root = root_of("fbuf datasets", options.root)
    found = list(_found(root))
    if options.available:
        here = {name for name, _ in found}
        known = [{"id": name, "here": name in here} for name in datasets.available()]
        if options.json:
            print(json.dumps(known, indent=1))
        for entry in () if options.json else known:
            print(f"{entry['id']}{'  (here)' if entry['here'] else ''}")
        return 0
    if options.json:
        print(json.dumps([{"id": name} | vars(about) for name, about in found], indent=1))
        return 0
    if not found:
        print(f"there are no data sets in {root}; what can be downloaded: python -m fbuf datasets list --available")
        return 0
    lines: list[tuple[str, ...]] = [("id", "rows", "bytes", "raw/bytes", "")]
    for name, about in found:
        state = "" if about.finished else "not finished"
        lines.append((name, f"{about.rows:,}", f"{about.disk:,}", f"{about.ratio:.1f}", state))
    for line in _table(lines):
        print(line)
    return 0


def _found(root: Path) -> Iterator[tuple[str, Any]]:
    """Yield ids and descriptions of data sets below a folder, finished or not."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        if (folder / NAME).is_file() or (folder / "pieces").is_dir():
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                yield _id_of(root, folder), datasets.info(folder)
        elif folder.is_dir() and len(folder.relative_to(root).parts) < _DEPTH:
            inner = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
            waiting += reversed(inner)


def _id_of(root: Path, folder: Path) -> str:
    parts = folder.relative_to(root).parts
    return MINARI + "/".join(parts[1:]) if parts[:1] == ("minari",) else "/".join(parts) or str(root)


def _folder(options: argparse.Namespace) -> Path:
    """Return the folder of the given data set; raise if it does not exist."""
    root, name = root_of("fbuf datasets", options.root), options.id
    if name.startswith(("/", "./", "../", "~")) or (Path(name) / NAME).is_file():
        return Path(name).expanduser()
    folder = root / "minari" / name.removeprefix(MINARI) if name.startswith(MINARI) else root / name
    if not folder.is_dir() and name[:1] != ".":
        raise CommandError(f"{name} is not at {folder}. To have it there: fbuf datasets download {name}")
    return folder


def _info(options: argparse.Namespace) -> int:
    about = datasets.info(_folder(options))
    print(json.dumps(vars(about), indent=1) if options.json else about)
    return 0


def _verify(options: argparse.Namespace) -> int:
    datasets.verify(_folder(options))
    print("whole")
    return 0


def _delete(options: argparse.Namespace) -> int:
    folder = _folder(options)
    about = datasets.info(folder)
    if not options.yes:
        if not sys.stdin.isatty():
            raise CommandError(f"{folder} would be removed, but standard input is not a terminal. Confirm with --yes")
        print(f"{folder}: {counted(about.rows, 'row')}, {about.disk:,} bytes")
        if input("remove it? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 1
    datasets.delete(folder)
    print(f"removed {folder}, {about.disk:,} bytes")
    return 0


def _download(options: argparse.Namespace) -> int:
    failed = 0
    for name in options.id:
        try:
            _download_one(name, options)
        except ERRORS as error:
            print(f"error: {name}: {text_of(error)}", file=sys.stderr)
            failed += 1
    return 1 if failed else 0


def _download_one(name: str, options: argparse.Namespace) -> None:
    download = "force" if options.force else True
    settings: dict[str, Any] = {"root": options.root, "source": options.source, "progress": not options.quiet}
    if options.workers is not None:
        settings["workers"] = options.workers
    if name.startswith(MINARI):
        if options.dumps is not None:
            raise CommandError("--dumps is for runs such as Pong/1; Minari's data sets come whole. Leave it out")
        if options.on_corrupt is not None:
            raise CommandError("--on-corrupt is for runs such as Pong/1, which have dumps. Leave it out")
        buffer, _ = datasets.minari(name.removeprefix(MINARI), download=download, skip=options.skip, **settings)
    else:
        if options.skip:
            raise CommandError("--skip is for Minari's data sets. Leave it out")
        if options.on_corrupt is not None:
            settings["on_corrupt"] = options.on_corrupt
        buffer, _ = datasets.atari_dqn(name, download=download, dumps=options.dumps, **settings)
    assert isinstance(buffer.storage, DataSet)
    print(datasets.info(buffer.storage.path))

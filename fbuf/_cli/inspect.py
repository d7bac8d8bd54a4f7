"""`python -m fbuf inspect` and `verify`: print the contents of a checkpoint or data set, and check every byte."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fbuf import datasets
from fbuf._checkpoint import contents
from fbuf._formats import dataset
from fbuf._formats.checkpoint.directory import Folder
from fbuf._formats.checkpoint.filesystem import DISK, is_checkpoint_name, is_data_name
from fbuf._formats.checkpoint.manifest import CheckpointNotFound, SchemaError, VersionError
from fbuf._formats.checkpoint.read import Saved
from fbuf._host.types import StoreCorrupted


def add_commands(commands: Any) -> None:
    """Add both subcommands to a parser."""
    for name, run, text in (
        ("inspect", _inspect, "print what a checkpoint or data set holds, and whether it is intact"),
        ("verify", _verify, "check every byte of a checkpoint or data set; exit status 1 if any is damaged"),
    ):
        parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parser.add_argument("path", help="the folder that fbuf.save was given")
        if name == "inspect":
            parser.add_argument("--json", action="store_true", help="print the internals: metadata, arrays, files")
        parser.set_defaults(run=functools.partial(guarded, run))


def describe(path: str) -> Iterator[str]:
    """Yield lines about the checkpoint or data set at `path`, for people; the last says whether every byte is intact.

    Raises:
      CheckpointNotFound: there is neither.
      StoreCorrupted, VersionError: no generation can be opened.
    Cost: each byte is read once. Memory: the state without its rows.
    """
    if dataset.is_dataset(path):
        about = datasets.info(path)
        head, *lines = str(about).splitlines()
        yield from (f"{head}: a data set, fbuf.datasets.open(path)", *lines)
        if about.finished:
            yield from _intact(path)
        return
    folder = Folder(path, DISK)
    generations, last = _generations(folder), None
    yield f"{folder.path}: a checkpoint, fbuf.load(path)"
    for generation in generations:
        try:
            with Saved(folder, generation) as saved:
                yield from (_line(*line) for line in contents.describe(saved))
            break
        except (StoreCorrupted, VersionError, SchemaError) as error:
            last = error
            yield _line("not opened", f"generation {generation}: {error}")
    else:
        assert last is not None
        raise last
    if generations[1:]:
        yield _line("generations", f"{', '.join(map(str, generations))}; the newest that is intact is loaded")
    yield from _intact(path)


def _intact(path: str) -> Iterator[str]:
    damage = [_line("damaged", line) for line in faults(path)]
    yield from damage or [_line("intact", "yes, every byte")]


def _line(label: str, text: str) -> str:
    return f"  {label:<11} {text}"


def internals(path: str) -> dict[str, Any]:
    """Return everything that the manifests of a checkpoint or data set say, as JSON; blocks are not read.

    Raises:
      As `describe`.
    """
    if dataset.is_dataset(path):
        return {"kind": "data set", **vars(datasets.info(path))}
    folder = Folder(path, DISK)
    names, found, last = folder.names(), [], None
    for generation in _generations(folder):
        try:
            with Saved(folder, generation) as saved:
                found.append(_manifest(saved, names))
        except (StoreCorrupted, VersionError) as error:
            last = error
            found.append({"generation": generation, "error": str(error)})
    if last is not None and all("error" in one for one in found):
        raise last
    others = [name for name in names if not is_checkpoint_name(name)]
    return {"kind": "checkpoint", "path": folder.path, "generations": found, "other files": others}


def faults(path: str) -> Iterator[str]:
    """Yield a line for each damage in any generation, or in a data set, at `path`. Cost: each byte is read once.

    Raises:
      CheckpointNotFound: there is no checkpoint.
    """
    if dataset.is_dataset(path):
        try:
            datasets.verify(path)
        except StoreCorrupted as damage:
            yield str(damage)
        return
    folder = Folder(path, DISK)
    whole: set[tuple[str, int, int]] = set()
    for generation in _generations(folder):
        try:
            with Saved(folder, generation) as saved:
                for array in saved.arrays.values():
                    for error in array.find_damage(whole=whole):
                        yield f"generation {generation}: {error}"
        except (StoreCorrupted, VersionError) as error:
            yield f"generation {generation}: {error}"


def _generations(folder: Folder) -> list[int]:
    found = folder.generations()
    if not found:
        raise CheckpointNotFound(
            2, f"no checkpoint or data set at {folder.path}; expected the path that fbuf.save or datasets was given."
        )
    return found


def _manifest(saved: Saved, names: list[str]) -> dict[str, Any]:
    arrays, live = {}, {entry.name: 0 for entry in saved.manifest.files}
    for name, entry in saved.manifest.arrays.items():
        layout = entry.layout
        shape, sizes = list(layout.shape), layout.sizes
        arrays[name] = {"dtype": layout.dtype.name, "shape": shape, "bytes": layout.nbytes, "blocks": layout.num_blocks}
        for number in np.unique(entry.file).tolist():
            live[saved.manifest.files[number].name] += int(sizes[entry.file == number].sum())
    files = {file.name: {"bytes": file.size, "in use": live[file.name]} for file in saved.manifest.files}
    unused = [name for name in names if is_data_name(name) and name not in live]
    about = {"generation": saved.generation, "save": saved.manifest.save, "bytes": saved.nbytes, "meta": saved.meta}
    return {**about, "arrays": arrays, "files": files, "files of other generations": unused}


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _inspect(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(internals(options.path), indent=1))
        return 0
    for line in describe(options.path):
        print(line, flush=True)
    return 0


def _verify(options: argparse.Namespace) -> int:
    damaged = 0
    for line in faults(options.path):
        damaged += 1
        print(f"damaged: {line}")
    print(f"{damaged} damaged" if damaged else "whole")
    return 1 if damaged else 0


class CommandError(Exception):
    """An error that the user can fix as its message says."""


ERRORS = (CommandError, OSError, ValueError, TypeError, ImportError, RuntimeError, MemoryError)


def guarded(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Return the exit status: that of `run`, or 1 after an error, with a message on standard error."""
    try:
        return run(options)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except ERRORS as error:
        print(f"error: {text_of(error)}", file=sys.stderr)
    return 1


def text_of(error: Exception) -> str:
    """Return what an error says, without its number."""
    text = error.strerror if isinstance(error, OSError) and error.strerror and error.filename is None else str(error)
    return str(text) or type(error).__name__

"""`python -m fbuf inspect` and `verify`: print the contents of a checkpoint, and check every byte."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np

from fbuf._core.text_table import printable
from fbuf._formats.checkpoint.directory import Folder
from fbuf._formats.checkpoint.filesystem import DISK, is_checkpoint_name, is_data_name
from fbuf._formats.checkpoint.manifest import CheckpointNotFound, VersionError
from fbuf._formats.checkpoint.read import Saved
from fbuf._host.types import StoreCorrupted

_META = 400  # characters shown of a value


def add_commands(commands: Any) -> None:
    """Add both subcommands to a parser."""
    for name, run, text in (
        ("inspect", _inspect, "print what a checkpoint holds: generations, arrays, files"),
        ("verify", _verify, "check every byte of a checkpoint; exit status 1 if any is damaged"),
    ):
        parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parser.add_argument("path", help="the folder that fbuf.save was given")
        parser.set_defaults(run=functools.partial(guarded, run))


def describe(path: str) -> Iterator[str]:
    """Yield lines that describe the checkpoint at `path`, without reading its blocks.

    Raises:
      CheckpointNotFound: there is no checkpoint.
      StoreCorrupted, VersionError: no generation can be opened.
    """
    folder = Folder(path, DISK)
    names = folder.names()
    shown, last = False, None
    for generation in _generations(folder):
        try:
            saved = Saved(folder, generation)
        except (StoreCorrupted, VersionError) as error:
            last = error
            yield f"generation {generation} cannot be opened: {error}"
            continue
        with saved:
            yield f"generation {generation}: {len(saved.arrays)} arrays, {saved.nbytes:,} bytes, save {saved.manifest.save}"
            if not shown:
                shown = True
                yield from _contents(saved, names)
    if last is not None and not shown:
        raise last
    others = [name for name in names if not is_checkpoint_name(name)]
    if others:
        yield f"other files, which are not looked at: {', '.join(map(printable, others))}"


def faults(path: str) -> Iterator[str]:
    """Yield a line for each damage in any generation at `path`. Cost: each byte is read once.

    Raises:
      CheckpointNotFound: there is no checkpoint.
    """
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
        raise CheckpointNotFound(2, f"no checkpoint at {folder.path}; expected the path that fbuf.save was given.")
    return found


def _contents(saved: Saved, names: list[str]) -> Iterator[str]:
    for key, value in saved.meta.items():
        text = printable(value) if isinstance(value, str) else json.dumps(value)
        text += _date(value) if key == "time" else ""
        yield f"  {printable(key)}: {text if len(text) <= _META else text[:_META] + f'... ({len(text)} characters)'}"
    rows: list[tuple[str, ...]] = [("array", "dtype", "shape", "bytes", "blocks")]
    live: dict[str, int] = {entry.name: 0 for entry in saved.manifest.files}
    for name, entry in saved.manifest.arrays.items():
        layout = entry.layout
        rows.append((name, layout.dtype.name, str(list(layout.shape)), f"{layout.nbytes:,}", str(layout.num_blocks)))
        sizes = layout.sizes
        for number in np.unique(entry.file).tolist():
            live[saved.manifest.files[number].name] += int(sizes[entry.file == number].sum())
    yield from _table(rows)
    rows = [("file", "bytes", "in use")]
    for file in sorted(saved.manifest.files, key=lambda file: file.name):
        data = file.size - file.header
        rows.append((file.name, f"{file.size:,}", f"{100 * live[file.name] / data if data else 100:.0f} %"))
    rows += [(name, "", "not by this generation") for name in names if is_data_name(name) and name not in live]
    yield from _table(rows)


def _date(seconds: Any) -> str:
    """Return ` (2026-11-22 14:05:09 UTC)`, or "" if the value in the file is not a valid time."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        return ""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(" (%Y-%m-%d %H:%M:%S UTC)")
    except (OverflowError, OSError, ValueError):
        return ""


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _inspect(options: argparse.Namespace) -> int:
    for line in describe(options.path):
        print(line)
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

"""`python -m fbuf view`: one HTML page of a checkpoint, a data set or another library's file."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from fbuf._cli.inspect import CommandError, guarded
from fbuf._core.text_table import human


def add_commands(commands: Any) -> None:
    """Add the subcommand `view` to a parser."""
    text = "write one HTML page that shows a checkpoint, a data set or another library's file"
    parser = commands.add_parser("view", help=text, description=f"{text[0].upper()}{text[1:]}: episodes play in it.")
    parser.add_argument("path", type=Path, help="what fbuf.save or datasets wrote, or a file that from_file reads")
    parser.add_argument("--output", type=Path, help="the page (default: the path's name with .html, here)")
    parser.add_argument(
        "--episodes",
        default="best,worst,median,newest",
        help="which play: numbers, or best, worst, median, newest (default: all four)",
    )
    parser.set_defaults(run=functools.partial(guarded, _view))


def _view(options: argparse.Namespace) -> int:
    from fbuf.plot import _view as pages

    chosen: list[str | int] = []
    for text in options.episodes.split(","):
        try:
            chosen.append(text if text in pages.NAMED else int(text))
        except ValueError:
            raise CommandError(f"--episodes has {text!r}; expected numbers, or {', '.join(pages.NAMED)}") from None
    output = options.output or Path(f"{options.path.absolute().name}.html")
    page = pages.view("fbuf view", options.path.expanduser(), chosen)
    output.write_text(page, encoding="utf-8")
    print(f"{output}: {human(len(page.encode()))}. Open it in a browser.")
    return 0

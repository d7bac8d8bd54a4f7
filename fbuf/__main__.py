"""`python -m fbuf`, or `fbuf`: the command line. Subcommands import their modules when they run."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fbuf import __version__
from fbuf._cli import datasets as _datasets
from fbuf._cli import inspect, view
from fbuf.demo import _command


class Parser(argparse.ArgumentParser):
    """A parser that suggests the command or value that was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, with a suggestion, and exit with status 2."""
        wrong = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong is not None:
            close = difflib.get_close_matches(wrong[1], re.findall(r"[\w-]+", wrong[2]), 1)
            message += f". Did you mean '{close[0]}'?" if close else ""
        super().error(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, or print the help.

    Args:
      arguments: Command-line arguments; None: those of the process.
    Returns:
      The exit status: 0 success, 1 failure with a message on standard error, 130 interrupted.
    """
    name = "fbuf" if Path(sys.argv[0]).name == "fbuf" else "python -m fbuf"
    parser = Parser(prog=name, description="Functional experience replay for JAX.")
    parser.add_argument("--version", action="version", version=f"fbuf {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="train Double DQN on a real Atari game, and see what the replay takes",
        description="Trains Double DQN on a real Atari game; the whole training step, replay and all, is one jitted "
        "function. Prints a table and draws a picture. Takes about a minute on 2 CPU cores by default.",
    )
    _command.add_arguments(demo)
    demo.set_defaults(run=_command.main)
    inspect.add_commands(commands)
    view.add_commands(commands)
    _datasets.add_commands(commands)
    options = parser.parse_args(arguments)
    if not hasattr(options, "run"):
        parser.print_help()
        return 0
    try:
        status: int = options.run(options)
    except _command.CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())

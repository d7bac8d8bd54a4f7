"""`python -m fbuf demo`: options, checks before the work starts, progress, table and picture."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

STEPS = 600
LONG = ("road_runner", 3_000)  # a game that DQN learns soon
STORAGES = ("device", "host", "compressed", "deduplicated")  # as in `_dqn`, which imports JAX
_EXTRAS = {"ale_py": "ale-py", "gymnasium": "gymnasium", "optax": "optax", "matplotlib": "matplotlib", "tqdm": "tqdm"}


class CommandError(Exception):
    """An error that the user can correct; its message says how."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `demo`."""
    parser.add_argument("--game", help="an Atari game by name (default: breakout)")
    parser.add_argument(
        "--steps", type=int, help=f"training steps, each 4 frames of 8 games and one batch (default: {STEPS})"
    )
    parser.add_argument(
        "--long", action="store_true", help=f"by default {LONG[1]:,} steps of {LONG[0]}: the score rises"
    )
    parser.add_argument("--seed", type=int, default=0, help="of games, network, policy and draws (default: 0)")
    parser.add_argument(
        "--storage", choices=STORAGES, default="compressed", help="where the frames are stored (default: %(default)s)"
    )
    parser.add_argument("--compare", action="store_true", help="then compare all storages on the newest of these rows")
    parser.add_argument("--out", type=Path, default=Path("fbuf-demo.png"), help="the picture (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
      The exit status: 0, or 1 if `--compare` finds storages that differ in a batch.
    Raises:
      CommandError: an extra is missing, or an option is invalid.
    """
    game, steps = LONG if options.long else ("breakout", STEPS)
    options.game = game if options.game is None else options.game
    options.steps = steps if options.steps is None else options.steps
    _check_extras()
    game = _check_options(options)

    # Only now: these load JAX and the extras.
    from fbuf.demo import _compare_storages, _report, _run
    from fbuf.demo._atari import VectorAtari

    settings = _run.Settings(game, options.seed, options.steps)
    with _progress(options.storage, options.steps) as progress:
        result = _run.run(options.storage, settings, VectorAtari, progress)
    print(f"\n{_report.table(result)}")
    columns = []
    if options.compare:
        with _progress("storages compared", _compare_storages.number_of_turns(result.newest)) as progress:
            columns = _compare_storages.compare(result.newest, progress)
        print(f"\n{_report.storages(columns)}")
    try:
        _report.plot(result, options.out)
    except OSError as error:
        raise CommandError(f"--out {options.out}: {error.strerror or error}. Choose another: --out PATH.png") from error
    print(f"\npicture: {options.out}")
    return 0 if all(column.identical for column in columns) else 1


@contextlib.contextmanager
def _progress(what: str, steps: int) -> Iterator[Callable[[int, dict[str, str]], None]]:
    """Show a progress bar on standard error; in a log file a line every 10 s. It says "compiling" until the first step."""
    from tqdm import tqdm

    with tqdm(total=steps, desc=what, unit="step", mininterval=0.2 if sys.stderr.isatty() else 10.0) as bar:
        bar.set_postfix_str("compiling")

        def show(step: int, shown: dict[str, str]) -> None:
            if not bar.n:
                bar.unpause()  # time to compile says nothing about what is left
            bar.set_postfix(shown, refresh=False)
            bar.update(step - bar.n)

        yield show


def _check_extras() -> None:
    for module, package in _EXTRAS.items():
        try:
            importlib.import_module(module)
        except ImportError:
            raise CommandError(f'{package} is missing. Run: pip install "fbuf[demo]"') from None


def _check_options(options: argparse.Namespace) -> str:
    """Return the emulator's name of the game. Raises CommandError for options that would fail after minutes of work."""
    from fbuf.demo import _atari, _dqn

    if options.steps < 1:
        raise CommandError(f"--steps is {options.steps}; expected 1 or more. Use --steps {STEPS}")
    if not 0 <= options.seed < 2**31 - _dqn.LANES:
        raise CommandError(f"--seed is {options.seed}; expected 0 or more, below 2**31 - 8. Use --seed 0")
    _check_out(options.out)
    try:
        return _atari.known_name(options.game)
    except ValueError as error:
        raise CommandError(str(error).replace("VectorAtari: game", "--game", 1)) from error


def _check_out(out: Path) -> None:
    if out.suffix.lower() != ".png":
        raise CommandError(f"--out {out} does not end in .png. Use --out {out}.png")
    try:  # the only sure test of permissions, quotas and read-only mounts
        try:
            out.open("xb").close()
            out.unlink()
        except FileExistsError:
            out.open("ab").close()
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror or error}. Choose another: --out PATH.png") from error

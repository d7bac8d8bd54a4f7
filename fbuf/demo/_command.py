"""`python -m fbuf demo`: options, checks before the work starts, progress, table and picture."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

STEPS = 2_000
STEPS_COMPARED = 600  # of each storage under --compare
STORAGES = ("device", "host", "compressed", "deduplicated")  # as in `_dqn`, which imports JAX
_EXTRAS = {"ale_py": "ale-py", "gymnasium": "gymnasium", "optax": "optax", "matplotlib": "matplotlib", "tqdm": "tqdm"}


class CommandError(Exception):
    """An error that the user can correct; its message says how."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `demo`."""
    parser.add_argument("--game", default="breakout", help="an Atari game by name (default: %(default)s)")
    parser.add_argument(
        "--steps",
        type=int,
        help=f"training steps, each 4 frames of 8 games and one batch (default: {STEPS}; "
        f"with --compare {STEPS_COMPARED} for each storage)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of games, network, policy and draws (default: 0)")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--storage",
        choices=STORAGES,
        default="compressed",
        help="where the frames live in training (default: %(default)s); at the end all storages are compared on the same rows",
    )
    choice.add_argument(
        "--compare",
        action="store_true",
        help="run every storage on the same seed, and check that training is the same, bit for bit",
    )
    parser.add_argument("--out", type=Path, default=Path("fbuf-demo.png"), help="the picture (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
      The exit status: 0, or 1 if storages differ in a batch, or under --compare in training.
    Raises:
      CommandError: an extra is missing, or an option is invalid.
    """
    _check_extras()
    game = _check_options(options)

    # Only now: these load JAX and the extras.
    from fbuf.demo import _compare_storages, _report, _run
    from fbuf.demo._atari import VectorAtari

    steps = options.steps or (STEPS_COMPARED if options.compare else STEPS)
    settings = _run.Settings(game, options.seed, steps)
    results: list[_run.Result] = []
    for storage in STORAGES if options.compare else (options.storage,):
        with _Progress(storage, steps) as progress:
            kept = 0 if results else _compare_storages.ROWS  # all runs have the same rows
            results.append(_run.run(storage, settings, VectorAtari, progress, kept))
    rows = results[0].newest
    assert rows is not None
    with _Progress("storages compared", _compare_storages.number_of_turns(rows)) as progress:
        columns = _compare_storages.compare(rows, progress)
    print(f"\n{_report.table(results)}\n\n{_report.storages(columns)}")
    try:
        _report.plot(results, options.out)
    except OSError as error:
        raise CommandError(f"--out {options.out}: {error.strerror or error}. Choose another: --out PATH.png") from error
    print(f"\npicture: {options.out}")
    alike = all(_report.identical(results[0], r) for r in results[1:]) and all(c.identical for c in columns)
    return 0 if alike else 1


class _Progress:
    """A progress bar, on standard error."""

    def __init__(self, storage: str, steps: int) -> None:
        from tqdm import tqdm

        # In a log file, where a bar cannot move, one line every 10 s.
        pause = 0.2 if sys.stderr.isatty() else 10.0
        self._bar: Any = tqdm(total=steps, desc=storage, unit="step", mininterval=pause, dynamic_ncols=True)
        self._bar.set_postfix_str("compiling", refresh=True)

    def __call__(self, step: int, shown: dict[str, str]) -> None:
        self._bar.set_postfix(shown, refresh=False)
        if self._bar.n == 0:
            self._bar.unpause()  # the rate leaves out what was compiled
        self._bar.update(step - self._bar.n)

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


def _check_extras() -> None:
    for module, package in _EXTRAS.items():
        try:
            importlib.import_module(module)
        except ImportError:
            raise CommandError(f'{package} is missing. Run: pip install "fbuf[demo]"') from None


def _check_options(options: argparse.Namespace) -> str:
    """Return the emulator's name of the game. Raises CommandError for options that would fail after minutes of work."""
    from fbuf.demo import _atari, _dqn

    if options.steps is not None and options.steps < 1:
        raise CommandError(f"--steps is {options.steps}; expected 1 or more. Use --steps {STEPS}")
    if not 0 <= options.seed < 2**31 - _dqn.LANES:
        raise CommandError(f"--seed is {options.seed}; expected 0 or more, below 2**31 - 8. Use --seed 0")
    _check_out(options.out)
    try:
        return _atari._known_name(options.game)
    except ValueError as error:
        raise CommandError(str(error).replace("VectorAtari: game", "--game", 1)) from error


def _check_out(out: Path) -> None:
    if out.is_dir():
        raise CommandError(f"--out {out} is a folder; expected a file. Use --out {out / 'fbuf-demo.png'}")
    if out.suffix.lower() != ".png":
        raise CommandError(f"--out {out} does not end in .png. Use --out {out.with_suffix('.png')}")
    if not out.parent.is_dir():
        raise CommandError(f"--out {out}: there is no folder {out.parent}. Make it: mkdir -p {out.parent}")
    exists = out.exists()
    try:
        out.open("ab").close()  # the only sure test of permissions, quotas and read-only mounts
        if not exists:
            out.unlink()
    except OSError as error:
        raise CommandError(f"--out {out}: {error.strerror or error}. Choose another: --out PATH.png") from error

"""`python -m fbuf demo torch`: a DQN in plain torch learns CartPole on fbuf's replay, while you watch."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from fbuf.demo._command import CommandError

STEPS = 32_000
_EXTRAS = {"torch": "torch", "gymnasium": "gymnasium"}
_LINES = 15  # of progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `demo torch`."""
    parser.add_argument("--steps", type=int, default=STEPS, help="of the environment (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of environments, network, policy and draws (default: 0)")
    parser.add_argument("--episodes", type=int, default=10, help="greedy ones at the end (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    """Trains, evaluates, and prints both.

    Returns:
      The exit status: 0.
    Raises:
      CommandError: an extra is missing, or an option cannot be met.
    """
    missing = [package for module, package in _EXTRAS.items() if not _there(module)]
    if missing:
        raise CommandError(f'missing: {", ".join(missing)}. Run: pip install "fbuf[demo]"')
    for name, least in (("steps", 1), ("seed", 0), ("episodes", 1)):
        if getattr(options, name) < least:
            raise CommandError(f"--{name} is {getattr(options, name)}; expected {least} or more.")

    # Only now: these load torch and JAX.
    import torch

    from fbuf.demo import _cartpole

    settings = _cartpole.Settings(steps=options.steps, seed=options.seed)
    every = max(1, options.steps // _LINES)
    shown = 0

    def progress(step: int, result: _cartpole.Result) -> None:
        nonlocal shown
        if step // every > shown:
            shown = step // every
            print(line(step, result), flush=True)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the network is small, and XLA has threads of its own
    try:
        print(f"{'step':>7}  {'return':>6}  {'loss':>7}  (return of the last 20 episodes, {_cartpole.LONGEST} at most)")
        online, result = _cartpole.train(settings, progress)
        returns = _cartpole.evaluate(online, options.episodes, seed=options.seed + 10_000)
    finally:
        torch.set_num_threads(threads)
    first = mean([total for _, total in result.returns[:20]])
    stats = result.stats
    print(
        f"\nreturn, first 20 episodes: {first:.0f}; greedy, {options.episodes} episodes: {mean(returns):.0f} "
        f"(lowest {min(returns):.0f})\nrows held: {stats['size']:.0f}; largest TD error seen: {stats['max_priority']:.2f}"
    )
    return 0


def line(step: int, result: Any) -> str:
    """What is shown of a run in progress."""
    bar = "#" * round(mean([total for _, total in result.returns[-20:]]) / 10)
    loss = f"{mean(result.losses[-200:]):7.4f}" if result.losses else "      -"
    return f"{step:>7}  {mean([total for _, total in result.returns[-20:]]):6.1f}  {loss}  {bar}"


def mean(numbers: list[float]) -> float:
    """Of none: 0."""
    return sum(numbers) / len(numbers) if numbers else 0.0


def _there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True

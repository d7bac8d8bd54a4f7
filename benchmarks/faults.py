"""Kill processes that write to files, fuzz files, or use every storage for a long time.

`python -m benchmarks.faults [kill] [--count 500] [--seconds 0]` (`_kill.py`) kills processes at random instants and looks for
rows that were flushed or saved, and lost or doubled; `fuzz [--kind stores] [--seconds 120] [--seed 0]` (`_fuzz.py`) changes
files at random; `soak [--seconds 1200]` (`_soak.py`) looks for what grows. The exit status is 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one of the campaigns, and print what was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("kill", "fuzz", "soak"), default="kill", help="what to do")
    parser.add_argument("--seed", type=int, default=0, help="of the first input of fuzz")
    parser.add_argument("--kind", help="of files, for fuzz; all by default")
    parser.add_argument("--count", type=int, default=500, help="processes to kill, over all kinds of stores")
    parser.add_argument(
        "--seconds", type=float, default=0, help="end after this time; 0: when all are killed, or the default"
    )
    options = parser.parse_args(arguments)
    if options.what == "fuzz":
        from benchmarks import _fuzz  # they start JAX, and processes that are to be killed are forked

        return _fuzz.main(options.seconds or 120, options.seed, options.kind)
    if options.what == "soak":
        from benchmarks import _soak

        return _soak.main(options.seconds or 1200)
    from benchmarks import _kill

    return _kill.main(options.count, options.seconds)


if __name__ == "__main__":
    sys.exit(main())

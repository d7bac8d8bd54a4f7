"""Install the libraries of environments into an environment of their own, with the Python that runs this (3.12 or newer).

    python3.12 tests/environments/install.py FOLDER
    FBUF_ENVIRONMENTS=FOLDER python -m pytest tests/environments

`--share K/N` installs every Nth library from the Kth on, for tests with the same option. What does not install in
`--seconds` is named, and its test is skipped. All libraries take 1.2 GB.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

LIBRARIES = "ale_py brax gymnax jaxmarl envpool pgx jumanji navix xminigrid playground dm_env".split()
"""Modules, in an order in which every third takes about as long to install."""


def requirements() -> dict[str, list[str]]:
    """Return the pinned requirements of `all` and of each library."""
    needed: dict[str, list[str]] = {"all": []} | {name: [] for name in LIBRARIES}
    _, *sections = Path(__file__).with_name("requirements.txt").read_text().split("\n\n")
    for section in sections:
        heading, *lines = section.strip().splitlines()
        for name in heading.removeprefix("# ").split():
            needed[name] += lines
    return needed


def main() -> None:
    """Install the share, and write the names of what is installed to the file `installed`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", default="0/1", help="every Nth library from the Kth on: K/N")
    parser.add_argument("--seconds", type=float, default=900)
    options = parser.parse_args()
    if sys.version_info < (3, 12):
        parser.error(f"this is Python {sys.version.split()[0]}; several libraries need 3.12 or newer.")
    first, parts = map(int, options.share.split("/"))
    end = time.monotonic() + options.seconds
    subprocess.run([sys.executable, "-m", "venv", "--clear", options.folder], check=True, timeout=options.seconds)
    pip = [options.folder / "bin" / "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    needed, installed = requirements(), []
    for name in ("all", *LIBRARIES[first % parts :: parts]):
        try:
            wait = max(end - time.monotonic(), 0)
            done = subprocess.run([*pip, *needed[name]], capture_output=True, text=True, timeout=wait, check=False)
            reason = done.stderr.strip()[-300:] if done.returncode else None
        except subprocess.TimeoutExpired:
            reason = f"{options.seconds:.0f} seconds are over"
        if reason is None:
            installed.append(name)
        else:
            print(f"not installed: {name}: {reason}", file=sys.stderr)
            if name == "all":
                sys.exit(1)
    (options.folder / "installed").write_text("\n".join(installed))


if __name__ == "__main__":
    main()

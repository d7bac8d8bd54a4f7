"""Install the compilers for TPUs and NVIDIA GPUs of the present JAX into a folder of their own: no device is needed.

    python tests/accelerators/install.py FOLDER
    PYTHONPATH=FOLDER JAX_PLATFORMS=cpu python -m pytest -n 1 tests/accelerators

The wheels unpack to 1.1 GB. What does not install is named, and its tests are skipped.
"""

import importlib.metadata
import re
import subprocess
import sys


def wheels() -> list[list[str]]:
    """Return the requirements of each compiler."""
    tpu = [
        found for line in importlib.metadata.requires("jax") or () if (found := re.match(r"(libtpu[^;]*);.*tpu", line))
    ]
    jaxlib = importlib.metadata.version("jaxlib")
    return [[tpu[0][1].strip()] if tpu else [], [f"jax-cuda13-{part}=={jaxlib}" for part in ("plugin", "pjrt")]]


def main(folder: str) -> None:
    """Install what can be installed."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", folder]
    for requirements in wheels():
        done = subprocess.run([*pip, *requirements], capture_output=True, text=True, check=False)
        if done.returncode or not requirements:
            print(f"not installed: {' '.join(requirements)} {done.stderr.strip()[-300:]}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1])

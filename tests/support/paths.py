"""Where the repository is."""

from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]  # not resolved: `benchmarks.mutants` runs tests in a folder of links

"""Writes the README's tables from the committed reports: `python -m benchmarks.readme [--check]`.

A table stands between `<!-- name -->` and `<!-- /name -->`; what is between is replaced, and never typed. A test fails where
the README says anything else than the reports do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import _figures, _report

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def sections(results: Path = RESULTS) -> dict[str, str]:
    """Name to Markdown of every generated part, from the reports in a folder."""
    from benchmarks.defects import _table as defects

    report = _report.load(results / "report.json")
    pictures = [path.name for path in sorted(results.glob("peers_*.png"))]
    return {
        "figures": _figures.figures(report),
        "peers": _figures.versus(report),
        "pictures": "\n".join(f"![{name}](benchmarks/results/{name})" for name in pictures),
        "runs": _report.runs(report),
        "defects": defects.markdown(defects.load(results / "defects.json")),
    }


def rewritten(text: str, parts: dict[str, str]) -> str:
    """The text with every part between its marks replaced.

    Raises:
      ValueError: a mark is missing, or there twice.
    """
    for name, part in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise ValueError(
                f"readme: expected {begin} and, after it, {end}, once each. Add them where the table belongs."
            )
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{part}\n{end}{rest.split(end)[1]}"
    return text


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if `--check` finds a README that says something else."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where it would change something")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="PATH")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    before = options.readme.read_text()
    after = rewritten(before, sections(options.results))
    if before == after:
        return 0
    if options.check:
        print(f"{options.readme} is not what the reports in {options.results} give. Run python -m benchmarks.readme.")
        return 1
    options.readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())

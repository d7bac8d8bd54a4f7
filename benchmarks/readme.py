"""Writes the tables of README.md and benchmarks/README.md from the committed report: `python -m benchmarks.readme [--check]`.

A table is the text between `<!-- name -->` and `<!-- /name -->`; it is replaced, never typed. A test fails where a page differs
from the report.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import _figures, _report

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


def sections(results: Path = RESULTS) -> dict[str, dict[str, str]]:
    """Page to name to Markdown of every generated part, from the reports in a folder."""
    from benchmarks.defects import _table as defects

    report = _report.load(results / "report.json")
    pictures = [path.name for path in sorted(results.glob("peers_*.png"))]
    details = {
        "missed": _figures.missed(report),
        "figures": _figures.figures(report),
        "peers": _figures.versus(report),
        "long_run": _figures.long_run(report),
        "pictures": "\n".join(f"![{name}](results/{name})" for name in pictures),
        "runs": _report.runs(report),
        "defects": defects.markdown(defects.load(results / "defects.json")),
    }
    return {"README.md": {"headline": _figures.headline(report)}, "benchmarks/README.md": details}


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
    """Returns 1 if `--check` finds a page that differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page would change")
    options = parser.parse_args(arguments)
    differs = False
    for page, parts in sections().items():
        before = (ROOT / page).read_text()
        after = rewritten(before, parts)
        if before == after:
            continue
        if options.check:
            print(f"{page} differs from the reports in {RESULTS}. Run python -m benchmarks.readme.")
            differs = True
        else:
            (ROOT / page).write_text(after)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())

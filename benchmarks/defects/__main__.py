"""Run `python -m benchmarks.defects`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import benchmarks.defects
from benchmarks.defects import _table
from benchmarks.defects._rows import ROWS


def main(arguments: list[str] | None = None) -> int:
    """Run the rows. Return 1 if fbuf fails one; failures of other libraries do not count."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defects", description=benchmarks.defects.__doc__)
    parser.add_argument("--peer", choices=sorted({row.peer for row in ROWS}), help="only the rows about this peer")
    parser.add_argument("--only", metavar="NAME", help="only rows whose name contains this")
    parser.add_argument("--ours", action="store_true", help="only run fbuf")
    parser.add_argument("--quick", action="store_true", help="skip the rows that take half a minute")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--markdown", type=Path, metavar="PATH")
    options = parser.parse_args(arguments)
    rows = [
        row
        for row in ROWS
        if options.peer in (None, row.peer) and (options.only or "") in row.name and not (options.quick and row.slow)
    ]
    table = _table.run(rows, peers=not options.ours)
    if options.json is not None:
        _table.save(options.json, table)
    if options.markdown is not None:
        options.markdown.write_text(_table.markdown(table) + "\n", encoding="utf-8")
    wrong = [row["name"] for row in table["rows"] if not row["ours"]["right"]]
    shown = sum(row["theirs"]["right"] is False for row in table["rows"])
    print(f"\n{len(rows)} rows: {shown} defects of other libraries, {len(wrong)} of fbuf {wrong or ''}".rstrip())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

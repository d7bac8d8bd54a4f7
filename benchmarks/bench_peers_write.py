"""What does one write cost as a user calls it, with every peer, and does it grow with the buffer?

Rows of 25 bytes into full buffers, one row and 256 at a time, each library by its own verb from the outside: nothing here is in
a scan (`extend` asks that). Brax's queue is moved as a whole once it is full; dopamine and a list take rows one by one.
Expected: with priorities twice as fast as flashbax; with and without flat from 10^4 to 10^7 rows.
"""

from __future__ import annotations

from typing import Any

from benchmarks import peers
from benchmarks._compare import Field

QUESTION = "Writing {} of 25 bytes into a full {} buffer, one call"


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for 10^4 to 10^7 rows held (`quick`: 10^3 and 10^4)."""
    return measure([10**3, 10**4] if quick else [10**n for n in range(4, 8)], 2 if quick else 15)


def measure(sizes: list[int], rounds: int, libraries: Any = peers.PEERS) -> list[dict[str, Any]]:
    """The rows for some sizes."""
    report = []
    for kind, flat in (("Uniform", "< 0.05"), ("Prioritized", "<= 0.12")):
        field = Field(kind, sizes, libraries)
        targets = {("flashbax", size): ">= 2" for size in sizes if kind == "Prioritized"}
        for number in (1, 256):
            new = peers.rows(number, seed=1)
            question = QUESTION.format("one row" if number == 1 else f"{number} rows", kind.lower())
            tags = {"number": number, "kind": kind.lower()}
            report += field.ask(question, lambda d, new=new: d.writer(new), rounds, targets, flat, **tags)
    return report


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))

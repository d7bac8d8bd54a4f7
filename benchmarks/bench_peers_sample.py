"""What does one uniform batch cost as a user calls it, with every peer, and does it grow with the buffer?

Batches of 32, 256 and 4,096 rows of 25 bytes from full buffers, each library from the outside. Ours also gives index,
probability, weight and mask. Numpy and C++ libraries have no program to dispatch, and win at 32; expected: at least flashbax's
speed, and an exponent that is memory's alone (10^7 rows do not fit into the cache).
"""

from __future__ import annotations

from typing import Any

from benchmarks import peers
from benchmarks._compare import Field

QUESTION = "A uniform batch of {}, one call"
BATCHES = (32, 256, 4096)


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for 10^4 to 10^7 rows held (`quick`: 10^3 and 10^4, B = 32)."""
    return measure([10**3, 10**4], 2, batches=(32,)) if quick else measure([10**n for n in range(4, 8)], 15)


def measure(
    sizes: list[int], rounds: int, libraries: Any = peers.PEERS, batches: Any = BATCHES
) -> list[dict[str, Any]]:
    """The rows for some sizes."""
    field, report = Field("Uniform", sizes, libraries), []
    targets = {("flashbax", size): ">= 1" for size in sizes}
    for batch in batches:
        report += field.ask(
            QUESTION.format(f"{batch:,}"), lambda d, batch=batch: d.sampler(batch), rounds, targets, batch=batch
        )
    return report


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))

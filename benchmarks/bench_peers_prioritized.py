"""What does one prioritized step (batch with weights, then new priorities) cost as a user calls it, with every peer?

Both verbs, rows included, from the outside: ours as one jitted call, as a training step has them; flashbax's as two, because in
one program XLA copies its tree; torchrl's and cpprb's as two, for they cannot be in one. (`priorities` compares the trees
alone, inside a scan.) torchrl's trees are the wheel's, or, where those do not load, built from the sources in it. Expected: at
least the speed of torchrl and cpprb at 256 and 4,096, and an exponent of at most 0.12.
"""

from __future__ import annotations

from typing import Any

from benchmarks import peers
from benchmarks._compare import Field

QUESTION = "A prioritized step of {} (batch, weights, new priorities), one call of each verb"
BATCHES = (32, 256, 4096)


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for 10^4 to 10^7 rows held (`quick`: 10^3 and 10^4, B = 32)."""
    return measure([10**3, 10**4], 2, batches=(32,)) if quick else measure([10**n for n in range(4, 8)], 15)


def measure(
    sizes: list[int], rounds: int, libraries: Any = peers.PEERS, batches: Any = BATCHES
) -> list[dict[str, Any]]:
    """The rows for some sizes."""
    field, report = Field("Prioritized", sizes, libraries), []
    for batch in batches:
        judged = ("torchrl", "cpprb") if batch >= 256 else ()
        targets = {(peer, size): ">= 1" for peer in judged for size in sizes}
        question = QUESTION.format(f"{batch:,}")
        report += field.ask(question, lambda d, b=batch: d.stepper(b), rounds, targets, "<= 0.12", batch=batch)
    return report


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))

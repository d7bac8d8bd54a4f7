"""Why targets are missed, as `benchmarks/README.md` says beside each."""

import re

REASONS: tuple[tuple[str, str, str], ...] = (
    # benchmark, the beginning of a question (a pattern), reason
    ("dqn_step", "DQN step", "a callback waits for a thread of JAX, and reads share the cores with the step"),
    ("datasets", "Seconds to make", "zstd at level 1 takes most of the time in games with much motion"),
    ("datasets", "Seconds to read", "chunks of this game are the largest, and each is decoded whole"),
    ("host_store", "Bytes a frame beside", "many small chunks of other sizes: the arena keeps room between them"),
    ("topk", "The highest of all rows", "each row moves in a tree of 100,000 values that does not fit in a near cache"),
    (
        "peers_",
        "",
        "see `loop`, which interleaves the calls with the peer's; here each library has a process of its own",
    ),
    ("priorities", "Writing to a full", "a dispatched call of flashbax and of fbuf both cost mostly JAX's dispatch"),
)


def reason(benchmark: str, question: str) -> str:
    """Return the reason of the first line that matches.

    Raises:
      LookupError: no line does.
    """
    for name, pattern, why in REASONS:
        if benchmark.startswith(name) and re.match(pattern, question):
            return why
    raise LookupError(f"benchmarks/_reasons.py has no reason for a missed target of {benchmark}: {question!r}.")

"""Why targets are missed, as `benchmarks/README.md` says beside each."""

import re

REASONS: tuple[tuple[str, str, str], ...] = (
    # benchmark, the beginning of a question (a pattern), reason
    (
        "checkpoint",
        "Second save",
        "comparing the arrays and waiting for the disk take more than the target (see `the least it takes`); wait=False "
        "still compares",
    ),
    ("compression", "Read of 256", "zstd and copies into the batch take most of the time; the rest is Python and JAX"),
    ("compression", "Write of 1,024", "the store takes three quarters of the time, JAX the rest"),
    (
        "datasets",
        "Seconds to make",
        "zstd and gunzip take most of the time; torchrl neither compresses nor waits for the disk",
    ),
    (
        "deduplicated",
        "Write of 256",
        "games in small blocks (8x12) need more look-ups; others are faster than in Compressed",
    ),
    ("dispatch", "CPU time of an eager", "checks of the arguments, and conversions of NumPy rows"),
    ("dqn_step", "", "a callback that does nothing costs more (see `device, empty callback`)"),
    (
        "extend",
        "",
        "a write takes 3 to 5 us, of which caches and the larger arrays take a little more at 10,000,000 rows",
    ),
    ("host_store", "", "the index takes 18 bytes for each chunk of 8 frames; the rest is the unused ends of segments"),
    (
        "loop",
        "A jitted method",
        "a bare ring of the same leaves is only a little faster (its row is in `loop`); flattening the state's named fields "
        "takes the rest",
    ),
    (
        "loop",
        "Prioritized step",
        "a program sets priorities and draws; XLA's hand-over to another thread, dispatch and Python take the rest",
    ),
    (
        "loop",
        "`Replay` of the view",
        "a row's neighbours and flags decide what can be drawn and are read with it, and collected rows are looked up; by "
        "priority, a program takes 40 to 60 us more",
    ),
    (
        "loop",
        "`fbuf.integrations.flashbax`",
        "most of a call is dispatch of JAX, which both pay, and runs differ by a tenth; the sample is built from one of ours",
    ),
    (
        "loop",
        "A (DQN|SAC) script",
        "between calls of torch caches are cold: a draw then takes two to three times what it takes in a loop of draws",
    ),
    (
        "peers_",
        "A prioritized step of 4,096.*growth",
        "cache misses in the lowest levels of the tree, as in `priorities`",
    ),
    ("peers_", "", "most of a call is dispatch of JAX, which flashbax pays too, and cpprb does not"),
    (
        "priorities",
        "Prioritized step in a scan, 10",
        "cache misses in the lowest levels of the tree; see `reads and writes alone`",
    ),
    ("priorities", "", "dispatch of JAX, which both sides pay, is most of the time"),
    ("import", "", "making 54 dataclasses takes half of the time that fbuf adds"),
    ("mixture", "", "each callback returns its part in an array of its own; joining them copies the batch once more"),
    ("ray", "", "a draw is a message to another process and back, on the same two cores"),
    (
        "start",
        "First call",
        "a write decides which rows can be drawn: 846 equations against 279; runs differ by a tenth",
    ),
    ("slices", "", "three quarters of one call are dispatch: in a scan a draw takes 75 us"),
    (
        "topk",
        "",
        "a ring takes about two thirds of this time to write the same rows (see `topk`), most of it dispatch of JAX",
    ),
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

"""What does the first call of a training step cost: CPU seconds to trace, lower and compile it?

A step adds one row and draws a batch of 256 from 10^5 rows; the prioritized one also updates the batch's priorities. flashbax
compiles the same step with its flat and its prioritized flat buffer. Both take turns in one process without JAX's caches. CPU
time is counted, because other work on the machine hardly changes it. `count_instructions` tells where the time of a step goes.
The first `Replay.sample` is measured from the constructor on, with one row added before it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

import fbuf
from benchmarks._harness import Absent, absent_row, load_peer, ratio, row, spread

QUESTION = "First call of a step (add 1 row, sample 256): CPU time to trace, lower and compile it over flashbax's"
FIRST = "First batch of a `fbuf.Replay`: CPU seconds from the constructor on"
CAPACITY, BATCH = 100_000, 256
EXAMPLE = {
    "obs": np.zeros(8, np.float32),
    "action": np.int32(0),
    "reward": np.float32(0),
    "terminated": np.bool_(False),
    "truncated": np.bool_(False),
}
CASES: dict[str, tuple[Callable[[], fbuf.Buffer], str, str]] = {
    "uniform": (lambda: fbuf.Buffer(CAPACITY), "flat", "<= 1.0"),
    "Transition": (lambda: fbuf.Buffer(CAPACITY, view=fbuf.views.Transition(autoreset="same_step")), "flat", "<= 1.2"),
    "prioritized": (lambda: fbuf.prioritized(CAPACITY), "prioritized", "<= 1.6"),
}
"""Buffer, flashbax's buffer, and target of each case."""

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def step_of(buffer: fbuf.Buffer) -> Step:
    """Return one step of ours and its arguments."""

    def step(state: Any, item: Any, key: jax.Array) -> Any:
        state, batch = buffer.sample(buffer.add(state, item), key, BATCH)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, batch.data["reward"])
        return state, batch

    return step, _described(buffer.init(EXAMPLE))


def peer_step(flashbax: Any, kind: str) -> Step:
    """Return one step of flashbax's and its arguments."""
    make = flashbax.make_flat_buffer if kind == "flat" else flashbax.make_prioritised_flat_buffer
    device = {} if kind == "flat" else {"device": jax.default_backend()}
    buffer = make(max_length=CAPACITY, min_length=2, sample_batch_size=BATCH, **device)

    def step(state: Any, item: Any, key: jax.Array) -> Any:
        state = buffer.add(state, item)
        batch = buffer.sample(state, key)
        if kind != "flat":
            state = buffer.set_priorities(state, batch.indices, batch.experience.first["reward"])
        return state, batch

    return step, _described(buffer.init(jax.tree.map(jnp.asarray, EXAMPLE)))


def _described(state: Any) -> tuple[Any, ...]:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, EXAMPLE, jax.random.key(0)))


@contextmanager
def _no_stored_programs() -> Iterator[None]:
    stored = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX decides once whether it uses one
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", stored)
        compilation_cache.reset_cache()


def compile_seconds(step: Step) -> float:
    """Return the CPU seconds to trace, lower and compile a step from nothing."""
    fn, arguments = step
    jax.clear_caches()
    with _no_stored_programs():
        start = time.process_time()
        jax.jit(fn, donate_argnums=0).lower(*arguments).compile()
        return time.process_time() - start


def count_instructions(step: Step) -> dict[str, int]:
    """Return the equations traced, the instructions of the optimized HLO, and the fusions among them."""
    fn, arguments = step
    traced = jax.jit(fn, donate_argnums=0).trace(*arguments)
    with _no_stored_programs():
        text = traced.lower().compile().as_text()
    return {
        "equations": len(re.findall(r" = \w+[\[ ]", str(traced.jaxpr))),
        "instructions": len(re.findall(r"^\s+(?:ROOT )?%?[\w.-]+ = ", text, re.MULTILINE)),
        "fusions": len(re.findall(r" fusion\(", text)),
    }


def first_batches(rounds: int) -> list[dict[str, Any]]:
    """Rows for a uniform and a prioritized replay, and batches for JAX and NumPy."""
    report = []
    makers = {"uniform": (fbuf.Buffer, 3), "prioritized": (fbuf.prioritized, 5)}
    for name, (make, target) in makers.items():
        for form in ("jax", "numpy"):
            taken = []
            for _ in range(rounds):
                jax.clear_caches()
                with _no_stored_programs():
                    start = time.process_time()
                    replay = fbuf.Replay(make(CAPACITY), EXAMPLE)
                    replay.add(EXAMPLE)
                    jax.block_until_ready(replay.sample(BATCH, to=form))  # type: ignore[arg-type]
                    taken.append(time.process_time() - start)
            median = float(np.median(taken))
            report.append(row(FIRST, f"{name}, {form}", ours=spread(taken), ratio=median, target=f"<= {target}"))
    return report


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for steps and first batches."""
    return first_batches(1 if quick else 5) + steps(quick)


def steps(quick: bool) -> list[dict[str, Any]]:
    """2 pairs if `quick`, else 11, after one that is not counted."""
    flashbax = load_peer("flashbax")
    if isinstance(flashbax, Absent):
        return [absent_row(QUESTION, name, flashbax, target) for name, (_, _, target) in CASES.items()]
    report = []
    for name, (make, peer, target) in CASES.items():
        sides = {"fbuf": step_of(make()), "flashbax": peer_step(flashbax, peer)}
        taken: dict[str, list[float]] = {side: [] for side in sides}
        for number in range(3 if quick else 12):
            for side in list(sides) if number % 2 else list(sides)[::-1]:
                taken[side].append(compile_seconds(sides[side]))
        ours, theirs = taken["fbuf"][1:], taken["flashbax"][1:]
        counts = {side: count_instructions(step) for side, step in sides.items()}
        report.append(
            row(
                QUESTION,
                f"{name} / flashbax {peer}",
                ours=spread(ours),
                peer=spread(theirs),
                ratio=ratio(ours, theirs),
                target=target,
                note=f"least {min(ours):.2f} / {min(theirs):.2f} s; " + _compared(counts),
            )
        )
    return report


def _compared(counts: dict[str, dict[str, int]]) -> str:
    ours, theirs = counts.values()
    return ", ".join(f"{ours[what]} / {theirs[what]} {what}" for what in ours)


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))

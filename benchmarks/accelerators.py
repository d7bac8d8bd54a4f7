"""Compile steps for TPUs and an H100 that are only described, beside flashbax's, and write ACCELERATORS.md.

    python tests/accelerators/install.py FOLDER
    PYTHONPATH=.:FOLDER JAX_PLATFORMS=cpu python -m benchmarks.accelerators [--only TEXT] [--missing]

Each step is written to `results/accelerators.json` as it is compiled, ours and flashbax's; others keep what they were.
`--page` compiles nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from benchmarks import _report
from tests.accelerators.compiled import BATCH, LANES, Compiled, compile_program, devices, leaf
from tests.accelerators.steps import ROWS, STEPS, Step, faults

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "accelerators.json", HERE / "ACCELERATORS.md"
DEVICES = {
    ("v5e", 1): "One TPU v5e (16 GB)",
    ("v5p", 1): "One TPU v5p",
    ("v5p", 8): "Eight TPU v5p, figures of each",
    ("h100", 1): "One H100",
}
PEERS = {"uniform": "flat", "prioritized": "prioritised_flat", "windows": "trajectory"}
"""The buffers of flashbax that draw the same."""


class Found(NamedTuple):
    """What the compilers said of a step."""

    ours: Compiled
    flashbax: Compiled | str | None  # the compiler's error, if it refused; None: flashbax has no such step
    versions: dict[str, str]


def load(path: Path = RESULTS) -> dict[Step, Found]:
    """Return the steps that were compiled."""
    found = {}
    for entry in json.loads(path.read_text()) if path.exists() else []:
        peer = entry["flashbax"]
        peer = Compiled(**peer) if isinstance(peer, dict) else peer
        found[Step(**entry["step"])] = Found(Compiled(**entry["ours"]), peer, entry["versions"])
    return found


def save(found: dict[Step, Found], path: Path = RESULTS) -> None:
    """Write them in the order of `STEPS`; steps that are no longer listed are dropped."""
    entries = []
    for step in STEPS:
        if step in found:
            ours, peer, versions = found[step]
            peer = peer._asdict() if isinstance(peer, Compiled) else peer
            entries.append({"step": step._asdict(), "ours": ours._asdict(), "flashbax": peer, "versions": versions})
    path.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")


def compile_flashbax(step: Step) -> Compiled | str | None:
    """Compile the same step of flashbax: the same rows are added, and as many drawn."""
    from flashbax.buffers import flat_buffer, prioritised_flat_buffer, prioritised_trajectory_buffer, trajectory_buffer

    kind = PEERS.get(step.parts)
    if kind is None or step.number > 1 or step.draw_first:
        return None
    platform, found = devices(step.kind, 1)
    # It asks whether this process has the device, and else takes the CPU's tree.
    own = "gpu" if platform == "cuda" else platform
    for module in (prioritised_flat_buffer, prioritised_trajectory_buffer):
        module.validate_device = lambda device: True
    common: dict[str, Any] = {"sample_batch_size": BATCH, "add_batch_size": LANES}
    if kind == "flat":
        made: Any = flat_buffer.make_flat_buffer(step.capacity, 1, add_sequences=True, **common)
    elif kind == "prioritised_flat":
        make = prioritised_flat_buffer.make_prioritised_flat_buffer
        made = make(step.capacity, 1, add_sequences=True, device=own, **common)
    else:
        sizes = {"min_length_time_axis": 16, "max_length_time_axis": step.capacity // LANES}
        made = trajectory_buffer.make_trajectory_buffer(sample_sequence_length=16, period=1, **sizes, **common)

    def run(state: Any, rows: Any, key: Any, error: Any) -> Any:
        state = made.add(state, rows)
        batch = made.sample(state, key)
        if kind == "prioritised_flat":
            state = made.set_priorities(state, batch.indices, error)
        return state, batch

    row = ROWS[step.row]
    rows = jax.tree.map(lambda x: leaf((LANES, 4, *x.shape), x.dtype), row)
    state = jax.eval_shape(made.init, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), row))
    arguments = (state, rows, leaf((2,), jnp.uint32), leaf((BATCH,), jnp.float32))
    try:
        return compile_program(run, platform, arguments, (SingleDeviceSharding(found[0]),) * 4)
    except jax.errors.JaxRuntimeError as error:
        return str(error).split("\n")[0]


def compile_all(steps: Iterable[Step]) -> None:
    """Compile steps, ours and flashbax's, and store what is found, one by one."""
    jax.config.update("jax_enable_compilation_cache", False)  # it knows no devices that are only described
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu", "jax-cuda13-plugin", "flashbax")}
    for step in steps:
        print(f"{step.number} {step.kind}: {step.name}", file=sys.stderr, flush=True)
        found = Found(step.compile(), compile_flashbax(step), versions)
        print(*faults(step, found.ours), file=sys.stderr, flush=True)
        save(load() | {step: found})
        jax.clear_caches()


def megabytes(number: int) -> str:
    return f"{number / 1e6:,.2f}" if number < 10e6 else f"{number / 1e6:,.0f}"


def _cells(made: Compiled | str | None, gpu: bool) -> list[str]:
    if not isinstance(made, Compiled):
        return [made or "", "", "", ""]
    speed = str(made.waits) if gpu else "" if made.estimate is None else f"{made.estimate:,.0f}"
    return [f"{made.stored / made.state:.3f}", megabytes(made.temporary), f"{made.launches:,}", speed]


def page(found: dict[Step, Found]) -> str:
    """Return ACCELERATORS.md."""
    parts = [
        "# Compiled for TPUs and GPUs",
        "Nothing here ran on a device: the compilers of a TPU v5e, a v5p and an H100, which are only described to them, tell "
        "the bytes of a program, and its text what it does. `python -m benchmarks.accelerators` writes this page; "
        "`tests/accelerators` compiles the steps again, and fails where temporaries or operations grew by more than 5 %, or "
        "launches or waits at all. No step takes more temporaries than what it is given and returns, and 1 MB, on a TPU 6 MB; "
        "`Deduplicated` three times that, and callbacks on a v5p 64 MB more. Windows and stacks of frames and images are read "
        "in parts of their rows: of images a v5p's program holds a batch in another order too.",
        "A step extends by 4 rows of 8 lanes, draws 256 and, if there are priorities, sets theirs; the state is donated. "
        "*padded*: bytes of the state's arrays over those of its rows. *temporaries*: what the program allocates besides, in "
        "MB. *operations*: those of a TPU's program outside fusions; *launches*: the kernels of a GPU's. A loop of unknown "
        "length counts once. *estimate*: the TPU compiler's own, in us; empty where it gives none. *waits*: conditionals and "
        "loops of unknown length, for which a GPU waits for the host. flashbax adds and draws as many rows, without stacks or "
        "n-step returns, with the sum tree that it has for the device; empty where it has no such buffer. Of rows on the host "
        "or in files only the state on the device counts; a step of a data set only draws. An H100 that is only described "
        "lowers no callbacks (Unknown backend: 'gpu' requested), so such steps are compiled for TPUs only.",
    ]
    for device, title in DEVICES.items():
        mine = {step: entry for step, entry in found.items() if (step.kind, step.number) == device}
        gpu = device[0] == "h100"
        own = ["padded", "temporaries", *(("launches", "waits") if gpu else ("operations", "estimate"))]
        head = ["step", "state, MB", *own, *(f"flashbax: {name}" for name in own)]
        lines = [
            [step.name, megabytes(entry.ours.state), *_cells(entry.ours, gpu), *_cells(entry.flashbax, gpu)]
            for step, entry in mine.items()
        ]
        parts += [f"## {title}", _report.table(head, lines)]
    versions = {tuple(sorted(entry.versions.items())) for entry in found.values()}
    parts += ["Versions: " + "; ".join(", ".join(map(" ".join, one)) for one in sorted(versions)) + "."]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerators", description=__doc__)
    parser.add_argument("--only", default="", help="steps whose device or name contains this")
    parser.add_argument("--missing", action="store_true", help="steps that were not compiled before")
    parser.add_argument("--page", action="store_true", help="compile nothing")
    options = parser.parse_args(arguments)
    before = load()
    chosen = [step for step in STEPS if options.only in f"{step.number} {step.kind}: {step.name}"]
    compile_all([] if options.page else [step for step in chosen if not (options.missing and step in before)])
    PAGE.write_text(page(load()))


if __name__ == "__main__":
    main()

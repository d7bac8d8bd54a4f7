"""The steps that are compiled for described devices, and what each must reach.

CI compiles `TESTED`, the exhaustive tier `STEPS`, and benchmarks/ACCELERATORS.md lists them.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf import samplers, storages, views, writers
from tests.accelerators.compiled import Compiled, compile_step, leaf

REST = {
    "action": leaf((), jnp.int32),
    "reward": leaf((), jnp.float32),
    "terminated": leaf((), jnp.bool_),
    "truncated": leaf((), jnp.bool_),
}
ROWS: dict[str, dict[str, Any]] = {
    "frames": REST | {"obs": leaf((84, 84), jnp.uint8)},
    "images": REST | {"obs": leaf((64, 64, 3), jnp.uint8)},
    "images of 4": REST | {"obs": leaf((64, 64, 4), jnp.uint8)},
    "vectors": REST | {"obs": leaf((17,), jnp.float32), "action": leaf((6,), jnp.float32)},
    "floats": REST | {"obs": leaf((8,), jnp.float32)},
    "goals": REST | {"obs": {name: leaf((3,), jnp.float32) for name in ("achieved_goal", "desired_goal", "position")}},
}
"""Rows by name: frames of Atari, images of 3 and 4 channels, observations and actions of MuJoCo, 8 floats, goals of 3."""


def _reward(achieved: Any, goal: Any) -> Any:
    return -(jnp.sum(jnp.abs(achieved - goal)) > jnp.float32(0.05)).astype(jnp.float32)


STACKS = views.Transition(n_step=3, stack=4, autoreset="same_step")
PARTS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "prioritized": {"sampler": samplers.Prioritized()},
    "prioritized, stacks": {"sampler": samplers.Prioritized(), "view": STACKS},
    "prioritized, once": {"sampler": samplers.Prioritized(replace=False)},
    "prioritized, held": {"sampler": samplers.Prioritized(normalize="buffer", largest="held")},
    "windows": {"view": views.Sequence(16, autoreset="same_step")},
    "hindsight": {"view": views.Hindsight(views.Transition(autoreset="same_step"), _reward)},
    "epoch": {"sampler": samplers.Epoch()},
    "consume": {"sampler": samplers.Consume()},
    "fifo": {"sampler": samplers.Consume(order="fifo")},
    "ranked": {"sampler": samplers.Ranked()},
    "staleness": {"sampler": samplers.Staleness(8)},
    "top k": {"writer": writers.TopK("reward")},
    "reservoir": {"writer": writers.Reservoir()},
    "deduplicated": {"storage": storages.Deduplicated(("obs",), blocks=2**20)},
    "deduplicated, stacks": {"storage": storages.Deduplicated(("obs",), blocks=2**20), "view": STACKS},
    "compressed": {"storage": storages.Compressed(("obs",)), "sampler": samplers.Prioritized()},
    "host": {"storage": storages.Host()},
    "memmap": {"storage": storages.Memmap()},  # in a temporary folder
    "ragged": {"storage": storages.Ragged(maximum={"obs": (17,), "action": (6,)}), "sampler": samplers.Prioritized()},
    "data set": {"writer": writers.Frozen()},
}


class Step(NamedTuple):
    """Extend by 4 rows of 8 lanes, draw 256, and set their priorities if there are any."""

    kind: str  # v5e, v5p or h100
    number: int  # devices
    capacity: int  # of all devices
    row: str
    parts: str
    draw_first: bool = False
    draw: Literal["local", "global"] = "local"

    @property
    def name(self) -> str:
        """Return what is drawn how, without the device."""
        more = ", drawn first" if self.draw_first else ', draw="global"' if self.draw == "global" else ""
        return f"{self.parts}{more}, {self.capacity:,} {self.row}"

    def compile(self) -> Compiled:
        """Compile the step; of a data set, which never changes, the draw."""
        if self.parts == "data set":
            with tempfile.TemporaryDirectory() as folder:
                buffer, state = _data_set(Path(folder, "rows"), ROWS[self.row], self.capacity)
                return compile_step(self.kind, buffer, ROWS[self.row], state=state)
        storage = storages.Device(None if self.kind == "h100" else "tiles")
        buffer = fbuf.Buffer(self.capacity, lanes=8, **{"storage": storage, **PARTS[self.parts]})
        row = ROWS[self.row]
        return compile_step(self.kind, buffer, row, self.number, draw_first=self.draw_first, draw=self.draw)


def _data_set(path: Path, row: dict[str, Any], number: int) -> tuple[fbuf.Buffer, Any]:
    arrays = {name: np.zeros((number, *x.shape), x.dtype) for name, x in row.items()}
    fbuf.interop.from_arrays(arrays).save(path)
    return fbuf.datasets.open(path)


KINDS = (("v5e", 1), ("v5p", 1), ("h100", 1))
SMALL, LARGE = 125_000, 1_000_000
SAMPLERS = tuple(name for name, parts in PARTS.items() if parts.keys() <= {"sampler"})
WINDOWS = ("uniform", "prioritized, stacks", "windows")
ON_ONE = (
    *(
        (capacity, row, parts)
        for capacity, row in itertools.product((SMALL, LARGE), ("frames", "vectors"))
        for parts in WINDOWS
    ),
    (SMALL, "images", "windows"),
    (SMALL, "images of 4", "prioritized, stacks"),
    *((LARGE, "floats", parts) for parts in SAMPLERS),
    *((LARGE, "floats", parts) for parts in ("top k", "reservoir")),
    (LARGE, "goals", "hindsight"),
    (LARGE, "frames", "deduplicated"),
    (LARGE, "frames", "deduplicated, stacks"),
)
ON_HOST = (
    (SMALL, "frames", "compressed"),
    *((SMALL, "vectors", parts) for parts in ("host", "memmap", "ragged")),
    (1_000, "vectors", "data set"),
)
"""Rows outside the device, which programs read and write by callbacks."""
DRAWN_FIRST = ("uniform", "prioritized", "epoch", "consume", "ranked", "staleness", "windows")
STEPS = (
    *(Step(*kind, *case) for kind in KINDS for case in ON_ONE),
    *(Step("h100", 1, LARGE, "vectors", parts, draw_first=True) for parts in DRAWN_FIRST),
    *(Step(kind, 1, *case) for kind in ("v5e", "v5p") for case in ON_HOST),
    *(Step("v5p", 8, LARGE, row, "uniform") for row in ("frames", "vectors")),
    Step("v5p", 8, LARGE, "frames", "prioritized, stacks"),
    *(Step("v5p", 8, LARGE, "vectors", "prioritized", draw=draw) for draw in ("local", "global")),
)
_QUICK = ("uniform", "windows")
TESTED = tuple(
    step
    for step in STEPS
    if (step.kind == "v5e" and step.row in ("frames", "images", "vectors") and step.parts in _QUICK)
    or (step.kind == "h100" and step.capacity == LARGE and not step.parts.startswith(("deduplicated", "hindsight")))
    or step == Step("v5e", 1, LARGE, "frames", "prioritized, stacks")
    or (step.kind == "v5e" and step.parts in ("compressed", "host", "ragged", "data set"))
    or (step.number == 8 and step.row == "vectors" and step.draw == "local")
)
"""Programs that compile in seconds, for each kind of device."""

TIMES = {"deduplicated": 3}
"""Most temporaries over what is given and returned, by parts; else 1."""
ALWAYS = 2**20
"""Bytes of them besides."""
FOR_TPUS = 5 * 2**20
"""More of them on a TPU, whose compiler takes kilobytes for each operation."""
EXCEPTIONS = {("v5p", parts): 64 * 2**20 for parts in {parts for _, _, parts in ON_HOST}}
"""More of them by device and parts: a program with callbacks takes 64 MiB more on a v5p than on a v5e."""
PADDED = {"frames": 1.05, "images": 1.05, "images of 4": 1.05, "deduplicated": 1.13}
"""Bytes of the arrays over those of the rows, by rows or parts; else 1.1. TPUs store 49 ids of a row as 56, 36 words as 40."""


def faults(step: Step, made: Compiled) -> list[str]:
    """Return what a compiled step does that none may do, whatever the page says."""
    always = ALWAYS + (0 if step.kind == "h100" else FOR_TPUS) + EXCEPTIONS.get((step.kind, step.parts), 0)
    parts = step.parts.partition(",")[0]
    most = TIMES.get(parts, 1) * made.passed + always  # less than a copy of the rows takes
    padded = PADDED.get(parts, PADDED.get(step.row, 1.1))
    given = min(made.state, made.stored)  # a scalar that the step does not read is not given
    rules = {
        f"{made.aliased:,} of {given:,} bytes of the state are written in place": made.aliased >= given,
        f"{made.stored:,} bytes are stored for {made.state:,}": made.stored <= made.state * padded + 2**20,
        f"{made.temporary:,} bytes of temporaries; expected {most:,}": made.temporary <= most,
    }
    return [text for text, holds in rules.items() if not holds]

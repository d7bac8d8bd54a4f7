"""Does a donated write cost the same in a buffer of 10^7 rows as in one of 10^4?

Rows of 64 bytes. Buffers are full before the measurement, so every page is touched and every write
replaces rows, closes anchors and opens others. Each write is measured twice: inside a scan, where
nothing but the write remains, and as one jitted call, which is what a Python loop pays. Expected: flat
(growth exponent < 0.05); a copy of any leaf that grows with the capacity shows as an exponent near 1.
Priorities are a tree of 5 levels at 10^4 rows and 8 at 10^7: inside a scan that alone is about 0.04, and
over fewer decades (`--quick`) it comes out higher.

flashbax is there for information: its `add` under the same jit and the same scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fbuf
from benchmarks._harness import Absent, exponent, interleave, load_peer, row, spread

SCANNED = "Donated writes of 64-byte rows inside a scan: growth exponent from {} to {} rows"
CALLED = "Donated writes of 64-byte rows, one jitted call each: growth exponent from {} to {} rows"

LANES, ROWS = 8, 256
Tree = Any


class Uniform:
    """One stream of rows `float32[16]`, drawn uniformly; flashbax's item buffer."""

    name = "Uniform/Row"
    lanes = None
    example = np.zeros(16, np.float32)

    @staticmethod
    def buffer(capacity: int) -> fbuf.Buffer:
        return fbuf.Buffer(capacity)

    @staticmethod
    def flashbax(peer: Any, capacity: int) -> Any:
        return peer.make_item_buffer(capacity, 1, 1, add_sequences=True, add_batches=False)


class Prioritized:
    """8 lanes of steps of 64 bytes, prioritized transitions; flashbax's prioritised flat buffer."""

    name = f"Prioritized/Transition, {LANES} lanes"
    lanes = LANES
    example = {
        "obs": np.zeros(54, np.uint8),
        "action": np.int32(0),
        "reward": np.float32(0),
        "terminated": np.bool_(False),
        "truncated": np.bool_(False),
    }

    @staticmethod
    def buffer(capacity: int) -> fbuf.Buffer:
        return fbuf.prioritized(capacity, view=fbuf.views.Transition(n_step=3, autoreset="same_step"), lanes=LANES)

    @staticmethod
    def flashbax(peer: Any, capacity: int) -> Any:
        return peer.make_prioritised_flat_buffer(capacity, 2 * LANES, 1, add_sequences=True, add_batch_size=LANES)


def _rows(kind: Any, *axes: int) -> Tree:
    """Random rows `[*axes, item]`; an episode ends every 100 steps or so."""
    random = np.random.default_rng(0)

    def leaf(example: Any) -> np.ndarray:
        shape = (*axes, *np.shape(example))
        if example.dtype == np.bool_:
            return random.random(shape) < 0.005
        return random.integers(0, 100, shape).astype(example.dtype)

    return jax.tree.map(leaf, kind.example)


def _ours(kind: Any, capacity: int) -> tuple[Callable[..., Any], Tree]:
    """`(state, rows) -> state` of `[N, item]` or `[N, E, item]`, and a full state."""
    buffer = kind.buffer(capacity)
    state = buffer.init(kind.example)
    lead = 1 if kind.lanes is None else kind.lanes
    size = min(capacity, 100_000) // lead
    rows = jax.device_put(_rows(kind, size) if kind.lanes is None else _rows(kind, size, lead))
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for _ in range(-(-capacity // (size * lead))):
        state = extend(state, rows)
    return buffer.extend, jax.block_until_ready(state)


def _theirs(peer: Any, kind: Any, capacity: int) -> tuple[Callable[..., Any], Tree]:
    """The same of flashbax. Its pages are touched but it is not filled: that takes minutes at 10^7 rows."""
    buffer = kind.flashbax(peer, capacity)
    state = jax.tree.map(lambda x: jnp.array(x, copy=True), buffer.init(kind.example))
    if kind.lanes is None:
        return buffer.add, jax.block_until_ready(state)

    def add(state: Tree, rows: Tree) -> Tree:
        return buffer.add(state, jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows))

    return add, jax.block_until_ready(state)


def _scanned(write: Callable[..., Any]) -> Callable[..., Any]:
    def run(state: Tree, rows: Tree) -> Tree:
        return lax.scan(lambda state, rows: (write(state, rows), None), state, rows)[0]

    return jax.jit(run, donate_argnums=0)


def _thunk(run: Callable[..., Any], holder: list[Any], rows: Tree) -> Callable[[], Any]:
    """Carries the donated state from call to call."""

    def thunk() -> Any:
        holder[0] = run(holder[0], rows)
        return holder[0]

    return thunk


def measure(kind: Any, sizes: Sequence[int], rounds: int, peer: Any, work: int = 16_384) -> list[dict[str, Any]]:
    """Rows of the report for one kind of buffer.

    Args:
      kind: `Uniform` or `Prioritized`.
      sizes: Capacities, the smallest first.
      rounds: Measurements of each.
      peer: flashbax, or `Absent`.
      work: Rows written in one measurement inside a scan.
    """
    sides: dict[tuple[str, int], tuple[Callable[..., Any], list[Any]]] = {}
    for size in sizes:
        write, state = _ours(kind, size)
        sides["ours", size] = write, [state]
        if not isinstance(peer, Absent):
            write, state = _theirs(peer, kind, size)
            sides["peer", size] = write, [state]
    report = []
    lanes = kind.lanes or 1
    for verb, number in (("extend", ROWS // lanes), ("add", 1)):
        steps = max(work // (number * lanes), 2)
        for question, scanned in ((SCANNED, True), (CALLED, False)):
            axes = (steps, number) if scanned else (number,)
            rows = jax.device_put(_rows(kind, *axes, *(() if kind.lanes is None else (lanes,))))
            thunks = {}
            for (side, size), (write, holder) in sides.items():
                run = _scanned(write) if scanned else jax.jit(write, donate_argnums=0)
                thunks[f"{side} {size}"] = _thunk(run, holder, rows)
            calls = 1 if scanned else 32
            timings = interleave(thunks, rounds=rounds, calls=calls)
            of: dict[str, dict[int, list[float]]] = {}
            for side, size in sides:
                seconds = timings[f"{side} {size}"]
                of.setdefault(side, {})[size] = [t / steps for t in seconds] if scanned else seconds
            note = f"{number * lanes} rows a write; times at {sizes[-1]:,} rows"
            note += f"; ours at {sizes[0]:,}: {spread(of['ours'][sizes[0]])}"
            if "peer" in of:
                note += f"; flashbax's exponent: {exponent(of['peer']).median:.3f}"
            report.append(
                row(
                    question.format(f"{sizes[0]:,}", f"{sizes[-1]:,}"),
                    f"{verb}, {kind.name}",
                    ours=spread(of["ours"][sizes[-1]]),
                    peer=spread(of["peer"][sizes[-1]]) if "peer" in of else "absent",
                    ratio=exponent(of["ours"]),
                    target="< 0.05",
                    note=note,
                )
            )
    return report


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for 10^4 to 10^7 rows (`quick`: 10^5)."""
    peer = load_peer("flashbax")
    sizes = [10**n for n in range(4, 6 if quick else 8)]
    report = [r for kind in (Uniform, Prioritized) for r in measure(kind, sizes, 2 if quick else 15, peer)]
    return sorted(report, key=lambda r: r["question"] != report[0]["question"])


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))

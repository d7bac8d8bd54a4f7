"""What does sampling without replacement cost, beside a permutation of all rows?

The peer is what one line of JAX does, `jax.random.permutation(key, n)[:B]`: no two rows of a batch are alike, and all n are
put in order for it. (Kept for an epoch it would be a stored order of n numbers; `samplers.Epoch` stores two words.) Ours is
`Epoch.draw`: the next B places of the epoch's order, their slots and probabilities, without reading the rows, which other
benchmarks measure. `Uniform`, with replacement, stands beside both for scale. Every batch of ours is checked: no slot comes
twice in an epoch. Expected: a thousand times as fast at a million rows, and the same time for any number of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fbuf
from benchmarks._harness import exponent, interleave, ratio, row, spread
from fbuf._core.slots import Ring
from fbuf._interfaces.sampler import AnchorSet

PERMUTATION = "A batch without replacement: time of jax.random.permutation over ours"
GROWTH = "A batch without replacement, {:,} to {:,} rows: growth exponent"

BATCH = 256


def filled(sampler: Any, rows: int, lanes: int) -> tuple[Any, AnchorSet]:
    """The sampler's state, and what it may know, of a full buffer whose rows are all anchors."""
    geometry = fbuf.Buffer(capacity=rows, lanes=lanes).geometry
    held = jnp.full((lanes,), geometry.length, jnp.int32)
    ring = Ring(cursor=jnp.zeros_like(held), size=held, lap=jnp.full((lanes,), 2, jnp.uint32))
    state = sampler.init(geometry, True)
    if isinstance(sampler, fbuf.samplers.Epoch):
        state = dataclasses.replace(state, held=jnp.copy(held))
    return state, AnchorSet(geometry, ring, held, None)


def drawn(sampler: Any, rows: int, steps: int, lanes: int = 1, scanned: bool = True) -> Callable[[], jax.Array]:
    """A thunk of `steps` batches in one scan, or one dispatched after the other; it carries the state on, gives the slots."""
    state, anchors = filled(sampler, rows, lanes)
    token = jnp.zeros((), jnp.int32)

    def one(state: Any, key: jax.Array) -> tuple[Any, Any]:
        state, draw = sampler.draw(state, key, BATCH, anchors, {}, token)
        return state, (draw.slot, draw.probability)

    run = jax.jit(lambda s, keys: lax.scan(one, s, keys) if scanned else one(s, keys), donate_argnums=0)
    keys = jax.random.split(jax.random.key(0), steps)
    held, single = [jax.tree.map(jnp.copy, state)], list(keys)

    def thunk() -> jax.Array:
        for key in [keys] if scanned else single:
            held[0], (slot, _) = run(held[0], key)
        return slot

    return thunk


def permuted(rows: int) -> Callable[[], jax.Array]:
    """A thunk of the peer's batch."""
    run = jax.jit(lambda key: jax.random.permutation(key, rows)[:BATCH])
    keys, calls = jax.random.split(jax.random.key(0), 256), 0

    def thunk() -> jax.Array:
        nonlocal calls
        calls += 1
        return run(keys[calls % 256])

    return thunk


def check(slots: jax.Array, rows: int) -> None:
    """Raises unless an epoch gave each slot once, in an order that is not theirs."""
    slots = np.asarray(slots).reshape(-1)[:rows]
    if not np.array_equal(np.sort(slots), np.arange(rows)) or np.array_equal(slots, np.arange(rows)):
        raise AssertionError(f"an epoch of {rows} rows is not every slot once, in random order")


def compare(rows: int, rounds: int, judged: bool = True) -> list[dict[str, Any]]:
    """A batch in a scan of one epoch and one dispatched, against the peer's dispatched: it would be no faster in a scan."""
    epoch, uniform = fbuf.samplers.Epoch(), fbuf.samplers.Uniform()
    steps = {True: -(-rows // BATCH), False: 64}
    thunks = {
        (name, scanned): drawn(sampler, rows, steps[scanned], scanned=scanned)
        for name, sampler in (("epoch", epoch), ("uniform", uniform))
        for scanned in (True, False)
    }
    check(thunks["epoch", True](), rows)
    named = {f"{name} {scanned}": thunk for (name, scanned), thunk in thunks.items()}
    timings = interleave(named | {"permutation": permuted(rows)}, rounds=rounds, warmup=1)
    report = []
    for scanned, number in steps.items():
        ours, replaced = ([t / number for t in timings[f"{name} {scanned}"]] for name in ("epoch", "uniform"))
        report.append(
            row(
                PERMUTATION,
                f"{rows:,} rows, B={BATCH}, {'in a scan' if scanned else 'dispatched'}",
                ours=spread(ours),
                peer=spread(timings["permutation"]),
                ratio=ratio(timings["permutation"], ours),
                target=">= 1000" if judged else None,
                note=f"Uniform, with replacement: {spread(replaced)}",
            )
        )
    return report


def growth(sizes: tuple[int, ...], steps: int, rounds: int, lanes: tuple[int, ...]) -> list[dict[str, Any]]:
    """How the time of a batch in a scan grows with the rows."""
    report = []
    for number in lanes:
        thunks = {str(n): drawn(fbuf.samplers.Epoch(), n // 8 * 8, steps, lanes=number) for n in sizes}
        timings = interleave(thunks, rounds=rounds)
        report.append(
            row(
                GROWTH.format(sizes[0], sizes[-1]),
                f"B={BATCH}, in a scan, {number} lane{'s' if number > 1 else ''}",
                ours=spread([t / steps for t in timings[str(sizes[-1])]]),
                ratio=exponent({n: timings[str(n)] for n in sizes}),
                target="<= 0.05",
            )
        )
    return report


def main(quick: bool) -> list[dict[str, Any]]:
    """A million rows, 10^5 if `quick`; growth up to 10^7 rows, 10^5."""
    if quick:
        return compare(10**5, 2) + growth((10**4, 10**5), 100, 2, lanes=(8,))
    return compare(10**6, 15) + growth((10**4, 10**5, 10**6, 10**7), 1000, 21, lanes=(1, 8))


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))

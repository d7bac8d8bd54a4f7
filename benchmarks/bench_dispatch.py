"""What does one eager call of a verb cost, and does it touch more than it must?

Four questions. Programs: how many compiled programs an eager verb runs, counted in JAX's own profile
(expected: one, whatever storage, sampler and view; conversions of Python arguments would show). Copies:
which arrays of rows are elsewhere after an eager `sample` or `update_priority` (expected: none). Growth:
both take the same time from 10^4 to 10^6 rows of 64 bytes (expected: exponent < 0.05; `update_priority`
donated, since an undonated one copies the priorities, though never the rows). Time: the price of a call
in a small buffer beside flashbax's functions under the user's own jit, for information: eager ones run
operation by operation. Checks: what an eager method costs above its jitted call (expected: 15 us).
"""

from __future__ import annotations

import collections
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from benchmarks._harness import Absent, absent_row, exponent, interleave, load_peer, ratio, row, spread

PROGRAMS = "Compiled programs run by one eager verb"
COPIES = "Arrays of rows that an eager verb moved"
GROWTH = "Eager verbs, 10^4 to {} rows of 64 bytes: growth exponent"
CHECKS = "CPU time of an eager method above that of the same method jitted, in the calling thread, us"
TIME = "One call in a buffer of 4,096 rows, 8 lanes: time of flashbax's, jitted, over ours"

LANES, STEPS, BATCH = 8, 4, 32
EXAMPLE = {
    "obs": np.zeros(54, np.uint8),
    "action": np.int32(0),
    "reward": np.float32(0),
    "terminated": np.bool_(False),
    "truncated": np.bool_(False),
}
_STEPS: dict[str, Any] = {
    "sampler": fbuf.samplers.Prioritized(),
    "view": fbuf.views.Transition(n_step=3, stack=4, autoreset="same_step"),
    "lanes": LANES,
}
KINDS: dict[str, dict[str, Any]] = {
    "Device, Uniform/Row": {"lanes": LANES},
    "Device, Prioritized/Transition": _STEPS,
    "Compressed, Prioritized/Transition": {**_STEPS, "storage": fbuf.storages.Compressed(keys=("obs",))},
    "Device, Uniform/Row, no lanes": {},
}
_extend = jax.jit(fbuf.Buffer.extend, static_argnums=0, donate_argnums=1)
_sample = jax.jit(fbuf.Buffer.sample, static_argnums=(0, 3), donate_argnums=1)
_update_priority = jax.jit(fbuf.Buffer.update_priority, static_argnums=0, donate_argnums=1)


def rows_of(*axes: int) -> dict[str, jax.Array]:
    """Rows `[*axes, item]` of one endless episode."""
    random = np.random.default_rng(0)
    shapes = {name: (*axes, *np.shape(leaf)) for name, leaf in EXAMPLE.items()}
    return {
        name: jnp.zeros(shapes[name], bool)
        if leaf.dtype == np.bool_
        else jnp.asarray(random.integers(0, 9, shapes[name]).astype(leaf.dtype))
        for name, leaf in EXAMPLE.items()
    }


def lead(buffer: fbuf.Buffer) -> tuple[int, ...]:
    """Axes of a row."""
    return () if buffer.lanes is None else (buffer.lanes,)


def filled(capacity: int, **parts: Any) -> tuple[fbuf.Buffer, Any]:
    """A full buffer."""
    buffer = fbuf.Buffer(capacity=capacity, **parts)
    size = min(capacity, 80_000) // (buffer.lanes or 1)
    rows, state = rows_of(size, *lead(buffer)), buffer.init(EXAMPLE)
    for _ in range(-(-capacity // (size * (buffer.lanes or 1)))):
        state = _extend(buffer, state, rows)
    return buffer, jax.block_until_ready(state)


# --------------------------------------------------------------------------------------- programs


def programs(thunk: Callable[[], Any], calls: int = 2) -> float:
    """Compiled programs that one call of `thunk` runs, from JAX's profile of `calls` calls.

    A version of JAX may name executions otherwise, or write no profile that can be read: ask `can_count` first.
    """
    jax.block_until_ready(thunk())
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # Python's own calls are most of a profile
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(calls):
                jax.block_until_ready(thunk())
        found = [jax.profiler.ProfileData.from_file(str(p)) for p in Path(folder).rglob("*.xplane.pb")]
        names = collections.Counter(
            event.name for data in found for plane in data.planes for line in plane.lines for event in line.events
        )
    # One such event an execution: its name has changed between versions and differs between backends.
    counts = [
        n for name, n in names.items() if "Executable::ExecuteHelper" in name or name.endswith("::EnqueueExecution")
    ]
    return max(counts, default=0) / calls


def can_count() -> Absent | None:
    """None if `programs` counts right what is known; else why not."""
    one, x = jax.jit(lambda x: x + jnp.float32(1)), jnp.zeros(4, jnp.float32)
    try:
        seen = programs(lambda: one(one(one(x)))), programs(lambda: one(x))
    except Exception as error:  # an older JAX
        return Absent("jax.profiler", f"{type(error).__name__}: {error}")
    return None if seen == (3, 1) else Absent("jax.profiler", f"counts {seen} where 3 and 1 ran")


def verbs_of(buffer: fbuf.Buffer, state: Any) -> dict[str, Callable[[], Any]]:
    """Every verb that returns arrays, as an eager call without donation."""
    rows, single, key = rows_of(STEPS, *lead(buffer)), rows_of(*lead(buffer)), jax.random.key(0)
    _, batch = buffer.sample(state, key, BATCH)
    error, reward = jnp.ones(BATCH, jnp.float32), jnp.ones(BATCH, jnp.float32)
    verbs: dict[str, Callable[[], Any]] = {
        "add": lambda: buffer.add(state, single),
        "extend": lambda: buffer.extend(state, rows),
        "sample": lambda: buffer.sample(state, key, BATCH),
        "peek": lambda: buffer.peek(state, key, BATCH),
        "update_priority": lambda: buffer.update_priority(state, batch.index, error),
        "update_rows": lambda: buffer.update_rows(state, batch.index, {"reward": reward}),
        "get": lambda: buffer.get(state, batch.index),
        "last": lambda: buffer.rows(state, last=4),
        "rows": lambda: buffer.rows(state),
        "clear": lambda: buffer.clear(state),
    }
    if not buffer.sampler.prioritized:
        del verbs["update_priority"]
    return verbs


def count_programs(capacity: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each kind of buffer: the verb that runs most programs decides."""
    unable = can_count()
    if unable is not None:
        return [absent_row(PROGRAMS, "all", unable, target="<= 1")]
    report = []
    for name in kinds:
        buffer, state = filled(capacity, **KINDS[name])
        counts = {verb: programs(call) for verb, call in verbs_of(buffer, state).items()}
        note = ", ".join(f"{verb} {n:g}" for verb, n in counts.items())
        report.append(
            row(PROGRAMS, name, ours=max(counts.values()), ratio=max(counts.values()), target="<= 1", note=note)
        )
    return report


# ----------------------------------------------------------------------------------------- copies


def moved(buffer: fbuf.Buffer, state: Any) -> dict[str, int]:
    """Leaves of the rows that lie elsewhere after an eager, undonated verb."""
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.rows)]
    key, after = jax.random.key(0), {}
    after["sample"], batch = buffer.sample(state, key, BATCH)
    if buffer.sampler.prioritized:
        after["update_priority"] = buffer.update_priority(state, batch.index, jnp.ones(BATCH, jnp.float32))
    jax.block_until_ready(after)
    return {
        verb: sum(p != x.unsafe_buffer_pointer() for p, x in zip(before, jax.tree.leaves(new.rows), strict=True))
        for verb, new in after.items()
    }


def find_copies(capacity: int) -> list[dict[str, Any]]:
    """A row for each kind of buffer; `extend` without donation is the control that must copy."""
    report = []
    for name, parts in KINDS.items():
        buffer, state = filled(capacity, **parts)
        counts = moved(buffer, state)
        leaves = jax.tree.leaves(buffer.extend(state, rows_of(STEPS, *lead(buffer))).rows)
        before = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.rows)}
        control = sum(x.unsafe_buffer_pointer() not in before for x in leaves)
        if not control:
            raise AssertionError("bench_dispatch: an undonated `extend` moved nothing; the pointers prove nothing")
        note = ", ".join(f"{v} {n} of {len(leaves)}" for v, n in counts.items()) + f"; undonated extend {control}"
        report.append(
            row(COPIES, name, ours=sum(counts.values()), ratio=sum(counts.values()), target="<= 0", note=note)
        )
    return report


# ----------------------------------------------------------------------------------------- growth


def _carried(run: Callable[..., Any], state: Any, *args: Any) -> Callable[[], Any]:
    """Carries a donated state from call to call."""
    held = [state]

    def thunk() -> Any:
        held[0] = run(held[0], *args)
        return held[0]

    return thunk


def growth(sizes: Sequence[int], kinds: Sequence[str], rounds: int, calls: int = 32) -> list[dict[str, Any]]:
    """Rows for `sample` (as it is) and `update_priority` (donated, and as it is)."""
    question = GROWTH.format(f"{sizes[-1]:,}")
    key, error = jax.random.key(0), jnp.ones(BATCH, jnp.float32)
    report = []
    for name in kinds:
        thunks: dict[str, dict[int, Callable[[], Any]]] = collections.defaultdict(dict)
        for size in sizes:
            buffer, state = filled(size, **KINDS[name])
            thunks["sample"][size] = functools.partial(buffer.sample, state, key, BATCH)
            if buffer.sampler.prioritized:
                _, batch = buffer.sample(state, key, BATCH)
                update = functools.partial(buffer.update_priority, state, batch.index, error)
                thunks["update_priority, copies the priorities"][size] = update
                donated = functools.partial(_update_priority, buffer)
                own = filled(size, **KINDS[name])[1]
                thunks["update_priority, donated"][size] = _carried(donated, own, batch.index, error)
        for verb, by_size in thunks.items():
            timings = interleave({str(n): t for n, t in by_size.items()}, rounds=rounds, calls=calls)
            times = {n: timings[str(n)] for n in by_size}
            first, last = spread(times[sizes[0]]), spread(times[sizes[-1]])
            report.append(
                row(
                    question,
                    f"{verb}; {name}",
                    ours=last,
                    ratio=exponent(times),
                    target=None if "copies" in verb else "< 0.05",
                    note=f"time at the largest; at the smallest {first}",
                )
            )
    return report


# ----------------------------------------------------------------------------------------- checks


def checks(rounds: int) -> list[dict[str, Any]]:
    """A row for each method of a small buffer without donation; rows as JAX arrays and as NumPy's."""
    buffer, state = filled(2000, sampler=fbuf.samplers.Prioritized())
    key, several, one = jax.random.key(0), rows_of(256), rows_of()
    index, errors = buffer.peek(state, key, BATCH).index, np.ones(BATCH, np.float32)
    calls: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "add": (buffer.add, (one,)),
        "extend": (buffer.extend, (several,)),
        "update_priority": (buffer.update_priority, (index, errors)),
        "sample": (functools.partial(buffer.sample, batch_size=BATCH), (key,)),
        "size": (buffer.size, ()),
        "stats": (buffer.stats, ()),
    }
    on_host = {f"{name}, NumPy rows": (method, jax.device_get(args)) for name, (method, args) in [*calls.items()][:2]}
    report = []
    for name, (method, args) in (calls | on_host).items():
        jitted = jax.jit(buffer.peek, static_argnums=2) if name == "sample" else jax.jit(method)
        args_jitted = (key, BATCH) if name == "sample" else args
        sides = {
            "eager": functools.partial(method, state, *args),
            "jitted": functools.partial(jitted, state, *args_jitted),
        }
        # Both run the same kernels. XLA's other threads spin while they wait, which varies by more than the difference.
        timings = interleave(sides, rounds=rounds, warmup=10, calls=60, clock=time.thread_time)
        more = 1e6 * float(np.median(np.subtract(timings["eager"], timings["jitted"])))
        report.append(
            row(CHECKS, name, ours=spread(timings["eager"]), peer=spread(timings["jitted"]), ratio=more, target="<= 15")
        )
    return report


# ------------------------------------------------------------------------------------------- time


def _flashbax(peer: Any, capacity: int, prioritized: bool) -> dict[str, Callable[[], Any]]:
    """flashbax's verbs as its documentation has them, under jit, writes donated."""
    rows = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), rows_of(STEPS, LANES))
    sizes = {"max_length": capacity, "min_length": BATCH, "sample_batch_size": BATCH, "add_sequences": True}
    make = peer.make_prioritised_flat_buffer if prioritized else peer.make_flat_buffer
    buffer = make(**sizes, add_batch_size=LANES)
    init = lambda: jax.tree.map(lambda x: jnp.array(x, copy=True), buffer.init(EXAMPLE))  # noqa: E731
    add, sample = jax.jit(buffer.add, donate_argnums=0), jax.jit(buffer.sample)
    state, key = init(), jax.random.key(0)
    for _ in range(2 * BATCH):  # enough to draw from
        state = add(state, rows)
    verbs = {"extend": _carried(add, init(), rows), "sample": lambda: sample(state, key)}
    if prioritized:
        index, priority = sample(state, key).indices, jnp.ones(BATCH, jnp.float32)
        update = jax.jit(buffer.set_priorities, donate_argnums=0)
        verbs["update_priority"] = _carried(update, jax.tree.map(jnp.copy, state), index, priority)
    return verbs


def _ours(capacity: int, parts: dict[str, Any]) -> dict[str, dict[str, Callable[[], Any]]]:
    """Our verbs as eager methods, and under the user's jit with the state donated."""
    buffer, state = filled(capacity, **parts)
    rows, key, error = rows_of(STEPS, *lead(buffer)), jax.random.key(0), jnp.ones(BATCH, jnp.float32)

    def own() -> Any:  # what donates or writes has a state of its own
        return filled(capacity, **parts)[1]

    held = [own()]

    def sampled() -> Any:
        held[0], batch = _sample(buffer, held[0], key, BATCH)
        return batch

    verbs = {
        "extend": {
            "eager": _carried(buffer.extend, own(), rows),
            "jitted": _carried(functools.partial(_extend, buffer), own(), rows),
        },
        "sample": {"eager": lambda: buffer.sample(state, key, BATCH), "jitted": sampled},
    }
    if buffer.sampler.prioritized:
        index = buffer.sample(state, key, BATCH)[1].index
        update = functools.partial(_update_priority, buffer)
        verbs["update_priority"] = {
            "eager": lambda: buffer.update_priority(state, index, error),
            "jitted": _carried(update, own(), index, error),
        }
    return verbs


def times(capacity: int, kinds: Sequence[str], rounds: int, peer: Any) -> list[dict[str, Any]]:
    """Rows for every verb of the named kinds of buffer, eager and jitted; no targets."""
    report = []
    for name in kinds:
        parts, prioritized = KINDS[name], "sampler" in KINDS[name]
        theirs = {} if isinstance(peer, Absent) else _flashbax(peer, capacity, prioritized)
        for verb, ways in _ours(capacity, parts).items():
            thunks = ways | ({"flashbax": theirs[verb]} if verb in theirs else {})
            timings = interleave(thunks, rounds=rounds, calls=16)
            for way in ways:
                note = "the buffer is copied" if (verb, way) == ("extend", "eager") else ""
                known = "flashbax" in timings
                report.append(
                    row(
                        TIME,
                        f"{verb}, {way}; {name}",
                        ours=spread(timings[way]),
                        peer=spread(timings["flashbax"]) if known else "absent",
                        ratio=ratio(timings["flashbax"], timings[way]) if known else None,
                        note=note,
                    )
                )
    return report


def main(quick: bool) -> list[dict[str, Any]]:
    """Rows for all four questions."""
    plain, steps, host, single = KINDS
    sizes, rounds = ((10**4, 10**5), 2) if quick else ((10**4, 10**5, 10**6), 25)
    report = count_programs(4096, (single,) if quick else tuple(KINDS))
    report += find_copies(4096)
    report += checks(2 if quick else 11)
    report += growth(sizes, (steps,) if quick else (plain, steps), rounds)
    return report + times(4096, (steps,) if quick else (plain, steps, host), rounds, load_peer("flashbax"))


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))

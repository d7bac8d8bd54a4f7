"""What does one buffer over a mesh cost, beside a buffer on one device?

A step adds 4 rows to each of 16 lanes, draws B rows, and sets their priorities. All sides have 2^17 slots, and 16 floats a row.
At D = 1 the peer is the unsharded step; at D = 8 it is the unsharded step and a program of as many collectives that do nothing
else. Other rows have other peers: the collectives in a program that also takes and returns the arrays of the step, as it
must; and the same steps of eight buffers that know nothing of one another, in one program, and the same empty collectives.

Eight devices are fake: threads of one CPU, which share its cores. They pay the fixed cost of a step eight times, and a
collective is a rendezvous of threads. Ratios at D = 8 say how much the program does, not how it scales.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks._harness import interleave, ratio, row, spread

ONE = "A step of a sharded buffer on one device: its time over the unsharded step"
MANY = "A step on 8 fake devices: its time over the unsharded step and {} equal empty collectives"
PASSED = "A step on 8 fake devices: its time over the unsharded step and {} empty collectives with the step's arrays"
APART = "A step on 8 fake devices: its time over 8 buffers that are drawn apart, and {} empty collectives"
CAPACITY, LANES, ROWS, WIDTH = 2**17, 16, 4, 16


def measure(quick: bool) -> list[dict[str, Any]]:
    """Rows, in a process with eight devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import fbuf
    from fbuf.sharded import Sharded
    from fbuf.sharded._state import block_of

    buffer = fbuf.prioritized(CAPACITY, lanes=LANES)
    example = {"obs": jnp.zeros(WIDTH), "reward": jnp.float32(0)}

    def mesh(number: int) -> Any:
        return jax.make_mesh((number,), ("data",), devices=jax.devices()[:number], axis_types=(AxisType.Auto,))

    def step_of(replay: Any, size: int) -> Callable[..., Any]:
        def step(state: Any, rows: Any, key: Any) -> Any:
            state, batch = replay.sample(replay.extend(state, rows), key, size)
            error = batch.weight * batch.data["reward"] + 1.0
            return replay.update_priority(state, batch.index, error), jnp.sum(batch.data["obs"], axis=1)

        return step

    def running(step: Callable[..., Any], replay: Any, devices: Any) -> tuple[Callable[[], Any], str]:
        """A thunk that steps a full buffer on, and its compiled program."""

        def put(x: Any, spec: Any) -> Any:
            return x if devices is None else jax.device_put(x, NamedSharding(devices, spec))

        rows = {n: put(jnp.ones((ROWS, LANES, *x.shape), x.dtype), P(None, "data")) for n, x in example.items()}
        full = {n: jnp.ones((CAPACITY // LANES, LANES, *x.shape), x.dtype) for n, x in example.items()}
        held, key = [replay.extend(replay.init(example), full)], put(jax.random.key(0), P())
        program = jax.jit(step, donate_argnums=0).lower(held[0], rows, key).compile()

        def thunk() -> Any:
            held[0], out = program(held[0], rows, key)
            return out

        return thunk, program.as_text()

    def collect(x: Any, number: int) -> Any:
        for _ in range(number):
            x = x + 0.0 * jnp.sum(lax.psum(jnp.broadcast_to(x[0], (8, 4)), "data"))
        return x

    def empty(number: int) -> Callable[[], Any]:
        """A thunk of so many collectives of four floats a device, one after the other."""

        split = NamedSharding(mesh(8), P("data"))
        run = jax.jit(
            jax.shard_map(lambda x: collect(x, number), mesh=mesh(8), in_specs=P("data"), out_specs=P("data"))
        )
        x = jax.device_put(np.zeros(8, np.float32), split)
        return lambda: run(x)

    report = []
    for size, target in ((256, "<= 1.10"), (4096, "<= 1.25"))[: 1 if quick else 2]:
        one, many = Sharded(buffer, mesh(1)), Sharded(buffer, mesh(8))

        def apart(state: Any, rows: Any, key: Any, many: Sharded = many, size: int = size) -> Any:
            key = jax.random.fold_in(key, lax.axis_index("data"))
            own, out = step_of(many.shard, size // 8)(state.local(), rows, key)
            return block_of(8, own), out

        specs = {"in_specs": (P("data"), P(None, "data"), P()), "out_specs": P("data")}
        eight, text = running(step_of(many, size), many, mesh(8))
        # Those of the while loop that sends rows of other devices do not run.
        number = sum("all-reduce(" in line for line in text.partition("\nENTRY ")[2].splitlines())

        def passed(state: Any, rows: Any, key: Any, number: int = number, size: int = size) -> Any:
            return state, collect(jnp.broadcast_to(rows["reward"][0, :1], (size // 8,)), number)

        thunks = {
            "unsharded": running(step_of(buffer, size), buffer, None)[0],
            "one": running(step_of(one, size), one, mesh(1))[0],
            "eight": eight,
            "apart": running(jax.shard_map(apart, mesh=mesh(8), **specs), many, mesh(8))[0],
            "passed": running(jax.shard_map(passed, mesh=mesh(8), **specs), many, mesh(8))[0],
            "empty": empty(number),
        }
        times = interleave(thunks, rounds=5 if quick else 41, calls=5, clock=time.process_time)

        def with_empty(name: str, which: str = "empty", times: Any = times) -> list[float]:
            return [a + b for a, b in zip(times[name], times[which], strict=True)]

        for question, ours, peer, bound in (
            (ONE, times["one"], times["unsharded"], target),
            (MANY.format(number), times["eight"], with_empty("unsharded"), "<= 1.5"),
            (PASSED.format(number), times["eight"], with_empty("unsharded", "passed"), None),
            (APART.format(number), times["eight"], with_empty("apart"), None),
        ):
            report.append(
                row(
                    question,
                    f"B={size:,}",
                    ours=spread(ours),
                    peer=spread(peer),
                    ratio=ratio(ours, peer),
                    target=bound,
                    note=""
                    if question == ONE
                    else f"CPU time; devices share cores; collectives {spread(times['empty'])}",
                )
            )
    return report


def main(quick: bool) -> list[dict[str, Any]]:
    """The rows of `measure`, from a fresh process: the number of devices is fixed when JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    code = f"import json; from benchmarks import bench_sharded; print(json.dumps(bench_sharded.measure({quick})))"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise RuntimeError(f"bench_sharded ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    from benchmarks._harness import table

    print(table(main(quick=False)))

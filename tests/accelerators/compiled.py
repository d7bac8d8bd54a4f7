"""Compile steps of buffers for a TPU or GPU that is only described, and count what the program does."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import fbuf
from fbuf._core.packed_leaf import is_packed
from fbuf.sharded import Sharded
from fbuf.storages._host_storage import HostStorage

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

H100 = Path(__file__).parent / "h100.txtpb"
TPUS = {("v5e", 1): "v5e:1x1", ("v5e", 8): "v5e:2x4", ("v5p", 1): "v5p:2x2x1", ("v5p", 8): "v5p:2x2x2"}
BATCH, LANES = 256, 8


class Compiled(NamedTuple):
    """What the compiler tells about a step on one device: bytes, and kernels or operations that it launches."""

    state: int  # bytes of the state, as the user's shapes have them
    stored: int  # bytes of the state's arguments, with padding
    aliased: int
    temporary: int
    passed: int  # bytes of the other arguments and results
    launches: int
    waits: int  # conditionals and loops of unknown length, for which a GPU waits for the host
    estimate: float | None  # microseconds, by the compiler's own model; GPUs have none


def devices(kind: str, number: int) -> tuple[str, list[Any]]:
    """Return the platform and devices; skip where its compiler is not installed."""
    if kind == "h100":
        _needs("jax_plugins.xla_cuda13")
        shape = f"1x1x{number}"
        made = topologies.get_topology_desc("", "cuda", topology=shape, target_config=H100.read_text())
        return "cuda", list(made.devices)[:number]
    _needs("libtpu")
    name = TPUS[kind, number]
    bounds: dict[str, Any] = {"chips_per_host_bounds": (1, 1, 1)} if name.endswith(":1x1") else {}
    return "tpu", list(topologies.get_topology_desc(name, "tpu", **bounds).devices)[:number]


def _needs(module: str) -> None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{module} is not installed: python tests/accelerators/install.py FOLDER; PYTHONPATH=FOLDER")


def leaf(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def bytes_of(tree: Any) -> int:
    """Return the bytes of all leaves in the user's shapes."""
    leaves = jax.tree.leaves(tree, is_leaf=is_packed)
    return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in leaves)


def compile_step(
    kind: str,
    buffer: fbuf.Buffer,
    row: Mapping[str, Any],
    number: int = 1,
    *,
    state: Any = None,
    draw_first: bool = False,
    draw: Literal["local", "global"] = "local",
) -> Compiled:
    """Compile extend, sample and, with priorities, their update, as one donated step.

    Args:
      number: Devices; more than one share the buffer.
      state: None: of `init`. A data set that is opened; the step then draws only.
      draw_first: Sample, then extend.
      draw: See `Sharded`.
    """
    platform, found = devices(kind, number)
    spread: Any = SingleDeviceSharding(found[0])
    everywhere, steps = spread, buffer
    if number > 1:
        mesh = Mesh(np.array(found), ("data",))
        spread, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
        steps = Sharded(buffer, mesh, draw=draw)
    writes = state is None

    def step(state: Any, rows: Any, key: Any, error: Any) -> Any:
        if writes and not draw_first:
            state = steps.extend(state, rows)
        state, batch = steps.sample(state, key, BATCH)
        if writes and draw_first:
            state = steps.extend(state, rows)
        if buffer.sampler.prioritized:
            state = steps.update_priority(state, batch.index, error)
        return state, batch

    if state is None:
        on_host = isinstance(buffer.storage, HostStorage) and any(buffer.storage.host_keys(row))
        example = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), row)
        state = steps.init(example) if on_host else jax.eval_shape(steps.init, row)
    rows = jax.tree.map(lambda x: leaf((4, LANES, *x.shape), x.dtype), row if writes else {})
    given = (rows, leaf((2,), jnp.uint32), leaf((BATCH,), jnp.float32))
    return compile_program(step, platform, (state, *given), (spread, *(everywhere for _ in given)), number)


def compile_program(
    step: Callable[..., Any], platform: str, arguments: tuple[Any, ...], shardings: tuple[Any, ...], number: int = 1
) -> Compiled:
    """Compile `step(state, ...) -> (state, ...)` with the state donated; `arguments` are arrays or their shapes."""

    def placed(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    state, *given = arguments
    traced = jax.jit(step, donate_argnums=0).trace(*map(placed, arguments, shardings))
    compiled = traced.lower(lowering_platforms=(platform,)).compile()
    memory: Any = compiled.memory_analysis()
    others = bytes_of(given)
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    seconds = (compiled.cost_analysis() or {}).get("optimal_seconds", -1.0) if platform == "tpu" else -1.0
    return Compiled(
        state=bytes_of(state) // number,
        stored=memory.argument_size_in_bytes - others,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        passed=others + made,
        launches=launches(compiled.as_text()),
        waits=waits(compiled.as_text()),
        estimate=seconds * 1e6 if seconds >= 0 else None,
    )


_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "iota",
}
_WAITING = {"conditional", "while"}
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")


def waits(program: str) -> int:
    """Return the conditionals and the loops of unknown length in the text of a program."""
    found = [line for line in program.splitlines() if (made := _OPERATION.match(line)) and made[1] in _WAITING]
    return sum("known_trip_count" not in line for line in found)


def launches(program: str) -> int:
    """Return the kernels that one call launches; a loop of unknown length counts once, and so does a conditional."""
    computations: dict[str, list[tuple[str, str]]] = {}
    entry, current = "", ""
    for line in program.splitlines():
        if line.rstrip().endswith("{") and "->" in line and not line.startswith(" "):
            found = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            assert found is not None
            current = found[2]
            computations[current] = []
            entry = current if found[1] else entry
        elif line.startswith("}"):
            current = ""
        elif current and (operation := _OPERATION.match(line)):
            computations[current].append((operation[1], line))

    def count(name: str) -> int:
        total = 0
        for operation, line in computations.get(name, ()):
            if operation in _FREE or operation.endswith("-done"):
                continue
            if operation == "while":
                trips = re.search(r"known_trip_count[^\d]*(\d+)", line)
                total += sum(map(count, _CALLED.findall(line))) * (int(trips[1]) if trips else 1)
            elif operation == "call":
                total += sum(map(count, _CALLED.findall(line)))
            else:
                total += 1
        return total

    return count(entry)

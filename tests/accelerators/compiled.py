"""Compile steps of buffers for a TPU or GPU that is only described, and count what the program does."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import fbuf
from fbuf._core.packed_leaf import is_packed
from fbuf.sharded import Sharded

H100 = Path(__file__).parent / "h100.txtpb"
TPUS = {("v5e", 1): "v5e:1x1", ("v5e", 8): "v5e:2x4", ("v5p", 1): "v5p:2x2x1", ("v5p", 8): "v5p:2x2x2"}
BATCH, LANES = 256, 8


class Compiled(NamedTuple):
    """What the compiler tells about a step: bytes, and kernels or operations that it launches."""

    state: int  # bytes of the state, as the user's shapes have them
    stored: int  # bytes of the state's arguments, with padding
    aliased: int
    temporary: int
    passed: int  # bytes of the other arguments and results
    launches: int
    waits: int  # conditionals and loops of unknown length, for which a GPU waits for the host


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
    kind: str, buffer: Any, row: Mapping[str, Any], number: int = 1, *, draw_first: bool = False
) -> Compiled:
    """Compile extend, sample and, with priorities, their update, as one donated step; `draw_first`: sample, then extend."""
    platform, found = devices(kind, number)
    spread: Any = SingleDeviceSharding(found[0])
    everywhere = spread
    if number > 1:
        mesh = Mesh(np.array(found), ("data",))
        spread, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
        buffer = Sharded(buffer, mesh)
    plain: Any = buffer.shard if number > 1 else buffer

    def step(state: Any, rows: Any, key: Any, error: Any) -> Any:
        if not draw_first:
            state = buffer.extend(state, rows)
        state, batch = buffer.sample(state, key, BATCH)
        if draw_first:
            state = buffer.extend(state, rows)
        if plain.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, error)
        return state, batch

    def placed(tree: Any, sharding: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    host = any(plain.storage.host_keys(row)) if isinstance(plain.storage, fbuf.storages.Compressed) else False
    example = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), row)
    state = buffer.init(example) if host else jax.eval_shape(buffer.init, row)
    state = jax.tree.map(lambda x: leaf(x.shape, x.dtype), state)
    rows = jax.tree.map(lambda x: leaf((4, LANES, *x.shape), x.dtype), row)
    given = (rows, leaf((2,), jnp.uint32), leaf((BATCH,), jnp.float32))
    arguments = (placed(state, spread), placed(given[0], everywhere), *placed(given[1:], everywhere))
    lowered = jax.jit(step, donate_argnums=0).trace(*arguments).lower(lowering_platforms=(platform,))
    compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    share, others = bytes_of(state) // number, bytes_of(given)
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        state=share,
        stored=memory.argument_size_in_bytes - others,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        passed=others + made,
        launches=launches(compiled.as_text()),
        waits=waits(compiled.as_text()),
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

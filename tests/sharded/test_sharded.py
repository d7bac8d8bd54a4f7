"""A sharded buffer on one device, and some cases on eight in a process of their own; each tier its own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.sharded import Sharded
from tests.support.processes import devices, run_python
from tests.support.refusals import raises
from tests.support.sharded import buffer_of, example, fill, mesh_of, rows_and_masks, run
from tests.support.tables import by_tier, checks
from tests.support.trees import same
from tests.support.two_processes import check_killed, check_two_processes


def test_arrays_of_all_shards_are_split() -> None:
    sharded = Sharded(buffer_of("prioritized"), mesh_of(1))
    state = sharded.init(example())
    assert all(leaf.ndim and leaf.size for leaf in jax.tree.leaves(state))
    split = jax.sharding.NamedSharding(sharded.mesh, jax.sharding.PartitionSpec("data"))
    assert all(leaf.sharding.is_equivalent_to(split, leaf.ndim) for leaf in jax.tree.leaves(state))


ROWS, MIXTURE, SAVED = (f"eight_devices_{name}" for name in ("rows", "mixture", "saved"))
PROCESSES = by_tier(
    ("quick", ["eight_devices", ROWS, MIXTURE], "0/1"),
    more=[("more", files, "0/1") for files in (["eight_devices"], [SAVED], [ROWS, MIXTURE])],
    exhaustive=[
        *(("exhaustive", ["eight_devices"], f"{part}/3") for part in range(3)),
        *(("exhaustive", [SAVED], f"{part}/3") for part in range(3)),
        *(("exhaustive", [file], "0/1") for file in (ROWS, MIXTURE)),
    ],
    ids=lambda tier, files, share: f"{tier}-{files[0]}-{share}",
)


@pytest.mark.parametrize(("tier", "files", "share"), PROCESSES)
def test_eight_devices(tier: str, files: list[str], share: str) -> None:
    run(tier, *files, share=share)


def batches(buffer):
    """What a few steps return, without the shard of each row."""

    @jax.jit
    def step(state, rows, key):
        state, batch = buffer.sample(buffer.extend(state, rows), key, 32)
        state = buffer.update_priority(state, batch.index, jnp.float32(1000) * batch.probability)
        shown = (batch.data, batch.index.slot, batch.index.generation, batch.probability, batch.weight, batch.mask)
        return buffer.cut(state), (shown, buffer.stats(state), buffer.size(state), buffer.can_sample(state))

    rows, state, out = {name: leaf[:2] for name, leaf in rows_and_masks()[0].items()}, fill(buffer), []
    for turn in range(3):
        state, found = step(state, rows, jax.random.key(turn))
        out.append(jax.device_get(found))
    return out


@pytest.mark.more
@pytest.mark.optimized
@pytest.mark.parametrize("draw", ["local", "global"])
def test_one_shard_equals_the_unsharded_buffer(draw):
    buffer = buffer_of("buffer")
    got, want = batches(Sharded(buffer, mesh_of(1), draw=draw)), batches(buffer)
    for found in got:
        assert found[1].pop("balance") == 1.0
    same(got, want)


@pytest.mark.more
def test_foreign_rows_are_refused_with_one_shard_too():
    sharded = Sharded(fbuf.prioritized(8), mesh_of(1))
    state = sharded.extend(sharded.init({"id": np.int32(0)}), {"id": np.arange(8, dtype=np.int32)})
    index = sharded.peek(state, jax.random.key(0), 4).index
    after = sharded.update_priority(state, dataclasses.replace(index, shard=jnp.array([0, 1, -1, 2])), jnp.full(4, 9.0))
    assert int(sharded.stats(after)["refused_out_of_range"]) == 3
    masked = sharded.peek(sharded.init({"id": np.int32(0)}), jax.random.key(0), 4).index
    after = sharded.update_priority(state, masked, jnp.full(4, 9.0))
    assert int(sharded.stats(after)["refused_out_of_range"]) == 0


@pytest.mark.more
def test_states_of_other_buffers_are_refused():
    kinds = fbuf.prioritized(64), fbuf.prioritized(128), fbuf.Buffer(64), fbuf.prioritized(64, lanes=4)
    buffers = [Sharded(buffer, mesh_of(1)) for buffer in kinds]
    states = [buffer.init({"id": np.int32(0)}) for buffer in buffers]
    for one in range(len(kinds)):
        for other, buffer in enumerate(buffers):
            if one == other:
                buffer.size(states[one])
                continue
            for call in (
                buffer.size,
                lambda state, b=buffer: b.sample(state, jax.random.key(0), 4),
            ):
                raises(ValueError, "made by another buffer", call, states[one])
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), states[0])
    raises(ValueError, "leading axis of 2", lambda: buffers[0].size(stacked))


@pytest.mark.exhaustive
@pytest.mark.optimized
def test_eight_devices_learn_as_one_does() -> None:
    code = "import runpy; print(runpy.run_path('tests/programs/sharded_dqn.py')['main']())"
    eight, one = (float(run_python(code, **devices(number)).stdout.split()[-1]) for number in (8, 1))
    assert min(eight, one) > 0.85 and abs(eight - one) < 0.1, (eight, one)


test_two_processes = checks(
    more=[(check_killed, [1])],
    exhaustive=[(check_two_processes, [("local", "Host"), ("global", "Device")]), (check_killed, range(2, 102))],
)

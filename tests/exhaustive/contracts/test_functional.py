"""Further cases of functional: see `tests/contracts/test_functional.py`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import fbuf
from tests.more.contracts.test_functional import test_grad_around_sample, test_no_method_calls_back_to_the_host  # noqa: F401
from tests.support import functional
from tests.support.processes import devices, run_python
from tests.support.trees import close, same


@pytest.fixture(params=[lambda loss: loss], ids=["plain"])
def wrap(request):
    return request.param


@pytest.mark.parametrize("name", functional.BUFFERS)
def test_vmap_over_states(name):
    buffer, number = functional.BUFFERS[name], 3
    new = [functional.rows(3, 30 + i) for i in range(number)]
    keys = jax.random.split(functional.KEY, number)
    single = jax.jit(functools.partial(functional.step, buffer))
    states = [buffer.extend(functional.filled(name), functional.rows(1 + i % 2, i)) for i in range(number)]
    stacked, many_rows = (jax.tree.map(lambda *x: jnp.stack(x), *trees) for trees in (states, new))
    after, batches = jax.jit(jax.vmap(functools.partial(functional.step, buffer)))(stacked, keys, many_rows)
    for i in range(number):
        one = jax.tree.map(lambda x, i=i: x[i], (after, batches))
        alone = single(states[i], keys[i], new[i])
        same(one[1].index, alone[1].index)
        close(one, alone, rtol=1e-5)


@pytest.mark.parametrize("name", ["uniform-row", "deduplicated"])
@pytest.mark.parametrize("check", [functional.check_arguments_unchanged, functional.check_laps])
def test_other_buffers_are_functional(check, name):
    check(name)


@pytest.mark.optimized
def test_an_exported_step_with_blocks_gives_the_same():
    buffer, state, raw = (
        functional.BUFFERS["deduplicated"],
        functional.filled("deduplicated"),
        jax.random.key_data(functional.KEY),
    )
    run = jax.jit(functools.partial(functional.step, buffer))
    again = export.deserialize(export.export(run)(state, raw, functional.rows(2)).serialize())
    close(again.call(state, raw, functional.rows(2)), run(state, raw, functional.rows(2)), rtol=1e-6)


_SHARDED = """
import functools, jax, jax.numpy as jnp, numpy as np, fbuf
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
try:
    shard_map = functools.partial(jax.shard_map, check_vma=False)
except AttributeError:
    from jax.experimental.shard_map import shard_map
    shard_map = functools.partial(shard_map, check_rep=False)

assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
storage = fbuf.storages.Deduplicated(keys=("x",), block=(4, 4), blocks=64)
buffer = fbuf.Buffer(32, storage=storage, sampler=fbuf.samplers.Prioritized())

def step(state, key, rows):
    state, batch = buffer.sample(buffer.extend(state, rows), key, 8)
    return buffer.update_priority(state, batch.index, batch.data["n"].astype(jnp.float32)), batch

def local(state, key, rows):
    one = jax.tree.map(lambda x: x[0], (state, key, rows))
    return jax.tree.map(lambda x: x[None], step(*one))

def rows_of(turn, device):
    rng = np.random.default_rng(100 * turn + device)
    return {"x": rng.integers(0, 256, (5, 8, 8)).astype(np.uint8), "n": np.arange(5, dtype=np.int32) + 5 * turn}

whole = NamedSharding(mesh, P("d"))
stack = lambda *x: jnp.stack(x)
example = {"x": np.zeros((8, 8), np.uint8), "n": np.int32(0)}
single = [buffer.init(example) for _ in range(4)]
state = jax.device_put(jax.tree.map(stack, *single), whole)
sharded = jax.jit(shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P("d")), donate_argnums=0)
alone = jax.jit(step)
for turn in range(6):
    keys = [jax.random.key_data(jax.random.key(10 * turn + d)) for d in range(4)]
    rows = [rows_of(turn, d) for d in range(4)]
    state, batch = sharded(state, jax.device_put(jnp.stack(keys), whole), jax.device_put(jax.tree.map(stack, *rows), whole))
    for d in range(4):
        single[d], want = alone(single[d], keys[d], rows[d])
        got = jax.tree.map(lambda x: np.asarray(x)[d], (state.rows, batch.data, batch.mask, batch.index))
        jax.tree.map(np.testing.assert_array_equal, got, jax.device_get((single[d].rows, want.data, want.mask, want.index)))
assert all(int(buffer.stats(s)["retired_rows"]) > 0 for s in single)
assert len(state.rows.tables[0].words.sharding.device_set) == 4
print("done")
"""


def test_four_devices_hold_a_buffer_each():
    assert run_python(_SHARDED, **devices(8)).stdout.strip() == "done"


def test_vmap_over_keys():
    keys = jax.random.split(functional.KEY, 3)
    many = jax.vmap(lambda key: functional.RICH.peek(functional.filled(), key, functional.BATCH))(keys)
    for i in range(3):
        one, alone = (
            jax.tree.map(lambda x, i=i: x[i], many),
            functional.RICH.peek(functional.filled(), keys[i], functional.BATCH),
        )
        same(one.index, alone.index)
        same(one.data["obs"], alone.data["obs"])


def test_grad_through_rows_that_were_stored():
    """Device rows are plain arrays: what is read depends on what was written."""
    buffer = fbuf.Buffer(capacity=8)

    def total(x):
        state = buffer.extend(buffer.init({"x": x[0]}), {"x": x})
        return jnp.sum(buffer.sample(state, functional.KEY, 16)[1].data["x"])

    slope = jax.jit(jax.grad(total))(jnp.arange(4, dtype=jnp.float32))
    assert float(jnp.sum(slope)) == 16.0 and float(jnp.min(slope)) >= 0.0
    many = jax.vmap(jax.grad(total))(jnp.ones((2, 4), jnp.float32))
    np.testing.assert_array_equal(many, jnp.stack([slope, slope]))


@pytest.fixture(params=["prioritized-transition", "uniform-row"])
def name(request):
    return request.param

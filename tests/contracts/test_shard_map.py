"""A buffer inside `jax.shard_map(check_vma=True)`."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.support.combinations import BATCH, EXAMPLE, REFUSED, SAMPLERS, VIEWS, make, rows_of
from tests.support.refusals import raises
from tests.support.tables import checks, pairwise
from tests.support.trees import same


def step(buffer, state, rows, key):
    state = buffer.extend(state, rows)
    state, batch = buffer.sample(state, key, BATCH)
    found = [buffer.stats(state), buffer.can_sample(state), buffer.get(state, batch.index), buffer.rows(state, last=2)]
    if buffer.sampler.prioritized:
        state = buffer.update_priority(state, batch.index, jnp.arange(1.0, BATCH + 1))
        found.append(jnp.nan_to_num(buffer.priorities(state)))
        if not getattr(buffer.sampler, "rebuilds", ""):
            state = buffer.set(state, rebuild=True)
    state = buffer.cut(buffer.update_rows(state, batch.index, {"reward": batch.probability}))
    return state, (batch, found, buffer.rows(state))


def mapped(buffer):
    """The step on each shard of a mesh of one device: types are checked as on many."""

    def local(*args):
        one = step(buffer, *jax.tree.map(lambda x: x[0], args))
        return jax.tree.map(lambda x: x[None], one)

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=True)


def arguments(buffer):
    return buffer.init(EXAMPLE), rows_of(np.random.default_rng(0), 5), jax.random.key(0)


def check_types(*combination):
    buffer = make(*combination)
    stacked = jax.tree.map(lambda x: jnp.asarray(x)[None], arguments(buffer))
    jax.eval_shape(mapped(buffer), *stacked)


def check_values(*combination):
    buffer = make(*combination)
    given = arguments(buffer)
    got = jax.jit(mapped(buffer))(*jax.tree.map(lambda x: jnp.asarray(x)[None], given))
    same(jax.tree.map(lambda x: x[0], got), jax.jit(lambda *args: step(buffer, *args))(*given))


def test_methods_work_inside_shard_map():
    check_types("Deduplicated", "Prioritized", "Transition")


@pytest.mark.parametrize("varies", [True, False])
def test_a_state_made_of_a_row_that_varies_can_be_scanned(varies):
    buffer = make("Device", "Prioritized", "Transition")

    def local(rows):
        example = jax.tree.map(lambda x: x[0, 0], rows) if varies else EXAMPLE
        scan = partial(jax.lax.scan, lambda state, _: (buffer.extend(state, rows), None), length=3)
        return scan(buffer.init(example))[0]

    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    if not varies:
        return raises(
            TypeError, "applying `jax.lax.pcast", jax.eval_shape, mapped, rows_of(np.random.default_rng(0), 5)
        )
    state = jax.jit(mapped)(rows_of(np.random.default_rng(0), 5))
    assert int(buffer.size(state)) == 3 * 5 * 2


VIEW = itertools.cycle(VIEWS)
TYPES = [
    (("Device", "Deduplicated")[number % 2], sampler, "Episode" if "episodes" in sampler else view)
    for number, (sampler, view) in enumerate(zip((name for name in SAMPLERS if "host" not in name), VIEW, strict=False))
]
HERE = [s for s in SAMPLERS if "host" not in s]
TYPED = pairwise(("Device", "Deduplicated"), HERE, VIEWS, refused=lambda storage, *case: case in REFUSED)
test_types_and_values = checks(
    more=[
        (check_types, TYPES),
        (check_types, [("Device", "Prioritized", "Row", "TopK"), ("Device", "Prioritized", "Row", "Reservoir")]),
        (check_values, [("Device", "Epoch", "Transition"), ("Device", "Prioritized(replace=False)", "Transition")]),
        (check_values, [("Deduplicated", "Prioritized", "Transition")]),
    ],
    exhaustive=[(check_types, TYPED)],
)

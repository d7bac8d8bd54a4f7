import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import fbuf
from tests.support.functional import BATCH, BUFFERS, CAPACITY, EXAMPLE, KEY, RICH, build, filled, methods, rows, step
from tests.support.processes import run_python
from tests.support.tables import one_of
from tests.support.trees import close, same

pytestmark = pytest.mark.more


def loss(weight, state, key):
    state, batch = RICH.sample(state, key, BATCH)
    error = weight * batch.data["obs"].astype(jnp.float32).mean(axis=(1, 2)) - batch.data["reward"]
    return jnp.mean(batch.weight * error**2), (state, batch, error)


wrap = one_of(jax.checkpoint)


def test_grad_around_sample(wrap):
    weight = jnp.float32(0.5)
    gradient = jax.jit(jax.grad(wrap(loss), has_aux=True))
    slope, (state, batch, error) = gradient(weight, filled(), KEY)
    alone = RICH.peek(filled(), KEY, BATCH)
    same(batch.index, alone.index)
    feature = alone.data["obs"].astype(jnp.float32).mean(axis=(1, 2))
    want = jnp.mean(2 * alone.weight * (weight * feature - alone.data["reward"]) * feature)
    np.testing.assert_allclose(slope, want, rtol=1e-5)
    after = RICH.update_priority(state, batch.index, error)
    assert float(after.sampler.max_priority) >= float(jnp.max(jnp.abs(error)))


@pytest.mark.optimized
@pytest.mark.parametrize("crossing", ["state", "buffer"])
def test_export_round_trip(crossing):
    raw = jax.random.key_data(KEY)
    if crossing == "state":
        exported = export.export(jax.jit(functools.partial(step, RICH)))(filled(), raw, rows(2))
        again = export.deserialize(exported.serialize())
        state, batch = again.call(filled(), raw, rows(2))
    else:
        exported = export.export(jax.jit(step))(RICH, filled(), raw, rows(2))
        again = export.deserialize(exported.serialize())
        state, batch = again.call(build(), filled(), raw, rows(2))
        with pytest.raises(ValueError, match="tree"):
            again.call(dataclasses.replace(RICH, capacity=2 * CAPACITY), filled(), raw, rows(2))
    assert isinstance(state, fbuf.BufferState) and isinstance(batch, fbuf.Sample)
    want = jax.jit(functools.partial(step, RICH))(filled(), raw, rows(2))
    close((state, batch), want, rtol=1e-6)


_CACHED = """
import sys, jax, numpy as np, fbuf
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))
for storage in fbuf.storages.Device(), fbuf.storages.Deduplicated(keys=("x",)):
    buffer = fbuf.Buffer(16, storage=storage, sampler=fbuf.samplers.Prioritized())
    def step(state, key, rows):
        state, batch = buffer.sample(buffer.extend(state, rows), key, 4)
        return buffer.update_priority(state, batch.index, batch.weight), batch
    state = jax.jit(buffer.init)({"x": np.zeros((8, 8), np.uint8)})
    jax.jit(step)(state, jax.random.key(0), {"x": np.ones((3, 8, 8), np.uint8)})
    fbuf.Replay(buffer, {"x": np.zeros((8, 8), np.uint8)}).compile(4, to="numpy", progress=False)
print(events.count("cache_hits"), events.count("cache_misses"))
"""


@pytest.mark.optimized
def test_the_persistent_cache_works_for_storages_without_callbacks(tmp_path):
    def run():
        hits, misses = map(int, run_python(_CACHED, tmp_path).stdout.split())
        return hits, misses, {p.name for p in tmp_path.iterdir() if p.name.endswith("-cache")}

    _, missed, first = run()
    assert missed and sum("step" in name for name in first) == 2
    hits, misses, second = run()
    assert hits >= missed and misses == 0 and second == first


@pytest.mark.optimized
@pytest.mark.parametrize(
    "settings", [{"storage": BUFFERS["deduplicated"].storage}, {"prefetch": 1, "batch_size": BATCH}]
)
def test_steps_with_blocks_or_prefetch_are_exported(settings):
    buffer, raw = dataclasses.replace(RICH, **settings), jax.random.key_data(KEY)
    run = jax.jit(functools.partial(step, buffer))
    state, _ = run(buffer.extend(buffer.init(EXAMPLE), rows(7)), raw, rows(2))
    again = export.deserialize(export.export(run)(state, raw, rows(2)).serialize())
    close(again.call(state, raw, rows(2)), run(state, raw, rows(2)), rtol=1e-6)


name = one_of("deduplicated")


def test_no_method_calls_back_to_the_host(name):
    state = jax.eval_shape(BUFFERS[name].init, EXAMPLE)
    for method, call in methods(BUFFERS[name]).items():
        text = jax.jit(call).lower(state).as_text()
        assert "callback" not in text, method
    control = jax.jit(lambda x: jax.pure_callback(np.sin, x, x)).lower(jax.ShapeDtypeStruct((), np.float32))
    assert "callback" in control.as_text()

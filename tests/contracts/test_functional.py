"""Methods are pure functions, a state is a pytree that JAX transforms, and a buffer is a value."""

import copy
import dataclasses
import functools
import json
import pickle
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.extend.core import jaxpr_as_fun

import fbuf
from fbuf._core.component import from_config, to_config
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, DataSet, Deduplicated, Device, Host, Ragged, Zstd
from tests.support import functional as support
from tests.support.combinations import SAMPLERS, STORAGES, VIEWS, WRITERS
from tests.support.functional import BATCH, BUFFERS, CAPACITY, EXAMPLE, KEY, RICH, build, filled, methods, rows, step
from tests.support.paths import ROOT
from tests.support.processes import run_python
from tests.support.refusals import raises
from tests.support.tables import by_tier, checks, one_of
from tests.support.trees import changed, close, same

SAVED = [
    *support.BUFFERS.values(),
    fbuf.Buffer(capacity=10, storage=Host(keys=("obs", ("next", "obs"))), episode_end=("done",)),
    fbuf.Buffer(capacity=10, storage=Compressed(keys=("obs",)), sampler=Prioritized(normalize=None, stratified=False)),
    fbuf.Buffer(capacity=10, storage=Deduplicated(keys=("obs",), block={"obs": (4, 8)}, blocks={"obs": 96})),
    fbuf.Buffer(capacity=10, storage=Ragged(maximum={"obs": (4, 8)}, codec=Zstd(3))),
]


def compiled(caplog):
    """Return how many programs were compiled since the last call."""
    number = caplog.text.count("Finished XLA compilation")
    caplog.clear()
    return number


def test_an_eager_method_is_pure_and_compiles_one_program(caplog):
    buffer, single = dataclasses.replace(support.RICH, capacity=26), fbuf.Buffer(27)  # of no other test
    programs, stream, numbers, mask = {}, single.init(jnp.zeros(5)), jnp.ones((13, 5)), jnp.ones(13, jnp.bool_)
    state, _ = support.filled(buffer), support.methods(buffer)  # compiles what their arguments take
    with jax.log_compiles():
        support.check_pure(buffer, after=lambda method: programs.update({method: compiled(caplog)}))
        assert programs == dict.fromkeys(programs, 1) | {"peek": 0}  # it is `sample`
        for options in ({}, {"mask": mask}):
            single.extend(stream, numbers, **options)
            assert compiled(caplog) == 1
        for seed in range(3):
            new = rows(3, seed)
            compiled(caplog)
            state, _ = buffer.sample(buffer.extend(state, new), support.KEY, support.BATCH)
            assert compiled(caplog) == 0


def test_laps_wrap():
    support.check_laps(support.RICH)


@pytest.mark.parametrize("how", by_tier("static", more=["argument", "closure"]))
def test_an_equal_buffer_built_again_does_not_trace_again(how):
    chex.clear_trace_counter()

    def run(buffer, state, key):
        return support.step(buffer, state, key, rows(2))

    counted = chex.assert_max_traces(run, n=1)
    if how == "closure":
        # the function closes over the buffer; what it is called with is a state
        bound = jax.jit(functools.partial(counted, support.build()))
        for seed in range(3):
            bound(support.filled(), jax.random.key(seed))
    else:
        jitted = jax.jit(counted, static_argnums=0) if how == "static" else jax.jit(counted)
        results = [jitted(support.build(), support.filled(), jax.random.key(0)) for _ in range(3)]
        same(results[0], results[2])


@pytest.mark.more
def test_annealed_numbers_do_not_trace_again(caplog):
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(state, key, alpha, beta):
        state, batch = support.RICH.sample(support.RICH.set(state, alpha=alpha), key, support.BATCH, beta=beta)
        return support.RICH.update_priority(state, batch.index, batch.data["reward"]), batch.weight

    uneven = support.RICH.extend(support.filled(), rows(7, 4), priority=rows(7, 5)["reward"])
    weights = [run(uneven, support.KEY, 0.1 * i, 0.2 * i)[1] for i in range(4)]
    assert not np.array_equal(weights[0], weights[3])
    support.RICH.sample(support.RICH.set(support.filled(), beta=0.0), support.KEY, support.BATCH, beta=0.1)
    with jax.log_compiles():  # eager too
        for i in range(1, 5):
            support.RICH.sample(
                support.RICH.set(support.filled(), beta=0.1 * i), support.KEY, support.BATCH, beta=0.2 * i
            )
        assert compiled(caplog) == 0


def test_a_buffer_is_a_value():
    one, two = support.build(), support.build()
    other = dataclasses.replace(one, capacity=support.CAPACITY * 2)
    assert one == two and one is not two and hash(one) == hash(two)
    assert one != other and hash(one) != hash(other)
    assert len({one, two, other}) == 2
    names = {n: x for m in (fbuf, fbuf.samplers, fbuf.views, fbuf.storages, fbuf.writers) for n, x in vars(m).items()}
    assert eval(repr(one), names) == one
    assert pickle.loads(pickle.dumps(one)) == one
    assert copy.deepcopy(one) == one and copy.copy(one) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.capacity = 3
    assert jax.tree.leaves(one) == []
    assert jax.tree.map(lambda x: x, one) == one


@pytest.mark.more
def test_a_pickled_buffer_hashes_alike_in_another_process():
    """String hashes differ between processes: a hash that travelled would break every jit cache it met."""
    code = (
        "import sys, pickle, fbuf\n"
        "from fbuf.samplers import Prioritized\n"
        "from fbuf.views import Transition\n"
        "b = pickle.load(sys.stdin.buffer)\n"
        "view = Transition(n_step=2, stack=2, autoreset='same_step')\n"
        f"c = fbuf.Buffer(capacity={support.CAPACITY}, sampler=Prioritized(), view=view, lanes={support.LANES})\n"
        "assert b == c and hash(b) == hash(c) and len({b, c}) == 1\n"
    )
    buffer = support.build()
    hash(buffer)
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(buffer), cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_configuration_builds_only_what_is_ours():
    for name in ("os.system", "builtins.eval", "fbuf.BufferState", "fbuf._core.component.component"):
        raises(ValueError, "is not a component of this version of fbuf", from_config, {"type": name})
    raises(TypeError, r"to_config: .* has no JSON form", to_config, print)


def test_a_state_is_a_pytree():
    state = support.filled()
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    same(jax.tree.map(lambda x: x, state), state)
    same(jax.device_put(state, jax.devices()[0]), state)
    same(jax.device_put(jax.device_get(state)), state)
    shapes = jax.eval_shape(support.RICH.init, support.EXAMPLE)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(shapes)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    assert ".rows['obs']" in names and ".sampler.tree" in names


@pytest.mark.parametrize("how", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), copy.copy])
def test_copies_of_a_state(how):
    state = support.filled()
    twin = how(state)
    same(twin, state)
    same(support.RICH.peek(twin, support.KEY, support.BATCH), support.RICH.peek(state, support.KEY, support.BATCH))
    if how is copy.deepcopy:  # its own arrays: donating one leaves the other
        jax.jit(support.RICH.extend, donate_argnums=0)(twin, rows(1))
        assert int(support.RICH.size(state)) == support.CAPACITY
        np.asarray(state.rows["obs"])


def test_init_shares_no_array_between_leaves():
    state = support.RICH.init(support.EXAMPLE)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.size]
    assert len(set(pointers)) == len(pointers)
    jax.jit(support.RICH.clear, donate_argnums=0)(state)


@pytest.mark.more
def test_eager_methods_copy_only_what_they_change():
    before, error = support.filled(), jnp.ones(support.BATCH)
    state, batch = support.RICH.sample(before, support.KEY, support.BATCH)
    assert changed(before, state) == [".header"]
    names = changed(state, support.RICH.update_priority(state, batch.index, error))
    assert ".sampler.tree" in names and not [name for name in names if name.startswith((".rows", ".anchors"))]
    names = changed(state, support.RICH.update_rows(state, batch.index, {"reward": error}))
    assert [name for name in names if name.startswith(".rows")] == [".rows['reward']"]
    assert not [name for name in changed(state, support.RICH.clear(state)) if name.startswith(".rows")]
    assert changed(state, support.RICH.set(state, beta=0.5)) == [".sampler.numbers"]
    ahead = dataclasses.replace(support.RICH, prefetch=1, batch_size=support.BATCH)
    state = support.filled(ahead)
    assert not [
        name for name in changed(state, ahead.sample(state, support.KEY)[0]) if name.startswith((".rows", ".sampler"))
    ]


def test_an_index_from_before_the_wrap_is_stale_after_it():
    buffer = support.RICH
    state = support.laps(buffer, 2**32 - 1)
    state, batch = buffer.sample(buffer.extend(state, rows(12)), support.KEY, support.BATCH)
    state = buffer.extend(state, rows(12, 1))
    assert not np.any(buffer.get(state, batch.index).mask)
    after = buffer.update_priority(state, batch.index, jnp.ones((support.BATCH,), jnp.float32))
    assert int(buffer.stats(after)["refused_stale"]) == support.BATCH
    # 0 is no generation.
    assert np.all(buffer.clear(buffer.extend(support.laps(buffer, 2**32 - 1), rows(1))).ring.lap == 1)


def test_counters_of_refusals_wrap_without_harm():
    state = support.RICH.init(support.EXAMPLE)
    state = state.replace(counters=jnp.full_like(state.counters, 2**32 - 1))
    state, batch = support.RICH.sample(state, support.KEY, support.BATCH)
    assert int(support.RICH.stats(state)["empty_samples"]) == 0
    assert not np.any(batch.mask)


def test_every_part_is_a_value():
    parts = [part for table in (STORAGES, SAMPLERS, VIEWS, WRITERS) for part in table.values()]
    more = (Deduplicated(block={"obs": (12, 12)}, blocks=64), DataSet("/data/set", memory=1), fbuf.writers.Frozen())
    for part in (*parts, *more, *SAVED):
        copies = [pickle.loads(pickle.dumps(part))]
        if part is not VIEWS["Hindsight"]:  # a function has no JSON form
            copies.append(from_config(json.loads(json.dumps(to_config(part)))))
        for again in copies:
            assert again == part and hash(again) == hash(part) and repr(again) == repr(part)
        assert jax.tree.leaves(part) == []
        assert part != object()


def test_rows_that_are_updated_twice_are_written_once():
    seen = []

    @dataclasses.dataclass(frozen=True)
    class Noting(Device):
        def update(self, rows, slot, leaves, token):
            seen.append(np.asarray(slot))
            return super().update(rows, slot, leaves, token)

    buffer = fbuf.Buffer(4)
    state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(4)})
    at = jnp.array([2, 1, 2, 2], jnp.int32)
    index = fbuf._buffer.state.index_of(buffer, state, at)
    noting = dataclasses.replace(buffer, storage=Noting())
    state, _ = fbuf._buffer.write.update_rows.core(noting, state, index, {"t": jnp.array([10, 11, 12, 13])}, None)
    np.testing.assert_array_equal(state.rows["t"], [0, 11, 13, 3])
    assert len(set(seen[0].tolist())) == 4 and sorted(seen[0][seen[0] < 4].tolist()) == [1, 2]


def test_sampler_and_view_have_keys_of_their_own(monkeypatch):
    keys = {}

    def noting(cls, method, at):
        real = getattr(cls, method)

        def noted(self, *args):
            keys[method] = args[at]
            return real(self, *args)

        monkeypatch.setattr(cls, method, noted)

    noting(fbuf.samplers.Uniform, "draw", 1)
    noting(fbuf.views.Row, "window", 4)
    buffer = fbuf.Buffer(4)

    def draw(key):
        buffer.sample(buffer.add(buffer.init(0.0), 1.0), key, 2)
        return [jax.random.key_data(keys[method]) for method in ("draw", "window")]

    with jax.disable_jit():  # what is compiled already notes no key
        drawn = jax.make_jaxpr(draw)(jax.random.key(0))
    assert not jnp.array_equal(*jax.jit(jaxpr_as_fun(drawn))(jax.random.key(0)))


def loss(weight, state, key):
    state, batch = RICH.sample(state, key, BATCH)
    error = weight * batch.data["obs"].astype(jnp.float32).mean(axis=(1, 2)) - batch.data["reward"]
    return jnp.mean(batch.weight * error**2), (state, batch, error)


wrap = one_of(jax.checkpoint, exhaustive=[lambda loss: loss])


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
@pytest.mark.optimized
def test_the_persistent_cache_works_for_storages_without_callbacks(tmp_path):
    def run():
        hits, misses = map(int, run_python(_CACHED, tmp_path).stdout.split())
        return hits, misses, {p.name for p in tmp_path.iterdir() if p.name.endswith("-cache")}

    _, missed, first = run()
    assert missed and sum("step" in name for name in first) == 2
    hits, misses, second = run()
    assert hits >= missed and misses == 0 and second == first


@pytest.mark.more
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


name = one_of("deduplicated", exhaustive=["prioritized-transition", "uniform-row"])


@pytest.mark.more
def test_no_method_calls_back_to_the_host(name):
    state = jax.eval_shape(BUFFERS[name].init, EXAMPLE)
    for method, call in methods(BUFFERS[name]).items():
        text = jax.jit(call).lower(state).as_text()
        assert "callback" not in text, method
    control = jax.jit(lambda x: jax.pure_callback(np.sin, x, x)).lower(jax.ShapeDtypeStruct((), np.float32))
    assert "callback" in control.as_text()


@pytest.mark.exhaustive
def test_grad_through_rows_that_were_stored():
    buffer = fbuf.Buffer(capacity=8)

    def total(x):
        state = buffer.extend(buffer.init({"x": x[0]}), {"x": x})
        return jnp.sum(buffer.sample(state, KEY, 16)[1].data["x"])

    slope = jax.jit(jax.grad(total))(jnp.arange(4, dtype=jnp.float32))
    assert float(jnp.sum(slope)) == 16.0 and float(jnp.min(slope)) >= 0.0
    many = jax.vmap(jax.grad(total))(jnp.ones((2, 4), jnp.float32))
    np.testing.assert_array_equal(many, jnp.stack([slope, slope]))


OTHERS = [support.BUFFERS[name] for name in ("uniform-row", "deduplicated")]
test_other_buffers_are_pure_and_wrap = checks(exhaustive=[(support.check_pure, OTHERS), (support.check_laps, OTHERS)])

"""Buffers with `prefetch=1` and the oracle of their batches, shared by tiers."""

import dataclasses
import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf._buffer import init
from fbuf._buffer import prefetch as _prefetch
from fbuf.samplers import Consume, Epoch, Prioritized, Uniform
from fbuf.storages import Compressed, Deduplicated, Device, Host
from fbuf.views import Hindsight, Row, Sequence, Transition
from tests.support.inplace import assert_order
from tests.support.refusals import raises
from tests.support.store import Deflate
from tests.support.threads import PATIENCE, soon
from tests.support.trees import example_of, same

LANES, ROWS, BATCH, STEPS = 2, 5, 6, 8


class Gate:
    """What the codec below asks before it decodes; hashes as one value."""

    def __init__(self):
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.fails = lambda: False


GATE = Gate()


@pytest.fixture(autouse=True)
def gate():
    GATE.__init__()
    yield GATE
    GATE.open.set()


@dataclasses.dataclass(frozen=True)
class Gated(Deflate):
    """A codec that waits at the gate in the thread that reads ahead, and fails when told to."""

    def decode(self, data, out):
        if threading.current_thread().name == "fbuf-read-ahead":
            GATE.entered.set()
            assert GATE.open.wait(PATIENCE)
        if GATE.fails():
            raise OSError("no such luck")
        super().decode(data, out)


STORAGES = {
    "device": Device(),
    "deduplicated": Deduplicated(keys=("obs",), blocks=512),
    "host": Host(keys=("obs",)),
    "compressed": Compressed(keys=("obs", "t")),
    "gated": Compressed(keys=("obs",), codec=Gated()),
}
SAMPLERS = {"uniform": Uniform(), "prioritized": Prioritized(), "epoch": Epoch(), "consume": Consume(2)}
VIEWS = {
    "row": Row(),
    "transition": Transition(n_step=3, stack=4, autoreset="same_step"),
    "sequence": Sequence(4, autoreset="same_step"),
    "hindsight": Hindsight(
        Transition(n_step=2, autoreset="same_step"),
        lambda a, b: (a == b).astype(jnp.float32),
        goal="action",
        achieved="t",
        fraction=0.5,
    ),
}


def rows_at(step, count=ROWS):
    rng, shape = np.random.default_rng(step), (count, LANES)
    t = (step * count * LANES + np.arange(count * LANES, dtype=np.int32)).reshape(shape)
    return {
        "obs": (t[..., None, None] % 251).astype(np.uint8) * np.ones((8, 8), np.uint8),
        "t": t,
        "action": rng.integers(0, 9, shape).astype(np.int32),
        "reward": rng.normal(size=shape).astype(np.float32),
        "terminated": rng.random(shape) < 0.1,
        "truncated": rng.random(shape) < 0.1,
    }


EXAMPLE = example_of(rows_at(0))


def make(storage="device", sampler="uniform", view="row", prefetch=1):
    parts = {"storage": STORAGES[storage], "sampler": SAMPLERS[sampler], "view": VIEWS[view]}
    return fbuf.Buffer(40, lanes=LANES, prefetch=prefetch, batch_size=BATCH, **parts)


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "fbuf-read-ahead"]


def wait_for_reads(store):
    soon(lambda: all(request.done.is_set() for request in store._ahead._requests.values()))


def errors_at(step):
    return np.random.default_rng(1000 + step).random(BATCH).astype(np.float32)


@functools.cache
def expected(sampler, view):
    """Return the batches of each step, drawn one step before; the first step has an empty buffer."""
    buffer = dataclasses.replace(make("device", sampler, view), prefetch=0)
    extend, sample, update = jax.jit(buffer.extend), jax.jit(buffer.sample), jax.jit(buffer.update_priority)
    state, pending, out = buffer.init(EXAMPLE), None, []
    for i in range(STEPS):
        if i:
            state = extend(state, rows_at(i))
        key = jax.random.key(i)
        if pending is None or not pending.mask.any():
            state, pending = sample(state, jax.random.fold_in(key, 1))
        batch = pending
        state, pending = sample(state, key)
        if buffer.sampler.prioritized:
            state = update(state, batch.index, errors_at(i))
        out.append(jax.device_get(batch))
    return out


def drawn(storage, sampler, view, form):
    """Return the batches of a buffer with prefetch; `form` is eager, jit, donated or scan."""
    buffer = make(storage, sampler, view)

    def step(state, given):
        rows, key, error, first = given
        state = buffer.extend(state, rows, mask=jnp.broadcast_to(~first, (ROWS, LANES)))
        state, batch = buffer.sample(state, key)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, error)
        return state, batch

    state = buffer.init(EXAMPLE)
    steps = [(rows_at(i), jax.random.key_data(jax.random.key(i)), errors_at(i), np.bool_(i == 0)) for i in range(STEPS)]
    if form == "scan":
        together = jax.tree.map(lambda *x: np.stack(x), *steps)
        state, batches = jax.jit(lambda s, g: lax.scan(step, s, g), donate_argnums=0)(state, together)
        return [jax.tree.map(lambda x, i=i: x[i], jax.device_get(batches)) for i in range(STEPS)]
    if form != "eager":
        step = jax.jit(step, donate_argnums=0 if form == "donated" else ())
    out = []
    for given_now in steps:
        state, batch = step(state, given_now)
        out.append(jax.device_get(batch))
    return out


def check_batches(storage, sampler, view, form):
    wanted = expected(sampler, view)
    assert not wanted[0].mask.any() and sum(int(batch.mask.sum()) for batch in wanted) > 3 * BATCH
    for one, two in zip(wanted, drawn(storage, sampler, view, form), strict=True):
        same(one, two)


def filled(buffer, count=20):
    """Return a state with these rows, after the draw of the batch that the next `sample` returns."""
    state = buffer.extend(buffer.init(EXAMPLE), rows_at(0, count))
    return jax.block_until_ready(buffer.sample(state, jax.random.key(0))[0])


def check_evicted_rows(storage):
    """Rows evicted after the draw are returned as drawn; their indices are stale."""
    buffer = make(storage, "prioritized")
    state = filled(buffer)
    then = buffer.peek(state, jax.random.key(0))
    same(then, buffer.peek(state, jax.random.key(0)))
    state = buffer.extend(state, rows_at(1, 20))  # every row is evicted
    tree = np.asarray(state.sampler.tree)
    state, batch = buffer.sample(state, jax.random.key(1))
    same(batch, then)
    assert batch.mask.all() and (batch.data["t"] < 40).all()
    np.testing.assert_array_equal(batch.data["obs"][:, 0, 0], batch.data["t"] % 251)
    assert int(buffer.stats(state)["stale_draws"]) == BATCH
    assert not buffer.get(state, batch.index).mask.any()
    update = fbuf.checked(buffer.update_priority)  # lets stale draws pass
    raises(ValueError, "priorities are NaN", update, state, batch.index, np.full(BATCH, np.nan, np.float32))
    state = update(state, batch.index, np.full(BATCH, 50.0, np.float32))
    state = buffer.update_rows(state, batch.index, {"reward": np.full(BATCH, 50.0, np.float32)})
    np.testing.assert_array_equal(tree, state.sampler.tree)
    assert int(buffer.stats(state)["refused_stale"]) == 2 * BATCH
    assert (buffer.rows(state).data["reward"] < 50).all()
    state, batch = buffer.sample(state, jax.random.key(2))
    assert (batch.data["t"] >= 40).all() and int(buffer.stats(state)["stale_draws"]) == BATCH


def check_changed_rows(storage):
    buffer = make(storage, "prioritized")
    state = filled(buffer)
    every = buffer.rows(state)
    count = every.mask.size
    index = jax.tree.map(lambda x: x.reshape(-1), every.index)
    changes = {"obs": np.full((count, 8, 8), 255, np.uint8), "action": np.full(count, 77)}
    state = buffer.update_rows(state, index, changes)
    state, batch = buffer.sample(state, jax.random.key(1))
    assert (batch.data["obs"] < 255).all() and (batch.data["action"] < 77).all()
    state, batch = buffer.sample(state, jax.random.key(2))
    assert (batch.data["obs"] == 255).all() and (batch.data["action"] == 77).all()
    assert int(buffer.stats(state)["stale_draws"]) == 0


def check_clear(storage):
    buffer = make(storage)
    state = filled(buffer, ROWS)
    state = buffer.clear(state)
    state, batch = buffer.sample(state, jax.random.key(1))
    assert not batch.mask.any() and int(buffer.stats(state)["empty_samples"]) == 1
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(batch.data))
    state = buffer.extend(state, rows_at(5))
    now = buffer.peek(state, jax.random.fold_in(jax.random.key(2), 1))
    state, batch = buffer.sample(state, jax.random.key(2))
    same(batch, now)
    assert batch.mask.all() and (batch.data["t"] >= 50).all()
    assert int(buffer.stats(state)["empty_samples"]) == 1 and int(buffer.stats(state)["stale_draws"]) == 0


def check_sampled_twice(storage):
    buffer = make(storage)
    state = filled(buffer, ROWS)
    one = buffer.sample(state, jax.random.key(1))
    two = buffer.sample(state, jax.random.key(1))
    same(one[1], two[1])
    for key in range(2, 6):  # drops its request
        one = buffer.sample(one[0], jax.random.key(key))
    again = buffer.sample(state, jax.random.key(1))
    same(again[1], two[1])
    same(buffer.sample(again[0], jax.random.key(9))[1], buffer.sample(two[0], jax.random.key(9))[1])


def check_futures(storage):
    buffer = make(storage)

    def steps(state, name):
        for i in range(4):
            state = buffer.extend(state, rows_at(10 * name + i, 2))
            state, batch = buffer.sample(state, jax.random.key(10 * name + i))
            yield jax.device_get(batch)

    alone = [list(steps(filled(buffer, ROWS), name)) for name in (1, 2, 3)]
    state = filled(buffer, ROWS)
    together = list(zip(*(steps(state, name) for name in (1, 2, 3)), strict=True))
    for name, batches in enumerate(alone):
        for i, batch in enumerate(batches):
            same(batch, together[i][name])


CHECKS = (check_evicted_rows, check_changed_rows, check_clear, check_sampled_twice, check_futures)
LARGE = {**EXAMPLE, "obs": jax.ShapeDtypeStruct((4, 3), np.uint8)}


def check_in_place(storage, sampler, view, order):
    """A donated step copies nothing; `order` is of extend, sample, update_priority and update_rows."""
    storages = {**STORAGES, "deduplicated": Deduplicated(keys=("obs",), blocks=2**19)}
    buffer = dataclasses.replace(make("device", sampler, view), capacity=400_000, storage=storages[storage])
    spec = init.checked_spec(buffer, "test", LARGE)
    rows = buffer.storage.abstract(buffer.geometry, spec, jax.tree.structure(LARGE))
    state = jax.eval_shape(functools.partial(_prefetch.empty_state, buffer), rows)

    for steps in (0, 3):
        assert_order(buffer, order, LARGE, state, steps=steps, batch=BATCH)

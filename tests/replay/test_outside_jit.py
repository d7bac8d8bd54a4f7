"""Methods of a `Replay` inside jit raise one sentence, and change nothing."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._replay import outside_jit
from tests.support.tables import by_tier

ROW = {"t": 0, "x": np.float32(0)}


def filled(seed=0, **parts):
    replay = fbuf.Replay(fbuf.prioritized(100, **parts), ROW, seed=seed)
    index = replay.extend({"t": np.arange(9), "x": np.ones(9, np.float32)})
    return replay, index


def calls(replay, index, x, folder):
    """Every public method, with arguments that are traced where rows or errors are."""
    row = {"t": jnp.int32(3), "x": x}
    rows = jax.tree.map(lambda leaf: leaf[None], row)
    return {
        "add": lambda: replay.add(row),
        "batches": lambda: replay.batches(4),
        "can_add": replay.can_add,
        "can_sample": replay.can_sample,
        "clear": replay.clear,
        "close": replay.close,
        "compile": lambda: replay.compile(4),
        "cut": replay.cut,
        "epoch": lambda: replay.epoch(4),
        "extend": lambda: replay.extend(rows),
        "get": lambda: replay.get(index),
        "grow": lambda: replay.grow(capacity=200),
        "load": lambda: fbuf.Replay.load(folder),
        "priorities": replay.priorities,
        "rows": replay.rows,
        "sample": lambda: replay.sample(4),
        "save": lambda: replay.save(folder),
        "set": lambda: replay.set(beta=0.5),
        "state": lambda: replay.state,
        "stats": replay.stats,
        "summary": replay.summary,
        "update_priority": lambda: replay.update_priority(index, x * jnp.ones(9)),
        "update_rows": lambda: replay.update_rows(index, {"x": x * jnp.ones(9)}),
        "window_index": lambda: replay.window_index(index),
        "__len__": lambda: len(replay),
        "__getitem__": lambda: replay[0],
        "__iter__": lambda: next(iter(replay)),
    }


def contents(replay):
    batch = jax.device_get(replay.sample(16))
    rows = jax.device_get(replay.rows())
    return batch.data, batch.index.slot, batch.probability, rows.data, rows.mask, replay.stats()


def test_the_table_has_every_public_method(tmp_path):
    replay, index = filled()
    public = {n for n, _ in inspect.getmembers(fbuf.Replay) if not n.startswith("_")}
    assert public - {"limit", "buffer"} <= calls(replay, index, np.float32(1), tmp_path).keys()


@pytest.mark.parametrize("traced", by_tier(jax.jit, more=[jax.vmap, jax.grad]))
def test_every_method_raises_and_changes_nothing(traced, tmp_path):
    (replay, index), (other, _) = filled(), filled()
    replay.add({"t": 7, "x": np.float32(2)})  # collected, not written
    other.add({"t": 7, "x": np.float32(2)})
    names = calls(replay, index, np.float32(1), tmp_path)
    if traced is jax.grad:
        names = ("add", "extend", "update_priority", "update_rows")
    for name in names:
        use = outside_jit._BUFFER.get(name)
        call = {"__len__": "len(replay)", "__getitem__": "replay[...]", "__iter__": "iter(replay)"}.get(
            name, f"Replay.{name}"
        )
        said = f"{call}: called inside jit. " + ("Call it outside." if use is None else f"Use {use} there.")

        def step(x, name=name):
            calls(replay, index, x, tmp_path)[name]()
            return x

        with pytest.raises(RuntimeError) as error:
            traced(step)(jnp.ones(()) if traced is not jax.vmap else jnp.ones(3))
        assert str(error.value).splitlines()[0] == said
    jax.tree.map(np.testing.assert_array_equal, contents(replay), contents(other))
    assert not list(tmp_path.iterdir())


def test_a_replay_is_not_made_inside_jit():
    def make(x):
        return len(fbuf.Replay(fbuf.Buffer(10), {"t": x}))

    with pytest.raises(RuntimeError, match=r"^Replay: called inside jit. Use buffer.init\(example\) there."):
        jax.jit(make)(jnp.int32(0))


def test_iterators_are_not_read_inside_jit():
    replay, _ = filled()
    with replay.batches(4) as batches, pytest.raises(RuntimeError, match="Replay.batches: called inside jit"):
        jax.jit(lambda: next(batches).data)()
    with pytest.raises(RuntimeError, match="Replay.epoch: called inside jit"):
        jax.jit(lambda epoch: [batch.data for batch in epoch], static_argnums=0)(replay.epoch(4))
    assert replay.sample(4).mask.all()


def test_an_index_and_a_repr_may_be_read_inside_jit():
    replay, index = filled()
    slots = jax.jit(lambda: index.slot + 0 * len(repr(replay)))()
    assert slots.tolist() == index.slot.tolist() == list(range(9))
    replay.update_priority(index, np.ones(9, np.float32))


def test_gradients_of_a_loss_that_draws_are_no_trace():
    replay, _ = filled()
    assert jax.grad(lambda x: x * replay.sample(4).data["x"].sum())(2.0) == 4
    assert replay.sample(4).mask.all()


def test_the_slow_way_to_find_a_trace(monkeypatch):
    """For a release of JAX that does not say whether it is tracing."""
    monkeypatch.setattr(outside_jit, "_nothing_traced", outside_jit._never)
    replay, _ = filled()
    with pytest.raises(RuntimeError, match="called inside jit"):
        jax.jit(lambda: replay.sample(4).data)()
    assert replay.sample(4).mask.all()


@pytest.mark.more
def test_callbacks_of_a_compiled_function_may_draw():
    replay, _ = filled()

    def draw(_):
        return replay.sample(4, to="numpy").data["x"]

    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    assert jax.jit(lambda x: jax.pure_callback(draw, shape, x))(1.0).tolist() == [1.0] * 4

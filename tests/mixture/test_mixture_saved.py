"""A mixture that is saved and loaded continues with the same batches; what does not fit is refused by name."""

import copy

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf._formats import checkpoint
from fbuf.samplers import Consume, Prioritized
from tests.support.mixture import EXAMPLE, extended, filled, rows_of, same, two
from tests.support.refusals import raises


def test_a_loaded_mixture_is_the_one_that_was_saved(tmp_path):
    mixture = two(
        fbuf.Buffer(2000, sampler=Prioritized()), fbuf.Buffer(2000), fractions={"a": 0.25, "b": 0.75}, beta=0.6
    )
    state = filled(mixture)
    first = fbuf.save(tmp_path, mixture, state, extra={"step": 6}).result()
    state = extended(mixture, state, "a", rows_of(1500, 3))
    second = fbuf.save(tmp_path, mixture, state, extra={"step": 7}, wait=False)
    assert second.result().bytes_written < first.bytes_written / 1.5
    loaded, again, extra = fbuf.load(tmp_path, extra=True)
    assert same(jax.tree.leaves(again), jax.tree.leaves(state)) and loaded == mixture and extra == {"step": 7}


def test_buffers_leave_and_join_a_saved_mixture(tmp_path):
    buffer = fbuf.Buffer(20, sampler=Consume())
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(1000, 20))
    mixture = two(buffer)
    fbuf.save(tmp_path, mixture, {"a": state, "b": mixture["b"].init(EXAMPLE)})
    loaded, again = fbuf.load(tmp_path)
    _, batch = loaded["a"].sample(again["a"], jax.random.key(0), 4)
    assert same(batch, buffer.sample(state, jax.random.key(0), 4)[1])


def test_other_mixtures_and_buffers_are_refused(tmp_path):
    mixture = two()
    state = filled(mixture)
    fbuf.save(tmp_path / "m", mixture, state)
    fbuf.save(tmp_path / "b", mixture["a"], state["a"])
    path = str(tmp_path / "m")
    raises(fbuf.SchemaError, "holds a mixture of a, b, not a Buffer", lambda: fbuf.load(path, mixture["a"]))
    other = fbuf.Mixture({"b": mixture["b"], "a": mixture["a"]})
    raises(fbuf.SchemaError, "expected b, a", lambda: fbuf.load(path, other))
    raises(TypeError, "expected a dict", lambda: fbuf.load(path, resize=7))
    raises(ValueError, "resize names 'c'", lambda: fbuf.load(path, resize={"c": 7}))
    larger = two(fbuf.Buffer(21))
    raises(fbuf.SchemaError, "capacity of .* is 20; expected 21", lambda: fbuf.load(path, larger))
    raises(fbuf.SchemaError, "not like the example", lambda: fbuf.load(path, example={"a": {"id": np.int32(0)}}))
    raises(TypeError, "buffer is Mixture; expected a Buffer", lambda: fbuf.load(tmp_path / "b", mixture))
    raises(
        TypeError,
        "states is BufferState; expected a dict of those of a, b",
        lambda: fbuf.save(path, mixture, state["a"]),
    )
    alone = fbuf.Mixture({"a": mixture["a"]})
    raises(ValueError, "states of a, b; expected a", fbuf.save, path, alone, state)
    raises(TypeError, "state is dict; expected a BufferState", lambda: fbuf.save(path, mixture["a"], state))
    raises(fbuf.SchemaError, "Replay", lambda: fbuf.Replay.load(path))
    step = jax.jit(lambda state: fbuf.save(path, mixture, state) and jnp.zeros(()))
    raises(TypeError, "traced", lambda: step(state))


def test_a_damaged_manifest_is_refused(tmp_path):
    mixture = two()
    fbuf.save(tmp_path / "m", mixture, filled(mixture))
    with checkpoint.read(str(tmp_path / "m")) as saved:
        meta, arrays = saved.meta, {name: np.asarray(a) for name, a in saved.arrays.items()}
    for number, spoil in enumerate(
        (
            lambda meta, arrays: meta["buffers"].pop(),
            lambda meta, arrays: meta["names"].append("c"),
            lambda meta, arrays: meta["mixture"].pop("quota") and meta["mixture"].update(odd=1),
            lambda meta, arrays: arrays.pop("buffers/1/state/header"),
        )
    ):
        about, given = copy.deepcopy(meta), dict(arrays)
        spoil(about, given)
        path = str(tmp_path / f"spoiled{number}")
        checkpoint.write(path, given, about)
        raises((fbuf.SchemaError, fbuf.VersionError, TypeError), None, fbuf.load, path)

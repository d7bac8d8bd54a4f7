"""NumPy rows of 64 bits for leaves of 32: values that fit are stored, others raise, wherever rows enter."""

import jax
import numpy as np
import pytest

import fbuf
from fbuf._core.pytree import exact
from tests.support.refusals import raises
from tests.support.trees import same

BUFFER = fbuf.Buffer(16)
EXAMPLE = {"id": np.int64(0), "x": np.float64(0)}
MOST = float(np.finfo(np.float32).max)


def rows(id=0, x=0.0):
    return {"id": np.full(2, id, np.int64), "x": np.full(2, x, np.float64)}


def one(id=0, x=0.0):
    return {"id": np.int64(id), "x": np.float64(x)}


def number(id=0, x=0.0):
    return {name: value.item() for name, value in one(id, x).items()}


def buffer(method, given):
    state = BUFFER.init(EXAMPLE)
    if method == "update_rows":
        state = BUFFER.extend(state, rows())
        return BUFFER.rows(BUFFER.update_rows(state, BUFFER.rows(state, last=2).index, given), last=2)
    return BUFFER.rows(getattr(BUFFER, method)(state, given), last=2)


def replay(method, given):
    made = fbuf.Replay(BUFFER, EXAMPLE)
    if method == "update_rows":
        made.extend(rows())
        made.update_rows(made.rows(last=2).index, given)
    else:
        getattr(made, method)(given)
    return made.rows(last=2)


METHODS = [("add", one), ("add", number), ("extend", rows), ("update_rows", rows)]


CASES = [(by, *method) for by in (buffer, replay) for method in METHODS]


@pytest.mark.parametrize(("by", "method", "make"), CASES)
def test_only_values_that_fit_are_stored(by, method, make):
    call = f"{'Replay' if by is replay else 'Buffer'}.{method}"
    for wrong in (2**31, -(2**31) - 1, 2**40, 2**63 - 1):
        said = rf"^{call}: leaf 'id' is {wrong}, which int32 cannot hold\. .*keys=\('id'"
        raises(ValueError, said, by, method, make(id=wrong))
    for x in (1e300, -1e39):
        raises(ValueError, rf"^{call}: leaf 'x' is .*e\+\d+, which float32 cannot hold", by, method, make(x=x))
    for id, x in ((2**31 - 1, np.inf), (-(2**31), MOST), (7, np.nan), (8, 0.1)):
        stored = by(method, make(id=id, x=x)).data
        assert int(stored["id"][-1]) == id and stored["id"].dtype == np.int32
        np.testing.assert_array_equal(stored["x"][-1], np.float32(x))


def test_rows_of_lanes_that_replay_collects_are_checked():
    replay = fbuf.Replay(fbuf.Buffer(16, lanes=2), EXAMPLE)
    replay.add(rows(2**31 - 1, MOST))
    assert replay._engine.block is not None and replay._engine.block.count == 1  # not yet written
    for wrong in (rows(id=2**31), rows(x=1e39)):
        raises(ValueError, r"^Replay.add: leaf '(id|x)' is .*, which (int|float)32 cannot hold", replay.add, wrong)
    replay.add(rows(-(2**31), -np.inf))
    data = replay.rows(last=2).data
    assert data["id"].tolist() == [[2**31 - 1] * 2, [-(2**31)] * 2]
    assert data["x"].tolist() == [[MOST] * 2, [-np.inf] * 2]


def test_rows_that_a_view_puts_below_a_name_are_exact():
    pairs = np.array([[1, 256]], np.uint32)
    spec = {"id": jax.ShapeDtypeStruct((), np.int64), "row/u": jax.ShapeDtypeStruct((2,), np.uint32)}
    data = exact("call", spec, {"row": {"id": pairs, "u": pairs}, "mask": pairs})
    assert data["row"]["id"].tolist() == [2**40 + 1] and data["row"]["u"] is data["mask"] is pairs
    assert exact("call", {"": spec["id"]}, {"row": pairs})["row"].tolist() == [2**40 + 1]


def test_an_example_out_of_range_is_refused():
    for wrong in (2**40, np.int64(2**40), np.array([0, -(2**40)]), 1e300):
        raises(ValueError, r"leaf 'id' is .*, which (int|float)32 cannot hold", BUFFER.init, {"id": wrong})


def test_rows_of_ragged_storage_are_checked_too():
    buffer = fbuf.Buffer(4, storage=fbuf.storages.Ragged(maximum={"obs": (3,)}))
    state = buffer.init({"n": 0, "x": 0.0, "obs": np.zeros(0, np.int64)})
    for name, wrong in (("n", 2**40), ("n", np.int64(2**40)), ("x", 1e300), ("obs", np.array([2**40]))):
        row = {"n": 1, "x": 1.0, "obs": np.zeros(2, np.int64)} | {name: wrong}
        for write in (lambda row=row: buffer.add(state, row), lambda row=row: buffer.extend(state, [row])):
            raises(ValueError, rf"leaf '{name}'.* is .*, which (int|float)32 cannot hold", write)


def test_states_of_64_bits_are_refused_where_x64_is_off():
    example = {"id": 0, "x": 0.0}
    with jax.enable_x64(True):
        state = BUFFER.init(example)
        BUFFER.sample(state, jax.random.key(0), 2)  # what this traces and checks is not taken for a state without x64
        made = fbuf.Replay(BUFFER, example)
        made.add(example)
    said = "leaf 'id' is int64, which jit cannot hold while jax_enable_x64 is off, .* or enable x64"
    draw = lambda state: BUFFER.sample(state, jax.random.key(0), 2)  # noqa: E731
    for call in (draw, jax.jit(draw), BUFFER.rows, lambda state: BUFFER.add(state, example)):
        raises(TypeError, said, call, state)
    raises(TypeError, said, made.sample, 2)
    host = fbuf.Buffer(16, storage=fbuf.storages.Host(keys=("id", "x")))
    with jax.enable_x64(True):
        state = host.add(host.init(example), {"id": 2**40, "x": 1e300})
    row = jax.tree.leaves(host.rows(state, last=1).data)
    assert [leaf.item() for leaf in row] == [2**40, 1e300]


NATIVE = {"id": np.arange(2, dtype=np.int32), "x": np.array([0.5, -1.5], np.float32)}


@pytest.mark.parametrize("order", ["<i4", ">i4", "<i8", ">i8"])
def test_arrays_in_any_byte_order_are_stored(order):
    given = {"id": NATIVE["id"].astype(order), "x": NATIVE["x"].astype(order.replace("i", "f"))}
    state = BUFFER.init(jax.tree.map(lambda leaf: leaf[:1].reshape(()), given))
    assert [leaf.dtype for leaf in state.rows.values()] == [np.int32, np.float32]
    for by, method in ((buffer, "extend"), (buffer, "update_rows"), (replay, "extend"), (replay, "update_rows")):
        same(by(method, given).data, NATIVE)
    for by in (buffer, replay):
        last = jax.tree.map(
            lambda leaf: leaf[1:], by("add", jax.tree.map(lambda leaf: leaf[1:].reshape(()), given)).data
        )
        same(last, jax.tree.map(lambda leaf: leaf[1:], NATIVE))
    if order == ">i8":
        for by in (buffer, replay):
            wrong = given | {"id": np.full(2, 2**40, order)}
            raises(ValueError, r"leaf 'id' is 1099511627776, which int32 cannot hold", by, "extend", wrong)


@pytest.mark.parametrize("order", ["i8", ">i8"])
def test_leaves_of_64_bits_on_the_host_are_exact_in_any_byte_order(order):
    host, many = fbuf.Buffer(4, storage=fbuf.storages.Host(keys=("id",))), np.array([2**40, 7], order)
    state = host.extend(host.init({"id": many[0:1].reshape(())}), {"id": many})
    assert host.rows(state, last=2).data["id"].tolist() == [2**40, 7]
    mixture, index = fbuf.Mixture({"a": host}), fbuf.Index([0, 1], [1, 1], source=[0, 0])
    states = mixture.update_rows({"a": state}, index, {"id": many + 1}, mask=[True, False])
    assert host.rows(states["a"], last=2).data["id"].tolist() == [2**40 + 1, 7]


def test_mixtures_narrow_nothing_unchecked():
    buffer = fbuf.prioritized(4)
    mixture, index = fbuf.Mixture({"a": buffer}), fbuf.Index([0, 1], [1, 1], source=[0, 0])
    states = {"a": buffer.extend(buffer.init({"id": 0}), {"id": np.arange(2)})}
    far = {"id": np.full(2, 2**40)}
    raises(ValueError, "Mixture.update_rows: leaf 'id' is 1099511627776", mixture.update_rows, states, index, far)
    mixture.update_rows(states, index, {"id": np.arange(2, dtype=np.int32)})  # JAX would read other bytes alike
    states = mixture.update_rows(states, index, {"id": np.arange(2).astype(">i4")})
    states = mixture.update_priority(states, index, np.array([2**40, 3]))
    assert buffer.rows(states["a"], last=2).data["id"].tolist() == [0, 1]
    np.testing.assert_allclose(buffer.priorities(states["a"])[:2], [2**40, 3], rtol=1e-5)
    raises(TypeError, "td_error is object", mixture.update_priority, states, index, np.array([None, 1.0]))


def test_slots_of_64_bits_never_wrap_to_other_rows():
    buffer, slot, generation = fbuf.prioritized(16), np.arange(2), np.ones(2, np.uint32)
    with jax.enable_x64(True):
        state, step = buffer.extend(buffer.init({"t": 0}), {"t": np.arange(4)}), jax.jit(buffer.update_priority)
        before = jax.device_get((buffer.priorities(state), buffer.rows(state).data))
        for far in (fbuf.Index(slot + 2**32, generation), fbuf.Index(slot, generation + np.uint64(2**32))):
            wide = jax.device_put(far)
            made = [step(state, far, np.full(2, 7.0)), buffer.update_priority(state, far, np.full(2, 7.0))]
            made += [
                buffer.update_priority(state, wide, np.full(2, 7.0)),
                buffer.update_rows(state, wide, {"t": slot + 7}),
            ]
            for after in made:
                same(jax.device_get((buffer.priorities(after), buffer.rows(after).data)), before)
                assert sum(int(n) for name, n in buffer.stats(after).items() if name.startswith("refused")) == 2
            assert not buffer.get(state, wide).mask.any() and np.isnan(buffer.priorities(state, wide)).all()
        for wrapped in (2**32, [2**32], jax.numpy.asarray(2**32)):
            assert not buffer.get(state, wrapped).mask.any()
        assert buffer.get(state, fbuf.Index(jax.device_put(slot), generation)).index.slot.dtype == np.int32
    far = fbuf.Index(slot, generation, source=slot + 2**32)
    mixture = fbuf.Mixture({"a": buffer, "b": buffer})
    raises(ValueError, "index.source is 4294967296, which int32 cannot hold", mixture.route, far, "a")


LISTS = [lambda x: x, list, lambda x: x.astype(">i4"), lambda x: x.astype(np.int64), lambda x: jax.numpy.asarray(x)]


@pytest.mark.parametrize("form", LISTS)
@pytest.mark.parametrize("by", ["Buffer", "Replay"])
def test_lists_and_arrays_of_any_kind_are_indices(form, by):
    buffer = fbuf.prioritized(16)
    replay = fbuf.Replay(buffer, {"t": 0})
    written = jax.device_get(replay.extend({"t": np.arange(4)}))
    index = fbuf.Index(form(written.slot), form(written.generation.astype(np.int32)))
    error = np.arange(1.0, 5.0, dtype=np.float32)
    if by == "Replay":
        replay.update_priority(index, error)
        replay.update_rows(index, {"t": np.arange(4) * 10})
        rows, priorities = replay.get(index), replay.priorities(index)
    else:
        state = buffer.update_priority(replay.state, index, error)
        state = buffer.update_rows(state, index, {"t": np.arange(4) * 10})
        rows, priorities = buffer.get(state, index), buffer.priorities(state, index)
    assert rows.data["t"].tolist() == [0, 10, 20, 30] and rows.mask.all()
    np.testing.assert_allclose(priorities, error, rtol=1e-5)


INVALID = [("slot", None), ("slot", [0.5]), ("generation", ["a"]), ("generation", np.array([1], object))]


@pytest.mark.parametrize(("name", "values"), INVALID)
def test_an_index_of_anything_else_names_what_is_wrong(name, values):
    replay = fbuf.Replay(fbuf.prioritized(16), {"t": 0})
    replay.extend({"t": np.arange(4)})
    index = fbuf.Index(**{"slot": [0], "generation": [1]} | {name: values})
    buffer, state = replay.buffer, replay.state
    for owner, first in ((buffer, (state,)), (replay, ())):
        said = (
            rf"^{type(owner).__name__}.\w+: index.{name} is (object|float32|<U1); expected integers. Pass batch.index"
        )
        for method, *more in (("get",), ("priorities",), ("update_priority", [1.0]), ("update_rows", {"t": [1]})):
            raises(TypeError, said, getattr(owner, method), *first, index, *more)
    raises(ValueError, "index.generation has shape", buffer.get, state, fbuf.Index([0, 1], [1, 1, 1]))
    raises(ValueError, "Buffer.get: index.slot has lists of sev", buffer.get, state, fbuf.Index([[0, 1], [2]], [1] * 3))


@pytest.mark.parametrize("dtype", ["list", "float64", "int64", ">f8"])
def test_priorities_that_float32_does_not_hold_are_infinite_and_no_integer_wraps(dtype):
    given = [2.0**62, 0.5, 1e300, np.inf] if dtype != "int64" else [2**62, 2, 3, 4]
    values = given if dtype == "list" else np.array(given, dtype)
    refused = sum(x > 1e39 for x in given)
    buffer = fbuf.prioritized(16)
    state = buffer.extend(buffer.init({"t": 0}), {"t": np.arange(4)}, priority=values)
    again = buffer.update_priority(state, buffer.rows(state, last=4).index, values)
    replay = fbuf.Replay(buffer, {"t": 0}, strict=False)
    replay.update_priority(replay.extend({"t": np.arange(4)}, priority=values), values)
    for after, times in ((state, 1), (again, 2), (replay.state, 2)):
        np.testing.assert_allclose(buffer.priorities(after)[:2], np.float32(given[:2]), rtol=1e-5)
        assert int(buffer.stats(after)["refused_nonfinite"]) == times * refused
    strict = fbuf.Replay(buffer, {"t": 0})
    if refused:
        said = "2 priorities are NaN or infinite and were refused"
        raises(ValueError, said, strict.extend, {"t": np.arange(4)}, priority=values)


class Frames:
    """As Gymnasium's LazyFrames."""

    shape, dtype = (2, 4), np.dtype(np.float32)

    def __array__(self, dtype=None, copy=None):
        return np.ones(self.shape, self.dtype)


def test_arrays_of_other_libraries_are_stored():
    replay = fbuf.Replay(BUFFER, {"x": np.zeros(4, np.float32)})
    replay.extend({"x": Frames()})
    same(replay.rows(last=2).data["x"], Frames().__array__())


def test_priorities_and_masks_of_objects_are_refused():
    replay = fbuf.Replay(fbuf.prioritized(16), {"t": 0.0})
    index, objects, t = replay.extend({"t": np.zeros(4)}), np.array([None] * 4), {"t": np.zeros(4)}
    raises(TypeError, "^Replay.extend: priority is object; expected a floating", replay.extend, t, priority=objects)
    raises(TypeError, "^Replay.extend: mask is object; expected a boolean", replay.extend, t, mask=objects)
    raises(TypeError, "^Replay.update_priority: td_error is object", replay.update_priority, index, objects)
    raises(TypeError, "^Replay.cut: lanes is object", replay.cut, objects)
    for leaf in (objects, np.array(["a"] * 4), np.array(["a"] * 4, np.dtypes.StringDType())):
        raises(TypeError, "^Replay.extend: leaf 't' is .*; .*float32. Convert it", replay.extend, {"t": leaf})
    row = np.zeros((), [("obs", "f4", 3)])
    raises(TypeError, "structured array; .*{name: x.name. for name in x.dtype.names}", fbuf.Buffer(4).init, row)
    assert len(replay) == 4

"""Batches belong to the learner: writing into one changes no buffer. Tensors are stored, nested ones as ragged rows."""

import dataclasses
import functools
import sys

import jax
import numpy as np
import pytest

import fbuf
from fbuf.torch import nested, to_tensordict, to_torch
from fbuf.torch._dtypes import import_torch
from tests.support.ragged import empty_replay
from tests.support.refusals import raises
from tests.support.tables import one_of

torch = pytest.importorskip("torch")

EXAMPLE = {"obs": np.zeros((8, 8), np.uint8), "reward": np.float32(0)}
STORAGES = {
    "device": fbuf.storages.Device(),
    "host": fbuf.storages.Host(keys=("obs",)),
    "compressed": fbuf.storages.Compressed(keys=("obs",)),
    "memmap": fbuf.storages.Memmap(keys=("obs",)),
    "deduplicated": fbuf.storages.Deduplicated(keys=("obs",), blocks=256),
    "ragged": fbuf.storages.Ragged(maximum={"obs": (8, 8)}),
}


def rows(count, seed=0):
    rng = np.random.default_rng(seed)
    obs = rng.integers(0, 255, (count, 8, 8)).astype(np.uint8)
    return {"obs": obs, "reward": np.arange(count, dtype=np.float32)}


case = one_of(
    ("compressed", 1),
    more=[("device", 0)],
    exhaustive=[*[(name, prefetch) for name in STORAGES for prefetch in (0, 1)]],
)


def replay(case, **settings):
    storage, prefetch = case
    sampler = fbuf.samplers.Prioritized()
    buffer = fbuf.Buffer(32, storage=STORAGES[storage], sampler=sampler, prefetch=prefetch, batch_size=8)
    return fbuf.Replay(buffer, EXAMPLE, **settings)


def held(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def test_writing_into_a_batch_changes_no_buffer_and_no_other_batch(case):
    buffer = replay(case).buffer
    state = buffer.extend(buffer.init(EXAMPLE), rows(32))
    for turn in range(2):
        old, before_old = state, held(state)
        state, batch = buffer.sample(state, jax.random.key(turn), 8)
        handed_out = [batch, buffer.peek(state, jax.random.key(9), 8), buffer.rows(state)]
        handed_out += [buffer.rows(state, last=4), buffer.get(state, batch.index)]
        kept, before = buffer.rows(state).data, held(state)
        expected, twin = held(kept), held(buffer.peek(state, jax.random.key(5), 8))
        for t in jax.tree.leaves([to_torch(out) for out in handed_out]):
            if isinstance(t, torch.Tensor) and t.numel():
                t.reshape(-1).view(torch.uint8).fill_(0xA5)  # every byte
        for tree, values in ((state, before), (old, before_old), (kept, expected)):
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(held(tree), values, strict=True))
        again = [held(buffer.rows(state).data), held(buffer.peek(state, jax.random.key(5), 8))]
        for one, other in zip(again, (expected, twin), strict=True):
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def test_methods_of_a_replay_take_tensors(case):
    made = replay(case)
    made.extend({n: torch.from_numpy(x) for n, x in rows(8).items()}, priority=torch.ones(8))
    made.extend({n: torch.from_numpy(x) for n, x in rows(4).items()}, mask=torch.tensor([True, False, True, False]))
    assert len(made) == 10
    batch = made.sample(to="torch")
    for error in (torch.rand(8).half(), torch.rand(16)[::2], torch.rand(8, requires_grad=True).detach()):
        made.update_priority(batch.index, error)
    made.update_rows(batch.index, {"reward": torch.full((8,), 7.0)})
    assert (np.asarray(made.get(batch.index).data["reward"]) == 7).all()
    assert made.get(batch.index.slot).mask.all()


@pytest.mark.parametrize("wide", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_wide_numbers_are_narrowed_alike_or_refused(wide):
    made = fbuf.Replay(fbuf.prioritized(16), {"t": 0})
    made.extend({"t": wide(np.arange(4))}, priority=wide(np.full(4, 2.0)))
    index = fbuf.Index(wide(np.arange(4)), wide(np.ones(4, np.int64)))
    assert made.get(index).mask.all() and made.get(index.slot).mask.all()
    made.update_priority(index, wide(np.arange(4)))
    assert np.rint(made.priorities(index)).tolist() == [0, 1, 2, 3]
    far = dataclasses.replace(index, slot=index.slot + 2**32)  # which JAX would wrap to the same rows
    calls = [lambda: made.update_priority(far, np.ones(4)), lambda: made.update_rows(far, {"t": np.arange(4)})]
    calls += [lambda: made.get(far), lambda: made.get(far.slot), lambda: made.priorities(far)]
    far = fbuf.Index(np.asarray(far.slot), np.asarray(far.generation))
    buffer, state = made.buffer, made.state
    calls += [
        lambda: buffer.get(state, far),
        lambda: buffer.get(state, far.slot),
        lambda: buffer.priorities(state, far),
    ]
    calls += [lambda: buffer.update_priority(state, far, np.ones(4))]
    for call in calls:
        raises(ValueError, r"index(\.slot)? is 4294967296, which int32 cannot hold", call)


def test_tensors_that_cannot_be_stored_are_refused():
    made = fbuf.Replay(fbuf.prioritized(16), {"obs": np.zeros(4, np.float32), "action": 0})
    fine = {"obs": torch.zeros(2, 4), "action": torch.zeros(2, dtype=torch.int32)}
    made.extend(fine)
    batch = made.sample(2, to="torch")
    cases = [
        (ValueError, r"leaf 'obs' requires grad; .*x\.detach\(\)", {"obs": torch.zeros(2, 4, requires_grad=True)}),
        (ValueError, r"leaf 'action' is 4294967296, which int32 cannot hold", {"action": torch.full((2,), 2**32)}),
        (ValueError, r"leaf 'obs' is 1e\+300, which float32", {"obs": torch.full((2, 4), 1e300, dtype=torch.float64)}),
        (ValueError, r"leaf 'obs' has shape \[2, 5\]", {"obs": torch.zeros(2, 5)}),
    ]
    for error, match, wrong in cases:
        raises(error, match, made.extend, fine | wrong)
    integers = {"action": torch.zeros(2, dtype=torch.int32)}
    graph = torch.ones(2, requires_grad=True)
    example = {"action": torch.tensor(0)}
    calls = [
        (ValueError, r"'action' is 4294967296", lambda: made.extend({"obs": np.zeros((2, 4))} | cases[1][2])),
        (ValueError, r"'td_error' requires grad; .*x\.detach\(\)", lambda: made.update_priority(batch.index, graph)),
        (TypeError, r"sample: beta is tensor\(0\.5000\); .*float\(x\)", lambda: made.sample(2, beta=torch.tensor(0.5))),
        (TypeError, r"set: alpha is tensor\(1\); .*float\(x\)", lambda: made.set(alpha=torch.tensor(1))),
        (ValueError, r"'action' is 4294967296", lambda: fbuf.Replay(fbuf.Buffer(4), {"action": torch.tensor(2**32)})),
        (TypeError, r"leaf 'action' is a torch tensor; .*from_torch", lambda: fbuf.Buffer(4).init(example)),
    ]
    for no_index in (batch, batch.index.slot, [0, 1]):
        for method, value in (("update_priority", torch.ones(2)), ("update_rows", integers)):
            match = rf"^Replay.{method}: index is \w+; .*Pass batch.index"
            calls.append((TypeError, match, functools.partial(getattr(made, method), no_index, value)))
    for error, match, call in calls:
        raises(error, match, call)
    assert len(made) == 2  # nothing was half-written
    made.extend({"obs": torch.full((2, 4), 0.1).double(), "action": torch.tensor([-7, 7])})  # as NumPy's int64
    assert (
        made.rows(last=2).data["action"].tolist() == [-7, 7]
        and (made.rows(last=2).data["obs"] == np.float32(0.1)).all()
    )


def plain():
    replay = fbuf.Replay(fbuf.Buffer(4), {"obs": np.float32(0)})
    replay.extend({"obs": np.ones(2, np.float32)})
    return replay.sample(2)


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_stored_and_returned():
    replay = empty_replay()
    lengths = [3, 0, 6, 1]
    values = [torch.arange(n, dtype=torch.int32) + 10 * i for i, n in enumerate(lengths)]
    jagged = torch.nested.nested_tensor(values, layout=torch.jagged)
    strided = torch.nested.nested_tensor(values)
    grids = [np.full((min(n, 4), 3), n, np.float32) for n in lengths]
    replay.extend({"tokens": jagged, "padded": strided, "grid": grids, "text": list("abcd")})
    rows = replay.rows(last=4)
    for name in ("tokens", "padded"):
        out = nested(rows, name)
        assert out.layout == torch.jagged and [x.tolist() for x in out.unbind()] == [x.tolist() for x in values]
    for layout in (None, torch.jagged, torch.strided):
        assert [x.tolist() for x in rows.lazy.nested("tokens", layout).unbind()] == [x.tolist() for x in values]
    assert [tuple(x.shape) for x in nested(rows, "grid").unbind()] == [(min(n, 4), 3) for n in lengths]
    raises(KeyError, r"no ragged leaf 'other' \(there are: ", nested, rows, "other")
    batch = replay.sample(8, to="torch")
    assert nested(batch, "padded").shape[0] == 8
    raises(KeyError, r"no ragged leaf 'obs' \(there are: none\)", lambda: nested(plain(), "obs"))


def test_rows_that_differ_in_a_second_axis_are_refused():
    storage = fbuf.storages.Ragged(maximum={"x": (3, 3)})
    replay = fbuf.Replay(fbuf.Buffer(8, storage=storage), {"x": np.zeros((0, 0), np.float32)})
    replay.extend([{"x": np.ones((2, 3), np.float32)}, {"x": np.ones((3, 1), np.float32)}])
    raises(ValueError, r"rows of leaf 'x' differ in axis 1\. Use", lambda: nested(replay.rows(last=2), "x"))


def test_a_missing_tensordict_is_named(monkeypatch):
    import_torch.cache_clear()
    monkeypatch.setitem(sys.modules, "tensordict", None)
    raises(ImportError, "tensordict is missing .*pip install tensordict", lambda: to_tensordict(plain()))


def as_tensors(way, x):
    """The values of `x` in memory of their own."""
    if way == "strided":
        return torch.from_numpy(np.repeat(x, 2, axis=0))[::2]
    if way == "transposed":
        return torch.from_numpy(np.ascontiguousarray(x.T)).permute(*range(x.ndim - 1, -1, -1))
    return torch.from_numpy(x.copy())


@pytest.mark.more
def test_tensors_are_stored_as_numpy_arrays_are(case):
    plain, ours = replay(case), replay(case)
    for turn, way in enumerate(("as it is", "strided", "transposed", "beside numpy")):
        new = rows(6, turn)
        tensors = {n: as_tensors(way, x) for n, x in new.items()}
        if way == "beside numpy":
            tensors["reward"] = new["reward"]
        one = {n: x[0].clone() if isinstance(x, torch.Tensor) else x[0] for n, x in tensors.items()}
        plain.extend(new)
        ours.extend(tensors)
        plain.add({n: x[0] for n, x in new.items()})
        ours.add(one)
        for x in (*tensors.values(), *one.values()):  # after the call they are the caller's again
            if isinstance(x, torch.Tensor):
                x.fill_(7)
    jax.tree.map(np.testing.assert_array_equal, ours.rows().data, plain.rows().data)
    a, b = plain.sample(to="torch"), ours.sample(to="torch")
    assert all(torch.equal(x, y) for x, y in zip(jax.tree.leaves(a.data), jax.tree.leaves(b.data), strict=True))
    if case[0] != "ragged":
        example = {"obs": torch.zeros(8, 8, dtype=torch.uint8), "reward": torch.tensor(0.0)}
        fbuf.Replay(ours.buffer, example).extend(new)


@pytest.mark.more
@pytest.mark.in_place
def test_writes_are_in_place_while_batches_are_held(case):
    made, alive = replay(case, strict=False), []
    made.extend(rows(32))

    def places():
        leaves = jax.tree.leaves((made.state.sampler, made.state.rows))
        return [x.unsafe_buffer_pointer() for x in leaves if isinstance(x, jax.Array) and x.nbytes >= 32]

    for turn in range(3):
        alive.append(made.sample(to="torch"))
        alive.append(to_torch(made.rows()))
        before = places()
        made.extend(rows(4, turn))
        made.update_priority(alive[-2].index, torch.rand(8))
        assert sorted(places()) == sorted(before)

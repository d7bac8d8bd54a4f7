"""flashbax states and Vaults, row by row and priority by priority against flashbax itself."""

from __future__ import annotations

import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.interop import _columns, _flashbax, from_flashbax, from_vault

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    fbx = pytest.importorskip("flashbax")
EXAMPLE = {"obs": jnp.zeros(3), "step": {"t": jnp.int32(0)}}
ALPHA = 0.7


@pytest.fixture(autouse=True)
def as_flashbax_needs_it(monkeypatch):
    monkeypatch.setattr(_columns, "BLOCK_BYTES", 48)
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def rows(first: int, lanes: int, n: int) -> dict:
    """`[E, n, ...]`, as flashbax has them."""
    t = first + np.arange(n)[None, :] + 1000 * np.arange(lanes)[:, None]
    return {"obs": jnp.asarray(np.repeat(t[..., None], 3, -1), jnp.float32), "step": {"t": jnp.asarray(t, jnp.int32)}}


def filled(lanes: int, number: int, *, made):
    """A state after `number` rows a lane, and the t of each row that flashbax holds, oldest first: [n, E]."""
    buffer, length = made
    state = buffer.init(EXAMPLE)
    for first in range(0, number, 3):
        state = buffer.add(state, rows(first, lanes, min(3, number - first)))
    held = np.arange(max(0, number - length), number)
    return state, held[:, None] + 1000 * np.arange(lanes)[None, :]


MAKERS = {
    "flat": lambda lanes: fbx.make_flat_buffer(
        max_length=8 * lanes, min_length=1, sample_batch_size=2, add_sequences=True, add_batch_size=lanes
    ),
    "item": lambda lanes: fbx.make_item_buffer(
        max_length=8, min_length=1, sample_batch_size=2, add_sequences=True, add_batches=True
    ),
    "trajectory": lambda lanes: fbx.make_trajectory_buffer(
        add_batch_size=lanes,
        max_length_time_axis=8,
        min_length_time_axis=1,
        sample_batch_size=1,
        sample_sequence_length=1,
        period=1,
    ),
}
PRIORITISED = {
    "flat": lambda lanes: fbx.make_prioritised_flat_buffer(
        max_length=8 * lanes,
        min_length=1,
        sample_batch_size=2,
        add_sequences=True,
        add_batch_size=lanes,
        priority_exponent=ALPHA,
        device="cpu",
    ),
    "item": lambda lanes: fbx.make_prioritised_item_buffer(
        max_length=8,
        min_length=1,
        sample_batch_size=2,
        add_sequences=True,
        add_batches=True,
        priority_exponent=ALPHA,
        device="cpu",
    ),
    "trajectory": lambda lanes: fbx.make_prioritised_trajectory_buffer(
        add_batch_size=lanes,
        max_length_time_axis=8,
        min_length_time_axis=1,
        sample_batch_size=1,
        sample_sequence_length=3,
        period=2,
        priority_exponent=ALPHA,
        device="cpu",
    ),
}


@pytest.mark.parametrize("number", [0, 5, 8, 19])
@pytest.mark.parametrize(("kind", "lanes"), [("flat", 2), ("flat", 1), ("item", 1), ("trajectory", 3)])
def test_every_row_in_order(kind, lanes, number):
    state, held = filled(lanes, number, made=(MAKERS[kind](lanes), 8))
    buffer, ours = from_flashbax(state)
    assert buffer.lanes == (None if lanes == 1 else lanes) and buffer.capacity == max(len(held), 1) * lanes
    if not number:
        assert int(buffer.size(ours)) == 0
        return
    got = buffer.rows(ours).data
    assert np.array_equal(np.asarray(got["step"]["t"]).reshape(held.shape), held)
    assert np.array_equal(np.asarray(got["obs"]).reshape(*held.shape, 3), np.repeat(held[..., None], 3, -1))


def test_into_a_given_buffer_with_other_names():
    state, held = filled(2, 11, made=(MAKERS["flat"](2), 8))
    compressed = fbuf.Buffer(40, lanes=2, storage=fbuf.storages.Compressed(keys=("frame",)))
    buffer, ours = from_flashbax(state, buffer=compressed, fields={"obs": "frame"}, newest=4)
    assert buffer is compressed and np.array_equal(buffer.last(ours, 4).data["frame"][..., 0], held[-4:])
    with pytest.raises(ValueError, match=r"rows come in 2 lanes, but the buffer has one stream .* lanes=2"):
        from_flashbax(state, buffer=fbuf.Buffer(40))
    single, _ = filled(1, 5, made=(MAKERS["flat"](1), 8))
    assert from_flashbax(single, buffer=fbuf.Buffer(40, lanes=1))[0].lanes == 1


def test_a_queue():
    queue = fbx.make_trajectory_queue(
        max_length_time_axis=8, add_batch_size=2, add_sequence_length=3, sample_sequence_length=2
    )
    state = queue.init(EXAMPLE)
    for first in (0, 3):
        state = queue.add(state, rows(first, 2, 3))
    state, _ = queue.sample(state)
    state = queue.add(state, rows(6, 2, 3))  # round the end
    buffer, ours = from_flashbax(state)
    assert np.asarray(buffer.rows(ours).data["step"]["t"])[:, 0].tolist() == [2, 3, 4, 5, 6, 7, 8]


def leaves_of(state, lanes: int) -> np.ndarray:
    """flashbax's own leaves, [E, windows]."""
    tree = state.sum_tree_state
    return np.asarray(fbx.buffers.sum_tree.get_batch(tree, jnp.arange(tree.capacity))).reshape(lanes, -1)


@pytest.mark.parametrize("number", [pytest.param(6, marks=pytest.mark.slow), 19])
@pytest.mark.parametrize(("kind", "lanes"), [("flat", 2), ("item", 1), ("trajectory", 2)])
def test_priorities_are_those_of_flashbax(kind, lanes, number):
    made = PRIORITISED[kind](lanes)
    state, held = filled(lanes, number, made=(made, 8))
    windows = np.flatnonzero(leaves_of(state, lanes).reshape(-1) > 0)
    state = made.set_priorities(state, jnp.asarray(windows), jnp.linspace(0.1, 3.0, len(windows)))
    theirs = leaves_of(state, lanes)
    buffer, ours = from_flashbax(state, priority_exponent=ALPHA)
    assert buffer.sampler == fbuf.samplers.Prioritized(alpha=ALPHA)
    _, batch = buffer.sample(ours, jax.random.key(0), 512)
    chance = dict(
        zip(np.asarray(batch.data["step"]["t"]).tolist(), np.asarray(batch.probability).tolist(), strict=True)
    )
    assert len(chance) == held.size
    period = 8 // theirs.shape[1]
    place = {int(t): (int(lane), int(t % 1000) % 8) for row in held for lane, t in enumerate(row)}
    leaf = {t: theirs[lane, at // period] if at % period == 0 else 0.0 for t, (lane, at) in place.items()}
    known = [t for t in chance if leaf[t] > 0]
    assert len(known) == len(windows)
    ratio = np.array([chance[t] / leaf[t] for t in known])
    np.testing.assert_allclose(ratio, ratio[0], rtol=2e-5)
    # those that begin no window are as new: the largest recorded
    new = np.array([chance[t] for t in chance if leaf[t] == 0]) / ratio[0]
    np.testing.assert_allclose(new, float(state.sum_tree_state.max_recorded_priority), rtol=2e-5)


def test_priorities_into_windows():
    """Where our view draws the same windows, theirs are ours, and none is left over."""
    made = PRIORITISED["flat"](2)
    state, held = filled(2, 19, made=(made, 8))
    windows = np.flatnonzero(leaves_of(state, 2).reshape(-1) > 0)
    state = made.set_priorities(state, jnp.asarray(windows), jnp.linspace(0.1, 3.0, len(windows)))
    view, sampler = fbuf.views.Sequence(2, episode_end=()), fbuf.samplers.Prioritized(ALPHA, eps=0.0)
    buffer = fbuf.Buffer(16, lanes=2, view=view, sampler=sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, ours = from_flashbax(state, buffer=buffer, priority_exponent=ALPHA)
    _, batch = buffer.sample(ours, jax.random.key(0), 256)
    t = np.asarray(batch.data["step"]["t"])[:, 0]
    theirs = leaves_of(state, 2)
    np.testing.assert_allclose(batch.probability, theirs[t // 1000, t % 1000 % 8] / theirs.sum(), rtol=2e-5)


def test_priorities_that_cannot_be_taken():
    made = PRIORITISED["item"](1)
    state, _ = filled(1, 6, made=(made, 8))
    with pytest.raises(ValueError, match="priority_exponent is None, but the state has priorities"):
        from_flashbax(state)
    assert from_flashbax(state, priorities=False)[0].sampler == fbuf.samplers.Uniform()
    broken = made.set_priorities(state, jnp.array([0]), jnp.array([jnp.nan]))
    with pytest.raises(ValueError, match="a TD error was NaN, and flashbax spread it"):
        from_flashbax(broken, priority_exponent=ALPHA)
    other = filled(1, 6, made=(MAKERS["item"](1), 8))[0].replace()
    mixed = {"experience": jax.tree.map(lambda x: x[:, :3], other.experience), "current_index": 2, "is_full": False}
    with pytest.raises(ValueError, match="expected those of 1 lanes of 3 rows"):
        from_flashbax({**mixed, "sum_tree_state": state.sum_tree_state}, priority_exponent=ALPHA)


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"x": 1}, "leaves of no experience; expected a state of flashbax"),
        ({"experience": {"a": np.zeros((1, 4)), "b": np.zeros((1, 5))}}, "whose experience has leaves"),
        (7, "state is a int"),
    ],
)
def test_what_is_no_state(state, match):
    with pytest.raises(TypeError, match=match):
        from_flashbax(state)


def test_an_index_that_is_none():
    with pytest.raises(ValueError, match="the index is 9; expected one below 4"):
        from_flashbax({"experience": {"a": np.zeros((1, 4), np.int32)}, "current_index": 9, "is_full": False})


def test_leaves_on_an_accelerator_are_fetched_in_part():
    leaf = jnp.arange(24).reshape(2, 6, 2)
    at = np.array([4, 5, 0])
    assert np.array_equal(_flashbax._take(leaf, jnp.asarray(at)), np.asarray(leaf)[:, at])


# ------------------------------------------------------------------------------------------------------- Vaults


def vault(folder, lanes: int = 2, number: int = 24):
    from flashbax.vault import Vault

    made = MAKERS["trajectory"](lanes)
    state = made.init(EXAMPLE)
    store = Vault("v", state.experience, rel_dir=str(folder), vault_uid="u")
    for first in range(0, number, 6):
        state = made.add(state, rows(first, lanes, 6))
        store.write(state)
    return store, folder / "v" / "u"


@pytest.mark.parametrize("lanes", [1, 2])
def test_every_row_of_a_vault(lanes, tmp_path):
    store, path = vault(tmp_path, lanes)
    buffer, ours = from_vault(path)
    theirs = store.read().experience
    got = buffer.rows(ours).data
    assert buffer.lanes == (None if lanes == 1 else 2)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(theirs), strict=True):
        other = np.asarray(other).swapaxes(0, 1)
        assert one.dtype == other.dtype and np.array_equal(np.asarray(one).reshape(other.shape), other)
    buffer, ours = from_vault(path, newest=5, fields={"step/t": "t"})
    assert np.asarray(buffer.rows(ours).data["t"]).reshape(5, lanes)[:, 0].tolist() == [19, 20, 21, 22, 23]


def test_a_vault_that_is_damaged(tmp_path):
    import tensorstore

    store, path = vault(tmp_path)
    described = json.loads((path / "metadata.json").read_text())

    def says(**entries):
        (path / "metadata.json").write_text(json.dumps({**described, **entries}))

    for entries, match in [
        ({"version": 9}, "version is '9'; expected 1.x"),
        ({"structure_dtype": {"obs": "object", "step": {"t": "int32"}}}, "leaf 'obs' is 'object' there and 'float32'"),
        ({"structure_dtype": {"../x": "int32"}}, "names a leaf '../x'"),
        ({"structure_dtype": [1]}, "is a list; expected nested objects"),
        ({"structure_dtype": {"nope": "int32"}}, "cannot be read"),
        ({"structure_dtype": {}}, "names no leaves"),
    ]:
        says(**entries)
        with pytest.raises(ValueError, match=match):
            from_vault(path)
    (path / "metadata.json").write_text("{" * 100)
    with pytest.raises(ValueError, match="is no JSON"):
        from_vault(path)
    says()
    base = {"driver": "ocdbt", "base": f"file://{path}", "path": "vault_index"}
    index = tensorstore.open({"driver": "zarr", "kvstore": base}, open=True).result()
    index.write(np.array([10**9], np.int32)).result()
    with pytest.raises(ValueError, match="are not all there, though its index says so"):
        from_vault(path, newest=4)
    index.write(np.array([-1], np.int32)).result()
    with pytest.raises(ValueError, match="and -1 rows"):
        from_vault(path)
    shutil.rmtree(path / "d")
    with pytest.raises((ValueError, FileNotFoundError)):
        from_vault(path)
    with pytest.raises(FileNotFoundError, match="expected a flashbax Vault"):
        from_vault(tmp_path)

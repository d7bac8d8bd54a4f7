"""States and Vaults that flashbax made, row by row and priority by priority."""

import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._rows import columns as _columns
from tests.support.interop import from_flashbax, from_vault
from tests.support.tables import one_of

pytestmark = pytest.mark.more

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import flashbax as fbx
EXAMPLE = {"obs": jnp.zeros(3), "step": {"t": jnp.int32(0)}}
ALPHA = 0.7


@pytest.fixture(autouse=True)
def flashbax_allowed(monkeypatch):
    monkeypatch.setattr(_columns, "BLOCK_BYTES", 48)
    with jax.numpy_rank_promotion("allow"), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def rows(first, lanes, n):
    t = first + np.arange(n)[None, :] + 1000 * np.arange(lanes)[:, None]
    return {"obs": jnp.asarray(np.repeat(t[..., None], 3, -1), jnp.float32), "step": {"t": jnp.asarray(t, jnp.int32)}}


def filled(lanes, number, *, made):
    """Return a state after `number` rows a lane, and the t of the rows that it holds, oldest first: [n, E]."""
    state = made.init(EXAMPLE)
    for first in range(0, number, 4):
        state = made.add(state, rows(first, lanes, min(4, number - first)))
    held = np.arange(max(0, number - 8), number)
    return state, held[:, None] + 1000 * np.arange(lanes)[None, :]


RING = {"min_length": 1, "sample_batch_size": 2, "add_sequences": True}
FLAT = RING | {"max_length": 16, "add_batch_size": 2}
ITEM = RING | {"max_length": 8, "add_batches": True}
TRAJECTORY = {"add_batch_size": 2, "max_length_time_axis": 8, "min_length_time_axis": 1, "sample_batch_size": 1}
PRIORITISED = {"priority_exponent": ALPHA, "device": "cpu"}
BY_PRIORITY = {
    "flat": lambda: fbx.make_prioritised_flat_buffer(**FLAT, **PRIORITISED),
    "item": lambda: fbx.make_prioritised_item_buffer(**ITEM, **PRIORITISED),
    "trajectory": lambda: fbx.make_prioritised_trajectory_buffer(
        **TRAJECTORY, sample_sequence_length=3, period=2, **PRIORITISED
    ),
}
LANES = {"flat": 2, "item": 1, "trajectory": 2}


def leaves_of(state, lanes):
    """flashbax's own leaves, [E, windows]."""
    tree = state.sum_tree_state
    return np.asarray(fbx.buffers.sum_tree.get_batch(tree, jnp.arange(tree.capacity))).reshape(lanes, -1)


buffer_kind = one_of(("trajectory", 19), exhaustive=[("flat", 6), ("item", 19)])


def test_priorities_are_those_of_flashbax(buffer_kind):
    kind, number = buffer_kind
    made, lanes = BY_PRIORITY[kind](), LANES[kind]
    state, held = filled(lanes, number, made=made)
    windows = np.flatnonzero(leaves_of(state, lanes).reshape(-1) > 0)
    state = made.set_priorities(state, jnp.asarray(windows), jnp.linspace(0.1, 3.0, len(windows)))
    theirs = leaves_of(state, lanes)
    buffer, ours = from_flashbax(state, priority_exponent=ALPHA)
    assert buffer.sampler == fbuf.samplers.Prioritized(alpha=ALPHA)
    _, batch = buffer.sample(ours, jax.random.key(0), 512)
    drawn = np.asarray(batch.data["step"]["t"]).tolist()
    chance = dict(zip(drawn, np.asarray(batch.probability).tolist(), strict=True))
    assert chance.keys() == set(held.reshape(-1).tolist())
    assert np.array_equal(batch.data["obs"][:, 2], batch.data["step"]["t"])
    period = 8 // theirs.shape[1]
    place = {int(t): (int(lane), int(t % 1000) % 8) for row in held for lane, t in enumerate(row)}
    leaf = {t: theirs[lane, at // period] if at % period == 0 else 0.0 for t, (lane, at) in place.items()}
    known = [t for t in chance if leaf[t] > 0]
    assert len(known) == len(windows)
    ratio = np.array([chance[t] / leaf[t] for t in known])
    np.testing.assert_allclose(ratio, ratio[0], rtol=2e-5)
    # Rows that begin no window have the largest recorded priority.
    new = np.array([chance[t] for t in chance if leaf[t] == 0]) / ratio[0]
    np.testing.assert_allclose(new, float(state.sum_tree_state.max_recorded_priority), rtol=2e-5)


def vault(folder, lanes=2, number=24):
    from flashbax.vault import Vault

    made = fbx.make_trajectory_buffer(**TRAJECTORY | {"add_batch_size": lanes}, sample_sequence_length=1, period=1)
    state = made.init(EXAMPLE)
    store = Vault("v", state.experience, rel_dir=str(folder), vault_uid="u")
    for first in range(0, number, 6):
        state = made.add(state, rows(first, lanes, 6))
        store.write(state)
    return store, folder / "v" / "u"


@pytest.mark.parametrize("lanes", [1, 2])
def test_every_row_of_a_vault_is_read(lanes, tmp_path):
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


def test_damaged_vaults_are_refused(tmp_path):
    import tensorstore

    store, path = vault(tmp_path)
    described = json.loads((path / "metadata.json").read_text())

    def says(**entries):
        (path / "metadata.json").write_text(json.dumps({**described, **entries}))

    says(version=9)
    pytest.raises(ValueError, from_vault, path).match("version is '9'; expected 1.x")
    for dtypes, match in [
        ({"obs": "object", "step": {"t": "int32"}}, "leaf 'obs' is 'object', but its array 'float32'"),
        ({"../x": "int32"}, "leaf '../x' has an invalid name"),
        ({"nope": "int32"}, "is damaged, or not a flashbax Vault"),
        ({}, "names no leaves"),
    ]:
        says(structure_dtype=dtypes)
        pytest.raises(ValueError, from_vault, path).match(match)
    says()
    base = {"driver": "ocdbt", "base": f"file://{path}", "path": "vault_index"}
    index = tensorstore.open({"driver": "zarr", "kvstore": base}, open=True).result()
    index.write(np.array([10**9], np.int32)).result()
    pytest.raises(ValueError, from_vault, path, newest=4).match("are missing. Take later ones")
    index.write(np.array([-1], np.int32)).result()
    pytest.raises(ValueError, from_vault, path).match("and -1 rows")
    large = {"shape": [1], "chunks": [2**40], "dtype": "<i4"}
    tensorstore.open({"driver": "zarr", "kvstore": base, "metadata": large}, create=True, delete_existing=True).result()
    pytest.raises(ValueError, from_vault, path).match(
        r"'vault_index' .* has chunks of \[1099511627776\]; expected at most"
    )
    shutil.rmtree(path / "d")
    pytest.raises((ValueError, FileNotFoundError), from_vault, path)
    pytest.raises(FileNotFoundError, from_vault, tmp_path).match("expected a flashbax Vault")

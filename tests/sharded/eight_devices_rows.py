"""Rows and statistics of sharded buffers on eight devices. `test_sharded.py` runs these in a process of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fbuf
from fbuf.samplers import Prioritized
from fbuf.sharded import Sharded
from fbuf.transforms import Normalize, NormalizeReward
from tests.support import sharded as support
from tests.support.refusals import raises
from tests.support.tables import by_tier
from tests.support.trees import same

DRAWS = ("local", "global")


def by_id(rows):
    """Return leaves of the rows held, by id, without their indices."""
    data, mask = jax.device_get(rows.data), np.asarray(rows.mask)
    return {int(i): tuple(leaf[mask][n] for leaf in data.values()) for n, i in enumerate(data["id"][mask])}


@pytest.mark.parametrize("draw", by_tier("local", exhaustive=["global"]))
def test_rows_are_those_of_one_buffer(draw):
    """Whole rows, the newest, rows by a shuffled index, and priorities; after `update_rows` from any device too."""
    buffer = fbuf.Buffer(support.CAPACITY, lanes=support.LANES, sampler=Prioritized(largest="held"))
    sharded = Sharded(buffer, support.mesh_of(), draw=draw)
    state, one = support.fill(sharded), support.fill(buffer)
    for got, want in ((sharded.rows(state), buffer.rows(one)), (sharded.rows(state, last=5), buffer.rows(one, last=5))):
        same((got.data, got.mask), (want.data, want.mask))
    np.testing.assert_array_equal(sharded.priorities(state), buffer.priorities(one))
    assert bool(sharded.can_add(state, 9))

    state, batch = sharded.sample(state, jax.random.key(0), 64)
    order, held = np.random.default_rng(0).permutation(64), by_id(buffer.rows(one))
    order = order[np.argsort(~np.asarray(batch.mask)[order], kind="stable")]  # rows of the empty shard are the last
    every, priority = jax.device_get((buffer.rows(one), buffer.priorities(one)))
    leaf = dict(zip(every.data["id"][every.mask].tolist(), priority[every.mask].tolist(), strict=True))
    index = jax.tree.map(lambda x: np.asarray(x)[order].copy(), batch.index)
    index.generation[0] += 7  # stale
    index.shard[1], index.shard[2] = 9, -1  # foreign
    fine = np.asarray(batch.mask)[order] & (np.arange(64) > 2)
    rows = sharded.get(state, index)
    np.testing.assert_array_equal(rows.mask, fine)
    ids = np.asarray(batch.data["id"])[order]
    same(by_id(rows), {int(i): held[int(i)] for i in ids[fine]})
    wanted = [leaf[int(i)] if known else np.nan for i, known in zip(ids, fine, strict=True)]
    np.testing.assert_array_equal(sharded.priorities(state, index), np.float32(wanted))
    np.testing.assert_array_equal(rows.index.shard, np.where(fine, index.shard, 8))

    # Invalid rows are counted once, whether they are at home or not.
    wrong = jax.tree.map(np.copy, index)
    home = next(n for n in range(3, 64) if fine[n] and index.shard[n] == n // 8)
    wrong.generation[home] += 7
    after = jax.jit(sharded.update_priority)(state, wrong, np.full(64, 2.0, np.float32))
    stats = jax.device_get(sharded.stats(after))
    assert (stats["refused_stale"], stats["refused_out_of_range"]) == (2, 2)
    valid = fine & (ids != ids[home])
    np.testing.assert_array_equal(np.asarray(sharded.priorities(after, index))[valid], 2.0)

    version = np.arange(64, dtype=np.int32) + 500
    versions = dict(zip(every.data["id"][every.mask].tolist(), every.data["version"][every.mask].tolist(), strict=True))
    update = jax.jit(sharded.update_rows)
    for given, at in ((index, order), (jax.tree.map(np.asarray, batch.index), np.arange(64))):
        before = jax.device_get(sharded.stats(state))
        state = update(state, given, {"version": version})
        stats = jax.device_get(sharded.stats(state))
        some = given is index
        assert stats["refused_stale"] - before["refused_stale"] == some
        assert stats["refused_out_of_range"] - before["refused_out_of_range"] == 2 * some
        for n, i in enumerate(np.asarray(batch.data["id"])[at]):
            if np.asarray(batch.mask)[at][n] and (not some or fine[n]):
                versions[int(i)] = int(version[n])  # the last of several wins
        data = jax.device_get(sharded.rows(state))
        found = dict(zip(data.data["id"][data.mask].tolist(), data.data["version"][data.mask].tolist(), strict=True))
        assert found == versions
    state = sharded.set(state, alpha=1.0, rebuild=True)
    got = jax.device_get(sharded.peek(state, jax.random.key(3), 64))
    power = np.array([leaf[int(i)] + buffer.sampler.eps for i in got.data["id"][got.mask]])
    total = sum(leaf.values()) + len(leaf) * buffer.sampler.eps
    np.testing.assert_allclose(got.probability[got.mask], power / total, rtol=1e-5)


@pytest.mark.parametrize("draw", by_tier(more=["global"], exhaustive=["local"]))
def test_windows_are_written_back(draw):
    view = fbuf.views.Sequence(3, boundary="mask", autoreset="same_step")
    sharded = Sharded(fbuf.Buffer(support.CAPACITY, lanes=support.LANES, view=view), support.mesh_of(), draw=draw)
    state, batch = sharded.sample(support.fill(sharded), jax.random.key(0), 32)
    index = jax.tree.map(lambda x: np.asarray(x)[::-1].copy(), batch.index)
    data = jax.tree.map(lambda x: np.asarray(x)[::-1], jax.device_get(batch.data))
    index.shard[0] = 9
    at = jax.device_get(sharded.window_index(state, index))
    there = data["mask"] & (np.arange(32) > 0)[:, None] & np.asarray(batch.mask)[::-1, None]
    np.testing.assert_array_equal(at.generation[1:] != 0, there[1:])
    missing = np.where(np.arange(32) == 0, 9, 8)[:, None]
    np.testing.assert_array_equal(at.shard, np.where(there, index.shard[:, None], missing))
    rows = sharded.get(state, at)
    np.testing.assert_array_equal(rows.mask, there)
    np.testing.assert_array_equal(np.asarray(rows.data["id"])[there], data["id"][there])
    state = sharded.update_rows(state, at, {"version": data["id"] + 7}, mask=there)
    after = sharded.get(state, at).data
    np.testing.assert_array_equal(np.asarray(after["version"])[there], data["id"][there] + 7)


@pytest.mark.more
def test_rows_inside_shard_map_are_those_of_the_device():
    sharded = Sharded(fbuf.Buffer(64), support.mesh_of())
    state = sharded.extend(sharded.init({"id": np.int32(0)}), {"id": np.arange(32, dtype=np.int32)})

    def local(state, index):
        rows = sharded.rows(state), sharded.rows(state, last=2), sharded.get(state, index)
        return rows[0].data["id"][:4], rows[1].data["id"], rows[2].data["id"]

    index = sharded.peek(state, jax.random.key(0), 16).index
    mapped = jax.shard_map(local, mesh=sharded.mesh, in_specs=P("data"), out_specs=P("data"))
    every, last, found = jax.device_get(jax.jit(mapped)(state, index))
    assert every.tolist() == list(range(32))
    assert last.reshape(8, 2).tolist() == [[4 * i + 2, 4 * i + 3] for i in range(8)]
    np.testing.assert_array_equal(found, sharded.get(state, index).data["id"])
    for call in (lambda: sharded.rows(state), lambda: sharded.rows(state, last=2)):
        raises(ValueError, "without lanes rows have no order over 8 shards. Use lanes=8", call)
    raises(TypeError, "expected the Index of a batch", lambda: sharded.get(state, jnp.arange(8)))
    plain = fbuf.Index(index.slot, index.generation)
    raises(TypeError, "of one buffer; expected one of shard. Pass batch.index", lambda: sharded.get(state, plain))
    with pytest.raises(ValueError, match="the length of index is 3, not a multiple"):
        sharded.get(state, jax.tree.map(lambda x: np.asarray(x)[:3], index))
    with pytest.raises(AttributeError, match="'Sharded' has no 'grow'"):
        sharded.grow  # noqa: B018


@pytest.mark.exhaustive
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes_with_another_axis(kind, draw):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    sharded = Sharded(fbuf.Buffer(support.CAPACITY, lanes=support.LANES, sampler=Prioritized()), mesh, draw=draw)
    state = support.fill(sharded)
    state, batch = jax.jit(sharded.sample, static_argnums=2)(state, jax.random.key(0), 32)
    index = jax.tree.map(lambda x: np.asarray(x)[::-1].copy(), batch.index)
    state = jax.jit(sharded.update_rows)(state, index, {"version": np.arange(32, dtype=np.int32) + 99})
    state = jax.jit(sharded.update_priority)(state, index, np.full(32, 5.0, np.float32))
    rows = jax.jit(sharded.get)(state, index)
    np.testing.assert_array_equal(rows.data["id"], np.asarray(batch.data["id"])[::-1])
    mask = np.asarray(rows.mask)
    assert mask.any() and (np.asarray(rows.data["version"])[mask] >= 99).all()
    np.testing.assert_allclose(np.asarray(sharded.priorities(state, index))[mask], 5.0, rtol=1e-5)


@pytest.mark.parametrize("draw", by_tier(more=["local"], exhaustive=["global"]))
def test_statistics_of_transforms_are_those_of_all_rows(draw):
    """Merged exactly, skewed shards and skipped numbers included, at write and at read."""
    stages = {"on_write": {"w": Normalize("obs")}, "on_read": (NormalizeReward(), Normalize("other"))}
    buffer = fbuf.Buffer(64, lanes=16, **stages)
    rng, sharded = np.random.default_rng(0), Sharded(buffer, support.mesh_of(), draw=draw)
    example = {"obs": np.zeros(3, np.float32), "reward": np.float32(0), "other": np.float32(0)}
    state, one = sharded.init(example), buffer.init(example)
    for turn in range(3):
        lane = np.arange(16, dtype=np.float32)
        rows = {
            "obs": (rng.normal(1e3, 1, (5, 16, 3)) * (1 + lane[None, :, None])).astype(np.float32),
            "reward": (rng.normal(0, 3, (5, 16)) + 100 * lane).astype(np.float32),
            "other": rng.normal(5, 1, (5, 16)).astype(np.float32),
        }
        rows["reward"][turn, 3] = np.nan
        mask = rng.random((5, 16)) < 0.8
        mask[:, 4:6] = False
        state, one = sharded.extend(state, rows, mask=mask), buffer.extend(one, rows, mask=mask)
    for name, leaf in buffer.rows(one).data.items():
        np.testing.assert_allclose(sharded.rows(state).data[name], leaf, rtol=1e-4, atol=1e-4)
    got, want = jax.device_get((sharded.stats(state), buffer.stats(one)))
    for name in ("normalize_reward_mean", "normalize_reward_std", "normalize_other_std", "w_obs_mean"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-6)
    assert got["normalize_reward_skipped"] == want["normalize_reward_skipped"] > 0
    batch = jax.device_get(sharded.peek(state, jax.random.key(0), 64))
    scale = np.float32(got["normalize_reward_std"])
    stored = jax.device_get(sharded.get(state, batch.index)).data["reward"]
    np.testing.assert_allclose(batch.data["reward"][batch.mask], stored[batch.mask] / scale, rtol=1e-5)


@pytest.mark.more
def test_summaries_plans_and_plots_are_of_the_whole():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    view = fbuf.views.Transition(observation="id", reward="version", action="id", autoreset="same_step")
    buffer = support.buffer_of("prioritized", view=view)
    sharded = Sharded(buffer, support.mesh_of())
    state, one = support.fill(sharded), support.fill(buffer)
    chance = support.chances(buffer, one)
    found, want = sharded.summary(state), buffer.summary(one).to_dict()
    got = found.to_dict()
    share = np.bincount(support.shard_of(np.arange(chance.size)), weights=chance, minlength=8)
    assert got.pop("stats/balance") == pytest.approx(1 / (8 * np.sum(share**2)), rel=1e-5)
    for name in [name for name in got if name.startswith(("nbytes", "parts"))]:  # a table and counters for each shard
        got.pop(name), want.pop(name, None)
    assert got == pytest.approx(want, rel=1e-5)
    assert found.nbytes == sharded.nbytes(state)
    plan, whole = sharded.plan(support.example(), batch_size=64), buffer.plan(support.example(), batch_size=64)
    assert plan.device == sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert plan.peak_sample < whole.peak_sample / 3
    axes = fbuf.plot.overview(sharded, state, figure=Figure(figsize=(13, 6.4))).figure.axes
    assert [ax.get_label() for ax in axes] == ["ages", "priorities", "episode_lengths", "shards", "memory"]
    assert axes[3].get_title("left") == f"8 shards, balance {found.stats['balance']:.2f}"
    drawn = axes[3].patches[1].get_data().values
    np.testing.assert_allclose(drawn, share, rtol=1e-5)


@pytest.mark.more
def test_an_episode_of_shards_plays():
    buffer = fbuf.Buffer(128, lanes=8, episode_end=("done",))
    sharded = Sharded(buffer, support.mesh_of())
    t, lane = np.indices((9, 8))
    rows = {"t": (10 * t + lane).astype(np.int32), "done": (t + lane) % 4 == 3}
    states = [one.extend(one.init({"t": 0, "done": False}), rows) for one in (buffer, sharded)]
    for number in range(-10, 10):
        plain, shards = (fbuf.plot.episode(pair, number) for pair in zip((buffer, sharded), states, strict=True))
        assert shards.track == plain.track

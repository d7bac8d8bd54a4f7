"""Saved sharded buffers on eight devices. `test_sharded.py` runs these in a process of their own."""

import dataclasses
import time

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import fbuf
from fbuf._bridge import lifetime
from fbuf._host.store.store import Store
from fbuf.samplers import Consume, Epoch, Prioritized, Staleness, Uniform
from fbuf.sharded import Sharded
from tests.support import sharded as support
from tests.support.refusals import raises
from tests.support.sharded_saved import check_moved, check_no_lanes, check_on_host, on
from tests.support.tables import by_tier, product_by_tier
from tests.support.trees import same

SHARDS = [(8, 4), (8, 0), (0, 8), (2, 8)]
COMPRESSED = fbuf.storages.Compressed(keys=("id", "version"))
BLOCKS = fbuf.storages.Deduplicated(keys=("obs",), blocks=4096)


@product_by_tier(("sampler", "shards"), support.SAMPLERS, SHARDS, more=[("batch", (2, 8))])
def test_another_number_of_shards_draws_the_same(sampler, shards, tmp_path):
    check_moved(support.buffer_of(sampler), *shards, tmp_path)


@product_by_tier(
    ("sampler", "shards"),
    [Uniform(), Prioritized(normalize="buffer"), Staleness(2, version="version")],
    SHARDS,
    more=[(Prioritized(normalize="buffer"), (8, 4))],
)
def test_rows_without_lanes_are_all_kept(sampler, shards, tmp_path):
    check_no_lanes(fbuf.Buffer(480, sampler=sampler), *shards, tmp_path)


@product_by_tier(("storage", "check_vma"), [fbuf.storages.Host(), COMPRESSED], [True, False], more=[(COMPRESSED, True)])
def test_rows_on_the_host_of_each_shard(storage, check_vma, tmp_path):
    check_on_host(storage, check_vma, tmp_path)


@pytest.mark.more
@pytest.mark.parametrize("through", ["eager", "step"])
def test_the_error_of_a_write_names_the_shards_that_lost_rows(through, monkeypatch):
    sharded = Sharded(fbuf.Buffer(80, lanes=8, storage=fbuf.storages.Host()), support.mesh_of(8))

    def rows(first):
        return {"t": np.arange(first, first + 24, dtype=np.int32).reshape(3, 8)}

    state = jax.block_until_ready(sharded.extend(sharded.init({"t": np.int32(0)}), rows(0)))
    write, parts = Store._write, state.shards.rows.owner.parts
    failing = [lifetime.find(parts[shard].id) for shard in (2, 5)]

    def write_some(store, *rows):
        if store in failing:
            time.sleep(0.3 * (store is failing[1]))  # its error comes after that of the other
            raise MemoryError("injected")
        return write(store, *rows)

    with monkeypatch.context() as broken:
        broken.setattr(Store, "_write", write_some)
        lost = r"6 rows \(3 of shard 2 and 3 of shard 5\) were not written: write them again"
        with pytest.raises(OSError, match=lost) as caught:
            if through == "eager":
                state = sharded.extend(state, rows(24))
            else:
                state = jax.jit(sharded.extend, donate_argnums=0)(state, rows(24))
            jax.block_until_ready(state.shards.header)
            sharded.size(state)
    state = getattr(caught.value, "result", state)
    held = np.asarray(sharded.rows(state).data["t"])[np.asarray(sharded.rows(state).mask)]
    expected = {t for t in range(48) if t < 24 or t % 8 not in (2, 5)}
    assert set(held.tolist()) == expected


@pytest.mark.parametrize("sampler", by_tier(more=[Consume(2)], exhaustive=[Epoch()], ids=str))
def test_rows_that_were_drawn_stay_drawn(sampler, tmp_path):
    """On the same shards bit for bit. On others an epoch restarts, and draws of Consume are kept."""
    buffer = fbuf.Buffer(64, lanes=8, sampler=sampler)
    eight, four = (Sharded(buffer, support.mesh_of(number)) for number in (8, 4))
    state = eight.extend(eight.init({"id": np.int32(0)}), {"id": np.arange(48, dtype=np.int32).reshape(6, 8)})
    state, drawn = eight.sample(state, jax.random.key(0), 32)
    fbuf.save(tmp_path, eight, state)
    again, moved = fbuf.load(tmp_path, eight)[1], fbuf.load(tmp_path, four)[1]
    same(jax.device_get(again), jax.device_get(state))
    counts = np.bincount(support.ids(jax.device_get(drawn)), minlength=48) * isinstance(sampler, Consume)
    for turn in range(5):
        moved, batch = four.sample(moved, jax.random.key(turn), 32)
        counts += np.bincount(support.ids(jax.device_get(batch))[np.asarray(batch.mask)], minlength=48)
        if batch.last is not None and batch.last:
            break
    assert set(counts) == {2 if isinstance(sampler, Consume) else 1}


@product_by_tier("shards", [(2, 2), (4, 2), (2, 0), (0, 2)], more=[((4, 2),)])
def test_statistics_of_a_new_transform_are_those_of_all_rows(shards, tmp_path):
    stages = (None, fbuf.transforms.NormalizeReward()), shards
    before, after = (on(fbuf.Buffer(64, lanes=4, on_read=stage), number) for stage, number in zip(*stages, strict=True))
    rewards = np.random.default_rng(0).normal(0, 1, (6, 4)).astype(np.float32) + 10 * np.arange(4, dtype=np.float32)
    state = before.extend(before.init({"reward": np.float32(0)}), {"reward": rewards})
    fbuf.save(tmp_path, before, state)
    stats = after.stats(fbuf.load(tmp_path, after)[1])
    found = float(stats["normalize_reward_mean"]), float(stats["normalize_reward_std"])
    np.testing.assert_allclose(found, (rewards.mean(), rewards.std()), rtol=1e-5)


@pytest.mark.more
def test_host_rows_that_are_moved_are_planned():
    buffer = fbuf.Buffer(64, lanes=8, storage=fbuf.storages.Host())
    sharded, example = Sharded(buffer, support.mesh_of(2), draw="global"), {"obs": np.zeros(3, np.float32)}
    plan = sharded.plan(example, batch_size=8)
    leaves = jax.tree.leaves(sharded.init(example))
    assert plan.device == sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) < plan.peak_sample


@pytest.mark.more
@pytest.mark.parametrize("donated", [False, True])
def test_a_write_that_one_shard_cannot_store_leaves_a_whole_state(donated, monkeypatch):
    view = fbuf.views.Sequence(2, episode_end=())
    sharded = Sharded(fbuf.Buffer(64, lanes=4, storage=fbuf.storages.Host(), view=view), support.mesh_of(4))

    def rows(first, count):
        return {"t": np.arange(4 * first, 4 * (first + count), dtype=np.int32).reshape(count, 4)}

    def held(state):
        there = sharded.rows(state)
        return sorted(np.asarray(there.data["t"])[np.asarray(there.mask)].tolist())

    step = jax.jit(sharded.extend, donate_argnums=0) if donated else sharded.extend
    state = jax.block_until_ready(step(sharded.init({"t": np.int32(0)}), rows(0, 3)))
    write, failing = Store._write, lifetime.find(sorted(state.shards.rows.owner.ids)[2])

    def fail(store, *args):
        if store is failing:
            raise MemoryError("injected")
        return write(store, *args)

    with monkeypatch.context() as broken:
        broken.setattr(Store, "_write", fail)
        said = r"injected.*2 rows \(2 of shard \d\) were not written: write them again"
        if donated:
            state = step(state, rows(3, 2))
            jax.block_until_ready(state.shards.header)
            raises(OSError, said, sharded.size, state)
        else:
            with pytest.raises(OSError, match=said) as caught:
                jax.tree.leaves(step(state, rows(3, 2)))
            state = getattr(caught.value, "result", state)
            del caught
    missing = sorted({*range(20)} - {*held(state)})
    assert len(missing) == 2 and missing[1] == missing[0] + 4 and missing[0] in range(12, 16)
    assert int(sharded.stats(state)["refused_rows"]) == 2 and int(sharded.size(state)) == 18
    lane = missing[0] % 4
    state = step(state, rows(5, 1))
    windows = np.asarray(sharded.sample(state, jax.random.key(0), 200)[1].data["t"])
    assert set(windows[:, 1] - windows[:, 0]) == {4} and 8 + lane not in windows[:, 0]  # none spans the gap
    mask = np.arange(4) == lane
    state = step(state, rows(3, 2), mask=np.stack([mask, mask]))
    assert held(state) == list(range(24))


@pytest.mark.parametrize("storage", by_tier(more=[fbuf.storages.Host()], exhaustive=[fbuf.storages.Device()], ids=str))
def test_mixtures_are_saved_as_a_whole(storage, tmp_path):
    buffers = {"z": support.buffer_of("prioritized", storage=storage), "a": support.buffer_of("uniform")}
    plain = fbuf.Mixture(buffers, fractions={"z": 0.75, "a": 0.25})
    two, four = (spread(plain, number) for number in (2, 4))
    rows, mask, priority = support.rows_and_masks()
    states = {name: sharded.init(support.example()) for name, sharded in four.members}
    states["z"] = four["z"].extend(states["z"], rows, mask=mask, priority=priority)
    states["a"] = four["a"].extend(states["a"], rows, mask=mask)
    fbuf.save(tmp_path / "four", four, states, extra={"step": 7})
    again, loaded, extra = fbuf.load(tmp_path / "four", four, extra=True)
    assert again == four and extra == {"step": 7}
    same(*(jax.device_get(four.peek(each, jax.random.key(0), 64)) for each in (states, loaded)))
    whole, states = fbuf.load(tmp_path / "four")
    assert whole == plain
    fbuf.save(tmp_path / "one", whole, states)
    for name in ("four", "one"):
        _, moved = fbuf.load(tmp_path / name, two)
        for number, member in (("size", "z"), ("size", "a"), ("max_priority", "z")):
            assert two[member].stats(moved[member])[number] == whole[member].stats(states[member])[number] > 0
        assert two.peek(moved, jax.random.key(0), 64).mask.any()
    other = fbuf.Mixture({"z": two["z"]})
    raises(fbuf.SchemaError, "holds a mixture of z, a; expected z", fbuf.load, tmp_path / "four", other)
    raises(TypeError, r"plot.overview\(mixture\['z'\], states\['z'\]\)", fbuf.plot.overview, two, moved)


def spread(mixture, number):
    mesh = support.mesh_of(number, axis_types=(AxisType.Auto,))
    return dataclasses.replace(mixture, buffers={name: Sharded(buffer, mesh) for name, buffer in mixture.members})


@pytest.mark.more
def test_leaves_of_64_bits_are_refused():
    buffer = fbuf.Buffer(64, lanes=8, storage=fbuf.storages.Host(keys=("id",)))
    raises(ValueError, "leaf 'id' is int64", lambda: Sharded(buffer, support.mesh_of(2)).init({"id": np.int64(0)}))


@pytest.mark.exhaustive
def test_shared_blocks_are_moved(tmp_path):
    buffer = fbuf.Buffer(64, lanes=8, storage=BLOCKS)
    eight = Sharded(buffer, support.mesh_of())
    rng = np.random.default_rng(0)
    rows = {"id": np.arange(48, dtype=np.int32).reshape(6, 8), "obs": rng.integers(0, 9, (6, 8, 16, 84), np.uint8)}
    state = eight.extend(eight.init(jax.tree.map(lambda x: x[0, 0], rows)), rows)
    fbuf.save(tmp_path, eight, state)
    plain, loaded = fbuf.load(tmp_path)
    held = plain.rows(loaded)
    assert np.asarray(held.mask).sum() == 48
    same(jax.tree.map(lambda x: np.asarray(x[:6]), held.data), rows)


@pytest.mark.more
@pytest.mark.parametrize("layouts", [("tiles", "rows"), ("rows", "tiles")], ids=str)
def test_packed_leaves_of_shards_are_moved(layouts, tmp_path):
    saved, loaded = (fbuf.Buffer(64, lanes=8, storage=fbuf.storages.Device(layout)) for layout in layouts)
    eight, four = Sharded(saved, support.mesh_of()), Sharded(loaded, support.mesh_of(4))
    rng = np.random.default_rng(0)
    rows = {"id": np.arange(48, dtype=np.int32).reshape(6, 8), "obs": rng.integers(0, 9, (6, 8, 12, 84), np.uint8)}
    rows["action"] = rng.random((6, 8, 5), np.float32)
    state = eight.extend(eight.init(jax.tree.map(lambda x: x[0, 0], rows)), rows)
    fbuf.save(tmp_path, eight, state)
    moved = fbuf.load(tmp_path, four)[1]
    plain, whole = fbuf.load(tmp_path, loaded)
    for held in (eight.rows(state), four.rows(moved), plain.rows(whole)):
        same(jax.tree.map(lambda x: np.asarray(x[:6]), held.data), rows)

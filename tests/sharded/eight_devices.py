"""Sharded buffers on eight devices. `test_sharded.py` runs these in a process of their own."""

from __future__ import annotations

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fbuf
from fbuf._core.pytree import tree_bytes
from fbuf.samplers import Consume, Epoch, Prioritized
from fbuf.sharded import Sharded, _blocks
from tests.support import sharded as support
from tests.support.inplace import ROW
from tests.support.refusals import raises
from tests.support.tables import by_tier, product_by_tier
from tests.support.transforms import Largest
from tests.support.trees import same, x64

DRAWS = ("local", "global")
WINDOWS = fbuf.views.Sequence(2, autoreset="same_step")


@pytest.mark.parametrize(
    ("sampler", "draw", "draws"),
    by_tier(
        ("batch", "global", 10**5),
        exhaustive=[(*case, 10**6) for case in itertools.product(support.SAMPLERS, DRAWS)],
    ),
)
def test_rows_are_drawn_with_the_probabilities_of_one_buffer(sampler, draw, draws):
    support.check_draws(sampler, draw, draws)


@product_by_tier(
    ("sampler", "view"),
    [Epoch(), Epoch(shuffle=False), Consume(), Consume(2)],
    [fbuf.views.Row(), WINDOWS],
    more=[(Epoch(), WINDOWS), (Consume(), WINDOWS)],
)
def test_every_anchor_is_drawn_once_although_shards_have_unequal_numbers(sampler, view):
    buffer = fbuf.Buffer(support.CAPACITY, lanes=support.LANES, sampler=sampler, view=view)
    sharded = Sharded(buffer, support.mesh_of())
    state, chance = support.fill(sharded), support.chances(buffer, support.fill(buffer))
    times = getattr(sampler, "times", 1)
    wanted = times * (support.drawable(buffer) > 0)
    step = jax.jit(sharded.sample, static_argnums=2)
    epochs = 2 if isinstance(sampler, Epoch) else 1
    for epoch in range(epochs):
        counts = np.zeros(chance.size)
        for turn in range(100):
            state, batch = step(state, jax.random.key(100 * epoch + turn), 32)
            batch = jax.device_get(batch)
            counts += np.bincount(support.ids(batch)[batch.mask], minlength=chance.size)
            np.testing.assert_array_equal(batch.weight, batch.mask)
            if batch.last if isinstance(sampler, Epoch) else not batch.mask.any():
                break
        np.testing.assert_array_equal(counts, wanted)
        if isinstance(sampler, Epoch):
            np.testing.assert_allclose(batch.probability[batch.mask], 1 / np.count_nonzero(wanted), rtol=1e-6)
    name, number = ("epoch", 2) if isinstance(sampler, Epoch) else ("anchors_left", 0)
    assert int(sharded.stats(state)[name]) == number


def batches(sharded, step, turns=4):
    """What a few steps return."""
    rng, out, state = np.random.default_rng(0), [], support.fill(sharded)
    rows, _, _ = support.rows_and_masks()
    for turn in range(turns):
        ids = {"id": rng.integers(0, 400, (2, support.LANES), np.int32)}
        new = {name: leaf[:2] for name, leaf in rows.items()} | ids
        state, found = step(state, new, jax.random.key(turn))
        out.append(jax.device_get(found))
    assert step._cache_size() == 1  # the second step compiles nothing
    return out


def four(draw, number=4, **settings):
    """A sharded buffer over four of the devices, or over four pairs of them."""
    view = fbuf.views.Transition(n_step=2, observation="id", reward="version", action="id", autoreset="same_step")
    sampler = Prioritized(normalize="buffer")
    buffer = fbuf.Buffer(support.CAPACITY, lanes=support.LANES, sampler=sampler, view=view)
    shape, names = ((4,), ("data",)) if number == 4 else ((4, 2), ("data", "model"))
    return Sharded(buffer, jax.make_mesh(shape, names, devices=jax.devices()[:number], **settings), draw=draw)


@functools.cache
def four_batches(draw):
    sharded = four(draw, axis_types=(AxisType.Auto,))
    return batches(sharded, jax.jit(support.step_of(sharded, 32), donate_argnums=0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("number", [4, 8])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_meshes_of_any_kind_give_the_same(kind, number, draw):
    sharded = four(draw, number, axis_types=(kind,) * (number // 4))
    same(batches(sharded, jax.jit(support.step_of(sharded, 32), donate_argnums=0)), four_batches(draw))


@product_by_tier(("check_vma", "draw", "number"), [True, False], DRAWS, [4, 8], more=[(True, "local", 8)])
def test_methods_inside_shard_map_over_one_axis_act_on_the_block_of_the_device(check_vma, draw, number):
    sharded = four(draw, number, axis_types=(AxisType.Auto,) * (number // 4))
    settings = {"mesh": sharded.mesh, "axis_names": {"data"}, "check_vma": check_vma}
    specs = {"in_specs": (P("data"), P(None, "data"), P()), "out_specs": (P("data"), (P("data"), P(), P(), P()))}
    step = jax.shard_map(support.step_of(sharded, 32), **settings, **specs)
    same(batches(sharded, jax.jit(step, donate_argnums=0)), four_batches(draw))


@pytest.mark.more
def test_states_print_the_rows_of_all_shards():
    sharded = Sharded(fbuf.prioritized(64), support.mesh_of())
    state = sharded.extend(sharded.init({"id": np.int32(0)}), {"id": np.arange(24, dtype=np.int32)})
    assert repr(state).startswith("ShardedState(24 of 64 rows)") and "24 of 64 rows" in state._repr_html_()
    seen = []
    after = jax.jit(lambda state: (seen.append(repr(state)), sharded.clear(state))[1], donate_argnums=0)(state)
    assert seen[0].startswith("ShardedState(traced") and repr(state).startswith("ShardedState(donated")
    assert repr(after).startswith("ShardedState(0 of 64 rows)")


@product_by_tier(
    ("normalize", "draw"), ["batch", "buffer"], DRAWS, quick=[("batch", "local")], more=[("batch", "global")]
)
def test_priorities_reach_their_shards_from_any_device(normalize, draw):
    sampler = Prioritized(alpha=1.0, eps=0.0, normalize=normalize)
    buffer = fbuf.Buffer(support.CAPACITY, lanes=support.LANES, sampler=sampler)
    sharded = Sharded(buffer, support.mesh_of(), draw=draw)
    state, rng = support.fill(sharded), np.random.default_rng(0)
    state, batch = sharded.sample(state, jax.random.key(0), 256)
    held = support.held()
    leaf = np.where(held, support.rows_and_masks()[2].reshape(-1), 0).astype(np.float64)
    largest = leaf.max()
    order = rng.permutation(256)
    order = order[np.argsort(~np.asarray(batch.mask)[order], kind="stable")]  # rows of the empty shard are the last
    error = rng.uniform(1, 9, 256).astype(np.float32)
    index = jax.tree.map(lambda x: np.asarray(x)[order].copy(), batch.index)
    index.shard[:3] = (-1, 9, 3)  # foreign, and stale
    index.generation[2] += 7
    error[3] = np.nan
    index.shard[4], index.slot[4], index.generation[4] = 8, buffer.capacity // 8, 0  # masked
    state = jax.jit(sharded.update_priority)(state, index, error)
    stats = jax.device_get(sharded.stats(state))
    assert stats["refused_out_of_range"] == 2
    assert stats["refused_stale"] == stats["refused_nonfinite"] == 1
    number, taken = np.count_nonzero(batch.mask), support.ids(batch)[order]
    for row, value in list(zip(taken, error, strict=True))[5:number]:  # the last of several wins
        leaf[row] = value
    probability = leaf / leaf.sum()
    assert float(stats["max_priority"]) == pytest.approx(max(largest, np.nanmax(error[5:number])))
    batch = jax.device_get(sharded.peek(state, jax.random.key(1), 4096))
    np.testing.assert_allclose(batch.probability, np.where(batch.mask, probability[support.ids(batch)], 0), rtol=3e-5)
    # New rows have the largest priority of all shards.
    new = {name: leaf[:1] for name, leaf in support.rows_and_masks()[0].items()}
    new["id"] = np.arange(1000, 1000 + support.LANES, dtype=np.int32)[None, :]
    batch = jax.device_get(sharded.peek(sharded.extend(state, new), jax.random.key(2), 4096))
    added = support.ids(batch) >= 1000
    assert len(set(support.ids(batch)[added])) == support.LANES
    np.testing.assert_allclose(batch.probability[added], batch.probability.max(), rtol=1e-6)


@pytest.mark.parametrize("draw", by_tier("local", more=["global"]))
def test_all_mass_on_one_shard_and_on_none(draw):
    sampler = Prioritized(alpha=1.0, eps=0.0, normalize=None, beta=1.0)
    buffer = fbuf.Buffer(64, lanes=8, sampler=sampler)
    sharded = Sharded(buffer, support.mesh_of(), draw=draw)
    rows = {"id": np.arange(32, dtype=np.int32).reshape(4, 8)}
    empty = sharded.init({"id": np.int32(0)})
    assert not bool(sharded.can_sample(empty))
    state, batch = sharded.sample(empty, jax.random.key(0), 64)
    assert not bool(batch.mask.any()) and int(sharded.stats(state)["empty_samples"]) == 1
    priority = np.zeros((4, 8), np.float32)
    state = sharded.extend(empty, rows, priority=priority)
    batch = jax.device_get(sharded.peek(state, jax.random.key(1), 64))
    assert batch.mask.all() and set(batch.probability) == {np.float32(1 / 32)} and set(batch.weight) == {1.0}
    priority[:, 5] = 2.0
    state = sharded.extend(empty, rows, priority=priority)
    batch = jax.device_get(sharded.peek(state, jax.random.key(2), 64))
    assert set(support.ids(batch)[batch.mask] % 8) == {5}
    np.testing.assert_allclose(batch.probability[batch.mask], 0.25)
    # Of the mean over all 32 rows, of those that can be drawn.
    estimate = np.sum(batch.weight * support.ids(batch)) / 64
    assert estimate == pytest.approx((5 + 13 + 21 + 29) / 32, rel=0.3)


@functools.cache
def programs(storage, sampler, draw):
    parts = {"device": {}, "blocks": {"storage": fbuf.storages.Deduplicated(keys=("obs",), blocks=2**15)}}
    view = fbuf.views.Transition(autoreset="same_step")
    part = getattr(fbuf.samplers, sampler)()
    buffer = fbuf.Buffer(2**17, lanes=16, sampler=part, view=view, **parts[storage])
    sharded, key = Sharded(buffer, support.mesh_of(), draw=draw), jax.eval_shape(lambda: jax.random.key(0))
    batch = jax.eval_shape(lambda state, key: sharded.peek(state, key, 256), jax.eval_shape(sharded.init, ROW), key)
    size = tree_bytes(batch)
    return *support.in_place(sharded, ROW, 4, 256), size


BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "u8": 1}
OTHERS = [("device", "Uniform", "local"), ("blocks", "Prioritized", "local"), ("device", "Epoch", "local")]
OTHERS += [("device", "Prioritized", "global")]


@pytest.mark.in_place
@pytest.mark.parametrize(
    ("storage", "sampler", "draw"), by_tier(more=[("device", "Prioritized", "local")], exhaustive=OTHERS)
)
def test_a_step_is_in_place_and_moves_no_rows(storage, sampler, draw):
    program, text, size = programs(storage, sampler, draw)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes > 2**17 / 8 * 20
    assert memory.temp_size_in_bytes < 3 * (256 * 40 * (2 if draw == "global" else 1)) + 64 * 1024
    most, moved = 16 * 256 + 64 * 8, 0
    for line in text.splitlines():
        found = re.search(r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(", line)
        if not found:
            continue
        sizes = re.findall(r"(f32|s32|u32|pred|u8)\[([\d,]*)\]", found[1])
        total = sum(BYTES[kind] * int(np.prod([int(n) for n in shape.split(",") if n])) for kind, shape in sizes)
        if found[2] == "all-to-all":
            moved += total
        else:
            assert total <= most, line
    assert moved <= 1.3 * size / 8 and (moved > 0) == (draw == "global")


@pytest.mark.more
@pytest.mark.parametrize("draw", DRAWS)
def test_a_step_has_few_collectives(draw):
    """One for the draw and one for the update, in which a loop that seldom runs has two more; rows move in one message."""
    sharded = Sharded(fbuf.prioritized(256, lanes=8), support.mesh_of(), draw=draw)

    def step(state, rows, key):
        state, batch = sharded.sample(sharded.extend(state, rows), key, 32)
        return sharded.update_priority(state, batch.index, batch.weight)

    row = {"id": jnp.int32(0), "flag": jnp.bool_(False), "obs": jnp.zeros((3, 4), jnp.float16)}
    rows = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((2, 8, *leaf.shape), leaf.dtype), row)
    state = jax.eval_shape(sharded.init, row)
    text = jax.jit(step).lower(state, rows, jax.eval_shape(lambda: jax.random.key(0))).as_text()
    assert [text.count(f"stablehlo.{name}") for name in ("all_reduce", "all_gather", "all_to_all")][1:] == [
        1,
        int(draw == "global"),
    ]


@pytest.mark.parametrize("draw", by_tier(more=["local"], exhaustive=["global"]))
def test_steps_are_clean_under_strict_flags(draw):
    """With NaN checks, strict promotion, 64 bits and leak checks; an empty shard and zero leaves are no reason for a NaN."""
    with jax.debug_nans(True), jax.numpy_dtype_promotion("strict"), x64(), jax.checking_leaks():
        buffer = fbuf.Buffer(64, lanes=8, sampler=Prioritized(eps=0.0, normalize="buffer"))
        sharded = Sharded(buffer, support.mesh_of(), draw=draw)
        state = sharded.init({"id": jnp.int32(0)})
        step = jax.jit(support.step_of(sharded, 16))
        for turn, added in enumerate([[False] * 8, [True] + [False] * 7, [True] * 8]):
            rows = {"id": np.arange(16, dtype=np.int32).reshape(2, 8)}
            state = sharded.extend(state, rows, mask=np.array([added] * 2), priority=np.zeros((2, 8), np.float32))
            state, (batch, stats, _, _) = step(state, rows, jax.random.key(turn))
            jax.block_until_ready((batch, stats))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [jnp.bool_, jnp.int8, jnp.uint16, jnp.bfloat16, jnp.float32, jnp.int32, jnp.int4])
def test_blocks_of_any_dtype_are_exchanged_bit_for_bit(dtype):
    bits = np.random.default_rng(0).integers(0, 256, (64, 8, 3, 2), np.uint8)
    large = np.arange(64 * 8 * 600, dtype=np.int32).reshape(64, 8, 600)
    blocks = {
        "a": jnp.asarray(bits).view(jnp.int8).astype(dtype),
        "b": jnp.asarray(bits[..., 0, 0]),
        "c": jnp.asarray(large),
    }
    split = P("data")
    exchange = jax.shard_map(
        lambda tree: _blocks.exchange(tree, "data"), mesh=support.mesh_of(), in_specs=split, out_specs=split
    )
    blocks = jax.device_put(blocks, jax.sharding.NamedSharding(support.mesh_of(), split))
    for name, got in jax.jit(exchange)(blocks).items():
        sent = np.asarray(blocks[name])
        expected = np.swapaxes(sent.reshape(8, 8, *sent.shape[1:]), 0, 1).reshape(sent.shape)
        np.testing.assert_array_equal(np.asarray(got), expected)
    text = jax.jit(exchange).lower(blocks).as_text()
    assert text.count("stablehlo.all_to_all") == (3 if dtype == jnp.int4 else 2)


@pytest.mark.more
def test_refusals():
    mesh = support.mesh_of()
    parts = {
        "lanes=8": (ValueError, {"view": fbuf.views.Sequence(2, episode_end=())}),
        "ranks": (TypeError, {"sampler": fbuf.samplers.Ranked()}),
        "all rows in one place": (TypeError, {"writer": fbuf.writers.TopK("id")}),
        "one queue": (ValueError, {"sampler": Consume(order="fifo")}),
        "uniform=None": (ValueError, {"sampler": Prioritized(uniform=0.1)}),
        "host": (ValueError, {"sampler": Prioritized(on="host")}),
        "in memory": (ValueError, {"storage": fbuf.storages.Memmap("rows")}),
        "prefetch=0": (ValueError, {"prefetch": 1, "batch_size": 8}),
        "stage 'largest' of on_read .* statistics of one shard": (TypeError, {"on_read": Largest("id")}),
        "is 100, not a multiple of the 8 shards of axis 'data'. Use 96 or 104": (ValueError, {"capacity": 100}),
        "lanes is 12, not a multiple of the 8 shards of axis 'data'. Use 8 or 16": (ValueError, {"lanes": 12}),
    }
    for said, (kind, settings) in parts.items():
        with pytest.raises(kind, match=said):
            Sharded(fbuf.Buffer(**({"capacity": 48 if "lanes" in settings else 64} | settings)), mesh)
    for sampler in (Epoch(), Consume(), Prioritized(replace=False)):
        raises(ValueError, "Use draw='local'", Sharded, fbuf.Buffer(64, sampler=sampler), mesh, draw="global")
    sharded = Sharded(fbuf.prioritized(64), mesh)
    four = Sharded(fbuf.prioritized(64), support.mesh_of(4))
    state = sharded.init({"id": np.int32(0)})
    zeros = jnp.zeros((12,), jnp.int32)
    index = fbuf.Index(zeros, zeros.astype(jnp.uint32), shard=zeros)
    calls = {
        "Use 16 or 24": lambda: sharded.sample(state, jax.random.key(0), 20),
        "the number of rows is 4": lambda: sharded.extend(state, {"id": np.arange(4)}),
        "one row cannot be split": lambda: sharded.add(state, {"id": np.int32(1)}),
        "the length of index is 12": lambda: sharded.update_priority(state, index, jnp.ones(12)),
        "the state has 8 shards; expected 4, of axis 'data'. Save it, and write fbuf.load": lambda: four.size(state),
    }
    for said, call in calls.items():
        raises(ValueError, said, call)
    moving = Sharded(fbuf.prioritized(64), mesh, draw="global")
    with pytest.raises(ValueError, match="the key varies over axis 'data'; expected the same key on all devices"):
        peek = lambda state: moving.peek(state, jax.random.key(jax.lax.axis_index("data")), 16).mask  # noqa: E731
        jax.shard_map(peek, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(state)
    reversed_mesh = jax.make_mesh((8,), ("data",), devices=jax.devices()[::-1])
    with pytest.raises(ValueError, match=r"devices \[0, 1, .*; expected .* of devices \[7, 6, "):
        Sharded(fbuf.prioritized(64), reversed_mesh).size(state)
    for local in (lambda: four.init({"id": np.int32(0)}), lambda: four.size(four.init({"id": np.int32(0)}))):
        with pytest.raises(ValueError, match="has 8 devices; expected 4"):
            jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P("data"))()
    raises(TypeError, "expected ShardedState", lambda: sharded.size(fbuf.prioritized(64).init({"id": np.int32(0)})))

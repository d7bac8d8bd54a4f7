"""Parts of one's own: the examples of the README, with every other part, in jit, saved and loaded."""

import inspect
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import parts
from tests.support import refusals
from tests.support.inplace import assert_order
from tests.support.parts import BATCH, BUFFERS, EXAMPLE, LANES, OWN, make, rows_of
from tests.support.refusals import raises
from tests.support.tables import one_of
from tests.support.trees import same

ON_THE_DEVICE = [name for name in BUFFERS if name not in ("codec", "storage, sampler, view")]
name = one_of("storage, sampler, view", more=["writer", "codec", "transforms"], exhaustive=[*ON_THE_DEVICE])


@pytest.mark.more
def test_parts_work_in_jit_and_scan(name):
    buffer = make(BUFFERS[name])
    chunks = [rows_of(7, buffer.lanes, seed) for seed in range(8)]
    keys = jax.random.split(jax.random.key(0), len(chunks))

    def step(state, given):
        rows, key = given
        state, batch = buffer.sample(buffer.extend(state, rows), key, BATCH)
        return state, (batch.data, batch.probability, batch.weight, batch.mask)

    state, eager = buffer.init(EXAMPLE), []
    for rows, key in zip(chunks, keys, strict=True):
        state, out = step(state, (rows, key))
        eager.append(out)
    stacked = jax.tree.map(lambda *x: np.stack(x), *chunks)
    after, scanned = jax.jit(lambda state: jax.lax.scan(step, state, (stacked, keys)))(buffer.init(EXAMPLE))
    same(jax.tree.map(lambda *x: jnp.stack(x), *eager), scanned)
    same(buffer.rows(state).data, buffer.rows(after).data)


def test_parts_are_saved_and_loaded(name, tmp_path):
    buffer = make(BUFFERS[name])
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(60, buffer.lanes))
    fbuf.save(tmp_path / "replay", buffer, state)
    again, loaded = fbuf.load(tmp_path / "replay", make(BUFFERS[name]))
    assert again == buffer
    same(buffer.peek(state, jax.random.key(1), BATCH).data, again.peek(loaded, jax.random.key(1), BATCH).data)


stored = one_of("storage", exhaustive=["storage with priorities, stacks"])


@pytest.mark.more
def test_a_storage_of_rounded_rows(stored):
    settings = BUFFERS[stored]
    ours, plain = make(settings), make(settings | {"storage": fbuf.storages.Device()})
    rows, key = rows_of(60, ours.lanes), jax.random.key(2)
    one = ours.peek(ours.extend(ours.init(EXAMPLE), rows), key, 64)
    other = plain.peek(plain.extend(plain.init(EXAMPLE), rows), key, 64)
    same(one.index.slot, other.index.slot)
    for leaf in other.data:
        if leaf in ("position", "reward"):
            limit = np.abs(np.asarray(other.data[leaf])).max()
            assert np.abs(np.clip(other.data[leaf], -limit, limit) - one.data[leaf]).max() <= limit
        else:
            same(one.data[leaf], other.data[leaf])
    np.testing.assert_allclose(one.data.get("position", 0), other.data.get("position", 0), atol=2 / 127)
    state = ours.init(EXAMPLE)
    assert ours.nbytes(state)["device"] < plain.nbytes(plain.init(EXAMPLE))["device"]
    assert ours.plan(EXAMPLE).device == ours.nbytes(state)["device"]


def test_a_sampler_draws_with_its_probabilities():
    buffer = fbuf.Buffer(10, sampler=OWN["Lately"]())
    state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(13)})
    batch = buffer.peek(state, jax.random.key(0), 50_000)
    drawn = np.bincount(np.asarray(batch.data["t"]) - 3, minlength=10)
    chance = (2 * np.arange(10) + 1) / 100
    assert ((drawn - 50_000 * chance) ** 2 / (50_000 * chance)).sum() < 27.9  # chi-square, 9 degrees, 0.001
    np.testing.assert_allclose(batch.probability, chance[np.asarray(batch.data["t"]) - 3], rtol=1e-6)
    empty = buffer.peek(buffer.init({"t": 0}), jax.random.key(0), 4)
    assert not empty.mask.any() and not empty.probability.any() and not empty.weight.any()


def test_a_sampler_works_in_replays_mixtures_shards_and_larger_loads(tmp_path):
    buffer = fbuf.Buffer(10, sampler=OWN["Lately"](), view=OWN["WithLastAction"](), episode_end=("done",))
    rows = {"action": np.arange(13, dtype=np.int32), "done": np.zeros(13, bool)}
    example = {name: x[0] for name, x in rows.items()}
    state = buffer.extend(buffer.init(example), rows)

    replay = fbuf.Replay(buffer, example)
    replay.extend(rows)
    assert set(np.asarray(replay.sample(1000).data["action"]).tolist()) == set(range(4, 13))

    mixture = fbuf.Mixture({"own": buffer, "other": buffer}, fractions={"own": 0.25, "other": 0.75})
    states = {"own": state, "other": buffer.extend(state, {"action": rows["action"] + 100, "done": rows["done"]})}
    batch = mixture.peek(states, jax.random.key(0), 4000)
    from_own = np.asarray(batch.data["action"]) < 100
    assert from_own.sum() == 1000
    chance = (2 * (np.asarray(batch.data["action"])[from_own] - 4) + 1) / 81  # the oldest row held has none before it
    np.testing.assert_allclose(np.asarray(batch.probability)[from_own], chance / 4, rtol=1e-6)

    sharded = fbuf.sharded.Sharded(buffer, jax.make_mesh((1,), ("data",)))
    of_shard = sharded.peek(sharded.extend(sharded.init(example), rows), jax.random.key(1), 100)
    same(of_shard.data, buffer.peek(state, jax.random.key(1), 100).data)

    fbuf.save(tmp_path, buffer, state)
    larger, loaded = fbuf.load(tmp_path, buffer, resize=20)
    same(larger.peek(loaded, jax.random.key(2), 100).data, buffer.peek(state, jax.random.key(2), 100).data)
    loaded = larger.extend(loaded, {"action": rows["action"] + 13, "done": rows["done"]})
    assert set(np.asarray(larger.peek(loaded, jax.random.key(3), 4000).data["action"]).tolist()) == set(range(7, 26))


def test_a_view_looks_back_within_the_episode():
    buffer = make({"view": OWN["WithLastAction"](), "lanes": LANES})
    state, rows, length = buffer.init(EXAMPLE), rows_of(100, LANES), 40 // LANES
    for start in range(0, 100, 10):
        state = buffer.extend(state, jax.tree.map(lambda x, start=start: x[start : start + 10], rows))
    action, end = rows["action"], rows["terminated"] | rows["truncated"]
    expected = set()
    for lane in range(LANES):
        for t in range(100 - length, 100):
            first = end[t - 1, lane]
            if t > 100 - length or first:  # else the action before it is overwritten
                expected.add((int(action[t, lane]), 0 if first else int(action[t - 1, lane])))
    batch = jax.device_get(buffer.peek(state, jax.random.key(0), 4000))
    assert batch.mask.all()
    assert set(zip(batch.data["action"].tolist(), batch.data["last_action"].tolist(), strict=True)) == expected


def test_a_view_looks_ahead_within_the_episode():
    @parts.component
    class Next(parts.FieldsView):
        rule = parts.AnchorRule("next", ahead=2)

        def fields(self, spec, anchors, slot):
            return {"now": ("t", slot), "later/t": ("t", parts.later(anchors, slot, 2))}

    buffer = fbuf.Buffer(12, view=Next(), episode_end=("done",))
    state = buffer.init({"t": 0, "done": False})
    t = np.arange(1, 31)
    for start in range(0, 30, 5):
        state = buffer.extend(state, {"t": t[start : start + 5], "done": t[start : start + 5] % 7 == 0})
    batch = buffer.peek(state, jax.random.key(0), 1000)
    pairs = set(zip(np.asarray(batch.data["now"]).tolist(), np.asarray(batch.data["later"]["t"]).tolist(), strict=True))
    assert pairs == {(t, t + 2) for t in range(19, 29) if (t - 1) // 7 == (t + 1) // 7}


def test_a_writer_keeps_every_third():
    buffer = fbuf.Buffer(4, writer=OWN["EveryNth"](3))
    state = buffer.init({"t": 0})
    for start in range(0, 24, 4):
        state = buffer.extend(state, {"t": np.arange(start, start + 4, dtype=np.int32)})
    assert sorted(np.asarray(buffer.rows(state).data["t"]).tolist()) == [12, 15, 18, 21]


def test_a_codec_and_a_transform():
    rows = rows_of(30, None)
    buffer = make(BUFFERS["codec"])
    state = buffer.extend(buffer.init(EXAMPLE), rows)
    np.testing.assert_array_equal(buffer.rows(state, last=30).data["obs"], rows["obs"])
    buffer = make(BUFFERS["transforms"])
    state = buffer.extend(buffer.init(EXAMPLE), rows)
    np.testing.assert_array_equal(buffer.rows(state, last=30).data["reward"], np.clip(rows["reward"], -1, 1))
    assert np.abs(np.asarray(buffer.peek(state, jax.random.key(0), 64).data["reward"])).max() == 0.5


class Alike:
    def init(self, geometry, dense): ...


class Looking(fbuf.views.Row):
    rule = parts.AnchorRule("looking", ahead=1, prompt=False)


def test_a_part_derives_from_its_base_class():
    said = r"sampler is .*; expected a fbuf.parts.Sampler. Write class Alike\(fbuf.parts.Sampler\)."
    raises(TypeError, said, fbuf.Buffer, 4, sampler=Alike())
    raises(TypeError, r"Write class Alike\(fbuf.parts.Scattering\).", fbuf.Buffer, 4, writer=Alike())
    raises(TypeError, "has no `decide`; see fbuf.parts.View", fbuf.Buffer, 4, view=Looking())
    with pytest.raises(TypeError, match="abstract method '?change"):
        own(parts.Sampler, init=lambda *_: None)()


@pytest.mark.optimized
def test_states_of_one_name_in_two_private_modules_are_exported():
    for module in ("own._parts.first", "own._parts.second"):
        cls = parts.state(type("Counts", (), {"__module__": module, "__annotations__": {"n": Any}}))
        exported = jax.export.export(jax.jit(lambda s: s))(cls(jnp.int32(1)))
        again = jax.export.deserialize(exported.serialize())
        assert again.call(cls(jnp.int32(3))).n == 3


def own(base, **members):
    return parts.component(type("Own", (base,), members))()


def zeros(size):
    return jnp.zeros(size, jnp.int32)


def used(**part):
    """Add a row to a buffer with this part, and draw."""
    buffer = fbuf.Buffer(4, **part)
    buffer.sample(buffer.add(buffer.init({"t": np.float32(0)}), {"t": np.float32(1)}), jax.random.key(0), 4)


INVALID = """
used(sampler=own(parts.NthSampler, pick=lambda own, key, size, total: zeros(size))) => TypeError
    Own.pick returned [4]; expected two of [4]
used(sampler=own(parts.NthSampler, pick=lambda own, key, size, total: (zeros(size), jnp.float32(1)))) => TypeError
    Own.pick returned [4], []
used(sampler=own(parts.NthSampler, draw=lambda *given: given[1])) => TypeError Own.draw gave | expected (state, Draw)
used(view=own(parts.FieldsView, fields=lambda *_: ["t"])) => TypeError Own.fields returned | expected a dict of pairs
used(view=own(parts.FieldsView, fields=lambda *_: {"t": "t"})) => TypeError Own.fields returned | expected a dict of pairs
used(view=own(parts.FieldsView, fields=lambda own, spec, anchors, slot: {"x": ("y", slot)})) => ValueError
    Own.fields names 'y', but rows have t
used(view=own(parts.FieldsView, fields=lambda own, *given: {"x": ("t", parts.earlier(*given[1:], 1))})) => ValueError
    has no neighbouring rows | Rule("name", back=1)
used(writer=own(parts.Scattering, init=lambda *_: zeros(()), choose=lambda *given: zeros(given[-1].shape))) => TypeError
    Own.choose returned a | expected slots and state
used(storage=own(OWN["Rounded"], take=lambda own, arrays, name, slot, leaf: arrays[name][slot])) => TypeError
    Own.take: leaf 't' is int8[4]; expected float32[4]
used(storage=own(parts.ArrayStorage)) => NotImplementedError allocate, put and take. Write def allocate(self, capacity, spec)
used(sampler=own(parts.NthSampler)) => NotImplementedError Own: write def pick
used(view=own(parts.FieldsView)) => NotImplementedError Own: write def fields
"""


def test_invalid_results_of_parts_are_refused():
    refusals.check_all(INVALID, globals())


def test_every_class_that_a_required_method_names_is_public():
    modules = [sys.modules[f"fbuf.{name}"] for name in "_core.slots _interfaces.sampler _interfaces.storage".split()]
    modules += [sys.modules[f"fbuf._interfaces.{name}"] for name in ("transform", "view", "writer")]
    classes = {n for m in modules for n, v in vars(m).items() if isinstance(v, type) and v.__module__ == m.__name__}
    bases = parts.Storage, parts.Sampler, parts.View, parts.Streaming, parts.Scattering
    named = set()
    for base in (*bases, parts.Transform, parts.StatefulTransform):
        for name in base.__abstractmethods__:
            member = inspect.getattr_static(base, name)
            named |= set(re.findall(r"\w+", str(getattr(member, "fget", member).__annotations__)))
    assert named & classes > {"Placement", "Window"}
    assert named & classes <= set(parts.__all__), (
        f"add to fbuf/parts/__init__.py: {named & classes - set(parts.__all__)}"
    )


large = one_of("storage, sampler, view", exhaustive=[*ON_THE_DEVICE])


@pytest.mark.more
@pytest.mark.in_place
def test_is_in_place(large):
    settings = {"episode_end": ("terminated", "truncated")} | BUFFERS[large]
    assert_order(fbuf.Buffer(20_000, **settings), "es", EXAMPLE)


@pytest.mark.more
def test_a_storage_updates_rows_and_maps():
    buffer = make(BUFFERS["storage"])
    state = buffer.extend(buffer.init(EXAMPLE), rows_of(30, None))
    state, batch = buffer.sample(state, jax.random.key(0), BATCH)
    state = buffer.update_rows(state, batch.index, {"action": jnp.full((BATCH,), 77, jnp.int32)})
    assert set(np.asarray(buffer.get(state, batch.index).data["action"])) == {77}
    keys = jax.random.split(jax.random.key(0), 3)
    states = jax.vmap(lambda _: buffer.init(EXAMPLE))(keys)
    states = jax.vmap(lambda s: buffer.extend(s, rows_of(9, None)))(states)
    assert jax.vmap(lambda s, k: buffer.peek(s, k, 4).data["action"])(states, keys).shape == (3, 4)

"""Transforms one by one: numpy says what they make of rows and batches, and each message names the fix."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fbuf import transforms
from fbuf._core.component import from_config, to_config
from fbuf._interfaces.transform import Transform
from tests.support.refusals import raises
from tests.support.transform_rows import applied, memory_of, negated, rows, run
from tests.support.trees import same
from tests.support.uniformity import chi_square_z

# Each for rows with leaves a float32[3], b float32[2], e float32[3], frame uint8[6, 5], r float32[].
MEMBERS = {
    "Augment": transforms.Augment("frame", 2),
    "Cast": transforms.Cast("frame", "float16", source="uint8"),
    "Chain": transforms.Chain((transforms.Scale("frame", source="uint8"), transforms.Rename({"a": "c"}))),
    "Concatenate": transforms.Concatenate(("a", "b"), "c", sizes=(3, 2)),
    "Denormalize": transforms.Denormalize(transforms.Normalize("a")),
    "Drop": transforms.Drop("a"),
    "Map": transforms.Map(negated, negated),
    "Normalize": transforms.Normalize("a"),
    "NormalizeReward": transforms.NormalizeReward("r"),
    "Rename": transforms.Rename({"a": "x/y", "b": "a"}),
    "RewardToGo": transforms.RewardToGo(0.9, "r", episode_end=()),
    "Scale": transforms.Scale("frame", source="uint8"),
    "Select": transforms.Select(("a", "frame")),
    "Split": transforms.Split("a", ("x", "y"), (1, 2)),
    "Stack": transforms.Stack(("a", "e"), "both", axis=-1),
    "Unstack": transforms.Unstack("b", ("x", "y")),
}
NO_INVERSE = ("Augment", "Drop", "RewardToGo", "Select")
LOSSY = ("Normalize", "NormalizeReward", "Denormalize")


def test_every_transform_is_a_value():
    assert set(MEMBERS) == set(transforms.__all__) - {"apply"}
    for name, member in MEMBERS.items():
        assert isinstance(member, Transform) and hash(member) == hash(member)
        if name != "Map":  # a function has no JSON form
            again = from_config(to_config(member))
            assert again == member and hash(again) == hash(member) and repr(again) == repr(member)
            assert eval(repr(member), vars(transforms)) == member


def flattened(data):
    return jax.tree.map(lambda x: x.reshape(12, *x.shape[2:]), data)


@functools.cache
def everything():
    data = rows(4, 3)
    memories = {name: memory_of(member) for name, member in MEMBERS.items()}

    @jax.jit
    def make(data, memories):
        out = {}
        for name, member in MEMBERS.items():
            settings = {"memory": memories[name], "key": jax.random.key(0)}
            if name == "RewardToGo":
                continue
            flat = transforms.apply(member, flattened(data), **settings)
            one = transforms.apply(member, {n: x[1, 2] for n, x in data.items()}, lead=0, **settings)
            windows = transforms.apply(member, data, lead=2, **settings)
            back = transforms.apply(member.inverse(), flat, **settings) if name not in NO_INVERSE else None
            out[name] = (windows, flat, one, back)
        return out

    return jax.device_get(make(data, memories))


def test_windows_and_rows_give_the_same():
    for name, (windows, flat, one, _) in everything().items():
        if name != "Augment":  # one shift for all frames of a window
            close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7, err_msg=name)
            jax.tree.map(close, flattened(windows), flat)
            jax.tree.map(close, jax.tree.map(lambda x: x[5], flat), one)


def test_inverses_give_the_rows_back():
    data = flattened(rows(4, 3))
    for name, (_, made, _, back) in everything().items():
        if name in NO_INVERSE:
            assert MEMBERS[name].inverse() is None
            raises(ValueError, r"stage '.*', .* has no inverse", transforms.Chain((MEMBERS[name],)).inverse)
            continue
        if name in LOSSY:
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), back, data)
        else:
            same(back, data)
        pairs = list(zip(jax.tree.leaves(made), jax.tree.leaves(data), strict=False))
        changed = any(x.shape != y.shape or x.dtype != y.dtype or not np.array_equal(x, y) for x, y in pairs)
        assert changed or jax.tree.structure(made) != jax.tree.structure(data)


def test_leaves_come_and_go_by_name():
    data = {"obs": {"x": np.zeros((4, 2)), "y": np.ones(4)}, "r": np.ones(4)}
    assert list(run(transforms.Select(("obs/y", "r")), data)) == ["obs", "r"]
    assert list(run(transforms.Select(("obs/y", "r")), data)["obs"]) == ["y"]
    assert run(transforms.Select("obs"), data).keys() == {"obs"}
    assert run(transforms.Drop("obs"), data).keys() == {"r"}
    assert run(transforms.Drop((("obs", "x"),)), data)["obs"].keys() == {"y"}
    renamed = run(transforms.Rename({"obs": "next/obs", "r": "reward"}), data)
    assert renamed.keys() == {"next", "reward"} and renamed["next"]["obs"].keys() == {"x", "y"}
    swapped = run(transforms.Rename({"obs/x": "obs/y", "obs/y": "obs/x"}), data)
    assert swapped["obs"]["x"].shape == (4,) and swapped["obs"]["y"].shape == (4, 2)
    same(run(transforms.Scale("obs", 2.0), data)["obs"], jax.tree.map(lambda x: 2 * jnp.float32(x), data["obs"]))
    assert run(transforms.Cast("obs/x", "int8"), data)["obs"]["x"].dtype == np.int8


def test_rows_that_are_not_dicts():
    pair = (np.zeros((4, 2)), np.ones(4))
    said = r"rows are PyTreeDef\(\(\*, \*\)\); expected dicts\. Use transforms\.Map\."
    raises(TypeError, said, transforms.apply, transforms.Select("0"), pair)
    raises(TypeError, "expected dicts", transforms.apply, transforms.Drop("x"), np.zeros(3))
    out = run(transforms.Scale("1", 2.0), pair)  # what keeps the structure takes any
    assert isinstance(out, tuple) and out[1].tolist() == [2.0] * 4
    assert run(transforms.Map(lambda row: {"x": row[0]}), pair)["x"].shape == (4, 2)


def test_leaves_are_joined_and_split():
    data = rows(4, 3)
    made = run(transforms.Concatenate(("a", "b"), "c"), data, lead=2)
    np.testing.assert_array_equal(made["c"], np.concatenate([data["a"], data["b"]], -1))
    made = run(transforms.Stack(("a", "e"), "both", axis=1), data, lead=2)
    np.testing.assert_array_equal(made["both"], np.stack([data["a"], data["e"]], -1))
    made = run(transforms.Stack(("a", "e"), "both"), data, lead=2)
    np.testing.assert_array_equal(made["both"], np.stack([data["a"], data["e"]], 2))
    parts = run(transforms.Split("frame", ("top", "rest"), (1, 5), axis=0), data, lead=2)
    np.testing.assert_array_equal(parts["rest"], data["frame"][:, :, 1:])
    parts = run(transforms.Split("frame", ("x", "y", "z"), (1, 2, 3), axis=0), data, lead=2)
    np.testing.assert_array_equal(parts["y"], data["frame"][:, :, 1:3])
    lines = run(transforms.Unstack("frame", tuple("uvwxy"), axis=-1), data, lead=2)
    np.testing.assert_array_equal(lines["w"], data["frame"][..., 2])


def test_scaled_integers_are_given_back():
    for dtype, to in (("uint8", "float16"), ("int8", "float32"), ("int16", "float32")):
        info = np.iinfo(dtype)
        numbers = np.arange(info.min, info.max + 1).astype(dtype)
        scale = transforms.Scale("x", 1 / info.max, 0.25, dtype=to, source=dtype)
        made = run(scale, {"x": numbers})
        assert made["x"].dtype == to
        want = (numbers.astype(np.float64) / info.max + 0.25).astype(to)
        np.testing.assert_allclose(made["x"], want, rtol=2e-3 if to == "float16" else 1e-6, atol=1e-6)
        same(run(scale.inverse(), made), {"x": jnp.asarray(numbers)})
    for stage in (
        transforms.Scale("x", 0.5, dtype="float64", source="uint8"),
        transforms.Cast("x", "int64", source="uint8"),
    ):
        x = jnp.arange(256, dtype=jnp.uint8)  # where the program has no such dtype, too
        same(run(stage.inverse(), run(stage, {"x": x})), {"x": x})


def test_integers_are_cut_at_their_ends():
    x = {"x": np.array([-1e9, -3.5, -2.5, 2.5, 3.49, 1e9, np.inf], np.float32)}
    for dtype, want in (("uint8", [0, 0, 0, 2, 3, 255, 255]), ("int8", [-128, -4, -2, 2, 3, 127, 127])):
        assert run(transforms.Scale("x", 1.0, dtype=dtype), x)["x"].tolist() == want
    for dtype in ("int32", "uint32"):
        out = run(transforms.Scale("x", 1e6, dtype=dtype), x)["x"]
        assert int(out[-1]) > 0.99 * np.iinfo(dtype).max and int(out[0]) <= 0.99 * np.iinfo(dtype).min


def oracle_to_go(reward, end, there, gamma):
    total, whole, out, complete = 0.0, False, [], []
    for r, e, t in list(zip(reward, end, there, strict=True))[::-1]:
        if t:
            total, whole = r + (0.0 if e else gamma * total), whole or bool(e)
        out.append(total if t else 0.0)
        complete.append(whole and bool(t))
    return np.array(out[::-1], np.float32), np.array(complete[::-1])


@given(st.data())
def test_reward_to_go(data):
    lanes, number = 3, 13
    flags = st.lists(st.booleans(), min_size=lanes * number, max_size=lanes * number)
    end, cut, there = (np.array(data.draw(flags)).reshape(number, lanes) for _ in range(3))
    reward = np.array(data.draw(st.lists(st.integers(-4, 4), min_size=lanes * number, max_size=lanes * number)))
    reward = reward.reshape(number, lanes).astype(np.float32)
    gamma = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    go = transforms.RewardToGo(gamma, complete="whole")
    made = run(go, {"reward": reward, "terminated": end, "truncated": cut}, lead=2, time=0, mask=there)
    for lane in range(lanes):
        want, whole = oracle_to_go(reward[:, lane], (end | cut)[:, lane], there[:, lane], gamma)
        np.testing.assert_allclose(made["reward_to_go"][:, lane], want, atol=1e-5)
        np.testing.assert_array_equal(made["whole"][:, lane], whole)


def test_rewards_that_are_not_finite_of_vectors_and_of_integers():
    reward = jnp.array([[1.0, 2.0, jnp.nan, 3.0, 4.0, jnp.inf]])
    data = {"reward": reward, "done": jnp.array([[False, True, False, True, True, False]])}
    out = run(transforms.RewardToGo(1.0, episode_end=("done",)), data, lead=2, time=1)["reward_to_go"]
    np.testing.assert_array_equal(out, [[3.0, 2.0, np.nan, 3.0, 4.0, np.inf]])
    out = run(transforms.RewardToGo(0.0, episode_end=()), data, lead=2, time=1)["reward_to_go"]
    np.testing.assert_array_equal(out, data["reward"])
    reward = np.array([[[1, 2], [3, 4], [5, 6]]], np.int32)
    made = run(transforms.RewardToGo(1.0, episode_end=(), into="reward"), {"reward": reward}, lead=2, time=1)
    assert made.keys() == {"reward"} and made["reward"].dtype == np.float32
    np.testing.assert_array_equal(made["reward"], [[[9, 12], [8, 10], [5, 6]]])
    raises(
        ValueError, "data are single rows; expected windows", lambda: run(transforms.RewardToGo(), {"reward": reward})
    )


NUMBER = st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([math.nan, math.inf, -math.inf, 1e20]))


@given(st.lists(st.lists(st.tuples(NUMBER, st.booleans()), min_size=4, max_size=4), min_size=1, max_size=6))
def test_running_statistics(portions):
    moments, seen, skipped = transforms._running_stats.init(()), [], 0
    for portion in portions:
        values = np.array([x for x, _ in portion], np.float32)
        there = np.array([t for _, t in portion])
        moments = _merge(moments, values, there)
        fine = np.abs(values) <= 1e15
        seen += values[there & fine].tolist()
        skipped += int((there & ~fine).sum())
    assert int(transforms._running_stats.count(moments)) == len(seen) and int(moments.skipped) == skipped
    mean, variance = (np.mean(seen), np.var(seen)) if seen else (0.0, 0.0)
    np.testing.assert_allclose(transforms._running_stats.mean(moments), mean, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(transforms._running_stats.variance(moments), variance, rtol=1e-4, atol=1e-3)


_merge = jax.jit(transforms._running_stats.merge)


def test_a_large_mean_and_many_rows_cost_no_digits():
    rng = np.random.default_rng(0)
    values = (1e4 + rng.normal(size=(2000, 50))).astype(np.float32)
    merge = lambda m, x: (transforms._running_stats.merge(m, x, jnp.ones(50, bool)), None)  # noqa: E731
    moments, _ = jax.lax.scan(merge, transforms._running_stats.init(()), values)
    np.testing.assert_allclose(transforms._running_stats.mean(moments), values.astype(np.float64).mean(), rtol=1e-7)
    np.testing.assert_allclose(transforms._running_stats.variance(moments), values.astype(np.float64).var(), rtol=1e-3)
    # Far beyond what one float32 can count: a row more still counts.
    seen, squares = jnp.array([3, 5], jnp.uint32), jnp.array([1.3e10, 0.0])
    many = transforms._running_stats.Moments(seen, jnp.zeros(2), squares, moments.skipped)
    step = jax.jit(lambda m: transforms._running_stats.merge(m, jnp.ones(1), jnp.ones(1, bool)))
    for _ in range(200):
        many = step(many)
    assert int(many.seen[1]) == 205 and int(many.seen[0]) == 3
    total = float(np.float64(many.squares[0]) + np.float64(many.squares[1]))
    np.testing.assert_allclose(total - np.float64(np.float32(1.3e10)), 200.0, rtol=1e-3)
    assert (
        int(_merge(transforms._running_stats.init(()), np.full(4, 2.0**31, np.float32), np.ones(4, bool)).seen[1]) == 4
    )
    carry = transforms._running_stats.Moments(
        jnp.array([0, 2**32 - 2], jnp.uint32), many.mean, many.squares, many.skipped
    )
    assert _merge(carry, np.ones(4, np.float32), np.ones(4, bool)).seen.tolist() == [1, 2]


def test_normalize():
    data, seen = rows(5), rows(7, 2, seed=9)["a"].astype(np.float64).reshape(-1, 3)
    out = applied(transforms.Normalize("a"), data)["a"]
    np.testing.assert_allclose(out, (data["a"] - seen.mean(0)) / seen.std(0), rtol=1e-4, atol=1e-5)
    out = applied(transforms.Normalize("a", center=False), data)["a"]
    np.testing.assert_allclose(out, data["a"] / seen.std(0), rtol=1e-4, atol=1e-5)
    out = applied(transforms.Normalize("a", clip=0.5), data)["a"]
    assert float(jnp.abs(out).max()) == 0.5
    out = applied(transforms.NormalizeReward("r"), data)["r"]
    np.testing.assert_allclose(out, data["r"] / rows(7, 2, seed=9)["r"].std(), rtol=1e-4)
    many = applied(transforms.Normalize(("a", "e"), of="a"), {**data, "e": np.stack([data["e"]] * 4, 1)})
    np.testing.assert_allclose(many["e"][:, 2], (data["e"] - seen.mean(0)) / seen.std(0), rtol=1e-4, atol=1e-5)


def test_normalize_of_constants():
    norm = transforms.Normalize("x", center=False)
    for number in (0, 1, 3):
        memory = norm.init({"x": jax.ShapeDtypeStruct((), np.float32)})
        memory = jax.jit(norm.observe)(memory, {"x": jnp.full(4, 3.0)}, jnp.arange(4) < number)
        assert run(norm, {"x": jnp.array([5.0, -2.0])}, memory=memory)["x"].tolist() == [5.0, -2.0]
    for dtype, want in (("int32", "float32"), ("float16", "float16")):
        memory = norm.init({"x": jax.ShapeDtypeStruct((), np.dtype(dtype))})
        assert run(norm, {"x": jnp.zeros(2, dtype)}, memory=memory)["x"].dtype == want


def possible(image, shift, cut):
    padded = np.pad(image, [(0, 0)] * (image.ndim - 2) + [(shift, shift)] * 2, mode="edge")
    high, wide = padded.shape[-2] - cut[0] + 1, padded.shape[-1] - cut[1] + 1
    return [padded[..., y : y + cut[0], x : x + cut[1]] for y in range(high) for x in range(wide)]


def test_shifts_and_crops():
    frames, number = np.random.default_rng(0).integers(0, 256, (3, 6, 5), np.uint8), 2000  # a stack
    for shift, crop, last in ((2, None, False), (1, (5, 5), True), (1, (7, 6), False)):
        given_frames = np.moveaxis(frames, 0, -1) if last else frames
        batch = {"obs": np.broadcast_to(given_frames, (number, *given_frames.shape))}
        augment = transforms.Augment("obs", shift, crop, axes=(-3, -2) if last else (-2, -1))
        out = np.asarray(run(augment, batch, key=jax.random.key(0))["obs"])
        out = np.moveaxis(out, -1, 1) if last else out
        assert out.dtype == np.uint8
        want = possible(frames, shift, crop or (6, 5))
        found = np.array([[np.array_equal(x, w) for w in want] for x in out])
        assert (found.sum(1) == 1).all()
        assert abs(chi_square_z(found.sum(0), np.full(len(want), 1 / len(want)))) < 5


def test_leaves_move_together_or_each_on_its_own():
    frames = np.random.default_rng(0).integers(0, 256, (64, 6, 5), np.uint8)
    data = dict.fromkeys(("obs", "next_obs", "other"), frames)
    for together in (False, True):
        one, again, other = (
            run(transforms.Augment(("obs", "next_obs"), 2, together=together), data, key=jax.random.key(seed))
            for seed in (1, 1, 2)
        )
        alike = (one["obs"] == one["next_obs"]).all(axis=(1, 2))
        assert alike.all() if together else alike.sum() < 20
        np.testing.assert_array_equal(one["other"], frames)
        same(one, again)
        assert not np.array_equal(one["obs"], other["obs"])

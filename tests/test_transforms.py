"""Transforms one by one: numpy says what they make of rows and batches, and each message is the one that helps."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf import transforms
from fbuf._config import from_config, to_config
from fbuf._typing import Invertible, Keyed, Remembering, Transform
from fbuf.transforms import (
    Augment,
    Cast,
    Chain,
    Concatenate,
    Denormalize,
    Drop,
    Map,
    Normalize,
    NormalizeReward,
    Rename,
    RewardToGo,
    Scale,
    Select,
    Split,
    Stack,
    Unstack,
    _moments,
)


def negated(row: Any) -> Any:
    """A function of a row, and its own inverse."""
    return {**row, "a": -row["a"]}


MEMBERS: dict[
    str, Transform
] = {  # each for rows with leaves a float32[3], b float32[2], frame uint8[6, 5], r float32[]
    "Augment": Augment("frame", 2),
    "Cast": Cast("frame", "float16", source="uint8"),
    "Chain": Chain((Scale("frame", source="uint8"), Rename({"a": "c"}))),
    "Concatenate": Concatenate(("a", "b"), "c", sizes=(3, 2)),
    "Denormalize": Denormalize(Normalize("a")),
    "Drop": Drop("a"),
    "Map": Map(negated, negated),
    "Normalize": Normalize("a"),
    "NormalizeReward": NormalizeReward("r"),
    "Rename": Rename({"a": "x/y", "b": "a"}),
    "RewardToGo": RewardToGo(0.9, "r", episode_end=()),
    "Scale": Scale("frame", source="uint8"),
    "Select": Select(("a", "frame")),
    "Split": Split("a", ("x", "y"), (1, 2)),
    "Stack": Stack(("a", "e"), "both", axis=-1),
    "Unstack": Unstack("b", ("x", "y")),
}
NO_INVERSE = ("Augment", "Drop", "RewardToGo", "Select")
LOSSY = ("Normalize", "NormalizeReward", "Denormalize")


def rows(*lead: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.normal(size=(*lead, 3)).astype(np.float32),
        "b": rng.normal(size=(*lead, 2)).astype(np.float32),
        "e": rng.normal(size=(*lead, 3)).astype(np.float32),
        "frame": rng.integers(0, 256, (*lead, 6, 5)).astype(np.uint8),
        "r": rng.normal(size=lead).astype(np.float32),
    }


def memory_of(transform: Transform) -> Any:
    """What it knows after a few rows."""
    source: Any = transform.of if isinstance(transform, Denormalize) else transform
    if not isinstance(source, Remembering):
        return None
    remembering: Remembering = source
    given = rows(7, 2, seed=9)
    spec = {n: jax.ShapeDtypeStruct(x.shape[2:], x.dtype) for n, x in given.items()}
    return remembering.observe(remembering.init(spec), given, jnp.ones((7, 2), bool))


run = jax.jit(transforms.apply, static_argnums=0, static_argnames=("lead", "time"))


def applied(transform: Transform, data: Any, **more: Any) -> Any:
    return run(transform, data, memory=memory_of(transform), **more)


def same(one: Any, two: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)


# -------------------------------------------------------------------------------------------- all members alike


def test_nobody_is_missing() -> None:
    assert set(MEMBERS) == set(transforms.__all__) - {"apply"}


@pytest.mark.parametrize("name", MEMBERS)
def test_they_are_values(name: str) -> None:
    member = MEMBERS[name]
    assert isinstance(member, Transform) and hash(member) == hash(member)
    if name != "Map":  # a function has no JSON form
        again = from_config(to_config(member))
        assert again == member and hash(again) == hash(member) and repr(again) == repr(member)
        assert eval(repr(member), vars(transforms)) == member


@pytest.mark.parametrize("name", MEMBERS)
def test_a_window_and_a_row_are_treated_alike(name: str) -> None:
    """Leaves `[B, T, ...]`, `[B, ...]` and one row give the same rows, eager and jitted."""
    member, data = MEMBERS[name], rows(4, 3)
    if name in ("Augment", "RewardToGo"):
        pytest.skip("one shift for all frames of a window, and sums along it")
    windows = applied(member, data, lead=2)
    flat = applied(member, {n: x.reshape(12, *x.shape[2:]) for n, x in data.items()})
    one = applied(member, {n: x[1, 2] for n, x in data.items()}, lead=0)
    same(jax.tree.map(lambda x: x.reshape(12, *x.shape[2:]), windows), flat)
    eager = transforms.apply(member, data, memory=memory_of(member), lead=2)
    for left, right in ((jax.tree.map(lambda x: x[5], flat), one), (eager, windows)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), left, right)


@pytest.mark.parametrize("name", MEMBERS)
def test_inverses(name: str) -> None:
    member, data = MEMBERS[name], rows(5)
    if name in NO_INVERSE:
        assert not isinstance(member, Invertible)
        with pytest.raises(ValueError, match=r"stage '.*' has no inverse|, has no inverse; expected"):
            Chain((member,)).inverse()
        return
    assert isinstance(member, Invertible)
    made = applied(member, data)
    back = run(member.inverse(), made, memory=memory_of(member))
    if name in LOSSY:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), back, data)
    else:
        same(back, jax.tree.map(jnp.asarray, data))
    changed = [x.shape != y.shape or x.dtype != y.dtype or not np.array_equal(x, y) for x, y in _pairs(made, data)]
    assert any(changed) or jax.tree.structure(made) != jax.tree.structure(data)


def _pairs(one: Any, two: Any) -> Any:
    return zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Concatenate(("a", "b"), "c").inverse(), r"sizes is None.*sizes=\(3, 4\)"),
        (lambda: Cast("a", "int8").inverse(), "source is None.*source='uint8'"),
        (lambda: Scale("a").inverse(), "source is None.*source='uint8'"),
        (lambda: Map(negated).inverse(), r"inverse_fn of .* is None.*Map\(fn, inverse\)"),
        (lambda: Normalize("a", clip=1.0).inverse(), "clips, which nothing undoes"),
        (lambda: NormalizeReward(clip=1.0).inverse(), "clips, which nothing undoes"),
    ],
)
def test_inverses_that_cannot_be(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ------------------------------------------------------------------------------------------------ which leaves


def test_leaves_come_and_go_by_name() -> None:
    data = {"obs": {"x": np.zeros((4, 2)), "y": np.ones(4)}, "r": np.ones(4)}
    assert list(run(Select(("obs/y", "r")), data)) == ["obs", "r"]
    assert list(run(Select(("obs/y", "r")), data)["obs"]) == ["y"]
    assert run(Select("obs"), data).keys() == {"obs"}
    assert run(Drop("obs"), data).keys() == {"r"}
    assert run(Drop((("obs", "x"),)), data)["obs"].keys() == {"y"}
    renamed = run(Rename({"obs": "next/obs", "r": "reward"}), data)
    assert renamed.keys() == {"next", "reward"} and renamed["next"]["obs"].keys() == {"x", "y"}
    swapped = run(Rename({"obs/x": "obs/y", "obs/y": "obs/x"}), data)
    assert swapped["obs"]["x"].shape == (4,) and swapped["obs"]["y"].shape == (4, 2)
    same(run(Scale("obs", 2.0), data)["obs"], jax.tree.map(lambda x: 2 * jnp.float32(x), data["obs"]))
    assert run(Cast("obs/x", "int8"), data)["obs"]["x"].dtype == np.int8


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (Select("c"), r"Select: leaf 'c' is not there \(there are: a, b, e, frame, r\)\. Name one of these"),
        (Drop("c"), "Drop: leaf 'c' is not there"),
        (Drop(("a", "b", "e", "frame", "r")), "Drop: no leaf is left"),
        (Rename({"c": "d"}), "Rename: leaf 'c' is not there"),
        (Rename({"a": "b"}), "Rename: there is a leaf 'b' already"),
        (Rename({"a": "b/x"}), "'b' would be a leaf, and hold the leaf 'b/x' too"),
        (Scale("c"), "Scale: leaf 'c' is not there"),
        (Scale("a", source="uint8"), "Scale: leaf 'a' is float32; expected uint8.*source='float32'"),
        (Cast("a", "int8", source="uint8"), "Cast: leaf 'a' is float32; expected uint8"),
        (Concatenate(("a", "c"), "x"), "Concatenate: leaf 'c' is not there"),
        (Concatenate(("a", "frame"), "x"), r"leaf 'frame' is uint8, but 'a' is float32.*Cast\('frame', 'float32'\)"),
        (Concatenate(("a", "b"), "x", sizes=(2, 2)), r"leaf 'a' is \[3\] a row; expected 2.*sizes=\(3, 2\)"),
        (Concatenate(("a", "b"), "r"), "there is a leaf 'r' already"),
        (Concatenate(("a", "b"), "x", axis=1), r"leaf 'a' is float32\[3\] a row, and has no axis 1\. Use one of 0"),
        (Concatenate(("r", "r2"), "x"), r"leaf 'r' is float32\[\] a row, and has no axis -1\. Use Stack"),
        (Split("a", ("x", "y"), (2, 2)), r"leaf 'a' is \[3\] a row, but sizes=\(2, 2\) come to 4; expected 3"),
        (Split("c", ("x", "y"), (2, 2)), "leaf 'c' is not there"),
        (Stack(("a", "b"), "x"), r"leaf 'b' is \[2\] a row, but 'a' is \[3\]; expected one shape.*Concatenate"),
        (Stack(("a", "e"), "x", axis=2), "has no axis 2. Use one of 0, 1"),
        (Unstack("a", ("x", "y")), r"leaf 'a' is \[3\] a row, so axis 0 makes 3 leaves; expected 2"),
        (RewardToGo(reward="c"), r"reward names 'c', but there are a.*RewardToGo\(reward=...\)"),
        (RewardToGo(reward="r", episode_end=("done",)), "episode_end names 'done'"),
        (RewardToGo(reward="r", episode_end=("a",)), r"leaf 'a' is float32\[3\] a row; expected bool\[\]"),
        (RewardToGo(reward="r", episode_end=(), into="a"), "there is a leaf 'a' already; expected a free name, or 'r'"),
        (Augment("r"), r"leaf 'r' is float32\[\] a row, and has no axes \(-2, -1\)"),
        (Augment("frame", crop=(20, 2)), "crop is .20, 2., but images of 'frame' are 6 by 5.*twice shift=4"),
        (Augment(("frame", "wide"), together=True), r"images of 'wide' are \(6, 4\), of 'frame' \(6, 5\)"),
        (Normalize("a"), "Normalize: there are no statistics.*memory=state.transforms.read"),
    ],
    ids=str,
)
def test_what_does_not_fit_rows(transform: Any, message: str) -> None:
    data = rows(4)
    names = str(transform)
    data |= {"r2": data["r"]} if "r2" in names else {}
    data |= {"wide": data["frame"][..., :4]} if "wide" in names else {}
    more = {"time": 0} if isinstance(transform, RewardToGo) else {}
    with pytest.raises((ValueError, TypeError), match=message):
        transforms.apply(transform, data, key=jax.random.key(0), **more)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Select(()), r"Select: keys is \(\); expected names"),
        (lambda: Select(3), "Select: keys is 3; expected names"),
        (lambda: Scale((1, 2)), "Scale: keys is"),
        (lambda: Drop(("a", "a")), "Drop: keys names 'a' twice"),
        (lambda: Rename("a"), "Rename: names is 'a'.*Rename"),
        (lambda: Rename({}), "Rename: names is {}"),
        (lambda: Rename({"a": "c", "b": "c"}), "Rename: 'c' is twice among the new names"),
        (lambda: Rename({"a": 3}), "Rename: 3 is no name"),
        (lambda: Scale("a", 0), "Scale: factor is 0; expected a finite number that is not 0"),
        (lambda: Scale("a", offset=math.nan), "Scale: offset is nan"),
        (lambda: Scale("a", dtype="floaty"), "Scale: dtype is 'floaty'; expected a dtype"),
        (lambda: Cast("a", 3.5), "Cast: dtype is 3.5; expected a dtype"),
        (lambda: Concatenate(("a", "b"), "c", sizes=(1,)), r"sizes is \(1,\); expected 2 ints"),
        (lambda: Concatenate(("a", "b"), "c", axis="x"), "axis is 'x'; expected an int"),
        (lambda: Split("a", "b", (1,)), r"into is 'b'; expected names of leaves"),
        (lambda: Cast("a", None), "Cast: dtype is None; expected a dtype of numbers"),
        (lambda: Cast("a", object), "expected a dtype of numbers"),
        (lambda: Map(3), "Map: fn is 3; expected a function"),
        (lambda: Map(negated, keyed="yes"), "Map: keyed is 'yes'; expected a bool"),
        (lambda: Map(negated, 3), "Map: inverse_fn is 3"),
        (lambda: RewardToGo(1.5), r"RewardToGo: gamma is 1.5; expected a number in \[0, 1\]"),
        (
            lambda: RewardToGo(episode_end="done"),
            r"episode_end is 'done'; expected a tuple. Write episode_end=\('done',\)",
        ),
        (lambda: Augment("a", 0), "shift is 0 and crop is None: nothing changes"),
        (lambda: Augment("a", -1), "shift is -1; expected an int >= 0"),
        (lambda: Augment("a", crop=3), "crop is 3; expected two ints"),
        (lambda: Augment("a", crop=(0, 3)), "crop is .0, 3.; expected ints >= 1"),
        (lambda: Augment("a", axes=(1, 2)), "axes is .1, 2.; expected height and width, counted from the end"),
        (lambda: Normalize("a", clip=0), "Normalize: clip is 0; expected a finite number > 0"),
        (lambda: NormalizeReward(eps=-1), "NormalizeReward: eps is -1; expected a finite number >= 0"),
        (lambda: Normalize(("a", "b", "c"), of=("a", "b")), "of is .* expected one name, or one for each"),
        (lambda: Normalize("a", of=3), "Normalize: 3 is no name of a leaf"),
        (lambda: Normalize("a", center=0), "Normalize: center is 0; expected a bool"),
        (lambda: Chain({"a/b": Cast("a", "int8")}), "a stage has the name 'a/b'; expected printable text without"),
        (lambda: Chain({"": Cast("a", "int8")}), "a stage has the name ''"),
        (lambda: Chain((Scale,)), r"a stage is the class Scale; expected a value. Write Scale\(...\)"),
        (lambda: Chain((negated,)), r"has no `apply`.*Write Map\(negated\)"),
        (lambda: Chain((3,)), "a stage is 3, which has no `apply`"),
        (lambda: Chain("scale"), "stages is 'scale'; expected transforms"),
        (lambda: Chain((("x", Cast("a", "int8")), ("x", Drop("a")))), "two stages have the name 'x'"),
    ],
)
def test_what_makes_no_sense(make: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_rows_that_are_no_dicts() -> None:
    pair = (np.zeros((4, 2)), np.ones(4))
    with pytest.raises(TypeError, match=r"expected \(nested\) dicts of arrays.*transforms.Map"):
        transforms.apply(Select("0"), pair)
    with pytest.raises(TypeError, match="nested"):
        transforms.apply(Drop("x"), np.zeros(3))
    out = run(Scale("1", 2.0), pair)  # what keeps the structure takes any
    assert isinstance(out, tuple) and out[1].tolist() == [2.0] * 4
    assert run(Map(lambda row: {"x": row[0]}), pair)["x"].shape == (4, 2)


# ------------------------------------------------------------------------------------------------------ numbers


def test_join_and_take_apart() -> None:
    data = rows(4, 3)
    made = run(Concatenate(("a", "b"), "c"), data, lead=2)
    np.testing.assert_array_equal(made["c"], np.concatenate([data["a"], data["b"]], -1))
    made = run(Stack(("a", "e"), "both", axis=1), data, lead=2)
    np.testing.assert_array_equal(made["both"], np.stack([data["a"], data["e"]], -1))
    made = run(Stack(("a", "e"), "both"), data, lead=2)
    np.testing.assert_array_equal(made["both"], np.stack([data["a"], data["e"]], 2))
    parts = run(Split("frame", ("top", "rest"), (1, 5), axis=0), data, lead=2)
    np.testing.assert_array_equal(parts["rest"], data["frame"][:, :, 1:])
    lines = run(Unstack("frame", tuple("uvwxy"), axis=-1), data, lead=2)
    np.testing.assert_array_equal(lines["w"], data["frame"][..., 2])


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16"])
@pytest.mark.parametrize("to", ["float32", "float16"])
def test_every_number_comes_back(dtype: str, to: str) -> None:
    info = np.iinfo(dtype)
    numbers = np.arange(info.min, info.max + 1).astype(dtype)
    if dtype == "int16" and to == "float16":
        pytest.skip("float16 does not tell them apart")
    scale = Scale("x", 1 / info.max, 0.25, dtype=to, source=dtype)
    made = run(scale, {"x": numbers})
    assert made["x"].dtype == to
    want = (numbers.astype(np.float64) / info.max + 0.25).astype(to)
    np.testing.assert_allclose(made["x"], want, rtol=2e-3 if to == "float16" else 1e-6, atol=1e-6)
    same(run(scale.inverse(), made), {"x": jnp.asarray(numbers)})


def test_integers_are_cut_at_their_ends() -> None:
    x = {"x": np.array([-1e9, -3.5, -2.5, 2.5, 3.49, 1e9, np.inf], np.float32)}
    for dtype, want in (("uint8", [0, 0, 0, 2, 3, 255, 255]), ("int8", [-128, -4, -2, 2, 3, 127, 127])):
        assert run(Scale("x", 1.0, dtype=dtype), x)["x"].tolist() == want
    for dtype in ("int32", "uint32"):
        out = run(Scale("x", 1e6, dtype=dtype), x)["x"]
        assert int(out[-1]) > 0.99 * np.iinfo(dtype).max and int(out[0]) <= 0.99 * np.iinfo(dtype).min


def oracle_to_go(reward: Any, end: Any, there: Any, gamma: float) -> tuple[Any, Any]:
    """Of one lane, backwards."""
    total, whole, out, complete = 0.0, False, [], []
    for r, e, t in list(zip(reward, end, there, strict=True))[::-1]:
        if t:
            total, whole = r + (0.0 if e else gamma * total), whole or bool(e)
        out.append(total if t else 0.0)
        complete.append(whole and bool(t))
    return np.array(out[::-1], np.float32), np.array(complete[::-1])


@given(st.data())
def test_reward_to_go(data: Any) -> None:
    lanes, number = 3, 13
    flags = st.lists(st.booleans(), min_size=lanes * number, max_size=lanes * number)
    end, cut, there = (np.array(data.draw(flags)).reshape(number, lanes) for _ in range(3))
    reward = np.array(data.draw(st.lists(st.integers(-4, 4), min_size=lanes * number, max_size=lanes * number)))
    reward = reward.reshape(number, lanes).astype(np.float32)
    gamma = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    go = RewardToGo(gamma, complete="whole")
    made = run(go, {"reward": reward, "terminated": end, "truncated": cut}, lead=2, time=0, mask=there)
    for lane in range(lanes):
        want, whole = oracle_to_go(reward[:, lane], (end | cut)[:, lane], there[:, lane], gamma)
        np.testing.assert_allclose(made["reward_to_go"][:, lane], want, atol=1e-5)
        np.testing.assert_array_equal(made["whole"][:, lane], whole)


def test_rewards_that_are_no_numbers_stay_in_their_episode() -> None:
    reward = jnp.array([[1.0, 2.0, jnp.nan, 3.0, 4.0, jnp.inf]])
    data = {"reward": reward, "done": jnp.array([[False, True, False, True, True, False]])}
    out = run(RewardToGo(1.0, episode_end=("done",)), data, lead=2, time=1)["reward_to_go"]
    np.testing.assert_array_equal(out, [[3.0, 2.0, np.nan, 3.0, 4.0, np.inf]])
    out = run(RewardToGo(0.0, episode_end=()), data, lead=2, time=1)["reward_to_go"]
    np.testing.assert_array_equal(out, data["reward"])


def test_a_dtype_that_this_program_has_not_comes_back() -> None:
    for stage in (Scale("x", 0.5, dtype="float64", source="uint8"), Cast("x", "int64", source="uint8")):
        x = jnp.arange(256, dtype=jnp.uint8)
        same(run(stage.inverse(), run(stage, {"x": x})), {"x": x})


@pytest.mark.parametrize("stage", [Scale("x"), Cast("x", "int8")])
def test_keys_are_no_numbers(stage: Any) -> None:
    with pytest.raises(TypeError, match="leaf 'x' is key<fry>; expected numbers"):
        transforms.apply(stage, {"x": jax.random.split(jax.random.key(0), 3)})


def test_reward_to_go_of_vectors_and_integers_in_place_of_rewards() -> None:
    reward = np.array([[[1, 2], [3, 4], [5, 6]]], np.int32)
    made = run(RewardToGo(1.0, episode_end=(), into="reward"), {"reward": reward}, lead=2, time=1)
    assert made.keys() == {"reward"} and made["reward"].dtype == np.float32
    np.testing.assert_array_equal(made["reward"], [[[9, 12], [8, 10], [5, 6]]])
    with pytest.raises(ValueError, match="it goes along time, but these are single rows"):
        run(RewardToGo(), {"reward": reward})


# --------------------------------------------------------------------------------------------------- statistics

NUMBER = st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([math.nan, math.inf, -math.inf, 1e20]))


@given(st.lists(st.lists(st.tuples(NUMBER, st.booleans()), min_size=4, max_size=4), min_size=1, max_size=6))
def test_running_statistics(portions: Any) -> None:
    """In portions as at once, in float64; what is masked or not finite is not there."""
    moments, seen, skipped = _moments.init(()), [], 0
    for portion in portions:
        values = np.array([x for x, _ in portion], np.float32)
        there = np.array([t for _, t in portion])
        moments = _merge(moments, values, there)
        fine = np.abs(values) <= 1e15
        seen += values[there & fine].tolist()
        skipped += int((there & ~fine).sum())
    assert int(_moments.count(moments)) == len(seen) and int(moments.skipped) == skipped
    mean, variance = (np.mean(seen), np.var(seen)) if seen else (0.0, 0.0)
    np.testing.assert_allclose(_moments.mean(moments), mean, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(_moments.variance(moments), variance, rtol=1e-4, atol=1e-3)


_merge = jax.jit(_moments.merge)


def test_a_large_mean_and_many_rows_cost_no_digits() -> None:
    rng = np.random.default_rng(0)
    values = (1e4 + rng.normal(size=(2000, 50))).astype(np.float32)
    moments = jax.lax.scan(lambda m, x: (_moments.merge(m, x, jnp.ones(50, bool)), None), _moments.init(()), values)[0]
    np.testing.assert_allclose(_moments.mean(moments), values.astype(np.float64).mean(), rtol=1e-7)
    np.testing.assert_allclose(_moments.variance(moments), values.astype(np.float64).var(), rtol=1e-3)
    # Far beyond what one float32 can count: a row more still counts.
    many = _moments.Moments(
        seen=jnp.array([3, 5], jnp.uint32), mean=jnp.zeros(2), squares=jnp.array([1.3e10, 0.0]), skipped=moments.skipped
    )
    step = jax.jit(lambda m: _moments.merge(m, jnp.ones(1), jnp.ones(1, bool)))
    for _ in range(200):
        many = step(many)
    assert int(many.seen[1]) == 205 and int(many.seen[0]) == 3
    total = float(np.float64(many.squares[0]) + np.float64(many.squares[1]))
    np.testing.assert_allclose(total - np.float64(np.float32(1.3e10)), 200.0, rtol=1e-3)
    assert int(_merge(_moments.init(()), np.full(4, 2.0**31, np.float32), np.ones(4, bool)).seen[1]) == 4
    carry = _moments.Moments(jnp.array([0, 2**32 - 2], jnp.uint32), many.mean, many.squares, many.skipped)
    assert _merge(carry, np.ones(4, np.float32), np.ones(4, bool)).seen.tolist() == [1, 2]


def test_normalize() -> None:
    data, seen = rows(5), rows(7, 2, seed=9)["a"].astype(np.float64).reshape(-1, 3)
    out = applied(Normalize("a"), data)["a"]
    np.testing.assert_allclose(out, (data["a"] - seen.mean(0)) / seen.std(0), rtol=1e-4, atol=1e-5)
    out = applied(Normalize("a", center=False), data)["a"]
    np.testing.assert_allclose(out, data["a"] / seen.std(0), rtol=1e-4, atol=1e-5)
    out = applied(Normalize("a", clip=0.5), data)["a"]
    assert float(jnp.abs(out).max()) == 0.5
    np.testing.assert_allclose(
        applied(NormalizeReward("r"), data)["r"], data["r"] / rows(7, 2, seed=9)["r"].std(), rtol=1e-4
    )
    many = applied(Normalize(("a", "e"), of="a"), {**data, "e": np.stack([data["e"]] * 4, 1)})
    np.testing.assert_allclose(many["e"][:, 2], (data["e"] - seen.mean(0)) / seen.std(0), rtol=1e-4, atol=1e-5)


def test_normalize_of_what_never_varied() -> None:
    """Nothing seen, one row, and rows that are all alike: left at their scale, and never NaN."""
    norm = Normalize("x", center=False)
    for number in (0, 1, 3):
        memory = norm.init({"x": jax.ShapeDtypeStruct((), np.float32)})
        memory = jax.jit(norm.observe)(memory, {"x": jnp.full(4, 3.0)}, jnp.arange(4) < number)
        assert run(norm, {"x": jnp.array([5.0, -2.0])}, memory=memory)["x"].tolist() == [5.0, -2.0]
    for dtype, want in (("int32", "float32"), ("float16", "float16")):
        memory = norm.init({"x": jax.ShapeDtypeStruct((), np.dtype(dtype))})
        assert run(norm, {"x": jnp.zeros(2, dtype)}, memory=memory)["x"].dtype == want


@pytest.mark.parametrize("transform", [Normalize("c"), NormalizeReward("c"), Normalize("a", of="c")])
def test_statistics_of_what_is_not_there(transform: Any) -> None:
    with pytest.raises(ValueError, match="the statistics are to be of leaf 'c', but rows have a, b.*of='a'"):
        transform.init({n: jax.ShapeDtypeStruct((), np.float32) for n in ("a", "b")})
    with pytest.raises(TypeError, match=r"leaf 'c' is bool; expected real numbers"):
        transform.init({"c": jax.ShapeDtypeStruct((), np.bool_)})


def test_statistics_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"leaf 'b' is \[5, 2\], but the statistics are of 'a', \[3\] a row"):
        applied(Normalize("b", of="a"), rows(5))


# ------------------------------------------------------------------------------------------------------- images


def possible(image: np.ndarray, shift: int, cut: tuple[int, int]) -> list[np.ndarray]:
    """All that an image [..., H, W] may become."""
    padded = np.pad(image, [(0, 0)] * (image.ndim - 2) + [(shift, shift)] * 2, mode="edge")
    high, wide = padded.shape[-2] - cut[0] + 1, padded.shape[-1] - cut[1] + 1
    return [padded[..., y : y + cut[0], x : x + cut[1]] for y in range(high) for x in range(wide)]


@pytest.mark.parametrize(
    ("shift", "crop"), [(2, None), (0, (4, 3)), (1, (5, 5)), (1, (7, 6))], ids=["shift", "crop", "both", "larger"]
)
@pytest.mark.parametrize("last", [False, True], ids=["HW", "HWC"])
def test_shifts_and_crops(shift: int, crop: Any, last: bool) -> None:
    """Each is one of those that can be, all are as likely, and frames of a stack go together."""
    frames = np.random.default_rng(0).integers(0, 256, (3, 6, 5), np.uint8)  # a stack
    number = 2000
    given_frames = np.moveaxis(frames, 0, -1) if last else frames
    batch = {"obs": np.broadcast_to(given_frames, (number, *given_frames.shape))}
    augment = Augment("obs", shift, crop, axes=(-3, -2) if last else (-2, -1))
    out = np.asarray(run(augment, batch, key=jax.random.key(0))["obs"])
    out = np.moveaxis(out, -1, 1) if last else out
    assert out.dtype == np.uint8
    want = possible(frames, shift, crop or (6, 5))
    found = np.array([[np.array_equal(x, w) for w in want] for x in out])
    assert (found.sum(1) == 1).all()
    counts = found.sum(0)
    expected = number / len(want)
    assert ((counts - expected) ** 2 / expected).sum() < len(want) + 5 * math.sqrt(2 * len(want))


@pytest.mark.parametrize("together", [False, True])
def test_leaves_move_together_or_each_on_its_own(together: bool) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (64, 6, 5), np.uint8)
    augment = Augment(("obs", "next_obs"), 2, together=together)
    data = {"obs": frames, "next_obs": frames, "other": frames}
    out = run(augment, data, key=jax.random.key(1))
    alike = [np.array_equal(a, b) for a, b in zip(out["obs"], out["next_obs"], strict=True)]
    assert all(alike) if together else sum(alike) < 20
    np.testing.assert_array_equal(out["other"], frames)
    same(out, run(augment, data, key=jax.random.key(1)))
    assert not np.array_equal(out["obs"], run(augment, data, key=jax.random.key(2))["obs"])
    windows = jax.tree.map(lambda x: np.stack([x, x], 1), data)  # [B, T, H, W]
    out = run(augment, windows, lead=2, key=jax.random.key(1))
    np.testing.assert_array_equal(out["obs"][:, 0], out["obs"][:, 1])


# ------------------------------------------------------------------------------------------------------- chains


def test_a_chain_is_a_value_that_changes_by_name() -> None:
    chain = Chain((Scale("a"), Scale("b"), ("last", Drop("r"))))
    assert chain.names == ("scale", "scale_2", "last") and len(chain) == 3 and "last" in chain and "drop" not in chain
    assert chain["scale_2"] == chain[1] == Scale("b") and chain[-1] == Drop("r")
    assert [name for name, _ in chain] == list(chain.names)
    assert chain.append(Cast("e", "int8")).names == ("scale", "scale_2", "last", "cast")
    assert chain.insert("scale_2", Scale("e")).names == ("scale", "scale_3", "scale_2", "last")
    assert chain.insert(0, Scale("e"), name="first").names == ("first", "scale", "scale_2", "last")
    assert chain.replace("last", Drop("e"))["last"] == Drop("e") and chain["last"] == Drop("r")
    assert chain.remove("scale").names == ("scale_2", "last") and chain.remove(-1).names == ("scale", "scale_2")
    assert Chain({"x": Scale("a")}) == Chain((("x", Scale("a")),)) != Chain((Scale("a"),))
    assert Chain((NormalizeReward(), RewardToGo())).names == ("normalize_reward", "reward_to_go")
    for wrong in (lambda: chain["none"], lambda: chain.remove("none"), lambda: chain.insert("none", Drop("a"))):
        with pytest.raises(KeyError, match="'none' is no stage; expected one of scale, scale_2, last"):
            wrong()
    with pytest.raises(IndexError, match="3 is no stage"):
        chain[3]
    for far in (99, -4, np.int64(99)):
        with pytest.raises(
            IndexError, match="Chain.insert: .*99|-4.* is no stage; expected one of scale, scale_2, last"
        ):
            chain.insert(far, Drop("a"))
    assert chain.insert(3, Drop("a")) == chain.append(Drop("a")) and chain[np.int64(1)] == chain["scale_2"]


def test_a_chain_prints_as_one_writes_it() -> None:
    assert repr(Chain((Scale("a"), Drop("r")))) == "Chain((Scale(keys=('a',)), Drop(keys=('r',))))"
    assert repr(Chain((Scale("a"),))) == "Chain((Scale(keys=('a',)),))"
    assert repr(Chain({"x": Scale("a")})) == "Chain({'x': Scale(keys=('a',))})"


def test_a_chain_of_chains_goes_in_order_and_back() -> None:
    inner = Chain((Rename({"a": "c"}), Scale("c", 2.0, 1.0, source="float32")))
    outer = Chain((Scale("a", 3.0, source="float32"), ("inner", inner), Cast("frame", "int16", source="uint8")))
    data = rows(5)
    made = run(outer, data)
    np.testing.assert_allclose(made["c"], data["a"] * 6 + 1, rtol=1e-6)
    assert outer.inverse().names == ("cast", "inner", "scale")
    back = run(outer.inverse(), made)
    np.testing.assert_allclose(back["a"], data["a"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(back["frame"], data["frame"])
    assert outer.inverse().inverse().names == outer.names
    assert not outer.keyed and Chain((("x", Chain((Augment("frame"),))),)).keyed


def test_a_stage_before_changes_no_random_number() -> None:
    data, key = rows(5), jax.random.key(3)
    alone = run(Chain((Augment("frame", 2),)), data, key=key)  # compiles twice: no more of these
    later = run(Chain((Scale("a"), Augment("frame", 2))), data, key=key)
    np.testing.assert_array_equal(alone["frame"], later["frame"])
    twice = run(Chain((Augment("frame", 2), Augment("frame", 2))), data, key=key)
    again = run(Chain((Augment("frame", 2),)), alone, key=key)
    assert not np.array_equal(twice["frame"], again["frame"])  # each has a key of its own


def test_map_with_random_numbers() -> None:
    noisy = Map(lambda row, key: {"x": row["x"] + jax.random.uniform(key)}, keyed=True)
    assert isinstance(noisy, Keyed)
    out = run(noisy, {"x": np.zeros(100, np.float32)}, key=jax.random.key(0))["x"]
    assert len(set(out.tolist())) == 100 and 0 < float(out.min()) and float(out.max()) < 1
    with pytest.raises(ValueError, match=r"needs a key. Write apply\(..., key=jax.random.key\(0\)\)"):
        transforms.apply(noisy, {"x": np.zeros(3)})


def test_apply_says_which_axes_it_wants() -> None:
    with pytest.raises(ValueError, match=r"leaves are 'a' \[4\], 'b' \[5\]; expected leading axes that are the same"):
        transforms.apply(Scale("a"), {"a": np.zeros(4), "b": np.zeros(5)})
    with pytest.raises(ValueError, match="leaves are none"):
        transforms.apply(Scale("a"), {})
    assert fbuf.transforms is transforms

"""Chains of transforms, and what transforms and chains refuse."""

import jax
import numpy as np
import pytest

from fbuf import transforms
from fbuf.transforms import (
    Augment,
    Cast,
    Chain,
    Concatenate,
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
)
from tests.support.refusals import raises
from tests.transforms.test_transforms import applied, negated, rows, run


def test_a_chain_is_a_value_that_changes_by_name():
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
        raises(KeyError, "'none' is no stage; expected one of scale, scale_2, last", wrong)
    raises(IndexError, "3 is no stage", lambda: chain[3])
    for far in (99, -4, np.int64(99)):
        with pytest.raises(
            IndexError, match="Chain.insert: .*99|-4.* is no stage; expected one of scale, scale_2, last"
        ):
            chain.insert(far, Drop("a"))
    assert chain.insert(3, Drop("a")) == chain.append(Drop("a")) and chain[np.int64(1)] == chain["scale_2"]


def test_a_chain_of_chains_goes_in_order_and_back():
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


def test_earlier_stages_do_not_change_random_numbers():
    data, key = rows(5), jax.random.key(3)
    alone = run(Chain((Augment("frame", 2),)), data, key=key)  # compiles twice: no more of these
    later = run(Chain((Scale("a"), Augment("frame", 2))), data, key=key)
    np.testing.assert_array_equal(alone["frame"], later["frame"])
    twice = run(Chain((Augment("frame", 2), Augment("frame", 2))), data, key=key)
    again = run(Chain((Augment("frame", 2),)), alone, key=key)
    assert not np.array_equal(twice["frame"], again["frame"])  # each has a key of its own


def test_map_with_random_numbers():
    noisy = Map(lambda row, key: {"x": row["x"] + jax.random.uniform(key)}, keyed=True)
    assert noisy.keyed
    out = run(noisy, {"x": np.zeros(100, np.float32)}, key=jax.random.key(0))["x"]
    assert len(set(out.tolist())) == 100 and 0 < float(out.min()) and float(out.max()) < 1
    with pytest.raises(ValueError, match=r"needs a key. Write apply\(..., key=jax.random.key\(0\)\)"):
        transforms.apply(noisy, {"x": np.zeros(3)})


ROWS = [
    (Select("c"), r"Select: leaf 'c' is missing; expected one of a, b, e, frame, r\."),
    (Drop(("a", "b", "e", "frame", "r")), "Drop: no leaf is left"),
    (Rename({"a": "b"}), "Rename: leaf 'b' already exists"),
    (Rename({"a": "b/x"}), "'b' is a leaf and contains the leaf 'b/x'"),
    (Scale("a", source="uint8"), "Scale: leaf 'a' is float32; expected uint8.*source='float32'"),
    (Cast("a", "int8", source="uint8"), "Cast: leaf 'a' is float32; expected uint8"),
    (Concatenate(("a", "frame"), "x"), r"leaf 'frame' is uint8, but 'a' is float32\. Cast first\."),
    (Concatenate(("a", "b"), "x", sizes=(2, 2)), r"leaf 'a' is \[3\] a row; expected 2 along axis -1, as sizes\."),
    (Concatenate(("a", "b"), "r"), "leaf 'r' already exists"),
    (Concatenate(("a", "b"), "x", axis=1), r"leaf 'a' is float32\[3\] a row, without axis 1\. Use one of 0"),
    (Concatenate(("r", "r2"), "x"), r"leaf 'r' is float32\[\] a row, without axis -1\. Use Stack"),
    (Split("a", ("x", "y"), (2, 2)), r"leaf 'a' is \[3\] a row; expected the sum of \(2, 2\)\."),
    (Stack(("a", "b"), "x"), r"leaf 'b' is \[2\] a row, but 'a' is \[3\]; expected one shape.*Concatenate"),
    (Stack(("a", "e"), "x", axis=2), "without axis 2. Use one of 0, 1"),
    (Unstack("a", ("x", "y")), r"leaf 'a' is \[3\] a row; expected 2 on the axis\."),
    (RewardToGo(reward="c"), r"reward names 'c'; expected leaves of a"),
    (RewardToGo(reward="r", episode_end=("done",)), "episode_end names 'done'"),
    (RewardToGo(reward="r", episode_end=("a",)), r"leaf 'a' is float32\[3\] a row; expected bool\[\]"),
    (RewardToGo(reward="r", episode_end=(), into="a"), "leaf 'a' already exists. Use another name, or 'r'"),
    (Augment("r"), r"leaf 'r' is float32\[\] a row, without axes \(-2, -1\)"),
    (Augment("frame", crop=(20, 2)), r"crop is \(20, 2\), but images of 'frame' are 14 by 13\."),
    (Augment(("frame", "wide"), together=True), r"sizes are \(6, 5\) and \(6, 4\)\. Write together=False\."),
    (Normalize("a"), "Normalize: memory is missing.*memory=state.transforms.read"),
]


def test_transforms_that_do_not_fit_rows_are_refused():
    for transform, message in ROWS:
        data, names = rows(4), str(transform)
        data |= {"r2": data["r"]} if "r2" in names else {}
        data |= {"wide": data["frame"][..., :4]} if "wide" in names else {}
        more = {"time": 0} if isinstance(transform, RewardToGo) else {}
        with pytest.raises((ValueError, TypeError), match=message):
            transforms.apply(transform, data, key=jax.random.key(0), **more)


SETTINGS = [
    (lambda: Concatenate(("a", "b"), "c").inverse(), r"sizes is None.*sizes=\(3, 4\)"),
    (lambda: Cast("a", "int8").inverse(), "source is None.*source='uint8'"),
    (lambda: Scale("a").inverse(), "source is None.*source='uint8'"),
    (lambda: Map(negated).inverse(), r"inverse_fn of .* is None.*Map\(fn, inverse\)"),
    (lambda: Normalize("a", clip=1.0).inverse(), "clip is 1.0; expected None"),
    (lambda: NormalizeReward(clip=1.0).inverse(), "clip is 1.0; expected None"),
    (lambda: Select(()), r"Select: keys is \(\); expected names"),
    (lambda: Drop(("a", "a")), "Drop: keys names 'a' twice"),
    (lambda: Rename("a"), "Rename: names is 'a'.*Rename"),
    (lambda: Rename({}), "Rename: names is {}"),
    (lambda: Rename({"a": "c", "b": "c"}), "Rename: 'c' occurs twice among the new names"),
    (lambda: Rename({"a": 3}), "Rename: name is 3; expected text"),
    (lambda: Scale("a", 0), "Scale: factor is 0; expected a finite number that is not 0"),
    (lambda: Scale("a", dtype="floaty"), "Scale: dtype is 'floaty'; expected a dtype"),
    (lambda: Cast("a", 3.5), "Cast: dtype is 3.5; expected a dtype"),
    (lambda: Concatenate(("a", "b"), "c", sizes=(1,)), r"sizes is \(1,\); expected 2 ints"),
    (lambda: Concatenate(("a", "b"), "c", axis="x"), "axis is 'x'; expected an int"),
    (lambda: Cast("a", object), "expected a dtype of numbers"),
    (lambda: Map(3), "Map: fn is 3; expected a function"),
    (lambda: Map(negated, keyed="yes"), "Map: keyed is 'yes'; expected a bool"),
    (lambda: RewardToGo(1.5), r"RewardToGo: gamma is 1.5; expected a number in \[0, 1\]"),
    (lambda: RewardToGo(episode_end="done"), r"episode_end is 'done'; expected \('done',\)\."),
    (lambda: Augment("a", 0), "shift is 0 and crop is None. Write shift=4"),
    (lambda: Augment("a", crop=(0, 3)), "crop is .0, 3.; expected ints >= 1"),
    (lambda: Augment("a", axes=(1, 2)), r"axes is \(1, 2\); expected two negative ints, as \(-3, -2\) for HWC\."),
    (lambda: Normalize("a", clip=0), "Normalize: clip is 0; expected a finite number > 0"),
    (lambda: NormalizeReward(eps=-1), "NormalizeReward: eps is -1; expected a finite number >= 0"),
    (lambda: Normalize(("a", "b", "c"), of=("a", "b")), "of is .* expected one name, or one for each"),
    (lambda: Normalize("a", of=3), "Normalize: name is 3; expected text"),
    (lambda: Normalize("a", center=0), "Normalize: center is 0; expected a bool"),
    (lambda: Chain({"a/b": Cast("a", "int8")}), "stage name is 'a/b'; expected printable text without"),
    (lambda: Chain((Scale,)), r"stage is the class Scale; expected an instance\."),
    (lambda: Chain((negated,)), r"without `apply`.*Write Map\(negated\)"),
    (lambda: Chain("scale"), "stages is 'scale'; expected transforms"),
    (lambda: Chain((("x", Cast("a", "int8")), ("x", Drop("a")))), "two stages are named 'x'"),
]


def test_invalid_settings_are_refused():
    for make, message in SETTINGS:
        raises((ValueError, TypeError), message, make)


def test_statistics_of_other_leaves_are_refused():
    for transform in (Normalize("c"), NormalizeReward("c"), Normalize("a", of="c")):
        with pytest.raises(ValueError, match=r"of is 'c', but rows have a, b\. Use of='a'\."):
            transform.init({n: jax.ShapeDtypeStruct((), np.float32) for n in ("a", "b")})
        with pytest.raises(TypeError, match=r"leaf 'c' is bool; expected real numbers"):
            transform.init({"c": jax.ShapeDtypeStruct((), np.bool_)})
    with pytest.raises(ValueError, match=r"leaf 'b' is \[5, 2\], but the statistics of 'a' are \[3\]"):
        applied(Normalize("b", of="a"), rows(5))


def test_leading_axes_and_keys_are_checked():
    with pytest.raises(ValueError, match=r"leaves are 'a' \[4\], 'b' \[5\]; expected 1 equal axes\. Set lead\."):
        transforms.apply(Scale("a"), {"a": np.zeros(4), "b": np.zeros(5)})
    raises(ValueError, "leaves are missing", lambda: transforms.apply(Scale("a"), {}))
    for stage in (Scale("x"), Cast("x", "int8")):
        with pytest.raises(TypeError, match="leaf 'x' is key<fry>; expected numbers"):
            transforms.apply(stage, {"x": jax.random.split(jax.random.key(0), 3)})

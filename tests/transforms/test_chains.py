"""Chains of transforms, and what transforms and chains refuse."""

import jax
import numpy as np
import pytest

import fbuf
from fbuf import transforms
from fbuf.transforms import Augment, Cast, Chain, Drop, Map, Normalize, NormalizeReward, Rename, RewardToGo, Scale
from tests.support import refusals
from tests.support.refusals import raises
from tests.support.transform_rows import applied, negated, rows, run


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
    raises(KeyError, "True is no stage", lambda: chain[True])
    for far in (99, -4, np.int64(99)):
        said = f"Chain.insert: .*{far}.* is no stage; expected one of scale, scale_2, last"
        raises(IndexError, said, chain.insert, far, Drop("a"))
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


@pytest.mark.parametrize("role", ["on_read", "on_write"])
def test_a_function_that_returns_nothing_is_named(role):
    buffer = fbuf.Buffer(4, **{role: Map(lambda row: None)})
    raises(ValueError, rf"{role}, .*Map\(.* returns None; expected arrays. Return the", buffer.init, {"x": 0.0})


ROWS = """
fit(Select("c")) => ValueError Select: leaf 'c' is missing; expected one of a, b, e, frame, r.
fit(Drop(("a", "b", "e", "frame", "r"))) => ValueError Drop: no leaf is left
fit(Rename({"a": "b"})) => ValueError Rename: leaf 'b' already exists
fit(Rename({"a": "b/x"})) => ValueError 'b' is a leaf and contains the leaf 'b/x'
fit(Scale("a", source="uint8")) => TypeError Scale: leaf 'a' is float32; expected uint8 | source='float32'
fit(Cast("a", "int8", source="uint8")) => TypeError Cast: leaf 'a' is float32; expected uint8
fit(Concatenate(("a", "frame"), "x")) => TypeError leaf 'frame' is uint8, but 'a' is float32. Cast first.
fit(Concatenate(("a", "b"), "x", sizes=(2, 2))) => ValueError leaf 'a' is [3] a row; expected 2 along axis -1, as sizes.
fit(Concatenate(("a", "b"), "r")) => ValueError leaf 'r' already exists
fit(Concatenate(("a", "b"), "x", axis=1)) => ValueError leaf 'a' is float32[3] a row, without axis 1. Use one of 0
fit(Concatenate(("r", "r2"), "x")) => ValueError leaf 'r' is float32[] a row, without axis -1. Use Stack
fit(Split("a", ("x", "y"), (2, 2))) => ValueError leaf 'a' is [3] a row; expected the sum of (2, 2).
fit(Stack(("a", "b"), "x")) => ValueError leaf 'b' is [2] a row, but 'a' is [3]; expected one shape | Concatenate
fit(Stack(("a", "e"), "x", axis=2)) => ValueError without axis 2. Use one of 0, 1
fit(Unstack("a", ("x", "y"))) => ValueError leaf 'a' is [3] a row; expected 2 on the axis.
fit(RewardToGo(reward="c")) => ValueError reward names 'c'; expected leaves of a
fit(RewardToGo(reward="r", episode_end=("done",))) => ValueError episode_end names 'done'
fit(RewardToGo(reward="r", episode_end=("a",))) => TypeError leaf 'a' is float32[3] a row; expected bool[]
fit(RewardToGo(reward="r", episode_end=(), into="a")) => ValueError leaf 'a' already exists. Use another name, or 'r'
fit(Augment("r")) => ValueError leaf 'r' is float32[] a row, without axes (-2, -1)
fit(Augment("frame", crop=(20, 2))) => ValueError crop is (20, 2), but images of 'frame' are 14 by 13.
fit(Augment(("frame", "wide"), together=True)) => ValueError sizes are (6, 5) and (6, 4). Write together=False.
fit(Normalize("a")) => ValueError Normalize: memory is missing | memory=state.transforms.read
applied(Normalize("b", of="a"), rows(5)) => ValueError leaf 'b' is [5, 2], but the statistics of 'a' are [3]
apply(Map(negated, keyed=True), rows(5)) => ValueError needs a key. Write apply(..., key=jax.random.key(0))
apply(Scale("a"), {"a": np.zeros(4), "b": np.zeros(5)}) => ValueError
    leaves are 'a' [4], 'b' [5]; expected 1 equal axes. Set lead.
apply(Scale("a"), {}) => ValueError leaves are missing
apply(Scale("x"), {"x": KEYS}) => TypeError leaf 'x' is key<fry>; expected numbers
apply(Cast("x", "int8"), {"x": KEYS}) => TypeError leaf 'x' is key<fry>; expected numbers
"""


def fit(transform):
    data, names = rows(4), str(transform)
    data |= {"r2": data["r"]} if "r2" in names else {}
    data |= {"wide": data["frame"][..., :4]} if "wide" in names else {}
    transforms.apply(transform, data, key=jax.random.key(0), **({"time": 0} if "RewardToGo" in names else {}))


SETTINGS = """
Concatenate(("a", "b"), "c").inverse() => ValueError sizes is None | sizes=(3, 4)
Cast("a", "int8").inverse() => ValueError source is None | source='uint8'
Scale("a").inverse() => ValueError source is None | source='uint8'
Map(negated).inverse() => ValueError inverse_fn of | is None | Map(fn, inverse)
Normalize("a", clip=1.0).inverse() => ValueError clip is 1.0; expected None
NormalizeReward(clip=1.0).inverse() => ValueError clip is 1.0; expected None
Select(()) => TypeError Select: keys is (); expected names
Drop(("a", "a")) => ValueError Drop: keys names 'a' twice
Rename("a") => TypeError Rename: names is 'a' | Rename
Rename({}) => TypeError Rename: names is {}
Rename({"a": "c", "b": "c"}) => ValueError Rename: 'c' occurs twice among the new names
Rename({"a": 3}) => TypeError Rename: name is 3; expected text
Scale("a", 0) => ValueError Scale: factor is 0; expected a finite number that is not 0
Scale("a", dtype="floaty") => TypeError Scale: dtype is 'floaty'; expected a dtype
Cast("a", 3.5) => TypeError Cast: dtype is 3.5; expected a dtype
Concatenate(("a", "b"), "c", sizes=(1,)) => ValueError sizes is (1,); expected 2 ints
Concatenate(("a", "b"), "c", axis="x") => TypeError axis is 'x'; expected an int
Cast("a", object) => TypeError expected a dtype of numbers
Map(3) => TypeError Map: fn is 3; expected a function
Map(negated, keyed="yes") => TypeError Map: keyed is 'yes'; expected a bool
RewardToGo(1.5) => ValueError RewardToGo: gamma is 1.5; expected a number in [0, 1]
RewardToGo(episode_end="done") => TypeError episode_end is 'done'; expected ('done',).
Augment("a", 0) => ValueError shift is 0 and crop is None. Write shift=4
Augment("a", crop=(0, 3)) => ValueError crop is (0, 3); expected ints >= 1
Augment("a", axes=(1, 2)) => ValueError axes is (1, 2); expected two negative ints, as (-3, -2) for HWC.
Normalize("a", clip=0) => ValueError Normalize: clip is 0; expected a finite number > 0
NormalizeReward(eps=-1) => ValueError NormalizeReward: eps is -1; expected a finite number >= 0
Normalize(("a", "b", "c"), of=("a", "b")) => ValueError of is | expected one name, or one for each
Normalize("a", of=3) => TypeError Normalize: name is 3; expected text
Normalize("a", center=0) => TypeError Normalize: center is 0; expected a bool
Chain({"a/b": Cast("a", "int8")}) => ValueError stage name is 'a/b'; expected printable text without
Chain((Scale,)) => TypeError stage is the class Scale; expected an instance.
Chain((negated,)) => TypeError expected a fbuf.parts.Transform | Write Map(negated)
Chain("scale") => TypeError stages is 'scale'; expected transforms
Chain((("x", Cast("a", "int8")), ("x", Drop("a")))) => ValueError two stages are named 'x'
"""


STATISTICS = """
init({"a": NUMBER, "b": NUMBER}) => ValueError of is 'c', but rows have a, b. Use of='a'.
init({"c": jax.ShapeDtypeStruct((), bool)}) => TypeError leaf 'c' is bool; expected real numbers
"""


def test_invalid_settings_and_transforms_that_do_not_fit_rows_are_refused():
    names = (
        globals()
        | {name: getattr(transforms, name) for name in transforms.__all__}
        | {"negated": negated, "applied": applied}
    )
    names["KEYS"] = jax.random.split(jax.random.key(0), 3)
    for table in (SETTINGS, ROWS):
        refusals.check_all(table, names)
    for transform in (Normalize("c"), NormalizeReward("c"), Normalize("a", of="c")):
        refusals.check_all(STATISTICS, names | {"init": transform.init, "NUMBER": jax.ShapeDtypeStruct((), np.float32)})

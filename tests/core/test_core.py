"""Components and their options, eager calls, progress bars, numbers in text, and searches in sorted arrays."""

import dataclasses
import sys
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._buffer import checks
from fbuf._core.control_flow import number_up_to
from fbuf._core.dispatch import changes_of, with_changes
from fbuf._core.progress import Bar
from fbuf._core.text_table import counted
from tests.support.refusals import raises


@fbuf.parts.component
class Clip(fbuf.parts.Transform):
    side: Literal["left", "right"] = "left"
    kind: Literal["soft", "hard"] | None = None
    width: Literal[1, 2] = 1  # of numbers: not checked

    def apply(self, data, context):
        return data


@fbuf.parts.component
class Text:
    """The same with annotations as text, as in modules with `from __future__ import annotations`."""

    side: 'Literal["left", "right"]' = "left"
    kind: 'Literal["soft", "hard"] | None' = None
    width: "Literal[1, 2]" = 1


@fbuf.parts.component
class Made:
    total: int

    def __init__(self, *terms, **others):
        object.__setattr__(self, "total", sum(terms) + sum(others.values()))


@pytest.mark.parametrize("part", [Clip, Text])
def test_options_of_ones_own_component_are_checked(part):
    name = part.__name__
    assert part("right", kind="hard", width=2) == part(side="right", kind="hard", width=2)
    raises(ValueError, f"{name}: side is 'lefft'; expected \"left\" or \"right\". Did you mean 'left'?", part, "lefft")
    raises(ValueError, f'{name}: kind is \'sot\'; expected "soft" or "hard".', part, kind="sot")
    raises(ValueError, f"{name}: side is None", part, side=None)
    raises(TypeError, f"{name}: there is no option 'with'. Did you mean 'width'?", part, **{"with": 1})
    raises(TypeError, f"{name}: there is no option 'sides'", lambda: dataclasses.replace(part(), sides="left"))


def test_a_component_may_have_its_own_constructor():
    assert Made(1, 2, more=3).total == 6


def shown(progress, total, unit="B"):
    bar = Bar(progress, "Pong/1", total, unit)
    bar(600)
    bar(400)
    bar.close()


def test_bars(capsys, monkeypatch):
    seen = []
    shown(lambda done, total: seen.append((done, total)), 1000)
    assert seen == [(600, 1000), (1000, 1000)]
    shown(True, 1000)
    assert "Pong/1: 100%" in (text := capsys.readouterr().err) and "1.00k/1.00k" in text
    shown(True, 0, " rows")
    assert "1000 rows" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    for progress, total, unit, text in (
        (True, 2000, "B", "\rPong/1: 30 %\rPong/1: 50 %\n"),
        (True, 0, " rows", "\rPong/1: 600 rows\rPong/1: 1000 rows\n"),
        (False, 1000, "B", ""),
    ):
        shown(progress, total, unit)
        assert capsys.readouterr().err == text


def test_a_noun_is_in_the_number_of_its_count():
    assert [counted(n, "row") for n in (0, 1, 2, 2000)] == ["0 rows", "1 row", "2 rows", "2,000 rows"]
    replay = fbuf.Replay(fbuf.Buffer(4), {"t": np.int32(0)})
    replay.add({"t": np.int32(1)})
    assert repr(replay) == "Replay(Buffer(capacity=4), 1 row)"


def test_searches_are_those_of_numpy():
    for number in (1, 2, 3, 7, 8, 9, 64, 65, 1000):
        rng = np.random.default_rng(number)
        ends = np.sort(rng.integers(0, number, number).astype(np.int32))
        values = rng.integers(-2, number + 2, (7, 50)).astype(np.int32)
        got = jax.jit(number_up_to)(ends, values)
        np.testing.assert_array_equal(got, np.searchsorted(ends, values, side="right"))
        assert got.dtype == np.int32


@pytest.mark.parametrize("case", ["nothing", "a field", "a state's field", "a leaf of a dict", "all"])
def test_changed_leaves_are_merged_with_those_that_stay(case: str) -> None:
    buffer = fbuf.prioritized(4)
    before = buffer.init({"a": 0, "b": 0.0})
    new = jax.tree.map(jnp.copy, before)
    after = {
        "nothing": before,
        "a field": dataclasses.replace(before, header=new.header),
        "a state's field": dataclasses.replace(
            before, header=new.header, sampler=dataclasses.replace(before.sampler, tree=new.sampler.tree)
        ),
        "a leaf of a dict": dataclasses.replace(before, rows={**before.rows, "b": new.rows["b"]}),
        "all": new,
    }[case]
    changes = changes_of(before, after)
    changed = [b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True) if a is not b]
    assert sorted(map(id, jax.tree.leaves(changes))) == sorted(map(id, changed))
    merged = with_changes(before, changes)
    assert (merged is before) == (case == "nothing")
    assert jax.tree.structure(merged) == jax.tree.structure(before)
    assert all(a is b for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(after), strict=True))


@pytest.mark.parametrize(
    ("rows", "taken"),
    [
        ({"t": np.int32(1), "next": {"t": jnp.zeros(2)}}, True),
        ([np.zeros(2, np.float32), None], True),
        ({"t": np.zeros(2, bool), "u": np.complex64(1)}, True),
        ({"t": np.int64(1)}, bool(jax.config.jax_enable_x64)),  # otherwise jit narrows it
        ({"t": 1.0}, False),
        ({"t": {"u": [1]}}, False),
        ({"t": np.zeros(2, "U1")}, False),
        ({"a": np.int32(1), 0: np.int32(1)}, False),
        ({0: np.int32(1), 1: np.int32(1)}, True),
    ],
)
def test_only_arrays_that_jit_takes_as_they_are_skip_eager_checks(rows: Any, taken: bool) -> None:
    buffer = fbuf.Buffer(4)
    state = buffer.init({"t": 0})
    assert checks.can_trace(buffer, state, rows, None) == taken
    traced: list[bool] = []
    jax.make_jaxpr(lambda row: traced.append(checks.can_trace(buffer, state, {"t": row})))(1)
    assert traced == [False]


@pytest.mark.parametrize("first", ["camera", "obs/camera"])
@pytest.mark.parametrize("storage", [fbuf.storages.Device(), fbuf.storages.Host()], ids=repr)
def test_a_name_that_begins_another_is_refused(first, storage):
    row = {"camera": np.int32(0), "camera/depth": np.zeros(2, np.float32)}
    row = {"obs": row} if "/" in first else row
    said = (
        f"the name of leaf '{first}' begins that of leaf '{first}/depth', as if it were a subtree. Rename one of them."
    )
    raises(ValueError, said, fbuf.Buffer(8, storage=storage).init, row)
    raises(ValueError, said, fbuf.Buffer(8, storage=storage).init, row | {"camera_id": 0})
    allowed = {"camera": {"depth": np.zeros(2, np.float32), "dept": 0}, "camera_id": 0, "cam": 0}
    fbuf.Buffer(8, storage=storage).init(allowed)


def test_a_name_that_begins_another_is_refused_where_it_is_made_on_write():
    renamed = fbuf.transforms.Map(lambda row: {"a": row["a"], "a/b": row["c"]})
    buffer = fbuf.Buffer(8, on_write=renamed)
    raises(ValueError, "the name of leaf 'a' begins that of leaf 'a/b'", buffer.init, {"a": 0, "c": 0})

"""Components: options by keyword and by `Literal`, also of components of one's own."""

import dataclasses
import pickle
from typing import Literal

import fbuf
from tests.support.refusals import raises


@fbuf.parts.component
class Clip:
    side: Literal["left", "right"] = "left"
    kind: Literal["soft", "hard"] | None = None
    width: Literal[1, 2] = 1  # of numbers: not checked

    def apply(self, data, context):
        return data


@fbuf.parts.component
class Made:
    total: int

    def __init__(self, *terms, **others):
        object.__setattr__(self, "total", sum(terms) + sum(others.values()))


def test_options_of_ones_own_component_are_checked():
    assert Clip("right", kind="hard", width=2) == Clip(side="right", kind="hard", width=2)
    raises(ValueError, "Clip: side is 'lefft'; expected \"left\" or \"right\". Did you mean 'left'?", Clip, "lefft")
    raises(ValueError, 'Clip: kind is \'sot\'; expected "soft" or "hard".', Clip, kind="sot")
    raises(ValueError, "Clip: side is None", Clip, side=None)
    raises(TypeError, "Clip: there is no option 'with'. Did you mean 'width'?", Clip, **{"with": 1})
    raises(TypeError, "Clip: there is no option 'sides'", lambda: dataclasses.replace(Clip(), sides="left"))


def test_a_component_may_have_its_own_constructor():
    assert Made(1, 2, more=3).total == 6


def test_checked_components_are_values():
    buffer = fbuf.prioritized(8, lanes=2)
    assert pickle.loads(pickle.dumps(buffer)) == buffer and hash(buffer) == hash(fbuf.prioritized(8, lanes=2))

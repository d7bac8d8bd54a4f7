"""Components: options by keyword and by `Literal`, also of components of one's own."""

import dataclasses
import pickle
from typing import Literal

import pytest

import fbuf


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
    with pytest.raises(ValueError, match="Clip: side is 'lefft'; expected \"left\" or \"right\". Did you mean 'left'?"):
        Clip("lefft")
    with pytest.raises(ValueError, match='Clip: kind is \'sot\'; expected "soft" or "hard".'):
        Clip(kind="sot")
    with pytest.raises(ValueError, match="Clip: side is None"):
        Clip(side=None)
    with pytest.raises(TypeError, match="Clip: there is no option 'with'. Did you mean 'width'?"):
        Clip(**{"with": 1})
    with pytest.raises(TypeError, match="Clip: there is no option 'sides'"):
        dataclasses.replace(Clip(), sides="left")


def test_a_component_may_have_its_own_constructor():
    assert Made(1, 2, more=3).total == 6


def test_checked_components_are_values():
    buffer = fbuf.prioritized(8, lanes=2)
    assert pickle.loads(pickle.dumps(buffer)) == buffer and hash(buffer) == hash(fbuf.prioritized(8, lanes=2))

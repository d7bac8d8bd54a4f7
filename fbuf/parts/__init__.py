"""Interfaces and base classes for storages, samplers, views, writers and transforms of your own.

A part is a frozen dataclass of values that derives from `Storage`, `Sampler`, `View`, `Streaming` or `Scattering` (writers),
`Transform` or `StatefulTransform`, which have a default for every method that a part may leave out. `component` makes the
class hashable, comparable and static in `jit`; `state` makes a class of arrays a pytree. `ArrayStorage`, `NthSampler` and
`FieldsView` implement all but one to three methods. `fbuf/parts/README.md` has an example of each.
"""

from fbuf._core.component import component, state
from fbuf._core.slots import Geometry, Placement, Ring
from fbuf._interfaces.sampler import AnchorChange, AnchorSet, Draw, Sampler
from fbuf._interfaces.storage import Read, Storage
from fbuf._interfaces.transform import Context, StatefulTransform, Transform
from fbuf._interfaces.view import AnchorRule, View, Window
from fbuf._interfaces.writer import Scattering, Streaming
from fbuf.parts._bases import ArrayStorage, FieldsView, NthSampler, earlier, later

__all__ = [
    "ArrayStorage",
    "Context",
    "Draw",
    "AnchorRule",
    "AnchorChange",
    "AnchorSet",
    "FieldsView",
    "Geometry",
    "NthSampler",
    "Placement",
    "Read",
    "Ring",
    "Sampler",
    "Scattering",
    "StatefulTransform",
    "Storage",
    "Streaming",
    "Transform",
    "View",
    "Window",
    "component",
    "earlier",
    "later",
    "state",
]

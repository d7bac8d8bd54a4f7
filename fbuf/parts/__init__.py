"""Interfaces and base classes for storages, samplers, views, writers and transforms of your own.

A part is a frozen dataclass of values with the methods of its Protocol: `Storage`, `Sampler`, `View`, `Streaming` or
`Scattering`, `Transform`. It need not inherit from anything. `component` makes the class hashable, comparable and static in
`jit`; `state` makes a class of arrays a pytree. Each Protocol lists the optional members that a part may add; groups of
optional methods are Protocols too (`Growable`, `Resumable`, ...). `ArrayStorage`, `NthSampler` and `FieldsView` implement
all but one to three methods. `fbuf/parts/README.md` has an example of each.
"""

from fbuf._core.component import component, state
from fbuf._core.slots import Geometry, Placement, Ring
from fbuf._interfaces.sampler import (
    Draw,
    EligibilityUpdate,
    EligibleSet,
    EpisodeStarts,
    HostSampler,
    Inspected,
    Mass,
    Sampler,
)
from fbuf._interfaces.storage import (
    Forecast,
    Growable,
    LeafBytes,
    Prefetchable,
    RaggedStorage,
    Read,
    Resumable,
    Storage,
)
from fbuf._interfaces.transform import Context, StatefulTransform, Transform
from fbuf._interfaces.view import EligibilityRule, View, Window
from fbuf._interfaces.writer import ReadOnly, Scattering, Streaming, Writer
from fbuf.parts._bases import ArrayStorage, FieldsView, NthSampler, earlier, later

__all__ = [
    "ArrayStorage",
    "Context",
    "Draw",
    "EligibilityRule",
    "EligibilityUpdate",
    "EligibleSet",
    "EpisodeStarts",
    "FieldsView",
    "Forecast",
    "Geometry",
    "Growable",
    "HostSampler",
    "Inspected",
    "LeafBytes",
    "Mass",
    "NthSampler",
    "Placement",
    "Prefetchable",
    "RaggedStorage",
    "Read",
    "ReadOnly",
    "Resumable",
    "Ring",
    "Sampler",
    "Scattering",
    "StatefulTransform",
    "Storage",
    "Streaming",
    "Transform",
    "View",
    "Window",
    "Writer",
    "component",
    "earlier",
    "later",
    "state",
]

"""For parts of your own: what storages, samplers, views, writers and transforms are, and three bases that do the rest.

A part is any frozen dataclass of values with the methods of its Protocol (`Storage`, `Sampler`, `View`, `Streaming` or
`Scattering`, `Transform`); nothing need be inherited, and fbuf's own inherit nothing. `component` makes such a class of yours
hash, compare, print and be static in `jit`; `state` makes a class of arrays a pytree. What a part may have besides
(`Growable`, `Limited`, `InOrder`, ...) is a Protocol of its own. A storage, sampler or view that differs from the usual in one
thing only derives from `ArrayStorage`, `NthSampler` or `FieldsView`, and says that one thing. A class decorator that adds
what is missing was rejected: type checkers do not see what it adds.

Names here are public: they change as `fbuf`'s own do. The README has an example of each.
"""

from fbuf._core.component import component, state
from fbuf._core.geometry import Geometry, Placement, Ring
from fbuf._interfaces.sampler import (
    Bounded,
    ByRank,
    Draw,
    EligibilityUpdate,
    EligibleSet,
    EpisodeStarts,
    HostKept,
    InOrder,
    Inspected,
    Inspecting,
    Joint,
    Limited,
    Rebuilding,
    Sampler,
)
from fbuf._interfaces.storage import (
    Forecast,
    Forecasting,
    Growable,
    LeafBytes,
    Read,
    Recording,
    Requesting,
    Resumable,
    Storage,
    Weighing,
)
from fbuf._interfaces.transform import Context, Invertible, Keyed, Remembering, Transform
from fbuf._interfaces.view import Deciding, EligibilityRule, Prompt, View, Window
from fbuf._interfaces.writer import Forgetting, ReadOnly, Reporting, Scattering, Streaming, Writer
from fbuf.parts._sampler import NthSampler
from fbuf.parts._storage import ArrayStorage
from fbuf.parts._view import FieldsView, earlier, later

__all__ = [
    "ArrayStorage",
    "Bounded",
    "ByRank",
    "Context",
    "Deciding",
    "Draw",
    "EligibilityRule",
    "EligibilityUpdate",
    "EligibleSet",
    "EpisodeStarts",
    "FieldsView",
    "Forecast",
    "Forecasting",
    "Forgetting",
    "Geometry",
    "Growable",
    "HostKept",
    "InOrder",
    "Inspected",
    "Inspecting",
    "Invertible",
    "Joint",
    "Keyed",
    "LeafBytes",
    "Limited",
    "NthSampler",
    "Placement",
    "Prompt",
    "Read",
    "ReadOnly",
    "Rebuilding",
    "Recording",
    "Remembering",
    "Reporting",
    "Requesting",
    "Resumable",
    "Ring",
    "Sampler",
    "Scattering",
    "Storage",
    "Streaming",
    "Transform",
    "View",
    "Weighing",
    "Window",
    "Writer",
    "component",
    "earlier",
    "later",
    "state",
]

"""Transform rows before they are stored, and batches after they are read; `fbuf.parts.Transform` is the interface.

A custom transform is a frozen dataclass of values with one method:

    @jax.tree_util.register_static
    @dataclasses.dataclass(frozen=True)
    class Clip:
        largest: float

        def apply(self, data, context):
            return {**data, "reward": jnp.clip(data["reward"], -self.largest, self.largest)}
"""

from typing import TYPE_CHECKING

from fbuf._core.lazy_import import later
from fbuf.transforms import _running_stats as _running_stats  # registers the statistics of exported programs
from fbuf.transforms._chain import Chain, apply
from fbuf.transforms._map import Map

if TYPE_CHECKING:
    from fbuf.transforms._augment import Augment
    from fbuf.transforms._normalize import Denormalize, Normalize, NormalizeReward
    from fbuf.transforms._reshape import Concatenate, Split, Stack, Unstack
    from fbuf.transforms._reward_to_go import RewardToGo
    from fbuf.transforms._scale import Cast, Scale
    from fbuf.transforms._select import Drop, Rename, Select

__all__ = [
    "Augment",
    "Cast",
    "Chain",
    "Concatenate",
    "Denormalize",
    "Drop",
    "Map",
    "Normalize",
    "NormalizeReward",
    "Rename",
    "RewardToGo",
    "Scale",
    "Select",
    "Split",
    "Stack",
    "Unstack",
    "apply",
]

__getattr__, __dir__ = later(
    __name__,
    {
        "fbuf.transforms._augment": ["Augment"],
        "fbuf.transforms._reshape": ["Concatenate", "Split", "Stack", "Unstack"],
        "fbuf.transforms._normalize": ["Denormalize", "Normalize", "NormalizeReward"],
        "fbuf.transforms._reward_to_go": ["RewardToGo"],
        "fbuf.transforms._scale": ["Cast", "Scale"],
        "fbuf.transforms._select": ["Drop", "Rename", "Select"],
    },
    __all__,
)

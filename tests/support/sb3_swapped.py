"""A plugin for pytest, `-p tests.support.sb3_swapped`: Stable-Baselines3 with compressed replay buffers in place of its own.

Every observation is compressed, however small. Imports of SB3's classes return ours, except in SB3's own modules.
"""

import sys
import types
from typing import Any

import stable_baselines3
from gymnasium import spaces
from stable_baselines3.common import buffers
from stable_baselines3.common.off_policy_algorithm import OffPolicyAlgorithm
from stable_baselines3.her import her_replay_buffer

from fbuf.integrations import sb3


class Smallest:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, min_bytes=1, **kwargs)


class ReplayBuffer(Smallest, sb3.CompressedReplayBuffer): ...


class DictReplayBuffer(Smallest, sb3.CompressedDictReplayBuffer): ...


class NStepReplayBuffer(Smallest, sb3.CompressedNStepReplayBuffer): ...


class HerReplayBuffer(Smallest, sb3.CompressedHerReplayBuffer): ...


SWAPPED = {
    buffers.ReplayBuffer: ReplayBuffer,
    buffers.DictReplayBuffer: DictReplayBuffer,
    buffers.NStepReplayBuffer: NStepReplayBuffer,
    her_replay_buffer.HerReplayBuffer: HerReplayBuffer,
}
_set_up = OffPolicyAlgorithm._setup_model


def set_up(self: Any) -> None:
    """Choose the class that SB3 would, and use ours."""
    steps, nested = getattr(self, "n_steps", 1), isinstance(self.observation_space, spaces.Dict)
    chosen = self.replay_buffer_class
    if chosen is None and not (nested and steps > 1):
        flat = buffers.NStepReplayBuffer if steps > 1 else buffers.ReplayBuffer
        chosen = buffers.DictReplayBuffer if nested else flat
        if steps > 1:
            self.replay_buffer_kwargs = self.replay_buffer_kwargs | {"n_steps": steps, "gamma": self.gamma}
    self.replay_buffer_class = SWAPPED.get(chosen, chosen)
    _set_up(self)


OffPolicyAlgorithm._setup_model = set_up
for module in (buffers, her_replay_buffer):  # their own code must see their own classes
    swapped = types.ModuleType(module.__name__)
    swapped.__dict__.update(module.__dict__)
    for theirs, ours in SWAPPED.items():
        if hasattr(swapped, theirs.__name__):
            setattr(swapped, theirs.__name__, ours)
    sys.modules[module.__name__] = swapped
stable_baselines3.HerReplayBuffer = HerReplayBuffer

"""Replay buffers for Stable-Baselines3 that keep each large observation once, compressed.

    DQN("CnnPolicy", env, replay_buffer_class=fbuf.integrations.sb3.CompressedReplayBuffer)

The classes derive from SB3's own. Only `observations` and `next_observations` are replaced, by objects that are read like
arrays, so SB3's code for adding, sampling, n-step returns, HER and VecNormalize runs unchanged. With the same random state
every batch equals that of SB3's buffer, bit for bit.

`save_replay_buffer` pickles the compressed bytes, and `load_replay_buffer` verifies their checksums. Checksums find damage,
not malice: unpickling can run any code, so load only files that you trust.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer, DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.her.her_replay_buffer import HerReplayBuffer

from fbuf._host.codecs import Codec, Zstd
from fbuf._host.pairs import ObservationPairs
from fbuf._host.types import Array

__all__ = [
    "CompressedDictReplayBuffer",
    "CompressedHerReplayBuffer",
    "CompressedNStepReplayBuffer",
    "CompressedReplayBuffer",
]

__dir__ = __all__.copy  # without the imports

_MIN_BYTES = 1024
_new: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()
"""Arrays that were read and not yet converted to tensors, by id: they need no copy."""


class _Shared:
    """What the two arrays of a buffer share: their store, and rows between two calls of SB3."""

    def __init__(self, pairs: ObservationPairs, reads_both: bool) -> None:
        self.pairs = pairs
        self._reads_both = reads_both
        self._waiting: Array | None = None  # the observation whose next observation is assigned next
        self._ahead: tuple[int, int, Array, Array, Array] | None = None  # rows that are probably read next

    def clear(self) -> None:
        """Drop all rows."""
        self._waiting = self._ahead = None
        self.pairs.clear()

    def assign(self, offset: int, position: Any, value: Array) -> None:
        pairs = self.pairs
        behind = (pairs.position - position) % pairs.length if isinstance(position, (int, np.integer)) else 2
        # The newest row is assigned again if `add` failed after the observations: an invalid reward, or an interrupt.
        if behind > min(pairs.steps, 1):
            raise IndexError(
                f"Compressed buffer: rows {position!r} were assigned; expected row {pairs.position}. Rows are "
                f"stored in order: call add."
            )
        if offset == 0:
            self._waiting = np.array(value)
        elif self._waiting is None:
            raise IndexError("Compressed buffer: next_observations was assigned before observations. Call add.")
        else:
            pairs.add(self._waiting, value, int(position))
            self._waiting = self._ahead = None

    def read(self, offset: int, position: Array, lane: Array) -> Array:
        """Return rows, and keep those of the other array, which SB3 reads next, decoded from the same chunks."""
        ahead, self._ahead = self._ahead, None
        steps = self.pairs.steps
        if ahead is not None and ahead[:2] == (offset, steps):
            if np.array_equal(ahead[2], position) and np.array_equal(ahead[3], lane):
                return ahead[4]
        if not self._reads_both:
            return self.pairs.read(position, lane, (offset,))[0]
        rows = self.pairs.read(position, lane)
        self._ahead = (1 - offset, steps, position.copy(), lane.copy(), rows[1 - offset])
        return rows[offset]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_ahead": None}


class _Observations:
    """Read like an array `[buffer_size, n_envs, *shape]`; rows are assigned in order, by SB3's `add`."""

    def __init__(self, shared: _Shared, offset: int) -> None:
        self._shared, self._offset = shared, offset
        pairs = shared.pairs
        self.shape = (pairs.length, pairs.lanes, *pairs.column.shape)
        self.dtype, self.ndim = pairs.column.dtype, len(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory; those of both arrays are counted for `observations`."""
        return 0 if self._offset else self._shared.pairs.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._shared.assign(self._offset, key, value)

    def __getitem__(self, key: Any) -> Array:
        key = key if isinstance(key, tuple) else (key,)
        while len(key) > 1 and (key[-1] is Ellipsis or (isinstance(key[-1], slice) and key[-1] == slice(None))):
            key = key[:-1]
        if len(key) == 2 and all(isinstance(k, np.ndarray) and k.dtype.kind in "iu" for k in key):
            position, lane = key if key[0].shape == key[1].shape else np.broadcast_arrays(*key)
            if position.ndim == 1 and min(position.min(initial=0), lane.min(initial=0)) >= 0:
                rows = self._shared.read(self._offset, position, lane)
                _new[id(rows)] = rows
                return rows
        number = np.arange(self.shape[0] * self.shape[1]).reshape(self.shape[:2])  # NumPy resolves any index
        if len(key) == 1 or not any(k is Ellipsis for k in key):
            with contextlib.suppress(IndexError):  # an index within rows
                place = np.asarray(number[key])
                return self._read(place.reshape(-1)).reshape(*place.shape, *self.shape[2:])
        inner = np.arange(math.prod(self.shape[2:])).reshape(self.shape[2:])
        number = number.reshape(*number.shape, *[1] * inner.ndim)
        place, entry = (np.broadcast_to(array, self.shape)[key] for array in (number, inner))
        places, nth = np.unique(place, return_inverse=True)
        return self._read(places).reshape(len(places), inner.size)[nth.reshape(place.shape), entry]

    def _read(self, place: Array) -> Array:
        return self._shared.pairs.read(*np.divmod(place, self.shape[1]), (self._offset,))[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)


class _Compressed(BaseBuffer):  # type: ignore[misc]
    """What the compressed buffers have in common."""

    _reads_both = True
    observations: Any
    next_observations: Any

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: Any = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        codec: Codec | None = None,
        min_bytes: int = _MIN_BYTES,
    ) -> None:
        # SB3's other constructors allocate the observations, or refuse to where memory is short.
        BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = False  # SB3 would then overwrite final observations
        self.handle_timeout_termination = handle_timeout_termination
        lead = self.buffer_size, self.n_envs
        self.actions = np.zeros((*lead, self.action_dim), ReplayBuffer._maybe_cast_dtype(action_space.dtype))
        self.rewards, self.dones, self.timeouts = (np.zeros(lead, np.float32) for _ in range(3))
        self._allocate(codec, min_bytes)

    def _allocate(self, codec: Codec | None, min_bytes: int) -> None:
        """Make empty observations."""
        nested = isinstance(self.observation_space, spaces.Dict)
        if nested != isinstance(self, DictReplayBuffer):
            expected, other = ("one array", "CompressedDict") if nested else ("a Dict", "Compressed")
            raise ValueError(
                f"{type(self).__name__}: observation_space is {self.observation_space}; expected {expected}. "
                f"Use {other}ReplayBuffer."
            )
        if not nested:
            space = self.observation_space
            self.observations, self.next_observations = self._arrays(self.obs_shape, space.dtype, codec, min_bytes)
            return
        assert isinstance(self.obs_shape, dict)
        self.observations, self.next_observations = {}, {}
        for key, shape in self.obs_shape.items():
            arrays = self._arrays(shape, self.observation_space[key].dtype, codec, min_bytes)
            self.observations[key], self.next_observations[key] = arrays

    def _arrays(self, shape: tuple[int, ...], dtype: Any, codec: Codec | None, min_bytes: int) -> tuple[Any, Any]:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if nbytes < max(min_bytes, 1):
            return tuple(np.zeros((self.buffer_size, self.n_envs, *shape), dtype) for _ in range(2))  # type: ignore[return-value]
        pairs = ObservationPairs(self.buffer_size, self.n_envs, shape, dtype, Zstd() if codec is None else codec)
        shared = _Shared(pairs, self._reads_both)
        return _Observations(shared, 0), _Observations(shared, 1)

    def to_torch(self, array: Array, copy: bool = True) -> Any:
        """Return a tensor; without a copy of observations that were read for it."""
        return super().to_torch(array, copy and _new.pop(id(array), None) is not array)

    def reset(self) -> None:
        """Drop all transitions."""
        super().reset()
        for array in self._observation_arrays():
            if isinstance(array, _Observations):
                array._shared.clear()

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory that transitions take."""
        small = self.actions, self.rewards, self.dones, self.timeouts
        return sum(array.nbytes for array in (*self._observation_arrays(), *small))

    def _observation_arrays(self) -> list[Any]:
        both = self.observations, self.next_observations
        return [array for one in both for array in (one.values() if isinstance(one, dict) else [one])]


class CompressedReplayBuffer(_Compressed, ReplayBuffer):  # type: ignore[misc]
    """Replace SB3's `ReplayBuffer`; store observations compressed.

    Args:
      buffer_size, observation_space, action_space, device, n_envs, handle_timeout_termination: As in SB3.
      optimize_memory_usage: Accepted and not needed: each observation is stored once, final observations are exact, and
        timeouts are handled. Batches are those of SB3 without it.
      codec: `fbuf.storages.Zstd()` by default.
      min_bytes: Observations of fewer bytes are kept in NumPy arrays.

    Example:
      >>> import gymnasium as gym, numpy as np
      >>> from fbuf.integrations.sb3 import CompressedReplayBuffer
      >>> frames = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
      >>> buffer = CompressedReplayBuffer(1000, frames, gym.spaces.Discrete(6), "cpu")
      >>> stack = np.zeros((1, 4, 84, 84), np.uint8)
      >>> for _ in range(100):
      ...     buffer.add(stack, stack, np.zeros(1), np.zeros(1), np.zeros(1), [{}])
      >>> buffer.sample(32).observations.shape
      torch.Size([32, 4, 84, 84])
    """


class CompressedDictReplayBuffer(_Compressed, DictReplayBuffer):  # type: ignore[misc]
    """Replace SB3's `DictReplayBuffer`; store observations compressed. Arguments are as for `CompressedReplayBuffer`.

    `min_bytes` applies to each entry of the observation.
    """


class CompressedNStepReplayBuffer(NStepReplayBuffer, CompressedReplayBuffer):  # type: ignore[misc]
    """Replace SB3's `NStepReplayBuffer`; store observations compressed.

    Args: as for `CompressedReplayBuffer`, and `n_steps` and `gamma`. SB3 ignores `n_steps` of an algorithm that is given a
    class: pass `replay_buffer_kwargs={"n_steps": 3, "gamma": 0.99}`.
    """

    _reads_both = False  # the next observation is of a later step


class CompressedHerReplayBuffer(HerReplayBuffer, CompressedDictReplayBuffer):  # type: ignore[misc]
    """Replace SB3's `HerReplayBuffer`; store observations compressed. Arguments are its own, `codec` and `min_bytes`."""

    def __init__(self, *args: Any, codec: Codec | None = None, min_bytes: int = _MIN_BYTES, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._allocate(codec, min_bytes)

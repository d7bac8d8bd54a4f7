"""Normalize leaves by the mean and the standard deviation of all rows ever written.

The statistics are part of the buffer's state and change with every write. At read all rows of a batch are scaled by the current
statistics, and stored values are unchanged. At write each row keeps the scale of its time, as with environment wrappers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from fbuf._core.arguments import check_bool
from fbuf._core.component import component
from fbuf._core.pytree import PyTree, Spec, named_leaves
from fbuf._interfaces.transform import Context, StatefulTransform, Transform
from fbuf.transforms import _running_stats
from fbuf.transforms._fields import blanked, checked_keys, checked_name, convert, is_number, leaf_of, replaced
from fbuf.transforms._running_stats import Moments


@component
class Normalize(StatefulTransform):
    """Compute `(x - mean) / std` of leaves, element by element, by running statistics.

    Attributes:
      keys: Names of leaves with real numbers; integers become float32.
      of: Names of the leaves whose statistics are used, one for each key, or one for all; None: the keys. At read these are
        leaves of the stored rows, and keys are leaves of the view's batch: `Normalize(("obs", "next_obs"), of="obs")`.
      center: Subtract the mean; False: only divide.
      clip: Clip results to [-clip, clip]; None: do not.
      eps: Elements with a standard deviation up to this are not divided (constants, or a single row).

    The statistics cover all rows ever written, each once; at write also the rows being written. Masked rows do not count,
    `update_rows` does not change them, and `clear` keeps them. NaN, infinite numbers and numbers beyond 1e15 are skipped
    and counted. `convert` to a buffer with another `on_read`, `resume` and `datasets.open` compute them from the held rows.

    `stats` of the buffer returns `<stage>_<leaf>_mean` and `_std` (averages over the elements of a leaf) and `_skipped`.
    The memory is in `state.transforms`.

    Cost: O(N) a write; three numbers an element of a leaf.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(10, on_read=fbuf.transforms.Normalize("obs"))
      >>> state = buffer.extend(buffer.init({"obs": 0.0}), {"obs": jnp.array([2.0, 4.0, 6.0, 8.0])})
      >>> round(float(buffer.stats(state)["normalize_obs_mean"]), 3), round(float(buffer.stats(state)["normalize_obs_std"]), 3)
      (5.0, 2.236)
      >>> bool((abs(buffer.peek(state, jax.random.key(0), 8).data["obs"]) < 1.4).all())
      True
    """

    keys: str | tuple[str, ...]
    of: tuple[str, ...] | str | None = None
    center: bool = True
    clip: float | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        check_bool("Normalize", "center", self.center)
        clip, eps = _number("Normalize", "clip", self.clip), _number("Normalize", "eps", self.eps)
        convert(self, clip=clip, eps=eps, keys=checked_keys("Normalize", self.keys))
        if self.of is not None:
            of = self.of if isinstance(self.of, (tuple, list)) else (self.of,)
            if len(of) not in (1, len(self.keys)):
                raise ValueError(f"Normalize: of is {self.of!r}; expected one name, or one for each of {self.keys}.")
            named = tuple(checked_name("Normalize", name) for name in of)
            convert(self, of=named * len(self.keys) if len(named) == 1 else named)

    @property
    def sources(self) -> dict[str, str]:
        """The leaf whose statistics are used, by changed leaf."""
        of: Any = self.of or self.keys
        return dict(zip(self.keys, of, strict=True))

    def watches(self, spec: Spec) -> tuple[str, ...]:
        return _watched("Normalize", self.sources.values(), spec)

    def init(self, spec: Spec) -> dict[str, Moments]:
        return {name: _running_stats.init(tuple(spec[name].shape)) for name in self.watches(spec)}

    def observe(self, memory: Mapping[str, Moments], leaves: Mapping[str, Array], mask: Array) -> dict[str, Moments]:
        return {name: _running_stats.merge(moments, leaves[name], mask) for name, moments in memory.items()}

    def stats(self, memory: Mapping[str, Moments]) -> dict[str, Array]:
        out = {}
        for name, moments in memory.items():
            out[f"{name}_mean"] = jnp.mean(_running_stats.mean(moments))
            out[f"{name}_std"] = jnp.mean(jnp.sqrt(_running_stats.variance(moments)))
            out[f"{name}_skipped"] = moments.skipped
        return out

    def apply(self, data: PyTree, context: Context) -> PyTree:
        return self._changed("Normalize", data, context, undo=False)

    def _changed(self, call: str, data: PyTree, context: Context, undo: bool) -> PyTree:
        if not isinstance(context.memory, Mapping):
            raise ValueError(f"{call}: memory is missing. Write transforms.apply(..., memory=state.transforms.read).")
        leaves, new = named_leaves(data), {}
        for name, source in self.sources.items():
            leaf, moments = leaf_of(call, name, leaves), context.memory[source]
            shape = moments.seen.shape[1:]
            if leaf.shape[leaf.ndim - len(shape) :] != shape or leaf.ndim < len(shape):
                raise ValueError(
                    f"{call}: leaf '{name}' is {list(leaf.shape)}, but the statistics of '{source}' are {list(shape)}; "
                    f"expected these axes last. Write of=..., or use on_write."
                )
            new[name] = self._element(name, leaf, moments, context, undo)
        return replaced(data, new)

    def _element(self, name: str, leaf: Array, moments: Moments, context: Context, undo: bool) -> Array:
        dtype = leaf.dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.dtype(jnp.float32)
        std = jnp.sqrt(_running_stats.variance(moments))
        std = jnp.where(std > jnp.float32(self.eps), std, jnp.float32(1))
        mean = _running_stats.mean(moments)
        shape = (1,) * (leaf.ndim - std.ndim) + std.shape
        x, std, mean = leaf.astype(jnp.float32), std.reshape(shape), mean.reshape(shape)
        if undo:
            x = x * std + mean if self.center else x * std
        else:
            x = (x - mean) / std if self.center else x / std
            if self.clip is not None:
                x = jnp.clip(x, jnp.float32(-self.clip), jnp.float32(self.clip))
        return (blanked(name, x, context) if self.center else x).astype(dtype)

    def inverse(self) -> Denormalize:
        """Return `x * std + mean` by the same statistics, for `transforms.apply(..., memory=...)`.

        Raises:
          ValueError: results are clipped.
        """
        if self.clip is not None:
            raise ValueError(f"Normalize.inverse: clip is {self.clip}; expected None. Clipping has no inverse.")
        return Denormalize(self)


@component
class Denormalize(Transform):
    """Invert a `Normalize` by its statistics; `Normalize(...).inverse()` returns one."""

    of: Normalize

    def apply(self, data: PyTree, context: Context) -> PyTree:
        return self.of._changed("Denormalize", data, context, undo=True)

    def inverse(self) -> Normalize:
        """Return the `Normalize`."""
        return self.of


@component
class NormalizeReward(StatefulTransform):
    """Divide rewards by their running standard deviation, which keeps their sign.

    It is valid for every view: the n-step return of scaled rewards is the scaled n-step return. Subtracting the mean
    changes the optimal policy if episodes end; `Normalize("reward")` does so.

    Attributes:
      reward: Name of the rewards.
      of: Name of the stored leaf whose statistics are used; None: the same.
      clip: Clip results to [-clip, clip]; None: do not.
      eps: Rewards with a standard deviation up to this are not divided.

    Example:
      >>> import fbuf, jax, jax.numpy as jnp
      >>> view = fbuf.views.Transition(n_step=3, autoreset="same_step")
      >>> buffer = fbuf.Buffer(1000, view=view, on_read=fbuf.transforms.NormalizeReward(clip=10.0))
      >>> buffer.on_read.names
      ('normalize_reward',)
    """

    reward: str = "reward"
    of: str | None = None
    clip: float | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        clip, eps = _number("NormalizeReward", "clip", self.clip), _number("NormalizeReward", "eps", self.eps)
        of = None if self.of is None else checked_name("NormalizeReward", self.of)
        convert(self, clip=clip, eps=eps, of=of, reward=checked_name("NormalizeReward", self.reward))

    @property
    def plain(self) -> Normalize:
        """The equivalent `Normalize`."""
        return Normalize(self.reward, self.of, False, self.clip, self.eps)

    def watches(self, spec: Spec) -> tuple[str, ...]:
        return _watched("NormalizeReward", self.plain.sources.values(), spec)

    def init(self, spec: Spec) -> dict[str, Moments]:
        self.watches(spec)
        return self.plain.init(spec)

    def observe(self, memory: Mapping[str, Moments], leaves: Mapping[str, Array], mask: Array) -> dict[str, Moments]:
        return self.plain.observe(memory, leaves, mask)

    def stats(self, memory: Mapping[str, Moments]) -> dict[str, Array]:
        ((_, moments),) = memory.items()
        return {number.rpartition("_")[2]: value for number, value in self.plain.stats({"": moments}).items()}

    def apply(self, data: PyTree, context: Context) -> PyTree:
        return self.plain._changed("NormalizeReward", data, context, undo=False)

    def inverse(self) -> Denormalize:
        """Return `x * std` by the same statistics.

        Raises:
          ValueError: results are clipped.
        """
        return self.plain.inverse()


def _watched(call: str, names: Any, spec: Spec) -> tuple[str, ...]:
    unique = tuple(dict.fromkeys(names))
    for name in unique:
        if name not in spec:
            raise ValueError(f"{call}: of is '{name}', but rows have {', '.join(spec)}. Use of='{next(iter(spec))}'.")
        dtype = spec[name].dtype
        if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
            raise TypeError(f"{call}: leaf '{name}' is {dtype}; expected real numbers. Use Cast before.")
    return unique


def _number(call: str, field: str, value: Any) -> float | None:
    """Return a setting as a Python number, as checkpoints need."""
    clip = field == "clip"
    if clip and value is None:
        return None
    if not is_number(value) or value < 0 or (clip and value == 0):
        least, example = ("> 0", 10.0) if clip else (">= 0", 1e-6)
        raise ValueError(f"{call}: {field} is {value!r}; expected a finite number {least}. Write {field}={example}.")
    return float(value)

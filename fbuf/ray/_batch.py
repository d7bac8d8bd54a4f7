"""Batches and indices that cross processes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from fbuf._core.component import state
from fbuf._core.pytree import PyTree, has_64_bits, needs_x64
from fbuf._core.sample import Sample


@state
class RayIndex:
    """Identify rows of a `RayReplay`. Any selection of its entries is an index too."""

    shard: jax.Array  # int32[B], in [0, K); K where the sample's mask is False
    birth: jax.Array  # uint32[B], incarnation of the shard; updates of rows that it lost are dropped
    slot: jax.Array  # int32[B], in the shard
    ticket: jax.Array  # uint32[B], generation of the slot; 0 where the mask is False


@state
class RaySample:
    """Hold a batch of a `RayReplay`. Where `mask` is False it is zero.

    Attributes: those of `fbuf.Sample`. `index` is a `RayIndex`; `probability` is of one draw from all shards.
    """

    data: PyTree
    index: RayIndex
    probability: jax.Array
    weight: jax.Array
    mask: jax.Array
    last: Any = None


def of_shard(batch: Sample, shard: int, shards: int, birth: int) -> RaySample:
    """Return a batch of one shard, whose index names it."""
    own: Any = np.where(batch.mask, np.int32(shard), np.int32(shards))
    births: Any = np.full(own.shape, birth, np.uint32)
    index = RayIndex(own, births, batch.index.slot, batch.index.ticket)
    return RaySample(batch.data, index, batch.probability, batch.weight, batch.mask, batch.last)


def placed(batch: RaySample, to: str, device: Any = None) -> RaySample:
    """Return a batch of NumPy arrays as JAX or torch arrays, without a copy where JAX allows it; 64 bits as NumPy."""
    if to == "jax":
        if device is None and not has_64_bits(batch):
            return jax.device_put(batch)
        own = jax.tree.map(functools.partial(_put, device=device), batch)
        return own if device is None else dataclasses.replace(own, index=batch.index)
    if to == "torch":
        from fbuf.torch import to_torch

        tensors: RaySample = to_torch(jax.tree.map(_writable, batch))
        return tensors if device is None else jax.tree.map(lambda tensor: tensor.to(device), tensors)
    return batch


def _put(leaf: Any, device: Any) -> Any:
    if needs_x64(leaf.dtype):
        return leaf
    if isinstance(device, jax.sharding.Sharding):
        return jax.make_array_from_process_local_data(device, leaf) if leaf.ndim else leaf
    return jax.device_put(leaf, device)


class _Writable:
    """The memory of a read-only array. No other process reads the reply that it is part of."""

    def __init__(self, array: np.ndarray[Any, Any]):
        self._array = array  # keeps the memory
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.flags.writeable:
        return array
    return np.asarray(_Writable(array)) if array.flags.aligned else array.copy()

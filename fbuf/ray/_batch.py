"""Batches and indices that cross processes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from fbuf._core.pytree import has_64_bits, needs_x64
from fbuf._core.sample import Sample


def of_shard(batch: Sample, shard: int, shards: int, birth: int) -> Sample:
    """Return a batch of one shard, whose index names it."""
    source: Any = np.where(batch.mask, np.int32(shard), np.int32(shards))
    births: Any = np.full(source.shape, birth, np.uint32)
    return dataclasses.replace(batch, index=dataclasses.replace(batch.index, shard=source, birth=births))


def placed(batch: Sample, to: str, device: Any = None) -> Sample:
    """Return a batch of NumPy arrays as JAX or torch arrays, without a copy where JAX allows it; 64 bits as NumPy."""
    if to == "jax":
        if device is None and not has_64_bits(batch):
            return jax.device_put(batch)
        arrays = jax.tree.map(functools.partial(_put, device=device), batch)
        return arrays if device is None else dataclasses.replace(arrays, index=batch.index)
    if to == "torch":
        from fbuf.torch import to_torch

        tensors: Sample = to_torch(jax.tree.map(_writable, batch))
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

"""Rows and indices of any kind on their way in, batches in the kind that was asked for on their way out.

A leaf may be a JAX, numpy or torch array; a batch is all of one kind.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.checks import check_is_index
from fbuf._core.pytree import PyTree
from fbuf._core.sample import Index, Sample


def _is_torch(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch"


def array(value: Any, name: str) -> Any:
    """Anything array-like as JAX takes it; a message says its name."""
    if value is None or isinstance(value, (jax.Array, np.ndarray, bool, int, float, np.generic, slice)):
        return value
    if _is_torch(value):
        from fbuf.torch import from_torch

        return from_torch({name: value})[name]
    return jnp.asarray(value)


def rows_of(tree: PyTree) -> PyTree:
    """Rows with torch leaves as JAX arrays; together, so that a message names the leaf."""
    if type(tree).__module__.split(".")[0] == "tensordict":
        raise TypeError(
            "Replay: rows are a TensorDict; expected dicts of arrays. Use fbuf.torch.from_tensordict(rows)."
        )
    if not any(_is_torch(leaf) for leaf in jax.tree.leaves(tree)):
        return tree
    from fbuf.torch import from_torch

    if all(_is_torch(leaf) for leaf in jax.tree.leaves(tree)):
        return from_torch(tree)
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: array(leaf, jax.tree_util.keystr(path, simple=True, separator="/")), tree
    )


def index_of(call: str, index: Any) -> Index:
    """An `Index` of JAX arrays; refuses what is none before anything is donated or traced."""
    check_is_index(call, index)
    return Index(array(index.slot, "index.slot"), array(index.ticket, "index.ticket"))


def convert(batch: Sample, to: str) -> Sample:
    """A batch as arrays of JAX, numpy or torch."""
    if to == "numpy":
        held: Sample = jax.device_get(batch)
        return held
    if to == "torch":
        from fbuf.torch._to_torch import sample_to_torch

        return sample_to_torch(batch)
    return batch


def place(batch: Sample, to: str, device: Any) -> Any:
    """A batch as such arrays, on a device of theirs; returns when they are there."""
    ragged, batch = batch.ragged, dataclasses.replace(batch, ragged=None)  # names rows: no data
    if to == "jax":
        batch = jax.block_until_ready(batch if device is None else jax.device_put(batch, device))
    else:
        batch = convert(batch, to)
        if device is not None:
            batch = jax.tree.map(lambda tensor: tensor.to(device), batch)
    return dataclasses.replace(batch, ragged=ragged)


def beside(value: Any, home: jax.Array) -> Any:
    """An array that lies on another device than `home` moved there; everything else as it is."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return value
    there, here = value.sharding.device_set, home.sharding.device_set
    return value if len(here) != 1 or there == here else jax.device_put(value, home.sharding)

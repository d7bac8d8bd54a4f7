"""The arrays of a state, without what can be recomputed: trees as leaves, ranks as buckets, host priorities as an array.

Parents of a sum tree equal the sums of their children bit for bit (`fbuf._algorithms.sum_tree`), and bucket counts are
integers, so nothing is lost. Everything else, custom parts included, is stored as it is.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import rank_buckets, sum_tree
from fbuf._algorithms.rank_buckets import Ranks
from fbuf._buffer import prefetch
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.pytree import Spec
from fbuf._core.row_format import RowFormat
from fbuf._interfaces.storage import Storage
from fbuf.samplers import Prioritized, PrioritizedState, _host_priorities
from fbuf.samplers._host_priorities import HostTree
from fbuf.storages._host_rows import SideHeld

_REDUCE: dict[str, sum_tree.Reduce] = {"tree": "sum", "low": "min", "top": "max"}


class Prefix:
    """The first `rows` of an array; a single leaf to JAX."""

    __slots__ = ("array", "rows")

    def __init__(self, array: Any, rows: int):
        self.array, self.rows = array, rows


def template(buffer: Buffer, spec: Spec, structure: Any, given: RowFormat | None) -> BufferState:
    """Return the shapes of a state of `buffer`, as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(
        partial(prefetch.empty_state, buffer, given=given), buffer.storage.abstract(buffer.geometry, spec, structure)
    )


def to_saved_arrays(buffer: Buffer, state: BufferState) -> dict[str, Any]:
    """Return the stored part of a state except the rows, by name: arrays or prefixes. Also of shapes."""
    capacity = buffer.capacity
    without = jax.tree.map(partial(_without_parents, capacity), state.sampler, is_leaf=_is_known)
    pairs = jax.tree_util.tree_flatten_with_path(dataclasses.replace(state, rows=None, sampler=without))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}


def from_saved_arrays(buffer: Buffer, abstract: BufferState, leaves: dict[str, Any], rows: Any) -> BufferState:
    """Return the state of leaves by name, in the order of `to_saved_arrays(abstract)`, over `rows`."""
    capacity = buffer.capacity
    without = jax.tree.map(partial(_without_parents, capacity), abstract.sampler, is_leaf=_is_known)
    structure: Any = jax.tree.structure(dataclasses.replace(abstract, rows=None, sampler=without))
    state = structure.unflatten(leaves.values())
    sampler = jax.tree.map(partial(_with_parents, buffer), abstract.sampler, state.sampler, is_leaf=_is_known)
    state = dataclasses.replace(state, rows=rows, sampler=sampler)
    return dataclasses.replace(state, ahead=restart_prefetch(buffer, state))


def has_custom_host_state(buffer: Buffer) -> bool:
    """Return whether a custom sampler keeps state on the host."""
    return buffer.sampler.on_host and not isinstance(buffer.sampler, Prioritized)


def has_custom_reads(buffer: Buffer) -> bool:
    """Return whether prefetched batches may refer to a custom storage's reads."""
    kind = type(buffer.storage)
    return kind.prepare_read is not Storage.prepare_read and kind.__module__.split(".")[0] != "fbuf"


def restart_prefetch(buffer: Buffer, state: BufferState) -> Any:
    """Return the prefetched batch, whose rows are read when it is returned, since no read is running."""
    ahead = state.ahead
    if ahead is None or has_custom_reads(buffer):
        return None if ahead is None else ahead.dropped()
    if isinstance(ahead.held, SideHeld):
        held = dataclasses.replace(ahead.held, number=jnp.zeros((), jnp.uint32))
        return dataclasses.replace(ahead, held=held)
    return ahead


def _is_known(node: Any) -> bool:
    return isinstance(node, (PrioritizedState, Ranks))


def _without_parents(capacity: int, node: Any) -> Any:
    if isinstance(node, Ranks):
        return Prefix(node.bucket, capacity)
    if not isinstance(node, PrioritizedState):
        return node
    tree = node.tree
    if isinstance(tree, HostTree):
        shapes = isinstance(tree.id, jax.ShapeDtypeStruct)
        kept: Any = jax.ShapeDtypeStruct((capacity,), jnp.float32) if shapes else _host_priorities.leaves(tree)
    else:
        kept = Prefix(tree, capacity)
    low: Any = None if node.low is None else Prefix(node.low, capacity)
    top: Any = None if node.top is None else Prefix(node.top, capacity)
    return dataclasses.replace(node, tree=kept, low=low, top=top)


def _with_parents(buffer: Buffer, abstract: Any, node: Any) -> Any:
    if isinstance(abstract, Ranks):
        return rank_buckets.of_buckets(node)
    if not isinstance(abstract, PrioritizedState):
        return node
    if isinstance(abstract.tree, HostTree):
        least = buffer.sampler.normalize == "buffer"
        tree = _host_priorities.open("fbuf.load", buffer.capacity, least, np.asarray(node.tree))
        return dataclasses.replace(node, tree=tree)
    trees: dict[str, Any] = {
        name: sum_tree.rebuild(getattr(node, name), reduce=reduce)
        for name, reduce in _REDUCE.items()
        if getattr(abstract, name) is not None
    }
    return dataclasses.replace(node, **trees)

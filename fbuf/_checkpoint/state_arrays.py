"""A state without what can be worked out again: trees as their leaves, ranks as buckets, priorities on the host as an array.

Parents of a sum tree equal what their children give, bit for bit, whatever the history (`fbuf._algorithms.sum_tree`), and
counts of buckets are whole numbers, so that nothing is lost. Whatever else is in a state is stored as it is, a user's own
parts too.
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
from fbuf._interfaces.sampler import host_sampler
from fbuf._interfaces.storage import Prefetchable
from fbuf.samplers import Prioritized, PrioritizedState, _host_priorities
from fbuf.samplers._host_priorities import HostTree
from fbuf.storages._host_reads import SideHeld

_REDUCE: dict[str, sum_tree.Reduce] = {"tree": "sum", "low": "min", "top": "max"}


class Prefix:
    """The first `rows` of an array; to JAX one leaf."""

    __slots__ = ("array", "rows")

    def __init__(self, array: Any, rows: int):
        self.array, self.rows = array, rows


def template(buffer: Buffer, spec: Spec, structure: Any, given: RowFormat | None) -> BufferState:
    """What a state of `buffer` is, as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(
        partial(prefetch.empty_state, buffer, given=given), buffer.storage.abstract(buffer.geometry, spec, structure)
    )


def packed(buffer: Buffer, state: BufferState) -> dict[str, Any]:
    """What of a state is stored, but the rows, by name: arrays, or the beginnings of some. Of shapes too."""
    capacity = buffer.geometry.capacity
    without = jax.tree.map(partial(_without_parents, capacity), state.sampler, is_leaf=_is_known)
    pairs = jax.tree_util.tree_flatten_with_path(dataclasses.replace(state, rows=None, sampler=without))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}


def unpacked(buffer: Buffer, abstract: BufferState, leaves: dict[str, Any], rows: Any) -> BufferState:
    """The state of leaves by name, those that `packed` names for `abstract`, over `rows`."""
    capacity = buffer.geometry.capacity
    without = jax.tree.map(partial(_without_parents, capacity), abstract.sampler, is_leaf=_is_known)
    structure: Any = jax.tree.structure(dataclasses.replace(abstract, rows=None, sampler=without))
    state = structure.unflatten(leaves.values())
    sampler = jax.tree.map(partial(_with_parents, buffer), abstract.sampler, state.sampler, is_leaf=_is_known)
    state = dataclasses.replace(state, rows=rows, sampler=sampler)
    return dataclasses.replace(state, ahead=_awake(buffer, state))


def keeps_elsewhere(buffer: Buffer) -> bool:
    """Whether the sampler has something on the host of which only it knows what it is."""
    return host_sampler(buffer.sampler) is not None and not isinstance(buffer.sampler, Prioritized)


def asks_elsewhere(buffer: Buffer) -> bool:
    """Whether what is drawn ahead may name something that is not in the state."""
    return isinstance(buffer.storage, Prefetchable) and type(buffer.storage).__module__.split(".")[0] != "fbuf"


def _awake(buffer: Buffer, state: BufferState) -> Any:
    """What was drawn ahead: its rows are read when they are handed out, since nobody is reading them now."""
    ahead = state.ahead
    if ahead is None or asks_elsewhere(buffer):
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
    low: Any = Prefix(node.low, capacity) if _some(node.low) else ()
    top: Any = None if node.top is None else Prefix(node.top, capacity)
    return dataclasses.replace(node, tree=kept, low=low, top=top)


def _with_parents(buffer: Buffer, abstract: Any, node: Any) -> Any:
    if isinstance(abstract, Ranks):
        return rank_buckets.of_buckets(node)
    if not isinstance(abstract, PrioritizedState):
        return node
    if isinstance(abstract.tree, HostTree):
        least = getattr(buffer.sampler, "normalize", None) == "buffer"
        tree = _host_priorities.open("fbuf.load", buffer.geometry.capacity, least, np.asarray(node.tree))
        return dataclasses.replace(node, tree=tree)
    whole: dict[str, Any] = {
        name: sum_tree.rebuild(getattr(node, name), reduce=reduce)
        for name, reduce in _REDUCE.items()
        if _some(getattr(abstract, name))
    }
    return dataclasses.replace(node, **({} if _some(abstract.low) else {"low": jnp.zeros((0,), jnp.float32)}), **whole)


def _some(tree: Any) -> bool:
    """Whether there is a tree, and not a mark that nobody asked for it."""
    return isinstance(tree, (jax.Array, jax.ShapeDtypeStruct)) and tree.shape != (0,)

"""Priorities in the host's memory, behind callbacks: an id and a version in the state, a numpy tree outside.

For rows on a device whose memory is short: 4.6 bytes a row go to the host, and every draw and every write is a call there. One
jitted program cannot run on two devices, so that an array on the CPU beside rows on a GPU would break it in two; a callback
does not. How versions keep states apart is in `fbuf._host.priorities`, how long a store lives in `fbuf._bridge.lifetime`.

Draws are those of the device, bit for bit: the random numbers come from there, and the tree adds in the same order. Where the
device is the same CPU its own tree is several times faster, the more so the smaller the batch. Left out: files, as the tree is
small and every batch touches pages all over it.
"""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import sum_tree, sum_tree_draw
from fbuf._bridge import lifetime
from fbuf._bridge.callbacks import clear_priorities, draw_priorities, write_priorities
from fbuf._host import OnHost
from fbuf._host.priorities import Layout, Priorities
from fbuf._host.priorities import most_bytes as _most_bytes
from fbuf.samplers._types import Drawn


class HostTree(OnHost):
    """Names a version of priorities on the host: a pytree node that keeps its store open."""

    __slots__ = ("id", "owner", "slot", "version")

    def __init__(self, id: Any, version: Any, slot: int):
        self.id = id  # uint32[2], names the store; 0 where only shapes are asked for
        self.version = version  # uint32[2]
        self.slot = slot  # static: owner group
        self.owner = lifetime.owner_of(slot, id)

    def at(self, version: jax.Array) -> HostTree:
        """Another version."""
        return HostTree(self.id, version, self.slot)

    def __deepcopy__(self, memo: dict[int, Any]) -> HostTree:
        return HostTree(copy.deepcopy(self.id, memo), copy.deepcopy(self.version, memo), self.slot)

    def __reduce__(self) -> Any:
        raise TypeError(
            "fbuf: priorities on the host cannot be pickled, because they live in this process's store. Save the state, "
            "fbuf.save(path, buffer, state), and load it there, fbuf.load(path); or use "
            'samplers.Prioritized(on="device").'
        )

    def __repr__(self) -> str:
        return "HostTree()"


def _flatten(tree: HostTree) -> tuple[tuple[Any, Any], int]:
    return (tree.id, tree.version), tree.slot


def _flatten_with_keys(tree: HostTree) -> tuple[Any, int]:
    names = (jax.tree_util.GetAttrKey(name) for name in ("id", "version"))
    return tuple(zip(names, (tree.id, tree.version), strict=True)), tree.slot


def _unflatten(slot: int, children: Any) -> HostTree:
    id, version = children
    return HostTree(id, version, slot)


jax.tree_util.register_pytree_with_keys(HostTree, _flatten_with_keys, _unflatten, _flatten)


def init() -> HostTree:
    """Names no store; `open` does."""
    return HostTree(jnp.zeros((2,), jnp.uint32), jnp.zeros((2,), jnp.uint32), 0)


def _layout(capacity: int) -> Layout:
    return Layout(*sum_tree.layout(capacity), sum_tree_draw.middle(capacity))


def open(call: str, capacity: int, least: bool, leaves: np.ndarray | None = None) -> HostTree:
    """Priorities of their own, all 0 or as given: float32 of the first slots.

    Raises:
      TypeError: under a trace.
    """
    if lifetime.traced():
        raise TypeError(
            f"{call}: priorities on the host cannot be traced: a store is opened for them, which is no array. Call it outside "
            f'jit, vmap and scan and pass the state in, or use samplers.Prioritized(on="device").'
        )
    store = Priorities(_layout(capacity), least)
    if leaves is not None:
        store.fill(leaves)
    owned = lifetime.open_store(store)
    tree = HostTree(jnp.asarray(lifetime.split_id(owned.id)), jnp.asarray(lifetime.split_id(store.first)), owned.slot)
    tree.owner = owned
    return tree


def set(tree: HostTree, slot: jax.Array, leaf: jax.Array, token: jax.Array) -> HostTree:
    """Writes leaves float32[B] to slots int32[B]; those out of range are skipped, of equal ones the last wins. One callback."""
    return tree.at(write_priorities(tree.id, token, tree.version, slot, leaf))


def draw(tree: HostTree, key: jax.Array, batch_size: int, stratified: bool) -> Drawn:
    """Leaves in proportion. One callback."""
    top, bottom = sum_tree_draw.uniforms(key, batch_size, stratified=stratified)
    return Drawn(*draw_priorities(tree.id, tree.version, top, bottom))


def cleared(tree: HostTree) -> HostTree:
    """All leaves 0 again. One callback."""
    return tree.at(clear_priorities(tree.id, tree.version))


def leaves(tree: HostTree) -> np.ndarray:
    """float32[C], a copy. Eager."""
    return store_of(tree).leaves(lifetime.join_id(np.asarray(tree.version)))


def store_of(tree: HostTree) -> Priorities:
    """The store itself. Eager."""
    store: Any = lifetime.find(lifetime.join_id(np.asarray(tree.id)))
    assert isinstance(store, Priorities)
    return store


def most_bytes(capacity: int, least: bool) -> int:
    """Host bytes that there can be; see `fbuf._host.priorities.most_bytes`."""
    return _most_bytes(_layout(capacity), least)

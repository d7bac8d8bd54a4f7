"""Keep priorities in host memory behind callbacks: an id and a version in the state, a numpy tree outside.

This suits rows on a device with little memory: 4.6 bytes a row move to the host, and every draw and write is a callback. Draws
are bitwise equal to those on the device: the random numbers are drawn there, and the tree adds in the same order.
`fbuf._host.priorities` separates the versions; `fbuf._bridge.lifetime` closes a store with its last state.
"""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._algorithms import sum_tree
from fbuf._bridge import lifetime
from fbuf._bridge.callbacks import clear_priorities, draw_priorities, read_priorities, write_priorities
from fbuf._core.dispatch import OnHost
from fbuf._core.pytree import register_node
from fbuf._host.priorities import Layout, Priorities
from fbuf._host.priorities import most_bytes as store_bytes


class HostTree(OnHost):
    """Name a version of the priorities of a store, as a pytree node that keeps the store open."""

    __slots__ = ("id", "owner", "slot", "version")

    def __init__(self, id: Any, version: Any, slot: int):
        self.id = id  # uint32[2], names the store; 0 for shapes only
        self.version = version  # uint32[2]
        self.slot = slot  # static: owner group
        self.owner = lifetime.owner_of(slot, id)

    def at(self, version: jax.Array) -> HostTree:
        """Return the tree with another version."""
        return HostTree(self.id, version, self.slot)

    def __deepcopy__(self, memo: dict[int, Any]) -> HostTree:
        return HostTree(copy.deepcopy(self.id, memo), copy.deepcopy(self.version, memo), self.slot)

    def __reduce__(self) -> Any:
        raise TypeError('fbuf: priorities on the host cannot be pickled. Use fbuf.save, or Prioritized(on="device").')

    def __repr__(self) -> str:
        return "HostTree()"


register_node(HostTree, ("id", "version"), lambda tree: ((tree.id, tree.version), (tree.slot,)))


def init() -> HostTree:
    """Return a tree without a store, for shapes; `open` opens one."""
    return HostTree(jnp.zeros((2,), jnp.uint32), jnp.zeros((2,), jnp.uint32), 0)


def _layout(capacity: int) -> Layout:
    return Layout(*sum_tree.layout(capacity), sum_tree.middle(capacity))


def open(call: str, capacity: int, least: bool, leaves: np.ndarray | None = None) -> HostTree:
    """Open a store with leaves float32 of the first slots, all 0 if None.

    Raises:
      TypeError: under a trace.
    """
    if lifetime.traced():
        raise TypeError(f'{call}: priorities on the host cannot be traced. Call it outside jit, or use on="device".')
    store = Priorities(_layout(capacity), least)
    if leaves is not None:
        store.fill(leaves)
    owned = lifetime.open_store(store, store.layout)
    tree = HostTree(jnp.asarray(lifetime.split_id(owned.id)), jnp.asarray(lifetime.split_id(store.first)), owned.slot)
    tree.owner = owned
    return tree


def set(tree: HostTree, slot: jax.Array, leaf: jax.Array, token: jax.Array) -> HostTree:
    """Write leaves float32[B] to slots int32[B]. Slots out of range are skipped; the last of equal slots wins. One callback."""
    return tree.at(write_priorities(tree.id, token, tree.version, slot, leaf))


def draw(tree: HostTree, top: jax.Array, bottom: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Draw leaves in proportion; see `fbuf.samplers._prioritized.draw_leaves`. One callback."""
    slot, leaf, mass, least = draw_priorities(tree.id, tree.version, top, bottom)
    return slot, leaf, mass, least


def get(tree: HostTree, slot: jax.Array) -> jax.Array:
    """Return the leaves float32[...] in slots int32[...], each in [0, C). One callback."""
    return read_priorities(tree.id, tree.version, slot)


def cleared(tree: HostTree) -> HostTree:
    """Set all leaves to 0. One callback."""
    return tree.at(clear_priorities(tree.id, tree.version))


def leaves(tree: HostTree) -> np.ndarray:
    """Return a copy of the leaves, float32[C]. Eager."""
    return store_of(tree).leaves(lifetime.join_id(np.asarray(tree.version)))


def store_of(tree: HostTree) -> Priorities:
    """Return the store. Eager."""
    store: Any = lifetime.find(lifetime.join_id(np.asarray(tree.id)))
    assert isinstance(store, Priorities)
    return store


def most_bytes(capacity: int, least: bool) -> int:
    """Return the most host bytes; see `fbuf._host.priorities.most_bytes`."""
    return store_bytes(_layout(capacity), least)

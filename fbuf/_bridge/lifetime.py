"""How long a host store lives: as long as some state of it does, like an array.

Arrays cannot hold a Python object, and the jit caches would keep one alive that hides in a pytree's static part. So the
host part of a state is a pytree node with a small static *slot* number (reused, so that stores opened one after another
share traces) and a random 64-bit *id* as an array leaf, by which every callback finds its store. Building a node takes a
reference to the slot's owner if the id agrees. When the last node is gone, reads that were dispatched may still be
pending: the store then waits in the graveyard until every array that was not ready at that moment is ready (without this
9 of 10 pending reads failed). An array that was dropped or donated meanwhile may have been used by a computation that is
still pending, so the arrays are then looked at again, for a minute at most.

The garbage collector calls `_retire` in any thread, perhaps inside a callback that holds the store's own locks: a store
whose states are gone is let go of, never closed, and nothing here waits for a store while it holds `_lock`.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend, core

from fbuf._host.interfaces import HostObject, RowStore

_lock = threading.RLock()
_stores: dict[int, HostObject] = {}
_slots: list[weakref.ref[Owner] | None] = []
_PATIENCE = 60.0  # seconds; a loop that never idles would keep a dropped store for ever


class _Grave(NamedTuple):
    """What a store without states waits for."""

    arrays: list[weakref.ref[Any]]
    until: float  # `time.monotonic()`; arrays gone after that are taken for done


_graveyard: dict[int, _Grave] = {}


class Owner:
    """Keeps one store open for as long as it is referenced (by the nodes of states)."""

    __slots__ = ("__weakref__", "id", "slot", "store")

    def __init__(self, slot: int, id: int, store: HostObject):
        self.slot, self.id, self.store = slot, id, store


class StoreHandle:
    """An open host store, as `fbuf.stores()` lists it.

    A context manager: leaving the `with` closes the store at once, whatever states of it are left.

    Example:
      >>> import fbuf, numpy as np
      >>> buffer = fbuf.Buffer(100, storage=fbuf.storages.Host(keys=("obs",)))
      >>> state = buffer.init({"obs": np.zeros(3, np.uint8)})
      >>> with fbuf.stores()[-1] as handle:
      ...     handle.nbytes >= 0
      True
    """

    __slots__ = ("id",)

    def __init__(self, id: int):
        self.id = id

    @property
    def _store(self) -> HostObject:
        return find(self.id)

    @property
    def nbytes(self) -> int:
        """Bytes of host memory: chunks, index, dictionaries, contexts, open rows."""
        return self._store.nbytes

    @property
    def disk(self) -> int:
        """Bytes of files, as far as blocks were allocated for them; 0 for a store in memory."""
        return self._store.disk

    @property
    def waiting(self) -> bool:
        """Whether no state is left and only dispatched computations keep it open."""
        return self.id in _graveyard

    def stats(self) -> dict[str, int]:
        """Rows accepted and live, chunks, payload and raw bytes, dictionaries."""
        return self._store.stats()

    def repack(self) -> None:
        """Compresses closed chunks again, against rows of their own, and returns when that is done.

        A store does so by itself, in the background, as rows come; this is for when they have all come.

        Cost: 8 to 20 us a frame of 84x84.
        """
        self._store.repack()

    def close(self) -> None:
        """Frees the store now; states of it can no longer be read."""
        _close(self.id)

    def __enter__(self) -> StoreHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        store = _stores.get(self.id)
        if store is None:
            return f"StoreHandle({self.id:016x}, closed)"
        stats = store.stats()
        disk = f", {store.disk} on disk" if store.disk else ""
        return f"StoreHandle({self.id:016x}, {stats['rows_live']} rows, {store.nbytes} bytes{disk})"


def open_store(store: HostObject) -> Owner:
    """Registers a store under a fresh id and the lowest free slot."""
    sweep()
    with _lock:
        id = 0
        while id == 0 or id in _stores:
            id = secrets.randbits(64)
        slot = next((i for i, ref in enumerate(_slots) if ref is None or ref() is None), len(_slots))
        owner = Owner(slot, id, store)
        if slot == len(_slots):
            _slots.append(None)
        _slots[slot] = weakref.ref(owner)
        _stores[id] = store
        weakref.finalize(owner, _retire, id).atexit = False
        return owner


def owner_of(slot: int, id_leaf: Any) -> Owner | None:
    """The owner a new node should hold: the slot's, unless the id leaf is known to be another's."""
    if _graveyard:
        sweep()
    with _lock:
        ref = _slots[slot] if slot < len(_slots) else None
        owner = ref() if ref is not None else None
    if owner is None:
        return None
    value: Any
    if isinstance(id_leaf, jax.Array):
        if isinstance(id_leaf, jax.core.Tracer):
            return None
        try:
            leaf: Any = id_leaf  # `is_ready` is not in the type
            if not leaf.is_ready():  # waiting here would make every jitted step synchronous
                return owner
            value = np.asarray(id_leaf)
        except (RuntimeError, ValueError):  # deleted or poisoned: the node cannot be used anyway
            return owner
    elif isinstance(id_leaf, np.ndarray):
        value = id_leaf
    else:
        return None
    named = value.dtype == np.uint32 and value.shape[-1:] == (2,) and value.size  # a batch has one for each place
    return owner if named and join_id(value) == owner.id else None


def split_id(id: int) -> np.ndarray:
    """uint32[2], as the state carries it."""
    return np.array([id & 0xFFFFFFFF, id >> 32], np.uint32)


def join_id(leaf: np.ndarray) -> int:
    """The inverse of `split_id`."""
    low, high = (int(x) for x in np.asarray(leaf).reshape(-1)[:2])
    return low | high << 32


def find(id: int) -> RowStore:
    """The store of an id: one of rows, unless it was opened by who keeps something else there.

    Raises:
      RuntimeError: there is none: it was freed, or belongs to another process.
    """
    store = _stores.get(id)
    if store is None:
        raise RuntimeError(
            f"fbuf: this state's host store ({id:016x}) is not open in this process: it was freed with its last state, "
            f"closed, or belongs to another process. Keep the BufferState itself, not single leaves of it; another "
            f"process loads what this one saves: fbuf.save(path, buffer, state)."
        )
    return cast(RowStore, store)


def stores() -> list[StoreHandle]:
    """Every host store open in this process, oldest first.

    Example:
      >>> import fbuf
      >>> fbuf.stores()
      []
    """
    sweep()
    with _lock:
        return [StoreHandle(id) for id in list(_stores)]


def traced() -> bool:
    """Whether we are inside jit, scan, eval_shape or vmap; vmap shows no tracer where nothing mapped is used."""
    name = "unsafe_am_i_under_a_vmap_DO_NOT_USE"  # if it is gone one day, the first write refuses
    vmapped: Any = getattr(core, name, None) or getattr(jax.core, name, bool)  # there until jax 0.7
    with jax.transfer_guard_host_to_device("allow"):
        return isinstance(jnp.zeros((), jnp.int32), jax.core.Tracer) or vmapped()


def sweep() -> None:
    """Lets go of the stores whose last pending computation is done."""
    with _lock:
        for id, grave in list(_graveyard.items()):
            pending = [_is_pending(ref()) for ref in grave.arrays]
            if any(pending):
                continue
            if None in pending:
                _bury(id, grave.until)
            else:
                _drop(id)


def _is_pending(array: Any) -> bool | None:
    """None: it is gone, and what used it may be pending."""
    if array is None:
        return None
    try:
        return not array.is_ready()
    except RuntimeError:  # deleted, by donation
        return None


def _retire(id: int) -> None:
    """The last node of a store is gone."""
    with _lock:
        if id in _stores:
            _bury(id, time.monotonic() + _PATIENCE)


def _bury(id: int, until: float) -> None:
    """Lets a store wait for what is pending now; call with `_lock`."""
    live = [array for platform in backend.backends() for array in jax.live_arrays(platform)]
    arrays = [weakref.ref(array) for array in live if _is_pending(array)]
    if arrays and time.monotonic() < until:
        _graveyard[id] = _Grave(arrays, until)
    else:
        _drop(id)


def _drop(id: int) -> None:
    """Forgets a store: its memory goes with the last callback that is using it; call with `_lock`."""
    _graveyard.pop(id, None)
    store = _stores.pop(id, None)
    if store is not None:
        store.last_error = None  # its traceback refers to the store


def _close(id: int) -> None:
    with _lock:
        _graveyard.pop(id, None)
        store = _stores.pop(id, None)
    if store is not None:
        store.close()

"""How long a host store lives: as long as some state of it does, like an array.

Arrays cannot hold a Python object, and jit caches would keep an object in the static part of a pytree alive. So a pytree node
has a small static slot number (reused by stores of equal rows, so that they share compiled programs) and a random 64-bit id as
an array leaf, by which callbacks find the store. A node takes a reference to the slot's owner if the id agrees. When the last
node is gone, dispatched reads may still be pending: the store then waits until every array that was not ready is ready. A
dropped or donated array may still be used by pending work, so the arrays are checked again, for a minute at most.

The garbage collector calls `_retire` in any thread, so a store whose states are gone is dropped and never closed, and nothing
here waits for a store while it holds `_lock`. A collection may start inside JAX, which is not reentrant everywhere (jaxlib
0.10.2 crashes). So `_retire` calls nothing of JAX during a collection: the next `sweep`, of a call for any store, does.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import backend, core

from fbuf._core.closing import Closing
from fbuf._host import failed_writes
from fbuf._host.types import HostObject, RowStore, StoreClosed, StoreCorrupted

_lock = threading.RLock()
_stores: dict[int, HostObject] = {}
_slots: list[weakref.ref[Owner]] = []
_slots_of: dict[Hashable, list[int]] = {}
"""Slots by the static part of the nodes in them: a store that is loaded again then finds one whose programs are compiled."""
_PATIENCE = 60.0  # seconds; a loop that never idles would keep a dropped store for ever


class _Grave(NamedTuple):
    """What a store without states waits for."""

    arrays: list[weakref.ref[Any]]
    until: float  # `time.monotonic()`; arrays gone after that are taken for done


_graveyard: dict[int, _Grave] = {}
_retired: deque[int] = deque()
"""Stores whose last node was collected as garbage, until the next sweep."""
_collecting = 0  # the thread in which the garbage collector runs


class Owner:
    """Keep one store open, or those of `parts`, by shard, while nodes of states refer to this."""

    __slots__ = ("__weakref__", "ids", "parts", "slot")

    def __init__(self, slot: int, ids: frozenset[int], parts: Mapping[int, Owner] | None = None):
        self.slot, self.ids, self.parts = slot, ids, parts

    @property
    def id(self) -> int:
        """The id of the store; of one of several."""
        return next(iter(self.ids))

    @property
    def failed(self) -> bool:
        """Whether a write of these stores failed whose error was not raised yet."""
        return any(id in failed_writes.failed for id in self.ids)

    def raise_failed(self) -> None:
        """Raise OSError or StoreCorrupted, once, if a write of these stores failed."""
        parts = {None: self} if self.parts is None else self.parts
        failed_writes.raise_failed({shard: part.id for shard, part in parts.items()})

    def raise_cause(self, error: Exception) -> None:
        """Raise what a callback of these stores raised, if JAX made `error` of it: an OSError, MemoryError or RuntimeError."""
        for id in self.ids:
            store = _stores.get(id)
            cause = _not_open(id) if store is None else store.last_error
            if cause is None or f"{type(cause).__name__}: {cause}" not in str(error):
                continue
            if isinstance(cause, OSError):
                raise OSError(cause.errno or errno.EIO, cause.strerror or str(cause)) from None
            if isinstance(cause, MemoryError):  # NumPy's has other arguments
                raise MemoryError(str(cause)) from None
            if isinstance(cause, StoreClosed | StoreCorrupted):
                raise type(cause)(str(cause)) from None
            if isinstance(cause, RuntimeError):
                raise RuntimeError(str(cause)) from None


class StoreHandle(Closing):
    """Inspect or close an open host store, as `fbuf.stores()` lists it.

    A context manager: leaving the `with` block closes the store at once, even if states of it are left.

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
        """Bytes of files, by allocated blocks; 0 for a store in memory."""
        return self._store.disk

    @property
    def waiting(self) -> bool:
        """Whether no state is left and only dispatched computations keep it open."""
        return self.id in _graveyard

    def stats(self) -> dict[str, int]:
        """Count rows accepted and live, chunks, payload and raw bytes, dictionaries."""
        return self._store.stats()

    def repack(self) -> None:
        """Recompress closed chunks, and wait for it.

        A store does so in the background as rows arrive. Call this after the last row.

        Cost: 8 to 20 us a frame of 84x84.
        """
        self._store.repack()

    def close(self) -> None:
        """Free the store now; its states can no longer be read."""
        _close(self.id)

    def __repr__(self) -> str:
        store = _stores.get(self.id)
        if store is None:
            return f"StoreHandle({self.id:016x}, closed)"
        stats = store.stats()
        disk = f", {store.disk} on disk" if store.disk else ""
        return f"StoreHandle({self.id:016x}, {stats['rows_live']} rows, {store.nbytes} bytes{disk})"


def open_store(store: HostObject, kind: Hashable) -> Owner:
    """Register a store under a fresh id, in a free slot of nodes whose static part is `kind`."""
    if _note_collection not in gc.callbacks:
        gc.callbacks.append(_note_collection)
    sweep()
    with _lock:
        id = 0
        while id == 0 or id in _stores:
            id = secrets.randbits(64)
        owner = _placed(kind, frozenset((id,)))
        _stores[id] = store
        weakref.finalize(owner, _retire, id).atexit = False
        return owner


def open_group(owners: Mapping[int, Owner], kind: Hashable) -> Owner:
    """Return the owner of the stores of several shards, by number, for a node whose id leaf has a block on each."""
    with _lock:
        ids = frozenset().union(*(owner.ids for owner in owners.values()))
        return _placed((len(owners), kind), ids, owners)


def _placed(kind: Hashable, ids: frozenset[int], parts: Mapping[int, Owner] | None = None) -> Owner:
    """Return an owner in a free slot; `_lock` is held."""
    slots = _slots_of.setdefault(kind, [])
    slot = next((i for i in slots if _is_free(i)), len(_slots))
    owner = Owner(slot, ids, parts)
    if slot == len(_slots):
        slots.append(slot)
        _slots.append(weakref.ref(owner))
    else:
        _slots[slot] = weakref.ref(owner)
    return owner


def _is_free(slot: int) -> bool:
    """Return whether all stores of a slot are gone or closed."""
    owner = _slots[slot]()
    return owner is None or _stores.keys().isdisjoint(owner.ids)


def owner_of(slot: int, id_leaf: Any) -> Owner | None:
    """Return the owner for a new node: the slot's, unless the id leaf is known to be another's."""
    if _graveyard or _retired:
        sweep()
    with _lock:
        owner = _slots[slot]() if slot < len(_slots) else None
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
            value = np.asarray(leaf.addressable_shards[0].data)
        except (RuntimeError, ValueError):  # deleted or poisoned: the node cannot be used anyway
            return owner
    elif isinstance(id_leaf, np.ndarray):
        value = id_leaf
    else:
        return None
    named = value.dtype == np.uint32 and value.shape[-1:] == (2,) and value.size  # a batch has one for each place
    return owner if named and join_id(value) in owner.ids else None


def split_id(id: int) -> np.ndarray:
    """Return an id as uint32[2]."""
    return np.array([id & 0xFFFFFFFF, id >> 32], np.uint32)


def join_id(leaf: np.ndarray) -> int:
    """Return the id of uint32[2]."""
    low, high = (int(x) for x in np.asarray(leaf).reshape(-1)[:2])
    return low | high << 32


def find(id: int) -> RowStore:
    """Return the store of an id.

    Raises:
      RuntimeError: there is none: it was freed, or belongs to another process.
    """
    store = _stores.get(id)
    if store is None:
        raise _not_open(id)
    return cast(RowStore, store)


def _not_open(id: int) -> RuntimeError:
    return RuntimeError(
        f"fbuf: this state's host store ({id:016x}) is not open in this process: it was freed with its last state, "
        f"closed, or belongs to another process. Keep the BufferState itself, not single leaves of it; another "
        f"process loads what this one saves: fbuf.save(path, buffer, state)."
    )


def stores() -> list[StoreHandle]:
    """Return every host store open in this process, oldest first.

    Example:
      >>> import fbuf
      >>> fbuf.stores()
      []
    """
    sweep()
    with _lock:
        return [StoreHandle(id) for id in list(_stores)]


def traced() -> bool:
    """Return whether this runs inside jit, scan, eval_shape or vmap."""
    name = "unsafe_am_i_under_a_vmap_DO_NOT_USE"  # if it is gone one day, the first write refuses
    vmapped: Any = getattr(core, name, None) or getattr(jax.core, name, bool)  # there until jax 0.7
    with jax.transfer_guard_host_to_device("allow"):
        return isinstance(jnp.zeros((), jnp.int32), jax.core.Tracer) or vmapped()


def sweep() -> None:
    """Drop the stores whose last pending computation is done."""
    with _lock:
        while _retired:
            _retire(_retired.popleft())
        for id, grave in list(_graveyard.items()):
            pending = [_is_pending(ref()) for ref in grave.arrays]
            if any(pending):
                continue
            if None in pending:
                _bury(id, grave.until)
            else:
                _drop(id)


def _is_pending(array: Any) -> bool | None:
    """Return whether an array is pending; None if it is gone, and what used it may be pending."""
    if array is None:
        return None
    try:
        return not array.is_ready()
    except RuntimeError:  # deleted, by donation
        return None


def _note_collection(phase: str, _: Any) -> None:
    global _collecting
    _collecting = threading.get_ident() if phase == "start" else 0


def _retire(id: int) -> None:
    """Handle the end of a store's last node."""
    if _collecting == threading.get_ident():
        _retired.append(id)
        return
    with _lock:
        if id in _stores:
            _bury(id, time.monotonic() + _PATIENCE)


def _bury(id: int, until: float) -> None:
    """Let a store wait for what is pending now; `_lock` is held."""
    live = [array for platform in backend.backends() for array in jax.live_arrays(platform)]
    arrays = [weakref.ref(array) for array in live if _is_pending(array)]
    if arrays and time.monotonic() < until:
        _graveyard[id] = _Grave(arrays, until)
    else:
        _drop(id)


def _drop(id: int) -> None:
    """Forget a store: its memory is freed with the last callback that uses it; `_lock` is held."""
    _graveyard.pop(id, None)
    store = _stores.pop(id, None)
    if store is not None:
        store.last_error = None  # its traceback refers to the store
    failed_writes.warn(id)


def _close(id: int) -> None:
    with _lock:
        _graveyard.pop(id, None)
        store = _stores.pop(id, None)
    if store is not None:
        store.close()
    failed_writes.warn(id)


@atexit.register
def _warn_at_exit() -> None:
    if _stores:
        with contextlib.suppress(Exception):  # which JAX tells itself
            jax.effects_barrier()
    failed_writes.warn_all()

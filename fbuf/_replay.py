"""`Replay`: a buffer, its state and its key in one object, for notebooks and torch loops.

The verbs of `Buffer` cannot raise for values (they are traced): they mask and count. `Replay` runs eagerly, so it looks
at the counters after each call and raises what they say. It donates the state to every write, so writes are in place, and
hands out batches as JAX, numpy or torch arrays. Inside jit use the `Buffer` itself.

Threads may share it: each verb holds a lock while it is dispatched, so a state is donated by one call at a time. What was
dispatched goes on without it.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from fbuf import _errors
from fbuf._buffer import Buffer
from fbuf._checked import raise_for
from fbuf._checkpoint import Saving, _shell
from fbuf._checkpoint._shell import Shell
from fbuf._checks import check_eta
from fbuf._sample import Index, Rows, Sample
from fbuf._state import COUNTERS, BufferState
from fbuf._tree import PyTree
from fbuf._typing import Growable
from fbuf.storages import Ragged

F = TypeVar("F", bound=Callable[..., Any])
_FORMS = ("jax", "numpy", "torch")

_in_place = partial(jax.jit, static_argnums=0, donate_argnums=1)
_add = _in_place(Buffer.add)
_extend = _in_place(Buffer.extend)
_update_priority = _in_place(Buffer.update_priority)
_update_rows = _in_place(Buffer.update_rows)


def _in_turn(method: F) -> F:
    """A verb that waits for the others."""

    @functools.wraps(method)
    def call(self: Replay, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._state.token.is_deleted():
                raise RuntimeError(
                    "Replay: an earlier write failed after its state was donated, and the state went with it; expected a "
                    "state. Load the last checkpoint, Replay.load(path), or make a new Replay; rows that lie in files are "
                    "there still: Replay(buffer, example, resume=True)."
                )
            return method(self, *args, **kwargs)

    return cast(F, call)


class Replay:
    """A stateful shell around a `Buffer`. Threads may share one: its verbs take turns.

    Args:
      buffer: What to hold and how to draw.
      example: One row, as for `Buffer.init`.
      seed: Of the draws; two of them with one seed and one history give the same batches.
      strict: Raise for values that the verbs would only count. False leaves them to `stats()`.
      unlimited: Twice the capacity whenever it is full, instead of overwriting the oldest rows (`storages.Ragged` only). Every
        verb compiles again then, so begin with a capacity of the right order; `buffer` is another after it.

      resume: Go on with the rows that lie at the storage's path (`Buffer.resume`), instead of none.

    A write that fails takes the state with it, because it was donated: later calls say so. Rows in files are still there.

    Example:
      >>> import fbuf, numpy as np
      >>> replay = fbuf.Replay(fbuf.prioritized(100), {"obs": np.zeros(3, np.float32)}, seed=0)
      >>> replay.extend({"obs": np.ones((5, 3), np.float32)})
      >>> batch = replay.sample(4, to="numpy")
      >>> replay.update_priority(batch.index, np.ones(4, np.float32))
      >>> len(replay), batch.data["obs"].shape
      (5, (4, 3))
    """

    def __init__(
        self,
        buffer: Buffer,
        example: PyTree,
        seed: int = 0,
        *,
        strict: bool = True,
        unlimited: bool = False,
        resume: bool = False,
    ):
        if not isinstance(buffer, Buffer):
            raise TypeError(
                f"Replay: buffer is {type(buffer).__name__}; expected a Buffer. The order is Replay(buffer, example)."
            )
        if unlimited and not isinstance(buffer.storage, Ragged):
            raise TypeError(
                f"Replay: unlimited is for rows on the host, but {buffer.storage!r} keeps arrays of the full capacity. Use "
                f"Buffer(storage=fbuf.storages.Ragged()), or a larger capacity."
            )
        self.buffer = buffer
        self.strict = strict
        self.unlimited = unlimited
        if isinstance(example, BufferState):
            raise TypeError(
                "Replay: example is a BufferState; expected one row. To go on with rows in files write "
                "Replay(buffer, example, resume=True)."
            )
        self._state = buffer.resume(example) if resume else buffer.init(example)
        self._key = jax.random.key(seed)
        self._lock = threading.RLock()
        self._counters = np.zeros(len(COUNTERS), np.uint32)

    @property
    def state(self) -> BufferState:
        """The state now. The next write through this object donates it; copy what must outlive that."""
        return self._state

    @_in_turn
    def add(self, row: PyTree, *, priority: Any = None, mask: Any = None) -> None:
        """Adds one row (one a lane); see `Buffer.add`."""
        if isinstance(self.buffer.storage, Ragged):
            self._write_ragged("Replay.add", _add, row, _array(priority), _array(mask))
            return
        spec, structure = self.buffer.storage.spec(self._state.rows)
        lead, axes = ((), "") if self.buffer.lanes is None else ((self.buffer.lanes,), "E")
        leaves = _errors.check_rows(
            "Replay.add", _rows(row), spec, structure, lead, axes
        )  # Python numbers become arrays
        row = structure.unflatten(leaves.values())
        self._state = _add(self.buffer, self._state, row, priority=_array(priority), mask=_array(mask))
        self._raise_for_write("Replay.add", priority)

    def _write_ragged(self, call: str, verb: Any, rows: PyTree, priority: Any, mask: Any) -> None:
        """What is no array is stored first, then the rest as ever, in place."""
        leaves, values, shape = self.buffer.parsed(call, self._state, rows, priority, mask)
        if self.unlimited:
            self._make_room(shape, mask)
        rows = self.buffer.stored(self._state, leaves, values, shape, mask)
        self._state = verb(self.buffer, self._state, rows, priority=priority, mask=mask)
        self._raise_for_write(call, priority)

    def _make_room(self, shape: tuple[int, int], mask: Any) -> None:
        more = shape[0] if mask is None else np.asarray(mask).reshape(shape).sum(axis=0)
        needed = int((np.asarray(self._state.ring.size) + more).max())
        capacity, length = self.buffer.capacity, self.buffer.geometry.length
        while length < needed:
            capacity, length = 2 * capacity, 2 * length
        if capacity != self.buffer.capacity:
            self.buffer, self._state = self.buffer.grow(self._state, capacity=capacity)

    @_in_turn
    def grow(self, blocks: Any = None, *, capacity: int | None = None) -> None:
        """More room for distinct blocks, or for ragged rows; see `Buffer.grow`. `self.buffer` is another then."""
        self.buffer, self._state = self.buffer.grow(self._state, blocks, capacity=capacity)

    @_in_turn
    def extend(self, rows: PyTree, *, priority: Any = None, mask: Any = None) -> None:
        """Adds rows in order of time; see `Buffer.extend`."""
        if isinstance(self.buffer.storage, Ragged):
            self._write_ragged("Replay.extend", _extend, rows, _array(priority), _array(mask))
            return
        self._state = _extend(self.buffer, self._state, _rows(rows), priority=_array(priority), mask=_array(mask))
        self._raise_for_write("Replay.extend", priority)

    @_in_turn
    def sample(self, batch_size: int | None = None, *, to: str = "jax", **options: Any) -> Sample:
        """Draws a batch; see `Buffer.sample`.

        Args:
          batch_size: B; None: the buffer's.
          to: "jax", "numpy" or "torch": the arrays in the `Sample`.
        Raises:
          ValueError: there is nothing to draw; or `to` is something else.
        """
        if to not in _FORMS:
            raise ValueError(f'Replay.sample: to is {to!r}; expected "jax", "numpy" or "torch".')
        self._key, key = jax.random.split(self._key)
        self._state, batch = self.buffer.sample(self._state, key, batch_size, **options)
        self._raise("Replay.sample")
        return _convert(batch, to)

    @_in_turn
    def update_priority(self, index: Index, td_error: Any, *, mask: Any = None, eta: float = 0.9) -> None:
        """Sets priorities from TD errors; see `Buffer.update_priority`. Arrays may be JAX, numpy or torch.

        Raises:
          ValueError: some were refused (not finite, out of range, stale, not drawable); the others are set. With
            `prefetch=1` stale ones are only counted.
        """
        check_eta("Replay.update_priority", eta)
        index, td_error, mask = _index(index), _array(td_error), None if mask is None else _array(mask)
        self._state = _update_priority(self.buffer, self._state, index, td_error, mask=mask, eta=eta)
        self._raise("Replay.update_priority")

    @_in_turn
    def update_rows(self, index: Index, fields: PyTree) -> None:
        """Replaces some leaves of rows; see `Buffer.update_rows`."""
        self._state = _update_rows(self.buffer, self._state, _index(index), _rows(fields))
        self._raise("Replay.update_rows")

    @_in_turn
    def get(self, index: Any) -> Rows:
        """Rows by index; see `Buffer.get`."""
        return self.buffer.get(self._state, _index(index) if isinstance(index, Index) else _array(index))

    @_in_turn
    def rows(self) -> Rows:
        """Every row, oldest first; see `Buffer.rows`."""
        return self.buffer.rows(self._state)

    @_in_turn
    def last(self, n: int) -> Rows:
        """The newest rows; see `Buffer.last`."""
        return self.buffer.last(self._state, n)

    @_in_turn
    def clear(self) -> None:
        """Forgets every row."""
        self._state = self.buffer.clear(self._state)

    @_in_turn
    def set(self, **numbers: float) -> None:
        """Replaces annealed numbers, `set(alpha=0.5)`; see `Buffer.set`."""
        self._state = self.buffer.set(self._state, **numbers)

    @_in_turn
    def rebuild(self) -> None:
        """Applies annealed numbers to all rows; see `Buffer.rebuild`."""
        self._state = self.buffer.rebuild(self._state)

    @_in_turn
    def can_sample(self) -> bool:
        """Whether there is something to draw."""
        return bool(self.buffer.can_sample(self._state))

    @_in_turn
    def stats(self) -> dict[str, float]:
        """`Buffer.stats` as Python numbers."""
        return {name: np.asarray(value).item() for name, value in self.buffer.stats(self._state).items()}

    @_in_turn
    def nbytes(self) -> dict[str, int]:
        """Bytes held now, by place."""
        return self.buffer.nbytes(self._state)

    @_in_turn
    def save(
        self,
        path: Any,
        *,
        keep: int = 2,
        extra: Any = None,
        wait: bool = True,
        sync: bool = True,
        progress: Any = None,
    ) -> Saving:
        """Saves everything, the key of the draws too; see `fbuf.save`. What `load` gives goes on with the same batches.

        Other threads wait as long as this takes; with `wait=False` only until what changed is copied.
        """
        shell = Shell(self.buffer, self._state, self._key, self._counters, self.strict, self.unlimited)
        return _shell.save(path, shell, keep, extra, wait, sync, progress)

    @classmethod
    def load(
        cls,
        path: Any,
        buffer: Buffer | None = None,
        *,
        example: Any = None,
        verify: Any = "full",
        resize: Any = None,
        extra: Any = None,
        progress: Any = None,
    ) -> Any:
        """What `save` saved, as a `Replay`; with `extra` a pair of it and that. See `fbuf.load`.

        Raises:
          SchemaError: it was saved by `fbuf.save`, without a key.

        Example:
          >>> import fbuf, tempfile, numpy as np
          >>> replay = fbuf.Replay(fbuf.uniform(100), {"t": 0})
          >>> replay.extend({"t": np.arange(5)})
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     saving = replay.save(folder)
          ...     again = fbuf.Replay.load(folder)
          >>> bool((again.sample(4).data["t"] == replay.sample(4).data["t"]).all())
          True
        """
        shell, beside = _shell.load(path, buffer, example, verify, resize, extra, progress)
        replay = cls.__new__(cls)
        replay.buffer, replay.strict, replay.unlimited = shell.buffer, shell.strict, shell.unlimited
        replay._state, replay._key, replay._counters = shell.state, shell.key, shell.counters
        replay._lock = threading.RLock()
        return replay if extra is None else (replay, beside)

    @_in_turn
    def __len__(self) -> int:
        return int(self.buffer.size(self._state))

    def __repr__(self) -> str:
        rows = "its state is gone" if self._state.token.is_deleted() else f"{len(self)} rows"
        return f"Replay({self.buffer!r}, {rows})"

    def _raise_for_write(self, call: str, priority: Any) -> None:
        """Looks only where a write can refuse something: looking waits for the write."""
        if priority is not None or isinstance(self.buffer.storage, Growable):
            self._raise(call)

    def _raise(self, call: str) -> None:
        """Raises what the last call only counted. Waits for it."""
        if not self.strict:
            return
        before, self._counters = self._counters, np.array(self._state.counters)
        hint = "Replay(..., strict=False) counts them in stats() instead."
        raise_for(call, before, self._counters, hint, ahead=self.buffer.prefetch > 0)


def _is_torch(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "torch"


def _array(value: Any) -> Any:
    """Anything array-like as JAX takes it."""
    if value is None or isinstance(value, (jax.Array, np.ndarray, bool, int, float, np.generic)):
        return value
    if _is_torch(value):
        from fbuf.torch import from_torch

        return from_torch(value)
    return jnp.asarray(value)


def _rows(tree: PyTree) -> PyTree:
    """Rows with torch leaves as JAX arrays; together, so that a message names the leaf."""
    if not any(_is_torch(leaf) for leaf in jax.tree.leaves(tree)):
        return tree
    from fbuf.torch import from_torch

    if all(_is_torch(leaf) for leaf in jax.tree.leaves(tree)):
        return from_torch(tree)
    return jax.tree.map(_array, tree)


def _index(index: Any) -> Any:
    if isinstance(index, Index):
        return Index(_array(index.slot), _array(index.ticket))
    return index


def _convert(tree: Any, to: str) -> Any:
    if to == "numpy":
        return jax.device_get(tree)
    if to == "torch":
        from fbuf.torch import to_torch

        ragged = getattr(tree, "ragged", None)  # names rows: no data
        if ragged is None:
            return to_torch(tree)
        return dataclasses.replace(to_torch(dataclasses.replace(tree, ragged=None)), ragged=ragged)
    return tree

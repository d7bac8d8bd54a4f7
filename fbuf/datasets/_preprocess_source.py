"""The input of `preprocess`: rows of a data set by number, or windows of a buffer by anchor, a batch at a time.

A data set is read directly, without a callback. A buffer is read as by its own `sample`, at the anchors in order of age.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import state_ops
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.pytree import PyTree, named_leaves
from fbuf._formats import dataset
from fbuf._indexing.anchors import OPEN
from fbuf._interfaces.view import View
from fbuf.datasets import _open
from fbuf.datasets._arrays.segments import to_path
from fbuf.datasets._preprocess_trace import CALL, Program
from fbuf.interop._row_reader import Reader
from fbuf.storages import DataSet, _host_rows
from fbuf.views import Row


def origin_of(data: Any, view: View | None) -> Stored | Windows:
    """Return the source for a path, an open data set, or a buffer and its state."""
    if isinstance(data, dataset.DataSet):
        data = data.path
    if not isinstance(data, tuple):
        path = to_path(CALL, "data", data, "or (buffer, state)")
        if view is None:
            return Stored(path)
        buffer, state = _open.open(path, view=view)
        return Windows(buffer, state, path)
    if len(data) != 2 or not isinstance(data[0], Buffer) or not isinstance(data[1], BufferState):
        names = tuple(type(x).__name__ for x in data)
        raise TypeError(f"{CALL}: data is {names}; expected (buffer, state), or a path.")
    buffer, state = data
    buffer.storage.spec(state.rows)  # raises for the state of another buffer
    source = Path(buffer.storage.path) if isinstance(buffer.storage, DataSet) else None
    if view is None and source is not None:
        stored = Stored(source)
        if stored.identity != _identity(state):
            stored.close()
            raise ValueError(f"{CALL}: the data set at {source} has changed since this state was made. Open it again.")
        return stored
    if buffer.lanes not in (None, 1):
        raise ValueError(f"{CALL}: the buffer has lanes={buffer.lanes}; expected one stream.")
    new_view = Row() if view is None else view
    if new_view != buffer.view:
        other = dataclasses.replace(buffer, view=new_view, episode_end=buffer.ends)
        buffer, state = other, buffer.convert(other, state)
    return Windows(buffer, state, source, rows=view is None)


class Stored:
    """Rows of a data set.

    Attributes:
      rows: Number of rows.
      row: One row, as `jax.ShapeDtypeStruct`s.
      names: Its leaves; () for windows.
      steps: Whether rows are consecutive, so that episode ends apply.
      mark: Identifies the rows.
      path: Of the files; None: no files.
    """

    def __init__(self, path: Path) -> None:
        self._dataset = dataset.DataSet.open(path)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._dataset.close)
            self.row = _open.example(self._dataset.schema)
            on_failure.pop_all()
        self.rows, self.names, self.steps = self._dataset.rows, self._dataset.schema.names, True
        self.path: Path | None = path
        self._structure: Any = jax.tree.structure(self.row)
        self._order = list(named_leaves(self.row))
        self.identity = self._dataset.identity
        self.mark = f"rows {self.identity}"

    def runner(self, program: Program, batch: int) -> Callable[[int, int], dict[str, np.ndarray]]:
        """Return a function of rows `start` to `stop - 1`, at most `batch`: the program's results by leaf."""
        run = jax.jit(lambda rows: named_leaves(jax.vmap(program)(rows)))

        def apply(start: int, stop: int) -> dict[str, np.ndarray]:
            rows = self._dataset.read_rows(start, stop)
            padded = [_padded(rows[name], batch) for name in self._order]
            out = run(self._structure.unflatten(padded))
            return {name: np.asarray(leaf)[: stop - start] for name, leaf in out.items()}

        return apply

    def close(self) -> None:
        """Close the files."""
        self._dataset.close()


class Windows:
    """The view's result for each anchor of a buffer, as `Stored`, oldest first; `rows`: these are its rows."""

    def __init__(self, buffer: Buffer, state: BufferState, path: Path | None, rows: bool = False) -> None:
        self._buffer, self._state = buffer, state
        self._slots = _anchors_by_age(buffer, state)
        self.rows, self.path = len(self._slots), path
        one = jax.eval_shape(functools.partial(_windows, buffer), state, jax.ShapeDtypeStruct((1,), np.int32), _key(0))
        self.row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), one[0])
        self.names = tuple(named_leaves(self.row)) if rows else ()
        self.steps = rows and buffer.writer.streams
        identity = _identity(state) if isinstance(buffer.storage, DataSet) else secrets.token_hex(16)
        self.mark = f"windows {identity} {buffer.view!r} {buffer.ends!r}"

    def runner(self, program: Program, batch: int) -> Callable[[int, int], dict[str, np.ndarray]]:
        @jax.jit
        def run(state: BufferState, slot: jax.Array, key: jax.Array) -> tuple[dict[str, Any], jax.Array]:
            data, ok = _windows(self._buffer, state, slot, key)
            return named_leaves(jax.vmap(program)(data)), ok

        def apply(start: int, stop: int) -> dict[str, np.ndarray]:
            slot = jnp.asarray(_padded(self._slots[start:stop], batch))
            out, ok = run(self._state, slot, _key(start))
            if not np.asarray(ok).all():
                raise RuntimeError(f"{CALL}: rows of this state have expired. Use the newest state.")
            return {name: np.asarray(leaf)[: stop - start] for name, leaf in out.items()}

        return apply

    def close(self) -> None:
        """Do nothing: the state keeps its files open."""


def _identity(state: BufferState) -> str:
    """Return the identity of the data set that a state was made of."""
    store: Any = _host_rows.store_of(state.rows)
    return str(store.identity)


def _key(number: int) -> jax.Array:
    """Return the key for views that draw at random: the same for the same anchors."""
    return jax.random.fold_in(jax.random.key(0), number)


def _windows(buffer: Buffer, state: BufferState, slot: jax.Array, key: jax.Array) -> tuple[PyTree, jax.Array]:
    """Return the view's result for anchors, and which of them are valid."""
    spec, structure = buffer.storage.spec(state.rows)
    mask = jnp.ones(slot.shape, bool)
    window = buffer.view.window(spec, state_ops.eligible_set(buffer, state), slot, mask, key)
    arrays, ok = buffer.storage.read(state.rows, window.reads)
    return buffer.view.assemble(spec, structure, arrays, window), mask if ok is None else ok


def _anchors_by_age(buffer: Buffer, state: BufferState) -> np.ndarray:
    """Return int32, the slots that can be sampled, in order of arrival."""
    reader = Reader(CALL, buffer, state)
    age = np.arange(int(reader.sizes[0]), dtype=np.int64)
    slots = reader.slots(age, np.zeros_like(age)).astype(np.int32)
    if state.anchors is None:
        return slots
    return slots[(np.asarray(state.anchors.flags)[slots] & OPEN) != 0]


def _padded(rows: np.ndarray, batch: int) -> np.ndarray:
    """Return `batch` rows, with the last repeated."""
    missing = batch - len(rows)
    return rows if not missing else np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])

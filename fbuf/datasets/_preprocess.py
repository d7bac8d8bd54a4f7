"""`preprocess`: map a function over the rows of a data set, or over windows of it, into a new data set.

One jitted program handles every batch, the last padded. Segments of the result are written one by one, so an interruption
loses at most one per worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, anchor_set
from fbuf._core import row_schema
from fbuf._core.arguments import check_int
from fbuf._core.progress import Progress
from fbuf._core.pytree import PyTree, named_leaves, tree_bytes
from fbuf._formats import dataset
from fbuf._formats.dataset.manifest import NAME
from fbuf._host.codecs import Codec
from fbuf._indexing.anchors import ANCHOR
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf._rows.columns import BLOCK_BYTES, DTYPES, Block
from fbuf._rows.row_reader import Reader
from fbuf.datasets import _open
from fbuf.datasets._arrays.episodes import default_view
from fbuf.datasets._arrays.segments import Work, check_free, rows_per_segment, to_path, write
from fbuf.datasets._lock import exclusive
from fbuf.storages import DataSet, _host_rows
from fbuf.views import Row

CALL = "preprocess"
_ADDRESS = re.compile(r"0x[0-9a-f]+")
_CALLBACK = re.compile(r"callback\[")  # what Python does then no text says


class Program:
    """`fn`, with the leaves of a row to keep.

    Attributes:
      schema: Of its result.
      mark: A text that only equal programs share; unique for one that calls back into Python.
    """

    def __init__(
        self, fn: Callable[[PyTree], PyTree], row: PyTree, keep: Sequence[str], codec: Mapping[str, Codec] | None
    ) -> None:
        """Trace `fn` for a row of `jax.ShapeDtypeStruct`s. Raises ValueError or TypeError for an invalid function."""
        if not callable(fn):
            raise TypeError(f"{CALL}: fn is a {type(fn).__name__}; expected a function of one row.")
        self._fn = fn
        out, text = self._trace(row)
        if text != self._trace(row)[1]:
            raise ValueError(
                f"{CALL}: fn differs when traced again; expected a pure function of its row without the clock or numpy's "
                f"random numbers. Use jax.random with a key made from the row."
            )
        self._kept = [name for name in keep if name not in named_leaves(out)]
        checksum = f"{zlib.crc32(repr((text, self._kept)).encode()):08x}"
        self.mark = secrets.token_hex(16) if _CALLBACK.search(text) else checksum
        out = jax.eval_shape(self, row)
        leaves = named_leaves(out)
        for name, leaf in leaves.items():
            if DTYPES.get(np.dtype(leaf.dtype).name if _is_plain(leaf) else "") is None:
                raise TypeError(f"{CALL}: fn returns leaf '{name}' as {leaf.dtype}; expected numbers or booleans.")
        shapes = {name: (leaf.shape, np.dtype(leaf.dtype)) for name, leaf in leaves.items()}
        structure = None if _only_dicts(out) else row_schema.encode(jax.tree.structure(out))
        if (custom := row_schema.custom_node(structure)) is not None:
            raise TypeError(f"{CALL}: fn returns a {custom}; expected dicts, lists and tuples of arrays.")
        self.schema = dataset.Schema(shapes, structure, codec)

    def __call__(self, row: PyTree) -> PyTree:
        """Return the result of `fn` for a row, and the leaves to keep."""
        out = self._fn(row)
        if not self._kept:
            return out
        leaves = named_leaves(row)
        return {**out, **{name: leaves[name] for name in self._kept}}

    def _trace(self, row: PyTree) -> tuple[PyTree, str]:
        """Return the result of `fn`, as shapes, and the text of its program."""

        def checked(row: PyTree) -> PyTree:
            out = self._fn(row)
            self._check(out)
            return out

        try:
            with jax.checking_leaks():
                closed, out = jax.make_jaxpr(checked, return_shape=True)(row)
        except Exception as error:
            if "Leaked" not in str(error):
                raise
            raise ValueError(
                f"{CALL}: fn leaks a traced value; expected a pure function. Return what it stores in a list, "
                f"an attribute or a global. ({str(error).splitlines()[0]:.200})"
            ) from None
        return out, f"{_ADDRESS.sub('', str(closed))} {_constants(closed)}"

    def _check(self, out: PyTree) -> None:
        leaves = named_leaves(out)
        for name, leaf in leaves.items():
            if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
                kind = type(leaf).__name__
                raise TypeError(f"{CALL}: fn returns '{name}' as a {kind}; expected arrays. Leave it out.")
        if not isinstance(out, dict) or not leaves:
            what = f"a {type(out).__name__}" if leaves or out is None else "no leaves"
            raise TypeError(f"{CALL}: fn returns {what} for a row; expected a dict of arrays. No row can be dropped.")


def _constants(part: Any) -> list[int]:
    """Return checksums of the arrays in a program, inner functions included, which its text leaves out."""
    if hasattr(part, "eqns"):
        inner = [value for eqn in part.eqns for value in (*eqn.invars, *eqn.params.values())]
        part = [*getattr(part, "consts", ()), *inner]
    if isinstance(part, (list, tuple)):
        return [number for inner in part for number in _constants(inner)]
    array = getattr(part, "val", part)  # of a literal
    if hasattr(array, "__array__") and hasattr(array, "dtype") and _is_plain(array):
        return [zlib.crc32(np.ascontiguousarray(np.asarray(array)).tobytes())]
    return []


def _is_plain(leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _only_dicts(tree: PyTree) -> bool:
    return all(map(_only_dicts, tree.values())) if type(tree) is dict else jax.tree_util.all_leaves([tree])


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
    window = buffer.view.window(spec, anchor_set(buffer, state), slot, mask, key)
    arrays, ok = buffer.storage.read(state.rows, window.reads)
    return buffer.view.assemble(spec, structure, arrays, window), mask if ok is None else ok


def _anchors_by_age(buffer: Buffer, state: BufferState) -> np.ndarray:
    """Return int32, the slots that can be sampled, in order of arrival."""
    reader = Reader(CALL, buffer, state)
    age = np.arange(int(reader.sizes[0]), dtype=np.int64)
    slots = reader.slots(age, np.zeros_like(age)).astype(np.int32)
    if state.anchors is None:
        return slots
    return slots[(np.asarray(state.anchors.flags)[slots] & ANCHOR) != 0]


def _padded(rows: np.ndarray, batch: int) -> np.ndarray:
    """Return `batch` rows, with the last repeated."""
    missing = batch - len(rows)
    return rows if not missing else np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)])


_ENDS = ("terminated", "truncated")
_MOST_BATCH, _MOST_WINDOWS = 4096, 256


def preprocess(
    data: str | os.PathLike[str] | dataset.DataSet | tuple[Buffer, BufferState],
    fn: Callable[[PyTree], PyTree],
    *,
    dest: str | os.PathLike[str],
    view: View | None = None,
    keep: Sequence[str] | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    segment_rows: int | None = None,
    codec: Mapping[str, Codec] | None = None,
    sampler: Sampler | None = None,
    metadata: Mapping[str, Any] | None = None,
    resume: bool = True,
    workers: int = 0,
    progress: Progress = None,
) -> tuple[Buffer, BufferState]:
    """Write a function's result for each row to a new data set, and open it.

    Args:
      data: A data set's path, or a buffer and its state (of any storage, without lanes).
      fn: A pure function of one row, a dict of arrays without leading axes, to a dict of arrays; it is vmapped and jitted.
      dest: The folder to write, which must not exist.
      view: None: `fn` gets rows, in order, and the result has the same order. A view: `fn` gets the view's result for each
        anchor that can be sampled, in order, each once; the results are rows of no episode.
      keep: Leaves of the row to keep if `fn` does not return them; None: `terminated` and `truncated` if rows have them,
        so that
        episodes are preserved; nothing with a view, or for a buffer whose writer keeps no order (`TopK`, `Reservoir`).
      limit: Process only the first rows or windows: to try a function.
      batch_size: Rows in one call of the compiled program; None: 8 MiB of rows, at most 4096; with a view 256.
      segment_rows, codec, metadata, progress: As for `interop.Source.save`.
      sampler: Of the buffer; its view is `Transition` if the rows are steps, else `Row`.
      resume: Continue an interrupted call with the same function and data. Functions that call back into Python
        (`jax.pure_callback`) and live buffers cannot resume, since nothing identifies them. False: discard its segments.
      workers: Segments written at a time, in threads; 0: one.
    Returns:
      The new buffer and its state, as from `fbuf.datasets.open(dest)`.
    Raises:
      FileExistsError: `dest` exists and is not of an interrupted call with this function.
      ValueError: `dest` is the source, or within it; `fn` is not pure; there are no rows.
      TypeError: `fn` does not return a dict of arrays.
      StoreCorrupted: a row of the source is damaged.
    Cost: reads and writes each row once; at most two compilations.

    Example:
      >>> import fbuf, tempfile, jax.numpy as jnp, numpy as np
      >>> data = {
      ...     "observations": {"place": np.ones((6, 3), np.float32), "goal": np.zeros((6, 2), np.float32)},
      ...     "actions": np.zeros((6, 1), np.float32),
      ...     "rewards": np.ones(6, np.float32),
      ...     "terminals": np.array([0, 0, 1, 0, 0, 1], bool),
      ... }
      >>> def flat(row):
      ...     obs = jnp.concatenate([row["obs"]["place"], row["obs"]["goal"]])
      ...     return {"obs": obs, "action": row["action"], "reward": row["reward"]}
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     buffer, state = fbuf.interop.from_arrays(data, ends="terminated").save(f"{folder}/maze")
      ...     buffer, state = fbuf.datasets.preprocess((buffer, state), flat, dest=f"{folder}/flat")
      ...     rows = buffer.rows(state).data
      ...     print(sorted(rows), rows["obs"].shape)
      ...     del state
      ['action', 'obs', 'reward', 'terminated', 'truncated'] (6, 5)
    """
    check_int(CALL, "workers", workers, 0)
    for name, value in (("limit", limit), ("batch_size", batch_size)):
        if value is not None:
            check_int(CALL, name, value, hint=", or None")
    path = to_path(CALL, "dest", dest)
    _open.check(path, None, sampler)
    origin = origin_of(data, view)
    try:
        if origin.path is not None:
            _check_apart(origin.path, path)
        if not resume:
            _discard(path)
        check_free(CALL, path, unfinished=True)
        rows = origin.rows if limit is None else min(int(limit), origin.rows)
        if not rows:
            why = "" if view is None else f"; {view!r} finds no window to draw"
            raise ValueError(f"{CALL}: there is nothing to write; expected at least one row{why}.")
        program = Program(fn, origin.row, _kept(keep, origin), codec)
        schema = program.schema
        _open.check(path, None if origin.steps else Row(), sampler, schema)
        if batch_size is None:
            most = _MOST_BATCH if view is None else _MOST_WINDOWS
            batch_size = max(1, min(most, BLOCK_BYTES // max(1, schema.row_bytes, tree_bytes(origin.row))))
        batch = min(int(batch_size), rows)
        size = rows_per_segment(CALL, segment_rows, schema)
        starts = range(0, rows, size)
        run = origin.runner(program, batch)

        def blocks(number: int) -> Iterator[Block]:
            stop = min(starts[number] + size, rows)
            for start in range(starts[number], stop, batch):
                yield run(start, min(start + batch, stop))

        mark = f"{program.mark} {origin.mark}" + ("" if view is None else f" {batch}")
        about = {**dict(metadata or {}), "from": "preprocess"}
        sizes = [min(start + size, rows) - start for start in starts]
        work = Work(schema, sizes, blocks, lambda number: f"{mark} {starts[number]}", lambda: about)
        write(CALL, path, work, workers=workers, progress=progress)
    finally:
        origin.close()
    steps = default_view(schema.names, rows)
    return _open.open(path, view=steps if origin.steps else Row(), sampler=sampler)


def _discard(path: Path) -> None:
    """Discard the segments of an interrupted call."""
    if path.is_dir() and not (path / NAME).exists():
        with exclusive(CALL, path):
            for number in dataset.committed(path):
                dataset.discard(path, number)


def _kept(keep: Sequence[str] | None, origin: Stored | Windows) -> tuple[str, ...]:
    if isinstance(keep, str):
        raise TypeError(f"{CALL}: keep is {keep!r}; expected a tuple. Write keep=({keep!r},).")
    if keep is None:
        return tuple(name for name in _ENDS if name in origin.names and origin.steps)
    if missing := [name for name in keep if name not in origin.names]:
        raise ValueError(f"{CALL}: keep has '{missing[0]}', but rows have {', '.join(origin.names) or 'none'}.")
    return tuple(keep)


def _check_apart(source: Path, dest: Path) -> None:
    a, b = source.resolve(), dest.resolve()
    if a == b:
        raise ValueError(f"{CALL}: dest is {dest}, the source itself; expected another folder.")
    if a in b.parents or b in a.parents:
        raise ValueError(f"{CALL}: dest is {dest}, and the source {source}; expected neither within the other.")

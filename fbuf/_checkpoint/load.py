"""`load`: a generation of a checkpoint folder becomes a buffer and its state.

Arrays of the device are made there and filled block by block; what lies on the host is handed to the storage as it is in the
files, to read as it likes. Nothing is imported, evaluated or cast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge import lifetime
from fbuf._buffer import checks, fit_transforms, prefetch
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._checkpoint import compatibility, mixture, state_arrays
from fbuf._checkpoint import extra as _extra
from fbuf._checkpoint import resize as _resize
from fbuf._checkpoint.device_arrays import place
from fbuf._checkpoint.save import Progress, checked_path
from fbuf._core.pytree import Spec
from fbuf._core.row_format import Given
from fbuf._formats import checkpoint
from fbuf._host.io.directory import rollback
from fbuf._mixture import Mixture
from fbuf.storages import _array_rows

_KNOWN = "state/transforms/read/"
"""What stages of `on_read` know, by their names."""


def load(
    path: str | os.PathLike[str],
    buffer: Buffer | Mixture | None = None,
    *,
    example: Any = None,
    verify: Any = "full",
    resize: Any = None,
    extra: Any = None,
    progress: Progress | bool | None = None,
) -> Any:
    """Loads what `save` saved: `(buffer, state)`, or with `extra` `(buffer, state, extra)`.

    The newest generation that is whole; where that is not the newest, a RuntimeWarning says why. Arrays come to the default
    device, whatever devices they were spread over when they were saved (`jax.device_put(state, ...)` spreads them again); a
    host store is a new one, of this process. Batches go on bit for bit, given the same keys.

    Args:
      path: The folder. Of a `Mixture` that was saved `buffer` is a mixture of the same names; `example` and `resize` are dicts
        by name, and what follows holds of each of its buffers.
      buffer: None: the one that was saved. Else one that the state must be of; it may differ in what the state does not depend
        on: what a view makes of the rows it draws (`gamma`, ...), `prefetch` and `batch_size` (what was drawn ahead is then
        dropped), settings of draws (`stratified`, `replace`, `drop_last`, ...), where priorities lie (`on`), the path of its
        files. Numbers that can be annealed (`alpha`, `beta`, ...) are those of the state: `buffer.set` gives others. Of
        another storage the rows are written anew, in order, which costs what adding them costs.
        Needed where functions or parts of yours were saved: they are noted by name, and nothing is imported.
      example: One row, as for `Buffer.init`; only needed where rows are made of nodes of yours (a NamedTuple, a registered
        dataclass). If given, rows must be like it.
      verify: "full": every byte is checked before anything is built. "lazy": each block as it is read; one that is damaged
        raises StoreCorrupted then.
      resize: Another capacity, larger or smaller; with a buffer True for its own. The newest rows stay, with their
        priorities, episodes and numbers. They come to lie in other slots: indices of before are stale, what was drawn ahead
        is dropped, and samplers without replacement go on where they were, but that an epoch begins anew that has more
        anchors than the new capacity.
      extra: Hand out what was saved with `extra=`: True as it was saved, or an example of it, whose structure it gets.
      progress: True for a bar, or a callable that is given bytes done and bytes in all.
    Raises:
      CheckpointNotFound (a FileNotFoundError): there is none.
      StoreCorrupted (a RuntimeError): there is one, and no generation of it is whole.
      SchemaError (a ValueError): it is not what was asked for; with the path, what is there, what was expected, what to write.
      VersionError (a ValueError): a later release has saved it, or an earlier one with a setting that was removed.
      TypeError: the call is traced.
      MemoryError: the state takes more than is free (on a CPU; not looked at where buffer and example are given).
      FileExistsError, BlockingIOError: its rows are to lie in files at a path that is taken: load it into a buffer with
        another.
    Cost: each byte is read once; twice with "full" where rows come to lie in files. Memory: the state, and a few blocks; twice
      the state where it is moved.

    Example:
      >>> import fbuf, tempfile, jax, jax.numpy as jnp
      >>> buffer = fbuf.Buffer(3)
      >>> state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     saving = fbuf.save(folder, buffer, state)
      ...     larger, state = fbuf.load(folder, resize=100)
      >>> larger.capacity, larger.last(state, 3).data["t"].tolist()
      (100, [2, 3, 4])
    """
    call = "fbuf.load"

    def build(saved: checkpoint.Saved) -> Any:
        beside = () if extra is None else (_extra.unpack(call, saved.path, saved, saved.meta["extra"], extra),)
        if "mixture" in saved.meta:

            def one(part: Any, buffer: Buffer | None, example: Any, size: Any) -> tuple[Buffer, BufferState]:
                return restored(call, part, buffer, example, size, verify)

            return *mixture.restored(call, saved, buffer, example, resize, one), *beside
        return *restored(call, saved, buffer, example, resize, verify), *beside

    return from_newest(call, path, verify, progress, build)


def from_newest(call: str, path: Any, verify: Any, progress: Any, build: Callable[[checkpoint.Saved], Any]) -> Any:
    """What `build` makes of the newest generation that is whole.

    Raises:
      SchemaError: it is a checkpoint of something else.
      TypeError: the call is traced.
    """
    if lifetime.traced():
        raise TypeError(
            f"{call}: the call is traced, and would read once what a program is to read each time; expected an eager call. "
            f"Call it outside jit, scan and vmap, and pass the state in."
        )

    def checked(saved: checkpoint.Saved) -> Any:
        one = saved.meta.keys() >= {"buffer", "rows", "rule", "placed", "extra", "replay"}
        if not one and not saved.meta.keys() >= mixture.KEYS:
            raise checkpoint.SchemaError(
                f"{call}: {saved.path} holds arrays, but no buffer; expected what fbuf.save wrote. Give its path."
            )
        try:
            return build(saved)
        except (KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            raise checkpoint.SchemaError(
                f"{call}: what {saved.path} says of its buffer makes no sense ({error!r}); expected what fbuf.save wrote. Load "
                f"another checkpoint."
            ) from error

    return checkpoint.restore(checked_path(call, path), checked, verify=verify, progress=progress)


def restored(call: str, saved: Any, buffer: Any, example: Any, resize: Any, verify: Any) -> tuple[Buffer, BufferState]:
    """The buffer and its state."""
    path, meta = saved.path, saved.meta
    reader, target, keeps_ahead = compatibility.match(call, path, meta, buffer, resize)
    spec, structure, was = compatibility.rows_of(call, path, meta, reader, example)
    checks.check_fields(call, target, spec)
    target.storage.host_keys(spec)
    if verify == "full" and isinstance(getattr(target.storage, "path", None), str):
        saved.verify()  # before files are made there, which a second try would find in its way
    given = buffer is not None and example is not None
    with rollback(getattr(target.storage, "path", None)):
        if (reader.storage, reader.capacity) == (target.storage, target.capacity):
            state = _read(call, saved, reader, spec, structure, was, given)
        else:
            with _apart(reader, target) as reader:
                state = _read(call, saved, reader, spec, structure, was, given)
                state = _resize.moved(f"{call}: {path}", reader, target, state)
        if reader.on_read != target.on_read:
            before = dataclasses.replace(target, on_read=reader.on_read, prefetch=0, batch_size=None)
            state = fit_transforms.observed(target, dataclasses.replace(state, ahead=None), since=before)
        if not keeps_ahead:
            state = dataclasses.replace(state, ahead=None)
            state = dataclasses.replace(state, ahead=prefetch.nothing(target, state))
        target.check_state(state)
    return target, state


@contextlib.contextmanager
def _apart(reader: Buffer, target: Buffer) -> Iterator[Buffer]:
    """The reader, whose rows lie for a while in a folder of their own, if in any."""
    storage: Any = reader.storage
    if not isinstance(getattr(storage, "path", None), str):
        yield reader
        return
    beside = getattr(target.storage, "path", None)
    where = os.path.dirname(os.path.abspath(beside)) if isinstance(beside, str) else None
    with tempfile.TemporaryDirectory(prefix="fbuf-", dir=where) as folder:
        yield dataclasses.replace(reader, storage=dataclasses.replace(storage, path=os.path.join(folder, "rows")))


def _read(
    call: str, saved: Any, reader: Buffer, spec: Spec, structure: Any, was: Given | None, given: bool
) -> BufferState:
    placed, stages = saved.meta["placed"], () if reader.on_read is None else reader.on_read.names
    abstract = state_arrays.template(reader, spec, structure, was)
    wanted = {f"state/{name}": _shape_of(leaf) for name, leaf in state_arrays.packed(reader, abstract).items()}
    there = {n for n in saved.arrays if n.startswith("state/")}
    if not reader.prefetch:
        there = {n for n in there if not n.startswith("state/ahead/")}
    there = {n for n in there if not n.startswith(_KNOWN) or n.removeprefix(_KNOWN).split("/")[0] in stages}
    found = {n: _Found(_whole_shape(saved, n), saved.arrays[n].dtype) for n in saved.arrays if n in there}
    compatibility.check_leaves(call, saved.path, found, wanted)
    _check_sizes(call, saved, reader, wanted, abstract.rows, given)
    rows = {
        name.removeprefix("rows/"): _array_rows.Owned(_placed(saved, name)) if name in placed else array
        for name, array in saved.arrays.items()
        if name.startswith("rows/")
    }
    made = reader.storage.from_arrays(rows, reader.geometry, spec, structure)
    leaves = {n: _placed(saved, n) if n in placed else jnp.array(np.asarray(saved.arrays[n])) for n in wanted}
    return state_arrays.unpacked(reader, abstract, leaves, made)


def _check_sizes(call: str, saved: Any, reader: Buffer, wanted: Mapping[str, Any], rows: Any, given: bool) -> None:
    """Refuses arrays of rows larger than this buffer has, and a state that nobody asked for and has no room."""
    there = [n for n in saved.arrays if n.startswith("rows/") and n in saved.meta["placed"]]
    claimed = nbytes((_whole_shape(saved, n), saved.arrays[n].dtype) for n in there)
    expected = nbytes((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(rows))
    if claimed > expected and type(reader.storage).__module__.split(".")[0] == "fbuf":
        raise checkpoint.SchemaError(
            f"{call}: {saved.path}: rows are said to take {claimed:,} bytes; expected {expected:,}, as of {reader!r}. Load "
            f"another checkpoint."
        )
    if not given:
        needed = nbytes((leaf.shape, leaf.dtype) for leaf in wanted.values())
        check(call, saved.path, needed + max(claimed, expected), saved.nbytes)


class _Found:
    """Shape and dtype of a leaf that was saved."""

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        self.shape, self.dtype = shape, dtype


def _shape_of(leaf: Any) -> Any:
    return _Found((leaf.rows,), leaf.array.dtype) if isinstance(leaf, state_arrays.Prefix) else leaf


def _whole_shape(saved: Any, name: str) -> tuple[int, ...]:
    """Of a leaf as it is in the state."""
    placed: Mapping[str, Any] = saved.meta["placed"]
    return tuple(placed[name][0]) if name in placed else tuple(saved.arrays[name].shape)


def _placed(saved: Any, name: str) -> Any:
    source, fill = saved.arrays[name], bytes.fromhex(saved.meta["placed"][name][1])
    shape = _whole_shape(saved, name)
    if (shape[1:] if shape else ()) != source.shape[1:] or (shape or (1,))[0] < source.shape[0]:
        raise checkpoint.SchemaError(
            f"fbuf.load: {saved.path}: '{name}' is said to be {list(shape)}, but {list(source.shape)} are there; expected "
            f"rows of one shape. Load another checkpoint."
        )
    return place(source, shape, source.dtype, fill)


_MEMORY = Path("/proc/meminfo")


def nbytes(arrays: Iterable[tuple[Iterable[int], Any]]) -> int:
    """Bytes of arrays of some shapes and dtypes, however large these say that they are."""
    return sum(math.prod(shape) * jax.numpy.dtype(dtype).itemsize for shape, dtype in arrays)


def check(call: str, path: str, needed: int, stored: int) -> None:
    """Raises MemoryError if a state takes more than is free; of other devices than the CPU nothing: they say so themselves."""
    free = _free() if jax.default_backend() == "cpu" else None
    if free is not None and needed > free:
        raise MemoryError(
            f"{call}: the state in {path} takes {needed:,} bytes, of which {stored:,} are stored; expected at most {free:,}, "
            f"which are free. Load it where there is more memory, or say what you know to be there: {call}(path, buffer, "
            f"example=row). If it is larger than what was saved, do not trust it."
        )


def _free() -> int | None:
    """Bytes that the system can still give, swap included; None where it does not say."""
    try:
        lines = [line.split() for line in _MEMORY.read_text().splitlines()]
        sizes = {words[0]: int(words[1]) * 1024 for words in lines}
        return sizes["MemAvailable:"] + sizes["SwapFree:"]
    except (OSError, LookupError, ValueError):
        return None

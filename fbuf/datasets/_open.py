"""`open`: the frozen buffer of a data set on disk, and its state."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fbuf._buffer import init
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core import row_schema
from fbuf._core.arguments import check_choice
from fbuf._core.pytree import PyTree, named_leaves, nested
from fbuf._formats import dataset
from fbuf._host.types import StoreCorrupted
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.view import View
from fbuf.datasets import _info
from fbuf.datasets._arrays.episodes import default_view
from fbuf.datasets._arrays.segments import to_path
from fbuf.samplers import Uniform
from fbuf.storages import DataSet
from fbuf.torch._dtypes import NARROW
from fbuf.views import Row, Transition
from fbuf.writers import Frozen

_MANY = 1 << 30  # rows of a data set that does not exist yet


def open(
    path: str | os.PathLike[str],
    *,
    view: View | None = None,
    sampler: Sampler | None = None,
    verify: Literal["full", "lazy"] = "lazy",
    prefetch: int = 0,
    batch_size: int | None = None,
    episode_end: tuple[str, ...] = (),
    on_read: Any = None,
    memory: int = 1 << 28,
    cache: int = 0,
) -> tuple[Buffer, BufferState]:
    """Open a data set as a read-only buffer for every reading method, view and sampler, inside jit.

    Args:
      path: Its folder, which must not move while the state is used.
      view: The view; None: `views.Row()`. Change it later by `buffer.convert(other, state)`.
      sampler: The sampler; None: `samplers.Uniform()`.
      verify: "lazy": check each part of the files when it is read. "full": check all now.
      prefetch, batch_size, episode_end, on_read: As for `Buffer`.
      memory, cache: As for `storages.DataSet`.
    Returns:
      The buffer and its state.
    Raises:
      FileNotFoundError: there is no data set, or it is unfinished.
      StoreCorrupted: it is damaged.
      ValueError: rows lack leaves that the view or the sampler reads; or a leaf has 64 bits and x64 is off.
    Cost: about 30 ms for a million Atari frames, and the same for the anchors of a view that reads neighbours.

    Example:
      >>> import fbuf, jax, numpy as np, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     made = fbuf.interop.from_arrays({"t": np.arange(6)}, episode_end=()).save(f"{folder}/six")
      ...     buffer, state = fbuf.datasets.open(f"{folder}/six", sampler=fbuf.samplers.Epoch(shuffle=False))
      ...     state, batch = buffer.sample(state, jax.random.key(0), 4)
      >>> batch.data["t"].tolist()
      [0, 1, 2, 3]
    """
    check_choice("fbuf.datasets.open", "verify", verify, ("full", "lazy"))
    if verify == "full":
        _info.verify(path)
    about = dataset.load(path)
    storage = DataSet(dataset.root(path), memory=memory, cache=cache)
    settings: dict[str, Any] = {"episode_end": episode_end, "prefetch": prefetch, "batch_size": batch_size}
    buffer = _buffer(about.rows, storage, view, sampler, on_read=on_read, **settings)
    return buffer, buffer.init(example(about.schema))


def _buffer(rows: int, storage: DataSet, view: View | None, sampler: Sampler | None, **settings: Any) -> Buffer:
    view, sampler = Row() if view is None else view, Uniform() if sampler is None else sampler
    return Buffer(rows, storage=storage, sampler=sampler, view=view, writer=Frozen(), **settings)


def check(
    path: str | os.PathLike[str],
    view: View | None,
    sampler: Sampler | None,
    schema: dataset.Schema | None = None,
    **settings: Any,
) -> None:
    """Raise, before a data set is written, what `open` would raise for its view and sampler.

    Args:
      view: None: the default view; `Transition` fits wherever another default does.
      schema: Of the rows, if known.
      settings: Other arguments of `open`, as for `Buffer`.
    """
    if view is None:
        view = Transition(autoreset="same_step") if schema is None else default_view(schema.names, _MANY)
    buffer = _buffer(_MANY, DataSet(os.fspath(path)), view, sampler, **settings)
    if schema is not None:
        init.checked_spec(buffer, "fbuf.datasets.open", example(schema))


def example(schema: dataset.Schema) -> PyTree:
    """Return one row of a data set, as shapes.

    Raises:
      ValueError: x64 is off, and a leaf has 64 bits. StoreCorrupted: the leaves do not fit the structure.
    """
    leaves: dict[str, Any] = {}
    for leaf in schema.leaves:
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise ValueError(
                f"fbuf.datasets: leaf '{leaf.name}' is {leaf.dtype}, but x64 is off; expected it on. Call "
                f"jax.config.update('jax_enable_x64', True), or make the data set with {NARROW[leaf.dtype.name]}."
            )
        leaves[leaf.name] = jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))
    with contextlib.suppress(ValueError, TypeError):
        if schema.structure is None:
            row = leaves[""] if list(leaves) == [""] else nested(leaves)
        else:
            row = row_schema.decode(schema.structure).unflatten(leaves.values())
        if named_leaves(row) == leaves:
            return row
    raise StoreCorrupted(f"fbuf.datasets: leaves {', '.join(leaves)} do not fit {str(schema.structure)[:200]}.")


def default_root() -> Path:
    """Return `$FBUF_DATASETS`, else `~/.cache/fbuf/datasets` (or below `$XDG_CACHE_HOME`)."""
    if root := os.environ.get("FBUF_DATASETS"):
        return Path(root).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fbuf" / "datasets"


def root_of(call: str, root: str | os.PathLike[str] | None) -> Path:
    """Return the folder passed, or the default. Raises TypeError: it is not a path."""
    return (default_root() if root is None else to_path(call, "root", root, "or None for the default one")).absolute()

"""Rows from arrays in memory, or from anything that slices like one (`numpy.memmap`, an h5py or zarr data set)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.progress import Progress
from fbuf._core.pytree import named_leaves
from fbuf.interop._columns import Fields, chosen, column_of, length_of
from fbuf.interop._fill import fill
from fbuf.interop._source import Source


def from_arrays(
    arrays: Any,
    *,
    buffer: Buffer | None = None,
    capacity: int | None = None,
    lanes: int | None = None,
    priority: Any = None,
    fields: Fields = None,
    dtypes: Mapping[str, str] | None = None,
    newest: int | None = None,
    progress: Progress = None,
) -> tuple[Buffer, BufferState]:
    """A buffer with rows from arrays, oldest first.

    Args:
      arrays: A dict (or any pytree) of arrays `[N, ...]`, with lanes `[N, E, ...]`: numpy's, JAX's, or what slices like
        them and has `shape` and `dtype`. Read block by block, so a `numpy.memmap` may be larger than memory.
      buffer: The buffer to fill; None: one with room for just these rows, `Uniform`, or `Prioritized` if priorities come.
      capacity: Of the buffer made where none is given; None: as many rows as there are.
      lanes: E, where arrays are `[N, E, ...]`; None: `buffer.lanes`.
      priority: |p| of each row, float `[N]`, with lanes `[N, E]`; None: rows are as new.
      fields: Which leaves to take: `{name there: name here}`, or names; "ted": torchrl's layout, each observation once;
        None: all, in the structure they are given in.
      dtypes: `{name here: dtype}`, casts asked for. Nothing else is cast, but 64-bit integers that fit to 32 bits where
        jax_enable_x64 is off.
      newest: Take only so many rows (a lane), the last ones.
      progress: True: a bar; or a function of `(done, total)`, in rows (a lane).
    Returns:
      The buffer, and its state.
    Raises:
      ValueError: leaves of different lengths; text or objects; fewer places than rows; other lanes; a value that a dtype
        cannot hold.
      TypeError: 64-bit floats, where jax_enable_x64 is off and no cast is asked for; a dtype that no buffer holds.
    Cost: O(N), in blocks of some 8 MiB.

    Example:
      >>> import fbuf, numpy as np
      >>> buffer, state = fbuf.interop.from_arrays({"obs": np.zeros((5, 3), np.float32), "action": np.arange(5)})
      >>> buffer.capacity, buffer.last(state, 2).data["action"].tolist()
      (5, [3, 4])
    """
    call = "from_arrays"
    if buffer is not None and lanes is None:
        lanes = buffer.lanes
    columns = {name: column_of(name, leaf, lanes) for name, leaf in named_leaves(arrays).items()}
    steps = length_of(call, {name: columns[name] for name in chosen(call, columns, fields)})
    given = None if priority is None else np.abs(np.asarray(priority, np.float32))
    if given is not None:
        wanted = (steps,) if lanes is None else (steps, lanes)
        if given.shape != wanted or not np.isfinite(given).all():
            what = f"has shape {list(given.shape)}" if given.shape != wanted else "is not finite throughout"
            raise ValueError(f"{call}: priority {what}; expected finite numbers of shape {list(wanted)}.")
    source = Source(columns, steps, lanes, priority=given, structure=jax.tree.structure(arrays))
    return fill(call, source, buffer, capacity=capacity, fields=fields, dtypes=dtypes, newest=newest, progress=progress)

"""The arrays of a state, without what can be recomputed: trees as leaves, ranks as buckets, host priorities as an array.

Parents of a sum tree equal the sums of their children bit for bit (`fbuf._algorithms.sum_tree`), and bucket counts are
integers, so nothing is lost. Everything else, custom parts included, is stored as it is.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._buffer import prefetch
from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.pytree import Spec
from fbuf._core.row_format import RowFormat
from fbuf._interfaces.sampler import Sampler
from fbuf._interfaces.storage import Storage
from fbuf.storages._host_rows import SideHeld

_NAMES_IN_FILES = {
    "ahead/batch/index/generation": "ahead/batch/index/ticket",
    "sampler/pool/": "sampler/roster/",
    "sampler/position/": "sampler/turn/",
    "sampler/unit_size": "sampler/lot",
}
"""First parts of names that files keep although the leaves have others. A name in a file changes only with the format."""


def template(buffer: Buffer, spec: Spec, structure: Any, row_format: RowFormat | None) -> BufferState:
    """Return the shapes of a state of `buffer`, as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(
        partial(prefetch.empty_state, buffer, row_format=row_format),
        buffer.storage.abstract(buffer.geometry, spec, structure),
    )


def to_saved_arrays(buffer: Buffer, state: BufferState) -> dict[str, Any]:
    """Return the stored part of a state except the rows, by name: arrays or prefixes. Also of shapes."""
    sampler = buffer.sampler.saved(state.sampler, buffer.capacity)
    pairs = jax.tree_util.tree_flatten_with_path(dataclasses.replace(state, rows=None, sampler=sampler))[0]
    named = ((jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs)
    return {name_in_file(name): leaf for name, leaf in named}


def name_in_file(name: str) -> str:
    """Return the name that files have for a leaf of a state."""
    for part, in_file in _NAMES_IN_FILES.items():
        if name.startswith(part):
            return in_file + name[len(part) :]
    return name


def from_saved_arrays(buffer: Buffer, abstract: BufferState, leaves: dict[str, Any], rows: Any) -> BufferState:
    """Return the state of leaves by name, in the order of `to_saved_arrays(abstract)`, over `rows`."""
    sampler = buffer.sampler.saved(abstract.sampler, buffer.capacity)
    structure: Any = jax.tree.structure(dataclasses.replace(abstract, rows=None, sampler=sampler))
    state = structure.unflatten(leaves.values())
    state = dataclasses.replace(state, rows=rows, sampler=buffer.sampler.loaded(state.sampler, buffer.capacity))
    return dataclasses.replace(state, ahead=restart_prefetch(buffer, state))


def has_custom_host_state(buffer: Buffer) -> bool:
    """Return whether a custom sampler keeps state on the host."""
    return buffer.sampler.on_host and type(buffer.sampler).saved is Sampler.saved


def has_custom_reads(buffer: Buffer) -> bool:
    """Return whether prefetched batches may refer to a custom storage's reads."""
    kind = type(buffer.storage)
    return kind.prepare_read is not Storage.prepare_read and kind.__module__.split(".")[0] != "fbuf"


def restart_prefetch(buffer: Buffer, state: BufferState) -> Any:
    """Return the prefetched batch, whose rows are read when it is returned, since no read is running."""
    ahead = state.ahead
    if ahead is None or has_custom_reads(buffer):
        return None if ahead is None else ahead.dropped()
    if isinstance(ahead.held, SideHeld):
        pending = dataclasses.replace(ahead.held, number=jnp.zeros((), jnp.uint32))
        return dataclasses.replace(ahead, held=pending)
    return ahead

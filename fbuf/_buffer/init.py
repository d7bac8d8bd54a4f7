"""New states: of empty buffers, and of files that outlive a process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer import checks, convert, prefetch, read, transforms
from fbuf._buffer.state import BufferConfig, BufferState, init_host_sampler, open_host_state
from fbuf._core import arguments, control_flow
from fbuf._core.pytree import PyTree, Spec, named_leaves, spec_of, tree_bytes
from fbuf._core.row_format import RowFormat, format_of
from fbuf._indexing.anchors import CUT
from fbuf._interfaces.writer import Streaming


def init(buffer: BufferConfig, example: PyTree) -> BufferState:
    """Return the state of an empty buffer, or of a data set: see `Buffer.init`."""
    call, row = "Buffer.init", example
    example, row_format = stored_example(call, buffer, example)
    with _report_memory(buffer, example):
        state = prefetch.empty_state(buffer, _empty_rows(call, buffer, example), row_format)
        if buffer.writer.read_only:
            state = convert.with_existing_rows(buffer, call, state)
        else:
            state = dataclasses.replace(state, sampler=open_host_state(buffer, call, state.sampler))
    if buffer.writer.read_only:
        state = transforms.fit_transforms(buffer, state)
    arrays = [leaf for leaf in jax.tree.leaves(row) if isinstance(leaf, jax.Array)]
    return control_flow.vary_like(validate_transforms(buffer, state), arrays)


def stored_example(call: str, buffer: BufferConfig, example: PyTree) -> tuple[PyTree, RowFormat | None]:
    """Return a row like `example` as it is stored, as shapes, and its format before `on_write`; or the example and None.

    Raises:
      ValueError, TypeError: it is not a valid row; or a stage does not fit it.
    """
    if buffer.on_write is None:
        return example, None
    spec = spec_of(example, buffer.storage.exact)
    arguments.check_spec(call, spec)
    checks.check_64_bits(call, buffer, spec)
    was = format_of(example)
    return buffer.on_write.opened(was.example)[1], was


def _empty_rows(call: str, buffer: BufferConfig, example: PyTree) -> Any:
    if not buffer.storage.ragged:
        spec = checked_spec(buffer, call, example)
        return buffer.storage.init(buffer.geometry, spec, jax.tree.structure(example))
    arrays, leaves = buffer.storage.describe(call, example)
    try:
        spec = checked_spec(buffer, call, arrays)
    except (TypeError, ValueError) as error:
        ragged = [leaf.name for leaf in leaves if leaf.name not in named_leaves(arrays)]
        named = next((name for name in ragged if f"'{name}'" in str(error)), None)
        if named is None:
            raise
        raise type(error)(
            f"{error} '{named}' is ragged; views read arrays that have one shape (keys= names the others) or a largest one: "
            f"storages.Ragged(maximum={{'{named}': (...)}})."
        ) from None
    return buffer.storage.open(buffer.geometry, spec, jax.tree.structure(arrays), leaves)


@contextlib.contextmanager
def _report_memory(buffer: BufferConfig, example: PyTree) -> Iterator[None]:
    """Name the bytes needed if an allocation fails."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        needed = "the state"
        if not buffer.storage.ragged:
            spec = spec_of(example, buffer.storage.exact)
            device = tree_bytes(buffer.storage.abstract(buffer.geometry, spec, jax.tree.structure(example)))
            host = buffer.storage.plan_host(buffer.geometry, spec, None, None)[2]
            needed = ", ".join(f"{n} bytes on the {place}" for place, n in (("device", device), ("host", host)) if n)
        raise MemoryError(
            f"Buffer.init: there is no room for {needed or 'the state'}, which rows of {buffer!r} take. Use a smaller "
            f'capacity, or storages.Compressed() or Memmap(path="/data/replay"); buffer.plan(example) says what it takes.'
        ) from error


def resume(buffer: BufferConfig, example: PyTree, verify: str) -> BufferState:
    """Return a state over the files at the storage's path: see `Buffer.resume`."""
    call, writer = "Buffer.resume", buffer.writer
    example, row_format = stored_example(call, buffer, example)
    spec = checked_spec(buffer, call, example)
    if not isinstance(writer, Streaming):
        raise TypeError(f"{call}: {writer!r} chooses slots, which files lack. Use writers.Ring(), or fbuf.save.")
    arguments.check_choice(call, "verify", verify, ("full", "lazy"))
    rows, count, sizes, cuts = buffer.storage.resume(buffer.geometry, spec, jax.tree.structure(example), verify)
    ring = dataclasses.replace(writer.resume(buffer.geometry, np.asarray(count)), size=jnp.asarray(sizes, jnp.int32))
    state = prefetch.empty_state(buffer, rows, row_format).replace(ring=ring)
    if state.anchors is not None:  # `convert` keeps cuts
        flags = jnp.where(cuts, jnp.uint8(CUT), jnp.uint8(0))
        state = dataclasses.replace(state, anchors=dataclasses.replace(state.anchors, flags=flags))
    sampler = init_host_sampler(buffer, call)
    anchors, sampler = convert.convert(buffer, state, sampler, static=(buffer,))[1]
    state = dataclasses.replace(state, anchors=anchors, sampler=sampler)
    return validate_transforms(buffer, transforms.fit_transforms(buffer, state))


def checked_spec(buffer: BufferConfig, call: str, example: PyTree) -> Spec:
    """Return the spec of a row that the buffer can hold; raise what `init` raises."""
    spec = spec_of(example, buffer.storage.exact)
    arguments.check_spec(call, spec)
    checks.check_fields(call, buffer, spec)
    buffer.storage.host_keys(spec)
    return spec


def validate_transforms(buffer: BufferConfig, state: BufferState) -> BufferState:
    """Return the state after a batch passed through `on_read`, as shapes, so that errors are raised now."""
    if buffer.on_read is not None:
        sample = functools.partial(read.sample.inline, buffer, options={}, batch_size=buffer.batch_size or 2)
        jax.eval_shape(sample, state, jax.eval_shape(lambda: jax.random.key(0)))
    return state

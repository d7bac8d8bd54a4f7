"""Check the numbers of a loaded state: checksums do not say that a buffer wrote them.

Each class made by `@state` says what its own fields hold, by its method `ranges`. Numbers beyond would be read unchecked on a
device, give weights that are not finite, or never end a loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState, Header, host_header
from fbuf._checkpoint.state_arrays import name_in_file
from fbuf._core.component import STATES
from fbuf._formats.checkpoint import SchemaError


def check_ranges(call: str, path: str, buffer: Buffer, state: BufferState) -> BufferState:
    """Return a loaded state; raise SchemaError if it holds numbers that no buffer writes."""
    for name, node in _nodes("", dataclasses.replace(state, header=host_header(state.header))):
        for field, values, low, high in node.ranges(buffer.geometry):
            _check(call, path, name_in_file(f"{name}{field}"), np.asarray(values), np.asarray(low), np.asarray(high))
    return state


def _nodes(name: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a state that say what they hold, arrays as NumPy's, inner ones first."""
    children: Mapping[str, Any]
    if type(node) in STATES:
        children = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    elif isinstance(node, Header):
        children = node._asdict()
    elif isinstance(node, dict):
        children = node
    elif isinstance(node, tuple | list):
        children = {str(number): child for number, child in enumerate(node)}
    else:
        return
    for key, child in children.items():
        yield from _nodes(f"{name}{key}/", child)
    if callable(getattr(type(node), "ranges", None)):
        yield name, node


def _check(call: str, path: str, what: str, values: Any, low: Any, high: Any) -> None:
    if values.size == 0 or (low.ndim == high.ndim == 0 and low <= values.min() and values.max() <= high):
        return  # NaN is the least and the largest
    wrong = np.broadcast_to(~((low <= values) & (values <= high)), np.broadcast_shapes(values.shape, low.shape))
    if wrong.any():
        at = np.argwhere(wrong)[0].tolist()
        found, least, most = (np.broadcast_to(x, wrong.shape)[tuple(at)] for x in (values, low, high))
        where = f" at {at}" if at else ""
        raise SchemaError(
            f"{call}: '{what}' in {path} is {found}{where}; expected {least} to {most}. Load another checkpoint."
        )

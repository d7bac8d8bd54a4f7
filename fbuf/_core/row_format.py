"""`RowFormat`: the structure, shapes and dtypes of rows before `on_write` transforms them.

`add` and `extend` check rows against it. It is a static part of the state: the buffer is constructed before the first row,
and stored rows do not determine it.
"""

from __future__ import annotations

import json
from typing import Any

import jax
from jax import export

from fbuf._core import row_schema
from fbuf._core.pytree import PyTree, Spec, leaf_spec, named_leaves


class RowFormat:
    """Spec and structure of a row before `on_write`. Static."""

    def __init__(self, items: tuple[tuple[str, tuple[int, ...], str], ...], structure: Any):
        self.items, self.structure = items, structure

    @property
    def spec(self) -> Spec:
        """Shape and dtype of each leaf by name."""
        return {name: jax.ShapeDtypeStruct(shape, jax.numpy.dtype(dtype)) for name, shape, dtype in self.items}

    @property
    def example(self) -> PyTree:
        """One row, as `jax.ShapeDtypeStruct`s."""
        return self.structure.unflatten(self.spec.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowFormat) and (self.items, self.structure) == (other.items, other.structure)

    def __hash__(self) -> int:
        return hash((self.items, self.structure))

    def __repr__(self) -> str:
        return f"RowFormat({', '.join(f'{name}: {dtype}{list(shape)}' for name, shape, dtype in self.items)})"


def format_of(example: PyTree) -> RowFormat:
    """Return the format of a row of arrays, scalars or shapes."""
    leaves = {name: leaf_spec(leaf) for name, leaf in named_leaves(example).items()}
    items = tuple((name, tuple(leaf.shape), str(leaf.dtype)) for name, leaf in leaves.items())
    return RowFormat(items, jax.tree.structure(example))


def _to_bytes(aux: Any) -> bytes:
    structure = row_schema.encode(aux.structure)
    if (custom := row_schema.custom_node(structure)) is not None:
        raise TypeError(f"Buffer: rows contain {custom}, not exportable; expected dicts, lists or tuples.")
    return json.dumps([aux.items, structure]).encode()


def _from_bytes(data: Any) -> RowFormat:
    items, structure = json.loads(bytes(data).decode())
    return RowFormat(tuple((n, tuple(shape), dtype) for n, shape, dtype in items), row_schema.decode(structure))


jax.tree_util.register_static(RowFormat)
export.register_pytree_node_serialization(
    RowFormat, serialized_name="fbuf.RowFormat", serialize_auxdata=_to_bytes, deserialize_auxdata=_from_bytes
)

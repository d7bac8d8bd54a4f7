"""`RowFormat`: the structure, shapes and dtypes of rows before `on_write` transforms them.

`add` and `extend` check rows against it. It is a static part of the state: the buffer is constructed before the first row,
and stored rows do not determine it.
"""

from __future__ import annotations

import json
from typing import Any

import jax
from jax import export

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


def _encoded(tree: Any) -> Any:
    """Return JSON of dicts, lists and tuples of numbers."""
    if tree is None or type(tree) is int:
        return tree
    if type(tree) is dict and all(type(key) is str for key in tree):
        return {"dict": {key: _encoded(child) for key, child in tree.items()}}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_encoded(child) for child in tree]}
    raise TypeError(f"Buffer: rows contain {type(tree).__name__}, not exportable; expected dicts, lists or tuples.")


def _decoded(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, children),) = tree.items()
    if kind == "dict":
        return {key: _decoded(child) for key, child in children.items()}
    return (list if kind == "list" else tuple)(_decoded(child) for child in children)


def _to_bytes(aux: Any) -> bytes:
    order = aux.structure.unflatten(range(aux.structure.num_leaves))
    return json.dumps([aux.items, _encoded(order)]).encode()


def _from_bytes(data: Any) -> RowFormat:
    items, order = json.loads(bytes(data).decode())
    return RowFormat(tuple((n, tuple(shape), dtype) for n, shape, dtype in items), jax.tree.structure(_decoded(order)))


jax.tree_util.register_static(RowFormat)
export.register_pytree_node_serialization(
    RowFormat, serialized_name="fbuf.RowFormat", serialize_auxdata=_to_bytes, deserialize_auxdata=_from_bytes
)

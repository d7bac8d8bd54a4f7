"""The schema of rows as JSON: names, shapes and dtypes of leaves, and the structure of dicts, lists and tuples.

Other nodes (a NamedTuple, a registered dataclass) are custom code, which no file may import. They are stored by name, and
`load` then needs one row as an example.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from fbuf._core.pytree import Spec

_KINDS: tuple[tuple[str, type[Any]], ...] = (("dict", dict), ("ordered", collections.OrderedDict))


def name_of_type(kind: type[Any]) -> str:
    """Return `"module:qualname"`, the name of a type in files."""
    return f"{kind.__module__}:{kind.__qualname__}"


def encode(structure: Any) -> Any:
    """Return the JSON form of a treedef, whose leaves are their numbers."""
    return _encoded(structure.unflatten(range(structure.num_leaves)))


def _encoded(tree: Any) -> Any:
    if tree is None or type(tree) is int:
        return tree
    for name, kind in _KINDS:
        if type(tree) is kind and all(type(key) in (str, int) for key in tree):
            return {name: [[key, _encoded(child)] for key, child in tree.items()]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_encoded(child) for child in tree]}
    return {"own": name_of_type(type(tree))}


def custom_node(encoded: Any) -> str | None:
    """Return the name of the first custom node, if any."""
    return next((part["own"] for part in _parts(encoded) if "own" in part), None)


def _parts(encoded: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(encoded, Mapping):
        yield encoded
        for value in encoded.values():
            for child in value if isinstance(value, list) else ():
                yield from _parts(child[1] if isinstance(child, list) else child)


def decode(encoded: Any) -> Any:
    """Return the treedef of a structure without custom nodes."""
    return jax.tree.structure(_decoded(encoded))


def _decoded(encoded: Any) -> Any:
    if encoded is None or type(encoded) is int:
        return encoded
    ((kind, children),) = encoded.items()
    if kind == "list":
        return [_decoded(child) for child in children]
    if kind == "tuple":
        return tuple(_decoded(child) for child in children)
    return dict(_KINDS)[kind]((key, _decoded(child)) for key, child in children)


def leaves(spec: Spec) -> list[list[Any]]:
    """Return name, shape and dtype of each leaf."""
    return [[name, list(leaf.shape), str(leaf.dtype)] for name, leaf in spec.items()]


def spec_of(listed: list[list[Any]]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the spec of such a list."""
    return {name: jax.ShapeDtypeStruct(tuple(shape), jax.numpy.dtype(dtype)) for name, shape, dtype in listed}


def texts(spec: Mapping[str, Any]) -> dict[str, str]:
    """Return `"uint8[84, 84]"` by name."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in spec.items()}


def difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """Return one line for each name whose text differs; empty if none does."""
    lines = []
    for name in dict.fromkeys((*found, *expected)):
        here, wanted = found.get(name), expected.get(name)
        if here != wanted:
            lines.append(f"  {name or '(the row)'}: found {here or 'nothing'}, expected {wanted or 'nothing'}")
    return "\n".join(lines)

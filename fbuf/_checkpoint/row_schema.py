"""What rows are, as JSON: names, shapes, dtypes, and how dicts, lists and tuples hold them.

Nodes of other kinds (a NamedTuple, a registered dataclass) are a user's own code, which no file may name to be imported:
they are noted by name, and `load` then asks for one row as an example.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from fbuf._core.pytree import Spec

_KINDS: tuple[tuple[str, type[Any]], ...] = (("dict", dict), ("ordered", collections.OrderedDict))


def name_of_type(kind: type[Any]) -> str:
    """`"module:qualname"`, by which files speak of what they never import."""
    return f"{kind.__module__}:{kind.__qualname__}"


def encode(structure: Any) -> Any:
    """The JSON form of a treedef: leaves are their numbers."""
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


def own_node(encoded: Any) -> str | None:
    """The first node that is a user's own, if any is."""
    return next((part["own"] for part in _parts(encoded) if "own" in part), None)


def _parts(encoded: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(encoded, Mapping):
        yield encoded
        for value in encoded.values():
            for child in value if isinstance(value, list) else ():
                yield from _parts(child[1] if isinstance(child, list) else child)


def decode(encoded: Any) -> Any:
    """The treedef, of structures without nodes of the user's own."""
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
    """Name, shape and dtype of each leaf."""
    return [[name, list(leaf.shape), str(leaf.dtype)] for name, leaf in spec.items()]


def spec_of(listed: list[list[Any]]) -> dict[str, jax.ShapeDtypeStruct]:
    """The inverse; dtypes from the table of those that JAX has."""
    return {name: jax.ShapeDtypeStruct(tuple(shape), jax.numpy.dtype(dtype)) for name, shape, dtype in listed}


def texts(spec: Mapping[str, Any]) -> dict[str, str]:
    """`"uint8[84, 84]"` by name."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in spec.items()}


def difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str:
    """One line for each name whose text is not the same in both; empty where all are."""
    lines = []
    for name in dict.fromkeys((*found, *expected)):
        here, there = found.get(name), expected.get(name)
        if here != there:
            lines.append(f"  {name or '(the row)'}: found {here or 'nothing'}, expected {there or 'nothing'}")
    return "\n".join(lines)

"""What a Minari data set says its observations and actions are: Gymnasium spaces as JSON, flattened to leaves.

Dicts and tuples become nested dicts (a tuple's parts are "0", "1", ...). Text, and spaces whose values have no one shape,
are found here, before anything is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fbuf.interop._source import DTYPES, check_name, check_shape

MOST_DEPTH = 64


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of observations or actions.

    Attributes:
      name: Here: "obs/image".
      keys: From the space's root to it; text in a dict, an int in a tuple.
      shape, dtype: Of one value.
      refused: Not empty: why it cannot be a leaf.
    """

    name: str
    keys: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    refused: str = ""


def leaves_of(where: str, name: str, space: Any) -> list[Leaf]:
    """Leaves of a space, as `metadata.json` has it, under a name.

    Raises:
      ValueError: it is no such space.
    """
    try:
        value = json.loads(space) if isinstance(space, str) else space
    except (ValueError, RecursionError):
        raise ValueError(f"{where}: the space of '{name}' is no JSON. The data set is damaged.") from None
    return list(_walk(where, name, (), value))


def _walk(where: str, name: str, keys: tuple[str | int, ...], space: Any) -> Iterator[Leaf]:
    kind = space.get("type") if isinstance(space, Mapping) else None
    parts = space.get("subspaces") if isinstance(space, Mapping) else None
    if len(keys) > MOST_DEPTH:
        raise ValueError(f"{where}: the space of '{name[:80]}' is nested too deep. Do not load this data set.")
    if kind == "Dict" and isinstance(parts, Mapping):
        for key in sorted(parts):
            yield from _walk(where, check_name(where, f"{name}/{key}"), (*keys, key), parts[key])
    elif kind == "Tuple" and isinstance(parts, list):
        for number, part in enumerate(parts):
            yield from _walk(where, f"{name}/{number}", (*keys, number), part)
    elif kind in ("Box", "Discrete", "MultiDiscrete", "MultiBinary"):
        yield _array(where, name, keys, kind, space)
    elif kind == "Text":
        yield Leaf(name, keys, (), np.dtype(bool), "is text (a Text space), which is no array")
    else:
        yield Leaf(
            name, keys, (), np.dtype(bool), f"is of the space {str(kind)[:40]!r}, whose values have no one shape"
        )


def _array(where: str, name: str, keys: tuple[str | int, ...], kind: str, space: Mapping[str, Any]) -> Leaf:
    if kind == "Discrete":
        return Leaf(name, keys, (), np.dtype(np.int64))
    if kind == "MultiBinary":
        number = space.get("n")
        shape: Any = number if isinstance(number, list) else [number]
        return Leaf(name, keys, check_shape(where, shape), np.dtype(np.int8))
    shape = space.get("shape") if kind == "Box" else np.shape(space.get("nvec", ()))
    dtype = DTYPES.get(str(space.get("dtype")))
    if dtype is None:
        what = f"is {str(space.get('dtype'))[:40]!r}; expected plain numbers"
        return Leaf(name, keys, (), np.dtype(bool), what)
    return Leaf(name, keys, check_shape(where, shape), dtype)

"""Rows of `Ragged` inside jit: columns of arrays, those with a maximum padded to it.

Rows whose ragged part is stored already (they bring tickets) come this way too, eager or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._bridge.lazy_rows import length_name
from fbuf._core import arguments
from fbuf._core.pytree import PyTree, Spec, leaf_spec
from fbuf._core.sample import TICKET
from fbuf._host.ragged.column import RaggedLeaf
from fbuf.storages._ragged.schema import flatten


class Parsed(NamedTuple):
    """Checked rows."""

    leaves: dict[str, Any]  # arrays [*leading, *item]; TICKET is zeros where `values` are still to be stored
    values: list[list[Any]] | None  # of each ragged leaf N * E values; None: nothing is left to store eagerly


def traced(
    call: str, given: PyTree, spec: Spec, leaves: tuple[RaggedLeaf, ...], lead: tuple[int | None, ...], axes: str
) -> Parsed:
    """Rows inside jit: columns of dense leaves, and of those with a maximum."""
    padded = {leaf.name: leaf for leaf in leaves if leaf.maximum is not None}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{call}: rows are {type(given).__name__}; inside jit expected a dict of arrays [{axes}, ...]. Call it outside "
            f"jit, or stack the rows: {{'reward': jnp.stack(rewards)}}."
        )
    flat = flatten(call, given, [leaf.name for leaf in leaves])
    for leaf in leaves:
        if leaf.name in flat and leaf.maximum is None and TICKET not in flat:
            raise TypeError(
                f"{call}: leaf '{leaf.name}' ({leaf.kind}) has no maximum, so it cannot be stored inside jit, where everything "
                f"is an array of a known shape. Call {call.split('.')[-1]} outside jit, leave the leaf out, or (arrays) "
                f"declare its largest shape: storages.Ragged(maximum={{'{leaf.name}': (...)}})."
            )
    if TICKET not in flat and not padded:
        some = leaves[0].name if leaves else "obs"
        raise TypeError(
            f"{call}: rows of this buffer have no leaf with a maximum, so they can be added eagerly only. Call it outside jit, "
            f"or declare the largest shape of an array leaf: storages.Ragged(maximum={{'{some}': (...)}})."
        )
    lengths = {length_name(name): name for name in padded}
    if TICKET in flat:  # stored already
        flat = {n: x for n, x in flat.items() if n not in padded and n not in lengths}
    dense = {n: s for n, s in spec.items() if n not in padded and n not in lengths and (n != TICKET or TICKET in flat)}
    own = {n: x for n, x in flat.items() if n not in padded and n not in lengths}
    out = (
        dict(arguments.check_rows(call, own, dense, jax.tree.structure(dict(dense)), lead, axes))
        if dense or own
        else {}
    )
    if TICKET in flat:
        return Parsed(out, None)
    head = next((x.shape[: len(lead)] for x in out.values()), None)
    for name in padded:
        if name not in flat and length_name(name) in flat:
            raise ValueError(f"{call}: '{length_name(name)}' is given without '{name}'. Give both, or none.")
    for name in [n for n in padded if n in flat]:
        array, length, head = _pad(call, padded[name], flat[name], flat.get(length_name(name)), spec, head, lead, axes)
        out |= {name: array, length_name(name): length}
    if head is None:
        raise ValueError(f"{call}: rows have no leaves; expected {', '.join(n for n in spec if n != TICKET)}.")
    for name in [n for n in padded if n not in flat]:
        out[name] = jnp.zeros((*head, *spec[name].shape), spec[name].dtype)
        out[length_name(name)] = jnp.full((*head, *spec[length_name(name)].shape), -1, jnp.int32)
    return Parsed(out, None)


def _pad(
    call: str,
    leaf: RaggedLeaf,
    value: Any,
    lengths: Any,
    spec: Spec,
    head: Any,
    lead: tuple[int | None, ...],
    axes: str,
) -> tuple[jax.Array, jax.Array, tuple[int, ...]]:
    want, got, cut = spec[leaf.name], leaf_spec(value), len(lead)
    assert leaf.maximum is not None
    if got.dtype != want.dtype:
        raise TypeError(
            f"{call}: leaf '{leaf.name}' is {got.dtype}; this buffer was initialised with {want.dtype}. "
            f"Cast with x.astype(jnp.{want.dtype})."
        )
    item, found = got.shape[cut:], got.shape[:cut]
    fits = len(item) == len(want.shape) and all(a <= b for a, b in zip(item, want.shape, strict=True))
    expected = tuple(lead) if head is None else head
    if not fits or len(found) != cut or any(n not in (None, m) for n, m in zip(expected, found, strict=True)):
        inner = "".join(f", <= {n}" for n in want.shape)
        raise ValueError(
            f"{call}: leaf '{leaf.name}' has shape {list(got.shape)}; expected [{axes}{inner}] (its maximum is "
            f"{list(want.shape)}), with the leading axes of the other leaves{'' if head is None else f', {list(head)}'}. Cut "
            f"it, or declare a larger maximum."
        )
    array = jnp.asarray(value)
    array = jnp.pad(array, [(0, 0)] * cut + [(0, b - a) for a, b in zip(item, want.shape, strict=True)])
    if lengths is None:
        length = jnp.broadcast_to(jnp.asarray(item, jnp.int32), (*found, len(item)))
    else:
        length = arguments.check_array(call, f"leaf '{length_name(leaf.name)}'", lengths, (*found, len(item)), "i")
        # What the array does not have is beyond any maximum: the store refuses the row.
        length = length.astype(jnp.int32)
        have, most = (jnp.asarray(np.broadcast_to(np.array(n, np.int32), length.shape)) for n in (item, want.shape))
        length = jnp.where((length > have) & (length <= most), most + jnp.int32(1), length)
    return array, length, found

"""What `Mixture` checks: its buffers, its fractions, and what its verbs are given. Messages say what to write instead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.checks import check_batch_size, check_index
from fbuf._core import arguments
from fbuf._core.pytree import named_leaves, spec_of
from fbuf._core.sample import Index
from fbuf._interfaces.storage import RaggedStorage
from fbuf._mixture.quota import counted
from fbuf._mixture.state import MixtureIndex

_TOLERANCE = 1e-6


def checked_buffers(buffers: Any) -> tuple[tuple[str, Buffer], ...]:
    """Names and buffers, in order."""
    pairs = tuple(buffers.items()) if isinstance(buffers, Mapping) else buffers
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            f"Mixture: buffers is {type(buffers).__name__}; expected a dict. Write "
            f'Mixture({{"online": buffer, "offline": other}}, ...).'
        )
    if not pairs:
        raise ValueError('Mixture: there are no buffers; expected one or more. Write Mixture({"online": buffer}).')
    for name, buffer in pairs:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(
                f'Mixture: a buffer is named {name!r}; expected text without "/". Write {{"online": buffer}}.'
            )
        if not isinstance(buffer, Buffer):
            raise TypeError(f"Mixture: '{name}' is {type(buffer).__name__}; expected a Buffer. States go to `init`.")
        if buffer.prefetch:
            raise ValueError(
                f"Mixture: '{name}' has prefetch={buffer.prefetch}, but a mixture draws what it hands out; expected 0. Write "
                f"dataclasses.replace(buffer, prefetch=0)."
            )
        if isinstance(buffer.storage, RaggedStorage):
            raise TypeError(
                f"Mixture: '{name}' has {buffer.storage!r}, whose leaves need not be arrays; expected arrays, which can stand "
                f"side by side. Use storages.Compressed(), Host() or Device()."
            )
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"Mixture: two buffers are named '{twice}'; expected another name for each. Rename one.")
    return pairs


def checked_fractions(fractions: Any, names: Sequence[str]) -> tuple[float, ...]:
    """In the order of the names; they come to 1."""
    values = fractions
    if isinstance(fractions, Mapping):
        check_names("Mixture: fractions", fractions, names)
        missing = [name for name in names if name not in fractions]
        if missing:
            raise ValueError(
                f"Mixture: fractions lacks '{missing[0]}'; expected one for each of {', '.join(names)}. Write 0.0 for none."
            )
        values = tuple(fractions[name] for name in names)
    if not isinstance(values, tuple) or len(values) != len(names):
        raise TypeError(
            f"Mixture: fractions is {fractions!r}; expected a dict with one for each of {', '.join(names)}. Write "
            f"fractions={{'{names[0]}': ...}}."
        )
    out = tuple(_share("Mixture", name, value) for name, value in zip(names, values, strict=True))
    if abs(sum(out) - 1) > _TOLERANCE:
        raise ValueError(
            f"Mixture: fractions come to {sum(out):g}; expected 1. Divide each by {sum(out):g}."
            if sum(out)
            else "Mixture: all fractions are 0; expected that they come to 1. Leave them out for equal ones."
        )
    return out


def check_names(call: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises for a name that no buffer has."""
    for name in given:
        if name not in names:
            raise ValueError(f"{call} names '{name}', but the buffers are {', '.join(names)}. Use one of those.")


def _share(call: str, name: str, value: Any) -> float:
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not 0 <= float(value) <= 1:
        fix = " Fractions that change go through sample(..., fractions=...)." if call == "Mixture" else ""
        raise ValueError(f"{call}: the fraction of '{name}' is {value!r}; expected a number from 0 to 1.{fix}")
    return float(value)


def traced_fractions(call: str, given: Any, names: Sequence[str], usual: Sequence[float]) -> jax.Array:
    """float32[S] of numbers by name, traced or not; buffers that are not named share the rest as they `usual`ly do.

    Raises:
      TypeError, ValueError: no dict of numbers; or, where values are known, they are not from 0 to 1, or do not come to 1.
    """
    if not isinstance(given, Mapping) or not given:
        raise TypeError(
            f"{call}: fractions is {given!r}; expected a dict of numbers. Write fractions={{'{names[0]}': schedule(step)}}."
        )
    check_names(f"{call}: fractions", given, names)
    known = 0.0
    for name, value in given.items():
        if isinstance(value, (str, bytes, bool)) or not hasattr(value, "dtype") and not isinstance(value, (int, float)):
            raise TypeError(f"{call}: the fraction of '{name}' is {value!r}; expected a number.")
        if np.shape(value) != ():
            shape = list(np.shape(value))
            raise ValueError(f"{call}: the fraction of '{name}' has shape {shape}; expected one number. Write x[0].")
        if isinstance(value, jax.Array):
            if value.dtype == jnp.bool_ or jnp.iscomplexobj(value):
                raise TypeError(f"{call}: the fraction of '{name}' is {value.dtype}[]; expected a real number.")
            known = math.nan
        else:
            known += _share(call, name, value)
    rest = [name for name in names if name not in given]
    weights = {name: weight for name, weight in zip(names, usual, strict=True) if name in rest}
    if known > 1 + _TOLERANCE or (not rest and known < 1 - _TOLERANCE):
        raise ValueError(f"{call}: fractions come to {known:g}; expected 1. Divide each by {known:g}.")
    if rest and not sum(weights.values()):
        raise ValueError(
            f"{call}: fractions names {', '.join(given)}, and what is left is for {', '.join(rest)}, whose fraction of the "
            f"mixture is 0; expected one for each. Name them too."
        )
    values = {name: counted(jnp.asarray(value, jnp.float32)) for name, value in given.items()}
    left = jnp.maximum(jnp.float32(1) - sum(values.values(), jnp.zeros((), jnp.float32)), jnp.float32(0))
    for name, weight in weights.items():
        values[name] = left * jnp.float32(weight / sum(weights.values()))
    return jnp.stack([values[name] for name in names])


def checked_sizes(call: str, batch_size: Any, names: Sequence[str]) -> tuple[int, ...]:
    """Rows of each buffer, for quota="all"."""
    if not isinstance(batch_size, Mapping):
        raise TypeError(
            f'{call}: batch_size is {batch_size!r}, but quota is "all"; expected a dict with a number of rows for each buffer. '
            f"Write {{{', '.join(f'{name!r}: 32' for name in names)}}}."
        )
    check_names(f"{call}: batch_size", batch_size, names)
    missing = [name for name in names if name not in batch_size]
    if missing:
        raise ValueError(
            f"{call}: batch_size lacks '{missing[0]}'; expected one for each of {', '.join(names)}. Add it."
        )
    for name in names:
        check_batch_size(f"{call}: '{name}'", batch_size[name])
    return tuple(int(batch_size[name]) for name in names)


def checked_beta(call: str, beta: Any) -> jax.Array | None:
    """float32[]."""
    if beta is None:
        return None
    if np.shape(beta) != () or isinstance(beta, (str, bytes, bool)):
        raise ValueError(f"{call}: beta is {beta!r}; expected one number. Write beta=1.0.")
    if not isinstance(beta, jax.Array) and not 0 <= float(beta) < math.inf:
        raise ValueError(f"{call}: beta is {beta!r}; expected a finite number >= 0.")
    return jnp.asarray(beta, jnp.float32)


def checked_index(call: str, index: Any) -> MixtureIndex:
    """The index of a batch, of one axis, with the dtypes it has to have."""
    if not isinstance(index, MixtureIndex):
        raise TypeError(
            f"{call}: index is {type(index).__name__}; expected the MixtureIndex of a batch, which says which buffer a row "
            f"came from. Pass batch.index."
        )
    own = check_index(call, Index(index.slot, index.ticket))
    source = arguments.check_array(call, "index.source", index.source, own.slot.shape, "i")
    return MixtureIndex(source.astype(jnp.int32), own.slot, own.ticket)


def check_alike(call: str, parts: Sequence[tuple[str, Any]]) -> None:
    """Raises unless data of all buffers, arrays or shapes, have the same leaves but for their first axis.

    Raises:
      ValueError: another structure, or a leaf of another shape or dtype.
    """
    first, one = parts[0]
    structure: Any = jax.tree.structure(one)
    for other, two in parts[1:]:
        if structure == jax.tree.structure(two) and _texts(one) == _texts(two):
            continue
        ours, theirs = _texts(one), _texts(two)
        lines = [
            f"  {name or '(the row)'}: {ours.get(name, 'nothing')} in '{first}', {theirs.get(name, 'nothing')} in '{other}'"
            for name in dict.fromkeys((*ours, *theirs))
            if ours.get(name) != theirs.get(name)
        ]
        if not lines:
            lines = [f"  {structure} in '{first}', {jax.tree.structure(two)} in '{other}'"]
        raise ValueError(
            f"{call}: what the buffers hand out is not alike; expected the same leaves of the same shapes and dtypes:\n"
            + "\n".join(lines)
            + "\nBring both to one form with Buffer(on_read=...), as fbuf.transforms.Select, Rename and Cast do, or give them "
            "the same view."
        )


def _texts(data: Any) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape[1:])}" for name, leaf in spec_of(named_leaves(data)).items()}

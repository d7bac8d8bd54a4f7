"""Check the buffers, fractions and arguments of `Mixture`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.checks import check_batch_size, check_number
from fbuf._core.pytree import leaf_spec, named_leaves, needs_x64, spec_of
from fbuf._members.quota import counted
from fbuf._members.split import check_draw_mode
from fbuf.sharded import Sharded

_TOLERANCE = 1e-6


def checked_buffers(buffers: Any) -> tuple[tuple[str, Any], ...]:
    """Return names and buffers, in order."""
    pairs = tuple(buffers.items()) if isinstance(buffers, Mapping) else buffers
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(f'Mixture: buffers is {type(buffers).__name__}; expected a dict {{"online": buffer, ...}}.')
    if not pairs:
        raise ValueError('Mixture: buffers is empty. Write Mixture({"online": buffer, ...}).')
    for name, buffer in pairs:
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f'Mixture: buffer name is {name!r}; expected text without "/".')
        if not isinstance(buffer, Buffer | Sharded):
            raise TypeError(
                f"Mixture: '{name}' is {type(buffer).__name__}; expected a Buffer. States go to the methods."
            )
        if isinstance(buffer, Sharded):
            _check_sharded(name, buffer)
            continue
        if buffer.prefetch:
            raise ValueError(f"Mixture: '{name}' has prefetch={buffer.prefetch}; expected 0.")
        if buffer.storage.ragged:
            raise TypeError(f"Mixture: '{name}' has {buffer.storage!r}, not all arrays. Use another storage.")
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"Mixture: two buffers are named '{twice}'; expected distinct names.")
    first, one = pairs[0]
    for name, other in pairs[1:]:
        if type(other) is not type(one):
            raise TypeError(
                f"Mixture: '{name}' is {type(other).__name__}, but '{first}' is {type(one).__name__}; expected all of one "
                f"kind. Use fbuf.sharded.Sharded(buffer, mesh) for each."
            )
        if isinstance(one, Sharded) and (other.mesh, other.axis) != (one.mesh, one.axis):
            raise ValueError(
                f"Mixture: '{name}' is over another mesh or axis than '{first}'; expected the same for all."
            )
    return pairs


def _check_sharded(name: str, sharded: Sharded) -> None:
    """Raise unless each shard can draw its part of a batch by itself."""
    if sharded.draw != "local":
        raise ValueError(f"Mixture: '{name}' has draw={sharded.draw!r}; expected 'local'. Leave it out.")
    if sharded.shards > 1:
        fix = "which mixtures over several shards cannot weigh. Use samplers.Uniform() or Prioritized()."
        check_draw_mode(f"Mixture: '{name}'", sharded.buffer.sampler, fix)


def checked_fractions(fractions: Any, names: Sequence[str]) -> tuple[float, ...]:
    """Return the fractions in the order of the names, with sum 1."""
    values = fractions
    if isinstance(fractions, Mapping):
        check_names("Mixture: fractions", fractions, names, complete=True)
        values = tuple(fractions[name] for name in names)
    if not isinstance(values, tuple) or len(values) != len(names):
        raise TypeError(f"Mixture: fractions is {fractions!r}; expected a dict of {', '.join(names)}.")
    for name, value in zip(names, values, strict=True):
        check_number("Mixture", f"the fraction of '{name}'", value, 1)
    out = tuple(map(float, values))
    if abs(sum(out) - 1) > _TOLERANCE:
        raise ValueError(f"Mixture: the sum of fractions is {sum(out):g}; expected 1.")
    return out


def check_names(call: str, mapping: Mapping[str, Any], names: Sequence[str], complete: bool = False) -> None:
    """Raise for unknown names, and for missing ones if `complete`."""
    for name in mapping:
        if name not in names:
            raise ValueError(f"{call} names '{name}'; expected the buffers {', '.join(names)}.")
    missing = next((name for name in names if complete and name not in mapping), None)
    if missing is not None:
        raise ValueError(f"{call} lacks '{missing}'; expected one for each of {', '.join(names)}.")


def traced_fractions(call: str, fractions: Any, names: Sequence[str], usual: Sequence[float]) -> jax.Array:
    """Return fractions float32[S] by name, traced or not; other buffers share the rest by their `usual` fractions.

    Raises:
      TypeError, ValueError: not a dict of numbers, or known values outside [0, 1] or with another sum than 1.
    """
    if not isinstance(fractions, Mapping) or not fractions:
        raise TypeError(f"{call}: fractions is {fractions!r}; expected a dict. Write {{'{names[0]}': schedule(step)}}.")
    check_names(f"{call}: fractions", fractions, names)
    known = 0.0
    for name, value in fractions.items():
        check_number(call, f"the fraction of '{name}'", value, 1)
        known += math.nan if isinstance(value, jax.Array) else float(value)
    rest = [name for name in names if name not in fractions]
    weights = {name: weight for name, weight in zip(names, usual, strict=True) if name in rest}
    if known > 1 + _TOLERANCE or (not rest and known < 1 - _TOLERANCE):
        raise ValueError(f"{call}: the sum of fractions is {known:g}; expected 1.")
    if rest and not sum(weights.values()):
        raise ValueError(f"{call}: fractions lacks {', '.join(rest)}, of default fraction 0. Name them too.")
    values = {name: counted(jnp.asarray(value, jnp.float32)) for name, value in fractions.items()}
    left = jnp.maximum(jnp.float32(1) - sum(values.values(), jnp.zeros((), jnp.float32)), jnp.float32(0))
    for name, weight in weights.items():
        values[name] = left * jnp.float32(weight / sum(weights.values()))
    return jnp.stack([values[name] for name in names])


def checked_sizes(call: str, batch_size: Any, names: Sequence[str]) -> tuple[int, ...]:
    """Return the rows of each buffer, for quota="all"."""
    if not isinstance(batch_size, Mapping):
        fix = f"Write {{{', '.join(f'{name!r}: 32' for name in names)}}}."
        raise TypeError(f'{call}: batch_size is {batch_size!r}; expected a dict with quota="all". {fix}')
    check_names(f"{call}: batch_size", batch_size, names, complete=True)
    for name in names:
        check_batch_size(f"{call}: '{name}'", batch_size[name])
    return tuple(int(batch_size[name]) for name in names)


def checked_beta(call: str, beta: Any) -> jax.Array | None:
    """Return beta as float32[]."""
    if beta is None:
        return None
    check_number(call, "beta", beta)
    return jnp.asarray(beta, jnp.float32)


def refuse_64_bits(call: str, buffers: Iterable[tuple[str, Buffer]], states: Mapping[str, Any]) -> None:
    """Raise if rows have leaves that JAX cannot hold: the buffers' batches are joined inside jit."""
    for name, buffer in buffers:
        for leaf, spec in buffer.storage.spec(states[name].rows)[0].items() if buffer.storage.exact else ():
            if needs_x64(spec.dtype):
                raise TypeError(
                    f"{call}: leaf '{leaf}' of '{name}' is {spec.dtype}, which jit cannot hold while jax_enable_x64 is off. "
                    f"Sample that buffer alone, or give the leaf 32 bits, np.{leaf_spec(spec).dtype}(x) in the example."
                )


def check_same_leaves(call: str, parts: Sequence[tuple[str, Any]]) -> None:
    """Raise unless the data of all buffers, arrays or shapes, have equal leaves except for their first axis.

    Raises:
      ValueError: another structure, or a leaf of another shape or dtype.
    """
    first, one = parts[0]
    structure: Any = jax.tree.structure(one)
    for other, two in parts[1:]:
        ours, theirs = _describe_leaves(one), _describe_leaves(two)
        if structure == jax.tree.structure(two) and ours == theirs:
            continue
        lines = [
            f"  {name or '(the row)'}: {ours.get(name, 'nothing')} in '{first}', {theirs.get(name, 'nothing')} in '{other}'"
            for name in dict.fromkeys((*ours, *theirs))
            if ours.get(name) != theirs.get(name)
        ]
        if not lines:
            lines = [f"  {structure} in '{first}', {jax.tree.structure(two)} in '{other}'"]
        raise ValueError(
            f"{call}: batches of the buffers differ; expected equal leaves, shapes and dtypes:\n"
            + "\n".join(lines)
            + "\nConvert them with Buffer(on_read=...), for example fbuf.transforms.Select, Rename and Cast."
        )


def _describe_leaves(data: Any) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape[1:])}" for name, leaf in spec_of(named_leaves(data)).items()}

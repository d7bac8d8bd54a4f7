"""A mixture in a checkpoint: each buffer as if saved alone, under prefixed names, and the mixture's numbers.

Each member supports what a checkpoint of one buffer does: another storage or capacity, differing settings, the same errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.mixture import Mixture, MixtureState
from fbuf._buffer.mixture.state import COUNTERS
from fbuf._checkpoint import config_json
from fbuf._checkpoint.device_arrays import DeviceLeaf
from fbuf._checkpoint.parts import SavedPart
from fbuf._core.component import from_config
from fbuf._formats import checkpoint
from fbuf._host.io.directory import rollback
from fbuf.sharded import Sharded, ShardedMixture

KEYS = frozenset(("names", "mixture", "buffers", "extra", "replay"))
"""The keys of such a checkpoint's `meta`."""
_BUFFER_KEYS = ("buffer", "rows", "given", "rule", "placed", "shard", "shards")
AnyMixture = Mixture | ShardedMixture
Gathered = tuple[dict[str, Any], dict[str, Any]]


def prefix(number: int) -> str:
    """Return the prefix of a buffer's array names."""
    return f"buffers/{number}/"


def buffers_by_prefix(mixture: Mixture) -> dict[str, Buffer]:
    """Return the buffers by the prefix of their array names."""
    return {prefix(number): buffer for number, (_, buffer) in enumerate(mixture.members)}


def config_of(mixture: AnyMixture) -> Mixture:
    """Return the mixture whose fractions and other settings these are."""
    return mixture.mixture if isinstance(mixture, ShardedMixture) else mixture


def check_state(call: str, mixture: AnyMixture, state: Any, of_buffer: Callable[[str, Any, Any], None]) -> None:
    """Raise if the state cannot be saved; `of_buffer` checks a member."""
    if not isinstance(state, MixtureState):
        usage = f"{call}(mixture, state)" if call.endswith("SaveArgs") else f"{call}(path, mixture, state)"
        raise TypeError(f"{call}: state is {type(state).__name__}; expected a MixtureState. Write {usage}.")
    names = config_of(mixture).names
    if set(state.buffers) != set(names):
        raise ValueError(f"{call}: the state is of {', '.join(state.buffers)}; expected {', '.join(names)}.")
    for name in names:
        of_buffer(call, mixture[name], state[name])


def gather(mixture: AnyMixture, state: MixtureState, of_buffer: Callable[[Any, Any], Gathered]) -> Gathered:
    """Return sources by name, and their description for the manifest; `of_buffer` returns those of a member."""
    arrays: dict[str, Any] = {}
    parts = []
    common: dict[str, Any] = {}
    config = config_of(mixture)
    for number, name in enumerate(config.names):
        own, about = of_buffer(mixture[name], state[name])
        arrays |= {prefix(number) + key: value for key, value in own.items()}
        parts.append({key: about.pop(key) for key in _BUFFER_KEYS if key in about})
        common = about
    for name, leaf in _numbers(state).items():
        arrays[f"mixture/{name}"] = DeviceLeaf(jnp.asarray(np.asarray(leaf)), whole=True)
    settings = {f.name: config_json.to_json(getattr(config, f.name)) for f in dataclasses.fields(config)}
    del settings["buffers"]
    return arrays, common | {"names": list(config.names), "mixture": settings, "buffers": parts}


def _numbers(state: MixtureState) -> dict[str, jax.Array]:
    found = {"beta": state.beta, "counters": state.counters}
    return found if state.fractions is None else found | {"fractions": state.fractions}


def restore(
    call: str, saved: checkpoint.Saved, mixture: Any, examples: Any, resize: Any, of_buffer: Callable[..., Any]
) -> tuple[AnyMixture, MixtureState]:
    """Return the mixture and its state; `of_buffer(part, buffer, example, resize)` loads a member."""
    path, names = saved.path, list(saved.meta["names"])
    if mixture is not None and not isinstance(mixture, AnyMixture):
        raise checkpoint.SchemaError(
            f"{call}: {path} holds a mixture of {', '.join(names)}, not a {type(mixture).__name__}. Write {call}(path)."
        )
    if mixture is not None and list(config_of(mixture).names) != names:
        raise checkpoint.SchemaError(
            f"{call}: {path} holds a mixture of {', '.join(names)}; expected {', '.join(config_of(mixture).names)}."
        )
    for what, given in (("example", examples), ("resize", resize)):
        if given is not None and given is not True and not isinstance(given, Mapping):
            raise TypeError(
                f"{call}: {what} is {type(given).__name__}; expected a dict. Write {what}={{{names[0]!r}: ...}}."
            )
        for name in given if isinstance(given, Mapping) else ():
            if name not in names:
                raise ValueError(f"{call}: {what} names '{name}', but the buffers are {', '.join(names)}.")
    buffers: dict[str, Any] = {}
    states: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for number, name in enumerate(names):
            part = SavedPart(saved, prefix(number), saved.meta["buffers"][number])
            buffer = None if mixture is None else mixture[name]
            saved_path = part.meta["buffer"]["storage"].get("path")
            own = buffer.buffer if isinstance(buffer, Sharded) else buffer
            storage = saved_path if own is None else getattr(own.storage, "path", None)
            stack.enter_context(rollback(storage if isinstance(storage, str) else None))
            example = examples.get(name) if isinstance(examples, Mapping) else None
            size = resize.get(name) if isinstance(resize, Mapping) else resize
            buffers[name], states[name] = of_buffer(part, buffer, example, size)
        made: AnyMixture
        if mixture is None:
            made = _build_mixture(call, saved, buffers)
        else:
            plain = {name: b.buffer if isinstance(b, Sharded) else b for name, b in buffers.items()}
            made = dataclasses.replace(config_of(mixture), buffers=plain)
            if isinstance(mixture, ShardedMixture):
                made = dataclasses.replace(mixture, mixture=made)
        fractions = config_of(made).first_fractions()
        if fractions is not None and "mixture/fractions" in saved.arrays:
            fractions = _load_number(saved, "fractions", (len(names),), np.float32)
        state = MixtureState(
            buffers=states,
            fractions=fractions,
            beta=_load_number(saved, "beta", (), np.float32),
            counters=_load_number(saved, "counters", (len(COUNTERS),), np.uint32),
        )
        if mixture is not None:  # the given mixture's views may differ from the saved ones
            made.check_same_batches(call, states)
    return made, state


def _build_mixture(call: str, saved: checkpoint.Saved, buffers: dict[str, Buffer]) -> Mixture:
    settings = saved.meta["mixture"]
    try:
        return Mixture(buffers, **{key: from_config(value) for key, value in settings.items()})
    except (TypeError, ValueError) as error:
        raise checkpoint.VersionError(f"{call}: {saved.path} was saved by a later release of fbuf ({error}).") from None


def _load_number(saved: checkpoint.Saved, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    found = saved.arrays[f"mixture/{name}"]
    if found.dtype != dtype or found.shape != (shape or (1,)):
        got, want = f"{found.dtype}{list(found.shape)}", f"{np.dtype(dtype)}{list(shape)}"
        raise checkpoint.SchemaError(f"fbuf.load: {saved.path}: 'mixture/{name}' is {got}; expected {want}.")
    return jnp.array(np.asarray(found).reshape(shape))

"""A mixture in a checkpoint: each buffer as if it were saved alone, under names of its own, and the mixture's numbers.

So whatever holds of a checkpoint of one buffer (another storage or capacity, what may differ, what is refused) holds of each.
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
from fbuf._buffer.state import BufferState
from fbuf._checkpoint import config_json
from fbuf._checkpoint.device_arrays import DeviceLeaf
from fbuf._formats import checkpoint
from fbuf._host.io.directory import rollback
from fbuf._mixture import Mixture, MixtureState
from fbuf._mixture.state import COUNTERS

KEYS = frozenset(("names", "mixture", "buffers", "extra", "replay"))
"""Of the `meta` of such a checkpoint."""
_OF_A_BUFFER = ("buffer", "rows", "given", "rule", "placed")
Made = tuple[dict[str, Any], dict[str, Any]]


def prefix(number: int) -> str:
    """What names of a buffer's arrays begin with."""
    return f"buffers/{number}/"


def by_prefix(mixture: Mixture) -> dict[str, Buffer]:
    """Buffers, by what names of their arrays begin with."""
    return {prefix(number): buffer for number, (_, buffer) in enumerate(mixture.members)}


def check_state(call: str, mixture: Mixture, state: Any, one: Callable[[str, Any, Any], None]) -> None:
    """Refuses what cannot be saved; `one` is that of a buffer."""
    if not isinstance(state, MixtureState):
        usage = f"{call}(mixture, state)" if call.endswith("SaveArgs") else f"{call}(path, mixture, state)"
        raise TypeError(f"{call}: state is {type(state).__name__}; expected a MixtureState. Write {usage}.")
    if set(state.buffers) != set(mixture.names):
        raise ValueError(
            f"{call}: the state is of {', '.join(state.buffers)}; expected {', '.join(mixture.names)}, the mixture's. Use the "
            f"mixture that made it."
        )
    for name, buffer in mixture.members:
        one(call, buffer, state[name])


def gathered(mixture: Mixture, state: MixtureState, one: Callable[[Buffer, BufferState], Made]) -> Made:
    """Sources by name, and what the manifest says of them; `one` gives those of a buffer."""
    arrays: dict[str, Any] = {}
    parts = []
    common: dict[str, Any] = {}
    for number, (name, buffer) in enumerate(mixture.members):
        own, about = one(buffer, state[name])
        arrays |= {prefix(number) + key: value for key, value in own.items()}
        parts.append({key: about.pop(key) for key in _OF_A_BUFFER})
        common = about
    for name, leaf in _numbers(state).items():
        arrays[f"mixture/{name}"] = DeviceLeaf(jnp.asarray(leaf), whole=True)
    settings = {f.name: config_json.describe(getattr(mixture, f.name)) for f in dataclasses.fields(mixture)}
    del settings["buffers"]
    return arrays, common | {"names": list(mixture.names), "mixture": settings, "buffers": parts}


def _numbers(state: MixtureState) -> dict[str, jax.Array]:
    found = {"beta": state.beta, "counters": state.counters}
    return found if state.fractions is None else found | {"fractions": state.fractions}


class Part:
    """What of a checkpoint belongs to one buffer; to who loads it, a checkpoint of its own."""

    def __init__(self, saved: checkpoint.Saved, number: int):
        begin = prefix(number)
        self.path, self.verify = saved.path, saved.verify
        self.meta = saved.meta["buffers"][number] | {"extra": None, "replay": None}
        self.arrays = {name[len(begin) :]: a for name, a in saved.arrays.items() if name.startswith(begin)}

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(array.nbytes for array in self.arrays.values())


def restored(
    call: str, saved: checkpoint.Saved, mixture: Any, examples: Any, resize: Any, one: Callable[..., tuple[Any, Any]]
) -> tuple[Mixture, MixtureState]:
    """The mixture and its state; `one(part, buffer, example, resize)` loads a buffer."""
    path, names = saved.path, list(saved.meta["names"])
    if mixture is not None and not isinstance(mixture, Mixture):
        raise checkpoint.SchemaError(
            f"{call}: {path} holds a mixture of {', '.join(names)}, but a {type(mixture).__name__} is given; expected a "
            f"Mixture. Write {call}(path), or give the mixture."
        )
    if mixture is not None and list(mixture.names) != names:
        raise checkpoint.SchemaError(
            f"{call}: {path} holds a mixture of {', '.join(names)}; expected {', '.join(mixture.names)}. Use the same names "
            f"in the same order."
        )
    for what, given in (("example", examples), ("resize", resize)):
        if given is not None and given is not True and not isinstance(given, Mapping):
            raise TypeError(
                f"{call}: {what} is {type(given).__name__}, but {path} holds a mixture; expected a dict by name. Write "
                f"{what}={{{names[0]!r}: ...}}."
            )
        for name in given if isinstance(given, Mapping) else ():
            if name not in names:
                raise ValueError(
                    f"{call}: {what} names '{name}', but the buffers are {', '.join(names)}. Use one of those."
                )
    buffers: dict[str, Buffer] = {}
    states: dict[str, BufferState] = {}
    with contextlib.ExitStack() as stack:
        for number, name in enumerate(names):
            part, buffer = Part(saved, number), None if mixture is None else mixture[name]
            storage = part.meta["buffer"]["storage"].get("path") if buffer is None else _path_of(buffer)
            stack.enter_context(rollback(storage if isinstance(storage, str) else None))
            example = examples.get(name) if isinstance(examples, Mapping) else None
            size = resize.get(name) if isinstance(resize, Mapping) else resize
            buffers[name], states[name] = one(part, buffer, example, size)
        if mixture is None:
            made = _made(call, saved, buffers)
        else:
            made = dataclasses.replace(mixture, buffers=buffers)
        fractions = made.first_fractions()
        if fractions is not None and "mixture/fractions" in saved.arrays:
            fractions = _number(saved, "fractions", (len(names),), np.float32)
        state = MixtureState(
            buffers=states,
            fractions=fractions,
            beta=_number(saved, "beta", (), np.float32),
            counters=_number(saved, "counters", (len(COUNTERS),), np.uint32),
        )
        if mixture is not None:  # what is loaded into may hand out something else than what was saved
            made.check_alike(call, states)
    return made, state


def _made(call: str, saved: checkpoint.Saved, buffers: dict[str, Buffer]) -> Mixture:
    settings = saved.meta["mixture"]
    try:
        return Mixture(buffers, **{key: config_json.build(value) for key, value in settings.items()})
    except (TypeError, ValueError) as error:
        raise checkpoint.VersionError(
            f"{call}: {saved.path} was saved by a mixture with {settings}, which this release of fbuf does not know: {error}. "
            f"Use a later one."
        ) from None


def _path_of(buffer: Buffer) -> Any:
    return getattr(buffer.storage, "path", None)


def _number(saved: checkpoint.Saved, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    found = saved.arrays[f"mixture/{name}"]
    if found.dtype != dtype or found.shape != (shape or (1,)):
        raise checkpoint.SchemaError(
            f"fbuf.load: {saved.path}: 'mixture/{name}' is {found.dtype}{list(found.shape)}; expected {np.dtype(dtype)}"
            f"{list(shape)}. Load another checkpoint."
        )
    return jnp.array(np.asarray(found).reshape(shape))

"""A mixture in a checkpoint: each buffer as if saved alone, under prefixed names.

Each member supports what a checkpoint of one buffer does: another storage or capacity, differing settings, the same errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from fbuf._buffer.buffer import Buffer
from fbuf._checkpoint import config_json, sharded
from fbuf._checkpoint.parts import SavedPart
from fbuf._checkpoint.plain import Gathered
from fbuf._core.component import from_config
from fbuf._formats import checkpoint
from fbuf._host.io.directory import rollback
from fbuf._members.mixture import Mixture
from fbuf._members.mixture.draw import buffer_of
from fbuf.sharded import Sharded

KEYS = frozenset(("names", "mixture", "buffers", "extra", "replay"))
"""The keys of such a checkpoint's `meta`."""
_BUFFER_KEYS = ("buffer", "rows", "given", "rule", "placed", "shard", "shards")


def prefix(number: int) -> str:
    """Return the prefix of a buffer's array names."""
    return f"buffers/{number}/"


def buffers_by_prefix(mixture: Mixture) -> dict[str, Buffer]:
    """Return the buffers by the prefix of their array names."""
    return {prefix(number): buffer for number, (_, buffer) in enumerate(mixture.members)}


def mesh_of(buffer: Any) -> Any:
    """Return the mesh of a sharded buffer, or of the sharded buffers of a mixture; None for others."""
    one = buffer.members[0][1] if isinstance(buffer, Mixture) else buffer
    return one.mesh if isinstance(one, Sharded) else None


def check_states(call: str, mixture: Mixture, states: Any) -> None:
    """Raise unless there is a state for each buffer."""
    names = ", ".join(mixture.names)
    if not isinstance(states, Mapping):
        usage = f"{call}(mixture, states)" if call.endswith("SaveArgs") else f"{call}(path, mixture, states)"
        raise TypeError(
            f"{call}: states is {type(states).__name__}; expected a dict of those of {names}. Write {usage}."
        )
    if set(states) != set(mixture.names):
        raise ValueError(f"{call}: states of {', '.join(map(str, states))}; expected {names}.")


def gather(mixture: Mixture, states: Mapping[str, Any]) -> Gathered:
    """Return sources by name, and their description for the manifest."""
    arrays: dict[str, Any] = {}
    parts = []
    common: dict[str, Any] = {}
    for number, (name, buffer) in enumerate(mixture.members):
        saved, about = sharded.gather(buffer, states[name])
        arrays |= {prefix(number) + key: value for key, value in saved.items()}
        parts.append({key: about.pop(key) for key in _BUFFER_KEYS if key in about})
        common = about
    settings = {f.name: config_json.to_json(getattr(mixture, f.name)) for f in dataclasses.fields(mixture)}
    del settings["buffers"]
    return arrays, common | {"names": list(mixture.names), "mixture": settings, "buffers": parts}


def restore(
    call: str, saved: checkpoint.Saved, mixture: Any, examples: Any, resize: Any, verify: Any, cut: bool
) -> tuple[Mixture, dict[str, Any]]:
    """Return the mixture and the states of its buffers."""
    path, names = saved.path, list(saved.meta["names"])
    if mixture is not None and not isinstance(mixture, Mixture):
        raise checkpoint.SchemaError(
            f"{call}: {path} holds a mixture of {', '.join(names)}, not a {type(mixture).__name__}. Write {call}(path)."
        )
    if mixture is not None and list(mixture.names) != names:
        raise checkpoint.SchemaError(
            f"{call}: {path} holds a mixture of {', '.join(names)}; expected {', '.join(mixture.names)}."
        )
    for what, value in (("example", examples), ("resize", resize)):
        if value is not None and value is not True and not isinstance(value, Mapping):
            raise TypeError(
                f"{call}: {what} is {type(value).__name__}; expected a dict. Write {what}={{{names[0]!r}: ...}}."
            )
        for name in value if isinstance(value, Mapping) else ():
            if name not in names:
                raise ValueError(f"{call}: {what} names '{name}', but the buffers are {', '.join(names)}.")
    buffers: dict[str, Any] = {}
    states: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for number, name in enumerate(names):
            part = SavedPart(saved, prefix(number), saved.meta["buffers"][number])
            buffer = None if mixture is None else mixture[name]
            saved_path = part.meta["buffer"]["storage"].get("path")
            storage = saved_path if buffer is None else buffer_of(buffer).storage.folder
            stack.enter_context(rollback(storage if isinstance(storage, str) else None))
            example = examples.get(name) if isinstance(examples, Mapping) else None
            size = resize.get(name) if isinstance(resize, Mapping) else resize
            buffers[name], states[name] = sharded.restore(call, part, buffer, example, size, verify, cut)
        made = (
            _build_mixture(call, saved, buffers) if mixture is None else dataclasses.replace(mixture, buffers=buffers)
        )
    return made, states


def _build_mixture(call: str, saved: checkpoint.Saved, buffers: dict[str, Buffer]) -> Mixture:
    settings = saved.meta["mixture"]
    try:
        return Mixture(buffers, **{key: from_config(value) for key, value in settings.items()})
    except (TypeError, ValueError) as error:
        raise checkpoint.VersionError(f"{call}: {saved.path} was saved by a later release of fbuf ({error}).") from None

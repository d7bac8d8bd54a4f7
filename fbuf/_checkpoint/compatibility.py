"""Whether a checkpoint and the buffer it is to be loaded into go together, and how.

What a state means must agree: lanes, writer, sampler (but for numbers that are leaves of the state, and settings that it does
not depend on), the view's rule. What only says how to read it may differ: the view beyond its rule, prefetch, where files lie.
Another storage or capacity is another state of the same rows, which `fbuf._checkpoint.resize` makes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fbuf._buffer import transforms
from fbuf._buffer.buffer import Buffer
from fbuf._checkpoint import config_json, row_schema
from fbuf._checkpoint.config_json import shown
from fbuf._core.pytree import Spec, spec_of
from fbuf._core.row_format import RowFormat, given
from fbuf._formats import checkpoint
from fbuf._interfaces.writer import ReadOnly
from fbuf.storages import Ragged

_FREE_STORAGE = ("path", "memory", "cache", "on_expired", "on_full", "encode", "decode")
"""Settings of storages that their arrays do not depend on."""
_FREE_SAMPLER: dict[str, tuple[str, ...] | None] = {
    "fbuf.samplers.Prioritized": None,  # all: what else the state depends on shows in its leaves
    "fbuf.samplers.Ranked": None,
    "fbuf.samplers.Epoch": ("drop_last",),
    "fbuf.samplers.Consume": ("times",),
    "fbuf.samplers.Staleness": ("maximum", "half_life"),
}


class Match(NamedTuple):
    """How to load."""

    reader: Buffer  # whose state the checkpoint is
    target: Buffer  # whose state is wanted
    keeps_ahead: bool  # what was drawn ahead can be handed out


def match(call: str, path: str, meta: Mapping[str, Any], buffer: Buffer | None, resize: Any) -> Match:
    """The buffers of a load.

    Raises:
      SchemaError: they do not go together; or what is saved names something of a user's own, and no buffer is given.
      VersionError: the buffer that was saved used a setting that was removed.
    """
    config = {"on_write": None, "on_read": None, **_current(call, path, meta["buffer"])}  # earlier releases had none
    if buffer is None:
        lacking = config_json.missing(config)
        if lacking is not None:
            raise checkpoint.SchemaError(
                f"{call}: {path} was saved by a buffer with {lacking}, which no file can hold; expected the buffer. It was\n"
                f"  {shown(config)}\nWrite {call}(path, buffer)."
            )
        reader = build(call, path, config)
        return Match(reader, _resized(call, reader, resize), keeps_ahead=resize is None)
    if not isinstance(buffer, Buffer):
        raise TypeError(f"{call}: buffer is {type(buffer).__name__}; expected a Buffer. Write {call}(path, buffer).")
    target = _resized(call, buffer, None if resize is True else resize)
    given = config_json.describe(target)
    _check_capacity(call, path, config, target, resize)
    _check_lanes(call, path, config, target)
    _check_same(call, path, "writer", config, given, ())
    _check_same(call, path, "sampler", config, given, _FREE_SAMPLER.get(config["sampler"].get("type"), ()))
    _check_same(call, path, "on_write", config, given, ())
    _check_rule(call, path, meta, target)
    same_storage = not _beyond(config["storage"], given["storage"], _FREE_STORAGE) and _in_files(config) == _in_files(
        given
    )
    storage = target.storage if same_storage else _saved_storage(call, path, config)
    same = not any(
        config_json.differing(config[field], given[field]) for field in ("prefetch", "batch_size", "view", "on_read")
    )
    keeps = same_storage and same and config["capacity"] == target.capacity
    ahead: dict[str, Any] = {} if keeps else {"prefetch": 0, "batch_size": None}
    ahead["on_read"] = _same_stages(config["on_read"], target)
    reader = dataclasses.replace(target, capacity=config["capacity"], storage=storage, **ahead)
    return Match(reader, target, keeps)


def _current(call: str, path: str, config: Any) -> Any:
    """The configuration without settings that were removed and did nothing."""
    try:
        return config_json.without_removed(config)
    except ValueError as error:
        raise checkpoint.VersionError(
            f"{call}: {path} was saved with {error}. Load it with the version that saved it, and convert it there to a buffer "
            f"without."
        ) from None


def build(call: str, path: str, config: Any) -> Any:
    """Return the component that was saved."""
    try:
        return config_json.build(config)
    except (TypeError, ValueError) as error:
        raise checkpoint.VersionError(
            f"{call}: {path} was saved with {shown(config)}, which this release of fbuf does not know ({error}). "
            f"Load it with the release that saved it."
        ) from None


def _same_stages(saved: Any, target: Buffer) -> Any:
    """The stages of `on_read` that go on with what they knew: those that were saved under their names."""
    if target.on_read is None:
        return None
    pairs = [pair["tuple"] for pair in saved["stages"]["tuple"]] if saved is not None else []
    was = {name: stage for name, stage in pairs}
    return tuple(pair for pair in target.on_read if was.get(pair[0]) == config_json.describe(pair[1]))


def rows_of(
    call: str, path: str, meta: Mapping[str, Any], reader: Buffer, example: Any
) -> tuple[Spec, Any, RowFormat | None]:
    """Spec and structure of a row as it is stored, and what it is before `on_write`.

    Raises:
      SchemaError: as for `_rows_of`.
    """
    if reader.on_write is None:
        return *_rows_of(call, path, meta["rows"], reader, example), None
    spec, structure = _rows_of(call, path, meta["given"], reader, example)
    was = given(structure.unflatten(spec.values()))
    stored, _ = transforms.stored(call, reader, was.example)
    return *_rows_of(call, path, meta["rows"], reader, stored), was


def _rows_of(call: str, path: str, rows: Mapping[str, Any], reader: Buffer, example: Any) -> tuple[Spec, Any]:
    """Spec and structure of a row.

    Raises:
      SchemaError: the example is not like it; one is needed and not given; or x64 is off and rows have 64 bits.
    """
    spec, encoded = row_schema.spec_of(rows["leaves"]), rows["structure"]
    for name, leaf in spec.items():
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype:
            raise checkpoint.SchemaError(
                f"{call}: {path}: leaf '{name}' is {leaf.dtype}, but x64 is off; expected it on, as when it was saved. Write "
                f"jax.config.update('jax_enable_x64', True)."
            )
    if example is None:
        own = row_schema.own_node(encoded)
        if own is not None:
            raise checkpoint.SchemaError(
                f"{call}: the rows of {path} are made of {own}, which nothing is imported for; expected an example of a row. "
                f"Write {call}(path, example=row)."
            )
        return spec, row_schema.decode(encoded)
    arrays = reader.storage.describe(call, example)[0] if isinstance(reader.storage, Ragged) else example
    difference = row_schema.difference(row_schema.texts(spec), row_schema.texts(spec_of(arrays)))
    structure: Any = jax.tree.structure(arrays)
    if difference or row_schema.encode(structure) != encoded:
        raise checkpoint.SchemaError(
            f"{call}: the rows of {path} are not like the example:\n{difference or '  other nodes'}\nNothing is cast. Give an "
            f"example like the rows that were saved, or leave it out: {call}(path)."
        )
    return spec, structure


def check_leaves(call: str, path: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compares leaves by name, shape and dtype: of the state that was saved and of one that this buffer makes."""
    difference = row_schema.difference(row_schema.texts(found), row_schema.texts(expected))
    if difference:
        raise checkpoint.SchemaError(
            f"{call}: the state in {path} is not one of this buffer:\n{difference}\nNothing is cast or left out. {_FIX}"
        )


_FIX = (
    "Load it as it was saved, and convert it: saved, state = fbuf.load(path); state = saved.convert(buffer, state) "
    "(priorities start anew)."
)


def _resized(call: str, buffer: Buffer, resize: Any) -> Buffer:
    if resize is None:
        return buffer
    if isinstance(buffer.writer, ReadOnly):
        raise ValueError(
            f"{call}: resize is {resize!r}, but the rows are those of a data set, {buffer.storage!r}; expected None. Leave it "
            f"out."
        )
    if isinstance(resize, bool) or not isinstance(resize, (int, np.integer)) or resize < 1:
        raise ValueError(
            f"{call}: resize is {resize!r}; expected the capacity to load into, an int >= 1, or with a buffer True for its own."
        )
    return dataclasses.replace(buffer, capacity=int(resize))


def _check_capacity(call: str, path: str, config: Any, target: Buffer, resize: Any) -> None:
    if config["capacity"] != target.capacity and resize is None:
        raise checkpoint.SchemaError(
            f"{call}: capacity of {path} is {config['capacity']}; expected {target.capacity}, the buffer's. Write {call}(path, "
            f"buffer, resize=True) for as many of the newest rows as fit, or use capacity={config['capacity']}."
        )


def _check_lanes(call: str, path: str, config: Any, target: Buffer) -> None:
    if (config["lanes"] or 1) != (target.lanes or 1):
        raise checkpoint.SchemaError(
            f"{call}: lanes of {path} is {config['lanes']}; expected {target.lanes}, the buffer's. Rows do not change lanes: "
            f"use lanes={config['lanes']}."
        )


def _beyond(saved: Any, given: Any, free: tuple[str, ...] | None) -> dict[str, tuple[Any, Any]]:
    """What differs besides settings that are free (None: all are, of the same kind)."""
    differing = config_json.differing(saved, given)
    return {n: pair for n, pair in differing.items() if n == "" or (free is not None and n.split(".")[0] not in free)}


def _check_same(call: str, path: str, field: str, config: Any, given: Any, free: tuple[str, ...] | None) -> None:
    differing = _beyond(config[field], given[field], free)
    if differing:
        lines = [
            f"  {field}{'.' if name else ''}{name}: found {shown(saved)}, expected {shown(new)}"
            for name, (saved, new) in differing.items()
        ]
        fix = _FIX if field == "sampler" else "Use the writer that it was saved with."
        raise checkpoint.SchemaError(f"{call}: the {field} of {path} is another:\n" + "\n".join(lines) + f"\n{fix}")


def _check_rule(call: str, path: str, meta: Mapping[str, Any], target: Buffer) -> None:
    found, expected = meta["rule"], None if target.dense else config_json.describe(target.rule)
    if found != expected:
        differing = config_json.differing(found, expected)
        lines = [
            f"  {n or 'rule'}: found {shown(saved) if saved else 'none: every row is drawn'}, expected "
            f"{shown(new) if new is not None else 'none: every row is drawn'}"
            for n, (saved, new) in differing.items()
        ]
        raise checkpoint.SchemaError(
            f"{call}: the view of {path} draws other rows ({shown(meta['buffer']['view'])}; expected {target.view!r}):\n"
            + "\n".join(lines)
            + f"\n{_FIX}"
        )


def _in_files(config: Any) -> bool:
    storage = config["storage"]
    return storage.get("type") == "fbuf.storages.Memmap" or storage.get("path") is not None


def _saved_storage(call: str, path: str, config: Any) -> Any:
    lacking = config_json.missing(config["storage"])
    if lacking is not None:
        raise checkpoint.SchemaError(
            f"{call}: the rows of {path} lie in {shown(config['storage'])}, with {lacking}; expected that storage. Load it "
            f"into a buffer with the storage that was saved."
        )
    return build(call, path, config["storage"])

"""Check whether a checkpoint can be loaded into a buffer, and how.

Settings that define the state must agree: lanes, writer, the view's rule, and the sampler except settings that are leaves of
the state or do not affect it. The rest may differ: the view beyond its rule, prefetch, paths. Another storage or capacity
is handled by `fbuf._checkpoint.resize`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from fbuf._buffer import init
from fbuf._buffer.buffer import Buffer
from fbuf._checkpoint import config_json
from fbuf._checkpoint.config_json import config_text
from fbuf._core import row_schema
from fbuf._core.component import from_config
from fbuf._core.pytree import Spec, is_under, needs_x64, spec_of
from fbuf._core.row_format import RowFormat, format_of
from fbuf._formats import checkpoint
from fbuf.storages import Ragged

_FLEXIBLE_STORAGE = ("layout", "path", "memory", "cache", "on_expired", "on_full", "encode", "decode")
"""Settings that a storage's arrays do not depend on."""
_FLEXIBLE_SAMPLER: dict[str, tuple[str, ...] | None] = {
    "fbuf.samplers.Prioritized": None,  # all: settings that change the state change its leaves
    "fbuf.samplers.Ranked": None,
    "fbuf.samplers.Epoch": ("drop_last",),
    "fbuf.samplers.Consume": ("times",),
    "fbuf.samplers.Staleness": ("maximum", "half_life"),
}


class Match(NamedTuple):
    """How to load."""

    reader: Buffer  # its state is in the checkpoint
    target: Buffer  # its state is requested
    keeps_ahead: bool  # the prefetched batch stays valid


def match(call: str, path: str, meta: Mapping[str, Any], buffer: Buffer | None, resize: Any) -> Match:
    """Return the buffers of a load.

    Raises:
      SchemaError: they are incompatible; or a custom part was saved, and no buffer is given.
      VersionError: the saved buffer used a setting that was removed.
    """
    older = {"on_write": None, "on_read": None}  # absent in older files
    config = older | _without_removed(call, path, meta["buffer"])
    if config["storage"].get("type") == "fbuf.storages.Device":
        config["storage"] = {"layout": None} | config["storage"]
    if buffer is None:
        lacking = config_json.custom_part(config)
        if lacking is not None:
            raise checkpoint.SchemaError(
                f"{call}: {path} was saved by a buffer with {lacking}, which load() cannot construct. Write "
                f"{call}(path, buffer); it was\n  {config_text(config)}"
            )
        reader = build_component(call, path, config)
        return Match(reader, _resized(call, reader, resize), keeps_ahead=resize is None)
    if not isinstance(buffer, Buffer):
        raise TypeError(f"{call}: buffer is {type(buffer).__name__}; expected a Buffer. Write {call}(path, buffer).")
    target = _resized(call, buffer, None if resize is True else resize)
    wanted = config_json.to_json(target)
    if config["capacity"] != target.capacity and resize is None:
        raise checkpoint.SchemaError(
            f"{call}: capacity of {path} is {config['capacity']}; expected {target.capacity}, the buffer's. Write "
            f"{call}(path, buffer, resize=True) to keep the newest rows, or use capacity={config['capacity']}."
        )
    if (config["lanes"] or 1) != (target.lanes or 1):
        raise checkpoint.SchemaError(
            f"{call}: lanes of {path} is {config['lanes']}; expected {target.lanes}, the buffer's. Use "
            f"lanes={config['lanes']}."
        )
    _check_same(call, path, "writer", config, wanted, ())
    _check_same(call, path, "sampler", config, wanted, _FLEXIBLE_SAMPLER.get(config["sampler"].get("type"), ()))
    _check_same(call, path, "on_write", config, wanted, ())
    _check_rule(call, path, meta, target)
    changed = _differences(config["storage"], wanted["storage"], _FLEXIBLE_STORAGE)
    same_storage = not changed and _is_in_files(config) == _is_in_files(wanted)
    storage = target.storage if same_storage else _saved_storage(call, path, config)
    same = not any(
        config_json.differences(config[field], wanted[field]) for field in ("prefetch", "batch_size", "view", "on_read")
    )
    keeps = same_storage and same and config["capacity"] == target.capacity
    ahead: dict[str, Any] = {} if keeps else {"prefetch": 0, "batch_size": None}
    ahead["on_read"] = _same_stages(config["on_read"], target)
    reader = dataclasses.replace(target, capacity=config["capacity"], storage=storage, **ahead)
    return Match(reader, target, keeps)


def _without_removed(call: str, path: str, config: Any) -> Any:
    """Return the configuration without removed settings that had no effect."""
    try:
        return config_json.without_removed(config)
    except ValueError as error:
        raise checkpoint.VersionError(f"{call}: {path} was saved with {error}. Convert it there.") from None


def build_component(call: str, path: str, config: Any) -> Any:
    """Return the component that was saved."""
    try:
        return from_config(config)
    except (TypeError, ValueError) as error:
        raise checkpoint.VersionError(f"{call}: {path} was saved by another release of fbuf ({error}).") from None


def _same_stages(saved: Any, target: Buffer) -> Any:
    """Return the stages of `on_read` that keep their state: those saved under the same names."""
    if target.on_read is None:
        return None
    was = {} if saved is None else dict(pair["tuple"] for pair in saved["stages"]["tuple"])
    return tuple(pair for pair in target.on_read if was.get(pair[0]) == config_json.to_json(pair[1]))


def rows_of(
    call: str, path: str, meta: Mapping[str, Any], reader: Buffer, example: Any
) -> tuple[Spec, Any, RowFormat | None]:
    """Return spec and structure of a stored row, and its format before `on_write`.

    Raises:
      SchemaError: as `_rows_of`.
    """
    if reader.on_write is None:
        return *_rows_of(call, path, meta["rows"], reader, example), None
    spec, structure = _rows_of(call, path, meta["given"], reader, example)
    was = format_of(structure.unflatten(spec.values()))
    stored, _ = init.stored_example(call, reader, was.example)
    return *_rows_of(call, path, meta["rows"], reader, stored), was


def check_ragged(call: str, path: str, buffer: Buffer, example: Any, rows: Any) -> None:
    """Raise SchemaError if loaded rows have other ragged leaves than the example, where there is one."""
    if example is None or not isinstance(buffer.storage, Ragged) or buffer.on_write is not None:
        return
    found, wanted = (
        {leaf.name: leaf for leaf in leaves} for leaves in (rows.layout.leaves, _leaves_of(call, buffer, example))
    )
    if found != wanted:
        texts = ({name: f"{leaf.kind} {leaf.dtype}".strip() for name, leaf in of.items()} for of in (found, wanted))
        difference = row_schema.difference(*texts) or "  other maxima"
        raise checkpoint.SchemaError(
            f"{call}: the rows of {path} are not like the example:\n{difference}\nPass an example like the saved rows, or "
            f"leave it out."
        )


def _leaves_of(call: str, buffer: Buffer, example: Any) -> Any:
    storage: Any = buffer.storage
    return storage.describe(call, example)[1]


def _rows_of(call: str, path: str, rows: Mapping[str, Any], reader: Buffer, example: Any) -> tuple[Spec, Any]:
    """Return spec and structure of a row.

    Raises:
      SchemaError: the example differs; it is needed and missing; or x64 is off and rows have 64 bits.
    """
    spec, encoded = row_schema.spec_of(rows["leaves"]), rows["structure"]
    exact = reader.storage.exact
    for name, leaf in spec.items():
        kept = needs_x64(leaf.dtype) and is_under(name, exact)
        if jax.dtypes.canonicalize_dtype(leaf.dtype) != leaf.dtype and not kept:
            raise checkpoint.SchemaError(
                f"{call}: {path}: leaf '{name}' is {leaf.dtype}, but x64 is off. Enable jax_enable_x64."
            )
    if example is None:
        custom = row_schema.custom_node(encoded)
        if custom is not None:
            raise checkpoint.SchemaError(f"{call}: rows of {path} contain a {custom}. Write {call}(path, example=row).")
        return spec, row_schema.decode(encoded)
    arrays = reader.storage.describe(call, example)[0] if isinstance(reader.storage, Ragged) else example
    difference = row_schema.difference(row_schema.texts(spec), row_schema.texts(spec_of(arrays, exact)))
    structure: Any = jax.tree.structure(arrays)
    if difference or row_schema.encode(structure) != encoded:
        raise checkpoint.SchemaError(
            f"{call}: the rows of {path} are not like the example:\n{difference or '  other nodes'}\nPass an example like "
            f"the saved rows, or leave it out."
        )
    return spec, structure


def check_leaves(call: str, path: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Compare leaves by name, shape and dtype: those saved and those of this buffer's state."""
    difference = row_schema.difference(row_schema.texts(found), row_schema.texts(expected))
    if difference:
        raise checkpoint.SchemaError(f"{call}: the state in {path} is not one of this buffer:\n{difference}\n{_FIX}")


_FIX = (
    "Load it as it was saved, and convert it: saved, state = fbuf.load(path); state = saved.convert(buffer, state) "
    "(priorities are reset)."
)


def _resized(call: str, buffer: Buffer, resize: Any) -> Buffer:
    if resize is None:
        return buffer
    if buffer.writer.read_only:
        raise ValueError(f"{call}: resize is {resize!r}, but rows are of {buffer.storage!r}. Leave resize out.")
    if isinstance(resize, bool) or not isinstance(resize, (int, np.integer)) or resize < 1:
        raise ValueError(f"{call}: resize is {resize!r}; expected a capacity >= 1, or True for the given buffer's.")
    return dataclasses.replace(buffer, capacity=int(resize))


def _differences(saved: Any, wanted: Any, free: tuple[str, ...] | None) -> dict[str, tuple[Any, Any]]:
    """Return the differences besides flexible settings (None: all settings of the same class are flexible)."""
    differing = config_json.differences(saved, wanted)
    return {n: pair for n, pair in differing.items() if n == "" or (free is not None and n.split(".")[0] not in free)}


def _check_same(call: str, path: str, field: str, config: Any, wanted: Any, free: tuple[str, ...] | None) -> None:
    differing = _differences(config[field], wanted[field], free)
    if differing:
        lines = [
            f"  {field}{'.' if name else ''}{name}: found {config_text(saved)}, expected {config_text(new)}"
            for name, (saved, new) in differing.items()
        ]
        fix = _FIX if field == "sampler" else f"Use the {field} that it was saved with."
        raise checkpoint.SchemaError("\n".join((f"{call}: the {field} of {path} is another:", *lines, fix)))


def _check_rule(call: str, path: str, meta: Mapping[str, Any], target: Buffer) -> None:
    absent = {"episode": None, "closes": False, "learns": None}  # in older files
    found = meta["rule"] and absent | meta["rule"]
    expected = None if target.dense else config_json.to_json(target.rule)
    if found != expected:
        lines = [
            f"  {name or 'rule'}: found {_rule_text(saved)}, expected {_rule_text(new)}"
            for name, (saved, new) in config_json.differences(found, expected).items()
        ]
        view = config_text(meta["buffer"]["view"])
        head = f"{call}: the view of {path} draws other rows ({view}; expected {target.view!r}):"
        raise checkpoint.SchemaError("\n".join((head, *lines, _FIX)))


def _rule_text(rule: Any) -> str:
    return "none: every row is drawn" if rule is None else config_text(rule)


def _is_in_files(config: Any) -> bool:
    storage = config["storage"]
    return storage.get("type") == "fbuf.storages.Memmap" or storage.get("path") is not None


def _saved_storage(call: str, path: str, config: Any) -> Any:
    lacking = config_json.custom_part(config["storage"])
    if lacking is not None:
        raise checkpoint.SchemaError(
            f"{call}: the rows of {path} are in {config_text(config['storage'])}, with {lacking}. Use that storage."
        )
    return build_component(call, path, config["storage"])

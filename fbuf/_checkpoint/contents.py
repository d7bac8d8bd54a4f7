"""What a checkpoint holds, in lines for people. Reads the state without its rows, which may not fit into memory."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import numpy as np

from fbuf._buffer.summary.collect import Seen, seen_without_rows
from fbuf._checkpoint import mixture, sharded
from fbuf._checkpoint.config_json import config_text
from fbuf._checkpoint.parts import SavedPart
from fbuf._checkpoint.plain import read_without_rows
from fbuf._core.text_table import counted, human, number, printable, spec_text
from fbuf._formats import checkpoint

_CALL = "fbuf inspect"
_EXTRA = 60  # characters shown of a value
Line = tuple[str, str]
"""A label and what it says."""


def describe(saved: checkpoint.Saved) -> list[Line]:
    """Return what a person asks of a generation: kind, rows, episodes, priorities, bytes, date.

    Raises:
      SchemaError: the metadata is not that of a buffer.
    """
    try:
        return list(_describe(saved))
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        raise checkpoint.SchemaError(f"the buffer's description in {saved.path} is invalid ({error!r})") from error


def _describe(saved: checkpoint.Saved) -> Iterator[Line]:
    meta = saved.meta
    if "mixture" in meta:
        names = list(map(str, meta["names"]))
        yield "kind", f"Mixture of {', '.join(map(printable, names))}"
        for at, name in enumerate(names):
            part = SavedPart(saved, mixture.prefix(at), meta["buffers"][at])
            yield from ((f"{printable(name)}: {label}", text) for label, text in _buffer(part))
    elif "buffer" in meta:
        limited = meta.get("replay") and meta["replay"].get("limit") is not None
        kind = "Buffer" if not meta.get("replay") else f"Replay{' with a limit' if limited else ''}"
        yield "kind", kind
        yield from _buffer(saved)
    else:
        yield "kind", "arrays, of no buffer"
    used = sum(file.size for file in saved.manifest.files)
    yield "on disk", f"{human(used)} for {human(saved.nbytes)} of arrays"
    if meta.get("extra"):
        yield "extra", ", ".join(_extra_text(leaf) for leaf in meta["extra"]["leaves"])
    if "fbuf" in meta:
        yield "saved", f"{_date(meta.get('time'))}by fbuf {meta['fbuf']}, JAX {meta.get('jax')}"


def _buffer(part: Any) -> Iterator[Line]:
    meta = part.meta
    shards = f", in {meta['shards']['number']} shards" if "shards" in meta else ""
    yield "buffer", config_text(meta["buffer"]) + shards
    capacity, lanes = int(meta["buffer"]["capacity"]), meta["buffer"]["lanes"]
    leaves = ", ".join(
        f"{printable(n) or '(row)'} {spec_text(shape, kind)}" for n, shape, kind in meta["rows"]["leaves"]
    )
    try:
        states = [read_without_rows(_CALL, shard) for shard in sharded.parts(part)]
    except (checkpoint.SchemaError, checkpoint.VersionError) as error:
        yield "rows", f"? of {capacity:,}: {str(error).splitlines()[0].partition(': ')[2]}"
    else:
        sizes = np.concatenate([np.asarray(state.ring.size) for _, state in states])
        number = int(sizes.sum())
        yield "rows", f"{number:,} of {capacity:,} ({100 * number / capacity:.0f} %)"
        if lanes is not None:
            apart = f"; {sizes.min():,} to {sizes.max():,} rows each" if sizes.min() != sizes.max() else ""
            yield "lanes", f"{lanes}{apart}"
        yield from _index([seen_without_rows(buffer, state) for buffer, state in states])
    yield "leaves", leaves


def _index(found: list[Seen]) -> Iterator[Line]:
    """Yield lines about episodes and priorities."""
    counts = [one for some in found if (one := some.episode_lengths()) is not None]
    if len(counts) == len(found):
        lengths, cut = np.concatenate([some for some, _ in counts]), sum(some for _, some in counts)
        spread = f", of {lengths.min():,} to {lengths.max():,} rows" if lengths.size else ""
        yield "episodes", f"{lengths.size:,} whole{spread}" + (f"; {cut:,} cut" if cut else "")
    anchors = sum(int(some.anchor.sum()) for some in found)
    yield "anchors", counted(anchors, "row")
    values = [some.priority[some.anchor] for some in found if some.priority is not None]
    if values and anchors:
        p = np.concatenate(values)
        middle = number(float(np.median(p)))
        spread = f"{number(float(p.min()))} to {number(float(p.max()))}, median {middle}"
        yield "priorities", "all alike" if p[0] < 0 else spread


def _extra_text(leaf: dict[str, Any]) -> str:
    name, kind = printable(str(leaf.get("name") or "value")), leaf.get("kind")
    if kind in ("bool", "int", "str", "float"):
        value = float.fromhex(leaf["value"]) if kind == "float" else leaf["value"]
        text = printable(value) if isinstance(value, str) else str(value)
        return f"{name} {text if len(text) <= _EXTRA else text[:_EXTRA] + '...'}"
    return f"{name} {kind if kind == 'key' else 'array'}{list(leaf.get('shape', []))}"


def _date(seconds: Any) -> str:
    """Return `2026-11-22 14:05:09 UTC `, or "" if the value in the file is not a valid time."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC ")
    except (OverflowError, OSError, TypeError, ValueError):
        return ""

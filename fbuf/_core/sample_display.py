"""`Sample` and `Rows` as tables of leaves, with thumbnails of frames in HTML.

Nothing is computed on a device: arrays of the CPU are read in place, small ones of other devices are fetched, and of large
leaves evenly spaced rows are looked at. Traced leaves show shape and dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fbuf._core import frames, text_table
from fbuf._core.text_table import WHOLE, Section, counted, number, spec_text

_SEEN = 1 << 21  # elements of a leaf that are looked at
_FETCHED = 1 << 24  # bytes of a leaf that are fetched from an accelerator
_VALUES = 6  # elements that are shown one by one
_THUMBNAILS = 8
_SIDES = (64, 48, 32, 24, 16, 8)  # pixels
_BUDGET = 18_000  # bytes of all thumbnails


def as_text(batch: Any) -> str:
    """Return aligned text, or the name of the class if that fails: `jax.tree.map` may make any leaves."""
    try:
        return text_table.text(*_outline(batch))
    except Exception:
        return f"{type(batch).__name__}(...)"


def as_html(batch: Any) -> str:
    """Return HTML for notebooks."""
    try:
        return f"<div>{text_table.html(*_outline(batch))}{_thumbnails(batch)}</div>"
    except Exception:
        return f"<code>{type(batch).__name__}(...)</code>"


def _outline(batch: Any) -> tuple[str, list[Section]]:
    mask = _values(batch.mask)
    data = [(name, *_cells(leaf, mask)) for name, leaf in _named(batch.data)]
    beside = []
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if field.name == "ragged" and value is not None:
            beside.append(("ragged", "storages.Ragged", "read by .lazy"))
        elif field.name != "data":
            where = None if field.name == "mask" else mask
            beside += [(f"{field.name}.{name}".strip("."), *_cells(leaf, where)) for name, leaf in _named(value, "")]
    heads = ("one array", "values")
    return f"{type(batch).__name__}: {_count(batch, mask)}", [
        Section("data", heads, tuple(data), left=3),
        Section("beside", heads, tuple(beside), left=3),
    ]


def _named(tree: Any, whole: str = WHOLE) -> list[tuple[str, Any]]:
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/") or whole, leaf) for path, leaf in pairs]


def _count(batch: Any, mask: np.ndarray | None) -> str:
    if mask is None:
        traced = "traced, " if isinstance(batch.mask, jax.core.Tracer) else ""
        return f"{traced}rows {list(getattr(batch.mask, 'shape', '?'))}"
    if not mask.ndim:
        return "one row" if mask else "no row"
    masked = f", {mask.size - int(mask.sum()):,} of them masked" if not mask.all() else ""
    return counted(mask.size, "row") + masked


def _values(leaf: Any) -> np.ndarray | None:
    """Return the values of an array if that takes no computation and little memory; else None."""
    if isinstance(leaf, jax.core.Tracer) or not hasattr(leaf, "__array__"):
        return None
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted() or not leaf.is_fully_addressable or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return None
        if leaf.nbytes > _FETCHED and any(device.platform != "cpu" for device in leaf.devices()):
            return None
    try:
        return np.asarray(leaf)
    except (TypeError, RuntimeError):  # a tensor of another device or dtype
        return None


def _cells(leaf: Any, mask: np.ndarray | None) -> tuple[str, str]:
    """Return the spec of a leaf, and what its values are in the rows that exist."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__, str(leaf) if isinstance(leaf, (bool, int, float)) else ""
    spec, array = spec_text(leaf.shape, str(leaf.dtype).removeprefix("torch.")), _values(leaf)
    if array is not None:
        return spec, described(array, mask)
    traced = isinstance(leaf, jax.core.Tracer)
    return spec, "donated" if not traced and isinstance(leaf, jax.Array) and leaf.is_deleted() else ""


def described(array: np.ndarray, mask: np.ndarray | None = None, seen: int = _SEEN) -> str:
    """Return the values of a small array, or their range in about `seen` elements, and how many are not finite."""
    note = ""
    if array.ndim and array.size > seen:
        step = -(-array.size // seen)
        array, mask = array[::step], None if mask is None or not mask.ndim else mask[::step]
        note = f" (1 row in {step:,})"
    elif array.size <= _VALUES and array.dtype.kind in "biuf":
        values = [str(v) if array.dtype == bool else number(v) for v in array.reshape(-1).tolist()]
        return values[0] if not array.ndim else f"[{', '.join(values)}]"
    known = mask is None or mask.all() or array.shape[: mask.ndim] != mask.shape
    return _range(array if known else array[mask]) + note


def _range(array: np.ndarray) -> str:
    if array.dtype == bool:
        return f"{int(array.sum()):,} of {array.size:,} true"
    if array.dtype.kind not in "iufV" or not array.size:
        return ""
    if array.dtype.kind == "V" or array.dtype.itemsize == 2:  # bfloat16 and the like
        array = array.astype(np.float32)
    finite = np.isfinite(array)
    nan, known = int(np.isnan(array).sum()), array if finite.all() else array[finite]
    said = []
    if known.size:
        low, high = number(known.min().item()), number(known.max().item())
        said.append(f"all {low}" if low == high else f"{low} to {high}")
    said += [f"{nan:,} NaN"] if nan else []
    said += [f"{infinite:,} infinite"] if (infinite := array.size - known.size - nan) else []
    return ", ".join(said)


def _thumbnails(batch: Any) -> str:
    """Return small images of the first rows of each leaf with frames, in at most `_BUDGET` bytes."""
    mask = _values(batch.mask)
    if mask is None:
        return ""
    found, some = {}, np.flatnonzero(mask)[:_THUMBNAILS]
    for name, leaf in _named(batch.data) if some.size else ():
        item = tuple(getattr(leaf, "shape", ()))[mask.ndim :]
        if frames.is_frames(item) and (array := _values(leaf)) is not None and frames.is_picture(item, array.dtype):
            found[name] = frames.to_images(array.reshape(-1, *item)[some])
    return "".join(_image(name, images, _BUDGET // len(found)) for name, images in found.items())


def _image(name: str, images: np.ndarray, budget: int) -> str:
    """Return rows `[B, S, H, W, 3]` side by side, their stacks from top to bottom, as large as the budget allows."""
    from html import escape

    for side in _SIDES:
        small = np.pad(frames.shrunk(images, side), [(0, 0), (0, 0), (1, 1), (1, 1), (0, 0)], constant_values=0.5)
        sheet = np.concatenate([np.concatenate(list(stack)) for stack in small], axis=1)
        address = frames.data_uri(frames.png(sheet))
        if len(address) <= budget:
            zoom = max(1, 64 // max(small.shape[-3:-1]))
            width = sheet.shape[1] * zoom
            text = escape(f"{name}, {len(images)} rows", quote=True)
            style = f"width:{width}px;image-rendering:pixelated;display:block;max-width:100%"
            return f'<div><code>{escape(name)}</code><img alt="{text}" style="{style}" src="{address}"/></div>'
    return ""

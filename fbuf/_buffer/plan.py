"""`buffer.plan(example)`: the bytes of a buffer before it is allocated.

Device bytes come from shapes and from XLA's memory analysis of the compiled methods. Host bytes of uncompressed rows come from
shapes. For compressed rows, and for a table of distinct blocks, the plan uses sample rows or a given ratio, or else the raw
upper bound, and reports which.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, TypedDict

import jax
import numpy as np

from fbuf._buffer import init, prefetch, transforms
from fbuf._core import arguments
from fbuf._core.pytree import PyTree, Spec, exact, in_jax, tree_bytes
from fbuf._core.row_format import RowFormat
from fbuf._core.text_table import Section, html, human
from fbuf._interfaces.storage import Forecast


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """Hold the bytes of a buffer, by place. It prints as a table, also in notebooks.

    Attributes:
      device: Of the state.
      host: Of rows, prefetched rows and priorities on the host.
      host_from: How `host` is known: "exact", "sample of N rows", "ratio given", "raw upper bound" or "none".
      host_raw: Host bytes without compression.
      disk: Of files.
      checkpoint: Of the first `save` of a full buffer; with `wait=False` it first copies `device` bytes.
      peak_init, peak_extend, peak_sample: Most device bytes during a call, with the state. `peak_extend` of a data set is 0.
      donated: Whether `peak_extend` is for a donated state; otherwise rows exist twice.
      table: Forecast for a storage with a table of distinct blocks; else None.
    """

    device: int
    host: int
    host_from: str
    host_raw: int
    disk: int
    checkpoint: int
    peak_init: int
    peak_extend: int
    peak_sample: int
    donated: bool
    table: Forecast | None = None

    def __repr__(self) -> str:
        return "\n".join(f"{name:<24}{size:>12}  {note}".rstrip() for name, size, note in self._lines())

    def _repr_html_(self) -> str:
        return html("", [Section("Plan", ("bytes", ""), tuple(self._lines()))])

    def _lines(self) -> list[tuple[str, str, str]]:
        lines = [
            ("state on device", self.device, ""),
            ("side-store on host", self.host, self.host_from),
            ("  if nothing compresses", self.host_raw, ""),
            ("disk", self.disk, ""),
            ("checkpoint, first save", self.checkpoint, ""),
            ("peak on device, init", self.peak_init, ""),
            ("peak on device, extend", self.peak_extend, "donated" if self.donated else "not donated"),
            ("peak on device, sample", self.peak_sample, ""),
        ]
        shown = [(name, human(size), note) for name, size, note in lines]
        if self.table is not None:
            shown.append(_table_line(self.table))
        return shown


def _table_line(table: Forecast) -> tuple[str, str, str]:
    if table.blocks is None or table.load is None:
        return "places for blocks", f"{table.places:,}", table.known
    note = f"of {table.places:,} places ({table.load:.0%}), {table.known}"
    if table.gives_way:
        who = "oldest" if table.gives_way == "retired" else "others"
        note += (
            f"; only about {table.rows:,} rows fit, the {who} are {table.gives_way}: {table.wanted:,} places hold all"
        )
    return "distinct blocks", f"{table.blocks:,}", note


class PlanSettings(TypedDict, total=False):
    """Keywords of `plan`, for type checkers."""

    batch_size: int | None
    num_rows: int
    donated: bool
    rows: PyTree | None
    ratio: float | None


def plan(
    buffer: Any,
    example: PyTree,
    *,
    batch_size: int | None = None,
    num_rows: int = 1,
    donated: bool = True,
    rows: PyTree | None = None,
    ratio: float | None = None,
) -> Plan:
    """Return the plan of `buffer` for rows like `example`.

    Args:
      batch_size: B of `sample`, for its peak; None: the buffer's, or 32.
      num_rows: N of `extend` (per lane), for its peak.
      donated: Whether the state is donated to `extend`.
      rows: Sample rows, as `extend` takes them, to compress or to count distinct blocks; use a thousand or more.
      ratio: Or the expected ratio of raw to compressed bytes.
    Raises:
      ValueError: both `rows` and `ratio` are given, or the ratio is not positive.
    Cost: two compilations; nothing is allocated.
    """
    if rows is not None and ratio is not None:
        raise ValueError("Buffer.plan: both rows and ratio are given; expected at most one. Drop one of them.")
    if ratio is not None and not ratio > 0:
        raise ValueError(f"Buffer.plan: ratio is {ratio}; expected a number > 0, raw bytes over compressed.")
    if buffer.storage.ragged:
        if rows is not None:
            raise ValueError(f"Buffer.plan: rows are given, which {buffer.storage!r} cannot use. Leave them out.")
        example, _ = buffer.storage.describe("Buffer.plan", example)
    example, was = init.stored_example("Buffer.plan", buffer, example)
    spec = init.checked_spec(buffer, "Buffer.plan", example)
    structure: Any = jax.tree.structure(example)
    taken, form = (spec, structure) if was is None else (was.spec, was.structure)
    geometry, storage = buffer.geometry, buffer.storage
    trial = None if rows is None else _stored_rows(buffer, rows, taken, form, was)
    host, host_from, host_raw = storage.plan_host(geometry, spec, trial, ratio)
    if on_host := buffer.sampler.plan_host(geometry):
        host, host_from, host_raw = host + on_host, "exact" if host_from == "none" else host_from, host_raw + on_host
    table = storage.forecast(geometry, spec, trial)

    abstract = storage.abstract(geometry, spec, structure)
    state = jax.eval_shape(partial(prefetch.empty_state, buffer, row_format=was), abstract)
    ahead = prefetch.held_bytes(buffer, state)
    disk = storage.plan_disk(geometry, spec, trial, ratio)
    batch_size = batch_size or buffer.batch_size or 32
    size = tree_bytes(state)
    lead = (num_rows,) if buffer.lanes is None else (num_rows, buffer.lanes)
    incoming = form.unflatten([jax.ShapeDtypeStruct(lead + s.shape, s.dtype) for s in map(in_jax, taken.values())])
    key = jax.eval_shape(lambda: jax.random.key(0))
    donate = (0,) if donated else ()
    fixed = buffer.writer.read_only
    return Plan(
        device=size,
        host=host + ahead,
        host_from=host_from,
        host_raw=host_raw + ahead,
        disk=disk,
        checkpoint=size + host + disk,
        peak_init=size,
        peak_extend=0 if fixed else peak(buffer.extend, (state, incoming), donate),
        peak_sample=peak(lambda state, key: buffer._sample(state, key, batch_size, {}), (state, key), (0,)),
        donated=donated,
        table=table,
    )


def _stored_rows(
    buffer: Any, rows: PyTree, taken: Spec, form: Any, was: RowFormat | None
) -> dict[str, np.ndarray[Any, Any]]:
    """Return sample rows as they are stored, leaves [N, E, ...]."""
    axes: tuple[int | None, ...] = (None,) if buffer.lanes is None else (None, buffer.lanes)
    checked = arguments.check_rows("Buffer.plan", rows, taken, form, axes, "N" if len(axes) == 1 else "N, E")
    checked = exact("Buffer.plan", taken, checked)
    full = (next(iter(checked.values())).shape[0], buffer.geometry.lanes)
    return transforms.trial(buffer, {n: x.reshape(full + taken[n].shape) for n, x in checked.items()}, was, full)


def peak(method: Any, args: tuple[Any, ...], donate: tuple[int, ...]) -> int:
    """Return the bytes of arguments, of results that do not reuse them, and of scratch memory."""
    analysis: Any = jax.jit(method, donate_argnums=donate).lower(*args).compile().memory_analysis()
    made = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(analysis.argument_size_in_bytes + made + analysis.temp_size_in_bytes)

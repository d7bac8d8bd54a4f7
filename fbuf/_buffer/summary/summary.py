"""`Summary`: the numbers, as a value that prints itself and goes to a logger."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from fbuf._buffer.state import COUNTERS, BufferConfig, BufferState
from fbuf._buffer.summary import statistics
from fbuf._buffer.summary.collect import Seen, distinct, seen, together
from fbuf._buffer.summary.statistics import Episodes, Histogram, Quantiles
from fbuf._core import text_table
from fbuf._core.arguments import is_int
from fbuf._core.pytree import item_bytes, tree_bytes
from fbuf._core.sample import TICKET
from fbuf._core.text_table import WHOLE, Section, human, number, spec_text
from fbuf._interfaces.storage import LeafBytes

_HEADS = ("mean", "least", "5 %", "25 %", "median", "75 %", "95 %", "most")


@dataclasses.dataclass(frozen=True)
class LeafSummary:
    """Bytes of one leaf, and its number of distinct values."""

    spec: str  # of one row: "uint8[84, 84]"
    raw: int | None  # uncompressed bytes of the rows held; None: leaves of any shape
    stored: LeafBytes | None  # by place; None: unknown
    distinct: int | None = None  # distinct values among `Summary.compared` rows; None: not compared

    @property
    def ratio(self) -> float | None:
        """Raw bytes over stored bytes, which include free space, slack and indexes."""
        total = sum(self.stored) if self.stored is not None else 0
        return self.raw / total if self.raw is not None and total else None


@dataclasses.dataclass(frozen=True)
class Summary:
    """Hold statistics of a buffer (`buffer.summary(state)`). None: unknown, or absent from this buffer.

    Attributes:
      buffer: The buffer, as it prints.
      size, capacity: Rows held, and C.
      anchors: Rows that can be sampled.
      available: Anchors that the sampler can draw now.
      unlearnt: Rows held that no window or episode learns, reset rows aside; None: the view has no windows.
      ages: Of rows held: the number of newer rows of the lane. With a writer that replaces any row: of all stored rows.
      drawn_ages: Of anchors, weighted by their probabilities in the next draw.
      priorities: |p| of anchors: exact (`Prioritized(largest="held")`), computed with the present alpha and eps
        (`Prioritized`; wrong if these were annealed), or rounded down by up to an eighth (`Ranked`).
      effective_size: (sum p)^2 / sum p^2 of the anchors' probabilities.
      likeliest: Share of draws of the most probable 1 % of anchors.
      draws, draws_since: Draws of each anchor (`Consume`, `Epoch`), and since when.
      episodes: Complete episodes and their lengths in rows.
      leaves: Bytes and distinct values of each leaf, by name.
      parts: Bytes other than leaves: "index" (of the storage; "rows" if it does not separate leaves), and fields of the state.
      compared, distinct: Number of newest rows that were compared, and of distinct ones among them.
      refused: Counts of refusals and evictions, by reason, if not 0 (see `stats`).
      stats: `Buffer.stats` as Python numbers.
      histograms: Of ages, priorities and episode lengths, as notebooks show them.
    """

    buffer: str
    size: int
    capacity: int
    anchors: int
    available: int
    unlearnt: int | None
    ages: Quantiles | None
    drawn_ages: Quantiles | None
    priorities: Quantiles | None
    effective_size: float | None
    likeliest: float | None
    draws: Quantiles | None
    draws_since: str
    episodes: Episodes | None
    leaves: dict[str, LeafSummary]
    parts: dict[str, LeafBytes]
    compared: int
    distinct: int | None
    refused: dict[str, int]
    stats: dict[str, float]
    histograms: dict[str, Histogram] = dataclasses.field(default_factory=dict)

    @property
    def fill(self) -> float:
        """Rows held over capacity."""
        return self.size / self.capacity

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by place, equal to `Buffer.nbytes`."""
        all_of = [*(leaf.stored for leaf in self.leaves.values() if leaf.stored is not None), *self.parts.values()]
        return {place: sum(getattr(part, place) for part in all_of) for place in LeafBytes._fields}

    @property
    def duplicates(self) -> float | None:
        """Share of duplicates among the compared rows."""
        return 1 - self.distinct / self.compared if self.distinct is not None and self.compared else None

    def to_dict(self) -> dict[str, float]:
        """Return the numbers as a flat dict for loggers, with keys such as `"ages/median"`. Unknown numbers are left out."""
        out: dict[str, Any] = {"size": self.size, "capacity": self.capacity, "fill": self.fill}
        out |= {"anchors": self.anchors, "available": self.available, "unlearnt": self.unlearnt}
        out |= {"effective_size": self.effective_size, "likeliest": self.likeliest}
        spread = {"ages": self.ages, "drawn_ages": self.drawn_ages, "priorities": self.priorities, "draws": self.draws}
        if self.episodes is not None:
            out |= {"episodes/number": self.episodes.number, "episodes/cut": self.episodes.cut}
            spread["episodes/lengths"] = self.episodes.lengths
        for name, several in spread.items():
            if several is not None:
                out |= {f"{name}/{field}": value for field, value in dataclasses.asdict(several).items()}
        out |= {f"nbytes/{place}": number for place, number in self.nbytes.items()}
        for name, leaf in self.leaves.items():
            stored = {} if leaf.stored is None else leaf.stored._asdict()
            numbers = {"raw": leaf.raw, **stored, "ratio": leaf.ratio, "distinct": leaf.distinct}
            out |= {f"leaves/{name}/{field}": value for field, value in numbers.items()}
        for name, part in self.parts.items():
            out |= {f"parts/{name}/{place}": number for place, number in part._asdict().items()}
        out |= {"compared": self.compared, "distinct": self.distinct, "duplicates": self.duplicates}
        out |= {f"stats/{name}": value for name, value in self.stats.items()}
        return {name: value for name, value in out.items() if value is not None}

    def sections(self) -> list[Section]:
        """Return the sections of the printed table, without empty ones."""
        made = [_rows(self), _spreads(self), _memory(self), _refused(self), _sampler(self)]
        return [section for section in made if section.rows]

    def __repr__(self) -> str:
        return text_table.text(self.buffer, self.sections())

    def _repr_html_(self) -> str:
        histograms = (
            text_table.bars(name, one.counts, number(one.low), number(one.high), " (logarithmic)" if one.is_log else "")
            for name, one in self.histograms.items()
        )
        return f"<div>{text_table.html(self.buffer, self.sections())}{''.join(histograms)}</div>"


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share < 0.1 else 0}f} %"


def _rows(summary: Summary) -> Section:
    rows = [("held", f"{summary.size:,} of {summary.capacity:,} ({_percent(summary.fill)})")]
    if summary.anchors != summary.size or summary.available != summary.anchors:
        available = f", {summary.available:,} now" if summary.available != summary.anchors else ""
        rows.append(("anchors", f"{summary.anchors:,}{available}"))
    if summary.unlearnt:
        rows.append(("not learnt", f"{summary.unlearnt:,} ({_percent(summary.unlearnt / summary.size)})"))
    if summary.effective_size is not None:
        of = f" ({_percent(summary.effective_size / summary.anchors)} of the anchors)" if summary.anchors else ""
        rows.append(("effective", f"{number(summary.effective_size)}{of}"))
    if summary.likeliest is not None:
        rows.append(("likeliest 1 %", f"{_percent(summary.likeliest)} of draws"))
    if summary.episodes is not None:
        cut = f", {summary.episodes.cut:,} cut" if summary.episodes.cut else ""
        rows.append(("episodes", f"{summary.episodes.number:,} whole{cut}"))
    if summary.duplicates is not None:
        newest = f"the newest {summary.compared:,}" if summary.compared < summary.size else f"{summary.compared:,}"
        rows.append(("duplicates", f"{_percent(summary.duplicates)} of {newest}"))
    return Section("rows", (), tuple(rows))


def _spreads(summary: Summary) -> Section:
    shown = {
        "age": summary.ages,
        "age, as drawn": summary.drawn_ages,
        "priority": summary.priorities,
        f"draws {summary.draws_since}": summary.draws,
        "episode length": None if summary.episodes is None else summary.episodes.lengths,
    }
    rows = ((name, *map(number, dataclasses.astuple(q)[1:])) for name, q in shown.items() if q is not None)
    return Section("spread", _HEADS, tuple(rows))


def _memory(summary: Summary) -> Section:
    total = summary.nbytes
    places = [place for place in LeafBytes._fields if total[place]]

    def cells(stored: LeafBytes | None) -> tuple[str, ...]:
        return tuple("" if stored is None or not getattr(stored, p) else human(getattr(stored, p)) for p in places)

    rows = []
    for name, leaf in summary.leaves.items():
        raw = "" if leaf.raw is None else human(leaf.raw)
        ratio = "" if leaf.ratio is None else f"{leaf.ratio:,.{0 if leaf.ratio >= 100 else 1}f}x"
        different = "" if leaf.distinct is None else number(leaf.distinct)
        rows.append((name, leaf.spec, *cells(leaf.stored), raw, ratio, different))
    large = {name: stored for name, stored in summary.parts.items() if sum(stored) >= 1024}
    small = [stored for name, stored in summary.parts.items() if name not in large]
    large |= {"other": LeafBytes(*map(sum, zip(*small, strict=True)))} if small else {}
    rows += [(name, "", *cells(stored), "", "", "") for name, stored in large.items()]
    rows.append(("total", "", *(human(total[place]) for place in places), "", "", ""))
    compared = f"distinct of {summary.compared:,}" if summary.compared else ""
    heads = ["one row", *places, "raw", "raw / stored", compared]
    if not summary.compared:
        rows, heads = [row[:-1] for row in rows], heads[:-1]
    return Section("memory", tuple(heads), tuple(rows), left=2)


def _refused(summary: Summary) -> Section:
    rows = tuple((name.replace("_", " "), number(count)) for name, count in summary.refused.items())
    return Section("refused or dropped", (), rows)


def _sampler(summary: Summary) -> Section:
    shown = {
        n: v
        for n, v in summary.stats.items()
        if n not in (*COUNTERS, "size", "anchors", "unlearnt", "is_full", "cursor", "writes")
    }
    return Section("stats", (), tuple((name.replace("_", " "), number(value)) for name, value in shown.items()))


def summary(buffer: BufferConfig, state: BufferState, compare: int | None) -> Summary:
    """Return the summary of a state: see `Buffer.summary`."""
    return summary_of(buffer, state, seen(buffer, state, checked_compare("Buffer.summary", buffer, state, compare)))


def checked_compare(call: str, buffer: BufferConfig, state: Any, compare: int | None) -> int:
    """Return how many rows to compare; raise if the state is traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
        raise TypeError(f"{call}: the state is traced. Call it outside jit; inside, use buffer.stats(state).")
    if compare is not None and (not is_int(compare) or compare < 0):
        raise ValueError(f"{call}: compare is {compare!r}; expected an int >= 0, rows, or None for all of them.")
    return buffer.capacity if compare is None else int(compare)


def summary_of(buffer: BufferConfig, state: BufferState, found: Seen) -> Summary:
    """Return the summary of what was collected."""
    exists, anchor = found.exists, found.anchor
    size, anchors = int(exists.sum()), int(anchor.sum())
    ages = found.age[anchor]
    chance: np.ndarray | None = None
    if found.probability is not None:
        chance = found.probability[anchor]
    elif found.uniform:
        chance = np.ones(anchors)
    known = chance is not None and bool(chance.any())
    priority = None if found.priority is None else found.priority[anchor]
    priority = None if priority is None or bool((priority < 0).any()) else priority
    hashes = [found.hashes[name] for name in found.hashes]
    compared = len(hashes[0]) if hashes else 0
    lengths, cut = found.episode_lengths() or (None, 0)
    seen = {"age": found.age[exists], "priority": priority, "episode length": lengths}
    drawn = {name: statistics.histogram(values) for name, values in seen.items() if values is not None}
    leaves, parts = _bytes(buffer, state, size, {name: distinct(h) for name, h in found.hashes.items()})
    return Summary(
        buffer=repr(buffer),
        size=size,
        capacity=buffer.capacity,
        anchors=anchors,
        available=found.available,
        unlearnt=found.stats.get("unlearnt"),
        ages=statistics.quantiles(found.age[exists]),
        drawn_ages=statistics.quantiles(ages, chance) if known else None,
        priorities=None if priority is None else statistics.quantiles(priority),
        effective_size=statistics.effective_size(chance) if chance is not None and known else None,
        likeliest=statistics.share_of_likeliest(chance, 0.01) if chance is not None and known else None,
        draws=None if found.draws is None else statistics.quantiles(found.draws[anchor]),
        draws_since=found.draws_since,
        episodes=None if lengths is None else Episodes(lengths.size, statistics.quantiles(lengths), cut),
        leaves=leaves,
        parts=parts,
        compared=compared,
        distinct=distinct(together(hashes)) if hashes and not buffer.storage.ragged else None,
        refused={name: int(found.stats[name]) for name in COUNTERS if found.stats[name]},
        stats=found.stats,
        histograms={name: one for name, one in drawn.items() if one is not None},
    )


def _bytes(
    buffer: BufferConfig, state: BufferState, size: int, different: dict[str, int]
) -> tuple[dict[str, LeafSummary], dict[str, LeafBytes]]:
    """Return bytes of leaves and of other parts; their sum is `Buffer.nbytes`."""
    storage = buffer.storage
    spec, _ = storage.spec(state.rows)
    stored: dict[str, LeafBytes] = storage.bytes_per_leaf(state.rows)
    total = storage.nbytes(state.rows)
    rest = LeafBytes(
        *(total[place] - sum(part[i] for part in stored.values()) for i, place in enumerate(LeafBytes._fields))
    )
    leaves = {}
    for name, leaf in spec.items():
        if name != TICKET:
            raw = size * item_bytes(leaf)
            part = stored.get(name) if stored else None
            leaves[name or WHOLE] = LeafSummary(spec_text(leaf.shape, leaf.dtype), raw, part, different.get(name))
    for name in stored:  # leaves that are not arrays
        if name not in spec:
            leaves[name] = LeafSummary("any", None, stored[name])
    parts = {"index" if stored else "rows": rest} if any(rest) else {}
    for field in dataclasses.fields(state):
        bytes_of = tree_bytes(getattr(state, field.name)) if field.name != "rows" else 0
        if bytes_of:
            parts[field.name] = LeafBytes(device=bytes_of)
    if host := buffer.sampler.host_bytes(state.sampler):
        parts["sampler"] = LeafBytes(parts.get("sampler", LeafBytes()).device, host)
    return leaves, parts

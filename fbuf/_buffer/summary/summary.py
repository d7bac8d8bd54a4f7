"""`Summary`: the numbers, as a value that prints itself and goes to a logger."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from fbuf._buffer.config import BufferConfig
from fbuf._buffer.state import COUNTERS, BufferState
from fbuf._buffer.summary.collect import Seen, seen, whole_rows
from fbuf._buffer.summary.row_hash import distinct, together
from fbuf._buffer.summary.statistics import Episodes, Quantiles, effective_size, episodes, quantiles, share_of_likeliest
from fbuf._core import text_table
from fbuf._core.pytree import item_bytes, tree_bytes
from fbuf._core.sample import TICKET
from fbuf._core.state_repr import WHOLE, spec_text
from fbuf._core.text_table import Section, human, number
from fbuf._interfaces.sampler import host_sampler
from fbuf._interfaces.storage import LeafBytes

_HEADS = ("mean", "least", "5 %", "25 %", "median", "75 %", "95 %", "most")


@dataclasses.dataclass(frozen=True)
class LeafSummary:
    """What one leaf takes, and how much of it is different."""

    spec: str  # of one row: "uint8[84, 84]"
    raw: int | None  # bytes of the rows held, as they are; None: leaves of any shape
    stored: LeafBytes | None  # bytes it takes, by place; None: the storage does not say
    distinct: int | None = None  # different ones among `Summary.compared` rows; None: not compared

    @property
    def ratio(self) -> float | None:
        """Raw bytes over bytes stored: room for rows that are not there yet, slack and indexes count as stored."""
        total = sum(self.stored) if self.stored is not None else 0
        return self.raw / total if self.raw is not None and total else None


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a buffer holds and would draw (`buffer.summary(state)`). None stands for what nobody knows, or does not exist here.

    Attributes:
      buffer: The buffer, as it prints.
      size, capacity: Rows held, and C.
      drawable: Anchors: rows that the view can start at.
      available: How many of them the sampler would draw now.
      ages: Of rows held: how many rows of the lane came later. With a writer that replaces any row: how many it put in later,
        of all lanes; those that it passed over do not count.
      drawn_ages: The same of drawn anchors: weighted by their chances in the next draw.
      priorities: |p| of anchors: as they are kept (`Prioritized(largest="held")`), worked out from leaves with the alpha and
        eps of now (`Prioritized`; wrong if these were annealed since), or rounded down by up to an eighth (`Ranked`).
      effective_size: Anchors that, drawn alike, would vary as much as these do: (sum p)^2 / sum p^2.
      likeliest: Share of draws that goes to the 1 % of anchors that are the likeliest.
      draws, draws_since: How often anchors were drawn (`Consume`, `Epoch`), and since when.
      episodes: Whole episodes and their lengths in rows.
      leaves: By name, bytes and how much is different.
      parts: Bytes beside leaves: "index" (what the storage needs to find rows; "rows" where it does not
        tell leaves apart), and fields of the state.
      compared, distinct: How many of the newest rows were compared, and how many of them are different.
      refused: What was refused or given up, by reason, where it is not 0 (see `stats`).
      stats: What `Buffer.stats` says, as Python numbers.
    """

    buffer: str
    size: int
    capacity: int
    drawable: int
    available: int
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

    @property
    def fill(self) -> float:
        """Rows held over capacity."""
        return self.size / self.capacity

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by place, as `Buffer.nbytes` has them."""
        all_of = [*(leaf.stored for leaf in self.leaves.values() if leaf.stored is not None), *self.parts.values()]
        return {place: sum(getattr(held, place) for held in all_of) for place in LeafBytes._fields}

    @property
    def duplicates(self) -> float | None:
        """Of the rows compared, the share that says nothing new."""
        return 1 - self.distinct / self.compared if self.distinct is not None and self.compared else None

    def to_dict(self) -> dict[str, float]:
        """Numbers by name, flat, for loggers: `"ages/median"`, `"leaves/obs/ratio"`. What is None is left out."""
        out: dict[str, Any] = {"size": self.size, "capacity": self.capacity, "fill": self.fill}
        out |= {"drawable": self.drawable, "available": self.available}
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
        for name, held in self.parts.items():
            out |= {f"parts/{name}/{place}": number for place, number in held._asdict().items()}
        out |= {"compared": self.compared, "distinct": self.distinct, "duplicates": self.duplicates}
        out |= {f"stats/{name}": value for name, value in self.stats.items()}
        return {name: value for name, value in out.items() if value is not None}

    def sections(self) -> list[Section]:
        """What is printed, part by part; parts with nothing to say are left out."""
        made = [_rows(self), _spreads(self), _memory(self), _refused(self), _sampler(self)]
        return [section for section in made if section.rows]

    def __repr__(self) -> str:
        return text_table.text(self.buffer, self.sections())

    def _repr_html_(self) -> str:
        return text_table.html(self.buffer, self.sections())

    def __rich__(self) -> Any:
        return text_table.rich(self.buffer, self.sections())


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share < 0.1 else 0}f} %"


def _rows(summary: Summary) -> Section:
    rows = [("held", f"{summary.size:,} of {summary.capacity:,} ({_percent(summary.fill)})")]
    if summary.drawable != summary.size or summary.available != summary.drawable:
        available = f", {summary.available:,} now" if summary.available != summary.drawable else ""
        rows.append(("drawable", f"{summary.drawable:,}{available}"))
    if summary.effective_size is not None:
        of = f" ({_percent(summary.effective_size / summary.drawable)} of those drawable)" if summary.drawable else ""
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
    given = {
        "age": summary.ages,
        "age, as drawn": summary.drawn_ages,
        "priority": summary.priorities,
        f"draws {summary.draws_since}": summary.draws,
        "episode length": None if summary.episodes is None else summary.episodes.lengths,
    }
    return Section("spread", _HEADS, tuple(_spread(name, q) for name, q in given.items() if q is not None))


def _spread(name: str, of: Quantiles) -> tuple[str, ...]:
    values = dataclasses.astuple(of)[1:]
    return (name, *map(number, values))


def _memory(summary: Summary) -> Section:
    total = summary.nbytes
    places = [place for place in LeafBytes._fields if total[place]]

    def cells(held: LeafBytes | None) -> tuple[str, ...]:
        return tuple("" if held is None or not getattr(held, p) else human(getattr(held, p)) for p in places)

    rows = []
    for name, leaf in summary.leaves.items():
        raw = "" if leaf.raw is None else human(leaf.raw)
        ratio = "" if leaf.ratio is None else f"{leaf.ratio:,.{0 if leaf.ratio >= 100 else 1}f}x"
        different = "" if leaf.distinct is None else number(leaf.distinct)
        rows.append((name, leaf.spec, *cells(leaf.stored), raw, ratio, different))
    large = {name: held for name, held in summary.parts.items() if sum(held) >= 1024}
    small = [held for name, held in summary.parts.items() if name not in large]
    large |= {"other": LeafBytes(*map(sum, zip(*small, strict=True)))} if small else {}
    rows += [(name, "", *cells(held), "", "", "") for name, held in large.items()]
    rows.append(("total", "", *(human(total[place]) for place in places), "", "", ""))
    compared = f"distinct of {summary.compared:,}" if summary.compared else ""
    heads = ["one row", *places, "raw", "raw / stored", compared]
    if not summary.compared:
        rows, heads = [row[:-1] for row in rows], heads[:-1]
    return Section("memory", tuple(heads), tuple(rows), left=2)


def _refused(summary: Summary) -> Section:
    rows = tuple((name.replace("_", " "), number(count)) for name, count in summary.refused.items())
    return Section("refused or given up", (), rows)


def _sampler(summary: Summary) -> Section:
    shown = {n: v for n, v in summary.stats.items() if n not in (*COUNTERS, "size", "drawable")}
    return Section("stats", (), tuple((name.replace("_", " "), number(value)) for name, value in shown.items()))


def summary(buffer: BufferConfig, state: BufferState, compare: int | None) -> Summary:
    """See `Buffer.summary`."""
    call = "Buffer.summary"
    leaves = jax.tree.leaves(state)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        raise TypeError(
            f"{call}: the state is traced, but a summary looks at every row and hands out Python numbers. Call it outside jit; "
            f"inside use buffer.stats(state)."
        )
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
        raise RuntimeError(
            f"{call}: the state was donated, and its arrays are gone; expected one that is not. Look at what the step "
            f"returned: state = step(state); buffer.summary(state)."
        )
    if compare is not None and (isinstance(compare, bool) or not isinstance(compare, (int, np.integer)) or compare < 0):
        raise ValueError(f"{call}: compare is {compare!r}; expected an int >= 0, rows, or None for all of them.")
    return _summary_of(buffer, state, seen(buffer, state, buffer.capacity if compare is None else int(compare)))


def _summary_of(buffer: BufferConfig, state: BufferState, found: Seen) -> Summary:
    held, anchor = found.held, found.anchor
    size, drawable = int(held.sum()), int(anchor.sum())
    ages = found.age[anchor]
    chance: np.ndarray | None = None
    if found.probability is not None:
        chance = found.probability[anchor]
    elif found.uniform:
        chance = np.ones(drawable)
    known = chance is not None and bool(chance.any())
    priority = None if found.priority is None else found.priority[anchor]
    priority = None if priority is None or bool((priority < 0).any()) else priority
    hashes = [found.hashes[name] for name in found.hashes]
    compared = len(hashes[0]) if hashes else 0
    leaves, parts = _bytes(buffer, state, size, {name: distinct(h) for name, h in found.hashes.items()})
    return Summary(
        buffer=repr(buffer),
        size=size,
        capacity=buffer.capacity,
        drawable=drawable,
        available=found.available,
        ages=quantiles(found.age[held]),
        drawn_ages=quantiles(ages, chance) if known else None,
        priorities=None if priority is None else quantiles(priority),
        effective_size=effective_size(chance) if chance is not None and known else None,
        likeliest=share_of_likeliest(chance, 0.01) if chance is not None and known else None,
        draws=None if found.draws is None else quantiles(found.draws[anchor]),
        draws_since=found.draws_since,
        episodes=None
        if found.start is None or found.end is None or found.reset is None
        else episodes(held, found.start, found.end, found.reset),
        leaves=leaves,
        parts=parts,
        compared=compared,
        distinct=distinct(together(hashes)) if hashes and whole_rows(buffer) else None,
        refused={name: int(found.stats[name]) for name in COUNTERS if found.stats[name]},
        stats=found.stats,
    )


def _bytes(
    buffer: BufferConfig, state: BufferState, size: int, different: dict[str, int]
) -> tuple[dict[str, LeafSummary], dict[str, LeafBytes]]:
    """Leaves, and bytes that are no leaf's: together what `Buffer.nbytes` says."""
    storage = buffer.storage
    spec, _ = storage.spec(state.rows)
    stored: dict[str, LeafBytes] = getattr(storage, "bytes_per_leaf", lambda rows: {})(state.rows)
    total = storage.nbytes(state.rows)
    rest = LeafBytes(
        *(total[place] - sum(held[i] for held in stored.values()) for i, place in enumerate(LeafBytes._fields))
    )
    leaves = {}
    for name, leaf in spec.items():
        if name != TICKET:
            raw = size * item_bytes(leaf)
            held = stored.get(name) if stored else None
            leaves[name or WHOLE] = LeafSummary(spec_text(leaf.shape, leaf.dtype), raw, held, different.get(name))
    for name in stored:  # leaves that are no arrays
        if name not in spec:
            leaves[name] = LeafSummary("any", None, stored[name])
    parts = {"index" if stored else "rows": rest} if any(rest) else {}
    for field in dataclasses.fields(state):
        bytes_of = tree_bytes(getattr(state, field.name)) if field.name != "rows" else 0
        if bytes_of:
            parts[field.name] = LeafBytes(device=bytes_of)
    kept = host_sampler(buffer.sampler)
    if kept is not None:
        parts["sampler"] = LeafBytes(parts.get("sampler", LeafBytes()).device, kept.host_bytes(state.sampler))
    return leaves, parts

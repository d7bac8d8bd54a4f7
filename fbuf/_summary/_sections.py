"""What a `Summary` prints: rows, spreads, memory, and what was refused."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fbuf._state import COUNTERS
from fbuf._summary._numbers import Quantiles
from fbuf._tables import Section, human, number
from fbuf._typing import Held

if TYPE_CHECKING:
    from fbuf._summary._summary import Summary

HEADS = ("mean", "least", "5 %", "25 %", "median", "75 %", "95 %", "most")


def sections(summary: Summary) -> list[Section]:
    """Parts in order; those with nothing to say are left out."""
    made = [_rows(summary), _spreads(summary), _memory(summary), _refused(summary), _sampler(summary)]
    return [section for section in made if section.rows]


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
    return Section("spread", HEADS, tuple(_spread(name, q) for name, q in given.items() if q is not None))


def _spread(name: str, of: Quantiles) -> tuple[str, ...]:
    values = dataclasses.astuple(of)[1:]
    return (name, *map(number, values))


def _memory(summary: Summary) -> Section:
    total = summary.nbytes
    places = [place for place in Held._fields if total[place]]

    def cells(held: Held | None) -> tuple[str, ...]:
        return tuple("" if held is None or not getattr(held, p) else human(getattr(held, p)) for p in places)

    rows = []
    for name, leaf in summary.leaves.items():
        raw = "" if leaf.raw is None else human(leaf.raw)
        ratio = "" if leaf.ratio is None else f"{leaf.ratio:,.{0 if leaf.ratio >= 100 else 1}f}x"
        different = "" if leaf.distinct is None else number(leaf.distinct)
        rows.append((name, leaf.spec, *cells(leaf.stored), raw, ratio, different))
    large = {name: held for name, held in summary.parts.items() if sum(held) >= 1024}
    small = [held for name, held in summary.parts.items() if name not in large]
    large |= {"other": Held(*map(sum, zip(*small, strict=True)))} if small else {}
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

"""The page of `fbuf view`: what looks wrong in a checkpoint or data set, its episodes, leaves and rows, and a player."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from fbuf._core.sample_display import described
from fbuf._core.text_table import WHOLE, counted, number, spec_text
from fbuf.plot._episodes import Episode, Episodes
from fbuf.plot._page import page
from fbuf.plot._source import opened

NAMED = ("best", "worst", "median", "newest")
MOST = 1000  # episodes in the table
BUDGET = 4_500_000  # bytes of frames of all players
ROWS, BYTES = 20_000, 1 << 26  # of a leaf that are looked at


def view(call: str, path: str | os.PathLike[str], chosen: Sequence[str | int] = NAMED) -> str:
    """Return the page of a checkpoint, a data set or another library's file.

    Args:
      chosen: Episodes to play: numbers, or "best" and "worst" by return, "median", and "newest", of those that are complete.
    Raises:
      As `plot.episode`.
    """
    with opened(call, path) as (buffer, state):
        found = Episodes(call, buffer, state)
        players = _chosen(call, found.all, chosen)
        leaves = {name: _values(found, name) for name in found.spec}
        tracks = [found.track(at, found.all[at], BUDGET / len(players)) for at in players]
        warnings = "".join(f"<li>{escape(text)}</li>" for text in suspicious(found, leaves))
        title = os.path.basename(os.path.abspath(path))
        body = [
            f"<h1>{escape(title)}</h1>",
            f'<h2>Suspicious</h2><ul class="warn">{warnings}</ul>' if warnings else "<h2>Nothing looks wrong</h2>",
            '<h2>Player</h2><div id="player"></div>' if tracks else "",
            _table_of_episodes(found.all, players),
            _table_of_leaves(found, leaves),
            f'<h2>Rows</h2><div class="scroll" style="max-height:none">{buffer.summary(state, compare=0)._repr_html_()}</div>',
        ]
    return page(title, "".join(body), tracks)


def _chosen(call: str, episodes: list[Episode], chosen: Sequence[str | int]) -> list[int]:
    """Return the numbers of the chosen episodes, each once."""
    whole = [i for i, one in enumerate(episodes) if one.is_whole and one.end != "running"] or list(range(len(episodes)))
    order = sorted(whole, key=lambda i: (episodes[i].reward or 0.0, episodes[i].length))
    named = {}
    if order:
        named = {"best": order[-1], "worst": order[0], "median": order[len(order) // 2], "newest": whole[-1]}
    players = []
    for one in chosen:
        if isinstance(one, str):
            players += [named[one]] if order else []
        elif -len(episodes) <= one < len(episodes):
            players.append(range(len(episodes))[one])
        else:
            raise ValueError(
                f"{call}: episode is {one}, but there are {len(episodes)}. Count from 0, or from the end: -1."
            )
    return list(dict.fromkeys(players))


def _values(found: Episodes, name: str) -> np.ndarray:
    """Return a leaf of evenly spaced rows of all lanes."""
    reader, leaf = found.reader, found.spec[name]
    age, lane = np.nonzero(reader.mask(0, reader.steps))
    most = max(1, min(ROWS, BYTES // max(1, int(np.prod(leaf.shape)) * leaf.dtype.itemsize)))
    some = np.unique(np.linspace(0, max(len(age) - 1, 0), most).astype(np.int64))[: len(age)]
    slots, block = reader.slots(age[some], lane[some]), min(reader.block(name), 1024)
    parts = [reader.leaf(name, slots[i : i + block], block) for i in range(0, len(slots), block)]
    return np.concatenate(parts) if parts else np.zeros((0, *leaf.shape), leaf.dtype)


def suspicious(found: Episodes, leaves: dict[str, np.ndarray]) -> Iterator[str]:
    """Yield what may be a mistake: constant leaves, NaN, rewards that are always 0, missing ends, lanes that differ."""
    for name, values in leaves.items():
        title, kind = name or WHOLE, values.dtype.kind
        if kind in "fV" and (bad := int((~np.isfinite(values.astype(np.float64))).sum())):
            yield f"{title}: {bad:,} of {values.size:,} values are NaN or infinite"
        if name in found.reward and values.size and not values.any():
            yield f"{title} is 0 in every row"
        elif len(values) > 1 and name not in found.ends and kind != "V" and (values == values[:1]).all():
            yield f"{title} is the same in every row"
    episodes = found.all
    lengths = [one.length for one in episodes if one.end != "running" and one.is_whole]
    if episodes and all(one.end == "running" for one in episodes):
        yield "no row ends an episode"
    elif lengths:
        middle = float(np.median(lengths))
        for one in episodes:
            if one.end == "running" and one.length > 10 * max(middle, max(lengths) / 5):
                yield f"lane {one.lane}: its newest {one.length:,} rows hold no end; episodes have {number(middle)} rows"
        for lane in range(len(found.reader.sizes)):
            own = [one.length for one in episodes if one.lane == lane and one.end != "running" and one.is_whole]
            if len(own) > 2 and not middle / 3 <= np.median(own) <= middle * 3:
                here = number(float(np.median(own)))
                yield f"lane {lane}: its episodes have {here} rows, those of all lanes {number(middle)}"
    sizes = found.reader.sizes
    if sizes.size and 2 * sizes.min() < sizes.max():
        yield f"lanes hold {sizes.min():,} to {sizes.max():,} rows"


def _table(heads: Sequence[str], rows: Sequence[str], kind: str = "") -> str:
    head = "".join(f"<th><button>{name}</button></th>" if kind else f"<th>{name}</th>" for name in heads)
    return f'<table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _table_of_episodes(episodes: list[Episode], players: list[int]) -> str:
    known = [i for i in range(len(episodes)) if i in players or i >= len(episodes) - MOST]
    rows = []
    for i in reversed(known):
        one = episodes[i]
        played = f' data-track="{players.index(i)}" tabindex="0"' if i in players else ""
        total = "" if one.reward is None else f"{one.reward:.6g}"
        cells = [(str(i), i), (total, total), (f"{one.length:,}", one.length), (str(one.lane), one.lane)]
        numbers = "".join(f'<td class="n" data-n="{value}">{text}</td>' for text, value in cells)
        note = "" if one.is_whole else ", first rows overwritten"
        rows.append(f"<tr{played}>{numbers}<td>{one.end}{note}</td><td>{'play' if played else ''}</td></tr>")
    heads = ("episode", "return", "rows", "lane", "end", "player")
    older = f"; the newest {MOST:,} are listed" if len(known) < len(episodes) else ""
    table = _table(heads, rows, "sortable")
    return f'<h2>{counted(len(episodes), "episode")}{older}</h2><div class="scroll">{table}</div>'


def _table_of_leaves(found: Episodes, leaves: dict[str, np.ndarray]) -> str:
    rows = []
    total = int(found.reader.sizes.sum())
    for name, values in leaves.items():
        seen = "" if len(values) == total else f" in {len(values):,} rows"
        cells = (name or WHOLE, spec_text(found.spec[name].shape, found.spec[name].dtype), described(values) + seen)
        rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    table = _table(("leaf", "one row", "values"), rows)
    return f'<h2>Leaves</h2><div class="scroll" style="max-height:none">{table}</div>'

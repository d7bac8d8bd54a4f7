"""The page of `fbuf view`: what looks wrong in a checkpoint or data set, its episodes, leaves and rows, and a player."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from fbuf._core.sample_display import described
from fbuf._core.text_table import WHOLE, Section, counted, html, number, spec_text
from fbuf.plot._episodes import Episode, Episodes
from fbuf.plot._page import page
from fbuf.plot._source import opened

NAMED = ("best", "worst", "median", "newest")
MOST = 1000  # episodes in the table
BUDGET = 4_500_000  # bytes of all players
BYTES = 1 << 26  # of a leaf that are looked at


def view(call: str, path: str | os.PathLike[str], chosen: Sequence[str | int] = NAMED) -> str:
    """Return the page of a checkpoint, a data set or another library's file.

    Args:
      chosen: Episodes to play: numbers, or "best" and "worst" by return, "median", and "newest", of those that are complete.
    Raises:
      TypeError: rows are ragged. FileNotFoundError: nothing is at the path.
      ValueError: there is no such episode.
    """
    with opened(call, path) as (buffer, state):
        found = Episodes(call, buffer, state)
        players = _chosen(call, found.all, chosen)
        leaves = {name: _values(found, name) for name in found.spec}
        tracks: dict[int, dict[str, Any]] = {}
        left = float(BUDGET)
        for at in sorted(players, key=lambda at: found.all[at].length):  # what short ones leave is for longer ones
            tracks[at] = found.track(at, left / (len(players) - len(tracks)))
            left -= len(json.dumps(tracks[at]))
        warnings = "".join(f"<li>{escape(text)}</li>" for text in suspicious(found, leaves))
        title = os.path.basename(os.path.abspath(path))
        body = [
            f"<h1>{escape(title)}</h1>",
            f'<h2>Suspicious</h2><ul class="warn">{warnings}</ul>' if warnings else "<h2>Nothing looks wrong</h2>",
            '<h2>Player</h2><div id="player"></div>' if tracks else "",
            _table_of_episodes(found.all, players),
            _table_of_leaves(found, leaves),
            f'<h2>Rows</h2><div class="wide">{buffer.summary(state, compare=0)._repr_html_()}</div>',
        ]
    return page(title, "".join(body), [tracks[at] for at in players])


def _chosen(call: str, episodes: list[Episode], chosen: Sequence[str | int]) -> list[int]:
    """Return the numbers of the chosen episodes, each once."""
    whole = [i for i, one in enumerate(episodes) if one.is_whole and one.end != "running"] or list(range(len(episodes)))
    order = sorted(whole, key=lambda i: (episodes[i].reward or 0.0, episodes[i].length))
    places = {"best": -1, "worst": 0, "median": len(order) // 2}
    players = []
    for one in chosen:
        if isinstance(one, str):
            players += order and [order[places[one]] if one in places else whole[-1]]
        elif -len(episodes) <= one < len(episodes):
            players.append(range(len(episodes))[one])
        else:
            raise ValueError(
                f"{call}: episode is {one}, but there are {len(episodes)}. Count from 0, or from the end: -1."
            )
    return list(dict.fromkeys(players))


def _values(found: Episodes, name: str) -> np.ndarray:
    """Return a leaf of all rows; evenly spaced ones of a large leaf."""
    leaf, (age, lane) = found.spec[name], np.nonzero(found.reader.mask(0, found.reader.steps))
    every = -(-age.size * int(np.prod(leaf.shape)) * leaf.dtype.itemsize // BYTES) or 1
    return found.rows(name, age[::every], lane[::every])


def suspicious(found: Episodes, leaves: dict[str, np.ndarray]) -> Iterator[str]:
    """Yield what may be a mistake: constant leaves, NaN, rewards that are always 0, missing ends, lanes that differ."""
    for name, values in leaves.items():
        title, kind = name or WHOLE, values.dtype.kind
        if kind in "fcV" and (bad := int((~np.isfinite(values if kind in "fc" else values.astype(np.float32))).sum())):
            yield f"{title}: {bad:,} of {values.size:,} values are NaN or infinite"
        if name in found.reward and values.size and not values.any():
            yield f"{title} is 0 in every row"
        elif len(values) > 1 and name not in found.ends and kind != "V" and (values == values[:1]).all():
            yield f"{title} is the same in every row"
    running = [one for one in found.all if one.end == "running"]
    whole: dict[int, list[int]] = {}
    for one in found.all:
        if one.end != "running" and one.is_whole:
            whole.setdefault(one.lane, []).append(one.length)
    if found.all and len(running) == len(found.all):
        yield "no row ends an episode" if found.has_ends else "nothing says where episodes end"
    elif whole:
        lengths = np.concatenate(list(whole.values()))
        middle, most = float(np.median(lengths)), int(lengths.max())
        for one in running:
            if one.length > 10 * max(middle, most / 5):
                yield f"lane {one.lane}: its newest {one.length:,} rows hold no end; episodes have {number(middle)} rows"
        for lane, lane_lengths in whole.items():
            here = float(np.median(lane_lengths))
            if len(lane_lengths) > 2 and not middle / 3 <= here <= middle * 3:
                yield f"lane {lane}: its episodes have {number(here)} rows, those of all lanes {number(middle)}"
    sizes = found.reader.sizes
    if sizes.size and 2 * sizes.min() < sizes.max():
        yield f"lanes hold {sizes.min():,} to {sizes.max():,} rows"


def _table_of_episodes(episodes: list[Episode], players: list[int]) -> str:
    known = [i for i in range(len(episodes)) if i in players or i >= len(episodes) - MOST]
    rows = []
    for i in reversed(known):
        one = episodes[i]
        track = f' data-track="{players.index(i)}"' if i in players else ""
        total = "" if one.reward is None else f"{one.reward:.6g}"
        cells = [(str(i), i), (total, total), (f"{one.length:,}", one.length), (str(one.lane), one.lane)]
        numbers = "".join(f'<td class="n" data-n="{value}">{text}</td>' for text, value in cells)
        note = "" if one.is_whole else ", first rows overwritten"
        rows.append(
            f"<tr{track}>{numbers}<td>{one.end}{note}</td><td>{'<button>play</button>' if track else ''}</td></tr>"
        )
    heads = "".join(
        f"<th><button>{name}</button></th>" for name in ("episode", "return", "rows", "lane", "end", "player")
    )
    older = f"; the newest {MOST:,} are listed" if len(known) < len(episodes) else ""
    table = f'<table class="sortable"><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<h2>{counted(len(episodes), "episode")}{older}</h2><div class="scroll">{table}</div>'


def _table_of_leaves(found: Episodes, leaves: dict[str, np.ndarray]) -> str:
    rows = []
    for name, values in leaves.items():
        seen = "" if len(values) == found.reader.sizes.sum() else f" in {len(values):,} rows"
        spec = spec_text(found.spec[name].shape, found.spec[name].dtype)
        rows.append((name or WHOLE, spec, described(values, seen=BYTES) + seen))
    return f'<h2>Leaves</h2><div class="wide">{html("", [Section("leaf", ("one row", "values"), tuple(rows), left=3)])}</div>'

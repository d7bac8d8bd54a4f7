"""HTML pages that need no other file, server or network: style, script and data are inside."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, body: str, tracks: Sequence[dict[str, Any]]) -> str:
    """Return a page with a player for `tracks`, which `Episodes.track` returns."""
    from html import escape

    files = resources.files("fbuf.plot")
    style, script = (files.joinpath(name).read_text("utf-8") for name in ("player.css", "player.js"))
    data = json.dumps({"tracks": list(tracks)}, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'
        f"<style>{style}</style></head><body>{body}"
        f'<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>'
    )

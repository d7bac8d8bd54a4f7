"""`episode`: one episode as an animation with curves, in a notebook, an HTML file or a GIF."""

from __future__ import annotations

import os
import zlib
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np

from fbuf._buffer.buffer import Buffer
from fbuf._buffer.state import BufferState
from fbuf._core.arguments import is_int
from fbuf._core.lazy_import import import_extra
from fbuf._core.text_table import WHOLE
from fbuf._replay import Replay
from fbuf.plot._episodes import Episodes
from fbuf.plot._page import page
from fbuf.plot._source import opened


class EpisodePlayer:
    """One episode to play: a notebook shows it, `save` writes it. `track` is what it shows, as JSON."""

    def __init__(self, track: dict[str, Any]) -> None:
        self.track = track

    def __repr__(self) -> str:
        t = self.track
        total = "" if t["return"] is None else f", return {t['return']}"
        return f"EpisodePlayer(episode {t['number']} of lane {t['lane']}: {t['length']} rows{total}, {t['end']})"

    def _repr_html_(self) -> str:
        from html import escape

        return f'<iframe style="width:100%;height:600px;border:0" title="episode" srcdoc="{escape(self._page())}"></iframe>'

    def _page(self) -> str:
        return page(f"Episode {self.track['number']}", '<div id="player"></div>', [self.track])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write an `.html` file that plays in any browser, or the frames as a `.gif`.

        Raises:
          ValueError: the path ends otherwise, or a GIF is wanted of rows without frames.
          ImportError: a GIF needs Pillow, which matplotlib brings.
        """
        call, name = "EpisodePlayer.save", os.fspath(path)
        if name.endswith(".html"):
            Path(name).write_text(self._page(), "utf-8")
        elif name.endswith(".gif"):
            self._save_gif(call, name)
        else:
            raise ValueError(f"{call}: path is {name!r}; expected one that ends in .html or .gif.")

    def _save_gif(self, call: str, name: str) -> None:
        about = self.track["frames"]
        if about is None:
            raise ValueError(f"{call}: the rows have no frames. Save it as .html, which draws curves.")
        image = import_extra(call, "PIL.Image", '"fbuf[plot]"')
        shape = (about["count"], about["height"], about["width"], about["channels"])
        frames = np.bitwise_xor.accumulate(
            np.frombuffer(zlib.decompress(b64decode(about["data"])), np.uint8).reshape(shape)
        )
        zoom = max(1, 160 // max(shape[1:3]))
        large = frames.repeat(zoom, 1).repeat(zoom, 2)
        images = [image.fromarray(frame[..., 0] if shape[3] == 1 else frame) for frame in large]
        images[0].save(name, save_all=True, append_images=images[1:], duration=66, loop=0)


def episode(source: Replay | tuple[Buffer, BufferState] | str | os.PathLike[str], number: int = -1) -> EpisodePlayer:
    """Return an episode to look at: its frames, and below them reward, action, other leaves and the priority of each step.

    The end is marked as terminated, truncated, cut, or not held yet. Vector observations are drawn as curves. An episode of
    more than 2,000 steps is thinned, and says so.

    Args:
      source: A `Replay`; `(buffer, state)`, as `fbuf.load` and `fbuf.datasets.open` return them; or the path of a
        checkpoint, a data set, or a file that `fbuf.interop.from_file` reads.
      number: Of the episode in order of their ends, 0 the oldest, -1 the newest, which may still run.
    Returns:
      A player: a notebook shows it; `save("episode.html")` and `save("episode.gif")` write files that need no others.
    Raises:
      TypeError: it is no source, or its rows are ragged or in no order.
      ValueError: nothing says where episodes end.
      IndexError: there is no such episode.
      FileNotFoundError: nothing is at the path.

    Example:
      >>> import fbuf, numpy as np
      >>> replay = fbuf.Replay(fbuf.Buffer(100, episode_end=("done",)), {"obs": np.zeros(3, np.float32), "done": False})
      >>> index = replay.extend({"obs": np.ones((30, 3), np.float32), "done": np.arange(30) % 10 == 9})
      >>> fbuf.plot.episode(replay, 0)
      EpisodePlayer(episode 0 of lane 0: 10 rows, ended)
    """
    call = "plot.episode"
    if not is_int(number):
        raise TypeError(f"{call}: number is {number!r}; expected an int, 0 for the oldest episode, -1 for the newest.")
    with opened(call, source) as (buffer, state):
        if not buffer.geometry.streams:
            raise TypeError(f"{call}: {buffer.writer!r} keeps rows in no order. Use plot.overview.")
        found = Episodes(call, buffer, state)
        if not found.has_ends:
            known = ", ".join(name or WHOLE for name in found.spec)
            raise ValueError(
                f"{call}: nothing says where episodes end, rows have {known}. Use Buffer(..., episode_end=(name,))."
            )
        if not -len(found.all) <= number < len(found.all):
            raise IndexError(f"{call}: number is {number}, but there are {len(found.all)} episodes.")
        return EpisodePlayer(found.track(range(len(found.all))[number]))

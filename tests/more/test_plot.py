"""Plots: words beside their frames, colours on every page, and axes of any values."""

from __future__ import annotations

import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import fbuf

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from tests.test_plot import THEMES, axes, closed, filled, pixels, stairs  # noqa: E402, F401


@pytest.mark.parametrize(("item", "number"), [((8, 8), 6), ((84, 84), 60), ((4, 40), 3)])
def test_words_and_lines_stay_beside_their_frames(item: tuple[int, int], number: int) -> None:
    """Words end before the next strip begins, and stand above its frames; lines are thin, however small frames are."""
    buffer = fbuf.uniform(8)
    state = buffer.init({"obs": jnp.zeros(item, jnp.uint8), "action": 0, "reward": jnp.float32(0)})
    more = {"obs": jnp.ones((8, *item), jnp.uint8), "action": jnp.arange(8), "reward": jnp.arange(8.0) * 1e6}
    made = fbuf.plot.frames(buffer, buffer.extend(state, more), number=number)
    made.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in made.texts if text.get_text()]
    assert boxes and not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    grey = (pixels(made) == 128).mean()
    assert 0 < grey < 0.15
    for text in made.texts:
        below = made.transData.inverted().transform(text.get_window_extent())
        sheet = np.asarray(made.images[0].get_array())
        rows, columns = np.round(np.sort(below, 0)).astype(int)[:, ::-1].T
        assert not text.get_text() or not sheet[slice(*rows), slice(*columns), 3].any()


@pytest.mark.parametrize("priority", [[3.4e38, 3.4e38, 1.0], [0.0, 0.0, 0.0]])
def test_priorities_of_any_size_have_a_histogram(priority: list[float]) -> None:
    buffer = fbuf.prioritized(8)
    state = buffer.extend(buffer.init(0.0), jnp.ones(3), priority=jnp.array(priority))
    there, edges = stairs(fbuf.plot.priorities(buffer, state, ax=axes()))[0]
    assert there.sum() == pytest.approx(1) and edges[0] >= 0 and np.isfinite(edges).all()


def test_one_record_alone_is_seen() -> None:
    buffer, state = filled()
    evolution = fbuf.plot.Evolution()
    evolution.record(buffer, state, 7)
    assert {line.get_marker() for line in evolution.plot(ax=axes()).lines} == {"o"}
    evolution.record(buffer, state, 8)
    assert {line.get_marker() for line in evolution.plot(ax=axes()).lines} == {"None"}


def test_without_matplotlib_the_extra_is_named() -> None:
    """And `fbuf` itself imports without it, and without pyplot or rich."""
    code = (
        "import sys\n"
        "import fbuf, jax.numpy as jnp\n"
        "assert not {'matplotlib', 'rich', 'torch'} & set(sys.modules), 'imported'\n"
        "sys.modules['matplotlib'] = None\n"
        "b = fbuf.uniform(4); s = b.init(jnp.zeros(2))\n"
        "for draw in (fbuf.plot.ages, fbuf.plot.memory, fbuf.plot.overview):\n"
        "    try:\n"
        "        draw(b, s)\n"
        "    except ImportError as error:\n"
        "        assert 'pip install \"fbuf[plot]\"' in str(error), error\n"
        "    else:\n"
        "        raise SystemExit('no error')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

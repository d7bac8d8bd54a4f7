"""Plots: words beside their frames, colours on every page, and axes of any values."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fbuf

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

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


@pytest.mark.parametrize("theme", THEMES)
def test_colours_stand_out_from_the_page_and_from_one_another(theme: str) -> None:
    """WCAG: 3 to 1 for graphics; and every pair differs for the three kinds of colour blindness."""
    from fbuf.plot._style import colors

    with pyplot.style.context(theme):
        made = pyplot.subplots()[1]
        page = luminance(made.get_facecolor())
        palette = colors(made)
        for color in palette[:3]:
            pair = sorted((page, luminance(color)))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) > 3
        for i in range(3):
            for j in range(i):
                for matrix in BLIND:
                    a, b = (matrix @ linear(palette[k]) for k in (i, j))
                    assert np.abs(a - b).max() > 0.05, (palette[i], palette[j])


BLIND = [
    np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
]


def linear(color: Any) -> np.ndarray:
    value = np.array(matplotlib.colors.to_rgb(color))
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def luminance(color: Any) -> float:
    return float(linear(color) @ [0.2126, 0.7152, 0.0722])


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


@pytest.mark.parametrize("theme", THEMES)
def test_a_transparent_page_is_taken_for_one_that_its_text_is_seen_on(theme: str) -> None:
    from fbuf.plot._style import colors

    with pyplot.style.context(theme):
        figure = Figure(facecolor="none")
        clear = figure.subplots()
        clear.set_facecolor("none")
        assert colors(clear) == colors(Figure().subplots())


def test_an_overview_in_a_figure_of_the_user_s_has_room_for_its_words() -> None:
    buffer, state = filled()
    figure = Figure()
    fbuf.plot.overview(buffer, state, figure=figure)
    assert type(figure.get_layout_engine()).__name__ == "ConstrainedLayoutEngine"
    tight = Figure(layout="tight")
    fbuf.plot.overview(buffer, state, figure=tight)
    assert type(tight.get_layout_engine()).__name__ == "TightLayoutEngine"


def test_new_axes_are_pyplot_s_and_given_ones_are_used() -> None:
    buffer, state = filled()
    for draw in (fbuf.plot.ages, fbuf.plot.priorities, fbuf.plot.episode_lengths, fbuf.plot.memory, fbuf.plot.frames):
        made = draw(buffer, state)
        assert made.get_figure().number in pyplot.get_fignums()
        given = axes()
        assert draw(buffer, state, ax=given) is given


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

"""Plots: words beside their frames, themes, and axes of any values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from tests.support.processes import run_python

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from tests.plot.test_plot import axes, closed, filled, pixels, stairs  # noqa: E402, F401

pytestmark = pytest.mark.more


@pytest.mark.parametrize("priority", [[3.4e38, 3.4e38, 1.0], [0.0, 0.0, 0.0]])
def test_priorities_of_any_size_have_a_histogram(priority):
    buffer = fbuf.prioritized(8)
    state = buffer.extend(buffer.init(0.0), jnp.ones(3), priority=jnp.array(priority))
    there, edges = stairs(fbuf.plot.priorities(buffer, state, ax=axes()))[0]
    assert there.sum() == pytest.approx(1) and edges[0] >= 0 and np.isfinite(edges).all()


def test_without_matplotlib_the_extra_is_named():
    """And `fbuf` itself imports without it, and without pyplot."""
    code = (
        "import sys\n"
        "import fbuf, jax.numpy as jnp\n"
        "assert not {'matplotlib', 'torch'} & set(sys.modules), 'imported'\n"
        "sys.modules['matplotlib'] = None\n"
        "b = fbuf.Buffer(4); s = b.init(jnp.zeros(2))\n"
        "for draw in (fbuf.plot.ages, fbuf.plot.memory, fbuf.plot.overview):\n"
        "    try:\n"
        "        draw(b, s)\n"
        "    except ImportError as error:\n"
        "        assert 'pip install \"fbuf[plot]\"' in str(error), error\n"
        "    else:\n"
        "        raise SystemExit('no error')\n"
    )
    run_python(code)


def test_stacks_and_the_frames_after_them():
    view = fbuf.views.Transition(stack=3, terminated="done", truncated=None, reward="action", autoreset="same_step")
    buffer, state = filled(view=view)
    batch = buffer.peek(state, jax.random.key(0), 1)
    made = fbuf.plot.frames(buffer, state, jax.random.key(0), number=1, ax=axes())
    line = pixels(made)[-5]
    frames = line[(line != -1) & (line != 128)]
    both = np.concatenate([np.asarray(batch.data[name])[0, :, 0] for name in ("obs", "next_obs")])
    np.testing.assert_array_equal(frames, both.repeat(8, -1).reshape(-1))  # eight pixels for each
    assert made.get_title(loc="left") == "obs | next_obs" and "discount" in made.texts[0].get_text()


def test_an_empty_buffer_says_so():
    buffer, _ = filled()
    state = buffer.init({"obs": np.zeros((8, 8), np.uint8), "action": 0, "done": False})
    for draw, words in {
        fbuf.plot.ages: "nothing can be drawn yet",
        fbuf.plot.priorities: "nothing can be drawn yet",
        fbuf.plot.episode_lengths: "no episode is complete",
        fbuf.plot.frames: "there is nothing to draw",
    }.items():
        assert draw(buffer, state, ax=axes()).texts[0].get_text() == words
    names = [one.get_label() for one in fbuf.plot.overview(buffer, state).figure.axes]
    assert names == ["ages", "priorities", "episode_lengths", "memory", "frames"]
    flat = fbuf.Buffer(8, sampler=fbuf.samplers.Prioritized(alpha=0.0))
    held = flat.extend(flat.init(0.0), jnp.ones(3))
    assert fbuf.plot.priorities(flat, held, ax=axes()).texts[0].get_text() == "alpha is 0: all alike"


@pytest.mark.parametrize("storage", [fbuf.storages.Device(), fbuf.storages.Compressed(keys=("obs",))])
def test_memory_has_a_bar_for_each_leaf_and_place(storage):
    buffer, state = filled(storage=storage)
    made = fbuf.plot.memory(buffer, state, ax=axes())
    total = {bars.get_label().split()[0]: sum(bar.get_width() for bar in bars) for bars in made.containers}
    assert total == {place: size for place, size in buffer.nbytes(state).items() if size}
    summary = buffer.summary(state)
    names = [label.get_text() for label in made.get_yticklabels()]
    bars = {name: sum(container[i].get_width() for container in made.containers) for i, name in enumerate(names)}
    for name, leaf in summary.leaves.items():
        assert leaf.stored is not None and bars[name] == sum(leaf.stored)
    assert names[0] == "obs" or storage != fbuf.storages.Device()

"""Plots: what their artists hold is what the numbers say."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from tests.support import refusals
from tests.support.processes import run_python

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

from fbuf._core.frames import to_images  # noqa: E402


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    pyplot.close("all")


def axes() -> Any:
    return Figure(layout="constrained").subplots()


def filled(sampler: Any = None, **settings: Any) -> tuple[fbuf.Buffer, Any]:
    """Episodes of 3 and 5 rows, priorities 1 to 30, frames that count."""
    sampler = sampler or fbuf.samplers.Prioritized(alpha=1.0, eps=0.0)
    buffer, number = fbuf.Buffer(64, sampler=sampler, episode_end=("done",), **settings), np.arange(30, dtype=np.int32)
    obs = np.broadcast_to(number.astype(np.uint8)[:, None, None], (30, 8, 8))
    rows = {"obs": obs, "action": number, "done": np.isin(number, [2, 7, 10, 15, 20])}
    state = buffer.init({"obs": np.zeros((8, 8), np.uint8), "action": 0, "done": False})
    priority = np.arange(1.0, 31.0, dtype=np.float32) if buffer.sampler.prioritized else None
    return buffer, buffer.extend(state, rows, priority=priority)


def stairs(made: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(patch.get_data().values, patch.get_data().edges) for patch in made.patches]


def test_priorities_are_histograms_of_anchors_and_of_draws() -> None:
    buffer, state = filled()
    (there, edges), (drawn, same) = stairs(fbuf.plot.priorities(buffer, state, bins=10, ax=axes()))
    p = np.arange(1.0, 31.0)
    np.testing.assert_array_equal(edges, same)
    np.testing.assert_allclose(there, np.histogram(p, edges)[0] / 30)
    np.testing.assert_allclose(drawn, np.histogram(p, edges, weights=p)[0] / p.sum(), rtol=1e-5)
    np.testing.assert_allclose([there.sum(), drawn.sum()], 1)
    # Far apart they have a logarithmic axis, and zeros are counted.
    state = buffer.update_priority(state, buffer.rows(state, last=3).index, jnp.array([0.0, 1e-4, 5.0]))
    made = fbuf.plot.priorities(buffer, state, ax=axes())
    assert made.get_xscale() == "log" and [text.get_text() for text in made.texts] == ["3% are 0"]
    assert stairs(made)[0][0].sum() == pytest.approx(29 / 30)


def test_ages_are_histograms_of_whole_numbers() -> None:
    buffer, state = filled()
    (there, edges), (drawn, _) = stairs(fbuf.plot.ages(buffer, state, bins=7, ax=axes()))
    age, p = np.arange(30)[::-1], np.arange(1.0, 31.0)
    assert set(np.diff(edges)) == {5.0} and edges[0] == -0.5
    np.testing.assert_allclose(there, np.histogram(age, edges)[0] / 30)
    np.testing.assert_allclose(drawn, np.histogram(age, edges, weights=p)[0] / p.sum(), rtol=1e-5)


def test_episode_lengths_are_those_of_whole_episodes() -> None:
    buffer, state = filled()
    made = fbuf.plot.episode_lengths(buffer, state, ax=axes())
    values, edges = stairs(made)[0]
    np.testing.assert_array_equal(values, np.histogram([3, 5, 3, 5, 5], edges)[0])
    assert made.lines[0].get_xdata()[0] == 5 and "5 episodes" in made.get_title(loc="left")
    assert made.get_xlabel() == "rows (1 more are cut)"


def test_evolution_plots_what_was_recorded() -> None:
    buffer = fbuf.prioritized(64)
    state, evolution = buffer.init(jnp.float32(0)), fbuf.plot.Evolution()
    evolution.record(buffer, state)  # nothing is there yet
    for step in range(0, 40, 10):
        state = buffer.extend(state, jnp.zeros(10), priority=jnp.arange(1.0, 11.0) * (step + 1))
        evolution.record(buffer, state, step)
    made = evolution.plot(ax=axes())
    lines = {line.get_label(): line for line in made.lines}
    assert lines["median"].get_xdata().tolist() == [0, 10, 20, 30]
    medians = [q.median for q in evolution.quantiles]
    assert lines["median"].get_ydata().tolist() == medians and len(made.collections) == 2
    np.testing.assert_allclose(lines["largest"].get_ydata(), [10, 110, 210, 310], rtol=1e-4)
    assert made.get_yscale() == "log"
    buffer, state = filled()
    evolution = fbuf.plot.Evolution("ages")
    evolution.record(buffer, state)
    evolution.record(buffer, state)
    assert evolution.steps == [0, 1] and evolution.quantiles[0].max == 29
    assert "nothing was recorded" in fbuf.plot.Evolution().plot(ax=axes()).texts[0].get_text()


def pixels(made: Any) -> np.ndarray:
    """The sheet, as bytes where it is opaque."""
    sheet = np.asarray(made.images[0].get_array())
    return np.where(sheet[..., 3] > 0, np.round(sheet[..., 0] * 255), -1)


def test_frames_are_those_of_the_batch() -> None:
    buffer, state = filled()
    key = jax.random.key(5)
    batch = buffer.peek(state, key, 4)
    made = fbuf.plot.frames(buffer, state, key, number=4, ax=axes())
    shades = {float(x) for x in np.unique(pixels(made))} - {-1.0, 128.0}  # grey: lines
    assert shades == set(np.asarray(batch.data["obs"])[:, 0, 0].astype(float).tolist())
    words = [text.get_text() for text in made.texts]
    assert [word.split("   ")[0] for word in words] == [f"action {a}" for a in batch.data["action"].tolist()]
    again = fbuf.plot.frames(buffer, state, batch=batch, number=4, ax=axes())
    np.testing.assert_array_equal(pixels(made), pixels(again))
    np.testing.assert_array_equal(pixels(made), pixels(fbuf.plot.frames(batch, number=4, ax=axes())))


def test_frames_of_every_layout() -> None:
    single = [((6, 6), (1, 6, 6)), ((6, 6, 1), (1, 6, 6)), ((6, 6, 3), (1, 6, 6))]
    for item, shown in (*single, ((6, 5, 4), (4, 6, 5)), ((2, 6, 6), (2, 6, 6)), ((2, 6, 6, 3), (2, 6, 6))):
        rows = np.arange(2 * np.prod(item), dtype=np.int64).reshape(2, *item).astype(np.uint8)
        images = to_images(rows)
        assert images.shape == (2, *shown, 3)
        if item == (6, 5, 4):
            np.testing.assert_allclose(images[1, 2, ..., 0], rows[1, ..., 2] / 255)
        elif item[-1] == 3:
            np.testing.assert_allclose(images.reshape(rows.shape), rows / 255)
        else:
            np.testing.assert_allclose(images[..., 0].reshape(rows.shape), rows / 255)


def test_other_numbers_are_shown_from_black_to_white() -> None:
    for dtype in (np.float32, np.bool_, np.int16):
        images = to_images((np.arange(32).reshape(2, 4, 4) % 2).astype(dtype))
        assert set(np.unique(images).tolist()) == {0.0, 1.0}
    assert (to_images(np.ones((1, 4, 4), bool)) == 1).all() and (to_images(np.zeros((1, 4, 4), bool)) == 0).all()
    rows = np.full((1, 4, 4), np.nan, np.float32)
    rows[0, 0] = [0, 1, np.inf, -np.inf]
    assert to_images(rows)[0, 0, 0, :, 0].tolist() == [0, 1, 1, 0] and np.isfinite(to_images(rows)).all()


def test_an_overview_leaves_out_plots_without_data() -> None:
    buffer = fbuf.Buffer(8)
    state = buffer.extend(buffer.init(jnp.zeros(3)), jnp.ones((4, 3)))
    figure = Figure()
    made = fbuf.plot.overview(buffer, state, figure=figure)
    assert [one.get_label() for one in figure.axes] == ["ages", "memory"] and made is figure.axes[0]


INVALID = """
plot.priorities(buffer, state) => ValueError has no priorities. Use fbuf.plot.ages
plot.Evolution().record(buffer, state) => ValueError Use Evolution('ages')
plot.Evolution("weights") => ValueError of is 'weights'; expected "priorities", "ages"
plot.frames(buffer, state, observation="action") => ValueError not look like frames | observation='obs'
plot.frames(buffer, state, observation="pixels") => ValueError 'pixels' is not in the batch
plot.ages(buffer, state, bins=0) => ValueError bins is 0; expected an int >= 1
plot.ages(state, buffer) => TypeError Write plot.ages
plot.ages(buffer, state, ax=3) => TypeError ax is int; expected the axes of matplotlib
plot.overview(buffer, state, figure=3) => TypeError figure is int; expected a matplotlib Figure
plot.frames({}) => TypeError dict and NoneType; expected Buffer and state
plot.frames(buffer, state, batch=6) => TypeError batch is int; expected a Sample
plot.ages(mixture, mixed) => TypeError Plot its buffers: plot.ages(mixture['old'], states['old'])
jax.jit(lambda state: plot.ages(buffer, state))(state) => TypeError the state is traced
plot.frames(plain, held) => ValueError no leaf looks like frames ('' [3]); expected [H, W] of 4 by 4 or more.
plot.episode_lengths(plain, held) => ValueError does not know where episodes end
"""


def test_invalid_arguments_are_refused() -> None:
    buffer, state = filled(fbuf.samplers.Uniform())
    mixture = fbuf.Mixture({"old": buffer})
    mixed, plain = {"old": state}, fbuf.Buffer(8)
    held = plain.extend(plain.init(jnp.zeros(3)), jnp.ones((2, 3)))
    names = {"buffer": buffer, "state": state, "mixture": mixture, "mixed": mixed, "plain": plain, "held": held}
    refusals.check_all(INVALID, names | {"plot": fbuf.plot, "jax": jax})
    fbuf.plot.ages(mixture["old"], mixed["old"], ax=axes())


matplotlib.use("Agg")


@pytest.mark.more
@pytest.mark.parametrize("priority", [[3.4e38, 3.4e38, 1.0], [0.0, 0.0, 0.0]])
def test_priorities_of_any_size_have_a_histogram(priority):
    buffer = fbuf.prioritized(8)
    state = buffer.extend(buffer.init(0.0), jnp.ones(3), priority=jnp.array(priority))
    there, edges = stairs(fbuf.plot.priorities(buffer, state, ax=axes()))[0]
    assert there.sum() == pytest.approx(1) and edges[0] >= 0 and np.isfinite(edges).all()


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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


@pytest.mark.more
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

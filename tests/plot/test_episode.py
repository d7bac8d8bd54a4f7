"""`plot.episode`: which rows an episode has, and that a player's frames and curves are theirs."""

import base64
import json
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from tests.support.tables import by_tier


def raises(kind, text):
    return pytest.raises(kind, match=re.escape(text))


def frames_of(track):
    """The frames that the script of the page inflates, in plain Python."""
    about = track["frames"]
    data = zlib.decompress(base64.b64decode(about["data"]))
    size, frames, last = about["height"] * about["width"] * about["channels"], [], None
    for i in range(about["count"]):
        last = bytes(a ^ b for a, b in zip(data[i * size : (i + 1) * size], last or bytes(size), strict=True))
        frames.append(last)
    return frames


def made(lengths, lanes=2, **settings):
    """A replay whose frames, rewards and actions are the number of the row; lane 1 lags one row behind."""
    n = sum(lengths)
    t = np.arange(n)
    last = np.isin(t, np.cumsum(lengths) - 1)
    number = np.stack([t + 100 * lane for lane in range(lanes)], axis=1)
    rows = {
        "obs": np.broadcast_to(number.astype(np.uint8)[..., None, None], (n, lanes, 5, 6)),
        "action": number.astype(np.int32),
        "reward": number.astype(np.float32),
        "terminated": np.stack([last, np.roll(last, 1)], axis=1)[:, :lanes],
        "truncated": np.zeros((n, lanes), bool),
    }
    settings.setdefault("episode_end", ("terminated", "truncated"))
    buffer = fbuf.Buffer(settings.pop("capacity", n * lanes + 8), lanes=lanes, **settings)
    replay = fbuf.Replay(buffer, jax.tree.map(lambda x: np.zeros_like(x[0, 0]), rows))
    replay.extend(rows)
    return replay


def curve(track, name):
    return next(one for one in track["curves"] if one["name"] == name)["values"][0]


def check(player, lane, rows, end):
    track = player.track
    assert (track["lane"], track["length"], track["end"]) == (lane, len(rows), end)
    assert [frame[0] for frame in frames_of(track)] == [row % 256 for row in rows]
    assert curve(track, "action") == rows and curve(track, "reward") == rows and track["return"] == sum(rows)


def test_episodes_are_in_order_of_their_ends():
    replay = made([3, 4, 2])
    episodes = [fbuf.plot.episode(replay, i) for i in range(7)]
    with raises(IndexError, "number is 7, but there are 7 episodes"):
        fbuf.plot.episode(replay, 7)
    check(episodes[0], 1, [100], "terminated")
    check(episodes[1], 0, [0, 1, 2], "terminated")
    check(episodes[2], 1, [101, 102, 103], "terminated")
    check(episodes[3], 0, [3, 4, 5, 6], "terminated")
    check(episodes[4], 1, [104, 105, 106, 107], "terminated")
    check(episodes[5], 0, [7, 8], "terminated")
    check(fbuf.plot.episode(replay), 1, [108], "running")
    assert "lane 0: 3 rows, return 3.0, terminated" in repr(episodes[1])


@pytest.mark.more
def test_a_first_episode_that_lost_rows_says_so():
    replay = made([3, 4, 2], lanes=1, capacity=8)
    first = fbuf.plot.episode(replay, 0).track
    assert not first["whole"] and first["length"] == 2 and fbuf.plot.episode(replay, 1).track["whole"]
    assert fbuf.plot.episode(made([3, 4, 2], lanes=1), 0).track["whole"]


def test_reset_rows_belong_to_no_episode():
    view = fbuf.views.Transition(autoreset="next_step")
    buffer = fbuf.Buffer(40, view=view)
    replay = fbuf.Replay(buffer, {"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False, "truncated": False})
    done = np.array([0, 0, 1, 0, 0, 1, 0, 0], bool)
    t = np.arange(8)
    replay.extend(
        {
            "obs": t / 2,
            "action": t.astype(np.int32),
            "reward": t / 4,
            "terminated": done,
            "truncated": np.zeros(8, bool),
        }
    )
    actions = [curve(fbuf.plot.episode(replay, i).track, "action") for i in range(3)]
    assert actions == [[0, 1, 2], [4, 5], [7]]
    replay.cut()
    assert fbuf.plot.episode(replay).track["end"] == "cut"


STORAGES = by_tier(
    fbuf.storages.Compressed(keys=("obs",)), more=[fbuf.storages.Host(), fbuf.storages.Deduplicated(("obs",))]
)


@pytest.mark.more
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_sources_show_the_same_episode(tmp_path, storage):
    replay = made([3, 4, 2], lanes=2, storage=storage, sampler=fbuf.samplers.Prioritized(alpha=1.0))
    replay.update_priority(replay.rows(last=1).index, np.array([[5.0, 7.0]], np.float32))
    replay.save(tmp_path / "replay")
    expected = fbuf.plot.episode(replay).track
    assert curve(expected, "priority")[-1] == pytest.approx(7, abs=1e-3)
    loaded = fbuf.load(tmp_path / "replay")
    for source in (str(tmp_path / "replay"), tmp_path / "replay", (replay.buffer, replay.state), loaded):
        assert fbuf.plot.episode(source).track == expected
    plain = made([3, 4, 2], lanes=1)
    arrays = {name: leaf[:, 0] for name, leaf in plain.rows().data.items()}
    arrays = {name: np.asarray(leaf)[:9] for name, leaf in arrays.items()}
    fbuf.interop.from_arrays(arrays).save(tmp_path / "data")
    check(fbuf.plot.episode(tmp_path / "data", 1), 0, [3, 4, 5, 6], "terminated")
    fbuf.interop.to_file(tmp_path / "rows.npz", plain.buffer, plain.state)
    check(fbuf.plot.episode(tmp_path / "rows.npz", 1), 0, [3, 4, 5, 6], "terminated")


@pytest.mark.more
def test_a_checkpoint_with_files_is_left_alone(tmp_path):
    replay = made([3, 4], storage=fbuf.storages.Memmap(str(tmp_path / "rows")))
    replay.save(tmp_path / "saved")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").rglob("*")}
    check(fbuf.plot.episode(tmp_path / "saved", 1), 0, [0, 1, 2], "terminated")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "rows").rglob("*")} == before


def test_a_long_episode_is_thinned_and_its_rewards_are_added():
    n = 4500
    replay = fbuf.Replay(fbuf.Buffer(n, episode_end=("done",)), {"x": 0.0, "reward": 0.0, "done": False})
    replay.extend({"x": np.arange(n) / 1.0, "reward": np.ones(n, np.float32), "done": np.arange(n) == n - 1})
    track = fbuf.plot.episode(replay, 0).track
    assert track["every"] == 3 and curve(track, "x")[:3] == [0, 3, 6] and set(curve(track, "reward")) == {3.0}
    assert track["return"] == n and "1 step in" in fbuf.plot.episode(replay, 0)._page()


def test_vectors_are_curves_and_values_that_json_lacks_are_gaps():
    replay = fbuf.Replay(fbuf.Buffer(50, episode_end=("done",)), {"obs": np.zeros(20, np.float32), "done": False})
    obs = np.arange(200, dtype=np.float32).reshape(10, 20)
    obs[2, 1], obs[3, 1] = np.nan, np.inf
    replay.extend({"obs": obs, "done": np.arange(10) == 9})
    player = fbuf.plot.episode(replay, 0)
    (vector,) = player.track["curves"]
    assert player.track["frames"] is None and vector["name"] == "obs, 12 of 20" and len(vector["values"]) == 12
    assert vector["values"][0] == [20 * i for i in range(10)] and vector["values"][1][1:5] == [21, None, None, 81]


def test_a_page_holds_its_data_and_asks_for_nothing(tmp_path):
    example = {"obs": np.zeros(2, np.float32), "</script><b>": 0.0, "done": False}
    replay = fbuf.Replay(fbuf.Buffer(50, episode_end=("done",)), example)
    replay.extend({"obs": np.ones((10, 2), np.float32), "</script><b>": np.arange(10) / 2, "done": np.arange(10) == 9})
    player = fbuf.plot.episode(replay, 0)
    player.save(tmp_path / "episode.html")
    text = (tmp_path / "episode.html").read_text("utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert json.loads(data)["tracks"] == [player.track] and "</script><b>" not in text
    assert not re.search(r"https?://", text) and "default-src 'none'" in text
    shown = player._repr_html_()
    assert shown.startswith("<iframe") and "<script" not in shown and len(shown) < 100_000
    with raises(ValueError, "expected one that ends in .html or .gif"):
        player.save(tmp_path / "episode.mp4")
    with raises(ValueError, "the rows have no frames"):
        player.save(tmp_path / "episode.gif")


def test_a_gif_has_the_frames(tmp_path):
    image = pytest.importorskip("PIL.Image")
    fbuf.plot.episode(made([3, 4]), 3).save(tmp_path / "episode.gif")
    with image.open(tmp_path / "episode.gif") as gif:
        levels = []
        for i in range(gif.n_frames):
            gif.seek(i)
            levels.append(gif.convert("L").getpixel((1, 1)))
    assert levels == [3, 4, 5, 6]


@pytest.mark.parametrize("dtype", by_tier(np.uint8, more=[np.float32]))
@pytest.mark.parametrize("shape", [(16, 20), (16, 20, 1), (16, 20, 3), (4, 16, 20), (16, 20, 4), (4, 16, 20, 3)])
def test_frames_of_every_layout_are_shown(shape, dtype):
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 256, (6, *shape)).astype(np.uint8)
    obs[0].flat[:2] = 0, 255  # floats are shown from least to largest
    given = obs if dtype == np.uint8 else (obs / 255).astype(np.float32)
    replay = fbuf.Replay(fbuf.Buffer(8, episode_end=("done",)), {"obs": given[0], "done": False})
    replay.extend({"obs": given, "done": np.arange(6) == 5})
    track = fbuf.plot.episode(replay, 0).track
    newest = obs[..., -1:] if shape[-1] == 4 else obs[:, -1] if shape[0] == 4 else obs
    newest = newest.reshape(6, 16, 20, -1)
    assert track["frames"]["channels"] == newest.shape[-1]
    shown = np.stack([np.frombuffer(frame, np.uint8) for frame in frames_of(track)]).reshape(newest.shape)
    assert np.array_equal(shown, newest)


def test_other_sources_are_refused(tmp_path):
    episode = fbuf.plot.episode
    plain = fbuf.Replay(fbuf.Buffer(4), {"x": 0.0})
    plain.add({"x": 1.0})
    with raises(ValueError, "plot.episode: nothing says where episodes end, rows have x. Use Buffer(..., episode_end"):
        episode(plain)
    with raises(TypeError, "source is Buffer; expected a Replay, (buffer, state) or a path"):
        episode(plain.buffer)
    with raises(TypeError, "number is '1'"):
        episode(plain, "1")
    with raises(FileNotFoundError, "no checkpoint, data set or file at"):
        episode(tmp_path / "nothing")
    mixture = fbuf.Mixture({"a": plain.buffer, "b": plain.buffer})
    fbuf.save(tmp_path / "mixture", mixture, {name: plain.buffer.init({"x": 0.0}) for name in mixture.names})
    with raises(TypeError, "holds a mixture of a, b; expected one buffer"):
        episode(tmp_path / "mixture")
    top = fbuf.Buffer(4, writer=fbuf.writers.Reservoir())
    with raises(TypeError, "keeps rows in no order"):
        episode((top, top.init({"x": 0.0, "done": False})))


def test_a_donated_state_is_refused():
    replay = made([3, 4])
    buffer, state = replay.buffer, jax.tree.map(jnp.array, replay.state)
    jax.jit(buffer.cut, donate_argnums=0)(state)
    with raises(RuntimeError, "plot.episode: the state was donated"):
        fbuf.plot.episode((buffer, state))


def test_rewards_that_are_not_finite_leave_the_returns_of_other_episodes():
    replay = fbuf.Replay(fbuf.Buffer(15, episode_end=("done",)), {"reward": 0.0, "done": False})
    reward = np.array([1, np.inf, 1, 2, 3, 4, np.nan, 1, 1, 5, 6, 7, np.inf, 1, -np.inf], np.float32)
    replay.extend({"reward": reward, "done": np.arange(15) % 3 == 2})
    assert [fbuf.plot.episode(replay, i).track["return"] for i in range(5)] == [None, 9, None, 18, None]


def test_ends_say_what_the_view_calls_them():
    view = fbuf.views.Transition(terminated="over", truncated="late", autoreset="same_step")
    replay = fbuf.Replay(
        fbuf.Buffer(8, view=view), {"obs": 0.0, "action": 0, "reward": 0.0, "over": False, "late": False}
    )
    over, late = np.array([0, 1, 0, 0], bool), np.array([0, 0, 0, 1], bool)
    rows = {"obs": np.zeros(4), "action": np.zeros(4, np.int32), "reward": np.zeros(4), "over": over, "late": late}
    replay.extend(rows)
    assert [fbuf.plot.episode(replay, i).track["end"] for i in range(2)] == ["terminated", "truncated"]


def test_complex_leaves_are_curves_of_both_parts():
    replay = fbuf.Replay(fbuf.Buffer(8, episode_end=("done",)), {"z": np.complex64(0), "done": False})
    replay.extend({"z": np.array([1 + 2j, 3 + 4j], np.complex64), "done": np.array([False, True])})
    (curves,) = fbuf.plot.episode(replay, 0).track["curves"]
    assert curves["values"] == [[1, 3], [2, 4]]


@pytest.mark.more
def test_every_plot_takes_a_replay():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib.figure import Figure

    replay = made([3, 4, 2], sampler=fbuf.samplers.Prioritized())
    plot = fbuf.plot
    for draw in (plot.ages, plot.priorities, plot.episode_lengths, plot.memory, plot.frames):
        one, two = Figure().subplots(), Figure().subplots()
        draw(replay, ax=one)
        draw(replay.buffer, replay.state, ax=two)
        assert one.get_title(loc="left") == two.get_title(loc="left") != ""
    figure = Figure(figsize=(10, 6))
    plot.overview(replay, figure=figure)
    assert len(figure.axes) == 5
    evolution = plot.Evolution("ages")
    evolution.record(replay, step=3)
    assert evolution.steps == [3] and evolution.quantiles[0].count == 18
    with raises(
        TypeError, "plot.ages: Buffer and NoneType; expected Buffer and state. Write plot.ages(buffer, state), or"
    ):
        plot.ages(replay.buffer)

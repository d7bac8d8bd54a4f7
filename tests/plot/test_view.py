"""`fbuf view`: what its page says, and that it sorts, plays and can be read in a browser."""

import json
import re

import jax
import numpy as np
import pytest

import fbuf
from fbuf.__main__ import main
from fbuf.demo import _atari
from fbuf.plot import _view
from tests.support import browser

pytestmark = pytest.mark.more

PLAY = """
  const root = document.getElementById("player");
  await root.ready;
  const canvas = root.querySelector("canvas.screen"), seen = [];
  const level = () => (canvas ? canvas.getContext("2d").getImageData(0, 0, 1, 1).data[0] : null);
  seen.push(level());
  root.seek(2);
  seen.push(level());
  const before = root.querySelector(".at").textContent;
  root.querySelector(".play").click();
  const playing = root.querySelector(".play").textContent;
  await new Promise((done) => setTimeout(done, 3000));
  const after = root.querySelector(".at").textContent;
"""
SORT = """
  const table = document.querySelector("table.sortable");
  const column = (n) => [...table.tBodies[0].rows].map((row) => row.cells[n].textContent);
  const first = column(0);
  table.tHead.rows[0].cells[1].querySelector("button").click();
  const down = column(1);
  table.tHead.rows[0].cells[1].querySelector("button").click();
  const up = column(1);
  const other = [...document.querySelectorAll("tr[data-track]")].find((row) => row.dataset.track === "1");
  other.click();
  const shown = root.querySelector(".faint").textContent, on = document.querySelectorAll("tr.on").length;
  const wide = document.documentElement.scrollWidth <= window.innerWidth + 1;
  const ink = getComputedStyle(document.body).color, page = getComputedStyle(document.body).backgroundColor;
  return { seen, before, playing, after, first, down, up, shown, on, wide, ink, page };
"""


@pytest.fixture
def checkpoint(tmp_path):
    """Twelve episodes of 4 rows; the frames of row t are of level 10 t; the return of episode i is (i - 3) % 12."""
    t = np.arange(48)
    buffer = fbuf.prioritized(60, episode_end=("done",))
    replay = fbuf.Replay(buffer, {"obs": np.zeros((8, 9), np.uint8), "reward": 0.0, "done": False, "<i>": 0.0})
    reward = np.where(t % 4 == 3, (t // 4 - 3) % 12, 0).astype(np.float32)
    obs = np.broadcast_to((t % 4 * 10 + 7).astype(np.uint8)[:, None, None], (48, 8, 9))
    replay.extend({"obs": obs, "reward": reward, "done": t % 4 == 3, "<i>": t / 7})
    replay.save(tmp_path / "replay")
    return tmp_path / "replay"


def test_the_page_is_one_file(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["view", str(checkpoint)]) == 0 and "replay.html" in capsys.readouterr().out
    page = (tmp_path / "replay.html").read_text("utf-8")
    assert not re.search(r"https?://|<i>", page) and "Nothing looks wrong" in page and "12 episodes" in page
    assert "48 of 60" in page and "7 to 37" in page and page.count("data-track=") == 4 + page.count("tr[data-track=")
    assert main(["view", str(checkpoint), "--episodes", "0,worst", "--output", "two.html"]) == 0
    assert (tmp_path / "two.html").read_text("utf-8").count("<tr data-track=") == 2
    assert (
        main(["view", str(checkpoint), "--episodes", "beast"]) == 1
        and "expected numbers, or best" in capsys.readouterr().err
    )
    assert main(["view", str(checkpoint), "--episodes", "12"]) == 1 and "there are 12" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "none")]) == 1


@browser.needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (500, True)])
def test_the_page_sorts_and_plays(checkpoint, tmp_path, width, dark):
    path = tmp_path / "page.html"
    path.write_text(_view.view("fbuf view", checkpoint, (5, "best", "worst")), "utf-8")
    result, problems = browser.run(path, PLAY + SORT, width, dark)
    assert problems == [] and "error" not in result
    assert result["seen"] == [7, 27] and result["playing"] == "pause"
    assert result["before"] == "step 2 of 4" and result["after"] == "step 3 of 4, ended"
    assert result["first"] == [str(i) for i in range(11, -1, -1)]
    assert [float(x) for x in result["down"]] == list(range(11, -1, -1)) and result["up"] == result["down"][::-1]
    assert result["on"] == 1 and "return 11" in result["shown"] and result["wide"]
    light = [sum(map(int, re.findall(r"\d+", result[name])[:3])) for name in ("ink", "page")]
    assert (light[0] > light[1] + 400) if dark else (light[1] > light[0] + 400)


@browser.needs_chromium
def test_an_episode_of_vectors_plays(tmp_path):
    replay = fbuf.Replay(fbuf.Buffer(50, episode_end=("done",)), {"obs": np.zeros(3, np.float32), "done": False})
    obs = np.arange(30, dtype=np.float32).reshape(10, 3)
    obs[4] = np.nan
    replay.extend({"obs": obs, "done": np.arange(10) == 9})
    fbuf.plot.episode(replay, 0).save(tmp_path / "episode.html")
    result, problems = browser.run(tmp_path / "episode.html", PLAY + "return { before, after };")
    assert problems == [] and result == {"before": "step 2 of 10", "after": "step 9 of 10, ended"}


@browser.needs_chromium
def test_a_notebook_gives_the_player_the_height_it_needs(checkpoint, tmp_path):
    shown = fbuf.plot.episode(checkpoint, 0)._repr_html_()
    (tmp_path / "cell.html").write_text(f"<html><head></head><body>{shown}</body></html>", "utf-8")
    script = """
      const frame = document.querySelector("iframe");
      await new Promise((done) => setTimeout(done, 1000));
      const inside = frame.contentDocument;
      return [frame.clientHeight, inside.body.offsetHeight, inside.querySelector(".at").textContent];
    """
    (high, page, at), problems = browser.run(tmp_path / "cell.html", script, 900)
    assert problems == [] and high == page and 200 < high < 600 and at == "step 0 of 4"


def suspicions(rows, lanes=None, end="done"):
    buffer = fbuf.Buffer(max(3999, len(rows[end])), lanes=lanes, episode_end=(end,))
    example = {name: np.zeros(leaf.shape[1 + (lanes is not None) :], leaf.dtype) for name, leaf in rows.items()}
    state = buffer.extend(buffer.init(example), rows)
    found = _view.Episodes("fbuf view", buffer, state)
    return list(_view.suspicious(found, {name: _view._values(found, name) for name in found.spec}))


def test_what_is_suspicious_is_said():
    t = np.arange(400)
    good = {"x": np.sin(t).astype(np.float32), "reward": (t % 3).astype(np.float32), "done": t % 10 == 9}
    assert suspicions(good) == []
    broken = np.where(t == 7, np.nan, good["x"]).astype(np.float32)
    assert suspicions({**good, "x": broken}) == ["x: 1 of 400 values are NaN or infinite"]
    assert suspicions({**good, "x": np.full(400, 3.0, np.float32)}) == ["x is the same in every row"]
    assert suspicions({**good, "reward": np.zeros(400, np.float32)}) == ["reward is 0 in every row"]
    assert suspicions({**good, "done": np.zeros(400, bool)}) == ["no row ends an episode"]
    (said,) = suspicions({**good, "done": (t % 10 == 9) & (t < 100)})
    assert said.startswith("lane 0: its newest 300 rows hold no end")
    three = {name: np.stack([leaf] * 3, axis=1) for name, leaf in good.items()}
    assert suspicions(three, lanes=3) == []
    three["done"] = three["done"].copy()
    three["done"][:, 1] = t % 50 == 49
    assert suspicions(three, lanes=3) == ["lane 1: its episodes have 50 rows, those of all lanes 10"]


def test_every_row_of_vectors_is_looked_at():
    x = np.sin(np.arange(60_000)).astype(np.float32)
    x[1] = np.nan
    assert suspicions({"x": x, "done": np.arange(60_000) % 100 == 99}) == ["x: 1 of 60,000 values are NaN or infinite"]


@pytest.mark.parametrize("writer", [fbuf.writers.Ring(), fbuf.writers.Reservoir()], ids=str)
def test_rows_without_ends_or_order_have_a_page(tmp_path, writer):
    buffer = fbuf.Buffer(16, writer=writer)
    z = np.array([1, 2, np.nan, 4, 5], np.complex64)
    state = buffer.extend(buffer.init({"z": np.complex64(0)}), {"z": z})
    fbuf.save(tmp_path / "with space", buffer, state)
    page = _view.view("fbuf view", tmp_path / "with space")
    assert "z: 1 of 5 values are NaN or infinite" in page
    ring = writer == fbuf.writers.Ring()
    assert ("nothing says where episodes end" in page) == ring and f"{int(ring)} episode" in page


def test_what_cannot_be_shown_is_refused_with_a_way_out(tmp_path, capsys):
    buffer = fbuf.Buffer(4)
    states = {name: buffer.init({"x": 0.0, "done": False}) for name in "ab"}
    fbuf.save(tmp_path / "mixture", fbuf.Mixture(dict.fromkeys("ab", buffer)), states)
    assert main(["view", str(tmp_path / "mixture")]) == 1
    assert "fbuf.plot.episode((mixture[name], states[name]))" in capsys.readouterr().err
    ragged = fbuf.Buffer(4, storage=fbuf.storages.Ragged())
    fbuf.save(tmp_path / "ragged", ragged, ragged.init({"text": ""}))
    assert main(["view", str(tmp_path / "ragged")]) == 1
    assert "Use plot.overview, or fbuf inspect" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "ragged")]) == 0
    assert main(["view", str(tmp_path / "ragged"), "--episodes", "²"]) == 1
    assert "expected numbers, or best" in capsys.readouterr().err


def page_of_ten(path, frames, length):
    """A page of ten episodes, and the tracks in it."""
    n = len(frames)
    buffer = fbuf.Buffer(n, episode_end=("done",))
    rows = {
        "obs": frames,
        "x": np.random.default_rng(1).normal(size=(n, 12)),
        "done": np.arange(n) % length == length - 1,
    }
    state = buffer.extend(buffer.init(jax.tree.map(lambda leaf: np.zeros_like(leaf[0]), rows)), rows)
    fbuf.save(path, buffer, state)
    page = _view.view("fbuf view", path, range(10))
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return page, json.loads(data)["tracks"]


def test_ten_episodes_of_noise_take_five_megabytes_by_leaving_out_steps(tmp_path):
    frames = np.random.default_rng(0).integers(0, 256, (3_000, 48, 48)).astype(np.uint8)
    page, tracks = page_of_ten(tmp_path, frames, 300)
    assert len(page) <= 5_000_000 and len(tracks) == 10 and all(track["every"] > 1 for track in tracks)


def test_ten_episodes_of_a_real_game_take_five_megabytes_with_every_step(tmp_path):
    game = _atari.VectorAtari("seaquest", 1, 0)
    frames = [game.reset()[0]] + [game.step(np.array([t // 4 % game.num_actions]))[0][0] for t in range(2_999)]
    page, tracks = page_of_ten(tmp_path, np.stack(frames), 300)
    assert len(page) <= 5_000_000 and all(track["every"] == 1 for track in tracks)

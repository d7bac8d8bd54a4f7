"""What a `Replay` shows in a notebook."""

from xml.etree import ElementTree

import jax
import numpy as np

import fbuf
from fbuf._replay import replay as module


def test_a_replay_shows_its_summary_and_a_large_one_its_shapes(monkeypatch):
    replay = fbuf.Replay(fbuf.Buffer(100, episode_end=("done",)), {"done": False})
    for t in range(30):
        replay.add({"done": t % 10 == 9})
    page = replay._repr_html_()
    assert "30 of 100" in page and len(list(ElementTree.fromstring(page).iter("svg"))) == 2
    monkeypatch.setattr(module, "SUMMARY_ROWS", 99)
    page = replay._repr_html_()
    assert "svg" not in page and "30 rows" in page and "bool[]" in page


def test_a_replay_shows_itself_when_traced_or_donated():
    replay = fbuf.Replay(fbuf.Buffer(10), {"x": np.float32(0)})
    replay.add({"x": np.float32(1)})
    seen = []
    jax.jit(lambda x: seen.append(replay._repr_html_()) or x)(1)
    assert "1 of 10" in seen[0] and len(replay) == 1
    step = jax.jit(lambda state: replay.buffer.add(state, {"x": 2.0}), donate_argnums=0)
    step(replay.state)
    assert "donated" in replay._repr_html_()


def test_info_shows_itself(tmp_path):
    arrays = {"obs": np.zeros((100, 3), np.float32), "done": np.arange(100) % 10 == 9}
    fbuf.interop.from_arrays(arrays, episode_end=("done",)).save(tmp_path / "data")
    info = fbuf.datasets.info(tmp_path / "data")
    assert repr(info) == str(info) and repr(info).splitlines()[1] == "  rows        100 in 1 segment"
    assert "100 in 1 segment" in [cell.text for cell in ElementTree.fromstring(info._repr_html_()).iter("td")]

"""Episodes of data sets and buffers that `preprocess` reads."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import fbuf
from tests.datasets.test_preprocess import EPISODES, LENGTHS, maze

__all__ = ["maze"]  # a fixture


def test_ends_of_a_buffer_are_kept_where_rows_follow_each_other(tmp_path: Path) -> None:
    row = {"obs": np.zeros(2, np.float32), "reward": np.float32(0), "terminated": False, "truncated": False}
    rows = {name: np.zeros((6, *np.shape(leaf)), np.asarray(leaf).dtype) for name, leaf in row.items()}
    rows["terminated"] = np.arange(6) % 3 == 2
    for name, writer in (("steps", fbuf.writers.Ring()), ("drawn", fbuf.writers.Reservoir())):
        ring = fbuf.Buffer(6, writer=writer)
        held = ring.extend(ring.init(row), rows)

        def less(row: Any) -> Any:
            return {"obs": row["obs"], "reward": row["reward"]}

        buffer, state = fbuf.datasets.preprocess((ring, held), less, dest=tmp_path / name)
        after = buffer.rows(state).data
        if name == "steps":
            assert np.array_equal(after["terminated"], rows["terminated"])
            assert buffer.view == fbuf.views.Transition(action=None, autoreset="same_step")
        else:
            assert sorted(after) == ["obs", "reward"] and buffer.view == fbuf.views.Row()
            other, _ = fbuf.datasets.preprocess((ring, held), lambda row: row, dest=tmp_path / "all")
            assert other.view == fbuf.views.Row()
            fbuf.datasets.preprocess((ring, held), less, dest=tmp_path / "kept", keep=("terminated",))


def test_windows_may_be_episodes(maze: Path, tmp_path: Path) -> None:
    def total(window: Any) -> Any:
        return {"return": jnp.sum(window["reward"]), "steps": jnp.sum(window["mask"])}

    buffer, state = fbuf.datasets.preprocess(
        maze, total, dest=tmp_path / "a", view=fbuf.views.Episode(6, autoreset="same_step")
    )
    rows = buffer.rows(state).data
    assert rows["steps"].tolist() == list(LENGTHS)
    assert np.allclose(rows["return"], [e.reward.sum() for e in EPISODES], rtol=1e-5)

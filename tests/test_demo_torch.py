"""The learner in plain torch: its rows, its targets, that equal settings give equal training, and the command."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gymnasium")

from fbuf.__main__ import main  # noqa: E402
from fbuf.demo import _cartpole, _torchcommand  # noqa: E402

FAST = _cartpole.Settings(steps=240, first_update=80, batch_size=16, capacity=400)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_rows_say_what_came_of_each_step():
    lanes = _cartpole.Lanes(2, seed=3)
    rows, finished = [], []
    for t in range(60):
        before = lanes.obs.copy()
        row, ended = lanes.step([t % 2, 1])
        np.testing.assert_array_equal(row["obs"], before)
        over = (row["terminated"] | row["truncated"]).numpy()
        assert len(ended) == over.sum()
        np.testing.assert_array_equal(row["final_obs"].numpy()[~over], lanes.obs[~over])
        assert (np.abs(row["final_obs"].numpy()[over] - lanes.obs[over]).max(axis=1) > 0.01).all()  # reset since
        rows.append(row)
        finished += ended
    assert finished and sum(finished) <= 120 and all(row["reward"].dtype == torch.float32 for row in rows)


def test_errors_are_those_of_double_q_learning():
    torch.manual_seed(0)
    online, target = _cartpole.network(8), _cartpole.network(8)
    data = {"obs": torch.rand(5, 4), "next_obs": torch.rand(5, 4), "reward": torch.rand(5)}
    data |= {
        "action": torch.tensor([0, 1, 0, 1, 1], dtype=torch.int32),
        "discount": torch.tensor([0.9, 0, 0.9, 0.5, 0]),
    }
    got = _cartpole.td_errors(online, target, data)
    for i in range(5):
        best = int(online(data["next_obs"][i]).argmax())
        value = data["reward"][i] + data["discount"][i] * target(data["next_obs"][i])[best]
        assert torch.isclose(got[i], value - online(data["obs"][i])[data["action"][i]], atol=1e-6)
    got.sum().backward()
    assert all(p.grad is not None for p in online.parameters()) and all(p.grad is None for p in target.parameters())


def test_equal_settings_train_alike():
    (one, first), (other, second) = _cartpole.train(FAST), _cartpole.train(FAST)
    assert first == second and first.losses and first.returns
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert first.stats["size"] == 240 and first.stats["max_priority"] > 0
    _, another = _cartpole.train(dataclasses.replace(FAST, seed=1))
    assert another.losses != first.losses
    returns = _cartpole.evaluate(one, 3, seed=5)
    assert len(returns) == 3 and all(1 <= total <= _cartpole.LONGEST for total in returns)


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(_cartpole, "Settings", lambda steps, seed: dataclasses.replace(FAST, steps=steps, seed=seed))
    assert main(["demo", "torch", "--steps", "120", "--episodes", "2"]) == 0
    out = capsys.readouterr().out
    assert "greedy, 2 episodes:" in out and "rows held: 120" in out
    assert len([text for text in out.splitlines() if text.strip()[:1].isdigit()]) >= 10


def test_what_is_missing_or_cannot_be_is_said(capsys, monkeypatch):
    assert main(["demo", "torch", "--steps", "0"]) == 1
    assert "--steps is 0; expected 1 or more" in capsys.readouterr().err
    monkeypatch.setattr(_torchcommand, "_there", lambda module: module != "torch")
    assert main(["demo", "torch"]) == 1
    assert 'missing: torch. Run: pip install "fbuf[demo]"' in capsys.readouterr().err


@pytest.mark.slow
def test_it_learns():
    online, result = _cartpole.train(dataclasses.replace(_cartpole.Settings(), steps=16_000))
    first = np.mean([total for _, total in result.returns[:20]])
    last = np.mean([total for _, total in result.returns[-20:]])
    assert last > 100 > 3 * first
    assert np.mean(_cartpole.evaluate(online, 10, seed=10_000)) > 100

"""Batches as TensorDicts and back, and torchrl's own loss of them."""

import jax
import numpy as np
import pytest

import fbuf
from fbuf.torch import from_tensordict, index_of, to_tensordict
from tests.support.ragged import empty_replay
from tests.support.refusals import raises

torch = pytest.importorskip("torch")
tensordict = pytest.importorskip("tensordict")


pytestmark = [pytest.mark.more, pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")]
GAMMA = 0.9
ROW = {"obs": np.zeros(2, np.float32), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}


def played(view, steps=40, **fields):
    """Episodes of 7 steps; every second one is cut off. A row's number is in its observation."""
    t = np.arange(steps)
    end = t % 7 == 6
    rows = {"obs": np.stack([t, -t], axis=1).astype(np.float32), "action": (t % 3).astype(np.int32)}
    rows |= {"reward": (t % 5).astype(np.float32), "terminated": end & (t % 14 == 6), "truncated": end & (t % 14 != 6)}
    replay = fbuf.Replay(fbuf.Buffer(64, view=view, batch_size=32), ROW | {n: x[0] for n, x in fields.items()})
    replay.extend(rows | fields)
    return replay


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("form", ["jax", "numpy", "torch"])
def test_transitions_follow_torchrl_conventions(n, form):
    final = np.stack([np.arange(1, 41), -np.arange(1, 41)], axis=1).astype(np.float32)
    view = fbuf.views.Transition(n_step=n, gamma=GAMMA, final_observation="final")
    replay = played(view, final=final)
    sample = replay.sample(to=form)
    td = to_tensordict(sample, view)
    assert td.batch_size == (32,) and td["next", "reward"].shape == (32, 1)
    for i in range(32):
        t = int(td["observation"][i, 0])
        left = 7 - t % 7  # steps to the end of the episode
        steps, ended = min(n, left), left <= n and t // 7 % 2 == 0
        cut = left <= n and not ended
        assert td["next", "observation"][i].tolist() == [t + steps, -t - steps]
        expected = sum(GAMMA**k * ((t + k) % 5) for k in range(steps))
        assert td["next", "reward"][i].item() == pytest.approx(expected, abs=1e-5)
        assert td["next", "terminated"][i].item() is ended
        if left < n or n == 1 or not cut:  # a cut exactly at the n-th step is not seen
            assert td["next", "truncated"][i].item() is cut
            assert td["next", "done"][i].item() is (ended or cut)
        if n > 1 and not ended:
            assert td["steps_to_next_obs"][i].item() == steps
    assert not td["done"].any() and not td["terminated"].any() and not td["truncated"].any()
    assert td["index"].dtype == td["index_generation"].dtype == torch.int64 and td["mask"].all()
    assert ("steps_to_next_obs" in td.keys()) is (n > 1) and td["priority_weight"].shape == (32,)
    if form == "torch":
        assert td["observation"].data_ptr() == sample.data["obs"].data_ptr()


@pytest.mark.parametrize("n", [1, 3])
def test_the_next_observation_of_a_terminated_step_is_the_final_one(n):
    t = np.arange(40)
    end = t % 8 == 6  # the row after holds the final observation
    obs = np.stack([t, -t], axis=1).astype(np.float32)
    rows = {"obs": obs, "action": (t % 3).astype(np.int32), "reward": np.ones(40, np.float32), "truncated": t < 0}
    view = fbuf.views.Transition(n_step=n, gamma=GAMMA, autoreset="next_step")
    replay = fbuf.Replay(fbuf.Buffer(64, view=view, sampler=fbuf.samplers.Epoch()), ROW)
    replay.extend(rows | {"terminated": end})
    td = to_tensordict(replay.sample(30, to="numpy"), view)
    at = td["observation"][:, 0].long()
    steps = torch.clamp(7 - at % 8, max=n)
    assert (td["next", "observation"][:, 0] == at + steps).all()
    assert (td["next", "terminated"][:, 0] == (at % 8 + n >= 7)).all() and td["next", "terminated"].sum() >= 4


@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_steps_are_counted_where_gamma_tells_nothing(gamma):
    view = fbuf.views.Transition(n_step=3, gamma=gamma, autoreset="same_step")
    td = to_tensordict(played(view).sample(), view)
    assert (td["steps_to_next_obs"] == 3).all()
    t = td["observation"][:, 0].long()
    first, within = (t % 14 == 6), (t % 14 >= 4) & (t % 14 <= 6)
    assert torch.equal(td["next", "terminated"].flatten(), first if gamma == 0 else within)


@pytest.mark.parametrize("n", [1, 3])
def test_without_terminations_every_end_is_a_cut(n):
    t = np.arange(40)
    row = {name: value for name, value in ROW.items() if name != "terminated"}
    rows = {
        "obs": np.stack([t, -t], axis=1).astype(np.float32),
        "action": t % 3,
        "reward": t * 0.0,
        "truncated": t % 8 == 6,
    }
    view = fbuf.views.Transition(n_step=n, gamma=GAMMA, terminated=None, autoreset="next_step")
    replay = fbuf.Replay(fbuf.Buffer(64, view=view, sampler=fbuf.samplers.Epoch()), row)
    replay.extend(rows | {"action": rows["action"].astype(np.int32), "reward": rows["reward"].astype(np.float32)})
    td = to_tensordict(replay.sample(30, to="numpy"), view)
    at = td["observation"][:, 0].long()
    steps = torch.clamp(7 - at % 8, max=n)
    assert (td["next", "observation"][:, 0] == at + steps).all() and not td["next", "terminated"].any()
    if n > 1:
        assert torch.equal(td["next", "truncated"].flatten(), steps < n) and (steps < n).any()


def test_indices_address_the_rows_again():
    view = fbuf.views.Transition(gamma=GAMMA, autoreset="same_step")
    sampler = fbuf.samplers.Prioritized(alpha=1.0, eps=0.0)
    replay = fbuf.Replay(fbuf.Buffer(64, view=view, sampler=sampler, batch_size=8), ROW)
    for _ in range(10):
        replay.add(ROW)
    td = to_tensordict(replay.sample(), view)
    replay.update_priority(index_of(td), torch.full((8,), 0.5))
    replay.update_rows(index_of(td), {"reward": torch.full((8,), 9.0)})
    assert (np.asarray(replay.get(index_of(td)).data["reward"]) == 9).all()
    raises(ValueError, "lacks index or index_generation", lambda: index_of(td.select("observation")))


def test_windows_are_batches_of_two_axes():
    replay = played(fbuf.views.Sequence(4, boundary="mask", autoreset="same_step"))
    sample = replay.sample(to="torch")
    td = to_tensordict(sample)
    assert td.batch_size == (32, 4) and td["next", "reward"].shape == (32, 4, 1)
    assert torch.equal(td["mask"], sample.data["mask"]) and td["is_init"].shape == (32, 4, 1)
    assert torch.equal(td["index"], sample.index.slot.long()[:, None].expand(32, 4))
    assert np.array_equal(np.asarray(index_of(td).generation), sample.index.generation.numpy())


def test_leaves_are_renamed():
    replay = played(fbuf.views.Row())
    td = to_tensordict(replay.rows(last=40), names={"obs": ("agent", "pixels"), "action": None})
    assert td.batch_size == (40,) and "action" not in td.keys() and "probability" not in td.keys()
    assert td["agent", "pixels"][:, 0].tolist() == list(range(40))
    view = fbuf.views.Transition(gamma=GAMMA, autoreset="same_step")
    td = to_tensordict(played(view).sample(), view, names={"obs": "pixels"})
    assert {"pixels", ("next", "pixels")} <= set(td.keys(True))


def test_invalid_batches_and_names_are_refused():
    view = fbuf.views.Transition(gamma=GAMMA, autoreset="same_step")
    sample = played(view).sample()
    cases = [
        (TypeError, "batch is dict; expected a Sample or Rows", lambda: to_tensordict(sample.data)),
        (ValueError, "expected that of the batch. Write to_tensordict", lambda: to_tensordict(sample)),
        (ValueError, "names has 'pixels', but", lambda: to_tensordict(sample, view, names={"pixels": "x"})),
        (ValueError, "leaf 'mask' has a reserved name", lambda: to_tensordict(sample, view, names={"action": "mask"})),
        (TypeError, "batch is dict; expected a TensorDict", lambda: from_tensordict({})),
    ]
    for error, match, call in cases:
        raises(error, match, call)


def rollout(*batch):
    """Rows numbered lane by lane, time last, as a collector hands them out."""
    number = torch.arange(int(np.prod(batch))).reshape(batch)
    obs = torch.stack([number, -number], dim=-1).float()
    flags = {n: (number % 5 == 4).unsqueeze(-1) for n in ("terminated", "truncated", "done")}
    after = {"observation": obs + 1, "reward": number.float().unsqueeze(-1)} | flags
    return tensordict.TensorDict({"observation": obs, "action": number, "next": after}, batch_size=batch)


def test_rollouts_are_converted_to_rows():
    rows = from_tensordict(rollout(6))
    kinds = {"obs": "float32", "action": "int32", "reward": "float32", "terminated": "bool", "truncated": "bool"}
    assert {n: x.dtype.name for n, x in rows.items()} == kinds
    assert rows.pop("obs").shape == (6, 2) and all(x.shape == (6,) for x in rows.values())
    lanes = from_tensordict(rollout(3, 4), final_observation="final_obs")
    assert lanes["reward"].shape == (4, 3) and lanes["final_obs"].shape == (4, 3, 2)
    assert np.array_equal(lanes["action"], np.arange(12).reshape(3, 4).T)
    many = from_tensordict(rollout(2, 3, 4))
    assert np.array_equal(many["action"], np.arange(24).reshape(6, 4).T)
    named = rollout(4, 3)
    named.names = ["time", None]
    assert np.array_equal(from_tensordict(named)["action"], np.arange(12).reshape(4, 3))
    view = fbuf.views.Transition(final_observation="final_obs")
    buffer = fbuf.Buffer(60, view=view, lanes=3)
    state = buffer.init(jax.tree.map(lambda x: x[0, 0], lanes))
    assert int(buffer.size(buffer.extend(state, lanes))) == 12


def test_chosen_fields_are_converted():
    td = rollout(5)
    assert set(from_tensordict(td, None)) == {"observation", "action", "next"}
    some = from_tensordict(td, {("next", "reward"): "r", "observation": ("agent", "seen")})
    assert set(some) == {"r", "agent"} and some["r"].shape == (5, 1)
    assert set(from_tensordict(td, ["action"])) == {"action"}
    whole = from_tensordict(td, {"next": "after"})
    assert set(whole["after"]) == {"observation", "reward", "done", "terminated", "truncated"}
    assert "action" not in from_tensordict(td.exclude("action", ("next", "truncated")))
    cases = [
        (ValueError, "fields has 'pixels', but the TensorDict has", td, {"pixels": "obs"}),
        (ValueError, "fields has 'next/reward', but", td.exclude(("next", "reward")), "ted"),
        (ValueError, "fields is 'all'; expected", td, "all"),
        (ValueError, "two leaves get the name 'x'", td, {"action": "x", "observation": "x"}),
        (ValueError, r"batch_size is \[\]", td[0], "ted"),
        (ValueError, "leaf 'action' is int64 with values that int32", td.set("action", td["action"] + 2**40), "ted"),
    ]
    for error, match, given, fields in cases:
        raises(error, match, from_tensordict, given, fields)
    double = rollout(5).double()
    raises(TypeError, "leaf 'action' is float64, and jax_enable_x64 is off", from_tensordict, double)


def test_a_tensordict_is_refused_where_rows_are_expected():
    raises(TypeError, r"rows are a TensorDict", lambda: fbuf.Replay(fbuf.Buffer(8), ROW).extend(rollout(3)))
    raises(TypeError, r"is a TensorDict; .*fbuf\.torch\.from_tensordict\(x\)", fbuf.torch.from_torch, {"x": rollout(3)})


def test_ragged_rows_are_nested_tensors():
    replay = empty_replay()
    tokens = [np.arange(n, dtype=np.int32) for n in (2, 5)]
    grids = [np.ones((1, 3), np.float32), np.ones((2, 3), np.float32)]
    replay.extend({"tokens": tokens, "padded": tokens, "grid": grids, "text": ["one", "two"]})
    td = to_tensordict(replay.rows(last=2))
    assert [x.tolist() for x in td["tokens"].unbind()] == [x.tolist() for x in tokens]
    assert list(td["text"]) == ["one", "two"] and td["padded"].shape == (2, 6)

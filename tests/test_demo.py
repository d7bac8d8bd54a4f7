"""The demo: every storage trains alike, and what a beginner gets wrong is said clearly."""

from __future__ import annotations

import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")

import fbuf  # noqa: E402
import fbuf.testing  # noqa: E402
from fbuf.__main__ import main  # noqa: E402
from fbuf.demo import _actor, _command, _dqn, _plot, _report, _run, _storages  # noqa: E402

PNG = b"\x89PNG\r\n\x1a\n"


class Blocks:
    """A stand-in for the games: lane, episode and time can be read off every frame; episodes end after 5 to 12 steps.

    Each episode ends for good except in lane 0, where it is cut off.
    """

    num_actions = 3

    def __init__(self, game: str, lanes: int, seed: int) -> None:
        self.lanes, self._rng = lanes, np.random.default_rng(seed)

    def reset(self):
        self._age, self._episode = np.zeros(self.lanes, np.int64), np.zeros(self.lanes, np.int64)
        self._left = self._rng.integers(5, 13, self.lanes)
        return self._frames()

    def step(self, actions):
        self._age += 1
        self._left -= 1
        ended = self._left == 0
        self._episode[ended] += 1
        self._age[ended] = 0
        self._left[ended] = self._rng.integers(5, 13, ended.sum())
        reward = 3 * (np.asarray(actions) == 1).astype(np.float32)
        cut = ended & (np.arange(self.lanes) == 0)
        return self._frames(), reward, ended & ~cut, cut

    def _frames(self):
        frames = np.zeros((self.lanes, 84, 84), np.uint8)
        frames[:, 0, 0] = np.arange(self.lanes) + 1
        frames[:, 0, 1] = self._episode % 250 + 1
        frames[:, 0, 2] = self._age + 1
        frames[:, 40:60, 10:70] = 13 * (self._age % 12)[:, None, None]
        return frames


@pytest.fixture
def small(monkeypatch):
    """The loop at a size for tests: little random play, few measurements, a ring that comes round."""
    monkeypatch.setattr(_run, "_PREFILL", 20)
    monkeypatch.setattr(_run, "_SHARE_ROUNDS", 2)
    monkeypatch.setattr(_run, "CAPACITY", 240)


@pytest.fixture(scope="module")
def runs():
    """One short run of every storage, on the same seed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "_PREFILL", 20)
        patch.setattr(_run, "_SHARE_ROUNDS", 2)
        patch.setattr(_run, "CAPACITY", 240)
        settings = _run.Settings("blocks", seed=3, steps=8)
        return {name: _run.run(name, settings, Blocks, newest=10_000) for name in _dqn.STORAGES}


@pytest.fixture(scope="module")
def columns(runs):
    """The comparison of all storages on the rows of one run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_storages, "READS", 5)
        patch.setattr(_storages, "_GROUP", 2)
        return _storages.compare(runs["device"].newest)


@pytest.mark.slow
def test_every_storage_trains_alike(runs):
    first = runs["device"]
    assert np.isfinite(first.losses).all() and (first.losses > 0).all()
    for result in runs.values():
        np.testing.assert_array_equal(result.losses, first.losses)
        jax.tree.map(np.testing.assert_array_equal, result.params, first.params)
        assert result.episodes == first.episodes
        assert _report.identical(first, result)


def test_identical_sees_a_single_bit(runs):
    one, other = runs["device"], runs["host"]
    changed = jax.tree.map(np.copy, other.params)
    changed["out"]["bias"][0] = np.nextafter(changed["out"]["bias"][0], np.float32(9))
    before, other.params = other.params, changed
    try:
        assert not _report.identical(one, other)
        assert "DIFFERENT" in _report.table([one, other])
    finally:
        other.params = before


def test_rows_of_the_end_are_those_played(runs):
    one = runs["device"].newest
    assert one["obs"].shape == (30, 8, 84, 84) and one["action"].shape == (30, 8)
    for result in runs.values():
        jax.tree.map(np.testing.assert_array_equal, result.newest, one)
    # In order of time: the frame says how old its episode is.
    age, over = one["obs"][:, :, 0, 2].astype(int), one["terminated"] | one["truncated"]
    np.testing.assert_array_equal(age[1:], np.where(over[:-1], 1, age[:-1] + 1))
    np.testing.assert_array_equal(one["obs"][:, :, 0, 0], np.tile(np.arange(1, 9), (30, 1)))


def test_newest_gives_what_is_held_and_no_more():
    buffer = _dqn.make_buffer(fbuf.storages.Device(), 8 * 16)
    actor = _actor.Actor(Blocks("blocks", 8, 0), jax.random.key(0))
    rows = actor.play(_dqn.init_params(jax.random.key(1), 3), 6, epsilon=1.0)
    replay = buffer.extend(buffer.init(_dqn.example_row()), rows)
    for number, steps in ((40, 5), (47, 5), (48, 6), (1_000, 6)):
        found = _storages.newest(buffer, replay, number)
        jax.tree.map(np.testing.assert_array_equal, found, {name: x[6 - steps :] for name, x in rows.items()})


@pytest.mark.slow
def test_a_crowded_table_grows_while_storages_are_compared(runs, columns, monkeypatch):
    kept = {name: _dqn.STORAGES[name] for name in ("device", "deduplicated")}
    monkeypatch.setattr(_dqn, "STORAGES", kept)
    monkeypatch.setattr(_storages, "READS", 2)
    monkeypatch.setattr(_storages, "CROWDED", 0.6)
    _, grown = _storages.compare(runs["device"].newest)
    before = columns[-1]
    assert before.blocks.grown == 0 and before.blocks.load > 0.6
    assert grown.blocks.grown > 0 and grown.blocks.load < before.blocks.load
    assert grown.blocks.places > before.blocks.places and grown.device_bytes > before.device_bytes
    assert grown.identical and grown.blocks.gone == 0 and grown.write > 0


@pytest.mark.slow
def test_the_table_grows_before_rows_give_way(monkeypatch):
    """Every frame is new, so that the table fills as fast as rows come."""
    actor = _actor.Actor(Blocks("blocks", 8, 0), jax.random.key(0))
    one = actor.play(_dqn.init_params(jax.random.key(1), 3), 1, epsilon=1.0)
    rows = {name: np.repeat(x, 140, axis=0) for name, x in one.items()}
    number = np.arange(140 * 8).reshape(140, 8)
    rows["obs"][:, :, 0, 0], rows["obs"][:, :, 0, 1] = number % 256, number // 256
    kept = {
        "device": fbuf.storages.Device,
        "tight": lambda: fbuf.storages.Deduplicated(keys=("obs",), block=(84, 84), blocks=1024),
    }
    monkeypatch.setattr(_dqn, "STORAGES", kept)
    monkeypatch.setattr(_storages, "READS", 2)
    _, tight = _storages.compare(rows)
    assert tight.blocks.grown == 1 and tight.blocks.gone == 0 and tight.rows == 140 * 8 and tight.identical


@pytest.mark.slow
def test_a_crowded_table_grows_and_training_stays_the_same(runs, small, monkeypatch):
    monkeypatch.setattr(_storages, "CROWDED", 0.6)
    grown = _run.run("deduplicated", _run.Settings("blocks", seed=3, steps=8), Blocks)
    before = runs["deduplicated"]
    assert grown.blocks.grown > 0 and grown.blocks.places > before.blocks.places and grown.blocks.gone == 0
    assert grown.device_bytes > before.device_bytes
    assert "growing and compiling again" in grown.seconds
    assert _report.identical(runs["device"], grown)
    text = _report.table([runs["device"], grown])
    assert re.search(r"deduplicated: .* grown (once|twice|\d+ times); no row gave way", text) and "identical" in text
    assert re.search(r"loop: growing and compiling again +0% +\d+%", text)


def test_rows_that_gave_way_are_said(runs):
    blocks = runs["deduplicated"].blocks._replace(gone=1_234, load=0.92)
    text = _report.table([dataclasses.replace(runs["deduplicated"], blocks=blocks)])
    assert "1,234 rows gave way" in text and "92% of" in text


def test_comparison_of_storages(runs, columns):
    assert [c.storage for c in columns] == list(_dqn.STORAGES)
    by_name = {c.storage: c for c in columns}
    assert all(c.rows == 7 * 4 * 8 for c in columns)  # 30 steps are 7 lots
    assert all(c.identical and c.write > 0 and c.read > 0 for c in columns)
    frames = 7 * 4 * 8 * 7056
    assert by_name["device"].device_bytes > frames and by_name["host"].host_bytes > frames
    assert by_name["deduplicated"].device_bytes < frames / 10
    assert 0 < by_name["compressed"].host_bytes < frames  # its contexts are most of it, in so few rows
    assert by_name["deduplicated"].host_bytes == 0 and by_name["deduplicated"].blocks.gone == 0


def test_comparison_in_words(columns):
    text = _report.storages(columns)
    rows = [re.split(r" {3,}", line.strip()) for line in text.splitlines() if line.startswith("  ")]
    lines = {head: cells for head, *cells in rows}
    assert lines["storage"] == list(_dqn.STORAGES)
    assert lines["batches for one key"] == ["reference", "identical", "identical", "identical"]
    assert lines["raw stacks / all of it"][0] == "8x"
    assert "224 of these rows" in text and "deduplicated here: blocks of" in text
    assert max(map(len, text.splitlines())) <= 128


def test_comparison_sees_a_single_bit(runs, monkeypatch):
    """A storage that changes one bit of one frame it reads differs; the others do not."""

    class Wrong(fbuf.storages.Device):
        def read(self, rows, reads):
            leaves, ok = super().read(rows, reads)
            flipped = [x.at[(0,) * x.ndim].add(jnp.uint8(1)) if x.dtype == jnp.uint8 else x for x in leaves]
            return flipped, ok

    monkeypatch.setattr(_storages, "READS", 1)
    monkeypatch.setattr(
        _dqn, "STORAGES", {"device": fbuf.storages.Device, "wrong": Wrong, "again": fbuf.storages.Device}
    )
    columns = _storages.compare(runs["device"].newest)
    assert [c.identical for c in columns] == [True, False, True]
    assert "DIFFERENT" in _report.storages(columns)


@pytest.mark.slow
def test_another_seed_trains_otherwise(runs, small):
    other = _run.run("device", _run.Settings("blocks", seed=4, steps=8), Blocks)
    assert not _report.identical(runs["device"], other)


def test_figures_of_a_run(runs):
    for name, result in runs.items():
        assert result.rows == 240  # 52 steps of 8 lanes were played: the ring came round
        assert result.raw_bytes == 240 * 8 * 7056
        assert result.memory[0][:2] == (24 * 8, 24 * 8) and result.memory[-1][:2] == (52 * 8, 240)
        assert set(result.seconds) == {"acting and emulators", "training steps"}
        assert result.steps_per_second > 0
        assert (result.host_bytes > 0) == (name in ("host", "compressed"))
        assert (result.blocks is not None) == (name == "deduplicated")
        assert result.share[0] <= result.share[1] <= result.share[2] < 1
        assert result.batch.data["obs"].shape == (32, 4, 84, 84)
    frames = 240 * 7056
    assert runs["device"].device_bytes > frames and runs["host"].host_bytes > frames
    assert runs["compressed"].device_bytes < 50_000
    assert runs["deduplicated"].device_bytes < frames / 10
    assert len(runs["device"].losses) == 8
    # The score counts what the game gave (3 a time), the rows hold its sign.
    assert {e.score % 3 for e in runs["device"].episodes} == {0.0} and runs["device"].batch.data["reward"].max() < 3


def test_the_network_acts_on_the_stacks_it_learns_from():
    actor = _actor.Actor(Blocks("blocks", 4, 0), jax.random.key(0))
    params = _dqn.init_params(jax.random.key(1), 3)
    buffer = _dqn.make_buffer(fbuf.storages.Device(), 4 * 40, lanes=4)
    replay, seen = buffer.init(_dqn.example_row()), []
    for _ in range(40):
        seen.append(actor.stacks)
        replay = buffer.extend(replay, actor.play(params, 1, epsilon=0.5))
    for stacks in seen[4:]:
        assert stacks.shape == (4, 4, 84, 84) and stacks.dtype == np.uint8
    acted = {stack.tobytes() for stacks in seen for stack in stacks}
    batch = buffer.peek(replay, jax.random.key(2), 256)
    assert batch.mask.all()
    drawn = np.asarray(batch.data["obs"])
    assert all(stack.tobytes() in acted for stack in drawn)
    # Starts of episodes are among them, with zeros before the first frame.
    assert (~drawn[:, 0].any(axis=(1, 2)) & drawn[:, -1].any(axis=(1, 2))).any()


def test_epsilon_falls_and_stays():
    values = [_run.epsilon(i, 100) for i in range(101)]
    assert values[0] == 1.0 and values[50] == values[100] == 0.05
    assert all(a >= b for a, b in zip(values, values[1:], strict=False))


def test_greedy_and_random_actions():
    params = _dqn.init_params(jax.random.key(0), 4)
    stacks = jnp.asarray(np.random.default_rng(0).integers(0, 255, (8, 4, 84, 84), np.uint8))
    best = np.argmax(np.asarray(_dqn.q_values(params, stacks)), axis=-1)
    act = jax.jit(_dqn.act)
    key, one, zero = jax.random.key(5), np.float32(1), np.float32(0)
    for time in range(5):
        np.testing.assert_array_equal(act(params, stacks, key, np.int32(time), zero), best)
    drawn = np.stack([act(params, stacks, key, np.int32(time), one) for time in range(60)])
    assert (np.bincount(drawn.reshape(-1), minlength=4) > 60).all() and drawn.dtype == np.int32


def test_the_step_updates_the_replay_in_place():
    # Nothing is allocated; so large that a copy of even the smallest array of the replay (8 MB of flags) would show.
    buffer = _dqn.make_buffer(fbuf.storages.Device(), 8_000_000)
    config = _dqn.Config(4)
    learner = jax.eval_shape(lambda: _dqn.init_learner(jax.random.key(0), config))
    row = _dqn.example_row()
    replay = jax.eval_shape(lambda: buffer.init(row))
    rows = {name: jax.ShapeDtypeStruct((4, 8, *x.shape), x.dtype) for name, x in row.items()}
    key = jax.eval_shape(lambda: jax.random.key(0))
    bare = fbuf.testing.measure(
        lambda learner, batch: _dqn.learn(config, learner, batch)[0],
        learner,
        jax.eval_shape(lambda replay, key: buffer.peek(replay, key, 32), replay, key),
    )
    whole = fbuf.testing.measure(_dqn.make_step(buffer, config), learner, replay, key, rows, donate=(0, 1))
    # A batch (1.8 MB) and rows (0.2 MB) more than the network alone.
    assert whole.temporary < bare.temporary + 6e6
    assert whole.made < 1e5


def test_learning_reduces_the_error_on_one_batch(runs):
    batch = jax.tree.map(jnp.asarray, runs["device"].batch)
    config = _dqn.Config(3, learning_rate=1e-3, target_period=1_000)
    learner, learn = _dqn.init_learner(jax.random.key(0), config), _dqn.make_learn(config)
    losses = []
    for _ in range(15):
        learner, _, metrics = learn(learner, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_masked_rows_teach_nothing():
    config = _dqn.Config(3)
    buffer = _dqn.make_buffer(fbuf.storages.Device(), 80)
    batch = buffer.peek(buffer.init(_dqn.example_row()), jax.random.key(0), 4)
    assert not batch.mask.any()
    before = _dqn.init_learner(jax.random.key(0), config)
    before.params["out"]["bias"] += 1.0  # so that frames of zeros have an error, which only the weight takes away
    after, td_error, metrics = _dqn.learn(config, before, batch)
    assert metrics["loss"] == 0 and (np.abs(td_error) > 0.5).all()
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)


def test_the_target_network_follows_every_period(runs):
    batch = jax.tree.map(jnp.asarray, runs["device"].batch)
    config = _dqn.Config(3, target_period=2)
    learner = _dqn.init_learner(jax.random.key(0), config)
    first = jax.tree.map(np.array, learner.params)
    learner, _, _ = _dqn.learn(config, learner, batch)
    jax.tree.map(np.testing.assert_array_equal, learner.target, first)
    assert not np.array_equal(learner.params["conv1"]["kernel"], first["conv1"]["kernel"])
    learner, _, _ = _dqn.learn(config, learner, batch)
    jax.tree.map(np.testing.assert_array_equal, learner.target, learner.params)


# --------------------------------------------------------------------------------------------- what is shown


def test_table(runs):
    text = _report.table(list(runs.values()))
    assert text.count("identical") >= 4 and "DIFFERENT" not in text and "reference" in text
    lines = {line[2:30].strip(): line[30:].split() for line in text.splitlines() if line.startswith("  ")}
    assert lines["storage"] == ["device", "host", "compressed", "deduplicated"]
    assert lines["rows held"] == ["240", "240", "240", "240"]
    assert "13.5 MB" in text  # 240 rows of 8 frames
    assert max(map(len, text.splitlines())) <= 128


def test_picture(runs, tmp_path):
    path = tmp_path / "picture.png"
    _plot.plot(list(runs.values()), path)
    data = path.read_bytes()
    assert data.startswith(PNG) and len(data) > 50_000


def test_picture_of_the_shortest_run(runs, tmp_path):
    whole = runs["device"]
    short = {"losses": whole.losses[:1], "td_errors": whole.td_errors[:1], "memory": whole.memory[:1]}
    result = dataclasses.replace(whole, episodes=[], steps_per_second=float("nan"), **short)
    assert "none ended" in _report.table([result])
    _plot.plot([result], tmp_path / "picture.png")


# --------------------------------------------------------------------------------------------- command line


@pytest.fixture
def blocks_for_games(small, monkeypatch):
    """The command line's own environment is the stand-in, and no game is unknown to it."""
    pytest.importorskip("ale_py")
    from fbuf.demo import _atari

    monkeypatch.setattr(_atari, "VectorAtari", Blocks)


def test_compare_from_the_command_line(runs, columns, tmp_path, capsys, monkeypatch):
    pytest.importorskip("ale_py")
    asked = []

    def run(storage, settings, make_environment, progress, newest):
        asked.append((settings, newest))
        progress(8, {"loss": "0.1"})
        return runs[storage]

    monkeypatch.setattr(_run, "run", run)
    monkeypatch.setattr(_storages, "compare", lambda rows, progress: columns)
    out = tmp_path / "compare.png"
    assert main(["demo", "--compare", "--seed", "1", "--out", str(out)]) == 0
    settings = _run.Settings("breakout", 1, _command.STEPS_COMPARED)
    assert asked == [(settings, _storages.ROWS), (settings, 0), (settings, 0), (settings, 0)]
    captured = capsys.readouterr()
    assert (
        captured.out.count("identical") >= 6
        and "every storage on the newest" in captured.out
        and str(out) in captured.out
    )
    assert "compressed" in captured.err  # the progress bar
    assert out.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_compare_for_real_from_the_command_line(blocks_for_games, tmp_path, capsys):
    out = tmp_path / "compare.png"
    assert main(["demo", "--compare", "--steps", "2", "--seed", "1", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert all(name in captured.out for name in _command.STORAGES)
    assert captured.out.count("identical") >= 6 and out.read_bytes().startswith(PNG)


def test_a_storage_that_differs_is_a_failure(blocks_for_games, runs, columns, tmp_path, capsys, monkeypatch):
    wrong = [*columns[:-1], dataclasses.replace(columns[-1], identical=False)]
    monkeypatch.setattr(_run, "run", lambda storage, *_: runs[storage])
    for found, status in ((columns, 0), (wrong, 1)):
        monkeypatch.setattr(_storages, "compare", lambda rows, progress, found=found: found)
        assert main(["demo", "--storage", "device", "--out", str(tmp_path / "x.png")]) == status
        assert ("DIFFERENT" in capsys.readouterr().out) == bool(status)


def test_compare_that_differs_is_a_failure(blocks_for_games, runs, columns, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_report, "identical", lambda one, other: one is other)
    monkeypatch.setattr(_run, "run", lambda storage, *_: runs[storage])
    monkeypatch.setattr(_storages, "compare", lambda rows, progress: columns)
    assert main(["demo", "--compare", "--out", str(tmp_path / "x.png")]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


@pytest.mark.slow
def test_real_game_from_the_command_line(small, tmp_path, capsys):
    pytest.importorskip("ale_py")
    out = tmp_path / "pong.png"
    assert main(["demo", "--game", "Pong", "--steps", "3", "--storage", "host", "--out", str(out)]) == 0
    assert "pong, seed 0: 3 training steps" in capsys.readouterr().out and out.exists()


def test_storages_on_the_command_line_are_those_there_are():
    assert tuple(_dqn.STORAGES) == _command.STORAGES


def test_no_command_prints_help(capsys):
    assert main([]) == 0
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--game", "Brekout"], r"--game is 'Brekout'; .* Near: breakout"),
        (["--steps", "0"], r"--steps is 0; expected 1 or more\. Use --steps 2000"),
        (["--seed", "-1"], r"--seed is -1; .* Use --seed 0"),
        (["--out", "."], r"--out \. is a folder; expected a file\. Use --out fbuf-demo\.png"),
        (["--out", "a.pdf"], r"--out a\.pdf does not end in \.png\. Use --out a\.png"),
        (["--out", "nowhere/a.png"], r"no folder nowhere\. Make it: mkdir -p nowhere"),
        (["--out", "/proc/a.png"], r"--out /proc/a\.png: .* Choose another"),
    ],
)
def test_what_a_beginner_gets_wrong(arguments, message, capsys, tmp_path, monkeypatch):
    pytest.importorskip("ale_py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_run, "run", None)  # nothing may start
    assert main(["demo", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ")
    assert re.search(message, captured.err)
    assert not list(tmp_path.iterdir())


def test_argparse_names_the_choices(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--storage", "disk"])
    assert stop.value.code == 2 and "compressed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("modules", "said"),
    [(["optax"], "optax is missing"), (["ale_py", "tqdm"], "ale-py, tqdm are missing")],
)
def test_a_missing_extra_names_the_command_to_install_it(modules, said, capsys, monkeypatch):
    pytest.importorskip("ale_py")
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == f'error: {said}. Run: pip install "fbuf[demo]"\n'


def test_the_command_says_its_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"fbuf {fbuf.__version__}\n"


def test_interrupting_is_no_traceback(capsys, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_command, "main", interrupt)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err

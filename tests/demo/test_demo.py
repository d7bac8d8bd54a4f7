"""The demo's parts that need no games, and its command line."""

import re

import jax
import numpy as np
import pytest

import fbuf
from fbuf.__main__ import main
from fbuf.demo import _command, _compare_storages, _dqn, _run
from tests.support.demo import some_rows


def test_newest_returns_the_rows_that_are_stored() -> None:
    buffer = _dqn.make_buffer(fbuf.storages.Device(), 8 * 16)
    rows = some_rows(6)
    replay = buffer.extend(buffer.init(_dqn.example_row()), rows)
    for number, steps in ((40, 5), (47, 5), (48, 6), (1_000, 6)):
        found = _compare_storages.newest(buffer, replay, number)
        jax.tree.map(np.testing.assert_array_equal, found, {name: x[6 - steps :] for name, x in rows.items()})


def test_help_shows_every_option_as_optional(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.raises(SystemExit, main, ["demo", "--help"])
    shown = " ".join(capsys.readouterr().out.partition("options:")[0].split())
    usage = shown[shown.index("fbuf demo ") : shown.index("Trains")]
    assert usage.replace(" [", "[").rstrip().endswith("]") and "..." not in usage and "--storage" in usage
    assert not re.sub(r"\[[^\[\]]*\]", "", usage.removeprefix("fbuf demo ")).strip()  # nothing outside brackets


def test_epsilon_falls_and_stays() -> None:
    values = [_run.epsilon(i, 100) for i in range(101)]
    assert values[0] == 1.0 and values[50] == values[100] == 0.05
    assert all(a >= b for a, b in zip(values, values[1:], strict=False))


def test_actions_are_greedy_or_random() -> None:
    params = _dqn.init_params(jax.random.key(0), 4)
    stacks = np.random.default_rng(0).integers(0, 255, (8, 4, 84, 84), np.uint8)
    best = np.argmax(np.asarray(jax.jit(_dqn.q_values)(params, stacks)), axis=-1)
    act = jax.jit(_dqn.act)
    key, one, zero = jax.random.key(5), np.float32(1), np.float32(0)
    for time in range(5):
        np.testing.assert_array_equal(act(params, stacks, key, np.int32(time), zero), best)
    drawn = np.stack([act(params, stacks, key, np.int32(time), one) for time in range(60)])
    assert (np.bincount(drawn.reshape(-1), minlength=4) > 60).all() and drawn.dtype == np.int32


def test_the_command_names_the_storages() -> None:
    assert tuple(_dqn.STORAGES) == _command.STORAGES


def test_the_command_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == 0
    assert "demo" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--storage", "disk"])
    assert stop.value.code == 2 and "compressed" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"fbuf {fbuf.__version__}\n"

    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(_command, "main", interrupt)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err

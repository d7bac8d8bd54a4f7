"""`fbuf inspect` and `fbuf verify` of checkpoints and data sets, and progress."""

import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.__main__ import main
from fbuf._formats import checkpoint
from tests.support.disk import flip
from tests.support.memory_disk import PATH, disk_of, save, sources


def test_an_error_in_progress_ends_the_save_and_leaves_nothing():
    disk, stop = disk_of(1), mock.Mock(side_effect=[None, KeyboardInterrupt])
    before = disk.contents()
    pytest.raises(KeyboardInterrupt, save, PATH, 2, disk, progress=stop)
    assert disk.contents() == before


@pytest.fixture
def run(capsys):
    return lambda *arguments: (main(arguments), *capsys.readouterr())


def rows_of_lanes(*lengths):
    """Rows of episodes of the given lengths, in each of two lanes."""
    end = np.concatenate([np.arange(length) == length - 1 for length in lengths])[:, None].repeat(2, 1)
    return {"obs": np.ones((len(end), 2, 3), np.float32), "done": end}


def no_change(data):
    return data


def labelled(out):
    return {line[2:13].strip(): line[14:] for line in out.splitlines()[1:]}


def test_inspect_says_what_a_person_asks(run, tmp_path):
    view = fbuf.views.Sequence(2, episode_end=("done",), autoreset="same_step")
    buffer = fbuf.Buffer(40, lanes=2, sampler=fbuf.samplers.Prioritized(alpha=1.0), view=view)
    replay = fbuf.Replay(buffer, {"obs": np.zeros(3, np.float32), "done": False})
    rows = rows_of_lanes(3, 5, 4)
    replay.extend(rows, priority=np.linspace(1, 3, rows["done"].size).reshape(-1, 2))
    replay.add({"obs": np.zeros((2, 3), np.float32), "done": np.zeros(2, bool)})
    path = str(tmp_path / "replay")
    replay.save(path, extra={"step": 7, "scale": 0.5, "name": "\x1b[2J", "w": np.zeros(4)})
    status, out, _ = run("inspect", path)
    said = labelled(out)
    assert status == 0 and "\x1b" not in out and "a checkpoint" in out.splitlines()[0]
    assert said["kind"] == "Replay" and said["rows"] == "26 of 40 (65 %)" and said["lanes"] == "2"
    assert said["episodes"] == "6 whole, of 3 to 5 rows; 2 cut" and said["intact"] == "yes, every byte"
    drawable = int(replay.stats()["anchors"])
    assert said["anchors"] == f"{drawable} rows" and said["leaves"] == "done bool[], obs float32[3]"
    held = replay.summary().priorities
    for value in (held.min, held.max):
        assert f"{value:.4g}" in said["priorities"]
    assert "step 7" in said["extra"] and "scale 0.5" in said["extra"] and "w array[4]" in said["extra"]
    assert f"by fbuf {fbuf.__version__}" in said["saved"] and "UTC" in said["saved"]


@pytest.mark.more
def test_inspect_of_mixtures_shards_host_priorities_and_custom_parts(run, tmp_path):
    buffer = fbuf.Buffer(8)
    state = buffer.extend(buffer.init({"t": 0}), {"t": jnp.arange(5)})
    mixture = fbuf.Mixture({"a": buffer, "b": fbuf.prioritized(20)}, {"a": 0.5, "b": 0.5})
    fbuf.save(tmp_path / "mixture", mixture, {"a": state, "b": mixture["b"].init({"t": 0})})
    out = run("inspect", str(tmp_path / "mixture"))[1]
    assert "Mixture of a, b" in out and "a: rows     5 of 8" in out and "b: rows     0 of 20" in out
    shards = fbuf.sharded.Sharded(fbuf.Buffer(8, lanes=2), jax.make_mesh((1,), ("data",)), "data")
    fbuf.save(tmp_path / "shards", shards, shards.extend(shards.init({"t": 0}), {"t": jnp.zeros((3, 2), int)}))
    out = run("inspect", str(tmp_path / "shards"))[1]
    assert "in 1 shards" in out and labelled(out)["rows"].startswith("6 of 8")
    chained = fbuf.Buffer(8, on_read=fbuf.transforms.Map(no_change))
    fbuf.save(tmp_path / "own", chained, chained.extend(chained.init({"t": 0}), {"t": jnp.arange(5)}))
    status, out, _ = run("inspect", str(tmp_path / "own"))
    assert status == 0 and "? of 8" in out and "no_change" in out
    host = fbuf.Buffer(8, storage=fbuf.storages.Host(), sampler=fbuf.samplers.Prioritized(on="host"))
    fbuf.save(tmp_path / "host", host, host.extend(host.init({"t": 0}), {"t": jnp.arange(5)}))
    assert labelled(run("inspect", str(tmp_path / "host"))[1])["rows"].startswith("5 of 8")


def test_inspect_and_verify_of_a_data_set(run, tmp_path):
    path = tmp_path / "data"
    arrays = {
        "obs": np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32),
        "done": np.arange(500) % 10 == 9,
    }
    fbuf.interop.from_arrays(arrays, episode_end=("done",)).save(path)
    status, out, _ = run("inspect", str(path))
    assert status == 0 and "a data set" in out.splitlines()[0] and labelled(out)["intact"] == "yes, every byte"
    assert labelled(out)["rows"] == "500 in 1 segment"
    assert json.loads(run("inspect", "--json", str(path))[1])["rows"] == 500
    assert run("verify", str(path)) == (0, "whole\n", "")
    flip(next((path / "pieces" / "0").glob("data-*.safetensors")), -1, -60)
    assert run("verify", str(path))[0] == 1
    assert "damaged" in labelled(run("inspect", str(path))[1])


def test_inspect_and_verify_of_damage(run, tmp_path):
    path = str(tmp_path / "c")
    assert run("inspect", path)[0] == run("verify", path)[0] == 1
    assert "no checkpoint or data set at" in run("verify", path)[2]
    save(path, 1)
    meta = {"k": 2, "long": ["x" * 1000], "\x1b[2J": "\x1b[2J"}
    checkpoint.write(path, sources(2), meta)
    (tmp_path / "c" / "notes").touch()
    status, out, _ = run("inspect", path)
    assert status == 0 and "arrays, of no buffer" in out and "2, 1; the newest" in out and "yes, every byte" in out
    status, out, _ = run("inspect", path, "--json")
    about = json.loads(out)
    newest, older = about["generations"]
    assert "\x1b" not in out and newest["meta"] == meta and newest["generation"] == 2 and older["generation"] == 1
    assert newest["arrays"]["table"]["shape"] == [40, 5] and newest["arrays"]["table"]["dtype"] == "float32"
    assert about["other files"] == ["notes"] and "data-000000000001.safetensors" in older["files"]
    assert run("verify", path) == (0, "whole\n", "")
    flip(tmp_path / "c" / "data-000000000002.safetensors", -1, -60)
    status, out, _ = run("verify", path)
    assert status == 1 and out.count("damaged: generation 2: ") == 2 and "array 'step'" in out and "2 damaged" in out
    assert run("inspect", path)[1].count("  damaged     generation 2: ") == 2
    (tmp_path / "c" / "manifest-000000000002.json").write_text("{}")
    assert "manifest-000000000002.json is damaged" in run("inspect", path)[1]
    assert (
        "manifest-000000000002.json is damaged"
        in json.loads(run("inspect", path, "--json")[1])["generations"][0]["error"]
    )
    assert run("verify", path)[0] == 1
    (tmp_path / "c" / "manifest-000000000001.json").write_text("{}")
    assert run("inspect", path)[0] == run("inspect", path, "--json")[0] == 1


@pytest.mark.parametrize(
    "meta", [{"buffer": "Buffer(capacity=9)"}, {"buffer": {"capacity": 3}}, {"mixture": 1, "names": [1]}]
)
def test_inspect_of_metadata_that_no_buffer_wrote(run, tmp_path, meta):
    checkpoint.write(str(tmp_path), sources(1), meta)
    status, _, error = run("inspect", str(tmp_path))
    assert status == 1 and "description" in error and "invalid" in error


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["inspct"], "inspect"), (["datasets", "lst"], "list"), (["datasets", "convrt"], "convert"), (["zzz"], None)],
)
def test_an_unknown_command_gets_a_suggestion(capsys, arguments, meant):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and (f"Did you mean '{meant}'?" in error if meant else "Did you mean" not in error)

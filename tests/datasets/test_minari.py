"""Minari data sets written by the `minari` package, against plain-Python episodes."""

import contextlib
import io
import json
import os
import shutil
from pathlib import Path

import h5py
import minari as package
import numpy as np
import pytest
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage
from PIL import Image

import fbuf
from fbuf._formats import dataset
from tests.support import datasets_oracle as oracle
from tests.support.minari_spaces import spaces_of
from tests.support.refusals import raises

pytestmark = pytest.mark.more

LEAVES = {
    "plain": ({"obs": ((4,), np.float64)}, {"action": ((), np.int64)}),
    "nested": (
        {"obs/image": ((40, 36, 3), np.uint8), "obs/pair/0": ((), np.int64), "obs/pair/1": ((5,), np.int8)},
        {"action/0": ((2, 3), np.float32), "action/1": ((2,), np.int64)},
    ),
}
LENGTHS = (5, 1, 7, 2, 6)
ROW = fbuf.views.Row()  # compiles nothing
FORMATS = ("hdf5", "arrow", "parquet")


def made(kind, seed=0):
    observation, action = LEAVES[kind]
    return oracle.episodes(seed, LENGTHS, observation, action)


def tree(leaves, root):
    """Return the subtree `root` as Minari stores it: an array, a dict or a tuple."""
    if root in leaves:
        return leaves[root]
    parts = {name.removeprefix(f"{root}/").split("/")[0]: None for name in leaves if name.startswith(f"{root}/")}
    out = {part: tree(leaves, f"{root}/{part}") for part in parts}
    return tuple(out.values()) if all(part.isdigit() for part in parts) else out


def write(root, name, episodes, kind, form, *, jpeg=False, infos=None, **about):
    (root / name).mkdir(parents=True)
    storage = MinariStorage.new(root / name / "data", *spaces_of(kind), data_format=form, jpeg_encoding=jpeg)
    for number, e in enumerate(episodes):
        last = np.arange(e.steps) == e.steps - 1
        seen = tree(e.obs, "obs")
        if kind == "text":
            seen["mission"] = ["go"] * (e.steps + 1)
        ends = {"terminations": last & e.terminated, "truncations": last & (not e.terminated)}
        played = {"observations": seen, "actions": tree(e.action, "action"), "rewards": e.reward}
        infos_of = {} if infos is None else infos[number]
        storage.update_episodes([EpisodeBuffer(id=number, seed=number, infos=infos_of, **played, **ends)])
    storage.update_metadata({"dataset_id": name, "minari_version": package.__version__, "author": {"me"}, **about})
    return root / name


def plain(root, **settings):
    return write(root, "test/plain-v0", made("plain"), "plain", "hdf5", **settings)


def file_of(folder):
    return h5py.File(folder / "data/main_data.hdf5", "a")


def test_every_view_sees_the_episodes(tmp_path):
    episodes = made("plain")
    plain(tmp_path / "minari")
    where = {"root": tmp_path / "ours", "source": tmp_path / "minari"}
    buffer, state = fbuf.datasets.minari("test/plain-v0", segment_rows=6, **where)
    assert buffer.view == fbuf.views.Transition(final_observation="final_obs")
    assert len(dataset.committed(tmp_path / "ours/minari/test/plain-v0")) == 3  # whole episodes of 6 rows or more
    oracle.check_rows(buffer, state, oracle.rows_of(episodes))
    for final in (True, False):
        oracle.check_transitions(buffer, state, episodes, n=3, final=final)


def unpacked(frame):
    file = io.BytesIO()
    Image.fromarray(frame).save(file, format="JPEG")
    return np.asarray(Image.open(file))


@pytest.mark.filterwarnings("ignore:.*JPEG:UserWarning")
@pytest.mark.parametrize("jpeg", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_dicts_tuples_and_packed_images_are_read(tmp_path, form, jpeg):
    episodes = made("nested")
    folder = write(tmp_path, "test/nested-v0", episodes, "nested", form, jpeg=jpeg)
    if jpeg:
        for e in episodes:
            e.obs["obs/image"] = np.stack([unpacked(frame) for frame in e.obs["obs/image"]])
    fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours", workers=2, segment_rows=3)
    oracle.check_files(tmp_path / "ours/minari/test/nested-v0", oracle.rows_of(episodes))


@pytest.mark.parametrize("form", ["hdf5", "arrow"])
def test_infos_are_leaves_where_asked_for(tmp_path, form):
    episodes = made("plain")
    nested = form == "hdf5"  # the others give structs as objects
    infos = []
    for i, e in enumerate(episodes):
        number = np.arange(e.steps + 1)
        qpos = np.arange(6 * len(number), dtype=np.float64).reshape(-1, 2, 3) + 100 * i
        infos.append({"qpos": qpos, "words": ["a"] * len(number)})
        if nested:
            infos[-1]["deep"] = {"success": number % 2 == 0, "other": np.zeros(len(number))}
    folder = write(tmp_path, "test/infos-v0", episodes, "plain", form, infos=infos)
    settings = {"root": tmp_path / "ours", "view": ROW}
    deep = "deep/other, deep/success, " if nested else ""
    with pytest.raises(ValueError, match=f"infos has 'speed', but the episode recorded {deep}qpos, words"):
        fbuf.datasets.minari(folder, infos=("speed",), **settings)
    raises(ValueError, "leaf 'infos/words' .*expected", fbuf.datasets.minari, folder, infos=("words",), **settings)
    pytest.raises(TypeError, fbuf.datasets.minari, folder, infos="qpos", **settings).match(r"infos=\('qpos',\)")
    names = ("qpos", "deep/success") if nested else ("qpos",)
    fbuf.datasets.minari(folder, infos=names, segment_rows=3, **settings)
    expected = oracle.rows_of(episodes)
    expected["infos/qpos"] = np.concatenate([info["qpos"][:-1] for info in infos])
    if nested:
        expected["infos/deep/success"] = np.concatenate([info["deep"]["success"][:-1] for info in infos])
    oracle.check_files(tmp_path / "ours/minari/test/infos-v0", expected)


def test_invalid_values_are_refused(tmp_path):
    def large_observation(file):
        file["episode_3/observations"][1] = 1e300

    def large_action(file):
        file["episode_3/actions"][1] = 2**40

    def wide(file):
        del file["episode_2/observations"]
        file["episode_2"].create_dataset("observations", data=np.zeros((8, 5)))

    def ragged(file):
        del file["episode_2/observations"]
        data = file["episode_2"].create_dataset("observations", (8,), h5py.vlen_dtype(np.float64))
        for i in range(8):
            data[i] = np.zeros(i + 1)

    def short(file):
        file["episode_4/observations"].resize((6, 4))

    for change, words in (
        (large_observation, "episode 3: leaf 'obs' is float64, and rows 0 to 1 hold values that float32 cannot"),
        (large_action, r"episode 3: leaf 'action' is int64.*dtypes=\{'action': 'float32'\}"),
        (wide, r"episode 2: leaf 'obs' is float32\[5\]; expected float32\[4\]"),
        (ragged, r"episode 2: leaf 'obs' is object; expected plain numbers.*skip=\('obs',\)"),
        (short, "episode 4: leaf 'obs' has 6 values; expected 7"),
    ):
        folder = plain(tmp_path / change.__name__)
        with file_of(folder) as file:
            change(file)
        raises(ValueError, words, fbuf.datasets.minari, folder, root=tmp_path / change.__name__ / "ours")


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_data_sets_are_refused(tmp_path, form):
    episodes = made("plain")
    folder = write(tmp_path, "test/plain-v0", episodes, "plain", form)
    about = json.loads((folder / "data/metadata.json").read_text())
    for other, words in (
        ({"total_episodes": 6}, "minari cannot read .*damaged"),
        ({"total_steps": 22}, "has 21 steps in 5 episodes; expected 22"),
        ({"total_episodes": -1}, "has 0 steps in 0 episodes; expected 21"),
        ({"total_steps": 0, "total_episodes": 0}, "has 0 steps in 0 episodes; expected some"),
        ({"data_format": "zip"}, "minari cannot read"),
        ({"minari_version": "0.3.0"}, "minari cannot read .* does not support the dataset"),
        ({"observation_space": "{"}, "minari cannot read"),
    ):
        (folder / "data/metadata.json").write_text(json.dumps(about | other))
        raises(ValueError, words, fbuf.datasets.minari, folder, view=ROW, root=tmp_path / "ours")
    (folder / "data/metadata.json").write_text(json.dumps(about))
    file = folder / "data" / ("main_data.hdf5" if form == "hdf5" else f"2/part-0.{form}")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match="minari cannot read (episode 2 in )?.*It is damaged"):
        fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours")
    pytest.raises(FileNotFoundError, lambda: fbuf.datasets.open(tmp_path / "ours/minari/test/plain-v0"))


def test_descriptions_that_name_code_are_refused(tmp_path):
    folder = plain(tmp_path)
    about = json.loads((folder / "data/metadata.json").read_text())
    del about["observation_space"]  # minari would import the environment
    (folder / "data/metadata.json").write_text(json.dumps(about | {"env_spec": "this is not read"}))
    raises(ValueError, "has no observation_space; expected one", fbuf.datasets.minari, folder, root=tmp_path / "ours")
    (folder / "data/metadata.json").write_text("[" * 100_000)
    pytest.raises(ValueError, lambda: fbuf.datasets.minari(folder, root=tmp_path / "ours")).match("is not valid JSON")
    assert not (tmp_path / "ours").exists()


@pytest.mark.filterwarnings("ignore:.*JPEG:UserWarning")
def test_damaged_images_are_refused(tmp_path):
    folder = write(tmp_path, "test/jpeg-v0", made("nested"), "nested", "hdf5", jpeg=True)
    with file_of(folder) as file:
        file["episode_1/observations/image"][1] = np.frombuffer(b"no image", np.uint8)
    match = "minari cannot read episode 1 in .*UnidentifiedImageError"
    raises(ValueError, match, fbuf.datasets.minari, folder, view=ROW, root=tmp_path / "ours")


@pytest.mark.parametrize("form", ["hdf5", "arrow"])
def test_text_is_named_and_may_be_skipped(tmp_path, form):
    episodes = made("nested")
    folder = write(tmp_path, "test/text-v0", episodes, "text", form)
    settings = {"view": ROW, "root": tmp_path / "ours"}
    raises(ValueError, r"leaf 'obs/mission' is .*skip=\('obs/mission',\)", fbuf.datasets.minari, folder, **settings)
    raises(ValueError, "skip has 'obs/odd', but leaves", fbuf.datasets.minari, folder, skip=("obs/odd",), **settings)
    pytest.raises(ValueError, fbuf.datasets.minari, folder, skip=("obs",), **settings).match("leaves no observation")
    pytest.raises(TypeError, fbuf.datasets.minari, folder, skip="obs", **settings).match(r"skip=\('obs',\)")
    fbuf.datasets.minari(folder, skip=("obs/mission", "obs/pair"), **settings)
    expected = {name: leaf for name, leaf in oracle.rows_of(episodes).items() if "pair" not in name}
    oracle.check_files(tmp_path / "ours/minari/test/text-v0", expected)
    raises(ValueError, "was converted with", fbuf.datasets.minari, folder, skip=("obs/mission",), **settings)


def test_a_data_set_is_converted_once(tmp_path):
    folder = plain(tmp_path / "minari")
    where = {"root": tmp_path / "ours", "source": tmp_path / "minari"}
    fbuf.datasets.minari("test/plain-v0", view=ROW, **where)
    file = tmp_path / "ours/minari/test/plain-v0/dataset.json"
    before = file.stat().st_mtime_ns
    wrong = fbuf.views.Transition(observation="pixels", autoreset="same_step")
    with pytest.raises(ValueError, match="no leaf named 'pixels'; rows have"):  # before anything is converted
        fbuf.datasets.minari("test/plain-v0", view=wrong, root=tmp_path / "other", source=tmp_path / "minari")
    raises(TypeError, "view is the class Row", fbuf.datasets.minari, "test/none-v0", view=fbuf.views.Row, **where)
    raises(TypeError, "minari: root is a int; expected the path of a", fbuf.datasets.minari, "test/plain-v0", root=3)
    assert not (tmp_path / "other").exists()
    buffer, _ = fbuf.datasets.minari("test/plain-v0", view=ROW, **where)
    assert file.stat().st_mtime_ns == before
    shutil.rmtree(folder)
    assert fbuf.datasets.minari("test/plain-v0", view=ROW, **where)[0] == buffer  # what was converted is enough
    write(tmp_path / "minari", "test/plain-v0", made("plain", seed=1), "plain", "hdf5", dataset_size=7)
    raises(ValueError, "was converted before the Minari data set", fbuf.datasets.minari, "test/plain-v0", **where)


def test_the_package_downloads_once_or_when_forced(tmp_path, monkeypatch):
    calls = []
    episodes = [made("plain")]

    def download_dataset(name, force_download=False):
        calls.append((name, force_download))
        shutil.rmtree(Path(os.environ["MINARI_DATASETS_PATH"]) / name, ignore_errors=True)
        write(Path(os.environ["MINARI_DATASETS_PATH"]), name, episodes[0], "plain", "hdf5")

    monkeypatch.setattr(package, "download_dataset", download_dataset)
    monkeypatch.delenv("MINARI_DATASETS_PATH", raising=False)
    where = {"root": tmp_path / "ours", "source": tmp_path / "minari"}
    for _ in range(2):
        fbuf.datasets.minari("test/plain-v0", view=ROW, download=True, **where)
    assert calls == [("test/plain-v0", False)]
    oracle.check_files(tmp_path / "ours/minari/test/plain-v0", oracle.rows_of(episodes[0]))
    for seed in (1, 2):
        episodes[0] = made("plain", seed=seed)
        fbuf.datasets.minari("test/plain-v0", view=ROW, download="force", **where)
        assert calls[seed:] == [("test/plain-v0", True)]
        oracle.check_files(tmp_path / "ours/minari/test/plain-v0", oracle.rows_of(episodes[0]))
        (tmp_path / "ours/minari/test/plain-v0/dataset.json").unlink()  # as an interrupted conversion leaves it


def test_lossy_frames_are_named(tmp_path):
    kinds = {"raw": False, "jpeg": True}
    for name, jpeg in kinds.items():
        folder = write(tmp_path, f"test/{name}-v0", made("nested"), "nested", "hdf5", jpeg=jpeg)
        with contextlib.ExitStack() as stack:
            if jpeg:
                stack.enter_context(
                    pytest.warns(UserWarning, match="stored obs/image of .* as JPEG.*jpeg_encoding=False")
                )
            fbuf.datasets.minari(folder, root=tmp_path / "ours", view=ROW)
        meta = fbuf.datasets.info(tmp_path / "ours" / "minari" / f"test/{name}-v0").meta
        assert meta["lossy"] == (["obs/image"] if jpeg else [])


@pytest.mark.parametrize("form", FORMATS)
def test_episodes_that_minari_cuts_are_refused(form, tmp_path):
    long = oracle.episodes(0, (3, 32_768), *LEAVES["plain"])
    folder = write(tmp_path, "test/long-v0", long, "plain", form)
    if form == "hdf5":
        buffer, _ = fbuf.datasets.minari(folder, root=tmp_path / "ours", view=ROW)
        assert buffer.capacity == 32_771
    else:
        words = f"episode 1 in .* has 32768 steps, and of {form} Minari returns 32767.*data_format='hdf5'"
        raises(ValueError, words, fbuf.datasets.minari, folder, root=tmp_path / "ours")
    whole = write(tmp_path, "test/whole-v0", oracle.episodes(0, (32_767,), *LEAVES["plain"]), "plain", form)
    buffer, _ = fbuf.datasets.minari(whole, root=tmp_path / "ours", view=ROW)
    assert buffer.capacity == 32_767

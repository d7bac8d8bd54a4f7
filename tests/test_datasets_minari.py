"""Minari data sets: folders in the documented layout, written here with h5py and pyarrow, against plain-Python episodes."""

from __future__ import annotations

import builtins
import io
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fbuf
from fbuf import _pieces
from tests.support import datasets_oracle as oracle

SPACES: dict[str, dict[str, Any]] = {
    "plain": {
        "observation_space": {"type": "Box", "dtype": "float64", "shape": [4]},
        "action_space": {"type": "Discrete", "dtype": "int64", "start": 0, "n": 200},
    },
    "nested": {
        "observation_space": {
            "type": "Dict",
            "subspaces": {
                "image": {"type": "Box", "dtype": "uint8", "shape": [40, 36, 3]},
                "pair": {"type": "Tuple", "subspaces": [{"type": "Discrete"}, {"type": "MultiBinary", "n": 5}]},
            },
        },
        "action_space": {
            "type": "Tuple",
            "subspaces": [
                {"type": "Box", "dtype": "float32", "shape": [2, 3]},
                {"type": "MultiDiscrete", "dtype": "int64", "nvec": [200, 200]},
            ],
        },
    },
}
LEAVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"obs": ((4,), np.float64)}, {"action": ((), np.int64)}),
    "nested": (
        {"obs/image": ((40, 36, 3), np.uint8), "obs/pair/0": ((), np.int64), "obs/pair/1": ((5,), np.int8)},
        {"action/0": ((2, 3), np.float32), "action/1": ((2,), np.int64)},
    ),
}
LENGTHS = (5, 1, 7, 2, 6)
ROW = fbuf.views.Row()  # where the view is not what is looked at: it compiles nothing
FORMATS = ("hdf5", "arrow", "parquet")
TUPLES = ("obs/pair", "action")


def made(kind: str, seed: int = 0) -> list[oracle.Episode]:
    observation, action = LEAVES[kind]
    return oracle.episodes(seed, LENGTHS, observation, action)


def tree(leaves: dict[str, np.ndarray], root: str) -> Any:
    """Nested dicts of what lies under `root`; the array itself where that is one."""
    if root in leaves:
        return leaves[root]
    out: dict[str, Any] = {}
    for name, leaf in leaves.items():
        at = out
        *path, last = name.split("/")[1:]
        for key in path:
            at = at.setdefault(key, {})
        at[last] = leaf
    return out


def write(
    root: Path,
    name: str,
    episodes: list[oracle.Episode],
    kind: str,
    form: str,
    pack: Any = None,
    infos: Any = None,
    **other: Any,
) -> Path:
    """A data set as Minari lays it out; `pack` makes bytes of an image."""
    folder = root / name / "data"
    folder.mkdir(parents=True)
    about: dict[str, Any] = {key: json.dumps(space) for key, space in SPACES[kind].items()}
    about |= {"dataset_id": name, "total_episodes": len(episodes), "total_steps": sum(e.steps for e in episodes)}
    about |= {"data_format": form, "jpeg_encoding": pack is not None, "minari_version": "0.5.4", "author": ["me"]}
    (folder / "metadata.json").write_text(json.dumps(about | other))
    (_write_hdf5 if form == "hdf5" else _write_arrow)(folder, episodes, form, pack, infos)
    return folder.parent


def _flags(e: oracle.Episode) -> dict[str, np.ndarray]:
    last = np.arange(e.steps) == e.steps - 1
    return {"rewards": e.reward, "terminations": last & e.terminated, "truncations": last & (not e.terminated)}


def _write_hdf5(folder: Path, episodes: list[oracle.Episode], form: str, pack: Any, infos: Any) -> None:
    h5py = pytest.importorskip("h5py")

    def put(group: Any, name: str, value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, child in value.items():
                put(group.require_group(name), f"_index_{key}" if path in TUPLES else key, child, f"{path}/{key}")
        elif pack is not None and value.dtype == np.uint8:
            packed = [np.frombuffer(pack(image), np.uint8) for image in value]
            data = group.create_dataset(name, (len(packed),), h5py.vlen_dtype(np.uint8), chunks=True)
            for i, image in enumerate(packed):
                data[i] = image
        else:
            group.create_dataset(name, data=value, chunks=True, maxshape=(None, *value.shape[1:]))

    with h5py.File(folder / "main_data.hdf5", "w", track_order=True) as file:
        for number, e in enumerate(episodes):
            group = file.create_group(f"episode_{number}")
            group.attrs.update({"id": number, "total_steps": e.steps, "seed": number})
            put(group, "observations", tree(e.obs, "obs"), "obs")
            put(group, "actions", tree(e.action, "action"), "action")
            if infos is not None:
                put(group, "infos", infos[number], "infos")
            for name, value in _flags(e).items():
                group.create_dataset(name, data=value, chunks=True, maxshape=(None,))


def _write_arrow(folder: Path, episodes: list[oracle.Episode], form: str, pack: Any, infos: Any) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def column(value: Any, rows: int) -> Any:
        if isinstance(value, dict):
            columns = [column(child, rows) for child in value.values()]
            notes = [{"shape": ",".join(map(str, np.shape(child)[1:]))} for child in value.values()]
            fields = [pa.field(n, c.type, metadata=m) for n, c, m in zip(value, columns, notes, strict=True)]
            return pa.StructArray.from_arrays(columns, fields=fields)
        if pack is not None and value.dtype == np.uint8:
            return pa.array([pack(image) for image in value], type=pa.binary())
        value = np.concatenate([value, np.zeros((rows - len(value), *value.shape[1:]), value.dtype)])
        if value.ndim == 1:
            return pa.array(value)
        flat = value.reshape(rows, -1)
        kind = pa.list_(pa.from_numpy_dtype(value.dtype), flat.shape[1])
        return pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), type=kind)

    for number, e in enumerate(episodes):
        values = {"observations": tree(e.obs, "obs"), "actions": tree(e.action, "action")} | _flags(e)
        if infos is not None:
            values["infos"] = infos[number]
        batch = pa.RecordBatch.from_pydict({name: column(value, e.steps + 1) for name, value in values.items()})
        (folder / str(number)).mkdir()
        (folder / str(number) / "metadata.json").write_text(json.dumps({"id": number, "total_steps": e.steps}))
        if form == "parquet":
            parquet.write_table(pa.Table.from_batches([batch]), folder / str(number) / "part-0.parquet")
        else:
            with pa.OSFile(str(folder / str(number) / "part-0.arrow"), "wb") as file:
                with pa.ipc.new_file(file, batch.schema) as writer:
                    writer.write_batch(batch)


@pytest.mark.parametrize("form", FORMATS)
def test_every_view_sees_the_episodes(tmp_path: Path, form: str) -> None:
    episodes = made("plain")
    write(tmp_path / "minari", "test/plain-v0", episodes, "plain", form)
    where = {"root": tmp_path / "ours", "source": tmp_path / "minari"}
    buffer, state = fbuf.datasets.minari("test/plain-v0", piece_rows=6, **where)
    assert buffer.view == fbuf.views.Transition(final_observation="final_obs")
    assert len(_pieces.committed(tmp_path / "ours/minari/test/plain-v0")) == 3  # whole episodes, 6 rows at least
    oracle.check_files(tmp_path / "ours/minari/test/plain-v0", oracle.rows_of(episodes))
    if form == "hdf5":
        oracle.check_rows(buffer, state, oracle.rows_of(episodes))
        oracle.check_transitions(buffer, state, episodes, n=3, final=True)
        oracle.check_sequences(buffer, state, episodes, 3)
        oracle.check_episodes(buffer, state, episodes)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("final", [False, True])
def test_every_horizon(tmp_path: Path, n: int, final: bool) -> None:
    """Also without the final observations: then a truncated step is not drawn, and those before bootstrap earlier."""
    episodes = made("plain", seed=n)
    folder = write(tmp_path, "test/plain-v0", episodes, "plain", "hdf5")
    buffer, state = fbuf.datasets.minari(folder, root=tmp_path / "ours")
    oracle.check_transitions(buffer, state, episodes, n=n, final=final)


@pytest.mark.parametrize("form", FORMATS)
def test_dicts_and_tuples(tmp_path: Path, form: str) -> None:
    episodes = made("nested")
    folder = write(tmp_path, "test/nested-v0", episodes, "nested", form)
    settings = {"root": tmp_path / "ours", "workers": 2, "piece_rows": 3}
    if form == "hdf5":
        buffer, state = fbuf.datasets.minari(folder, **settings)
        oracle.check_rows(buffer, state, oracle.rows_of(episodes))
        oracle.check_transitions(buffer, state, episodes, n=2, final=True)
    else:
        fbuf.datasets.minari(folder, view=ROW, **settings)
    oracle.check_files(tmp_path / "ours/minari/test/nested-v0", oracle.rows_of(episodes))


@pytest.mark.parametrize("form", FORMATS)
def test_packed_images(tmp_path: Path, form: str) -> None:
    image = pytest.importorskip("PIL.Image")

    def pack(frame: np.ndarray) -> bytes:
        file = io.BytesIO()
        image.fromarray(frame).save(file, format="JPEG")
        return file.getvalue()

    episodes = made("nested")
    folder = write(tmp_path, "test/jpeg-v0", episodes, "nested", form, pack)
    for e in episodes:  # what was packed is what is to come
        frames = [np.asarray(image.open(io.BytesIO(pack(frame)))) for frame in e.obs["obs/image"]]
        e.obs["obs/image"] = np.stack(frames)
    fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours")
    oracle.check_files(tmp_path / "ours/minari/test/jpeg-v0", oracle.rows_of(episodes))


@pytest.mark.parametrize("form", FORMATS)
def test_infos(tmp_path: Path, form: str) -> None:
    episodes = made("plain")
    infos = [
        {
            "qpos": np.arange((e.steps + 1) * 6, dtype=np.float64).reshape(-1, 2, 3) + 100 * i,
            "deep": {"success": np.arange(e.steps + 1) % 2 == 0, "other": np.zeros(e.steps + 1)},
            "words": np.array([b"a"] * (e.steps + 1)),
        }
        for i, e in enumerate(episodes)
    ]
    folder = write(tmp_path, "test/infos-v0", episodes, "plain", form, infos=infos)
    settings: dict[str, Any] = {"root": tmp_path / "ours", "view": ROW}
    with pytest.raises(
        ValueError, match="infos has 'speed', but episode 0 recorded deep/other, deep/success, qpos, words"
    ):
        fbuf.datasets.minari(folder, infos=("speed",), **settings)
    with pytest.raises(ValueError, match="leaf 'infos/words' .*expected (plain numbers|numbers of one shape)"):
        fbuf.datasets.minari(folder, infos=("words",), **settings)
    with pytest.raises(TypeError, match=r"infos=\('qpos',\)"):
        fbuf.datasets.minari(folder, infos="qpos", **settings)
    fbuf.datasets.minari(folder, infos=("qpos", "deep/success"), piece_rows=3, **settings)
    expected = oracle.rows_of(episodes)
    expected["infos/qpos"] = np.concatenate([info["qpos"][:-1] for info in infos])
    expected["infos/deep/success"] = np.concatenate([info["deep"]["success"][:-1] for info in infos])
    oracle.check_files(tmp_path / "ours/minari/test/infos-v0", expected)


def test_values_that_float32_cannot_hold(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    folder = write(tmp_path, "test/plain-v0", made("plain"), "plain", "hdf5")
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        file["episode_3/observations"][1] = 1e300
    with pytest.raises(ValueError, match=r"episode 3: leaf 'obs' is float64, and holds values that float32 cannot"):
        fbuf.datasets.minari(folder, root=tmp_path / "ours")


def test_packed_images_of_one_length(tmp_path: Path) -> None:
    """Minari stores files that happen to be of one length as a plain array of bytes."""
    image = pytest.importorskip("PIL.Image")

    def pack(frame: np.ndarray) -> bytes:
        file = io.BytesIO()
        image.fromarray(frame).save(file, format="JPEG")
        return file.getvalue().ljust(20_000, b"\0")

    h5py = pytest.importorskip("h5py")
    episodes = made("nested")
    folder = write(tmp_path, "test/jpeg-v0", episodes, "nested", "hdf5", pack)
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        for group in file.values():
            images = np.stack(group["observations/image"][:])
            del group["observations/image"]
            group["observations"].create_dataset("image", data=images)
    fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours")
    with _pieces.DataSet.open(tmp_path / "ours/minari/test/jpeg-v0") as dataset:
        assert dataset.rows == 21 and dataset.schema["obs/image"].shape == (40, 36, 3)


def test_packed_images_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, "test/jpeg-v0", made("nested"), "nested", "hdf5", lambda frame: b"\xff\xd8\xff")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"leaf 'obs/image' is packed as JPEG.*pip install \"fbuf\[minari\]\""):
        fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("packed", [b"no image", b"\xff\xd8\xff but then nothing"])
def test_damaged_images(tmp_path: Path, packed: bytes) -> None:
    pytest.importorskip("PIL")
    folder = write(tmp_path, "test/jpeg-v0", made("nested"), "nested", "hdf5", lambda frame: packed)
    with pytest.raises(ValueError, match="leaf 'obs/image' (is no JPEG|has a damaged image)"):
        fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours")
    with pytest.raises(FileNotFoundError):
        fbuf.datasets.open(tmp_path / "ours/minari/test/jpeg-v0")


def test_an_episode_that_just_stops_is_truncated(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    episodes = made("plain")
    folder = write(tmp_path, "test/plain-v0", episodes, "plain", "hdf5")
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        for group in file.values():
            group["truncations"][:] = False
    fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours")
    oracle.check_files(tmp_path / "ours/minari/test/plain-v0", oracle.rows_of(episodes))


def test_dtypes(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    folder = write(tmp_path, "test/plain-v0", made("plain"), "plain", "hdf5")
    fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "a", dtypes={"obs": "float16"})
    assert fbuf.datasets.info(tmp_path / "a/minari/test/plain-v0").leaves == {
        "obs": "float16[4]",
        "action": "int32[]",
        "reward": "float32[]",
        "terminated": "bool[]",
        "truncated": "bool[]",
        "final_obs": "float16[4]",
    }
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        file["episode_3/actions"][1] = 2**40
    with pytest.raises(ValueError, match=r"episode 3: leaf 'action' is int64.*dtypes=\{'action': 'float32'\}"):
        fbuf.datasets.minari(folder, root=tmp_path / "b")
    with pytest.raises(ValueError, match="dtypes has 'odd'"):
        fbuf.datasets.minari(folder, root=tmp_path / "b", dtypes={"odd": "int32"})
    with pytest.raises(TypeError, match="expected one of bool"):
        fbuf.datasets.minari(folder, root=tmp_path / "b", dtypes={"obs": "str"})


def test_what_is_no_array_is_named_and_may_be_skipped(tmp_path: Path) -> None:
    episodes = made("nested")
    folder = write(tmp_path, "test/text-v0", episodes, "nested", "hdf5")
    about = json.loads((folder / "data/metadata.json").read_text())
    space = json.loads(about["observation_space"])
    space["subspaces"]["mission"] = {"type": "Text", "max_length": 10}
    space["subspaces"]["stack"] = {"type": "Sequence"}
    (folder / "data/metadata.json").write_text(json.dumps(about | {"observation_space": json.dumps(space)}))
    with pytest.raises(ValueError, match=r"leaf 'obs/mission' is text.*skip=\('obs/mission', 'obs/stack'\)"):
        fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours")
    with pytest.raises(ValueError, match="leaf 'obs/stack' is of the space 'Sequence', whose values have no one shape"):
        fbuf.datasets.minari(folder, root=tmp_path / "ours", skip=("obs/mission",))
    skip = ("obs/mission", "obs/stack", "obs/pair")
    fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours", skip=skip)
    expected = oracle.rows_of(episodes)
    expected = {n: x for n, x in expected.items() if "pair" not in n}
    oracle.check_files(tmp_path / "ours/minari/test/text-v0", expected)
    with pytest.raises(ValueError, match="was converted with"):
        fbuf.datasets.minari(folder, root=tmp_path / "ours", skip=("obs/mission", "obs/stack"))


def test_values_of_several_shapes(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    folder = write(tmp_path, "test/plain-v0", made("plain"), "plain", "hdf5")
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        del file["episode_2/observations"]
        file["episode_2"].create_dataset("observations", data=np.zeros((8, 5)))
    with pytest.raises(ValueError, match=r"leaf 'obs' of episode 2 is \[8, 5\]; expected \[8, 4\]"):
        fbuf.datasets.minari(folder, root=tmp_path / "a")
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        del file["episode_2/observations"]
        data = file["episode_2"].create_dataset("observations", (8,), h5py.vlen_dtype(np.float64))
        for i in range(8):
            data[i] = np.zeros(i + 1)
    with pytest.raises(ValueError, match=r"leaf 'obs' of episode 2 is object, values of no one shape.*skip=\('obs',\)"):
        fbuf.datasets.minari(folder, root=tmp_path / "b")


def test_observations_without_the_last(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    folder = write(tmp_path, "test/plain-v0", made("plain"), "plain", "hdf5")
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        file["episode_4/observations"].resize((6, 4))
    with pytest.raises(
        ValueError, match=r"leaf 'obs' of episode 4 is \[6, 4\]; expected \[7, 4\], as 6 steps have 7 observ"
    ):
        fbuf.datasets.minari(folder, root=tmp_path / "a")


@pytest.mark.parametrize("form", FORMATS)
def test_damage(tmp_path: Path, form: str) -> None:
    episodes = made("plain")
    folder = write(tmp_path, "test/plain-v0", episodes, "plain", form)
    about = json.loads((folder / "data/metadata.json").read_text())
    for other, words in (
        ({"total_episodes": 6}, "has 5 episodes; expected 6"),
        ({"total_steps": 22}, "has 21 steps in 5 episodes; expected 22"),
        ({"total_episodes": -1}, "total_episodes is '-1'"),
        ({"data_format": "zip"}, "is of the format 'zip'"),
        ({"observation_space": "{"}, "the space of 'obs' is no JSON"),
    ):
        (folder / "data/metadata.json").write_text(json.dumps(about | other))
        with pytest.raises(ValueError, match=words):
            fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours")
    (folder / "data/metadata.json").write_text(json.dumps(about))
    file = folder / "data" / ("main_data.hdf5" if form == "hdf5" else f"2/part-0.{form}")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match="is damaged or cut off|is no (arrow|parquet) file"):
        fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours")
    with pytest.raises(FileNotFoundError):
        fbuf.datasets.open(tmp_path / "ours/minari/test/plain-v0")


def test_links_in_a_file_are_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    folder = write(tmp_path, "test/plain-v0", made("plain"), "plain", "hdf5")
    with h5py.File(folder / "data/main_data.hdf5", "a") as file:
        del file["episode_0/rewards"]
        file["episode_0/rewards"] = h5py.ExternalLink("/etc/other.hdf5", "/secret")
    with pytest.raises(ValueError, match="'episode_0/rewards' is a link to elsewhere"):
        fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours")


def test_converted_once(tmp_path: Path) -> None:
    episodes = made("plain")
    folder = write(tmp_path / "minari", "test/plain-v0", episodes, "plain", "hdf5")
    where = {"root": tmp_path / "ours", "source": tmp_path / "minari"}
    fbuf.datasets.minari("test/plain-v0", view=ROW, **where)
    file = tmp_path / "ours/minari/test/plain-v0/dataset.json"
    before = file.stat().st_mtime_ns
    wrong = fbuf.views.Transition(observation="pixels")
    with pytest.raises(ValueError, match="observation is 'pixels', but rows have"):  # before anything is converted
        fbuf.datasets.minari("test/plain-v0", view=wrong, root=tmp_path / "other", source=tmp_path / "minari")
    with pytest.raises(TypeError, match="view is the class Row"):
        fbuf.datasets.minari("test/none-v0", view=fbuf.views.Row, **where)
    with pytest.raises(TypeError, match="minari: root is a int; expected the path of a folder"):
        fbuf.datasets.minari("test/plain-v0", root=3)
    assert not (tmp_path / "other").exists()
    buffer, _ = fbuf.datasets.minari("test/plain-v0", view=ROW, **where)
    assert file.stat().st_mtime_ns == before
    shutil.rmtree(folder)
    assert fbuf.datasets.minari("test/plain-v0", view=ROW, **where)[0] == buffer  # what was converted is enough
    write(tmp_path / "minari", "test/plain-v0", made("plain", seed=1), "plain", "hdf5", dataset_size=7)
    with pytest.raises(ValueError, match="was converted from another state of the data set"):
        fbuf.datasets.minari("test/plain-v0", **where)


def test_names_that_lead_elsewhere(tmp_path: Path) -> None:
    for name in ("a/../../b", "a//b", "a\\b"):
        with pytest.raises(ValueError, match="names a leaf|expected a name"):
            fbuf.datasets.minari(name, root=tmp_path, source=tmp_path)


def test_hostile_descriptions(tmp_path: Path) -> None:
    folder = write(tmp_path, "test/plain-v0", made("plain"), "plain", "hdf5")
    about = json.loads((folder / "data/metadata.json").read_text())
    deep: Any = {"type": "Discrete"}
    for _ in range(70):
        deep = {"type": "Tuple", "subspaces": [deep]}
    box = {"type": "Box", "dtype": "float64"}
    for space, words in (
        ({"type": "Dict", "subspaces": {"../../x": box | {"shape": [4]}}}, "expected a name such as"),
        ({"type": "Dict", "subspaces": {}}, "leaves no observation"),
        (deep, "nested too deep"),
        (box | {"shape": [-1]}, "an axis is '-1'"),
        (box | {"shape": [2**40, 2**40]}, "fewer than 2\\^62 entries"),
        (box | {"shape": [4], "dtype": "object"}, "expected plain numbers"),
        ([1], "whose values have no one shape"),
    ):
        (folder / "data/metadata.json").write_text(json.dumps(about | {"observation_space": json.dumps(space)}))
        with pytest.raises(ValueError, match=words):
            fbuf.datasets.minari(folder, root=tmp_path / "ours")
    (folder / "data/metadata.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deep|is no JSON"):
        fbuf.datasets.minari(folder, root=tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"root": tmp_path / "ours", "source": tmp_path / "minari"}
    with pytest.raises(FileNotFoundError, match=r"minari\('D4RL/door/human-v2', download=True\)"):
        fbuf.datasets.minari("D4RL/door/human-v2", **where)
    with pytest.raises(FileNotFoundError, match="expected a folder with data/metadata.json"):
        fbuf.datasets.minari(tmp_path / "nothing", root=tmp_path / "ours")
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(ImportError, match=r'pip install "minari\[hdf5,arrow\]" pillow, or: minari download D4RL'):
        fbuf.datasets.minari("D4RL/door/human-v2", download=True, **where)
    with pytest.raises(ValueError, match="download is \"yes\"|download is 'yes'"):
        fbuf.datasets.minari("D4RL/door/human-v2", download="yes", **where)
    assert list(tmp_path.iterdir()) == []


def test_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the package, which is told where to put it; again only where that is forced."""
    calls: list[tuple[str, bool]] = []
    episodes = [made("plain")]

    def download_dataset(name: str, force_download: bool = False) -> None:
        import os

        calls.append((name, force_download))
        shutil.rmtree(Path(os.environ["MINARI_DATASETS_PATH"]) / name, ignore_errors=True)
        write(Path(os.environ["MINARI_DATASETS_PATH"]), name, episodes[0], "plain", "hdf5")

    package = types.ModuleType("minari")
    package.download_dataset = download_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "minari", package)
    monkeypatch.delenv("MINARI_DATASETS_PATH", raising=False)
    where = {"root": tmp_path / "ours", "source": tmp_path / "minari"}
    for _ in range(2):
        fbuf.datasets.minari("test/plain-v0", view=ROW, download=True, **where)
    assert calls == [("test/plain-v0", False)]
    oracle.check_files(tmp_path / "ours/minari/test/plain-v0", oracle.rows_of(episodes[0]))
    episodes[0] = made("plain", seed=1)
    fbuf.datasets.minari("test/plain-v0", view=ROW, download="force", **where)
    assert calls[1:] == [("test/plain-v0", True)]
    oracle.check_files(tmp_path / "ours/minari/test/plain-v0", oracle.rows_of(episodes[0]))


def test_interrupted_conversion_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = made("plain")
    folder = write(tmp_path, "test/plain-v0", episodes, "plain", "hdf5")
    path = tmp_path / "ours/minari/test/plain-v0"

    def stop(done: int, total: int) -> None:
        if done >= 14:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fbuf.datasets.minari(folder, root=tmp_path / "ours", piece_rows=6, progress=stop)
    assert sorted(_pieces.committed(path)) == [0, 1]
    with pytest.raises(FileNotFoundError):
        fbuf.datasets.open(path)
    with pytest.raises(FileExistsError, match="unfinished work on other rows, or with other settings"):
        fbuf.datasets.minari(folder, root=tmp_path / "ours", piece_rows=6, dtypes={"obs": "float16"})
    seen: list[int] = []
    fbuf.datasets.minari(
        folder, view=ROW, root=tmp_path / "ours", piece_rows=6, progress=lambda done, total: seen.append(done)
    )
    assert seen[0] == 13 and seen[-1] == 21
    oracle.check_files(path, oracle.rows_of(episodes))


def test_needs_no_package_but_the_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path, "test/plain-v0", made("plain"), "plain", "hdf5")
    true_import = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name.split(".")[0] in ("minari", "gymnasium", "pyarrow", "PIL"):
            raise AssertionError(name)
        return true_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    fbuf.datasets.minari(folder, view=ROW, root=tmp_path / "ours")

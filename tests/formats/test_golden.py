"""FORMAT.md describes the format, and files of earlier versions load."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import fbuf
from fbuf._formats import checkpoint
from tests.golden.make import CASES, DTYPES, FOLDER, plain_arrays, plain_meta
from tests.support.memory_disk import bits, load, save, sources, state

PAGE = Path(fbuf.__file__).parent / "FORMAT.md"


def reader() -> dict:
    pytest.importorskip("safetensors")
    code = PAGE.read_text().split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 30 and "fbuf" not in code
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def copy_of(case: str, path: Path) -> str:
    """Copy golden files, because a save would change them."""
    return str(shutil.copytree(FOLDER / case, path / "golden"))


@pytest.mark.parametrize("case", CASES)
def test_golden_files_load(case: str, tmp_path: Path) -> None:
    CASES[case].check(copy_of(case, tmp_path))


def test_every_golden_folder_is_tested() -> None:
    folders = {str(path.relative_to(FOLDER)) for path in FOLDER.glob("v*/*") if any(path.iterdir())}
    assert folders == set(CASES)


def test_a_save_builds_on_golden_files(tmp_path: Path) -> None:
    path = copy_of("v1/plain", tmp_path)
    arrays = plain_arrays(2) | {"scalar": np.array(9)}
    assert checkpoint.write(path, arrays, {}).bytes_written < 8000
    with checkpoint.read(path) as saved:
        assert {n: bits(np.asarray(a)) for n, a in saved.arrays.items()} == {n: bits(a) for n, a in arrays.items()}


def test_the_page_reads_golden_files(tmp_path: Path) -> None:
    meta, arrays = reader()["read"](copy_of("v1/plain", tmp_path))
    wanted = plain_arrays(2)
    assert meta == plain_meta(2) and list(arrays) == list(wanted)
    for name, array in arrays.items():
        assert array.shape == wanted[name].shape and array.tobytes() == wanted[name].tobytes(), name
        assert array.dtype == wanted[name].dtype or (name in DTYPES and array.dtype.kind == "u"), name


def test_the_page_reads_what_is_saved_now_and_falls_back(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path, read = tmp_path / "c", reader()["read"]
    for k in range(6):
        save(str(path), k)
    meta, arrays = read(path)
    assert meta == {"k": 5} and {n: bits(a) for n, a in arrays.items()} == {n: bits(a) for n, a in state(5).items()}
    file = path / "data-000000000006.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert read(path)[0] == {"k": 4} and "is not whole" in capsys.readouterr().err


def test_the_page_names_every_key_and_no_other(tmp_path: Path) -> None:
    checkpoint.write(str(tmp_path), sources(2), {"k": 2})
    manifest = json.loads((tmp_path / "manifest-000000000001.json").read_text().splitlines()[1])
    keys = set(manifest) | set(manifest["files"][0]) | {key for a in manifest["arrays"].values() for key in a}
    page = PAGE.read_text().split("# The format of a data set")[0]
    table = "\n".join(line for line in page.splitlines() if line.startswith("| `"))
    assert keys - {"name"} <= set(re.findall("`([a-z0-9]+)`", table)) <= keys | {"name"}
    assert load(str(tmp_path)) == 2


def test_data_files_are_safetensors(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    save(str(tmp_path), 3)
    tensors = numpy.load_file(tmp_path / "data-000000000001.safetensors")
    assert bits(tensors["log#piece-2"]) == bits(state(3)["log"][100:150])
    assert np.array_equal(np.concatenate([tensors[f"table#{i}"] for i in range(10)]), state(3)["table"])

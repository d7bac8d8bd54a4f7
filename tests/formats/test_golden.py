"""FORMAT.md describes the format, and files of earlier versions load."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import fbuf
from fbuf._formats import checkpoint
from tests.golden.make import CASES, FOLDER, plain_arrays
from tests.support.disk import flip
from tests.support.memory_disk import bits, same, save, state

PAGE = Path(fbuf.__file__).parent / "FORMAT.md"


def copy_of(case, path):
    return str(shutil.copytree(FOLDER / case, path / "golden"))


def test_golden_files_load(tmp_path):
    for case, (_, check) in CASES.items():
        check(copy_of(case, tmp_path / case))
    assert {str(path.relative_to(FOLDER)) for path in FOLDER.glob("v*/*") if any(path.iterdir())} == set(CASES)


def test_a_save_builds_on_golden_files(tmp_path):
    path = copy_of("v1/plain", tmp_path)
    arrays = plain_arrays(2) | {"scalar": np.array(9)}
    assert checkpoint.write(path, arrays, {}).bytes_written < 8000
    with checkpoint.read(path) as saved:
        same(saved, arrays)


def test_the_page_reads_what_is_saved_now_and_falls_back(tmp_path, capsys):
    pytest.importorskip("safetensors")
    code, path, names = PAGE.read_text().split("```python\n")[1].split("```")[0], tmp_path / "c", {}
    assert len(code.splitlines()) <= 30 and "fbuf" not in code
    exec(compile(code, str(PAGE), "exec"), names)
    read = names["read"]
    for k in range(6):
        save(str(path), k)
    meta, arrays = read(path)
    assert meta == {"k": 5} and {n: bits(a) for n, a in arrays.items()} == {n: bits(a) for n, a in state(5).items()}
    flip(path / "data-000000000006.safetensors", -1)
    assert read(path)[0] == {"k": 4} and "is not whole" in capsys.readouterr().err


def test_data_files_are_safetensors(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    save(str(tmp_path), 3)
    tensors = numpy.load_file(tmp_path / "data-000000000001.safetensors")
    assert bits(tensors["log#piece-2"]) == bits(state(3)["log"][100:150])
    assert np.array_equal(np.concatenate([tensors[f"table#{i}"] for i in range(10)]), state(3)["table"])

"""Checkpoint folders: arrays of every kind come back as they were, and a second save costs what is new."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fbuf import _files
from fbuf._files._dtypes import NAMES, dtype_named


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).tobytes()


def same(saved: _files.Saved, arrays: dict[str, np.ndarray]) -> None:
    assert list(saved.arrays) == list(arrays)
    for name, array in arrays.items():
        found = saved.arrays[name]
        got = np.asarray(found)
        assert got.shape == found.shape == array.shape and got.dtype == found.dtype == array.dtype.newbyteorder("=")
        assert bits(got) == bits(array.astype(array.dtype.newbyteorder("="))), name


def back(path: Path, arrays: dict[str, np.ndarray], **how: object) -> None:
    with _files.read(str(path), **how) as saved:  # type: ignore[arg-type]
        same(saved, arrays)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0), (1,), (1000, 3)])
def test_every_dtype(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    if not hasattr(ml_dtypes, name) and not hasattr(np, name):
        pytest.skip(f"ml_dtypes {ml_dtypes.__version__} has no {name}")
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype_named(name))
    written = _files.write(str(tmp_path), {"a": array}, {"n": name}, sync=False)
    assert (written.generation, written.bytes_total) == (1, array.nbytes)
    back(tmp_path, {"a": array})

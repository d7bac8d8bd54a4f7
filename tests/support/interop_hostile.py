"""Small npz files and their damage, bit by bit."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fbuf.interop import from_arrays, to_file
from tests.support.interop import read_file

ROWS = {"a": np.arange(6, dtype=np.int32), "b": np.arange(12).reshape(6, 2) % 2 == 0}


def written(folder: Path, compress: bool) -> bytes:
    """Return the bytes of `a.npz`, which is written to the folder."""
    buffer, state = from_arrays(ROWS)
    to_file(folder / "a.npz", buffer, state, compress=compress)
    assert _is_intact(read_file(folder / "a.npz"))
    return (folder / "a.npz").read_bytes()


def _is_intact(got: dict[str, np.ndarray]) -> bool:
    return got.keys() == ROWS.keys() and all(
        got[n].dtype == x.dtype and got[n].shape == x.shape and got[n].tobytes() == x.tobytes() for n, x in ROWS.items()
    )


def check_truncations(file: bytes, folder: Path, every: int) -> None:
    """Read the file cut off at every nth byte."""
    path = folder / "cut.npz"
    for size in range(0, len(file), every):
        path.write_bytes(file[:size])
        pytest.raises(ValueError, read_file, path)


def check_flips(file: bytes, folder: Path, every: int) -> None:
    """Flip every nth bit: it is noticed, or the rows are intact (a date or an attribute of the zip)."""
    path = folder / "flipped.npz"
    bits, noticed = range(0, 8 * len(file), every), 0
    for bit in bits:
        damaged = bytearray(file)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            got = read_file(path)
        except ValueError:
            noticed += 1
        else:
            assert _is_intact(got), bit
    assert noticed > 0.6 * len(bits)


def packed(path: Path, members: dict[str, bytes], **settings: Any) -> Path:
    with zipfile.ZipFile(path, "w", **settings) as out:
        for name, text in members.items():
            out.writestr(name, text)
    return path


def npy(array: np.ndarray) -> bytes:
    text = io.BytesIO()
    np.save(text, array, allow_pickle=True)
    return text.getvalue()

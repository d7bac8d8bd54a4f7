"""Files that the system refuses to read are no damaged files: `OSError` with the path, and right when read again."""

import errno
import zipfile

import h5py
import numpy as np
import pytest

import fbuf
from fbuf.interop import _hdf5

pytestmark = pytest.mark.more

ROWS = {"obs": np.arange(80, dtype=np.float32).reshape(40, 2), "reward": np.arange(40, dtype=np.float32)}


@pytest.fixture(params=["npz", "h5"])
def path(request, tmp_path):
    path = tmp_path / f"rows.{request.param}"
    if request.param == "npz":
        np.savez(path, **ROWS)
    else:
        with h5py.File(path, "w") as file:
            for name, rows in ROWS.items():
                file[name] = rows
    return path


def failing(number):
    def fail(*_, **__):
        raise OSError(number, "injected")

    return fail


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.ENOMEM])
@pytest.mark.parametrize("when", ["opening", "reading"])
def test_a_refused_read_is_an_os_error_with_the_path(path, when, number, monkeypatch):
    with monkeypatch.context() as broken:
        if when == "opening":
            broken.setattr(zipfile.ZipFile, "__init__", failing(number))
            broken.setattr(h5py, "File", failing(number))
        else:
            broken.setattr(zipfile.ZipExtFile, "read", failing(number))
            broken.setattr(_hdf5.Reader, "_walk", failing(number))
        with pytest.raises(OSError, match=f"{path}.*injected. Check the disk and the permissions") as caught:
            fbuf.interop.from_file(path, episode_end=()).into(fbuf.Buffer(40))
    assert caught.value.errno == number
    _, state = fbuf.interop.from_file(path, episode_end=()).into(fbuf.Buffer(40))
    assert np.asarray(state.rows["reward"]).tolist() == list(range(40))


def test_bytes_that_the_system_calls_invalid_are_damage(path, monkeypatch):
    monkeypatch.setattr(zipfile.ZipFile, "__init__", failing(errno.EINVAL))
    monkeypatch.setattr(h5py, "File", failing(errno.EINVAL))
    with pytest.raises(ValueError, match="It is damaged or truncated"):
        fbuf.interop.from_file(path)

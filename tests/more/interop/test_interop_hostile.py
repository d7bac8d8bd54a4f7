"""Every bit of an npz and many of a compressed h5, flipped."""

import numpy as np
import pytest

from fbuf.interop import from_arrays, to_file
from tests.support.interop_hostile import check_flips, check_truncations, written
from tests.support.processes import run_python


@pytest.fixture(params=[True])
def compress(request):
    return request.param


def test_every_truncation_and_flipped_bit_is_noticed(compress, tmp_path):
    file = written(tmp_path, compress)
    check_truncations(file, tmp_path, every=1)
    check_flips(file, tmp_path, every=1)


FLIPS = """
import sys
from pathlib import Path
import numpy as np
from tests.support.interop import read_file
path = Path(sys.argv[1])
whole, other = path.read_bytes(), path.with_name("b.h5")
wanted, noticed = read_file(path), 0
generator = np.random.default_rng(0)
for at in generator.integers(0, len(whole), 400):
    damaged = bytearray(whole)
    damaged[at] ^= 1 << int(generator.integers(8))
    other.write_bytes(damaged)
    try:
        got = read_file(other)
    except (ValueError, KeyError, RuntimeError, OSError):
        noticed += 1
    else:
        assert got.keys() == wanted.keys() and all(np.array_equal(got[n], wanted[n]) for n in got), at
print("noticed", noticed)
"""


def test_flipped_bits_of_a_compressed_h5_are_noticed(tmp_path):
    """Its data have checksums; without `compress` HDF5 has none, where npz has them always."""
    rows = {"x": np.random.default_rng(1).integers(0, 4, (600, 16)).astype(np.uint8)}
    to_file(tmp_path / "a.h5", *from_arrays(rows), compress=True)
    assert int(run_python(FLIPS, tmp_path / "a.h5").stdout.split()[-1]) > 100

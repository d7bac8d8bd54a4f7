"""Storages that make room, full disks and bounded memory; torchrl reads the files that `to_ted` writes."""

import numpy as np
import pytest

import fbuf
from fbuf.interop import to_file, to_ted
from tests.support.interop import check_flips, check_truncations, from_arrays, written
from tests.support.processes import run_python
from tests.support.tables import one_of

pytestmark = pytest.mark.more

on_full = one_of("retire")


def test_a_storage_filled_by_an_import_keeps_every_row_or_raises(on_full):
    frames = np.random.default_rng(0).integers(0, 255, (300, 12, 12), np.uint8)
    storage = fbuf.storages.Deduplicated(keys=("x",), block=(12, 12), blocks=160, on_full=on_full)
    with pytest.raises(ValueError, match=r"held 1\d\d of 300 rows"):
        from_arrays({"x": frames}, buffer=fbuf.Buffer(400, storage=storage))
    if on_full == "retire":
        buffer, state = from_arrays({"x": frames[:100]}, buffer=fbuf.Buffer(400, storage=storage))
        assert np.array_equal(buffer.last(state, 100).data["x"], frames[:100])


FULL_DISK = """
import resource, signal, sys, fbuf
import numpy as np
buffer, state = fbuf.interop.from_arrays({"x": np.arange(2**18, dtype=np.float32)}).into()
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for suffix in (".npz", ".h5"):
    try:
        fbuf.interop.to_file(sys.argv[1] + suffix, buffer, state)
    except OSError as error:
        print("refused", type(error).__name__)
"""


def test_a_full_disk_leaves_no_file(tmp_path):
    assert run_python(FULL_DISK, tmp_path / "rows").stdout.count("refused") == 2 and not list(tmp_path.iterdir())


MEMORY = """
import gc, resource, sys
import numpy as np
import fbuf
folder = sys.argv[1]

class Frames:
    # 40,000 frames, each made when it is read
    def __init__(self, n):
        self.shape, self.dtype = (n, 84, 84), np.dtype(np.uint8)

    def __getitem__(self, at):
        t = (np.arange(at.start, at.stop) % 251).astype(np.uint8)
        return np.broadcast_to(t[:, None, None], (len(t), 84, 84))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def both(n, name):
    buffer = fbuf.Buffer(n, storage=fbuf.storages.Compressed(keys=("x",)))
    buffer, state = fbuf.interop.from_arrays({"x": Frames(n), "i": np.arange(n, dtype=np.int32)}).into(buffer)
    done = fbuf.interop.to_file(f"{folder}/{name}", buffer, state)
    assert done.nbytes > n * 84 * 84
    del state
    gc.collect()
    buffer, state = fbuf.interop.from_file(f"{folder}/{name}").into(buffer)
    assert int(buffer.size(state)) == n
    return buffer.nbytes(state)["host"]

for suffix in (".npz", ".h5"):
    both(4000, "warm" + suffix)
before = peak()
kept = [both(40_000, "all" + suffix) for suffix in (".npz", ".h5")]
print((peak() - before) // 2**20, max(kept) // 2**20)
"""


def test_torchrl_slices_ted_within_episodes(tmp_path):
    import tensordict
    import torch
    from torchrl import data

    buffer = fbuf.Buffer(40, lanes=2, view=fbuf.views.Transition(autoreset="same_step"))
    t = np.arange(40).reshape(20, 2)
    rows = {"obs": t.astype(np.float32), "action": t.astype(np.int32), "reward": t.astype(np.float32)}
    rows |= {"terminated": t % 14 == 9, "truncated": t % 26 == 16}
    state = buffer.extend(buffer.init({name: leaf[0, 0] for name, leaf in rows.items()}), rows)
    done = to_ted(tmp_path / "a.h5", buffer, state)
    td = tensordict.PersistentTensorDict.from_h5(str(tmp_path / "a.h5")).to_tensordict()
    assert td.shape == (done.rows,)
    sampler = data.SliceSampler(slice_len=3, strict_length=False)
    replay = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(done.rows), sampler=sampler, batch_size=60)
    replay.extend(td)
    torch.manual_seed(0)
    batch = replay.sample()
    obs, after = batch["observation"], batch["next", "observation"]
    ids, over = batch["collector", "traj_ids"], batch["next", "terminated"][:, 0]
    assert (((after - obs) == 2) | over).all()
    step = (ids[1:] == ids[:-1]) & (obs[1:] - obs[:-1] == 2)
    assert step.any() and (after[:-1][step] == obs[1:][step]).all()


compress = one_of(True)


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
wanted, noticed, rng = read_file(path), 0, np.random.default_rng(0)
for at in rng.integers(0, len(whole), 400):
    damaged = bytearray(whole)
    damaged[at] ^= 1 << int(rng.integers(8))
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
    rows = {"x": np.random.default_rng(1).integers(0, 4, (600, 16)).astype(np.uint8)}
    to_file(tmp_path / "a.h5", *from_arrays(rows), compress=True)
    assert int(run_python(FLIPS, tmp_path / "a.h5").stdout.split()[-1]) > 100

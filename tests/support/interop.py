"""Rows of every kind of leaf, what a buffer holds of them, and files read without a buffer."""

import io
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import interop
from fbuf._rows import columns as _columns
from fbuf.interop import to_file
from tests.support.disk import flipped
from tests.support.trees import same


def every_kind(n, lanes=None):
    """Return n rows (a lane) of all kinds of leaves; no two rows are equal."""
    lead = (n,) if lanes is None else (n, lanes)
    t = np.arange(np.prod(lead)).reshape(lead)
    return {
        "action": t.astype(np.int32),
        "done": t % 5 == 4,
        "next": {"obs": np.broadcast_to(t[..., None, None], (*lead, 4, 3)).astype(np.uint8)},
        "nothing": np.zeros((*lead, 0), np.float32),
        "x": (t * 0.5).astype(jnp.bfloat16),
    }


def held(buffer, state):
    """Return the rows in a buffer by leaf, oldest first, lane after lane: `[N, ...]`."""
    rows = buffer.rows(state)
    mask = np.asarray(rows.mask).reshape(len(rows.mask), -1).T
    leaves = fbuf._core.pytree.named_leaves(rows.data)
    lead = 1 if buffer.lanes is None else 2
    flat = {n: np.asarray(x).reshape(*mask.T.shape, *x.shape[lead:]).swapaxes(0, 1) for n, x in leaves.items()}
    return {name: leaf[mask] for name, leaf in flat.items()}


def read_file(path):
    """Return what `from_file` reads, without a buffer to put it into."""
    source = interop.from_file(path)
    names = _columns.choose_leaves("from_file", source.columns, None)
    return {name: source.columns[name].read(0, source.steps) for name in names}


def into(reader):
    """Return a function that reads with `reader` and fills a buffer."""

    def fill(data, *, buffer=None, capacity=None, newest=None, **settings):
        if buffer is not None and buffer.lanes and reader is interop.from_arrays:
            settings.setdefault("lanes", buffer.lanes)
        return reader(data, **settings).into(buffer, capacity=capacity, newest=newest)

    return fill


from_arrays, from_file, from_torchrl, from_flashbax, from_vault = map(
    into, (interop.from_arrays, interop.from_file, interop.from_torchrl, interop.from_flashbax, interop.from_vault)
)


ROWS = {"a": np.arange(6, dtype=np.int32), "b": np.arange(12).reshape(6, 2) % 2 == 0}


def written(folder, compress):
    buffer, state = from_arrays(ROWS)
    to_file(folder / "a.npz", buffer, state, compress=compress)
    same(read_file(folder / "a.npz"), ROWS)
    return (folder / "a.npz").read_bytes()


def check_truncations(file, folder, every):
    path = folder / "cut.npz"
    for size in range(0, len(file), every):
        path.write_bytes(file[:size])
        pytest.raises(ValueError, read_file, path)


def check_flips(file, folder, every):
    """Flip every nth bit: it is noticed, or the rows are intact (a date or an attribute of the zip)."""
    path = folder / "flipped.npz"
    bits, noticed = range(0, 8 * len(file), every), 0
    for bit in bits:
        path.write_bytes(flipped(file, bit))
        try:
            got = read_file(path)
        except ValueError:
            noticed += 1
        else:
            same(got, ROWS, f"bit {bit}")
    assert noticed > 0.6 * len(bits)


def packed(path, members, **settings):
    with zipfile.ZipFile(path, "w", **settings) as out:
        for name, text in members.items():
            out.writestr(name, text)
    return path


def npy(array):
    text = io.BytesIO()
    np.save(text, array, allow_pickle=True)
    return text.getvalue()


def rollout(n, first=0):
    import tensordict
    import torch

    t = torch.arange(first, first + n)
    obs = t[:, None].float().repeat(1, 3)
    after = {"observation": obs + 1, "reward": t[:, None].double(), "done": (t % 5 == 4)[:, None]}
    rows = {"observation": obs, "action": t, "half": t.to(torch.bfloat16), "next": after}
    return tensordict.TensorDict(rows | {"pixels": (t[:, None] % 256).to(torch.uint8).repeat(1, 4)}, [n])

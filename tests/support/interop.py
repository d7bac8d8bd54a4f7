"""Rows of every kind of leaf, what a buffer holds of them, and files read without a buffer."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.interop import _columns, _load


def every_kind(n: int, lanes: int | None = None) -> dict[str, Any]:
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


def held(buffer: fbuf.Buffer, state: fbuf.BufferState) -> dict[str, np.ndarray]:
    """Return the rows in a buffer by leaf, oldest first, lane after lane: `[N, ...]`."""
    rows = buffer.rows(state)
    mask = np.asarray(rows.mask).reshape(len(rows.mask), -1).T
    leaves = fbuf._core.pytree.named_leaves(rows.data)
    lead = 1 if buffer.lanes is None else 2
    flat = {n: np.asarray(x).reshape(*mask.T.shape, *x.shape[lead:]).swapaxes(0, 1) for n, x in leaves.items()}
    return {name: leaf[mask] for name, leaf in flat.items()}


def check_equal(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert list(got) == list(wanted)
    for name, leaf in wanted.items():
        assert got[name].dtype == leaf.dtype and got[name].shape == leaf.shape, name
        assert got[name].tobytes() == leaf.tobytes(), name


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Return what `from_file` reads, without a buffer to put it into."""
    with _load.opened("from_file", path) as reader:
        source = _load._source(path, reader, None, None)
        names = _columns.choose_leaves("from_file", source.columns, None)
        return {name: source.columns[name].read(0, source.steps) for name in names}

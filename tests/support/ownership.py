"""Buffers on the host, rows that tell their number, and computations that end late."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import fbuf
from fbuf._bridge import lifetime
from fbuf._host.codecs import Zstd
from tests.support.tables import one_of

STORAGES = {
    "host": partial(fbuf.storages.Host, keys=("obs",)),
    "compressed": partial(fbuf.storages.Compressed, keys=("obs",), codec=Zstd(chunk=4)),
    "memmap": partial(fbuf.storages.Memmap, keys=("obs",)),
}
EXAMPLE = {"obs": jax.ShapeDtypeStruct((6,), jnp.int32), "t": jax.ShapeDtypeStruct((), jnp.int32)}
KEY = np.array([0, 7], np.uint32)


def rows_of(first, count, lanes=None):
    """Rows `first`, `first + 1`, ...; with lanes in order of time, then lane."""
    t = np.arange(first, first + count * (lanes or 1), dtype=np.int32)
    t = t if lanes is None else t.reshape(count, lanes)
    return {"obs": 10 * t[..., None] + np.arange(6, dtype=np.int32), "t": t}


def agree(batch):
    """The numbers of the rows in a batch, after a check that host and device parts are of one row each."""
    t, obs, mask = (np.asarray(x) for x in (batch.data["t"], batch.data["obs"], batch.mask))
    np.testing.assert_array_equal(obs, np.where(mask[..., None], 10 * t[..., None] + np.arange(6), 0))
    return t[mask]


def make(storage, capacity=8, lanes=None, **settings):
    return fbuf.Buffer(capacity=capacity, lanes=lanes, storage=STORAGES[storage](**settings))


def filled(buffer, first=0, count=None):
    rows = rows_of(first, buffer.geometry.length if count is None else count, buffer.lanes)
    return jax.block_until_ready(buffer.extend(buffer.init(EXAMPLE), rows))


def full(*args, **settings):
    """Return the buffer that `make` makes of the arguments, and a state in which it is full."""
    buffer = make(*args, **settings)
    return buffer, filled(buffer)


def id_of(state):
    return lifetime.join_id(np.asarray(state.rows.id))


def store_of(state):
    return lifetime.find(id_of(state))


storage = one_of("compressed", exhaustive=["host", "memmap"])


_MATRIX = np.full((256, 256), 0.01, np.float32)


@jax.jit
def _late(x, matrix):
    slow = lax.fori_loop(0, 160, lambda i, a: jnp.tanh(a @ matrix), matrix)
    zero = jnp.isnan(slow[0, 0])  # False, but XLA cannot know
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), x)


def late(x):
    """The same values, some tenths of a second later."""
    return _late(x, _MATRIX)

"""Examples and comparisons of pytrees of arrays, and x64 under the name that this version of JAX has for it."""

import jax
import numpy as np


def numpy_leaf(leaf):
    """Return a copy in numpy; of keys, their data."""
    is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)
    return np.array(jax.random.key_data(leaf) if is_key else leaf)


def same(one, two, case=""):
    """Compare the paths, dtypes, shapes and bits of two pytrees of arrays."""
    pairs, others = (jax.tree_util.tree_flatten_with_path(tree)[0] for tree in (one, two))
    assert [path for path, _ in pairs] == [path for path, _ in others], case
    for (path, a), (_, b) in zip(pairs, others, strict=True):
        a, b = numpy_leaf(a), numpy_leaf(b)
        name = case + jax.tree_util.keystr(path)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert a.tobytes() == b.tobytes(), f"{name}: {a} and {b}"


def example_of(rows, axes=2):
    """Return the shapes and dtypes of one of the rows, which have so many leading axes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[axes:], x.dtype), rows)


def row_with(obs, *axes, **leaves):
    """Return an observation, an action, a reward and flags that end no episode; the others are zeros of these axes."""
    zeros = {"action": np.zeros(axes, np.int32), "reward": np.zeros(axes, np.float32)}
    return {"obs": obs} | zeros | dict.fromkeys(("terminated", "truncated"), np.zeros(axes, bool)) | leaves


def close(one, two, **tolerance):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(numpy_leaf(a), numpy_leaf(b), **tolerance)


def changed(before, after):
    """Return the names of the leaves that are in other memory."""
    old, new = (jax.tree_util.tree_leaves_with_path(state) for state in (before, after))
    pairs = [(jax.tree_util.keystr(path), x, y) for (path, x), (_, y) in zip(old, new, strict=True) if x.size]
    return [name for name, x, y in pairs if x.unsafe_buffer_pointer() != y.unsafe_buffer_pointer()]


def x64(on=True):
    return jax.enable_x64(on) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(on)

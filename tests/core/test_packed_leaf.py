"""Packed leaves give and take the rows of an array `[C, ...]`, in every form and dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf._core import packed_leaf, slots
from fbuf._core.packed_leaf import PackedLeaf, Packing
from tests.support.platforms import as_on_tpus
from tests.support.tables import by_tier

FORMS = {
    "flat": ((5,), np.float32),
    "flat, one element": ((1,), np.int32),
    "flat, bool": ((2, 3), np.bool_),
    "tiles, padded": ((36, 84), np.uint8),
    "tiles, whole": ((2, 1024), jnp.bfloat16),
    "tiles, channels": ((37, 55, 3), np.uint8),
    "tiles, bytes": ((115, 128), np.uint8),  # the last half of the last tile is padding
}


@pytest.mark.parametrize(
    ("shape", "dtype", "capacity", "form"),
    [
        ((), np.float32, 1000, None),
        ((0,), np.float32, 1000, None),
        ((17,), np.float32, 2**30 // 17, "flat"),
        ((17,), np.float32, 2**30 // 17 + 1, None),  # positions would not fit int32
        ((84, 84), np.uint8, 1_000_000, "tiles"),
        ((1500,), np.float32, 1000, "flat"),  # tiles would add a third
        ((1500,), np.float32, 2**20, "tiles"),
        ((4,), np.complex64, 1000, None),
        ((4,), jnp.int4, 1000, None),
        ((4,), np.float64, 1000, None),
        ((4,), jnp.float8_e4m3fn, 1000, "flat"),
    ],
)
def test_the_form_follows_from_the_row(shape, dtype, capacity, form):
    packing = packed_leaf.packing_for(capacity, jax.ShapeDtypeStruct(shape, dtype))
    assert (packing and packing.form) == form
    if form == "tiles":
        assert packing.stored[0] % 8 == 0 and packing.stored[1] == 128


@pytest.mark.parametrize("name", by_tier("flat, bool", "tiles, bytes", more=FORMS))
def test_packed_rows_are_those_of_an_array(name):
    item, dtype = FORMS[name]
    rng, capacity = np.random.default_rng(0), 7
    packing = packed_leaf.packing_for(capacity, jax.ShapeDtypeStruct(item, dtype))
    assert packing.form == name.split(",")[0]
    leaf, plain = packed_leaf.zeros(capacity, packing, dtype), np.zeros((capacity, *item), dtype)
    assert (leaf.shape, leaf.dtype, leaf.ndim, leaf.size) == (plain.shape, plain.dtype, plain.ndim, plain.size)
    write = jax.jit(slots.write_rows, static_argnames="inside", donate_argnums=0)
    for slot in ([[3, 0], [6, 2]], [[7, 1], [-1, 80]], [[5]]):
        at = np.array(slot, np.int32)
        values = rng.integers(0, 2, (*at.shape, *item)).astype(dtype)
        leaf = write({"": leaf}, at, {"": values}, jnp.int32(0), inside=at.size == 1)[""]
        held = (at >= 0) & (at < capacity)
        plain[at[held]] = values[held]
        assert np.array_equal(np.asarray(leaf), plain)
    wanted = np.array([[0, 7], [-1, 6], [3, 3]], np.int32)
    read = jax.jit(slots.read_rows)
    expected = np.asarray(read(jnp.asarray(plain), wanted))
    assert np.array_equal(read(leaf, wanted), expected)
    many = jax.tree.map(lambda x: jnp.stack([x, x]), leaf)
    assert many.shape == (2, capacity, *item)
    both = jax.vmap(slots.read_rows, (0, None))
    assert np.array_equal(jax.jit(both)(many, wanted), [expected, expected])
    # No row, one, and halves that differ in length.
    some = [wanted[:number] for number in range(4)] + [wanted[:, 1]]
    with as_on_tpus():
        found = jax.jit(lambda leaf: [slots.read_rows(leaf, slot) for slot in some])(leaf)
        assert np.array_equal(jax.jit(lambda many: both(many, wanted))(many), [expected, expected])
    for got, want in zip(found, [*(expected[:number] for number in range(4)), expected[:, 1]], strict=True):
        assert np.array_equal(got, want)
    stored = packed_leaf.pack_on_host(plain, packing)
    assert np.array_equal(stored.reshape(leaf.array.shape), leaf.array)
    assert np.array_equal(packed_leaf.unpack_on_host(stored, packing), plain)


def test_packed_leaves_are_pytrees_that_export():
    leaf = PackedLeaf(jnp.arange(12.0), Packing((3,), "flat"))
    assert jax.tree.leaves(leaf)[0] is leaf.array and jax.tree.structure(leaf) == jax.tree.structure(
        packed_leaf.zeros(4, Packing((3,), "flat"), jnp.float32)
    )
    read = jax.export.export(jax.jit(slots.read_rows))(leaf, np.arange(2, dtype=np.int32))
    again = jax.export.deserialize(read.serialize())
    assert np.array_equal(again.call(leaf, np.arange(2, dtype=np.int32)), np.arange(6.0).reshape(2, 3))

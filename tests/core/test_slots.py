"""Slots, generations and rings of lanes are those of lists in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fbuf._core import slots
from fbuf._core.slots import Geometry

LENGTH = 5


class Plain:
    """`generation[slot]` of rows held (0: none), and how many rows each lane has ever had a position for."""

    def __init__(self, lanes):
        self.lanes, self.generation, self.count = lanes, np.zeros(LENGTH * lanes, int), [0] * lanes

    def write(self, keep):
        """Return the slot of each row, -1 where it is skipped or overwritten by a later row."""
        slot = np.full(keep.shape, -1)
        for i, lane in np.argwhere(keep).tolist():
            lap, position = divmod(self.count[lane], LENGTH)
            at = position * self.lanes + lane
            slot[slot == at] = -1
            slot[i, lane], self.generation[at] = at, lap + 1
            self.count[lane] += 1
        return slot

    def clear(self):
        self.generation[:] = 0
        self.count = [-(-count // LENGTH) * LENGTH for count in self.count]

    def evict(self, lane):
        oldest = min((g, at) for at, g in enumerate(self.generation) if at % self.lanes == lane and g)[1]
        self.generation[oldest] = 0


@pytest.mark.parametrize("lanes", [1, 3])
def test_rings_are_those_of_lists(lanes):
    rng, geometry, plain = np.random.default_rng(lanes), Geometry(lanes, LENGTH), Plain(lanes)
    ring, every = slots.init_rings(geometry), jnp.arange(-2, LENGTH * lanes + 2)
    place, generation = (jax.jit(f, static_argnums=n) for f, n in ((slots.place, (1, 2)), (slots.generation, 1)))
    for step in range(40):
        num = (1, 7, 1, 7, 2, 7, 2, 7)[step % 8]
        masked = step % 4 > 0
        keep = rng.random((num, lanes)) < (rng.random(lanes) if masked else 1)
        placed = place(ring, geometry, num, jnp.asarray(keep) if masked else None)
        expected, ring = plain.write(keep), placed.ring
        slot = np.asarray(placed.slot)
        assert np.array_equal(np.where(slot < LENGTH * lanes, slot, -1), expected) and len({*slot.ravel()}) == slot.size
        assert np.array_equal(placed.rows, keep.sum(0))
        if step % 10 == 4 and plain.generation[0]:
            plain.evict(0)
            ring = slots.evict(ring, jnp.asarray([1] + [0] * (lanes - 1), jnp.int32))
        if step % 10 == 9:
            plain.clear()
            ring = slots.clear_rings(ring)
        found = np.asarray(generation(ring, geometry, every))
        assert np.array_equal(found[2:-2], plain.generation) and not found[:2].any() and not found[-2:].any()
        assert np.array_equal(ring.size, np.count_nonzero(plain.generation.reshape(LENGTH, lanes), axis=0))
        cursor, writes = slots.head(ring, geometry)
        own = {count % LENGTH for count in plain.count}
        assert int(cursor) == (own.pop() if len(own) == 1 else -1) and int(writes) == sum(plain.count)


@pytest.mark.parametrize("lanes", [1, 3])
def test_neighbours_and_skipped_rows(lanes):
    geometry = Geometry(lanes, LENGTH)
    ring = slots.place(slots.init_rings(geometry), geometry, 3, None).ring
    whole, part = slots.place(ring, geometry, 4, None), slots.place(ring, geometry, 1, None, skipped=3)
    assert np.array_equal(whole.slot[3:], part.slot) and np.array_equal(whole.rank[3:], part.rank)
    for one, other in zip((whole.ring.cursor, whole.ring.lap), (part.ring.cursor, part.ring.lap), strict=True):
        assert np.array_equal(one, other)
    slot = np.arange(LENGTH * lanes)
    for offset in (-7, -1, 0, 3):
        after = (slot // lanes + offset) % LENGTH * lanes + slot % lanes
        assert np.array_equal(slots.shift(geometry, jnp.asarray(slot, jnp.int32), jnp.int32(offset)), after)
    assert np.array_equal(slots.by_age(ring, geometry, jnp.zeros((1, lanes), jnp.int32))[0], np.arange(lanes))


@pytest.mark.parametrize("lanes", range(1, slots.FEW + 3))
def test_numbers_of_few_lanes_are_those_of_many(lanes):
    values, lane = jnp.arange(3, 3 + lanes, dtype=jnp.int32), jnp.arange(12, dtype=jnp.int32).reshape(3, 4) % lanes
    np.testing.assert_array_equal(jnp.broadcast_to(slots.of_lane(values, lane), (3, 4)), np.asarray(values)[lane])
    assert int(slots.sum_of_lanes(values)) == int(np.sum(values)) and slots.sum_of_lanes(values).dtype == jnp.int32


@pytest.mark.parametrize("item", [(), (3,), (2, 3)])
def test_every_form_of_writing_rows_gives_the_same_array(item):
    rng = np.random.default_rng(0)
    array, values = rng.integers(0, 99, (9, *item)), rng.integers(100, 199, (2, 3, *item))
    slot = np.array([[4, 9, 0], [70, 8, 2]], np.int32)  # 9 and 70 are no slots
    expected = array.copy()
    expected[[4, 0, 8, 2]] = values.reshape(6, *item)[[0, 2, 4, 5]]
    array, values = array.astype(np.int32), values.astype(np.int32)

    def write(array, values):
        arrays = {"unchanged": jnp.zeros(9), "changed": jnp.asarray(array)}
        written = slots.write_rows(arrays, slot, {"other": values, "changed": values}, jnp.int32(0))
        assert list(written) == list(arrays) and written["unchanged"] is arrays["unchanged"]
        return written["changed"]

    for form in (write, jax.jit(write)):
        assert np.array_equal(form(array, values), expected)
    at = jnp.asarray(slot.reshape(-1))
    for form in (slots._write_windows, slots._write_items):
        assert np.array_equal(form(jnp.asarray(array), at, values.reshape(6, *item)), expected)
    many = jax.vmap(write)(np.stack([array, array + 1]), values[None].repeat(2, 0))
    untouched = np.isin(np.arange(9), [4, 0, 8, 2], invert=True).reshape(9, *(1,) * len(item))
    assert np.array_equal(many, np.stack([expected, expected + untouched]))


@pytest.mark.optimized
def test_the_platform_that_is_lowered_for_chooses_how_rows_are_written():
    array, slot = jax.ShapeDtypeStruct((1000, 17), jnp.float32), jax.ShapeDtypeStruct((4, 8), jnp.int32)
    values = jax.ShapeDtypeStruct((4, 8, 17), jnp.float32)

    def write(array, slot, values):
        return slots.write_rows({"": array}, slot, {"": values}, jnp.int32(0))[""]

    traced = jax.jit(write, donate_argnums=0).trace(array, slot, values)
    for platform, expected in (
        ("tpu", "inserted_window_dims = [0]"),
        ("cuda", "inserted_window_dims = [0]"),
        ("cpu", ""),
    ):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        scatter = next(line for line in text.splitlines() if "stablehlo.scatter" in line)
        assert expected in scatter and ("inserted_window_dims" in scatter) == bool(expected)
    compiled = traced.lower().compile()
    if jax.default_backend() == "cpu":
        program = compiled.as_text()
        assert " conditional(" not in program and " copy(" not in program and " while(" not in program
    assert compiled.memory_analysis().alias_size_in_bytes == 1000 * 17 * 4
    both = jax.export.export(jax.jit(write), platforms=("cpu", "tpu"))(array, slot, values)
    at, ones = np.arange(32, dtype=np.int32).reshape(4, 8), np.ones((4, 8, 17), np.float32)
    rows = both.call(np.zeros((1000, 17), np.float32), at, ones)
    assert np.array_equal(rows[:, 0] == 1, np.arange(1000) < 32)

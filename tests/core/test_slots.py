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

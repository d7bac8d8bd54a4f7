"""Writers that replace any row, `TopK` and some as a user would write them, and what they leave in plain Python."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import fbuf
from fbuf.samplers import Prioritized, Uniform
from fbuf.storages import Compressed, Device, Host, Zstd
from tests.support.inplace import assert_draw_write_draw
from tests.support.trees import example_of

Largest = fbuf.writers.TopK  # of equal rows the older stays


@dataclasses.dataclass(frozen=True)
class Anywhere(fbuf.parts.Scattering):
    """Replaces a random row once the buffer is full: all rows of a call at once."""

    seed: int = 0

    def init(self, geometry, spec):
        return jnp.uint32(0)  # calls so far

    def choose(self, own, geometry, held, leaves, keep):
        key = jax.random.fold_in(jax.random.key(self.seed), own)
        rank = jnp.cumsum(keep.reshape(-1), dtype=jnp.int32).reshape(keep.shape) - jnp.int32(1)
        anywhere = jax.random.randint(key, keep.shape, 0, geometry.capacity, jnp.int32)
        slot = jnp.where(held + rank < geometry.capacity, held + rank, anywhere)
        return jnp.where(keep, slot, jnp.int32(-1)), own + jnp.uint32(1)


STORAGES = {
    "Device": Device(),
    "Host": Host(keys=("obs",)),
    "Compressed": Compressed(keys=("obs",)),
    "Compressed, small": Compressed(keys=("obs", "score"), codec=Zstd(chunk=1, dictionary=0), slack=3),
}
WRITERS = {"Largest": Largest("score"), "Anywhere": Anywhere()}
SAMPLERS = {"Uniform": Uniform(), "Prioritized": Prioritized()}
BATCH = 6


def rows_of(first, *shape):
    number = first + np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    return {
        "obs": (number[..., None, None] % 5 + np.arange(8)[:, None] * np.ones(8, int)).astype(np.uint8),
        "score": (number * 7919 % 101).astype(np.float32),
        "id": number.astype(np.int32),
        "done": number % 7 == 0,
    }


EXAMPLE = example_of(rows_of(0, 1), 1)


def make(storage="Device", writer="Largest", capacity=12, **more):
    return fbuf.Buffer(capacity, storage=STORAGES.get(storage, storage), writer=WRITERS.get(writer, writer), **more)


class Model:
    """Rows by slot, with the order in which they came."""

    def __init__(self, capacity):
        self.capacity, self.arrived = capacity, 0
        self.held = {}  # arrival and row, by slot

    def place(self, row, slot):
        self.arrived += 1
        self.held[slot] = self.arrived, row

    def in_order(self):
        return [row for _, row in sorted(self.held.values(), key=lambda pair: pair[0])]

    def largest(self, row):
        if len(self.held) < self.capacity:
            self.place(row, len(self.held))
            return
        slot = min(self.held, key=lambda s: (self.held[s][1]["score"], -self.held[s][0]))
        if row["score"] > self.held[slot][1]["score"]:
            self.place(row, slot)


MOST = 17  # rows a lane of every call, masked beyond those given, so that it compiles once


def check_largest(storage, data, lanes):
    buffer, model = make(storage, lanes=lanes), Model(12)
    state, first, width = buffer.init(EXAMPLE), 0, lanes or 1
    for _ in range(data.draw(st.integers(1, 6), "calls")):
        call = data.draw(st.sampled_from(["extend", "extend", "masked", "update", "clear"]), "call")
        num = data.draw(st.sampled_from([1, 6, MOST]), "rows")
        if call in ("extend", "masked"):
            rows = rows_of(first, MOST, width)
            first += MOST * width
            mask = np.arange(MOST)[:, None] < np.full(width, num)
            if call == "masked":
                mask &= np.random.default_rng(first).random((MOST, width)) < 0.5
            for n, e in np.argwhere(mask):
                model.largest({name: x[n, e] for name, x in rows.items()})
            rows, mask = (rows, mask) if lanes else jax.tree.map(lambda x: x[:, 0], (rows, mask))
            state = buffer.extend(state, rows, mask=mask)
        elif call == "update" and model.held:
            index = buffer.rows(state).index
            index = fbuf.Index(index.slot.reshape(-1)[:4], index.generation.reshape(-1)[:4])
            obs = np.full((4, 8, 8), first % 200, np.uint8)
            state = buffer.update_rows(state, index, {"obs": obs})
            for row in model.in_order()[:4]:
                row["obs"] = obs[0]
        elif call == "clear":
            state, model.held = buffer.clear(state), {}
        assert int(buffer.size(state)) == len(model.held)
        expected = model.in_order()
        newest = ([None] * 2 * width + expected)[-2 * width :]
        for got, wanted in ((buffer.rows(state), expected), (buffer.rows(state, last=2), newest)):
            flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[1 if lanes is None else 2 :]), got)
            padded = wanted + [None] * (flat.mask.size - len(wanted))
            assert flat.mask.tolist() == [row is not None for row in padded]
            for i, row in enumerate(padded):
                for name in EXAMPLE:
                    zero = np.zeros(EXAMPLE[name].shape, EXAMPLE[name].dtype)
                    assert np.array_equal(flat.data[name][i], zero if row is None else row[name])


def check_inplace(storage, sampler):
    keys = {} if storage == "Device" else {"keys": ("obs",)}
    parts = {"storage": type(STORAGES[storage])(**keys), "sampler": SAMPLERS[sampler], "writer": Anywhere()}
    buffer = fbuf.Buffer(40_000, lanes=2, **parts)
    example = {"obs": jax.ShapeDtypeStruct((16,), np.uint8), "score": jax.ShapeDtypeStruct((), np.float32)}
    state = buffer.init(example) if storage != "Device" else None
    assert_draw_write_draw(buffer, example, state)


@dataclasses.dataclass(frozen=True)
class Told(fbuf.parts.Scattering):
    change: Any = staticmethod(lambda slots, own: (slots, own))

    def init(self, geometry, spec):
        return jnp.uint32(0)

    def choose(self, own, geometry, held, leaves, keep):
        return self.change(leaves["id"], own)


def check_refused(storage):
    """Refuse a row that would leave a slot empty, and count it."""
    buffer = make(storage, Told())
    checked = fbuf.checked(buffer.extend)
    for slots, kept, refused in (((0, 2, 1), [0, 1, 2], 0), ((0, 3, 1), [0, 1], 1), ((4, 4, -1), [], 1)):
        given = rows_of(0, 3) | {"id": np.int32(slots)}
        state = buffer.extend(buffer.init(EXAMPLE), given)
        rows = jax.device_get(buffer.rows(state))
        assert sorted(rows.data["id"][rows.mask].tolist()) == kept and int(buffer.size(state)) == len(kept)
        assert int(buffer.stats(state)["refused_rows"]) == refused
        state, batch = buffer.sample(state, jax.random.key(0), 20)
        assert set(np.asarray(batch.data["id"])[np.asarray(batch.mask)].tolist()) == set(kept)
        with pytest.raises(ValueError, match="1 rows") if refused else pytest.MonkeyPatch.context():
            checked(state, given)

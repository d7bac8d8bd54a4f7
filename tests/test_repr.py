"""How states look to people: always something to read, whatever their leaves are, and never an error."""

from __future__ import annotations

import dataclasses
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf

EXAMPLE = {"obs": np.zeros((8, 8), np.uint8), "next": {"reward": np.float32(0)}}
STORAGES = {
    "Device": (fbuf.storages.Device(), "device"),
    "Host": (fbuf.storages.Host(keys=("obs",)), "host"),
    "Compressed": (fbuf.storages.Compressed(keys=("obs",)), "host"),
    "Deduplicated": (fbuf.storages.Deduplicated(keys=("obs",), blocks=64), "device, blocks"),
    "Memmap": (fbuf.storages.Memmap(keys=("obs",)), "host"),
}
GOLDEN = """\
BufferState(3 of 1,000 rows)

rows           one row        place
  next/reward  float32[]      device
  obs          uint8[84, 84]  device

beside         kept as             bytes
  ring         Ring                 12 B
  sampler      PrioritizedState  4.5 KiB
  counters     uint32[9]            36 B"""


def test_a_state_says_what_rows_are_and_how_many_there_are() -> None:
    buffer = fbuf.prioritized(1000)
    example = {"obs": jnp.zeros((84, 84), jnp.uint8), "next": {"reward": 0.0}}
    rows = {"obs": jnp.zeros((3, 84, 84), jnp.uint8), "next": {"reward": jnp.zeros(3)}}
    assert repr(buffer.extend(buffer.init(example), rows)) == GOLDEN


@pytest.mark.parametrize("name", STORAGES)
def test_every_storage_names_its_leaves(name: str) -> None:
    storage, place = STORAGES[name]
    state = fbuf.Buffer(32, storage=storage, lanes=2).init(EXAMPLE)
    lines = [line.split(None, 2) for line in repr(state).splitlines()]
    assert ["obs", "uint8[8,", f"8]  {place}"] in lines
    assert "next/reward  float32[]" in repr(state) and "0 of 32 rows" in repr(state)
    ElementTree.fromstring(state._repr_html_())


def test_leaves_that_are_no_arrays_are_named_too() -> None:
    buffer = fbuf.Buffer(8, storage=fbuf.storages.Ragged(maximum={"obs": (4,)}))
    text = repr(buffer.init({"obs": np.zeros(3, np.float32), "text": "", "reward": 0.0}))
    lines = [line.split() for line in text.splitlines()]
    assert ["text", "text", "host"] in lines and ["obs", "float32[4]", "host"] in lines and "length" not in text


def test_a_bare_array_has_a_name_for_people() -> None:
    lines = repr(fbuf.uniform(8).init(jnp.zeros(3))).splitlines()
    assert ["(row)", "float32[3]", "device"] in [line.split() for line in lines]


@pytest.mark.parametrize("storage", ["Device", "Compressed", "Deduplicated"])
def test_inside_jit_scan_and_vmap(storage: str) -> None:
    buffer = fbuf.Buffer(16, storage=STORAGES[storage][0])
    state, seen = buffer.init(EXAMPLE), []

    def look(state: Any) -> Any:
        seen.append(repr(state) + state._repr_html_())
        return state

    jax.jit(look)(state)
    jax.lax.scan(lambda carry, _: (look(carry), None), state, length=2)
    jax.make_jaxpr(look)(state)
    assert len(seen) >= 2 and all("traced, of 16 rows" in text for text in seen)
    if storage == "Device":
        jax.vmap(look)(jax.tree.map(lambda x: jnp.stack([x, x]), state))


def test_a_donated_state_says_so() -> None:
    buffer = fbuf.uniform(16)
    state = buffer.init(jnp.zeros(2))
    jax.jit(buffer.extend, donate_argnums=0)(state, jnp.ones((2, 2)))
    assert repr(state).startswith("BufferState(donated, of 16 rows)")


@pytest.mark.parametrize("leaf", [None, "text", object(), 3, True, np.zeros(2), jax.ShapeDtypeStruct((2,), np.uint8)])
def test_whatever_the_leaves_are(leaf: Any) -> None:
    """`jax.tree.map` makes states of anything."""
    for storage, _ in STORAGES.values():
        state = jax.tree.map(lambda x: leaf, fbuf.Buffer(16, storage=storage).init(EXAMPLE))
        assert repr(state).startswith("BufferState(")
        ElementTree.fromstring(state._repr_html_())


def test_shapes_alone() -> None:
    state = jax.eval_shape(fbuf.prioritized(16).init, EXAMPLE)
    assert repr(state).startswith("BufferState(? of 16 rows)") and "obs          uint8[8, 8]" in repr(state)


def test_under_transfer_guards() -> None:
    state = fbuf.uniform(16).init(jnp.zeros(2))
    with jax.transfer_guard("disallow"):
        assert repr(state).startswith("BufferState(")


def test_a_buffer_prints_what_was_chosen() -> None:
    assert repr(fbuf.Buffer(8)) == "Buffer(capacity=8)"
    buffer = fbuf.Buffer(8, lanes=2, sampler=fbuf.samplers.Prioritized(alpha=0.5))
    assert repr(buffer) == "Buffer(capacity=8, sampler=Prioritized(alpha=0.5), lanes=2)"


def test_a_part_that_cannot_describe_itself_hides_nothing_else() -> None:
    @dataclasses.dataclass
    class Broken:
        def outline(self) -> Any:
            raise RuntimeError("no")

    state = dataclasses.replace(fbuf.uniform(4).init(0.0), rows=Broken())
    assert repr(state) == "BufferState(...)" and state._repr_html_() == "<code>BufferState(...)</code>"

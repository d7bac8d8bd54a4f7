"""States print a table of leaves whatever their leaves are, and printing never raises."""

from xml.etree import ElementTree

import jax
import numpy as np

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
  header       int32[13]            52 B
  sampler      PrioritizedState  4.5 KiB"""


def shown(state):
    ElementTree.fromstring(state._repr_html_())
    return repr(state)


def test_a_state_prints_its_leaves_and_number_of_rows():
    buffer = fbuf.prioritized(1000)
    example = {"obs": np.zeros((84, 84), np.uint8), "next": {"reward": 0.0}}
    rows = {"obs": np.zeros((3, 84, 84), np.uint8), "next": {"reward": np.zeros(3, np.float32)}}
    assert repr(buffer.extend(buffer.init(example), rows)) == GOLDEN


def test_every_storage_names_its_leaves():
    for storage, place in STORAGES.values():
        state = fbuf.Buffer(32, storage=storage, lanes=2).init(EXAMPLE)
        lines = [line.split(None, 2) for line in shown(state).splitlines()]
        assert ["obs", "uint8[8,", f"8]  {place}"] in lines
        assert "next/reward  float32[]" in repr(state) and "0 of 32 rows" in repr(state)
        for leaf in (None, "text", object(), 3, np.zeros(2), jax.ShapeDtypeStruct((2,), np.uint8)):
            odd = jax.tree.map(lambda x, leaf=leaf: leaf, state)  # `jax.tree.map` makes states of anything
            assert shown(odd).startswith("BufferState(")
    ragged = fbuf.Buffer(8, storage=fbuf.storages.Ragged(maximum={"obs": (4,)}))
    text = repr(ragged.init({"obs": np.zeros(3, np.float32), "text": "", "reward": 0.0}))
    lines = [line.split() for line in text.splitlines()]
    assert ["text", "text", "host"] in lines and ["obs", "float32[4]", "host"] in lines and "length" not in text
    lines = [line.split() for line in repr(fbuf.uniform(8).init(np.zeros(3, np.float32))).splitlines()]
    assert ["(row)", "float32[3]", "device"] in lines


def test_traced_states_print():
    for name in ("Device", "Compressed", "Deduplicated"):
        state, seen = fbuf.Buffer(16, storage=STORAGES[name][0]).init(EXAMPLE), []
        jax.make_jaxpr(lambda state, seen=seen: seen.append(shown(state)))(state)
        assert "traced, of 16 rows" in seen[0]
        if name == "Device":
            jax.eval_shape(jax.vmap(lambda state: shown(state) and state), jax.tree.map(lambda x: x[None], state))


def test_donated_and_abstract_states_print():
    buffer = fbuf.uniform(16)
    state = buffer.init(np.zeros(2, np.float32))
    with jax.transfer_guard("disallow"):
        assert repr(state).startswith("BufferState(")
    jax.jit(buffer.extend, donate_argnums=0)(state, np.ones((2, 2), np.float32))
    assert repr(state).startswith("BufferState(donated, of 16 rows)")
    state = jax.eval_shape(fbuf.prioritized(16).init, EXAMPLE)
    assert repr(state).startswith("BufferState(? of 16 rows)") and "obs          uint8[8, 8]" in repr(state)

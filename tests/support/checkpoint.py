"""Checks of checkpoints shared by tiers: saved and loaded buffers draw the same batches, bit for bit."""

import dataclasses
import functools
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed, Deduplicated
from fbuf.views import Transition
from tests.golden import buffers as golden
from tests.support import combinations
from tests.support.paths import ROOT
from tests.support.trees import same

GOLDEN = ROOT / "tests" / "golden" / "buffers-v1"


@functools.partial(jax.jit, static_argnums=0)
def step(buffer, state, rows, key):
    state = buffer.extend(state, rows)
    state, batch = buffer.sample(state, key) if buffer.batch_size else buffer.sample(state, key, combinations.BATCH)
    if buffer.sampler.prioritized:
        error = jnp.arange(1.0, batch.mask.shape[0] + 1) * jnp.float32(0.37)
        state = buffer.update_priority(state, batch.index, error)
    return state, (batch.data, batch.index, batch.probability, batch.weight, batch.mask)


def steps(buffer, state, first, number, size=3):
    out = []
    for i in range(first, first + number):
        rows = combinations.rows_of(np.random.default_rng(i), size)
        state, drawn = step(buffer, state, rows, jax.random.key(i))
        out.append(jax.device_get(drawn))
    return state, out


def elsewhere(buffer, path):
    """Return the same buffer; one with rows in files at a path gets another path."""
    if isinstance(getattr(buffer.storage, "path", None), str):
        return dataclasses.replace(buffer, storage=dataclasses.replace(buffer.storage, path=str(path)))
    return buffer


def load(path, buffer, to):
    """Load by the path alone where that is possible."""
    if elsewhere(buffer, to) is buffer and "Hindsight" not in repr(buffer):
        loaded, state = fbuf.load(path)
        assert loaded == buffer
        return loaded, state
    return fbuf.load(path, elsewhere(buffer, to))


def made(storage, sampler, view, prefetch):
    buffer = combinations.make(storage, sampler, view)
    return dataclasses.replace(buffer, prefetch=prefetch, batch_size=combinations.BATCH) if prefetch else buffer


def check_goes_on(pair, number, tmp_path):
    """A loaded buffer draws the batches of the saved one: storage, sampler, view and prefetch are `pair`."""
    buffer = made(*pair)
    for before in (4, 9):  # before and after the first eviction
        state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, before)
        assert fbuf.save(tmp_path / "saved", buffer, state).result().generation == 1 + (before == 9)
        loaded, again = load(tmp_path / "saved", buffer, tmp_path / f"rows{before}")
        same(jax.device_get(loaded.stats(again)), jax.device_get(buffer.stats(state)))
        drawn, compiled = steps(buffer, state, 100, number)[1], step._cache_size()
        same(steps(loaded, again, 100, number)[1], drawn)
        # A loaded buffer equals the saved one, so that jitted steps do not retrace; rows or trees on the host are others.
        assert pair[0] != "Device" or "host" in pair[1] or step._cache_size() == compiled
        if elsewhere(buffer, tmp_path) is not buffer:
            break  # its path is in use


def placed(storage, folder):
    return elsewhere(combinations.make(storage, "Prioritized", "Row"), Path(folder))


_CHILD = """
import sys
import fbuf
from tests.support import combinations
from tests.support.checkpoint import placed, steps
storage, folder, path = sys.argv[1:]
buffer = placed(storage, folder)
state = buffer.init(combinations.EXAMPLE)
for number in range(1, 10**9):
    state = steps(buffer, state, number, 1)[0]
    print(number, flush=True)
    fbuf.save(path, buffer, state, wait=number % 2 == 1, sync=False, extra=number)
"""


def check_killed(storage, seed, tmp_path):
    child, path, loading, repeated = (str(tmp_path / name) for name in ("child", "saved", "loaded", "repeated"))
    command = [sys.executable, "-c", _CHILD, storage, child, path]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for number in ("1\n", "2\n"):  # the first save has ended
        assert process.stdout.readline() == number
    time.sleep(random.Random(seed).uniform(0, 0.4))
    process.send_signal(signal.SIGKILL)
    begun = [2, *map(int, process.communicate()[0].split())]
    buffer = placed(storage, repeated)
    loaded, again, number = fbuf.load(path, placed(storage, loading), extra=True)
    # Every save but the last has ended, and one in the background, which the next save waits for.
    case = f"{storage}, seed {seed}: began save {begun[-1]}, loaded {number}"
    assert max(begun[-1] - 2, 1) <= number <= begun[-1], case
    state = steps(buffer, buffer.init(combinations.EXAMPLE), 1, number)[0]
    same(steps(loaded, again, 10**6, 6)[1], steps(buffer, state, 10**6, 6)[1], case)
    fbuf.save(path, loaded, again)
    return int(number)


def numbered(buffer, state, first, count):
    return buffer.extend(state, {"t": jnp.arange(first, first + count, dtype=jnp.float32)})


def check_every_number_of_rows(storage, tmp_path):
    for capacity, counts in ((5, (0, 1, 4, 5, 6, 9, 10, 11)), (1, (0, 1, 2, 3))):
        buffer = fbuf.Buffer(capacity, storage=storage, sampler=Prioritized())
        for count in counts:
            state = buffer.init({"t": 0.0})
            for i in range(count):
                state = numbered(buffer, state, i, 1)
            fbuf.save(tmp_path / "saved", buffer, state, sync=False)
            loaded, again = fbuf.load(tmp_path / "saved")
            for i in range(3):
                key = jax.random.key(i)
                same(loaded.peek(again, key, 4), buffer.peek(state, key, 4))
                same(loaded.rows(again), buffer.rows(state))
                same(again.ring, state.ring)
                state, again = numbered(buffer, state, 50 + i, 1), numbered(loaded, again, 50 + i, 1)


def check_old_state(storage, tmp_path):
    buffer = combinations.make(storage, "Prioritized", "Row")
    old, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, 3)
    steps(buffer, old, 50, 2)
    fbuf.save(tmp_path / "saved", buffer, old)
    loaded, again = fbuf.load(tmp_path / "saved")
    same(loaded.rows(again), buffer.rows(old))
    same(steps(loaded, again, 100, 3)[1], steps(buffer, old, 100, 3)[1])


def saved_transitions(tmp_path, **parts):
    settings = {"sampler": Prioritized(), "view": Transition(gamma=0.9, autoreset="same_step"), **parts}
    buffer = fbuf.Buffer(40, lanes=2, **settings)
    rows = combinations.rows_of(np.random.default_rng(0), 15)
    state = jax.jit(buffer.extend)(buffer.init(combinations.EXAMPLE), rows)
    fbuf.save(tmp_path / "saved", buffer, state)
    return buffer, state


OTHERS = {
    "gamma": {"view": Transition(gamma=0.5, autoreset="same_step")},
    "numbers": {"sampler": Prioritized(alpha=0.1, beta=0.9, stratified=False)},
    "replace": {"sampler": Prioritized(replace=False)},
    "prefetch": {"prefetch": 1, "batch_size": 6},
    "on": {"sampler": Prioritized(on="host")},
    "Compressed": {"storage": Compressed(keys=("obs",))},
    "Deduplicated": {"storage": Deduplicated(keys=("obs",), blocks=512)},
}


def check_other_buffer(what, tmp_path):
    buffer, state = saved_transitions(tmp_path)
    state, _ = steps(buffer, state, 0, 3)
    fbuf.save(tmp_path / "saved", buffer, state)
    other = dataclasses.replace(buffer, **OTHERS[what])
    loaded, again = fbuf.load(tmp_path / "saved", other)
    assert loaded is other
    same(loaded.rows(again).data, buffer.rows(state).data)
    same(again.ring, state.ring)
    same(again.sampler.alpha, state.sampler.alpha)
    if what in ("on", "Compressed", "Deduplicated"):
        same(steps(loaded, again, 100, 4)[1], steps(buffer, state, 100, 4)[1])
    else:
        steps(loaded, again, 100, 1)


def drawable(buffer, state):
    """Return the lane, the age (0: the newest) and the priority of every anchor."""
    cursor = np.asarray(state.ring.cursor)
    length, lanes = buffer.geometry.length, buffer.geometry.lanes
    every = np.arange(buffer.capacity)
    if state.anchors is not None:
        is_open = (np.asarray(state.anchors.flags) & 8) != 0
    else:
        age = (cursor[every % lanes] - 1 - every // lanes) % length
        is_open = age < np.asarray(state.ring.size)[every % lanes]
    own = state.sampler
    leaf = np.asarray(own.tree)[: buffer.capacity] if hasattr(own, "tree") else np.zeros(buffer.capacity)
    found = []
    for slot in np.flatnonzero(is_open).tolist():
        lane = slot % lanes
        found.append((lane, int((cursor[lane] - 1 - slot // lanes) % length), float(leaf[slot])))
    return sorted(found)


def check_resize(case, tmp_path):
    """The newest rows stay, with their priorities: storage, sampler, view, capacity and steps are `case`."""
    *parts, capacity, number = case
    buffer = combinations.make(*parts)
    state, _ = steps(buffer, buffer.init(combinations.EXAMPLE), 0, number)
    fbuf.save(tmp_path / "saved", buffer, state, sync=False)
    other = elsewhere(dataclasses.replace(buffer, capacity=capacity), tmp_path / "rows")
    loaded, again = fbuf.load(tmp_path / "saved", other, resize=True)
    assert loaded is other
    held = min(capacity, 40) // combinations.LANES
    last, wanted = loaded.rows(again, last=held), buffer.rows(state, last=held)
    same((last.data, last.mask), (wanted.data, wanted.mask))
    if not parts[1].endswith("'host')"):
        kept = [(lane, age, leaf) for lane, age, leaf in drawable(buffer, state) if age < held]
        moved = drawable(loaded, again)
        # The oldest kept rows may have lost the frames of their stacks.
        gone = {(lane, age) for lane, age, _ in kept} - {(lane, age) for lane, age, _ in moved}
        assert set(moved) <= set(kept) and all(age >= held - 3 for _, age in gone)
        assert capacity == 16 or not gone
        batch = jax.device_get(loaded.peek(again, jax.random.key(0), 256))
        length, lanes = loaded.geometry.length, loaded.geometry.lanes
        lane = batch.index.slot % lanes
        age = (np.asarray(again.ring.cursor)[lane] - 1 - batch.index.slot // lanes) % length
        drawn = set(zip(lane[batch.mask], age[batch.mask], strict=True))
        assert drawn <= {place[:2] for place in moved}
    stats = jax.device_get(loaded.stats(again))
    assert stats["size"] == min(int(buffer.size(state)), capacity)
    again, drawn = steps(loaded, again, 100, 12)
    assert any(mask.any() for *_, mask in drawn)
    stats = jax.device_get(loaded.stats(again))
    assert not any(stats[name] for name in stats if name.startswith(("refused", "expired", "retired")))


def check_golden(name, path, draw=False):
    buffer, state, extra = fbuf.load(GOLDEN / name, extra=True)
    assert buffer == golden.BUFFERS[name]
    assert extra["step"] == 7 and int(jax.random.bits(extra["key"])) == int(jax.random.bits(jax.random.key(3)))
    held = buffer.rows(state)
    assert np.asarray(held.mask).all()
    want = golden.rows(golden.STEPS - 8, 8)
    same({n: held.data[n] for n in want}, want)
    fbuf.save(path, buffer, state, sync=False)
    again = fbuf.load(path, buffer)[1]
    found = buffer.rows(again)
    same((found.data, found.mask, found.index, again.ring), (held.data, held.mask, held.index, state.ring))
    if name == "deduplicated":  # all of it is in the state
        same(again, state)
    if draw:
        for i in range(3):
            state, batch = buffer.sample(state, jax.random.key(i), 4)
            assert np.asarray(batch.mask).any()
        state = buffer.extend(state, golden.rows(golden.STEPS, 3))
        same(buffer.rows(state, last=8).data["obs"], golden.rows(golden.STEPS - 5, 8)["obs"])

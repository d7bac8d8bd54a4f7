"""Random sequences of verbs against the plain-Python buffer of `tests/model.py`.

Every program runs on the buffer and on the model at once; after each step everything that can be seen of the buffer is
compared: every row, every index, which rows can be drawn, their leaves, a batch with its probabilities and weights, and the
counters. Values come from a seed in each step, so that Hypothesis shrinks the order of verbs, which is where bugs are.
Shapes are few, because each costs a compilation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fbuf
from fbuf import _anchors, _ranks, _sumtree
from fbuf.samplers import _hosttree
from tests.disk import fresh, somewhere
from tests.model import Fields, Model, Row

FIELDS = {
    "action": ((), np.int32),
    "final": ((4,), np.uint8),
    "info/id": ((), np.int32),
    "obs": ((4,), np.uint8),
    "reward": ((), np.float32),
    "terminated": ((), np.bool_),
    "truncated": ((), np.bool_),
}
BATCH = 12
SOME = 3  # rows a lane of an ordinary write

Episode, Sequence, Transition = fbuf.views.Episode, fbuf.views.Sequence, fbuf.views.Transition
VIEWS = {
    "row": fbuf.views.Row(),
    "one step": Transition(),
    "one frame": Transition(n_step=2, stack=1, gamma=0.5),
    "three steps": Transition(n_step=3, gamma=0.9),
    "stack": Transition(stack=3),
    "stack, steps": Transition(n_step=3, stack=3, gamma=0.9, pad="repeat"),
    "final": Transition(n_step=3, gamma=0.9, final_observation="final"),
    "final, stack": Transition(n_step=2, stack=3, final_observation="final"),
    "final, repeat": Transition(n_step=2, stack=4, final_observation="final", pad="repeat"),
    "next step": Transition(autoreset="next_step"),
    "next step, stack": Transition(n_step=3, stack=3, autoreset="next_step", pad="repeat"),
    "other ends": Transition(n_step=2, truncated=None),
    "sequence": Sequence(3),
    "sequence, 1": Sequence(1, autoreset="next_step"),
    "sequence, stride": Sequence(4, burn_in=1, bootstrap=1, stride=2, autoreset="next_step"),
    "sequence, dilation": Sequence(3, dilation=2, stride=3),
    "cross": Sequence(4, boundary="cross", stride=3),
    "cross, dilation": Sequence(3, burn_in=1, boundary="cross", dilation=2, autoreset="next_step"),
    "mask": Sequence(4, boundary="mask"),
    "mask, stride": Sequence(3, boundary="mask", stride=2, bootstrap=1, autoreset="next_step"),
    "mask, left": Sequence(4, boundary="mask", at=3, episode_end=("truncated",)),
    "mask, both": Sequence(3, boundary="mask", at=1, dilation=2, autoreset="next_step"),
    "episode": Episode(4),
    "episode, cut": Episode(3, longer="cut"),
    "episode, next step": Episode(5, longer="cut", autoreset="next_step"),
}
SAMPLERS = {
    "uniform": fbuf.samplers.Uniform(),
    "episodes": fbuf.samplers.Uniform(over="episodes"),
    "batch": fbuf.samplers.Prioritized(),
    "buffer": fbuf.samplers.Prioritized(alpha=1.0, beta=1.0, eps=0.0, normalize="buffer"),
    "none": fbuf.samplers.Prioritized(alpha=0.5, normalize=None, stratified=False),
    "batch, host": fbuf.samplers.Prioritized(on="host"),
    "buffer, host": fbuf.samplers.Prioritized(alpha=1.0, beta=1.0, eps=0.0, normalize="buffer", on="host"),
    "mixed, held": fbuf.samplers.Prioritized(uniform=0.3, largest="held", normalize="buffer", eps=0.0),
    "held": fbuf.samplers.Prioritized(largest="held", normalize="buffer"),
    "ranks": fbuf.samplers.Ranked(),
    "ranks, all": fbuf.samplers.Ranked(uniform=0.2, largest="held", normalize="buffer", stratified=False),
    "versions": fbuf.samplers.Staleness(4, version="action", runs=5),
    "versions, all": fbuf.samplers.Staleness(20, version="action", decay="exponential", half_life=2),
    "ages": fbuf.samplers.Staleness(3, decay="none"),
    "ages, lots": fbuf.samplers.Staleness(2, unit=2, decay="exponential", half_life=0.5),
}
STORAGES = {
    "device": fbuf.storages.Device(),
    "host": fbuf.storages.Host(keys=("obs", "final")),
    "compressed": fbuf.storages.Compressed(keys=("obs", "info")),
    "memmap": fbuf.storages.Memmap(keys=("obs", "final")),
    "files": fbuf.storages.Compressed(keys=("obs", "info"), path=somewhere("model")),
    "deduplicated": fbuf.storages.Deduplicated(keys=("obs", "final"), blocks=256),  # room for all: nothing is refused
}
FORMS = ("eager", "jit", "donated")


def make(view: str, sampler: str, storage: str, lanes: int | None) -> fbuf.Buffer:
    """A buffer of few rows, a number that no power of two divides."""
    length = max(7, VIEWS[view].rule.rows)
    return fbuf.Buffer(
        capacity=length * (lanes or 1),
        storage=fresh(STORAGES[storage]),
        sampler=SAMPLERS[sampler],
        view=VIEWS[view],
        lanes=lanes,
        episode_end=("truncated",) if view in ("other ends", "row") else (),
    )


# ------------------------------------------------------------------------------------------------ the verbs


class Verbs(NamedTuple):
    """The verbs of one buffer in one form, compiled once for all programs."""

    extend: Any
    add: Any
    sample: Any
    update_priority: Any
    update_rows: Any
    clear: Any
    set: Any
    rebuild: Any
    scan: Any


@functools.cache
def verbs_of(buffer: fbuf.Buffer, form: str) -> Verbs:
    def train_step(state: Any, step: Any) -> Any:
        key, rows, priority, errors = step
        state = buffer.extend(state, rows, priority=priority)
        state, batch = buffer.sample(state, key, BATCH)
        if errors is not None:
            state = buffer.update_priority(state, batch.index, errors)
        return state, batch

    made = Verbs(
        extend=lambda state, rows, priority, mask: buffer.extend(state, rows, priority=priority, mask=mask),
        add=lambda state, row, priority, mask: buffer.add(state, row, priority=priority, mask=mask),
        sample=lambda state, key, options: buffer.sample(state, key, BATCH, **options),
        update_priority=buffer.update_priority,
        update_rows=buffer.update_rows,
        clear=buffer.clear,
        set=lambda state, numbers: buffer.set(state, **numbers),
        rebuild=buffer.rebuild,
        scan=lambda state, steps: jax.lax.scan(train_step, state, steps),
    )
    if form == "eager":
        return made._replace(scan=jax.jit(made.scan))
    return Verbs(*(jax.jit(verb, donate_argnums=0 if form == "donated" else ()) for verb in made))


def nest(fields: Fields) -> dict[str, Any]:
    """`{"info/id": x}` as `{"info": {"id": x}}`."""
    rows: dict[str, Any] = {n: jnp.asarray(x) for n, x in fields.items() if "/" not in n}
    if "info/id" in fields:
        rows["info"] = {"id": jnp.asarray(fields["info/id"])}
    return rows


def flat(tree: Any) -> Fields:
    """The inverse of `nest`, as numpy arrays."""
    pairs = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))[0]
    return {"/".join(part.key for part in path): np.asarray(leaf) for path, leaf in pairs}


class Trial:
    """A buffer and its model, kept in step and compared."""

    def __init__(self, buffer: fbuf.Buffer, form: str = "eager"):
        self.buffer, self.form = buffer, form
        self.verbs = verbs_of(buffer, form)
        self.model = Model(buffer, FIELDS)
        example = {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items() if n != "info/id"}
        self.state = buffer.init(example | {"info": {"id": jax.ShapeDtypeStruct((), np.int32)}})
        self.id = itertools.count(1)
        self.trace: list[Any] = []  # all that was sampled

    # ----------------------------------------------------------------------------------------- steps

    def rows(self, rng: np.random.Generator, count: int) -> Fields:
        """New rows `[N, E, ...]`; how often episodes end varies."""
        shape = (count, self.model.lane_count)
        often = rng.choice([0.0, 0.15, 0.5])
        ids = [next(self.id) for _ in range(shape[0] * shape[1])]
        values = {
            "action": rng.integers(-5, 5, shape),
            "final": rng.integers(1, 256, (*shape, 4)),
            "info/id": np.reshape(ids, shape),
            "obs": rng.integers(1, 256, (*shape, 4)),
            "reward": rng.normal(size=shape),
            "terminated": rng.random(shape) < often,
            "truncated": rng.random(shape) < often,
        }
        return {n: np.asarray(x).astype(FIELDS[n][1]) for n, x in values.items()}

    def magnitudes(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        """TD errors, a few of them bad."""
        sane = rng.normal(size=shape) * 10 ** rng.integers(-3, 3, shape).astype(float)
        odd = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e6], shape)
        return np.where(rng.random(shape) < 0.25, odd, sane).astype(np.float32)

    def extend(self, rng: np.random.Generator, count: int | None, given: bool) -> None:
        """`add` (count None) or `extend`; `given`: with mask, and with priority where there are any."""
        rows = self.rows(rng, count or 1)
        shape = (count or 1, self.model.lane_count)
        priority = mask = None
        if given:
            mask = rng.random(shape) < rng.choice([0.6, 1.0])
            priority = self.magnitudes(rng, shape) if self.model.prioritized else None
        self.model.extend(rows, priority, mask)

        def as_given(x: np.ndarray | None) -> Any:
            if x is None:
                return None
            x = x if self.buffer.lanes else x[:, 0]
            return jnp.asarray(x if count else x[0])

        rows = {n: as_given(x) for n, x in rows.items()}
        verb = self.verbs.extend if count else self.verbs.add
        self.state = verb(self.state, nest(rows), as_given(priority), as_given(mask))

    def some_indices(self, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Indices of rows held now, of rows long gone, and of none."""
        known = list(self.model.by_index)
        indices = []
        for kind in rng.choice(["held", "held", "held", "any", "wrong"], BATCH):
            held = [i for i in known if self.model.row_at(*i) is not None]
            if kind == "held" and held:
                indices.append(held[rng.integers(len(held))])
            elif kind == "any" and known:
                indices.append(known[rng.integers(len(known))])
            else:
                c = self.model.capacity
                slot = rng.choice([-1, -c, c, c + 3, 2**31 - 1, -(2**31), 0, c - 1])
                indices.append((int(slot), int(rng.choice([0, 2**32 - 1]))))
        return indices

    def update_priority(self, rng: np.random.Generator) -> None:
        if self.model.prioritized:
            indices, errors = self.some_indices(rng), self.magnitudes(rng, (BATCH,))
            self.model.update_priority(indices, errors)
            self.state = self.verbs.update_priority(self.state, index_of(indices), jnp.asarray(errors))

    def update_rows(self, rng: np.random.Generator) -> None:
        indices = self.some_indices(rng)
        fields = {
            "reward": rng.normal(size=BATCH).astype(np.float32),
            "obs": rng.integers(1, 256, (BATCH, 4)).astype(np.uint8),
        }
        self.model.update_rows(indices, fields)
        self.state = self.verbs.update_rows(self.state, index_of(indices), nest(fields))

    def clear(self, rng: np.random.Generator) -> None:
        del rng
        self.model.clear()
        self.state = self.verbs.clear(self.state)

    def set(self, rng: np.random.Generator) -> None:
        numbers: dict[str, Any] = {}
        if self.model.prioritized:
            names = [n for n in self.buffer.sampler.numbers if n != "eps"]
            numbers = {n: np.float32(rng.uniform()) for n in names}
        elif "version" in self.buffer.sampler.numbers:
            numbers = {"version": np.int32(rng.integers(0, 9))}
        if numbers:
            self.model.set(**numbers)
            self.state = self.verbs.set(self.state, {n: jnp.asarray(x) for n, x in numbers.items()})

    def rebuild(self, rng: np.random.Generator) -> None:
        del rng
        if self.model.prioritized and not self.buffer.sampler.rebuilds:
            self.model.rebuild()
            self.state = self.verbs.rebuild(self.state)

    def scan(self, rng: np.random.Generator) -> None:
        """Three training steps in one program."""
        steps = 3
        rows = [self.rows(rng, 2) for _ in range(steps)]
        shape = (2, self.model.lane_count)
        stacked = {n: np.stack([r[n] for r in rows]) for n in FIELDS}
        priority = errors = None
        if self.model.prioritized:
            priority = self.magnitudes(rng, (steps, *shape))
            errors = self.magnitudes(rng, (steps, BATCH))
        one = slice(None) if self.buffer.lanes else 0
        given = jax.tree.map(lambda x: jnp.asarray(x[:, :, one]), (stacked, priority))
        keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), steps)
        errors_in = None if errors is None else jnp.asarray(errors)
        self.state, batches = self.verbs.scan(self.state, (keys, nest(given[0]), given[1], errors_in))
        for i in range(steps):
            self.model.extend(rows[i], None if priority is None else priority[i])
            batch = jax.tree.map(lambda x, i=i: x[i], batches)
            self.compare_batch(batch)
            if errors is not None:
                self.model.update_priority(pairs_of(batch.index), errors[i])

    def sample(self, rng: np.random.Generator, options: dict[str, float] | None = None) -> None:
        key = jax.random.key(int(rng.integers(2**31)))
        values = {n: jnp.float32(x) for n, x in (options or {}).items()}
        self.state, batch = self.verbs.sample(self.state, key, values)
        self.compare_batch(batch, (options or {}).get("beta"))

    def beta(self, rng: np.random.Generator) -> None:
        """A sample with an exponent of its own."""
        if self.model.prioritized:
            self.sample(rng, {"beta": float(np.float32(rng.uniform(0, 1)))})

    # -------------------------------------------------------------------------------------- compare

    def compare_batch(self, batch: Any, beta: float | None = None) -> None:
        """Every row of a batch is what its anchor stands for."""
        model = self.model
        data, anchors = flat(batch.data), {row.name for row in model.chosen_from()}
        mask = np.asarray(batch.mask)
        probability, weight = np.asarray(batch.probability), np.asarray(batch.weight)
        self.trace.append((data, mask, probability, weight, np.asarray(batch.index.slot)))
        assert mask.all() == mask.any() == bool(anchors)
        if not anchors:
            model.counters["empty_samples"] += 1
            assert pairs_of(batch.index) == [(model.capacity, 0)] * len(mask)
            for zero in (probability, weight, *data.values()):
                assert not zero.any()
            return
        rows = []
        for slot, ticket in pairs_of(batch.index):
            row = model.in_slot(slot)
            assert row is not None and row.name in anchors
            model.meet(slot, ticket, row)
            rows.append(row)
        for i, row in enumerate(rows):
            compare_fields({n: x[i] for n, x in data.items()}, model.content(row))
        near = {"rtol": 1e-5, "atol": 0}
        np.testing.assert_allclose(probability, [model.probability(row) for row in rows], **near)
        np.testing.assert_allclose(weight, model.weights(rows, beta), **near)

    def compare_rows(self, got: Any, expected: list[Row | None]) -> None:
        """`Rows` against rows of the model, None where the mask must be False."""
        data = {n: x.reshape((-1, *x.shape[len(got.mask.shape) :])) for n, x in flat(got.data).items()}
        mask = np.asarray(got.mask).reshape(-1)
        assert mask.tolist() == [row is not None for row in expected]
        for i, (row, (slot, ticket)) in enumerate(zip(expected, pairs_of(got.index), strict=True)):
            if row is None:
                assert (slot, ticket) == (self.model.capacity, 0)
                assert not any(x[i].any() for x in data.values())
            else:
                self.model.meet(slot, ticket, row)
                compare_fields({n: x[i] for n, x in data.items()}, row.fields)

    def compare_all(self) -> None:
        """Rows, anchors, leaves and counters."""
        model, buffer, state = self.model, self.buffer, self.state
        self.compare_rows(buffer.rows(state), list(itertools.chain(*model.by_age())))
        self.compare_rows(buffer.last(state, 2), list(itertools.chain(*model.newest(2))))
        anchors = {row.slot for row in model.anchors()}
        stats = {n: np.asarray(x).item() for n, x in buffer.stats(state).items()}
        assert stats["size"] == model.size and stats["drawable"] == len(anchors)
        assert {n: stats[n] for n in model.counters} == model.counters
        assert bool(buffer.can_sample(state)) == bool(model.chosen_from())
        assert drawable_slots(buffer, state) in (anchors, None)
        if model.prioritized:
            expected, priority = np.zeros(model.capacity), np.full(model.capacity, -np.inf)
            for row in model.anchors():
                expected[row.slot], priority[row.slot] = model.leaf[row.name], model.magnitude[row.name]
            compare = compare_ranks if model.ranked else compare_trees
            compare(buffer, state.sampler, expected, priority)
            assert stats["max_priority"] == pytest.approx(model.max_priority, rel=1e-5)

    def compare_get(self, rng: np.random.Generator) -> None:
        """`get` by index (also stale) and by slot."""
        indices = [i for i in self.some_indices(rng)]
        rows = [self.model.row_at(*i) for i in indices]
        self.compare_rows(self.buffer.get(self.state, index_of(indices)), rows)
        slots = [slot for slot, _ in indices]
        got = self.buffer.get(self.state, jnp.asarray(slots, jnp.int32))
        self.compare_rows(got, [self.model.in_slot(slot) for slot in slots])

    # ---------------------------------------------------------------------------------- whole programs

    def run(self, program: list[tuple[str, int]], given: bool) -> None:
        """Steps, each followed by every comparison.

        Args:
          program: Name of a step, and its seed.
          given: Whether `add` and long writes, or the ordinary ones, come with mask and priority.
        """
        for name, seed in program:
            rng = np.random.default_rng(seed)
            before, model = self.state, self.model.copy()
            if name == "add":
                self.extend(rng, None, given)
            elif name == "some":
                self.extend(rng, SOME, not given)
            elif name == "many":
                self.extend(rng, self.model.length + 2, given)
            else:
                getattr(self, name)(rng)
            self.compare_all()
            self.sample(rng)
            self.compare_get(rng)
            if self.form != "donated":
                self.compare_old(before, model)

    def compare_old(self, state: Any, model: Model) -> None:
        """An earlier state still is what it was."""
        now = self.state, self.model
        self.state, self.model = state, model
        self.compare_all()
        self.state, self.model = now


def host_tree(tree: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Leaves of a version, all its nodes, and the least below each parent."""
    leaves = _hosttree.leaves(tree)
    held = _hosttree.store_of(tree)._tree
    return leaves, held._nodes, held._least


def index_of(pairs: list[tuple[int, int]]) -> fbuf.Index:
    slots, tickets = zip(*pairs, strict=True)
    return fbuf.Index(jnp.asarray(slots, jnp.int32), jnp.asarray(np.array(tickets, np.uint32)))


def pairs_of(index: fbuf.Index) -> list[tuple[int, int]]:
    slots, tickets = np.asarray(index.slot).reshape(-1), np.asarray(index.ticket).reshape(-1)
    return list(zip(slots.tolist(), tickets.tolist(), strict=True))


def compare_fields(got: Fields, expected: Fields) -> None:
    """Exact, but for what the model has in float64."""
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        if np.asarray(want).dtype == np.float64:
            np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            assert np.array_equal(got[name], want), (name, got[name], want)


@functools.partial(jax.jit, static_argnums=1)
def rebuilt(leaves: jax.Array, reduce: Any) -> jax.Array:
    return _sumtree.rebuild(leaves, reduce=reduce)


def compare_trees(buffer: fbuf.Buffer, sampler: Any, leaf: np.ndarray, priority: np.ndarray) -> None:
    """Leaves and priorities are those expected, by slot; parents are what all leaves give, bit for bit."""
    capacity, near = buffer.capacity, {"rtol": 2e-5, "atol": 0}
    if buffer.sampler.on_host:
        leaves, sums, lows = host_tree(sampler.tree)
        np.testing.assert_allclose(leaves, leaf, **near)
        assert (sums == np.asarray(rebuilt(leaves, "sum"))).all()
        if buffer.sampler.normalize == "buffer":
            low = np.asarray(rebuilt(jnp.where(leaves > 0, leaves, jnp.float32(jnp.inf)), "min"))
            assert (lows == low[low.size - lows.size :]).all()  # the host has no leaves of its own for these
        return
    every = jnp.arange(capacity, dtype=jnp.int32)
    leaves = _sumtree.get(sampler.tree, every)
    np.testing.assert_allclose(leaves, leaf, **near)
    assert (np.asarray(sampler.tree) == np.asarray(rebuilt(leaves, "sum"))).all()
    if buffer.sampler.normalize == "buffer":
        drawn = np.isfinite(priority) & ((np.asarray(leaves) > 0) | (sampler.uniform is not None))
        low = jnp.where(drawn, leaves, jnp.float32(jnp.inf))
        assert (np.asarray(sampler.low) == np.asarray(rebuilt(low, "min"))).all()
    if sampler.top is not None:
        held = _sumtree.get(sampler.top, every)
        np.testing.assert_allclose(held, priority, **near)
        assert (np.asarray(sampler.top) == np.asarray(rebuilt(held, "max"))).all()


def compare_ranks(buffer: fbuf.Buffer, sampler: Any, bucket: np.ndarray, priority: np.ndarray) -> None:
    """Buckets are those expected, by slot; counts are what all of them give."""
    del priority
    slot, zero = jnp.arange(buffer.capacity, dtype=jnp.int32), jnp.zeros((), jnp.int32)
    again = _ranks.set(_ranks.init(buffer.capacity), slot, jnp.asarray(bucket, jnp.int32), buffer.capacity, zero)
    for one, two in zip(jax.tree.leaves(sampler.ranks), jax.tree.leaves(again), strict=True):
        assert np.array_equal(one, two)


def drawable_slots(buffer: fbuf.Buffer, state: Any) -> set[int] | None:
    """Slots of anchors by flags and by the sampler's log, which must agree; None where every row is one."""
    if state.anchors is None:
        return None
    flags = np.asarray(state.anchors.flags)
    slots = set(np.flatnonzero(flags & _anchors.OPEN).tolist())
    if not buffer.sampler.prioritized:
        lanes, length, _ = buffer.geometry
        queue = getattr(state.sampler, "log", state.sampler)
        log, head, count = np.asarray(queue.slot), np.asarray(queue.head), np.asarray(queue.count)
        logged = [int(log[(head[e] + i) % length * lanes + e]) for e in range(lanes) for i in range(count[e])]
        assert len(logged) == len(set(logged)) and set(logged) == slots
    return slots


STEPS = (
    *("some",) * 5,
    *("add", "many", "update_priority", "update_rows", "scan") * 2,
    *("clear", "set", "beta", "rebuild"),
)
PROGRAMS = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2**16)), min_size=1, max_size=12)
EXAMPLES = max(settings.default.max_examples // 3, 1)

# The whole product would take hours to compile; every view, sampler, storage and form comes in several company.
CASES = [
    ("row", "batch", "device", 3, "donated"),
    ("one step", "uniform", "device", 3, "jit"),
    ("final, stack", "uniform", "device", 3, "eager"),
    ("next step", "none", "device", None, "donated"),
    ("other ends", "uniform", "device", None, "donated"),
    ("sequence, stride", "episodes", "device", 3, "donated"),
    ("episode, cut", "uniform", "device", None, "donated"),
    ("row", "versions", "device", 3, "donated"),
]
SLOW_CASES = [
    ("stack, steps", "held", "device", 3, "donated"),
    ("row", "ranks, all", "device", 3, "donated"),
    ("stack, steps", "buffer", "compressed", None, "donated"),
    ("next step, stack", "batch", "host", 3, "donated"),
    ("cross", "batch", "device", None, "donated"),
    ("mask, both", "batch", "device", 3, "jit"),
    ("stack, steps", "batch", "deduplicated", 3, "donated"),
    ("row", "ages, lots", "device", 3, "jit"),
    ("stack, steps", "versions, all", "device", 3, "donated"),
    ("next step, stack", "versions", "compressed", None, "donated"),
    ("sequence, stride", "ages", "device", 3, "eager"),
    ("mask, both", "versions", "device", None, "donated"),
    ("episode", "versions, all", "host", 3, "jit"),
    ("row", "episodes", "device", 3, "donated"),
    ("sequence", "batch", "compressed", 3, "donated"),
    ("sequence, 1", "uniform", "device", None, "jit"),
    ("sequence, stride", "buffer", "host", None, "eager"),
    ("sequence, dilation", "uniform", "deduplicated", 3, "donated"),
    ("cross, dilation", "none", "device", 3, "jit"),
    ("mask", "episodes", "device", None, "donated"),
    ("mask, stride", "uniform", "compressed", 3, "jit"),
    ("mask, stride", "episodes", "device", 3, "eager"),
    ("mask, left", "batch", "device", 3, "donated"),
    ("episode", "episodes", "deduplicated", 3, "jit"),
    ("episode, next step", "batch", "device", 3, "donated"),
    ("stack, steps", "episodes", "device", 3, "donated"),
    ("row", "uniform", "device", None, "eager"),
    ("row", "none", "compressed", None, "jit"),
    ("row", "uniform", "host", 3, "donated"),
    ("one step", "batch", "host", None, "eager"),
    ("one frame", "buffer", "device", 3, "eager"),
    ("three steps", "uniform", "compressed", 3, "jit"),
    ("three steps", "none", "device", None, "donated"),
    ("stack", "batch", "device", 3, "jit"),
    ("stack, steps", "uniform", "device", 3, "donated"),
    ("final", "none", "compressed", 3, "eager"),
    ("final, stack", "batch", "compressed", None, "donated"),
    ("final, repeat", "buffer", "host", 3, "jit"),
    ("next step", "uniform", "compressed", 3, "eager"),
    ("next step, stack", "uniform", "device", None, "jit"),
    ("other ends", "buffer", "device", 3, "donated"),
    ("row", "uniform", "deduplicated", None, "eager"),
    ("final, repeat", "buffer", "deduplicated", 3, "jit"),
    ("next step, stack", "none", "deduplicated", None, "donated"),
    ("final, stack", "batch", "memmap", 3, "donated"),
    ("mask, stride", "uniform", "memmap", None, "eager"),
    ("stack, steps", "buffer", "files", None, "donated"),
    ("episode", "versions, all", "files", 3, "jit"),
    ("row", "batch, host", "device", 3, "eager"),
    ("stack, steps", "buffer, host", "compressed", 3, "donated"),
    ("sequence, stride", "batch, host", "deduplicated", None, "jit"),
    ("row", "mixed, held", "device", 3, "donated"),
    ("stack, steps", "mixed, held", "compressed", None, "jit"),
    ("mask, both", "mixed, held", "device", 3, "donated"),
    ("row", "held", "device", None, "donated"),
    ("next step, stack", "held", "host", 3, "donated"),
    ("sequence, stride", "held", "host", None, "jit"),
    ("episode, next step", "held", "deduplicated", 3, "donated"),
    ("row", "ranks", "memmap", None, "donated"),
    ("final, stack", "ranks", "device", 3, "jit"),
    ("mask, stride", "ranks, all", "compressed", 3, "donated"),
]


@pytest.mark.parametrize(
    ("view", "sampler", "storage", "lanes", "form"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
@settings(max_examples=EXAMPLES)
@given(program=PROGRAMS)
def test_every_verb_does_what_the_model_does(view, sampler, storage, lanes, form, program):
    trial = Trial(make(view, sampler, storage, lanes), form)
    trial.run(program, given=(len(view) + len(form)) % 2 == 0)


WRITES = ("some", "add", "many", "some", "update_rows")
CONVERSIONS = [
    ("row", "uniform", "stack, steps", "batch", "device", 3),
    ("stack, steps", "batch", "next step, stack", "uniform", "device", None),
    ("next step", "uniform", "row", "buffer", "compressed", 3),
    ("final", "uniform", "next step", "uniform", "device", None),
    ("final", "buffer", "stack, steps", "uniform", "deduplicated", 3),
    ("row", "uniform", "sequence, stride", "episodes", "device", 3),
    ("sequence", "uniform", "episode, next step", "uniform", "device", None),
    ("episode", "uniform", "mask, both", "batch", "device", 3),
    ("mask", "batch", "cross", "uniform", "compressed", None),
    ("episode", "uniform", "stack, steps", "versions", "device", 3),
    ("row", "batch", "row", "versions, all", "host", None),
    ("row", "batch", "stack, steps", "held", "device", 3),
    ("stack, steps", "held", "row", "ranks", "device", None),
]


@pytest.mark.parametrize(
    ("view", "sampler", "other_view", "other_sampler", "storage", "lanes"),
    [CONVERSIONS[0], *(pytest.param(*case, marks=pytest.mark.slow) for case in CONVERSIONS[1:])],
)
@settings(max_examples=EXAMPLES)
@given(
    before=st.lists(st.tuples(st.sampled_from(WRITES), st.integers(0, 2**16)), min_size=1, max_size=5),
    after=st.lists(st.tuples(st.sampled_from(WRITES), st.integers(0, 2**16)), max_size=4),
)
def test_convert_keeps_rows_and_finds_anchors_anew(
    view, sampler, other_view, other_sampler, storage, lanes, before, after
):
    capacity = 9 * (lanes or 1)
    first, second = (
        dataclasses.replace(make(v, s, storage, lanes), capacity=capacity, episode_end=())
        for v, s in ((view, sampler), (other_view, other_sampler))
    )
    trial, converted = Trial(first), Trial(second)
    trial.run(before, given=False)
    converted.state = first.convert(second, trial.state)
    converted.model, converted.id = trial.model.convert(second), trial.id
    converted.compare_all()
    converted.sample(np.random.default_rng(0))
    converted.run(after, given=True)


@pytest.mark.parametrize(
    ("view", "sampler", "lanes"),
    [
        pytest.param("final, stack", "batch", None, marks=pytest.mark.slow),
        pytest.param("next step, stack", "uniform", 3, marks=pytest.mark.slow),
        pytest.param("row", "buffer", 3, marks=pytest.mark.slow),
    ],
)
def test_one_key_gives_one_batch_whatever_the_storage(view, sampler, lanes):
    program = [(name, seed) for seed in range(4) for name in dict.fromkeys(STEPS) if name != "set"]
    traces = []
    for storage in STORAGES:
        trial = Trial(make(view, sampler, storage, lanes), "donated")
        trial.run(program, given=True)
        traces.append(trial.trace)
    for other in traces[1:]:
        assert len(other) == len(traces[0])
        for one, two in zip(traces[0], other, strict=True):
            same = jax.tree.map(lambda a, b: a.dtype == b.dtype and a.tobytes() == b.tobytes(), one, two)
            assert all(jax.tree.leaves(same))

"""Any sequence of methods does what the plain-Python buffer of `tests/support/model.py` does.

A program runs on a buffer and on the model at once; after each step everything that can be seen of the buffer is compared:
every row, every index, which rows can be drawn, their leaves, a batch with its probabilities and weights, and the counters.
Values come from a seed in each step, so that Hypothesis shrinks the order of methods, where the defects are. Shapes are few,
because each costs a compilation.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

import fbuf
from fbuf._algorithms import rank_buckets, sum_tree
from fbuf._indexing import anchors as _anchors
from fbuf.samplers import _host_priorities
from tests.support.disk import fresh, somewhere
from tests.support.model import Fields, Model, Row

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
    observe: Any


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
        observe=lambda state, index: (
            buffer.rows(state),
            buffer.last(state, 2),
            buffer.stats(state),
            buffer.can_sample(state),
            buffer.get(state, index),
            buffer.get(state, index.slot),
        ),
    )
    if form == "eager":
        return made._replace(scan=jax.jit(made.scan))
    jitted = [jax.jit(verb, donate_argnums=0 if form == "donated" else ()) for verb in made[:-1]]
    return Verbs(*jitted, observe=jax.jit(made.observe))


def nest(fields: Fields) -> dict[str, Any]:
    """`{"info/id": x}` as `{"info": {"id": x}}`."""
    rows: dict[str, Any] = {n: x for n, x in fields.items() if "/" not in n}
    if "info/id" in fields:
        rows["info"] = {"id": fields["info/id"]}
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
            return x if count else x[0]

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
            self.state = self.verbs.update_priority(self.state, index_of(indices), errors)

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
            self.state = self.verbs.set(self.state, numbers)

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
        given = jax.tree.map(lambda x: x[:, :, one], (stacked, priority))
        keys = jax.random.split(jax.random.key(int(rng.integers(2**31))), steps)
        self.state, batches = self.verbs.scan(self.state, (keys, nest(given[0]), given[1], errors))
        batches = jax.device_get(batches)
        for i in range(steps):
            self.model.extend(rows[i], None if priority is None else priority[i])
            batch = jax.tree.map(lambda x, i=i: x[i], batches)
            self.compare_batch(batch)
            if errors is not None:
                self.model.update_priority(pairs_of(batch.index), errors[i])

    def sample(self, rng: np.random.Generator, options: dict[str, float] | None = None) -> None:
        key = jax.random.key(int(rng.integers(2**31)))
        values = {n: np.float32(x) for n, x in (options or {}).items()}
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

    def compare_all(self, rng: np.random.Generator) -> None:
        """Rows, also by index (stale ones too) and by slot; anchors, leaves and counters."""
        model, buffer, state = self.model, self.buffer, self.state
        indices = self.some_indices(rng)
        seen = jax.device_get(self.verbs.observe(state, index_of(indices)))
        rows, last, stats, can_sample, by_index, by_slot = seen
        self.compare_rows(rows, list(itertools.chain(*model.by_age())))
        self.compare_rows(last, list(itertools.chain(*model.newest(2))))
        self.compare_rows(by_index, [model.row_at(*i) for i in indices])
        self.compare_rows(by_slot, [model.in_slot(slot) for slot, _ in indices])
        anchors = {row.slot for row in model.anchors()}
        stats = {n: np.asarray(x).item() for n, x in stats.items()}
        assert stats["size"] == model.size and stats["drawable"] == len(anchors)
        assert {n: stats[n] for n in model.counters} == model.counters
        assert bool(can_sample) == bool(model.chosen_from())
        assert drawable_slots(buffer, state) in (anchors, None)
        if model.prioritized:
            expected, priority = np.zeros(model.capacity), np.full(model.capacity, -np.inf)
            for row in model.anchors():
                expected[row.slot], priority[row.slot] = model.leaf[row.name], model.magnitude[row.name]
            compare = compare_ranks if model.ranked else compare_trees
            compare(buffer, state.sampler, expected, priority)
            assert stats["max_priority"] == pytest.approx(model.max_priority, rel=1e-5)

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
            self.compare_all(rng)
            self.sample(rng)
            if self.form != "donated":
                self.compare_old(before, model, rng)

    def compare_old(self, state: Any, model: Model, rng: np.random.Generator) -> None:
        """An earlier state still is what it was."""
        now = self.state, self.model
        self.state, self.model = state, model
        self.compare_all(rng)
        self.state, self.model = now


def host_tree(tree: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Leaves of a version, all its nodes, and the least below each parent."""
    leaves = _host_priorities.leaves(tree)
    held = _host_priorities.store_of(tree)._tree
    return leaves, held._nodes, held._least


def index_of(pairs: list[tuple[int, int]]) -> fbuf.Index:
    slots, tickets = zip(*pairs, strict=True)
    return fbuf.Index(np.array(slots, np.int32), np.array(tickets, np.uint32))


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
    return sum_tree.rebuild(leaves, reduce=reduce)


@functools.partial(jax.jit, static_argnums=1)
def leaves_of(tree: jax.Array, capacity: int) -> jax.Array:
    return sum_tree.get(tree, jnp.arange(capacity, dtype=jnp.int32))


def compare_trees(buffer: fbuf.Buffer, sampler: Any, leaf: np.ndarray, priority: np.ndarray) -> None:
    """Leaves and priorities are those expected, by slot; parents are what all leaves give, bit for bit."""
    near = {"rtol": 2e-5, "atol": 0}
    lowest = buffer.sampler.normalize == "buffer"
    if buffer.sampler.on_host:
        leaves, sums, lows = host_tree(sampler.tree)
        np.testing.assert_allclose(leaves, leaf, **near)
        assert (sums == np.asarray(rebuilt(leaves, "sum"))).all()
        if lowest:
            low = np.asarray(rebuilt(np.where(leaves > 0, leaves, np.float32(np.inf)), "min"))
            assert (lows == low[low.size - lows.size :]).all()  # the host has no leaves of its own for these
        return
    leaves = np.asarray(leaves_of(sampler.tree, buffer.capacity))
    np.testing.assert_allclose(leaves, leaf, **near)
    assert (np.asarray(sampler.tree) == np.asarray(rebuilt(leaves, "sum"))).all()
    if lowest:
        drawn = np.isfinite(priority) & ((leaves > 0) | (sampler.uniform is not None))
        low = np.where(drawn, leaves, np.float32(np.inf))
        assert (np.asarray(sampler.low) == np.asarray(rebuilt(low, "min"))).all()
    if sampler.top is not None:
        held = np.asarray(leaves_of(sampler.top, buffer.capacity))
        np.testing.assert_allclose(held, priority, **near)
        assert (np.asarray(sampler.top) == np.asarray(rebuilt(held, "max"))).all()


@jax.jit
def ranks_of(bucket: jax.Array) -> Any:
    number = bucket.shape[0]
    slot, zero = jnp.arange(number, dtype=jnp.int32), jnp.zeros((), jnp.int32)
    return rank_buckets.set(rank_buckets.init(number), slot, bucket, number, zero)


def compare_ranks(buffer: fbuf.Buffer, sampler: Any, bucket: np.ndarray, priority: np.ndarray) -> None:
    """Buckets are those expected, by slot; counts are what all of them give."""
    del priority
    again = ranks_of(bucket.astype(np.int32))
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


WRITES = ("some", "add", "many", "some", "update_rows")


def name_of(case: tuple) -> str:
    return "-".join(map(str, case))

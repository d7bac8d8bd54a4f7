"""Programs of methods that run on a buffer and on the model of `tests/support/model.py`, compared after each step."""

import functools
import itertools
import tempfile
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._algorithms import rank_buckets, sum_tree
from fbuf._indexing import anchors
from fbuf.samplers import _host_priorities
from tests.support.model import Model
from tests.support.model_cases import FIELDS
from tests.support.trees import same

BATCH = 12
SOME = 3  # rows a lane of an ordinary write


@functools.cache
def methods_of(buffer, form):
    """Return the methods of a buffer in one form, compiled once for all programs."""

    def train_step(state, step):
        key, rows, priority, errors = step
        state = buffer.extend(state, rows, priority=priority)
        state, batch = buffer.sample(state, key, BATCH)
        if errors is not None:
            state = buffer.update_priority(state, batch.index, errors)
        return state, batch

    methods = {
        "extend": lambda state, rows, priority, mask: buffer.extend(state, rows, priority=priority, mask=mask),
        "add": lambda state, row, priority, mask: buffer.add(state, row, priority=priority, mask=mask),
        "sample": lambda state, key, options: buffer.sample(state, key, BATCH, **options),
        "set": lambda state, numbers: buffer.set(state, **numbers),
        "cut": lambda state, lanes: buffer.cut(state, lanes),
        **{name: getattr(buffer, name) for name in ("update_priority", "update_rows", "clear")},
        "rebuild": lambda state: buffer.set(state, rebuild=True),
    }
    donated = 0 if form == "donated" else ()
    if form != "eager":
        methods = {name: jax.jit(method, donate_argnums=donated) for name, method in methods.items()}

    def observed(state, index):
        seen = buffer.rows(state), buffer.rows(state, last=2), buffer.stats(state), buffer.can_sample(state)
        return *seen, buffer.get(state, index), buffer.get(state, index.slot)

    scan = jax.jit(lambda state, steps: jax.lax.scan(train_step, state, steps), donate_argnums=donated)
    return SimpleNamespace(**methods, scan=scan, observe=observed if form == "eager" else jax.jit(observed))


def nest(fields):
    rows = {n: x for n, x in fields.items() if "/" not in n}
    if "info/id" in fields:
        rows["info"] = {"id": fields["info/id"]}
    return rows


def flat(tree):
    pairs = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))[0]
    return {"/".join(part.key for part in path): np.asarray(leaf) for path, leaf in pairs}


class Trial:
    """A buffer and its model, kept in step and compared."""

    def __init__(self, buffer, form="eager"):
        self.buffer, self.form = buffer, form
        self.methods = methods_of(buffer, form)
        self.model = Model(buffer, FIELDS)
        example = {n: jax.ShapeDtypeStruct(*of) for n, of in FIELDS.items() if n != "info/id"}
        self.state = buffer.init(example | {"info": {"id": jax.ShapeDtypeStruct((), np.int32)}})
        self.id = itertools.count(1)

    def rows(self, rng, count):
        shape = (count, self.model.lane_count)
        often = rng.choice([0.0, 0.15, 0.5])
        ids = [next(self.id) for _ in range(shape[0] * shape[1])]
        values = {
            "action": rng.integers(*rng.choice([(-5, 5), (0, 2), (1, 2)]), shape),
            "final": rng.integers(1, 256, (*shape, 4)),
            "info/id": np.reshape(ids, shape),
            "obs": rng.integers(1, 256, (*shape, 4)),
            "reward": rng.normal(size=shape),
            "terminated": rng.random(shape) < often,
            "truncated": rng.random(shape) < often,
        }
        return {n: np.asarray(x).astype(FIELDS[n][1]) for n, x in values.items()}

    def magnitudes(self, rng, shape):
        sane = rng.normal(size=shape) * 10 ** rng.integers(-3, 3, shape).astype(float)
        odd = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e6], shape)
        return np.where(rng.random(shape) < 0.25, odd, sane).astype(np.float32)

    def extend(self, rng, count, given):
        """`add` (count None) or `extend`; `given`: with mask, and with priority where there are any."""
        rows = self.rows(rng, count or 1)
        shape = (count or 1, self.model.lane_count)
        priority = mask = None
        if given:
            mask = rng.random(shape) < rng.choice([0.6, 1.0])
            priority = self.magnitudes(rng, shape) if self.model.prioritized else None
        self.model.extend(rows, priority, mask)

        def as_given(x):
            if x is None:
                return None
            x = x if self.buffer.lanes else x[:, 0]
            return x if count else x[0]

        rows = {n: as_given(x) for n, x in rows.items()}
        method = self.methods.extend if count else self.methods.add
        self.state = method(self.state, nest(rows), as_given(priority), as_given(mask))

    def some_indices(self, rng):
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

    def update_priority(self, rng):
        if self.model.prioritized:
            indices, errors = self.some_indices(rng), self.magnitudes(rng, (BATCH,))
            self.model.update_priority(indices, errors)
            self.state = self.methods.update_priority(self.state, index_of(indices), errors)

    def update_rows(self, rng):
        indices = self.some_indices(rng)
        fields = {
            "reward": rng.normal(size=BATCH).astype(np.float32),
            "obs": rng.integers(1, 256, (BATCH, 4)).astype(np.uint8),
        }
        self.model.update_rows(indices, fields)
        self.state = self.methods.update_rows(self.state, index_of(indices), nest(fields))

    def clear(self, _):
        self.model.clear()
        self.state = self.methods.clear(self.state)

    def cut(self, rng):
        lanes = rng.random(self.model.lane_count) < rng.choice([0.5, 1.0])
        self.model.cut(lanes)
        self.state = self.methods.cut(self.state, lanes if self.buffer.lanes else lanes[0])

    def convert(self, _):
        self.model = self.model.convert(self.buffer)
        self.state = self.buffer.convert(self.buffer, self.state)

    def reload(self, rng):
        """From a checkpoint, at times with a cut."""
        cut = bool(rng.integers(2))
        with tempfile.TemporaryDirectory() as folder:
            fbuf.save(folder, self.buffer, self.state)
            _, self.state = fbuf.load(folder, self.buffer, cut=cut)
        if cut:
            self.model.cut(np.ones(self.model.lane_count, bool))

    def set(self, rng):
        numbers = {}
        if self.model.prioritized:
            names = [n for n in self.buffer.sampler.numbers if n != "eps"]
            numbers = {n: np.float32(rng.uniform()) for n in names}
        elif "version" in self.buffer.sampler.numbers:
            numbers = {"version": np.int32(rng.integers(0, 9))}
        if numbers:
            self.model.set(**numbers)
            self.state = self.methods.set(self.state, numbers)

    def rebuild(self, _):
        if self.model.prioritized and not self.buffer.sampler.rebuilds:
            self.model.rebuild()
            self.state = self.methods.rebuild(self.state)

    def scan(self, rng):
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
        self.state, batches = self.methods.scan(self.state, (keys, nest(given[0]), given[1], errors))
        batches = jax.device_get(batches)
        for i in range(steps):
            self.model.extend(rows[i], None if priority is None else priority[i])
            batch = jax.tree.map(lambda x, i=i: x[i], batches)
            self.compare_batch(batch)
            if errors is not None:
                self.model.update_priority(pairs_of(batch.index), errors[i])

    def sample(self, rng, options=None):
        key = jax.random.key(int(rng.integers(2**31)))
        values = {n: np.float32(x) for n, x in (options or {}).items()}
        self.state, batch = self.methods.sample(self.state, key, values)
        self.compare_batch(batch, (options or {}).get("beta"))

    def beta(self, rng):
        if self.model.prioritized:
            self.sample(rng, {"beta": float(np.float32(rng.uniform(0, 1)))})

    def compare_batch(self, batch, beta=None):
        model = self.model
        data, anchors = flat(batch.data), {row.name for row in model.chosen_from()}
        mask = np.asarray(batch.mask)
        probability, weight = np.asarray(batch.probability), np.asarray(batch.weight)
        assert mask.all() == mask.any() == bool(anchors)
        if not anchors:
            model.counters["empty_samples"] += 1
            assert pairs_of(batch.index) == [(model.capacity, 0)] * len(mask)
            for zero in (probability, weight, *data.values()):
                assert not zero.any()
            return
        rows = []
        for slot, generation in pairs_of(batch.index):
            row = model.in_slot(slot)
            assert row is not None and row.name in anchors
            model.meet(slot, generation, row)
            rows.append(row)
        for i, row in enumerate(rows):
            compare_fields({n: x[i] for n, x in data.items()}, model.content(row))
        near = {"rtol": 1e-5, "atol": 0}
        np.testing.assert_allclose(probability, [model.probability(row) for row in rows], **near)
        np.testing.assert_allclose(weight, model.weights(rows, beta), **near)

    def compare_rows(self, got, expected):
        data = {n: x.reshape((-1, *x.shape[len(got.mask.shape) :])) for n, x in flat(got.data).items()}
        mask = np.asarray(got.mask).reshape(-1)
        assert mask.tolist() == [row is not None for row in expected]
        for i, (row, (slot, generation)) in enumerate(zip(expected, pairs_of(got.index), strict=True)):
            if row is None:
                assert (slot, generation) == (self.model.capacity, 0)
                assert not any(x[i].any() for x in data.values())
            else:
                self.model.meet(slot, generation, row)
                compare_fields({n: x[i] for n, x in data.items()}, row.fields)

    def compare_all(self, rng):
        model, buffer, state = self.model, self.buffer, self.state
        indices = self.some_indices(rng)
        seen = jax.device_get(self.methods.observe(state, index_of(indices)))
        rows, last, stats, can_sample, by_index, by_slot = seen
        self.compare_rows(rows, list(itertools.chain(*model.by_age())))
        self.compare_rows(last, list(itertools.chain(*model.newest(2))))
        self.compare_rows(by_index, [model.row_at(*i) for i in indices])
        self.compare_rows(by_slot, [model.in_slot(slot) for slot, _ in indices])
        anchors = {row.slot for row in model.anchors()}
        stats = {n: np.asarray(x).item() for n, x in stats.items()}
        assert stats["size"] == model.size and stats["anchors"] == len(anchors)
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

    def run(self, program, given):
        """Steps by name and seed; `given`: whether `add` and long writes, or ordinary ones, have mask and priority."""
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

    def compare_old(self, state, model, rng):
        now = self.state, self.model
        self.state, self.model = state, model
        self.compare_all(rng)
        self.state, self.model = now


def index_of(pairs):
    slots, generations = zip(*pairs, strict=True)
    return fbuf.Index(np.array(slots, np.int32), np.array(generations, np.uint32))


def pairs_of(index):
    slots, generations = np.asarray(index.slot).reshape(-1), np.asarray(index.generation).reshape(-1)
    return list(zip(slots.tolist(), generations.tolist(), strict=True))


def compare_fields(got, expected):
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        if np.asarray(want).dtype == np.float64:
            np.testing.assert_allclose(got[name], want, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            assert np.array_equal(got[name], want), (name, got[name], want)


@functools.partial(jax.jit, static_argnums=1)
def rebuilt(leaves, reduce):
    return sum_tree.rebuild(leaves, reduce=reduce)


@functools.partial(jax.jit, static_argnums=1)
def leaves_of(tree, capacity):
    return sum_tree.get(tree, jnp.arange(capacity, dtype=jnp.int32))


def compare_trees(buffer, sampler, leaf, priority):
    """Leaves and priorities are those expected, by slot; parents are what all leaves give, bit for bit."""
    near = {"rtol": 2e-5, "atol": 0}
    lowest = buffer.sampler.normalize == "buffer"
    if buffer.sampler.on_host:
        leaves, held = _host_priorities.leaves(sampler.tree), _host_priorities.store_of(sampler.tree)._tree
        np.testing.assert_allclose(leaves, leaf, **near)
        assert (held._nodes == np.asarray(rebuilt(leaves, "sum"))).all()
        if lowest:
            low = np.asarray(rebuilt(np.where(leaves > 0, leaves, np.float32(np.inf)), "min"))
            # The host has no leaves of its own for these.
            assert (held._least == low[low.size - held._least.size :]).all()
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
def ranks_of(bucket):
    number = bucket.shape[0]
    slot, zero = jnp.arange(number, dtype=jnp.int32), jnp.zeros((), jnp.int32)
    return rank_buckets.set(rank_buckets.init(number), slot, bucket, number, zero)


def compare_ranks(buffer, sampler, bucket, _):
    """Buckets are those expected, by slot; counts are what all of them give."""
    same(sampler.ranks, ranks_of(bucket.astype(np.int32)))


def drawable_slots(buffer, state):
    """Slots of anchors by flags and by the sampler's log, which must agree; None where every row is one."""
    if state.anchors is None:
        return None
    flags = np.asarray(state.anchors.flags)
    slots = set(np.flatnonzero(flags & anchors.ANCHOR).tolist())
    if not buffer.sampler.prioritized:
        lanes, length, _ = buffer.geometry
        queue = getattr(state.sampler, "log", state.sampler)
        log, head, count = np.asarray(queue.slot), np.asarray(queue.head), np.asarray(queue.count)
        logged = [int(log[(head[e] + i) % length * lanes + e]) for e in range(lanes) for i in range(count[e])]
        assert len(logged) == len(set(logged)) and set(logged) == slots
    return slots

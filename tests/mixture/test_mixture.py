"""`Mixture`: sources and frequencies of rows, and updates routed back to their buffers."""

import contextlib
import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._host.store.store import Store
from fbuf.samplers import Epoch, Prioritized
from fbuf.storages import Compressed, Memmap
from fbuf.views import Transition
from tests.support import mixture as support
from tests.support import refusals, segments
from tests.support.mixture import (
    EXAMPLE,
    MODES,
    B,
    check_in_place,
    check_sampler,
    extended,
    filled,
    numbers,
    played,
    refused,
    rows_of,
    same,
    two,
    weighted,
)
from tests.support.refusals import raises
from tests.support.tables import checks
from tests.support.uniformity import chi_square_z


def test_chances_and_weights_are_those_of_the_closed_form():
    mixture, state = weighted(MODES["annealed"], target="union", normalize=None, beta=0.7)
    keys = jax.random.split(jax.random.key(7), 3000)
    ids, probability, _, weight = map(np.asarray, numbers(mixture, mode="annealed")(state, keys))
    wanted = support.density(mixture, state, {"a": 0.25, "b": 0.75})
    chance = np.array([wanted[n] for n in ids.tolist()])
    np.testing.assert_allclose(probability, chance, rtol=1e-5)
    np.testing.assert_allclose(weight, (60 * chance) ** -0.7, rtol=1e-5)
    # Quotas and strata only make counts more even than independent draws.
    counts = np.array([np.sum(ids == n) for n in sorted(wanted)])
    assert chi_square_z(counts, np.array([wanted[n] for n in sorted(wanted)])) < 4


def test_all_takes_the_rows_asked_of_each():
    mixture = two(quota="all")
    state = filled(mixture, a=0)
    batch = mixture.peek(state, jax.random.key(0), {"b": 3, "a": 2})
    assert batch.index.source.tolist() == [2, 2, 1, 1, 1] and not bool(mixture.can_sample(state))
    batch = mixture.peek(filled(mixture), jax.random.key(0), {"b": 3, "a": 2})
    assert batch.index.source.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(batch.probability, np.array([0.4 / 20] * 2 + [0.6 / 40] * 3), rtol=1e-6)


def test_a_buffer_of_which_nothing_is_drawn_may_be_empty():
    mixture = two(fractions={"a": 0.0, "b": 1.0}, if_empty="mask")
    assert mixture.can_sample(filled(mixture, a=0)) and not mixture.can_sample(filled(mixture, b=0))


def test_sources_at_random_differ_from_batch_to_batch():
    mixture, state = weighted(MODES["random"])
    sources = [mixture.peek(state, jax.random.key(i), B).index.source for i in range(8)]
    assert len({int(jnp.sum(source)) for source in sources}) > 1


def test_the_first_buffer_that_can_counts_rows_of_no_buffer():
    mixture = two(fbuf.Buffer(20), fbuf.prioritized(40))
    states = filled(mixture)
    index = fbuf.Index(jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.uint32), source=jnp.full(2, 9, jnp.int32))
    assert refused(mixture, mixture.update_priority(states, index, jnp.ones(2))) == {"b/refused_out_of_range": 2}
    fields = {"id": jnp.zeros(2, jnp.int32)}
    assert refused(mixture, mixture.update_rows(states, index, fields)) == {"a/refused_out_of_range": 2}
    after = mixture.update_rows(states, index, fields, mask=np.arange(2) == 0)
    assert refused(mixture, after) == {"a/refused_out_of_range": 1}


def test_buffers_that_are_alike_draw_other_rows():
    mixture = fbuf.Mixture({name: fbuf.Buffer(1000) for name in "ab"}, fractions=dict.fromkeys("ab", 0.5))
    rows = np.arange(1000)
    state = {name: buffer.extend(buffer.init(rows[0]), rows) for name, buffer in mixture.members}
    batch = mixture.peek(state, jax.random.key(0), 64)
    of_a, of_b = (np.asarray(batch.index.slot)[np.asarray(batch.index.source) == n] for n in (0, 1))
    assert len(of_a) == 32 and not np.array_equal(of_a, of_b)


def test_errors_and_rows_go_where_rows_came_from():
    mixture, state = weighted(MODES["exact"])
    state, batch = support.sampling(mixture)(state, jax.random.key(0))
    source, slot = np.asarray(batch.index.source), np.asarray(batch.index.slot)
    error = np.where(np.arange(B) == 0, np.nan, np.arange(B) + 2.0).astype(np.float32)  # row 0 is of a
    after = mixture.update_priority(state, batch.index, error)
    leaves = np.asarray(state["a"].sampler.tree[:20]).copy()
    for row in np.flatnonzero(source == 0)[1:]:
        leaves[slot[row]] = row + 2
    np.testing.assert_allclose(after["a"].sampler.tree[:20], leaves, rtol=1e-6)
    assert refused(mixture, after) == {"a/refused_nonfinite": 1}
    assert same(state["b"], after["b"])

    after = mixture.update_rows(state, batch.index, {"id": -np.arange(1, B + 1, dtype=np.int32)})
    for i, name in enumerate(mixture.names):
        mine = source == i
        got = mixture[name].get(after[name], mixture.route(batch.index, name))
        assert (np.asarray(got.mask) == mine).all()
        last = {int(slot[row]): -(row + 1) for row in np.flatnonzero(mine)}  # of rows drawn twice the last wins
        assert np.asarray(got.data["id"])[mine].tolist() == [last[s] for s in slot[mine].tolist()]
        assert int(np.sum(np.asarray(mixture[name].rows(after[name]).data["id"]) < 0)) == len(last)

    index = dataclasses.replace(batch.index, source=np.array([0, 7, -1, 2] + [0] * (B - 4), np.int32))
    after = mixture.update_priority(state, index, np.ones(B, np.float32))
    assert refused(mixture, after) == {"a/refused_out_of_range": 3 + np.sum((index.source == 0) & (slot >= 20))}
    masked = fbuf.Index(np.zeros(B, np.int32), np.zeros(B, np.uint32), source=np.full(B, 2, np.int32))
    assert not refused(mixture, mixture.update_priority(state, masked, np.full(B, np.nan, np.float32)))
    later = extended(mixture, state, "a", rows_of(1500, 20))
    after = mixture.update_priority(later, batch.index, np.ones(B, np.float32))
    assert refused(mixture, after) == {"a/refused_stale": int(np.sum(source == 0))}


def test_changing_fractions_compiles_once():
    mixture = two(fractions={"a": 0.5, "b": 0.5})
    state, traces = filled(mixture), []

    @jax.jit
    def step(state, key, share):
        traces.append(0)
        state, batch = mixture.sample(state, key, 8, fractions={"a": share})
        return state, batch.index.source

    for share, wanted in ((0.0, 0), (0.25, 2), (0.5, 4), (0.9, 7), (1.0, 8), (2.0, 8), (-1.0, 0), (float("nan"), 0)):
        state, source = step(state, jax.random.key(0), share)
        assert (int(jnp.sum(source == 0)), int(jnp.sum(source == 1))) == (wanted, 8 - wanted), share
    assert len(traces) == 1
    sorted_by_name = jax.jit(lambda states: states)({"b": state["b"], "a": state["a"]})
    assert jnp.sum(mixture.peek(sorted_by_name, jax.random.key(0), 8, fractions={"b": 0.25}).index.source == 0) == 6


def test_parts_are_not_concatenated():
    mixture = two()
    lowered = jax.jit(lambda state, key: mixture.sample(state, key, B)).lower(filled(mixture), jax.random.key(0))
    joins = [line for line in lowered.as_text().splitlines() if "stablehlo.concatenate" in line]
    assert joins and not [line for line in joins if "xui8>" in line]


def test_a_mixture_is_a_value():
    one, other = (two(fractions={"b": 0.5, "a": 0.5}) for _ in "12")
    assert one == other and hash(one) == hash(other) and one != two()
    assert fbuf.Mixture(one.buffers, one.fractions) == one
    said = "Mixture(buffers=(('a', Buffer(capacity=20)), ('b', Buffer(capacity=40))), fractions=(0.5, 0.5))"
    assert repr(one) == said


SETTINGS = """
fbuf.Mixture(U) => TypeError buffers is Buffer; expected a dict
fbuf.Mixture({}) => ValueError buffers is empty
fbuf.Mixture({"a": 1}) => TypeError 'a' is int; expected a Buffer
fbuf.Mixture({"a/b": U}) => ValueError buffer name is 'a/b'
fbuf.Mixture((("a", U), ("a", U))) => ValueError two buffers are named 'a'
fbuf.Mixture({"a": dataclasses.replace(U, prefetch=1, batch_size=4)}) => ValueError 'a' has prefetch=1
fbuf.Mixture({"a": dataclasses.replace(U, storage=fbuf.storages.Ragged())}) => TypeError 'a' has Ragged
two(fractions={"a": 0.4, "b": 0.5}) => ValueError sum of fractions is 0.9; expected 1
two(fractions={"a": 1.0}) => ValueError fractions lacks 'b'
two(fractions={"c": 1.0}) => ValueError fractions names 'c'; expected the buffers a, b
two(fractions={"a": -1, "b": 2}) => ValueError the fraction of 'a' is -1
two(fractions=(1.0,)) => TypeError expected a dict of a, b
two(quota="each") => ValueError quota is 'each'; expected "exact", "random" or "all"
two(target=None) => ValueError target is None
two(normalize="buffer") => ValueError normalize is 'buffer'; expected "batch" or None.
two(if_empty="raise") => ValueError if_empty is 'raise'
two(quota="all", fractions={"a": 0.5, "b": 0.5}) => ValueError quota is "all"; expected fractions=None
two(beta=-1) => ValueError beta is -1
"""
ARGUMENTS = """
drawn(EXAMPLE, EXAMPLE | {"id": np.float32(0)}) => ValueError
    Mixture.sample | id: int32[] in 'a', float32[] in 'b' | on_read
drawn(EXAMPLE, {"id": np.int32(0)}) => ValueError obs: uint8[8, 8] in 'a', nothing in 'b'
drawn([np.int32(0)], (np.int32(0),)) => ValueError PyTreeDef([*]) in 'a', PyTreeDef((*,)) in 'b'
mixture.sample(state | {"a": state["b"]}, key, 4) => ValueError another buffer
mixture.sample(state["a"], key, 4) => TypeError
    states is BufferState; expected a dict of the states of a, b. The order is sample(states, key, batch_size).
mixture.sample(state | {"a": EXAMPLE}, key, 4) => TypeError
    the state of 'a' is dict; expected BufferState. Write mixture['a'].init(row).
mixture.route(index, "c") => ValueError name is 'c'; expected one of a, b
mixture.route("a", index) => TypeError name is Index; expected one of a, b
mixture["c"] => ValueError name is 'c'; expected one of a, b
mixture.peek(state, key, 4, fractions={"a": jnp.array(True)}) => TypeError a number from 0 to 1
fbuf.Mixture({"a": mixture["a"]}).can_sample(state) => ValueError states of a, b; expected a
two(fbuf.Buffer(21)).sample(state, key, 4) => ValueError another buffer
jax.jit(lambda n: mixture.sample(state, key, n))(4) => TypeError batch_size is traced
mixture.sample(state, key, 0) => ValueError Mixture.sample: batch_size is 0
mixture.sample(state, key, {"a": 4}) => TypeError batch_size is a dict; expected an int
every.sample(state, key, 4) => TypeError batch_size is 4; expected a dict
every.sample(state, key, {"a": 4}) => ValueError batch_size lacks 'b'
every.sample(state, key, {"a": 4, "b": 4}, fractions={"a": 1}) => ValueError given; expected None
mixture.sample(state, key, 4, beta=-1) => ValueError beta is -1
mixture.sample(state, key, 4, fractions=0.5) => TypeError fractions is 0.5; expected a dict
mixture.sample(state, key, 4, fractions={"a": 1, "b": 0.5}) => ValueError sum of fractions is 1.5
mixture.sample(state, key, 4, fractions={"a": jnp.ones(2)}) => ValueError has shape [2]
mixture.sample(state, key, 4, fractions={"a": "x"}) => TypeError 'a' is 'x'; expected a number
two(fractions={"a": 1.0, "b": 0.0}).sample(state, key, 4, fractions={"a": 0.5}) => ValueError fractions lacks b
mixture.update_priority(state, index, jnp.ones(4)) => TypeError no buffer has priorities
mixture.update_rows(state, fbuf.Index(index.slot, index.generation), {}) => TypeError
    index is an Index of one buffer; expected one of source. Pass batch.index.
mixture["a"].get(state["a"], index) => TypeError
    Buffer.get: index is an Index of source; expected one of one buffer. Pass mixture.route(batch.index, name)
own.update_priority(held, index, jnp.ones(4)) => TypeError Buffer.update_priority: index is an Index of source
mixture.update_rows(state, index, {"x": jnp.ones(4)}) => ValueError leaf 'x'
"""
U = fbuf.Buffer(10)


def drawn(a, b):
    mixture = two()
    states = {"a": mixture["a"].init(a), "b": mixture["b"].init(b)}
    return jax.eval_shape(lambda key: mixture.peek(states, key, 4), jax.random.key(0))


def test_invalid_settings_are_refused():
    refusals.check_all(SETTINGS, globals())
    assert two(beta=np.float32(0.5)) == two(beta=0.5)
    assert two(fractions={"a": np.asarray(0.5), "b": 0.5}).shares == (0.5, 0.5)


def test_invalid_arguments_are_refused():
    mixture, own, key = two(), fbuf.prioritized(20), jax.random.key(0)
    state, held = filled(mixture), own.init(EXAMPLE)
    shapes = jax.eval_shape(lambda: mixture.peek(state, key, 4).index)
    index = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    names = {"mixture": mixture, "every": two(quota="all"), "state": state, "key": key, "index": index}
    refusals.check_all(ARGUMENTS, globals() | names | {"own": own, "held": held})


def test_methods_of_buffers_alone_are_named():
    mixture = two()
    told = {
        "get": r"mixture\['a'\].get\(states\['a'\], mixture.route\(batch.index, 'a'\)\)",
        "extend": r"mixture\['a'\].extend\(states\['a'\], \.\.\.\)",
        "init": r"mixture\['a'\].init\(row\)",
        "convert": r"mixture\['a'\].convert\(other, states\['a'\]\)",
        "resume": r"mixture\['a'\].resume\(row\)",
        "capacity": r"mixture\['a'\].capacity\.",
        "prefetch": r"mixture\['a'\].prefetch\.",
    }
    for name, text in told.items():
        raises(AttributeError, rf"'{name}'; its buffers have. Write {text}", lambda n=name: getattr(mixture, n))
        assert not hasattr(mixture, name) and name not in dir(mixture)
    raises(AttributeError, "'Mixture' object has no attribute 'nonsense'$", lambda: mixture.nonsense)
    said = "Replay: buffer is Mixture; expected a Buffer. Carry the state of a mixture yourself"
    raises(TypeError, said, fbuf.Replay, mixture, {"a": EXAMPLE, "b": EXAMPLE})
    again = pickle.loads(pickle.dumps(mixture))
    assert again == mixture == copy.deepcopy(mixture)


@jax.tree_util.register_static
class Remembering(Epoch):
    def draw_some(self, *args):
        return None

    def draw(self, *args):
        return Epoch().draw(*args)


def test_a_sampler_that_remembers_must_be_told_how_many():
    buffers = {name: fbuf.Buffer(50, sampler=Remembering()) for name in "ab"}
    state = jax.eval_shape(lambda: {name: buffer.init(EXAMPLE) for name, buffer in buffers.items()})
    for mixture, works in ((fbuf.Mixture(buffers), False), (fbuf.Mixture(buffers, if_empty="mask"), True)):
        message = "changes its state when it draws, and has no `draw_some`"
        with contextlib.nullcontext() if works else pytest.raises(TypeError, match=message):
            jax.eval_shape(lambda state, key, m=mixture: m.peek(state, key, 8), state, jax.random.key(0))


def test_a_donated_state_is_named():
    mixture = two(fbuf.prioritized(20))
    state = filled(mixture)
    jax.jit(lambda state: extended(mixture, state, "a", rows_of(0, 3)), donate_argnums=0)(state)
    for call in (mixture.can_sample, lambda state: mixture.sample(state, jax.random.key(0), 4)):
        raises(RuntimeError, r"^Mixture\.\w+: the state was donated", call, state)


@pytest.mark.more
def test_data_sets_are_mixed(tmp_path):
    rows = segments.make(tmp_path)
    buffer, held = fbuf.datasets.open(tmp_path, view=Transition(autoreset="same_step"))
    sets = fbuf.Mixture({"one": buffer, "two": buffer}, fractions={"one": 0.3, "two": 0.7})
    both, batch = sets.sample({"one": held, "two": held}, jax.random.key(0), 10)
    assert batch.index.source.tolist() == [0] * 3 + [1] * 7 and bool(jnp.all(batch.mask))
    actions = np.asarray(rows["action"])[np.asarray(batch.index.slot)]
    assert (np.asarray(batch.data["action"]) == actions).all()

    online = fbuf.Buffer(50, view=Transition(autoreset="same_step"), sampler=Prioritized())
    mixture = fbuf.Mixture({"online": online, "offline": buffer})
    state = {"online": online.init({name: array[0] for name, array in rows.items()}), "offline": held}
    state, batch = mixture.sample(state, jax.random.key(0), 8)
    assert batch.index.source.tolist() == [1] * 8
    state |= {"online": online.extend(state["online"], {name: array[:20] for name, array in rows.items()})}
    state, batch = mixture.sample(state, jax.random.key(1), 8)
    assert batch.index.source.tolist() == [0] * 4 + [1] * 4
    state = mixture.update_priority(state, batch.index, jnp.ones(8))
    after = mixture.update_rows(state, batch.index, {"action": batch.data["action"]})
    assert same(after["offline"], state["offline"]) and not refused(mixture, after)


@pytest.mark.more
def test_a_host_reads_only_the_rows_it_returns(monkeypatch):
    asked = []
    real = Store.read

    def read(self, requests):
        asked.extend((np.count_nonzero(tickets), len(tickets)) for _, tickets, *_ in requests)
        return real(self, requests)

    monkeypatch.setattr(Store, "read", read)
    buffers = {name: fbuf.Buffer(20, storage=Compressed(keys=("obs",))) for name in "ab"}
    mixture = fbuf.Mixture(buffers)
    batch = mixture.peek(filled(mixture), jax.random.key(0), 16, fractions={"a": 0.25})
    assert batch.index.source.tolist() == [0] * 4 + [1] * 12
    jax.block_until_ready(batch)
    assert sorted(asked) == [(4, 16), (12, 16)]


test_in_place_checks = pytest.mark.in_place(checks(more=[(check_in_place, [("Prioritized", "annealed")])]))


def half_of(samplers):
    return [(s, m) for i, s in enumerate(samplers) for j, m in enumerate(support.MODES) if (i + j) % 2 == 0]


IN_PLACE = half_of(["Uniform", "Epoch", "Consume", "Prioritized", "Prioritized(replace=False)", "Ranked"])


test_checks = checks(
    more=[(check_sampler, [("Prioritized(on='host')", "random")])],
    exhaustive=[(support.check_sampler, half_of(support.SAMPLERS)), (support.check_empty, [False, True])],
)


test_steps_are_in_place = pytest.mark.in_place(checks(exhaustive=[(support.check_in_place, IN_PLACE)]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mode", "target"), [("exact", "source"), ("annealed", "source"), ("random", "source"), ("all", "union")]
)
def test_weights_are_those_of_the_mixture(mode, target):
    """`beta` of the call replaces that of the mixture."""
    mixture, state = support.weighted(support.MODES[mode], target=target, normalize=None, beta=0.7)
    given = {"beta": jnp.float32(1)} | support.traced(mode)
    batch = jax.device_get(mixture.peek(state, jax.random.key(1), support.size_of(mixture), **given))
    wanted = support.density(mixture, state, {"a": 0.25, "b": 0.75})
    chance = np.array([wanted[n] for n in batch.data["id"].tolist()])
    np.testing.assert_allclose(batch.probability, chance, rtol=1e-5)
    number, share = np.where(batch.index.source == 0, 20, 40), np.where(batch.index.source == 0, 0.25, 0.75)
    relative = 60 * chance if target == "union" else number * chance / share
    np.testing.assert_allclose(batch.weight, 1 / relative, rtol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("quota", ["exact", "random"])
def test_rows_of_an_empty_buffer_are_masked(quota):
    mixture = support.three(quota=quota, if_empty="mask")
    state = support.filled(mixture, a=0)
    _, probability, source, _ = map(
        np.asarray, support.numbers(mixture)(state, jax.random.split(jax.random.key(0), 300))
    )
    counts = np.bincount(source, minlength=4)
    if quota == "random":
        assert chi_square_z(counts[[1, 2, 3]], np.array([0.25, 0.5, 0.25])) < 4 and counts[0] == 0
    else:
        assert counts.tolist() == [0, 4 * 300, 8 * 300, 4 * 300]
    assert not bool(mixture.can_sample(state))
    np.testing.assert_allclose(probability[source == 2], 0.5 / 40, rtol=1e-6)


@pytest.mark.exhaustive
def test_buffers_are_loaded_into_other_capacities_and_storages(tmp_path):
    mixture = two(fbuf.Buffer(20, sampler=Prioritized()), fbuf.Buffer(40))
    state, _ = played(mixture, filled(mixture), 0, 1)
    fbuf.save(tmp_path / "c", mixture, state)
    small, fewer = fbuf.load(tmp_path / "c", resize={"a": 5})
    assert small["a"].capacity == 5 and small["b"].capacity == 40
    assert small["a"].rows(fewer["a"], last=5).data["id"].tolist() == list(range(1015, 1020))
    files = two(mixture["a"], fbuf.Buffer(40, storage=Memmap(str(tmp_path / "rows"), keys=("obs",))))
    loaded, again = fbuf.load(tmp_path / "c", files)
    assert loaded == files and same(played(mixture, state, 1, 2)[1], played(loaded, again, 1, 2)[1])
    other = dataclasses.replace(mixture, fractions={"a": 0.25, "b": 0.75}, target="source")
    loaded, again = fbuf.load(tmp_path / "c", other, example={"a": EXAMPLE, "b": EXAMPLE})
    assert loaded == other and same(again, state)

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
from fbuf.samplers import Epoch
from tests.support.mixture import (
    EXAMPLE,
    MODES,
    B,
    density,
    filled,
    numbers,
    rows_of,
    same,
    sampling,
    two,
    weighted,
)
from tests.support.refusals import raises
from tests.support.uniformity import chi_square_z


def test_chances_and_weights_are_those_of_the_closed_form():
    mixture, state = weighted(MODES["annealed"], target="union", normalize=None, beta=0.7)
    keys = jax.random.split(jax.random.key(7), 3000)
    ids, probability, _, weight = map(np.asarray, numbers(mixture)(state, keys))
    wanted = density(mixture, state, {"a": 0.25, "b": 0.75})
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
    assert batch.source.tolist() == [2, 2, 1, 1, 1] and not bool(mixture.can_sample(state))
    batch = mixture.peek(filled(mixture), jax.random.key(0), {"b": 3, "a": 2})
    assert batch.source.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(batch.probability, np.array([0.4 / 20] * 2 + [0.6 / 40] * 3), rtol=1e-6)


def test_errors_and_rows_go_where_rows_came_from():
    mixture, state = weighted(MODES["exact"])
    state, batch = sampling(mixture)(state, jax.random.key(0))
    source, slot = np.asarray(batch.source), np.asarray(batch.index.slot)
    error = np.where(np.arange(B) == 0, np.nan, np.arange(B) + 2.0).astype(np.float32)  # row 0 is of a
    after = mixture.update_priority(state, batch.index, error)
    leaves = np.asarray(state["a"].sampler.tree[:20]).copy()
    for row in np.flatnonzero(source == 0)[1:]:
        leaves[slot[row]] = row + 2
    np.testing.assert_allclose(after["a"].sampler.tree[:20], leaves, rtol=1e-6)
    assert int(mixture.stats(after)["a/refused_nonfinite"]) == 1
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
    assert int(mixture.stats(after)["refused_out_of_range"]) == 3
    masked = fbuf.MixtureIndex(np.full(B, 2, np.int32), np.zeros(B, np.int32), np.zeros(B, np.uint32))
    stats = mixture.stats(mixture.update_priority(state, masked, np.full(B, np.nan, np.float32)))
    assert not any(int(stats[name]) for name in stats if "refused" in name)
    after = mixture.update_priority(mixture.extend(state, "a", rows_of(1500, 20)), batch.index, np.ones(B, np.float32))
    assert int(mixture.stats(after)["a/refused_stale"]) == int(np.sum(source == 0)) > 0


def test_buffers_whose_batches_differ_are_refused():
    mixture = two()
    with pytest.raises(ValueError, match=r"(?s)Mixture.init.*id: int32\[\] in 'a', float32\[\] in 'b'.*on_read"):
        mixture.init({"a": EXAMPLE, "b": {**EXAMPLE, "id": np.float32(0)}})
    with pytest.raises(ValueError, match=r"obs: uint8\[8, 8\] in 'a', nothing in 'b'"):
        mixture.init({"a": EXAMPLE, "b": {"id": np.int32(0)}})
    with pytest.raises(ValueError, match=r"PyTreeDef\(\[\*\]\) in 'a', PyTreeDef\(\(\*,\)\) in 'b'"):
        mixture.init({"a": [np.int32(0)], "b": (np.int32(0),)})


def test_changing_fractions_compiles_once():
    mixture = two(fractions={"a": 0.5, "b": 0.5}, annealed=True)
    state, traces = filled(mixture), []

    @jax.jit
    def step(state, key, share):
        traces.append(0)
        state, batch = mixture.sample(state, key, 8, fractions={"a": share})
        return state, batch.source

    for share, wanted in ((0.0, 0), (0.25, 2), (0.5, 4), (0.9, 7), (1.0, 8), (2.0, 8), (-1.0, 0), (float("nan"), 0)):
        state, source = step(state, jax.random.key(0), share)
        assert (int(jnp.sum(source == 0)), int(jnp.sum(source == 1))) == (wanted, 8 - wanted), share
    assert len(traces) == 1
    state = mixture.set(state, fractions={"b": 0.25}, beta=0.5)
    assert state.fractions.tolist() == [0.75, 0.25] and float(state.beta) == 0.5
    assert jnp.sum(mixture.peek(state, jax.random.key(0), 8).source == 0) == 6
    stats = mixture.stats(state)
    assert (float(stats["a/fraction"]), float(stats["beta"])) == (0.75, 0.5)


def test_parts_are_not_concatenated():
    mixture = two()
    lowered = jax.jit(lambda state, key: mixture.sample(state, key, B)).lower(filled(mixture), jax.random.key(0))
    joins = [line for line in lowered.as_text().splitlines() if "stablehlo.concatenate" in line]
    assert joins and not [line for line in joins if "xui8>" in line]


def test_a_mixture_is_a_value():
    one, other = (
        fbuf.Mixture({"a": fbuf.uniform(20), "b": fbuf.uniform(40)}, fractions={"b": 0.5, "a": 0.5}) for _ in "12"
    )
    assert one == other and hash(one) == hash(other) and one != two()
    assert fbuf.Mixture(one.buffers, one.fractions) == one
    assert repr(one) == (
        "Mixture(buffers=(('a', Buffer(capacity=20)), ('b', Buffer(capacity=40))), fractions=(0.5, 0.5))"
    )
    state = filled(one)
    assert int(one.size(state)) == 60
    sizes = one.nbytes(state)
    parts = [one[name].nbytes(state[name]) for name in "ab"]
    assert sizes["device"] == sum(p["device"] for p in parts) + 4 + 16
    assert int(one.size(one.clear(state))) == 0 and int(one.size(one.clear(state, "b"))) == 20
    assert repr(state).startswith("MixtureState(a, b)\n\na: BufferState(20 of 20 rows)")


def test_invalid_settings_are_refused():
    u = fbuf.uniform(10)
    raises(TypeError, "buffers is Buffer; expected a dict", lambda: fbuf.Mixture(u))
    raises(ValueError, "buffers is empty", lambda: fbuf.Mixture({}))
    raises(TypeError, "'a' is int; expected a Buffer", lambda: fbuf.Mixture({"a": 1}))
    raises(ValueError, "buffer name is 'a/b'", lambda: fbuf.Mixture({"a/b": u}))
    raises(ValueError, "two buffers are named 'a'", lambda: fbuf.Mixture((("a", u), ("a", u))))
    ahead = dataclasses.replace(u, prefetch=1, batch_size=4)
    raises(ValueError, "'a' has prefetch=1", lambda: fbuf.Mixture({"a": ahead}))
    ragged = dataclasses.replace(u, storage=fbuf.storages.Ragged())
    raises(TypeError, "'a' has Ragged", lambda: fbuf.Mixture({"a": ragged}))
    raises(ValueError, "sum of fractions is 0.9; expected 1", lambda: two(fractions={"a": 0.4, "b": 0.5}))
    raises(ValueError, "sum of fractions is 0; expected 1", lambda: two(fractions={"a": 0, "b": 0}))
    raises(ValueError, "fractions lacks 'b'", lambda: two(fractions={"a": 1.0}))
    raises(ValueError, "fractions names 'c'; expected the buffers a, b", lambda: two(fractions={"c": 1.0}))
    raises(ValueError, "the fraction of 'a' is -1", lambda: two(fractions={"a": -1, "b": 2}))
    raises(TypeError, "expected a dict of a, b", lambda: two(fractions=(1.0,)))
    raises(ValueError, 'quota is \'each\'; expected "exact", "random" or "all"', lambda: two(quota="each"))
    raises(ValueError, "target is None", lambda: two(target=None))
    raises(ValueError, r'normalize is .buffer.; expected "batch" or None\.', lambda: two(normalize="buffer"))
    raises(ValueError, "if_empty is 'raise'", lambda: two(if_empty="raise"))
    raises(TypeError, "annealed is 1", lambda: two(annealed=1))
    raises(ValueError, 'quota is "all"; expected fractions=None', lambda: two(quota="all", annealed=True))
    raises(ValueError, "beta is -1", lambda: two(beta=-1))
    raises(ValueError, "quota is array", lambda: two(quota=np.array(["exact", "all"])))
    assert two(beta=np.float32(0.5)) == two(beta=0.5)
    assert two(fractions={"a": np.asarray(0.5), "b": 0.5}).shares == (0.5, 0.5)


def test_invalid_arguments_are_refused():
    mixture, every = two(), two(quota="all")
    state, key = filled(mixture), jax.random.key(0)
    batch = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(lambda: mixture.peek(state, key, 4)))
    raises(ValueError, "Mixture.init: examples is a; expected one row, or", lambda: mixture.init({"a": EXAMPLE}))
    raises(ValueError, "another buffer", lambda: mixture.init({"a": state["b"], "b": EXAMPLE}))
    raises(TypeError, "state is BufferState; expected MixtureState", lambda: mixture.sample(state["a"], key, 4))
    raises(ValueError, "name is 'c'; expected one of a, b", lambda: mixture.extend(state, "c", EXAMPLE))
    raises(KeyError, "buffer is 'c'", lambda: state["c"])
    for row in (EXAMPLE, EXAMPLE["obs"], jnp.zeros(3)):
        raises(TypeError, "name is .*; expected one of a, b", lambda row=row: mixture.add(state, row, "a"))
    raises(ValueError, "Mixture.plan: examples is a; expected one row for each", lambda: mixture.plan({"a": EXAMPLE}))
    for odd in (jnp.array(True), jnp.complex64(0.5)):
        raises(TypeError, "a number from 0 to 1", lambda odd=odd: mixture.peek(state, key, 4, fractions={"a": odd}))
    raises(ValueError, "state of a, b; expected a", lambda: fbuf.Mixture({"a": mixture["a"]}).size(state))
    raises(ValueError, "expected a, b, annealed", lambda: two(annealed=True).size(state))
    raises(ValueError, "another buffer", lambda: two(fbuf.uniform(21)).sample(state, key, 4))
    raises(TypeError, "batch_size is traced", lambda: jax.jit(lambda n: mixture.sample(state, key, n))(4))
    raises(ValueError, "Mixture.sample: batch_size is 0", lambda: mixture.sample(state, key, 0))
    raises(TypeError, "batch_size is a dict; expected an int", lambda: mixture.sample(state, key, {"a": 4}))
    raises(TypeError, "batch_size is 4; expected a dict", lambda: every.sample(state, key, 4))
    raises(ValueError, "batch_size lacks 'b'", lambda: every.sample(state, key, {"a": 4}))
    raises(ValueError, "'b': batch_size is 0", lambda: every.sample(state, key, {"a": 4, "b": 0}))
    sizes = {"a": 4, "b": 4}
    raises(ValueError, "given; expected None", lambda: every.sample(state, key, sizes, fractions={"a": 1}))
    raises(ValueError, "beta is -1", lambda: mixture.sample(state, key, 4, beta=-1))
    raises(TypeError, "fractions is 0.5; expected a dict", lambda: mixture.sample(state, key, 4, fractions=0.5))
    raises(ValueError, "sum of fractions is 1.5", lambda: mixture.sample(state, key, 4, fractions={"a": 1, "b": 0.5}))
    raises(ValueError, "names 'c'", lambda: mixture.sample(state, key, 4, fractions={"c": 1}))
    raises(ValueError, r"has shape \[2\]", lambda: mixture.sample(state, key, 4, fractions={"a": jnp.ones(2)}))
    raises(TypeError, "'a' is 'x'; expected a number", lambda: mixture.sample(state, key, 4, fractions={"a": "x"}))
    whole = two(fractions={"a": 1.0, "b": 0.0})
    raises(ValueError, "fractions lacks b", lambda: whole.sample(state, key, 4, fractions={"a": 0.5}))
    raises(TypeError, "no buffer has priorities", lambda: mixture.update_priority(state, batch.index, jnp.ones(4)))
    index = fbuf.Index(batch.index.slot, batch.index.ticket)
    raises(TypeError, "index is Index; expected a MixtureIndex", lambda: mixture.update_rows(state, index, {}))
    for verb in ("get", "update_rows", "update_priority"):
        own = fbuf.prioritized(20) if verb == "update_priority" else mixture["a"]
        held = own.init({name: leaf[0] for name, leaf in rows_of(0, 1).items()}) if own != mixture["a"] else state["a"]
        args = [jnp.ones(4)] * (verb != "get")
        raises(
            TypeError,
            rf"Buffer.{verb}: index is MixtureIndex; expected the Index of a batch. Pass mixture.route\(batch.index, name\)",
            lambda own=own, verb=verb, args=args, held=held: getattr(own, verb)(held, batch.index, *args),
        )
    raises(ValueError, "leaf 'x'", lambda: mixture.update_rows(state, batch.index, {"x": jnp.ones(4)}))
    raises(ValueError, "annealed is False", lambda: mixture.set(state, fractions={"a": 1}))
    raises(
        ValueError,
        r"no number 'alpha' in fractions, beta\. Write set\(state, 'a', alpha=\.\.\.\)\.",
        lambda: mixture.set(state, alpha=1),
    )
    raises(ValueError, "has no number 'alpha'", lambda: mixture.set(state, "a", alpha=1))
    raises(ValueError, "fractions belong to the mixture", lambda: mixture.set(state, "a", fractions={"a": 1}))


def test_methods_of_buffers_alone_are_named():
    mixture = two()
    told = {
        "get": r"mixture\['a'\].get\(state\['a'\], mixture.route\(batch.index, 'a'\)\)",
        "last": r"mixture\['a'\].last\(state\['a'\], n\)",
        "convert": r"mixture\['a'\].convert\(other, state\['a'\]\)",
        "resume": r"mixture\['a'\].resume\(row\)",
        "capacity": r"mixture\['a'\].capacity\.",
        "prefetch": r"mixture\['a'\].prefetch\.",
    }
    for name, text in told.items():
        raises(AttributeError, rf"'{name}'; its buffers have. Write {text}", lambda n=name: getattr(mixture, n))
        assert not hasattr(mixture, name) and name not in dir(mixture)
    raises(AttributeError, "'Mixture' object has no attribute 'nonsense'$", lambda: mixture.nonsense)
    raises(
        TypeError,
        "Replay: buffer is Mixture; expected a Buffer. Carry the state of a mixture yourself",
        lambda: fbuf.Replay(mixture, {"a": EXAMPLE, "b": EXAMPLE}),
    )
    again = pickle.loads(pickle.dumps(mixture))
    assert again == mixture == copy.deepcopy(mixture)


@jax.tree_util.register_static
class Remembering(Epoch):
    draw_some = None

    def draw(self, *args):
        return Epoch().draw(*args)


def test_a_sampler_that_remembers_must_be_told_how_many():
    buffers = {name: fbuf.Buffer(50, sampler=Remembering()) for name in "ab"}
    state = jax.eval_shape(lambda: fbuf.Mixture(buffers).init(dict.fromkeys("ab", EXAMPLE)))
    for mixture, works in ((fbuf.Mixture(buffers), False), (fbuf.Mixture(buffers, if_empty="mask"), True)):
        message = "changes its state when it draws, and has no `draw_some`"
        with contextlib.nullcontext() if works else pytest.raises(TypeError, match=message):
            jax.eval_shape(lambda state, key, m=mixture: m.peek(state, key, 8), state, jax.random.key(0))


def test_set_reaches_a_sampler():
    mixture = two(fbuf.prioritized(20))
    state = mixture.set(filled(mixture), "a", alpha=0.5, beta=0.25)
    assert (float(state["a"].sampler.alpha), float(state["a"].sampler.beta), float(state.beta)) == (0.5, 0.25, 1.0)


def test_a_donated_state_is_named():
    mixture = fbuf.Mixture({"a": fbuf.uniform(8), "b": fbuf.uniform(8)}, fractions={"a": 0.5, "b": 0.5})
    state = mixture.init({"a": {"t": 0}, "b": {"t": 0}})
    jax.jit(lambda state: mixture.extend(state, "a", {"t": jnp.arange(3)}), donate_argnums=0)(state)
    for verb in (mixture.stats, mixture.size, lambda state: mixture.sample(state, jax.random.key(0), 4)):
        raises(RuntimeError, r"^(Mixture\.\w+|Buffer.size): the state was donated", verb, state)

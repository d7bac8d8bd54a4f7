"""`Mixture`: each row comes from where it says, as often as it should, and what is said of it goes back there.

Rows carry a number that tells their buffer and when they came, so that what a batch holds can be worked out from what it says
of itself. Chances are compared with a closed form, and with counts of many draws.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fbuf
from fbuf._host.store import Store
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Compressed, Deduplicated, Device, Host, Memmap
from fbuf.testing import assert_inplace
from fbuf.views import Sequence, Transition
from tests.disk import fresh, somewhere
from tests.support import pieces
from tests.test_uniformity import chi_square_z

EXAMPLE = {"obs": np.zeros((8, 8), np.uint8), "id": np.int32(0)}
B = 16
SAMPLERS = {
    "Uniform": Uniform(),
    "Epoch": Epoch(),
    "Consume": Consume(),
    "Consume(3)": Consume(3),
    "Prioritized": Prioritized(),
    "Prioritized(replace=False)": Prioritized(replace=False),
    "Prioritized(on='host')": Prioritized(on="host"),
    "Ranked": Ranked(),
    "Staleness": Staleness(100),
}
STORAGES = {
    "Device": Device(),
    "Deduplicated": Deduplicated(keys=("obs",), blocks=128),
    "Compressed": Compressed(keys=("obs",)),
    "Compressed(path=...)": Compressed(keys=("obs",), path=somewhere("mixture")),
    "Host": Host(keys=("obs",)),
    "Memmap": Memmap(keys=("obs",)),
}
MODES = {
    "exact": {"fractions": {"a": 0.25, "b": 0.75}},
    "annealed": {"fractions": {"a": 0.25, "b": 0.75}, "annealed": True},
    "random": {"fractions": {"a": 0.25, "b": 0.75}, "quota": "random"},
    "all": {"quota": "all"},
}
DEFAULT = ("Epoch", "Prioritized(replace=False)")


def rows_of(first: int, number: int) -> dict[str, np.ndarray]:
    ids = first + np.arange(number, dtype=np.int32)
    return {"obs": (ids[:, None, None] % 251 * np.ones((8, 8))).astype(np.uint8), "id": ids}


def two(one: Any = None, other: Any = None, **settings: Any) -> fbuf.Mixture:
    """Rows of a are numbered from 1000, those of b from 2000."""
    buffers = {"a": one or fbuf.uniform(20), "b": other or fbuf.uniform(40)}
    return fbuf.Mixture(buffers, **settings)


def filled(mixture: fbuf.Mixture, **counts: int) -> Any:
    state = mixture.init(dict.fromkeys(mixture.names, EXAMPLE))
    for i, name in enumerate(mixture.names):
        number = counts.get(name, mixture[name].capacity)
        if number:
            state = mixture.extend(state, name, rows_of(1000 * (i + 1), number))
    return state


def size_of(mixture: fbuf.Mixture, size: int = B) -> Any:
    """What to ask for to get `size` rows, a quarter of them of a."""
    return {"a": size // 4, "b": size - size // 4} if mixture.quota == "all" else size


@functools.cache
def sampling(mixture: fbuf.Mixture) -> Any:
    return jax.jit(lambda state, key: mixture.sample(state, key, size_of(mixture)), donate_argnums=0)


def check(mixture: fbuf.Mixture, batch: Any, held: dict[str, int]) -> None:
    """What holds of every batch, over buffers that hold all rows they were given."""
    batch = jax.device_get(batch)
    source, mask, ids = batch.source, batch.mask, batch.data["id"]
    assert ((source == len(mixture.names)) == ~mask).all()
    for leaf in (ids, batch.index.slot, batch.index.ticket, batch.probability, batch.weight):
        assert not leaf[~mask].any()
    assert not batch.data["obs"][~mask].any()
    assert (ids[mask] // 1000 == source[mask] + 1).all()
    assert (batch.data["obs"][mask] == (ids[mask] % 251)[:, None, None]).all()
    for i, name in enumerate(mixture.names):
        mine = source == i
        number, capacity = held[name], mixture[name].capacity
        first = max(number - capacity, 0)
        assert ((ids[mine] % 1000 >= first) & (ids[mine] % 1000 < number)).all()
        assert (batch.index.slot[mine] == ids[mine] % 1000 % capacity).all()
    assert (batch.probability[mask] > 0).all() and np.isfinite(batch.weight).all()
    if mixture.normalize == "batch" and mask.any():
        assert batch.weight.max() == pytest.approx(1)


# ------------------------------------------------------------------------------------------------- every combination


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampler", [pytest.param(s, marks=() if s in DEFAULT else pytest.mark.slow) for s in SAMPLERS])
def test_every_sampler(sampler: str, mode: str) -> None:
    one, other = (fbuf.Buffer(c, sampler=SAMPLERS[sampler]) for c in (20, 40))
    mixture = two(one, other, **MODES[mode])
    state, step = filled(mixture), sampling(mixture)
    drawn: dict[int, list[int]] = {0: [], 1: []}
    empty = 0
    for i in range(9):
        state, batch = step(state, jax.random.key(i))
        check(mixture, batch, {"a": 20, "b": 40})
        empty += not bool(jnp.any(batch.mask))
        mask, source = np.asarray(batch.mask), np.asarray(batch.source)
        for s in (0, 1):
            mine = np.asarray(batch.data["id"])[mask & (source == s)].tolist()
            if not sampler.startswith(("Uniform", "Prioritized'", "Ranked", "Staleness")) and "replace" in sampler:
                assert len(set(mine)) == len(mine)
            drawn[s] += mine
        if mode != "random" and sampler not in ("Epoch", "Consume", "Consume(3)"):
            assert np.bincount(source, minlength=3).tolist() == [4, 12, 0]
        if mixture["a"].sampler.prioritized:
            error = jnp.where(batch.source == 0, 3.0, batch.data["id"] % 7)
            state = mixture.update_priority(state, batch.index, error)
    for s, capacity in ((0, 20), (1, 40)):
        if sampler == "Epoch":  # each once before any comes again
            for start in range(0, len(drawn[s]) - capacity + 1, capacity):
                assert len(set(drawn[s][start : start + capacity])) == capacity
        if sampler.startswith("Consume"):
            times = 3 if "3" in sampler else 1
            assert max(np.unique(drawn[s], return_counts=True)[1]) <= times
    stats = mixture.stats(state)
    assert not any(int(stats[name]) for name in stats if "refused" in name or name.endswith("/empty_samples"))
    assert int(stats["empty_samples"]) == empty and (not empty or sampler == "Consume")


def own(storage: str, name: str) -> Any:
    """A storage of the table for one buffer of several; nothing lies at its path."""
    one = STORAGES[storage]
    if isinstance(getattr(one, "path", None), str):
        one = dataclasses.replace(one, path=f"{one.path}-{name}")
    return fresh(one)


@functools.cache
def batches(storage: str, mode: str) -> list[Any]:
    """What a few steps draw: both rings go round, priorities change."""
    views = {"view": Sequence(3, boundary="mask", episode_end=("done",))}
    mixture = two(
        fbuf.Buffer(20, storage=own(storage, "a"), sampler=Prioritized(), **views),
        fbuf.Buffer(30, storage=own(storage, "b"), sampler=Epoch(), **views),
        **MODES[mode],
    )
    example = {**EXAMPLE, "done": np.bool_(False)}
    state = mixture.init({"a": example, "b": example})

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, rows: Any, key: Any) -> Any:
        for name in mixture.names:
            state = mixture.extend(state, name, rows)
        state, batch = mixture.sample(state, key, size_of(mixture, 8))
        state = mixture.update_priority(state, batch.index, jnp.arange(8.0))
        return state, (batch.data, batch.mask, batch.index.source, batch.index.slot, batch.probability, batch.weight)

    rng, out = np.random.default_rng(0), []
    for i in range(6):
        rows = {**rows_of(1000 + 5 * i, 5), "done": rng.random(5) < 0.3}
        state, drawn = step(state, rows, jax.random.key(i))
        out.append(jax.device_get(drawn))
    return out


@pytest.mark.parametrize("mode", [pytest.param(m, marks=() if m == "annealed" else pytest.mark.slow) for m in MODES])
def test_storages_do_not_matter(mode: str) -> None:
    reference = batches("Device", mode)
    assert sum(int(drawn[1].sum()) for drawn in reference) > 24
    for storage in ("Compressed",) if mode == "annealed" else STORAGES:
        for one, other in zip(reference, batches(storage, mode), strict=True):
            assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), one, other))


@pytest.mark.slow
@pytest.mark.parametrize("storage", [s for s in STORAGES if s not in ("Device", "Compressed")])
def test_storages_do_not_matter_to_traced_quotas(storage: str) -> None:
    for one, other in zip(batches("Device", "annealed"), batches(storage, "annealed"), strict=True):
        assert jax.tree.all(jax.tree.map(np.array_equal, one, other))


def test_a_host_reads_no_more_than_is_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    real = Store.read

    def read(self: Store, requests: Any) -> Any:
        asked.extend((np.count_nonzero(tickets), len(tickets)) for _, tickets, *_ in requests)
        return real(self, requests)

    monkeypatch.setattr(Store, "read", read)
    buffers = {name: fbuf.Buffer(20, storage=Compressed(keys=("obs",))) for name in "ab"}
    mixture = fbuf.Mixture(buffers, annealed=True)
    batch = mixture.peek(filled(mixture), jax.random.key(0), 16, fractions={"a": 0.25})
    assert batch.source.tolist() == [0] * 4 + [1] * 12
    jax.block_until_ready(batch)
    assert sorted(asked) == [(4, 16), (12, 16)]


# ------------------------------------------------------------------------------------------------- how often, how likely


def density(mixture: fbuf.Mixture, state: Any, share: dict[str, float]) -> dict[int, float]:
    """Chance of each row by its number, from priorities (alpha = 1, eps = 0)."""
    out = {}
    for i, name in enumerate(mixture.names):
        ids = np.asarray(mixture[name].rows(state[name]).data["id"])
        weight = 1.0 + ids % 5 if mixture[name].sampler.prioritized else np.ones(len(ids))
        out |= {int(n): share[name] * w / weight.sum() for n, w in zip(ids, weight, strict=True)}
        assert all(n // 1000 == i + 1 for n in ids)
    return out


def weighted(mode: dict[str, Any], **settings: Any) -> tuple[fbuf.Mixture, Any]:
    sampler = Prioritized(alpha=1.0, eps=0.0)
    mixture = two(fbuf.Buffer(20, sampler=sampler), fbuf.uniform(40), **mode, **settings)
    state = filled(mixture)
    index = mixture["a"].rows(state["a"]).index
    online = mixture["a"].update_priority(state["a"], index, 1.0 + np.arange(1000, 1020) % 5)
    return mixture, mixture.replace(state, {"a": online})


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_drawn_as_often_as_is_said(mode: str) -> None:
    mixture, state = weighted(MODES[mode])
    keys = jax.random.split(jax.random.key(7), 3000)
    batch = jax.jit(jax.vmap(lambda key: mixture.peek(state, key, size_of(mixture))))(keys)
    ids, probability = (np.asarray(x).reshape(-1) for x in (batch.data["id"], batch.probability))
    wanted = density(mixture, state, {"a": 0.25, "b": 0.75})
    np.testing.assert_allclose(probability, [wanted[n] for n in ids.tolist()], rtol=1e-5)
    numbers = sorted(wanted)
    counts = np.array([np.sum(ids == n) for n in numbers])
    # Quotas and strata only make counts more even than independent draws.
    assert chi_square_z(counts, np.array([wanted[n] for n in numbers])) < 4


@pytest.mark.parametrize("target", ["union", "source"])
@pytest.mark.parametrize("mode", MODES)
def test_weights_are_those_of_the_mixture(mode: str, target: str) -> None:
    mixture, state = weighted(MODES[mode], target=target, normalize=None, beta=0.7)
    batch = jax.device_get(mixture.peek(state, jax.random.key(1), size_of(mixture)))
    wanted = density(mixture, state, {"a": 0.25, "b": 0.75})
    chance = np.array([wanted[n] for n in batch.data["id"].tolist()])
    number = np.where(batch.source == 0, 20, 40)
    share = np.where(batch.source == 0, 0.25, 0.75)
    relative = 60 * chance if target == "union" else number * chance / share
    np.testing.assert_allclose(batch.weight, relative**-0.7, rtol=1e-5)
    anew = jax.device_get(mixture.peek(state, jax.random.key(1), size_of(mixture), beta=jnp.float32(1)))
    np.testing.assert_allclose(anew.weight, 1 / relative, rtol=1e-5)
    scaled = jax.device_get(
        dataclasses.replace(mixture, normalize="batch").peek(state, jax.random.key(1), size_of(mixture))
    )
    np.testing.assert_allclose(scaled.weight, batch.weight / batch.weight.max(), rtol=1e-5)


@pytest.mark.parametrize("annealed", [False, True])
def test_every_part_of_a_stratified_buffer_is_drawn(annealed: bool) -> None:
    """What goes wrong if of a batch drawn in order the first rows are taken: nothing above the middle is ever drawn."""
    buffers = {name: fbuf.prioritized(100, alpha=1.0) for name in "ab"}
    mixture = fbuf.Mixture(buffers, annealed=annealed)
    state = filled(mixture)
    keys = jax.random.split(jax.random.key(0), 600)
    ids = np.asarray(jax.jit(jax.vmap(lambda key: mixture.peek(state, key, 16).data["id"]))(keys)).reshape(-1)
    counts = np.array([np.sum(ids == 1000 * s + i) for s in (1, 2) for i in range(100)])
    assert counts.min() > 0 and chi_square_z(counts, np.full(200, 1 / 200)) < 4


@jax.tree_util.register_static
class InOrder(Uniform):
    """A sampler of a user's own: anchors in order of their slots, each share of the buffer once."""

    def draw(self, sampler: Any, key: Any, batch_size: int, population: Any, options: Any, token: Any) -> Any:
        sampler, draw = super().draw(sampler, key, batch_size, population, options, token)
        return sampler, dataclasses.replace(draw, slot=jnp.sort(draw.slot))


def test_the_order_in_which_a_sampler_draws_does_not_matter() -> None:
    buffers = {name: fbuf.Buffer(50, sampler=InOrder()) for name in "ab"}
    mixture = fbuf.Mixture(buffers, annealed=True)
    state = filled(mixture)
    keys = jax.random.split(jax.random.key(0), 600)
    ids = np.asarray(jax.jit(jax.vmap(lambda key: mixture.peek(state, key, 16).data["id"]))(keys)).reshape(-1)
    counts = np.array([np.sum(ids == 1000 * s + i) for s in (1, 2) for i in range(50)])
    assert chi_square_z(counts, np.full(100, 1 / 100)) < 4


# ------------------------------------------------------------------------------------------------- nothing to draw

THREE = {"a": 0.25, "b": 0.25, "c": 0.5}


def three(**settings: Any) -> fbuf.Mixture:
    return fbuf.Mixture({n: fbuf.Buffer(40, sampler=Epoch()) for n in THREE}, fractions=THREE, **settings)


@pytest.mark.parametrize("annealed", [False, True])
@pytest.mark.parametrize(
    ("held", "quota", "moved"),
    [
        ({"a": 40, "b": 40, "c": 40}, [4, 4, 8], 0),
        ({"a": 0, "b": 40, "c": 40}, [0, 5, 11], 4),
        ({"a": 0, "b": 40, "c": 0}, [0, 16, 0], 12),
        ({"a": 0, "b": 0, "c": 0}, [0, 0, 0], 0),
    ],
)
def test_what_an_empty_buffer_leaves_over_others_give(
    annealed: bool, held: dict[str, int], quota: list[int], moved: int
) -> None:
    mixture = three(annealed=annealed)
    state = filled(mixture, **held)
    state, batch = sampling(mixture)(state, jax.random.key(0))
    check(mixture, batch, held)
    assert np.bincount(batch.source, minlength=4).tolist() == [*quota, 16 - sum(quota)]
    stats = mixture.stats(state)
    assert int(stats["moved_rows"]) == moved and int(stats["empty_samples"]) == (not sum(quota))
    assert not int(stats["a/empty_samples"])
    assert bool(mixture.can_sample(state)) == bool(sum(quota))
    for name, number in zip(THREE, quota, strict=True):  # what is not handed out stays to be drawn
        left = held[name] - number if number else 0
        assert int(stats[f"{name}/epoch_left"]) == left
    ids = np.asarray(batch.data["id"])[np.asarray(batch.mask)]
    assert len(set(ids.tolist())) == len(ids)
    shares = {name: q / 16 for name, q in zip(THREE, quota, strict=True)}
    for i, name in enumerate(THREE):
        got = np.asarray(batch.probability)[np.asarray(batch.source) == i]
        np.testing.assert_allclose(got, shares[name] / 40, rtol=1e-6)


@pytest.mark.parametrize(
    "settings", [{"quota": "random"}, {"quota": "random", "if_empty": "mask"}, {"if_empty": "mask"}]
)
def test_rows_of_an_empty_buffer(settings: dict[str, Any]) -> None:
    mixture = three(**settings)
    state = filled(mixture, a=0)
    keys = jax.random.split(jax.random.key(0), 300)
    batch = jax.device_get(jax.jit(jax.vmap(lambda key: mixture.peek(state, key, 16)))(keys))
    counts = np.bincount(batch.source.reshape(-1), minlength=4)
    if settings.get("if_empty") == "mask":
        if settings.get("quota") == "random":
            assert chi_square_z(counts[[1, 2, 3]], np.array([0.25, 0.5, 0.25])) < 4 and counts[0] == 0
        else:
            assert counts.tolist() == [0, 4 * 300, 8 * 300, 4 * 300]
        assert not bool(mixture.can_sample(state))
        np.testing.assert_allclose(batch.probability[batch.source == 2], 0.5 / 40, rtol=1e-6)
    else:
        assert counts[3] == 0 and chi_square_z(counts[[1, 2]], np.array([1 / 3, 2 / 3])) < 4
        assert bool(mixture.can_sample(state))
        np.testing.assert_allclose(batch.probability[batch.source == 2], 2 / 3 / 40, rtol=1e-6)


def test_a_fraction_of_zero_is_never_drawn_from() -> None:
    for settings in ({}, {"annealed": True}, {"quota": "random"}):
        mixture = two(fractions={"a": 1.0, "b": 0.0}, **settings)
        state = filled(mixture, a=0)
        state, batch = mixture.sample(state, jax.random.key(0), 8)
        assert not bool(jnp.any(batch.mask)) and not bool(mixture.can_sample(state))
        assert not int(mixture.stats(state)["moved_rows"])


def test_all_takes_so_many_of_each() -> None:
    mixture = two(quota="all")
    state = filled(mixture, a=0)
    batch = mixture.peek(state, jax.random.key(0), {"b": 3, "a": 2})
    assert batch.source.tolist() == [2, 2, 1, 1, 1] and not bool(mixture.can_sample(state))
    batch = mixture.peek(filled(mixture), jax.random.key(0), {"b": 3, "a": 2})
    assert batch.source.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_allclose(batch.probability, np.array([0.4 / 20] * 2 + [0.6 / 40] * 3), rtol=1e-6)


# ------------------------------------------------------------------------------------------------- what goes back


def test_priorities_go_where_rows_came_from() -> None:
    sampler = Prioritized(alpha=1.0, eps=0.0)
    mixture = fbuf.Mixture(
        {"a": fbuf.Buffer(20, sampler=sampler), "u": fbuf.uniform(20), "b": fbuf.Buffer(20, sampler=sampler)}
    )
    state = filled(mixture)
    state, batch = mixture.sample(state, jax.random.key(0), 12)
    error = jnp.where(jnp.arange(12) == 0, jnp.nan, jnp.arange(12) + 2.0)
    new = mixture.update_priority(state, batch.index, error)
    for i, name in enumerate(mixture.names):
        if name == "u":
            continue
        leaves = np.ones(20)
        for row in range(12):
            if int(batch.source[row]) == i and row:
                leaves[int(batch.index.slot[row])] = row + 2
        np.testing.assert_allclose(new[name].sampler.tree[:20], leaves, rtol=1e-6)
        assert int(mixture.stats(new)[f"{name}/refused_nonfinite"]) == (name == "a")
    assert jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.all(x == y)), state["u"], new["u"]))


def test_indices_that_lead_nowhere_are_counted() -> None:
    mixture, state = weighted({})
    state, batch = mixture.sample(state, jax.random.key(0), 4)
    index = dataclasses.replace(batch.index, source=jnp.array([0, 7, -1, 2]))
    after = mixture.update_priority(state, index, jnp.ones(4))
    assert int(mixture.stats(after)["refused_out_of_range"]) == 3
    masked = fbuf.MixtureIndex(jnp.full(4, 2), jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.uint32))
    after = mixture.update_priority(state, masked, jnp.full(4, jnp.nan))
    stats = mixture.stats(after)
    assert not any(int(stats[name]) for name in stats if "refused" in name)
    state = mixture.extend(state, "a", rows_of(1500, 20))
    after = mixture.update_priority(state, batch.index, jnp.ones(4))
    assert int(mixture.stats(after)["a/refused_stale"]) == int(jnp.sum(batch.source == 0)) > 0


def test_rows_change_where_they_came_from() -> None:
    mixture = two()
    state = filled(mixture)
    state, batch = mixture.sample(state, jax.random.key(0), 8)
    after = mixture.update_rows(state, batch.index, {"id": -jnp.arange(1, 9)})
    for i, name in enumerate(mixture.names):
        index = mixture.route(batch.index, name)
        got = mixture[name].get(after[name], index)
        mine = np.asarray(batch.source) == i
        assert (np.asarray(got.mask) == mine).all()
        last = {int(s): -(r + 1) for r, s in enumerate(batch.index.slot.tolist()) if mine[r]}
        assert [n for n in got.data["id"].tolist() if n] == [last[int(s)] for s in np.asarray(batch.index.slot)[mine]]
        assert int(jnp.sum(mixture[name].rows(after[name]).data["id"] < 0)) == len(last)


def test_windows_take_their_errors() -> None:
    view = Sequence(3, episode_end=("done",))
    buffers = {n: fbuf.Buffer(30, view=view, sampler=Prioritized(alpha=1.0, eps=0.0)) for n in "ab"}
    mixture = fbuf.Mixture(buffers)
    example = {"id": np.int32(0), "done": np.bool_(False)}
    state = mixture.init({"a": example, "b": example})
    for name in "ab":
        state = mixture.extend(state, name, {"id": np.arange(30, dtype=np.int32), "done": np.zeros(30, bool)})
    state, batch = mixture.sample(state, jax.random.key(0), 6)
    after = mixture.update_priority(state, batch.index, jnp.ones((6, 3)) * 5, eta=0.5)
    for i, name in enumerate("ab"):
        slots = np.unique(np.asarray(batch.index.slot)[np.asarray(batch.source) == i])
        np.testing.assert_allclose(after[name].sampler.tree[:30][slots], 5, rtol=1e-6)


# ------------------------------------------------------------------------------------------------- data sets, rows of two kinds


def test_data_sets_mix_like_others(tmp_path: Path) -> None:
    """Two data sets, and one beside a buffer that grows."""
    rows = pieces.make(tmp_path)
    buffer, held = fbuf.datasets.open(tmp_path, view=Transition())
    sets = fbuf.Mixture({"one": buffer, "two": buffer}, fractions={"one": 0.3, "two": 0.7})
    both = sets.init({"one": held, "two": held})
    both, batch = sets.sample(both, jax.random.key(0), 10)
    assert batch.source.tolist() == [0] * 3 + [1] * 7 and bool(jnp.all(batch.mask))
    actions = np.asarray(rows["action"])[np.asarray(batch.index.slot)]
    assert (np.asarray(batch.data["action"]) == actions).all()

    online = fbuf.Buffer(50, view=Transition(), sampler=Prioritized())
    mixture = fbuf.Mixture({"online": online, "offline": buffer})
    state = mixture.init({"online": {name: array[0] for name, array in rows.items()}, "offline": held})
    state, batch = mixture.sample(state, jax.random.key(0), 8)
    assert batch.source.tolist() == [1] * 8 and int(mixture.stats(state)["moved_rows"]) == 4
    state = mixture.extend(state, "online", {name: array[:20] for name, array in rows.items()})
    state, batch = mixture.sample(state, jax.random.key(1), 8)
    assert batch.source.tolist() == [0] * 4 + [1] * 4
    state = mixture.update_priority(state, batch.index, jnp.ones(8))
    after = mixture.update_rows(state, batch.index, {"action": batch.data["action"]})
    assert int(mixture.stats(after)["refused_read_only"]) == 4
    with pytest.raises(TypeError):
        mixture.extend(state, "offline", {name: array[:1] for name, array in rows.items()})
    with pytest.raises(TypeError):
        mixture.clear(state)
    assert int(mixture["online"].size(mixture.clear(state, "online")["online"])) == 0


def test_what_is_handed_out_must_be_alike() -> None:
    mixture = two()
    with pytest.raises(ValueError, match=r"(?s)Mixture.init.*id: int32\[\] in 'a', float32\[\] in 'b'.*on_read"):
        mixture.init({"a": EXAMPLE, "b": {**EXAMPLE, "id": np.float32(0)}})
    with pytest.raises(ValueError, match=r"obs: uint8\[8, 8\] in 'a', nothing in 'b'"):
        mixture.init({"a": EXAMPLE, "b": {"id": np.int32(0)}})
    with pytest.raises(ValueError, match=r"PyTreeDef\(\[\*\]\) in 'a', PyTreeDef\(\(\*,\)\) in 'b'"):
        mixture.init({"a": [np.int32(0)], "b": (np.int32(0),)})


# ------------------------------------------------------------------------------------------------- programs


@pytest.mark.parametrize("mode", ["exact", "annealed"])
def test_eager_jitted_and_scanned_give_the_same(mode: str) -> None:
    samplers = (Prioritized(), Consume(2))
    one, other = (fbuf.Buffer(c, sampler=s) for c, s in zip((20, 40), samplers, strict=True))
    mixture = two(one, other, **MODES[mode])

    def step(state: Any, i: Any) -> Any:
        rows = {"obs": jnp.zeros((2, 8, 8), jnp.uint8) + i.astype(jnp.uint8), "id": jnp.full((2,), i, jnp.int32)}
        state = mixture.extend(state, "a", rows)
        state, batch = mixture.sample(state, jax.random.fold_in(jax.random.key(3), i), 8)
        state = mixture.update_priority(state, batch.index, batch.data["id"] + 1.0)
        return state, batch

    start = filled(mixture, a=0)
    eager, out = start, []
    for i in range(4):
        eager, batch = step(eager, jnp.int32(i))
        out.append(batch)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *out)
    scanned, batches = jax.jit(lambda state: lax.scan(step, state, jnp.arange(4)))(start)
    for a, b in zip(jax.tree.leaves((eager, stacked)), jax.tree.leaves((scanned, batches)), strict=True):
        assert a.dtype == b.dtype and bool(jnp.all(a == b))


def test_changing_fractions_compiles_once() -> None:
    mixture = two(fractions={"a": 0.5, "b": 0.5}, annealed=True)
    state, traces = filled(mixture), []

    @jax.jit
    def step(state: Any, key: Any, share: Any) -> Any:
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


def test_a_checked_step_raises() -> None:
    mixture = two()
    state = filled(mixture, b=0)
    step = fbuf.checked(lambda state, key: mixture.sample(state, key, 4))
    state, batch = step(state, jax.random.key(0))
    wrong = dataclasses.replace(batch.index, source=batch.index.source + 7)
    with pytest.raises(ValueError, match="4 out of range"):
        fbuf.checked(mixture.update_rows)(state, wrong, {"id": jnp.zeros(4, jnp.int32)})
    with pytest.raises(ValueError, match="there is nothing to draw now"):
        step(mixture.clear(state), jax.random.key(0))


def test_parts_are_not_concatenated() -> None:
    mixture = two()
    lowered = jax.jit(lambda state, key: mixture.sample(state, key, B)).lower(filled(mixture), jax.random.key(0))
    joins = [line for line in lowered.as_text().splitlines() if "stablehlo.concatenate" in line]
    assert joins and not [line for line in joins if "xui8>" in line]


BIG = 400_000
ROW = {"obs": jax.ShapeDtypeStruct((8,), np.uint8), "id": jax.ShapeDtypeStruct((), np.int32)}


@pytest.mark.parametrize(
    ("sampler", "mode"),
    [
        pytest.param(
            s, m, marks=() if (s, m) in (("Consume", "exact"), ("Prioritized", "annealed")) else pytest.mark.slow
        )
        for s in ("Uniform", "Epoch", "Consume", "Prioritized", "Prioritized(replace=False)", "Ranked")
        for m in MODES
    ],
)
def test_steps_are_in_place(sampler: str, mode: str) -> None:
    mixture = two(*(fbuf.Buffer(BIG, sampler=SAMPLERS[sampler]) for _ in "ab"), **MODES[mode])
    state = jax.eval_shape(lambda: mixture.init({"a": ROW, "b": ROW}))

    def step(state: Any, rows: Any, key: Any) -> Any:
        state, batch = mixture.sample(state, key, size_of(mixture))
        if mixture["a"].sampler.prioritized:
            state = mixture.update_priority(state, batch.index, jnp.ones(B))
        state = mixture.update_rows(state, batch.index, {"id": jnp.zeros(B, jnp.int32)})
        state = mixture.extend(state, "a", rows)
        return mixture.extend(state, "b", rows), batch

    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((4, *x.shape), x.dtype), ROW)
    assert_inplace(step, state, rows, jax.eval_shape(lambda: jax.random.key(0)), bound=BIG)


def test_flags_and_raw_keys() -> None:
    """64 bits, strict promotion, no NaN and no leak on the way, in every mode; and keys of either kind."""
    for mode in MODES.values():
        mixture = two(fbuf.prioritized(20), fbuf.Buffer(40, sampler=Epoch()), **mode)
        state = filled(mixture, a=0)
        for enable in (
            lambda: jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64(),
            lambda: jax.numpy_dtype_promotion("strict"),
            lambda: jax.debug_nans(True),
            lambda: jax.debug_key_reuse(True),
            jax.checking_leaks,
        ):
            with enable():
                batch = mixture.peek(state, jax.random.key(0), size_of(mixture))
                assert batch.weight.dtype == jnp.float32 and batch.source.dtype == jnp.int32
        typed = mixture.peek(state, jax.random.key(3), size_of(mixture))
        raw = mixture.peek(state, jax.random.key_data(jax.random.key(3)), size_of(mixture))
        assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), typed, raw))


# ------------------------------------------------------------------------------------------------- values and messages


def test_it_is_a_value() -> None:
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
    plans = one.plan({"a": EXAMPLE, "b": EXAMPLE})
    assert plans["b"].device == one["b"].plan(EXAMPLE).device
    assert int(one.size(one.clear(state))) == 0 and int(one.size(one.clear(state, "b"))) == 20
    one.flush(state)
    assert {name: summary.size for name, summary in one.summary(state).items()} == {"a": 20, "b": 40}
    assert repr(state).startswith("MixtureState(a, b)\n\na: BufferState(20 of 20 rows)")


def refused(error: Any, match: str, call: Any) -> None:
    with pytest.raises(error, match=match):
        call()


def test_what_makes_no_mixture_is_refused() -> None:
    u = fbuf.uniform(10)
    refused(TypeError, "buffers is Buffer; expected a dict", lambda: fbuf.Mixture(u))
    refused(ValueError, "there are no buffers", lambda: fbuf.Mixture({}))
    refused(TypeError, "'a' is int; expected a Buffer", lambda: fbuf.Mixture({"a": 1}))
    refused(ValueError, "a buffer is named 'a/b'", lambda: fbuf.Mixture({"a/b": u}))
    refused(ValueError, "two buffers are named 'a'", lambda: fbuf.Mixture((("a", u), ("a", u))))
    ahead = dataclasses.replace(u, prefetch=1, batch_size=4)
    refused(ValueError, "'a' has prefetch=1", lambda: fbuf.Mixture({"a": ahead}))
    ragged = dataclasses.replace(u, storage=fbuf.storages.Ragged())
    refused(TypeError, "'a' has Ragged", lambda: fbuf.Mixture({"a": ragged}))
    refused(ValueError, "fractions come to 0.9; expected 1", lambda: two(fractions={"a": 0.4, "b": 0.5}))
    refused(ValueError, "all fractions are 0", lambda: two(fractions={"a": 0, "b": 0}))
    refused(ValueError, "fractions lacks 'b'", lambda: two(fractions={"a": 1.0}))
    refused(ValueError, "fractions names 'c', but the buffers are a, b", lambda: two(fractions={"c": 1.0}))
    refused(ValueError, "the fraction of 'a' is -1", lambda: two(fractions={"a": -1, "b": 2}))
    refused(TypeError, "expected a dict with one for each of a, b", lambda: two(fractions=(1.0,)))
    refused(ValueError, "quota is 'each'; expected 'exact' or 'random' or 'all'", lambda: two(quota="each"))
    refused(ValueError, "target is None", lambda: two(target=None))
    refused(ValueError, "normalize is 'buffer'; expected 'batch' or None", lambda: two(normalize="buffer"))
    refused(ValueError, "if_empty is 'raise'", lambda: two(if_empty="raise"))
    refused(TypeError, "annealed is 1", lambda: two(annealed=1))
    refused(ValueError, 'quota is "all", which goes by no fractions', lambda: two(quota="all", annealed=True))
    refused(ValueError, "beta is -1", lambda: two(beta=-1))
    refused(ValueError, "quota is array", lambda: two(quota=np.array(["exact", "all"])))
    assert two(beta=np.float32(0.5)) == two(beta=0.5)
    assert two(fractions={"a": np.asarray(0.5), "b": 0.5}).shares == (0.5, 0.5)


def test_what_verbs_refuse() -> None:
    mixture, every = two(), two(quota="all")
    state, key = filled(mixture), jax.random.key(0)
    batch = mixture.peek(state, key, 4)
    refused(ValueError, "Mixture.init: got a; expected one row, or a BufferState", lambda: mixture.init({"a": EXAMPLE}))
    refused(ValueError, "another buffer", lambda: mixture.init({"a": state["b"], "b": EXAMPLE}))
    refused(
        TypeError, "first argument is BufferState, expected MixtureState", lambda: mixture.sample(state["a"], key, 4)
    )
    refused(ValueError, "there is no buffer 'c'; expected one of a, b", lambda: mixture.extend(state, "c", EXAMPLE))
    refused(KeyError, "there is no buffer 'c'", lambda: state["c"])
    for row in (EXAMPLE, EXAMPLE["obs"], jnp.zeros(3)):
        refused(
            TypeError, r"the name of a buffer is .*add\(state, 'a', row\)", lambda row=row: mixture.add(state, row, "a")
        )
    refused(ValueError, "Mixture.plan: got a; expected one row for each of a, b", lambda: mixture.plan({"a": EXAMPLE}))
    for odd in (jnp.array(True), jnp.complex64(0.5)):
        refused(TypeError, "expected a real number", lambda odd=odd: mixture.peek(state, key, 4, fractions={"a": odd}))
    assert mixture.peek(state, key, 4, fractions={"a": np.asarray(0.5)}).source.tolist() == [0, 0, 1, 1]
    refused(ValueError, "made by another mixture, of a, b", lambda: fbuf.Mixture({"a": mixture["a"]}).size(state))
    refused(ValueError, "expected a, b, annealed", lambda: two(annealed=True).size(state))
    refused(ValueError, "another buffer", lambda: two(fbuf.uniform(21)).sample(state, key, 4))
    refused(TypeError, "batch_size is traced", lambda: jax.jit(lambda n: mixture.sample(state, key, n))(4))
    refused(ValueError, "Mixture.sample: batch_size is 0", lambda: mixture.sample(state, key, 0))
    refused(TypeError, "batch_size is a dict, but quota is 'exact'", lambda: mixture.sample(state, key, {"a": 4}))
    refused(TypeError, "batch_size is 4, but quota is", lambda: every.sample(state, key, 4))
    refused(ValueError, "batch_size lacks 'b'", lambda: every.sample(state, key, {"a": 4}))
    refused(ValueError, "'b': batch_size is 0", lambda: every.sample(state, key, {"a": 4, "b": 0}))
    refused(ValueError, "goes by none", lambda: every.sample(state, key, {"a": 4, "b": 4}, fractions={"a": 1}))
    refused(ValueError, "beta is -1", lambda: mixture.sample(state, key, 4, beta=-1))
    refused(TypeError, "fractions is 0.5; expected a dict", lambda: mixture.sample(state, key, 4, fractions=0.5))
    refused(ValueError, "come to 1.5", lambda: mixture.sample(state, key, 4, fractions={"a": 1, "b": 0.5}))
    refused(ValueError, "names 'c'", lambda: mixture.sample(state, key, 4, fractions={"c": 1}))
    refused(ValueError, r"has shape \[2\]", lambda: mixture.sample(state, key, 4, fractions={"a": jnp.ones(2)}))
    refused(TypeError, "'a' is 'x'; expected a number", lambda: mixture.sample(state, key, 4, fractions={"a": "x"}))
    whole = two(fractions={"a": 1.0, "b": 0.0})
    refused(ValueError, "what is left is for b", lambda: whole.sample(state, key, 4, fractions={"a": 0.5}))
    refused(
        TypeError, "no buffer of a, b has priorities", lambda: mixture.update_priority(state, batch.index, jnp.ones(4))
    )
    index = fbuf.Index(batch.index.slot, batch.index.ticket)
    refused(TypeError, "index is Index; expected the MixtureIndex", lambda: mixture.update_rows(state, index, {}))
    for verb in ("get", "update_rows", "update_priority"):
        own = fbuf.prioritized(20) if verb == "update_priority" else mixture["a"]
        args = [jnp.ones(4)] * (verb != "get")
        refused(
            TypeError,
            rf"Buffer.{verb}: index is MixtureIndex, of rows of several buffers.* Write mixture.route\(batch.index, name\)",
            lambda own=own, verb=verb, args=args: getattr(own, verb)(state["a"], batch.index, *args),
        )
    refused(ValueError, "leaf 'x'", lambda: mixture.update_rows(state, batch.index, {"x": jnp.ones(4)}))
    refused(ValueError, "the fractions of this mixture are settled", lambda: mixture.set(state, fractions={"a": 1}))
    refused(ValueError, "a mixture has no number 'alpha'", lambda: mixture.set(state, alpha=1))
    refused(ValueError, "has no number 'alpha'", lambda: mixture.set(state, "a", alpha=1))
    refused(ValueError, "fractions belong to the mixture", lambda: mixture.set(state, "a", fractions={"a": 1}))


def test_what_only_buffers_have() -> None:
    """Asked of a mixture, it says what to write; and `Replay`, which takes no mixture, what to do instead."""
    mixture = two()
    state = filled(mixture)
    batch = mixture.peek(state, jax.random.key(0), 4)
    told = {
        "get": r"mixture\['a'\].get\(state\['a'\], mixture.route\(batch.index, 'a'\)\)",
        "last": r"mixture\['a'\].last\(state\['a'\], n\)",
        "convert": r"mixture\['a'\].convert\(other, state\['a'\]\)",
        "resume": r"mixture\['a'\].resume\(row\)",
        "capacity": r"mixture\['a'\].capacity\.",
        "prefetch": r"mixture\['a'\].prefetch\.",
    }
    for name, text in told.items():
        refused(
            AttributeError,
            rf"no attribute '{name}'; its buffers have. Write {text}",
            lambda n=name: getattr(mixture, n),
        )
        assert not hasattr(mixture, name) and name not in dir(mixture)
    refused(AttributeError, "'Mixture' object has no attribute 'nonsense'$", lambda: mixture.nonsense)
    mine = batch.source == 0
    got = mixture["a"].get(state["a"], mixture.route(batch.index, "a"))
    np.testing.assert_array_equal(got.mask, mine)
    np.testing.assert_array_equal(got.data["id"][mine], batch.data["id"][mine])
    refused(
        TypeError,
        "Replay: buffer is Mixture; expected a Buffer. Carry the state of a mixture yourself",
        lambda: fbuf.Replay(mixture, {"a": EXAMPLE, "b": EXAMPLE}),  # type: ignore[arg-type]
    )
    again = pickle.loads(pickle.dumps(mixture))
    assert again == mixture == copy.deepcopy(mixture)


@jax.tree_util.register_static
class Remembering(Epoch):
    """One that remembers what it drew, and cannot be told how many are wanted."""

    draw_some = None  # type: ignore[assignment]

    def draw(self, *args: Any) -> Any:
        return Epoch().draw(*args)


def test_a_sampler_that_remembers_must_be_told_how_many() -> None:
    buffers = {name: fbuf.Buffer(50, sampler=Remembering()) for name in "ab"}
    state = filled(fbuf.Mixture(buffers))
    with pytest.raises(TypeError, match="remembers what it drew, but cannot draw a number of anchors"):
        fbuf.Mixture(buffers).peek(state, jax.random.key(0), 8)
    batch = fbuf.Mixture(buffers, if_empty="mask").peek(state, jax.random.key(0), 8)
    assert bool(jnp.all(batch.mask))


def test_set_reaches_a_sampler() -> None:
    mixture = two(fbuf.prioritized(20))
    state = mixture.set(filled(mixture), "a", alpha=0.5, beta=0.25)
    assert (float(state["a"].sampler.alpha), float(state["a"].sampler.beta), float(state.beta)) == (0.5, 0.25, 1.0)


def test_a_donated_state_is_named() -> None:
    mixture = fbuf.Mixture({"a": fbuf.uniform(8), "b": fbuf.uniform(8)}, fractions={"a": 0.5, "b": 0.5})
    state = mixture.init({"a": {"t": 0}, "b": {"t": 0}})
    jax.jit(lambda state: mixture.extend(state, "a", {"t": jnp.arange(3)}), donate_argnums=0)(state)
    for verb in (mixture.stats, mixture.size, lambda state: mixture.sample(state, jax.random.key(0), 4)):
        with pytest.raises(
            RuntimeError, match=r"^Mixture\.\w+: the state was donated|^Buffer.size: the state was donated"
        ):
            verb(state)

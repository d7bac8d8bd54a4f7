"""Buffers with transforms: what is stored, what is drawn, what stages learn, and which transforms are refused."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._buffer import transforms
from fbuf.samplers import Epoch, Prioritized
from fbuf.storages import Device, Memmap, Ragged
from fbuf.testing import measure
from fbuf.transforms import Augment, Chain, Drop, Map, Normalize, NormalizeReward, Rename, RewardToGo, Scale, Select
from fbuf.views import Episode, Sequence, Transition
from tests.support import refusals, same_step, segments
from tests.support.inplace import assert_order
from tests.support.refusals import raises
from tests.support.tables import one_of
from tests.support.transforms import (
    BATCH,
    EXAMPLE,
    LANES,
    ON_READ,
    ON_WRITE,
    VIEWS,
    Largest,
    apart,
    close,
    given_rows,
    laned_windows,
    make,
)
from tests.support.trees import same


def stored_by_hand(state, rows):
    out = {}
    speeds = []
    for call in rows:
        made = {n: x for n, x in call.items() if n not in ("observation", "nothing")}
        made["obs"], made["action"] = call["observation"], call["action"].astype(np.int16)
        speeds.append(call["speed"])
        seen = np.concatenate(speeds).astype(np.float64)
        made["speed"] = ((call["speed"] - seen.mean()) / seen.std()).astype(np.float32)
        end, total = call["terminated"] | call["truncated"], np.zeros(LANES)
        sums = []
        for t in range(len(end))[::-1]:
            total = call["reward"][t] + np.where(end[t], 0, 0.9 * total)
            sums.append(total)
        made["reward_to_go"] = np.array(sums[::-1], np.float32)
        for name, x in made.items():
            out.setdefault(name, []).append(x)
    return {name: np.concatenate(x) for name, x in out.items()}


def test_what_is_stored_and_what_is_drawn():
    buffer = make(Device(), VIEWS["Row"])
    plain = dataclasses.replace(buffer, on_read=None)
    calls = [given_rows(np.random.default_rng(i), 5) for i in range(4)]
    state = buffer.init(EXAMPLE)
    for rows in calls:
        state = buffer.extend(state, rows)
    want = stored_by_hand(state, calls)
    held = buffer.rows(state)
    close(jax.tree.map(lambda x: x[:20], held.data), want)
    np.testing.assert_array_equal(held.data["obs"][:20], want["obs"])
    close(buffer.rows(state, last=3).data, {n: x[-3:] for n, x in want.items()})
    key = jax.random.key(7)
    batch = buffer.peek(state, key, BATCH)
    before = plain.peek(buffer.convert(plain, state), key, BATCH)
    same(batch.index, before.index)
    assert batch.data.keys() == (before.data.keys() - {"action"}) | {"act"}
    same(batch.data["act"], before.data["action"])
    deviation = np.concatenate([c["reward"] for c in calls]).astype(np.float64).std()
    close(batch.data["reward"], before.data["reward"] / np.float32(deviation))
    frames = np.asarray(before.data["obs"])  # each of one colour: a shift changes nothing
    close(batch.data["obs"], frames / np.float32(255) + np.float32(0.5))
    same(buffer.get(state, batch.index).data, before.data)


def test_missing_rows_of_a_window_are_zeros():
    add = Map(lambda row: {**row, "action": row["action"] + 1, "made": jnp.float32(3)})
    on_read = (Scale("reward", offset=7.0), Normalize("speed", center=True), add)
    buffer = dataclasses.replace(make(Device(), VIEWS["Sequence"], on_read), on_write=None)
    rows = given_rows(np.random.default_rng(0), 9)
    rows = {"obs": rows.pop("observation"), **rows}
    state = buffer.init(jax.tree.map(lambda x: x[0, 0], rows))
    empty = buffer.peek(state, jax.random.key(0), 64)
    assert not empty.mask.any() and all(not np.asarray(x).any() for x in jax.tree.leaves(empty.data))
    batch = buffer.peek(buffer.extend(state, rows), jax.random.key(0), 64)
    assert batch.mask.all() and (np.asarray(batch.data["made"]) == 3).all()
    gone = ~np.asarray(batch.data["mask"])
    assert gone.any()
    for name in ("reward", "speed"):
        assert not np.asarray(batch.data[name])[gone].any() and np.asarray(batch.data[name])[~gone].all()


TRANSFORMS = {name: getattr(fbuf.transforms, name) for name in fbuf.transforms.__all__}
JOINS = """
joined(Concatenate(("x", "sum"), "y")) => ValueError
    leaf 'sum' is [4] a window, but 'x' is [4] a row. | Map and jnp.broadcast_to
joined(Stack(("reward", "most"), "y")) => ValueError leaf 'most' is [] a window, but 'reward' is [] a row
joined(Concatenate(("least", "most"), "y")) => ValueError leaf 'least' is float32[] a window, without axis -1. Use Stack
joined(Split("sum", ("a", "b"), (1, 1))) => ValueError leaf 'sum' is [4] a window; expected the sum of (1, 1).
"""


def test_leaves_of_rows_and_of_windows_are_not_joined():
    names = {"joined": lambda stage: laned_windows(4, (Map(apart), stage))}
    refusals.check_all(JOINS, TRANSFORMS | names)


SMALL = fbuf.Buffer(3, on_read={"r": NormalizeReward()})
extend_small = jax.jit(lambda state, rows, mask: SMALL.extend(state, rows, mask=mask))


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5))
def test_statistics_of_rows_that_were_written(masks):
    buffer, seen, rng = SMALL, [], np.random.default_rng(len(masks))
    state = buffer.init({"reward": 0.0})
    for mask in masks:
        reward = rng.normal(2, 3, 4).astype(np.float32)
        state = extend_small(state, {"reward": reward}, np.array(mask))
        seen += reward[np.array(mask)].tolist()
    stats = buffer.stats(state)
    np.testing.assert_allclose(stats["r_mean"], np.mean(seen) if seen else 0, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stats["r_std"], np.std(seen) if seen else 0, rtol=1e-4, atol=1e-5)
    state = buffer.clear(state)
    assert int(buffer.size(state)) == 0 and float(buffer.stats(state)["r_mean"]) == float(stats["r_mean"])


@pytest.mark.more
def test_values_that_are_not_finite_are_counted_and_left_out():
    buffer = fbuf.Buffer(8, on_write={"norm": NormalizeReward()}, on_read={"later": NormalizeReward(clip=5.0)})
    state = buffer.init({"reward": 0.0})
    state = buffer.extend(state, {"reward": jnp.array([1.0, jnp.nan, 3.0, jnp.inf, 1e30])})
    stats = buffer.stats(state)
    assert int(stats["norm_skipped"]) == 3 and float(stats["norm_mean"]) == 2.0 and float(stats["norm_std"]) == 1.0
    state = buffer.extend(state, {"reward": jnp.array([5.0, 7.0])})
    assert np.isfinite(float(buffer.stats(state)["norm_std"])) and np.isfinite(float(buffer.stats(state)["later_std"]))


def test_without_transforms_nothing_changes():
    buffer = fbuf.Buffer(10, prefetch=1, batch_size=2)
    for none in (None, (), {}, Chain()):
        assert fbuf.Buffer(10, prefetch=1, batch_size=2, on_write=none, on_read=none) == buffer
    state = buffer.init({"x": 0.0})
    assert state.transforms is None and state.ahead.reading is None
    scaled = dataclasses.replace(buffer, on_read=Scale("x"))
    assert jax.tree.structure(scaled.init({"x": 0.0})) == jax.tree.structure(state)


@pytest.mark.more
def test_convert_keeps_statistics_and_new_stages_learn_from_held_rows(monkeypatch):
    monkeypatch.setattr(transforms, "BLOCK_BYTES", 4 * 3)  # several blocks
    buffer = fbuf.Buffer(8, on_read=NormalizeReward(), episode_end=("done",))
    example = {"reward": 0.0, "done": False}
    state = buffer.init(example)
    for first in (0.0, 6.0):
        reward = first + jnp.arange(6.0)
        state = buffer.extend(state, {"reward": reward, "done": jnp.zeros(6, bool)})
    ever, held = np.arange(12.0), np.arange(4.0, 12.0)
    assert float(buffer.stats(state)["normalize_reward_mean"]) == ever.mean()
    more = dataclasses.replace(
        buffer,
        view=Sequence(2, episode_end=("done",), autoreset="same_step"),
        on_read=buffer.on_read.append(Normalize("reward"), name="own"),
    )
    stats = more.stats(buffer.convert(more, state))
    assert float(stats["normalize_reward_mean"]) == ever.mean()
    found = stats["own_reward_mean"], stats["own_reward_std"]
    np.testing.assert_allclose(found, [held.mean(), held.std()], rtol=1e-6)
    without = dataclasses.replace(buffer, on_read=Drop("done"))
    assert buffer.convert(without, state).transforms is None
    again = without.convert(buffer, buffer.convert(without, state))
    np.testing.assert_allclose(buffer.stats(again)["normalize_reward_mean"], held.mean(), rtol=1e-6)
    jitted = jax.jit(lambda state: buffer.convert(more, state))(state)
    np.testing.assert_allclose(more.stats(jitted)["own_reward_mean"], held.mean(), rtol=1e-6)


@pytest.mark.more
def test_rows_are_checked_as_they_are_given():
    buffer = make(Device(), VIEWS["Row"])
    state, rows = buffer.init(EXAMPLE), given_rows(np.random.default_rng(0), 3)
    floats = rows["observation"].astype(np.float32)
    for broken, message in (
        ({**rows, "observation": floats}, "leaf 'observation' is float32; this .* uint8"),
        ({n: x for n, x in rows.items() if n != "speed"}, "leaf 'speed' is missing"),
        ({**rows, "obs": rows["observation"]}, "leaf 'obs' is not in this buffer"),
        ({**rows, "reward": rows["reward"][..., None]}, r"leaf 'reward' has shape \[3, 2, 1\]; expected \[N, E\]"),
    ):
        raises((ValueError, TypeError), f"Buffer.extend: {message}", buffer.extend, state, broken)
    assert buffer.extend(state, {n: x[:0] for n, x in rows.items()}) is state
    one = buffer.add(state, {n: x[0] for n, x in rows.items()})
    close(buffer.rows(one, last=1).data["obs"][0], rows["observation"][0])
    index = buffer.rows(one, last=1).index
    flat = fbuf.Index(index.slot.reshape(-1), index.generation.reshape(-1))
    changed = buffer.update_rows(one, flat, {"action": jnp.full(2, 77, jnp.int16)})
    assert buffer.rows(changed, last=1).data["action"].tolist() == [[77, 77]]


def test_init_and_plan_check_transforms_on_the_example():
    for settings in ({"on_write": lambda row: row["x"].sum()}, {"on_read": lambda row: {"y": row["x"].sum()}}):
        buffer = fbuf.Buffer(8, **{name: Map(fn) for name, fn in settings.items()})
        example = {"x": np.zeros(3)}
        assert buffer.plan(example).device == buffer.nbytes(buffer.init(example))["device"]
    for table in (REFUSED_ON_WRITE, REFUSED_ON_WRITE.replace(").init(", ").plan(")):
        refusals.check_all(table, globals() | TRANSFORMS | {"same_step": same_step})


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Loses(fbuf.parts.Transform):
    def apply(self, data, context):
        return {"x": data["x"].sum()}


LEARNT = NormalizeReward()
REFUSED_ON_WRITE = """
fbuf.Buffer(8, on_write=Scale("y")).init({"x": 0.0}) => ValueError Scale: leaf 'y' is missing
fbuf.Buffer(8, on_write=Drop("x"), episode_end=("x",)).init({"x": False, "y": 0}) => ValueError
    no leaf named 'x'; rows have y
fbuf.Buffer(8, on_write=Drop("x")).init({}) => ValueError the example has no leaves
fbuf.Buffer(8, on_write=Drop("x"), view=same_step.Sequence(2)).init({"x": False, "y": 0}) => ValueError
    no leaf named 'terminated'
"""
BUFFERS = """
fbuf.Buffer(8, on_read=Scale("y")).init({"x": 0.0}) => ValueError Scale: leaf 'y' is missing
fbuf.Buffer(8, on_read=LEARNT).init({"x": 0.0}) => ValueError of is 'reward', but rows have x. Use of='x'.
fbuf.Buffer(8, on_read=RewardToGo()).init({"reward": 0.0}) => ValueError
    data are single rows; expected windows, of views.Sequence
SCALED.sample(fbuf.Buffer(8).init(BYTE), KEY, 2) => ValueError made by another buffer
fbuf.Buffer(8).sample(SCALED.init(BYTE), KEY, 2) => ValueError made by another buffer | other transforms
fbuf.Buffer(8, on_write=Normalize("x")).sample(SCALED.init(BYTE), KEY, 2) => ValueError
    made by another buffer | other transforms
fbuf.Buffer(8, on_read=Normalize("x")).sample(SCALED.init(BYTE), KEY, 2) => ValueError
    made by another buffer | other transforms
SCALED.convert(fbuf.Buffer(8), SCALED.init(BYTE)) => ValueError
    other.on_write is None; expected Chain((Scale | add the rows again
fbuf.Buffer(8, on_write=Augment("x")) => ValueError
    stage 'augment' of on_write, Augment(keys=('x',)), needs a key. Use on_read.
fbuf.Buffer(8, on_read=lambda x: x) => TypeError on_read is <function | Write Map(
fbuf.Buffer(8, on_write=3) => TypeError on_write is 3. Chain: stage is 3; expected a fbuf.parts.Transform.
fbuf.Buffer(8, on_read=Scale) => TypeError stage is the class Scale
fbuf.Buffer(8, storage=fbuf.storages.Ragged(), on_write=Scale("x")) => ValueError
    on_write is Chain((Scale(keys=('x',)),)), but Ragged() holds objects. Use on_read.
fbuf.Buffer(8, on_write=LEARNT, on_read=LEARNT) => ValueError both have a stage 'normalize_reward' with memory
fbuf.Buffer(8, on_write=Loses()).init({"x": 0.0}) => ValueError 'loses' of on_write | leaf 'x' of shape []
fbuf.Buffer(8, on_read=Loses()).init({"x": 0.0}) => ValueError on_read, | leaf 'x' of shape [] for a batch of 2
"""
SCALED, BYTE, KEY = fbuf.Buffer(8, on_write=Scale("x")), {"x": jnp.uint8(0)}, jax.random.key(0)


def test_invalid_transforms_are_refused():
    refusals.check_all(BUFFERS, globals() | TRANSFORMS)


@pytest.mark.more
def test_top_k_ranks_the_stored_values():
    buffer = fbuf.Buffer(2, writer=fbuf.writers.TopK("score"), on_write=Scale("score", -1.0))
    state = buffer.extend(buffer.init({"score": 0.0}), {"score": jnp.array([3.0, 1.0, 2.0])})
    assert buffer.rows(state).data["score"].tolist() == [-1.0, -2.0]


def test_names_of_subtrees_and_of_tuples():
    buffer = fbuf.Buffer(8, on_write=Select(("next/obs", "r")), on_read=Rename({("next", "obs"): "obs"}))
    state = buffer.init({"next": {"obs": 0.0, "t": 0}, "r": 0.0})
    assert buffer.peek(state, jax.random.key(0), 2).data.keys() == {"obs", "r"}


def test_a_function_of_a_whole_batch_is_told_what_it_gets():
    for view, what in (
        (fbuf.views.Row(), r"row .* {'x': \[3\]}"),
        (Sequence(2, episode_end=()), r"window .* \[2, 3\]"),
    ):
        buffer = fbuf.Buffer(8, view=view, on_read=Map(lambda batch: {"x": batch["x"].mean(axis=2)}))
        with pytest.raises(IndexError) as caught:
            buffer.init({"x": np.zeros(3, np.float32)})
        assert re.search(f"Map.fn, <function .*, gets one {what}", "".join(caught.value.__notes__))


settings = one_of({"prefetch": 1, "batch_size": 8}, exhaustive=[{}])


@pytest.mark.more
@pytest.mark.in_place
def test_steps_are_in_place(settings):
    parts = {"on_write": ON_WRITE, "on_read": ON_READ, "sampler": Prioritized()}
    view = Transition(autoreset="same_step")
    assert_order(fbuf.Buffer(200_000, lanes=2, view=view, **parts, **settings), "ses", EXAMPLE)


@pytest.mark.more
@pytest.mark.in_place
@pytest.mark.parametrize("scale", [Scale("obs"), Scale("obs", 2 / 255, -1.0)], ids=["factor", "offset"])
def test_scale_costs_no_copy(scale):
    """It is one kernel, which makes the batch."""

    def sampling(on_read):
        buffer = fbuf.Buffer(1000, on_read=on_read)
        state = jax.eval_shape(buffer.init, {"obs": jax.ShapeDtypeStruct((84, 84), np.uint8)})
        return (lambda state, key: buffer.sample(state, key, 64)), state, jax.ShapeDtypeStruct((2,), jnp.uint32)

    plain, (fn, *args), pixels = measure(*sampling(None)), sampling(scale), 64 * 84 * 84
    memory = measure(fn, *args)
    assert memory.made - plain.made <= 4 * pixels
    assert memory.temporary <= plain.temporary + pixels + 4096  # the uint8 batch is no result any more
    text = jax.jit(fn, donate_argnums=0).lower(*args).compile().as_text()
    own = r"= f32\[64,84,84\]\S* "
    entry = text[text.index("ENTRY") :].splitlines()
    made = [line for line in entry if re.search(own + r"(?!get-tuple-element|bitcast|parameter)\w", line)]
    assert len(made) == 1, made
    called = re.search(own + r"call\(.*to_apply=(%[\w.-]+)", made[0])
    if called:  # older releases of XLA cut a kernel into parts for several threads in a function of its own
        body = text[text.index(f"\n{called[1]} (") :]
        made = re.findall(r"ROOT .*", body[: body.index("\n}")])
    assert len(made) == 1 and re.search(own + r"fusion\(", made[0]), made


@pytest.mark.more
def test_windows_to_the_end_of_episodes():
    view = Episode(4, episode_end=("done",), autoreset="same_step")
    buffer = fbuf.Buffer(20, view=view, on_read=RewardToGo(1.0, episode_end=("done",), complete="all"))
    rows = {"reward": jnp.arange(1.0, 8.0), "done": jnp.array([0, 0, 1, 0, 1, 0, 0], bool)}
    batch = buffer.peek(buffer.extend(buffer.init({"reward": 0.0, "done": False}), rows), jax.random.key(0), 32)
    found = {tuple(x) for x in np.asarray(batch.data["reward_to_go"]).tolist()}
    assert found == {(6.0, 5.0, 3.0, 0.0), (9.0, 5.0, 0.0, 0.0)}
    np.testing.assert_array_equal(batch.data["all"], batch.data["mask"])


@pytest.mark.more
def test_ragged_rows_are_transformed_after_they_are_read():
    buffer = fbuf.Buffer(8, storage=Ragged(), on_read=(Scale("reward", 2.0), NormalizeReward()))
    state = buffer.init({"text": "", "reward": 0.0})
    state = buffer.extend(state, [{"text": "a", "reward": 1.0}, {"text": "b", "reward": 3.0}])
    batch = buffer.sample(state, jax.random.key(0), 4)[1]
    want = {"a": 2.0, "b": 6.0}
    assert batch.data["reward"].tolist() == [want[x] for x in batch.lazy["text"]]
    assert float(buffer.stats(state)["normalize_reward_std"]) == 1.0
    larger, grown = buffer.grow(state)
    assert float(larger.stats(grown)["normalize_reward_std"]) == 1.0


@pytest.mark.more
def test_statistics_of_data_sets_are_taken_when_opened(tmp_path):
    rows = segments.make(tmp_path)
    buffer, state = fbuf.datasets.open(tmp_path, on_read=NormalizeReward())
    reward = np.asarray(rows["reward"], np.float64)
    np.testing.assert_allclose(buffer.stats(state)["normalize_reward_mean"], reward.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(buffer.stats(state)["normalize_reward_std"], reward.std(), rtol=1e-5)
    with pytest.raises(ValueError, match="on_write is .* of a stored data set"):
        dataclasses.replace(buffer, on_write=Scale("reward"))


@pytest.mark.more
def test_files_are_resumed(tmp_path):
    storage = Memmap(str(tmp_path / "rows"))
    buffer = fbuf.Buffer(4, storage=storage, on_write=Rename({"r": "reward"}), on_read=NormalizeReward())
    state = buffer.extend(buffer.init({"r": 0.0}), {"r": jnp.arange(6.0)})
    buffer.flush(state)
    del state
    state = buffer.resume({"r": 0.0})
    assert float(buffer.stats(state)["normalize_reward_mean"]) == 3.5  # of the rows that are held
    state = buffer.extend(state, {"r": jnp.array([9.0])})
    assert float(buffer.rows(state, last=1).data["reward"][0]) == 9.0


@pytest.mark.more
def test_a_prefetched_batch_is_the_one_peek_gave():
    buffer = fbuf.Buffer(10, on_read=(NormalizeReward(), Augment("x", 1)), prefetch=1, batch_size=4)
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(5, 3, 3)).astype(np.float32), "reward": rng.normal(size=5).astype(np.float32)}
    state = buffer.extend(buffer.init({"x": np.zeros((3, 3), np.float32), "reward": 0.0}), rows)
    state, first = buffer.sample(state, jax.random.key(0))
    same(first.data, buffer.peek(state, jax.random.fold_in(jax.random.key(0), 1)).data)
    want = buffer.peek(state, jax.random.key(1))
    state, _ = buffer.sample(state, jax.random.key(1))
    state = buffer.extend(state, {**rows, "reward": rows["reward"] * 100})
    assert not np.array_equal(buffer.peek(state, jax.random.key(1)).data["reward"], want.data["reward"])
    same(buffer.sample(state, jax.random.key(2))[1].data, want.data)


@pytest.mark.more
def test_custom_transforms():
    rows = {"reward": jnp.array([-9.0, 1.0, 4.0])}
    for settings in ({"on_read": Largest()}, {"on_write": Largest()}):
        buffer = fbuf.Buffer(4, sampler=Epoch(shuffle=False), **settings)
        state = buffer.extend(buffer.init({"reward": 0.0}), rows, mask=jnp.array([False, True, True]))
        assert float(buffer.stats(state)["largest_is"]) == 4.0
        assert buffer.sample(state, jax.random.key(0), 2)[1].data["reward"].tolist() == [0.25, 1.0]


def collapsed(window):
    """One value a window beside its rows: a number, a vector as wide as rows are, and the state it begins with."""
    total = {"total": window["reward"].sum(), "wide": window["x"].sum(0), "begins": window["x"][0]}
    return {**window, **total}


@pytest.mark.exhaustive
def test_one_value_a_window_is_not_taken_for_its_rows():
    """Though it is as long as the window, and rows are missing there."""
    names = ("total", "wide", "begins", "reward")
    later = (Scale(names, 2.0, 1.0), Rename({"wide": "x/wide", "x": "x/rows"}), Normalize(("x/wide", "x/rows"), of="x"))
    buffer, state = laned_windows(4, (Map(collapsed), Chain(later)))
    x = np.asarray(state.rows["x"])[:9]
    batch = buffer.peek(state, jax.random.key(0), 16).data
    plain_buffer = dataclasses.replace(buffer, on_read=None)
    plain = plain_buffer.peek(buffer.convert(plain_buffer, state), jax.random.key(0), 16).data
    there = np.asarray(plain["mask"])
    assert not there.all()
    before = np.asarray(plain["x"])
    close(batch["total"], np.asarray(plain["reward"]).sum(1) * 2 + 1)
    close(batch["begins"], before[:, 0] * 2 + 1)
    close(batch["reward"], np.where(there, np.asarray(plain["reward"]) * 2 + 1, 0).astype(np.float32))
    mean, std = x.mean(0), x.std(0)
    close(batch["x"]["wide"], (before.sum(1) * 2 + 1 - mean) / std)
    close(batch["x"]["rows"], np.where(there[..., None], (before - mean) / std, 0))

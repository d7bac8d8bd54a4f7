"""`storages.Ragged`: rows of any shape, text and objects, against plain Python lists."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import pickle
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._host import owner
from fbuf._host.arrays import StoreCorrupted
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Ragged, Zstd
from fbuf.testing import assert_inplace
from fbuf.views import Episode, Row, Sequence, Transition

EXAMPLE = {"obs": np.zeros(0, np.float32), "text": "", "info": {"any": None}, "reward": 0.0}
DTYPES = [
    *map(np.dtype, ("?", "i1", "<u8", ">i4", "f2", "f8", "c16", "M8[s]", "<U3", "S2")),
    *map(np.dtype, (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)),
]


class Thing:
    """What only Python knows."""


def store_of(state: Any) -> Any:
    return owner.find(owner.join_id(np.asarray(state.rows.id)))


def random_array(rng: np.random.Generator) -> np.ndarray:
    dtype = DTYPES[rng.integers(len(DTYPES))]
    shape = tuple(rng.integers(0, 4, rng.integers(0, 4)).tolist())
    if dtype.kind in "US":
        return rng.integers(0, 99, shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def random_value(rng: np.random.Generator) -> Any:
    kinds = [
        random_array(rng),
        "é\ud800" * 2,
        b"\0\1",
        None,
        True,
        -(2**200),
        1.5,
        2j,
        Thing(),
        [1, "a"],
        (),
        np.int8(3),
    ]
    return kinds[rng.integers(len(kinds))]


def random_row(rng: np.random.Generator, number: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "obs": rng.normal(size=rng.integers(0, 9)).astype(np.float32),
        "text": "x" * int(rng.integers(0, 5)) + str(number),
        "info": {"any": random_value(rng)},
        "reward": float(number),
    }
    for name in ("obs", "text", "info"):
        if rng.random() < 0.2:
            del row[name]
    return row


def same(one: Any, two: Any) -> bool:
    if isinstance(two, np.ndarray) and isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if isinstance(two, dict):
        return isinstance(one, dict) and one.keys() == two.keys() and all(same(one[k], two[k]) for k in two)
    if isinstance(two, Thing):
        return one is two
    return bool(one == two) and (isinstance(two, (float, np.generic)) or type(one) is type(two))


# ------------------------------------------------------------------------------------------------ what users see


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_example_of_lazy_stack_storage() -> None:
    """torchrl's LazyStackStorage, with `stack_dim=-1`."""
    torch = pytest.importorskip("torch")
    example = {"a": torch.zeros(0), "b": torch.zeros(4), "c": ""}
    replay = fbuf.Replay(fbuf.Buffer(capacity=1000, storage=Ragged(keys=("a",))), example)
    data0 = {"a": torch.randn(10), "b": torch.rand(4), "c": "a string!"}
    data1 = {"a": torch.randn(11), "b": torch.rand(4), "c": "another string!"}
    replay.add(data0)
    replay.add(data1)
    sample = replay.sample(10, to="torch")
    assert sample.data["b"].shape == (10, 4)
    assert set(sample.lazy["c"]) == {"a string!", "another string!"}
    assert sorted({x.shape for x in sample.lazy["a"]}) == [(10,), (11,)]
    with pytest.raises(ValueError, match=r"2 shapes \(float32\[1[01]\]: rows"):
        sample.lazy.stack("a", axis=-1)
    by_text = {"a string!": data0, "another string!": data1}
    for text, a, b in zip(sample.lazy["c"], sample.lazy["a"], sample.data["b"], strict=True):
        assert torch.equal(torch.from_numpy(a), by_text[text]["a"])
        assert torch.equal(b, by_text[text]["b"])
    for layout in (None, torch.jagged, torch.strided):
        nested = sample.lazy.nested("a", layout)
        assert [len(x) for x in nested.unbind()] == [len(x) for x in sample.lazy["a"]]
    alike = replay.get(jnp.zeros(3, jnp.int32))
    assert alike.lazy.stack("a", axis=-1).shape == (10, 3)
    assert np.array_equal(alike.lazy.stack("a")[0], data0["a"].numpy())


def test_leaves_in_all_forms() -> None:
    buffer = fbuf.Buffer(capacity=10, storage=Ragged())
    state = buffer.init(EXAMPLE)
    rows = [
        {"obs": np.arange(3, dtype=np.float32), "text": "a", "info": {"any": [1]}, "reward": 1.0},
        {"obs": np.ones(4, np.float32), "reward": 2.0},
    ]
    state = buffer.extend(state, rows)
    got = buffer.last(state, 3)
    lazy = got.lazy
    assert (lazy.names, lazy.shape, "obs" in lazy, list(lazy)) == (
        ("info/any", "obs", "text"),
        (3,),
        True,
        list(lazy.names),
    )
    assert lazy.present.tolist() == got.mask.tolist() == [False, True, True]
    assert lazy.missing == {"info/any": [2], "text": [2]}
    assert lazy["obs"][0] is None and [len(x) for x in lazy["obs"][1:]] == [3, 4]
    with pytest.raises(KeyError, match=r"1 of 3 rows lack leaf 'text' \(2\).*get\('text', default\)"):
        lazy["text"]
    assert lazy.get("text", "?") == [None, "a", "?"]
    assert lazy.get(("info", "any")) == [None, [1], None]
    objects = lazy.objects("obs")
    assert objects.dtype == object and objects.shape == (3,) and objects[1].shape == (3,)
    out = lazy.rows()
    assert out[0] is None and same(out[1], rows[0]) and same(out[2], rows[1])
    with pytest.raises(ValueError, match=r"1 places of this batch have no row \(0\)"):
        lazy.stack("obs")
    with pytest.raises(KeyError, match="no ragged leaf 'reward'.*batch.data has it"):
        lazy["reward"]
    text = buffer.get(state, jnp.zeros(2, jnp.int32)).lazy
    with pytest.raises(ValueError, match="leaf 'text' of row 0 is str; expected a number"):
        text.stack("text")
    assert text.stack("obs", -1).shape == (3, 2)
    copies = text["obs"]
    copies[0][:] = 7
    assert (text["obs"][0] == np.arange(3)).all()


def test_rows_may_be_given_in_any_form() -> None:
    torch = pytest.importorskip("torch")
    buffer = fbuf.Buffer(capacity=12, lanes=2, storage=Ragged(maximum={"obs": 3}))
    state = buffer.init({"obs": jnp.zeros(0), "x": np.float32(0), "at": {"any": None}})
    one = {"obs": jnp.ones(2), "x": jnp.float32(1), "at": {"any": {"a": {"b": 1}}}}
    two = {"obs": torch.ones(3), "x": 2, "at": {"any": (1, 2)}}
    state = buffer.add(state, [one, two])
    state = buffer.add(state, {"x": np.array([3, 4], np.float32), "at": {"any": ["c", "d"]}})
    state = buffer.add(state, {"x": [5, 6], "obs": np.ones((2, 3), np.float32), "obs_length": np.array([[0], [-1]])})
    state = buffer.extend(state, ((one, two),))
    state = buffer.extend(state, [])
    got = buffer.last(state, 4)
    assert got.data["x"].tolist() == [[1, 2], [3, 4], [5, 6], [1, 2]]
    assert got.data["obs_length"][..., 0].tolist() == [[2, 3], [-1, -1], [0, -1], [2, 3]]
    assert got.lazy.get("at/any", "?") == [
        [one["at"]["any"], (1, 2)],
        ["c", "d"],
        ["?", "?"],
        [one["at"]["any"], (1, 2)],
    ]
    assert got.lazy.missing == {"at/any": [(2, 0), (2, 1)], "obs": [(1, 0), (1, 1), (2, 1)]}
    assert buffer.get(state, jnp.array([[0]])).lazy.stack("obs", -1).shape == (2, 1, 1)
    alone = fbuf.Buffer(capacity=3, storage=Ragged(maximum={"obs": 3}))
    state = alone.init({"obs": np.zeros(0, np.float32)})
    state = alone.add(state, {"obs": np.ones(3, np.float32), "obs_length": np.array([1])})
    assert alone.rows(state).lazy["obs"][0].tolist() == [1]


def test_a_batch_in_torch_still_reads() -> None:
    torch = pytest.importorskip("torch")
    from fbuf.torch import to_torch

    buffer = fbuf.Buffer(capacity=4, storage=Ragged())
    state = buffer.extend(buffer.init({"text": "", "x": 0.0}), [{"text": "a", "x": 1.0}])
    batch = to_torch(buffer.peek(state, jax.random.key(0), 2))
    del state
    gc.collect()
    assert isinstance(batch.data["x"], torch.Tensor) and batch.lazy["text"] == ["a", "a"]
    assert batch.lazy.rows() == [{"text": "a", "x": np.float32(1)}] * 2
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(batch.ragged)
    copied = copy.deepcopy(batch)
    del batch
    gc.collect()
    assert copied.lazy["text"] == ["a", "a"]


def test_keys_drawn_by_vmap_read_their_rows() -> None:
    buffer = fbuf.Buffer(capacity=4, storage=Ragged())
    state = buffer.extend(buffer.init({"text": "", "x": 0.0}), [{"text": str(i), "x": float(i)} for i in range(4)])
    batch = jax.vmap(lambda key: buffer.peek(state, key, 3))(jax.random.split(jax.random.key(0), 2))
    assert batch.lazy["text"] == [[str(int(x)) for x in xs] for xs in batch.data["x"]]


def test_readers_and_writers_in_threads() -> None:
    buffer = fbuf.Buffer(capacity=64, storage=Ragged())
    state = buffer.init({"a": b""})
    store, wrong = store_of(state), list[str]()

    def write() -> None:
        for i in range(150):
            store.put([[bytes([i % 250]) * (40 * i) for _ in range(4)]], 4, None)

    def read() -> None:
        for _ in range(300):
            newest = store.stats()["rows_accepted"]
            tickets = np.arange(max(newest - 30, 0), newest, dtype=np.uint64) + np.uint64(1)
            found, there = store.values(0, tickets)
            for ticket, value, ok in zip(tickets.tolist(), found, there, strict=True):
                i = (ticket - 1) // 4 % 150
                if ok and value != bytes([i % 250]) * (40 * i):
                    wrong.append(f"{ticket}")

    threads = [threading.Thread(target=write)] + [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and store.stats()["rows_accepted"] == 600


def test_windows_come_as_rows_of_their_own() -> None:
    storage = Ragged(keys=("obs",))
    example = {"obs": np.zeros(0, np.int32), "text": "", "terminated": False, "truncated": False}
    for view, lead in ((Sequence(3), (5, 3)), (Sequence(3, boundary="mask"), (5, 3)), (Episode(4), (5, 4))):
        buffer = fbuf.Buffer(capacity=24, lanes=2, storage=storage, view=view)
        rows = [
            [
                {"obs": np.arange(t, dtype=np.int32), "text": f"{e}.{t}", "terminated": t % 4 == 3, "truncated": False}
                for e in range(2)
            ]
            for t in range(8)
        ]
        state = buffer.extend(buffer.init(example), rows)
        state, batch = buffer.sample(state, jax.random.key(0), 5)
        assert batch.lazy.shape == lead
        there = np.asarray(batch.data["mask"])
        assert (batch.lazy.present == there).all()
        for text, obs, mask, first in zip(
            batch.lazy["text"], batch.lazy["obs"], there, batch.data["is_first"], strict=True
        ):
            steps = [int(t.split(".")[1]) for t in text if t is not None]
            assert steps == list(range(steps[0], steps[0] + mask.sum()))
            assert [len(o) for o in obs if o is not None] == steps
            assert all(steps[i] % 4 == 0 for i in np.flatnonzero(first[mask]))
        assert "text" not in batch.data and "_ticket" not in batch.data
    transition = fbuf.Buffer(capacity=9, storage=Ragged(), view=Transition(observation="x"))
    state = transition.init({"x": 0, "text": "", "action": 0, "reward": 0.0, "terminated": False, "truncated": False})
    row = {"action": 0, "reward": 1.0, "terminated": False, "truncated": False}
    state = transition.extend(state, [{"x": i, "text": str(i), **row} for i in range(5)])
    state, batch = transition.sample(state, jax.random.key(0), 6)
    assert batch.lazy["text"] == [str(int(x)) for x in batch.data["obs"]]
    assert (batch.data["next_obs"] == batch.data["obs"] + 1).all()


# -------------------------------------------------------------------------------------------------- the oracle


class Lanes:
    """Plain Python: the newest rows of each lane."""

    def __init__(self, lanes: int, length: int):
        self.rows: list[list[Any]] = [[] for _ in range(lanes)]
        self.length = length

    def extend(self, rows: list[list[Any]], keep: Any) -> None:
        for step, several in enumerate(rows):
            for lane, row in enumerate(several):
                if keep is None or keep[step][lane]:
                    self.rows[lane] = [*self.rows[lane], row][-self.length :]


@given(
    seed=st.integers(0, 2**32 - 1),
    lanes=st.sampled_from([None, 1, 3]),
    codec=st.sampled_from([None, Zstd(3)]),
    sizes=st.lists(st.sampled_from([0, 1, 2, 5, 9]), min_size=1, max_size=6),
    columns=st.booleans(),
)
def test_rows_are_those_of_a_plain_list(seed: int, lanes: int | None, codec: Any, sizes: Any, columns: bool) -> None:
    rng = np.random.default_rng(seed)
    number, length = lanes or 1, 4
    buffer = fbuf.Buffer(capacity=length * number, lanes=lanes, storage=Ragged(codec=codec, slack=0))
    state, oracle, count = buffer.init(EXAMPLE), Lanes(number, length), 0
    for size in sizes:
        rows = [[random_row(rng, count + number * i + e) for e in range(number)] for i in range(size)]
        count += size * number
        keep = None if rng.random() < 0.5 else rng.random((size, number)) < 0.6
        mask = None if keep is None else keep if lanes else keep[:, 0]
        if columns:
            rows = [
                [{**r, "text": str(count), "obs": np.ones(2, np.float32), "info": {"any": 1}} for r in s] for s in rows
            ]
        given: Any = rows if lanes else [several[0] for several in rows]
        if columns and size:
            lead = (size, number) if lanes else (size,)
            given = {
                "obs": np.ones((*lead, 2), np.float32),
                "text": [[str(count)] * number] * size if lanes else [str(count)] * size,
                "info": {"any": np.ones(lead, int).astype(object)},
                "reward": np.array([[r["reward"] for r in s] for s in rows], np.float32).reshape(lead),
            }
        state = buffer.extend(state, given, mask=mask)
        oracle.extend(rows, keep)
    got = buffer.rows(state)
    held = got.lazy.rows()
    held = held if lanes else [[row] for row in held]
    for lane, want in enumerate(oracle.rows):
        mine = [row[lane] for row in held if row[lane] is not None]
        assert len(mine) == len(want) and all(same(a, b) for a, b in zip(mine, want, strict=True))
    if any(oracle.rows):
        by_reward = {row["reward"]: row for lane in oracle.rows for row in lane}
        state, batch = buffer.sample(state, jax.random.key(seed), 7)
        for row, reward in zip(batch.lazy.rows(), batch.data["reward"].tolist(), strict=True):
            assert same(row, by_reward[reward])


# --------------------------------------------------------------------------------------------------- inside jit

PADDED = {"obs": np.zeros((0, 0), np.int16), "text": "", "reward": 0.0}
MAXIMUM = {"obs": (3, 4)}
TEXT = {"x": 1.0, "text": "a"}


def padded_rows(rng: np.random.Generator, count: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Columns padded with rubbish, and what lies in them."""
    lengths = np.stack([rng.integers(0, 4, count), rng.integers(0, 5, count)], 1).astype(np.int32)
    obs = rng.integers(1, 99, (count, 3, 4)).astype(np.int16)
    rows = {"obs": obs, "obs_length": lengths, "reward": np.arange(count, dtype=np.float32)}
    return rows, [x[: n[0], : n[1]] for x, n in zip(obs, lengths, strict=True)]


@pytest.mark.parametrize("form", ["eager", "jit", "donated", "scan"])
def test_padded_leaves_in_every_form(form: str) -> None:
    buffer = fbuf.Buffer(capacity=7, storage=Ragged(maximum=MAXIMUM))
    rng = np.random.default_rng(0)
    batches = [padded_rows(rng, 3) for _ in range(5)]
    keys = jax.random.split(jax.random.key(1), 5)

    def step(state: Any, given: Any) -> Any:
        state = buffer.extend(state, given[0])
        return buffer.sample(state, given[1], 6)

    run: Any = {"eager": step, "scan": step}.get(form) or jax.jit(
        step, donate_argnums=(0,) if form == "donated" else ()
    )
    state, out = buffer.init(PADDED), []
    if form == "scan":
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *(rows for rows, _ in batches))
        state, every = jax.jit(lambda state, given: jax.lax.scan(step, state, given))(state, (stacked, keys))
        out = [jax.tree.map(lambda x, i=i: x[i], every) for i in range(5)]
    else:
        for (rows, _), key in zip(batches, keys, strict=True):
            state, batch = run(state, (rows, key))
            out.append(batch)
    held: list[np.ndarray] = []
    for _, values in batches:
        held = [*held, *values][-7:]
    # What the buffer holds at the end, and what each batch showed.
    rows_now = buffer.rows(state)
    assert all(same(a, b) for a, b in zip(rows_now.lazy["obs"], held, strict=True))
    seen: list[np.ndarray] = []
    for (_, values), batch in zip(batches, out, strict=True):
        seen += values
        for obs, length, slot in zip(batch.data["obs"], batch.data["obs_length"], batch.index.slot, strict=True):
            newest = max(i for i in range(len(seen)) if i % 7 == int(slot))
            assert length.tolist() == list(seen[newest].shape)
            want = np.zeros((3, 4), np.int16)
            want[: length[0], : length[1]] = seen[newest]
            assert (np.asarray(obs) == want).all() and obs.dtype == jnp.int16
    last = out[-1]
    assert last.lazy.missing == {"text": list(range(6))}
    assert all(
        same(np.asarray(o)[: n[0], : n[1]], x)
        for o, n, x in zip(last.data["obs"], last.data["obs_length"], last.lazy["obs"], strict=True)
    )


def test_eager_and_jitted_rows_mix() -> None:
    buffer = fbuf.Buffer(capacity=8, storage=Ragged(maximum={"obs": 4}))
    state = buffer.init({"obs": np.zeros(0, np.float32), "text": "", "reward": 0.0})
    state = buffer.extend(state, [{"text": "none", "reward": 0.0}, {"obs": np.ones(3, np.float32), "reward": 1.0}])
    whole = jax.jit(buffer.extend)(state, {"obs": jnp.full((2, 2), 5.0), "reward": jnp.ones(2)})
    lacking = jax.jit(buffer.extend)(whole, {"reward": jnp.ones(1)})
    got = buffer.rows(lacking)
    assert got.data["obs_length"][:5, 0].tolist() == [-1, 3, 2, 2, -1]
    assert got.data["obs"][:5].tolist() == [[0] * 4, [1, 1, 1, 0], [5, 5, 0, 0], [5, 5, 0, 0], [0] * 4]
    assert got.lazy.missing == {"obs": [0, 4], "text": [1, 2, 3, 4]}
    again = buffer.init({"obs": np.zeros(0, np.float32), "text": "", "reward": 0.0})
    again = buffer.extend(again, got.data, mask=got.mask)  # what a batch shows can be added again
    assert [None if x is None else x.tolist() for x in buffer.rows(again).lazy.get("obs")[:5]] == [
        None if x is None else x.tolist() for x in got.lazy.get("obs")[:5]
    ]
    single = jax.jit(buffer.add)(lacking, {"obs": jnp.arange(4.0), "reward": jnp.float32(3)})
    assert buffer.last(single, 1).lazy["obs"][0].tolist() == [0, 1, 2, 3]


def test_a_row_beyond_its_maximum_is_refused_and_nothing_stored() -> None:
    buffer = fbuf.Buffer(capacity=8, storage=Ragged(maximum={"obs": 4}))
    state = buffer.init({"obs": np.zeros(0, np.float32), "reward": 0.0})
    fine = {"obs": np.ones(3, np.float32), "reward": 1.0}
    before = store_of(state).stats()
    with pytest.raises(ValueError, match=r"leaf 'obs' of row 1 has shape \[5\]; expected at most \[4\], its maximum"):
        buffer.extend(state, [fine, {"obs": np.ones(5, np.float32), "reward": 1.0}])
    with pytest.raises(ValueError, match=r"leaf 'obs' has shape \[2, 5\]; expected \[N, <= 4\]"):
        jax.jit(buffer.extend)(state, {"obs": jnp.ones((2, 5)), "reward": jnp.ones(2)})
    wrong = {"obs": jnp.ones((2, 4)), "obs_length": jnp.array([[4], [5]]), "reward": jnp.ones(2)}
    with pytest.raises(Exception, match=r"leaf 'obs' of row 1 has lengths \[5\]; expected at most \[4\]"):
        jax.block_until_ready(jax.jit(buffer.extend)(state, wrong))
    assert store_of(state).stats() == before
    state = buffer.extend(state, [fine])
    assert buffer.rows(state).lazy["obs"][0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("view", [Row(), pytest.param(Sequence(3), marks=pytest.mark.slow)])
def test_a_donated_step_copies_nothing(view: Any) -> None:
    buffer = fbuf.Buffer(capacity=200_000, storage=Ragged(maximum={"obs": 4}), sampler=Prioritized(), view=view)
    ends = {"terminated": False, "truncated": False}
    state = buffer.init({"obs": np.zeros(0, np.float32), "text": "", "x": 0.0, **ends})
    rows = {"obs": jnp.ones((3, 3)), "x": jnp.ones(3), **{name: jnp.zeros(3, bool) for name in ends}}

    def step(state: Any, given: Any) -> Any:
        rows, key = given
        state, one = buffer.sample(state, key, 8)
        state, two = buffer.sample(buffer.extend(state, rows), key, 8)
        return buffer.update_priority(state, one.index, two.weight), (one, two)

    memory = assert_inplace(step, state, (rows, jax.random.key(0)))
    for leaf in jax.tree.leaves(state):
        assert leaf.nbytes < 1024 or leaf.nbytes > memory.bound, f"a copy of {leaf.shape} would go unnoticed"


@pytest.mark.parametrize("sampler", [Uniform(), Prioritized(), Epoch()])
@pytest.mark.parametrize("lanes", [None, 2])
def test_verbs_take_ragged_rows_as_others(sampler: Any, lanes: int | None) -> None:
    """The same batch as `Device` of what is dense, and ragged leaves of the same rows."""
    number = lanes or 1
    ragged = fbuf.Buffer(capacity=6 * number, lanes=lanes, storage=Ragged(), sampler=sampler)
    device = fbuf.Buffer(capacity=6 * number, lanes=lanes, sampler=sampler)
    one, two = ragged.init({"id": 0, "text": ""}), device.init({"id": 0})
    for i in range(5):
        ids = np.arange(4 * i * number, 4 * (i + 1) * number, dtype=np.int32).reshape(4, number)
        ids = ids if lanes else ids[:, 0]
        one = ragged.extend(one, {"id": ids, "text": jax.tree.map(str, ids.tolist())})
        two = device.extend(two, {"id": ids})
        one, batch = ragged.sample(one, jax.random.key(i), 8)
        two, other = device.sample(two, jax.random.key(i), 8)
        assert batch.lazy["text"] == [
            str(int(n)) if m else None for n, m in zip(batch.data["id"], batch.mask, strict=True)
        ]
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(batch), strict=False):
            assert a.dtype == b.dtype and (a == b).all()
        if sampler.prioritized:
            one = ragged.update_priority(one, batch.index, batch.data["id"].astype(jnp.float32))
            two = device.update_priority(two, batch.index, batch.data["id"].astype(jnp.float32))
    assert [x for x in jax.tree.leaves(ragged.rows(one).lazy["text"])] == [
        str(int(n)) for n in device.rows(two).data["id"].reshape(-1)
    ]


# ------------------------------------------------------------------------------------------ old states, old batches


def test_old_states_and_batches_read_their_own_rows_or_say_so() -> None:
    buffer = fbuf.Buffer(capacity=4, storage=Ragged(slack=4))
    state = buffer.init({"text": ""})
    rows = [{"text": str(i)} for i in range(20)]
    old = buffer.extend(state, rows[:4])
    _, batch = buffer.sample(old, jax.random.key(0), 3)
    texts = batch.lazy["text"]
    one, two = buffer.extend(old, rows[4:6]), buffer.extend(old, rows[6:8])  # two futures
    assert buffer.rows(old).lazy["text"] == ["0", "1", "2", "3"]
    assert buffer.rows(one).lazy["text"] == ["2", "3", "4", "5"]
    assert buffer.rows(two).lazy["text"] == ["2", "3", "6", "7"]
    assert batch.lazy["text"] == texts
    buffer.extend(two, rows[8:16])
    with pytest.raises(RuntimeError, match=r"4 of 4 rows have expired \(0, 1, 2, 3\).*Ragged\(slack="):
        buffer.rows(old).lazy["text"]
    with pytest.raises(RuntimeError, match="3 of 3 rows have expired"):
        print(batch.lazy.missing)
    masking = fbuf.Buffer(capacity=4, storage=Ragged(slack=0, on_expired="mask"))
    old = masking.extend(masking.init({"text": ""}), rows[:4])
    masking.extend(old, rows[4:6])
    lazy = masking.rows(old).lazy
    assert lazy["text"] == [None, None, "2", "3"] and lazy.present.tolist() == [False, False, True, True]


def test_padded_reads_of_expired_rows() -> None:
    example = {"obs": np.zeros(0, np.float32), "x": 0.0}
    rows = [{"obs": np.full(2, i, np.float32), "x": 1.0} for i in range(8)]
    for on_expired in ("raise", "mask"):
        buffer = fbuf.Buffer(capacity=4, storage=Ragged(maximum={"obs": 2}, slack=0, on_expired=on_expired))
        old = buffer.extend(buffer.init(example), rows[:4])
        buffer.extend(old, rows[4:6])
        if on_expired == "raise":
            with pytest.raises(Exception, match="2 of 4|4 of 8|rows have expired"):
                jax.block_until_ready(buffer.rows(old))
        else:
            got = buffer.rows(old)
            assert got.mask.tolist() == [False, False, True, True]
            assert got.data["obs"].tolist() == [[0, 0], [0, 0], [2, 2], [3, 3]]
            assert got.lazy.rows()[0] is None


def test_a_batch_keeps_its_store_and_objects_go_with_their_rows() -> None:
    buffer = fbuf.Buffer(capacity=2, storage=Ragged(slack=0))
    state = buffer.init({"x": None})
    thing = Thing()
    alive = weakref.ref(thing)
    state = buffer.add(state, {"x": thing})
    assert buffer.rows(state).lazy["x"][0] is thing
    state, batch = buffer.sample(state, jax.random.key(0), 2)
    stores = len(fbuf.stores())
    kept = state
    del state, kept
    gc.collect()
    assert len(fbuf.stores()) == stores and batch.lazy["x"] == [thing, thing]
    copied = jax.device_get(batch)
    del batch
    gc.collect()
    assert copied.lazy["x"][0] is thing
    del copied
    gc.collect()
    assert len(fbuf.stores()) == stores - 1
    state = buffer.extend(buffer.init({"x": None}), [{"x": thing}, {"x": 1}])
    del thing
    gc.collect()
    assert alive() is not None
    state = buffer.extend(state, [{"x": 2}, {"x": 3}])
    gc.collect()
    assert alive() is None


def test_a_batch_outlives_the_donation_of_its_state() -> None:
    buffer = fbuf.Buffer(capacity=4, storage=Ragged())
    state = buffer.extend(buffer.init({"text": "", "x": 0.0}), [{"text": "a", "x": 1.0}])
    state, batch = buffer.sample(state, jax.random.key(0), 2)
    state = jax.jit(lambda s, k: buffer.sample(s, k, 2)[0], donate_argnums=0)(state, jax.random.key(0))
    assert batch.lazy["text"] == ["a", "a"]
    assert buffer.rows(state).lazy["text"][0] == "a"


# --------------------------------------------------------------------------------------------------------- growth


def grown_cases() -> list[Any]:
    samplers = [Uniform(), Prioritized(), Prioritized(normalize="buffer"), Epoch(), Consume(2), Staleness(4, unit=3)]
    views = [Row(), Transition(observation="id", n_step=2), Sequence(3), Sequence(3, boundary="mask"), Episode(4)]
    cases = [(s, v) for s in samplers for v in views] + [(Uniform(over="episodes"), v) for v in views]
    kit = [Prioritized(largest="held", uniform=0.2, normalize="buffer"), Ranked(uniform=0.2)]
    cases += [(s, v) for s in kit for v in views]
    return [pytest.param(s, v, marks=() if i in (0, 8, 30) else pytest.mark.slow) for i, (s, v) in enumerate(cases)]


def stream(rng: np.random.Generator, count: int, lanes: int) -> list[list[dict[str, Any]]]:
    return [
        [
            {
                "id": int(rng.integers(99)),
                "text": str(rng.integers(999)),
                "action": 0,
                "reward": float(rng.random()),
                "terminated": bool(rng.random() < 0.3),
                "truncated": False,
            }
            for _ in range(lanes)
        ]
        for _ in range(count)
    ]


@pytest.mark.parametrize(("sampler", "view"), grown_cases())
def test_a_grown_buffer_is_one_that_was_larger_from_the_start(sampler: Any, view: Any) -> None:
    ends = ("terminated",)
    small = fbuf.Buffer(capacity=12, lanes=2, storage=Ragged(), sampler=sampler, view=view, episode_end=ends)
    large = fbuf.Buffer(capacity=24, lanes=2, storage=Ragged(), sampler=sampler, view=view, episode_end=ends)
    rng = np.random.default_rng(3)
    first, second = stream(rng, 6, 2), stream(rng, 5, 2)
    example = first[0][0] | {"text": ""}
    one, two = small.init(example), large.init(example)
    for part in (first[:4], first[4:]):
        one, two = small.extend(one, part), large.extend(two, part)
        if sampler.prioritized:
            index = large.last(two, 3).index
            index = fbuf.Index(index.slot.reshape(-1), index.ticket.reshape(-1))
            error = jnp.arange(1.0, 7.0)
            one, two = small.update_priority(one, index, error), large.update_priority(two, index, error)
    if isinstance(sampler, Consume):
        one, two = (b.sample(s, jax.random.key(0), 2)[0] for b, s in ((small, one), (large, two)))
    index = small.last(one, 2).index
    grown, one = small.grow(one)
    assert grown == large
    assert grown.get(one, index).lazy["text"] == [[r["text"] for r in several] for several in first[-2:]]
    for i, part in enumerate((first[:0], second)):
        one, two = grown.extend(one, part), large.extend(two, part)
        named = [
            jax.tree_util.tree_flatten_with_path(s)[0]
            for s in (one.ring, two.ring, one.anchors, two.anchors, one.counters, two.counters)
        ]
        assert all(
            np.array_equal(x, y)
            for a, b in zip(named[::2], named[1::2], strict=True)
            for (_, x), (_, y) in zip(a, b, strict=True)
        )
        if not isinstance(sampler, (Epoch, Uniform)):
            for x, y in zip(jax.tree.leaves(one.sampler), jax.tree.leaves(two.sampler), strict=True):
                assert np.array_equal(x, y)
        one, batch = grown.sample(one, jax.random.key(i), 5)
        two, other = large.sample(two, jax.random.key(i), 5)
        for x, y in zip(jax.tree.leaves(batch)[:-2], jax.tree.leaves(other)[:-2], strict=True):
            assert np.array_equal(x, y)
        assert batch.lazy.get("text") == other.lazy.get("text")
    assert grown.rows(one).lazy["text"] == large.rows(two).lazy["text"]


def test_unlimited_replay() -> None:
    replay = fbuf.Replay(
        fbuf.Buffer(capacity=4, storage=Ragged(), sampler=Prioritized()), {"text": "", "x": 0.0}, unlimited=True
    )
    index = None
    for i in range(0, 21, 3):
        replay.extend([{"text": str(i + j), "x": float(i + j)} for j in range(3)], mask=np.array([True, i != 9, True]))
        index = index or replay.last(1).index
        replay.sample(2)
    replay.extend([{"text": f"+{j}", "x": 0.0} for j in range(70)])
    want = [str(i) for i in range(21) if i != 10] + [f"+{j}" for j in range(70)]
    assert len(replay) == 90 and replay.buffer.capacity == 128
    assert [t for t in replay.rows().lazy["text"] if t is not None] == want
    assert replay.get(index).lazy["text"] == ["2"]
    replay.update_priority(index, np.array([50.0], np.float32))
    replay.grow(capacity=200)
    assert replay.sample(64).lazy["text"].count("2") > 2
    replay.clear()
    replay.add({"text": "new", "x": 1})
    assert replay.rows().lazy["text"][0] == "new"


def test_what_cannot_grow_says_so() -> None:
    buffer = fbuf.Buffer(capacity=4, storage=Ragged())
    state = buffer.extend(buffer.init({"text": ""}), [{"text": str(i)} for i in range(5)])
    with pytest.raises(ValueError, match="rows have been overwritten"):
        buffer.grow(state)
    fresh = buffer.init({"text": ""})
    with pytest.raises(ValueError, match="capacity is 4; expected an int > 4"):
        buffer.grow(fresh, capacity=4)
    with pytest.raises(TypeError, match="state is traced"):
        jax.jit(lambda s: buffer.grow(s)[1])(fresh)
    with pytest.raises(TypeError, match="nothing to grow"):
        fbuf.uniform(4).grow(fbuf.uniform(4).init(0.0), capacity=8)
    with pytest.raises(TypeError, match="unlimited is for rows on the host"):
        fbuf.Replay(fbuf.uniform(4), {"x": 0.0}, unlimited=True)


# ------------------------------------------------------------------------------------------------------ saving


def reload(buffer: fbuf.Buffer, state: Any) -> Any:
    spec, structure = buffer.storage.spec(state.rows)
    arrays = buffer.storage.to_arrays(state.rows)
    copied = {n: np.array(a) for n, a in arrays.items()}
    assert all(a.dtype.kind in "biuf" for a in copied.values())
    return buffer.storage.from_arrays(copied, buffer.geometry, spec, structure)


@pytest.mark.parametrize("codec", [None, Zstd(1)])
def test_saved_rows_come_back(codec: Any) -> None:
    storage = Ragged(maximum={"obs": 9}, codec=codec)
    buffer = fbuf.Buffer(capacity=6, lanes=2, storage=storage)
    example = EXAMPLE | {"obs": np.zeros(0, np.float32)}
    rng = np.random.default_rng(0)
    state = buffer.init(example)
    rows = [[random_row(rng, i), random_row(rng, 100 + i)] for i in range(5)]
    for several in rows:
        for row in several:
            if isinstance(row.get("info", {}).get("any"), (Thing, list, tuple)):
                row["info"]["any"] = "replaced"
    state = buffer.extend(state, rows)
    before = buffer.rows(state)
    again = dataclasses.replace(state, rows=reload(buffer, state))
    after = buffer.rows(again)
    assert all(
        same(a, b)
        for x, y in zip(after.lazy.rows(), before.lazy.rows(), strict=True)
        for a, b in zip(x, y, strict=True)
    )
    for name in ("obs", "obs_length", "reward"):
        assert np.array_equal(after.data[name], before.data[name])
    assert same(buffer.rows(buffer.extend(again, rows)).lazy.rows()[-1][0], rows[-1][0])


def test_objects_are_saved_by_encode_and_refused_without() -> None:
    buffer = fbuf.Buffer(capacity=6, storage=Ragged())
    state = buffer.extend(
        buffer.init({"a": "", "b": {"c": None}}), [{"a": "x", "b": {"c": Thing()}}, {"b": {"c": {1}}}]
    )
    with pytest.raises(
        TypeError, match=r"leaf 'b/c' holds Python objects \(Thing, set\) in 2 rows.*encode=..., decode="
    ):
        buffer.storage.to_arrays(state.rows)
    storage = Ragged(encode=lambda x: bytes(sorted(x)), decode=lambda data: set(data))
    buffer = fbuf.Buffer(capacity=6, storage=storage)
    state = buffer.extend(buffer.init({"c": None}), [{"c": {3, 1}}, {"c": "text"}])
    again = reload(buffer, state)
    store = owner.find(owner.join_id(np.asarray(again.id)))
    assert store.values(0, np.array([1, 2], np.uint64))[0] == [{1, 3}, "text"]


def test_arrays_that_do_not_fit_are_refused() -> None:
    buffer = fbuf.Buffer(capacity=6, storage=Ragged(maximum={"obs": 3}))
    state = buffer.extend(buffer.init({"obs": np.zeros(0), "text": ""}), [{"obs": np.ones(2), "text": "a"}])
    spec, structure = buffer.storage.spec(state.rows)
    arrays = buffer.storage.to_arrays(state.rows)
    load = functools.partial(buffer.storage.from_arrays, geometry=buffer.geometry, spec=spec, structure=structure)
    for name in [n for n in arrays if n.startswith("store:")]:
        with pytest.raises(ValueError, match="is missing"):
            load({n: a for n, a in arrays.items() if n != name})
    with pytest.raises(ValueError, match="Load with the buffer that was saved"):
        load(arrays, geometry=buffer.geometry._replace(length=7))
    damaged = np.array(arrays["store:payload"])
    damaged[int(arrays["store:leaf0:address"][0, 0]) + 2] ^= 1
    with pytest.raises(StoreCorrupted, match="leaf 'obs' has another checksum"):
        load(arrays | {"store:payload": damaged})


# ----------------------------------------------------------------------------------------------- faults, memory


def snapshot(buffer: fbuf.Buffer, state: Any) -> Any:
    return buffer.rows(state).lazy.rows(), store_of(state).stats()


def test_a_failing_encode_leaves_the_store_as_it_was() -> None:
    calls = [0, -1]

    def encode(thing: Any) -> bytes:
        calls[0] += 1
        if calls[0] == calls[1]:
            raise OSError("no")
        return b"thing"

    buffer = fbuf.Buffer(capacity=3, storage=Ragged(encode=encode, decode=bytes, slack=0))
    state = buffer.init({"a": None, "b": None, "x": 0.0})
    rows = [{"a": Thing(), "b": Thing(), "x": float(i)} for i in range(4)]
    state = buffer.extend(state, rows)
    before = snapshot(buffer, state)
    for n in range(1, 9):
        calls[:] = [0, n]
        try:
            buffer.extend(state, rows)
        except OSError as error:
            assert any("of row" in note and "nothing was stored" in note for note in error.__notes__)
            assert snapshot(buffer, state) == before
        else:
            assert n > 6  # a buffer of three rows encodes three
    calls[:] = [0, -1]
    state = buffer.extend(state, rows)
    assert buffer.rows(state).lazy["a"] == [b"thing"] * 3


def test_a_full_memory_leaves_the_store_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fbuf.Buffer(capacity=3, storage=Ragged(slack=0))
    state = buffer.extend(buffer.init({"a": b""}), [{"a": bytes(20_000)} for _ in range(3)])
    before = snapshot(buffer, state)
    arena = store_of(state)._arena
    grow, left = arena._grow, [0]

    def failing(least: int, tail: int) -> Any:
        if left[0] == 0:
            raise MemoryError
        left[0] -= 1
        return grow(least, tail)

    monkeypatch.setattr(arena, "_grow", failing)
    for n in range(3):
        left[0] = n
        with pytest.raises(MemoryError):
            buffer.extend(state, [{"a": bytes(30_000)} for _ in range(3)])
        assert buffer.rows(state).lazy.rows() == before[0]
        assert {k: v for k, v in store_of(state).stats().items() if k != "nbytes"} == {
            k: v for k, v in before[1].items() if k != "nbytes"
        }


def test_damaged_bytes_are_never_returned() -> None:
    buffer = fbuf.Buffer(capacity=3, storage=Ragged(maximum={"obs": 4}))
    example = {"obs": np.zeros(0, np.float32), "text": ""}
    state = buffer.extend(buffer.init(example), [{"obs": np.ones(3, np.float32), "text": "a"}])
    rows = buffer.rows(state)
    jax.block_until_ready(rows)
    store = store_of(state)
    shelf = store._shelves[0]
    segment = store._arena.segments[int(shelf.address[0, 0]) >> 24]
    segment.array[(int(shelf.address[0, 0]) & 0xFFFFFF) + int(shelf.size[0, 0]) - 1] ^= 4
    with pytest.raises(StoreCorrupted, match="leaf 'obs' has another checksum"):
        rows.lazy["obs"]
    with pytest.raises(Exception, match="another checksum"):
        jax.block_until_ready(buffer.rows(state))
    assert rows.lazy["text"][0] == "a"
    assert isinstance(store.last_error, StoreCorrupted)


def test_memory_is_flat() -> None:
    buffer = fbuf.Buffer(capacity=64, lanes=2, storage=Ragged())
    state = buffer.init({"a": b"", "b": None})
    rng = np.random.default_rng(0)
    sizes = []
    for i in range(120):
        rows = [[{"a": bytes(int(rng.integers(1, 4000))), "b": Thing()} for _ in range(2)] for _ in range(8)]
        state = buffer.extend(state, rows, mask=rng.random((8, 2)) < (0.9, 0.1))  # a lane that stalls
        if i >= 30:
            sizes.append(store_of(state).nbytes)
    assert max(sizes) < 2 * np.mean(sizes[:20])
    stats = store_of(state).stats()
    assert stats["objects"] <= stats["rows_live"] and len(store_of(state)._shelves[1].objects) == stats["objects"]


# ----------------------------------------------------------------------------------------------------- mistakes


def misuse() -> list[Any]:
    row = {"obs": np.zeros(3, np.float32), "text": "a", "reward": 1.0}
    return [
        (
            "extend",
            [row, row | {"obs": [1.0]}],
            TypeError,
            r"leaf 'obs' of row 1 is list; expected an array of float32",
        ),
        ("extend", [row | {"obs": object()}], TypeError, r"leaf 'obs' of row 0 is object; expected an array"),
        ("extend", [row | {"obs": np.zeros(3)}], TypeError, r"leaf 'obs' of row 0 is float64;.*astype\('float32'\)"),
        ("extend", [row | {"text": 3}], TypeError, r"leaf 'text' of row 0 is int; expected str"),
        ("extend", [row | {"reward": "x"}], TypeError, r"leaf 'reward' of row 0 is str; expected float32\[\].*keys"),
        (
            "extend",
            [row | {"reward": np.zeros(2, np.float32)}],
            ValueError,
            r"'reward' of row 0 has shape \[2\].*not ragged",
        ),
        ("extend", [{"obs": row["obs"]}], ValueError, r"row 0: leaf 'reward' is missing.*Rows may lack ragged leaves"),
        ("extend", [row | {"oops": 1}], ValueError, r"leaf 'oops' is not in this buffer"),
        ("extend", [3], TypeError, r"a row is int; storages.Ragged takes dicts"),
        ("extend", [row | {1: 2}], TypeError, r"a row has the key 1; expected a name"),
        ("extend", "abc", TypeError, r"rows are str; storages.Ragged takes a list of dicts or a dict of columns"),
        (
            "extend",
            {"text": "a", "reward": np.zeros(1, np.float32)},
            TypeError,
            r"leaf 'text' has type str; expected a column",
        ),
        (
            "extend",
            {"text": ["a", "b"], "reward": np.zeros(1, np.float32)},
            ValueError,
            r"'text' has leading axes \[2\]",
        ),
        ("add", [row], TypeError, r"rows are list; storages.Ragged takes a dict"),
    ]


@pytest.mark.parametrize(("verb", "rows", "kind", "words"), misuse())
def test_mistakes_are_named_and_nothing_is_stored(verb: str, rows: Any, kind: Any, words: str) -> None:
    buffer = fbuf.Buffer(capacity=4, storage=Ragged())
    state = buffer.init({"obs": np.zeros(0, np.float32), "text": "", "reward": 0.0})
    with pytest.raises(kind, match=words):
        getattr(buffer, verb)(state, rows)
    assert store_of(state).stats()["rows_accepted"] == 0


def test_mistakes_inside_jit_and_elsewhere() -> None:
    buffer = fbuf.Buffer(capacity=4, storage=Ragged())
    row = {"obs": np.zeros(3, np.float32), "text": "a", "reward": 1.0}
    state = buffer.init(row)
    with pytest.raises(TypeError, match=r"leaf 'obs' \(array\) has no maximum.*Ragged\(maximum="):
        jax.jit(buffer.extend)(state, {"obs": jnp.zeros((1, 3)), "reward": jnp.zeros(1)})
    with pytest.raises(TypeError, match=r"no leaf with a maximum, so they can be added eagerly only"):
        jax.jit(buffer.extend)(state, {"reward": jnp.zeros(1)})
    with pytest.raises(TypeError, match=r"leaf 'text' \(text\) has no maximum"):
        jax.jit(lambda s, x: buffer.extend(s, {"text": ["a"], "reward": x}))(state, jnp.zeros(1))
    with pytest.raises(TypeError, match=r"rows are list; inside jit expected a dict of arrays"):
        jax.jit(lambda s, x: buffer.extend(s, [{"reward": x}]))(state, jnp.zeros(()))
    with pytest.raises(TypeError, match="this batch is traced"):
        jax.jit(lambda s: buffer.sample(s, jax.random.key(0), 2)[1].lazy["text"])(state)
    with pytest.raises(AttributeError, match="keeps arrays only.*Ragged"):
        print(fbuf.uniform(3).peek(fbuf.uniform(3).init(0.0), jax.random.key(0), 1).lazy)
    with pytest.raises(TypeError, match="takes one dict of arrays.*Ragged"):
        fbuf.uniform(3).extend(fbuf.uniform(3).init({"x": 0.0}), [{"x": 1.0}, {"x": 2.0}])
    with pytest.raises(TypeError, match=r"leaf 't' is <U1.*Ragged"):
        fbuf.uniform(3).init({"t": "a"})
    state = buffer.add(state, row)
    index = buffer.last(state, 1).index
    with pytest.raises(TypeError, match="leaf 'text' is ragged, and cannot change"):
        buffer.update_rows(state, index, {"text": ["b"]})
    state = buffer.update_rows(state, index, {"reward": jnp.array([9.0])})
    assert same(buffer.last(state, 1).lazy.rows()[0], row | {"reward": 9.0})
    assert buffer.last(state, 1).data["reward"].tolist() == [9.0]
    for settings_, words in (
        ({"maximum": {"obs": ()}}, "one or more sizes"),
        ({"maximum": 3}, "expected shapes by name"),
        ({"encode": bytes}, "encode is given without decode"),
        ({"codec": Zstd}, "codec is the class"),
        ({"codec": 3}, "codec is 3"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            Ragged(**settings_)
    for settings_, example, words in (
        ({"maximum": {"no": 3}}, row, "maximum names 'no'"),
        ({"keys": ("no",)}, row, "keys names 'no'"),
        ({"maximum": {"text": 3}}, row, "is str, but has a maximum"),
        ({"maximum": {"obs": 2}}, row, r"has shape \[3\]; expected at most \[2\]"),
        ({"maximum": {"obs": 4}}, row | {"obs_length": 0}, "'obs_length', a name storages.Ragged makes itself"),
        ({}, [1.0], "a row is list"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            fbuf.Buffer(capacity=4, storage=Ragged(**settings_)).init(example)
    with pytest.raises(ValueError, match=r"'obs' is ragged; views read arrays.*maximum=\{'obs'"):
        fbuf.Buffer(capacity=4, storage=Ragged(), view=Transition()).init(
            row | {"action": 0, "terminated": False, "truncated": False}
        )
    with pytest.raises(TypeError, match="cannot be traced"):
        jax.jit(buffer.init)({"x": 0.0})


def test_a_value_like_the_other_storages() -> None:
    one, two = Ragged(maximum={"obs": 3}), Ragged(maximum=(("obs", (3,)),))
    assert one == two and hash(one) == hash(two) and "obs" in repr(one)
    plan = fbuf.Buffer(capacity=4, storage=one).plan({"obs": np.zeros(2, np.float32), "text": ""})
    assert plan.host > 0 and "maximum" in plan.host_from
    buffer = fbuf.Buffer(capacity=4, storage=one)
    state = buffer.init({"obs": np.zeros(2, np.float32), "text": ""})
    assert buffer.nbytes(state)["host"] == store_of(state).nbytes
    assert "rows" in repr(fbuf.stores()[-1])
    state = buffer.clear(buffer.add(state, {"text": "x"}))
    assert int(buffer.size(state)) == 0
    assert buffer.peek(state, jax.random.key(0), 2).lazy["text"] == [None, None]


def test_a_batch_can_be_cut_joined_and_scanned() -> None:
    buffer = fbuf.Buffer(10, storage=Ragged())
    state = buffer.init({"text": "", "r": 0.0})
    state = buffer.extend(state, [{"text": str(i), "r": float(i)} for i in range(7)])
    keys = jax.random.split(jax.random.key(0), 3)
    state, batches = jax.lax.scan(lambda s, k: buffer.sample(s, k, 4), state, keys)
    del state
    other = buffer.add(buffer.init({"text": "", "r": 0.0}), {"text": "q", "r": 0.0})  # takes the next store's place
    for cut in (batches, jax.tree.map(lambda x: x[1, ::-1], batches), jax.tree.map(lambda x: x[:, 1:3], batches)):
        texts = np.array(cut.lazy["text"], object).reshape(-1).tolist()
        assert [float(t) for t in texts] == np.asarray(cut.data["r"]).reshape(-1).tolist()
    totals = jax.vmap(lambda batch: batch.data["r"].sum())(batches)
    np.testing.assert_allclose(totals, batches.data["r"].sum(axis=1))
    assert np.asarray(other.ring.size) == 1


def test_growing_an_old_state_leaves_a_larger_future_alone() -> None:
    buffer = fbuf.Buffer(10, storage=Ragged())
    state = buffer.extend(buffer.init({"text": ""}), [{"text": str(i)} for i in range(10)])
    large, future = buffer.grow(state, capacity=200)
    future = large.extend(future, [{"text": str(i)} for i in range(10, 110)])
    buffer.grow(state, capacity=20)
    assert large.rows(future).lazy["text"] == [str(i) for i in range(110)] + [None] * 90


def test_lengths_beyond_the_array_are_refused_inside_jit() -> None:
    buffer = fbuf.Buffer(8, storage=Ragged(maximum={"obs": (4,)}))
    state = buffer.init({"obs": np.zeros(2, np.float32)})
    rows = {"obs": jnp.ones((2, 3)), "obs_length": jnp.asarray([[3], [4]], jnp.int32)}
    with pytest.raises(Exception, match="obs"):
        jax.block_until_ready(jax.jit(buffer.extend)(state, rows))
    fine = jax.jit(buffer.extend)(state, {**rows, "obs_length": jnp.asarray([[3], [2]], jnp.int32)})
    assert [len(x) for x in buffer.last(fine, 2).lazy["obs"]] == [3, 2]


@pytest.mark.parametrize(
    ("use", "error", "part"),
    [
        (lambda b: b.init({}), ValueError, "the example has no leaves"),
        (lambda b: b.add(b.init(TEXT), {"x": 1.0, "text": None}), TypeError, "Leave it out of the row"),
        (lambda b: b.extend(b.init(TEXT), {"x": 1.0, "text": "b"}), ValueError, "Add one row with `add`"),
        (lambda b: b.resume({"x": 1.0}), TypeError, "keeps its rows in memory"),
    ],
    ids=["no leaves", "no text", "one row", "resume"],
)
def test_messages_say_what_to_write_instead(use: Any, error: type[Exception], part: str) -> None:
    with pytest.raises(error, match=part):
        use(fbuf.Buffer(10, storage=fbuf.storages.Ragged()))


def test_more_room_is_not_made_for_rows_that_are_refused() -> None:
    replay = fbuf.Replay(fbuf.Buffer(2, storage=fbuf.storages.Ragged()), TEXT, unlimited=True)
    with pytest.raises(TypeError, match="has no priorities"):
        replay.extend([TEXT] * 5, priority=np.ones(5))
    assert replay.buffer.capacity == 2

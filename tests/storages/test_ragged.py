"""`storages.Ragged`: rows of any shape, text and objects, against plain Python lists."""

import dataclasses
import functools
import gc
import itertools
import os
import signal
import weakref
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf._bridge import lifetime
from fbuf._host.ragged import values
from fbuf._host.ragged.column import INDEX, RaggedLeaf
from fbuf._host.ragged.store import Records
from fbuf._host.ragged.values import MISSING
from fbuf._host.types import StoreCorrupted
from fbuf.samplers import Prioritized
from fbuf.storages import Ragged, Zstd
from fbuf.testing import assert_inplace
from fbuf.views import Episode, Row, Sequence, Transition
from tests.support import combinations, refusals
from tests.support.ownership import store_of
from tests.support.ragged import EXAMPLE, Thing, check_growth, check_history, random_row, same
from tests.support.refusals import raises
from tests.support.tables import checks, one_of
from tests.support.threads import Thread, handled


@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from([(None, None), (3, Zstd(3))]),  # lanes and codec
    sizes=st.lists(st.sampled_from([0, 2, 9]), min_size=1, max_size=6),
    columns=st.booleans(),
)
def test_rows_are_those_of_a_plain_list(seed: int, kind: Any, sizes: Any, columns: bool) -> None:
    check_history(seed, *kind, sizes, columns)


def test_leaves_in_all_forms() -> None:
    buffer = fbuf.Buffer(capacity=10, storage=Ragged())
    state = buffer.init(EXAMPLE)
    rows = [
        {"obs": np.arange(3, dtype=np.float32), "text": "a", "info": {"any": [1]}, "reward": 1.0},
        {"obs": np.ones(4, np.float32), "reward": 2.0},
    ]
    state = buffer.extend(state, rows)
    got = buffer.rows(state, last=3)
    lazy = got.lazy
    assert lazy.names == tuple(lazy) == ("info/any", "obs", "text") and lazy.shape == (3,) and "obs" in lazy
    assert lazy.present.tolist() == got.mask.tolist() == [False, True, True]
    assert lazy.missing == {"info/any": [2], "text": [2]}
    assert lazy["obs"][0] is None and [len(x) for x in lazy["obs"][1:]] == [3, 4]
    pytest.raises(KeyError, lambda: lazy["text"]).match(r"1 of 3 rows lack leaf 'text' \(2\).*get\('text', default\)")
    assert lazy.get("text", "?") == [None, "a", "?"]
    assert lazy.get(("info", "any")) == [None, [1], None]
    objects = lazy.objects("obs")
    assert objects.dtype == object and objects.shape == (3,) and objects[1].shape == (3,)
    out = lazy.rows()
    assert out[0] is None and same(out[1], rows[0]) and same(out[2], rows[1])
    pytest.raises(ValueError, lazy.stack, "obs").match(r"1 places of this batch have no row \(0\)")
    pytest.raises(KeyError, lambda: lazy["reward"]).match("no ragged leaf 'reward'.*batch.data has it")
    text = buffer.get(state, jnp.zeros(2, jnp.int32)).lazy
    pytest.raises(ValueError, text.stack, "text").match(r"leaf 'text' of row 0 is str; expected a number\.")
    assert text.stack("obs", -1).shape == (3, 2)
    copies = text["obs"]
    copies[0][:] = 7
    assert (text["obs"][0] == np.arange(3)).all()


def test_rows_beyond_their_maximum_are_refused_and_nothing_is_stored() -> None:
    buffer = fbuf.Buffer(capacity=8, storage=Ragged(maximum={"obs": 4}))
    state = buffer.init({"obs": np.zeros(0, np.float32), "reward": 0.0})
    fine = {"obs": np.ones(3, np.float32), "reward": 1.0}
    before, extend = store_of(state).stats(), jax.jit(buffer.extend)
    with pytest.raises(ValueError, match=r"leaf 'obs' of row 1 has shape \[5\]; expected at most \[4\]"):
        buffer.extend(state, [fine, {"obs": np.ones(5, np.float32), "reward": 1.0}])
    with pytest.raises(ValueError, match=r"leaf 'obs' has shape \[2, 5\]; expected \[N, <= 4\]"):
        extend(state, {"obs": jnp.ones((2, 5)), "reward": jnp.ones(2)})
    for width, lengths, message in ((4, [[4], [5]], r"leaf 'obs' of row 1 has lengths \[5\]"), (3, [[3], [4]], "obs")):
        wrong = {"obs": jnp.ones((2, width)), "obs_length": np.array(lengths), "reward": jnp.ones(2)}
        raises(Exception, message, lambda: jax.block_until_ready(extend(state, wrong)))  # noqa: B023
    assert store_of(state).stats() == before
    state = buffer.extend(state, [fine])
    assert buffer.rows(state).lazy["obs"][0].tolist() == [1, 1, 1]


def test_old_states_and_batches_read_their_own_rows_or_raise() -> None:
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
    pytest.raises(RuntimeError, lambda: print(batch.lazy.missing)).match("3 of 3 rows have expired")
    masking = fbuf.Buffer(capacity=4, storage=Ragged(slack=0, on_expired="mask"))
    old = masking.extend(masking.init({"text": ""}), rows[:4])
    masking.extend(old, rows[4:6])
    lazy = masking.rows(old).lazy
    assert lazy["text"] == [None, None, "2", "3"] and lazy.present.tolist() == [False, False, True, True]


def test_an_interrupt_waits_until_rows_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fbuf.Buffer(capacity=4, storage=Ragged(slack=2))
    old = buffer.extend(buffer.init({"text": ""}), [{"text": str(n)} for n in range(4)])
    state = buffer.extend(old, [{"text": "4"}, {"text": "5"}])
    commit = Records._commit

    monkeypatch.setattr(Records, "_commit", lambda *args: (commit(*args), os.kill(os.getpid(), signal.SIGINT)))
    with handled(signal.SIGINT, signal.default_int_handler):
        raises(KeyboardInterrupt, None, buffer.extend, state, [{"text": "6"}, {"text": "7"}])
    monkeypatch.undo()
    assert buffer.rows(state).lazy["text"] == ["2", "3", "4", "5"]
    raises(RuntimeError, "expired", lambda: buffer.rows(old).lazy["text"])  # not those of other rows


def test_a_grown_buffer_does_what_a_larger_one_does() -> None:
    check_growth(fbuf.samplers.Prioritized(normalize="buffer"), fbuf.views.Row())


def test_growing_an_old_state_does_not_change_its_future() -> None:
    buffer = fbuf.Buffer(10, storage=Ragged())
    state = buffer.extend(buffer.init({"text": ""}), [{"text": str(i)} for i in range(10)])
    large, future = buffer.grow(state, capacity=200)
    future = large.extend(future, [{"text": str(i)} for i in range(10, 110)])
    buffer.grow(state, capacity=20)
    assert large.rows(future).lazy["text"] == [str(i) for i in range(110)] + [None] * 90


TEXT = {"x": 1.0, "text": "a"}


def test_objects_are_found_after_a_ring_that_turned_is_deeper() -> None:
    records = Records((RaggedLeaf("any", "any"),), lanes=1, length=3, slack=0)
    things = [Thing() for _ in range(5)]
    tickets = np.concatenate([records.put([[thing]], 1, None)[:, 0] for thing in things])
    records.with_capacity(7, 0)
    assert records.values(0, tickets[2:])[0] == things[2:]


def test_growth_that_is_impossible_is_refused() -> None:
    buffer = fbuf.Buffer(capacity=4, storage=Ragged())
    state = buffer.extend(buffer.init({"text": ""}), [{"text": str(i)} for i in range(5)])
    pytest.raises(ValueError, buffer.grow, state).match("rows have been overwritten")
    fresh = buffer.init({"text": ""})
    pytest.raises(ValueError, buffer.grow, fresh, capacity=4).match("capacity is 4; expected an int > 4")
    pytest.raises(TypeError, lambda: jax.jit(lambda s: buffer.grow(s)[1])(fresh)).match("state is traced")
    raises(TypeError, "cannot grow", lambda: fbuf.Buffer(4).grow(fbuf.Buffer(4).init(0.0), capacity=8))
    with pytest.raises(TypeError, match="unlimited needs storages.Ragged"):
        fbuf.Replay(fbuf.Buffer(4), {"x": 0.0}, unlimited=True)
    replay = fbuf.Replay(fbuf.Buffer(2, storage=Ragged()), TEXT, unlimited=True)
    pytest.raises(TypeError, lambda: replay.extend([TEXT] * 5, priority=np.ones(5))).match("takes no priority")
    assert replay.buffer.capacity == 2


def reload(buffer: fbuf.Buffer, state: Any) -> Any:
    spec, structure = buffer.storage.spec(state.rows)
    arrays = buffer.storage.to_arrays(state.rows)
    copied = {n: np.array(a) for n, a in arrays.items()}
    assert all(a.dtype.kind in "biuf" for a in copied.values())
    return buffer.storage.from_arrays(copied, buffer.geometry, spec, structure)


def test_saved_rows_are_loaded() -> None:
    buffer = fbuf.Buffer(capacity=6, lanes=2, storage=Ragged(maximum={"obs": 9}, codec=Zstd(1)))
    rng = np.random.default_rng(0)
    state = buffer.init(EXAMPLE)
    rows = [[random_row(rng, i), random_row(rng, 100 + i)] for i in range(5)]
    for several in rows:
        for row in several:
            if isinstance(row.get("info", {}).get("any"), (Thing, list, tuple)):
                row["info"]["any"] = "replaced"
    state = buffer.extend(state, rows)
    before = buffer.rows(state)
    again = dataclasses.replace(state, rows=reload(buffer, state))
    after = buffer.rows(again)
    for step, before_step in zip(after.lazy.rows(), before.lazy.rows(), strict=True):
        assert all(map(same, step, before_step))
    for name in ("obs", "obs_length", "reward"):
        assert np.array_equal(after.data[name], before.data[name])
    assert same(buffer.rows(buffer.extend(again, rows)).lazy.rows()[-1][0], rows[-1][0])


def test_ints_of_any_size_return() -> None:
    for power in (0, 7, 8, 15, 16, 63, 64, 200):
        for number in (2**power - 1, 2**power, -(2**power), -(2**power) - 1):
            data = values.encode(number, None)
            assert data is not None and values.decode(memoryview(data), None) == number


def test_objects_are_saved_by_encode_and_refused_without() -> None:
    buffer = fbuf.Buffer(capacity=6, storage=Ragged())
    rows: Any = [{"a": "x", "b": {"c": Thing()}}, {"b": {"c": {1}}}]
    state = buffer.extend(buffer.init({"a": "", "b": {"c": None}}), rows)
    with pytest.raises(TypeError, match=r"'b/c' holds Python objects \(Thing, set\) in 2 rows.*encode=..., decode="):
        buffer.storage.to_arrays(state.rows)
    storage = Ragged(encode=lambda x: bytes(sorted(x)), decode=lambda data: set(data))
    buffer = fbuf.Buffer(capacity=6, storage=storage)
    state = buffer.extend(buffer.init({"c": None}), [{"c": {3, 1}}, {"c": "text"}])
    again = reload(buffer, state)
    store = lifetime.find(lifetime.join_id(np.asarray(again.id)))
    assert store.values(0, np.array([1, 2], np.uint64))[0] == [{1, 3}, "text"]


def test_arrays_that_do_not_fit_are_refused() -> None:
    buffer = fbuf.Buffer(capacity=6, storage=Ragged(maximum={"obs": 3}))
    state = buffer.extend(buffer.init({"obs": np.zeros(0), "text": ""}), [{"obs": np.ones(2), "text": "a"}])
    spec, structure = buffer.storage.spec(state.rows)
    arrays = buffer.storage.to_arrays(state.rows)
    load = functools.partial(buffer.storage.from_arrays, geometry=buffer.geometry, spec=spec, structure=structure)
    for name in [n for n in arrays if n.startswith("store:")]:
        raises(ValueError, "is missing", load, {n: a for n, a in arrays.items() if n != name})
    said = r"the records have format, lanes, length, slack \[1, 1, 6, 16\]; expected \[1, 1, 7, 16\]\."
    pytest.raises(ValueError, load, arrays, geometry=buffer.geometry._replace(length=7)).match(said)
    damaged = np.array(arrays["store:payload"])
    damaged[int(arrays["store:leaf0:address"][0, 0]) + 2] ^= 1
    with pytest.raises(StoreCorrupted, match=r"a row's leaf 'obs' is damaged\. Load the last checkpoint\."):
        load(arrays | {"store:payload": damaged})


def test_strings_of_rows_that_were_not_saved_are_ignored() -> None:
    records = Records((RaggedLeaf("text", "text"),), lanes=2, length=3, slack=0)
    records.put([["a", "b", "c", MISSING]], 2, np.array([[True, True], [True, False]]))
    arrays = {name: np.array(array) for name, array in records.to_arrays().items()}
    for name in INDEX:
        arrays[f"leaf0:{name}"][1, 1] = arrays[f"leaf0:{name}"][0, 0]
    again = Records.from_arrays(arrays, lanes=2, length=3, slack=0)
    assert again.stats()["payload_bytes"] == records.stats()["payload_bytes"]


def snapshot(buffer: fbuf.Buffer, state: Any) -> Any:
    return buffer.rows(state).lazy.rows(), store_of(state).stats()


def test_a_failing_encode_leaves_the_store_as_it_was() -> None:
    encode = mock.Mock(return_value=b"thing")
    buffer = fbuf.Buffer(capacity=3, storage=Ragged(encode=encode, decode=bytes, slack=0))
    state = buffer.init({"a": None, "b": None, "x": 0.0})
    rows = [{"a": Thing(), "b": Thing(), "x": float(i)} for i in range(4)]
    state = buffer.extend(state, rows)
    before = snapshot(buffer, state)
    for n in range(1, 9):
        encode.side_effect = [*[mock.DEFAULT] * (n - 1), OSError("no"), *[mock.DEFAULT] * 9]
        try:
            buffer.extend(state, rows)
        except OSError as error:
            assert any("of row" in note and "nothing was stored" in note for note in error.__notes__)
            assert snapshot(buffer, state) == before
        else:
            break
    assert n == 7  # a buffer of three rows encodes three
    encode.side_effect = None
    state = buffer.extend(state, rows)
    assert buffer.rows(state).lazy["a"] == [b"thing"] * 3


def test_a_full_memory_leaves_the_store_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = fbuf.Buffer(capacity=3, storage=Ragged(slack=0))
    state = buffer.extend(buffer.init({"a": b""}), [{"a": bytes(20_000)} for _ in range(3)])
    before = snapshot(buffer, state)
    arena = store_of(state)._arena
    grow = mock.Mock(wraps=arena._grow)
    monkeypatch.setattr(arena, "_grow", grow)
    for n in range(3):
        grow.side_effect = [*[mock.DEFAULT] * n, MemoryError]
        raises(MemoryError, None, lambda: buffer.extend(state, [{"a": bytes(30_000)} for _ in range(3)]))
        assert buffer.rows(state).lazy.rows() == before[0]
        assert store_of(state).stats() | {"nbytes": 0} == before[1] | {"nbytes": 0}


def test_damaged_bytes_are_never_returned() -> None:
    buffer = fbuf.Buffer(capacity=3, storage=Ragged(maximum={"obs": 4}))
    example = {"obs": np.zeros(0, np.float32), "text": ""}
    state = buffer.extend(buffer.init(example), [{"obs": np.ones(3, np.float32), "text": "a"}])
    rows = buffer.rows(state)
    jax.block_until_ready(rows)
    store = store_of(state)
    column = store._columns[0]
    segment = store._arena.segments[int(column.address[0, 0]) >> 24]
    segment.array[(int(column.address[0, 0]) & 0xFFFFFF) + int(column.size[0, 0]) - 1] ^= 4
    pytest.raises(StoreCorrupted, lambda: rows.lazy["obs"]).match("leaf 'obs' is damaged. Load the last checkpoint")
    raises(Exception, "'obs' is damaged", lambda: jax.block_until_ready(buffer.rows(state)))
    assert rows.lazy["text"][0] == "a"
    assert isinstance(store.last_error, StoreCorrupted)


ROW = {"obs": np.zeros(3, np.float32), "text": "a", "reward": 1.0}
ONE = np.zeros(1, np.float32)
MISTAKES = """
extend([ROW, ROW | {"obs": [1.0]}]) => TypeError leaf 'obs' of row 1 is list; expected an array of float32
extend([ROW | {"obs": object()}]) => TypeError leaf 'obs' of row 0 is object; expected an array
extend([ROW | {"obs": np.zeros(3)}]) => TypeError leaf 'obs' of row 0 is float64; | astype(jnp.float32)
extend([ROW | {"text": 3}]) => TypeError leaf 'text' of row 0 is int; expected str
extend([ROW | {"reward": "x"}]) => TypeError leaf 'reward' of row 0 is str; expected float32[] | keys
extend([ROW | {"reward": np.zeros(2, np.float32)}]) => ValueError 'reward' of row 0 has shape [2] | keys=('reward',)
extend([{"obs": ROW["obs"]}]) => ValueError row 0: leaf 'reward' is missing | Only ragged leaves
extend([ROW | {"oops": 1}]) => ValueError leaf 'oops' is not in this buffer
extend([ROW | {"text": None}]) => TypeError Leave it out of the row
extend([3]) => TypeError a row is int; expected a dict. Name the leaf: {'x': row}.
extend([ROW | {1: 2}]) => TypeError a row has the key 1; expected a name
fbuf.Replay(buffer, ROW).add(ROW | {1: 2}) => TypeError a row has the key 1; expected a name
fbuf.Replay(fbuf.Buffer(8), {"t": 0}).add({"t": 1, 3: 1}) => TypeError a dict has keys of several types; expected strings
extend("abc") => TypeError rows are str; storages.Ragged takes a list of dicts or a dict of columns
extend({"text": "a", "reward": ONE}) => TypeError leaf 'text' has type str; expected an array
extend({"text": ["a", "b"], "reward": ONE}) => ValueError 'text' has leading axes [2]
extend({"text": "b", "reward": 1.0}) => ValueError Add one row with `add`
buffer.add(state, [ROW]) => TypeError rows are list; storages.Ragged takes a dict
buffer.init({}) => ValueError the example has no leaves
buffer.resume({"x": 1.0}) => TypeError keeps rows in memory
"""
TRACED = """
jit(extend)({"obs": jnp.zeros((1, 3)), "reward": jnp.zeros(1)}) => TypeError
    leaf 'obs' (array) has no maximum | Ragged(maximum=
jit(extend)({"reward": jnp.zeros(1)}) => TypeError no leaf with a maximum, so they can be added eagerly only
jit(lambda x: extend({"text": ["a"], "reward": x}))(jnp.zeros(1)) => TypeError leaf 'text' (text) has no maximum
jit(lambda x: extend([{"reward": x}]))(jnp.zeros(())) => TypeError
    rows are list; expected a dict of arrays [N, ...] inside jit.
jit(lambda s: buffer.sample(s, KEY, 2)[1].lazy["text"])(state) => TypeError this batch is traced
jit(buffer.init)({"x": 0.0}) => TypeError cannot be traced
fbuf.Buffer(3).peek(fbuf.Buffer(3).init(0.0), KEY, 1).lazy => AttributeError all rows are arrays | Ragged
fbuf.Buffer(3).extend(fbuf.Buffer(3).init({"x": 0.0}), [{"x": 1.0}, {"x": 2.0}]) => TypeError
    takes one dict of arrays | Ragged
fbuf.Buffer(3).init({"t": "a"}) => TypeError leaf 't' is <U1 | Ragged
Ragged(maximum={"obs": ()}) => ValueError one or more sizes
Ragged(maximum=3) => TypeError expected shapes by name
Ragged(encode=bytes) => TypeError encode is given without decode
Ragged(codec=Zstd) => TypeError codec is the class
Ragged(codec=3) => TypeError codec is 3
init(ROW, maximum={"no": 3}) => ValueError maximum names 'no'
init(ROW, keys=("no",)) => ValueError keys names 'no'
init(ROW, maximum={"text": 3}) => TypeError leaf 'text' is str, and maximum names it. Leave it out of maximum.
init(ROW, maximum={"obs": 2}) => ValueError has shape [3]; expected at most [2]
init(ROW | {"obs_length": 0}, maximum={"obs": 4}) => ValueError 'obs_length', a name reserved by storages.Ragged
init([1.0]) => TypeError a row is list
"""
KEY = jax.random.key(0)


def init(example: Any, **settings: Any) -> Any:
    return fbuf.Buffer(capacity=4, storage=Ragged(**settings)).init(example)


def test_mistakes_are_named_and_nothing_is_stored() -> None:
    buffer = fbuf.Buffer(capacity=4, storage=Ragged())
    state = buffer.init(ROW)
    names = {"buffer": buffer, "state": state, "jit": jax.jit, "extend": functools.partial(buffer.extend, state)}
    for table in (MISTAKES, TRACED):
        refusals.check_all(table, globals() | names)
    assert store_of(state).stats()["rows_accepted"] == 0


def test_ragged_leaves_do_not_change_and_are_not_read_by_views() -> None:
    buffer = fbuf.Buffer(capacity=4, storage=Ragged())
    state = buffer.add(buffer.init(ROW), ROW)
    index = buffer.rows(state, last=1).index
    raises(TypeError, "leaf 'text' is ragged, and cannot change", buffer.update_rows, state, index, {"text": ["b"]})
    state = buffer.update_rows(state, index, {"reward": jnp.array([9.0])})
    assert same(buffer.rows(state, last=1).lazy.rows()[0], ROW | {"reward": 9.0})
    assert buffer.rows(state, last=1).data["reward"].tolist() == [9.0]
    with pytest.raises(ValueError, match=r"'obs' is ragged; views read arrays.*maximum=\{'obs'"):
        fbuf.Buffer(capacity=4, storage=Ragged(), view=Transition(autoreset="same_step")).init(
            ROW | {"action": 0, "terminated": False, "truncated": False}
        )


def test_memory_does_not_grow():
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
    assert stats["objects"] <= stats["rows_live"] and len(store_of(state)._columns[1].objects) == stats["objects"]


def test_eager_and_jitted_rows_mix():
    buffer = fbuf.Buffer(capacity=8, storage=Ragged(maximum={"obs": 4}))
    state = buffer.init({"obs": np.zeros(0, np.float32), "text": "", "reward": 0.0})
    state = buffer.extend(state, [{"text": "none", "reward": 0.0}, {"obs": np.ones(3, np.float32), "reward": 1.0}])
    whole = jax.jit(buffer.extend)(state, {"obs": jnp.full((2, 2), 5.0), "reward": jnp.ones(2)})
    lacking = jax.jit(buffer.extend)(whole, {"reward": jnp.ones(1)})
    got = buffer.rows(lacking)
    assert got.data["obs_length"][:5, 0].tolist() == [-1, 3, 2, 2, -1]
    assert got.data["obs"][:5].tolist() == [[0] * 4, [1, 1, 1, 0], [5, 5, 0, 0], [5, 5, 0, 0], [0] * 4]
    assert got.lazy.missing == {"obs": [0, 4], "text": [1, 2, 3, 4]}
    lazy = buffer.get(lacking, jnp.array([1, 2, 3, 2])).lazy
    pytest.raises(ValueError, lazy.stack, "obs").match(r"2 shapes \(float32\[[23]\]: rows")
    assert buffer.get(lacking, jnp.array([2, 3, 2])).lazy.stack("obs", axis=-1).shape == (2, 3)
    again = buffer.init({"obs": np.zeros(0, np.float32), "text": "", "reward": 0.0})
    again = buffer.extend(again, got.data, mask=got.mask)  # what a batch shows can be added again
    for one, other in zip(buffer.rows(again).lazy.get("obs")[:5], got.lazy.get("obs")[:5], strict=True):
        assert np.array_equal(one, other)
    single = jax.jit(buffer.add)(lacking, {"obs": jnp.arange(4.0), "reward": jnp.float32(3)})
    assert buffer.rows(single, last=1).lazy["obs"][0].tolist() == [0, 1, 2, 3]


@pytest.mark.more
def test_readers_and_writers_in_threads():
    buffer = fbuf.Buffer(capacity=64, storage=Ragged())
    state = buffer.init({"a": b""})
    store, wrong = store_of(state), list[str]()

    def write():
        for i in range(150):
            store.put([[bytes([i % 250]) * (40 * i) for _ in range(4)]], 4, None)

    def read():
        for _ in range(300):
            newest = store.stats()["rows_accepted"]
            tickets = np.arange(max(newest - 30, 0), newest, dtype=np.uint64) + np.uint64(1)
            found, there = store.values(0, tickets)
            for ticket, value, ok in zip(tickets.tolist(), found, there, strict=True):
                i = (ticket - 1) // 4 % 150
                if ok and value != bytes([i % 250]) * (40 * i):
                    wrong.append(f"{ticket}")

    for thread in [Thread(write), Thread(read), Thread(read)]:
        thread.ends()
    assert not wrong and store.stats()["rows_accepted"] == 600


view = one_of(Sequence(3, autoreset="same_step"), exhaustive=[Row()])


@pytest.mark.more
@pytest.mark.in_place
def test_a_donated_step_copies_nothing(view):
    buffer = fbuf.Buffer(capacity=200_000, storage=Ragged(maximum={"obs": 4}), sampler=Prioritized(), view=view)
    ends = {"terminated": False, "truncated": False}
    state = buffer.init({"obs": np.zeros(0, np.float32), "text": "", "x": 0.0, **ends})
    rows = {"obs": jnp.ones((3, 3)), "x": jnp.ones(3), **{name: jnp.zeros(3, bool) for name in ends}}

    def step(state, given):
        rows, key = given
        state, one = buffer.sample(state, key, 8)
        state, two = buffer.sample(buffer.extend(state, rows), key, 8)
        return buffer.update_priority(state, one.index, two.weight), (one, two)

    memory = assert_inplace(step, state, (rows, jax.random.key(0)))
    for leaf in jax.tree.leaves(state):
        assert leaf.nbytes < 1024 or leaf.nbytes > memory.bound, f"a copy of {leaf.shape} would go unnoticed"


@pytest.mark.more
def test_padded_reads_of_expired_rows():
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


@pytest.mark.more
def test_a_batch_keeps_its_store_and_objects_go_with_their_rows():
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


@pytest.mark.more
def test_a_batch_can_be_cut_joined_and_scanned():
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


SAMPLERS = [sampler for name, sampler in combinations.SAMPLERS.items() if name != "Prioritized(on='host')"]
VIEWS = [Row(), Transition(observation="id", n_step=2, autoreset="same_step"), Episode(4, autoreset="same_step")]
VIEWS += [Sequence(3, boundary=boundary, autoreset="same_step") for boundary in ("stop", "mask")]


test_a_grown_buffer_is_one_that_was_larger_from_the_start = checks(
    exhaustive=[(check_growth, zip(SAMPLERS, itertools.cycle(VIEWS)))]
)


@pytest.mark.exhaustive
def test_unlimited_replay() -> None:
    replay = fbuf.Replay(
        fbuf.Buffer(capacity=4, storage=Ragged(), sampler=Prioritized()), {"text": "", "x": 0.0}, unlimited=True
    )
    index = None
    for i in range(0, 21, 3):
        replay.extend([{"text": str(i + j), "x": float(i + j)} for j in range(3)], mask=np.array([True, i != 9, True]))
        index = index or replay.rows(last=1).index
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


@pytest.mark.exhaustive
def test_windows_hold_ragged_rows() -> None:
    storage = Ragged(keys=("obs",))
    example = {"obs": np.zeros(0, np.int32), "text": "", "terminated": False, "truncated": False}

    def row(e: int, t: int) -> Any:
        return example | {"obs": np.arange(t, dtype=np.int32), "text": f"{e}.{t}", "terminated": t % 4 == 3}

    rows = [[row(e, t) for e in range(2)] for t in range(8)]
    for view, lead in ((Sequence(3, autoreset="same_step"), (5, 3)), (Episode(4, autoreset="same_step"), (5, 4))):
        buffer = fbuf.Buffer(capacity=24, lanes=2, storage=storage, view=view)
        state = buffer.extend(buffer.init(example), rows)
        state, batch = buffer.sample(state, jax.random.key(0), 5)
        assert batch.lazy.shape == lead
        there = np.asarray(batch.data["mask"])
        assert (batch.lazy.present == there).all()
        columns = batch.lazy["text"], batch.lazy["obs"], there, batch.data["is_first"]
        for text, obs, mask, first in zip(*columns, strict=True):
            steps = [int(t.split(".")[1]) for t in text if t is not None]
            assert steps == list(range(steps[0], steps[0] + mask.sum()))
            assert [len(o) for o in obs if o is not None] == steps
            assert all(steps[i] % 4 == 0 for i in np.flatnonzero(first[mask]))
        assert "text" not in batch.data and "_ticket" not in batch.data

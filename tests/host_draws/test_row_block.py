"""Rows of `Replay.add` in host memory: batches and counts are those of writing each row at once."""

import itertools
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf import limits, storages
from fbuf._host_draws import row_block
from tests.support import datasets_oracle as oracle
from tests.support.refusals import raises
from tests.support.tables import by_tier
from tests.support.threads import Thread
from tests.support.trees import same
from tests.support.two_replays import ROW, compare, leaves_of, make_pair

EXAMPLE = {"x": np.zeros(2, np.float32), "n": np.int32(0), "u": np.uint8(0), "end": np.bool_(False)}
PARTS = by_tier((("device", "epoch", "transition"),), more=[(("device", "uniform", "sequence", 2),)])


def row(n):
    return {"x": np.full(2, n, np.float32), "n": np.int32(n), "u": np.uint8(n % 256), "end": np.bool_(n % 5 == 4)}


def make(capacity=100, rows=0, **settings):
    """Return a replay after adding `rows` rows, one by one."""
    replay = fbuf.Replay(fbuf.Buffer(capacity), EXAMPLE, **settings)
    for n in range(rows):
        replay.add(row(n))
    return replay


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_batches_are_those_of_writing_each_row(parts):
    compare(make_pair(*parts), steps=40)


@pytest.mark.more
def test_rows_get_a_priority_that_was_given_once_its_row_is_an_anchor():
    pair = ours, theirs = make_pair("device", "prioritized", "transition")
    for n in range(8):
        for replay in pair:
            replay.add(ROW, priority=np.float32(4) if n == 1 else None)
        assert theirs.state is not None  # writes the row
    assert ours._engine.block.count
    same(*(leaves_of(replay.state) for replay in pair))


@pytest.mark.parametrize(("sampler", "view"), by_tier(("prioritized", "transition"), more=[("ranked", "sequence")]))
def test_rows_of_other_lanes_are_collected_while_one_waits_whose_priority_was_given(sampler, view):
    pair = ours, theirs = make_pair("device", sampler, view, lanes=2, capacity=80)
    row, collected = {name: np.array([leaf, leaf]) for name, leaf in ROW.items()}, list[int]()
    for n in range(30):
        mask, given = np.array([True, n % 10 > 5]), np.full(2, n, np.float32) if n % 10 == 1 else None
        for replay in pair:
            replay.add(row, priority=given, mask=mask | (given is not None))
        assert theirs.state is not None  # writes the row
        collected.append(ours._engine.block.count)
    same(*(leaves_of(replay.state) for replay in pair))
    assert collected[5] and not collected[6] and collected[25] and not collected[26], collected
    ours.add(row, priority=np.ones(2, np.float32))
    raises(TypeError, "mask is float32; expected a boolean array", ours.add, row, mask=np.ones(2))


def test_rows_are_written_by_few_calls(monkeypatch):
    replay, lengths = make(1000), list[int]()
    real = row_block.write

    def extend(buffer, state, packed):
        lengths.append(len(packed))
        return real(buffer, state, packed)

    monkeypatch.setattr(row_block, "write", extend)
    for n in range(600):
        replay.add(row(n))
    assert lengths == [512] and len(replay) == 600
    replay.sample(4, to="numpy")  # reads them where they are
    assert replay._engine.block is not None and replay._engine.block.count == 88
    replay.sample(4)  # writes them, too
    assert lengths == [512] and replay._engine.block.count == 0
    replay.add(row(600))
    assert replay.stats()["size"] == 601 and lengths == [512, 16]
    assert replay.rows().data["n"][:600].tolist() == list(range(600))


READS = {
    "state": lambda replay, _: replay.state.ring.size[0],
    "len": lambda replay, _: len(replay),
    "repr": lambda replay, _: int(repr(replay).split(", ")[-1].split()[0]),
    "stats": lambda replay, _: replay.stats()["size"],
    "rows": lambda replay, _: int(replay.rows().mask.sum()),
    "last": lambda replay, _: replay.rows(last=1).data["n"][0] + 1,
    "summary": lambda replay, _: replay.summary().to_dict()["size"],
    "thread": lambda replay, _: Thread(lambda: int(replay.rows().mask.sum())).ends(),
    "save": lambda replay, path: (replay.save(path / "saved"), len(fbuf.Replay.load(path / "saved")))[1],
    "extend": lambda replay, _: (replay.extend({k: v[None] for k, v in row(3).items()}), len(replay) - 1)[1],
    "close": lambda replay, _: (replay.close(), int(replay.rows().mask.sum()))[1],
}


@pytest.mark.parametrize("read", READS)
def test_every_read_sees_every_row(read, tmp_path):
    replay = make(rows=3)
    assert READS[read](replay, tmp_path) == 3


def test_clear_removes_rows_not_yet_written():
    replay = make(rows=1)
    replay.clear()
    assert len(replay) == 0 and not replay.can_sample()
    replay.add(row(1))
    assert replay.can_sample() and replay.sample(2).data["n"].tolist() == [1, 1]


def test_added_rows_are_copied():
    replay, given = make(), row(1)
    replay.add(given)
    given["x"][:] = 99
    assert replay.rows(last=1).data["x"].tolist() == [[1, 1]]
    for n in range(64):
        replay.add(row(n))
    assert replay.rows(last=64).data["n"].tolist() == list(range(64))


INVALID = [
    ({"x": np.zeros(3, np.float32)}, ValueError, r"leaf 'x' has shape \[3\]"),
    ({"x": np.zeros(2, np.float16)}, TypeError, r"Replay\.add: leaf 'x' is float16"),
    ({"n": 1.5}, TypeError, r"Replay\.add: leaf 'n' is float"),
    ({"u": 256}, ValueError, r"Replay\.add: leaf 'u' is 256, which uint8 cannot hold"),
    ({"end": 1}, TypeError, r"Replay\.add: leaf 'end' is int"),
    ({"more": np.zeros(())}, ValueError, r"Replay\.add: leaf 'more' is not in this buffer"),
]


@pytest.mark.parametrize(("change", "kind", "message"), INVALID)
def test_invalid_rows_are_errors_at_once(change, kind, message):
    replay = make(rows=1)
    raises(kind, message, lambda: replay.add(row(1) | change))
    assert len(replay) == 1 and replay.rows(last=1).data["n"].tolist() == [0]


def test_a_masked_array_is_no_mask():
    raises(TypeError, "mask is a masked array", make().add, row(0), mask=np.ma.array(True, mask=True))


def test_numbers_and_other_arrays():
    replay = make()
    replay.add({"x": np.ones(2, np.float32), "n": 1, "u": True, "end": False})
    replay.add({"x": jnp.ones(2), "n": jnp.int32(2), "u": jnp.uint8(2), "end": jnp.bool_(True)})
    replay.add(row(3), mask=False)
    replay.add(row(4), mask=True)
    assert replay.rows().data["n"][:3].tolist() == [1, 2, 4] and len(replay) == 3
    replay.add(row(5))
    assert replay.rows().data["n"][:4].tolist() == [1, 2, 4, 5]


def test_a_row_in_the_place_of_one_that_was_taken_back_has_no_mask_of_it():
    block: Any = make()._engine.block
    block.append(row(0), False)
    block.count -= 1
    block.append(row(0), None)
    assert block.rows_in(block.packed()) == 1


@pytest.mark.parametrize("number", [2**70, -(2**65), 2**62])
def test_integers_of_any_size_fit_bfloat16(number):
    replay = fbuf.Replay(fbuf.Buffer(10), {"x": jnp.bfloat16(0)})
    replay.add({"x": number})
    assert float(replay.rows().data["x"][0]) == number  # a power of two


def test_wide_numbers_are_collected():
    replay = make()
    replay.add({"x": np.full(2, 0.1), "n": np.int64(-7), "u": 255, "end": np.bool_(True)})
    assert replay._engine.block is not None and replay._engine.block.count == 1
    held = replay.rows(last=1).data
    assert held["x"].tolist() == [[np.float32(0.1)] * 2] and held["n"].tolist() == [-7] and held["u"].tolist() == [255]


CHANGES: list[dict[str, Any]] = [
    {},
    *({"x": x} for x in (np.zeros(2), np.full(2, 1e300), np.zeros(3, np.float32), np.zeros(2, ">f4"), np.ma.ones(2))),
    *({"n": n} for n in (3, True, 1.5, 2**40, np.int64(4), np.int64(2**40), np.array(5, np.int32), np.array(2**40))),
    *(
        {"f": f}
        for f in (2, 0.1, 1e300, float("nan"), np.float64(0.1), np.float64(1e300), np.array(1.0), np.float16(1))
    ),
    *({"h": h} for h in (2**62, 2**63, 0.5, 1e300)),
    *({"end": end} for end in (True, 1, np.array(True), None)),
]


def test_rows_are_copied_or_refused_whatever_rows_were_before():
    example = EXAMPLE | {"f": np.float32(0), "h": np.zeros((), jnp.bfloat16)}
    buffer = fbuf.Buffer(100)
    state = buffer.init(example)
    for before, change in itertools.product(CHANGES, repeat=2):
        block, fresh = (row_block.RowBlock(buffer, state, 8) for _ in range(2))
        assert block.append(example, None)
        block.append(example | before, None)
        block.count = 0
        kept = fresh.append(example | change, None)
        assert block.append(example | change, None) is kept, (before, change)
        same(*([column[: int(kept)] for column in of.columns] for of in (block, fresh)))


MAPPED = fbuf.transforms.Map(lambda row: row)
COLLECTED = [
    (True, {"view": fbuf.views.Sequence(3, episode_end=("end",), autoreset="same_step"), "lanes": 2}),
    (True, {"sampler": fbuf.samplers.Epoch(), "lanes": 2}),
    (True, {"sampler": fbuf.samplers.Staleness(3, version="n"), "lanes": 2}),
    (True, {"on_write": fbuf.transforms.Chain((fbuf.transforms.Drop("u"), fbuf.transforms.Cast("n", "float32")))}),
    (True, {"on_write": fbuf.transforms.Split("x", ("left", "right"), (1, 1))}),
    (True, {"on_read": MAPPED}),
    (False, {"sampler": fbuf.samplers.Consume(), "view": fbuf.views.Sequence(3, episode_end=())}),
    (False, {"sampler": fbuf.samplers.Prioritized(largest="held"), "view": fbuf.views.Sequence(3, episode_end=())}),
    (False, {"on_write": fbuf.transforms.Chain((fbuf.transforms.Drop("u"), MAPPED))}),
    (False, {"on_read": fbuf.transforms.Normalize("x")}),
    (False, {"writer": fbuf.writers.TopK("n")}),
    (False, {"view": fbuf.views.Sequence(64, episode_end=())}),
]


@pytest.mark.parametrize(("collects", "parts"), by_tier(*COLLECTED[::3], COLLECTED[7], more=COLLECTED))
def test_rows_are_collected_where_the_parts_say_so(collects, parts):
    buffer = fbuf.Buffer(64 * parts.get("lanes", 1), **parts)
    lead = () if buffer.lanes is None else (buffer.lanes,)
    replays = [fbuf.Replay(buffer, EXAMPLE, strict=False) for _ in range(2)]
    for n in range(20):
        for replay in replays:
            replay.add(jax.tree.map(lambda x: np.broadcast_to(x, (*lead, *x.shape)), row(n)))
        assert replays[1].state is not None  # writes the row
    assert (replays[0]._engine.block is not None and replays[0]._engine.block.count == 20) is collects
    same(*(leaves_of(replay.state) for replay in replays))
    same(*(replay.sample(5, to="numpy") for replay in replays))


def test_numbers_of_half_a_byte_are_written_at_once():
    replay = fbuf.Replay(fbuf.Buffer(9), {"x": jnp.zeros(2, jnp.int4)})
    replay.add({"x": np.ones(2, jnp.int4)})
    assert replay.rows(last=1).data["x"].astype(int).tolist() == [[1, 1]]


@pytest.mark.parametrize("size", [True, 1.0, [1]], ids=str)
def test_batch_sizes_are_ints_after_a_draw_too(size):
    replay = make(rows=1)
    replay.sample(1)
    raises(TypeError, r"Replay\.sample: batch_size is \w+; expected a Python int", replay.sample, size)


def test_rows_in_files_are_written_at_once(tmp_path):
    buffer = fbuf.Buffer(64, storage=storages.Memmap(str(tmp_path / "rows")))
    replay = fbuf.Replay(buffer, EXAMPLE)
    replay.add(row(7))
    replay._engine.state.token.block_until_ready()
    assert int(replay._engine.state.ring.size[0]) == 1


def test_a_limit_counts_each_row():
    replay = make(limit=limits.queue(3))
    for n in range(3):
        replay.add(row(n), timeout=0)
    raises(TimeoutError, None, lambda: replay.add(row(3), timeout=0))
    assert replay.stats()["limit_added"] == 3


@pytest.mark.parametrize(
    ("settings", "limit", "programs"),  # capacities of no other test
    [
        pytest.param({"capacity": 76, "sampler": fbuf.samplers.Ranked()}, None, 8, marks=pytest.mark.more),
        ({"capacity": 77, "sampler": fbuf.samplers.Prioritized()}, None, 10),
        pytest.param(
            {"capacity": 78, "sampler": fbuf.samplers.Prioritized()}, limits.min_size(2), 5, marks=pytest.mark.more
        ),
        pytest.param({"capacity": 79, "writer": fbuf.writers.Reservoir()}, None, 2, marks=pytest.mark.more),
    ],
    ids=["ranked", "collected", "limit", "at once"],
)
def test_compile_leaves_nothing_to_compile(settings, limit, programs, caplog):
    buffer, counted = fbuf.Buffer(**settings), list[tuple[int, int]]()
    replay = fbuf.Replay(buffer, EXAMPLE, limit=limit)
    replay.compile(4, to="numpy", progress=lambda done, total: counted.append((done, total)))
    assert counted == [(n, programs) for n in range(1, programs + 1)]
    with jax.log_compiles():
        for n in range(70):
            replay.add(row(n))
        batch = replay.sample(4, to="numpy")
        if buffer.sampler.prioritized:
            replay.update_priority(batch.index, np.ones(4, np.float32))
            for n in range(70):  # until a block is full
                replay.add(row(n))
                replay.update_priority(replay.sample(4, to="numpy").index, np.ones(4, np.float32))
        replay.add(row(0))
        replay.sample(4, to="numpy")
        assert "Compiling" not in caplog.text
        replay.sample(5, to="numpy")
        assert "Compiling" in caplog.text


def test_a_data_set_is_compiled_without_add(tmp_path):
    oracle.from_arrays({"t": np.arange(6)}, path=tmp_path / "six", episode_end=())
    buffer, _ = fbuf.datasets.open(tmp_path / "six")
    replay = fbuf.Replay(buffer, {"t": np.int32(0), "terminated": False, "truncated": False})
    replay.compile(4, progress=False)
    assert replay.sample(4).mask.all()


def test_an_empty_dict_is_no_row():
    for example in (np.float32(0), {"a": {"b": np.float32(0)}}):
        replay = fbuf.Replay(fbuf.Buffer(8), example)
        with pytest.raises(ValueError, match="is missing .got: nothing; expected: "):
            replay.add({})
        assert len(replay) == 0


def test_a_masked_array_is_refused():
    raises(TypeError, "masked", lambda: make(rows=1).add({**row(0), "x": np.ma.masked_array(row(0)["x"])}))


def test_float8_is_rounded_as_by_the_buffer():
    buffer, example = fbuf.Buffer(4), {"x": jnp.zeros((), jnp.float8_e4m3fn)}
    number = 1 + 2**-4 + 2**-30  # which NumPy rounds up, and JAX down
    replay = fbuf.Replay(buffer, example)
    replay.add({"x": number})
    state = buffer.add(buffer.init(example), {"x": number})
    assert float(replay.rows(last=1).data["x"][0]) == float(buffer.rows(state, last=1).data["x"][0])


def test_a_slow_compilation_is_announced_in_interactive_sessions(monkeypatch, capsys):
    timers = list[Any]()

    class Timer:
        def __init__(self, seconds, call, args, options):
            self.seconds, self.fire, self.cancelled = seconds, lambda: call(*args, **options), False
            timers.append(self)

        def start(self):
            self.fire()

        def cancel(self):
            self.cancelled = True

    monkeypatch.setattr(threading, "Timer", Timer)
    replay = make(rows=1)
    replay.sample(3)
    assert not timers
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    for _ in range(2):
        replay.sample(2)
    assert [(t.seconds, t.cancelled) for t in timers] == [(2.0, True)]
    assert capsys.readouterr().err.startswith("fbuf: compiling Replay.sample(2), once for these shapes.")


@pytest.mark.more
@pytest.mark.optimized
def test_batches_are_those_of_writing_each_row_as_users_compile_them():
    test_batches_are_those_of_writing_each_row(("device", "epoch", "transition"))

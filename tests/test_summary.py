"""`Buffer.summary` against plain Python, over every storage, sampler, view and writer; and how it prints.

A history of writes, draws and updates is kept beside the buffer as lists; every number of the summary is worked out from it
again, or from what the public verbs say (`rows`, `peek`, `stats`, `nbytes`).
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import json
import math
from collections import Counter
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fbuf
from fbuf import _tables
from fbuf._summary import _hash, _look, _numbers
from fbuf._tree import item_bytes
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked
from tests import test_combinations as parts

LANES, BATCH = parts.LANES, parts.BATCH
REFUSED = parts.REFUSED
MANY = 1 << 14  # rows compared where nobody says


@dataclasses.dataclass
class History:
    """What happened to a buffer."""

    buffer: fbuf.Buffer
    state: Any
    rows: list[dict[str, np.ndarray]]  # every row ever written, `[E, ...]` each
    drawn: Counter[tuple[int, int]]  # how often each (slot, ticket) was handed out
    priority: dict[tuple[int, int], float]  # the last error given to each

    @property
    def held(self) -> int:
        return min(len(self.rows), self.buffer.geometry.length)


@functools.cache
def history(storage: str, sampler: str, view: str, writer: str = "Ring", steps: int = 7) -> History:
    """Writes until the ring has gone round, with draws and updates between."""
    buffer = parts.make(storage, sampler, view, writer)
    told = History(buffer, buffer.init(parts.EXAMPLE), [], Counter(), {})
    rng = np.random.default_rng(3)
    for i in range(steps):
        rows = parts.rows_of(rng, 5)
        told.rows += [{name: leaf[t] for name, leaf in rows.items()} for t in range(5)]
        told.state, batch = buffer.sample(buffer.extend(told.state, rows), jax.random.key(i), BATCH)
        slots = zip(batch.index.slot.tolist(), batch.index.ticket.tolist(), batch.mask.tolist(), strict=True)
        names = [(slot, ticket) for slot, ticket, there in slots if there]
        told.drawn.update(names)
        if buffer.sampler.prioritized:
            error = rng.gamma(1.0, 1.0, BATCH).astype(np.float32)
            told.state = buffer.update_priority(told.state, batch.index, error)
            told.priority |= dict(zip(names, error.tolist(), strict=False))
    return told


# --------------------------------------------------------------------------------------------------- the oracle


def plain_quantiles(values: list[float], weights: list[float] | None = None) -> dict[str, float]:
    """By counting, one after another."""
    pairs = sorted(zip(values, weights or [1] * len(values), strict=True))
    pairs = [(value, weight) for value, weight in pairs if weight > 0]
    total = math.fsum(weight for _, weight in pairs)
    out = {"mean": math.fsum(v * w for v, w in pairs) / total, "min": pairs[0][0], "max": pairs[-1][0]}
    for name, level in zip(("q05", "q25", "median", "q75", "q95"), (0.05, 0.25, 0.5, 0.75, 0.95), strict=True):
        upto = itertools.accumulate(weight for _, weight in pairs)
        out[name] = next(v for (v, _), so_far in zip(pairs, upto, strict=True) if so_far >= level * total * (1 - 1e-9))
    return out


def plain_episodes(rows: list[dict[str, np.ndarray]], length: int, exact: bool) -> tuple[list[int], int]:
    """Lengths of whole episodes and the number of others, from all rows ever written."""
    lengths, cut = [], 0
    for lane in range(LANES):
        ends = [bool(row["terminated"][lane] or row["truncated"][lane]) for row in rows]
        first = max(0, len(ends) - length)
        known = exact or len(ends) < length
        begun = first == 0 and known or (first > 0 and ends[first - 1] and exact)
        current = 0
        for end in ends[first:]:
            current += 1
            if end:
                lengths += [current] if begun else []
                cut += not begun
                begun, current = True, 0
        cut += current > 0
    return sorted(lengths), cut


def check(told: History, summary: fbuf.Summary, compare: int = MANY) -> None:
    """Everything that can be known of any combination."""
    buffer, state = told.buffer, told.state
    stats = {name: np.asarray(value).item() for name, value in buffer.stats(state).items()}
    assert summary.stats == stats and summary.buffer == repr(buffer)
    assert (summary.size, summary.drawable) == (stats["size"], stats["drawable"])
    assert summary.capacity == buffer.capacity and summary.fill == summary.size / 40
    assert summary.refused == {n: stats[n] for n in fbuf._state.COUNTERS if stats[n]}
    assert summary.nbytes == buffer.nbytes(state)
    assert summary.to_dict() == json.loads(json.dumps(summary.to_dict()))

    rows = buffer.rows(state)
    there = np.asarray(rows.mask)
    assert summary.size == there.sum()
    if buffer.writer.streams:
        ages = [age for age in range(told.held) for _ in range(LANES)]
        close(summary.ages, plain_quantiles(ages))
    if not isinstance(buffer.storage, fbuf.storages.Ragged):
        data = {name: np.asarray(leaf)[there] for name, leaf in rows.data.items()}
        number = min(summary.size, -(-compare // LANES) * LANES) if compare else 0
        data = {name: leaf[len(leaf) - number :] for name, leaf in data.items()}
        assert summary.compared == number
        for name, leaf in data.items():
            assert summary.leaves[name].distinct == (len({row.tobytes() for row in leaf}) if number else None)
            assert summary.leaves[name].raw == summary.size * item_bytes(parts.EXAMPLE[name])
        if number:
            whole = {tuple(leaf[i].tobytes() for leaf in data.values()) for i in range(number)}
            assert summary.distinct == len(whole) and summary.duplicates == 1 - len(whole) / number
    if buffer.writer.streams:
        exact = state.anchors is not None
        lengths, cut = plain_episodes(told.rows, buffer.geometry.length, exact)
        assert summary.episodes is not None
        assert (summary.episodes.number, summary.episodes.cut) == (len(lengths), cut)
        close(summary.episodes.lengths, plain_quantiles([float(n) for n in lengths]) if lengths else None)
    else:
        assert summary.episodes is None


def close(found: Any, expected: dict[str, float] | None, rtol: float = 1e-5) -> None:
    if expected is None:
        assert found is None
        return
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=rtol, err_msg=name)


def check_chances(told: History) -> None:
    """Chances are those of the draws, and sum to 1."""
    buffer, state = told.buffer, told.state
    seen, summary = _look.seen(buffer, state, MANY), buffer.summary(state)
    slot = slots_of(buffer, state)
    chance = np.zeros(buffer.capacity)
    anchor = seen.anchor
    each = np.full(anchor.shape, 1 / max(anchor.sum(), 1)) if seen.alike else seen.probability
    chance[slot[anchor]] = each[anchor]
    assert abs(chance.sum() - 1) < 1e-5
    is_exact = not isinstance(buffer.sampler, (Epoch, Consume)) and getattr(buffer.sampler, "replace", True)
    for i in range(4):
        batch = buffer.peek(state, jax.random.key(100 + i), BATCH)
        mask, drawn = np.asarray(batch.mask), np.asarray(batch.index.slot)
        assert (chance[drawn[mask]] > 0).all() or isinstance(buffer.sampler, Epoch)
        if is_exact:
            np.testing.assert_allclose(chance[drawn[mask]], np.asarray(batch.probability)[mask], rtol=1e-5)
    some = chance[chance > 0]
    assert summary.effective_size is not None and summary.likeliest is not None
    np.testing.assert_allclose(summary.effective_size, 1 / math.fsum(p * p for p in some), rtol=1e-5)
    likeliest = sorted(chance[slot[anchor]].tolist())[-math.ceil(0.01 * anchor.sum()) :]
    np.testing.assert_allclose(summary.likeliest, sum(likeliest), rtol=1e-5)
    ages, chances = seen.age[anchor].tolist(), chance[slot[anchor]].tolist()
    assert summary.drawn_ages is not None
    np.testing.assert_allclose(summary.drawn_ages.mean, np.average(ages, weights=chances), rtol=1e-5)


def slots_of(buffer: fbuf.Buffer, state: Any) -> np.ndarray:
    """int[L, E], slots in order of arrival; C where none."""
    slot = np.asarray(buffer.rows(state).index.slot)
    return slot.reshape(buffer.geometry.length, buffer.geometry.lanes)


def check_draws(told: History) -> None:
    """How often each anchor was drawn, from what was handed out."""
    seen, summary = _look.seen(told.buffer, told.state, MANY), told.buffer.summary(told.state)
    if not isinstance(told.buffer.sampler, (Consume, Epoch)):
        assert summary.draws is None and seen.draws is None
        return
    index = told.buffer.rows(told.state).index
    names = list(zip(np.ravel(index.slot).tolist(), np.ravel(index.ticket).tolist(), strict=True))
    drawn = np.array([told.drawn[name] for name in names]).reshape(seen.anchor.shape)
    if isinstance(told.buffer.sampler, Epoch):
        left = int(told.buffer.stats(told.state)["epoch_left"])
        assert ((seen.draws <= drawn) | ~seen.anchor).all() and set(np.unique(seen.draws)) <= {0, 1}
        waits = (seen.probability > 0) & seen.anchor
        over = bool((waits == seen.anchor).all())  # all that were left have closed unnoticed: the next epoch begins
        assert not left or waits.sum() <= left or over
    else:
        assert (seen.draws == drawn)[seen.anchor].all()
    assert summary.draws is not None and summary.draws.max == seen.draws[seen.anchor].max()


COMBINATIONS = [
    case for case in itertools.product(parts.STORAGES, parts.SAMPLERS, parts.VIEWS) if case[1:] not in REFUSED
]


DEFAULT = {("Device", "Prioritized", "Transition"), ("Compressed", "Consume", "Row")}


@pytest.mark.parametrize(
    ("storage", "sampler", "view"),
    [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow) for case in COMBINATIONS],
)
def test_every_number_against_plain_python(storage: str, sampler: str, view: str) -> None:
    told = history(storage, sampler, view)
    check(told, told.buffer.summary(told.state))
    check_chances(told)
    check_draws(told)


@pytest.mark.parametrize("writer", [w for w in parts.WRITERS if not parts.WRITERS[w].streams])
@pytest.mark.parametrize(
    "storage", [pytest.param(s, marks=() if s == "Device" else pytest.mark.slow) for s in parts.ANY_ORDER]
)
def test_of_rows_in_no_order(storage: str, writer: str) -> None:
    told = history(storage, "Prioritized", "Row", writer)
    summary = told.buffer.summary(told.state)
    check(told, summary)
    check_chances(told)
    assert summary.episodes is None and summary.ages is not None and summary.ages.min == 0
    # Ages count rows that were kept: those of the whole history if none was turned down.
    number = np.asarray(told.state.scatter.number[:, 0])
    assert summary.ages.max == number.max() - number[number > 0].min()


@pytest.mark.parametrize("compare", [0, 1, 7, None])
def test_how_many_rows_are_compared(compare: int | None) -> None:
    told = history("Device", "Prioritized", "Transition")
    check(told, told.buffer.summary(told.state, compare=compare), 40 if compare is None else compare)


def test_comparing_goes_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_look, "BLOCK_BYTES", 300)  # three rows at a time
    _look.look._jitted.clear_cache()
    told = history("Device", "Prioritized", "Transition")
    check(told, told.buffer.summary(told.state))
    _look.look._jitted.clear_cache()


@pytest.mark.parametrize(
    "sampler",
    [
        Prioritized(alpha=0.6),
        Prioritized(alpha=0.5, largest="held", eps=0.0),
        Prioritized(alpha=0.7, on="host"),
        Ranked(),
    ],
)
def test_priorities_are_those_that_were_given(sampler: Any) -> None:
    buffer = fbuf.Buffer(32, sampler=sampler)
    given = np.arange(1.0, 21.0, dtype=np.float32)
    state = buffer.extend(buffer.init(jnp.zeros(2)), jnp.zeros((20, 2)), priority=given)
    index = buffer.last(state, 4).index
    state = buffer.update_priority(state, index, jnp.asarray([-30.0, 0.5, jnp.nan, 7.0]))
    expected = given.tolist()[:16] + [30.0, 0.5, 19.0, 7.0]
    loose = 0.125 if isinstance(sampler, Ranked) else 1e-4
    close(buffer.summary(state).priorities, plain_quantiles(expected), rtol=loose)


def test_priorities_that_cannot_be_told_are_not() -> None:
    buffer = fbuf.Buffer(8, sampler=Prioritized(alpha=0.0))
    state = buffer.extend(buffer.init(jnp.zeros(2)), jnp.zeros((4, 2)))
    summary = buffer.summary(state)
    assert summary.priorities is None and summary.effective_size == 4


def test_priorities_that_are_all_zero() -> None:
    buffer = fbuf.Buffer(8, sampler=Prioritized(eps=0.0))
    state = buffer.extend(buffer.init(jnp.zeros(2)), jnp.zeros((4, 2)), priority=jnp.zeros(4))
    summary = buffer.summary(state)
    assert summary.effective_size == 4 and summary.priorities is not None and summary.priorities.max == 0


@pytest.mark.parametrize("sampler", [s for s in parts.SAMPLERS if s != "Staleness(version=...)"])
def test_an_empty_buffer_has_a_summary(sampler: str) -> None:
    buffer = fbuf.Buffer(8, sampler=parts.SAMPLERS[sampler], episode_end=("done",), lanes=2)
    summary = buffer.summary(buffer.init({"x": 0.0, "done": False}))
    assert (summary.size, summary.drawable, summary.compared) == (0, 0, 0)
    assert summary.ages is summary.drawn_ages is summary.effective_size is summary.duplicates is None
    assert summary.episodes == (0, None, 0)
    assert "0 of 8 (0.0 %)" in repr(summary) and summary.to_dict()["size"] == 0


def test_a_reset_row_is_no_step_of_an_episode() -> None:
    view = fbuf.views.Transition(autoreset="next_step", truncated=None)
    buffer = fbuf.Buffer(16, view=view)
    example = {"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False}
    ends = np.array([0, 0, 1, 0, 0, 1, 0, 0, 0], bool)  # 3 steps, the reset row; 2 steps, the reset row; 2 steps
    rows = {"obs": np.zeros(9, np.float32), "action": np.zeros(9, np.int32), "reward": np.zeros(9, np.float32)}
    summary = buffer.summary(buffer.extend(buffer.init(example), {**rows, "terminated": ends}))
    assert summary.episodes is not None and summary.episodes.lengths is not None
    assert (summary.episodes.number, summary.episodes.cut) == (2, 1)
    assert (summary.episodes.lengths.min, summary.episodes.lengths.max) == (2, 3)


@given(st.integers(1, 3), st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=40), st.data())
def test_episode_lengths_of_any_lanes(lanes: int, steps: list[tuple[bool, int]], data: Any) -> None:
    """Lanes filled unevenly, some not from the beginning."""
    length = len(steps)
    shape = (length, lanes)
    held, end = np.zeros(shape, bool), np.zeros(shape, bool)
    start, expected, cut = np.zeros(shape, bool), [], 0
    for lane in range(lanes):
        size = data.draw(st.integers(0, length))
        begun = data.draw(st.booleans())
        held[:size, lane] = True
        current = 0
        for t in range(size):
            start[t, lane] = begun if t == 0 else end[t - 1, lane]
            end[t, lane] = steps[(t + lane) % length][0]
            current += 1
            if end[t, lane]:
                expected += [current] if begun else []
                cut += not begun
                begun, current = True, 0
        cut += current > 0
    lengths, others = _numbers.episode_lengths(held, start, end, np.zeros(shape, bool))
    assert lengths.tolist() == expected and others == cut


@given(
    st.lists(
        st.tuples(st.integers(-50, 50), st.integers(0, 3)).filter(lambda pair: True), min_size=1, max_size=60
    ).filter(lambda pairs: any(w for _, w in pairs))
)
def test_quantiles_against_counting(pairs: list[tuple[int, int]]) -> None:
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    found = _numbers.quantiles(np.array(values), np.array(weights, float))
    close(found, plain_quantiles([float(v) for v in values], [float(w) for w in weights]))
    close(_numbers.quantiles(np.array(values)), plain_quantiles([float(v) for v in values]))
    repeated = np.repeat(values, weights)
    again = _numbers.quantiles(repeated)
    assert found is not None and again is not None and found.median == again.median


# ---------------------------------------------------------------------------------------------------- the hash

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32", "complex64", "bfloat16"]


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e4m3fn", "int4"])
def test_rows_are_hashed_by_their_bits(dtype: str) -> None:
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.integers(0, 2, (64, 3)), dtype)
    hashes = np.asarray(jax.jit(_hash.hashed)(rows))
    bytes_of = [np.asarray(row).astype(np.complex64).tobytes() for row in rows]
    assert _hash.distinct(hashes) == len(set(bytes_of))
    for i, j in itertools.combinations(range(64), 2):
        assert (hashes[i].tolist() == hashes[j].tolist()) == (bytes_of[i] == bytes_of[j])


def test_rows_of_eight_bytes_are_hashed_whole() -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        rows = jnp.asarray([[1], [1 + 2**32], [1], [2**40]], jnp.int64)
        assert _hash.distinct(np.asarray(_hash.hashed(rows))) == 3


def test_the_place_of_a_value_counts() -> None:
    hashed = jax.jit(_hash.hashed)
    rows = jnp.asarray(list(itertools.permutations(range(5))), jnp.uint8)
    assert _hash.distinct(np.asarray(hashed(rows))) == 120
    assert _hash.distinct(np.asarray(hashed(jnp.zeros((4, 0), jnp.uint8)))) == 1
    assert _hash.distinct(np.asarray(hashed(jnp.eye(50, dtype=jnp.uint8)))) == 50


def test_nan_and_zeros_go_by_their_bits() -> None:
    rows = jnp.asarray([[0.0], [-0.0], [jnp.nan], [jnp.nan]])
    assert _hash.distinct(np.asarray(jax.jit(_hash.hashed)(rows))) == 3


def test_rows_are_alike_only_if_all_leaves_are() -> None:
    buffer = fbuf.Buffer(8)
    state = buffer.init({"a": jnp.int32(0), "b": jnp.int32(0)})
    state = buffer.extend(state, {"a": jnp.array([1, 1, 2, 2, 1]), "b": jnp.array([1, 2, 1, 2, 1])})
    summary = buffer.summary(state)
    assert summary.distinct == 4 and summary.duplicates == pytest.approx(0.2)
    assert (summary.leaves["a"].distinct, summary.leaves["b"].distinct) == (2, 2)
    swapped = buffer.extend(buffer.init({"a": 0, "b": 0}), {"a": jnp.array([1, 2]), "b": jnp.array([2, 1])})
    assert buffer.summary(swapped).distinct == 2


# --------------------------------------------------------------------------------------------------- storages


def test_ragged_leaves_have_bytes_but_no_raw_size() -> None:
    buffer = fbuf.Buffer(100, storage=fbuf.storages.Ragged(maximum={"obs": (4,)}))
    state = buffer.init({"obs": np.zeros(3, np.float32), "text": "", "reward": 0.0})
    rows = [{"obs": np.zeros(n % 4 + 1, np.float32), "text": "x" * n, "reward": 1.0} for n in range(20)]
    state = buffer.extend(state, rows)
    summary = buffer.summary(state)
    assert summary.nbytes == buffer.nbytes(state) and summary.distinct is None
    text = summary.leaves["text"]
    assert text.raw is None and text.ratio is None and text.stored is not None
    assert text.stored.host >= sum(range(20)) and summary.leaves["reward"].distinct == 1


def test_a_table_that_leaves_share_is_divided_among_them() -> None:
    storage = fbuf.storages.Deduplicated(keys=("a", "b"), block=(4, 4), blocks=64)
    buffer = fbuf.Buffer(16, storage=storage)
    example = {"a": np.zeros((8, 8), np.uint8), "b": np.zeros((8, 8), np.uint8), "c": 0}
    summary = buffer.summary(buffer.init(example))
    a, b = summary.leaves["a"].stored, summary.leaves["b"].stored
    assert a is not None and b is not None and abs(a.device - b.device) <= 1 and a.device > 16 * 4


def test_files_count_as_disk(tmp_path: Any) -> None:
    buffer = fbuf.Buffer(64, storage=fbuf.storages.Memmap(str(tmp_path / "rows")))
    state = buffer.extend(buffer.init({"x": np.zeros(100, np.uint8)}), {"x": np.ones((64, 100), np.uint8)})
    jax.block_until_ready(state)
    summary = buffer.summary(state)
    stored = summary.leaves["x"].stored
    assert stored is not None and 6400 <= stored.disk <= summary.nbytes["disk"] == buffer.nbytes(state)["disk"]
    del state


def without(kind: type[Any], *names: str) -> Any:
    """A part of one's own: like `kind`, but for some methods."""
    body = {name: item for name, item in vars(kind).items() if name not in (*names, "__dict__", "__weakref__")}
    return jax.tree_util.register_static(type(f"Own{kind.__name__}", (), body))()


def test_parts_of_ones_own_need_not_say_more() -> None:
    storage, sampler = without(fbuf.storages.Device, "weigh"), without(fbuf.samplers.Uniform, "inspect", "fetch")
    buffer = fbuf.Buffer(9, storage=storage, sampler=sampler)
    state = buffer.extend(buffer.init({"x": 0.0}), {"x": jnp.arange(4.0)})
    summary = buffer.summary(state)
    assert summary.leaves["x"].stored is None and summary.leaves["x"].ratio is None
    assert summary.parts["rows"].device == 36 and summary.nbytes == buffer.nbytes(state)
    assert summary.effective_size is summary.drawn_ages is summary.likeliest is None
    assert summary.ages is not None


# ---------------------------------------------------------------------------------------------------- messages


def test_a_traced_state_is_refused() -> None:
    buffer = fbuf.uniform(4)
    with pytest.raises(TypeError, match="inside use buffer.stats"):
        jax.jit(buffer.summary)(buffer.init(0.0))


@pytest.mark.parametrize("compare", [-1, True, 1.5, "all"])
def test_compare_is_a_number_of_rows(compare: Any) -> None:
    buffer = fbuf.uniform(4)
    with pytest.raises(ValueError, match="expected an int >= 0, rows, or None"):
        buffer.summary(buffer.init(0.0), compare=compare)


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"The order is summary\(state\)"):
        fbuf.uniform(4).summary(3)  # type: ignore[arg-type]


def test_nothing_changes_and_nothing_is_donated() -> None:
    told = history("Device", "Consume", "Row")
    before = jax.device_get(told.state)
    told.buffer.summary(told.state)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, jax.device_get(told.state))))


def test_under_transfer_guards_and_debugging() -> None:
    told = history("Device", "Consume", "Row")
    expected = repr(told.buffer.summary(told.state))
    with jax.transfer_guard("disallow"), jax.debug_nans(True):
        assert repr(told.buffer.summary(told.state)) == expected
    buffer = fbuf.Buffer(16, sampler=Prioritized(on="host", alpha=0.0))
    state = buffer.extend(buffer.init(jnp.zeros(2)), jnp.zeros((4, 2)))
    with jax.transfer_guard("disallow"), jax.debug_nans(True):
        assert buffer.summary(state).effective_size == 4


def test_a_replay_and_a_checked_buffer_have_one_too() -> None:
    replay = fbuf.Replay(fbuf.prioritized(16), {"x": 0.0})
    replay.extend({"x": np.arange(5.0, dtype=np.float32)})
    assert replay.summary().size == 5 and replay.summary(compare=0).compared == 0
    checked = fbuf.checked(replay.buffer)
    assert repr(checked.summary(replay.state)) == repr(replay.summary())


# ----------------------------------------------------------------------------------------------------- printing

GOLDEN = """\
Buffer(capacity=8, sampler=Prioritized(alpha=1.0, eps=0.0), lanes=2, episode_end=('done',))

rows
  held               6 of 8 (75 %)
  effective          4.481 (75 % of those drawable)
  likeliest 1 %      36 % of draws
  episodes           2 whole, 2 cut
  duplicates         33 % of 6

spread                 mean  least  5 %  25 %  median  75 %  95 %  most
  age                     1      0    0     0       1     2     2     2
  age, as drawn      0.7273      0    0     0       1     1     2     2
  priority            1.833      1    1     1       1     2     4     4
  episode length        1.5      1    1     1       1     2     2     2

memory               one row  device   raw  raw / stored  distinct of 6
  done               bool[]      8 B   6 B          0.8x              2
  x                  int32[]    32 B  24 B          0.8x              2
  other                        144 B
  total                        184 B

refused or given up
  refused nonfinite  1

stats
  alpha              1
  beta               0.4
  max priority       4"""


def golden() -> fbuf.Summary:
    sampler = Prioritized(alpha=1.0, eps=0.0)
    buffer = fbuf.Buffer(8, lanes=2, sampler=sampler, episode_end=("done",))
    state = buffer.init({"x": jnp.int32(0), "done": False})
    rows = {"x": jnp.array([[0, 0], [1, 1], [0, 1]]), "done": jnp.array([[0, 1], [1, 0], [0, 0]], bool)}
    state = buffer.extend(state, rows, priority=jnp.array([[1.0, 1], [2, 2], [jnp.nan, 4]]))
    return buffer.summary(state)


def test_it_prints_as_a_table() -> None:
    assert repr(golden()) == str(golden()) == GOLDEN


def test_its_html_is_well_formed_and_needs_nothing_else() -> None:
    page = golden()._repr_html_()
    tree = ElementTree.fromstring(page)
    cells = ["".join(cell.itertext()) for cell in tree.iter() if cell.tag in ("td", "th")]
    assert "6 of 8 (75 %)" in cells and "age, as drawn" in cells
    assert not [word for word in ("http", "<script", "<link", "src=", "url(", "#000", "#fff") if word in page]
    widths = {
        sum(int(cell.get("colspan", 1)) for cell in row) for row in tree.iter("tr")
    }  # every row has as many columns
    assert len(widths) == 1


def test_names_that_no_page_or_terminal_could_show_are_written_out() -> None:
    buffer = fbuf.uniform(4)
    state = buffer.init({"a\x00\x1b[31m\nb": jnp.float32(0), "ünï ☃": 0})
    found = buffer.summary(state)
    for made in (found, state):
        ElementTree.fromstring(made._repr_html_())
        for text in (repr(made), made._repr_html_()):
            assert r"a\x00\x1b[31m\nb" in text and "ünï ☃" in text and "\x1b" not in text


def test_names_are_escaped() -> None:
    buffer = fbuf.uniform(4)
    page = buffer.summary(buffer.init({"<b>&'\"": 0.0}))._repr_html_()
    assert "&lt;b&gt;&amp;" in page and "<b>" not in page
    ElementTree.fromstring(page)
    ElementTree.fromstring(buffer.init({"<b>&'\"": 0.0})._repr_html_())


def test_rich_prints_it_without_being_imported_here() -> None:
    console = pytest.importorskip("rich.console").Console(width=140, record=True, file=io.StringIO())
    console.print(golden())
    text = console.export_text()
    lines = {tuple(line.split()) for line in GOLDEN.splitlines()}
    printed = {tuple(line.split()) for line in text.splitlines()}
    assert not [line for line in lines if line and line not in printed and line[0] != "Buffer(capacity=8,"]
    console.print(golden().__rich__())
    weird = fbuf.uniform(4)
    console.print(weird.summary(weird.init({"[red]x[/red]": 0.0})))  # no markup of rich's
    assert "[red]x[/red]" in console.export_text()


def test_bytes_and_numbers_as_people_read_them() -> None:
    assert [_tables.human(n) for n in (0, 1023, 1024, 3 * 2**30, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    assert [_tables.number(x) for x in (None, 3, 1234567, 0.125, 2.0, 1234.6, 1e12)] == [
        "",
        "3",
        "1,234,567",
        "0.125",
        "2",
        "1,235",
        "1e+12",
    ]


def test_a_flat_dict_for_loggers() -> None:
    flat = golden().to_dict()
    assert flat["ages/median"] == 1 and flat["episodes/number"] == 2 and flat["leaves/x/raw"] == 24
    assert (
        flat["stats/max_priority"] == 4 and flat["nbytes/device"] == 184 and flat["duplicates"] == pytest.approx(1 / 3)
    )
    assert all(isinstance(value, (int, float)) for value in flat.values())
    assert "draws/mean" not in flat  # nobody counts them


def test_a_state_that_was_donated_is_told() -> None:
    buffer = fbuf.Buffer(4)
    state = buffer.init({"t": jnp.float32(0)})
    jax.jit(buffer.add, donate_argnums=0)(state, {"t": jnp.float32(1)})
    with pytest.raises(RuntimeError, match="Buffer.summary: the state was donated.*state = step"):
        buffer.summary(state)

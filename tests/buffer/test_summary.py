"""`Buffer.summary` against plain Python (`tests/support/summary.py`), the hash of rows, and how summaries and states print."""

import itertools
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._buffer.summary import collect, statistics
from fbuf.samplers import Prioritized, Ranked
from tests.support import combinations as parts
from tests.support.refusals import raises
from tests.support.summary import check, check_all, check_unordered, close, history, plain_quantiles
from tests.support.tables import checks, pairwise
from tests.support.trees import x64


def test_every_number_is_that_of_plain_python():
    check_all("Device", "Prioritized", "Transition")
    told = history("Device", "Prioritized", "Transition")
    check(told, told.buffer.summary(told.state, compare=7), 7)
    before = jax.device_get(told.state)
    with jax.transfer_guard("disallow"), jax.debug_nans(True):
        told.buffer.summary(told.state)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, before, jax.device_get(told.state))))


def test_priorities_are_those_that_were_given():
    buffer = fbuf.Buffer(32, sampler=Prioritized(alpha=0.6))
    given = np.arange(1.0, 21.0, dtype=np.float32)
    state = buffer.extend(buffer.init(np.zeros(2, np.float32)), np.zeros((20, 2), np.float32), priority=given)
    state = buffer.update_priority(
        state, buffer.rows(state, last=4).index, np.array([-30.0, 0.5, np.nan, 7.0], np.float32)
    )
    expected = given.tolist()[:16] + [30.0, 0.5, 19.0, 7.0]
    close(buffer.summary(state).priorities, plain_quantiles(expected), rtol=1e-4)


def test_an_empty_buffer_has_a_summary():
    buffer = fbuf.Buffer(8, sampler=Prioritized(), episode_end=("done",), lanes=2)
    summary = buffer.summary(buffer.init({"x": 0.0, "done": False}))
    assert (summary.size, summary.anchors, summary.compared) == (0, 0, 0)
    assert summary.ages is summary.drawn_ages is summary.effective_size is summary.duplicates is None
    assert summary.episodes == (0, None, 0)
    assert "0 of 8 (0.0 %)" in repr(summary) and summary.to_dict()["size"] == 0


def test_every_bit_of_short_words_counts():
    rows = jnp.asarray([[0x0100, 0], [0, 1], [1, 0], [0, 0x0100]], jnp.uint16)
    assert collect.distinct(np.asarray(collect.hashed(rows))) == 4


def test_rows_are_hashed_by_their_bits():
    for dtype in ("bool", "int16", "uint32", "float32", "bfloat16", "int4"):
        rows = jnp.asarray(np.random.default_rng(0).integers(0, 2, (64, 3)), dtype)
        hashes = np.asarray(jax.jit(collect.hashed)(rows))
        bytes_of = [np.asarray(row).astype(np.complex64).tobytes() for row in np.asarray(rows)]
        assert collect.distinct(hashes) == len(set(bytes_of))
        for i, j in itertools.combinations(range(64), 2):
            assert (hashes[i].tolist() == hashes[j].tolist()) == (bytes_of[i] == bytes_of[j])
    zeros = np.array([[0.0], [-0.0], [np.nan], [np.nan]], np.float32)
    assert collect.distinct(np.asarray(jax.jit(collect.hashed)(zeros))) == 3


def test_rows_are_equal_only_if_all_leaves_are():
    buffer = fbuf.Buffer(8)
    state = buffer.init({"a": jnp.int32(0), "b": jnp.int32(0)})
    state = buffer.extend(state, {"a": jnp.array([1, 1, 2, 2, 1]), "b": jnp.array([1, 2, 1, 2, 1])})
    summary = buffer.summary(state)
    assert summary.distinct == 4 and summary.duplicates == pytest.approx(0.2)
    assert (summary.leaves["a"].distinct, summary.leaves["b"].distinct) == (2, 2)
    swapped = buffer.extend(buffer.init({"a": 0, "b": 0}), {"a": jnp.array([1, 2]), "b": jnp.array([2, 1])})
    assert buffer.summary(swapped).distinct == 2


def test_invalid_arguments_are_refused():
    buffer = fbuf.Buffer(4)
    state = buffer.init(0.0)
    raises(TypeError, "inside, use buffer.stats", lambda: jax.jit(buffer.summary)(state))
    for compare in (-1, True, 1.5, "all"):
        raises(ValueError, "expected an int >= 0, rows, or None", buffer.summary, state, compare=compare)
    raises(TypeError, r"The order is summary\(state\)", buffer.summary, 3)
    jax.jit(buffer.add, donate_argnums=0)(state, 1.0)
    raises(RuntimeError, "Buffer.summary: the state was donated.*state = step", buffer.summary, state)


GOLDEN = """\
Buffer(capacity=8, sampler=Prioritized(alpha=1.0, eps=0.0), lanes=2, episode_end=('done',))

rows
  held               6 of 8 (75 %)
  effective          4.481 (75 % of the anchors)
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

refused or dropped
  refused nonfinite  1

stats
  alpha              1
  beta               0.4
  max priority       4"""


def golden():
    sampler = Prioritized(alpha=1.0, eps=0.0)
    buffer = fbuf.Buffer(8, lanes=2, sampler=sampler, episode_end=("done",))
    state = buffer.init({"x": jnp.int32(0), "done": False})
    rows = {"x": jnp.array([[0, 0], [1, 1], [0, 1]]), "done": jnp.array([[0, 1], [1, 0], [0, 0]], bool)}
    state = buffer.extend(state, rows, priority=jnp.array([[1.0, 1], [2, 2], [jnp.nan, 4]]))
    return buffer.summary(state)


def test_names_are_escaped():
    buffer = fbuf.Buffer(4)
    state = buffer.init({"a\x00\x1b[31m\nb": np.float32(0), "ünï ☃": 0, "<b>&'\"": 0})
    for made in (buffer.summary(state), state):
        page = made._repr_html_()
        ElementTree.fromstring(page)
        for text in (repr(made), page):
            assert r"a\x00\x1b[31m\nb" in text and "ünï ☃" in text and "\x1b" not in text
        assert "&lt;b&gt;&amp;" in page and "<b>" not in page


def test_it_prints_as_a_table_and_is_a_flat_dict_for_loggers():
    summary = golden()
    assert repr(summary) == str(summary) == GOLDEN
    flat = summary.to_dict()
    assert flat["ages/median"] == 1 and flat["episodes/number"] == 2 and flat["leaves/x/raw"] == 24
    assert flat["stats/max_priority"] == 4 and flat["nbytes/device"] == 184
    assert flat["duplicates"] == pytest.approx(1 / 3)
    assert all(isinstance(value, (int, float)) for value in flat.values())
    assert "draws/mean" not in flat  # not counted by this sampler


EXAMPLE = {"obs": np.zeros((8, 8), np.uint8), "next": {"reward": np.float32(0)}}
STORAGES = {
    "Device": (fbuf.storages.Device(), "device"),
    "Host": (fbuf.storages.Host(keys=("obs",)), "host"),
    "Compressed": (fbuf.storages.Compressed(keys=("obs",)), "host"),
    "Deduplicated": (fbuf.storages.Deduplicated(keys=("obs",), blocks=64), "device, blocks"),
    "Memmap": (fbuf.storages.Memmap(keys=("obs",)), "host"),
}
TABLE = """\
BufferState(3 of 1,000 rows)

rows           one row        place
  next/reward  float32[]      device
  obs          uint8[84, 84]  device

beside         kept as             bytes
  header       int32[13]            52 B
  sampler      PrioritizedState  4.5 KiB"""


def shown(state):
    ElementTree.fromstring(state._repr_html_())
    return repr(state)


def test_a_state_prints_its_leaves_and_number_of_rows():
    buffer = fbuf.prioritized(1000)
    example = {"obs": np.zeros((84, 84), np.uint8), "next": {"reward": 0.0}}
    rows = {"obs": np.zeros((3, 84, 84), np.uint8), "next": {"reward": np.zeros(3, np.float32)}}
    assert repr(buffer.extend(buffer.init(example), rows)) == TABLE


def test_every_storage_names_its_leaves():
    for storage, place in STORAGES.values():
        state = fbuf.Buffer(32, storage=storage, lanes=2).init(EXAMPLE)
        lines = [line.split(None, 2) for line in shown(state).splitlines()]
        assert ["obs", "uint8[8,", f"8]  {place}"] in lines
        assert "next/reward  float32[]" in repr(state) and "0 of 32 rows" in repr(state)
        for leaf in (None, "text", object(), 3, np.zeros(2), jax.ShapeDtypeStruct((2,), np.uint8)):
            odd = jax.tree.map(lambda x, leaf=leaf: leaf, state)  # `jax.tree.map` makes states of anything
            assert shown(odd).startswith("BufferState(")
    ragged = fbuf.Buffer(8, storage=fbuf.storages.Ragged(maximum={"obs": (4,)}))
    text = repr(ragged.init({"obs": np.zeros(3, np.float32), "text": "", "reward": 0.0}))
    lines = [line.split() for line in text.splitlines()]
    assert ["text", "text", "host"] in lines and ["obs", "float32[4]", "host"] in lines and "length" not in text
    lines = [line.split() for line in repr(fbuf.Buffer(8).init(np.zeros(3, np.float32))).splitlines()]
    assert ["(row)", "float32[3]", "device"] in lines


@pytest.mark.more
def test_traced_donated_and_abstract_states_print():
    for name in ("Device", "Compressed", "Deduplicated"):
        state, seen = fbuf.Buffer(16, storage=STORAGES[name][0]).init(EXAMPLE), []
        jax.make_jaxpr(lambda state, seen=seen: seen.append(shown(state)))(state)
        assert "traced, of 16 rows" in seen[0]
        if name == "Device":
            jax.eval_shape(jax.vmap(lambda state: shown(state) and state), jax.tree.map(lambda x: x[None], state))
    buffer = fbuf.Buffer(16)
    state = buffer.init(np.zeros(2, np.float32))
    with jax.transfer_guard("disallow"):
        assert repr(state).startswith("BufferState(")
    jax.jit(buffer.extend, donate_argnums=0)(state, np.ones((2, 2), np.float32))
    assert repr(state).startswith("BufferState(donated, of 16 rows)")
    state = jax.eval_shape(fbuf.prioritized(16).init, EXAMPLE)
    assert repr(state).startswith("BufferState(? of 16 rows)") and "obs          uint8[8, 8]" in repr(state)
    for name in ("Device", "Deduplicated"):
        buffer = fbuf.Buffer(16, storage=STORAGES[name][0])
        init = jax.vmap(lambda _, buffer=buffer: buffer.add(buffer.init(EXAMPLE), EXAMPLE))
        state = jax.jit(jax.vmap(init))(np.zeros((2, 3)))
        assert "(6 of 2 x 3 x 16 rows)" in repr(state) and "obs          uint8[8, 8]" in repr(state)


def test_histograms_count_every_value():
    ages = np.array([0, 1, 1, 2, 99, 99], np.int64)
    counts, low, high, is_log = statistics.histogram(ages)
    assert (low, high, is_log) == (0, 99, False) and len(counts) == 25 and counts[0] == 4 and counts[-1] == 2
    flat = statistics.histogram(np.arange(320))
    assert set(flat.counts) == {10} and len(flat.counts) == 32
    wide = statistics.histogram(np.array([0.0, 0.01, 0.1, 1.0, 10.0, 100.0], np.float32))
    assert wide.is_log and sum(wide.counts) == 6 and wide.counts[0] == 2 and wide.counts[-1] == 1 and wide.low < 0.011
    same = statistics.histogram(np.ones(5, np.float32))
    assert not same.is_log and sum(same.counts) == 5 and statistics.histogram(np.zeros(0)) is None


def test_a_summary_shows_histograms_of_what_it_knows():
    buffer = fbuf.Buffer(64, sampler=Prioritized(alpha=1.0), episode_end=("done",))
    done = np.isin(np.arange(50), [9, 29])
    given = np.linspace(1, 5, 50, dtype=np.float32)
    state = buffer.extend(buffer.init({"done": False}), {"done": done}, priority=given)
    summary = buffer.summary(state)
    assert summary.histograms.keys() == {"age", "priority", "episode length"}
    assert {name: sum(one.counts) for name, one in summary.histograms.items()} == {
        **{"age": 50, "priority": 50},
        "episode length": 2,
    }
    page = ElementTree.fromstring(summary._repr_html_())
    assert len(list(page.iter("svg"))) == 3
    plain = fbuf.Buffer(8)
    assert plain.summary(plain.init({"x": 0})).histograms == {}


@pytest.mark.more
def test_rows_are_compared_in_blocks(monkeypatch):
    monkeypatch.setattr(collect, "BLOCK_BYTES", 300)  # three rows at a time
    collect.look._jitted.clear_cache()
    told = history("Device", "Prioritized", "Transition")
    check(told, told.buffer.summary(told.state))
    collect.look._jitted.clear_cache()


@pytest.mark.more
def test_priorities_of_ranks_and_of_zero():
    for sampler, loose in (
        (Prioritized(alpha=0.5, largest="held", eps=0.0), 1e-4),
        (Prioritized(on="host"), 1e-4),
        (Ranked(), 0.125),
    ):
        buffer, given = fbuf.Buffer(32, sampler=sampler), np.arange(1.0, 21.0, dtype=np.float32)
        state = buffer.extend(buffer.init(jnp.zeros(2)), jnp.zeros((20, 2)), priority=given)
        close(buffer.summary(state).priorities, plain_quantiles(given.tolist()), rtol=loose)
    buffer = fbuf.Buffer(8, sampler=Prioritized(alpha=0.0))
    summary = buffer.summary(buffer.extend(buffer.init(jnp.zeros(2)), jnp.zeros((4, 2))))
    assert summary.priorities is None and summary.effective_size == 4
    buffer = fbuf.Buffer(8, sampler=Prioritized(eps=0.0))
    summary = buffer.summary(buffer.extend(buffer.init(jnp.zeros(2)), jnp.zeros((4, 2)), priority=jnp.zeros(4)))
    assert summary.effective_size == 4 and summary.priorities is not None and summary.priorities.max == 0


@pytest.mark.more
def test_a_reset_row_is_not_a_step_of_an_episode():
    view = fbuf.views.Transition(autoreset="next_step", truncated=None)
    buffer = fbuf.Buffer(16, view=view)
    example = {"obs": 0.0, "action": 0, "reward": 0.0, "terminated": False}
    ends = np.array([0, 0, 1, 0, 0, 1, 0, 0, 0], bool)  # 3 steps, the reset row; 2 steps, the reset row; 2 steps
    rows = {"obs": np.zeros(9, np.float32), "action": np.zeros(9, np.int32), "reward": np.zeros(9, np.float32)}
    summary = buffer.summary(buffer.extend(buffer.init(example), {**rows, "terminated": ends}))
    assert (summary.episodes.number, summary.episodes.cut) == (2, 1)
    assert (summary.episodes.lengths.min, summary.episodes.lengths.max) == (2, 3)


@pytest.mark.more
def test_rows_of_eight_bytes_are_hashed_whole():
    with x64():
        rows = jnp.asarray([[1], [1 + 2**32], [1], [2**40]], jnp.int64)
        assert collect.distinct(np.asarray(collect.hashed(rows))) == 3


@pytest.mark.more
def test_ragged_leaves_have_bytes_but_no_raw_size():
    buffer = fbuf.Buffer(100, storage=fbuf.storages.Ragged(maximum={"obs": (4,)}))
    state = buffer.init({"obs": np.zeros(3, np.float32), "text": "", "reward": 0.0})
    rows = [{"obs": np.zeros(n % 4 + 1, np.float32), "text": "x" * n, "reward": 1.0} for n in range(20)]
    state = buffer.extend(state, rows)
    summary = buffer.summary(state)
    assert summary.nbytes == buffer.nbytes(state) and summary.distinct is None
    text = summary.leaves["text"]
    assert text.raw is None and text.ratio is None and text.stored is not None
    assert text.stored.host >= sum(range(20)) and summary.leaves["reward"].distinct == 1


SUMMARIES = pairwise(parts.STORAGES, parts.SAMPLERS, parts.VIEWS, refused=lambda storage, *case: case in parts.REFUSED)


test_summaries = checks(
    more=[
        (check_all, [("Compressed", "Consume", "Row")]),
        (check_unordered, [("Device", "TopK")]),
    ],
    exhaustive=[
        (check_all, SUMMARIES),
        (check_unordered, itertools.product(parts.UNORDERED_STORAGES, parts.UNORDERED_WRITERS)),
    ],
)

"""`buffer.plan` against what is then allocated and compiled."""

from xml.etree import ElementTree

import jax
import numpy as np
import pytest

import fbuf
from fbuf._core.text_table import human
from tests.support.refusals import raises
from tests.support.tables import checks, pairwise
from tests.support.trees import row_with

EXAMPLE = row_with(np.zeros((28, 28), np.uint8))
TRANSITION = fbuf.views.Transition(n_step=2, stack=4, autoreset="same_step")


def frames(count, seed=0):
    """A dot that wanders over a fixed background: compresses like a game."""
    rng = np.random.default_rng(seed)
    background = rng.integers(0, 255, (28, 28), np.uint8)
    out = np.repeat(background[None], count, 0)
    out[np.arange(count), np.arange(count) % 28, (np.arange(count) // 28) % 28] = 255
    return out


def rows(count):
    return row_with(frames(count), count)


STORAGES = {
    "device": fbuf.storages.Device(),
    "host": fbuf.storages.Host(keys=("obs",)),
    "memmap": fbuf.storages.Memmap(keys=("obs",)),
    "deduplicated": fbuf.storages.Deduplicated(keys=("obs",)),
}
VIEWS = {"row": fbuf.views.Row(), "transition": TRANSITION}
SAMPLERS = {"uniform": fbuf.samplers.Uniform(), "prioritized": fbuf.samplers.Prioritized(normalize="buffer")}


def check_fixed(view, sampler, storage):
    """Plan exactly what is of a fixed size."""
    view, sampler, storage = VIEWS[view], SAMPLERS[sampler], STORAGES[storage]
    buffer = fbuf.Buffer(3000, storage=storage, sampler=sampler, view=view)
    plan = buffer.plan(EXAMPLE, batch_size=16, num_rows=100)
    state = buffer.init(EXAMPLE)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert plan.device == held == buffer.nbytes(state)["device"]
    for _ in range(34):
        state = buffer.extend(state, rows(100))
    assert plan.host == pytest.approx(buffer.nbytes(state)["host"], rel=0.05, abs=100)
    known = {fbuf.storages.Host: "exact", fbuf.storages.Memmap: "the rest is on disk"}
    assert plan.host_from == known.get(type(storage), "none")
    assert plan.disk == pytest.approx(buffer.nbytes(state)["disk"], rel=0.05, abs=20_000)
    # Blocks are looked up 1,024 at a time, however few rows come.
    lot = 3 * 1024 * 160 if isinstance(storage, fbuf.storages.Deduplicated) else 0
    assert held < plan.peak_extend < held + 3 * 100 * 820 + 65536 + lot
    assert held < plan.peak_sample < held + 3 * 16 * 9 * 820 + 65536
    return plan, buffer, state


def deduplicated(blocks, on_full="retire"):
    storage = fbuf.storages.Deduplicated(keys=("obs",), block=(7, 8), blocks=blocks, on_full=on_full)
    return fbuf.Buffer(2000, storage=storage)


def distinct_rows(count):
    obs = np.repeat(frames(1), count, 0)
    obs[:, 0, :4] = np.arange(count, dtype="<u4").view(np.uint8).reshape(count, 4)
    return rows(count) | {"obs": obs}


@pytest.mark.more
def test_fixed_sizes_are_exact(tmp_path):
    plan, buffer, state = check_fixed("transition", "uniform", "host")
    fbuf.save(tmp_path, buffer, state, sync=False)
    saved = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert plan.checkpoint == pytest.approx(saved, rel=0.05)


def test_a_plan_draws_batches_of_the_buffer_s_size():
    few, many = (fbuf.Buffer(100, batch_size=size).plan(EXAMPLE).peak_sample for size in (None, 2000))
    assert many > 2 * few


def test_a_plan_allocates_no_rows_and_counts_them_twice_without_donation():
    plan = fbuf.Buffer(1_000_000_000, view=TRANSITION).plan(EXAMPLE, donated=False)
    assert plan.device > 780_000_000_000 and "GiB" in str(plan)
    assert plan.peak_extend == pytest.approx(2 * plan.device, rel=0.05)
    assert not plan.donated and "not donated" in str(plan)


def test_invalid_plan_arguments_are_refused():
    buffer = fbuf.Buffer(100, storage=fbuf.storages.Compressed(keys=("obs",)))
    raises(ValueError, "both rows and ratio", lambda: buffer.plan(EXAMPLE, rows=rows(10), ratio=2.0))
    raises(ValueError, "ratio is 0", buffer.plan, EXAMPLE, ratio=0.0)
    odd = rows(10) | {"obs": np.zeros((10, 3, 3), np.uint8)}
    raises(ValueError, "leaf 'obs' has shape", buffer.plan, EXAMPLE, rows=odd)


def test_a_plan_shows_itself():
    plan = fbuf.Buffer(1000).plan({"obs": np.zeros(17, np.float32)})
    assert repr(plan) == str(plan) and "peak on device, sample" in repr(plan)
    page = ElementTree.fromstring(plan._repr_html_())
    assert [cell.text for cell in page.iter("td")][:2] == ["state on device", human(plan.device)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("on_full", ["retire", "refuse"])
def test_plan_predicts_a_table_that_is_too_small(on_full):
    buffer = deduplicated(1024, on_full)
    given = distinct_rows(2000)
    plan = buffer.plan(EXAMPLE, rows=jax.tree.map(lambda x: x[:500], given))
    table = plan.table
    assert table is not None and table.load is not None and table.load > 1.5
    assert table.gives_way == {"retire": "retired", "refuse": "refused"}[on_full]
    state = buffer.init(EXAMPLE)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for start in range(0, 2000, 20):
        state = extend(state, jax.tree.map(lambda x, s=start: x[s : s + 20], given))
    stats = buffer.stats(state)
    assert int(stats["refused_rows" if on_full == "refuse" else "retired_rows"]) > 900
    held = 2000 - int(stats["refused_rows"]) - int(stats["retired_rows"])
    assert table.rows == pytest.approx(held, rel=0.15)
    who = "oldest" if on_full == "retire" else "others"
    assert f"{who} are {table.gives_way}: {table.wanted:,} places" in str(plan)
    larger = deduplicated(table.wanted, on_full).plan(EXAMPLE, rows=given).table
    assert larger is not None and larger.gives_way == "" and larger.rows == 2000


@pytest.mark.exhaustive
def test_plan_counts_rows_of_all_lanes():
    storage = fbuf.storages.Deduplicated(keys=("obs",), block=(7, 8), blocks=4096)
    one = fbuf.Buffer(2000, storage=storage).plan(EXAMPLE, rows=distinct_rows(400)).table
    lanes = jax.tree.map(lambda x: x.reshape(100, 4, *x.shape[1:]), distinct_rows(400))
    assert fbuf.Buffer(2000, storage=storage, lanes=4).plan(EXAMPLE, rows=lanes).table == one


test_every_fixed_size_is_exact = pytest.mark.in_place(
    checks(exhaustive=[(check_fixed, pairwise(VIEWS, SAMPLERS, STORAGES))])
)


@pytest.mark.more
def test_compressed_reports_the_source_of_its_estimate():
    buffer = fbuf.Buffer(20_000, storage=fbuf.storages.Compressed(keys=("obs",)), view=TRANSITION)
    raw = buffer.plan(EXAMPLE)
    assert raw.host_from == "raw upper bound" and raw.host == raw.host_raw
    given = buffer.plan(EXAMPLE, ratio=100.0)
    assert given.host_from == "ratio given" and given.host == raw.host_raw // 100
    sampled = buffer.plan(EXAMPLE, rows=rows(3000))
    assert sampled.host_from == "sample of 3000 rows"
    state = buffer.init(EXAMPLE)
    extend = jax.jit(buffer.extend, donate_argnums=0)
    for start in range(0, 20_000, 1000):
        state = extend(state, jax.tree.map(lambda x, s=start: x[s : s + 1000], rows(20_000)))
    host = buffer.nbytes(state)["host"]
    assert host < sampled.host_raw / 5
    assert sampled.host == pytest.approx(host, rel=0.25)
    noise = rows(2000) | {"obs": np.random.default_rng(0).integers(0, 255, (2000, 28, 28), np.uint8)}
    plan = buffer.plan(EXAMPLE, rows=noise)  # cannot be compressed
    assert plan.host == plan.host_raw


@pytest.mark.more
def test_without_rows_the_load_of_a_table_is_unknown():
    plan = deduplicated(4096).plan(EXAMPLE)
    assert plan.table is not None and plan.table.blocks is None and plan.table.places == 4096
    assert "places for blocks" in str(plan) and "give rows" in str(plan)
    few = deduplicated(4096).plan(EXAMPLE, rows=rows(10)).table
    assert few is not None and few.blocks is None and few.known == "10 rows are too few to tell"
    assert fbuf.Buffer(100).plan(EXAMPLE, rows=rows(100)).table is None

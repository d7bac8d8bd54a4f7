"""Every storage with every sampler, view and writer: the same batches, or an error that says why it makes no sense.

What a batch holds is shown elsewhere (`tests/test_model.py`); here that parts which know nothing of one another go together.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf.samplers import Consume, Epoch, Prioritized, Ranked, Staleness, Uniform
from fbuf.storages import Compressed, Deduplicated, Device, Host, Memmap, Ragged
from fbuf.views import Episode, Hindsight, Row, Sequence, Transition
from tests.disk import fresh, somewhere


def missed(achieved: jax.Array, goal: jax.Array) -> jax.Array:
    """A reward."""
    return -(achieved != goal).astype(jnp.float32)


STORAGES = {
    "Device": Device(),
    "Deduplicated": Deduplicated(keys=("obs",), blocks=512),
    "Compressed": Compressed(keys=("obs",)),
    "Compressed(path=...)": Compressed(keys=("obs",), path=somewhere("combinations")),
    "Host": Host(keys=("obs",)),
    "Memmap": Memmap(keys=("obs",)),
    "Ragged": Ragged(keys=(), maximum={"obs": (8, 8)}),
}
SAMPLERS = {
    "Uniform": Uniform(),
    "Uniform(over='episodes')": Uniform(over="episodes"),
    "Epoch": Epoch(),
    "Consume": Consume(2),
    "Prioritized": Prioritized(),
    "Prioritized(on='host')": Prioritized(on="host"),
    "Prioritized(replace=False)": Prioritized(replace=False, largest="held"),
    "Prioritized(spread=...)": Prioritized(
        spread=2, keep=0.5, decay=0.9, uniform=0.2, largest="held", normalize="buffer"
    ),
    "Ranked": Ranked(uniform=0.2, largest="held"),
    "Staleness(version=...)": Staleness(6, version="action"),
    "Staleness": Staleness(4, unit=3),
}
VIEWS = {
    "Row": Row(),
    "Transition": Transition(n_step=2, stack=3),
    "Sequence('stop')": Sequence(4, stride=2),
    "Sequence('mask')": Sequence(4, boundary="mask", at=1),
    "Sequence('cross')": Sequence(4, boundary="cross"),
    "Episode": Episode(6),
    "Hindsight": Hindsight(Transition(n_step=2, stack=3), missed, goal="goal", achieved="reached"),
}
WRITERS = {
    "Ring": fbuf.writers.Ring(),
    "TopK": fbuf.writers.TopK("reward"),
    "Reservoir": fbuf.writers.Reservoir(),
}
REFUSED = {
    (sampler, "Sequence('cross')"): "its windows cross the ends of episodes"
    for sampler in ("Uniform(over='episodes')", "Prioritized(spread=...)")
}
ANY_ORDER = ("Device", "Deduplicated", "Compressed", "Host")  # storages for writers that replace any row
UNORDERED = [s for s in SAMPLERS if SAMPLERS[s].by_episode is False and not getattr(SAMPLERS[s], "in_order", False)]
DEFAULT = {
    ("Epoch", "Sequence('mask')"),
    ("Consume", "Episode"),
    ("Staleness", "Hindsight"),
}
LANES, BATCH = 2, 6
EXAMPLE = {
    "obs": jax.ShapeDtypeStruct((8, 8), np.uint8),
    "action": jax.ShapeDtypeStruct((), np.int32),
    "goal": jax.ShapeDtypeStruct((), np.int32),
    "reached": jax.ShapeDtypeStruct((), np.int32),
    "reward": jax.ShapeDtypeStruct((), np.float32),
    "terminated": jax.ShapeDtypeStruct((), np.bool_),
    "truncated": jax.ShapeDtypeStruct((), np.bool_),
}


def rows_of(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    shape = (count, LANES)
    return {
        "obs": rng.integers(1, 5, (*shape, 1, 1), np.uint8) * np.ones((8, 8), np.uint8),
        "action": rng.integers(0, 9, shape).astype(np.int32),
        "goal": rng.integers(0, 9, shape).astype(np.int32),
        "reached": rng.integers(0, 9, shape).astype(np.int32),
        "reward": rng.normal(size=shape).astype(np.float32),
        "terminated": rng.random(shape) < 0.15,
        "truncated": rng.random(shape) < 0.1,
    }


def make(storage: str, sampler: str, view: str, writer: str = "Ring") -> fbuf.Buffer:
    return fbuf.Buffer(
        40,
        lanes=LANES,
        storage=fresh(STORAGES[storage]),
        sampler=SAMPLERS[sampler],
        view=VIEWS[view],
        writer=WRITERS[writer],
        episode_end=("terminated", "truncated") if WRITERS[writer].streams else (),
    )


@functools.cache
def batches(storage: str, sampler: str, view: str, writer: str = "Ring") -> list[Any]:
    """What a few steps draw: the ring goes round, priorities change."""
    buffer = make(storage, sampler, view, writer)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, rows: Any, key: Any) -> Any:
        state, batch = buffer.sample(buffer.extend(state, rows), key, BATCH)
        if buffer.sampler.prioritized:
            state = buffer.update_priority(state, batch.index, jnp.arange(1.0, BATCH + 1))
        data = {name: leaf for name, leaf in batch.data.items() if name != "obs_length"}  # of `Ragged`
        return state, (data, batch.mask, batch.index.slot, batch.probability, batch.weight)

    state, rng, out = buffer.init(EXAMPLE), np.random.default_rng(0), []
    for i in range(8):
        state, drawn = step(state, rows_of(rng, 5), jax.random.key(i))
        out.append(jax.device_get(drawn))
    stats = jax.device_get(buffer.stats(state))
    assert not any(stats[name] for name in stats if name.startswith(("refused", "expired", "retired")))
    return out


@pytest.mark.parametrize(
    ("sampler", "view"),
    [
        pytest.param(s, v, marks=() if (s, v) in DEFAULT else pytest.mark.slow)
        for s in SAMPLERS
        for v in VIEWS
        if (s, v) not in REFUSED
    ],
)
def test_storages_do_not_matter(sampler: str, view: str) -> None:
    reference = batches("Device", sampler, view)
    assert sum(int(mask.sum()) for _, mask, *_ in reference) > 2 * BATCH
    for storage in STORAGES:
        other = batches(storage, sampler, view)
        for one, two in zip(reference, other, strict=True):
            same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), one, two)
            assert all(jax.tree.leaves(same)), storage


@pytest.mark.parametrize("sampler", [pytest.param(s, marks=pytest.mark.slow) for s in UNORDERED])
@pytest.mark.parametrize("writer", [w for w in WRITERS if not WRITERS[w].streams])
def test_storages_do_not_matter_to_writers(writer: str, sampler: str) -> None:
    reference = batches("Device", sampler, "Row", writer)
    assert sum(int(mask.sum()) for _, mask, *_ in reference) > 2 * BATCH
    for storage in ANY_ORDER:
        other = batches(storage, sampler, "Row", writer)
        for one, two in zip(reference, other, strict=True):
            same = jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), one, two)
            assert all(jax.tree.leaves(same)), storage


@pytest.mark.parametrize("writer", [w for w in WRITERS if not WRITERS[w].streams])
def test_what_needs_rows_in_order_refuses_the_other_writers(writer: str) -> None:
    for view in VIEWS:
        for sampler in SAMPLERS:
            if view != "Row" or sampler not in UNORDERED:
                with pytest.raises(ValueError, match="may replace any"):
                    make("Device", sampler, view, writer)
            else:
                assert make("Device", sampler, view, writer).dense
    for storage in STORAGES:
        if storage not in ANY_ORDER:
            with pytest.raises(ValueError, match="the writer replaces any row"):
                make(storage, "Uniform", "Row", writer).init(EXAMPLE)


@pytest.mark.slow
@pytest.mark.parametrize("view", VIEWS)
def test_where_priorities_live_does_not_matter(view: str) -> None:
    for one, two in zip(
        batches("Device", "Prioritized", view), batches("Device", "Prioritized(on='host')", view), strict=True
    ):
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, one, two)))


@pytest.mark.parametrize("pair", REFUSED)
@pytest.mark.parametrize("storage", STORAGES)
def test_what_makes_no_sense_is_refused(storage: str, pair: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=REFUSED[pair]):
        make(storage, *pair)


def test_the_readme_shows_what_goes_together() -> None:
    lines = (Path(fbuf.__file__).parent.parent / "README.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| | `Row` |"))
    heads = [cell.replace("`", "").strip() for cell in lines[start].split("|")[2:-1]]
    table = {}
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :]):
        name, *cells = (cell.replace("`", "").replace('"', "'").strip() for cell in line.split("|")[1:-1])
        table |= {(name.removesuffix("()"), head): cell for head, cell in zip(heads, cells, strict=True)}
    for sampler, view in itertools.product(SAMPLERS, VIEWS):
        boundary = view.partition("'")[2].rstrip("')")
        head = next(h for h in heads if h.startswith(view.split("(")[0]) and (not boundary or boundary in h))
        plain = sampler.replace("(version=...)", "").replace("(replace=False)", "").replace("(on='host')", "")
        cell = table[plain, head]
        assert cell.split(":")[0].split(",")[0] == ("refused" if (sampler, view) in REFUSED else "yes")


READ_ONLY = ("DataSet", "Frozen")  # these two go together only: tests/test_frozen.py
CODECS = ("BitPack", "Codec", "Raw", "Zstd")


def test_nobody_is_missing() -> None:
    """A new part belongs into this table."""
    for package, known in (
        (fbuf.storages, STORAGES),
        (fbuf.samplers, SAMPLERS),
        (fbuf.views, VIEWS),
        (fbuf.writers, WRITERS),
    ):
        parts = {n for n in package.__all__ if not n.endswith("State") and n not in CODECS + READ_ONLY}
        assert parts == {name.split("(")[0] for name in known}, package.__name__

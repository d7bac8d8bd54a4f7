"""`fbuf._blocktable` against a dict: what it holds, who refers to it, when it refuses; with good hashes and with bad ones.

What a write does is tried in any order: blocks are inserted, references to them added (`refer`) and taken (`release`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as some
from jax import lax

from fbuf import _blocktable
from fbuf._blocktable import CHUNK_ITEMS, WAYS, Placed, Table

WORDS = 3
MANY = 2**32 - 10
"""References a place may have without being wrong."""
GOOD = _blocktable.digest
Digest = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def constant(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Every block has the same two buckets and the same fingerprint."""
    return jnp.full((blocks.shape[0],), 77, jnp.uint32), jnp.full((blocks.shape[0],), 5, jnp.uint32)


def one_fingerprint(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    return GOOD(blocks)[0], jnp.zeros((blocks.shape[0],), jnp.uint32)


def three_bits(blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    first, second = GOOD(blocks)
    return first & jnp.uint32(7), second & jnp.uint32(7)


DIGESTS: dict[str, Digest] = {"good": GOOD, "constant": constant, "equal": one_fingerprint, "3 bits": three_bits}


def some_digests(*quick: str) -> list[Any]:
    """All of them for a test that compiles much; those not named are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in DIGESTS]


@pytest.fixture(params=DIGESTS)
def digest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Digest]:
    """Runs a test with each of the hashes; nothing traced with one of them is left to the next."""
    _blocktable.rebuild.clear_cache()
    monkeypatch.setattr(_blocktable, "digest", DIGESTS[request.param])
    yield DIGESTS[request.param]
    _blocktable.rebuild.clear_cache()


def x64() -> contextlib.AbstractContextManager[Any]:
    return jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64()


# --------------------------------------------------------------------------------------------------- what is driven


def put(
    table: Table, blocks: jax.Array, items: jax.Array, number: jax.Array, lot: int, token: Any = None
) -> tuple[Table, Placed, jax.Array]:
    """Inserts `blocks[items[:number]]`."""
    token = jnp.zeros((), jnp.int32) if token is None else token

    def fetch(item: jax.Array) -> jax.Array:
        return blocks.at[item].get(mode="promise_in_bounds")

    return _blocktable.insert(table, fetch, items, number, lot, token)


class Calls(NamedTuple):
    insert: Callable[..., Any]
    refer: Callable[..., Any]
    release: Callable[..., Any]
    buckets: Callable[..., Any]


@functools.cache
def _calls(digest: Digest, lot: int) -> Calls:
    """All in jit; new functions for each digest, as jit caches by function and the digest changes behind its back."""
    return Calls(
        jax.jit(lambda table, blocks, items, number: put(table, blocks, items, number, lot)),
        REFER,
        RELEASE,
        jax.jit(lambda blocks, number: _blocktable._buckets(*digest(blocks), number), static_argnums=1),
    )


REFER = jax.jit(lambda table, ids, refers, won: _blocktable.refer(table, ids, refers, won, jnp.int32(0)))
RELEASE = jax.jit(lambda table, ids: _blocktable.release(table, ids, jnp.int32(0)))


def some_blocks(number: int, alphabet: int, seed: int, words: int = WORDS) -> np.ndarray:
    """uint32[number, words] of `alphabet` kinds of blocks, one of them zeros; above 2^20: all distinct."""
    draw = np.random.default_rng(seed)
    if alphabet > 2**20:
        made = draw.integers(0, 2**32, (number, words), dtype=np.uint32)
        made[:, 0] = draw.permutation(2**20)[:number].astype(np.uint32) << np.uint32(12) | np.uint32(seed % 2**12)
        return made
    kinds = np.random.default_rng(alphabet).integers(0, 2**32, (alphabet, words), dtype=np.uint32)
    kinds[0] = 0
    return kinds[draw.integers(0, alphabet, number)]


def names(blocks: Any) -> list[bytes]:
    return [block.tobytes() for block in np.asarray(blocks)]


class Model:
    """A table beside a dict of blocks and references. Every call checks all that is promised of the table."""

    def __init__(self, places: int, lot: int, words: int = WORDS) -> None:
        self.table = _blocktable.init(places, words)
        self.calls = _calls(_blocktable.digest, lot)
        self.lot = lot
        self.references: Counter[bytes] = Counter()
        self.ids: list[int] = []  # one for each reference
        self.refused = 0

    def contents(self) -> dict[bytes, int]:
        """Where each block lies that the table holds, with references or without."""
        places = np.asarray(self.table.names)
        places = places[places != 0]
        return dict(zip(names(np.asarray(self.table.words)[places]), places.tolist(), strict=True))

    @property
    def live(self) -> int:
        return int(self.table.live)

    def check(self, held: tuple[int, ...] = ()) -> None:
        """The whole table; `held` are places that `insert` has taken and `refer` has not settled yet."""
        words, count, home, prints, named, tally = (
            np.asarray(getattr(self.table, field.name)) for field in dataclasses.fields(Table)
        )
        slots = np.flatnonzero(named)
        assert count[0] == 1 and not words[0].any(), "place 0 was used"
        assert named[0] == 0 and ((prints != 0) == (named != 0)).all(), "a free slot is not empty"
        assert np.isin(np.flatnonzero(count[1:]) + 1, named).all(), "references to a block that cannot be found"
        contents = self.contents()
        assert len(contents) == len(slots), "one block has two slots"
        np.testing.assert_array_equal(home[named[slots]], slots)
        expected = np.zeros_like(count)
        expected[0] = 1
        for name, number in self.references.items():
            if number:
                expected[contents[name]] = number
        for place in held:
            assert expected[place] == 0, "a place that somebody refers to was given away"
            expected[place] = 1
        np.testing.assert_array_equal(count, expected)
        assert tally[0] == np.count_nonzero(count) - 1 and tally[1] < len(count)
        mine = slots[:, None] // WAYS == self.buckets(words[named[slots]])
        assert mine.any(axis=1).all(), "a slot lies outside its block's buckets"

    def buckets(self, blocks: np.ndarray) -> np.ndarray:
        return np.asarray(self.calls.buckets(blocks, self.table.names.shape[0] // WAYS))

    def insert(self, blocks: np.ndarray, items: np.ndarray, number: int) -> Placed:
        before, counts = self.contents(), np.asarray(self.table.count)
        self.table, placed, token = self.calls.insert(self.table, blocks, items, np.int32(number))
        way, won = (np.asarray(a) for a in placed)
        words, after, named = (np.asarray(a) for a in (self.table.words, self.table.count, self.table.names))
        assert int(token) == 0 and not way[number:].any() and not won[number:].any()
        assert (way >= 0).all() and not won[way == 0].any()
        self.check(tuple(way[won].tolist()))
        assert len(set(way[won].tolist())) == won.sum(), "two blocks won one place"
        given = blocks[items]
        met: dict[bytes, int] = {}
        for block, place, bucket in list(zip(given, way, self.buckets(given), strict=True))[:number]:
            name = block.tobytes()
            assert met.setdefault(name, place) == place, "equal blocks were parted"
            if place == 0:
                there = named.reshape(-1, WAYS)[bucket]
                lost = after.all() or ((there != 0) == (bucket[:, None] * WAYS + np.arange(WAYS) != 0)).all()
                assert lost, "a block was refused though there was room for it"
                self.refused += 1
            else:
                np.testing.assert_array_equal(words[place], block)
            old = before.get(name)
            if old is not None and (counts[old] or number <= self.lot):
                assert place == old, "a block that lay in the table was not found"
        assert set(way[won].tolist()) == {p for p in way.tolist() if p and not counts[p]}
        return placed

    def write(self, blocks: np.ndarray, number: int, seed: int, accepted: float = 1.0) -> Placed:
        """Inserts the first `number` of `blocks`, in another order, and refers to a share of them and to some others."""
        draw = np.random.default_rng(seed)
        size = len(blocks)
        items = draw.permutation(size).astype(np.int32)
        placed = self.insert(blocks, items, number)
        way, won = (np.asarray(a) for a in placed)
        known = np.array([*self.ids, *way[way != 0].tolist(), 0], np.int32)
        ids = np.concatenate([way, draw.choice(known, size)])
        won = np.concatenate([won, np.zeros((size,), bool)])
        refers = (draw.random(2 * size) < accepted) & (ids != 0)
        order = draw.permutation(2 * size)
        ids, won, refers = ids[order], won[order], refers[order]
        self.table, token = self.calls.refer(self.table, ids, refers, won)
        self.references.update(names(np.asarray(self.table.words)[ids[refers]]))
        self.ids += ids[refers].tolist()
        assert int(token) == 0
        self.check()
        return placed

    def release(self, share: float, seed: int, size: int) -> None:
        draw = np.random.default_rng(seed)
        number = min(size, round(share * len(self.ids)))
        chosen = draw.permutation(len(self.ids))[:number]
        ids = np.zeros((size,), np.int32)
        ids[:number] = np.array(self.ids, np.int32)[chosen]
        self.references.subtract(names(np.asarray(self.table.words)[ids[:number]]))
        self.ids = np.delete(np.array(self.ids, np.int32), chosen).tolist()
        self.table, token = self.calls.release(self.table, draw.permutation(ids))
        assert int(token) == 0
        self.check()


# ------------------------------------------------------------------------------------------------- against the dict

SIZE = 24
seeds = some.integers(0, 2**32 - 1)
steps = some.one_of(
    some.tuples(
        some.just("write"),
        seeds,
        some.sampled_from([1, 2, 12, 80, 2**32]),
        some.one_of(some.just(SIZE), some.integers(0, SIZE)),
        some.sampled_from([1.0, 0.6, 0.0]),
    ),
    some.tuples(some.just("release"), seeds, some.sampled_from([1.0, 0.5, 0.1])),
)
FULL = [("write", seed, 2**32, SIZE, 1.0) for seed in range(12)]
CAME_BACK = [("write", 1, 12, SIZE, 1.0), *[("release", s, 1.0) for s in range(3)], ("write", 2, 12, SIZE, 1.0)]


@pytest.mark.parametrize(("places", "lot"), [(64, SIZE), (160, 7)])
def test_any_sequence_of_calls(digest: Digest, places: int, lot: int) -> None:
    """Content, counts, living blocks and refusals, after every call."""
    refused = []

    @given(some.lists(steps, max_size=14))
    @example(FULL + [("release", 0, 0.5), *FULL])
    @example(CAME_BACK)
    def run(sequence: list[tuple[Any, ...]]) -> None:
        model = Model(places, lot)
        for kind, seed, *more in sequence:
            if kind == "write":
                alphabet, number, accepted = more
                model.write(some_blocks(SIZE, alphabet, seed), number, seed, accepted)
            else:
                model.release(more[0], seed, 2 * SIZE)
        refused.append(model.refused)

    run()
    assert max(refused) > 0, "no sequence filled the table"


def test_blocks_that_came_back_are_found(digest: Digest) -> None:
    """Even when new blocks of the same call could have taken their places."""
    model = Model(64, SIZE)
    old = some_blocks(SIZE, 2**32, 1)
    at = model.write(old, SIZE, 0).place
    at = dict(zip(names(old[np.random.default_rng(0).permutation(SIZE)]), np.asarray(at).tolist(), strict=True))
    for seed in range(3):
        model.release(1.0, seed, 2 * SIZE)
    assert model.live == 0 and len(model.contents()) == SIZE
    both = np.concatenate([some_blocks(8, 2**32, 2), old[::3], old[::3]])
    way = np.asarray(model.insert(both, np.arange(SIZE, dtype=np.int32), SIZE).place)
    assert way[8:16].tolist() == way[16:].tolist() == [at[name] for name in names(old[::3])]
    assert not set(way[:8].tolist()) & set(way[8:].tolist())


@pytest.mark.parametrize("lot", [1000, 128])
def test_noise_takes_a_place_each(lot: int) -> None:
    model = Model(4096, lot)
    placed = model.write(some_blocks(1000, 2**32, 0), 1000, 0)
    assert np.asarray(placed.won).all() and model.live == 1000 == len(set(np.asarray(placed.place).tolist()))


@pytest.mark.parametrize("kind", [0, 7])
@pytest.mark.parametrize(("places", "lot"), [(64, SIZE), (160, 7)])
def test_equal_blocks_take_one_place(digest: Digest, places: int, lot: int, kind: int) -> None:
    """The zeros among them: place 0 holds zeros too, and is none of theirs."""
    model = Model(places, lot)
    placed = model.write(np.full((SIZE, WORDS), kind, np.uint32), SIZE, 0)
    way, won = (np.asarray(a) for a in placed)
    assert len(set(way.tolist())) == 1 and way[0] != 0 and won.sum() == 1 and model.live == 1


@pytest.mark.parametrize("lot", [1000, 128])
def test_many_equal_blocks(lot: int) -> None:
    model = Model(4096, lot)
    blocks = some_blocks(1000, 5, 0)
    placed = model.write(blocks, 1000, 0)
    assert np.asarray(placed.won).sum() == model.live == len(set(np.asarray(placed.place).tolist())) == 5


@pytest.mark.parametrize("number", [0, 1, SIZE - 1, SIZE])
@pytest.mark.parametrize("lot", [1, 5, SIZE])
def test_lots_and_numbers(number: int, lot: int) -> None:
    model = Model(64, lot)
    model.write(some_blocks(SIZE, 12, 0), 12, 0)
    before = jax.tree.map(np.asarray, model.table)
    placed = model.insert(some_blocks(SIZE, 2**32, 5), np.arange(SIZE, dtype=np.int32), number)
    assert np.asarray(placed.won).tolist() == [True] * number + [False] * (SIZE - number)
    if number == 0:
        jax.tree.map(np.testing.assert_array_equal, before, model.table)


def test_one_bucket_pair_is_used_to_its_last_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks want the same 64 places of 320: they get every one, and no other."""
    monkeypatch.setattr(_blocktable, "digest", constant)
    model = Model(320, 16)
    room = WAYS * 2 - (0 in model.buckets(np.zeros((1, WORDS), np.uint32)))
    placed = model.write(some_blocks(100, 2**32, 0), 100, 0)
    assert np.asarray(placed.won).sum() == room and model.refused == 100 - room


def test_slots_of_blocks_that_nobody_refers_to_are_given_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks want the same 64 slots, which are named by blocks of no references while most places were never used."""
    monkeypatch.setattr(_blocktable, "digest", constant)
    model = Model(320, 16)
    for seed in range(9):
        refused = model.refused
        model.write(some_blocks(16, 2**32, seed), 16, seed)
        if refused:  # the lot before found few slots free; now there is none
            assert model.refused == refused
        model.release(1.0, seed, 32)
        model.release(1.0, seed, 32)
    assert model.live == 0 and len(model.contents()) < 65 and model.refused < 16


def test_places_are_given_in_order_of_arrival() -> None:
    """Blocks that came together lie together; the hand passes what somebody refers to, and comes round."""
    model = Model(64, 8)
    blocks = some_blocks(60, 2**32, 0)
    order = np.arange(60, dtype=np.int32)
    placed = model.insert(blocks, order, 60)
    assert np.asarray(placed.place).tolist() == list(range(1, 61))
    table, _ = model.calls.refer(model.table, placed.place, np.ones((60,), bool), placed.won)
    model.table, _ = model.calls.release(table, np.array([5, 6, 7, 40, 41, 0], np.int32))
    place = np.asarray(model.calls.insert(model.table, some_blocks(60, 2**32, 1), order, np.int32(10))[1].place)
    assert place[:10].tolist() == [61, 62, 63, 5, 6, 7, 40, 41, 0, 0]


def test_one_bucket() -> None:
    """A table of 31 places: every block has the same two buckets."""
    model = Model(WAYS, 8)
    placed = model.write(some_blocks(40, 2**32, 0), 40, 0)
    assert sorted(np.asarray(placed.place)[np.asarray(placed.won)].tolist()) == list(range(1, WAYS))
    assert model.refused == 40 - (WAYS - 1)


# ------------------------------------------------------------------------------------------------------------- load


def load_at_first_refusal(places: int, blocks: np.ndarray, batch: int) -> float:
    """Share of the places taken by distinct blocks before the batch of which the table refuses one first."""
    add = jax.jit(lambda table, blocks, items: put(table, blocks, items, jnp.int32(batch), batch), donate_argnums=0)
    table, items = _blocktable.init(places, blocks.shape[1]), np.arange(batch, dtype=np.int32)
    for begin in range(0, len(blocks), batch):
        table, placed, _ = add(table, blocks[begin : begin + batch], items)
        if not np.asarray(placed.place).all():
            return begin / (places - 1)
    raise AssertionError("nothing was refused")


def sprites(number: int, words: int = 36) -> np.ndarray:
    """12 x 12 pictures, all distinct, of few values: two bars on a plain ground, as games draw them, and a number."""
    at = np.arange(number)
    made = np.zeros((number, 12, 12), np.uint8)
    made[at, at % 12] = 87
    made[at, :, at // 12 % 12] = 236
    made[at, at // 144 % 12, at // 1728 % 12] = at // 20736 + 1
    made[at, 11, 8:] = (at[:, None] >> np.arange(0, 32, 8)).astype(np.uint8)
    return made.reshape(number, 144).view(np.uint32)[:, :words]


CONTENTS: dict[str, Callable[[int], np.ndarray]] = {
    "noise": lambda number: some_blocks(number, 2**32, 3),
    "sprites": sprites,
    "counter": lambda number: np.arange(1, number + 1, dtype=np.uint32)[:, None] * np.uint32([[1, 0, 0]]),
}


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("places", [4096, 65_504])
def test_no_refusal_before_every_place_is_taken(places: int, content: str) -> None:
    batch = places // 128 // 8 * 8
    assert load_at_first_refusal(places, CONTENTS[content](places + 2 * batch), batch) > 1 - batch / places


@pytest.mark.parametrize(("places", "lot"), [(64, 16), (96, 64), (320, 64), (4096, 256)])
def test_no_refusal_while_blocks_come_and_go(places: int, lot: int) -> None:
    """A table that is always full: as many blocks go as come, and each finds the place of one that went."""

    @functools.partial(jax.jit, donate_argnums=0)
    def turn(table: Table, blocks: jax.Array, old: jax.Array) -> Any:
        table, token = _blocktable.release(table, old, jnp.int32(0))
        table, placed, token = put(table, blocks, jnp.arange(lot, dtype=jnp.int32), jnp.int32(lot), lot, token)
        table, _ = _blocktable.refer(table, placed.place, jnp.ones((lot,), bool), placed.won, token)
        return table, placed.place

    table, draw = _blocktable.init(places, 1), np.random.default_rng(0)
    held: list[np.ndarray] = [np.zeros((lot,), np.int32)] * ((places - 1) // lot)
    for number in range(40 * places // lot):
        blocks = np.arange(number * lot, (number + 1) * lot, dtype=np.uint32)[:, None]
        table, place = turn(table, blocks, held.pop(draw.integers(len(held))))
        assert np.asarray(place).all(), f"refused after {number} turns"
        held.append(np.asarray(place))
    assert int(table.live) == (places - 1) // lot * lot


def test_hashes_of_blocks_that_are_nearly_alike() -> None:
    """No two pairs alike, fingerprints that meet no oftener than chance, all buckets used evenly."""
    base = np.random.default_rng(0).integers(0, 256, 144).astype(np.uint8)
    near = np.tile(base, (2**15, 1))
    at = np.arange(2**15)
    near[at, at % 144] ^= (1 + at // 144 % 255).astype(np.uint8)
    near[at, (at % 144 + 1 + at // 36720) % 144] ^= (at // 36720).astype(np.uint8)
    for blocks in (
        near.view(np.uint32),
        sprites(2**15),
        CONTENTS["counter"](2**15),
        np.eye(2**11, 36, dtype=np.uint32),
    ):
        blocks = np.unique(blocks, axis=0)
        first, second = (np.asarray(h).astype(np.uint64) for h in GOOD(jnp.asarray(blocks)))
        assert len(np.unique(first << np.uint64(32) | second)) == len(blocks)
        assert len(blocks) - len(np.unique(second)) <= 4  # 0.1 are expected
        if len(blocks) < 2**14:
            continue
        both = first % np.uint64(32) * np.uint64(32) + second % np.uint64(32)  # neither says anything of the other
        for hashes in (first, second, both):
            for buckets in [1024] if hashes is both else [128, 2047]:
                counts = np.bincount((hashes % np.uint64(buckets)).astype(np.int64), minlength=buckets)
                mean = len(blocks) / buckets
                excess = ((counts - mean) ** 2 / mean).sum() / (buckets - 1)
                assert abs(excess - 1) < 5 * np.sqrt(2 / (buckets - 1)), f"{buckets} buckets: chi-square {excess:.2f}"


# ----------------------------------------------------------------------------------------------------------- counts


def table_of(counts: np.ndarray) -> Table:
    """A table with these counts from place 1 on, and distinct blocks."""
    places = -(-(len(counts) + 1) // WAYS) * WAYS
    number = np.arange(places, dtype=np.uint32)
    count = np.zeros((places,), np.uint32)
    count[0], count[1 : len(counts) + 1] = 1, counts
    tally = jnp.array([np.count_nonzero(counts), 1], jnp.uint32)
    empty = _blocktable.init(places, 1)
    return dataclasses.replace(empty, words=jnp.asarray(number[:, None]), count=jnp.asarray(count), tally=tally)


@given(
    some.lists(some.integers(1, 9), min_size=1, max_size=40),
    some.lists(some.integers(0, 9), min_size=1, max_size=40),
    seeds,
)
@example([400], [400], 0)
@example([399], [400], 0)
@example([3] * 133, [0], 0)
@example([1] * 400, [0], 0)
def test_how_many_died(gone: list[int], kept: list[int], seed: int) -> None:
    """Blocks that lose all references, however many each had, among blocks that keep one."""
    draw = np.random.default_rng(seed)
    counts = np.array([*gone, *(k + 1 for k in kept)], np.uint32)
    lost = np.array([*gone, *kept])
    ids = np.repeat(np.arange(1, len(lost) + 1), lost)
    ids = draw.permutation(np.concatenate([ids, np.zeros((800 - len(ids),), ids.dtype)])).astype(np.int32)
    start = table_of(np.concatenate([counts, np.zeros((512 - len(counts),), np.uint32)]))
    table, _ = RELEASE(start, ids)
    assert int(start.live) - int(table.live) == len(gone)
    np.testing.assert_array_equal(np.asarray(table.count)[1 : len(lost) + 1], counts - lost)


@pytest.mark.parametrize("each", [1, 2, 3, 7, 181, 3000, CHUNK_ITEMS - 1, CHUNK_ITEMS])
def test_how_many_died_of_the_most_at_once(each: int) -> None:
    """`CHUNK_ITEMS` references, `each` to every block: the sum of reciprocals is furthest from whole numbers."""
    blocks = CHUNK_ITEMS // each
    ids = np.resize(np.arange(1, blocks + 1, dtype=np.int32), CHUNK_ITEMS)
    ids[blocks * each :] = 0
    counts = np.zeros((CHUNK_ITEMS,), np.uint32)
    counts[:blocks] = each
    table, _ = RELEASE(table_of(counts), ids)
    assert int(table.live) == 0 and np.asarray(table.count).sum() == 1


def test_counts_near_2_to_the_32() -> None:
    """More references than an int32 counts: added and taken exactly, and nobody dies of it."""
    counts = np.array([MANY, 2**31, 2**31 - 1, 3], np.uint32)
    ids = np.repeat(np.arange(5, dtype=np.int32), 8)
    every, none = np.ones((40,), bool) & (ids != 0), np.zeros((40,), bool)
    start = table_of(counts)
    table, _ = REFER(start, ids, every, none)
    assert int(table.live) == 4
    np.testing.assert_array_equal(np.asarray(table.count)[:5], [1, MANY + 8, 2**31 + 8, 2**31 + 7, 11])
    table, _ = RELEASE(table, ids)
    assert int(table.live) == 4
    jax.tree.map(np.testing.assert_array_equal, table, start)
    fewer = np.array([1, 1, 1, 2, 2, 3, 4, 4, 4], np.int32)
    table, _ = RELEASE(table, fewer)
    np.testing.assert_array_equal(np.asarray(table.count)[:5], [1, MANY - 3, 2**31 - 2, 2**31 - 2, 0])
    assert int(table.live) == 3


def test_inserting_leaves_counts_near_2_to_the_32_alone() -> None:
    model = Model(64, SIZE)
    blocks = some_blocks(SIZE, 2**32, 0)
    model.write(blocks, SIZE, 0)
    taken = np.asarray(model.table.count) > 0
    count = np.where(taken & (np.arange(64) > 0), np.uint32(MANY), np.asarray(model.table.count))
    table = dataclasses.replace(model.table, count=jnp.asarray(count))
    again, placed, _ = model.calls.insert(table, blocks, np.arange(SIZE, dtype=np.int32), np.int32(SIZE))
    assert not np.asarray(placed.won).any() and np.asarray(placed.place).all()
    jax.tree.map(np.testing.assert_array_equal, again, table)


# -------------------------------------------------------------------------------------------- jit, vmap, scan, memory


class Cycle(NamedTuple):
    """What a step of the loop below needs and leaves."""

    table: Table
    old: jax.Array  # int32[2, K], what the latest two steps referred to; the older ones are released
    token: jax.Array


def cycle(now: Cycle, blocks: jax.Array, number: jax.Array, lot: int) -> tuple[Cycle, tuple[jax.Array, ...]]:
    """What a write into a ring of two rows does with the table."""
    size = blocks.shape[0]
    table, token = _blocktable.release(now.table, now.old[0], now.token)
    items = jnp.arange(size, dtype=jnp.int32)
    table, placed, token = put(table, blocks, items[::-1], number, lot, token)
    refers = (placed.place != jnp.int32(0)) & (items % jnp.int32(5) != jnp.int32(0))
    table, token = _blocktable.refer(table, placed.place, refers, placed.won, token)
    ids = jnp.where(refers, placed.place, jnp.int32(0))
    return Cycle(table, jnp.stack([now.old[1], ids]), token), (table.live, placed.place, placed.won)


def start(places: int, size: int, words: int) -> Cycle:
    return Cycle(_blocktable.init(places, words), jnp.zeros((2, size), jnp.int32), jnp.zeros((), jnp.int32))


def same(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("digest", some_digests("good"), indirect=True)
def test_eager_jit_scan_and_vmap_are_the_same(digest: Digest) -> None:
    """Three tables, seven steps, different numbers of blocks: one after the other, in loops, and all at once."""
    turns, size, lot = 7, 30, 8
    draw = np.random.default_rng(0)
    blocks = np.stack([[some_blocks(size, a, turn) for turn in range(turns)] for a in (12, 90, 2**32)])
    number = np.array([[0, 1, 8, 30, 30, 0, 17], draw.integers(0, 31, turns), [30] * turns], np.int32)
    one = jax.jit(lambda now, blocks, number: cycle(now, blocks, number, lot))
    ends, outs = [], []
    for i in range(3):
        now, out = start(96, size, WORDS), []
        for turn in range(turns):
            now, made = one(now, blocks[i, turn], number[i, turn])
            out.append(made)
        ends.append(now)
        outs.append(jax.tree.map(lambda *a: np.stack(a), *out))
    assert [int(end.table.count.astype(bool).sum()) - 1 for end in ends][2] > 30

    eager = start(96, size, WORDS)
    for turn in range(2):
        eager, made = cycle(eager, jnp.asarray(blocks[1, turn]), jnp.asarray(number[1, turn]), lot)
        same(made, jax.tree.map(lambda a, turn=turn: a[turn], outs[1]))

    def loop(now: Cycle, blocks: jax.Array, number: jax.Array) -> Any:
        return lax.scan(lambda now, xs: cycle(now, *xs, lot), now, (blocks, number))

    scanned = jax.jit(loop)
    for i in range(3):
        same(scanned(start(96, size, WORDS), blocks[i], number[i]), (ends[i], outs[i]))

    starts = jax.tree.map(lambda a: jnp.stack([a] * 3), start(96, size, WORDS))
    together = jax.tree.map(lambda *a: np.stack(a), *ends), jax.tree.map(lambda *a: np.stack(a), *outs)
    same(jax.jit(jax.vmap(loop))(starts, blocks, number), together)


def in_jit(now: Cycle, blocks: jax.Array, number: jax.Array) -> Any:
    return cycle(now, blocks[0], number[0], 64)


def in_scan(now: Cycle, blocks: jax.Array, number: jax.Array) -> Any:
    return lax.scan(lambda now, xs: cycle(now, *xs, 64), now, (blocks, number))


@pytest.mark.parametrize(
    ("way", "tables"),
    [
        (in_jit, None),
        (in_scan, 3),
        pytest.param(in_scan, None, marks=pytest.mark.slow),
        pytest.param(in_jit, 3, marks=pytest.mark.slow),
    ],
)
def test_in_place(way: Callable[..., Any], tables: int | None) -> None:
    """The temporary bytes of a cycle do not know how large the table is."""
    temporary = {}
    for places in (4096, 262_144):
        given = jax.eval_shape(lambda places=places: start(places, 256, 36))
        given = given, jax.ShapeDtypeStruct((4, 256, 36), jnp.uint32), jax.ShapeDtypeStruct((4,), jnp.int32)
        if tables is not None:
            given = jax.tree.map(lambda a: jax.ShapeDtypeStruct((tables, *a.shape), a.dtype), given)
        fn = way if tables is None else jax.vmap(way)
        compiled = jax.jit(lambda *args, fn=fn: fn(*args), donate_argnums=0).lower(*given).compile()
        memory = compiled.memory_analysis()
        temporary[places] = memory.temp_size_in_bytes
        assert memory.alias_size_in_bytes >= (tables or 1) * places * 40 * 4
    assert temporary[262_144] <= temporary[4096] + 256
    assert temporary[262_144] < (tables or 1) * 10 * 256 * 36 * 4


# ---------------------------------------------------------------------------------------------------------- rebuild


@pytest.mark.parametrize("places", [64, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("digest", some_digests("good", "constant"), indirect=True)
def test_rebuilding_keeps_who_is_referred_to(digest: Digest, places: int) -> None:
    """Content and counts go along, blocks of no references stay behind, and those that find no place are counted."""
    model = Model(160, 7)
    for seed in range(6):
        model.write(some_blocks(SIZE, 2**32, seed), SIZE, seed, 0.8)
    for seed in range(2):
        model.release(0.2, seed, 2 * SIZE)
    assert 0 < model.live < len(model.contents())
    made, moved, lost = _blocktable.rebuild(model.table, places)
    old, new, moved = jax.tree.map(np.asarray, (model.table, made, moved))
    live = np.flatnonzero(old.count[1:]) + 1
    assert new.count.shape == (places,) and new.count[0] == 1 and not new.words[0].any()
    assert not np.delete(moved, live).any(), "a place that nobody refers to was moved"
    went = live[moved[live] != 0]
    assert int(lost) == len(live) - len(went)
    np.testing.assert_array_equal(new.words[moved[went]], old.words[went])
    np.testing.assert_array_equal(new.count[moved[went]], old.count[went])
    assert np.count_nonzero(new.count) == 1 + len(went) == 1 + len(set(moved[went].tolist()))
    if places == 64 and digest is GOOD:
        assert int(lost) >= len(live) - (places - 1) > 0
    if places == 1024 and digest is GOOD:
        assert int(lost) == 0
    model.calls = _calls(digest, SIZE)
    model.table, model.references = (
        made,
        Counter(dict(zip(names(old.words[went]), old.count[went].tolist(), strict=True))),
    )
    model.ids = np.repeat(moved[went], old.count[went]).tolist()
    assert model.live == len(went)
    model.check()
    model.write(some_blocks(SIZE, 2**32, 1), SIZE, 9)


@pytest.mark.parametrize("places", [1024, 4096, 8192])
def test_rebuilding_a_full_table_into_one_hardly_larger_loses_nothing(places: int) -> None:
    for seed in range(4):
        model = Model(places, 64)
        blocks = some_blocks(places - 1, 2**32, seed)
        model.table, placed, _ = model.calls.insert(
            model.table, blocks, np.arange(places - 1, dtype=np.int32), places - 1
        )
        assert np.asarray(placed.place).all()
        made, moved, lost = _blocktable.rebuild(model.table, places + 32)
        assert int(lost) == 0 and int(made.live) == places - 1
        np.testing.assert_array_equal(np.asarray(made.words)[np.asarray(moved)[1:]], np.asarray(model.table.words)[1:])


def test_rebuilding_an_empty_table() -> None:
    made, moved, lost = _blocktable.rebuild(_blocktable.init(64, WORDS), 128)
    same(made, _blocktable.init(128, WORDS))
    assert not np.asarray(moved).any() and int(lost) == 0


# ------------------------------------------------------------------------------------------------------------ flags

FLAGS: dict[str, Callable[[], Any]] = {
    "x64": x64,
    "strict dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "debug nans": lambda: jax.debug_nans(True),
    "tracer leaks": jax.checking_leaks,
}


def one_step() -> Any:
    blocks = jnp.asarray(some_blocks(30, 12, 0))
    return jax.jit(lambda now: cycle(now, blocks, jnp.int32(21), 8))(start(64, 30, WORDS))


@pytest.fixture(scope="module")
def plain() -> Any:
    return one_step()


@pytest.mark.parametrize("flag", FLAGS)
def test_clean_under_flags(flag: str, plain: Any) -> None:
    """And the same result, to the bit."""
    with FLAGS[flag]():
        got = one_step()
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.dtype, b.dtype), got, plain)
    same(got, plain)

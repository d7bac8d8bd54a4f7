"""`fbuf._algorithms.block_table` beside a dict:"""

import contextlib
import dataclasses
import functools
from collections import Counter, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as some

from fbuf._algorithms import block_table
from fbuf._algorithms.block_table import WAYS, Table

WORDS, SIZE = 3, 24
GOOD = block_table.digest


def constant(blocks):
    """Every block has the same two buckets and the same fingerprint."""
    return jnp.full((blocks.shape[0],), 77, jnp.uint32), jnp.full((blocks.shape[0],), 5, jnp.uint32)


def one_fingerprint(blocks):
    return GOOD(blocks)[0], jnp.zeros((blocks.shape[0],), jnp.uint32)


def three_bits(blocks):
    first, second = GOOD(blocks)
    return first & jnp.uint32(7), second & jnp.uint32(7)


DIGESTS = {"good": GOOD, "constant": constant, "equal": one_fingerprint, "3 bits": three_bits}


@contextlib.contextmanager
def hashing(name):
    """Another digest; programs traced with one are not left to the next."""
    block_table.rebuild.clear_cache()
    block_table.digest = DIGESTS[name]
    try:
        yield
    finally:
        block_table.digest = GOOD
        block_table.rebuild.clear_cache()


def put(table, blocks, items, number, chunk, token=None):
    token = jnp.zeros((), jnp.int32) if token is None else token

    def blocks_of(item):
        return blocks.at[item].get(mode="promise_in_bounds")

    return block_table.insert(table, blocks_of, items, number, chunk, token)


Calls = namedtuple("Calls", "insert refer release buckets")


@functools.cache
def _calls(digest, chunk):
    """All in jit; new functions for each digest, as jit caches by function and the digest changes behind its back."""
    return Calls(
        jax.jit(lambda table, blocks, items, number: put(table, blocks, items, number, chunk)),
        REFER,
        RELEASE,
        jax.jit(lambda blocks, number: block_table._buckets(*digest(blocks), number), static_argnums=1),
    )


REFER = jax.jit(lambda table, ids, refers, won: block_table.refer(table, ids, refers, won, jnp.int32(0)))
RELEASE = jax.jit(lambda table, ids: block_table.release(table, ids, jnp.int32(0)))


def some_blocks(number, alphabet, seed, words=WORDS):
    """uint32[number, words] of `alphabet` kinds of blocks, one of them zeros; above 2^20: all distinct."""
    draw = np.random.default_rng(seed)
    if alphabet > 2**20:
        made = draw.integers(0, 2**32, (number, words), dtype=np.uint32)
        made[:, 0] = draw.permutation(2**20)[:number].astype(np.uint32) << np.uint32(12) | np.uint32(seed % 2**12)
        return made
    kinds = np.random.default_rng(alphabet).integers(0, 2**32, (alphabet, words), dtype=np.uint32)
    kinds[0] = 0
    return kinds[draw.integers(0, alphabet, number)]


def names(blocks):
    return [block.tobytes() for block in np.asarray(blocks)]


class Model:
    """A table beside a dict of blocks and references. Every call checks all that is promised of the table."""

    def __init__(self, places, chunk, words=WORDS):
        self.table = block_table.init(places, words)
        self.calls = _calls(block_table.digest, chunk)
        self.chunk = chunk
        self.references = Counter()
        self.ids = []  # one for each reference
        self.refused = 0

    def contents(self):
        places = np.asarray(self.table.names)
        places = places[places != 0]
        return dict(zip(names(np.asarray(self.table.words)[places]), places.tolist(), strict=True))

    @property
    def live(self):
        return int(self.table.live)

    def check(self, held=()):
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
            assert expected[place] == 0, "a place with references was given away"
            expected[place] = 1
        np.testing.assert_array_equal(count, expected)
        assert tally[0] == np.count_nonzero(count) - 1 and tally[1] < len(count)
        mine = slots[:, None] // WAYS == self.buckets(words[named[slots]])
        assert mine.any(axis=1).all(), "a slot is outside its block's buckets"

    def buckets(self, blocks):
        return np.asarray(self.calls.buckets(blocks, self.table.names.shape[0] // WAYS))

    def insert(self, blocks, items, number):
        before, counts = self.contents(), np.asarray(self.table.count)
        self.table, placed, token = self.calls.insert(self.table, blocks, items, np.int32(number))
        way, won = (np.asarray(a) for a in placed)
        words, after, named = (np.asarray(a) for a in (self.table.words, self.table.count, self.table.names))
        assert int(token) == 0 and not way[number:].any() and not won[number:].any()
        assert (way >= 0).all() and not won[way == 0].any()
        self.check(tuple(way[won].tolist()))
        assert len(set(way[won].tolist())) == won.sum(), "two blocks won one place"
        given = blocks[items]
        met = {}
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
            if old is not None and (counts[old] or number <= self.chunk):
                assert place == old, "a block that lay in the table was not found"
        assert set(way[won].tolist()) == {p for p in way.tolist() if p and not counts[p]}
        return placed

    def write(self, blocks, number, seed, accepted=1.0):
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

    def release(self, share, seed, size):
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


def check_sequences(digest, places, chunk):
    refused = []

    @settings(max_examples=settings.default.max_examples // 2)
    @given(some.lists(steps, max_size=14))
    @example(FULL + [("release", 0, 0.5), *FULL])
    @example(CAME_BACK)
    def run(sequence):
        model = Model(places, chunk)
        for kind, seed, *more in sequence:
            if kind == "write":
                alphabet, number, accepted = more
                model.write(some_blocks(SIZE, alphabet, seed), number, seed, accepted)
            else:
                model.release(more[0], seed, 2 * SIZE)
        refused.append(model.refused)

    with hashing(digest):
        run()
    assert max(refused) > 0, "no sequence filled the table"


def check_rebuild(digest, places):
    """Content and counts are kept, blocks of no references are not, and those that find no place are counted."""
    with hashing(digest):
        _check_rebuild(places)


def _check_rebuild(places):
    model, is_good = Model(160, 7), block_table.digest is GOOD
    for seed in range(6):
        model.write(some_blocks(SIZE, 2**32, seed), SIZE, seed, 0.8)
    for seed in range(2):
        model.release(0.2, seed, 2 * SIZE)
    assert 0 < model.live < len(model.contents())
    made, moved, lost = block_table.rebuild(model.table, places)
    old, new, moved = jax.tree.map(np.asarray, (model.table, made, moved))
    live = np.flatnonzero(old.count[1:]) + 1
    assert new.count.shape == (places,) and new.count[0] == 1 and not new.words[0].any()
    assert not np.delete(moved, live).any(), "a place without references was moved"
    went = live[moved[live] != 0]
    assert int(lost) == len(live) - len(went)
    np.testing.assert_array_equal(new.words[moved[went]], old.words[went])
    np.testing.assert_array_equal(new.count[moved[went]], old.count[went])
    assert np.count_nonzero(new.count) == 1 + len(went) == 1 + len(set(moved[went].tolist()))
    if places == 64 and is_good:
        assert int(lost) >= len(live) - (places - 1) > 0
    if places == 1024 and is_good:
        assert int(lost) == 0
    model.calls = _calls(block_table.digest, SIZE)
    model.table = made
    model.references = Counter(dict(zip(names(old.words[went]), old.count[went].tolist(), strict=True)))
    model.ids = np.repeat(moved[went], old.count[went]).tolist()
    assert model.live == len(went)
    model.check()
    model.write(some_blocks(SIZE, 2**32, 1), SIZE, 9)


def load_at_first_refusal(places, blocks, batch):
    """Share of the places taken by distinct blocks before the batch of which the table refuses one first."""
    add = jax.jit(lambda table, blocks, items: put(table, blocks, items, jnp.int32(batch), batch), donate_argnums=0)
    table, items = block_table.init(places, blocks.shape[1]), np.arange(batch, dtype=np.int32)
    for begin in range(0, len(blocks), batch):
        table, placed, _ = add(table, blocks[begin : begin + batch], items)
        if not np.asarray(placed.place).all():
            return begin / (places - 1)
    raise AssertionError("nothing was refused")


def sprites(number, words=36):
    """12 x 12 pictures, all distinct, of few values: two bars on a plain ground, as games draw them, and a number."""
    at = np.arange(number)
    made = np.zeros((number, 12, 12), np.uint8)
    made[at, at % 12] = 87
    made[at, :, at // 12 % 12] = 236
    made[at, at // 144 % 12, at // 1728 % 12] = at // 20736 + 1
    made[at, 11, 8:] = (at[:, None] >> np.arange(0, 32, 8)).astype(np.uint8)
    return made.reshape(number, 144).view(np.uint32)[:, :words]


CONTENTS = {
    "noise": lambda number: some_blocks(number, 2**32, 3),
    "sprites": sprites,
    "counter": lambda number: np.arange(1, number + 1, dtype=np.uint32)[:, None] * np.uint32([[1, 0, 0]]),
}


def check_load(places, content):
    """A table refuses nothing before every place is taken."""
    batch = places // 128 // 8 * 8
    assert load_at_first_refusal(places, CONTENTS[content](places + 2 * batch), batch) > 1 - batch / places

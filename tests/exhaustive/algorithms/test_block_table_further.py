"""Further cases of blocktable, which take long: see `tests/more/algorithms/test_block_table.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.more.algorithms.test_block_table import same  # noqa: F401
from tests.support.block_table import SIZE, WORDS, check_rebuild, check_sequences, cycle, some_blocks, start
from tests.support.tables import checks


def test_eager_jit_scan_and_vmap_are_the_same():
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

    def loop(now, blocks, number):
        return lax.scan(lambda now, xs: cycle(now, *xs, lot), now, (blocks, number))

    scanned = jax.jit(loop)
    for i in range(3):
        same(scanned(start(96, size, WORDS), blocks[i], number[i]), (ends[i], outs[i]))

    starts = jax.tree.map(lambda a: jnp.stack([a] * 3), start(96, size, WORDS))
    together = jax.tree.map(lambda *a: np.stack(a), *ends), jax.tree.map(lambda *a: np.stack(a), *outs)
    same(jax.jit(jax.vmap(loop))(starts, blocks, number), together)


def test_rebuilding_keeps_blocks_that_are_referred_to():
    check_rebuild("good", 64)
    check_rebuild("good", 1024)
    check_rebuild("constant", 64)


test_checks = checks((check_sequences, [("good", 160, 7), ("constant", 64, SIZE), ("equal", 160, 7)]))

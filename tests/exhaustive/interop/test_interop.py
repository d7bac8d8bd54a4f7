"""Further cases of `tests/more/interop`: priorities of windows, bounded memory, and every bit of an npz."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np

import fbuf
from fbuf.interop import from_flashbax
from tests.more.interop.test_flashbax import (  # noqa: F401
    ALPHA,
    BY_PRIORITY,
    filled,
    flashbax_allowed,
    leaves_of,
    test_priorities_are_those_of_flashbax,
)
from tests.more.interop.test_interop import (  # noqa: F401
    MEMORY,
    test_a_storage_filled_by_an_import_keeps_every_row_or_raises,
    test_every_truncation_and_flipped_bit_is_noticed,
)
from tests.support.fixtures import fixed
from tests.support.processes import run_python

buffer_kind = fixed(("flat", 6), ("item", 19))
on_full = fixed("refuse")
compress = fixed(False)


def test_priorities_of_windows_are_kept():
    """A view that draws the same windows takes every priority, without a warning."""
    made = BY_PRIORITY["flat"]()
    state, held = filled(2, 19, made=made)
    windows = np.flatnonzero(leaves_of(state, 2).reshape(-1) > 0)
    state = made.set_priorities(state, jnp.asarray(windows), jnp.linspace(0.1, 3.0, len(windows)))
    view, sampler = fbuf.views.Sequence(2, episode_end=()), fbuf.samplers.Prioritized(ALPHA, eps=0.0)
    buffer = fbuf.Buffer(16, lanes=2, view=view, sampler=sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, ours = from_flashbax(state, buffer=buffer, priority_exponent=ALPHA)
    _, batch = buffer.sample(ours, jax.random.key(0), 256)
    t = np.asarray(batch.data["step"]["t"])[:, 0]
    theirs = leaves_of(state, 2)
    np.testing.assert_allclose(batch.probability, theirs[t // 1000, t % 1000 % 8] / theirs.sum(), rtol=2e-5)


def test_memory_stays_bounded(tmp_path):
    more, kept = map(int, run_python(MEMORY, tmp_path).stdout.split()[-2:])
    assert more < 100 + kept, (more, kept)

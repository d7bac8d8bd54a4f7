"""Windows of 500 random settings in 20 logs each, against their oracle."""

import jax
import numpy as np
import pytest

from tests.support.window_cases import check, program, random_view
from tests.views.test_sequence_steps import LOGS

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("part", range(100))
def test_buffers_have_the_windows_of_the_oracle(part):
    for seed in range(100 + 5 * part, 105 + 5 * part):
        view = random_view(np.random.default_rng(seed))
        for log in range(LOGS):
            check(view, 1000 * seed + log)
    program.cache_clear()
    jax.clear_caches()

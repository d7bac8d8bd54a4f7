"""Further cases of demo, which take long: see `tests/more/test_demo.py`."""

from __future__ import annotations

import jax
import numpy as np

import tests.more.test_demo as _more
from fbuf.demo import _report

runs = _more.runs


def test_every_storage_trains_alike(runs):
    assert len(runs) > 1
    first = runs["device"]
    assert np.isfinite(first.losses).all() and (first.losses > 0).all()
    for result in runs.values():
        np.testing.assert_array_equal(result.losses, first.losses)
        jax.tree.map(np.testing.assert_array_equal, result.params, first.params)
        assert result.episodes == first.episodes
        assert _report.identical(first, result)

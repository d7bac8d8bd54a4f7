"""Saved sharded buffers on eight devices. `test_saved.py` runs these in a process of their own."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import sharded as support
from tests.support.sharded_saved import check_moved


@pytest.mark.parametrize("shards", [(8, 4), (8, 0), (0, 8), (2, 8)], ids=str)
@pytest.mark.parametrize("sampler", support.SAMPLERS)
def test_another_number_of_shards_draws_the_same(sampler: str, shards: Any, tmp_path: Path) -> None:
    check_moved(support.buffer_of(sampler), *shards, tmp_path)

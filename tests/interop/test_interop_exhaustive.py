"""Further cases: priorities of windows, bounded memory, and every bit of an npz."""

import pytest

from tests.interop.test_flashbax_more import (  # noqa: F401
    ALPHA,
    BY_PRIORITY,
    filled,
    flashbax_allowed,
    leaves_of,
    test_priorities_are_those_of_flashbax,
)
from tests.interop.test_interop_more import (  # noqa: F401
    MEMORY,
    test_a_storage_filled_by_an_import_keeps_every_row_or_raises,
    test_every_truncation_and_flipped_bit_is_noticed,
)
from tests.support.processes import run_python
from tests.support.tables import one_of

pytestmark = pytest.mark.exhaustive

buffer_kind = one_of(("flat", 6), ("item", 19))
on_full = one_of("refuse")
compress = one_of(False)


def test_memory_stays_bounded(tmp_path):
    more, kept = map(int, run_python(MEMORY, tmp_path).stdout.split()[-2:])
    assert more < 100 + kept, (more, kept)

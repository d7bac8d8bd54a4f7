"""Further cases of `tests/more/interop`: priorities of windows, bounded memory, and every bit of an npz."""

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
from tests.support.processes import run_python
from tests.support.tables import one_of

buffer_kind = one_of(("flat", 6), ("item", 19))
on_full = one_of("refuse")
compress = one_of(False)


def test_memory_stays_bounded(tmp_path):
    more, kept = map(int, run_python(MEMORY, tmp_path).stdout.split()[-2:])
    assert more < 100 + kept, (more, kept)

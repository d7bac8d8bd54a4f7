"""The tests of rows in files with both storages and other parts."""

from typing import Any

from fbuf.samplers import Epoch, Prioritized, Uniform
from fbuf.views import Row, Sequence
from tests.more.storages.test_memmap import (  # noqa: F401
    test_a_checkpoint_of_one_loads_at_another_path,
    test_another_process_goes_on,
    test_sizes_are_those_of_the_disk,
)
from tests.storages.test_memmap import (  # noqa: F401
    test_a_path_that_holds_a_store_names_resume,
    test_a_resumed_state_is_the_state_it_was,
    test_masked_lanes_and_changed_rows_come_back,
)
from tests.support.memmap import TRANSITION
from tests.support.tables import one_of

PARTS: list[Any] = [(storage, TRANSITION, Prioritized(), 2) for storage in ("memmap", "files")]
PARTS += [("files", Sequence(3, autoreset="same_step"), Uniform(over="episodes"), 3), ("memmap", Row(), Epoch(), None)]
way = one_of(*((*parts, rows) for parts in PARTS for rows in (7, 12, 31)))
storage = one_of("files")
end = one_of("pass", "import os; os._exit(0)")

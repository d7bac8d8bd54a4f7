from tests.more.parts.test_parts import test_is_in_place  # noqa: F401
from tests.parts.test_parts import (  # noqa: F401
    test_a_storage_of_rounded_rows,
    test_parts_are_saved_and_loaded,
    test_parts_work_in_jit_and_scan,
)
from tests.support.parts import BUFFERS
from tests.support.tables import one_of

ON_THE_DEVICE = [name for name in BUFFERS if name not in ("codec", "storage, sampler, view")]
name = one_of(*ON_THE_DEVICE)
large = one_of(*ON_THE_DEVICE)
stored = one_of("storage with priorities, stacks")

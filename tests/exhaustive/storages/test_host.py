"""The tests of buffers on the host with every storage and form of calling."""

from fbuf.samplers import Prioritized
from tests.more.storages.test_host import (  # noqa: F401
    test_any_one_device_is_served_and_several_are_refused,
    test_readers_beside_a_writer,
    test_the_device_part_stays_in_place,  # noqa: F401
    test_without_the_token_a_write_does,
    untied,
)
from tests.storages.test_host import (  # noqa: F401
    test_a_window_that_lost_a_row_is_masked_whole,
    test_an_old_state_can_mask_instead,
    test_an_old_state_reads_its_own_rows_then_raises,
    test_changed_rows_leave_the_old_state_alone,
    test_counters_cross_2_to_32,
    test_every_dtype_and_shape_crosses_the_callback,
    test_every_form_gives_the_batches_of_device,
    test_no_write_overtakes_a_late_read,
    test_peek_vmaps_over_keys,
    test_the_callbacks_for_accelerators_agree,
    test_two_futures_of_one_state_never_read_each_others_rows,
    test_what_cannot_be_vmapped_says_so,
    test_writes_of_one_jit_reach_the_store_in_order,
)
from tests.support.tables import one_of

storage = one_of("host", "memmap")
form = one_of("eager", "jit", "donated")
calls = one_of("eager", "jit", "donated", "scan")
lanes = one_of(None, 3)
sampler = one_of(Prioritized())

import gc

import fbuf
from tests.contracts.test_ownership import (  # noqa: F401
    gate,
    nothing_left,
    test_a_handle_closes_its_store,
    test_a_store_goes_with_its_last_state_without_the_garbage_collector,
    test_init_cannot_be_traced,
    test_single_leaves_do_not_own_the_store,
    test_states_are_pytrees,
    test_what_was_made_of_a_pending_read_outlives_every_state,
)
from tests.more.contracts.test_ownership import (  # noqa: F401
    test_a_deep_copy_shares_the_store_and_goes_its_own_way,
    test_a_pending_write_without_a_reader_raises_no_error,
    test_a_state_of_another_process_is_refused,
)
from tests.support.ownership import agree, filled, make
from tests.support.tables import one_of
from tests.support.threads import Thread


def test_opening_and_dropping_in_threads():
    buffer = make("host")

    def work(first):
        for i in range(20):
            assert agree(buffer.rows(filled(buffer, first + i)))[0] == first + i

    for thread in [Thread(work, 1000 * i) for i in range(3)]:
        thread.ends()
    gc.collect()
    assert fbuf.stores() == []


storage = one_of("host", "memmap")

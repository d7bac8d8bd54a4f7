"""`Replay` between threads for minutes: no row is lost, doubled or torn, and memory stays constant."""

import pytest

from fbuf.storages import Compressed
from tests.replay.test_replay_more import (  # noqa: F401
    CASES,
    test_collected_rows_and_priorities_give_the_batches_of_writing_at_once,
)
from tests.support.replay import BUFFERS, at_exit, same_batches_as_the_buffer, soak
from tests.support.tables import checks, one_of, pairwise
from tests.support.two_replays import SAMPLERS, STORAGES, VIEWS

pytestmark = pytest.mark.exhaustive


def refused(storage, *case):
    return case[:2] == ("consume", "sequence")  # windows are not consumed


case = one_of(*[c for c in pairwise(STORAGES, SAMPLERS, VIEWS, (None, 2), refused=refused) if c not in CASES])
test_checks = checks(
    (soak, [(name, 4000) for name in BUFFERS]),
    (at_exit, ["room", "error"]),
    (same_batches_as_the_buffer, [Compressed(keys=("obs",))]),
)

"""Further cases of flags: see `tests/contracts/test_flags.py`."""

import pytest

from tests.support.flags import BUFFERS, EXAMPLE, FLAGS, check, check_all_flags, every_method, flags, given, plain
from tests.support.tables import checks


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", BUFFERS)
def test_every_method_under_each_flag(name, flag):
    if flag == "debug_infs" and name == "rich":
        pytest.skip("an empty tree of minima holds infinity")
    buffer = BUFFERS[name]
    state, x = buffer.init(EXAMPLE), given(buffer)
    with flags(flag):
        got = every_method(buffer, state, x)
    check(name, plain(got))


test_checks = checks((check_all_flags, sorted(BUFFERS.keys() - {"rich", "host"})))

"""More of `samplers.Consume`: other views and lanes, many rows, many states at once, in place."""

import fbuf
from fbuf.samplers import Consume
from fbuf.views import Transition
from tests.samplers.test_consume import Trial, check_places
from tests.support.tables import checks, one_of

case = one_of((Consume(3), Transition(n_step=2, autoreset="same_step"), 2, True))


def test_no_row_is_drawn_too_often(case):
    sampler, view, lanes, donated = case
    buffer = fbuf.Buffer(11 * (lanes or 1), sampler=sampler, view=view, lanes=lanes)
    Trial(buffer, 0, donated).run(40)


test_checks = checks((check_places, [(3000,)]))

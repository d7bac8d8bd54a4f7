"""Numbers with their nouns, in what users read."""

import numpy as np

import fbuf
from fbuf._core.text_table import counted


def test_a_noun_is_in_the_number_of_its_count():
    assert [counted(n, "row") for n in (0, 1, 2, 2000)] == ["0 rows", "1 row", "2 rows", "2,000 rows"]
    replay = fbuf.Replay(fbuf.uniform(4), {"t": np.int32(0)})
    replay.add({"t": np.int32(1)})
    assert repr(replay) == "Replay(Buffer(capacity=4), 1 row)"

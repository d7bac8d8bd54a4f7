"""Every transition that is drawn from what other libraries wrote, from a data set and from a buffer."""

import numpy as np
import pytest

from fbuf import interop
from tests.support.foreign import FILES, world
from tests.support.foreign.check import check_draws

PARTS = {"part": world.steps(25), "wrapped": world.steps(57)[-40:]}
WHOLE = [step for steps in world.episodes(6) for step in steps]


def cpprb(name):
    with np.load(FILES / f"cpprb_{name}.npz") as file:
        return interop.from_cpprb(dict(file), position=25 if name == "part" else 17, ends="terminated")


CASES = {
    "tianshou part": (lambda: interop.from_file(FILES / "tianshou_part.hdf5"), [PARTS["part"]], True),
    "tianshou wrapped": (lambda: interop.from_file(FILES / "tianshou_wrapped.hdf5"), [PARTS["wrapped"]], True),
    "tianshou ignore": (lambda: interop.from_file(FILES / "tianshou_ignore.hdf5"), [PARTS["wrapped"]], False),
    "d3rlpy": (
        lambda: interop.from_file(FILES / "d3rlpy_tuple.h5"),
        [[s for steps in world.episodes(7) if len(steps) > 1 or steps[0].terminated for s in steps]],
        False,
    ),
    "robomimic": (lambda: interop.from_file(FILES / "robomimic_0.hdf5", ends="terminated"), [WHOLE], True),
    "cpprb part": (lambda: cpprb("part"), [PARTS["part"]], True),
    "cpprb wrapped": (lambda: cpprb("wrapped"), [PARTS["wrapped"]], True),
    "skrl": (
        lambda: interop.from_skrl(FILES / "skrl_wrapped.npz", position=13, filled=True),
        [world.steps(33, lane)[-20:] for lane in range(2)],
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_transition_is_drawn(name, tmp_path):
    make, lanes, final = CASES[name]
    check_draws(make, lanes, tmp_path / "set", final)

"""Saved mixtures: what transforms have learnt, and loading into other capacities, storages and modes."""

import fbuf
from fbuf.samplers import Epoch, Prioritized
from fbuf.storages import Compressed
from tests.support.mixture import MODES, filled, played, same, two


def test_a_loaded_mixture_continues_with_the_same_batches(tmp_path):
    one = fbuf.Buffer(20, sampler=Prioritized(normalize="buffer"))
    other = fbuf.Buffer(40, storage=Compressed(keys=("obs",)), sampler=Epoch())
    mixture = two(one, other, **MODES["annealed"])
    state, _ = played(mixture, filled(mixture), 0, 2)
    state = mixture.set(state, fractions={"a": 0.5}, beta=0.6)
    fbuf.save(tmp_path, mixture, state, extra={"step": 7})
    loaded, again, extra = fbuf.load(tmp_path, extra=True)
    assert loaded == mixture and extra == {"step": 7}
    assert same((again.fractions, again.beta, again.counters), (state.fractions, state.beta, state.counters))
    assert same(played(mixture, state, 2, 3)[1], played(loaded, again, 2, 3)[1])

"""Mixtures with further samplers, storages and data sets, saved and loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fbuf
from fbuf._host.store.store import Store
from fbuf.samplers import Prioritized
from fbuf.storages import Compressed
from fbuf.views import Transition
from tests.support import pieces
from tests.support.mixture import check_in_place, check_sampler, filled, refused, same
from tests.support.tables import checks

pytestmark = pytest.mark.more


def test_data_sets_are_mixed(tmp_path):
    rows = pieces.make(tmp_path)
    buffer, held = fbuf.datasets.open(tmp_path, view=Transition(autoreset="same_step"))
    sets = fbuf.Mixture({"one": buffer, "two": buffer}, fractions={"one": 0.3, "two": 0.7})
    both, batch = sets.sample({"one": held, "two": held}, jax.random.key(0), 10)
    assert batch.index.source.tolist() == [0] * 3 + [1] * 7 and bool(jnp.all(batch.mask))
    actions = np.asarray(rows["action"])[np.asarray(batch.index.slot)]
    assert (np.asarray(batch.data["action"]) == actions).all()

    online = fbuf.Buffer(50, view=Transition(autoreset="same_step"), sampler=Prioritized())
    mixture = fbuf.Mixture({"online": online, "offline": buffer})
    state = {"online": online.init({name: array[0] for name, array in rows.items()}), "offline": held}
    state, batch = mixture.sample(state, jax.random.key(0), 8)
    assert batch.index.source.tolist() == [1] * 8
    state |= {"online": online.extend(state["online"], {name: array[:20] for name, array in rows.items()})}
    state, batch = mixture.sample(state, jax.random.key(1), 8)
    assert batch.index.source.tolist() == [0] * 4 + [1] * 4
    state = mixture.update_priority(state, batch.index, jnp.ones(8))
    after = mixture.update_rows(state, batch.index, {"action": batch.data["action"]})
    assert same(after["offline"], state["offline"]) and not refused(mixture, after)


def test_a_host_reads_only_the_rows_it_returns(monkeypatch):
    asked = []
    real = Store.read

    def read(self, requests):
        asked.extend((np.count_nonzero(tickets), len(tickets)) for _, tickets, *_ in requests)
        return real(self, requests)

    monkeypatch.setattr(Store, "read", read)
    buffers = {name: fbuf.Buffer(20, storage=Compressed(keys=("obs",))) for name in "ab"}
    mixture = fbuf.Mixture(buffers)
    batch = mixture.peek(filled(mixture), jax.random.key(0), 16, fractions={"a": 0.25})
    assert batch.index.source.tolist() == [0] * 4 + [1] * 12
    jax.block_until_ready(batch)
    assert sorted(asked) == [(4, 16), (12, 16)]


test_checks = checks((check_sampler, [("Prioritized(on='host')", "random")]))
test_in_place_checks = pytest.mark.in_place(checks((check_in_place, [("Prioritized", "annealed")])))

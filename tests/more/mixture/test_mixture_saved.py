"""Saved mixtures: what transforms have learnt, and loading into other capacities, storages and modes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fbuf
from fbuf.samplers import Epoch, Prioritized
from fbuf.storages import Compressed, Memmap
from tests.support.mixture import EXAMPLE, MODES, filled, played, same, two


def test_a_loaded_mixture_continues_with_the_same_batches(tmp_path: Path) -> None:
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


def test_buffers_are_loaded_into_other_capacities_and_storages(tmp_path: Path) -> None:
    mixture = two(fbuf.Buffer(20, sampler=Prioritized()), fbuf.uniform(40))
    state, _ = played(mixture, filled(mixture), 0, 1)
    fbuf.save(tmp_path / "c", mixture, state)
    small, fewer = fbuf.load(tmp_path / "c", resize={"a": 5})
    assert small["a"].capacity == 5 and small["b"].capacity == 40
    assert small["a"].last(fewer["a"], 5).data["id"].tolist() == list(range(1015, 1020))
    files = two(mixture["a"], fbuf.Buffer(40, storage=Memmap(str(tmp_path / "rows"), keys=("obs",))))
    loaded, again = fbuf.load(tmp_path / "c", files)
    assert loaded == files and same(played(mixture, state, 1, 2)[1], played(loaded, again, 1, 2)[1])
    annealed = dataclasses.replace(mixture, annealed=True, fractions={"a": 0.25, "b": 0.75}, target="source")
    loaded, again = fbuf.load(tmp_path / "c", annealed, example={"a": EXAMPLE, "b": EXAMPLE})
    assert loaded == annealed and again.fractions.tolist() == [0.25, 0.75]

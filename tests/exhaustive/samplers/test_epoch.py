"""Every kind of epoch over every view; every order of verbs in place."""

from __future__ import annotations

import dataclasses

import pytest

import fbuf
from fbuf.samplers import Epoch
from fbuf.views import Transition
from tests.support.epoch import (
    Trial,
    buffer_of,
    check_inplace,
    check_places,
    empty,
)


@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("view", ["row", "steps"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_more_programs(shuffle, drop_last, view, lanes):
    for seed in range(6, 12):
        Trial(buffer_of(Epoch(shuffle, drop_last), view, lanes), seed).run(80, (1, 5, 40))


@pytest.mark.optimized
@pytest.mark.parametrize(("view", "order"), [("row", "es"), ("row", "ses"), ("steps", "ses")])
def test_a_scan_copies_nothing(view, order):
    check_inplace(view, order)


def test_rows_of_another_sampler():
    """`convert` tells the sampler of rows that arrived before it."""
    view = Transition(n_step=3)
    uniform = fbuf.Buffer(capacity=12, view=view)
    trial = Trial(dataclasses.replace(uniform, sampler=Epoch()), 0)
    trial.buffer, trial.state = uniform, empty(uniform)
    for _ in range(3):
        trial.extend(7)
    trial.buffer = dataclasses.replace(uniform, sampler=Epoch())
    trial.state = uniform.convert(trial.buffer, trial.state)
    trial.model = trial.model.convert(trial.buffer)
    trial.sample(4)
    trial.extend(1)
    trial.sample(40)


def test_everyone_is_as_likely_at_every_place():
    check_places(2000, 20_000)

"""Buffers for the model of `tests/support/model.py`: views, samplers and storages by name, and programs of methods."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st

import fbuf
from fbuf.views import Episode, Sequence, Transition
from tests.support.disk import fresh, somewhere
from tests.support.tables import by_tier

FIELDS = {
    "action": ((), np.int32),
    "final": ((4,), np.uint8),
    "info/id": ((), np.int32),
    "obs": ((4,), np.uint8),
    "reward": ((), np.float32),
    "terminated": ((), np.bool_),
    "truncated": ((), np.bool_),
}
VIEWS = {
    "row": fbuf.views.Row(),
    "one step": Transition(autoreset="same_step"),
    "one frame": Transition(n_step=2, stack=1, gamma=0.5, autoreset="same_step"),
    "three steps": Transition(n_step=3, gamma=0.9, autoreset="same_step"),
    "stack": Transition(stack=3, autoreset="same_step"),
    "stack, steps": Transition(n_step=3, stack=3, gamma=0.9, pad="repeat", autoreset="same_step"),
    "final": Transition(n_step=3, gamma=0.9, final_observation="final"),
    "final, stack": Transition(n_step=2, stack=3, final_observation="final"),
    "final, repeat": Transition(n_step=2, stack=4, final_observation="final", pad="repeat"),
    "next step": Transition(autoreset="next_step"),
    "next step, stack": Transition(n_step=3, stack=3, autoreset="next_step", pad="repeat"),
    "other ends": Transition(n_step=2, truncated=None, autoreset="same_step"),
    "sequence": Sequence(3, autoreset="same_step"),
    "sequence, 1": Sequence(1, autoreset="next_step"),
    "sequence, stride": Sequence(4, burn_in=1, bootstrap=1, stride=2, autoreset="next_step"),
    "sequence, dilation": Sequence(3, dilation=2, stride=3, autoreset="same_step"),
    "cross": Sequence(4, boundary="cross", stride=3, autoreset="same_step"),
    "cross, dilation": Sequence(3, burn_in=1, boundary="cross", dilation=2, autoreset="next_step"),
    "mask": Sequence(4, boundary="mask", autoreset="same_step"),
    "mask, stride": Sequence(3, boundary="mask", stride=2, bootstrap=1, autoreset="next_step"),
    "mask, left": Sequence(4, boundary="mask", at=3, episode_end=("truncated",), autoreset="same_step"),
    "mask, both": Sequence(3, boundary="mask", at=1, dilation=2, autoreset="next_step"),
    "episode": Episode(4, autoreset="same_step"),
    "episode, cut": Episode(3, longer="cut", autoreset="same_step"),
    "episode, next step": Episode(5, longer="cut", autoreset="next_step"),
    "ids": Transition(n_step=3, stack=2, terminated=None, truncated=None, episode="action"),
    "ids, flags": Transition(n_step=2, stack=2, final_observation="final", episode="action"),
    "ids, next step": Transition(n_step=2, autoreset="next_step", episode="action"),
    "ids, stop": Sequence(2, episode_end=(), episode="action"),
    "ids, mask": Sequence(3, boundary="mask", at=1, autoreset="next_step", episode="action"),
    "ids, cross": Sequence(3, boundary="cross", episode_end=(), episode="action"),
    "ids, episode": Episode(3, longer="cut", episode_end=(), episode="action"),
    "ids, reset": Episode(4, autoreset="next_step", episode="action"),
}
SAMPLERS = {
    "uniform": fbuf.samplers.Uniform(),
    "episodes": fbuf.samplers.Uniform(over="episodes"),
    "batch": fbuf.samplers.Prioritized(),
    "buffer": fbuf.samplers.Prioritized(alpha=1.0, beta=1.0, eps=0.0, normalize="buffer"),
    "none": fbuf.samplers.Prioritized(alpha=0.5, normalize=None, stratified=False),
    "batch, host": fbuf.samplers.Prioritized(on="host"),
    "buffer, host": fbuf.samplers.Prioritized(alpha=1.0, beta=1.0, eps=0.0, normalize="buffer", on="host"),
    "mixed, held": fbuf.samplers.Prioritized(uniform=0.3, largest="held", normalize="buffer", eps=0.0),
    "held": fbuf.samplers.Prioritized(largest="held", normalize="buffer"),
    "ranks": fbuf.samplers.Ranked(),
    "ranks, all": fbuf.samplers.Ranked(uniform=0.2, largest="held", normalize="buffer", stratified=False),
    "versions": fbuf.samplers.Staleness(4, version="action", runs=5),
    "versions, all": fbuf.samplers.Staleness(20, version="action", decay="exponential", half_life=2),
    "ages": fbuf.samplers.Staleness(3, decay="none"),
    "ages, lots": fbuf.samplers.Staleness(2, unit=2, decay="exponential", half_life=0.5),
}
STORAGES = {
    "device": fbuf.storages.Device(),
    "host": fbuf.storages.Host(keys=("obs", "final")),
    "compressed": fbuf.storages.Compressed(keys=("obs", "info")),
    "memmap": fbuf.storages.Memmap(keys=("obs", "final")),
    "files": fbuf.storages.Compressed(keys=("obs", "info"), path=somewhere("model")),
    "deduplicated": fbuf.storages.Deduplicated(keys=("obs", "final"), blocks=256),  # room for all: nothing is refused
}


def make(view, sampler, storage, lanes):
    """A buffer of few rows, a number that no power of two divides."""
    parts = {"storage": fresh(STORAGES[storage]), "sampler": SAMPLERS[sampler], "view": VIEWS[view]}
    ends = ("truncated",) if view in ("other ends", "row") else ()
    return fbuf.Buffer(max(7, VIEWS[view].rule.rows) * (lanes or 1), lanes=lanes, episode_end=ends, **parts)


def listed(text):
    """Return the cases of a text such as `row/uniform/device/-/jit; row/batch/host/3/eager`, where `-` is None."""
    cases = [case.strip().split("/") for case in text.split(";")]
    return [tuple(None if part == "-" else int(part) if part.isdigit() else part for part in case) for case in cases]


def cases(quick=(), more=(), exhaustive=()):
    """Return a fixture of cases of each tier."""
    quick, more, exhaustive = ([(case,) for case in table] for table in (quick, more, exhaustive))
    params = by_tier(*quick, more=more, exhaustive=exhaustive, ids=lambda case: "-".join(map(str, case)))
    return pytest.fixture(params=params)(lambda request: request.param)


WRITES = ("some", "add", "many", "some", "update_rows", "cut")
STEPS = ("some",) * 5 + ("add", "many", "update_priority", "update_rows", "scan", "cut") * 2
STEPS += ("clear", "set", "beta", "rebuild")
RESTARTS = ("some", "cut") * 4 + ("add", "many", "update_priority", "update_rows", "convert", "reload", "clear")
PROGRAMS, CUTS = (
    st.lists(st.tuples(st.sampled_from(steps), st.integers(0, 2**16)), min_size=1, max_size=12)
    for steps in (STEPS, RESTARTS)
)
EXAMPLES = max(settings.default.max_examples // 3, 1)

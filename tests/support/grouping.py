"""One history of rows, written one by one and in random groups, and the states that both leave."""

import functools

import jax
import numpy as np

import fbuf
from fbuf._host_draws.row_block import collects_rows, longest
from fbuf.views import Sequence, Transition
from tests.support.combinations import REFUSED, SAMPLERS, VIEWS, rows_of
from tests.support.two_replays import leaves_of

NEXT = {"autoreset": "next_step"}
VIEWS = VIEWS | {
    "Transition()": Transition(autoreset="same_step"),
    "Transition(3)": Transition(n_step=3, stack=4, **NEXT),
    "Transition(episode=...)": Transition(n_step=2, episode="action", terminated=None, truncated=None),
    "Sequence(4)": Sequence(4, autoreset="same_step"),
    "Sequence('stop', closes)": Sequence(4, stride=4, burn_in=1, episode="action", **NEXT),
}


def make(sampler, view, lanes, length):
    return fbuf.Buffer(length * (lanes or 1), lanes=lanes, view=VIEWS[view], sampler=SAMPLERS[sampler])


def equal(sampler, view, lanes, masked=True, steps=90):
    """Whether both states are equal after each group of up to as many rows as may be collected, and are drawn from."""
    buffer = make(sampler, view, lanes, length=14)
    most, random, lead = longest(buffer), np.random.default_rng(0), () if lanes is None else (lanes,)
    rows = rows_of(random, steps, lead, size=1)
    rows["action"] = np.cumsum(random.random((steps, *lead)) < 0.2, axis=0).astype(np.int32)  # an episode's id
    mask = random.random((steps, *lead)) < (0.8 if masked else 2)
    one = many = buffer.init(jax.tree.map(lambda x: x[(0,) * (1 + len(lead))], rows))
    write = jax.jit(lambda state, rows, mask: buffer.extend(state, rows, mask=mask))
    draw = jax.jit(functools.partial(buffer.sample, batch_size=3))
    first = 0
    while first < steps:
        last = min(first + int(random.integers(1, most + 1)), steps)
        for n in range(first, last):
            one = write(one, *jax.tree.map(lambda x, n=n: x[n : n + 1], (rows, mask)))
        group = jax.tree.map(lambda x: np.resize(x[first:last], (most, *x.shape[1:])), rows)  # noqa: B023
        kept = np.zeros((most, *lead), bool)
        kept[: last - first] = mask[first:last]
        many, first = write(many, group, kept), last
        ours, theirs = jax.device_get((leaves_of(many), leaves_of(one)))
        if any(not np.array_equal(ours[name], theirs[name], equal_nan=ours[name].dtype.kind == "f") for name in ours):
            return False
        one, many = (draw(state, jax.random.key(first))[0] for state in (one, many))
    return True


def collected(sampler, view, lanes):
    """Whether there is such a buffer, and its parts are row by row."""
    refused = (sampler, view) in REFUSED or (sampler, view) == ("Uniform(over='episodes')", "Row")
    return not refused and collects_rows(make(sampler, view, lanes, length=14))

"""Compare sources of steps with the steps of `world`: row by row without a program, or as the transitions that are drawn."""

import dataclasses

import jax
import numpy as np

import fbuf
from fbuf._core.pytree import named_leaves
from fbuf._formats import dataset

GAMMA = 0.5


def rows_of(steps, final):
    """Return the rows of one lane, whose last step is an end."""
    ends = [s.terminated or s.truncated or s is steps[-1] for s in steps]
    rows = {
        "obs": [s.obs.tolist() for s in steps],
        "action": [s.action for s in steps],
        "reward": [s.reward for s in steps],
        "terminated": [s.terminated for s in steps],
        "truncated": [end and not s.terminated for s, end in zip(steps, ends, strict=True)],
    }
    if final:
        rows["final_obs"] = [s.next_obs.tolist() if end else [0, 0, 0] for s, end in zip(steps, ends, strict=True)]
    return rows


def check_rows(make, lanes, path, final=True):
    """Check what both sinks would store; `lanes`: the steps that each is to have."""
    make().save(path, view=fbuf.views.Row(), segment_rows=13)
    with dataset.DataSet.open(path) as found:
        same(found.read_rows(0, found.rows), [rows_of(steps, final) for steps in lanes])
    source = make()
    example, blocks, steps = source.stored()
    steps = 0 if source.tables is not None else steps
    parts = list(blocks(0, steps, 7))
    rows = {name: np.concatenate([part[name] for part in parts]) for name in example}
    assert source.lanes == (len(lanes) if len(lanes) > 1 else None)
    for lane, wanted in enumerate(lanes):
        here = rows if source.lanes is None else {name: leaf[: len(wanted), lane] for name, leaf in rows.items()}
        same(here, [rows_of(wanted, final)])
    if source.mask is not None:
        assert source.mask(0, steps).sum(axis=0).tolist() == [len(wanted) for wanted in lanes]


def same(found, wanted):
    for name in ("obs", "final_obs", "action", "reward", "terminated", "truncated"):
        if name in wanted[0] or name == "final_obs":
            leaf = next((x for n, x in found.items() if n.split("/")[0] == name), None)
            expected = [x for rows in wanted for x in rows.get(name, [])]
            if leaf is None:
                assert not expected, name
            elif name == "action":
                assert leaf.reshape(-1).tolist() == expected
            else:
                assert leaf.tolist() == expected, name


def transitions(buffer, state, final):
    """Return every transition that the buffer can draw, as a sorted list."""
    view = fbuf.views.Transition(gamma=GAMMA, final_observation="final_obs" if final else None, autoreset="same_step")
    every = dataclasses.replace(buffer, view=view, sampler=fbuf.samplers.Epoch(shuffle=False))
    batch = every.peek(buffer.convert(every, state), jax.random.key(0), buffer.capacity + 1)
    data = {name: np.asarray(leaf) for name, leaf in named_leaves(batch.data).items()}
    first, last = (next(x for n, x in data.items() if n.split("/")[0] == name) for name in ("obs", "next_obs"))
    found = []
    for i in np.flatnonzero(np.asarray(batch.mask)):
        ended = float(data["discount"][i]) == 0
        step = (*first[i].tolist(), int(data["action"][i].reshape(-1)[0]), float(data["reward"][i]), ended)
        found.append((*step, *(() if ended else last[i].tolist())))
    return sorted(found)


def expected(lanes, final):
    """Return the transitions of steps whose next observation is known, as a sorted list."""
    found = []
    for steps in lanes:
        for step in steps:
            if final or step.terminated or not (step.truncated or step is steps[-1]):
                one = (*step.obs.tolist(), step.action, step.reward, step.terminated)
                found.append((*one, *(() if step.terminated else step.next_obs.tolist())))
    return sorted(found)


def check_draws(make, lanes, path, final=True):
    """Check every transition that a data set and a buffer draw."""
    wanted = expected(lanes, final)
    assert transitions(*make().save(path), final) == wanted
    source = make()
    buffer, state = source.into(None if source.tables is None else fbuf.Buffer(200))
    assert buffer.lanes == (len(lanes) if len(lanes) > 1 else None)
    assert int(buffer.size(state)) == sum(map(len, lanes)) and transitions(buffer, state, final) == wanted

"""Compare every transition that is drawn with bare steps of the same environment. Arrays are `[N, E, ...]`."""

import jax
import jax.numpy as jnp
import numpy as np

import fbuf

GAMMA = 0.9


def compare(rows, truth, n_step, **settings):
    """Store `rows`, draw every transition once, and return how often each kind of mistake occurs.

    Args:
      rows: The leaves of fbuf's rows, as the table of ENVIRONMENTS.md stores them.
      truth: `reward`, `terminated`, `truncated`, `next` (a pytree) and `real` bool, all of bare steps without autoreset;
        where `real` is False the action was ignored.
      **settings: Of `views.Transition`.
    """
    steps, lanes = truth["real"].shape
    rows = dict(rows) | {"id": np.arange(steps * lanes, dtype=np.int32).reshape(steps, lanes)}
    view = fbuf.views.Transition(n_step=n_step, gamma=GAMMA, **settings)
    buffer = fbuf.Buffer(steps * lanes, lanes=lanes, view=view, sampler=fbuf.samplers.Epoch())
    state = buffer.init(jax.tree.map(lambda x: np.zeros_like(np.asarray(x)[0, 0]), rows))
    batch = jax.device_get(
        buffer.peek(buffer.extend(state, jax.tree.map(jnp.asarray, rows)), jax.random.key(0), steps * lanes)
    )
    stored = "final_observation" in settings or settings.get("autoreset") == "next_step"
    wrong = dict.fromkeys(("reward", "discount", "next_obs", "obs", "phantom", "missing"), 0)
    drawn = set()
    for i in np.flatnonzero(batch.mask):
        start, lane = divmod(int(batch.data["id"][i]), lanes)
        drawn.add((start, lane))
        if not truth["real"][start, lane]:
            wrong["phantom"] += 1
            continue
        last, ended = start, False
        for last in range(start, min(start + n_step, steps)):
            ended = bool(truth["terminated"][last, lane] | truth["truncated"][last, lane])
            if ended:
                break
        terminated = bool(truth["terminated"][last, lane])
        if ended and not terminated and not stored:  # it bootstraps from the observation before the last action
            last -= 1
            if last < start:
                wrong["discount"] += 1
                continue
        rewards = [GAMMA**k * np.asarray(truth["reward"][start + k, lane], float) for k in range(last - start + 1)]
        discount = 0.0 if terminated else GAMMA ** len(rewards)
        wrong["reward"] += not np.allclose(batch.data["reward"][i], sum(rewards), rtol=1e-3, atol=1e-4)
        wrong["discount"] += not np.isclose(batch.data["discount"][i], discount)
        wrong["obs"] += not _equal(rows["obs"], (start, lane), batch.data["obs"], i)
        if stored or not terminated:
            wrong["next_obs"] += not _equal(truth["next"], (last, lane), batch.data["next_obs"], i)
    # A truncated step is not drawn where its final observation is not stored; the newest rows wait for the next ones.
    lost = truth["truncated"] & ~truth["terminated"] & (not stored)
    whole = np.argwhere(truth["real"][: steps - n_step - 1] & ~lost[: steps - n_step - 1])
    wrong["missing"] = len(set(map(tuple, whole.tolist())) - drawn)
    assert len(drawn) > steps
    return wrong


def _equal(tree, at, batch, i):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(batch), strict=True)
    return all(np.allclose(np.asarray(x[at], float), np.asarray(y[i], float), 1e-5, 1e-5) for x, y in pairs)


def check(name, rows, truth, **settings):
    """Raise unless all transitions are right, for one step and for three."""
    ends = int((truth["terminated"] | truth["truncated"]).sum())
    limits = int((truth["truncated"] & ~truth["terminated"]).sum())
    assert ends > 5, f"{name}: {ends} ends of episodes"
    for n_step in (1, 3):
        wrong = compare(rows, truth, n_step, **settings)
        assert not any(wrong.values()), f"{name}, {n_step} steps, {settings}: {wrong}"
    print(f"{name} {settings}: right ({ends} ends, {limits} of them time limits)")


def check_wrong(name, rows, truth, kind, **settings):
    """Raise unless other settings make mistakes of this kind, so that the check can fail."""
    wrong = compare(rows, truth, 1, **settings)
    assert wrong[kind] > 5, f"{name}, {settings}: {wrong}"

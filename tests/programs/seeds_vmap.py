"""Sixteen seeds of prioritized Q-learning on a chain, each with its own buffer, as one vmapped program."""

import jax
import jax.numpy as jnp

import fbuf

LENGTH, BATCH, SEEDS = 8, 32, 16
BUFFER = fbuf.prioritized(2_000, view=fbuf.views.Transition(n_step=3, gamma=0.9, autoreset="same_step"))


def train(state, key, steps):
    """Return the state and the Q values of one seed. Action 1 moves right, 0 left; the right end pays 1."""

    def step(carry, key):
        state, q, place, time = carry
        explore, choose, draw = jax.random.split(key, 3)
        random = jax.random.bernoulli(explore, 0.3) | (q[place, 0] == q[place, 1])
        action = jnp.where(random, jax.random.randint(choose, (), 0, 2), q[place].argmax())
        there = jnp.clip(place + 2 * action - 1, 0, LENGTH - 1)
        done, late = there == LENGTH - 1, time == 99
        row = {"obs": place, "action": action, "reward": jnp.float32(done)}
        state = BUFFER.add(state, row | {"terminated": done, "truncated": ~done & late})
        state, batch = BUFFER.sample(state, draw, BATCH, beta=0.5)
        data = batch.data
        wanted = data["reward"] + data["discount"] * q[data["next_obs"]].max(-1)
        td_error = jnp.where(batch.mask, wanted - q[data["obs"], data["action"]], 0)
        state = BUFFER.update_priority(state, batch.index, td_error)
        q = q.at[data["obs"], data["action"]].add(0.1 * batch.weight * td_error)
        over = done | late
        return (state, q, jnp.where(over, 0, there), jnp.where(over, 0, time + 1)), None

    start = state, jnp.zeros((LENGTH, 2)), jnp.int32(0), jnp.int32(0)
    return jax.lax.scan(step, start, jax.random.split(key, steps))[0][:2]


def main(steps: int = 1000) -> int:
    row = {"obs": 0, "action": 0, "reward": 0.0, "terminated": False, "truncated": False}
    states = jax.vmap(lambda _: BUFFER.init(row))(jnp.arange(SEEDS))
    keys = jax.random.split(jax.random.key(0), SEEDS)
    states, q = jax.jit(jax.vmap(train, in_axes=(0, 0, None)), static_argnums=2)(states, keys, steps)
    assert jax.vmap(BUFFER.can_sample)(states).all() and (jax.vmap(BUFFER.size)(states) == steps).all()
    stats = jax.vmap(BUFFER.stats)(states)
    assert len(set(stats["max_priority"].tolist())) > 1 and not stats["refused_nonfinite"].any()
    solved = int((q[:, :-1].argmax(-1) == 1).all(axis=1).sum())
    assert solved >= SEEDS - 1, solved
    return solved


if __name__ == "__main__":
    print(f"{main()} of {SEEDS} seeds found the way")

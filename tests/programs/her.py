"""Hindsight experience replay on bit flipping: acting, replay and learning are one compiled scan."""

import jax
import jax.numpy as jnp
import optax

import fbuf

BITS, LANES, BATCH = 8, 16, 128


def reward(achieved, goal):
    return jnp.where(jnp.all(achieved == goal), 0.0, -1.0)


def q_values(params, obs):
    return jax.nn.relu(jnp.concatenate(list(obs.values()), axis=-1) @ params["w1"]) @ params["w2"]


def main(fraction: float = 0.8, steps: int = 4000) -> float:
    view = fbuf.views.Hindsight(fbuf.views.Transition(gamma=0.95, autoreset="same_step"), reward, fraction=fraction)
    buffer = fbuf.uniform(LANES * 2000, view=view, lanes=LANES)
    obs = {"achieved_goal": jnp.zeros(BITS), "desired_goal": jnp.zeros(BITS)}
    state = buffer.init({"obs": obs, "action": 0, "reward": 0.0, "terminated": False, "truncated": False})
    optimizer = optax.adam(1e-3)

    def loss(params, target, data):
        wanted = data["reward"] + data["discount"] * q_values(target, data["next_obs"]).max(-1)
        return optax.huber_loss(q_values(params, data["obs"])[jnp.arange(BATCH), data["action"]], wanted).mean()

    def step(carry, key):
        state, params, target, momentum, bits, goal, time = carry
        explore, choose, draw, restart = jax.random.split(key, 4)
        obs = {"achieved_goal": bits, "desired_goal": goal}
        greedy, random = q_values(params, obs).argmax(-1), jax.random.randint(choose, (LANES,), 0, BITS)
        action = jnp.where(jax.random.bernoulli(explore, 0.15, (LANES,)), random, greedy)
        bits = jnp.abs(bits - jax.nn.one_hot(action, BITS))
        done, late = jnp.all(bits == goal, axis=-1), time == BITS - 1
        row = {"obs": obs, "action": action, "reward": jax.vmap(reward)(bits, goal)}
        state = buffer.add(state, row | {"terminated": done, "truncated": ~done & late})
        state, batch = buffer.sample(state, draw, BATCH)
        changes, momentum = optimizer.update(jax.grad(loss)(params, target, batch.data), momentum)
        params = optax.apply_updates(params, changes)
        target, over = optax.incremental_update(params, target, 0.02), done | late
        fresh = jax.random.bernoulli(restart, shape=(2, LANES, BITS)).astype(jnp.float32)
        bits, goal = jnp.where(over[:, None], fresh, jnp.stack([bits, goal]))
        return (state, params, target, momentum, bits, goal, jnp.where(over, 0, time + 1)), (done, over)

    zeros, w1 = jnp.zeros((LANES, BITS)), jax.random.normal(jax.random.key(0), (2 * BITS, 128)) / 4
    params = {"w1": w1, "w2": jnp.zeros((128, BITS))}
    carry = state, params, params, optimizer.init(params), zeros, zeros + 1, jnp.zeros(LANES, int)
    done, over = jax.lax.scan(step, carry, jax.random.split(jax.random.key(1), steps))[1]
    success = float(done[-500:].sum() / over[-500:].sum())
    assert (success > 0.7) == (fraction > 0), success
    return success


if __name__ == "__main__":
    print(f"goals reached: {main():.0%}; without hindsight {main(fraction=0.0):.0%}")

"""R2D2 in a T-maze: the last row asks for the cue of the first, and windows are shorter than the corridor.

The learner writes recurrent states back to the rows, and learns the turn. With zero states it does not."""

import jax
import jax.numpy as jnp

import fbuf

CORRIDOR, LANES, UNITS, T, BATCH = 10, 8, 8, 5, 256
VIEW = fbuf.views.Sequence(T, episode_end=("terminated",), autoreset="same_step")
BUFFER = fbuf.Buffer(1600, view=VIEW, lanes=LANES)


def episodes(key):  # of random actions, one a lane; an actor with a network would store its states in `carry`
    cue, action = jax.random.bernoulli(key, shape=(2, CORRIDOR, LANES)).astype(jnp.int32)
    first, last = (jnp.broadcast_to(jnp.arange(CORRIDOR)[:, None] == t, action.shape) for t in (0, CORRIDOR - 1))
    obs = jnp.stack([first * (2.0 * cue[:1] - 1), 1.0 * last], axis=-1)
    reward, carry = 1.0 * (last & (action == cue[:1])), jnp.zeros((CORRIDOR, LANES, UNITS))
    return {"obs": obs, "action": action, "reward": reward, "terminated": last, "carry": carry}


def unroll(params, carry, obs):  # -> values [B, T, 2], and the state before each row [B, T, UNITS]
    def step(carry, obs):
        after = jnp.tanh(obs @ params["in"] + carry @ params["again"])
        return after, (0.5 + after @ params["out"], carry)

    return [x.swapaxes(0, 1) for x in jax.lax.scan(step, carry, obs.swapaxes(0, 1))[1]]


def loss(params, data, carry):
    value, carries = unroll(params, carry, data["obs"])
    later = jnp.pad(0.97 * jax.lax.stop_gradient(value[:, 1:].max(axis=-1)), ((0, 0), (0, 1)))
    error = jnp.where(data["terminated"], data["reward"], later) - (value * jax.nn.one_hot(data["action"], 2)).sum(-1)
    return jnp.mean((data["terminated"] | (jnp.arange(T) < T - 1)[None]) * error**2), carries


def right_turns(key, refreshed, steps=400):
    params = {"in": jax.random.normal(key, (2, UNITS)), "again": jnp.eye(UNITS), "out": jnp.zeros((UNITS, 2))}

    def step(learner, key):
        params, state = learner
        state, batch = BUFFER.sample(BUFFER.extend(state, episodes(key)), key, BATCH)
        carry = batch.data["carry"][:, 0] if refreshed else jnp.zeros((BATCH, UNITS))
        grads, carries = jax.grad(loss, has_aux=True)(params, batch.data, carry)
        state = BUFFER.update_rows(state, BUFFER.window_index(state, batch.index), {"carry": carries})
        return (jax.tree.map(lambda p, g: p - 0.2 * g, params, grads), state), None

    seen = episodes(key)
    learner = params, BUFFER.init(jax.tree.map(lambda x: x[0, 0], seen))
    params = jax.lax.scan(step, learner, jax.random.split(key, steps))[0][0]
    value = unroll(params, seen["carry"][0], seen["obs"].swapaxes(0, 1))[0][:, -1]
    return jnp.mean(value.argmax(axis=-1) == (seen["obs"][0, :, 0] > 0))


def main():
    train, keys = jax.jit(jax.vmap(right_turns, (0, None)), static_argnums=1), jax.random.split(jax.random.key(0), 8)
    refreshed, zero = train(keys, True).mean(), train(keys, False).mean()
    assert refreshed >= 0.95 and zero <= 0.75, f"{refreshed:.2f} of turns are right, and {zero:.2f} with zero states"

"""Double DQN with prioritized replay on CartPole: a plain Python loop, updates in JAX."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fbuf

LANES, BATCH, ADAM = 8, 128, optax.adam(3e-3)


@jax.jit
def q_values(params, obs):
    return jnp.tanh(obs @ params[0] + params[1]) @ params[2] + params[3]


@jax.jit
def update(params, target, momentum, batch):
    data, rows = batch.data, jnp.arange(BATCH)

    def loss(params):
        best = q_values(params, data["next_obs"]).argmax(-1)
        wanted = data["reward"] + data["discount"] * q_values(target, data["next_obs"])[rows, best]
        td_error = q_values(params, data["obs"])[rows, data["action"]] - jax.lax.stop_gradient(wanted)
        return (batch.weight * optax.huber_loss(td_error)).mean(), td_error

    gradient, td_error = jax.grad(loss, has_aux=True)(params)
    changes, momentum = ADAM.update(gradient, momentum)
    params = optax.apply_updates(params, changes)
    return params, optax.incremental_update(params, target, 0.01), momentum, td_error


def main(steps: int = 2000) -> None:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=LANES, vectorization_mode="sync")
    buffer = fbuf.prioritized(20_000, view=fbuf.gymnasium.view(envs, n_step=3, gamma=0.98), lanes=LANES)
    replay = fbuf.Replay(buffer, fbuf.gymnasium.spec(envs))
    envs = fbuf.gymnasium.Recorder(envs, replay)

    rng, falls = np.random.default_rng(0), []
    params = target = [jnp.float32(rng.normal(0, 0.3, shape)) for shape in ((4, 64), 64, (64, 2), 2)]
    momentum = ADAM.init(params)
    obs, _ = envs.reset(seed=0)
    for step in range(steps):
        explore = rng.random(LANES) < max(0.05, 1 - 3 * step / steps)
        action = np.asarray(q_values(params, obs)).argmax(-1)
        obs, _, terminated, *_ = envs.step(np.where(explore, rng.integers(2, size=LANES), action))
        falls.append(terminated.mean())
        if step >= 100:
            batch = replay.sample(BATCH, beta=0.4 + 0.6 * step / steps)
            params, target, momentum, td_error = update(params, target, momentum, batch)
            replay.update_priority(batch.index, td_error)
    print(f"falls a step: {np.mean(falls[:300]):.3f} at first, {np.mean(falls[-300:]):.3f} at last")
    assert np.mean(falls[-300:]) < np.mean(falls[:300]) / 3


if __name__ == "__main__":
    main()

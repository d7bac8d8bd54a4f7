"""Double DQN with prioritized replay on CartPole: a plain Python loop, updates in JAX."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fbuf

LANES, BATCH = 8, 128


def q_values(params, obs):
    hidden = jnp.tanh(obs @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


@jax.jit
def update(params, target, momentum, batch):
    data, rows = batch.data, jnp.arange(BATCH)

    def loss(params):
        best = q_values(params, data["next_obs"]).argmax(-1)
        wanted = data["reward"] + data["discount"] * q_values(target, data["next_obs"])[rows, best]
        td_error = q_values(params, data["obs"])[rows, data["action"]] - jax.lax.stop_gradient(wanted)
        return (batch.weight * optax.huber_loss(td_error)).mean(), td_error

    gradient, td_error = jax.grad(loss, has_aux=True)(params)
    changes, momentum = optax.adam(3e-3).update(gradient, momentum)
    target = optax.incremental_update(params, target, 0.01)
    return optax.apply_updates(params, changes), target, momentum, td_error


def main(steps: int = 2500) -> float:
    envs = gymnasium.make_vec("CartPole-v1", num_envs=LANES, vectorization_mode="sync")
    view = fbuf.gymnasium.view(envs, n_step=3, gamma=0.98)
    buffer = fbuf.prioritized(20_000, alpha=0.6, view=view, lanes=LANES)
    replay = fbuf.Replay(buffer, fbuf.gymnasium.spec(envs))
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(envs, buffer_length=20)
    recorder = fbuf.gymnasium.Recorder(envs, replay)

    rng = np.random.default_rng(0)
    params = {"w1": rng.normal(0, 0.5, (4, 64)), "b1": np.zeros(64), "w2": rng.normal(0, 0.1, (64, 2)), "b2": np.zeros(2)}
    params = target = jax.tree.map(jnp.float32, params)
    momentum, act = optax.adam(3e-3).init(params), jax.jit(lambda params, obs: q_values(params, obs).argmax(-1))
    obs, _ = recorder.reset(seed=0)
    for step in range(steps):
        action = np.asarray(act(params, obs))
        explore = rng.random(LANES) < max(0.05, 1 - 3 * step / steps)
        obs, *_ = recorder.step(np.where(explore, rng.integers(2, size=LANES), action))
        if step >= 100:
            batch = replay.sample(BATCH, beta=0.4 + 0.6 * step / steps)
            params, target, momentum, td_error = update(params, target, momentum, batch)
            replay.update_priority(batch.index, td_error)
    return float(np.mean(envs.return_queue))


if __name__ == "__main__":
    print(f"mean return of the last 20 episodes: {main():.0f} of 500")

"""Advantage-weighted regression on a D4RL data set: whole epochs over rows that never change."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fbuf


def episodes(number, policy, rng):
    """Push a mass to 0, in the layout of D4RL."""
    obs, actions, rewards, x = [], [], [], rng.uniform(-1, 1, (number, 1))
    for _ in range(40):
        obs, actions = [*obs, x], [*actions, np.clip(policy(x), -1, 1)]
        x = x + 0.1 * actions[-1]
        rewards = [*rewards, -np.abs(x)]
    obs, actions, rewards = (np.float32(a).swapaxes(0, 1).reshape(number * 40, 1) for a in (obs, actions, rewards))
    ends = np.arange(number * 40) % 40 == 39
    return dict(observations=obs, actions=actions, rewards=rewards[:, 0], terminals=ends & False, timeouts=ends)


def network(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


@jax.jit
def update(params, momentum, data):
    def loss(params):
        value = network(params["value"], data["obs"])[:, 0]
        wanted = data["reward"] + data["discount"] * network(params["value"], data["next_obs"])[:, 0]
        advantage = jax.lax.stop_gradient(wanted) - value
        weight = jax.lax.stop_gradient(jnp.exp(20 * advantage).clip(0, 20))
        return (advantage**2 + weight * ((network(params["policy"], data["obs"]) - data["action"]) ** 2)[:, 0]).mean()

    changes, momentum = optax.adam(1e-2).update(jax.grad(loss)(params), momentum)
    return optax.apply_updates(params, changes), momentum


def main(epochs=20):
    rng = np.random.default_rng(0)
    data = episodes(200, lambda x: rng.uniform(-1, 1, x.shape), rng)
    one = {"w1": jnp.linspace(-2, 2, 32)[None], "b1": jnp.linspace(-1, 1, 32), "w2": jnp.zeros((32, 1))}
    params = {"value": one, "policy": one}
    momentum = optax.adam(1e-2).init(params)
    with tempfile.TemporaryDirectory() as folder:
        replay = fbuf.Replay(*fbuf.interop.from_arrays(data).save(f"{folder}/push"))
        for _ in range(epochs):
            for batch in replay.epoch(256, drop_last=True):
                params, momentum = update(params, momentum, batch.data)
        del replay  # before its files
    after = episodes(50, lambda x: np.asarray(network(params["policy"], np.float32(x))), rng)
    assert after["rewards"].mean() > data["rewards"].mean() / 2, after["rewards"].mean()


if __name__ == "__main__":
    main()

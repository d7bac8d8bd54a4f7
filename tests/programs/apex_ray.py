"""Ape-X on CartPole: four actor processes write to a prioritized replay on Ray, and a learner draws from it."""

import contextlib

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray

import fbuf

ACTORS, ROWS, BATCH, ADAM = 4, 32, 128, optax.adam(3e-3)
ROW = {"obs": np.zeros(4, np.float32), "action": 0, "reward": 0.0, "terminated": False, "truncated": False}


def q_values(params, obs):
    return (obs @ params[0] + params[1]).clip(0) @ params[2] + params[3]


@ray.remote(num_cpus=0)
class Actor:
    def __init__(self, client, number):
        self.client, self.explore = client, 0.4 ** (1 + 7 * number / (ACTORS - 1))
        self.env, self.rng = gymnasium.make("CartPole-v1"), np.random.default_rng(number)
        self.obs, self.returns = self.env.reset(seed=number)[0], [0]

    def act(self, params):
        rows = []
        for _ in range(ROWS):
            action = self.rng.integers(2) if self.rng.random() < self.explore else q_values(params, self.obs).argmax()
            obs, reward, terminated, truncated, _ = self.env.step(action)
            rows.append((self.obs, np.int32(action), np.float32(reward), terminated, truncated))
            self.obs, self.returns[-1] = obs, self.returns[-1] + 1
            if terminated or truncated:
                self.obs, self.returns = self.env.reset()[0], [*self.returns, 0]
        with contextlib.suppress(fbuf.ReplayClosed):  # at the end
            self.client.extend({k: np.stack(v)[:, None] for k, v in zip(ROW, zip(*rows, strict=True), strict=True)})
        return self.returns


@jax.jit
def update(params, target, momentum, batch):
    data = batch.data

    def loss(params):
        wanted = data["reward"] + data["discount"] * q_values(target, data["next_obs"]).max(-1)
        td_error = q_values(params, data["obs"])[jnp.arange(BATCH), data["action"]] - jax.lax.stop_gradient(wanted)
        return (batch.weight * optax.huber_loss(td_error)).mean(), td_error

    gradient, td_error = jax.grad(loss, has_aux=True)(params)
    changes, momentum = ADAM.update(gradient, momentum)
    params = optax.apply_updates(params, changes)
    return params, optax.incremental_update(params, target, 0.02), momentum, td_error


def main(steps=1200):
    ray.init(ignore_reinit_error=True)
    view, rng = fbuf.views.Transition(n_step=3, gamma=0.98, autoreset="same_step"), np.random.default_rng(0)
    limit = fbuf.limits.samples_per_insert(16, min_size=512, rows=ROWS, draws=BATCH)
    params = target = [jnp.float32(rng.normal(0, 0.3, shape)) for shape in ((4, 64), 64, (64, 2), 2)]
    momentum, returns = ADAM.init(params), {}
    with fbuf.ray.RayReplay(fbuf.prioritized(20_000, view=view, lanes=ACTORS), ROW, limit=limit) as replay:
        learner, actors = replay.client(), [Actor.remote(replay.client(lanes=(i,)), i) for i in range(ACTORS)]
        for _ in range(4):
            first = ray.get([actor.act.remote(jax.device_get(params)) for actor in actors])[-1]
        acting = {actor.act.remote(jax.device_get(params)): i for i, actor in enumerate(actors)}
        for _, batch in zip(range(steps), learner.batches(BATCH, prefetch=4), strict=False):
            params, target, momentum, td_error = update(params, target, momentum, batch)
            learner.update_priority(batch.index, td_error)
            for done in ray.wait(list(acting), num_returns=ACTORS, timeout=0)[0]:
                returns[i := acting.pop(done)] = ray.get(done)
                acting[actors[i].act.remote(jax.device_get(params))] = i
    assert np.mean(returns[ACTORS - 1][-10:]) > 2 * np.mean(first), returns  # of the greediest actor


if __name__ == "__main__":
    main()

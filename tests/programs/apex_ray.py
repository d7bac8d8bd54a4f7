"""Ape-X on CartPole: four actor processes write to a prioritized replay on Ray, and a learner draws from it."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import ray

import fbuf

ACTORS, ROWS, BATCH, ADAM = 4, 32, 128, optax.adam(3e-3)
ROW = {
    "obs": np.zeros(4, np.float32),
    "action": np.int32(0),
    "reward": np.float32(0),
    "terminated": False,
    "truncated": False,
}


def q_values(params, obs):
    return (obs @ params[0] + params[1]).clip(0) @ params[2] + params[3]


@ray.remote(num_cpus=0)
class Actor:
    def __init__(self, client, number):
        self.client, self.explore = client, 0.4 ** (1 + 7 * number / (ACTORS - 1))
        self.env, self.rng = gymnasium.make("CartPole-v1"), np.random.default_rng(number)
        self.obs, self.returns = self.env.reset(seed=number)[0], [0.0]

    def act(self, params):
        rows = []
        for _ in range(ROWS):
            greedy = self.rng.random() > self.explore
            action = int(q_values(params, self.obs).argmax()) if greedy else int(self.rng.integers(2))
            obs, reward, terminated, truncated, _ = self.env.step(action)
            rows.append((self.obs, np.int32(action), np.float32(reward), terminated, truncated))
            self.returns[-1] += reward
            self.obs = obs
            if terminated or truncated:
                self.obs, self.returns = self.env.reset()[0], [*self.returns, 0.0]
        self.client.extend({name: np.stack(leaf)[:, None] for name, leaf in zip(ROW, zip(*rows), strict=False)})
        return self.returns


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
    return params, optax.incremental_update(params, target, 0.02), momentum, td_error


def main(steps=600):
    if not ray.is_initialized():
        ray.init()
    buffer = fbuf.prioritized(
        20_000, view=fbuf.views.Transition(n_step=3, gamma=0.98, autoreset="same_step"), lanes=ACTORS
    )
    limit = fbuf.limits.samples_per_insert(16, min_size=512, rows=ROWS, draws=BATCH)
    rng = np.random.default_rng(0)
    params = target = [jnp.float32(rng.normal(0, 0.3, shape)) for shape in ((4, 64), 64, (64, 2), 2)]
    momentum = ADAM.init(params)
    with fbuf.ray.RayReplay(buffer, ROW, limit=limit) as replay:
        learner = replay.client()
        actors = [Actor.remote(replay.client(lanes=(i,)), i) for i in range(ACTORS)]
        for _ in range(4):
            first = ray.get([actor.act.remote(jax.device_get(params)) for actor in actors])[-1]
        acting = {actor.act.remote(jax.device_get(params)): actor for actor in actors}
        for _, batch in zip(range(steps), learner.batches(BATCH, prefetch=4), strict=False):
            params, target, momentum, td_error = update(params, target, momentum, batch)
            learner.update_priority(batch.index, td_error)
            for done in ray.wait(list(acting), num_returns=ACTORS, timeout=0)[0]:
                actor = acting.pop(done)
                acting[actor.act.remote(jax.device_get(params))] = actor
        last = ray.get(actors[-1].act.remote(jax.device_get(params)))
    print(f"mean return of the greediest actor: {np.mean(first):.0f} at first, {np.mean(last[-5:]):.0f} at last")
    assert np.mean(last[-5:]) > 2 * np.mean(first)


if __name__ == "__main__":
    main()

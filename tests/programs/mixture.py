"""Offline to online: batches of expert rows and the agent's own, with an annealed fraction, in one jitted step."""

import jax
import jax.numpy as jnp
import optax

import fbuf

OBS, ACTIONS, BATCH = 6, 4, 64


def rows_of(obs, action):
    """Rows of a contextual bandit: action a pays obs[a]."""
    return {"obs": obs, "action": action, "reward": jnp.take_along_axis(obs, action[:, None], axis=1)[:, 0]}


def main(steps: int = 400) -> float:
    expert, online = fbuf.Buffer(2000), fbuf.prioritized(1000)
    row = {"obs": jnp.zeros(OBS), "action": 0, "reward": 0.0}
    obs = jax.random.normal(jax.random.key(0), (2000, OBS))
    best = obs[:, :ACTIONS].argmax(-1)
    recorded = expert.extend(expert.init(row), rows_of(obs, jnp.where(jnp.arange(2000) % 3 > 0, best, 0)))
    mixture = fbuf.Mixture({"expert": expert, "online": online}, fractions={"expert": 0.5, "online": 0.5})
    states, params = {"expert": recorded, "online": online.init(row)}, jnp.zeros((OBS, ACTIONS))
    optimizer = optax.adam(0.02)

    def step(carry, given):
        (states, params, momentum), (number, key) = carry, given
        act, explore, draw = jax.random.split(key, 3)
        obs = jax.random.normal(act, (8, OBS))
        random = jax.random.randint(explore, (8,), 0, ACTIONS)
        action = jnp.where(jax.random.bernoulli(explore, 0.2, (8,)), random, (obs @ params).argmax(-1))
        states = states | {"online": online.extend(states["online"], rows_of(obs, action))}
        share = {"expert": jnp.maximum(0.0, 1 - 2 * number / steps)}  # none from the middle of the run on
        states, batch = mixture.sample(states, draw, BATCH, fractions=share, beta=0.4)

        def loss(params):
            data = batch.data
            td_error = (data["obs"] @ params)[jnp.arange(BATCH), data["action"]] - data["reward"]
            return (batch.weight * optax.huber_loss(td_error)).mean(), td_error

        gradient, td_error = jax.grad(loss, has_aux=True)(params)
        states = mixture.update_priority(states, batch.index, td_error)
        changes, momentum = optimizer.update(gradient, momentum)
        return (states, optax.apply_updates(params, changes), momentum), (batch.index.source == 0).mean()

    given = jnp.arange(steps), jax.random.split(jax.random.key(2), steps)
    (states, params, _), share = jax.lax.scan(step, (states, params, optimizer.init(params)), given)
    assert share[0] == 1 and abs(share[steps // 4] - 0.5) < 0.02 and not share[steps // 2 :].any()
    assert online.stats(states["online"])["refused_out_of_range"] == 0 and online.size(states["online"]) == 1000
    agreed = float(((obs @ params).argmax(-1) == best).mean())
    assert agreed > 0.95, agreed
    return agreed


if __name__ == "__main__":
    print(f"best action in {main():.0%} of states")

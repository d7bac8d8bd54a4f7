"""Data-parallel Double DQN on Catch: games, replay and batches are split over all devices, the network is on each.

To try it on a CPU: XLA_FLAGS=--xla_force_host_platform_device_count=8 python tests/programs/sharded_dqn.py
"""

import sys

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fbuf
from fbuf.demo import catch
from fbuf.sharded import Sharded

LANES, BATCH, ADAM = 16, 64, optax.adam(1e-3)


def main(steps: int = 6000, seed: int = 0) -> float:
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    view = fbuf.views.Transition(n_step=3, gamma=0.97, stack=2, autoreset="same_step")
    replay = Sharded(fbuf.prioritized(16_384, view=view, lanes=LANES), mesh)
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def step(carry, number):
        actors, params, target, momentum, state, key = carry
        key, choose, games, draw = jax.random.split(key, 4)
        q = catch.q_values(params, actors.stacks)
        action = catch.explore(q, choose, catch.epsilon_at(number / steps))
        actors, rows = catch.play(actors, action, games)
        actors = jax.lax.with_sharding_constraint(actors, split)
        state = replay.add(state, rows)  # each device adds the rows of its lanes
        state, batch = replay.sample(state, draw, BATCH)  # and draws BATCH / D rows of its own
        (_, (td_error, _)), gradient = catch.double_dqn(catch.q_values, params, target, batch)
        state = replay.update_priority(state, batch.index, td_error)
        changes, momentum = ADAM.update(gradient, momentum)  # XLA has summed the gradient over devices
        params = jax.lax.with_sharding_constraint(optax.apply_updates(params, changes), whole)
        target = jax.tree.map(lambda new, old: jnp.where(number % 50 == 0, new, old), params, target)
        return (actors, params, target, momentum, state, key), rows["reward"].sum()

    key, network, games = jax.random.split(jax.random.key(seed), 3)
    params = jax.device_put(catch.init_params(network), whole)
    actors = jax.device_put(catch.first_actors(games, LANES), split)
    carry = actors, params, params, ADAM.init(params), replay.init(catch.EXAMPLE), key
    carry, rewards = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps)))(carry)
    stats = replay.stats(carry[4])
    assert replay.size(carry[4]) == min(steps * LANES, 16_384) and stats["balance"] > 0.99
    assert not stats["refused_nonfinite"] and jnp.isfinite(rewards).all()
    return catch.evaluate(lambda stacks: catch.q_values(jax.device_get(carry[1]), stacks).argmax(-1))


if __name__ == "__main__":
    score = main(*map(int, sys.argv[1:]))
    print(f"{jax.device_count()} devices: a mean return of {score:.2f}; random play earns -0.8, perfect play 1")
